package bench

import (
	"math"
	"math/rand/v2"
	"slices"
)

// summary describes a sample of times, in microseconds.
type summary struct {
	mean, min, p50, p99, max float64
}

// summarize sorts times.
func summarize(times []float64) summary {
	slices.Sort(times)
	return summary{
		mean: mean(times), min: quantile(times, 0), p50: quantile(times, 0.5),
		p99: quantile(times, 0.99), max: quantile(times, 1),
	}
}

func mean(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}

// quantile is that of sorted values, interpolated between neighbours (definition 7 of Hyndman and Fan, 1996); at 0.5 it
// is the median.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	at := q * float64(len(sorted)-1)
	low := int(at)
	if low+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[low] + (at-float64(low))*(sorted[low+1]-sorted[low])
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return quantile(sorted, 0.5)
}

// resamples is the number of bootstrap samples.
const resamples = 10000

// relativeDifference is the mean of a[i]-b[i] in percent of the mean of b, and its 95% interval by the bootstrap: pairs
// are drawn with replacement, and the interval is from the 2.5th to the 97.5th percentile of what the samples give
// (Efron, 1979). It assumes no distribution, and is the same in every run on the same values.
func relativeDifference(a, b []float64) (percent, low, high float64) {
	of := func(index func(i int) int) float64 {
		difference, base := 0.0, 0.0
		for i := range a {
			k := index(i)
			difference += a[k] - b[k]
			base += b[k]
		}
		return 100 * difference / base
	}
	percent = of(func(i int) int { return i })
	random := rand.New(rand.NewPCG(1, 2))
	samples := make([]float64, resamples)
	for s := range samples {
		samples[s] = of(func(int) int { return random.IntN(len(a)) })
	}
	slices.Sort(samples)
	return percent, quantile(samples, 0.025), quantile(samples, 0.975)
}
