package shm

import (
	"sync/atomic"

	"github.com/gohvd/gohvd/topo"
)

// Inner is the Mesh within what Connect returned.
func Inner(s Sharer) *Mesh {
	if p, ok := s.(pollingMesh); ok {
		return p.Mesh
	}
	return s.(*Mesh)
}

// Put sends a message as this rank would, which owns fds.
func (m *Mesh) Put(to topo.Rank, kind, id uint32, size uint64, fds ...int) {
	m.peer(to).outbox.put(message{kind, id, size, fds})
}

// Kinds of messages.
const (
	ControlMessage = controlMessage
	ShareMessage   = shareMessage
	ArenaMessage   = arenaMessage
	KeptMessage    = keptMessage
	DropMessage    = dropMessage
)

// SetHead and SetTail write the words that this rank's peer to checks.
func (m *Mesh) SetHead(to topo.Rank, v uint64) { atomic.StoreUint64(m.peer(to).ring.outHead, v) }

func (m *Mesh) SetTail(to topo.Rank, v uint64) { atomic.StoreUint64(m.peer(to).ring.inTail, v) }

// Sleepers is what keeps peers ringing, and whether they see it.
func (m *Mesh) Sleepers() (int, bool) {
	m.bell.mu.Lock()
	defer m.bell.mu.Unlock()
	return m.bell.sleepers, atomic.LoadUint32(m.bell.word) != 0
}
