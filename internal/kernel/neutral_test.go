package kernel_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/tensor"
)

var allOps = []tensor.ReduceOp{
	tensor.Average, tensor.Sum, tensor.Min, tensor.Max, tensor.Product, tensor.Adasum, tensor.AverageActive,
}

func TestNeutral(t *testing.T) {
	t.Run("uint8", testNeutral(every[uint8]))
	t.Run("int8", testNeutral(every[int8]))
	t.Run("uint16", testNeutral(every[uint16]))
	t.Run("int16", testNeutral(every[int16]))
	t.Run("int32", testNeutral(integers[int32]))
	t.Run("int64", testNeutral(integers[int64]))
	t.Run("float16", testNeutral(every[half.Float16]))
	t.Run("bfloat16", testNeutral(every[half.BFloat16]))
	t.Run("float32", testNeutral(floats[float32]))
	t.Run("float64", testNeutral(floats[float64]))
	t.Run("bool", testNeutral(func(*rand.Rand, int) []bool { return []bool{false, true} }))
}

// every returns all values of a type with one or two bytes.
func every[T tensor.Element](*rand.Rand, int) []T {
	words := make([]uint16, 1<<16)
	for i := range words {
		words[i] = uint16(i)
	}
	return tensor.View[T](tensor.Bytes(words))
}

// testNeutral combines values with the neutral element of each operation, as first and as second operand. The
// result must have the bits of the value.
func testNeutral[T tensor.Element](values func(*rand.Rand, int) []T) func(*testing.T) {
	return func(t *testing.T) {
		dt := tensor.Of[T]()
		for _, op := range allOps {
			fill, err := kernel.Neutral(op, dt)
			if tensor.CheckReduce(op, dt) != nil {
				if err == nil {
					t.Errorf("%v of %v was not refused", op, dt)
				}
				continue
			}
			if err != nil {
				t.Error(err)
				continue
			}
			want := values(rand.New(rand.NewPCG(13, 14)), 5000)
			right, left, neutral := append([]T(nil), want...), make([]T, len(want)), make([]T, len(want))
			fill(tensor.Bytes(left))
			fill(tensor.Bytes(neutral))
			combine := combination(t, op, dt)
			combine(tensor.Bytes(right), tensor.Bytes(neutral))
			combine(tensor.Bytes(left), tensor.Bytes(want))
			for i, w := range want {
				if !sameBits(right[i], w) || !sameBits(left[i], w) {
					t.Fatalf("%v of %v and %v: got %v and, the other way round, %v", op, w, neutral[i],
						right[i], left[i])
				}
			}
		}
	}
}

// combination returns the function that combines the elements of two ranks. For Adasum it returns a sum:
// neutral elements are orthogonal to all others, and the Adasum of orthogonal vectors is their sum.
func combination(t *testing.T, op tensor.ReduceOp, dt tensor.DType) kernel.Func {
	t.Helper()
	if op == tensor.Adasum {
		combine, err := kernel.Combine(dt)
		if err != nil {
			t.Fatal(err)
		}
		return func(dst, src []byte) { combine(dst, dst, src, 1, 1) }
	}
	reduce, err := kernel.Reduce(op.Base(), dt)
	if err != nil {
		t.Fatal(err)
	}
	return reduce
}

// Neutral fills the whole buffer and changes no bytes beside it.
func TestNeutralFills(t *testing.T) {
	for _, dt := range tensor.DTypes() {
		fill, err := kernel.Neutral(tensor.Min, dt)
		if err != nil {
			t.Fatal(err)
		}
		elem := make([]byte, dt.Size())
		fill(elem)
		for _, n := range lengths() {
			what := fmt.Sprintf("%d of %v", n, dt)
			buf, check := guarded(t, what, dt, n*dt.Size())
			fill(buf)
			if !bytes.Equal(buf, bytes.Repeat(elem, n)) {
				t.Fatalf("%s: got % x, want % x repeated", what, buf, elem)
			}
			check()
		}
	}
}
