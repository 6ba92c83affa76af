//go:build !noasm

package kernel

import (
	"testing"

	"github.com/gohvd/gohvd/tensor"
)

// TestAssembled: whatever plain Go has there is in assembly, but for conversions that are copies, divisions of int64,
// and scaling of int64 without AVX-512. All else would be slow and right.
func TestAssembled(t *testing.T) {
	for name, f := range map[string]*functions{"avx2": &functionsAVX2, "avx512": &functionsAVX512} {
		check := func(what string, plain, assembled bool) {
			if plain != assembled {
				t.Errorf("%s: %s in assembly: %v, want %v", name, what, assembled, plain)
			}
		}
		for i, r := range plainSet.table {
			dt := tensor.DType(i)
			for _, op := range reduceOps {
				check(op.String()+" of "+dt.String(), r.of(op) != nil, f.reduce[dt].of(op).run != nil)
			}
			check("scale "+dt.String(), r.scale != nil && (dt != tensor.Int64 || name == "avx512"), f.scale[dt].run != nil)
			check("divide "+dt.String(), r.divide != nil && dt != tensor.Int64, f.divide[dt].run != nil)
			for from := range r.from {
				check(tensor.DType(from).String()+" to "+dt.String(), r.from[from] != nil && from != i, f.convert[dt][from].run != nil)
			}
		}
	}
}
