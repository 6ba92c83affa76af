package tcp_test

import (
	"bytes"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

// alike returns the ranks' contributions to tensors of the given lengths. The ranks' vectors are similar to
// each other. So their combination differs a lot from their sum and depends on the order.
func alike(dt tensor.DType, n int, tensors []int) [][]byte {
	rng := rand.New(rand.NewPCG(3, 4))
	numElems := 0
	for _, k := range tensors {
		numElems += k
	}
	common := make([]float64, numElems)
	for i := range common {
		common[i] = rng.NormFloat64()
	}
	all := make([][]byte, n)
	for r := range all {
		all[r] = floats(dt, numElems, func(i int) float64 {
			return float64(r+1) * (common[i] + rng.NormFloat64())
		})
	}
	return all
}

// adasum runs Adasum on copies of the ranks' contributions and returns the result. If the ranks have
// different results, it fails the test.
func adasum(t *testing.T, c *cluster, dt tensor.DType, in [][]byte, tensors []int) []byte {
	t.Helper()
	var counts []int64
	for _, k := range tensors {
		counts = append(counts, int64(k*dt.Size()))
	}
	bufs := make([][]byte, len(in))
	c.must(t, func(r int, b *opstest.Blocking) error {
		bufs[r] = aligned(in[r])
		return b.Adasum(t.Context(), message.HalvingDoubling, dt, bufs[r], counts)
	})
	for r := range bufs {
		wantElements(t, fmt.Sprintf("adasum of %v × %v: rank %d, as rank 0", tensors, dt, r), dt, bufs[r],
			bufs[0])
	}
	return bufs[0]
}

// adasumReference is a simple implementation to compare Adasum with. It combines whole vectors, tensor by
// tensor, in the tree that package ops/adasum defines.
func adasumReference(dt tensor.DType, in [][]byte, tensors []int) []byte {
	var out []byte
	from := 0
	for _, k := range tensors {
		to := from + k*dt.Size()
		v := make([][]byte, len(in))
		for r := range in {
			v[r] = in[r][from:to]
		}
		out = append(out, combineAll(dt, v)...)
		from = to
	}
	return out
}

// combineAll returns the Adasum combination of the ranks' vectors of one tensor.
func combineAll(dt tensor.DType, in [][]byte) []byte {
	p := 1 << (bits.Len(uint(len(in))) - 1)
	v := slices.Clone(in[:p])
	for i, sent := range in[p:] {
		v[i] = combinePair(dt, v[i], sent)
	}
	for ; len(v) > 1; v = v[:len(v)/2] {
		for i := range len(v) / 2 {
			v[i] = combinePair(dt, v[2*i], v[2*i+1])
		}
	}
	return v[0]
}

func combinePair(dt tensor.DType, a, b []byte) []byte {
	numElems := len(a) / dt.Size()
	var ab, aa, bb float64
	for i := range numElems {
		x, y := float(dt, a, i), float(dt, b, i)
		ab += x * y
		aa += x * x
		bb += y * y
	}
	ca, cb := 1.0, 1.0
	if aa != 0 {
		ca -= ab / (2 * aa)
	}
	if bb != 0 {
		cb -= ab / (2 * bb)
	}
	return floats(dt, numElems, func(i int) float64 { return ca*float(dt, a, i) + cb*float(dt, b, i) })
}

// epsilon returns the distance from 1 to the next number of type dt.
func epsilon(dt tensor.DType) float64 {
	return map[tensor.DType]float64{
		tensor.Float16: 0x1p-10, tensor.BFloat16: 0x1p-7, tensor.Float32: 0x1p-23, tensor.Float64: 0x1p-52,
	}[dt]
}

// wantClose compares the results of two implementations for the same contributions, and fails the test if the
// results differ too much.
//
// Each implementation adds products in its own order, which changes the last bits of the factors. So at each
// level of the tree, a result that lies between two numbers of type dt may be rounded to either of them. The
// limit is two units in the last place of the largest element in a tensor's inputs. For float64 it is 64
// units, because float64 factors are not more precise than the elements.
func wantClose(t *testing.T, what string, dt tensor.DType, in [][]byte, tensors []int, got, want []byte) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: got %d bytes, want %d", what, len(got), len(want))
	}
	units := 2.0
	if dt == tensor.Float64 {
		units = 64
	}
	from := 0
	for _, k := range tensors {
		largest := 0.0
		for _, p := range in {
			for i := from; i < from+k; i++ {
				largest = max(largest, math.Abs(float(dt, p, i)))
			}
		}
		for i := from; i < from+k; i++ {
			if g, w := float(dt, got, i), float(dt, want, i); !(math.Abs(g-w) <= units*epsilon(dt)*largest) {
				t.Fatalf("%s: got %v as element %d, want %v", what, g, i, w)
			}
		}
		from += k
	}
}

func checkAdasum(t *testing.T, c *cluster, tensors []int) {
	t.Helper()
	for _, dt := range floatTypes {
		in := alike(dt, len(c.backends), tensors)
		got := adasum(t, c, dt, in, tensors)
		wantClose(t, fmt.Sprintf("adasum of %v × %v", tensors, dt), dt, in, tensors, got,
			adasumReference(dt, in, tensors))
	}
}

var adasumShapes = [][]int{{0}, {1}, {2}, {7}, {64}, {1000}, {0, 0}, {1, 1, 1}, {3, 0, 5, 0, 0, 11, 1},
	{0, 500, 13}, {13, 700, 0}}

// Adasum combines tensors of all lengths, some of them empty, also for more ranks than eachCluster has.
func TestAdasumShapes(t *testing.T) {
	for _, n := range []int{2, 3, 11} {
		c := newCluster(memMeshes(n), upTo(n), tcp.Config{SegmentBytes: 64})
		for _, tensors := range adasumShapes {
			checkAdasum(t, c, tensors)
		}
	}
}

// The combination of equal vectors is the same vector. The combination of orthogonal vectors is their sum. If
// one of two vectors is zero, their combination is the other vector.
func TestAdasumProperties(t *testing.T) {
	for n := 1; n <= 5; n++ {
		c := newCluster(memMeshes(n), upTo(n), tcp.Config{SegmentBytes: 64})
		for _, dt := range floatTypes {
			same := slices.Repeat(alike(dt, 1, []int{100}), n)
			if got := adasum(t, c, dt, same, []int{100}); !bytes.Equal(got, same[0]) {
				t.Errorf("%v: equal vectors are not their own combination", dt)
			}
			orthogonal, one := make([][]byte, n), make([][]byte, n)
			for r := range n {
				orthogonal[r] = floats(dt, 100, func(i int) float64 {
					if i%n == r {
						return float64(i + 1)
					}
					return 0
				})
				one[r] = same[r]
				if r != n/2 {
					one[r] = make([]byte, len(same[r]))
				}
			}
			if got := adasum(t, c, dt, orthogonal, []int{100}); !bytes.Equal(got,
				floats(dt, 100, func(i int) float64 { return float64(i + 1) })) {
				t.Errorf("%v: the combination of orthogonal vectors is not their sum", dt)
			}
			if got := adasum(t, c, dt, one, []int{100}); !bytes.Equal(got, one[n/2]) {
				t.Errorf("%v: the combination with vectors of zeros is not the other vector", dt)
			}
		}
		c.close()
	}
}

// Two equal vectors are averaged, even if their squares are outside of the range of float64.
func TestAdasumRange(t *testing.T) {
	c := newCluster(memMeshes(2), upTo(2), tcp.Config{})
	for _, x := range []float64{0x1p-1074, 0x1p-600, 0x1p-257, 0x1p-255, 1, 0x1p600, math.MaxFloat64} {
		in := slices.Repeat([][]byte{floats(tensor.Float64, 1, func(int) float64 { return x })}, 2)
		if got := float(tensor.Float64, adasum(t, c, tensor.Float64, in, []int{1}), 0); got != x {
			t.Errorf("two vectors with the element %v: got %v, want their average", x, got)
		}
	}
}

// A NaN or an infinity in one of three tensors makes the result of this tensor NaN. The results of the other
// two tensors do not change.
func TestAdasumNotFinite(t *testing.T) {
	tensors := []int{10, 20, 30}
	const n = 3
	c := newCluster(memMeshes(n), upTo(n), tcp.Config{SegmentBytes: 64})
	defer c.close()
	for _, dt := range floatTypes {
		finite := alike(dt, n, tensors)
		want := adasumReference(dt, finite, tensors)
		for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
			in := alike(dt, n, tensors)
			copy(in[n-1][15*dt.Size():], floats(dt, 1, func(int) float64 { return bad }))
			got := adasum(t, c, dt, in, tensors)
			for i := 10; i < 30; i++ {
				// The bad value makes the factor of its vector NaN, and this factor makes every element
				// of the tensor NaN.
				if v := float(dt, got, i); !math.IsNaN(v) {
					t.Fatalf("%v with %v: got %v as element %d, want NaN", dt, bad, v, i)
				}
			}
			// The other two tensors must have their usual results.
			copy(got[10*dt.Size():30*dt.Size()], want[10*dt.Size():])
			wantClose(t, fmt.Sprintf("%v beside %v", dt, bad), dt, finite, tensors, got, want)
		}
	}
}
