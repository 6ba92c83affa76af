//go:build !mpi

package rank

import (
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testmpi"
)

// After a failed job, a process cannot use MPI again, and says so.
func TestInitAfterFailureWithMPI(t *testing.T) {
	testmpi.Each(t, func(t *testing.T, l testmpi.Library) {
		program := l.Build(t, "test", "./internal/rank")
		// The exit status does not matter: mpirun may complain that MPI was not finalized.
		out, _ := l.Surviving().Command(t, 3, program, "-test.run", "TestInitAfterFailureOfMPI",
			"-test.v").CombinedOutput()
		if refused := strings.Count(string(out), "MPI was refused"); refused != 3 {
			t.Errorf("got %d refusals, want 3:\n%s", refused, out)
		}
	})
}
