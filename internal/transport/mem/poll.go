package mem

import "sync/atomic"

// bell notifies a parked rank when something arrives on its Control lane.
type bell struct {
	notify atomic.Pointer[func()]
	parked atomic.Bool
}

// ring calls notify if the rank is parked, once for each Park.
func (b *bell) ring() {
	if !b.parked.CompareAndSwap(true, false) {
		return
	}
	if notify := b.notify.Load(); notify != nil {
		(*notify)()
	}
}

// attach makes the pipes of c use the bell of this rank. The caller holds the Cluster's mu.
func (m *mesh) attach(c *conn) {
	c.in.bell, c.out.own = &m.bell, &m.bell
	m.control = append(m.control, c)
}

// OnNotify implements transport.Poller.
func (m *mesh) OnNotify(notify func()) { m.bell.notify.Store(&notify) }

// NotifyPeers implements transport.Poller.
func (m *mesh) NotifyPeers() {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	for _, c := range m.control {
		c.out.notify()
	}
}

// Park implements transport.Poller. It sets parked before it checks for bytes, and senders check parked after
// they have sent, so at least one of the two notices the other.
func (m *mesh) Park() bool {
	m.bell.parked.Store(true)
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	for _, c := range m.control {
		if c.in.stirs() {
			m.Unpark()
			return false
		}
	}
	return true
}

// Unpark implements transport.Poller.
func (m *mesh) Unpark() { m.bell.parked.Store(false) }

// EntersKernel implements transport.Poller.
func (m *mesh) EntersKernel() bool { return false }
