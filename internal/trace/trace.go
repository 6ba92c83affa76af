// Package trace defines what the engine and the nodes of a parameter server report about their work: a Record
// for each tensor of each operation, and the counters that package metrics exports.
//
// The same Record is in the flight recorder, in its dumps, in the timelines and in the reports about them.
// All times are counted from the start of the engine or node, on a clock that does not jump, or are on a
// clock that all ranks share. A time of 0 means that the event has not happened yet or that its time is not
// known.
package trace

import (
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// Record is one tensor of an operation at one rank, from its submission to the end of the operation. An
// operation that is pending has no Ended. Records of one process set with the same number belong to the same
// operation, which ran on all members.
type Record struct {
	Set topo.ProcessSetID `json:"set,omitempty"`
	// Peer is the other rank of a message, or the other process of a push or pull. It is -1 if it is not
	// known, such as if a receive from any rank has ended without a message. In other operations it is 0.
	Peer topo.Rank `json:"peer,omitempty"`
	// Number is the number of the grant, counted from 1 in each set. The number of a message counts the
	// messages of its sender to its receiver in the set; messages also have the same name at both ranks.
	// Number is 0 if there is no grant or the number is not known.
	Number uint64 `json:"number,omitempty"`
	// Kind is the requested kind. If the ranks did not agree on a kind, Kind is Error or the kind that this
	// rank requested.
	Kind      message.Kind      `json:"kind"`
	Backend   message.Backend   `json:"backend,omitempty"`
	Algorithm message.Algorithm `json:"algorithm,omitempty"`
	DType     tensor.DType      `json:"dtype,omitempty"`
	// Cached says that the tensor was granted by its bit in the response cache.
	Cached bool `json:"cached,omitempty"`
	// Absent says that this rank had joined and took part with neutral elements. In this case there are no
	// times from this rank, and there may be no name.
	Absent bool `json:"absent,omitempty"`
	// Refused says that only this tensor ended with Error, while the other tensors of the operation
	// completed.
	Refused bool `json:"refused,omitempty"`
	// Partial says that the recording of arrival times began after the first request for the tensor, so that
	// Operation.Arrivals has 0 also for members whose requests had arrived before.
	Partial bool   `json:"-"`
	Name    string `json:"name"`
	// Shape is the shape of this rank's contribution.
	Shape tensor.Shape `json:"shape,omitempty"`
	// Bytes is the size of this rank's input. For a broadcast, it is the size of this rank's output.
	Bytes int64 `json:"bytes,omitempty"`
	// Parts is the number of tensors if this is a group that ran as one tensor, else 0. For such a group,
	// Shape is the total number of elements, and DType is Invalid if there are several element types.
	Parts int32 `json:"parts,omitempty"`
	// Error is the text of the error with which the operation or this tensor failed. Otherwise it is empty.
	Error string `json:"error,omitempty"`
	// Submitted is when the caller submitted the tensor, and Sent is when its request or vote was sent to the
	// coordinator. Granted is when this rank received the grant, Begun is when the execution began, and Ended
	// is when it ended. A message is granted and begins when this rank knows that the other rank has called
	// its send or recv, or, if it is sent without waiting for that, when it is submitted. No caller that
	// waits for the operation is notified before Ended.
	Submitted time.Duration `json:"submitted_ns,omitempty"`
	Sent      time.Duration `json:"sent_ns,omitempty"`
	Granted   time.Duration `json:"granted_ns,omitempty"`
	Begun     time.Duration `json:"begun_ns,omitempty"`
	Ended     time.Duration `json:"ended_ns,omitempty"`
	// Among are the ranks that take part in a pending operation if these are not all members of Set.
	// Otherwise it is empty.
	Among []topo.Rank `json:"among,omitempty"`
}

// Operation is an operation that has ended: a granted response, a message to or from another rank, or a push
// or pull. A function that receives an Operation must not use it after returning, except for its strings and
// shapes, which do not change.
type Operation struct {
	// Records has one record for each tensor, at least one. They differ only in what belongs to the tensor,
	// which includes Submitted and Sent.
	Records []Record `json:"records"`
	// Activities are the parts of the execution between Begun and Ended, in order. They do not overlap, but
	// there may be gaps between them.
	Activities []Activity `json:"activities,omitempty"`
	// Arrivals has, for one record after the other, the times at which the members' requests reached the
	// coordinator, in the order of their positions in the process set. A member that had joined has the time
	// 0. Arrivals is empty except at rank 0.
	Arrivals []time.Duration `json:"arrivals_ns,omitempty"`
}

// ArrivalsOf returns the part of Arrivals that belongs to record i.
func (o *Operation) ArrivalsOf(i int) []time.Duration {
	members := len(o.Arrivals) / len(o.Records)
	return o.Arrivals[i*members : (i+1)*members]
}

// Activity is a part of an operation. If Horovod has a name for the part, such as MEMCPY_IN_FUSION_BUFFER,
// Name is the same. The name of the exchange consists of the backend and the kind, such as SHM_ALLREDUCE.
type Activity struct {
	Name  string        `json:"name"`
	Begun time.Duration `json:"begun_ns"`
	End   time.Duration `json:"end_ns"`
}

// Span is a time in which the program of a rank did something that the timeline shows.
type Span struct {
	Kind SpanKind `json:"kind"`
	// Name is the name of the tensor or the message for which the program waited, or that of the range.
	Name  string        `json:"name"`
	Begun time.Duration `json:"begun_ns"`
	End   time.Duration `json:"end_ns"`
}

// SpanKind says what a program did in a Span.
type SpanKind uint8

const (
	// Wait is the time in which a call of the program waited for the result of an operation.
	Wait SpanKind = iota
	// Range is a time to which the program has given a name, such as "forward".
	Range
)

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
