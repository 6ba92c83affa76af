package autotune

import "math"

// surface is a function with a known maximum.
type surface struct {
	space Space
	rate  func(values []float64) float64 // the score without noise; values are those of a point
	best  float64
}

func newSurface(s Space, rate func(values []float64) float64) *surface {
	f := &surface{s, rate, 0}
	g := newGrid(s)
	for _, at := range g.all() {
		f.best = max(f.best, rate(g.point(at).values))
	}
	return f
}

// share returns the score of p as a fraction of the maximum.
func (f *surface) share(p Point) float64 { return f.rate(p.values) / f.best }

// between returns a random number from a to b whose logarithm is uniformly distributed.
func (r *random) between(a, b float64) float64 { return a * math.Pow(b/a, r.float()) }

// noisy returns a score with noise of 5 %.
func (r *random) noisy(score float64) float64 {
	normal := math.Sqrt(-2*math.Log(1-r.float())) * math.Cos(2*math.Pi*r.float())
	return score * math.Exp(0.05*normal)
}

var algorithms = []string{"auto", "ring", "direct", "halving-doubling"}

// hill is a smooth surface with one maximum at a random point for each algorithm. Far from it, the score is
// 30 % of the maximum.
func hill(seed uint64) *surface {
	r := random{seed}
	s := Space{FusionThreshold(128 << 20), CycleTime(0), SegmentSize(256 << 10), Algorithm(algorithms...)}
	var at, width [3]float64
	for i := range at {
		at[i], width[i] = r.float(), 0.3+0.4*r.float()
	}
	var height, shift []float64
	for range algorithms {
		height, shift = append(height, 0.6+0.4*r.float()), append(shift, 0.2*r.float()-0.1)
	}
	return newSurface(s, func(values []float64) float64 {
		alg, d := int(values[3]), 0.0
		for i := range at {
			d += square((s[i].coordinate(values[i]) - at[i] - shift[alg]) / width[i])
		}
		return 1000 * height[alg] * (0.3 + 0.7*exp(-d/2))
	})
}

// job models the step of a training job. Its five parameters have kinks and depend on each other. Gradients
// become ready during the computation, and half of the communication overlaps with it. All times are in
// milliseconds.
func job(seed uint64) *surface {
	r := random{seed}
	s := Space{FusionThreshold(128 << 20), CycleTime(0), SegmentSize(256 << 10), Algorithm(algorithms...),
		Toggle(CacheEnabledName, true)}
	total, tensors, compute := r.between(20e6, 400e6), r.between(30, 300), r.between(20, 200)
	latency := []float64{0, r.between(0.03, 1), r.between(0.02, 0.4), r.between(0.03, 0.6)}
	// in bytes per millisecond
	speed := []float64{0, r.between(0.8e6, 3e6), r.between(0.4e6, 2e6), r.between(0.5e6, 2.5e6)}
	processorCache := r.between(1<<20, 64<<20)
	segment, request := r.between(0.002, 0.05), r.between(0.005, 0.1)
	each := total / tensors
	return newSurface(s, func(values []float64) float64 {
		threshold, cycle, segmentBytes, alg := values[0], values[1], values[2], int(values[3])
		// A grant has what fits into the threshold and became ready during a cycle.
		size := max(each, min(threshold, total))
		size = max(size, min(max(threshold, each), total*cycle/compute))
		if alg == 0 {
			if alg = 1; size < 1e6 {
				alg = 2
			}
		}
		operation := latency[alg] + request + cycle/2 + size/segmentBytes*segment +
			size/speed[alg]*(1+0.25/(1+processorCache/size)) + 2*min(segmentBytes, size)/speed[alg]
		if values[4] == 0 {
			operation += 0.3 * request * size / each
		}
		communication := total / size * operation
		return total / 1000 / (max(compute, communication/2) + communication/2 + operation)
	})
}
