//go:build !mpi

package mpi_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testmpi"
	"github.com/gohvd/gohvd/ops/mpi"
)

// The tests of the build with MPI pass with each library and several numbers of ranks. With options that only
// change how a process joins and leaves MPI, which TestMain of these tests checks, one of them is enough.
func TestWithMPI(t *testing.T) {
	testmpi.Each(t, func(t *testing.T, l testmpi.Library) {
		const one = "TestCollectives"
		program := l.Build(t, "test", "./ops/mpi")
		t.Setenv("GOMAXPROCS", "1")
		l.RunTests(t, program, "", 1, 3)
		t.Run("one thread", func(t *testing.T) {
			t.Setenv("SINGLE_THREAD", "1")
			l.RunTests(t, program, "", 2)
		})
		t.Run("GOMAXPROCS", func(t *testing.T) {
			t.Setenv("KEEP_THREADS", "1")
			l.RunTests(t, program, one, 2)
		})
		t.Run("initialized by the program", func(t *testing.T) {
			t.Setenv("INITIALIZED", "1")
			l.RunTests(t, program, one, 2)
			t.Setenv("ALONE", "1")
			l.RunTests(t, program, one, 2)
		})
		for _, test := range []string{"TestFailure", "TestFailureElsewhere", "TestFailureToMakeSet",
			"TestFailureToFree"} {
			t.Run(test, func(t *testing.T) {
				t.Setenv("TEST_FAILURE", "1")
				cmd := l.Command(t, 2, program, "-test.run", "^"+test+"$")
				out, err := cmd.CombinedOutput()
				handled := strings.Contains(string(out), "the failure was handled")
				// The exit status is that of rank 0, or that of a rank that mpirun has killed.
				if err == nil || !handled {
					t.Errorf("got %v, want a failure that was handled:\n%s", err, out)
				}
			})
		}
	})
}

// A program that was built without MPI says so.
func TestNotBuilt(t *testing.T) {
	if _, err := mpi.Join(t.Context(), mpi.Options{}); !errors.Is(err, mpi.ErrNotBuilt) {
		t.Errorf("got error %v, want %v", err, mpi.ErrNotBuilt)
	}
}
