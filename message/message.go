// Package message holds what ranks say to each other while they negotiate, and its encoding.
//
// A rank sends Up frames to the coordinator, the coordinator sends Down frames to ranks (NEGOTIATION §2).
// Votes for cached tensors are bit vectors in a fixed binary layout; requests and responses are protobuf
// messages inside it. Decoders bound every length by the bytes that are there before they allocate.
package message

import (
	"fmt"
	"math"

	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/topo"
)

// Kind is what is to be done with a tensor.
type Kind uint8

// The kinds of operation. Error is a kind of response only: the ranks did not agree.
const (
	NoKind Kind = iota
	Allreduce
	Allgather
	Broadcast
	Barrier
	Error
	numKinds
)

var kinds = [numKinds]string{"none", "allreduce", "allgather", "broadcast", "barrier", "error"}

// Valid reports whether k is a kind that a request may have.
func (k Kind) Valid() bool { return k > NoKind && k < Error }

func (k Kind) String() string {
	if k >= numKinds {
		return fmt.Sprintf("Kind(%d)", uint8(k))
	}
	return kinds[k]
}

// Backend names who moves the bytes of a granted response.
type Backend uint8

// The backends. NoBackend is for responses that move nothing: barriers and errors.
const (
	NoBackend Backend = iota
	TCP
	numBackends
)

var backends = [numBackends]string{"none", "tcp"}

func (b Backend) String() string {
	if b >= numBackends {
		return fmt.Sprintf("Backend(%d)", uint8(b))
	}
	return backends[b]
}

// Algorithm is how a backend moves them.
type Algorithm uint8

// The algorithms.
const (
	NoAlgorithm Algorithm = iota
	Ring
	Tree
	numAlgorithms
)

var algorithms = [numAlgorithms]string{"none", "ring", "tree"}

func (a Algorithm) String() string {
	if a >= numAlgorithms {
		return fmt.Sprintf("Algorithm(%d)", uint8(a))
	}
	return algorithms[a]
}

// Request is one rank's wish to run an operation on a named tensor. Its rank is the sender's.
type Request struct {
	Kind  Kind
	Name  string
	DType tensor.DType
	Shape tensor.Shape
	// Op, Prescale and Postscale are for allreduce.
	Op                  tensor.ReduceOp
	Prescale, Postscale float64
	// Root is for broadcast.
	Root topo.Rank
}

// Response is what the members of a process set have agreed to do with one tensor. It is immutable once
// built and holds nothing that is true of one rank only, so the caches of all ranks are equal.
type Response struct {
	Kind  Kind
	Name  string
	DType tensor.DType
	// Shape is each rank's shape. For allgather its first dimension is 0 and FirstDims has that of every
	// member, in the order of the set.
	Shape               tensor.Shape
	FirstDims           []int64
	Op                  tensor.ReduceOp
	Prescale, Postscale float64
	Root                topo.Rank
	// Text is the reason of an Error.
	Text string
}

// Request is what member i of the process set must have submitted for this response.
func (r *Response) Request(i int) Request {
	q := Request{
		Kind: r.Kind, Name: r.Name, DType: r.DType, Shape: r.Shape,
		Op: r.Op, Prescale: r.Prescale, Postscale: r.Postscale, Root: r.Root,
	}
	if r.Kind == Allgather {
		q.Shape = append(tensor.Shape(nil), r.Shape...)
		q.Shape[0] = r.FirstDims[i]
	}
	return q
}

// Matches reports whether q, submitted by member i of the process set, is a repetition of what r
// answered. It allocates nothing.
func (r *Response) Matches(q *Request, i int) bool {
	if r.Kind != q.Kind || r.DType != q.DType || r.Op != q.Op || r.Prescale != q.Prescale ||
		r.Postscale != q.Postscale || r.Root != q.Root || len(r.Shape) != len(q.Shape) {
		return false
	}
	for d := range r.Shape {
		want := r.Shape[d]
		if d == 0 && r.Kind == Allgather {
			want = r.FirstDims[i]
		}
		if q.Shape[d] != want {
			return false
		}
	}
	return true
}

// NumElems is the number of elements of the result: for allgather those of all ranks together.
func (r *Response) NumElems() (int64, error) {
	if r.Kind != Allgather {
		return r.Shape.NumElems()
	}
	var rows int64
	for _, n := range r.FirstDims {
		if n < 0 || rows > math.MaxInt64-n {
			return 0, fmt.Errorf("message: allgather %q: first dimensions %v have no sum", r.Name, r.FirstDims)
		}
		rows += n
	}
	row, err := r.RowElems()
	if err != nil {
		return 0, err
	}
	if row > 0 && rows > math.MaxInt64/int64(r.DType.Size())/row {
		return 0, fmt.Errorf("message: allgather %q: %d rows of %d elements have more than 2^63-1 bytes", r.Name, rows, row)
	}
	return rows * row, nil
}

// RowElems is the number of elements under one index of the first dimension.
func (r *Response) RowElems() (int64, error) {
	if len(r.Shape) == 0 {
		return 1, nil
	}
	return r.Shape[1:].NumElems()
}

// NumBytes is the size of the result. The response must be sound, as the coordinator's are.
func (r *Response) NumBytes() int64 {
	n, err := r.NumElems()
	if err != nil {
		return 0
	}
	return n * int64(r.DType.Size())
}
