package tensor_test

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/gohvd/gohvd/tensor"
)

func TestDTypes(t *testing.T) {
	want := []struct {
		dt   tensor.DType
		name string
		size int
	}{
		{tensor.Uint8, "uint8", 1}, {tensor.Int32, "int32", 4}, {tensor.Int64, "int64", 8},
		{tensor.Float32, "float32", 4}, {tensor.Float64, "float64", 8},
	}
	all := tensor.DTypes()
	if len(all) != len(want) {
		t.Fatalf("%d types, want %d", len(all), len(want))
	}
	for i, w := range want {
		if all[i] != w.dt || !w.dt.Valid() || w.dt.String() != w.name || w.dt.Size() != w.size {
			t.Errorf("type %d is %v of %d bytes, valid %v, want %s of %d", i, all[i], w.dt.Size(), w.dt.Valid(), w.name, w.size)
		}
	}
	// Values from the wire may be anything.
	for _, dt := range []tensor.DType{tensor.Invalid, tensor.Float64 + 1, 255} {
		if dt.Valid() || dt.Size() != 0 || !strings.HasPrefix(dt.String(), "DType(") {
			t.Errorf("%d: valid %v, %d bytes, %v", uint8(dt), dt.Valid(), dt.Size(), dt)
		}
	}
}

type (
	pixel   uint8
	counter int32
	stamp   int64
	weight  float32
	loss    float64
)

// Types that are only named differently map to the same DType.
func TestOf(t *testing.T) {
	for _, c := range []struct {
		name      string
		got, want tensor.DType
	}{
		{"uint8", tensor.Of[uint8](), tensor.Uint8}, {"pixel", tensor.Of[pixel](), tensor.Uint8},
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
	if v[1] = 7; s[1] != 7 {
		t.Error("View copies")
	}
	// A remainder is left out, and a slice ends where its bytes do.
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
		// A zero hides neither a negative dimension nor, in either order, dimensions that are too large.
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
	for want, s := range map[string]tensor.Shape{"[]": nil, "[7]": {7}, "[64 3 7 7]": {64, 3, 7, 7}, "[-1 0]": {-1, 0}} {
		if s.String() != want {
			t.Errorf("got %q, want %q", s.String(), want)
		}
	}
}

func TestReduceOps(t *testing.T) {
	for op, want := range map[tensor.ReduceOp]string{
		tensor.Average: "average", tensor.Sum: "sum", tensor.Min: "min", tensor.Max: "max", tensor.Product: "product",
	} {
		if op.String() != want || !op.Valid() {
			t.Errorf("got %v, valid %v, want %s", op, op.Valid(), want)
		}
	}
	if tensor.NoReduce.Valid() || tensor.NoReduce.String() != "none" {
		t.Errorf("no reduction is %v, valid %v", tensor.NoReduce, tensor.NoReduce.Valid())
	}
	if op := tensor.Product + 1; op.Valid() || op.String() != "ReduceOp(6)" {
		t.Errorf("%v is valid: %v", op, op.Valid())
	}
}
