package conformance

import (
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/gohvd/gohvd/internal/tensor"
)

// reduction has the parameters that determine what an allreduce or reducescatter computes.
type reduction struct {
	dt        tensor.DType
	op        tensor.ReduceOp
	pre, post float64
	wire      tensor.DType // the type to which contributions are compressed; Invalid if they are not
	device    bool         // the tensors are on CUDA devices
}

// divisor returns the number by which an average divides the sum. For other reductions it returns 1. size is
// the number of members of the set, and active is the number of members that have contributed.
func (r reduction) divisor(size, active int) float64 {
	switch r.op {
	case tensor.Average:
		return float64(size)
	case tensor.AverageActive:
		return float64(active)
	}
	return 1
}

// ints returns the exact result of reducing integers or bools. The first argument has the inputs of the
// members that contribute. size is the number of all members.
func (r reduction) ints(in [][]int64, size int) []int64 {
	out := make([]int64, len(in[0]))
	divisor := r.divisor(size, len(in))
	for i := range out {
		acc := scaleInt(r.dt, in[0][i], r.pre)
		for _, v := range in[1:] {
			x := scaleInt(r.dt, v[i], r.pre)
			switch r.op {
			case tensor.Min:
				acc = min(acc, x)
			case tensor.Max:
				acc = max(acc, x)
			case tensor.Product:
				acc *= x // the product is modulo 2^64, and wrap reduces it to the type
			default:
				acc += x
			}
		}
		acc = wrap(r.dt, acc)
		if divisor != 1 && r.post == 1 {
			out[i] = acc / int64(divisor)
		} else {
			out[i] = scaleInt(r.dt, acc, r.post/divisor)
		}
	}
	return out
}

// scaleInt returns x*f, computed in float64 and truncated toward zero. If the result exceeds the limits of
// dt, scaleInt returns the limit.
func scaleInt(dt tensor.DType, x int64, f float64) int64 {
	if f == 1 {
		return x
	}
	lo, hi := limits(dt)
	switch y := math.Trunc(float64(x) * f); {
	case y <= float64(lo):
		return lo
	case y >= float64(hi):
		return hi
	default:
		return int64(y)
	}
}

// interval is the set of right results for one element: the numbers from lo to hi. If both are NaN, the
// result must be NaN. If both have the same bits, the result must have these bits. If orNaN is set, NaN is
// right too.
type interval struct {
	lo, hi float64
	orNaN  bool
}

func exactly(x float64) interval { return interval{lo: x, hi: x} }

// around returns the interval from x-d to x+d. If x is not finite or d is 0, the interval has only the number
// x.
func around(x, d float64) interval {
	if d == 0 || math.IsInf(x, 0) || math.IsNaN(x) {
		return exactly(x)
	}
	return interval{lo: x - d, hi: x + d}
}

func (v interval) has(x float64) bool {
	switch {
	case math.IsNaN(v.lo), v.orNaN && math.IsNaN(x):
		return math.IsNaN(x)
	case math.Float64bits(v.lo) == math.Float64bits(v.hi):
		return math.Float64bits(x) == math.Float64bits(v.lo)
	default:
		return v.lo <= x && x <= v.hi
	}
}

// round returns the interval whose ends are the ends of v rounded to f. Because rounding is monotone, it
// contains the rounded value of each number in v.
func (v interval) round(f format) interval {
	return interval{f.round(v.lo), f.round(v.hi), v.orNaN}
}

func (v interval) String() string { return fmt.Sprintf("%v to %v", v.lo, v.hi) }

// floats returns the correct results of reducing floats. The argument in has the inputs of the members that
// contribute, and floats overwrites them. size is the number of all members.
//
// The contribution of a member is known exactly. The prescale factor is rounded to float32 unless the type is
// float64. The contribution is the product of this factor and the member's input. This product is rounded to
// float32, then to the element type, and then to the wire type if there is one.
//
// The order of additions is not known, and every order is right. Let k members contribute y_1 ... y_k. Let S
// be the exact sum, let T be the sum of |y_i|, and let a be the unit roundoff of the type in which sums are
// formed. This is float32 for the 16-bit floats, and otherwise the type itself. Each of the k-1 additions
// multiplies its result by 1+e with |e| <= a. So the result is the sum of y_i (1+e_1)...(1+e_{k-1}) with
// different e's for each i. It differs from S by at most ((1+a)^(k-1) - 1) T, which is less than 1.001 (k-1)
// a T for k below 1000 (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). Additions do
// not underflow. The reference adds in float64, and its error follows the same formula with the unit roundoff
// of float64. The formula also holds for a product P, with |P| in place of T. Each product that may underflow
// adds the smallest number of the type to the error, because the other factors are then below 2^8. Minima and
// maxima are exact. At the end a 16-bit result is rounded once.
//
// After the reduction the result is multiplied by one factor, which is post or post/divisor. This factor has
// been rounded once or twice, depending on how it was computed, and the product is rounded once. The same
// holds for the reference. Together these errors are at most 5 units: units of float64 for float64, and units
// of float32 for all other types. The product is then rounded to the element type.
//
// The inputs must be such that either every order of additions overflows or no order does (see
// input_test.go).
func (r reduction) floats(in [][]float64, size int) []interval {
	carried := formats[r.carried()]
	for _, v := range in {
		r.contribute(v)
	}
	post := r.post / r.divisor(size, len(in))
	out := make([]interval, len(in[0]))
	y := make([]float64, len(in))
	for i := range out {
		for m := range in {
			y[m] = in[m][i]
		}
		out[i] = r.scaled(r.combined(y).round(carried), post)
	}
	return out
}

// carried returns the type in which contributions are sent between ranks.
func (r reduction) carried() tensor.DType {
	if r.wire.Valid() {
		return r.wire
	}
	return r.dt
}

// arithmetic returns the format in which the engine computes with elements of type dt.
func arithmetic(dt tensor.DType) format {
	if dt == tensor.Float64 {
		return formats[dt]
	}
	return formats[tensor.Float32]
}

// contribute replaces the input of a member by the contribution that the member sends.
func (r reduction) contribute(v []float64) {
	a, own, carried := arithmetic(r.dt), formats[r.dt], formats[r.carried()]
	factor := a.round(r.pre)
	for i, x := range v {
		if r.pre != 1 {
			x = own.round(a.round(x * factor)) // the product of two float32 is exact in float64
		}
		if r.wire.Valid() {
			x = carried.round(x)
		}
		v[i] = x
	}
}

// combined returns the reduction of the contributions, before the result is rounded to the type in which
// results are sent.
func (r reduction) combined(y []float64) interval {
	a := arithmetic(r.carried())
	if r.byNCCL() {
		a = formats[r.dt]
	}
	acc, total := y[0], math.Abs(y[0])
	for _, x := range y[1:] {
		total += math.Abs(x)
		switch r.op {
		case tensor.Min:
			acc = math.Min(acc, x)
		case tensor.Max:
			acc = math.Max(acc, x)
		case tensor.Product:
			acc *= x
		default:
			acc += x
		}
	}
	steps := float64(len(y)-1) * (a.unit() + formats[tensor.Float64].unit()) * 1.001
	switch {
	case r.op == tensor.Min || r.op == tensor.Max || steps == 0:
		return exactly(orNaN(acc, total))
	case r.op == tensor.Product && someZero(y):
		return exactly(acc)
	case r.op == tensor.Product:
		return around(acc, steps*math.Abs(acc)+float64(len(y))*a.tiny())
	default:
		return around(acc, steps*total)
	}
}

// orNaN returns NaN if total is NaN, and otherwise x. It is needed because math.Min and math.Max return an
// infinity in some cases where the other number is NaN.
func orNaN(x, total float64) float64 {
	if math.IsNaN(total) {
		return total
	}
	return x
}

func someZero(y []float64) bool {
	for _, x := range y {
		if x == 0 {
			return true
		}
	}
	return false
}

// scaled returns v*f, widened by the error that the multiplication after the reduction may have.
func (r reduction) scaled(v interval, f float64) interval {
	if f == 1 {
		return v
	}
	a := arithmetic(r.dt)
	slack := func(x float64) float64 {
		if x == 0 {
			return 0
		}
		return 5*a.unit()*math.Abs(x) + a.tiny()
	}
	lo, hi := v.lo*f, v.hi*f
	if f < 0 {
		lo, hi = hi, lo
	}
	return interval{lo: around(lo, slack(lo)).lo, hi: around(hi, slack(hi)).hi}.round(formats[r.dt])
}

// approx is a vector v with an error bound for each element: element i may be wrong by up to d[i].
type approx struct{ v, d []float64 }

// adasum combines the vectors of all members. A nil vector stands for the zeros of a member that has joined.
// The order is the tree that the package comment of ops/tcp describes. Let n be the number of members, and
// let p be the largest power of two up to n. The last n-p members are added to the first n-p. Then neighbours
// at distances 1, 2, 4 ... p/2 are combined.
func (r reduction) adasum(in [][]float64, elements int) []interval {
	vectors := make([]approx, len(in))
	for m, v := range in {
		if v == nil {
			v = slices.Repeat([]float64{math.Copysign(0, -1)}, elements)
		} else {
			r.contribute(v)
		}
		vectors[m] = approx{v, make([]float64, elements)}
	}
	f := formats[r.carried()]
	n := len(vectors)
	p := 1 << (bits.Len(uint(n)) - 1)
	for m := p; m < n; m++ {
		vectors[m-p] = adaptiveSum(vectors[m-p], vectors[m], f)
	}
	for vectors = vectors[:p]; len(vectors) > 1; vectors = vectors[:len(vectors)/2] {
		for m := range len(vectors) / 2 {
			vectors[m] = adaptiveSum(vectors[2*m], vectors[2*m+1], f)
		}
	}
	out := make([]interval, elements)
	for i := range out {
		out[i] = r.scaled(around(vectors[0].v[i], vectors[0].d[i]).round(f), r.post)
	}
	return out
}

// adaptiveSum returns (1 - a·b/(2 a·a)) a + (1 - a·b/(2 b·b)) b. A factor is 1 if its a·a or b·b is 0.
//
// Let da and db be the errors of a and b. To first order, the dot products have at most these errors: for
// |a·b| the sum of |a| db + |b| da + da db, and for a·a the sum of 2 |a| da + da². The engine and the
// reference sum in float64, which adds 2 N units of float64, relative to the sum of |a b|. A quotient q =
// x/(2y) has an error of at most (dx + |x|/y dy) / (2 (y - dy)). An element ca a + cb b has the error |ca| da
// + dca (|a| + da), the same for b, and the error of rounding to f. The rounding error is one unit of the
// result, or half of the smallest number.
func adaptiveSum(a, b approx, f format) approx {
	const u = 0x1p-53
	var ab, aa, bb, dab, daa, dbb, sizes float64
	for i := range a.v {
		x, y, dx, dy := a.v[i], b.v[i], a.d[i], b.d[i]
		ab, aa, bb = ab+x*y, aa+x*x, bb+y*y
		sizes += math.Abs(x * y)
		dab += math.Abs(x)*dy + math.Abs(y)*dx + dx*dy
		daa += 2*math.Abs(x)*dx + dx*dx
		dbb += 2*math.Abs(y)*dy + dy*dy
	}
	sums := 2 * float64(len(a.v)) * u
	dab, daa, dbb = dab+sums*sizes, daa+sums*aa, dbb+sums*bb
	factor := func(square, d float64) (c, dc float64) {
		if square == 0 {
			return 1, 0
		}
		c = 1 - ab/(2*square)
		return c, (dab+math.Abs(ab)/square*d)/(2*(square-d)) + 4*u*(1+math.Abs(c))
	}
	ca, dca := factor(aa, daa)
	cb, dcb := factor(bb, dbb)
	out := approx{make([]float64, len(a.v)), make([]float64, len(a.v))}
	for i := range out.v {
		x, y, dx, dy := a.v[i], b.v[i], a.d[i], b.d[i]
		v := ca*x + cb*y
		d := math.Abs(ca)*dx + dca*(math.Abs(x)+dx) + math.Abs(cb)*dy + dcb*(math.Abs(y)+dy) +
			4*u*(math.Abs(ca*x)+math.Abs(cb*y))
		if d > 0 {
			d += f.unit()*(math.Abs(v)+d) + f.tiny()/2
		}
		out.v[i], out.d[i] = v, d
	}
	return out
}
