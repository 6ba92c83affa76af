package bench

import (
	"math"

	"github.com/gohvd/gohvd/message"
)

// unchecked is the number of wrong elements where nobody looked.
const unchecked = -1

// Row is the result of one case. Times are of one call, in microseconds; bandwidths in 10^9 bytes per second, by the
// mean time.
type Row struct {
	Collective string  `json:"collective"` // or workload and mode
	Path       string  `json:"path"`       // negotiated or raw
	Memory     string  `json:"memory"`     // slices or arena
	Touch      bool    `json:"touch"`
	Ranks      int     `json:"ranks"`
	Bytes      int64   `json:"bytes"`
	Count      int64   `json:"count"`
	Type       string  `json:"type"`  // none for a barrier
	Op         string  `json:"redop"` // none where nothing is reduced
	Root       int     `json:"root"`  // -1 where there is none
	Placement  string  `json:"placement"`
	Iters      int     `json:"iters"`
	Mean       float64 `json:"mean_us"`
	P50        float64 `json:"p50_us"`
	P99        float64 `json:"p99_us"`
	Min        float64 `json:"min_us"`
	Max        float64 `json:"max_us"`
	// LeastMean and GreatestMean are those of the ranks' own means.
	LeastMean    float64 `json:"least_mean_us"`
	GreatestMean float64 `json:"greatest_mean_us"`
	AlgBW        float64 `json:"algbw_GBps"`
	BusBW        float64 `json:"busbw_GBps"`
	Wrong        int64   `json:"wrong"` // elements, of all ranks; -1 if nobody looked
	// CPU is what the timed calls have cost each rank, in seconds, if it was asked for.
	CPU []RankCPU `json:"cpu,omitempty"`
}

// RankCPU is the time of one rank in seconds.
type RankCPU struct {
	Wall   float64 `json:"wall_s"`
	User   float64 `json:"user_s"`
	System float64 `json:"system_s"`
}

// RankMemory is the memory of one rank in bytes. Tensors are the benchmark's own, at their most.
type RankMemory struct {
	PeakRSS float64 `json:"peak_rss_bytes"`
	Shared  float64 `json:"shared_bytes"`
	Tensors float64 `json:"tensor_bytes"`
}

// setTimes fills in what follows from the times of all ranks' calls.
func (r *Row) setTimes(byRank [][]float64, how Average, factor float64) {
	r.LeastMean, r.GreatestMean = math.Inf(1), 0
	for _, times := range byRank {
		m := mean(times)
		r.LeastMean, r.GreatestMean = min(r.LeastMean, m), max(r.GreatestMean, m)
	}
	s := summarize(combine(byRank, how))
	r.Mean, r.P50, r.P99, r.Min, r.Max = s.mean, s.p50, s.p99, s.min, s.max
	r.AlgBW = gbps(r.Bytes, r.Mean)
	r.BusBW = r.AlgBW * factor
}

// gbps is 10^9 bytes per second.
func gbps(numBytes int64, us float64) float64 {
	if numBytes == 0 {
		return 0
	}
	return float64(numBytes) / us / 1000
}

// combine makes one time of those that the ranks needed for each call.
func combine(byRank [][]float64, how Average) []float64 {
	times := make([]float64, len(byRank[0]))
	for i := range times {
		switch how {
		case OfRank0:
			times[i] = byRank[0][i]
		case OfMin, OfMax:
			times[i] = byRank[0][i]
			for _, of := range byRank[1:] {
				if how == OfMin {
					times[i] = min(times[i], of[i])
				} else {
					times[i] = max(times[i], of[i])
				}
			}
		default:
			for _, of := range byRank {
				times[i] += of[i] / float64(len(byRank))
			}
		}
	}
	return times
}

// resolve says what ByKind stands for.
func (a Average) resolve(kind message.Kind, touched bool) Average {
	switch {
	case a != ByKind:
		return a
	case kind == message.Broadcast:
		return OfMax
	case touched:
		return OfMin
	}
	return OfMean
}

func placement(inPlace bool) string {
	if inPlace {
		return "in-place"
	}
	return "out-of-place"
}

func memoryName(inArena bool) string {
	if inArena {
		return "arena"
	}
	return "slices"
}
