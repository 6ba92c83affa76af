package report

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// noise is how the times of a run vary from step to step: by 5 %, with a correlation rho of successive steps
// (AR(1)); one step in 50 is an outlier that may take several times as long. If drift is set, times also rise
// and fall by 3 % every 120 steps, and become 2 % shorter over the run. If tenth is set, every tenth step
// takes twice as long.
type noise struct {
	rho          float64
	drift, tenth bool
}

// run simulates a run of which a step takes 10 ms, and tensor i takes i+1 ms, or slower times as long for
// tensor 3.
func (k noise) run(rng *rand.Rand, steps, tensors int, slower float64) *Report {
	times := func(usual float64) []float64 {
		all, x, phase := make([]float64, steps), rng.NormFloat64(), 2*math.Pi*rng.Float64()
		for i := range all {
			x = k.rho*x + math.Sqrt(1-k.rho*k.rho)*rng.NormFloat64()
			all[i] = usual * (1 + 0.05*x)
			if k.drift {
				wave := math.Sin(phase + 2*math.Pi*float64(i)/120)
				all[i] += usual * (0.03*wave - 0.02*float64(i)/float64(steps))
			}
			if k.tenth && i%10 == 0 {
				all[i] += usual
			}
			if rng.IntN(50) == 0 {
				all[i] += usual * min(math.Pow(rng.Float64(), -0.7)-1, 20)
			}
		}
		return all
	}
	r := &Report{series: make(map[string]series)}
	held, begins, now := times(300), []time.Duration(nil), time.Duration(0)
	for i, us := range times(10_000) {
		r.StepList = append(r.StepList, Step{Number: uint64(i), Steps: 1, LengthUS: us, AnyHeldUS: held[i]})
		begins, now = append(begins, now), now+time.Duration(us*nanosPerMicro)
	}
	r.lengths = stepLengths(begins)
	for i := range tensors {
		name, usual, s := fmt.Sprint("grad.", i), 1000*float64(i+1), series{}
		if i == 3 {
			usual *= slower
		}
		for at, us := range times(usual) {
			s.add(at, us*nanosPerMicro)
		}
		r.series[name], r.TensorTable = s, append(r.TensorTable, Tensor{Name: name})
	}
	return r
}

// claims returns the rows of a comparison in which a difference was found.
func claims(c *Comparison) (found []Difference) {
	for _, d := range c.Rows {
		if d.Differs {
			found = append(found, d)
		}
	}
	return found
}

var steady, drifting, tenth = noise{}, noise{rho: 0.7, drift: true}, noise{tenth: true}

// Of 100 pairs of equal runs, a difference is found in at most five, also if one is so long that only a
// sample of its times is kept.
func TestEqualRuns(t *testing.T) {
	for _, c := range []struct {
		noise
		steps, longer, tensors int
	}{
		{steady, 101, 101, 20}, {steady, 200, 200, 50}, {noise{rho: 0.7}, 200, 200, 20},
		{drifting, 101, 101, 20}, {drifting, 400, 400, 20}, {tenth, 1500, 5000, 5}, {tenth, 300, 5000, 5},
	} {
		wrong := 0
		for seed := range uint64(100) {
			rng := rand.New(rand.NewPCG(seed, uint64(c.steps)))
			r := Compare(c.run(rng, c.steps, c.tensors, 1), c.run(rng, c.longer, c.tensors, 1), "a", "b")
			if len(claims(r)) > 0 {
				wrong++
			} else if !strings.HasPrefix(r.Verdict, "no difference found, in the steps (") {
				t.Errorf("got the verdict %q", r.Verdict)
			}
			want := c.tensors + 3
			if c.longer > mostLonger*c.steps {
				want = c.tensors + 1 // without means
			}
			if len(r.Rows) != want {
				t.Fatalf("got %d rows, want %d", len(r.Rows), want)
			}
		}
		t.Logf("%+v: a difference in %d pairs", c, wrong)
		if wrong > 5 {
			t.Errorf("%+v: a difference was found in %d of 100 pairs of equal runs", c, wrong)
		}
	}
}

// If one of 20 tensors takes 5 % longer, this is found in at least 19 of 20 pairs of runs.
func TestSlowerTensor(t *testing.T) {
	for _, c := range []struct {
		noise
		steps int
	}{{steady, 400}, {drifting, 1000}, {drifting, 3000}} {
		found := 0
		for seed := range uint64(20) {
			rng := rand.New(rand.NewPCG(seed, uint64(c.steps)))
			r := Compare(c.run(rng, c.steps, 20, 1), c.run(rng, c.steps, 20, 1.05), "a", "b")
			for _, d := range claims(r) {
				if d.Tensor == "grad.3" && d.LowUS > 0 {
					found++
				}
			}
		}
		t.Logf("%+v: found in %d pairs", c, found)
		if found < 19 {
			t.Errorf("%+v: the slower tensor was found in %d of 20 pairs", c, found)
		}
	}
}

// The verdict says which of the steps and tensors differ, and how the runs could be compared if they cannot.
func TestVerdictOfComparison(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	a, b := drifting.run(rng, 1000, 20, 1), drifting.run(rng, 1000, 20, 1.2)
	slow := drifting.run(rng, 1000, 20, 1)
	for i := range slow.StepList {
		slow.StepList[i].LengthUS *= 1.1
		slow.StepList[i].AnyHeldUS *= 3
		slow.lengths[min(i, len(slow.lengths)-1)] *= 1.1
	}
	delete(slow.series, "grad.7")
	for _, c := range []struct {
		a, b *Report
		want []string
	}{
		{a, b, []string{"no difference found in the time of a step (median ",
			"; 1 of 20 tensors differ, most clearly grad.3 ("}},
		{a, slow, []string{"a step takes ", " longer in B (median ",
			"; the time for which a rank held up all others differs (", "; no difference found in 19 tensors",
			"note: 1 of 20 tensors are not compared"}},
		{slow, a, []string{" less in B (median "}},
		{a, drifting.run(rng, 100, 20, 1), []string{"cannot be compared: A has 999 complete steps after the start-up, and B has 99, want 100 or more"}},
	} {
		var text strings.Builder
		if err := Compare(c.a, c.b, "a/", "b/").WriteText(&text); err != nil {
			t.Fatal(err)
		}
		for _, want := range append(c.want, "A: a/: ", "B: b/: ") {
			if !strings.Contains(text.String(), want) {
				t.Errorf("got %s\nwant %q", text.String(), want)
			}
		}
	}
}

// A series that has left out times has times from the whole run, those of the same operations of all ranks.
func TestSeriesLeavesOutTimes(t *testing.T) {
	for _, count := range []int{0, 1, maxTimes, maxTimes + 1, 2*maxTimes + 1, 5*maxTimes + 3} {
		var s series
		for rank := range 2 {
			for at := range count {
				s.add(at, float64(1000*at+10*rank))
			}
		}
		got := s.micros()
		if count > 0 && len(got) < count/s.per || len(got) > maxTimes {
			t.Fatalf("%d times: got %d entries of %d each", count, len(got), s.per)
		}
		for i, us := range got {
			at := math.Round(us)
			if math.Abs(us-at-0.005) > 1e-3 || int(at)/max(s.per, 1) != i || !chosen(int(at), s.per) {
				t.Errorf("%d times: entry %d: got %g us", count, i, us)
			}
		}
	}
}
