// Package trace defines what the engine reports about its work: a record of each operation for the timeline
// and the flight recorder, and the counters that package metrics exports.
//
// All times are counted from the engine's start, on a clock that does not jump. A time of 0 means that the
// event has not happened yet or that its time is not known.
package trace

import (
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// Operation is a granted response that has ended, or a message to or from another rank. It has one tensor, or
// several tensors that ran as one operation. A function that receives an Operation must not use it after
// returning, except for its strings and shapes, which do not change.
type Operation struct {
	Set topo.ProcessSetID
	// Number is the number of the grant, counted from 1 in each set. It is equal at all members, so Set and
	// Number together identify the operation at all ranks. The number of a message counts the messages of its
	// sender to its receiver in the set. It is 0 if a receive has ended without a message.
	Number uint64
	// Peer is the other rank of a message, or -1 if a receive from any rank has ended without a message. In
	// other operations it is 0.
	Peer topo.Rank
	// Kind is the requested kind. If the ranks did not agree on a kind, Kind is Error or the kind that this
	// rank requested.
	Kind      message.Kind
	Backend   message.Backend
	Algorithm message.Algorithm
	// Absent says that this rank had joined and took part with neutral elements. In this case the tensors
	// have no times from this rank.
	Absent bool
	// Granted is when this rank received the grant, Begun is when the execution began, and Ended is when it
	// ended. A message is granted and begins when this rank knows that the other rank has called its send or
	// recv, or, if it is sent without waiting for that, when it is submitted. No caller that waits for the
	// operation is notified before Ended.
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
	// Bytes is the size of this rank's input. For a broadcast, it is the size of this rank's output.
	Bytes int64
	// Submitted is the time at which the caller submitted the tensor. Sent is the time at which its request
	// or vote was sent to the coordinator.
	Submitted, Sent time.Duration
	// Cached says that the tensor was granted by its bit in the response cache.
	Cached bool
	// Arrivals are the times at which the members' requests reached the coordinator, indexed by position in
	// the process set. A member that had joined has the time 0. Arrivals is nil except at rank 0.
	Arrivals []time.Duration
	// Partial says that the recording of arrival times began after the first request for the tensor. In this
	// case Arrivals also has 0 for members whose requests had arrived before.
	Partial bool
	// Parts is the number of tensors if this is a group that ran as one tensor, else 0. For such a group,
	// Shape is the total number of elements, and DType is Invalid if there are several element types.
	Parts int
	// Refused is the error with which this tensor ended while the other tensors of the operation completed,
	// or nil.
	Refused error
}

// Activity is a part of an operation. If Horovod has a name for the part, such as MEMCPY_IN_FUSION_BUFFER,
// Name is the same. The name of the exchange consists of the backend and the kind, such as SHM_ALLREDUCE.
type Activity struct {
	Name       string
	Begun, End time.Duration
}

// Pending is an unfinished operation on a tensor.
type Pending struct {
	Set   topo.ProcessSetID
	Kind  message.Kind
	Name  string
	DType tensor.DType
	Shape tensor.Shape
	// Submitted, Sent, Granted and Begun have the same meaning as in Operation and Tensor.
	Submitted, Sent, Granted, Begun time.Duration
	// Number and Backend have the same meaning as in Operation. They are 0 before the operation is granted.
	Number  uint64
	Backend message.Backend
	// Among are the ranks that take part in the operation if these are not all members of Set. Otherwise it
	// is nil.
	Among []topo.Rank
}

// Offset is a measurement of this rank's clock against rank 0's clock. Each clock counts from the start of
// its rank's engine.
type Offset struct {
	// At is the time of the measurement. Offset is the difference between the clocks at that time: the number
	// to add to a time of this rank to get the time of rank 0.
	At, Offset time.Duration
	// Error is the maximum error of Offset in either direction. It is 0 if both ranks read the same clock.
	Error time.Duration
	// Job is the result of Clock.Job at rank 0. The other ranks learn it by the measurement.
	Job string
}
