package message

import "fmt"

// Kind is what is to be done with a tensor.
type Kind uint8

// The kinds of operation. Error is a kind of response only: the ranks did not agree.
const (
	NoKind Kind = iota
	Allreduce
	Allgather
	Broadcast
	Alltoall
	Reducescatter
	Barrier
	// Join says that a rank has no more tensors for a process set; it is answered when all members have
	// joined.
	Join
	// AddProcessSet and RemoveProcessSet are requests of every rank on the global set.
	AddProcessSet
	RemoveProcessSet
	Error
	numKinds
)

// NumKinds is the number of kinds, with NoKind, and NumBackends that of backends: every value is less.
const (
	NumKinds    = int(numKinds)
	NumBackends = int(numBackends)
)

var kinds = [numKinds]string{
	"none", "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join",
	"add process set", "remove process set", "error",
}

// Valid reports whether k is a kind that a request may have.
func (k Kind) Valid() bool { return k > NoKind && k < Error }

// MovesData reports whether k exchanges tensors. Operations of the other kinds are done when they are
// granted.
func (k Kind) MovesData() bool { return k >= Allreduce && k <= Reducescatter }

// Reduces reports whether k combines elements, so that reduction and scale factors matter.
func (k Kind) Reduces() bool { return k == Allreduce || k == Reducescatter }

// Ragged reports whether the first dimensions of k's tensors may differ between ranks.
func (k Kind) Ragged() bool { return k == Allgather || k == Alltoall }

func (k Kind) String() string {
	if k >= numKinds {
		return fmt.Sprintf("Kind(%d)", uint8(k))
	}
	return kinds[k]
}

// Backend is what moves the bytes of a granted response.
type Backend uint8

// The backends. NoBackend is for responses that move nothing, as barriers and errors.
const (
	NoBackend Backend = iota
	TCP
	// SHM is shared memory, between ranks of one host.
	SHM
	numBackends
)

var backends = [numBackends]string{"none", "tcp", "shm"}

func (b Backend) String() string {
	if b >= numBackends {
		return fmt.Sprintf("Backend(%d)", uint8(b))
	}
	return backends[b]
}

// Algorithm is how a backend moves the bytes.
type Algorithm uint8

// The algorithms.
const (
	NoAlgorithm Algorithm = iota
	// Ring passes parts from rank to rank in a ring. The order of a sum depends on the element's position in
	// the buffer.
	Ring
	// Tree is a binomial tree.
	Tree
	// Direct sends each part straight to the rank that needs it; sums are in the order of the ranks.
	Direct
	// HalvingDoubling halves vectors at doubling distances.
	HalvingDoubling
	numAlgorithms
)

var algorithms = [numAlgorithms]string{"none", "ring", "tree", "direct", "halving-doubling"}

func (a Algorithm) String() string {
	if a >= numAlgorithms {
		return fmt.Sprintf("Algorithm(%d)", uint8(a))
	}
	return algorithms[a]
}
