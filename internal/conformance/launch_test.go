//go:build !mpi

package conformance

import (
	"fmt"
	"testing"

	"github.com/gohvd/gohvd/internal/testmpi"
)

// Every operation gives the result of the reference with each MPI library, if each rank is a process and MPI
// moves the tensors. Members in different processes get the same bits. CI draws the number of ranks.
func TestConformanceMPI(t *testing.T) {
	testmpi.Each(t, func(t *testing.T, l testmpi.Library) {
		program := l.Build(t, "test", "./internal/conformance")
		for _, ranks := range testmpi.Sample(t, []int{2, 3, 4}) {
			t.Run(fmt.Sprintf("ranks=%d", ranks), func(t *testing.T) {
				out := l.Run(t, ranks, program, "-test.run", "TestRankOfMPI", "-test.v",
					fmt.Sprintf("-full=%v", *full))
				compareDigests(t, out, 4)
			})
		}
	})
}
