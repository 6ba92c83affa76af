package dial

import (
	"container/list"
	"errors"
	"io"
	"sync"
)

// ErrEvicted is the error of a connection that a Limiter closed.
var ErrEvicted = errors.New(
	"closed before its handshake ended, because too many newer connections are in their handshake")

// Limiter bounds the connections that have not proved their identity yet. If there is one too many it closes
// the oldest: a peer that can prove itself does so at once, so the oldest most likely cannot, and a
// peer of the job would retry.
type Limiter struct {
	most int

	mu    sync.Mutex
	slots list.List // elements are *Slot, oldest first
}

// NewLimiter makes a Limiter for most connections, at least one.
func NewLimiter(most int) *Limiter { return &Limiter{most: most} }

// Grow raises the bound to most, if that is more.
func (l *Limiter) Grow(most int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.most = max(l.most, most)
}

// Slot is the slot of one connection in a Limiter.
type Slot struct {
	of   *Limiter
	conn io.Closer
	at   *list.Element // nil after the slot was released or evicted
}

// Acquire gives conn a slot. If there are too many connections it closes the one that has had a slot for the
// longest time. The caller must release the slot.
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

// Release frees the slot, and reports whether the connection still had it. It is called once.
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
