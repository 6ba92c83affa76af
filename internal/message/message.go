// Package message has the frames that ranks exchange while they negotiate, and their encoding.
//
// A rank sends Up frames to the coordinator, the coordinator sends Down frames to ranks (docs/negotiation.md,
// Frames). Votes for cached tensors are bit vectors in a fixed binary layout; requests and responses are
// protobuf messages inside it. Decoders bound every length by the bytes that are there before they allocate.
package message

import (
	"fmt"
	"math"
	"slices"

	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// Request is one rank's request to run an operation on a named tensor. Its rank is the sender's.
type Request struct {
	Kind  Kind
	Name  string
	DType tensor.DType
	Shape tensor.Shape
	// Op, Prescale and Postscale are for kinds that reduce.
	Op                  tensor.ReduceOp
	Prescale, Postscale float64
	// Wire is the type to which an allreduce is compressed for transfer, or Invalid.
	Wire tensor.DType
	// Root is for broadcast: a rank of the job, not a position in the set.
	Root topo.Rank
	// Group is the name of a group of GroupSize tensors that are granted together. A tensor without a group
	// has "" and 0.
	Group     string
	GroupSize int32
	// Parts are the tensors of a group whose allreduce is one request, else nil. Shape is then the total
	// number of elements, and DType is their type, or Invalid if the group has several types.
	Parts Parts
	// Empty is for Join: the rank contributes no rows to operations that are otherwise an error for joined
	// ranks.
	Empty bool
	// Ranks are the members of a process set to add, ascending.
	Ranks []topo.Rank
	// Set is the process set to remove.
	Set topo.ProcessSetID
	// Bit is a guess of the name's bit in the response cache, and is not sent. A wrong guess only costs time.
	Bit uint32
	// Hit is the cached response that the request matches, or nil. It is not sent.
	Hit *Response
}

// Response is what the members of a process set have agreed to do with one tensor. It is immutable once built
// and contains nothing that holds for one rank only, so the caches of all ranks are equal.
type Response struct {
	Kind  Kind
	Name  string
	DType tensor.DType
	// Shape is the shape at every rank. If the first dimensions may differ between ranks, the first dimension
	// of Shape is 0. FirstDims has those of an allgather, in the order of the set. The ranks exchange those
	// of an alltoall when they execute it.
	Shape               tensor.Shape
	FirstDims           []int64
	Op                  tensor.ReduceOp
	Prescale, Postscale float64
	Wire                tensor.DType
	// Root is the root of a broadcast. For a join it is the rank that joined last.
	Root      topo.Rank
	Group     string
	GroupSize int32
	Parts     Parts
	Ranks     []topo.Rank
	// Set is the process set that was added, or is removed.
	Set topo.ProcessSetID
	// Text is the reason of an Error.
	Text string
}

// Request returns what member i of the process set must have submitted for this response. For alltoall the
// first dimension is unknown, and 0 in the result.
func (r *Response) Request(i int) Request {
	q := r.request()
	if r.Kind == Allgather {
		q.Shape = slices.Clone(r.Shape)
		q.Shape[0] = r.FirstDims[i]
	}
	return q
}

func (r *Response) request() Request {
	return Request{
		Kind: r.Kind, Name: r.Name, DType: r.DType, Shape: r.Shape,
		Op: r.Op, Prescale: r.Prescale, Postscale: r.Postscale, Wire: r.Wire, Root: r.Root,
		Group: r.Group, GroupSize: r.GroupSize, Parts: r.Parts, Ranks: r.Ranks, Set: r.Set,
	}
}

// Matches reports whether q, submitted by member i of the process set, repeats what r answered. It compares
// what matters to the kind, as the coordinator does, and allocates nothing.
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
	return r.DType == q.DType && r.matchesShape(q.Shape, i) &&
		(!r.Kind.Reduces() || r.Op == q.Op && r.Prescale == q.Prescale && r.Postscale == q.Postscale) &&
		(r.Kind != Allreduce || r.Wire == q.Wire) &&
		(r.Kind != Broadcast || r.Root == q.Root)
}

func (r *Response) matchesShape(s tensor.Shape, i int) bool {
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

// NumElems returns the number of elements of the result: for allgather and reducescatter of all ranks
// together, for alltoall 0, because the number is unknown.
func (r *Response) NumElems() (int64, error) {
	if r.Kind != Allgather {
		return r.Shape.NumElems()
	}
	var rows int64
	for _, n := range r.FirstDims {
		if n < 0 || rows > math.MaxInt64-n {
			return 0, fmt.Errorf(
				"message: allgather %q: first dimensions %v: one is negative, or their sum is too large",
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

// RowElems returns the number of elements under one index of the first dimension.
func (r *Response) RowElems() (int64, error) {
	if len(r.Shape) == 0 {
		return 1, nil
	}
	return r.Shape[1:].NumElems()
}

// NumBytes returns the size of the result. The response must have passed the check of the decoder.
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

// WireBytes returns the size of the result in elements of WireType, which is its size in the fusion buffer.
// The response must have passed the check of the decoder.
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

// WireType returns the element type that is sent.
func (r *Response) WireType() tensor.DType {
	if r.Wire.Valid() {
		return r.Wire
	}
	return r.DType
}
