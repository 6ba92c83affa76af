package autotune

import (
	"math"
	"slices"
	"testing"
)

// normalCDF has the results of math.Erfc.
func TestNormalCDF(t *testing.T) {
	for x := -40.0; x <= 40; x += 0.01 {
		if got, want := normalCDF(x), math.Erfc(-x/math.Sqrt2)/2; math.Abs(got-want) > 1e-14 {
			t.Fatalf("normalCDF(%v) is %v, want %v", x, got, want)
		}
	}
}

// The formula of the expected improvement is the integral that it stands for.
func TestExpectedImprovement(t *testing.T) {
	for _, test := range []struct{ mean, deviation, best float64 }{
		{0, 1, 0}, {1, 0.5, 0}, {-2, 1, 0}, {0.3, 0.01, 0.5}, {0.3, 2, 0.5}, {1, 0, 0}, {-1, 0, 0},
	} {
		want := max(test.mean-test.best-exploration, 0)
		if test.deviation > 0 {
			want = 0
			const step = 1e-4
			for z := -9.0; z < 9; z += step {
				gain := test.mean + z*test.deviation - test.best - exploration
				want += max(gain, 0) * math.Exp(-z*z/2) / math.Sqrt(2*math.Pi) * step
			}
		}
		if got := expectedImprovement(test.mean, test.deviation, test.best); math.Abs(got-want) > 1e-5 {
			t.Errorf("%v: got %v, want %v", test, got, want)
		}
	}
}

// A proposal is a place that was not taken, with a greater expected improvement than random places and than
// its neighbours.
func TestProposals(t *testing.T) {
	f := hill(2)
	g, r := newGrid(f.space), random{6}
	var all []observation
	var places []place
	for range 12 {
		at := g.at(r.vector(len(g.free)))
		places = append(places, at)
		all = append(all, observation{g.coordinates(at), f.rate(g.point(at).values), 1})
	}
	m := mustFit(t, all, g.unordered(), 0.8)
	taken := func(at place) bool {
		return slices.ContainsFunc(places, func(p place) bool { return slices.Equal(p, at) })
	}
	best, _ := m.predict(all[0].x)
	for range 5 {
		at, improvement, ok := g.propose(m, best, places[:3], taken, &r)
		if !ok || taken(at) {
			t.Fatalf("proposed %v, %v", at, ok)
		}
		better := 0
		for range 300 {
			mean, deviation := m.predict(g.coordinates(g.at(r.vector(len(g.free)))))
			if expectedImprovement(mean, deviation, best) > improvement {
				better++
			}
		}
		if better > 0 {
			t.Errorf("%d of 300 random places are better than the proposal", better)
		}
		g.neighbours(at, func(p place) {
			mean, deviation := m.predict(g.coordinates(p))
			if !taken(p) && expectedImprovement(mean, deviation, best) > improvement {
				t.Errorf("the neighbour %v is better than the proposal %v", p, at)
			}
		})
		places = append(places, at)
	}
}

// BenchmarkRound measures what the last sample of a late round computes.
func BenchmarkRound(b *testing.B) {
	f := job(1)
	g, r := newGrid(f.space), random{6}
	var all []observation
	for range 20 {
		at := g.at(r.vector(len(g.free)))
		all = append(all, observation{g.coordinates(at), f.rate(g.point(at).values), 1})
	}
	for b.Loop() {
		m, err := fit(all, g.unordered(), 0.8)
		if err != nil {
			b.Fatal(err)
		}
		g.propose(m, 1, []place{g.start()}, func(place) bool { return false }, &r)
	}
}
