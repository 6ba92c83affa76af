//go:build mpi

package mpi

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
)

// backend is the ops.Backend of one process set. An error ends it, because MPI does not say in which state an
// operation is after an error. Then no process set can use MPI any more.
type backend struct {
	world   *world
	comm    comm
	yielder shmem.Yielder
	err     error // the error that ended the backend, or nil

	op      ops.Operation // the operation in progress
	started bool          // whether an operation is in progress
	pins    *runtime.Pinner
	buf     []byte  // the buffer of a reduction: that of the operation, small or own
	counts  []int64 // the sizes of blocks, for MPI
	// small is the buffer of a reduction of few bytes, because it takes less time to copy them than to pin
	// and unpin their memory. own is the buffer of a larger reduction of 16-bit floats, which are float32
	// there. own stays pinned, by kept. store writes the result in small or own to the buffer of the
	// operation. It is nil if the reduction uses neither.
	small []byte
	own   []byte
	kept  *runtime.Pinner
	store kernel.ConvertFunc
	// whole is set if a reducescatter leaves the result in its place. sizes is set while the ranks exchange
	// the sizes of the blocks of an alltoall, gather or scatter.
	whole, sizes bool

	tester *tester
	begin  func() error // beginNow, made once so that no call allocates
}

// planner decides which responses MPI runs.
type planner struct{ deterministic bool }

// plan implements ops.Planner.
func (p planner) plan(_ []topo.Rank, r *message.Response, _ int64,
	_ *message.Tuning) (message.Algorithm, error) {
	if !r.Kind.MovesData() {
		return message.NoAlgorithm, fmt.Errorf("%v is not supported", r.Kind)
	}
	if !r.Kind.Reduces() {
		return message.NoAlgorithm, nil
	}
	dt, op := r.WireType(), r.Op.Base()
	switch err := tensor.CheckReduce(r.Op, dt); {
	case err != nil:
		return message.NoAlgorithm, err
	case op == tensor.Adasum:
		return message.NoAlgorithm, fmt.Errorf("%v with %v is not supported", r.Kind, op)
	case p.deterministic && dt.IsFloat() && (op == tensor.Sum || op == tensor.Product):
		return message.NoAlgorithm, errors.New(
			"MPI may add in any order, but HVD_DETERMINISTIC is set")
	}
	return message.NoAlgorithm, nil
}

// Start implements ops.Backend.
func (b *backend) Start(op ops.Operation) error {
	switch {
	case b.err != nil:
		return fmt.Errorf("ops/mpi: %v: the backend has failed before: %w", op.Kind, b.err)
	case b.started:
		return b.fail(errors.New("Start was called for another operation before this one had finished"))
	}
	b.op, b.started = op, true
	if err := b.prepare(); err != nil {
		return b.fail(err)
	}
	if err := b.world.start(b.tester, b.begin); err != nil {
		return b.fail(err)
	}
	return nil
}

// prepare sets the buffers of the operation and pins them.
func (b *backend) prepare() error {
	op := &b.op
	b.counts = append(b.counts[:0], op.Counts...)
	switch op.Kind {
	case message.Allreduce, message.Reduce:
		if n := len(op.Tensors); n != 1 {
			return fmt.Errorf("got %d tensors, want 1", n)
		}
		return b.setBuffer(op.Tensors[0].Out)
	case message.Reducescatter:
		for i := range b.counts {
			b.counts[i] /= int64(op.DType.Size())
		}
		return b.setBuffer(op.Buf)
	case message.Alltoall, message.Gather, message.Scatter:
		b.sizes = true
		pin(b.pins, op.Counts)
		b.counts = append(b.counts[:0], make([]int64, len(b.comm.ranks))...)
		pin(b.pins, b.counts)
	case message.Allgather, message.Broadcast:
	default:
		return fmt.Errorf("%v is not supported", op.Kind)
	}
	pin(b.pins, op.Buf)
	return nil
}

// setBuffer sets the buffer of a reduction of buf. Because MPI has no 16-bit floats, they are reduced as
// float32.
func (b *backend) setBuffer(buf []byte) (err error) {
	dt := b.op.DType
	n, load := len(buf), kernel.ConvertFunc(copyBytes)
	b.store = copyBytes
	if dt.IsHalf() {
		n *= 2
		if load, err = kernel.Convert(tensor.Float32, dt); err == nil {
			b.store, err = kernel.Convert(dt, tensor.Float32)
		}
		if err != nil {
			return err
		}
	}
	switch {
	case n <= len(b.small):
		b.buf = b.small[:n]
	case !dt.IsHalf():
		b.buf, b.store = buf, nil
		pin(b.pins, b.buf)
		return nil
	default:
		if n > len(b.own) {
			b.kept.Unpin()
			b.own = make([]byte, max(n, len(b.own)+len(b.own)/4))
			pin(b.kept, b.own)
		}
		b.buf = b.own[:n]
	}
	load(b.buf, buf)
	return nil
}

func copyBytes(dst, src []byte) { copy(dst, src) }

// reduced returns the element type with which MPI reduces.
func (b *backend) reduced() tensor.DType {
	if b.op.DType.IsHalf() {
		return tensor.Float32
	}
	return b.op.DType
}

// beginNow begins the next MPI operation of the operation. It is called where MPI may be called.
func (b *backend) beginNow() (err error) {
	op := &b.op
	switch op.Kind {
	case message.Allreduce:
		return b.comm.allreduce(b.buf, b.reduced(), op.Op)
	case message.Reduce:
		return b.comm.reduce(b.buf, b.reduced(), op.Op, op.Root)
	case message.Reducescatter:
		b.whole, err = b.comm.reduceScatter(b.buf, b.counts, b.reduced(), op.Op)
	case message.Allgather:
		return b.comm.allgather(op.Buf, b.counts)
	case message.Broadcast:
		return b.comm.broadcast(op.Buf, op.Root)
	case message.Alltoall, message.Gather, message.Scatter:
		if b.sizes {
			return b.comm.alltoall(op.Counts, b.counts)
		}
		return b.comm.exchange(op.Buf, op.Counts, b.buf, b.counts)
	}
	return err
}

// Step implements ops.Backend.
func (b *backend) Step(ctx context.Context, wait bool) (ops.Progress, error) {
	switch {
	case b.err != nil:
		return ops.Waiting, fmt.Errorf("ops/mpi: Step was called for a backend that has failed before: %w",
			b.err)
	case !b.started:
		return ops.Waiting, errors.New("ops/mpi: Step was called without an operation in progress")
	}
	var done bool
	var err error
	if wait {
		done, err = b.world.wait(ctx, b.tester, &b.yielder)
	} else {
		done, err = b.world.test(b.tester)
	}
	switch {
	case err != nil:
		return ops.Waiting, b.fail(err)
	case !done:
		return ops.Waiting, nil
	case b.sizes:
		if err := b.receive(); err != nil {
			return ops.Waiting, b.fail(err)
		}
		return ops.Moving, nil
	}
	b.finish()
	return ops.Finished, nil
}

// receive begins the exchange of the blocks of an alltoall, whose sizes this rank has received.
func (b *backend) receive() (err error) {
	b.sizes = false
	if b.buf, err = b.op.Allocate(b.counts); err != nil {
		return err
	}
	pin(b.pins, b.buf)
	return b.world.start(b.tester, b.begin)
}

// finish ends an operation that MPI has completed.
func (b *backend) finish() {
	op := &b.op
	switch {
	case op.Kind == message.Reducescatter:
		b.place()
	case op.Kind.Reduces() && b.store != nil:
		b.store(op.Tensors[0].Out, b.buf)
	}
	b.pins.Unpin()
	b.op, b.started, b.buf = ops.Operation{}, false, nil
}

// place moves the result of a reducescatter to this rank's block.
func (b *backend) place() {
	size := int64(b.reduced().Size())
	var before int64
	for _, n := range b.counts[:b.comm.rank()] {
		before += n
	}
	n := b.counts[b.comm.rank()]
	result := b.buf
	if b.whole {
		result = b.buf[before*size:]
	}
	own := b.op.Buf[before*int64(b.op.DType.Size()):][:n*int64(b.op.DType.Size())]
	if result = result[:n*size]; b.store != nil {
		b.store(own, result)
	} else {
		copy(own, result)
	}
}

// fail ends the backend because the current operation has failed with err. It returns err with the kind of
// the operation, for the caller.
func (b *backend) fail(err error) error {
	b.err = fmt.Errorf("ops/mpi: %v: %w", b.op.Kind, err)
	b.world.abandon(b.err, b.pins, b.kept)
	return b.err
}

// Close implements ops.Backend.
func (b *backend) Close() {
	if b.err != nil || b.started {
		return
	}
	b.err = errors.New("the backend was closed")
	b.kept.Unpin()
	b.world.change(b.comm.set, b.comm.free)
}
