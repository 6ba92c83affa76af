package autotune

import (
	"math"
	"slices"
	"testing"
)

// value returns the value that a normalised value stands for.
func (g *regression) value(z float64) float64 { return g.mean + z*g.dev }

// samples returns observations of a smooth function of two ordered dimensions and one without order.
func samples(r *random, n int, noise float64) (all []observation) {
	for range n {
		x := []float64{r.float(), r.float(), math.Floor(3 * r.float())}
		y := 5 + math.Sin(3*x[0]) + 0.5*square(x[1]-0.3) + 0.4*x[2] + noise*(2*r.float()-1)
		all = append(all, observation{x, y, 1})
	}
	return all
}

var threeDims = []bool{false, false, true}

func mustFit(t *testing.T, all []observation, unordered []bool, maxNoise float64) *regression {
	t.Helper()
	g, err := fit(all, unordered, maxNoise)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// Without noise, the regression has the observed values at the observed places, without doubt. In between it
// is near the function, and far away it is in doubt.
func TestRegressionInterpolates(t *testing.T) {
	for seed := range uint64(20) {
		r := random{seed}
		all := samples(&r, 5+int(seed), 0)
		g := mustFit(t, all, threeDims, 0)
		for _, o := range all {
			mean, deviation := g.predict(o.x)
			if got := g.value(mean); math.Abs(got-o.y) > 1e-4 || deviation > 1e-3 {
				t.Errorf("seed %d: got %v ± %v at an observation of %v", seed, got, deviation, o.y)
			}
		}
		if _, deviation := g.predict([]float64{30, 30, 7}); deviation < 0.3 {
			t.Errorf("seed %d: the deviation far from all observations is %v", seed, deviation)
		}
	}
	r := random{1}
	g, worst := mustFit(t, samples(&r, 40, 0), threeDims, 0), 0.0
	for _, o := range samples(&r, 200, 0) {
		mean, _ := g.predict(o.x)
		worst = max(worst, math.Abs(g.value(mean)-o.y))
	}
	if worst > 0.2 { // the values are from 5 to 7
		t.Errorf("the worst error is %v", worst)
	}
}

// With noise, the regression is nearer to the function than the observations are, and the fitted noise is
// near the true one.
func TestRegressionSmooths(t *testing.T) {
	r := random{4}
	all := samples(&r, 60, 0.4)
	g := mustFit(t, all, threeDims, 1)
	observed, modelled := 0.0, 0.0
	for _, o := range all {
		truth := 5 + math.Sin(3*o.x[0]) + 0.5*square(o.x[1]-0.3) + 0.4*o.x[2]
		mean, _ := g.predict(o.x)
		observed += square(o.y - truth)
		modelled += square(g.value(mean) - truth)
	}
	if modelled > 0.5*observed {
		t.Errorf("squared errors: %v of the model and %v of the observations", modelled, observed)
	}
	// The noise is uniform from -0.4 to 0.4, so its deviation is 0.4/√3.
	if got, want := math.Sqrt(g.noise*g.variance)*g.dev, 0.4/math.Sqrt(3); got < want/2 || got > want*2 {
		t.Errorf("the deviation of the noise is %v, want about %v", got, want)
	}
	// An observation with more weight pulls the regression nearer.
	far := func(weight float64) float64 {
		all[0].weight = weight
		g := mustFit(t, all, threeDims, 1)
		mean, _ := g.predict(all[0].x)
		return math.Abs(g.value(mean) - all[0].y)
	}
	if light, heavy := far(1), far(1000); heavy >= light {
		t.Errorf("the distance is %v with weight 1 and %v with weight 1000", light, heavy)
	}
}

// Length scales tell a dimension that matters from one that does not.
func TestRegressionFindsWhatMatters(t *testing.T) {
	r := random{8}
	var all []observation
	for range 30 {
		x := r.vector(2)
		all = append(all, observation{x, math.Sin(6 * x[0]), 1})
	}
	g := mustFit(t, all, []bool{false, false}, 0.5)
	if g.inverse[0] < 4*g.inverse[1] {
		t.Errorf("1/scale² is %v, want the first to be greater by far", g.inverse)
	}
}

// Places without order are equally far from each other, whatever their numbers are.
func TestUnorderedPlaces(t *testing.T) {
	g := &regression{unordered: []bool{true}, inverse: []float64{1}}
	if a, b := g.correlation([]float64{0}, []float64{1}), g.correlation([]float64{0}, []float64{3}); a != b {
		t.Errorf("correlations of different words: %v and %v", a, b)
	}
	if c := g.correlation([]float64{2}, []float64{2}); c != 1 {
		t.Errorf("correlation of a word with itself: %v", c)
	}
}

// Equal values give a regression that expects no other value, and a single value gives one too.
func TestRegressionOfEqualValues(t *testing.T) {
	r := random{2}
	all := samples(&r, 10, 0)
	for i := range all {
		all[i].y = 0.1
	}
	for _, all := range [][]observation{all, all[:1]} {
		g := mustFit(t, all, threeDims, 0.8)
		mean, _ := g.predict([]float64{0.5, 0.5, 1})
		if math.Abs(g.value(mean)-0.1) > 1e-12 || g.dev != 0 {
			t.Errorf("got %v with deviation %v, want 0.1 and 0", g.value(mean), g.dev)
		}
	}
}

// exp has the results of math.Exp.
func TestExp(t *testing.T) {
	for x := -40.0; x <= 40; x += 0.01 {
		if got, want := exp(x), math.Exp(x); math.Abs(got-want) > 1e-13*want {
			t.Fatalf("exp(%v) is %v, want %v", x, got, want)
		}
	}
}

// In each dimension of a hypercube, each part has one value.
func TestHypercube(t *testing.T) {
	r := random{5}
	all := r.hypercube(7, 3)
	for d := range 3 {
		var parts []int
		for _, x := range all {
			parts = append(parts, int(7*x[d]))
		}
		slices.Sort(parts)
		if !slices.Equal(parts, []int{0, 1, 2, 3, 4, 5, 6}) {
			t.Errorf("dimension %d has the parts %v", d, parts)
		}
	}
}
