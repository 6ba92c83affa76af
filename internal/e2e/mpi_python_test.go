package e2e

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testmpi"
	"github.com/gohvd/gohvd/internal/testnet"
)

// pythonSums is a program in Python that sums the ranks. It writes its line by one call, because mpirun mixes
// the lines of ranks that are written in pieces.
const pythonSums = `
import os, numpy, gohvd.numpy as hvd
from gohvd import basics
hvd.init()
total = hvd.allreduce(numpy.array([hvd.rank() + 1.0]), op=hvd.Sum).item()
os.write(1, f"sum {hvd.size()} {total} {basics.mpi_built()} {basics.mpi_enabled()}\n".encode())
hvd.shutdown()
`

// withCommunicators is a program in Python that makes two jobs of the processes of MPI, and registers process
// sets in them by communicators. In each job the ranks have the opposite order of those in MPI.
const withCommunicators = `
import os, numpy, gohvd.numpy as hvd
from gohvd import basics
from mpi4py import MPI

world = MPI.COMM_WORLD
job = world.Split(world.rank % 2, -world.rank)
part = job.Split(0 if job.rank == 0 else 1, 0)
for _ in range(2):
    first = hvd.ProcessSet(part if job.rank == 0 else [0])
    hvd.init(comm=job, process_sets=[first])
    assert (hvd.rank(), hvd.size()) == (job.rank, world.size // 2), (hvd.rank(), hvd.size())
    assert basics.mpi_built() and basics.mpi_enabled()
    total = hvd.allreduce(numpy.array([float(world.rank)]), op=hvd.Sum).item()
    assert total == sum(range(world.rank % 2, world.size, 2)), total
    rest = hvd.add_process_set(part if job.rank > 0 else [1, 2])
    assert (first.ranks, rest.ranks) == ([0], [1, 2]), (first, rest)
    try:
        hvd.add_process_set(world)
    except ValueError as e:
        assert f"{world.size} processes, of which {world.size - hvd.size()} are not ranks of the job" in str(e), e
    else:
        assert False, "a communicator of another job was accepted"
    hvd.shutdown()
    assert not basics.mpi_enabled()
os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="tcp")
try:
    hvd.init(comm=job)
except hvd.HorovodInternalError as e:
    assert "got an MPI communicator, but HOROVOD_CONTROLLER is gloo" in str(e), e
else:
    assert False, "a communicator was accepted without MPI"
os.write(1, b"rank is done\n")
`

// anotherMPI is a program in Python that imports mpi4py, which was built for another MPI library than gohvd.
const anotherMPI = `
from mpi4py import MPI
import gohvd.numpy as hvd
hvd.init(comm=MPI.COMM_WORLD)
`

// Programs in Python use MPI in their own process, with a library that was built with it.
func TestPythonWithMPI(t *testing.T) {
	testnet.NeedTorch(t)
	python, err := filepath.Abs("../../python")
	if err != nil {
		t.Fatal(err)
	}
	testmpi.Each(t, func(t *testing.T, l testmpi.Library) {
		env := []string{"HVD_LIBRARY=" + l.BuildLibrary(t), "PYTHONPATH=" + python, "OMP_NUM_THREADS=1"}
		run := func(t *testing.T, processes int, program, want string, more ...string) {
			cmd := l.Command(t, processes, testnet.Python, "-c", program)
			cmd.Env = append(append(cmd.Env, env...), more...)
			out, err := cmd.CombinedOutput()
			if n := bytes.Count(out, []byte(want)); err != nil || n != processes {
				t.Errorf("got %v and %d times %q, want %d:\n%s", err, n, want, processes, out)
			}
		}
		t.Run("mpirun", func(t *testing.T) { run(t, 3, pythonSums, "sum 3 6.0 True True\n", allMPI...) })
		t.Run("hvdrun", func(t *testing.T) {
			command := append([]string{"env"}, env...)
			j := underMPI(t, l, append(command, testnet.Python, "-c", pythonSums)...)
			if status := j.wait(); status != 0 || strings.Count(j.out(), "sum 3 6.0 True True\n") != 3 {
				t.Errorf("got status %d, want 3 right sums:\n%s%s", status, j.out(), j.err())
			}
		})
		t.Run("communicators", func(t *testing.T) {
			// The package of Debian, python3-mpi4py, is for Open MPI.
			if out, err := exec.Command(testnet.Python, "-c", "import mpi4py").CombinedOutput(); err != nil {
				t.Fatalf("install python3-mpi4py: %s", out)
			}
			if l.Name == "mpich" {
				cmd := l.Command(t, 1, testnet.Python, "-c", anotherMPI)
				cmd.Env = append(cmd.Env, env...)
				if out, err := cmd.CombinedOutput(); err == nil ||
					!bytes.Contains(out, []byte("InitError: hvd: init: gohvd was not built for Open MPI")) {
					t.Errorf("got %v, want an error that names both libraries:\n%s", err, out)
				}
				return
			}
			run(t, 6, withCommunicators, "rank is done\n")
			run(t, 6, withCommunicators, "rank is done\n", "HOROVOD_CPU_OPERATIONS=mpi")
		})
	})
}
