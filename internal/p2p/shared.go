package p2p

import (
	"bufio"
	"errors"
	"sync/atomic"
	"unsafe"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/topo"
)

// segmentBytes is the size of the segment that each rank has for the lane if it shares messages. The segment
// is one word.
//
// If a large message is in an arena, its sender offers the place. When a receive matches, the receiver
// accepts the message, copies it from the memory of the sender, and says that it has finished. The sender
// sets its word before it gives the memory of unfinished messages back to its callers. A receiver checks this
// word after it has copied a message, because the callers may have changed the memory meanwhile.
const segmentBytes = 4

// errRevoked reports that the sender has ended the operation, so the message may have changed while it was
// copied.
var errRevoked = errors.New("the sender has ended the operation")

// share returns the place of o's message, and whether the peer can read it there. Before the first such
// message, share makes this rank's segment. If that fails, for example because this process has no
// descriptor left, the message goes over the channel. The caller holds x.mu.
func (p *peer) share(o *Op) (place arena.Ref, ok bool) {
	if !p.near {
		return place, false
	}
	place, ok = p.x.cfg.Memory.Find(o.Buf)
	return place, ok && (p.x.revoked != nil || p.x.shareWord() == nil)
}

// shareWord makes this rank's segment. The caller holds mu.
func (x *Exchange) shareWord() error {
	var near []topo.Rank
	for _, p := range x.peers {
		if p.near {
			near = append(near, p.rank)
		}
	}
	b, err := x.cfg.Memory.Share(x.cfg.Lane, segmentBytes, near)
	if err == nil {
		x.revoked = word(b)
	}
	return err
}

func word(b []byte) *uint32 { return (*uint32)(unsafe.Pointer(&b[0])) }

// revoke says to the peers that callers may change the memory of messages from now on.
func (x *Exchange) revoke() {
	if x.revoked != nil {
		atomic.StoreUint32(x.revoked, 1)
		shmem.Fence() // so that peers see the word before the callers change the memory
	}
}

// shared handles the offer of a message that this rank can copy from the memory of the peer.
func (p *peer) shared(h header, in *bufio.Reader) error {
	b, err := in.Peek(placeBytes)
	if err != nil {
		return err
	}
	m := message{header: h, place: decodePlace(b)}
	_, _ = in.Discard(placeBytes)
	if !p.near || m.place.Offset < 0 {
		return p.malformed("a shared message at byte %d of chunk %d", m.place.Offset, m.place.Chunk)
	}
	return p.offered(m)
}

// fetch completes the receive o, which has accepted the message m, by copying the message from the memory of
// the peer.
func (p *peer) fetch(o *Op, m message) {
	err := p.copyFrom(m.place, o.Buf)
	x := p.x
	x.mu.Lock()
	for err == errRevoked && !p.silent && !p.closed {
		// The job has failed or the peer has left, and this rank is about to learn which.
		p.wake.Wait()
	}
	if err != nil && err != errRevoked && !p.departed() && !p.closed {
		x.mu.Unlock()
		x.cfg.Failed(err)
		return // Close ends o
	}
	_, mine := p.expected[m.id]
	delete(p.expected, m.id)
	if err == nil && mine {
		p.answer(finish, m.id)
	}
	x.mu.Unlock()
	if err != nil {
		err = &LeftError{[]topo.Rank{p.rank}}
	}
	if mine { // otherwise Close ends it
		o.Done(err)
	}
}

// copyFrom copies len(dst) bytes from the given place in the memory of the peer.
func (p *peer) copyFrom(at arena.Ref, dst []byte) error {
	cfg := &p.x.cfg
	segment, err := cfg.Memory.Peer(p.x.ctx, cfg.Lane, p.rank)
	if err != nil {
		return err
	}
	chunk, err := cfg.Memory.Arena(p.x.ctx, p.rank, at.Chunk)
	if err != nil {
		return err
	}
	if len(segment) < segmentBytes || at.Offset > int64(len(chunk)) ||
		int64(len(dst)) > int64(len(chunk))-at.Offset {
		return p.malformed("%d bytes at byte %d of chunk %d, which has %d bytes", len(dst), at.Offset, at.Chunk,
			len(chunk))
	}
	copy(dst, chunk[at.Offset:])
	shmem.Fence() // so that the word is read after the message
	if atomic.LoadUint32(word(segment)) != 0 {
		return errRevoked
	}
	return nil
}
