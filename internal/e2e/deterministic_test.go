package e2e

import (
	"strings"
	"testing"
)

// A job runs several times in deterministic mode, with tensors in different orders, so that they are fused
// differently. Each run prints the same hash of all results.
func TestDeterministicRuns(t *testing.T) {
	hashes := make(map[string]int)
	for range 5 {
		j := start(t, ranks, "sums", "HVD_DETERMINISTIC=1")
		left := ranks
		j.until("all ranks had printed their hash", func(l line) bool {
			if hash, ok := strings.CutPrefix(l.text, "hash "); ok {
				hashes[hash]++
				left--
			}
			return left == 0
		})
		if status := j.wait(); status != 0 {
			t.Fatalf("hvdrun ended with status %d:\n%s", status, j.err())
		}
	}
	if len(hashes) != 1 {
		t.Errorf("got hashes %v, want one", hashes)
	}
}
