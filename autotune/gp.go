package autotune

import (
	"fmt"
	"math"

	"gonum.org/v1/gonum/mat"
)

// observation is a measured value of the function that a regression models.
type observation struct {
	x      []float64
	y      float64
	weight float64 // the variance of the noise of y is divided by it
}

// regression is a Gaussian process that was fitted to observations (Rasmussen and Williams, 2006, chapters 2
// and 5). Its covariance function is the Matérn function with ν = 5/2. Each dimension has a length scale of
// its own. In a dimension without order, two places have the distance 0 or 1.
//
// Length scales and noise maximise the marginal likelihood of the observations times a prior. The prior keeps
// a dimension from being ignored, or a difference from being explained by noise, while there are few
// observations.
type regression struct {
	unordered []bool // whether a dimension has no order
	all       []observation
	z         []float64 // the values y, with mean 0 and variance 1
	mean, dev float64   // of the values y

	inverse  []float64 // 1/scale² of each dimension, where scale is its length scale
	noise    float64   // variance of the noise as a fraction of the variance of the process
	variance float64   // variance of the process, in units of dev²
	chol     mat.Cholesky
	solved   mat.VecDense // covariance⁻¹ z
	lower    [][]float64  // rows of the lower triangle of the decomposition
	work     []float64    // of predict
}

const (
	// leastNoise makes the covariance matrix well conditioned if there is no noise.
	leastNoise = 1e-9
	// The prior of a length scale is a log-normal distribution around typicalScale, and that of the noise one
	// around typicalNoise. The deviations are in natural logarithms.
	typicalScale, scaleDeviation = 0.6, 0.8
	typicalNoise, noiseDeviation = 0.01, 1.5
	// The prior of the variance of the process is an inverse gamma distribution with the mode 1 and the
	// weight of priorCount observations.
	priorCount = 2
)

// fit returns the regression for the observations, of which there must be at least one. maxNoise is the
// maximum standard deviation of the noise of an observation with weight 1, as a fraction of the standard
// deviation of the process. The cost is about 150 Cholesky decompositions.
func fit(all []observation, unordered []bool, maxNoise float64) (*regression, error) {
	g := &regression{unordered: unordered, all: all, z: make([]float64, len(all))}
	g.normalise()
	dims := len(unordered)
	low, high, start := make([]float64, dims+1), make([]float64, dims+1), make([]float64, dims+1)
	for i := range dims {
		low[i], high[i], start[i] = math.Log(0.05), math.Log(5), math.Log(typicalScale)
	}
	high[dims] = math.Log(max(maxNoise*maxNoise, leastNoise))
	low[dims] = min(math.Log(1e-5), high[dims])
	start[dims] = min(math.Log(typicalNoise), high[dims])
	best := minimise(g.cost, start, low, high)
	if math.IsInf(g.cost(best), 1) {
		return nil, fmt.Errorf("autotune: fit %d scores: the covariance matrix is singular", len(all))
	}
	// cost has left the decomposition for best.
	var l mat.TriDense
	g.chol.LTo(&l)
	for i := range all {
		g.lower = append(g.lower, make([]float64, i+1))
		for j := range g.lower[i] {
			g.lower[i][j] = l.At(i, j)
		}
	}
	g.work = make([]float64, len(all))
	return g, nil
}

// normalise computes z, which has the mean 0 and the variance 1. If all values are equal, z is 0.
func (g *regression) normalise() {
	n := float64(len(g.all))
	for _, o := range g.all {
		g.mean += o.y / n
	}
	for _, o := range g.all {
		g.dev += (o.y - g.mean) * (o.y - g.mean) / n
	}
	g.dev = math.Sqrt(g.dev)
	if g.dev < 1e-12 {
		g.dev = 0 // rounding errors only
		return
	}
	for i, o := range g.all {
		g.z[i] = (o.y - g.mean) / g.dev
	}
}

// cost sets the logarithms of the length scales and of the noise, and decomposes the covariance matrix. It
// returns the negative logarithm of the posterior density of these parameters, without constants. If the
// matrix is singular, it returns infinity.
func (g *regression) cost(logs []float64) float64 {
	dims, n := len(g.unordered), len(g.all)
	g.inverse, g.noise = g.inverse[:0], exp(logs[dims])
	for _, l := range logs[:dims] {
		g.inverse = append(g.inverse, exp(-2*l))
	}
	k := mat.NewSymDense(n, nil)
	for i := range g.all {
		for j := range i {
			k.SetSym(i, j, g.correlation(g.all[i].x, g.all[j].x))
		}
		k.SetSym(i, i, 1+g.noise/g.all[i].weight)
	}
	if !g.chol.Factorize(k) {
		return math.Inf(1)
	}
	z := mat.NewVecDense(n, g.z)
	if err := g.chol.SolveVecTo(&g.solved, z); err != nil {
		return math.Inf(1)
	}
	misfit := mat.Dot(z, &g.solved)
	// This variance minimises the cost for the given length scales and noise.
	g.variance = (misfit + priorCount) / float64(n+priorCount)
	cost := 0.5*float64(n+priorCount)*(1+math.Log(g.variance)) + 0.5*g.chol.LogDet()
	for _, l := range logs[:dims] {
		cost += square((l-math.Log(typicalScale))/scaleDeviation) / 2
	}
	return cost + square((logs[dims]-math.Log(typicalNoise))/noiseDeviation)/2
}

// correlation returns the correlation of the process at two places.
func (g *regression) correlation(a, b []float64) float64 {
	r2 := 0.0
	for i, w := range g.inverse {
		d := a[i] - b[i]
		if g.unordered[i] && d != 0 {
			d = 1
		}
		r2 += d * d * w
	}
	r := math.Sqrt(5 * r2)
	return (1 + r + r*r/3) * exp(-r)
}

// predict returns the mean and the standard deviation of the process at x, in units of normalised values.
func (g *regression) predict(x []float64) (mean, deviation float64) {
	rest := 1.0 // of the variance
	for i := range g.all {
		v := g.correlation(x, g.all[i].x)
		mean += v * g.solved.AtVec(i)
		// Forward substitution: the variance that observation i explains is the square of element i.
		row := g.lower[i]
		for j, e := range g.work[:i] {
			v -= row[j] * e
		}
		g.work[i] = v / row[i]
		rest -= square(g.work[i])
	}
	return mean, math.Sqrt(g.variance * max(rest, 0))
}

// minimise returns a local minimum of f between low and high, by a search along the axes that starts at start
// and halves its steps. The last call of f has the result as its argument.
func minimise(f func([]float64) float64, start, low, high []float64) []float64 {
	x := append([]float64(nil), start...)
	best := f(x)
	for step := 1.0; step > 0.1; {
		improved := false
		for i := range x {
			for _, d := range []float64{step, -step} {
				old := x[i]
				x[i] = min(max(old+d, low[i]), high[i])
				if x[i] == old {
					continue
				}
				if c := f(x); c < best {
					best, improved = c, true
					break
				}
				x[i] = old
			}
		}
		if !improved {
			step /= 2
		}
	}
	f(x)
	return x
}

func square(x float64) float64 { return x * x }

// exp is like math.Exp, whose result depends on whether the processor has fused multiplication and addition.
// Its relative error is below 1e-13 for the arguments of this package.
func exp(x float64) float64 { return math.Exp2(x * math.Log2E) }
