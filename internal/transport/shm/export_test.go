package shm

import (
	"slices"
	"sync/atomic"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// Inner returns the Mesh behind a Sharer from Connect.
func Inner(s Sharer) *Mesh { return s.(*Mesh) }

// Put queues a message to another rank, as if this rank's mesh had sent it. The message owns the descriptors
// fds.
func (m *Mesh) Put(to topo.Rank, kind, id uint32, size uint64, fds ...int) {
	m.PutFrom(m.rank, to, kind, id, size, fds...)
}

// PutFrom is like Put for a message that says that the rank from has made it.
func (m *Mesh) PutFrom(from, to topo.Rank, kind, id uint32, size uint64, fds ...int) {
	msg := message{kind: kind, id: id, size: size, from: uint32(slices.Index(m.group, from))}
	for _, fd := range fds {
		msg.files = append(msg.files, newFile(fd))
	}
	m.peer(to).outbox.put(msg)
}

// Queued returns the number of messages that wait to be sent to another rank.
func (m *Mesh) Queued(to topo.Rank) int {
	o := &m.peer(to).outbox
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.queue)
}

// Links returns the number of Unix connections of this rank.
func (m *Mesh) Links() int { return len(m.linked) }

// These are the kinds of messages between the ranks of a host.
const (
	ControlMessage = controlMessage
	ShareMessage   = shareMessage
	ArenaMessage   = arenaMessage
	DropMessage    = dropMessage
	GoneMessage    = goneMessage
)

// SetHead and SetTail overwrite words that the peer must check. SetHead overwrites the head of the ring in
// which this rank sends to the peer. SetTail overwrites the tail of the ring in which the peer sends to this
// rank. The parameter to is the rank of the peer.
func (m *Mesh) SetHead(to topo.Rank, v uint64) { atomic.StoreUint64(m.peer(to).conn.outHead, v) }

func (m *Mesh) SetTail(to topo.Rank, v uint64) { atomic.StoreUint64(m.peer(to).conn.inTail, v) }

// Sleepers returns the number of parked goroutines, and whether peers see that at least one goroutine is
// parked.
func (m *Mesh) Sleepers() (int, bool) {
	m.waker.mu.Lock()
	defer m.waker.mu.Unlock()
	return m.waker.sleepers, atomic.LoadUint32(m.waker.word) != 0
}

// Loopback returns the channel to a peer that does not exist, with rings of 64 bytes. setWords sets the head
// and the tail, which that peer would write.
func Loopback() (c transport.Conn, setWords func(head, tail uint64)) {
	layout := controlLayout{size: 1, ringBytes: 64}
	own, theirs := make([]byte, layout.bytes()), make([]byte, layout.bytes())
	b := &waker{fd: -1, word: word32(own, parkedAt)}
	p := &peer{rank: 1, index: 1, link: &link{waker: peerWaker{fd: -1, parked: word32(theirs, parkedAt)}}}
	conn := newConn(b, new(atomic.Bool), p, layout.slotOf(own, 0), layout.slotOf(theirs, 0))
	return conn, func(head, tail uint64) {
		atomic.StoreUint64(conn.inHead, head)
		atomic.StoreUint64(conn.outTail, tail)
	}
}
