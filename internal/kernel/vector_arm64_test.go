//go:build !noasm

package kernel

import (
	"testing"

	"github.com/gohvd/gohvd/tensor"
)

// TestEveryFunctionIsNEON: a function missing from the table would be compared with itself everywhere else.
func TestEveryFunctionIsNEON(t *testing.T) {
	if Level() != "neon" {
		t.Errorf("level: got %q, want neon", Level())
	}
	for i, r := range plainSet.table {
		dt := tensor.DType(i)
		for _, op := range reduceOps {
			multiplied := dt != tensor.Int64 || op != tensor.Product // NEON multiplies no int64s
			if want := r.of(op) != nil && multiplied; want != (functionsNEON.reduce[dt].of(op).run != nil) {
				t.Errorf("%v of %v: got NEON %v, want %v", op, dt, !want, want)
			}
		}
		if want := r.scale != nil; want != (functionsNEON.scale[dt].run != nil) {
			t.Errorf("scale of %v: got NEON %v, want %v", dt, !want, want)
		}
		for from, f := range r.from {
			// From a type to itself is a copy.
			if want := f != nil && from != i; want != (functionsNEON.convert[dt][from].run != nil) {
				t.Errorf("%v to %v: got NEON %v, want %v", tensor.DType(from), dt, !want, want)
			}
		}
	}
}
