package shm_test

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/shm"
)

// Small operations store their contributions one after another in a ring. The results stay right when the
// ring has wrapped around several times.
func TestSmallRoundTheRing(t *testing.T) {
	for _, n := range []int{2, 3} {
		run(t, n, shm.Config{SmallBytes: 64 << 10}, func(r *rank) error {
			for i := range 500 {
				elems := (i*i*37)%(16<<10/(n-1)) + 1
				// The operation has two tensors, the second of which may be empty. first is the number of
				// elements of the first tensor.
				first := elems / (1 + i%3)
				buf := input(tensor.Float32, r.me, i, elems)
				tensors := []ops.Tensor{{In: buf[:4*first], Out: buf[:4*first]},
					{In: buf[4*first:], Out: buf[4*first:]}}
				if err := r.AllreduceFused(context.Background(), message.Direct, tensor.Float32, tensor.Sum,
					one, tensors); err != nil {
					return err
				}
				if want := reduced(tensor.Float32, tensor.Sum, n, i, elems); !bytes.Equal(buf, want) {
					return fmt.Errorf("operation %d of %d elements: %s", i, elems, difference(buf, want))
				}
			}
			return nil
		})
	}
}
