package tcp

import (
	"iter"
	_ "unsafe" // for the linkname of lockedOSThread

	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
)

// steps runs operations step by step. An operation is written as code that blocks in reads and flushes. A
// step that may wait runs this code directly. A step that may not wait runs it on a coroutine. Where the code
// would block, the coroutine is suspended until the next step.
//
// A goroutine that is locked to a thread, such as any goroutine that was called from C, must not resume the
// coroutine, because the runtime would then abort the process.
type steps struct {
	resume  func() (ops.Progress, bool) // resumes the coroutine; nil until the first step that may not wait
	stop    func()
	yield   func(ops.Progress) bool
	err     error // the result of the operation that the coroutine has finished
	running bool  // an operation is suspended on the coroutine
	closed  bool
}

// next runs the next step of b's operation. A step that may wait runs the operation to its end: directly, or
// on the coroutine if an earlier step has begun it there.
func (s *steps) next(b *Backend) (ops.Progress, error) {
	if !s.running && b.ctx != nil {
		return ops.Finished, b.run()
	}
	if s.closed {
		return ops.Waiting, transport.ErrClosed
	}
	if b.ctx == nil && lockedOSThread() {
		return ops.Blocked, nil
	}
	if s.resume == nil {
		s.resume, s.stop = iter.Pull(func(yield func(ops.Progress) bool) {
			s.yield = yield
			for {
				s.running = true
				s.err = b.run()
				s.running = false
				if !yield(ops.Finished) {
					return
				}
			}
		})
	}
	resume := s.resume
	if lockedOSThread() {
		resume = onUnlockedThread(resume)
	}
	p, _ := resume()
	if p != ops.Finished {
		return p, nil
	}
	return p, s.err
}

// close ends the coroutine. An operation that is suspended on it fails with transport.ErrClosed.
func (s *steps) close() {
	s.closed = true
	switch {
	case s.stop == nil:
	case lockedOSThread():
		onUnlockedThread(func() (ops.Progress, bool) {
			s.stop()
			return ops.Finished, false
		})()
	default:
		s.stop()
	}
}

// onUnlockedThread returns a function that calls f in a new goroutine, which is not locked to a thread, and
// waits for the result.
func onUnlockedThread(f func() (ops.Progress, bool)) func() (ops.Progress, bool) {
	return func() (p ops.Progress, ok bool) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			p, ok = f()
		}()
		<-done
		return p, ok
	}
}

// lockedOSThread reports whether the calling goroutine is locked to a thread. If a later runtime removes
// runtime.lockedOSThread, linking fails with an error.
//
//go:linkname lockedOSThread runtime.lockedOSThread
func lockedOSThread() bool

// await is called where an operation has to wait. If the step may not wait, await suspends the operation, and
// the step returns p. If the step may wait, await returns nil at once, and the caller blocks.
func (b *Backend) await(p ops.Progress) error {
	if b.ctx == nil && (b.steps.closed || !b.steps.yield(p)) {
		return transport.ErrClosed
	}
	return nil
}
