//go:build !mpi

package conformance

import (
	"fmt"
	"regexp"
	"testing"

	"github.com/gohvd/gohvd/internal/testmpi"
)

// digest matches a line of TestRankOfMPI.
var digest = regexp.MustCompile(`(?m)^digest of (.*): (\w+)$`)

// Every operation gives the result of the reference with each MPI library, if each rank is a process and MPI
// moves the tensors. Members in different processes get the same bits.
func TestConformanceMPI(t *testing.T) {
	testmpi.Each(t, func(t *testing.T, l testmpi.Library) {
		program := l.Build(t, "test", "./internal/conformance")
		for _, ranks := range []int{2, 3, 4} {
			t.Run(fmt.Sprintf("ranks=%d", ranks), func(t *testing.T) {
				out := l.Run(t, ranks, program, "-test.run", "TestRankOfMPI", "-test.v",
					fmt.Sprintf("-full=%v", *full))
				digests := make(map[string]string)
				for _, d := range digest.FindAllStringSubmatch(out, -1) {
					if other := digests[d[1]]; other != "" && other != d[2] {
						t.Errorf("%s: ranks have different results", d[1])
					}
					digests[d[1]] = d[2]
				}
				if len(digests) < 4 {
					t.Errorf("got %d digests, want at least 4:\n%s", len(digests), out)
				}
			})
		}
	})
}
