package adasum_test

import (
	"fmt"
	"testing"

	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops/adasum"
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
