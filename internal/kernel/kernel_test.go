package kernel_test

import (
	"bytes"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/tensor"
)

var ops = []tensor.ReduceOp{tensor.Sum, tensor.Min, tensor.Max, tensor.Product}

// lengths are numbers of elements that meet every remainder of the loops.
func lengths() []int {
	var all []int
	for n := range 71 {
		all = append(all, n)
	}
	return append(all, 1023, 4097)
}

func TestReduce(t *testing.T) {
	t.Run("uint8", testReduce(integerRef[uint8], integers[uint8]))
	t.Run("int32", testReduce(integerRef[int32], integers[int32]))
	t.Run("int64", testReduce(integerRef[int64], integers[int64]))
	t.Run("float32", testReduce(floatRef[float32], floats[float32]))
	t.Run("float64", testReduce(floatRef[float64], floats[float64]))
}

// testReduce compares with ref, on bits unless both are NaN, at an odd offset in a larger array, of which the rest
// must stay as it is.
func testReduce[T tensor.Element](ref func(op tensor.ReduceOp, a, b T) T, values func(*rand.Rand, int) []T) func(*testing.T) {
	return func(t *testing.T) {
		r := rand.New(rand.NewPCG(1, 2))
		for _, op := range ops {
			reduce, err := kernel.Reduce(op, tensor.Of[T]())
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range lengths() {
				dst, src := values(r, n+2), values(r, n+2)
				want := slices.Clone(dst)
				for i := 1; i <= n; i++ {
					want[i] = ref(op, dst[i], src[i])
				}
				keep := slices.Clone(src)
				reduce(tensor.Bytes(dst[1:n+1]), tensor.Bytes(src[1:n+1]))
				for i := range dst {
					if !sameBits(dst[i], want[i]) {
						t.Fatalf("%v of %d: element %d is %v, want %v", op, n, i, dst[i], want[i])
					}
				}
				if !bytes.Equal(tensor.Bytes(src), tensor.Bytes(keep)) {
					t.Fatalf("%v of %d: the source was changed", op, n)
				}
			}
		}
	}
}

// sameBits takes all NaNs as the same.
func sameBits[T tensor.Element](a, b T) bool {
	if a != a || b != b {
		return a != a && b != b
	}
	return bytes.Equal(tensor.Bytes([]T{a}), tensor.Bytes([]T{b}))
}

func integers[T uint8 | int32 | int64](r *rand.Rand, n int) []T {
	v := make([]T, n)
	for i := range v {
		v[i] = T(r.Uint64()) >> r.IntN(8*tensor.Of[T]().Size())
	}
	return v
}

func floats[T float32 | float64](r *rand.Rand, n int) []T {
	special := []float64{0, math.Copysign(0, -1), math.Inf(1), math.Inf(-1), math.NaN(), math.MaxFloat64, 1e-45, 5e-324}
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

// integerRef computes without bounds and wraps at the end.
func integerRef[T uint8 | int32 | int64](op tensor.ReduceOp, a, b T) T {
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

func wrap[T uint8 | int32 | int64](z *big.Int) T {
	return T(z.And(z, new(big.Int).SetUint64(math.MaxUint64)).Uint64())
}

// floatRef computes finite sums and products exactly and rounds them once.
func floatRef[T float32 | float64](op tensor.ReduceOp, a, b T) T {
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
	case op == tensor.Sum && (!finite || x+y == 0): // the sign of zero is the hardware's to know
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

// TestSpecial states what the package promises where arithmetic has a choice.
func TestSpecial(t *testing.T) {
	negZero := math.Copysign(0, -1)
	checkReduce(t, tensor.Min, 1, math.NaN(), math.NaN())
	checkReduce(t, tensor.Min, math.NaN(), 1, math.NaN())
	checkReduce(t, tensor.Max, math.Inf(1), math.NaN(), math.NaN())
	checkReduce(t, tensor.Min, 0, negZero, negZero)
	checkReduce(t, tensor.Max, negZero, 0, 0)
	checkReduce(t, tensor.Max, float32(1), float32(math.NaN()), float32(math.NaN()))
	checkReduce(t, tensor.Sum, uint8(255), 2, 1)
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
	// Five elements pass through both loops of a function.
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
	// A product in float64 would be 1e-16 here.
	checkScale(t, []float32{1e30}, 1e-46, []float32{0})
}

func TestScaleInteger(t *testing.T) {
	checkScale(t, []uint8{0, 1, 3, 255}, 0.5, []uint8{0, 0, 1, 127})
	checkScale(t, []uint8{0, 1, 128, 255}, 2, []uint8{0, 2, 255, 255})
	checkScale(t, []uint8{0, 1, 255}, -1, []uint8{0, 0, 0})
	checkScale(t, []uint8{0, 1, 255}, -0.5, []uint8{0, 0, 0})
	checkScale(t, []uint8{255, 255}, 255.999/255, []uint8{255, 255})
	checkScale(t, []int32{-7, 7, math.MinInt32, math.MaxInt32}, 0.5, []int32{-3, 3, math.MinInt32 / 2, math.MaxInt32 / 2})
	checkScale(t, []int32{1 << 30, -1 << 30, 5}, 2, []int32{math.MaxInt32, math.MinInt32, 10})
	checkScale(t, []int32{5, 0, -5}, math.NaN(), []int32{0, 0, 0})
	checkScale(t, []int32{5, 0, -5}, math.Inf(1), []int32{math.MaxInt32, 0, math.MinInt32})
	checkScale(t, []int64{1 << 62, -1 << 62, 9}, 2, []int64{math.MaxInt64, math.MinInt64, 18})
	checkScale(t, []int64{math.MaxInt64, math.MinInt64}, -1, []int64{math.MinInt64, math.MaxInt64})
	checkScale(t, []int64{1<<53 + 1, math.MaxInt64}, 1, []int64{1<<53 + 1, math.MaxInt64})
	checkScale(t, []int64{1<<53 + 1}, -1, []int64{-1 << 53})
	checkScale(t, []int64{}, 3, []int64{})
}

// checkScale scales a copy of in, and guards the elements around it.
func checkScale[T tensor.Element](t *testing.T, in []T, factor float64, want []T) {
	t.Helper()
	scale, err := kernel.Scale(tensor.Of[T]())
	if err != nil {
		t.Fatal(err)
	}
	got := slices.Concat([]T{7}, in, []T{7})
	scale(tensor.Bytes(got[1:len(got)-1]), factor)
	for i, w := range slices.Concat([]T{7}, want, []T{7}) {
		if !sameBits(got[i], w) {
			t.Errorf("%T %v scaled by %v: element %d is %v, want %v", in, in, factor, i-1, got[i], w)
			return
		}
	}
}

// TestTable holds the table to the types of package tensor.
func TestTable(t *testing.T) {
	for _, dt := range tensor.DTypes() {
		for _, op := range ops {
			if _, err := kernel.Reduce(op, dt); err != nil {
				t.Error(err)
			}
		}
		for _, op := range []tensor.ReduceOp{tensor.NoReduce, tensor.Average, 200} {
			if _, err := kernel.Reduce(op, dt); err == nil {
				t.Errorf("%v of %v was not refused", op, dt)
			}
		}
		if _, err := kernel.Scale(dt); err != nil {
			t.Error(err)
		}
	}
	for _, dt := range []tensor.DType{tensor.Invalid, tensor.DType(len(tensor.DTypes()) + 1), 255} {
		if _, err := kernel.Reduce(tensor.Sum, dt); err == nil {
			t.Errorf("a sum of %v was not refused", dt)
		}
		if _, err := kernel.Scale(dt); err == nil {
			t.Errorf("scaling %v was not refused", dt)
		}
	}
}

func TestBadLengthPanics(t *testing.T) {
	sum, err := kernel.Reduce(tensor.Sum, tensor.Int32)
	if err != nil {
		t.Fatal(err)
	}
	scale, err := kernel.Scale(tensor.Int32)
	if err != nil {
		t.Fatal(err)
	}
	b := tensor.Bytes(make([]int64, 2))
	for name, f := range map[string]func(){
		"source shorter":            func() { sum(b[:8], b[8:12]) },
		"source longer":             func() { sum(b[:4], b[8:16]) },
		"not a multiple":            func() { sum(b[:6], b[8:14]) },
		"scaling, not a multiple":   func() { scale(b[:6], 2) },
		"scaling by 1, no multiple": func() { scale(b[:6], 1) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f()
		})
	}
}

// BenchmarkReduce counts the bytes of the destination.
func BenchmarkReduce(b *testing.B) {
	for _, dt := range tensor.DTypes() {
		for _, op := range ops {
			for _, size := range []int{4 << 10, 256 << 10} {
				b.Run(fmt.Sprintf("%v/%v/bytes=%d", dt, op, size), func(b *testing.B) {
					reduce, err := kernel.Reduce(op, dt)
					if err != nil {
						b.Fatal(err)
					}
					// All bits zero are a zero, which every operation leaves a zero: no overflow, no denormals.
					dst, src := tensor.Bytes(make([]int64, size/8)), tensor.Bytes(make([]int64, size/8))
					b.SetBytes(int64(size))
					for b.Loop() {
						reduce(dst, src)
					}
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
					b.Fatal(err)
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
	for _, dt := range []tensor.DType{tensor.Float32, tensor.Float64, tensor.Invalid, 200} {
		if kernel.Divide(dt) != nil {
			t.Errorf("%v has a division", dt)
		}
	}
}
