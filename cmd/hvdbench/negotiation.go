package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// negotiationCost is what a negotiated step costs beside a raw one on the same tensors. Times are means in milliseconds; a step
// lasts until the last rank has finished it.
type negotiationCost struct {
	workload, dt       string
	pairs              int
	negotiated, raw    float64
	percent, low, high float64 // see relativeDifference
}

func (n *negotiationCost) String() string {
	return fmt.Sprintf("%s, %s: negotiated %.3f ms, raw %.3f ms a step; negotiation costs %.2f%% of the raw step, 95%% interval %.2f%% to %.2f%% (bootstrap of %d pairs)",
		n.workload, n.dt, n.negotiated, n.raw, n.percent, n.low, n.high, n.pairs)
}

// compare alternates negotiated and raw steps over g. The first of a pair alternates too, so that neither gains by what
// the other leaves in the caches, nor by the machine growing slower.
func (b *benchmark) compare(ctx context.Context, g *gradients) error {
	teams := [2]*team{b.job.negotiated, b.job.raw}
	var steps [2]func(ctx context.Context) error
	var times [2][]float64
	for i, t := range teams {
		times[i] = make([]float64, b.negotiation)
		run, _, err := g.step(t, asynchronous)
		if err != nil {
			return err
		}
		steps[i] = run
		r := &result{collective: fmt.Sprintf("%s, %v", g.name, t)}
		if err := b.checkStep(ctx, g, run, r); err != nil {
			return err
		}
		b.wrong += r.wrong
	}
	g.clear()
	for pair := -b.warmup; pair < b.negotiation; pair++ {
		for k := range teams {
			i := (k + pair&1) % 2
			if b.touch {
				for _, t := range g.tensors {
					touch(t.buf, touchNumbers)
				}
			}
			if err := teams[i].barrier(ctx); err != nil {
				return err
			}
			start := time.Now()
			err := steps[i](ctx)
			took := time.Since(start)
			if err != nil {
				return err
			}
			if pair >= 0 {
				times[i][pair] = float64(took) / 1000
			}
		}
	}
	for i := range times {
		byRank, err := b.team.gather(ctx, times[i])
		if err != nil {
			return err
		}
		times[i] = combine(byRank, ofMax)
	}
	b.cost = &negotiationCost{workload: g.name, dt: g.dt.String(), pairs: b.negotiation, negotiated: mean(times[0]) / 1000, raw: mean(times[1]) / 1000}
	b.cost.percent, b.cost.low, b.cost.high = relativeDifference(times[0], times[1])
	return nil
}

// relativeDifference returns the mean of a[i]-b[i] in percent of the mean of b, and its 95% interval by the bootstrap: pairs
// are drawn with replacement, and the interval is from the 2.5th to the 97.5th percentile of what 10,000 samples give
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
	samples := make([]float64, 10000)
	for s := range samples {
		samples[s] = of(func(int) int { return random.IntN(len(a)) })
	}
	slices.Sort(samples)
	return percent, quantile(samples, 0.025), quantile(samples, 0.975)
}
