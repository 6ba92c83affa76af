package autotune

import (
	"math"
	"slices"
	"strings"
	"testing"
)

func mustNew(t *testing.T, s Space, o Options) *Tuner {
	t.Helper()
	tn, err := New(s, o)
	if err != nil {
		t.Fatal(err)
	}
	return tn
}

// finish records samples until the tuner is done.
func finish(t *testing.T, tn *Tuner, score func(Point) float64) (samples int) {
	t.Helper()
	for ; !tn.Done(); samples++ {
		if samples == 10000 {
			t.Fatal("not done after 10000 samples")
		}
		if err := tn.Record(score(tn.Next())); err != nil {
			t.Fatal(err)
		}
	}
	return samples
}

// A fixed parameter keeps its value in every point, even if other values would be better and if the value is
// outside of the bounds. Every point is within the bounds.
func TestFixedParametersDoNotMove(t *testing.T) {
	for seed := range uint64(20) {
		s := Space{FusionThreshold(1 << 30).Fix(), CycleTime(0), SegmentSize(256 << 10),
			Parameter{Name: AlgorithmName, Kind: Choice, Choices: algorithms, Default: 2}.Fix(),
			Toggle(CacheEnabledName, false).Fix()}
		o := DefaultOptions()
		o.Seed = seed
		tn, noise, moved := mustNew(t, s, o), random{seed}, map[string]bool{}
		check := func(p Point) {
			fusion, _ := p.Number(FusionThresholdName)
			alg, _ := p.Choice(AlgorithmName)
			cache, _ := p.Switch(CacheEnabledName)
			if fusion != 1<<30 || alg != "direct" || cache {
				t.Fatalf("seed %d: a fixed parameter has moved: %v", seed, p)
			}
			cycle, _ := p.Number(CycleTimeName)
			segment, _ := p.Number(SegmentSizeName)
			if cycle != 0 && cycle < 0.1 || cycle > 25 || segment < 64<<10 || segment > 8<<20 {
				t.Fatalf("seed %d: out of bounds: %v", seed, p)
			}
			moved[p.String()] = true
		}
		finish(t, tn, func(p Point) float64 {
			check(p)
			return noise.noisy(p.values[2] / (1 + p.values[0] + p.values[1]))
		})
		check(tn.Best())
		if len(moved) < 5 {
			t.Errorf("seed %d: tried only %d points", seed, len(moved))
		}
	}
}

// If there is nothing to tune, the tuner is done at once, with the defaults.
func TestNothingToTune(t *testing.T) {
	rounds := func(n int) Options {
		o := DefaultOptions()
		o.MaxRounds = n
		return o
	}
	space := Space{CycleTime(2)}
	for name, tn := range map[string]*Tuner{
		"no parameters": mustNew(t, nil, DefaultOptions()),
		"all fixed":     mustNew(t, Space{CycleTime(2).Fix()}, DefaultOptions()),
		"one value":     mustNew(t, Space{Algorithm("ring")}, DefaultOptions()),
		"no rounds":     mustNew(t, space, rounds(0)),
		"one round":     mustNew(t, space, rounds(1)),
	} {
		if !tn.Done() || !tn.Next().Equal(tn.grid.space.Default()) || !tn.Best().Equal(tn.Next()) {
			t.Errorf("%s: done is %v, next %v", name, tn.Done(), tn.Next())
		}
		if err := tn.Record(1); err != nil || tn.Step(1, 1) || len(tn.Rounds()) != 0 {
			t.Errorf("%s: a sample after the end has an effect, error %v", name, err)
		}
	}
}

// The defaults are measured first. If no point is better, they are the result, and the search ends early
// because no improvement is expected.
func TestEqualScores(t *testing.T) {
	f := hill(1)
	tn := mustNew(t, f.space, DefaultOptions())
	if !tn.Next().Equal(f.space.Default()) {
		t.Errorf("the first point is %v, want the defaults", tn.Next())
	}
	finish(t, tn, func(Point) float64 { return 7 })
	if !tn.Best().Equal(f.space.Default()) || tn.BestScore() != 7 || len(tn.Rounds()) > 12 {
		t.Errorf("best %v with %v after %d rounds", tn.Best(), tn.BestScore(), len(tn.Rounds()))
	}
}

// If the defaults are the best, or another point only seemed better, they are the result.
func TestDefaultsWinTheEnd(t *testing.T) {
	f := hill(1)
	best := func(p Point) float64 {
		if p.Equal(f.space.Default()) {
			return 10
		}
		return 5
	}
	tn := mustNew(t, f.space, DefaultOptions())
	finish(t, tn, best)
	if !tn.Best().Equal(f.space.Default()) {
		t.Errorf("best is %v, want the defaults", tn.Best())
	}
	if r := tn.Rounds(); r[len(r)-1].Final {
		t.Errorf("the last round is %v, want no comparison if no point seems better", r[len(r)-1])
	}

	// In the search all other points are better, at the end they are worse.
	tn = mustNew(t, f.space, DefaultOptions())
	finish(t, tn, func(p Point) float64 {
		if p.Equal(f.space.Default()) || tn.phase == final {
			return best(p)
		}
		return 20
	})
	if !tn.Best().Equal(f.space.Default()) || tn.BestScore() != 10 {
		t.Errorf("best is %v with %v, want the defaults with 10", tn.Best(), tn.BestScore())
	}
	rounds := tn.Rounds()
	if n := len(rounds); !rounds[n-3].Final || !rounds[n-1].Final || rounds[n-4].Final {
		t.Errorf("the last rounds are %v, want three of the final comparison", rounds[n-4:])
	}
}

// A score that is not a positive finite number is an error and changes nothing.
func TestInvalidScores(t *testing.T) {
	f := hill(5)
	run := func(bad ...float64) (points []string) {
		tn, noise := mustNew(t, f.space, DefaultOptions()), random{3}
		finish(t, tn, func(p Point) float64 {
			for _, b := range bad {
				err := tn.Record(b)
				if err == nil || !strings.Contains(err.Error(), "want a positive finite number") {
					t.Fatalf("score %v: got error %v", b, err)
				}
			}
			points = append(points, p.String())
			return noise.noisy(f.rate(p.values))
		})
		return append(points, tn.Best().String())
	}
	if a, b := run(), run(math.NaN(), math.Inf(1), math.Inf(-1), 0, -1); !slices.Equal(a, b) {
		t.Errorf("invalid scores changed the points:\n%q\n%q", a, b)
	}
}

// Options or a space that are not valid are errors.
func TestInvalidOptions(t *testing.T) {
	if _, err := New(Space{Algorithm()}, DefaultOptions()); err == nil {
		t.Error("New accepts a space that is not valid")
	}
	for want, change := range map[string]func(*Options){
		"WarmupSamples is -1, want at least 0":    func(o *Options) { o.WarmupSamples = -1 },
		"StepsPerSample is 0, want at least 1":    func(o *Options) { o.StepsPerSample = 0 },
		"SamplesPerRound is 0, want at least 1":   func(o *Options) { o.SamplesPerRound = 0 },
		"MaxRounds is -1, want at least 0":        func(o *Options) { o.MaxRounds = -1 },
		"Noise is 1.5, want a number from 0 to 1": func(o *Options) { o.Noise = 1.5 },
		"Noise is NaN, want a number from 0 to 1": func(o *Options) { o.Noise = math.NaN() },
	} {
		o := DefaultOptions()
		change(&o)
		if _, err := New(nil, o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want %s", err, want)
		}
	}
}

// Warm-up samples belong to no round. A sample is StepsPerSample steps after one that is discarded if the
// point has changed. Its score is bytes over time. Steps without bytes or time do not count.
func TestSteps(t *testing.T) {
	o := DefaultOptions()
	o.WarmupSamples, o.StepsPerSample, o.SamplesPerRound = 1, 2, 3
	tn := mustNew(t, Space{FusionThreshold(128 << 20)}, o)
	step := func(bytes int64, micros float64, sampled bool) {
		t.Helper()
		if got := tn.Step(bytes, micros); got != sampled {
			t.Errorf("Step(%v, %v) is %v, want %v", bytes, micros, got, sampled)
		}
	}
	step(1, 1, false) // discarded: the first step
	step(1, 1, false)
	step(1, 1, true) // the warm-up sample
	for _, micros := range []float64{10, 20, 1000} {
		if len(tn.Rounds()) != 0 {
			t.Error("the first round has ended early")
		}
		step(0, 5, false)
		step(-1, 5, false)
		step(5, 0, false)
		step(5, math.NaN(), false)
		step(5, math.Inf(1), false)
		step(100, micros, false)
		step(300, micros, true)
	}
	r := tn.Rounds()
	if len(r) != 1 || r[0].Score != 10 || r[0].Samples != 3 || !r[0].Point.Equal(tn.grid.space.Default()) {
		t.Fatalf("the first round is %v, want the median 400/40 of three samples", r)
	}
	if tn.Next().Equal(r[0].Point) {
		t.Error("the point has not changed after the first round")
	}
	step(1, 1e6, false) // discarded: the point has changed
	step(200, 10, false)
	step(200, 10, true)
	if tn.samples[0] != 20 {
		t.Errorf("the score is %v, want 20", tn.samples[0])
	}
	step(math.MaxInt64, 1e-300, false)
	step(math.MaxInt64, 1e-300, false) // the score would be infinite
	if tn.steps != 0 || len(tn.samples) != 1 {
		t.Error("an infinite score was recorded")
	}
}

// A round of a bad point ends after two samples. One slow sample does not end a round, and its median is not
// affected.
func TestHopelessRoundsEndEarly(t *testing.T) {
	o := DefaultOptions()
	o.WarmupSamples, o.SamplesPerRound = 0, 5
	tn := mustNew(t, Space{FusionThreshold(128 << 20)}, o)
	record := func(scores ...float64) Round {
		t.Helper()
		for _, s := range scores {
			if err := tn.Record(s); err != nil {
				t.Fatal(err)
			}
		}
		return tn.rounds[len(tn.rounds)-1]
	}
	for i, test := range []struct {
		scores []float64
		want   float64
	}{
		{[]float64{100, 1, 101, 99, 100}, 100}, {[]float64{89, 1}, 45}, {[]float64{1, 95, 96, 97, 96}, 96},
	} {
		r := record(test.scores...)
		if len(tn.rounds) != i+1 || r.Samples != len(test.scores) || r.Score != test.want {
			t.Errorf("round %d: got %d rounds and %v, want the score %v of %d samples", i, len(tn.rounds), r,
				test.want, len(test.scores))
		}
	}
}

// All points of a small space are measured, each once, and the best is found.
func TestSmallSpaces(t *testing.T) {
	s := Space{Algorithm(algorithms...), Toggle(CacheEnabledName, true)}
	o := DefaultOptions()
	tn, measured := mustNew(t, s, o), map[string]int{}
	finish(t, tn, func(p Point) float64 {
		return map[float64]float64{0: 30, 1: 50, 2: 20, 3: 70}[p.values[0]] * (1.5 + p.values[1])
	})
	for _, r := range tn.Rounds() {
		if !r.Final {
			measured[r.Point.String()]++
		}
	}
	for p, n := range measured {
		if n != 1 {
			t.Errorf("%s was measured %d times", p, n)
		}
	}
	if got, want := tn.Best().String(), "algorithm=halving-doubling cache_enabled=on"; got != want {
		t.Errorf("best is %s, want %s", got, want)
	}
}
