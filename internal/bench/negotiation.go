package bench

import (
	"context"
	"fmt"
	"time"
)

// Negotiation is what a negotiated step costs beside a raw one on the same tensors.
type Negotiation struct {
	Workload string `json:"workload"`
	Type     string `json:"type"`
	Pairs    int    `json:"pairs"`
	// NegotiatedMs and RawMs are mean steps; a step lasts until the last rank has done it.
	NegotiatedMs float64 `json:"negotiated_ms"`
	RawMs        float64 `json:"raw_ms"`
	// Percent is the mean of the paired differences in percent of the mean raw step, and Low to High its 95% interval by
	// the bootstrap.
	Percent float64 `json:"percent"`
	Low     float64 `json:"percent_low"`
	High    float64 `json:"percent_high"`
}

func (n *Negotiation) String() string {
	return fmt.Sprintf("%s, %s: negotiated %.3f ms, raw %.3f ms a step; negotiation costs %.2f%% of the raw step, 95%% interval %.2f%% to %.2f%% (bootstrap of %d pairs)",
		n.Workload, n.Type, n.NegotiatedMs, n.RawMs, n.Percent, n.Low, n.High, n.Pairs)
}

// compare alternates negotiated and raw steps over g. Which of a pair comes first alternates too, so that neither gains
// by what the other leaves in the caches, nor by the machine growing slower.
func (r *run) compare(ctx context.Context, g *gradients) error {
	type side struct {
		team  *team
		run   func(ctx context.Context) error
		times []float64
	}
	sides := [2]side{{team: r.job.negotiated}, {team: r.job.raw}}
	for i := range sides {
		s := &sides[i]
		s.times = make([]float64, r.Negotiation)
		r.progress.show("%s, %v, check", g.name, s.team)
		run, _, err := g.step(s.team, asynchronous)
		if err != nil {
			return err
		}
		s.run = run
		row := &Row{Collective: fmt.Sprintf("%s, %v", g.name, s.team), Wrong: unchecked}
		if err := r.checkStep(ctx, g, run, row); err != nil {
			return err
		}
		r.wrong += row.Wrong
	}
	g.clear()
	for pair := -r.Warmup; pair < r.Negotiation; pair++ {
		if pair >= 0 {
			r.progress.show("%s, negotiated and raw: pair %d of %d", g.name, pair+1, r.Negotiation)
		}
		for i := range sides {
			s := &sides[(i+pair&1)%2]
			if r.Touch {
				for _, t := range g.tensors {
					touch(t.buf, touchNumbers)
				}
			}
			if err := s.team.barrier(ctx); err != nil {
				return err
			}
			start := time.Now()
			err := s.run(ctx)
			took := time.Since(start)
			if err != nil {
				return err
			}
			if pair >= 0 {
				s.times[pair] = float64(took) / 1000
			}
		}
	}
	var means [2][]float64
	for i, s := range sides {
		byRank, err := r.team.gather(ctx, s.times)
		if err != nil {
			return err
		}
		means[i] = combine(byRank, OfMax)
	}
	r.cost = &Negotiation{Workload: g.name, Type: g.dt.String(), Pairs: r.Negotiation, NegotiatedMs: mean(means[0]) / 1000, RawMs: mean(means[1]) / 1000}
	r.cost.Percent, r.cost.Low, r.cost.High = relativeDifference(means[0], means[1])
	return nil
}
