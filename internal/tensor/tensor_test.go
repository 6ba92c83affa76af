package tensor_test

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/tensor"
)

func TestDTypes(t *testing.T) {
	want := []struct {
		dt   tensor.DType
		name string
		size int
	}{
		{tensor.Uint8, "uint8", 1}, {tensor.Int8, "int8", 1}, {tensor.Uint16, "uint16", 2},
		{tensor.Int16, "int16", 2},
		{tensor.Int32, "int32", 4}, {tensor.Int64, "int64", 8}, {tensor.Float16, "float16", 2},
		{tensor.BFloat16, "bfloat16", 2},
		{tensor.Float32, "float32", 4}, {tensor.Float64, "float64", 8}, {tensor.Bool, "bool", 1},
	}
	all := tensor.DTypes()
	if len(all) != len(want) {
		t.Fatalf("%d types, want %d", len(all), len(want))
	}
	for i, w := range want {
		if all[i] != w.dt || !w.dt.Valid() || w.dt.String() != w.name || w.dt.Size() != w.size {
			t.Errorf("type %d is %v of %d bytes, valid %v, want %s of %d", i, all[i], w.dt.Size(),
				w.dt.Valid(), w.name, w.size)
		}
	}
	// Values from a peer may be out of range.
	for _, dt := range []tensor.DType{tensor.Invalid, tensor.Bool + 1, 255} {
		if dt.IsFloat() || dt.IsHalf() || dt.IsInteger() {
			t.Errorf("%v is of a kind: float %v, half %v, integer %v", dt, dt.IsFloat(), dt.IsHalf(),
				dt.IsInteger())
		}
		if dt.Valid() || dt.Size() != 0 || !strings.HasPrefix(dt.String(), "DType(") {
			t.Errorf("%d: valid %v, %d bytes, %v", uint8(dt), dt.Valid(), dt.Size(), dt)
		}
	}
}

// Each type is either an integer type, a floating-point type or Bool. Half-precision types are floating-point
// types.
func TestKinds(t *testing.T) {
	floats := []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64}
	for _, dt := range tensor.DTypes() {
		if got, want := dt.IsFloat(), slices.Contains(floats, dt); got != want {
			t.Errorf("%v is a float: %v, want %v", dt, got, want)
		}
		if got, want := dt.IsHalf(), slices.Contains(floats[:2], dt); got != want {
			t.Errorf("%v is a half: %v, want %v", dt, got, want)
		}
		if got, want := dt.IsInteger(), !slices.Contains(floats, dt) && dt != tensor.Bool; got != want {
			t.Errorf("%v is an integer: %v, want %v", dt, got, want)
		}
	}
}

type (
	pixel   uint8
	level   int8
	port    uint16
	sample  int16
	counter int32
	stamp   int64
	weight  float32
	loss    float64
	mask    bool
)

// Of returns the right DType for each type, also for a named type such as type pixel uint8.
func TestOf(t *testing.T) {
	for _, c := range []struct {
		name      string
		got, want tensor.DType
	}{
		{"uint8", tensor.Of[uint8](), tensor.Uint8}, {"pixel", tensor.Of[pixel](), tensor.Uint8},
		{"int8", tensor.Of[int8](), tensor.Int8}, {"level", tensor.Of[level](), tensor.Int8},
		{"uint16", tensor.Of[uint16](), tensor.Uint16}, {"port", tensor.Of[port](), tensor.Uint16},
		{"int16", tensor.Of[int16](), tensor.Int16}, {"sample", tensor.Of[sample](), tensor.Int16},
		{"half.Float16", tensor.Of[half.Float16](), tensor.Float16},
		{"half.BFloat16", tensor.Of[half.BFloat16](), tensor.BFloat16},
		{"bool", tensor.Of[bool](), tensor.Bool}, {"mask", tensor.Of[mask](), tensor.Bool},
		{"int32", tensor.Of[int32](), tensor.Int32}, {"counter", tensor.Of[counter](), tensor.Int32},
		{"int64", tensor.Of[int64](), tensor.Int64}, {"stamp", tensor.Of[stamp](), tensor.Int64},
		{"float32", tensor.Of[float32](), tensor.Float32}, {"weight", tensor.Of[weight](), tensor.Float32},
		{"float64", tensor.Of[float64](), tensor.Float64}, {"loss", tensor.Of[loss](), tensor.Float64},
	} {
		if c.got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, c.got, c.want)
		}
	}
}

func TestBytesAndView(t *testing.T) {
	s := []weight{1, -2, 0.5}
	b := tensor.Bytes(s)
	var want []byte
	for _, v := range s {
		want = binary.NativeEndian.AppendUint32(want, math.Float32bits(float32(v)))
	}
	if !bytes.Equal(b, want) {
		t.Errorf("got % x, want % x", b, want)
	}
	if unsafe.SliceData(b) != (*byte)(unsafe.Pointer(unsafe.SliceData(s))) {
		t.Error("Bytes copies")
	}
	v := tensor.View[weight](b)
	if !slices.Equal(v, s) {
		t.Errorf("View gives %v, want %v", v, s)
	}
	v[1] = 7
	if s[1] != 7 {
		t.Error("View copies")
	}
	// View leaves out a part of an element at the end. The capacity of the results ends where their bytes
	// end.
	if v := tensor.View[weight](b[:11]); len(v) != 2 || cap(v) != 2 {
		t.Errorf("View of 11 bytes has length %d and capacity %d, want 2", len(v), cap(v))
	}
	if b := tensor.Bytes(s[:2]); len(b) != 8 || cap(b) != 8 {
		t.Errorf("Bytes of 2 elements has length %d and capacity %d, want 8", len(b), cap(b))
	}
	for _, n := range []int{0, 1, 3} {
		if v := tensor.View[weight](make([]byte, n)); v != nil {
			t.Errorf("View of %d bytes is %v, want nil", n, v)
		}
	}
	if tensor.Bytes([]loss{}) != nil || tensor.Bytes[loss](nil) != nil {
		t.Error("Bytes of nothing is not nil")
	}
}

func TestNumElems(t *testing.T) {
	const most = math.MaxInt64
	for _, c := range []struct {
		shape tensor.Shape
		want  int64
		err   string
	}{
		{nil, 1, ""},
		{tensor.Shape{0}, 0, ""},
		{tensor.Shape{1}, 1, ""},
		{tensor.Shape{64, 3, 7, 7}, 9408, ""},
		{tensor.Shape{5, 0, 3}, 0, ""},
		{tensor.Shape{most}, most, ""},
		{tensor.Shape{1, most, 1}, most, ""},
		{tensor.Shape{1 << 31, 1 << 31}, 1 << 62, ""},
		{tensor.Shape{1 << 31, 1 << 32}, 0, "more than 2^63-1 elements"},
		{tensor.Shape{most, 2}, 0, "more than 2^63-1 elements"},
		{tensor.Shape{1 << 62, 1 << 62, 1 << 62}, 0, "more than 2^63-1 elements"},
		{tensor.Shape{-1}, 0, "shape [-1] has a negative dimension"},
		{tensor.Shape{math.MinInt64}, 0, "negative dimension"},
		// A dimension of 0 hides neither a negative dimension nor dimensions that are too large, in any
		// order.
		{tensor.Shape{0, -1}, 0, "shape [0 -1] has a negative dimension"},
		{tensor.Shape{-1, 0}, 0, "negative dimension"},
		{tensor.Shape{0, most, 2}, 0, "more than 2^63-1 elements"},
		{tensor.Shape{most, 2, 0}, 0, "more than 2^63-1 elements"},
	} {
		got, err := c.shape.NumElems()
		switch {
		case c.err == "" && (err != nil || got != c.want):
			t.Errorf("%v: got %d and %v, want %d", c.shape, got, err, c.want)
		case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err) || got != 0):
			t.Errorf("%v: got %d and %v, want %q", c.shape, got, err, c.err)
		}
	}
}

func TestShape(t *testing.T) {
	for _, c := range []struct {
		a, b  tensor.Shape
		equal bool
	}{
		{nil, tensor.Shape{}, true},
		{tensor.Shape{4, 5}, tensor.Shape{4, 5}, true},
		{tensor.Shape{4, 5}, tensor.Shape{5, 4}, false},
		{tensor.Shape{4}, tensor.Shape{4, 1}, false},
		{nil, tensor.Shape{1}, false},
	} {
		if c.a.Equal(c.b) != c.equal || c.b.Equal(c.a) != c.equal {
			t.Errorf("%v equal to %v: want %v", c.a, c.b, c.equal)
		}
	}
	for want, s := range map[string]tensor.Shape{"[]": nil, "[7]": {7}, "[64 3 7 7]": {64, 3, 7, 7},
		"[-1 0]": {-1, 0}} {
		if s.String() != want {
			t.Errorf("got %q, want %q", s.String(), want)
		}
	}
}

func TestReduceOps(t *testing.T) {
	for i, want := range []struct {
		op   tensor.ReduceOp
		name string
		base tensor.ReduceOp
	}{
		{tensor.NoReduce, "none", tensor.NoReduce},
		{tensor.Average, "average", tensor.Sum},
		{tensor.Sum, "sum", tensor.Sum},
		{tensor.Min, "min", tensor.Min},
		{tensor.Max, "max", tensor.Max},
		{tensor.Product, "product", tensor.Product},
		{tensor.Adasum, "adasum", tensor.Adasum},
		{tensor.AverageActive, "average-active", tensor.Sum},
		{8, "ReduceOp(8)", 8},
	} {
		op := tensor.ReduceOp(i)
		if op != want.op || op.String() != want.name || op.Base() != want.base {
			t.Errorf("operation %d is %v with base %v, want %s with %v", i, op, op.Base(), want.name,
				want.base)
		}
		if got, want := op.Valid(), i > 0 && i < 8; got != want {
			t.Errorf("%v is valid: %v, want %v", op, got, want)
		}
		if got, want := op.IsAverage(), op == tensor.Average || op == tensor.AverageActive; got != want {
			t.Errorf("%v is an average: %v, want %v", op, got, want)
		}
	}
}

func TestCheckReduce(t *testing.T) {
	for _, c := range []struct {
		op   tensor.ReduceOp
		dt   tensor.DType
		want string
	}{
		{tensor.Min, tensor.Bool, ""},
		{tensor.Max, tensor.Bool, ""},
		{tensor.Sum, tensor.Bool, "reduce bool: got operation sum, want min (logical and) or max (logical or)"},
		{tensor.Average, tensor.Bool, "got operation average"},
		{tensor.AverageActive, tensor.Bool, "got operation average-active"},
		{tensor.Product, tensor.Bool, "got operation product"},
		{tensor.Adasum, tensor.Bool, "got operation adasum"},
		{tensor.Adasum, tensor.Int32, "reduce with adasum: got element type int32, want a floating-point type"},
		{tensor.Adasum, tensor.BFloat16, ""},
		{tensor.NoReduce, tensor.Float32, "reduce float32: got the unknown reduction none"},
		{200, tensor.Float32, "got the unknown reduction ReduceOp(200)"},
		{tensor.Sum, tensor.Invalid, "reduce with sum: got the unknown element type DType(0)"},
		{tensor.Sum, tensor.Bool + 1, "got the unknown element type DType(12)"},
	} {
		checkError(t, tensor.CheckReduce(c.op, c.dt), c.want)
	}
	for _, dt := range tensor.DTypes() {
		if dt == tensor.Bool {
			continue
		}
		for _, op := range []tensor.ReduceOp{
			tensor.Average, tensor.Sum, tensor.Min, tensor.Max, tensor.Product, tensor.AverageActive,
		} {
			checkError(t, tensor.CheckReduce(op, dt), "")
		}
	}
}

func TestCheckScale(t *testing.T) {
	for _, dt := range tensor.DTypes() {
		want := ""
		if dt == tensor.Bool {
			want = "prescale or postscale factor: got element type bool, want a numeric type"
		}
		checkError(t, tensor.CheckScale(dt), want)
	}
	checkError(t, tensor.CheckScale(tensor.Invalid), "got element type DType(0)")
	checkError(t, tensor.CheckScale(255), "got element type DType(255)")
}

// checkError fails the test if the text of err does not contain want. If want is empty, it fails the test if
// err is not nil.
func checkError(t *testing.T, err error, want string) {
	t.Helper()
	if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		t.Errorf("got %v, want %q", err, want)
	}
}
