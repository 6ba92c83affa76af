package kernel_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/tensor"
)

func float16(x float64) half.Float16 {
	return half.Float16FromFloat32(float32(roundTo(tensor.Float16, x)))
}
func bfloat16(x float64) half.BFloat16 {
	return half.BFloat16FromFloat32(float32(roundTo(tensor.BFloat16, x)))
}

// roundTo returns the number of the half-precision type dt that is nearest to x. It rounds the float64 once.
func roundTo(dt tensor.DType, x float64) float64 {
	// fraction is the number of bits of the fraction. least and most are the least and greatest exponent of a
	// normal number.
	fraction, least, most := 10, -14, 15
	if dt == tensor.BFloat16 {
		fraction, least, most = 7, -126, 127
	}
	if x == 0 || math.IsNaN(x) || math.IsInf(x, 0) {
		return x
	}
	unit := math.Ldexp(1, max(math.Ilogb(x), least)-fraction)
	rounded := math.RoundToEven(x/unit) * unit
	if math.Abs(rounded) >= math.Ldexp(2, most) {
		return math.Inf(int(math.Copysign(1, x)))
	}
	return math.Copysign(rounded, x)
}

// halfRef returns x op y. It computes in float64 and rounds once.
func halfRef(dt tensor.DType, op tensor.ReduceOp, x, y float64) float64 {
	switch op {
	case tensor.Sum:
		return roundTo(dt, x+y)
	case tensor.Product:
		z := x * y
		if dt == tensor.BFloat16 && math.Abs(z) < 0x1p-126 {
			// A subnormal float32 lacks the additional bits that make rounding twice harmless, so this rounds
			// twice too.
			z = float64(float32(z))
		}
		return roundTo(dt, z)
	case tensor.Min:
		return math.Min(nanFirst(x, y))
	default:
		return math.Max(nanFirst(x, y))
	}
}

// nanFirst returns x and y. If one of them is a NaN, it returns two NaNs, because math.Min and math.Max
// prefer an infinity to a NaN.
func nanFirst(x, y float64) (float64, float64) {
	if math.IsNaN(x) || math.IsNaN(y) {
		return math.NaN(), math.NaN()
	}
	return x, y
}

func float16Ref(op tensor.ReduceOp, a, b half.Float16) half.Float16 {
	return float16(halfRef(tensor.Float16, op, float64(a.Float32()), float64(b.Float32())))
}

func bfloat16Ref(op tensor.ReduceOp, a, b half.BFloat16) half.BFloat16 {
	return bfloat16(halfRef(tensor.BFloat16, op, float64(a.Float32()), float64(b.Float32())))
}

func float16s(r *rand.Rand, n int) []half.Float16 {
	v := make([]half.Float16, n)
	for i := range v {
		v[i] = half.Float16FromBits(uint16(r.Uint32()))
	}
	return v
}

func bfloat16s(r *rand.Rand, n int) []half.BFloat16 {
	v := make([]half.BFloat16, n)
	for i := range v {
		v[i] = half.BFloat16FromBits(uint16(r.Uint32()))
	}
	return v
}

// TestEveryHalf combines each of the 65536 values with several other values and compares the results with the
// reference.
func TestEveryHalf(t *testing.T) {
	t.Run("float16", testEveryHalf(float16Ref, half.Float16FromBits, 0x3c00, 0x7c00))
	t.Run("bfloat16", testEveryHalf(bfloat16Ref, half.BFloat16FromBits, 0x3f80, 0x7f80))
}

func testEveryHalf[T half.Float16 | half.BFloat16](ref func(op tensor.ReduceOp, a, b T) T,
	fromBits func(uint16) T, one, inf uint16) func(*testing.T) {
	return func(t *testing.T) {
		all, dst, src := make([]T, 1<<16), make([]T, 1<<16), make([]T, 1<<16)
		for i := range all {
			all[i] = fromBits(uint16(i))
		}
		// The values are zeros, the least and greatest subnormal and normal numbers, one and its neighbours,
		// infinities and NaNs.
		others := []uint16{0, 0x8000, 1, 0x8001, one - 1, one, one + 1, 0x8000 | one, inf - 1, inf,
			0x8000 | inf, inf + 1, 0xffff}
		r := rand.New(rand.NewPCG(5, 6))
		for range 3 {
			others = append(others, uint16(r.Uint32()))
		}
		if testing.Short() {
			others = others[8:]
		}
		for _, op := range ops {
			reduce, err := kernel.Reduce(op, tensor.Of[T]())
			if err != nil {
				t.Fatal(err)
			}
			for _, bits := range others {
				copy(dst, all)
				for i := range src {
					src[i] = fromBits(bits)
				}
				reduce(tensor.Bytes(dst), tensor.Bytes(src))
				for i := range dst {
					if want := ref(op, all[i], src[i]); !sameBits(dst[i], want) {
						t.Fatalf("%v of %04x and %04x (%v and %v): got %v, want %v", op, i, bits, all[i],
							src[i], dst[i], want)
					}
				}
			}
		}
	}
}

// For half-precision types, Scale rounds the factor to float32, then the product to float32, and then the
// rounded product to the half-precision type.
func TestScaleHalf(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for _, n := range lengths() {
		for _, factor := range []float64{1, 0, -2, 1.0 / 3, 0.1, 1e300, math.NaN()} {
			f, b := float16s(r, n), bfloat16s(r, n)
			wantF, wantB := make([]half.Float16, n), make([]half.BFloat16, n)
			for i := range n {
				wantF[i] = float16(float64(f[i].Float32() * float32(factor)))
				wantB[i] = bfloat16(float64(b[i].Float32() * float32(factor)))
			}
			checkScale(t, f, factor, wantF)
			checkScale(t, b, factor, wantB)
		}
	}
	// The product is above the middle between 1 and its neighbour only if the factor is not rounded to
	// float32. So it must be 1.
	checkScale(t, []half.Float16{float16(1)}, 1+0x1p-11+0x1p-40, []half.Float16{float16(1)})
	checkScale(t, []half.BFloat16{bfloat16(1)}, 1+0x1p-8+0x1p-40, []half.BFloat16{bfloat16(1)})
}
