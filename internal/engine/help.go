package engine

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/futex"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Turns of the loop are taken by whoever holds its wheel: BackgroundThreadLoop, or a goroutine that waits for an operation
// and has nothing better to do. An operation that a goroutine waits for from its submission on then passes through no
// other thread.

// wheel is the right to take turns.
type wheel struct {
	mu sync.Mutex // held by who takes turns
	// background says that the holder is BackgroundThreadLoop, and wanted that somebody would rather have it.
	background, wanted atomic.Bool
	// missed says that BackgroundThreadLoop was woken while another had the wheel.
	missed atomic.Bool

	// What follows belongs to the holder.
	alarm time.Duration // when BackgroundThreadLoop wakes by itself, or should have
	over  bool          // the epoch is
	err   error         // and why
}

// takeBack takes the wheel for BackgroundThreadLoop. If it fails the holder wakes that later.
func (w *wheel) takeBack() bool {
	w.missed.Store(true)
	if !w.mu.TryLock() {
		return false
	}
	w.missed.Store(false)
	w.background.Store(true)
	return true
}

// giveUp is the opposite of takeBack.
func (w *wheel) giveUp() {
	w.background.Store(false)
	w.mu.Unlock()
}

// take takes the wheel for a goroutine that waits, from BackgroundThreadLoop if need be. If another such goroutine has it
// there is no need for more.
func (w *wheel) take() bool {
	if w.mu.TryLock() {
		return true
	}
	if !w.background.Load() || !w.wanted.CompareAndSwap(false, true) {
		return false
	}
	defer w.wanted.Store(false)
	for range triesForWheel {
		if w.mu.TryLock() {
			return true
		}
		futex.Pause(pauses)
	}
	w.mu.Lock()
	return true
}

// triesForWheel are about as many as a turn takes.
const triesForWheel = 50

// Queue is Submit for a caller that calls Help, Ring or RingSoon next, and has checked the requests.
func (e *Engine) Queue(entries ...*tensorqueue.Entry) error {
	l := e.lanes.find(entries[0].Set)
	err := error(ErrNoProcessSet)
	e.observer.submitted(entries)
	if l != nil {
		err = l.queue.Add(entries...)
	}
	if err == nil {
		return nil
	}
	var duplicate *tensorqueue.DuplicateNameError
	if errors.As(err, &duplicate) { // it need not be the first of a group
		return &OpError{Op: duplicate.Kind.String(), Tensor: duplicate.Name, Err: err}
	}
	return opError(&entries[0].Request, err)
}

// Help takes turns of the loop in the calling goroutine until done reports true or ctx has ended, but not for long when
// nothing happens: the caller goes on to wait. What was queued is noticed in any case. It may be called from any
// goroutine; Done of other operations is called by it too.
func (e *Engine) Help(ctx context.Context, done func() bool) {
	if !e.helpable || !e.wheel.take() {
		e.ring()
		return
	}
	if e.wheel.over {
		e.wheel.mu.Unlock()
		return
	}
	e.late.unneeded()
	e.wake()
	e.now = time.Since(e.start)
	e.spin.budget = e.spin.help
	e.spin.extend(e.now)
	var next time.Duration
	enough := func() bool { return done() || closed(ctx.Done()) || closed(e.stop) }
	for !e.wheel.over {
		if next = e.turn(); enough() || !e.look(&e.spin.helping, enough) {
			break
		}
	}
	e.leave(next)
}

// turn takes a turn. It says when the next is due.
func (e *Engine) turn() (next time.Duration) {
	next, e.wheel.over, e.wheel.err = e.RunLoopOnce()
	return next
}

// leave gives the wheel up. Who comes to rest does not wake BackgroundThreadLoop, which the bell does when something comes.
func (e *Engine) leave(next time.Duration) {
	e.spin.budget = e.spin.watch
	e.spin.until = min(e.spin.until, e.now+e.spin.watch)
	rests := false
	for range turnsToRest {
		e.handOver()
		if e.wheel.over || closed(e.stop) {
			break
		}
		if rests = e.rest(); rests {
			break
		}
		e.wake()
		next = e.turn()
	}
	e.tellPeers()
	due := !rests || next < e.wheel.alarm || e.wheel.alarm <= e.now
	e.wheel.mu.Unlock()
	if e.wheel.missed.Swap(false) || due {
		e.rouse()
	}
}

// turnsToRest is how often who leaves does what has come meanwhile. It is cheaper than to wake another for it.
const turnsToRest = 4

// handOver gives operations that were started to their lanes, which wait for the others.
func (e *Engine) handOver() {
	for i, l := range e.trying {
		w := l.trial
		l.trial = nil
		l.unclaim(w)
		e.trying[i] = nil
	}
	e.trying = e.trying[:0]
}

// attempt does w here, or begins it, if that needs no waiting. Else it reports false, and w is to be given to the lane.
func (e *Engine) attempt(l *lane, w *work) bool {
	kind := w.grant.Responses[0].Kind
	// A barrier is not answered before what it comes after.
	if !e.helpable || !l.claim(!kind.MovesData()) {
		return false
	}
	e.observer.begin(w, e.now)
	var err error
	if !kind.MovesData() {
		err = l.execute(e.ctx, w)
		e.attempted(l, w, err)
		return true
	}
	// A caller that waits has time for many steps. If others are late for one of them, or ctx ends, the lane goes on.
	w.started, err = l.start(w, !e.wheel.background.Load())
	if err != nil {
		e.attempted(l, w, err)
		return true
	}
	if !w.started {
		l.unclaim(nil)
		return false
	}
	l.trial = w
	e.trying = append(e.trying, l)
	return true
}

// attempted notes that w has ended, and gives the lane back.
func (e *Engine) attempted(l *lane, w *work, err error) {
	e.laneFinished(w, err)
	if err == nil {
		l.unclaim(nil)
		return
	}
	w.failed = true // it waits there for the verdict
	l.unclaim(w)
}

// try does the next step of what was started where that is possible by now, and reports whether there was one.
func (e *Engine) try() (some bool) {
	for i := 0; i < len(e.trying); i++ {
		l := e.trying[i]
		w := l.trial
		progress, err := l.tryFinish(w)
		if err == nil && progress != ops.Finished {
			if progress == ops.Moving {
				some = true
				e.spin.extend(e.now)
			}
			continue
		}
		if err == nil {
			l.observer.ended(l.set.ID, w, nil)
			for _, entry := range w.entries {
				l.finish(entry, nil)
			}
		}
		e.attempted(l, w, err)
		l.trial = nil
		last := len(e.trying) - 1
		e.trying[i], e.trying[last] = e.trying[last], nil
		e.trying = e.trying[:last]
		i--
		some = true
	}
	return some
}

// closed reports whether c is.
func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
