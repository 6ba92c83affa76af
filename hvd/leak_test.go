package hvd_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"testing"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestInitLeavesNothing runs forty rounds of Init, operations and Shutdown, with three ranks over TCP in one
// process. No goroutine and no open file may be left, and the memory in use must not grow.
func TestInitLeavesNothing(t *testing.T) {
	if testing.Short() {
		t.Skip("many rounds of Init")
	}
	const (
		warmup    = 10 // number of rounds after which pools no longer grow
		compared  = 10 // number of rounds after the warmup that are compared with the last rounds
		rounds    = 40
		mostBytes = 256 << 10
	)
	ctx, kv := meeting(t)
	running := goleak.IgnoreCurrent()
	var files int
	var bytes []uint64 // bytes in use on the heap after each round
	last := make([]*hvd.Engine, 3)
	for round := range rounds {
		if round == warmup {
			files = testnet.OpenFiles(t)
		}
		ranks(t, len(last), func(r int) {
			mode := []string{"event", "lockstep"}[round%2]
			opts := append(place(kv, r, len(last), "HVD_NEGOTIATION", mode), hvd.WithProcessSets([]int{0, 2}))
			if last[r] != nil {
				opts = append(opts, hvd.After(last[r]))
			}
			e, err := hvd.New(ctx, opts...)
			if err != nil {
				t.Errorf("rank %d: round %d: %v", r, round, err)
				return
			}
			last[r] = e
			work(ctx, t, e)
			if err := e.Shutdown(ctx); err != nil {
				t.Errorf("rank %d: round %d: %v", r, round, err)
			}
		})
		if t.Failed() {
			return
		}
		bytes = append(bytes, heap())
	}
	noError(t, goleak.Find(running))
	eventually(ctx, t, func() error {
		if now := testnet.OpenFiles(t); now > files {
			return fmt.Errorf("%d files are open after %d rounds, %d after %d", now, rounds, files, warmup)
		}
		return nil
	})
	// A stopped engine may keep a tensor of its last operation until the next round replaces the engine. So a
	// single round can show more memory than is really in use. Therefore the test compares the smallest
	// values of several rounds.
	before, now := slices.Min(bytes[warmup:warmup+compared]), slices.Min(bytes[rounds-compared:])
	if now > before+mostBytes {
		t.Errorf("at least %d bytes are in use after each of the last %d rounds, %d after one of rounds %d to %d",
			now, compared, before, warmup, warmup+compared-1)
	}
	runtime.KeepAlive(last) // keeps last reachable, as it was at the earlier measurements
}

// work adds and removes a process set, runs operations of every kind, and joins.
func work(ctx context.Context, t *testing.T, e *hvd.Engine) {
	static := e.ProcessSets()[1]
	set := add(ctx, t, e, 1, 2)
	if set == nil {
		return
	}
	if static.Included() {
		checkUsable(ctx, t, static, "x")
	}
	checkAll(ctx, t, e.ProcessSets()[0], numbers[float32](), "")
	if set.Included() {
		checkAll(ctx, t, set, numbers[float32](), "")
	}
	x := make([]float32, 50_000)
	must(hvd.Allreduce(ctx, x, hvd.CompressFP16(), hvd.ErrorFeedback(), hvd.Name("compressed"),
		hvd.On(e)))
	noError(t, hvd.RemoveProcessSet(ctx, set))
	must(hvd.Join(ctx, hvd.On(e)))
}

// heap returns how many bytes are in use on the heap after a garbage collection.
func heap() uint64 {
	runtime.GC()
	runtime.GC() // the second collection empties the pools
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
