package transport

import "sync/atomic"

// Waker implements parts of Poller for a mesh whose peers are in the same process. The mesh calls Wake when
// something has arrived on the Control lane. The zero value is ready to use.
type Waker struct {
	notify atomic.Pointer[func()]
	parked atomic.Bool
}

// OnNotify implements Poller.
func (w *Waker) OnNotify(notify func()) { w.notify.Store(&notify) }

// Notifies reports whether OnNotify was called.
func (w *Waker) Notifies() bool { return w.notify.Load() != nil }

// Wake calls the function notify if the rank is parked. It calls it at most once for each Park. The caller
// must store what has arrived before it calls Wake.
func (w *Waker) Wake() {
	if !w.parked.CompareAndSwap(true, false) {
		return
	}
	if notify := w.notify.Load(); notify != nil {
		(*notify)()
	}
}

// Park parks the rank unless something has arrived. It sets parked before it calls arrived, and peers look at
// parked after they have stored what arrives. So at least one of the two notices the other.
func (w *Waker) Park(arrived func() bool) bool {
	w.parked.Store(true)
	if arrived() {
		w.Unpark()
		return false
	}
	return true
}

// Unpark implements Poller.
func (w *Waker) Unpark() { w.parked.Store(false) }
