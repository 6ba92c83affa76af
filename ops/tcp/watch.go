package tcp

import (
	"context"
	"errors"
	"sync"
)

// watch aborts a lane when the context of the running operation ends, since calls of a transport.Conn take none. An
// operation with the same context as the one before, or one that cannot end, allocates nothing: the watch stays on the
// context until it ends or an operation brings another.
type watch struct {
	abort func(error)

	// mu may be held when abort is called, which takes the mesh's own locks and never comes back here.
	mu      sync.Mutex
	done    <-chan struct{} // of the watched context
	stop    func() bool
	running bool
	cause   error // why the running operation was aborted
}

// begin starts an operation, unless ctx has ended.
func (w *watch) begin(ctx context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if done := ctx.Done(); done != w.done {
		if w.stop != nil {
			w.stop()
		}
		w.done, w.stop = done, nil
		if done != nil {
			w.stop = context.AfterFunc(ctx, func() { w.ended(ctx) })
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	w.running = true
	return nil
}

// ended is told that a context ended, which need not be the watched one any more.
func (w *watch) ended(ctx context.Context) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.running && w.done == ctx.Done() {
		w.cause = context.Cause(ctx)
		w.abort(w.cause)
	}
}

// end ends an operation with err, or with the reason why its lane was aborted meanwhile if err does not tell.
func (w *watch) end(err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.running = false
	if w.cause != nil && !errors.Is(err, w.cause) {
		return w.cause
	}
	return err
}
