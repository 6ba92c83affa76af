package main

import (
	"fmt"
	"math"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// unchecked is the value of result.wrong if results were not verified.
const unchecked = -1

// result is the result of one case. Times are per call, in microseconds. Bandwidths are in 10^9 bytes per
// second and are computed from the mean time.
type result struct {
	collective string // name of the collective, or of the workload and the mode
	path       string // "negotiated" or "raw"
	memory     string // the result of memoryName
	touch      bool
	ranks      int
	bytes      int64
	count      int64
	dt         tensor.DType    // Invalid for a barrier
	op         tensor.ReduceOp // NoReduce if the collective does not reduce
	root       int             // root of a broadcast; otherwise -1
	placement  string
	iters      int
	ran        ways
	mean, p50  float64
	p99        float64
	min, max   float64
	// Each rank has a mean time of its calls. leastMean is the least of these mean times, and greatestMean is
	// the greatest.
	leastMean, greatestMean float64
	algBW, busBW            float64
	wrong                   int64 // number of wrong elements at all ranks, or unchecked
}

// setTimes computes the times and bandwidths of r from the times that each rank has measured for its calls.
// factor is the ratio of busbw to algbw.
func (r *result) setTimes(byRank [][]float64, how average, factor float64) {
	r.leastMean = math.Inf(1)
	for _, times := range byRank {
		m := mean(times)
		r.leastMean, r.greatestMean = min(r.leastMean, m), max(r.greatestMean, m)
	}
	times := combine(byRank, how)
	slices.Sort(times)
	r.mean, r.p50, r.p99 = mean(times), quantile(times, 0.5), quantile(times, 0.99)
	r.min, r.max = quantile(times, 0), quantile(times, 1)
	r.algBW = float64(r.bytes) / r.mean / 1000
	r.busBW = r.algBW * factor
}

// combine combines the times that the ranks measured for each call into one time per call.
func combine(byRank [][]float64, how average) []float64 {
	times := slices.Clone(byRank[0])
	for i := range times {
		for _, of := range byRank[1:] {
			switch how {
			case ofMin:
				times[i] = min(times[i], of[i])
			case ofMax:
				times[i] = max(times[i], of[i])
			case ofMean:
				times[i] += of[i]
			}
		}
		if how == ofMean {
			times[i] /= float64(len(byRank))
		}
	}
	return times
}

// average says how the ranks' times for one call are combined. Its values have the same numbers as in
// nccl-tests.
type average int

// Ways to combine the ranks' times.
const (
	// byKind means the mean of the ranks' times, with two exceptions. For a broadcast it means the longest
	// time, because the root returns first. If buffers are touched, it means the shortest time, because only
	// the rank that arrives last does not wait for another rank.
	byKind average = iota - 1
	ofRank0
	ofMean
	ofMin
	ofMax
)

// resolve returns the average that byKind means for a collective of this kind: ofMean, ofMin or ofMax.
// touched is set if buffers are touched. If a is not byKind, resolve returns a.
func (a average) resolve(kind message.Kind, touched bool) average {
	switch {
	case a != byKind:
		return a
	case kind == message.Broadcast:
		return ofMax
	case touched:
		return ofMin
	}
	return ofMean
}

func placement(inPlace bool) string {
	if inPlace {
		return "in-place"
	}
	return "out-of-place"
}

// memoryName returns the name of the memory of the tensors.
func (o *options) memoryName() string {
	switch {
	case o.gpu:
		return "gpu"
	case o.arena:
		return "arena"
	case o.offset > 0:
		return fmt.Sprintf("slices+%d", o.offset)
	}
	return "slices"
}

func mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}

// quantile returns the q-quantile of sorted values, interpolated between neighbours (definition 7 of Hyndman
// and Fan, 1996). For q = 0.5 it is the median.
func quantile(sorted []float64, q float64) float64 {
	at := q * float64(len(sorted)-1)
	low := int(at)
	if low+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[low] + (at-float64(low))*(sorted[low+1]-sorted[low])
}
