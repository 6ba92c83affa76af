package testcluster

import (
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Op is one rank's part of an operation. The functions below make Ops. The fields of an Op may be changed
// until it is submitted. An Op may be submitted only once.
type Op struct {
	// Entry is passed to the engine. If Output is nil, Submit allocates the output. If the operation is an
	// alltoall and Splits is nil, Submit sends every member the same number of rows. Submit sets Done and
	// Allocate.
	tensorqueue.Entry
	// Err is the error of the operation, or nil. It is valid after Wait.
	Err error

	done chan struct{}
}

func newOp(kind message.Kind, name string, dt tensor.DType, shape tensor.Shape, input []byte) *Op {
	return &Op{
		Entry: tensorqueue.Entry{
			Request: message.Request{Kind: kind, Name: name, DType: dt, Shape: shape, Prescale: 1,
				Postscale: 1},
			Input: input,
		},
		done: make(chan struct{}),
	}
}

// Allreduce returns an Op that reduces input with op.
func Allreduce(name string, dt tensor.DType, shape tensor.Shape, op tensor.ReduceOp, input []byte) *Op {
	o := newOp(message.Allreduce, name, dt, shape, input)
	o.Request.Op = op
	return o
}

// Reducescatter returns an Op that reduces input with op and distributes the rows of the result over the
// ranks.
func Reducescatter(name string, dt tensor.DType, shape tensor.Shape, op tensor.ReduceOp, input []byte) *Op {
	o := newOp(message.Reducescatter, name, dt, shape, input)
	o.Request.Op = op
	return o
}

// Reduce returns an Op that reduces input with op. Only root gets the result.
func Reduce(name string, dt tensor.DType, shape tensor.Shape, op tensor.ReduceOp, root topo.Rank,
	input []byte) *Op {
	o := newOp(message.Reduce, name, dt, shape, input)
	o.Request.Op, o.Request.Root = op, root
	return o
}

// Allgather returns an Op that concatenates the inputs of all ranks.
func Allgather(name string, dt tensor.DType, shape tensor.Shape, input []byte) *Op {
	return newOp(message.Allgather, name, dt, shape, input)
}

// Broadcast returns an Op that copies the input of root to all ranks.
func Broadcast(name string, dt tensor.DType, shape tensor.Shape, root topo.Rank, input []byte) *Op {
	o := newOp(message.Broadcast, name, dt, shape, input)
	o.Request.Root = root
	return o
}

// Alltoall returns an Op that sends splits[i] rows of input to member i.
func Alltoall(name string, dt tensor.DType, shape tensor.Shape, splits []int64, input []byte) *Op {
	o := newOp(message.Alltoall, name, dt, shape, input)
	o.Splits = splits
	return o
}

// Gather returns an Op that concatenates the inputs of all ranks at root.
func Gather(name string, dt tensor.DType, shape tensor.Shape, root topo.Rank, input []byte) *Op {
	o := newOp(message.Gather, name, dt, shape, input)
	o.Request.Root = root
	return o
}

// Scatter returns an Op that sends splits[i] rows of the input of root to member i. At ranks other than root,
// shape, splits and input are nil.
func Scatter(name string, dt tensor.DType, shape tensor.Shape, splits []int64, root topo.Rank,
	input []byte) *Op {
	o := newOp(message.Scatter, name, dt, shape, input)
	o.Splits, o.Request.Root = splits, root
	return o
}

// Barrier returns an Op that completes when all ranks have started it.
func Barrier(name string) *Op { return newOp(message.Barrier, name, tensor.Invalid, nil, nil) }

// Join returns an Op with which this rank joins: it has nothing more to submit. When the Op has completed,
// Last returns the rank that joined last.
func Join(name string) *Op { return newOp(message.Join, name, tensor.Invalid, nil, nil) }

// AddSet returns an Op that adds a process set with the given ranks, which must be in ascending order. When
// the Op has completed, its Response.Set is the ID of the new process set.
func AddSet(ranks ...topo.Rank) *Op {
	o := newOp(message.AddProcessSet, "process_set.add", tensor.Invalid, nil, nil)
	o.Request.Ranks = ranks
	return o
}

// RemoveSet returns an Op that removes the process set with the given ID.
func RemoveSet(set topo.ProcessSetID) *Op {
	o := newOp(message.RemoveProcessSet, "process_set.remove", tensor.Invalid, nil, nil)
	o.Request.Set = set
	return o
}

// Over sets the process set of all ops, and returns the last op.
func Over(set topo.ProcessSetID, ops ...*Op) *Op {
	for _, op := range ops {
		op.Set = set
	}
	return ops[len(ops)-1]
}

// Group makes a group of ops. The ops must be submitted together.
func Group(name string, ops ...*Op) {
	for _, op := range ops {
		op.Request.Group, op.Request.GroupSize = name, int32(len(ops))
	}
}

// InPlace makes op store its result in the memory of its input, and returns op. r is the rank that will
// submit op.
//
// In an allgather, InPlace moves the input into a larger buffer, which has room for the same number of rows
// from each rank. In a reducescatter, the result becomes a part of the input. In both cases Output is the
// memory of the result.
func (op *Op) InPlace(r *Rank) *Op {
	if kind := op.Request.Kind; kind == message.Gather || kind == message.Scatter {
		return op // these have no form in place
	}
	op.Entry.InPlace = true
	switch members := r.Members(op.Set); op.Request.Kind {
	case message.Allgather:
		n := len(op.Input)
		op.Output = make([]byte, n*len(members))
		mine := op.Output[slices.Index(members, r.Rank)*n:][:n]
		copy(mine, op.Input)
		op.Input = mine
	case message.Reducescatter:
		op.Output = op.part(r)
	case message.Reduce:
		if op.Request.Root == r.Rank {
			op.Output = op.Input
		}
	default:
		op.Output = op.Input
	}
	return op
}

// part returns the rows of a reducescatter's input in which r gets its part of the result.
func (op *Op) part(r *Rank) []byte {
	shape := op.Request.Shape
	if len(shape) == 0 || shape[0] == 0 {
		return nil
	}
	members := r.Members(op.Set)
	first, rows := tensor.Rows(shape[0], len(members), slices.Index(members, r.Rank))
	row := int64(len(op.Input)) / shape[0]
	return op.Input[first*row : (first+rows)*row]
}

// prepare sets the fields of op that the engine of r needs.
func (op *Op) prepare(r *Rank) error {
	members := r.Members(op.Set)
	if members == nil {
		return fmt.Errorf("%v %q: rank %d does not know process set %d", op.Request.Kind, op.Request.Name,
			r.Rank, op.Set)
	}
	if !slices.Contains(members, r.Rank) {
		return fmt.Errorf("%v %q: rank %d is not in process set %d", op.Request.Kind, op.Request.Name, r.Rank,
			op.Set)
	}
	op.Done = func(err error) {
		op.Err = err
		if err == nil {
			r.changeSets(op.Response)
		}
		close(op.done)
	}
	if op.Request.Kind == message.Alltoall && op.Splits == nil {
		if err := op.splitEvenly(len(members)); err != nil {
			return err
		}
	}
	if op.Request.Kind == message.Gather {
		op.Splits = make([]int64, len(members))
		if i := slices.Index(members, op.Request.Root); i >= 0 && len(op.Request.Shape) > 0 {
			op.Splits[i] = op.Request.Shape[0]
		}
	}
	if op.Output != nil {
		return nil
	}
	switch op.Request.Kind {
	case message.Allreduce, message.Broadcast:
		op.Output = make([]byte, len(op.Input))
	case message.Reduce:
		if op.Request.Root == r.Rank {
			op.Output = make([]byte, len(op.Input))
		}
	case message.Reducescatter:
		op.Output = make([]byte, len(op.part(r)))
	case message.Allgather, message.Alltoall, message.Gather, message.Scatter:
		op.Allocate = func(numBytes int) []byte { return make([]byte, numBytes) }
	}
	return nil
}

// splitEvenly sets Splits so that each of the n members gets the same number of rows.
func (op *Op) splitEvenly(n int) error {
	shape := op.Request.Shape
	if len(shape) == 0 || shape[0]%int64(n) != 0 {
		return fmt.Errorf("%v %q: got shape %v, want a first dimension that is a multiple of %d, the number of ranks", op.Request.Kind, op.Request.Name, shape, n)
	}
	op.Splits = slices.Repeat([]int64{shape[0] / int64(n)}, n)
	return nil
}

// Last returns the rank that joined last. op must be a Join that has completed.
func (op *Op) Last() topo.Rank { return op.Response.Root }
