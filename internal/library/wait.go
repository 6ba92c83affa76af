package library

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/rank"
)

// Forever is a limit that never ends.
const Forever = time.Duration(-1)

// Wait waits until what h stands for is done, or until the limit ends. Unless it returns ErrPending, the
// handle is used up. into, which may be nil, receives the result.
func (l *Library) Wait(h Handle, limit time.Duration, into *Result) error {
	return l.wait(h, limit, into, false)
}

// Finish waits as Wait does, but uses up the handle only if what it stands for has succeeded.
func (l *Library) Finish(h Handle, limit time.Duration, into *Result) error {
	return l.wait(h, limit, into, true)
}

func (l *Library) wait(h Handle, limit time.Duration, into *Result, keepFailed bool) error {
	p, err := l.handles.use("wait", h)
	if err != nil {
		return err
	}
	if !await(p, limit) {
		l.handles.unuse(h)
		return ErrPending
	}
	if err := p.failure(); err != nil && keepFailed {
		l.handles.unuse(h)
		return err
	}
	valid, alone := l.handles.remove(h)
	if !valid {
		return unknown("wait", h) // another thread has waited for it too
	}
	return l.finish(p, into, alone)
}

// finish frees the name of p, which is done, stores its result in into, unless that is nil, and returns its
// error. alone says that no other call uses p.
func (l *Library) finish(p pending, into *Result, alone bool) error {
	p.seen()
	err := p.take(into)
	if c, is := p.(*call); is && alone && err == nil {
		l.calls.add(c)
	}
	return err
}

// await waits until p is done or the limit ends. It reports whether p is done.
func await(p pending, limit time.Duration) bool {
	if p.ended() {
		return true
	}
	if limit == 0 {
		p.notify()
		return p.ended()
	}
	begun := p.beginWait()
	ended := awaitWithin(p, limit)
	p.endWait(begun)
	return ended
}

// awaitWithin does the same for a limit other than 0.
func awaitWithin(p pending, limit time.Duration) bool {
	if limit < 0 {
		if p.drive(time.Time{}, nil); !p.ended() {
			<-p.done()
		}
		return true
	}
	deadline := time.Now().Add(limit)
	if p.drive(deadline, nil); p.ended() {
		return true
	}
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	select {
	case <-p.done():
		return true
	case <-timer.C:
		return p.ended()
	}
}

// WaitAny waits until one of several things is done, or until the limit ends, and returns the index of its
// handle.
func (l *Library) WaitAny(handles []Handle, limit time.Duration) (int, error) {
	all := make([]pending, len(handles))
	for i, h := range handles {
		var err error
		if all[i], err = l.handles.use("wait any", h); err != nil {
			l.handles.unuse(handles[:i]...)
			return 0, err
		}
	}
	defer l.handles.unuse(handles...)
	if len(all) == 0 {
		return 0, errors.New("got no handles")
	}
	first := func() int { return slices.IndexFunc(all, pending.ended) }
	i := first()
	if i < 0 && limit != 0 {
		i = awaitAny(all, limit, first)
	}
	if i < 0 {
		for _, p := range all {
			p.notify()
		}
		if i = first(); i < 0 {
			return 0, ErrPending
		}
	}
	all[i].seen()
	return i, nil
}

// awaitAny waits until one of several things is done or the limit ends. It returns the result of first, which
// is the index of one that is done, or -1.
//
// With a gate among them, the caller is a thread that waits on behalf of the program, which goes on. So it
// does not drive the engine, because the program may need the processor, and no timeline shows the wait.
func awaitAny(all []pending, limit time.Duration, first func() int) (i int) {
	quit := func() bool { return first() >= 0 }
	hasGate := slices.ContainsFunc(all, func(p pending) bool { _, is := p.(*gate); return is })
	if !hasGate {
		begun := all[0].beginWait()
		defer func() { all[max(i, 0)].endWait(begun) }()
	}
	var deadline time.Time
	timer := make(<-chan time.Time)
	if limit >= 0 {
		deadline, timer = time.Now().Add(limit), time.After(limit)
	}
	if r := remoteOf(all); r != nil {
		driveAny(r, all, deadline, quit)
		return first()
	}
	if hasGate {
		for _, p := range all {
			p.notify()
		}
	} else {
		all[0].drive(deadline, quit)
	}
	if i := first(); i >= 0 {
		return i
	}
	awaitDone(all, timer)
	return first()
}

// remoteOf returns the connection to the sidecar that executes operations among all. It returns nil if there
// is no such operation.
func remoteOf(all []pending) rank.Remote {
	for _, p := range all {
		if c, is := p.(*call); is && c.execution.Rank.Remote != nil {
			return c.execution.Rank.Remote
		}
	}
	return nil
}

// driveAny waits until quit returns true, which depends on all, or until the deadline, unless it is zero. r
// is the result of remoteOf.
func driveAny(r rank.Remote, all []pending, deadline time.Time, quit func() bool) {
	ctx, cancel := context.WithCancel(context.Background())
	if !deadline.IsZero() {
		ctx, cancel = context.WithDeadline(ctx, deadline)
	}
	defer cancel()
	for _, p := range all {
		if _, is := p.(*call); !is { // r does not notice its end
			go func() {
				select {
				case <-p.done():
					cancel()
				case <-ctx.Done():
				}
			}()
		}
	}
	r.Drive(ctx, nil, quit)
}

// maxCases is how many pending awaitDone passes to reflect.Select, which takes 65536 cases.
const maxCases = 1<<16 - 2

// awaitDone waits until one of several things is done, or until it receives from stop.
func awaitDone(all []pending, stop <-chan time.Time) {
	cases := []reflect.SelectCase{{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(stop)}}
	if len(all) > maxCases {
		end, ended, rest := make(chan time.Time), make(chan struct{}), all[maxCases:]
		go func() {
			defer close(ended)
			awaitDone(rest, end)
		}()
		defer func() {
			close(end)
			<-ended
		}()
		cases = append(cases, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ended)})
		all = all[:maxCases]
	}
	for _, p := range all {
		cases = append(cases, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(p.done())})
	}
	reflect.Select(cases)
}

// Poll reports whether what h stands for is done. If it is, its name is free. Otherwise Poll makes the engine
// notice what was submitted.
func (l *Library) Poll(h Handle) (bool, error) {
	p, err := l.handles.use("poll", h)
	if err != nil {
		return false, err
	}
	defer l.handles.unuse(h)
	if !p.ended() {
		if p.notify(); !p.ended() {
			return false, nil
		}
	}
	p.seen()
	return true, nil
}

// Release makes a handle invalid without a wait. When what it stands for is done, its name is free and its
// result is freed. A gate is opened, because nothing else could open it any more.
func (l *Library) Release(h Handle) error {
	p, err := l.handles.use("release", h)
	if err != nil {
		return err
	}
	valid, alone := l.handles.remove(h)
	if !valid {
		return unknown("release", h)
	}
	if g, is := p.(*gate); is {
		g.open()
	}
	// The program has given up the handle, so nobody wants the error.
	if p.notify(); p.ended() {
		_ = l.finish(p, nil, alone)
		return nil
	}
	go func() {
		await(p, Forever)
		_ = l.finish(p, nil, alone)
	}()
	return nil
}

// gate is a pending that Open ends.
type gate struct {
	task
	once sync.Once
}

// NewGate returns the handle of something that is done when Open is called. A thread can so end the WaitAny
// of another one.
func (l *Library) NewGate() Handle { return l.handles.add(new(gate)) }

// Open ends what NewGate has begun. A further call does nothing.
func (l *Library) Open(h Handle) error {
	p, err := l.handles.use("open gate", h)
	if err != nil {
		return err
	}
	defer l.handles.unuse(h)
	g, ok := p.(*gate)
	if !ok {
		return unknown("open gate", h)
	}
	g.open()
	return nil
}

func (g *gate) open() { g.once.Do(func() { g.complete(nil) }) }
