// Package message defines the frames that ranks exchange while they negotiate, and their encoding.
//
// Ranks send Up frames to the coordinator, and the coordinator sends Down frames to ranks
// (docs/negotiation.md, Frames). Frames have a fixed binary layout, in which votes for cached tensors are bit
// vectors, and requests and responses are embedded protobuf messages. A decoder checks every length against
// the number of received bytes before it allocates memory.
package message

import (
	"fmt"
	"math"
	"slices"

	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// Request is one rank's request to run an operation on a named tensor. The requesting rank is the sender of
// the frame.
type Request struct {
	Kind  Kind
	Name  string
	DType tensor.DType
	Shape tensor.Shape // empty in a scatter, except at the root
	// Device is the memory in which this rank's tensor is. In a Join it is where the rank keeps the neutral
	// elements that it contributes to operations on CUDA devices.
	Device tensor.Device
	// Op, Prescale and Postscale are used by kinds that reduce.
	Op                  tensor.ReduceOp
	Prescale, Postscale float64
	// Wire is the element type to which an allreduce is compressed for transfer. It is Invalid if the
	// allreduce is not compressed.
	Wire tensor.DType
	// Root is used by kinds that have a root. It is a rank of the job, not a position in the process set.
	Root topo.Rank
	// Group is the name of a group of GroupSize tensors that are granted together. If the tensor has no
	// group, Group is "" and GroupSize is 0.
	Group     string
	GroupSize int32
	// Parts has the tensors of a group that is one allreduce request. For other requests it is nil. If Parts
	// is set, Shape is the total number of elements, and DType is the common element type, or Invalid if
	// there are several types.
	Parts Parts
	// Empty is used in a Join. It says that the rank contributes no rows to operations that otherwise fail
	// for joined ranks.
	Empty bool
	// Ranks are the members of a process set to add, in ascending order.
	Ranks []topo.Rank
	// MembersOnly is set if only the ranks in Ranks take part in adding the process set.
	MembersOnly bool
	// Set is the process set to remove.
	Set topo.ProcessSetID
	// Bit is a guess of the cache bit of the name. A wrong guess only makes the lookup slower. Bit is not
	// sent.
	Bit uint32
	// Hit is the cached response that matches the request, or nil. It is not sent.
	Hit *Response
}

// Equal reports whether q and o are sent as the same bytes.
func (q *Request) Equal(o *Request) bool {
	return q.Kind == o.Kind && q.Name == o.Name && q.DType == o.DType && q.Shape.Equal(o.Shape) &&
		q.Device == o.Device && q.Op == o.Op && q.Prescale == o.Prescale && q.Postscale == o.Postscale &&
		q.Wire == o.Wire && q.Root == o.Root && q.Group == o.Group && q.GroupSize == o.GroupSize &&
		q.Parts.Equal(o.Parts) && q.Empty == o.Empty && slices.Equal(q.Ranks, o.Ranks) &&
		q.MembersOnly == o.MembersOnly && q.Set == o.Set
}

// Response is what the members of a process set have agreed to do with one tensor. It is immutable. It
// contains nothing that is specific to one rank, so that the caches of all ranks are equal.
type Response struct {
	Kind  Kind
	Name  string
	DType tensor.DType
	// Shape is the shape of the tensor, which is the same at every rank except possibly in the first
	// dimension. If the first dimension may differ between ranks, it is 0 in Shape. For an allgather,
	// FirstDims has the first dimensions of all members, in the order of the set. For kinds that send rows,
	// the ranks learn the first dimensions when they execute the operation. For a scatter, Shape is the shape
	// of the root's tensor.
	Shape     tensor.Shape
	FirstDims []int64
	// Devices has the CUDA devices of all members, in the order of the set. The entry of a member that has
	// joined is that of its join, or tensor.Host. Devices is nil if the tensor is in host memory, which is
	// then so at every rank.
	Devices             []tensor.Device
	Op                  tensor.ReduceOp
	Prescale, Postscale float64
	Wire                tensor.DType
	// Root is used by kinds that have a root. For a join, it is the rank that joined last.
	Root      topo.Rank
	Group     string
	GroupSize int32
	Parts     Parts
	// Ranks are the members of a process set that was added. An Error in place of a process set that only
	// its members add has the ranks that asked for it.
	Ranks []topo.Rank
	// Set is the process set that was added or is to be removed.
	Set topo.ProcessSetID
	// Text is the reason for an Error.
	Text string
}

// Request returns the request that member i of the process set must have submitted to get this response. For
// kinds that send rows, the first dimension is unknown, so it is 0 in the result. For a scatter, the shape
// counts only if the member is the root.
func (r *Response) Request(i int) Request {
	q := r.request()
	if r.Kind == Allgather {
		q.Shape = slices.Clone(r.Shape)
		q.Shape[0] = r.FirstDims[i]
	}
	q.Device = r.device(i)
	return q
}

// device returns the memory in which member i of the process set has its tensor.
func (r *Response) device(i int) tensor.Device {
	if r.Devices == nil {
		return tensor.Host
	}
	return r.Devices[i]
}

func (r *Response) request() Request {
	return Request{
		Kind: r.Kind, Name: r.Name, DType: r.DType, Shape: r.Shape,
		Op: r.Op, Prescale: r.Prescale, Postscale: r.Postscale, Wire: r.Wire, Root: r.Root,
		Group: r.Group, GroupSize: r.GroupSize, Parts: r.Parts, Ranks: r.Ranks, Set: r.Set,
	}
}

// Matches reports whether q, a request of member i of the process set, is equal to the request that r has
// answered. It compares the same fields as the coordinator, which depend on the kind. It allocates nothing.
func (r *Response) Matches(q *Request, i int) bool {
	if r.Kind != q.Kind || r.Group != q.Group || r.GroupSize != q.GroupSize || !r.Parts.Equal(q.Parts) {
		return false
	}
	switch r.Kind {
	case AddProcessSet:
		return slices.Equal(r.Ranks, q.Ranks)
	case RemoveProcessSet:
		return r.Set == q.Set
	case Barrier, Join:
		return true
	}
	return r.DType == q.DType && r.matchesShape(q.Shape, i) && r.device(i) == q.Device &&
		(!r.Kind.Reduces() || r.Op == q.Op && r.Prescale == q.Prescale && r.Postscale == q.Postscale) &&
		(r.Kind != Allreduce || r.Wire == q.Wire) &&
		(!r.Kind.HasRoot() || r.Root == q.Root)
}

func (r *Response) matchesShape(s tensor.Shape, i int) bool {
	if r.Kind == Scatter && len(s) == 0 {
		return true // only the root has a shape, which is not a scalar: that is refused at submission
	}
	if len(r.Shape) != len(s) {
		return false
	}
	for d := range r.Shape {
		if d == 0 && r.Kind.Ragged() {
			if r.Kind == Allgather && s[0] != r.FirstDims[i] {
				return false
			}
			continue
		}
		if s[d] != r.Shape[d] {
			return false
		}
	}
	return true
}

// NumElems returns the number of elements of the result. For an allgather or a reducescatter, it counts the
// elements of all ranks together. For kinds that send rows the number is unknown, and NumElems returns 0.
func (r *Response) NumElems() (int64, error) {
	if r.Kind != Allgather {
		return r.Shape.NumElems()
	}
	var rows int64
	for _, n := range r.FirstDims {
		if n < 0 || rows > math.MaxInt64-n {
			return 0, fmt.Errorf(
				"message: allgather %q: got first dimensions %v: a dimension is negative, or the sum is too large",
				r.Name, r.FirstDims)
		}
		rows += n
	}
	row, err := r.RowElems()
	if err != nil {
		return 0, err
	}
	if row > 0 && rows > math.MaxInt64/int64(r.DType.Size())/row {
		return 0, fmt.Errorf("message: allgather %q: %d rows of %d elements have more than 2^63-1 bytes",
			r.Name, rows, row)
	}
	return rows * row, nil
}

// RowElems returns the number of elements of a row. A row is all elements at one index of the first
// dimension.
func (r *Response) RowElems() (int64, error) {
	if len(r.Shape) == 0 {
		return 1, nil
	}
	return r.Shape[1:].NumElems()
}

// NumBytes returns the size of the result in bytes. The decoder must have checked the response.
func (r *Response) NumBytes() int64 {
	if r.hasSeveralTypes() {
		return r.Parts.numBytes(tensor.Invalid)
	}
	n, err := r.NumElems()
	if err != nil {
		return 0
	}
	return n * int64(r.DType.Size())
}

// WireBytes returns the size of the result in bytes if its elements have the type WireType. The result has
// this size in the fusion buffer. The decoder must have checked the response.
func (r *Response) WireBytes() int64 {
	if r.hasSeveralTypes() {
		return r.Parts.numBytes(r.Wire)
	}
	n, err := r.NumElems()
	if err != nil {
		return 0
	}
	return n * int64(r.WireType().Size())
}

// hasSeveralTypes reports whether the response is a group with several element types.
func (r *Response) hasSeveralTypes() bool { return len(r.Parts) > 0 && !r.DType.Valid() }

// WireType returns the element type in which the tensor is sent.
func (r *Response) WireType() tensor.DType {
	if r.Wire.Valid() {
		return r.Wire
	}
	return r.DType
}
