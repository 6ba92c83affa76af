//go:build nccl && cgo

package nccl

import (
	"context"
	"slices"
	"time"
	"unsafe"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/tensor"
)

// communicator is an ncclComm_t whose calls block. NCCL launches the operations of a nonblocking one from a
// thread that it starts for each of them, which takes several times as long as the launch itself.
//
// One thread at a time calls NCCL for a communicator, except that ncclCommAbort does not wait for long for a
// call that is stuck.
type communicator struct {
	library *Library
	handle  unsafe.Pointer
	stream  *cuda.Stream
	rank, n int
	devices []tensor.Device // of its ranks
	busy    chan struct{}   // has an element while a thread calls NCCL
	aborted chan struct{}   // closed before ncclCommAbort is called
	ended   chan struct{}   // closed when NCCL has ended the communicator
}

// stuckCall is how long abort waits for a call of another thread, which an abort in its middle may free the
// memory of. It is less than Library.EndTimeout, and more than the first operation of a communicator takes,
// because NCCL 2.22 and newer connect the ranks then.
const stuckCall = 2500 * time.Millisecond

// join makes a communicator of n ranks for the stream of d. NCCL connects the ranks in a goroutine, because
// it cannot be interrupted. If ctx ends first, join returns the cause, and the goroutine aborts the
// communicator if NCCL makes it later.
func (l *Library) join(ctx context.Context, id *[idBytes]byte, n, rank int, d *device) (*communicator,
	error) {
	c := &communicator{library: l, stream: d.stream, rank: rank, n: n, busy: make(chan struct{}, 1),
		aborted: make(chan struct{}), ended: make(chan struct{})}
	made := make(chan error, 1)
	of := *id
	go func() {
		made <- d.Use(func() error { return l.initialize(c, &of, d.maxCTAs) })
	}()
	select {
	case err := <-made:
		if err == nil {
			err = l.keep(c)
		}
		return c, err
	case <-ctx.Done():
		l.mu.Lock()
		l.late = append(l.late, c)
		l.mu.Unlock()
		go func() {
			close(c.aborted)
			if <-made == nil {
				c.abort()
			} else {
				close(c.ended)
			}
		}()
		return nil, context.Cause(ctx)
	}
}

// keep makes Fail abort the communicator. If an operation has failed already, keep aborts it.
func (l *Library) keep(c *communicator) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		close(c.aborted)
		l.late = append(l.late, c)
		go c.abort()
		return l.afterFailure()
	}
	l.comms = append(l.comms, c)
	return nil
}

// forget ends what keep has begun. It reports whether the communicator is still to be ended.
func (l *Library) forget(c *communicator) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.comms = slices.DeleteFunc(l.comms, func(o *communicator) bool { return o == c })
	return !c.isAborted()
}

func (c *communicator) isAborted() bool {
	select {
	case <-c.aborted:
		return true
	default:
		return false
	}
}

// use calls f, which calls NCCL, unless the communicator was aborted. It does not wait for an abort that is
// stuck.
func (c *communicator) use(f func() error) error {
	select {
	case c.busy <- struct{}{}:
	case <-c.aborted:
		return c.library.failure()
	}
	defer func() { <-c.busy }()
	if c.isAborted() {
		return c.library.failure()
	}
	return f()
}

// failure returns the error that the communicator reports, or nil. It does not ask while another thread uses
// the communicator.
func (c *communicator) failure() error {
	if c.isAborted() {
		return c.library.failure()
	}
	select {
	case c.busy <- struct{}{}:
	default:
		return nil
	}
	defer func() { <-c.busy }()
	if c.isAborted() {
		return c.library.failure()
	}
	return c.library.asyncError(c)
}

// abort makes the work of the communicator on the device end soon, also without the other ranks. It may wait
// for this work, and, up to NCCL 2.21, for that of all other communicators. It must be called once, after
// aborted was set.
func (c *communicator) abort() {
	defer close(c.ended)
	select {
	case c.busy <- struct{}{}:
		defer func() { <-c.busy }()
	case <-time.After(stuckCall):
	}
	c.end(c.library.abort)
}

// destroy ends the communicator, which has no work left. It may wait for the other ranks. It must be called
// once, and not besides abort.
func (c *communicator) destroy() {
	defer close(c.ended)
	c.end(c.library.destroy)
}

// end calls f with the device of the communicator as the current one. In a thread without a device, NCCL
// would return to device 0 afterwards, and make a context there. If Use fails, the process has lost the
// context of the device, and with it the communicator.
func (c *communicator) end(f func(*communicator)) {
	_ = c.stream.Device.Use(func() error { f(c); return nil })
}
