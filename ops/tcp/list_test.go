package tcp_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

// An allreduce reduces and scales a list of tensors in their own memory, in place and out of place. Small
// tensors, which are packed, stand between large ones, at the beginning and at the end. The inputs do not
// change, unless they are the outputs. Every rank divides the elements into tensors differently.
func TestLists(t *testing.T) {
	sizes := []int{3, 0, 5000, 70, 1, 0, 9000, 20000, 2, 8}
	total := 0
	for _, k := range sizes {
		total += k
	}
	for n := 1; n <= 4; n++ {
		for _, r := range []struct {
			alg message.Algorithm
			dt  tensor.DType
			s   ops.Scaling
		}{
			{message.Ring, tensor.Float32, ops.Scaling{Pre: 2, Post: 0.25}},
			{message.Ring, tensor.Int32, ops.Scaling{Pre: 3, Post: 1, Divisor: 2}},
			{message.Ring, tensor.Float64, ops.Scaling{Pre: 1, Post: 1}},
			{message.Direct, tensor.BFloat16, ops.Scaling{Pre: 2, Post: 0.25}},
			{message.Direct, tensor.Int32, ops.Scaling{Pre: 3, Post: 1, Divisor: 2}},
			{message.Exchange, tensor.Float16, ops.Scaling{Pre: 2, Post: 0.25}},
			{message.Exchange, tensor.Int32, ops.Scaling{Pre: 3, Post: 1, Divisor: 2}},
		} {
			t.Run(fmt.Sprintf("ranks=%d/%v/%v", n, r.alg, r.dt), func(t *testing.T) {
				c := newCluster(strictMeshes(t, n), upTo(n), tcp.Config{SegmentBytes: 1 << 10})
				defer c.close()
				want := scaled(t, r.dt, total, n, r.s)
				c.must(t, func(me int, b *opstest.Blocking) error {
					b.Steps = me == 1
					in := elements(r.dt, total, func(i int) int64 { return value(r.dt, me, i) })
					given, out := bytes.Clone(in), in
					if me%2 == 0 {
						out = make([]byte, len(in))
					}
					var list []ops.Tensor
					at := 0
					for i := range sizes {
						end := at + sizes[(i+me)%len(sizes)]*r.dt.Size()
						list = append(list, ops.Tensor{In: in[at:end], Out: out[at:end]})
						at = end
					}
					err := b.AllreduceFused(t.Context(), r.alg, r.dt, tensor.Sum, r.s, list)
					if err != nil {
						return err
					}
					if !bytes.Equal(out, want) {
						return fmt.Errorf("rank %d: got a wrong result", me)
					}
					if me%2 == 0 && !bytes.Equal(in, given) {
						return fmt.Errorf("rank %d: the input has changed", me)
					}
					return nil
				})
				checkReleased(t, c)
			})
		}
	}
}

// scaled returns the scaled sum of the contributions of n ranks, which are scaled too.
func scaled(t *testing.T, dt tensor.DType, numElems, n int, s ops.Scaling) []byte {
	t.Helper()
	scale, err := kernel.Scale(dt)
	if err != nil {
		t.Fatal(err)
	}
	add, err := kernel.Reduce(tensor.Sum, dt)
	if err != nil {
		t.Fatal(err)
	}
	sum := make([]byte, numElems*dt.Size())
	for rank := range n {
		x := elements(dt, numElems, func(i int) int64 { return value(dt, rank, i) })
		scale(x, s.Pre)
		add(sum, x)
	}
	if s.Divisor > 1 {
		kernel.Divide(dt)(sum, s.Divisor)
	}
	scale(sum, s.Post)
	return sum
}
