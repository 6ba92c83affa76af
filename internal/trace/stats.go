package trace

import (
	"math"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Stats is a rank at a moment. Counters begin with the epoch.
type Stats struct {
	Rank, Size int
	Host       string
	Epoch      uint64

	// Operations are by what was done and by whom, Moved by element type besides. Both are in no particular order, and without
	// what was never done.
	Operations []Operations
	Moved      []Moved
	// Negotiation is, for each tensor, from its submission to its grant; Queued, for each fused response, from the grant to the
	// beginning of its execution.
	Negotiation, Queued Histogram
	// FusedTensors and FusedBytes are of the responses that could have had more than one tensor; FusionResponses is their
	// number, and FusionThresholdBytes what each could have held at most.
	FusedTensors, FusedBytes, FusionResponses uint64
	FusionThresholdBytes                      int64
	// CacheHits are requests that travelled as a bit, CacheMisses those in full.
	CacheHits, CacheMisses uint64
	// Refused are tensors that were answered with an error of their own, as for ranks that disagree; Failed those that were
	// answered because the job had failed or was shut down.
	Refused, Failed uint64
	// InFlight are the tensors that were submitted and not answered.
	InFlight int
	// Clock is the last measurement of this rank's clock against rank 0's, and ClockKnown says that there is one.
	ClockOffset, ClockError time.Duration
	ClockKnown              bool
	// TimelineDropped are operations that the timeline has lost because it could not write as fast, or at all.
	TimelineDropped uint64
	// Coordinator is what rank 0 knows besides; nil elsewhere.
	Coordinator *Coordinator
}

// Operations are the fused responses of a kind that a backend has run.
type Operations struct {
	Kind    message.Kind
	Backend message.Backend
	// Durations are from the beginning of execution to its end.
	Durations Histogram
	Tensors   uint64
}

// Moved is how much of an element type went through operations: what this rank put in, or, for broadcasts, got.
type Moved struct {
	Kind    message.Kind
	Backend message.Backend
	DType   tensor.DType
	Bytes   uint64
}

// Coordinator is what the coordinator has counted.
type Coordinator struct {
	Cycles uint64
	// Late is by rank.
	Late []analysis.HeldUp
	// Stalled are tensors that have waited for longer than the stall warning, and StallReports how often that was said.
	Stalled      int
	StallReports uint64
}

// Histogram counts durations in buckets of powers of two of a second. The zero value is empty.
type Histogram struct {
	// Buckets[i] counts those of more than UpperBound(i-1) and at most UpperBound(i).
	Buckets [NumBuckets]uint64
	Sum     time.Duration
}

const (
	// NumBuckets is the number of buckets of a Histogram: up to 2^-20 s, about a microsecond; up to 2^-19 s, and so on to 64 s;
	// the last has what is longer.
	NumBuckets = 28
	// MinExponent is the power of two of the first bucket's bound.
	MinExponent = -20
)

// UpperBound returns the greatest duration in bucket i, in seconds; of the last bucket it is infinite.
func UpperBound(i int) float64 {
	if i >= NumBuckets-1 {
		return math.Inf(1)
	}
	return math.Ldexp(1, i+MinExponent)
}

// Add counts a duration. One below 0 counts as 0.
func (h *Histogram) Add(d time.Duration) {
	d = max(d, 0)
	// Frexp gives a fraction in [1/2, 1), but of 0: a power of two belongs to the bucket that it bounds.
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
