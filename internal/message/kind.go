package message

import (
	"fmt"
	"slices"
)

// Kind is the kind of an operation.
type Kind uint8

// These are the kinds of operations. Only a response can have the kind Error, which says that the ranks did
// not agree.
const (
	NoKind Kind = iota
	Allreduce
	Allgather
	Broadcast
	Alltoall
	Reducescatter
	Barrier
	// Join says that a rank has no more tensors for a process set. It is answered when all members of the set
	// have joined.
	Join
	// AddProcessSet and RemoveProcessSet are operations of all ranks on the global set.
	AddProcessSet
	RemoveProcessSet
	Reduce
	Gather
	Scatter
	Error
	// Send and Recv are operations of two ranks. They are not negotiated, so no request has these kinds.
	// Clients of a sidecar know their numbers (docs/sidecar.md), so they stay after Error.
	Send
	Recv
	// Push, Pull and PushPull are operations of nodes of a parameter server.
	Push
	Pull
	PushPull
	numKinds
)

// NumKinds is the number of kinds, including NoKind. NumBackends is the number of backends, including
// NoBackend. Each constant is greater than all values of its type.
const (
	NumKinds    = int(numKinds)
	NumBackends = int(numBackends)
)

var kinds = [numKinds]string{
	"none", "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join",
	"add process set", "remove process set", "reduce", "gather", "scatter", "error", "send", "recv",
	"push", "pull", "pushpull",
}

// Valid reports whether a request may have the kind k.
func (k Kind) Valid() bool { return k > NoKind && k < Error }

// MovesData reports whether operations of kind k exchange tensors. Operations of other kinds are finished
// when they are granted.
func (k Kind) MovesData() bool {
	return k >= Allreduce && k <= Reducescatter || k >= Reduce && k <= Scatter
}

// IsMessage reports whether operations of kind k move a tensor from one rank to another, without negotiation.
func (k Kind) IsMessage() bool { return k == Send || k == Recv }

// IsRequest reports whether operations of kind k are those of a parameter server.
func (k Kind) IsRequest() bool { return k >= Push && k <= PushPull }

// Reduces reports whether operations of kind k combine elements. Only such operations have a reduction and
// scale factors.
func (k Kind) Reduces() bool { return k == Allreduce || k == Reducescatter || k == Reduce }

// HasRoot reports whether one rank, the root, sends or receives more than the other ranks in operations of
// kind k.
func (k Kind) HasRoot() bool { return k == Broadcast || k >= Reduce && k <= Scatter }

// SendsRows reports whether operations of kind k send rows from rank to rank. Each rank knows how many rows
// it sends to which rank, and learns during the operation how many rows it receives.
func (k Kind) SendsRows() bool { return k == Alltoall || k == Gather || k == Scatter }

// Ragged reports whether the first dimension of a tensor may differ between ranks in operations of kind k.
func (k Kind) Ragged() bool { return k == Allgather || k.SendsRows() }

func (k Kind) String() string {
	if k >= numKinds {
		return fmt.Sprintf("Kind(%d)", uint8(k))
	}
	return kinds[k]
}

// MarshalText implements encoding.TextMarshaler.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (k *Kind) UnmarshalText(text []byte) error { return unmarshal(k, "kind", kinds[:], text) }

// unmarshal sets value to the index of text in a list of names. what says what the names are.
func unmarshal[T ~uint8](value *T, what string, names []string, text []byte) error {
	i := slices.Index(names, string(text))
	if i < 0 {
		return fmt.Errorf("got the %s %.64q, want one of %q", what, text, names)
	}
	*value = T(i)
	return nil
}

// Backend identifies the component that moves the bytes of an operation.
type Backend uint8

// These are the backends. Responses that move no data, such as barriers and errors, have NoBackend.
const (
	NoBackend Backend = iota
	TCP
	// SHM is shared memory between the ranks of one host.
	SHM
	// Hier runs an operation on two levels: in shared memory among the ranks of each host, and over TCP
	// between the hosts.
	Hier
	// MPI runs operations with the MPI library.
	MPI
	// NCCL runs operations on CUDA devices with the NCCL library.
	NCCL
	numBackends
)

var backends = [numBackends]string{"none", "tcp", "shm", "hier", "mpi", "nccl"}

func (b Backend) String() string {
	if b >= numBackends {
		return fmt.Sprintf("Backend(%d)", uint8(b))
	}
	return backends[b]
}

// MarshalText implements encoding.TextMarshaler.
func (b Backend) MarshalText() ([]byte, error) { return []byte(b.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (b *Backend) UnmarshalText(text []byte) error { return unmarshal(b, "backend", backends[:], text) }

// Algorithm identifies the way in which a backend moves the bytes of an operation.
type Algorithm uint8

// These are the algorithms.
const (
	NoAlgorithm Algorithm = iota
	// Ring passes parts of the buffer from rank to rank in a ring. The order in which a sum is computed
	// depends on the position of the element in the buffer.
	Ring
	// Tree passes the buffer along a binomial tree.
	Tree
	// Direct sends each part of the buffer directly to the rank that needs it. Sums are computed in the order
	// of the ranks.
	Direct
	// HalvingDoubling exchanges halves of the buffer, then quarters and so on, with ranks at doubling
	// distances.
	HalvingDoubling
	// Exchange sends the whole contribution of every rank to every other rank. Every rank computes the whole
	// result, in the order of the ranks.
	Exchange
	// RecursiveDoubling exchanges the whole buffer with ranks at doubling distances.
	RecursiveDoubling
	// Bruck sends the blocks that a rank has collected so far to ranks at doubling distances. In an alltoall,
	// blocks pass through other ranks at these distances.
	Bruck
	// Chain passes the buffer from rank to rank, segment by segment.
	Chain
	// TwoLevel composes operations among the ranks of each host and operations between hosts, whose
	// algorithms the backends of the levels choose.
	TwoLevel
	numAlgorithms
)

var algorithms = [numAlgorithms]string{
	"none", "ring", "tree", "direct", "halving-doubling", "exchange", "recursive-doubling", "bruck",
	"chain", "two-level",
}

func (a Algorithm) String() string {
	if a >= numAlgorithms {
		return fmt.Sprintf("Algorithm(%d)", uint8(a))
	}
	return algorithms[a]
}

// MarshalText implements encoding.TextMarshaler.
func (a Algorithm) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (a *Algorithm) UnmarshalText(text []byte) error {
	return unmarshal(a, "algorithm", algorithms[:], text)
}
