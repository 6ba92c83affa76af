package dial

import (
	"container/list"
	"errors"
	"io"
	"sync"
)

// ErrEvicted is the error of a connection that a Limiter has closed.
var ErrEvicted = errors.New(
	"closed before its handshake ended, because too many newer connections are in their handshake")

// Limiter bounds the number of connections whose peer has not proved its identity yet. A connection beyond
// the bound makes the Limiter close the oldest one. A peer of the job proves its identity at once, so the
// oldest peer is most likely a stranger. If it belongs to the job after all, it dials again.
type Limiter struct {
	most int

	mu    sync.Mutex
	slots list.List // elements are *Slot, oldest first
}

// NewLimiter makes a Limiter that permits most connections, which must be at least one.
func NewLimiter(most int) *Limiter { return &Limiter{most: most} }

// Grow raises the bound to most. It never lowers the bound.
func (l *Limiter) Grow(most int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.most = max(l.most, most)
}

// Slot is one connection's slot in a Limiter.
type Slot struct {
	of   *Limiter
	conn io.Closer
	at   *list.Element // nil after release or eviction
}

// Acquire gives conn a slot. If no slot is free, it first closes the connection that has had its slot for
// longest, and takes that slot away. The caller must call Release on the result.
func (l *Limiter) Acquire(conn io.Closer) *Slot {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.slots.Len() >= l.most {
		oldest := l.slots.Remove(l.slots.Front()).(*Slot)
		oldest.at = nil
		oldest.conn.Close()
	}
	s := &Slot{of: l, conn: conn}
	s.at = l.slots.PushBack(s)
	return s
}

// Release frees the slot. It reports whether the connection still had the slot, which is false if the Limiter
// has closed the connection. The caller calls it once.
func (s *Slot) Release() bool {
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	if s.at == nil {
		return false
	}
	s.of.slots.Remove(s.at)
	s.at = nil
	return true
}
