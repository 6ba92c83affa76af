package tcp_test

import (
	"bytes"
	"math"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

// All ranks get the same bits, even if the sum of their contributions depends on the order of the additions,
// or if they contribute NaNs with different bits.
func TestAllreduceSameBits(t *testing.T) {
	for n := 2; n <= 9; n++ {
		c := newCluster(memMeshes(n), topo.UpTo(n), tcp.Config{SegmentBytes: 64})
		for _, alg := range tcp.Algorithms(message.Allreduce) {
			bufs := make([][]byte, n)
			c.must(t, func(r int, b *opstest.Blocking) error {
				v := make([]float32, 1000)
				for i := range v {
					v[i] = 1 / float32(1+i*n+r*r)
				}
				v[500] = math.Float32frombits(0x7fc00000 | uint32(r)<<31 | uint32(r))
				bufs[r] = tensor.Bytes(v)
				return b.Allreduce(t.Context(), alg, tensor.Float32, tensor.Sum, bufs[r])
			})
			for r := range bufs {
				if !bytes.Equal(bufs[r], bufs[0]) {
					t.Errorf("%v: rank %d of %d has other bits than rank 0", alg, r, n)
				}
			}
		}
		c.close()
	}
}
