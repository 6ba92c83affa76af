// Package tcp runs collectives over the byte channels of a transport.Mesh: the backend that works between any two
// hosts. It is as well served by any other mesh.
//
// Every collective is cut into segments, and each segment is passed on as soon as it has been received and, in a
// reduction, added: while one is reduced, the transport sends those before it and receives those behind it. The streams
// carry data alone, in an order that all ranks know. Nothing is allocated once the channels are there.
//
// The algorithms, for n ranks and messages so long that latency does not count:
//
//	allreduce  ring  2(n-1) steps; each rank sends and receives 2(n-1)/n of the buffer
//	allgather  ring  n-1 steps; each rank sends all blocks but one
//	broadcast  tree  ceil(log2 n) deep; the root sends ceil(log2 n) times the buffer, the leaves nothing
package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
)

// DefaultSegmentBytes is the segment size unless a Config says otherwise.
const DefaultSegmentBytes = 256 << 10

// Config says how a Backend behaves. The zero value is the default.
type Config struct {
	// SegmentBytes is the size of a segment, rounded down to whole elements but to one at least. Larger segments cost
	// fewer calls, smaller ones stay in the processor's cache and fill the ring sooner. Ranks may differ. Default
	// 256 KiB.
	SegmentBytes int
}

// Backend is the ops.Backend of one process set on one lane, which it has to itself.
//
// Whenever a method returns, with an error too, nothing reads or writes its buffers any more. Any error ends the
// backend: later calls fail with it, and the lane of this rank is aborted, which its peers take for silence. The
// error wraps what the transport said: a *transport.PeerError names the peer that failed, which is always a direct
// one. A rank that waits for a living peer learns of a death elsewhere when its lane is aborted. When the context of
// a call ends, the error wraps context.Cause.
type Backend struct {
	mesh  transport.Mesh
	lane  transport.Lane
	ranks []topo.Rank
	me    int

	segBytes int
	scratch  []byte           // one segment, received but not yet reduced
	conns    []transport.Conn // by rank of the set, nil until needed
	ctx      watch
	err      error // what ended the backend
}

// New makes the backend of rank ranks[me] for the process set ranks, on a lane that nothing else uses. Channels are
// made when an operation first needs them, and kept.
func New(mesh transport.Mesh, lane transport.Lane, ranks []topo.Rank, me int, cfg Config) *Backend {
	b := &Backend{
		mesh: mesh, lane: lane, ranks: slices.Clone(ranks), me: me,
		segBytes: cfg.SegmentBytes,
		conns:    make([]transport.Conn, len(ranks)),
	}
	if b.segBytes <= 0 {
		b.segBytes = DefaultSegmentBytes
	}
	b.ctx.abort = func(err error) { mesh.Abort(lane, err) }
	return b
}

// ID implements ops.Backend.
func (b *Backend) ID() message.Backend { return message.TCP }

// Plan implements ops.Backend. The size makes no difference.
func (b *Backend) Plan(r *message.Response, _ int64) (message.Algorithm, error) {
	switch r.Kind {
	case message.Allreduce:
		op := r.Op
		if op == tensor.Average {
			op = tensor.Sum
		}
		if _, err := kernel.Reduce(op, r.DType); err != nil {
			return message.NoAlgorithm, err
		}
		return message.Ring, nil
	case message.Allgather:
		return message.Ring, nil
	case message.Broadcast:
		return message.Tree, nil
	}
	return message.NoAlgorithm, fmt.Errorf("no method for %v", r.Kind)
}

// Allreduce implements ops.Backend by Ring: each rank's share of the buffer is reduced on its way round the ring,
// then goes round once more (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
// workstations, 2009). Each rank sends 2(n-1)/n × len(buf) bytes in 2(n-1) steps and computes (n-1)/n × len(buf).
//
// Which ranks an element's sum begins with depends on its place in buf: sums of floating-point numbers are the same
// bits on all ranks, but not in buffers of another length.
func (b *Backend) Allreduce(ctx context.Context, alg message.Algorithm, dt tensor.DType, op tensor.ReduceOp, buf []byte) error {
	return b.run(ctx, message.Allreduce, alg, message.Ring, func() error {
		reduce, err := kernel.Reduce(op, dt)
		if err != nil {
			return err
		}
		if len(buf)%dt.Size() != 0 {
			return fmt.Errorf("got %d bytes, want whole elements of %v", len(buf), dt)
		}
		if len(b.ranks) == 1 || len(buf) == 0 {
			return nil
		}
		return b.allreduceRing(ctx, dt.Size(), reduce, buf)
	})
}

// Allgather implements ops.Backend by Ring: every block travels once round the ring. Each rank sends len(out) less
// its right neighbour's block, in n-1 steps.
func (b *Backend) Allgather(ctx context.Context, alg message.Algorithm, out []byte, counts []int64) error {
	return b.run(ctx, message.Allgather, alg, message.Ring, func() error {
		if len(counts) != len(b.ranks) {
			return fmt.Errorf("got %d counts, want one for each of %d ranks", len(counts), len(b.ranks))
		}
		rest := int64(len(out))
		for i, c := range counts {
			if c < 0 || c > rest {
				return fmt.Errorf("got %d bytes from rank %d, want 0 to %d, which are left of %d", c, b.ranks[i], rest, len(out))
			}
			rest -= c
		}
		if rest != 0 {
			return fmt.Errorf("got counts of %d bytes together, want %d", int64(len(out))-rest, len(out))
		}
		if len(b.ranks) == 1 || len(out) == 0 {
			return nil
		}
		return b.allgatherRing(ctx, out, counts)
	})
}

// Broadcast implements ops.Backend by Tree: a binomial tree of depth ceil(log2 n), in which the root sends up to
// ceil(log2 n) × len(buf) bytes and every other rank less.
func (b *Backend) Broadcast(ctx context.Context, alg message.Algorithm, root int, buf []byte) error {
	return b.run(ctx, message.Broadcast, alg, message.Tree, func() error {
		if root < 0 || root >= len(b.ranks) {
			return fmt.Errorf("got root %d, want 0 to %d", root, len(b.ranks)-1)
		}
		if len(b.ranks) == 1 || len(buf) == 0 {
			return nil
		}
		return b.broadcastTree(ctx, root, buf)
	})
}

// run is the frame of every operation.
func (b *Backend) run(ctx context.Context, kind message.Kind, alg, want message.Algorithm, op func() error) error {
	if b.err != nil {
		return fmt.Errorf("ops/tcp: %v %v: after a failure: %w", kind, alg, b.err)
	}
	err := b.ctx.begin(ctx)
	if err == nil && alg != want {
		err = fmt.Errorf("got algorithm %v, want %v", alg, want)
	}
	if err == nil {
		err = op()
	}
	if err = b.ctx.end(err); err == nil {
		return nil
	}
	b.err = fmt.Errorf("ops/tcp: %v %v: %w", kind, alg, err)
	// The streams have lost their position. Once the lane is aborted Flush no longer waits for peers, but only until
	// the channel holds no buffer; it fails with an error that adds nothing.
	b.mesh.Abort(b.lane, b.err)
	for _, c := range b.conns {
		if c != nil {
			_ = c.Flush()
		}
	}
	return b.err
}

// conn returns the channel to rank i of the set.
func (b *Backend) conn(ctx context.Context, i int) (transport.Conn, error) {
	if b.conns[i] == nil {
		c, err := b.mesh.Conn(ctx, b.lane, b.ranks[i])
		if err != nil {
			if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
				err = fmt.Errorf("%w: %w", err, cause)
			}
			return nil, err
		}
		b.conns[i] = c
	}
	return b.conns[i], nil
}

// neighbours returns the channels to the next rank of the ring, to whom all is sent, and from the one before.
func (b *Backend) neighbours(ctx context.Context) (right, left transport.Conn, err error) {
	n := len(b.ranks)
	if right, err = b.conn(ctx, (b.me+1)%n); err != nil {
		return nil, nil, err
	}
	if left, err = b.conn(ctx, (b.me+n-1)%n); err != nil {
		return nil, nil, err
	}
	return right, left, nil
}

// receive fills p from c.
func receive(c transport.Conn, p []byte) error {
	_, err := io.ReadFull(c, p)
	return err
}

// send queues p on c by segments of seg bytes.
func send(c transport.Conn, p []byte, seg int) error {
	for len(p) > 0 {
		k := min(seg, len(p))
		if err := c.Send(p[:k]); err != nil {
			return err
		}
		p = p[k:]
	}
	return nil
}
