// Package trace defines what the engine reports of its work: a record of each operation, for the timeline and
// the flight recorder, and the counters that package metrics shows.
//
// All times are since the engine's start, on a clock that does not jump. 0 is a time that has not come or is
// not known.
package trace

import (
	"fmt"
	"hash/fnv"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// Operation is a granted response that has ended, of one tensor or of several that ran as one. A receiver
// must read it before it returns, and may keep only strings and shapes, which do not change.
type Operation struct {
	Set topo.ProcessSetID
	// Number counts the grants of the set from 1. It is the same at all members: Set and Number identify the
	// operation across ranks.
	Number uint64
	// Kind is the kind of the request. If the ranks did not agree it is Error, or the kind that this rank
	// requested.
	Kind      message.Kind
	Backend   message.Backend
	Algorithm message.Algorithm
	// Absent says that this rank had joined and took part with neutral elements. Then the tensors have no
	// times of this rank.
	Absent bool
	// Granted is when this rank received the grant, and Begun when its execution began. Ended is when it had
	// ended, before any waiter was notified.
	Granted, Begun, Ended time.Duration
	// Activities are the parts of the execution between Begun and Ended, in order, without overlaps, possibly
	// with gaps.
	Activities []Activity
	Tensors    []Tensor
	// Failed is the error of the whole operation; nil if it succeeded.
	Failed error
}

// Tensor is one tensor of an operation.
type Tensor struct {
	Name  string
	DType tensor.DType
	// Shape is the shape of this rank's contribution.
	Shape tensor.Shape
	// Bytes is the size of this rank's input, or of its output for a broadcast.
	Bytes int64
	// Submitted is when the caller submitted the tensor. Sent is when its request or vote was sent to the
	// coordinator.
	Submitted, Sent time.Duration
	// Cached says that the ranks agreed on the tensor by bits of the response cache.
	Cached bool
	// Arrivals are, by position in the set, the times at which the members' requests reached the coordinator.
	// They are known only at rank 0, and nil elsewhere; 0 is a member that had joined.
	Arrivals []time.Duration
	// Partial says that Arrivals has 0 also for members whose requests came before arrival times were
	// recorded.
	Partial bool
	// Parts is the number of tensors if this is a group that ran as one, and 0 if it is one tensor. For a
	// group, Shape is the number of all elements, and DType is Invalid if they have several types.
	Parts int
	// Refused is the error of this tensor only; nil if it has none.
	Refused error
}

// Activity is a part of an operation. Its name is Horovod's if Horovod has one, such as
// MEMCPY_IN_FUSION_BUFFER. For the exchange itself it consists of the backend and the kind, such as
// SHM_ALLREDUCE.
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
	// Number and Backend are as in Operation if the operation is granted and they are known; otherwise 0.
	Number  uint64
	Backend message.Backend
}

// Clock describes a rank's clock, so that its times can be compared with those of other ranks.
type Clock struct {
	// Start is the time of day when the engine started.
	Start time.Time
	// Domain names the clock that the process reads: processes with the same domain read the same clock. It
	// stands for a boot of a host and a time namespace in it.
	Domain string
	// Monotonic is the reading of that clock when the engine started.
	Monotonic time.Duration
}

// Job returns a name for an epoch of a job, made from the clock of its rank 0. No other epoch has the same
// name. It is empty if the domain of the clock is not known.
func (c Clock) Job() string {
	if c.Domain == "" {
		return ""
	}
	h := fnv.New64a()
	fmt.Fprintf(h, "%s\n%d", c.Domain, c.Monotonic)
	return fmt.Sprintf("%016x", h.Sum64())
}

// Offset is a measurement of rank 0's time since its engine's start relative to this rank's.
type Offset struct {
	// At is when the measurement was made. Offset is what was then to be added to a time of this rank to get
	// rank 0's.
	At, Offset time.Duration
	// Error is the greatest error of Offset, either way; 0 if both ranks read one clock.
	Error time.Duration
	// Job is Clock.Job of rank 0, which the ranks receive with the measurement.
	Job string
}
