package kernel_test

import (
	"math/rand/v2"

	"github.com/gohvd/gohvd/internal/tensor"
)

// bools returns n bytes as a peer may send them: all values occur, and many are 0.
func bools(r *rand.Rand, n int) []uint8 {
	v := make([]uint8, n)
	for i := range v {
		v[i] = [...]uint8{0, 0, 0, 1, 1, 2, 0x80, uint8(r.Uint32())}[r.IntN(8)]
	}
	return v
}

func boolRef(op tensor.ReduceOp, a, b uint8) uint8 {
	truths := map[bool]uint8{true: 1}
	if op == tensor.Min {
		return truths[a != 0 && b != 0]
	}
	return truths[a != 0 || b != 0]
}
