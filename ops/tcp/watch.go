package tcp

import (
	"context"
	"errors"
	"sync"
)

// watch aborts a lane when the context of the running operation ends, because the calls of a transport.Conn
// take no context. An operation that has the same context as the one before, or a context that cannot end,
// allocates nothing: the watch stays on a context until it ends or an operation has another one.
type watch struct {
	abort func(error)

	// mu may be held when abort is called. abort takes locks of the mesh and does not call the watch.
	mu      sync.Mutex
	done    <-chan struct{} // the Done channel of the watched context
	stop    func() bool
	running bool
	cause   error // the reason why the running operation was aborted
}

// begin starts an operation. It returns the cause of ctx if ctx has ended.
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

// ended is called when a context has ended. The context need not be the watched one any more.
func (w *watch) ended(ctx context.Context) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.running && w.done == ctx.Done() {
		w.cause = context.Cause(ctx)
		w.abort(w.cause)
	}
}

// end ends an operation that returned err. If the lane was aborted meanwhile and err does not wrap the
// reason, end returns the reason; otherwise it returns err.
func (w *watch) end(err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.running = false
	if w.cause != nil && !errors.Is(err, w.cause) {
		return w.cause
	}
	return err
}
