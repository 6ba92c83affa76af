package adasum_test

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops/adasum"
	"github.com/gohvd/gohvd/ops/opstest"
)

// Two tensors of two elements are combined in parts of one element. The vectors of the first tensor are
// orthogonal, and those of the second are equal.
func ExampleCombiner() {
	a, b := []float32{1, 0, 3, 4}, []float32{0, 2, 3, 4}
	var c adasum.Combiner
	if err := c.Prepare(tensor.Float32, 16, []int64{8, 8}); err != nil {
		panic(err)
	}
	dots := make([]float64, c.Dots())
	for from := 0; from < 16; from += 4 {
		c.AddDots(dots, tensor.Bytes(a)[from:from+4], tensor.Bytes(b)[from:from+4], from)
	}
	for from := 0; from < 16; from += 4 {
		part := tensor.Bytes(a)[from : from+4]
		c.Combine(part, part, tensor.Bytes(b)[from:from+4], from, dots)
	}
	fmt.Println(a)
	// Output: [1 2 3 4]
}

// Prepare refuses sizes of tensors that do not match the buffer or the type.
func TestPrepareRefuses(t *testing.T) {
	for _, counts := range [][]int64{nil, {8}, {8, 16}, {-8, 24}, {6, 10}, {16, 1}} {
		var c adasum.Combiner
		if err := c.Prepare(tensor.Float32, 16, counts); err == nil {
			t.Errorf("tensors of %v bytes in 16 bytes are accepted", counts)
		}
	}
	var c adasum.Combiner
	if err := c.Prepare(tensor.Int32, 16, []int64{16}); err == nil {
		t.Error("integers are accepted")
	}
}

// The results for float64 vectors at the ends of the range are those of the same vectors in the middle of it.
func TestRange(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	vector := func(n int) []float64 {
		v := make([]float64, n)
		for i := range v {
			v[i] = rnd.NormFloat64()
		}
		return v
	}
	x, y := vector(200), vector(200)
	minus := func(v []float64) []float64 { return scaled(v, -1, 0) }
	for name, test := range map[string]struct {
		a, b       []float64
		expA, expB int
	}{
		"small":                 {x, y, -1000, -1000},
		"smallest":              {x, y, -1040, -1040},
		"large":                 {x, y, 700, 700},
		"largest":               {x, y, 1021, 1021},
		"largest, opposite":     {x, minus(x), 1021, 1021},
		"large, equal":          {x, x, 1000, 1000},
		"small, equal":          {x, x, -1000, -1000},
		"small and large":       {x, y, -1000, 700},
		"small and middle":      {x, y, -1000, 0},
		"middle and large":      {x, y, 0, 700},
		"parallel, far apart":   {x, x, -1000, 1000},
		"opposite, far apart":   {minus(x), x, 1000, -1000},
		"zero and large":        {make([]float64, 200), y, 0, 1000},
		"zero and small":        {make([]float64, 200), y, 0, -1000},
		"in the middle":         {x, y, 0, 3},
		"one element, large":    {x[:1], y[:1], 1000, 1000},
		"one element, small":    {x[:1], y[:1], -1000, -1000},
		"parts differ in range": {append(scaled(x, 1, 1000), x...), append(scaled(y, 1, 1000), y...), 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := scaled(test.a, 1, test.expA), scaled(test.b, 1, test.expB)
			want := exactly(a, b)
			for _, part := range []int{8, 8 * len(a)} {
				got := slices.Clone(a)
				var c adasum.Combiner
				if err := c.Prepare(tensor.Float64, 8*len(a), []int64{int64(8 * len(a))}); err != nil {
					t.Fatal(err)
				}
				dots := make([]float64, c.Dots())
				for from := 0; from < 8*len(a); from += part {
					c.AddDots(dots, tensor.Bytes(a)[from:from+part], tensor.Bytes(b)[from:from+part], from)
				}
				c.Combine(tensor.Bytes(got), tensor.Bytes(a), tensor.Bytes(b), 0, dots)
				largest := max(norm(a), norm(b))
				for i, g := range got {
					w, _ := want[i].Float64()
					if d := math.Abs(g/2 - w/2); !(d <= 64*0x1p-53*largest/2+0x1p-1074) {
						t.Fatalf("parts of %d bytes: element %d is %v, want %v", part, i, g, w)
					}
				}
			}
		})
	}
}

// A NaN or an infinity in one tensor makes the result of this tensor NaN, and does not change that of another
// one.
func TestNotFinite(t *testing.T) {
	for _, r := range opstest.Adasums() {
		dt := r.DType
		widen, err := kernel.Convert(tensor.Float64, dt)
		if err != nil {
			t.Fatal(err)
		}
		for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
			a, b := opstest.Encode(dt, []float64{1, bad, 1, 0}), opstest.Encode(dt, []float64{1, 2, 0, 2})
			var c adasum.Combiner
			if err := c.Prepare(dt, len(a), []int64{int64(len(a) / 2), int64(len(a) / 2)}); err != nil {
				t.Fatal(err)
			}
			dots := make([]float64, c.Dots())
			c.AddDots(dots, a, b, 0)
			c.Combine(a, a, b, 0, dots)
			got := make([]float64, 4)
			widen(tensor.Bytes(got), a)
			if !math.IsNaN(got[0]) || !math.IsNaN(got[1]) || got[2] != 1 || got[3] != 2 {
				t.Errorf("%v, %v: got %v, want [NaN NaN 1 2]", dt, bad, got)
			}
		}
	}
}

// scaled returns v, each element multiplied by f·2^exp.
func scaled(v []float64, f float64, exp int) []float64 {
	out := make([]float64, len(v))
	for i := range v {
		out[i] = math.Ldexp(v[i]*f, exp)
	}
	return out
}

// norm returns the largest absolute value of an element.
func norm(v []float64) float64 {
	largest := 0.0
	for _, x := range v {
		largest = max(largest, math.Abs(x))
	}
	return largest
}

// exactly returns the adaptive sum of a and b, computed with numbers of a large range and precision.
func exactly(a, b []float64) []*big.Float {
	num := func(x float64) *big.Float { return new(big.Float).SetPrec(300).SetFloat64(x) }
	dot := func(v, w []float64) *big.Float {
		d := num(0)
		for i := range v {
			d.Add(d, num(0).Mul(num(v[i]), num(w[i])))
		}
		return d
	}
	factor := func(square *big.Float) *big.Float {
		if square.Sign() == 0 {
			return num(1)
		}
		q := num(0).Quo(dot(a, b), num(0).Mul(num(2), square))
		return q.Sub(num(1), q)
	}
	fa, fb := factor(dot(a, a)), factor(dot(b, b))
	out := make([]*big.Float, len(a))
	for i := range a {
		out[i] = num(0).Add(num(0).Mul(fa, num(a[i])), num(0).Mul(fb, num(b[i])))
	}
	return out
}
