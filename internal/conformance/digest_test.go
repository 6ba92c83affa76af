//go:build !mpi || (nccl && cgo)

package conformance

import (
	"regexp"
	"testing"
)

// digest matches a line with the digest of results that must be the same in all processes.
var digest = regexp.MustCompile(`(?m)^digest of (.*): (\w+)$`)

// compareDigests fails the test if the output of the processes of a job has fewer different digests than
// atLeast, or different digests of the same results.
func compareDigests(t *testing.T, output string, atLeast int) {
	t.Helper()
	digests := make(map[string]string)
	for _, d := range digest.FindAllStringSubmatch(output, -1) {
		if other := digests[d[1]]; other != "" && other != d[2] {
			t.Errorf("%s: ranks have different results", d[1])
		}
		digests[d[1]] = d[2]
	}
	if len(digests) < atLeast {
		t.Errorf("got %d digests, want at least %d:\n%s", len(digests), atLeast, output)
	}
}
