package trace

import (
	"math"
	"math/bits"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// Stats is the state of a rank at one moment. Its counters begin with 0 at the beginning of the epoch.
type Stats struct {
	Rank, Size int
	Host       string
	Epoch      uint64

	// Operations has an element for each kind and backend. Moved has an element for each kind, backend and
	// element type. Both are unsorted and omit combinations that have never run.
	Operations []Operations
	Moved      []Moved
	// Negotiation has the time from submission to grant for each tensor. Queued has the time from the grant
	// to the beginning of execution for each fused response.
	Negotiation, Queued Histogram
	// FusionResponses is the number of responses of kinds that can be fused. FusedTensors and FusedBytes are
	// the numbers of tensors and bytes in these responses. FusionRoomBytes is the sum of the fusion
	// thresholds of these responses. FusionThresholdBytes is the maximum number of bytes in one such
	// response. It changes if rank 0 tunes it.
	FusedTensors, FusedBytes, FusionResponses uint64
	FusionRoomBytes                           uint64
	FusionThresholdBytes                      int64
	// CacheHits is the number of requests that were sent as a cache bit. CacheMisses is the number of
	// requests that were sent in full.
	CacheHits, CacheMisses uint64
	// Refused is the number of tensors that ended with an error of their own, for example because ranks
	// disagreed. Failed is the number of tensors that ended because the job failed or was shut down.
	Refused, Failed uint64
	// Phases has for how long the rank was in each phase. At each moment it is in one phase.
	Phases [NumPhases]time.Duration
	// Steps is the number of training steps that the program has marked.
	Steps uint64
	// InFlight is the number of tensors that were submitted and have not ended.
	InFlight int
	// ClockOffset and ClockError are the last measurement of this rank's clock against rank 0's clock. They
	// are valid if ClockKnown is set.
	ClockOffset, ClockError time.Duration
	ClockKnown              bool
	// TimelineDropped is the number of operations that are missing in the timeline, because it could not
	// write fast enough or could not write at all.
	TimelineDropped uint64
	// Coordinator has the coordinator's counters. It is nil except at rank 0.
	Coordinator *Coordinator
	// Tuning has the state of the search for settings. It is nil except at rank 0 of a job that tunes.
	Tuning *Tuning
}

// Phase is what a rank does at a moment.
type Phase uint8

const (
	// Computing is the phase of a rank without an operation in flight.
	Computing Phase = iota
	// Waiting is the phase in which an operation is in flight, but none is granted: the rank waits for other
	// ranks, or for the negotiation.
	Waiting
	// Queued is the phase in which an operation is granted, but none is executed.
	Queued
	// Communicating is the phase in which an operation is executed.
	Communicating
	// NumPhases is the number of phases.
	NumPhases
)

func (p Phase) String() string {
	return [...]string{"computing", "waiting", "queued", "communicating"}[p]
}

// Tuning is the state of the search for settings.
type Tuning struct {
	// Active is set until the search has ended.
	Active bool
	// Rounds is the number of rounds that have ended.
	Rounds int
	// BytesPerSecond is the score of the best settings so far, or 0 if nothing was measured.
	BytesPerSecond float64
	// Values are the settings that rank 0 has chosen last.
	Values message.Tuning
}

// Operations counts the operations of one kind that one backend has run.
type Operations struct {
	Kind    message.Kind
	Backend message.Backend
	// Durations has the execution time of each operation.
	Durations Histogram
	Tensors   uint64
}

// Moved is the number of bytes of one element type that operations have processed. For a broadcast, it counts
// this rank's output. For other kinds, it counts this rank's input.
type Moved struct {
	Kind    message.Kind
	Backend message.Backend
	DType   tensor.DType
	Bytes   uint64
}

// Coordinator has the counters of the coordinator.
type Coordinator struct {
	Cycles uint64
	// Late has an element for each rank, in the order of the ranks.
	Late []HeldUp
	// Stalled is the number of tensors that have waited for longer than the stall warning time. StallReports
	// is the number of stall warnings so far.
	Stalled      int
	StallReports uint64
}

// HeldUp says for how long one rank or node held up all others. The rules are those of analysis.Held.
type HeldUp struct {
	Rank topo.Rank
	// Last is the number of operations for which this rank was the last of all ranks to ask.
	Last uint64
	// Held is the wall time during which the rank held up all others. No moment counts twice, neither for one
	// rank nor for two ranks.
	Held time.Duration
}

// Histogram counts durations in buckets. The upper bounds of the buckets are powers of two of a second. The
// zero value is empty.
type Histogram struct {
	// Buckets[i] is the number of durations that are greater than UpperBound(i-1) and at most UpperBound(i).
	Buckets [NumBuckets]uint64
	Sum     time.Duration
}

const (
	// NumBuckets is the number of buckets of a Histogram. Their upper bounds are 2^-20 s (about a
	// microsecond), 2^-19 s and so on to 64 s. The last bucket counts longer durations.
	NumBuckets = 28
	// MinExponent is the exponent of the upper bound of the first bucket.
	MinExponent = -20
)

// UpperBound returns the upper bound of bucket i in seconds. It is infinite for the last bucket.
func UpperBound(i int) float64 {
	if i >= NumBuckets-1 {
		return math.Inf(1)
	}
	return math.Ldexp(1, i+MinExponent)
}

// Add counts a duration. A negative duration counts as 0.
func (h *Histogram) Add(d time.Duration) {
	d = max(d, 0)
	h.Sum += d
	const longest = time.Second << (NumBuckets - 1 + MinExponent) // belongs to the last bucket
	// The duration in units of the first upper bound, rounded up.
	units := (uint64(min(d, longest))<<-MinExponent + uint64(time.Second) - 1) / uint64(time.Second)
	h.Buckets[bits.Len64(max(units, 1)-1)]++
}

// Count returns the number of durations.
func (h *Histogram) Count() (n uint64) {
	for _, c := range h.Buckets {
		n += c
	}
	return n
}
