package autotune

import (
	"cmp"
	"math"
	"slices"
)

const (
	// exploration is the improvement, in units of normalised values, that is subtracted from the expected
	// improvement. It is Horovod's value of ξ.
	exploration = 0.01
	// maxCandidates is the number of points whose expected improvement is computed before refinement.
	maxCandidates = 1000
	// refined is the number of candidates that are refined.
	refined = 5
)

// expectedImprovement returns the expectation of max(0, v - best - exploration), if v has a normal
// distribution (Mockus, 1978; Jones, 1998).
func expectedImprovement(mean, deviation, best float64) float64 {
	gain := mean - best - exploration
	if deviation < 1e-9 {
		return max(gain, 0)
	}
	z := gain / deviation
	return max(gain*normalCDF(z)+deviation*exp(-z*z/2)/math.Sqrt(2*math.Pi), 0)
}

// normalCDF returns the cumulative distribution function of the standard normal distribution, with an
// absolute error below 1e-14. math.Erfc is not used, because it calls math.Exp (see exp).
//
// The method is algorithm 5666 of Hart (Computer Approximations, 1968), as given by West (Better
// approximations to cumulative normal functions, 2005).
func normalCDF(x float64) float64 {
	a, tail := math.Abs(x), 0.0
	switch e := exp(-a * a / 2); {
	case a > 37:
	case a < 7.07106781186547:
		p := 3.52624965998911e-02*a + 0.700383064443688
		p = p*a + 6.37396220353165
		p = p*a + 33.912866078383
		p = p*a + 112.079291497871
		p = p*a + 221.213596169931
		p = p*a + 220.206867912376
		q := 8.83883476483184e-02*a + 1.75566716318264
		q = q*a + 16.064177579207
		q = q*a + 86.7807322029461
		q = q*a + 296.564248779674
		q = q*a + 637.333633378831
		q = q*a + 793.826512519948
		q = q*a + 440.413735824752
		tail = e * p / q
	default:
		tail = e / (a + 1/(a+2/(a+3/(a+4/(a+0.65))))) / math.Sqrt(2*math.Pi)
	}
	if x > 0 {
		return 1 - tail
	}
	return tail
}

// propose returns the place outside of taken with the greatest expected improvement, and that improvement in
// units of normalised values. It reports false if all places are taken.
//
// Small grids are searched completely. In others, seeded random places and the surroundings of the best
// observed places are candidates, and the best candidates are refined by moving to neighbours.
func (g *grid) propose(r *regression, best float64, observed []place, taken func(place) bool,
	random *random) (place, float64, bool) {
	type candidate struct {
		at place
		ei float64
	}
	score := func(p place) float64 {
		mean, deviation := r.predict(g.coordinates(p))
		return expectedImprovement(mean, deviation, best)
	}
	var candidates []candidate
	add := func(p place) {
		if !taken(p) {
			candidates = append(candidates, candidate{slices.Clone(p), score(p)})
		}
	}
	complete := g.size(maxCandidates+1) <= maxCandidates
	if complete {
		for _, p := range g.all() {
			add(p)
		}
	} else {
		for range maxCandidates {
			add(g.at(random.vector(len(g.free))))
		}
		for _, p := range observed {
			g.neighbours(p, add)
		}
	}
	if len(candidates) == 0 {
		return nil, 0, false
	}
	// The sort is stable, so equal improvements have one order on all machines.
	slices.SortStableFunc(candidates, func(a, b candidate) int { return cmp.Compare(b.ei, a.ei) })
	top := candidates[0]
	if complete {
		return top.at, top.ei, true
	}
	for _, c := range candidates[:min(refined, len(candidates))] {
		for moved := true; moved; {
			moved = false
			g.neighbours(c.at, func(p place) {
				if taken(p) {
					return
				}
				if ei := score(p); ei > c.ei {
					c, moved = candidate{slices.Clone(p), ei}, true
				}
			})
		}
		if c.ei > top.ei {
			top = c
		}
	}
	return top.at, top.ei, true
}
