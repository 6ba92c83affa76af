//go:build nccl && cgo

package nccl

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
)

// flight is an operation that was launched and has not been seen to end.
type flight struct {
	kind     message.Kind
	ranks    []topo.Rank
	ctx      context.Context
	comm     *communicator
	device   *device
	done     *cuda.Event
	follower ops.Follower
	enter    func(ops.Activity)
	// activities are those that the device has not begun, for the timeline.
	activities []activity
}

// activity is an activity of the device. It begins when the work before the event has ended.
type activity struct {
	ops.Activity
	after *cuda.Event
}

// isDone reports whether the work of the operation has ended on the device.
func (f *flight) isDone() (bool, error) {
	for len(f.activities) > 0 {
		next := f.activities[0]
		begun, err := next.after.Query()
		if !begun {
			if err == nil {
				err = f.comm.failure()
			}
			return false, err
		}
		f.enter(next.Activity)
		f.comm.library.Devices.Release(next.after)
		f.activities = slices.Delete(f.activities, 0, 1)
	}
	done, err := f.done.Query()
	if err == nil && (!done || f.comm.isAborted()) { // an abort may be why it has ended
		err = f.comm.failure()
	}
	return done && err == nil, err
}

// land waits until the operation has ended on the device. If it fails, land fails the library, and waits
// until the device no longer uses the buffers. isDone is f's method of this name.
func (f *flight) land(isDone func() (bool, error)) error {
	l := f.comm.library
	err := cuda.Poll(f.ctx, isDone)
	if err != nil {
		err = l.failed(f.kind, f.ranks, err)
		if inUse := l.settle(f.device, f.done); inUse != nil {
			err = fmt.Errorf("%w; %w", err, inUse)
		}
	} else {
		l.Devices.Release(f.done)
	}
	for _, a := range f.activities {
		l.Devices.Release(a.after)
	}
	*f = flight{activities: f.activities[:0]}
	return err
}

// finisher sees the operations on a stream of a device end, in the order of their launches.
type finisher struct {
	mu       sync.Mutex
	changed  sync.Cond // notified when flights or closing changes
	flights  []*flight
	unused   []*flight
	started  bool
	closing  bool
	finished chan struct{} // closed when run has returned
}

// take returns a flight to fill in.
func (f *finisher) take() *flight {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.unused)
	if n == 0 {
		return new(flight)
	}
	taken := f.unused[n-1]
	f.unused = f.unused[:n-1]
	return taken
}

// giveBack ends the use of a flight that take has returned.
func (f *finisher) giveBack(o *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unused = append(f.unused, o)
}

// add makes the finisher call the follower of o when it has ended.
func (f *finisher) add(o *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.started {
		f.started, f.finished = true, make(chan struct{})
		go f.run()
	}
	f.flights = append(f.flights, o)
	f.changed.Signal()
}

// oldest removes and returns the oldest flight. It waits until there is one. After close it returns nil.
func (f *finisher) oldest() *flight {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.flights) == 0 && !f.closing {
		f.changed.Wait()
	}
	if len(f.flights) == 0 {
		return nil
	}
	o := f.flights[0]
	f.flights = slices.Delete(f.flights, 0, 1)
	return o
}

func (f *finisher) run() {
	defer close(f.finished)
	var o *flight
	isDone := func() (bool, error) { return o.isDone() }
	for o = f.oldest(); o != nil; o = f.oldest() {
		follower := o.follower
		err := o.land(isDone)
		f.giveBack(o)
		follower.Ended(err)
	}
}

// close ends the finisher, which has no flight left, and waits for it.
func (f *finisher) close() {
	f.mu.Lock()
	f.closing = true
	f.changed.Signal()
	started := f.started
	f.mu.Unlock()
	if started {
		<-f.finished
	}
}
