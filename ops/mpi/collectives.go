//go:build mpi

package mpi

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// collectives implements Collectives. A frame travels in two parts. The head has a fixed size, so that all
// ranks know it: it contains the length of the frame and its beginning. The rest follows only if the frame is
// longer.
//
//	AndOr      one allreduce with MPI_BAND of both vectors, the second of which is complemented
//	Gather     MPI_Igather of the heads, then MPI_Isend of the rests to rank 0
//	Broadcast  MPI_Ibcast of the head, then MPI_Ibcast of the rest
type collectives struct {
	world  *world
	comm   comm
	tester *tester
	pins   runtime.Pinner // of the rests
	kept   runtime.Pinner // of head, heads and large vectors, which stay pinned

	begin   func() error // begins the operation in the fields below; made once so that no call allocates
	kind    collective
	and, or []uint64
	vectors []uint64 // the vector and, then the complement of the vector or
	head    []byte   // the head of this rank, or that of rank 0 in a broadcast
	heads   []byte   // the gathered heads, at rank 0
	frame   []byte   // the frame of this rank, or that of rank 0 in a broadcast
	frames  [][]byte
	rests   []rest // the rests in transfer, pinned
	err     error
}

// rest is the rest of a frame that this rank exchanges with a peer.
type rest struct {
	peer int
	part []byte
}

// collective is the kind of a collective.
type collective uint8

const (
	andOr collective = iota
	gather
	broadcast
)

const (
	headBytes  = 512
	frameBytes = 64 << 20 // maximum length of a frame
	lengthSize = 4
)

// Collectives implements World. All calls return the same collectives, and w refers to them. So the memory of
// one that has not completed stays pinned.
func (w *world) Collectives() Collectives {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.collectives == nil {
		c := &collectives{world: w, comm: w.comm, tester: newTester(w.comm), head: make([]byte, headBytes),
			heads: make([]byte, headBytes*w.Size()), frames: make([][]byte, w.Size()),
			vectors: small[uint64](w.comm)}
		c.begin = c.beginNow
		pin(&c.kept, c.head)
		pin(&c.kept, c.heads)
		w.collectives = c
	}
	return w.collectives
}

// AndOr implements Collectives.
func (c *collectives) AndOr(and, or []uint64) {
	c.kind, c.and, c.or = andOr, and, or
	if n := len(and) + len(or); n > cap(c.vectors) {
		c.vectors = make([]uint64, 2*n) // the memory of old vectors also stays pinned
		pin(&c.kept, c.vectors)
	}
	c.vectors = append(append(c.vectors[:0], and...), or...)
	complement(c.vectors[len(and):])
	c.start()
}

// complement inverts all bits. The complement of the AND of complements is the OR.
func complement(words []uint64) {
	for i := range words {
		words[i] = ^words[i]
	}
}

// Gather implements Collectives.
func (c *collectives) Gather(frame []byte) {
	c.kind, c.frame = gather, frame
	c.writeHead()
	c.start()
}

// Broadcast implements Collectives.
func (c *collectives) Broadcast(frame []byte) {
	c.kind, c.frame = broadcast, frame
	c.writeHead()
	c.start()
}

// writeHead stores the length and the beginning of the frame in the head.
func (c *collectives) writeHead() {
	binary.LittleEndian.PutUint32(c.head, uint32(len(c.frame)))
	copy(c.head[lengthSize:], c.frame)
}

func (c *collectives) start() {
	c.rests = c.rests[:0]
	c.err = c.world.start(c.tester, c.begin)
}

// beginNow begins the operation, or the transfer of the rests. It is called where MPI may be called.
func (c *collectives) beginNow() (err error) {
	for _, r := range c.rests {
		err = errors.Join(err, c.transfer(r))
	}
	switch {
	case len(c.rests) > 0:
		return err
	case c.kind == andOr:
		return c.comm.and(c.vectors)
	case c.kind == gather:
		return c.comm.gather(c.head, c.heads)
	}
	return c.comm.broadcast(c.head, 0)
}

// Poll implements Collectives.
func (c *collectives) Poll() bool {
	if !c.tester.done && c.err == nil {
		_, c.err = c.world.test(c.tester)
	}
	return c.tester.done || c.err != nil
}

// Test implements Collectives.
func (c *collectives) Test() (frames [][]byte, done bool, err error) {
	if !c.Poll() {
		return nil, false, nil
	}
	if c.err == nil && len(c.rests) == 0 {
		c.err = c.findRests()
		if c.err == nil && len(c.rests) > 0 {
			c.err = c.world.start(c.tester, c.begin)
			return c.Test()
		}
	}
	if c.err != nil {
		// The memory stays pinned, because MPI may still refer to it.
		c.world.Fail(c.err)
		return nil, false, fmt.Errorf("ops/mpi: negotiation: %w", c.err)
	}
	if len(c.rests) > 0 {
		c.pins.Unpin()
	}
	switch {
	case c.kind == andOr:
		copy(c.or, c.vectors[copy(c.and, c.vectors):])
		complement(c.or)
	case c.kind == broadcast:
		c.frames[0] = c.frame
		return c.frames[:1], true, nil
	case c.kind == gather && c.comm.rank() == 0:
		return c.frames, true, nil
	}
	return nil, true, nil
}

// findRests sets the frames as far as their heads contain them, and rests.
func (c *collectives) findRests() (err error) {
	switch {
	case c.kind == broadcast:
		err = c.restOf(c.head, 0)
		c.frame = c.frames[0]
	case c.kind == gather && c.comm.rank() == 0:
		for r := range c.frames {
			err = errors.Join(err, c.restOf(c.heads[r*headBytes:][:headBytes], r))
		}
	case c.kind == gather:
		c.addRest(c.frame, 0)
	}
	return err
}

// restOf sets the frame of a rank from its head, and adds the rest. The frame of this rank is complete.
func (c *collectives) restOf(head []byte, from int) error {
	n := binary.LittleEndian.Uint32(head)
	if n > frameBytes {
		return &transport.PeerError{Peer: topo.Rank(from), Lane: transport.Control,
			Err: fmt.Errorf("got a frame of %d bytes, want at most %d", n, frameBytes)}
	}
	own := from == c.comm.rank()
	switch {
	case own:
		c.frames[from] = c.frame
	case n <= headBytes-lengthSize:
		c.frames[from] = head[lengthSize:][:n]
	default:
		c.frames[from] = append(make([]byte, 0, n), head[lengthSize:]...)[:n]
	}
	if !own || c.kind == broadcast {
		c.addRest(c.frames[from], from)
	}
	return nil
}

// addRest adds the rest of a frame, if there is one, for the exchange with another rank.
func (c *collectives) addRest(frame []byte, peer int) {
	if len(frame) <= headBytes-lengthSize {
		return
	}
	r := rest{peer, frame[headBytes-lengthSize:]}
	pin(&c.pins, r.part)
	c.rests = append(c.rests, r)
}

// transfer begins the transfer of a rest.
func (c *collectives) transfer(r rest) error {
	switch {
	case c.kind == broadcast:
		return c.comm.broadcast(r.part, r.peer)
	case c.comm.rank() == 0:
		return c.comm.receive(r.part, r.peer)
	}
	return c.comm.send(r.part, r.peer)
}

// Missing returns no ranks, because MPI does not say for which rank it waits.
func (c *collectives) Missing() []topo.Rank { return nil }
