package tcp

import (
	"context"
	"errors"
	"sync"
)

// watch aborts a lane when the context of the running operation ends, because the methods of a transport.Conn
// take no context. It stays registered with a context until the context ends or an operation has another
// context. So an operation allocates nothing if it has the same context as the operation before, or a context
// that cannot end.
type watch struct {
	abort func(error)

	// mu may be held while abort is called, because abort locks only mutexes of the mesh and does not call
	// the watch.
	mu      sync.Mutex
	done    <-chan struct{} // the Done channel of the watched context
	stop    func() bool
	running bool
	cause   error // the reason why the running operation was aborted, or nil
}

// begin records that an operation with the context ctx runs. If ctx has ended, begin returns the cause of
// ctx.
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

// ended is called when ctx has ended. It aborts the lane if ctx is still the watched context and an operation
// runs.
func (w *watch) ended(ctx context.Context) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.running && w.done == ctx.Done() {
		w.cause = context.Cause(ctx)
		w.abort(w.cause)
	}
}

// end records that the running operation has ended with err. If the lane was aborted during the operation and
// err does not wrap the reason, end returns the reason. Otherwise it returns err.
func (w *watch) end(err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.running = false
	if w.cause != nil && !errors.Is(err, w.cause) {
		return w.cause
	}
	return err
}

// close ends the registration with the context, which would keep the backend in memory.
func (w *watch) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stop != nil {
		w.stop()
	}
	w.stop, w.done = nil, nil
}
