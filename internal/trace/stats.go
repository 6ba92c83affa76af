package trace

import (
	"math"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Stats is the state of a rank at one moment. Counters begin with the epoch.
type Stats struct {
	Rank, Size int
	Host       string
	Epoch      uint64

	// Operations are by kind and backend, Moved by kind, backend and element type. Both are unsorted and
	// without combinations that never ran.
	Operations []Operations
	Moved      []Moved
	// Negotiation counts, for each tensor, the time from its submission to its grant. Queued counts, for each
	// fused response, the time from the grant to the beginning of its execution.
	Negotiation, Queued Histogram
	// FusedTensors and FusedBytes are the tensors and bytes of the responses that could have had more than
	// one tensor. FusionResponses is the number of these responses, and FusionThresholdBytes the most that
	// each could have held.
	FusedTensors, FusedBytes, FusionResponses uint64
	FusionThresholdBytes                      int64
	// CacheHits is the number of requests that were sent as a cache bit, CacheMisses of those that were sent
	// in full.
	CacheHits, CacheMisses uint64
	// Refused is the number of tensors that ended with an error of their own, for example because ranks
	// disagreed. Failed is the number of tensors that ended because the job failed or was shut down.
	Refused, Failed uint64
	// InFlight is the number of tensors that were submitted and have not ended.
	InFlight int
	// ClockOffset and ClockError are the last measurement of this rank's clock relative to rank 0's.
	// ClockKnown says that there is one.
	ClockOffset, ClockError time.Duration
	ClockKnown              bool
	// TimelineDropped is the number of operations that the timeline lost because it could not write as fast,
	// or at all.
	TimelineDropped uint64
	// Coordinator has the coordinator's counters at rank 0; nil elsewhere.
	Coordinator *Coordinator
}

// Operations counts the fused responses of a kind that a backend has run.
type Operations struct {
	Kind    message.Kind
	Backend message.Backend
	// Durations counts the times from the beginning of execution to its end.
	Durations Histogram
	Tensors   uint64
}

// Moved is the number of bytes of an element type that went through operations: this rank's input or, for
// broadcasts, its output.
type Moved struct {
	Kind    message.Kind
	Backend message.Backend
	DType   tensor.DType
	Bytes   uint64
}

// Coordinator has the counters of the coordinator.
type Coordinator struct {
	Cycles uint64
	// Late is by rank.
	Late []analysis.HeldUp
	// Stalled is the number of tensors that have waited for longer than the stall warning, and StallReports
	// the number of warnings.
	Stalled      int
	StallReports uint64
}

// Histogram counts durations in buckets of powers of two of a second. The zero value is empty.
type Histogram struct {
	// Buckets[i] is the number of durations above UpperBound(i-1) and up to UpperBound(i).
	Buckets [NumBuckets]uint64
	Sum     time.Duration
}

const (
	// NumBuckets is the number of buckets of a Histogram: up to 2^-20 s, about a microsecond; up to 2^-19 s;
	// and so on to 64 s. The last bucket counts longer durations.
	NumBuckets = 28
	// MinExponent is the power of two of the first bucket's upper bound.
	MinExponent = -20
)

// UpperBound returns the upper bound of bucket i, in seconds; it is infinite for the last bucket.
func UpperBound(i int) float64 {
	if i >= NumBuckets-1 {
		return math.Inf(1)
	}
	return math.Ldexp(1, i+MinExponent)
}

// Add counts a duration. A negative duration counts as 0.
func (h *Histogram) Add(d time.Duration) {
	d = max(d, 0)
	// Frexp returns a fraction in [1/2, 1) for numbers above 0. A power of two belongs to the bucket that it
	// bounds.
	fraction, exponent := math.Frexp(max(d, 1).Seconds())
	if fraction == 0.5 {
		exponent--
	}
	h.Buckets[min(max(exponent-MinExponent, 0), NumBuckets-1)]++
	h.Sum += d
}

// Count returns the number of durations.
func (h *Histogram) Count() (n uint64) {
	for _, c := range h.Buckets {
		n += c
	}
	return n
}
