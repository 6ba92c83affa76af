package mem

import "slices"

// attach makes the pipes of c use the waker of this rank. The caller holds the Cluster's mu.
func (m *mesh) attach(c *conn) {
	c.in.receiverWaker, c.out.senderWaker = &m.waker, &m.waker
	m.control = append(m.control, c)
}

// OnNotify implements transport.Poller.
func (m *mesh) OnNotify(notify func()) { m.waker.OnNotify(notify) }

// NotifyPeers implements transport.Poller.
func (m *mesh) NotifyPeers() {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	for _, c := range m.control {
		c.out.notify()
	}
}

// Park implements transport.Poller.
func (m *mesh) Park() bool {
	return m.waker.Park(func() bool {
		m.c.mu.Lock()
		defer m.c.mu.Unlock()
		return slices.ContainsFunc(m.control, func(c *conn) bool { return c.in.hasUnread() })
	})
}

// Unpark implements transport.Poller.
func (m *mesh) Unpark() { m.waker.Unpark() }

// EntersKernel implements transport.Poller.
func (m *mesh) EntersKernel() bool { return false }
