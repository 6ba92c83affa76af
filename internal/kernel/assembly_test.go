//go:build !noasm && (amd64 || arm64)

package kernel

import (
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/tensor"
)

// Every function that should be in assembly is in assembly. If one were missing, all other tests would still
// pass, because they would compare plain Go with itself.
func TestAssembled(t *testing.T) {
	halves := []tensor.DType{tensor.Float16, tensor.BFloat16}
	floats := append(slices.Clone(halves), tensor.Float32, tensor.Float64)
	reduced := append(slices.Clone(floats), tensor.Uint8, tensor.Int32, tensor.Int64)
	for name, f := range assembled {
		check := func(what string, dt tensor.DType, types []tensor.DType, have bool) {
			if want := slices.Contains(types, dt); have != want {
				t.Errorf("%s: %s %v in assembly: %v, want %v", name, what, dt, have, want)
			}
		}
		for dt := range tensor.DType(numTypes) {
			check("sum of", dt, reduced, f.reduce[dt].sum.run != nil)
			check("min of", dt, reduced, f.reduce[dt].min.run != nil)
			check("max of", dt, reduced, f.reduce[dt].max.run != nil)
			check("scale", dt, floats, f.scale[dt].run != nil)
			check("widen", dt, halves, f.widen[dt].run != nil)
			check("narrow", dt, halves, f.narrow[dt].run != nil)
		}
	}
}
