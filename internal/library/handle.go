package library

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
)

// Handle is the number of something that was begun and that the program has not waited for. 0 is no handle.
type Handle uint64

var (
	// ErrPending reports that the time limit of a wait has ended. The operation goes on.
	ErrPending = errors.New("the operation is not done yet")
	// ErrHandle reports that there is nothing pending with a handle.
	ErrHandle = errors.New("does not exist, or was used up by a wait or released")
)

// pending is an operation, or another thing for which the program can wait.
type pending interface {
	// ended reports whether it is done.
	ended() bool
	// done returns a channel that is closed when it is done.
	done() <-chan struct{}
	// drive helps to make progress until quit returns true or the deadline, unless it is zero. If quit is
	// nil, the method ended stands for it. drive returns early if nothing happens.
	drive(deadline time.Time, quit func() bool)
	// beginWait returns the time at which a wait of the program begins, for endWait, which ends it. If no
	// timeline shows the wait, the time is 0.
	beginWait() time.Duration
	endWait(begun time.Duration)
	// failure returns the error with which it has ended. It must be done.
	failure() error
	// notify makes the engine notice what was submitted. If a sidecar has done it, notify ends it.
	notify()
	// seen frees the name. It must be done.
	seen()
	// take stores the result in into, unless into is nil, and returns the error. It is called once, when it
	// is done. Memory that into does not get is freed.
	take(into *Result) error
}

// event is the part of a pending that records the end.
type event struct {
	err error // set before it is done
	// signal is nil until a caller needs a channel. When it is done, signal is closedSignal.
	signal atomic.Pointer[chan struct{}]
}

// closedSignal points to the channel of everything that is done.
var closedSignal = func() *chan struct{} {
	c := make(chan struct{})
	close(c)
	return &c
}()

// complete records the end.
func (e *event) complete(err error) {
	e.err = err
	if c := e.signal.Swap(closedSignal); c != nil {
		close(*c)
	}
}

func (e *event) ended() bool { return e.signal.Load() == closedSignal }

func (e *event) failure() error { return e.err }

func (e *event) done() <-chan struct{} {
	if e.signal.Load() == nil {
		c := make(chan struct{})
		e.signal.CompareAndSwap(nil, &c)
	}
	return *e.signal.Load()
}

// task is a pending that a goroutine executes.
type task struct {
	event
	result Result
}

// start runs f in a goroutine. f may set the result.
func (l *Library) start(f func(into *Result) error) Handle {
	t := new(task)
	h := l.handles.add(t)
	go func() { t.complete(f(&t.result)) }()
	return h
}

func (t *task) drive(time.Time, func() bool) {}

func (t *task) beginWait() time.Duration { return 0 }

func (t *task) endWait(time.Duration) {}

func (t *task) notify() {}

func (t *task) seen() {}

func (t *task) take(into *Result) error {
	if into != nil {
		*into = t.result
	}
	return t.err
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

// table has what is pending, by handle.
type table struct {
	mu    sync.Mutex
	slots []slot
	free  []uint32 // indices of empty slots
}

// slot is an entry of a table. A handle is the generation of the slot and its index.
type slot struct {
	generation uint32
	users      int     // the number of calls that use pending
	pending    pending // nil in an empty slot
}

func (t *table) add(p pending) Handle {
	t.mu.Lock()
	defer t.mu.Unlock()
	var i uint32
	if n := len(t.free); n > 0 {
		i, t.free = t.free[n-1], t.free[:n-1]
	} else {
		i, t.slots = uint32(len(t.slots)), append(t.slots, slot{})
	}
	s := &t.slots[i]
	s.generation = max(s.generation+1, 1) // not 0, because handle 0 is none
	s.pending, s.users = p, 0
	return Handle(s.generation)<<32 | Handle(i)
}

// use returns what is pending with a handle, or an error of the function op. If there is no error, the caller
// must call unuse or remove afterwards.
func (t *table) use(op string, h Handle) (pending, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.slot(h); s != nil {
		s.users++
		return s.pending, nil
	}
	return nil, unknown(op, h)
}

// unuse ends the use of what is pending with handles.
func (t *table) unuse(handles ...Handle) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, h := range handles {
		if s := t.slot(h); s != nil {
			s.users--
		}
	}
}

// unknown returns the error of the function op that there is nothing pending with h.
func unknown(op string, h Handle) error {
	return &engine.UsageError{Op: op, Err: fmt.Errorf("handle %d %w", h, ErrHandle)}
}

// remove makes a handle invalid that the caller uses. It reports whether the handle was valid, and whether no
// other call uses what was pending with it.
func (t *table) remove(h Handle) (valid, alone bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.slot(h)
	if s == nil {
		return false, false
	}
	s.pending = nil
	t.free = append(t.free, uint32(h))
	return true, s.users == 1
}

// slot returns the slot of a valid handle, or nil. The caller holds mu.
func (t *table) slot(h Handle) *slot {
	i := uint32(h)
	if uint64(i) >= uint64(len(t.slots)) {
		return nil
	}
	if s := &t.slots[i]; s.pending != nil && s.generation == uint32(h>>32) {
		return s
	}
	return nil
}

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
