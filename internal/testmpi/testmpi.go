// Package testmpi builds programs with MPI and runs them as jobs of several processes, for tests. It does so
// for each MPI library of the machine.
package testmpi

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Library is an MPI library of this machine.
type Library struct {
	// Name is "openmpi" or "mpich".
	Name  string
	flags []string // of mpirun
	// survive are flags with which mpirun does not end the other processes when one has died.
	survive []string
	env     []string // of the compiler
}

// libraries are the libraries that the tests know.
var libraries = []Library{
	{Name: "openmpi", flags: []string{"--allow-run-as-root", "--oversubscribe"},
		survive: []string{"--enable-recovery"}},
	{Name: "mpich", survive: []string{"-disable-auto-cleanup"}},
}

var (
	enabled = flag.Bool("mpi", false, "run the tests that start MPI jobs; make test-openmpi does")
	all     = flag.Bool("mpi-all", false, "run all MPI jobs, and all tests in each; make test-mpi does")
)

const notEnabled = "the flag -mpi is not set; make test-mpi and make deaths set it"

// Each runs f as a subtest for each MPI library. It skips a library that is not installed, unless CI is set.
// Without the flag -mpi, it skips the test, because such tests take long.
func Each(t *testing.T, f func(t *testing.T, l Library)) {
	if !*enabled {
		t.Skip(notEnabled)
	}
	for _, l := range libraries {
		t.Run(l.Name, func(t *testing.T) { f(t, Need(t, l.Name)) })
	}
}

// Need returns the library with the given name. It skips the test as Each does.
func Need(t *testing.T, name string) Library {
	t.Helper()
	if !*enabled {
		t.Skip(notEnabled)
	}
	for _, program := range []string{"mpirun." + name, "mpicc." + name} {
		if _, err := exec.LookPath(program); err != nil && os.Getenv("CI") == "" {
			t.Skipf("%v: install openmpi-bin, libopenmpi-dev, mpich and libmpich-dev", err)
		}
	}
	l := libraries[slices.IndexFunc(libraries, func(l Library) bool { return l.Name == name })]
	if name == "mpich" {
		// The build cache does not notice another result of pkg-config, but it notices flags.
		l.env = []string{"PKG_CONFIG_PATH=" + filepath.Join(root(), "ops", "mpi", "mpich"),
			"CGO_CFLAGS=-O2 -g -DMPICH"}
	}
	return l
}

// root returns the folder of the module.
func root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..")
}

// Sample returns one of cells, or all with the flag -mpi-all.
func Sample[T any](t *testing.T, cells []T) []T {
	t.Helper()
	if *all {
		return cells
	}
	i := rand.IntN(len(cells))
	t.Logf("case %d of %d", i, len(cells))
	return cells[i : i+1]
}

// Build runs the go command with the given arguments, such as "build", and adds the flags that make a program
// with MPI. It returns the path of the program.
func (l Library) Build(t *testing.T, args ...string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "program")
	command, rest := args[:1], args[1:]
	if args[0] == "test" {
		command = []string{"test", "-c"}
	}
	args = append(append(command, "-tags", "mpi", "-ldflags=-s -w", "-o", program), rest...)
	cmd := exec.Command("go", args...)
	cmd.Env = append(cmd.Environ(), l.env...)
	cmd.Dir = root()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return program
}

// BuildLibrary builds libgohvd.so with MPI and NCCL, and returns its path.
func (l Library) BuildLibrary(t *testing.T) string {
	t.Helper()
	library := filepath.Join(t.TempDir(), "libgohvd.so")
	cmd := exec.Command(filepath.Join(root(), "scripts", "build-libgohvd.sh"), library, "-tags", "nccl,mpi")
	cmd.Env = append(cmd.Environ(), l.env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return library
}

// Surviving returns the library with an mpirun that does not end the other processes when one has died.
func (l Library) Surviving() Library {
	l.flags = slices.Concat(l.flags, l.survive)
	return l
}

// Path returns a value of the variable PATH with which mpirun is that of the library.
func (l Library) Path(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	// A link would not do, because MPICH looks for its other programs beside mpirun.
	script := fmt.Sprintf("#!/bin/sh\nexec mpirun.%s \"$@\"\n", l.Name)
	if err := os.WriteFile(filepath.Join(dir, "mpirun"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return dir + ":" + os.Getenv("PATH")
}

// jobTime is the time limit of a job.
const jobTime = 10 * time.Minute

// Command returns the command that starts a program as a job with the given number of processes. The job is
// killed when the test ends, or after ten minutes.
func (l Library) Command(t *testing.T, processes int, program string, args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), jobTime)
	t.Cleanup(cancel)
	flags := append([]string{"-np", strconv.Itoa(processes)}, l.flags...)
	cmd := exec.CommandContext(ctx, "mpirun."+l.Name, append(append(flags, program), args...)...)
	cmd.Env = append(cmd.Environ(), "OMPI_MCA_mpi_yield_when_idle=1")
	// mpirun ends its processes when it is asked to, but not when it is killed.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

// Run runs a program as a job with the given number of processes and returns what it has written. The test
// fails if the job fails.
func (l Library) Run(t *testing.T, processes int, program string, args ...string) string {
	t.Helper()
	out, err := l.Command(t, processes, program, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%d processes: %v\n%s", processes, err, out)
	}
	return string(out)
}

// RunTests runs a program that was built with Build("test", ...) as jobs with the given numbers of processes.
// The processes run the tests that match the pattern, or all with the flag -mpi-all, in the same order.
func (l Library) RunTests(t *testing.T, program, pattern string, processes ...int) {
	if *all {
		pattern = ""
	}
	for _, n := range processes {
		t.Run(fmt.Sprintf("processes=%d", n), func(t *testing.T) {
			l.Run(t, n, program, "-test.v", "-test.timeout", "9m", "-test.run", pattern)
		})
	}
}
