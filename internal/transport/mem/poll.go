package mem

import "sync/atomic"

// waker notifies a parked rank when something arrives on its Control lane.
type waker struct {
	notify atomic.Pointer[func()]
	parked atomic.Bool
}

// wake calls notify if the rank is parked. It calls notify at most once after each call of Park.
func (w *waker) wake() {
	if !w.parked.CompareAndSwap(true, false) {
		return
	}
	if notify := w.notify.Load(); notify != nil {
		(*notify)()
	}
}

// attach makes the pipes of c use the waker of this rank. The caller holds the Cluster's mu.
func (m *mesh) attach(c *conn) {
	c.in.receiverWaker, c.out.senderWaker = &m.waker, &m.waker
	m.control = append(m.control, c)
}

// OnNotify implements transport.Poller.
func (m *mesh) OnNotify(notify func()) { m.waker.notify.Store(&notify) }

// NotifyPeers implements transport.Poller.
func (m *mesh) NotifyPeers() {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	for _, c := range m.control {
		c.out.notify()
	}
}

// Park implements transport.Poller. It sets parked before it checks for bytes, and senders check parked after
// they have sent. So either Park sees the bytes or the sender sees that the rank is parked.
func (m *mesh) Park() bool {
	m.waker.parked.Store(true)
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	for _, c := range m.control {
		if c.in.hasUnread() {
			m.Unpark()
			return false
		}
	}
	return true
}

// Unpark implements transport.Poller.
func (m *mesh) Unpark() { m.waker.parked.Store(false) }

// EntersKernel implements transport.Poller.
func (m *mesh) EntersKernel() bool { return false }
