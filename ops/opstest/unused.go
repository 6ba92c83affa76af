package opstest

import (
	"runtime"
	"testing"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
)

// UnusedIsSmall tests that a backend of a set of many ranks takes little memory before its first operation.
// The function newBackend makes one.
func UnusedIsSmall(t *testing.T, newBackend func(ranks []topo.Rank) ops.Backend) {
	t.Helper()
	const numRanks, most = 10_000, 8 << 10
	var ranks [numRanks]topo.Rank
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	b := newBackend(ranks[:])
	runtime.ReadMemStats(&after)
	if got := after.TotalAlloc - before.TotalAlloc; got > most {
		t.Errorf("a new backend of %d ranks has allocated %d bytes, want at most %d", numRanks, got, most)
	}
	b.Close()
}
