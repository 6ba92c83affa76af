package mem

import "sync/atomic"

// bell tells a rank that rests of what arrives on its Control lane.
type bell struct {
	ring  atomic.Pointer[func()]
	rests atomic.Bool
}

// strike rings, once for each Rest.
func (b *bell) strike() {
	if !b.rests.CompareAndSwap(true, false) {
		return
	}
	if ring := b.ring.Load(); ring != nil {
		(*ring)()
	}
}

// attach makes this rank hear of what arrives on c. The caller holds the Cluster's mu.
func (m *mesh) attach(c *conn) {
	c.in.bell, c.out.own = &m.bell, &m.bell
	m.control = append(m.control, c)
}

// OnBell implements transport.Poller.
func (p poller) OnBell(ring func()) { p.bell.ring.Store(&ring) }

// Ring implements transport.Poller.
func (p poller) Ring() {
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	for _, c := range p.control {
		c.out.ring()
	}
}

// Rest implements transport.Poller. It says so before it looks, and senders look after they have sent: one of the two
// sees the other.
func (p poller) Rest() bool {
	p.bell.rests.Store(true)
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	for _, c := range p.control {
		if c.in.stirs() {
			p.Wake()
			return false
		}
	}
	return true
}

// Wake implements transport.Poller.
func (p poller) Wake() { p.bell.rests.Store(false) }
