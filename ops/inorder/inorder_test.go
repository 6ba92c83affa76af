package inorder_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/inorder"
)

// Sums of 16-bit floats are those of float32 in the order of the ranks, rounded once and then scaled. The
// destination may be any of the sources, and the sources may be longer.
func TestReduce(t *testing.T) {
	const numElems = 10_001 // several blocks, and a part of one
	rng := rand.New(rand.NewPCG(1, 2))
	var r inorder.Reducer
	for n := 2; n <= 5; n++ {
		srcs := make([][]half.BFloat16, n)
		for i := range srcs {
			for range numElems + 3 {
				srcs[i] = append(srcs[i], half.BFloat16FromFloat32(float32(rng.NormFloat64())))
			}
		}
		want := make([]half.BFloat16, numElems)
		for k := range want {
			sum := srcs[0][k].Float32()
			for _, s := range srcs[1:] {
				sum += s[k].Float32()
			}
			want[k] = half.BFloat16FromFloat32(half.BFloat16FromFloat32(sum).Float32() / 2)
		}
		err := r.Prepare(tensor.Sum, tensor.BFloat16, ops.Scaling{Pre: 1, Post: 0.5}, n)
		if err != nil {
			t.Fatal(err)
		}
		for to := range n + 1 {
			t.Run(fmt.Sprintf("sources=%d/destination=%d", n, to), func(t *testing.T) {
				in := make([][]byte, n+1)
				for i, s := range srcs {
					in[i] = bytes.Clone(tensor.Bytes(s))
				}
				in[n] = make([]byte, 2*numElems)
				dst := in[to][:2*numElems]
				r.Reduce(dst, in[:n])
				if !bytes.Equal(dst, tensor.Bytes(want)) {
					t.Error("got a wrong result")
				}
			})
		}
	}
}

// A divisor is an error unless the elements are integers.
func TestDivisor(t *testing.T) {
	var r inorder.Reducer
	for dt, ok := range map[tensor.DType]bool{tensor.Int32: true, tensor.Float32: false} {
		err := r.Prepare(tensor.Sum, dt, ops.Scaling{Pre: 1, Post: 1, Divisor: 2}, 3)
		if (err == nil) != ok {
			t.Errorf("%v: got %v", dt, err)
		}
	}
}
