package kernel_test

import (
	"bytes"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/tensor"
)

var ops = []tensor.ReduceOp{tensor.Sum, tensor.Min, tensor.Max, tensor.Product}

type integer interface {
	uint8 | int8 | uint16 | int16 | int32 | int64
}

type float interface{ float32 | float64 }

// lengths returns numbers of elements that leave every possible remainder after the turns of the loops.
func lengths() []int {
	var all []int
	for n := range 71 {
		all = append(all, n)
	}
	return append(all, 127, 128, 129, 1023)
}

func TestReduce(t *testing.T) {
	t.Run("uint8", testReduce(integerRef[uint8], integers[uint8]))
	t.Run("int8", testReduce(integerRef[int8], integers[int8]))
	t.Run("uint16", testReduce(integerRef[uint16], integers[uint16]))
	t.Run("int16", testReduce(integerRef[int16], integers[int16]))
	t.Run("int32", testReduce(integerRef[int32], integers[int32]))
	t.Run("int64", testReduce(integerRef[int64], integers[int64]))
	t.Run("float16", testReduce(float16Ref, float16s))
	t.Run("bfloat16", testReduce(bfloat16Ref, bfloat16s))
	t.Run("float32", testReduce(floatRef[float32], floats[float32]))
	t.Run("float64", testReduce(floatRef[float64], floats[float64]))
	t.Run("bool", testReduceAs(tensor.Bool, boolRef, bools))
}

func testReduce[T tensor.Element](ref func(op tensor.ReduceOp, a, b T) T,
	values func(*rand.Rand, int) []T) func(*testing.T) {
	return testReduceAs(tensor.Of[T](), ref, values)
}

// testReduceAs compares results with the results of ref. They must have the same bits or both be NaN. The
// elements are at all offsets in a larger array, and the rest of the array must not change.
func testReduceAs[T tensor.Element](dt tensor.DType, ref func(op tensor.ReduceOp, a, b T) T,
	values func(*rand.Rand, int) []T) func(*testing.T) {
	return func(t *testing.T) {
		r := rand.New(rand.NewPCG(1, 2))
		for _, op := range ops {
			if tensor.CheckReduce(op, dt) != nil {
				continue
			}
			reduce, err := kernel.Reduce(op, dt)
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range lengths() {
				for at := 1; at <= 4; at++ {
					from := 5 - at
					dst, src := values(r, n+5), values(r, n+5)
					want := slices.Clone(dst)
					for i := range n {
						want[at+i] = ref(op, dst[at+i], src[from+i])
					}
					keep := slices.Clone(src)
					reduce(tensor.Bytes(dst[at:at+n]), tensor.Bytes(src[from:from+n]))
					for i := range dst {
						if !sameBits(dst[i], want[i]) {
							t.Fatalf("%v of %d at %d: element %d is %v, want %v", op, n, at, i-at, dst[i],
								want[i])
						}
					}
					if !bytes.Equal(tensor.Bytes(src), tensor.Bytes(keep)) {
						t.Fatalf("%v of %d at %d: the source was changed", op, n, at)
					}
				}
			}
		}
	}
}

// sameBits reports whether a and b have the same bits or are both NaN.
func sameBits[T tensor.Element](a, b T) bool {
	if isNaN(a) || isNaN(b) {
		return isNaN(a) && isNaN(b)
	}
	return bytes.Equal(tensor.Bytes([]T{a}), tensor.Bytes([]T{b}))
}

func isNaN[T tensor.Element](x T) bool {
	switch x := any(x).(type) {
	case half.Float16:
		return math.IsNaN(float64(x.Float32()))
	case half.BFloat16:
		return math.IsNaN(float64(x.Float32()))
	}
	return x != x
}

func integers[T integer](r *rand.Rand, n int) []T {
	v := make([]T, n)
	for i := range v {
		v[i] = T(r.Uint64()) >> r.IntN(8*tensor.Of[T]().Size())
	}
	return v
}

func floats[T float](r *rand.Rand, n int) []T {
	special := []float64{0, math.Copysign(0, -1), math.Inf(1), math.Inf(-1), math.NaN(), math.MaxFloat64,
		1e-45, 5e-324}
	v := make([]T, n)
	for i := range v {
		if r.IntN(3) == 0 {
			v[i] = T(special[r.IntN(len(special))])
		} else {
			v[i] = T(math.Ldexp(r.Float64()-0.5, r.IntN(60)-30))
		}
	}
	return v
}

// integerRef computes with integers of arbitrary size and wraps the result.
func integerRef[T integer](op tensor.ReduceOp, a, b T) T {
	x, y := big.NewInt(int64(a)), big.NewInt(int64(b))
	switch z := new(big.Int); op {
	case tensor.Sum:
		z.Add(x, y)
		return wrap[T](z)
	case tensor.Product:
		z.Mul(x, y)
		return wrap[T](z)
	}
	if (x.Cmp(y) < 0) == (op == tensor.Min) {
		return a
	}
	return b
}

func wrap[T integer](z *big.Int) T {
	return T(z.And(z, new(big.Int).SetUint64(math.MaxUint64)).Uint64())
}

// floatRef computes finite sums and products exactly and rounds them once.
func floatRef[T float](op tensor.ReduceOp, a, b T) T {
	x, y := float64(a), float64(b)
	switch {
	case math.IsNaN(x) || math.IsNaN(y):
		return T(math.NaN())
	case op == tensor.Min:
		return T(math.Min(x, y))
	case op == tensor.Max:
		return T(math.Max(x, y))
	}
	exact := new(big.Float).SetPrec(4000)
	finite := !math.IsInf(x, 0) && !math.IsInf(y, 0)
	switch {
	case op == tensor.Sum && (!finite || x+y == 0): // for zeros, so that the hardware chooses the sign
		return T(x + y)
	case op == tensor.Sum:
		exact.Add(big.NewFloat(x), big.NewFloat(y))
	case !finite:
		return T(x * y)
	default:
		exact.Mul(big.NewFloat(x), big.NewFloat(y))
	}
	if tensor.Of[T]() == tensor.Float32 {
		f, _ := exact.Float32()
		return T(f)
	}
	f, _ := exact.Float64()
	return T(f)
}

// The results for special values, such as NaNs and zeros, are those that this package documents.
func TestSpecial(t *testing.T) {
	negZero := math.Copysign(0, -1)
	checkReduce(t, tensor.Min, 1, math.NaN(), math.NaN())
	checkReduce(t, tensor.Min, math.NaN(), 1, math.NaN())
	checkReduce(t, tensor.Max, math.Inf(1), math.NaN(), math.NaN())
	checkReduce(t, tensor.Min, 0, negZero, negZero)
	checkReduce(t, tensor.Max, negZero, 0, 0)
	checkReduce(t, tensor.Max, float32(1), float32(math.NaN()), float32(math.NaN()))
	checkReduce(t, tensor.Min, float16(0), float16(negZero), float16(negZero))
	checkReduce(t, tensor.Max, float16(negZero), float16(0), float16(0))
	checkReduce(t, tensor.Min, bfloat16(0), bfloat16(negZero), bfloat16(negZero))
	checkReduce(t, tensor.Max, bfloat16(negZero), bfloat16(0), bfloat16(0))
	checkReduce(t, tensor.Sum, float16(65504), float16(16), float16(math.Inf(1)))
	checkReduce(t, tensor.Sum, float16(2048), float16(1), float16(2048))
	checkReduce(t, tensor.Product, bfloat16(0x1p-100), bfloat16(0x1p-33), bfloat16(0x1p-133))
	checkReduce(t, tensor.Sum, uint8(255), 2, 1)
	checkReduce(t, tensor.Sum, int8(127), 1, -128)
	checkReduce(t, tensor.Product, int16(-1<<15), -1, -1<<15)
	checkReduce(t, tensor.Max, int8(-1), -128, -1)
	checkReduce(t, tensor.Max, uint16(0xffff), 1, 0xffff)
	checkReduce(t, tensor.Product, uint8(16), 17, 16)
	checkReduce(t, tensor.Sum, int32(math.MaxInt32), 1, math.MinInt32)
	checkReduce(t, tensor.Sum, int64(math.MinInt64), -1, math.MaxInt64)
	checkReduce(t, tensor.Min, int32(-1), 1, -1)
	checkReduce(t, tensor.Max, uint8(200), 100, 200)
}

func checkReduce[T tensor.Element](t *testing.T, op tensor.ReduceOp, a, b, want T) {
	t.Helper()
	reduce, err := kernel.Reduce(op, tensor.Of[T]())
	if err != nil {
		t.Fatal(err)
	}
	// Five elements use both loops of a function: four per turn, and one.
	dst, src := slices.Repeat([]T{a}, 5), slices.Repeat([]T{b}, 5)
	reduce(tensor.Bytes(dst), tensor.Bytes(src))
	for i := range dst {
		if !sameBits(dst[i], want) {
			t.Errorf("%v of %v and %v: element %d is %v, want %v", op, a, b, i, dst[i], want)
		}
	}
}

func TestScaleFloat(t *testing.T) {
	const third = 1.0 / 3
	r := rand.New(rand.NewPCG(3, 4))
	for _, n := range lengths() {
		for _, factor := range []float64{1, 0, -2, third, 1e300, math.NaN()} {
			f32, f64 := floats[float32](r, n), floats[float64](r, n)
			want32, want64 := slices.Clone(f32), slices.Clone(f64)
			for i := range n {
				want32[i] *= float32(factor)
				want64[i] *= factor
			}
			checkScale(t, f32, factor, want32)
			checkScale(t, f64, factor, want64)
		}
	}
	// If the factor were not rounded to float32, the product would be 1e-16.
	checkScale(t, []float32{1e30}, 1e-46, []float32{0})
}

func TestScaleInteger(t *testing.T) {
	checkScale(t, []uint8{0, 1, 3, 255}, 0.5, []uint8{0, 0, 1, 127})
	checkScale(t, []uint8{0, 1, 128, 255}, 2, []uint8{0, 2, 255, 255})
	checkScale(t, []uint8{0, 1, 255}, -1, []uint8{0, 0, 0})
	checkScale(t, []uint8{0, 1, 255}, -0.5, []uint8{0, 0, 0})
	checkScale(t, []uint8{255, 255}, 255.999/255, []uint8{255, 255})
	checkScale(t, []int8{-7, 7, -128, 127}, 0.5, []int8{-3, 3, -64, 63})
	checkScale(t, []int8{100, -100, 1}, 2, []int8{127, -128, 2})
	checkScale(t, []int8{-128, 127}, -1, []int8{127, -127})
	checkScale(t, []uint16{0, 3, 65535}, 0.5, []uint16{0, 1, 32767})
	checkScale(t, []uint16{0, 1, 40000}, 2, []uint16{0, 2, 65535})
	checkScale(t, []uint16{0, 1}, -3, []uint16{0, 0})
	checkScale(t, []int16{-7, 7, -1 << 15}, -0.5, []int16{3, -3, 1 << 14})
	checkScale(t, []int16{20000, -20000}, 2, []int16{1<<15 - 1, -1 << 15})
	checkScale(t, []int32{-7, 7, math.MinInt32, math.MaxInt32}, 0.5, []int32{-3, 3, math.MinInt32 / 2,
		math.MaxInt32 / 2})
	checkScale(t, []int32{1 << 30, -1 << 30, 5}, 2, []int32{math.MaxInt32, math.MinInt32, 10})
	checkScale(t, []int32{5, 0, -5}, math.NaN(), []int32{0, 0, 0})
	checkScale(t, []int32{5, 0, -5}, math.Inf(1), []int32{math.MaxInt32, 0, math.MinInt32})
	checkScale(t, []int64{1 << 62, -1 << 62, 9}, 2, []int64{math.MaxInt64, math.MinInt64, 18})
	checkScale(t, []int64{math.MaxInt64, math.MinInt64}, -1, []int64{math.MinInt64, math.MaxInt64})
	checkScale(t, []int64{1<<53 + 1, math.MaxInt64}, 1, []int64{1<<53 + 1, math.MaxInt64})
	checkScale(t, []int64{1<<53 + 1}, -1, []int64{-1 << 53})
	checkScale(t, []int64{}, 3, []int64{})
}

// checkScale scales a copy of in and compares it with want. The elements around the copy must not change.
func checkScale[T tensor.Element](t *testing.T, in []T, factor float64, want []T) {
	t.Helper()
	scale, err := kernel.Scale(tensor.Of[T]())
	if err != nil {
		t.Fatal(err)
	}
	guard := []T{guardElem[T]()}
	got := slices.Concat(guard, in, guard)
	scale(tensor.Bytes(got[1:len(got)-1]), factor)
	for i, w := range slices.Concat(guard, want, guard) {
		if !sameBits(got[i], w) {
			t.Errorf("%T %v scaled by %v: element %d is %v, want %v", in, in, factor, i-1, got[i], w)
			return
		}
	}
}

// guardElem returns an element that every operation would change.
func guardElem[T tensor.Element]() T {
	b := make([]byte, tensor.Of[T]().Size())
	b[0] = 7
	return tensor.View[T](b)[0]
}

// An operation exists for an element type exactly if package tensor allows it.
func TestTable(t *testing.T) {
	for _, dt := range tensor.DTypes() {
		for _, op := range ops {
			_, err := kernel.Reduce(op, dt)
			_, intoErr := kernel.ReduceInto(op, dt)
			if want := tensor.CheckReduce(op, dt); (err == nil) != (want == nil) ||
				(intoErr == nil) != (want == nil) {
				t.Errorf("%v of %v: got %v and %v, want %v", op, dt, err, intoErr, want)
			}
		}
		for _, op := range []tensor.ReduceOp{tensor.NoReduce, tensor.Average, tensor.Adasum,
			tensor.AverageActive, 200} {
			if _, err := kernel.Reduce(op, dt); err == nil {
				t.Errorf("%v of %v was not refused", op, dt)
			}
		}
		_, err := kernel.Scale(dt)
		if want := tensor.CheckScale(dt); (err == nil) != (want == nil) {
			t.Errorf("scale %v: got %v, want %v", dt, err, want)
		}
		if got := kernel.Divide(dt) != nil; got != dt.IsInteger() {
			t.Errorf("%v has a division: %v, want %v", dt, got, dt.IsInteger())
		}
		_, dotErr := kernel.Dot(dt)
		_, combineErr := kernel.Combine(dt)
		_, convertErr := kernel.Convert(dt, tensor.Float32)
		_, backErr := kernel.Convert(tensor.Float32, dt)
		for _, err := range []error{dotErr, combineErr, convertErr, backErr} {
			if (err == nil) != dt.IsFloat() {
				t.Errorf("%v: got %v, want an error only if it is no float", dt, err)
			}
		}
	}
	for _, dt := range []tensor.DType{tensor.Invalid, tensor.DType(len(tensor.DTypes()) + 1), 255} {
		_, sum := kernel.Reduce(tensor.Sum, dt)
		_, scale := kernel.Scale(dt)
		_, dot := kernel.Dot(dt)
		_, combine := kernel.Combine(dt)
		_, convert := kernel.Convert(dt, dt)
		_, neutral := kernel.Neutral(tensor.Sum, dt)
		if sum == nil || scale == nil || dot == nil || combine == nil || convert == nil || neutral == nil ||
			kernel.Divide(dt) != nil {
			t.Errorf("%v: sum %v, scale %v, dot %v, combine %v, convert %v, neutral %v", dt, sum, scale, dot,
				combine, convert, neutral)
		}
	}
}

func TestBadLengthPanics(t *testing.T) {
	b := tensor.Bytes(make([]int64, 64))
	for _, dt := range []tensor.DType{tensor.Int32, tensor.Float16, tensor.BFloat16, tensor.Float32,
		tensor.Bool} {
		size := dt.Size()
		if maximum, err := kernel.Reduce(tensor.Max, dt); err != nil {
			t.Error(err)
		} else {
			mustPanic(t, dt, "source shorter", func() { maximum(b[:2*size], b[8:8+size]) })
			mustPanic(t, dt, "source longer", func() { maximum(b[:size], b[8:8+2*size]) })
		}
		if into, err := kernel.ReduceInto(tensor.Max, dt); err != nil {
			t.Error(err)
		} else {
			for i, numElems := range [][3]int{{63, 64, 64}, {64, 63, 64}, {64, 64, 63}, {64, 65, 64},
				{1, 2, 1}, {0, 1, 0}} {
				x, y, z := numElems[0]*size, numElems[1]*size, numElems[2]*size
				mustPanic(t, dt, fmt.Sprint("lengths ", i), func() { into(b[:x], b[:y], b[:z]) })
			}
		}
		if fill, err := kernel.Neutral(tensor.Max, dt); err != nil {
			t.Error(err)
		} else if size > 1 {
			mustPanic(t, dt, "neutral, not a multiple", func() { fill(b[:300+size/2]) })
		}
	}
	for _, dt := range []tensor.DType{tensor.Int32, tensor.Float16, tensor.BFloat16, tensor.Float32} {
		odd := 300 + dt.Size()/2
		sum, err := kernel.Reduce(tensor.Sum, dt)
		if err != nil {
			t.Fatal(err)
		}
		scale, err := kernel.Scale(dt)
		if err != nil {
			t.Fatal(err)
		}
		mustPanic(t, dt, "source shorter", func() { sum(b[:300], b[:296]) })
		mustPanic(t, dt, "not a multiple", func() { sum(b[:odd], b[:odd]) })
		mustPanic(t, dt, "scaling, not a multiple", func() { scale(b[:odd], 2) })
		mustPanic(t, dt, "scaling by 1, not a multiple", func() { scale(b[:odd], 1) })
	}
	for _, dt := range []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64} {
		size := dt.Size()
		odd := 304 + size/2
		dot, err := kernel.Dot(dt)
		if err != nil {
			t.Fatal(err)
		}
		mustPanic(t, dt, "dot, not a multiple", func() { dot(b[:odd], b[:odd]) })
		mustPanic(t, dt, "dot, shorter", func() { dot(b[:304], b[:304-size]) })
		combine, err := kernel.Combine(dt)
		if err != nil {
			t.Fatal(err)
		}
		mustPanic(t, dt, "combine, not a multiple", func() { combine(b[:odd], b[:odd], b[:odd], 1, 1) })
		mustPanic(t, dt, "combine, first shorter", func() { combine(b[:304], b[:304-size], b[:304], 1, 1) })
		mustPanic(t, dt, "combine, second shorter", func() { combine(b[:304], b[:304], b[:304-size], 1, 1) })
		mustPanic(t, dt, "combine, first longer", func() { combine(b[:304], b[:304+size], b[:304], 1, 1) })
		mustPanic(t, dt, "combine, second longer", func() { combine(b[:304], b[:304], b[:304+size], 1, 1) })
		for _, to := range []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64} {
			convert, err := kernel.Convert(to, dt)
			if err != nil {
				t.Fatal(err)
			}
			mustPanic(t, dt, "conversion to fewer", func() { convert(b[:3*to.Size()], b[:4*size]) })
			mustPanic(t, dt, "conversion to more", func() { convert(b[:5*to.Size()], b[:4*size]) })
			mustPanic(t, dt, "conversion, not a multiple", func() {
				convert(b[:4*to.Size()], b[:4*size+size/2])
			})
			mustPanic(t, dt, "conversion to no multiple", func() {
				convert(b[:4*to.Size()+to.Size()/2], b[:4*size])
			})
		}
	}
}

func mustPanic(t *testing.T, dt tensor.DType, what string, f func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if recover() == nil {
			t.Errorf("%v, %s: no panic", dt, what)
		}
	}()
	f()
}

// The functions allocate nothing. This matters because they are called for each part of each tensor.
func TestNoAllocation(t *testing.T) {
	a, b, c := tensor.Bytes(make([]int64, 256)), tensor.Bytes(make([]int64, 256)),
		tensor.Bytes(make([]int64, 256))
	check := func(what string, dt tensor.DType, f func()) {
		if n := testing.AllocsPerRun(10, f); n != 0 {
			t.Errorf("%s of %v allocates %v times", what, dt, n)
		}
	}
	for _, dt := range tensor.DTypes() {
		for _, op := range ops {
			if reduce, err := kernel.Reduce(op, dt); err == nil {
				check(op.String(), dt, func() { reduce(a, b) })
			}
			if into, err := kernel.ReduceInto(op, dt); err == nil {
				check(op.String()+" apart", dt, func() { into(c, a, b) })
			}
		}
		if scale, err := kernel.Scale(dt); err == nil {
			check("scale", dt, func() { scale(a, 0.5) })
		}
		if dot, err := kernel.Dot(dt); err == nil {
			check("dot", dt, func() { dot(a, b) })
		}
		if combine, err := kernel.Combine(dt); err == nil {
			check("combine", dt, func() { combine(a, a, b, 0.5, 0.5) })
		}
		if fill, err := kernel.Neutral(tensor.Min, dt); err == nil {
			check("neutral", dt, func() { fill(a) })
		}
		for _, to := range tensor.DTypes() {
			if convert, err := kernel.Convert(to, dt); err == nil {
				check("conversion to "+to.String(), dt, func() {
					convert(b[:32*to.Size()], a[:32*dt.Size()])
				})
			}
		}
	}
}

func BenchmarkScale(b *testing.B) {
	for _, dt := range tensor.DTypes() {
		for _, size := range []int{4 << 10, 256 << 10} {
			b.Run(fmt.Sprintf("%v/bytes=%d", dt, size), func(b *testing.B) {
				scale, err := kernel.Scale(dt)
				if err != nil {
					b.Skip(err)
				}
				buf := tensor.Bytes(make([]int64, size/8))
				b.SetBytes(int64(size))
				for b.Loop() {
					scale(buf, 0.5)
				}
			})
		}
	}
}

func TestDivide(t *testing.T) {
	ones := make([]int32, 5)
	for n := int64(1); n < 1000; n++ {
		for i := range ones {
			ones[i] = int32(n)
		}
		ones[3] = int32(-2*n - 1)
		kernel.Divide(tensor.Int32)(tensor.Bytes(ones), n)
		if !slices.Equal(ones, []int32{1, 1, 1, int32((-2*n - 1) / n), 1}) {
			t.Fatalf("divided by %d: got %v", n, ones)
		}
	}
	large := []int64{math.MaxInt64, math.MinInt64}
	kernel.Divide(tensor.Int64)(tensor.Bytes(large), 2)
	if !slices.Equal(large, []int64{math.MaxInt64 / 2, math.MinInt64 / 2}) {
		t.Errorf("got %v", large)
	}
	bytes := []uint8{255, 7}
	kernel.Divide(tensor.Uint8)(bytes, 300)
	if !slices.Equal(bytes, []uint8{0, 0}) {
		t.Errorf("got %v", bytes)
	}
	small := []int8{-128, 127, -1}
	kernel.Divide(tensor.Int8)(tensor.Bytes(small), 2)
	if !slices.Equal(small, []int8{-64, 63, 0}) {
		t.Errorf("got %v", small)
	}
	words := []uint16{65535, 1}
	kernel.Divide(tensor.Uint16)(tensor.Bytes(words), 2)
	if !slices.Equal(words, []uint16{32767, 0}) {
		t.Errorf("got %v", words)
	}
}
