// Package trace defines what the engine reports about its work: a record of each operation for the timeline
// and the flight recorder, and the counters that package metrics exports.
//
// All times are counted from the engine's start, on a clock that does not jump. A time of 0 means that it has
// not come yet or is not known.
package trace

import (
	"fmt"
	"hash/fnv"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// Operation is a granted response that has ended. It has one tensor, or several that ran as one operation. A
// receiver must not use it after returning, except its strings and shapes, which do not change.
type Operation struct {
	Set topo.ProcessSetID
	// Number counts the grants of the set from 1. It is equal at all members, so Set and Number identify the
	// operation at all ranks.
	Number uint64
	// Kind is the requested kind. If the ranks did not agree on a kind, it is Error or the kind that this
	// rank requested.
	Kind      message.Kind
	Backend   message.Backend
	Algorithm message.Algorithm
	// Absent says that this rank had joined and took part with neutral elements. The tensors then have no
	// times from this rank.
	Absent bool
	// Granted is when this rank received the grant, Begun is when the execution began, and Ended is when it
	// had ended. No waiter was notified before Ended.
	Granted, Begun, Ended time.Duration
	// Activities are the parts of the execution between Begun and Ended, in order. They do not overlap, but
	// there may be gaps between them.
	Activities []Activity
	Tensors    []Tensor
	// Failed is the error with which the whole operation failed, or nil.
	Failed error
}

// Tensor is a tensor of an operation.
type Tensor struct {
	Name  string
	DType tensor.DType
	// Shape is the shape of this rank's contribution.
	Shape tensor.Shape
	// Bytes is the size of this rank's input or, for a broadcast, of its output.
	Bytes int64
	// Submitted is when the caller submitted the tensor. Sent is when its request or vote was sent to the
	// coordinator.
	Submitted, Sent time.Duration
	// Cached says that the tensor was granted by its bit in the response cache.
	Cached bool
	// Arrivals are the times at which the members' requests reached the coordinator, by position in the
	// process set. A member that had joined has the time 0. Arrivals is nil except at rank 0.
	Arrivals []time.Duration
	// Partial says that Arrivals also has 0 for members whose requests arrived before the recording of
	// arrival times began.
	Partial bool
	// Parts is the number of tensors if this is a group that ran as one tensor, else 0. For a group, Shape is
	// the number of all elements, and DType is Invalid if the group has several element types.
	Parts int
	// Refused is the error with which only this tensor ended, or nil.
	Refused error
}

// Activity is a part of an operation. If Horovod has a name for it, such as MEMCPY_IN_FUSION_BUFFER, its name
// is the same. The name of the exchange consists of the backend and the kind, such as SHM_ALLREDUCE.
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
	// Submitted, Sent, Granted and Begun are as in Operation and Tensor.
	Submitted, Sent, Granted, Begun time.Duration
	// Number and Backend are as in Operation. They are 0 if the operation was not granted yet.
	Number  uint64
	Backend message.Backend
}

// Clock describes a rank's clock, so that times of the rank can be compared with times of other ranks.
type Clock struct {
	// Start is the time of day at which the engine started.
	Start time.Time
	// Domain is the name of the clock that the process reads. Processes with the same domain read the same
	// clock. A domain is a time namespace during one boot of a host.
	Domain string
	// Monotonic is the reading of that clock at the engine's start.
	Monotonic time.Duration
}

// Job returns a name for one epoch of a job. c must be the clock of rank 0. No other epoch has the same name.
// If the domain of the clock is unknown, Job returns "".
func (c Clock) Job() string {
	if c.Domain == "" {
		return ""
	}
	h := fnv.New64a()
	fmt.Fprintf(h, "%s\n%d", c.Domain, c.Monotonic)
	return fmt.Sprintf("%016x", h.Sum64())
}

// Offset is a measurement of this rank's clock against rank 0's clock. Both count from the start of their
// engines.
type Offset struct {
	// At is when the measurement was made. Offset is the number to add to a time of this rank to get the time
	// of rank 0, as of then.
	At, Offset time.Duration
	// Error is the maximum error of Offset in either direction. It is 0 if both ranks read the same clock.
	Error time.Duration
	// Job is Clock.Job of rank 0, which the ranks learn by the measurement.
	Job string
}
