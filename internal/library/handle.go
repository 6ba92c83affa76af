package library

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Handle is the number of something that was begun and that the program has not waited for. 0 is no handle.
type Handle uint64

var (
	// ErrPending reports that the time limit of a wait has ended. The operation goes on.
	ErrPending = errors.New("the operation is not done yet")
	// ErrHandle reports that there is nothing pending with a handle.
	ErrHandle = errors.New("does not exist, or was used up by a wait or released")
)

// Result is the result of something that has succeeded.
type Result struct {
	Outputs                 []Output // one for each tensor
	Received                []int64  // the rows that came from each member, if the operation sends rows
	Source, LastJoined, Set int
}

// Output is the result of one tensor.
type Output struct {
	Data  []byte
	Shape tensor.Shape
	Made  bool // whether Memory has provided Data
}

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
