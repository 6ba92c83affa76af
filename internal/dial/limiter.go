package dial

import (
	"container/list"
	"errors"
	"io"
	"net"
	"sync"
)

// ErrEvicted reports that a Limiter has closed a connection to make room for another one.
var ErrEvicted = errors.New(
	"the connection was closed before its handshake ended, because too many newer connections are in a handshake")

// Limiter limits the number of connections whose peer has not proved its identity yet. If there is one
// connection more than the limit, the Limiter closes the oldest of these connections. A peer that belongs to
// the job proves its identity at once, so the oldest peer probably does not belong to it. If it does, it
// dials again.
type Limiter struct {
	mu      sync.Mutex
	most    int
	slots   list.List // elements are *Slot, oldest first
	evicted int       // number of slots that were taken away and not released yet
	settled sync.Cond // signals that evicted is 0
}

// descriptorShare is the share of the file descriptors of a process that the connections of a Limiter may
// have: one of so many. A rank has up to three Limiters, so these connections leave descriptors for those of
// the job.
const descriptorShare = 8

// NewLimiter returns a Limiter with the limit most, which must be at least one. The limit is lower if the
// process may have few file descriptors open.
func NewLimiter(most int) *Limiter {
	l := new(Limiter)
	l.settled.L = &l.mu
	l.Grow(most)
	return l
}

// Grow raises the limit to the value of most, as far as NewLimiter would. If the limit is already as high,
// Grow does nothing.
func (l *Limiter) Grow(most int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.most = max(l.most, min(most, max(Descriptors()/descriptorShare, 1)))
}

// Slot is the permission of a Limiter for one connection.
type Slot struct {
	of   *Limiter
	conn io.Closer
	at   *list.Element // nil after release or eviction
}

// Acquire gives conn a slot. If no slot is free, Acquire first closes the connection that has the oldest slot
// and takes its slot away. The caller must call Release on the slot that Acquire returns.
func (l *Limiter) Acquire(conn io.Closer) *Slot {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.slots.Len() >= l.most {
		oldest := l.slots.Remove(l.slots.Front()).(*Slot)
		oldest.at = nil
		oldest.conn.Close()
		l.evicted++
	}
	s := &Slot{of: l, conn: conn}
	s.at = l.slots.PushBack(s)
	return s
}

// Settle waits until the slots that were taken away from connections are released, which means that the
// descriptors of the connections are free. A goroutine that accepts connections calls Settle before it
// accepts the next one. Otherwise it could accept faster than connections end.
func (l *Limiter) Settle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.evicted > 0 {
		l.settled.Wait()
	}
}

// Release frees the slot. If the Limiter has closed the connection and taken the slot away, Release returns
// false. Release must be called once.
func (s *Slot) Release() bool {
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	if s.at == nil {
		if s.of.evicted--; s.of.evicted == 0 {
			s.of.settled.Broadcast()
		}
		return false
	}
	s.of.slots.Remove(s.at)
	s.at = nil
	return true
}

// Listener returns a listener that accepts the connections of another one. Each has a slot until it is closed
// or its method Prove is called. They are *LimitedConn.
func (l *Limiter) Listener(of net.Listener) net.Listener { return &limitedListener{of, l} }

type limitedListener struct {
	net.Listener
	limiter *Limiter
}

func (l *limitedListener) Accept() (net.Conn, error) {
	l.limiter.Settle()
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &LimitedConn{Conn: conn, slot: l.limiter.Acquire(conn)}, nil
}

// LimitedConn is a connection of a Limiter's Listener.
type LimitedConn struct {
	net.Conn
	slot  *Slot
	leave sync.Once
}

// Prove says that the peer has proved its identity, so that the Limiter does not close the connection.
func (c *LimitedConn) Prove() { c.leave.Do(func() { c.slot.Release() }) }

// Close implements net.Conn.
func (c *LimitedConn) Close() error {
	c.Prove()
	return c.Conn.Close()
}
