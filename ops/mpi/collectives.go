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
//	AndOr      MPI_Iallreduce with MPI_BAND and MPI_BOR
//	Gather     MPI_Igather of the heads, then MPI_Isend of the rests to rank 0
//	Broadcast  MPI_Ibcast of the head, then MPI_Ibcast of the rest
type collectives struct {
	world  *world
	comm   comm
	tester *tester
	pins   runtime.Pinner

	begin   func() error // begins the operation in the fields below; made once so that no call allocates
	kind    collective
	and, or []uint64
	head    []byte // the head of this rank, or that of rank 0 in a broadcast
	heads   []byte // the gathered heads, at rank 0
	frame   []byte // the frame of this rank, or that of rank 0 in a broadcast
	frames  [][]byte
	resting bool // whether the rests are in transfer
	err     error
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

// Collectives implements World.
func (w *world) Collectives() Collectives {
	c := &collectives{world: w, comm: w.comm, tester: newTester(w.comm), head: make([]byte, headBytes),
		heads: make([]byte, headBytes*w.Size()), frames: make([][]byte, w.Size())}
	c.begin = c.beginNow
	return c
}

// AndOr implements Collectives.
func (c *collectives) AndOr(and, or []uint64) {
	c.kind, c.and, c.or = andOr, and, or
	pin(&c.pins, and)
	pin(&c.pins, or)
	c.start()
}

// Gather implements Collectives.
func (c *collectives) Gather(frame []byte) {
	c.kind, c.frame = gather, frame
	c.writeHead()
	pin(&c.pins, c.heads)
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
	pin(&c.pins, c.head)
}

func (c *collectives) start() {
	c.resting, c.tester.done = false, false
	c.err = c.world.do(c.begin)
}

// beginNow begins the operation. It is called where MPI may be called.
func (c *collectives) beginNow() error {
	switch c.kind {
	case andOr:
		return c.comm.andOr(c.and, c.or)
	case gather:
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
	if c.err == nil && !c.resting {
		if c.err = c.world.do(c.rest); c.resting {
			return c.Test()
		}
	}
	if c.err != nil {
		// The memory stays pinned, because MPI may still refer to it.
		c.world.spoil(c.err)
		return nil, false, fmt.Errorf("ops/mpi: negotiation: %w", c.err)
	}
	c.pins.Unpin()
	switch {
	case c.kind == broadcast:
		c.frames[0] = c.frame
		return c.frames[:1], true, nil
	case c.kind == gather && c.comm.rank() == 0:
		return c.frames, true, nil
	}
	return nil, true, nil
}

// rest begins the transfer of the rests of frames, if there are any, and sets resting. It is called where MPI
// may be called.
func (c *collectives) rest() (err error) {
	switch {
	case c.kind == broadcast:
		err = c.restOf(c.head, 0, func(rest []byte, _ int) error { return c.comm.broadcast(rest, 0) })
		c.frame = c.frames[0]
	case c.kind == gather && c.comm.rank() == 0:
		for r := range c.frames {
			err = errors.Join(err, c.restOf(c.heads[r*headBytes:][:headBytes], r, c.comm.receive))
		}
	case c.kind == gather && len(c.frame) > headBytes-lengthSize:
		err = c.transfer(c.frame[headBytes-lengthSize:], 0, c.comm.send)
	}
	return err
}

// restOf sets the frame of a rank from its head, and transfers the rest. The frame of this rank is complete.
func (c *collectives) restOf(head []byte, from int, transfer func([]byte, int) error) error {
	n := binary.LittleEndian.Uint32(head)
	if n > frameBytes {
		return &transport.PeerError{Peer: topo.Rank(from), Lane: transport.Control,
			Err: fmt.Errorf("got a frame of %d bytes, want at most %d", n, frameBytes)}
	}
	if c.frames[from] = c.frame; from != c.comm.rank() {
		c.frames[from] = append(make([]byte, 0, n), head[lengthSize:min(lengthSize+int(n), headBytes)]...)[:n]
	}
	if own := from == c.comm.rank(); n > headBytes-lengthSize && (!own || c.kind == broadcast) {
		return c.transfer(c.frames[from][headBytes-lengthSize:], from, transfer)
	}
	return nil
}

// transfer begins a transfer with another rank.
func (c *collectives) transfer(rest []byte, peer int, begin func([]byte, int) error) error {
	pin(&c.pins, rest)
	c.resting, c.tester.done = true, false
	return begin(rest, peer)
}

// Missing returns no ranks, because MPI does not say for which rank it waits.
func (c *collectives) Missing() []topo.Rank { return nil }
