package autotune

import (
	"flag"
	"fmt"
	"slices"
	"testing"
)

// seeds is the number of surfaces of each kind. The results of a seed are the same in each run.
var seeds = flag.Uint64("seeds", 20, "tune on so many surfaces of each kind; make autotune has 100")

// counts has for a way of tuning how many of the seeds have found a point within 10 % of the best, and the
// greatest number of samples of a seed.
type counts struct{ good, samples int }

// tune runs a Tuner on each surface, with the number of the surface as the seed. It counts in tuner how often
// the Tuner finds a point within 10 % of the maximum. In defaults and atRandom it counts how often the
// default point is as good, and how often the best of as many random points as the Tuner tries is.
func tune(t *testing.T, surfaces []*surface, rounds, samplesPerRound int) (tuner, defaults, atRandom counts) {
	count := func(c *counts, share float64) {
		if share >= 0.9 {
			c.good++
		}
	}
	for i, f := range surfaces {
		seed, samples := uint64(i+1), 0
		noise := random{seed << 32}
		o := DefaultOptions()
		o.Seed, o.MaxRounds, o.SamplesPerRound = seed, rounds, samplesPerRound
		tn, err := New(f.space, o)
		if err != nil {
			t.Fatal(err)
		}
		for ; !tn.Done(); samples++ {
			if err := tn.Record(noise.noisy(f.rate(tn.Next().values))); err != nil {
				t.Fatal(err)
			}
		}
		tuner.samples = max(tuner.samples, samples)
		count(&tuner, f.share(tn.Best()))
		count(&defaults, f.share(f.space.Default()))
		if got, least := f.share(tn.Best()), 0.9*f.share(f.space.Default()); got < least {
			t.Errorf("seed %d: the best is %.2f of the maximum, want at least %.2f", seed, got, least)
		}

		g := newGrid(f.space)
		best, top := f.space.Default(), 0.0
		for range rounds {
			var samples []float64
			p := g.point(g.at(noise.vector(len(g.free))))
			for range samplesPerRound {
				samples = append(samples, noise.noisy(f.rate(p.values)))
			}
			if score := median(samples); score > top {
				best, top = p, score
			}
		}
		count(&atRandom, f.share(best))
	}
	return tuner, defaults, atRandom
}

// The tuner finds settings within 10 % of the best with 40 samples, each with noise of 5 %. These include the
// samples of warm-up and of the comparison at the end. The share of seeds for which it does so is at least
// the given one. Random points and the defaults are worse by far, so the surfaces are not easy.
func TestFindsGoodSettings(t *testing.T) {
	surfaces := make(map[string][]*surface)
	for seed := uint64(1); seed <= *seeds; seed++ {
		surfaces["hill"] = append(surfaces["hill"], hill(seed))
		surfaces["job"] = append(surfaces["job"], job(seed))
	}
	for _, test := range []struct {
		surface                 string
		rounds, samplesPerRound int
		samples, want, random   int // want and random in percent of the seeds
	}{
		{"hill", 28, 1, 40, 95, 50},
		{"hill", 20, 3, 72, 90, 50},
		{"job", 28, 1, 40, 90, 80},
		{"job", 20, 3, 72, 85, 80},
	} {
		t.Run(fmt.Sprintf("%s/%dx%d", test.surface, test.rounds, test.samplesPerRound), func(t *testing.T) {
			tuner, defaults, atRandom := tune(t, surfaces[test.surface], test.rounds, test.samplesPerRound)
			t.Logf("%d of %d with at most %d samples; defaults %d, random points %d", tuner.good, *seeds,
				tuner.samples, defaults.good, atRandom.good)
			percent := func(n int) int { return int(*seeds) * n / 100 }
			want := percent(test.want)
			if *seeds < 100 {
				want-- // few seeds scatter more
			}
			if tuner.good < want || tuner.samples > test.samples {
				t.Errorf("%d of %d with at most %d samples, want %d with %d", tuner.good, *seeds,
					tuner.samples, want, test.samples)
			}
			if defaults.good > percent(10) || atRandom.good > percent(test.random) {
				t.Errorf("defaults %d, random points %d: the surface is too easy", defaults.good,
					atRandom.good)
			}
		})
	}
}

// A proposal is the same if the seed and the scores are the same.
func TestSameSeedSameProposals(t *testing.T) {
	run := func(seed uint64) (points []string) {
		f, noise := hill(3), random{9}
		o := DefaultOptions()
		o.Seed = seed
		tn, err := New(f.space, o)
		if err != nil {
			t.Fatal(err)
		}
		for !tn.Done() {
			points = append(points, tn.Next().String())
			if err := tn.Record(noise.noisy(f.rate(tn.Next().values))); err != nil {
				t.Fatal(err)
			}
		}
		return points
	}
	if a, b := run(1), run(1); !slices.Equal(a, b) {
		t.Errorf("the same seed gave\n%q and\n%q", a, b)
	}
	if a, b := run(1), run(2); slices.Equal(a, b) {
		t.Error("two seeds gave the same points")
	}
}
