//go:build !mpi

package rank

import (
	"bufio"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testmpi"
)

// After a failed job, a process cannot use MPI again, and says so.
func TestInitAfterFailureWithMPI(t *testing.T) {
	testmpi.Each(t, func(t *testing.T, l testmpi.Library) {
		program := l.Build(t, "test", "./internal/rank")
		cmd := l.Surviving().Command(t, 3, program, "-test.run", "TestInitAfterFailureOfMPI", "-test.v")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stderr = cmd.Stdout
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var all []string
		refused := 0
		for lines := bufio.NewScanner(out); lines.Scan(); {
			all = append(all, lines.Text())
			if strings.Contains(lines.Text(), "MPI was refused") {
				refused++
			}
			if refused == 3 {
				_ = cmd.Cancel() // the processes wait for their end
			}
		}
		_ = cmd.Wait() // mpirun says that it was interrupted
		if refused != 3 {
			t.Errorf("got %d refusals, want 3:\n%s", refused, strings.Join(all, "\n"))
		}
	})
}
