package tcp_test

import (
	"bytes"
	"fmt"
	"math"
	"testing"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

// value returns element i of the contribution of the given rank, for type dt. The values are small, positive
// or negative, and never zero. So sums and products over nine ranks are exact in every floating-point type.
func value(dt tensor.DType, rank, i int) int64 {
	v := int64(rank*7+i*3)%4 - 2 // between -2 and 1
	if v >= 0 {
		v++
	}
	switch dt {
	case tensor.Uint8:
		return int64(uint8(v))
	case tensor.Uint16:
		return int64(uint16(v))
	case tensor.Bool:
		return int64((rank*7 + i*3) % 5 / 4)
	}
	return v
}

// fold returns element i of the expected reduction over n ranks. For narrow integer types only the lowest
// bits of the returned number count.
func fold(op tensor.ReduceOp, dt tensor.DType, n, i int) int64 {
	acc := value(dt, 0, i)
	for r := 1; r < n; r++ {
		v := value(dt, r, i)
		switch op {
		case tensor.Sum:
			acc += v
		case tensor.Product:
			acc *= v
		case tensor.Min:
			acc = min(acc, v)
		case tensor.Max:
			acc = max(acc, v)
		}
	}
	return acc
}

// elements returns the bytes of numElems elements of dt with the values v(i).
func elements(dt tensor.DType, numElems int, v func(i int) int64) []byte {
	switch dt {
	case tensor.Uint8, tensor.Int8, tensor.Bool:
		return fill(numElems, func(i int) uint8 { return uint8(v(i)) })
	case tensor.Uint16, tensor.Int16:
		return fill(numElems, func(i int) uint16 { return uint16(v(i)) })
	case tensor.Int32:
		return fill(numElems, func(i int) int32 { return int32(v(i)) })
	case tensor.Int64:
		return fill(numElems, v)
	}
	return floats(dt, numElems, func(i int) float64 { return float64(v(i)) })
}

// floats returns the bytes of numElems elements of a floating-point type with the values v(i). For
// half-precision types each value is first rounded to float32.
func floats(dt tensor.DType, numElems int, v func(i int) float64) []byte {
	switch dt {
	case tensor.Float16:
		return fill(numElems, func(i int) half.Float16 { return half.Float16FromFloat32(float32(v(i))) })
	case tensor.BFloat16:
		return fill(numElems, func(i int) half.BFloat16 { return half.BFloat16FromFloat32(float32(v(i))) })
	case tensor.Float32:
		return fill(numElems, func(i int) float32 { return float32(v(i)) })
	case tensor.Float64:
		return fill(numElems, v)
	}
	panic(fmt.Sprintf("no floats of %v", dt))
}

func fill[T tensor.Element](numElems int, v func(i int) T) []byte {
	s := make([]T, numElems)
	for i := range s {
		s[i] = v(i)
	}
	return tensor.Bytes(s)
}

// reduction is a reduction of elements of a type.
type reduction struct {
	op tensor.ReduceOp
	dt tensor.DType
}

// everyReduction has all reductions that exist.
var everyReduction = func() (all []reduction) {
	for _, dt := range tensor.DTypes() {
		for _, op := range []tensor.ReduceOp{tensor.Sum, tensor.Min, tensor.Max, tensor.Product} {
			if tensor.CheckReduce(op, dt) == nil {
				all = append(all, reduction{op, dt})
			}
		}
	}
	return all
}()

// fewReductions has a reduction for each element size, for tests of what does not depend on the arithmetic.
var fewReductions = []reduction{{tensor.Max, tensor.Uint8}, {tensor.Sum, tensor.BFloat16},
	{tensor.Sum, tensor.Float32}, {tensor.Product, tensor.Int64}}

// eachReduction calls f with the contributions of all ranks of c and the expected result. It does so for each
// of the given reductions and every algorithm of algs.
func eachReduction(c *cluster, reductions []reduction, algs []message.Algorithm, numElems int,
	f func(op tensor.ReduceOp, dt tensor.DType, alg message.Algorithm, in [][]byte, want []byte)) {
	n := len(c.backends)
	for _, r := range reductions {
		given := make([][]byte, n)
		for rank := range given {
			given[rank] = elements(r.dt, numElems, func(i int) int64 { return value(r.dt, rank, i) })
		}
		want := elements(r.dt, numElems, func(i int) int64 { return fold(r.op, r.dt, n, i) })
		for _, alg := range algs {
			f(r.op, r.dt, alg, copies(given), want)
		}
	}
}

// aligned returns a copy of p that is aligned for every element type.
func aligned(p []byte) []byte {
	c := tensor.Bytes(make([]int64, (len(p)+7)/8))[:len(p)]
	copy(c, p)
	return c
}

// copies returns aligned copies of all buffers.
func copies(bufs [][]byte) [][]byte {
	all := make([][]byte, len(bufs))
	for i, p := range bufs {
		all[i] = aligned(p)
	}
	return all
}

func checkAllreduce(t *testing.T, c *cluster, reductions []reduction, numElems int) {
	t.Helper()
	eachReduction(c, reductions, tcp.Algorithms(message.Allreduce), numElems,
		func(op tensor.ReduceOp, dt tensor.DType, alg message.Algorithm, bufs [][]byte, want []byte) {
			t.Helper()
			c.must(t, func(r int, b *opstest.Blocking) error {
				return b.Allreduce(t.Context(), alg, dt, op, bufs[r])
			})
			for r := range bufs {
				wantElements(t, fmt.Sprintf("allreduce %v %v of %d × %v: rank %d", alg, op, numElems, dt, r),
					dt, bufs[r], want)
			}
		})
}

// wantElements fails the test if got and want differ. It reports the first element of type dt that differs.
func wantElements(t *testing.T, what string, dt tensor.DType, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	if len(got) != len(want) {
		t.Fatalf("%s: got %d bytes, want %d", what, len(got), len(want))
	}
	for i := 0; i < len(want); i += dt.Size() {
		if g, w := got[i:i+dt.Size()], want[i:i+dt.Size()]; !bytes.Equal(g, w) {
			t.Fatalf("%s: got %x as element %d of %d, want %x", what, g, i/dt.Size(), len(want)/dt.Size(), w)
		}
	}
}

// All ranks get the same bits, even if the sum of their contributions depends on the order of the additions.
func TestAllreduceSameBits(t *testing.T) {
	eachCluster(t, func(t *testing.T, c *cluster) {
		for _, alg := range tcp.Algorithms(message.Allreduce) {
			bufs := make([][]byte, len(c.backends))
			for r := range bufs {
				bufs[r] = floats(tensor.Float32, 1000, func(i int) float64 {
					return 1 / float64(1+i*len(bufs)+r*r)
				})
			}
			c.must(t, func(r int, b *opstest.Blocking) error {
				return b.Allreduce(t.Context(), alg, tensor.Float32, tensor.Sum, bufs[r])
			})
			for r := range bufs {
				wantElements(t, fmt.Sprintf("%v: rank %d, as rank 0", alg, r), tensor.Float32, bufs[r],
					bufs[0])
			}
		}
	})
}

// All ranks get the same bits of a NaN, even if they contribute NaNs with different bits.
func TestAllreduceSameNaN(t *testing.T) {
	c := newCluster(memMeshes(4), upTo(4), tcp.Config{})
	defer c.close()
	for _, alg := range tcp.Algorithms(message.Allreduce) {
		bufs := make([][]byte, 4)
		c.must(t, func(r int, b *opstest.Blocking) error {
			bufs[r] = tensor.Bytes([]float32{math.Float32frombits(0x7fc00000 | uint32(r)<<31 | uint32(r))})
			return b.Allreduce(t.Context(), alg, tensor.Float32, tensor.Sum, bufs[r])
		})
		for r := range bufs {
			wantElements(t, fmt.Sprintf("%v: rank %d, as rank 0", alg, r), tensor.Float32, bufs[r], bufs[0])
		}
	}
}

// divisions returns several ways to divide numElems elements into blocks for n ranks, by name.
func divisions(n, numElems int) map[string][]int64 {
	even, last, odd := make([]int64, n), make([]int64, n), make([]int64, n)
	for r := range n {
		even[r] = int64((r+1)*numElems/n - r*numElems/n)
	}
	last[n-1] = int64(numElems)
	for r := 1; r < n; r += 2 {
		odd[r] = int64(numElems / n)
	}
	rest := int64(numElems)
	for _, k := range odd {
		rest -= k
	}
	odd[n/2] += rest
	return map[string][]int64{"even": even, "last": last, "odd": odd}
}

func checkReducescatter(t *testing.T, c *cluster, reductions []reduction, numElems int) {
	t.Helper()
	eachReduction(c, reductions, tcp.Algorithms(message.Reducescatter), numElems,
		func(op tensor.ReduceOp, dt tensor.DType, alg message.Algorithm, in [][]byte, want []byte) {
			t.Helper()
			for name, elems := range divisions(len(c.backends), numElems) {
				var counts []int64
				for _, k := range elems {
					counts = append(counts, k*int64(dt.Size()))
				}
				bufs := copies(in)
				c.must(t, func(r int, b *opstest.Blocking) error {
					return b.Reducescatter(t.Context(), alg, dt, op, bufs[r], counts)
				})
				from := int64(0)
				for r, k := range counts {
					what := fmt.Sprintf("reducescatter %v %v of %d × %v (%s): rank %d", alg, op, numElems, dt,
						name, r)
					wantElements(t, what, dt, bufs[r][from:from+k], want[from:from+k])
					from += k
				}
			}
		})
}

// A reduce gives its root the bits of a direct allreduce, whether the root reduces alone (up to 64 KiB from
// all other ranks) or each rank reduces a part.
func TestReduce(t *testing.T) {
	for n := 1; n <= 4; n++ {
		c := newCluster(memMeshes(n), upTo(n), tcp.Config{SegmentBytes: 4 << 10})
		for _, numElems := range []int{0, 1, 7, 1000, 8192, 8193, 16384, 16385} {
			checkReduce(t, c, numElems)
		}
		c.close()
	}
}

// checkReduce compares the results of reduces to each root with that of one direct allreduce.
func checkReduce(t *testing.T, c *cluster, numElems int) {
	t.Helper()
	for _, dt := range []tensor.DType{tensor.Float16, tensor.Float32, tensor.Int64} {
		given := make([][]byte, len(c.backends))
		for r := range given {
			if dt == tensor.Float32 { // sums of these numbers depend on the order of the additions
				given[r] = floats(dt, numElems, func(i int) float64 { return 1 / float64(3+(r*11+i)%1009) })
			} else {
				given[r] = elements(dt, numElems, func(i int) int64 { return value(dt, r, i) })
			}
		}
		want := copies(given)
		c.must(t, func(r int, b *opstest.Blocking) error {
			return b.Allreduce(t.Context(), message.Direct, dt, tensor.Sum, want[r])
		})
		for root := range c.backends {
			bufs := copies(given)
			c.must(t, func(r int, b *opstest.Blocking) error {
				return b.Reduce(t.Context(), message.Direct, dt, tensor.Sum, root,
					ops.Tensor{In: bufs[r], Out: bufs[r]})
			})
			wantElements(t, fmt.Sprintf("reduce of %d × %v to rank %d", numElems, dt, root), dt, bufs[root],
				want[root])
		}
	}
}
