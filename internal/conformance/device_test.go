package conformance

import (
	"math"

	"github.com/gohvd/gohvd/internal/tensor"
)

// byNCCL reports whether NCCL runs the reduction. It runs only reductions of tensors on devices, and not all
// of them. Tensors on devices for which it does not are copied to host memory and reduced there.
func (r reduction) byNCCL() bool {
	scaled, isSum := r.pre != 1 || r.post != 1, r.op == tensor.Sum || r.op == tensor.Average ||
		r.op == tensor.AverageActive
	switch {
	case r.dt == tensor.Int16 || r.dt == tensor.Uint16: // NCCL has no integers of 16 bits
		return false
	case r.op == tensor.Adasum || r.wire.Valid():
		return false
	case scaled && !(isSum && r.dt.IsFloat()): // NCCL scales only sums of floats
		return false
	case r.op == tensor.AverageActive && !r.dt.IsFloat(): // NCCL divides only by the number of all ranks
		return false
	case r.dt == tensor.Float16 && r.pre < 1 && r.post > 1: // NCCL multiplies by the postscale first
		return false
	}
	return r.device
}

// floatsOnDevice is like floats for the results of NCCL. Let k members contribute x_1 ... x_k, and let u be
// the unit roundoff of the element type, in which NCCL computes, also with 16-bit floats.
//
// NCCL multiplies each x_i by one factor, which is pre*post/divisor, before it adds. The factor and each
// product are rounded, and a product that underflows has an error of at most the smallest number. So the sum
// differs from the exact sum of y_i = x_i * factor by at most 1.001 (k+1) u T, where T is the sum of |y_i|,
// plus k times the smallest number. Without a factor the bound is that of floats with the unit roundoff u.
//
// A minimum or a maximum of numbers and NaNs is NaN or that of the numbers, and a zero has any sign. If
// members have joined, a sum of zeros has any sign, because they contribute +0.
func (r reduction) floatsOnDevice(in [][]float64, size int) []interval {
	out, y := make([]interval, len(in[0])), make([]float64, len(in))
	factor := r.pre * r.post / r.divisor(size, len(in))
	for i := range out {
		underflow := 0.0 // of the products
		for m := range in {
			y[m] = in[m][i] * factor
			if factor != 1 && in[m][i] != 0 {
				underflow += formats[r.dt].tiny()
			}
		}
		switch r.op {
		case tensor.Min, tensor.Max:
			out[i] = r.extreme(y)
		case tensor.Product:
			out[i] = r.combined(y)
		default:
			out[i] = r.sum(y, factor != 1, underflow, len(in) < size)
		}
		out[i] = out[i].round(formats[r.dt])
	}
	return out
}

// extreme returns the minimum or the maximum of y.
func (r reduction) extreme(y []float64) interval {
	acc, nans := math.NaN(), 0
	for _, x := range y {
		switch {
		case math.IsNaN(x):
			nans++
		case math.IsNaN(acc), r.op == tensor.Min && x < acc, r.op == tensor.Max && x > acc:
			acc = x
		}
	}
	return zeroOf(acc, nans > 0)
}

// zeroOf returns the interval of x. If x is 0, it has zeros of both signs.
func zeroOf(x float64, orNaN bool) interval {
	if x == 0 {
		return interval{math.Copysign(0, -1), 0, orNaN}
	}
	return interval{x, x, orNaN}
}

// sum returns the sum of the contributions y. The argument scaled says that they are products, and underflow
// is the error of products that underflow. The argument joined says that some members have joined.
func (r reduction) sum(y []float64, scaled bool, underflow float64, joined bool) interval {
	f := formats[r.dt]
	acc, total, steps, infinite := math.Copysign(0, -1), 0.0, float64(len(y)-1), false
	for _, x := range y {
		acc, total, infinite = acc+x, total+math.Abs(x), infinite || math.IsInf(x, 0)
	}
	if scaled {
		steps += 2
	}
	switch {
	case acc == 0 && joined && underflow == 0:
		return zeroOf(0, false)
	case math.IsInf(acc, 0) && scaled && !infinite: // the sum of float64 overflows, or nearly does
		return interval{lo: min(acc, f.largest), hi: max(acc, -f.largest)}
	}
	return around(acc, 1.001*steps*(f.unit()+formats[tensor.Float64].unit())*total+underflow)
}
