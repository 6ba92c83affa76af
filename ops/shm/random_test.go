package shm_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/shm"
)

// Random operations follow each other on the same memory. Their tensors are in arenas at all ranks, at no
// rank, or at some, so an operation with large steps follows one with small steps and the other way round.
// Floats are added in the order of the ranks. Small operations go around their ring several times.
func TestAtRandom(t *testing.T) {
	kinds := []message.Kind{message.Allreduce, message.Allreduce, message.Allreduce, message.Reduce,
		message.Reducescatter, message.Allgather, message.Broadcast, message.Alltoall, message.Gather,
		message.Scatter}
	// The sizes are those of a cache line, the largest small operation, a step, and several steps.
	sizes := []int{1, 16, 500, 1000, 2000, 4096, 16384, 50_000}
	for name, c := range map[string]struct {
		cfg    shm.Config
		rounds int
		kinds  []message.Kind
		sizes  []int
	}{
		"short stages": {shm.Config{StageBytes: 2 << 10}, 60, kinds, sizes},
		"stages":       {shm.Config{StageBytes: 16 << 10}, 60, kinds, sizes},
		"direct": {shm.Config{StageBytes: 12 << 10, SmallBytes: 1 << 10, DirectBytes: 64 << 10}, 60, kinds,
			sizes},
		"small":      {shm.Config{SmallBytes: 64 << 10}, 400, kinds[:1], []int{10, 1000, 2000}},
		"long lists": {shm.Config{StageBytes: 4 << 10}, 4, kinds[:1], []int{200_000}},
	} {
		for n := 1; n <= 5; n++ {
			t.Run(fmt.Sprintf("%s/ranks=%d", name, n), func(t *testing.T) {
				seed := opstest.PickSeed(t)
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				run(t, n, c.cfg, func(r *rank) error {
					x := opstest.Random{
						Seed: seed, Rounds: c.rounds, Kinds: c.kinds, Sizes: c.sizes,
						Reductions: append(opstest.Reductions(), slices.Repeat(opstest.Adasums(), 5)...),
						InOrder:    func(message.Algorithm) bool { return true }, Lists: ops.Always,
						Place: r.place,
					}
					err := x.Run(ctx, &r.Blocking, r.me, n)
					if err != nil {
						cancel(err) // or the other ranks wait for this one
					}
					return err
				})
			})
		}
	}
}

// place returns memory with a copy of the content: of Go if shared is 0, in an arena if it is 2, otherwise in
// either.
func (r *rank) place(shared int, own *rand.Rand, content []byte) []byte {
	n := (len(content) + 63) &^ 63
	b := aligned(len(content))
	if n > 0 && (shared == 2 || shared == 1 && own.IntN(2) == 0) {
		if len(r.room) < n {
			r.room = r.mem.alloc(max(n, 1<<20))
		}
		b, r.room = r.room[:len(content):len(content)], r.room[n:]
	}
	copy(b, content)
	return b
}
