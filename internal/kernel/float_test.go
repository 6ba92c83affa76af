package kernel_test

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/tensor"
)

var floatTypes = []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64}

// encode returns v as elements of dt. It rounds them once, with an implementation that is independent of this
// package.
func encode(dt tensor.DType, v []float64) []byte {
	b := tensor.Bytes(make([]float64, len(v)))[:len(v)*dt.Size()]
	for i, x := range v {
		switch dt {
		case tensor.Float16:
			tensor.View[half.Float16](b)[i] = float16(x)
		case tensor.BFloat16:
			tensor.View[half.BFloat16](b)[i] = bfloat16(x)
		case tensor.Float32:
			tensor.View[float32](b)[i] = float32(x)
		default:
			tensor.View[float64](b)[i] = x
		}
	}
	return b
}

// decode returns the elements of b, which have type dt.
func decode(dt tensor.DType, b []byte) []float64 {
	v := make([]float64, len(b)/dt.Size())
	for i := range v {
		switch dt {
		case tensor.Float16:
			v[i] = float64(tensor.View[half.Float16](b)[i].Float32())
		case tensor.BFloat16:
			v[i] = float64(tensor.View[half.BFloat16](b)[i].Float32())
		case tensor.Float32:
			v[i] = float64(tensor.View[float32](b)[i])
		default:
			v[i] = tensor.View[float64](b)[i]
		}
	}
	return v
}

// checkFloats fails the test if elements of got and want, of type dt, differ in their bits and are not both
// NaN.
func checkFloats(t *testing.T, what string, dt tensor.DType, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	for i, w := range decode(dt, want) {
		if g := decode(dt, got)[i]; !sameBits(g, w) {
			t.Fatalf("%s: element %d is %v, want %v", what, i, g, w)
		}
	}
}

// guarded returns size bytes for a result with elements of type dt. check fails the test if the bytes around
// them have changed.
func guarded(t *testing.T, what string, dt tensor.DType, size int) (buf []byte, check func()) {
	const guard = 3
	around := guard * dt.Size()
	all := tensor.Bytes(make([]float64, size/8+8))[:size+2*around]
	for i := range all {
		all[i] = 0xa5
	}
	return all[around : around+size], func() {
		t.Helper()
		for i, x := range slices.Concat(all[:around], all[around+size:]) {
			if x != 0xa5 {
				t.Fatalf("%s: byte %d beside the result was changed", what, i)
			}
		}
	}
}

func mustConvert(t testing.TB, to, from tensor.DType) kernel.ConvertFunc {
	t.Helper()
	convert, err := kernel.Convert(to, from)
	if err != nil {
		t.Fatal(err)
	}
	return convert
}

func TestConvert(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for _, from := range floatTypes {
		for _, to := range floatTypes {
			convert := mustConvert(t, to, from)
			for _, n := range lengths() {
				src := encode(from, floats[float64](r, n+1))[from.Size():]
				what := fmt.Sprintf("%d of %v to %v", n, from, to)
				dst, check := guarded(t, what, to, n*to.Size())
				keep := bytes.Clone(src)
				convert(dst, src)
				checkFloats(t, what, to, dst, encode(to, decode(from, src)))
				check()
				if !bytes.Equal(src, keep) {
					t.Fatalf("%s: the source was changed", what)
				}
			}
		}
	}
}

// TestConvertOnce converts float64s near the middle between two neighbouring half-precision numbers. They are
// so near that a float32 would be exactly the middle, which would then be rounded to the even neighbour. The
// results must be the correct neighbours.
func TestConvertOnce(t *testing.T) {
	for _, to := range []tensor.DType{tensor.Float16, tensor.BFloat16} {
		var halves []uint16
		for i := range 1 << 15 {
			halves = append(halves, uint16(i))
		}
		values := decode(to, tensor.Bytes(halves))
		var src []float64
		for i, low := range values[:len(values)-1] {
			high := values[i+1]
			if math.IsNaN(low) || math.IsNaN(high) || math.IsInf(low, 0) {
				continue
			}
			if math.IsInf(high, 1) {
				high = 2*low - values[i-1]
			}
			mid := low + (high-low)/2
			up, down := math.Nextafter(mid, math.Inf(1)), math.Nextafter(mid, 0)
			src = append(src, low, mid, up, down, -mid, -up, -down, math.Nextafter(low, -1),
				math.Nextafter(low, high))
		}
		src = append(src, math.MaxFloat64, 5e-324, -5e-324, 0x1p-149, 0x1p-150, math.MaxFloat32,
			math.Nextafter(math.MaxFloat32, math.Inf(1)))
		dst := make([]byte, len(src)*2)
		mustConvert(t, to, tensor.Float64)(dst, tensor.Bytes(src))
		got := decode(to, dst)
		for i, x := range src {
			if want := roundTo(to, x); !sameBits(got[i], want) {
				t.Fatalf("%v of %v (%x): got %v, want %v", to, x, x, got[i], want)
			}
		}
	}
	// As a float32, this number is the middle between 1 and its neighbour, which is rounded to 1.
	dst := make([]uint16, 1)
	mustConvert(t, tensor.Float16, tensor.Float64)(tensor.Bytes(dst),
		tensor.Bytes([]float64{1 + 0x1p-11 + 0x1p-40}))
	if dst[0] != 0x3c01 {
		t.Errorf("got %04x, want 3c01", dst[0])
	}
}

func TestDot(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	for _, dt := range floatTypes {
		dot, err := kernel.Dot(dt)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range lengths() {
			// The values are integers, whose sums are exact in any order.
			x, y := make([]float64, n+1), make([]float64, n+1)
			var ab, aa, bb float64
			for i := range x {
				x[i], y[i] = float64(r.IntN(201)-100), float64(r.IntN(201)-100)
				if i > 0 {
					ab, aa, bb = ab+x[i]*y[i], aa+x[i]*x[i], bb+y[i]*y[i]
				}
			}
			a, b := encode(dt, x)[dt.Size():], encode(dt, y)[dt.Size():]
			if gotAB, gotAA, gotBB := dot(a, b); gotAB != ab || gotAA != aa || gotBB != bb {
				t.Fatalf("%d of %v: got %v, %v and %v, want %v, %v and %v", n, dt, gotAB, gotAA, gotBB, ab,
					aa, bb)
			}
			if gotAB, gotAA, gotBB := dot(a, a); gotAB != aa || gotAA != aa || gotBB != aa {
				t.Fatalf("%d of %v with itself: got %v, %v and %v, want %v", n, dt, gotAB, gotAA, gotBB, aa)
			}
		}
	}
}

// If the sums of squares exceed the range of float32 or of a half-precision type, Dot returns the right
// result, because they do not exceed the range of float64.
func TestDotIsWide(t *testing.T) {
	for dt, x := range map[tensor.DType]float64{tensor.Float16: 65504, tensor.BFloat16: 0x1p127,
		tensor.Float32: 0x1p-140} {
		dot, err := kernel.Dot(dt)
		if err != nil {
			t.Fatal(err)
		}
		a, b := encode(dt, slices.Repeat([]float64{x}, 512)), encode(dt, slices.Repeat([]float64{-x}, 512))
		if ab, aa, bb := dot(a, b); ab != -512*x*x || aa != 512*x*x || bb != 512*x*x {
			t.Errorf("%v: got %v, %v and %v, want ±%v", dt, ab, aa, bb, 512*x*x)
		}
	}
}

func TestCombine(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	for _, dt := range floatTypes {
		combine, err := kernel.Combine(dt)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range lengths() {
			a, b := encode(dt, floats[float64](r, n+1))[dt.Size():],
				encode(dt, floats[float64](r, n+1))[dt.Size():]
			ca, cb := r.Float64(), r.Float64()
			want := make([]float64, n)
			x, y := decode(dt, a), decode(dt, b)
			for i := range want {
				want[i] = float64(ca*x[i]) + float64(cb*y[i])
			}
			what := fmt.Sprintf("%d of %v", n, dt)
			dst, check := guarded(t, what, dt, n*dt.Size())
			keepA, keepB := bytes.Clone(a), bytes.Clone(b)
			combine(dst, a, b, ca, cb)
			checkFloats(t, what, dt, dst, encode(dt, want))
			check()
			if !bytes.Equal(a, keepA) || !bytes.Equal(b, keepB) {
				t.Fatalf("%s: a source was changed", what)
			}
			combine(a, a, b, ca, cb)
			checkFloats(t, what+" into a", dt, a, encode(dt, want))
			copy(a, keepA)
			combine(b, a, b, ca, cb)
			checkFloats(t, what+" into b", dt, b, encode(dt, want))
		}
	}
}

// A half-precision result is rounded from the float64 sum and not from a rounded float32.
func TestCombineRoundsOnce(t *testing.T) {
	for dt, unit := range map[tensor.DType]float64{tensor.Float16: 0x1p-10, tensor.BFloat16: 0x1p-7} {
		combine, err := kernel.Combine(dt)
		if err != nil {
			t.Fatal(err)
		}
		one := encode(dt, []float64{1})
		dst := make([]byte, 2)
		combine(dst, one, one, 1, unit/2+0x1p-40)
		if got := decode(dt, dst)[0]; got != 1+unit {
			t.Errorf("%v: got %v, want %v", dt, got, 1+unit)
		}
	}
}

func BenchmarkConvert(b *testing.B) {
	const numElems = 64 << 10
	for _, from := range floatTypes {
		for _, to := range floatTypes {
			b.Run(fmt.Sprintf("%v-%v", from, to), func(b *testing.B) {
				convert := mustConvert(b, to, from)
				dst, src := make([]byte, numElems*to.Size()), make([]byte, numElems*from.Size())
				b.SetBytes(int64(len(src)))
				for b.Loop() {
					convert(dst, src)
				}
			})
		}
	}
}

func BenchmarkAdasum(b *testing.B) {
	const numElems = 64 << 10
	for _, dt := range floatTypes {
		x, y := make([]byte, numElems*dt.Size()), make([]byte, numElems*dt.Size())
		b.Run("dot/"+dt.String(), func(b *testing.B) {
			dot, err := kernel.Dot(dt)
			if err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(len(x)))
			for b.Loop() {
				dot(x, y)
			}
		})
		b.Run("combine/"+dt.String(), func(b *testing.B) {
			combine, err := kernel.Combine(dt)
			if err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(len(x)))
			for b.Loop() {
				combine(x, x, y, 0.5, 0.5)
			}
		})
	}
}
