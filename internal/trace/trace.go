// Package trace defines what the engine reports of its work: a record of each operation, for the timeline and the flight recorder, and
// the counters that package metrics shows.
//
// All times are since the engine's start, on a clock that does not jump. 0 is a time that has not come, or is not known.
package trace

import (
	"fmt"
	"hash/fnv"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// Operation is a granted response, of one tensor or of several that ran as one, when it has ended. Whoever is given one
// reads it before he returns and keeps nothing of it but strings and shapes, which do not change.
type Operation struct {
	Set topo.ProcessSetID
	// Number counts the grants of the set from 1. It is the same at all members, and with Set says which operations of
	// different ranks are one.
	Number uint64
	// Kind is what was asked for. If the ranks did not agree it is Error, or what this rank asked for.
	Kind      message.Kind
	Backend   message.Backend
	Algorithm message.Algorithm
	// Absent says that this rank had joined and stood in with neutral elements; then it has no times of its own for the tensors.
	Absent bool
	// Granted is when the rank learned that the operation is to run, Begun when it began, Ended when it had ended and before
	// anybody was told.
	Granted, Begun, Ended time.Duration
	// Activities are what it did between Begun and Ended: in order, one after the other, maybe with gaps.
	Activities []Activity
	Tensors    []Tensor
	// Failed is why the operation failed as a whole; nil if it did not.
	Failed error
}

// Tensor is one of an operation.
type Tensor struct {
	Name  string
	DType tensor.DType
	// Shape is this rank's contribution.
	Shape tensor.Shape
	// Bytes is what this rank put in, or, for a broadcast, gets.
	Bytes int64
	// Submitted is when the caller handed it in, Sent when its request, or its vote, was on its way to the coordinator.
	Submitted, Sent time.Duration
	// Cached says that it was agreed on by bits of the response cache.
	Cached bool
	// Arrivals, by position in the set, are when each member's request reached the coordinator. They are known at rank 0
	// only, and nil elsewhere; 0 is a member that had joined.
	Arrivals []time.Duration
	// Partial says that Arrivals has 0 also for members whose requests came before anybody noted when.
	Partial bool
	// Parts is the number of tensors if it is a group that ran as one, 0 if it is one tensor. Shape is then the number of all
	// elements, and DType Invalid if they have several types.
	Parts int
	// Refused is the error of this tensor alone; nil if it has none.
	Refused error
}

// Activity is a part of an operation. Its name is Horovod's where Horovod has one, as MEMCPY_IN_FUSION_BUFFER, and that of the
// backend and the kind for the exchange itself, as SHM_ALLREDUCE.
type Activity struct {
	Name       string
	Begun, End time.Duration
}

// Pending is an operation on a tensor that has not ended.
type Pending struct {
	Set   topo.ProcessSetID
	Kind  message.Kind
	Name  string
	DType tensor.DType
	Shape tensor.Shape
	// Submitted, Sent, Granted and Begun are as for one that has.
	Submitted, Sent, Granted, Begun time.Duration
	// Number and Backend are as for one that has, if it is granted and they are known; else 0.
	Number  uint64
	Backend message.Backend
}

// Clock is how a rank's times are compared with those of others.
type Clock struct {
	// Start is the time of day when the engine started.
	Start time.Time
	// Domain names the clock that the process reads: two with the same one read the same clock. It stands for a boot of a host and
	// a time namespace in it.
	Domain string
	// Monotonic is what that clock showed when the engine started.
	Monotonic time.Duration
}

// Job returns what rank 0's clock names an epoch of a job: no other has it. It is empty if the clock cannot be compared.
func (c Clock) Job() string {
	if c.Domain == "" {
		return ""
	}
	h := fnv.New64a()
	fmt.Fprintf(h, "%s\n%d", c.Domain, c.Monotonic)
	return fmt.Sprintf("%016x", h.Sum64())
}

// Offset is a measurement of rank 0's time since its engine's start against this rank's.
type Offset struct {
	// At is when it was made, and Offset what is then to be added to a time of this rank to get rank 0's.
	At, Offset time.Duration
	// Error is how far Offset may be from the truth, either way; 0 where both read one clock.
	Error time.Duration
	// Job is Clock.Job of rank 0, which ranks learn with the measurement.
	Job string
}
