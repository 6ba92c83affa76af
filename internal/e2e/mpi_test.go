package e2e

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/testmpi"
	"github.com/gohvd/gohvd/internal/testnet"
)

// digitsHash matches the line that each rank of the example prints at the end.
var digitsHash = regexp.MustCompile(`(?m)^digits: ranks=(\d+) .* weights_sha256=(\w+)`)

// allMPI are the settings with which a job meets by MPI and moves tensors with it.
var allMPI = []string{"HOROVOD_CONTROLLER=mpi", "HOROVOD_CPU_OPERATIONS=mpi"}

// digitsWithMPI builds the program examples/digits with a library, once for all tests, and returns its path.
func digitsWithMPI(t *testing.T, l testmpi.Library) string {
	t.Helper()
	path := filepath.Join(filepath.Dir(hvdrunPath), "digits-"+l.Name)
	if _, err := os.Stat(path); err != nil {
		if err := os.Rename(l.Build(t, "build", "./examples/digits"), path); err != nil {
			t.Fatal(err)
		}
	}
	return path
}

// The example trains under mpirun with MPI. All ranks get the same weights, and the timeline shows that MPI
// moved the tensors.
func TestDigitsWithMPI(t *testing.T) {
	testmpi.Each(t, func(t *testing.T, l testmpi.Library) {
		program := digitsWithMPI(t, l)
		for _, settings := range [][]string{
			nil, {"HVD_NEGOTIATION=lockstep"}, {"HOROVOD_CPU_OPERATIONS=gloo"}, {"HOROVOD_CONTROLLER=gloo"},
			{"HOROVOD_MPI_THREADS_DISABLE=1"},
		} {
			t.Run(strings.Join(settings, ","), func(t *testing.T) {
				file := filepath.Join(t.TempDir(), "timeline.json")
				cmd := l.Command(t, 3, program, "-epochs", "2")
				cmd.Env = append(append(append(cmd.Env, allMPI...), "HOROVOD_TIMELINE="+file), settings...)
				out, err := cmd.CombinedOutput()
				if err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
				same := map[string]int{}
				for _, e := range digitsHash.FindAllStringSubmatch(string(out), -1) {
					same[e[1]+" "+e[2]]++
				}
				if len(same) != 1 || slices.Max(slices.Collect(maps.Values(same))) != 3 {
					t.Errorf("got ranks and weights %v, want the same 3 times", same)
				}
				timeline := testnet.ReadFile(t, file)
				byMPI := len(settings) == 0 || settings[0] != "HOROVOD_CPU_OPERATIONS=gloo"
				for _, activity := range []string{"MPI_ALLREDUCE", "MPI_BCAST"} {
					if bytes.Contains(timeline, []byte(activity)) != byMPI {
						t.Errorf("the timeline has %s: %v, want %v", activity, !byMPI, byMPI)
					}
				}
			})
		}
	})
}

// If a rank is killed, mpirun ends the job, and no process is left.
func TestDeathWithMPI(t *testing.T) {
	testmpi.Each(t, func(t *testing.T, l testmpi.Library) {
		program := digitsWithMPI(t, l)
		cmd := l.Command(t, 3, program, "-epochs", "1000000")
		cmd.Env = append(cmd.Env, allMPI...)
		startDigits(t, cmd)
		ranks := ranksOf(program)
		if len(ranks) != 3 {
			t.Fatalf("got ranks %v, want 3", ranks)
		}
		send(t, ranks[1], unix.SIGKILL)
		killed := time.Now()
		if err := cmd.Wait(); err == nil {
			t.Error("mpirun has succeeded")
		}
		t.Logf("the job ended after %v", time.Since(killed).Round(time.Millisecond))
		awaitEnd(t, program, time.Now().Add(time.Minute))
	})
}

// reportTime is the time within which the survivors must report a killed rank.
const reportTime = time.Minute

// If a rank is killed, each survivor reports this rank. mpirun may end before it has read the report, so each
// rank writes its errors to a file of its own.
func TestSurvivorsNameKilledRankWithMPI(t *testing.T) {
	testmpi.Each(t, func(t *testing.T, l testmpi.Library) {
		program := digitsWithMPI(t, l)
		for _, negotiation := range []string{"event", "lockstep"} {
			for _, victim := range testmpi.Sample(t, []int{0, 1, 2}) {
				t.Run(fmt.Sprintf("rank=%d/%s", victim, negotiation), func(t *testing.T) {
					killRank(t, l, program, victim, negotiation)
				})
			}
		}
	})
}

func killRank(t *testing.T, l testmpi.Library, program string, victim int, negotiation string) {
	errs := filepath.Join(t.TempDir(), "stderr")
	// When a process dies, mpirun of MPICH may fail and kill its children. So each rank is in a session of
	// its own, and survives that.
	cmd := l.Surviving().Command(t, 3, "sh", "-c",
		`trap "" PIPE; setsid "$0" "$@" 2> "$ERRS.${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" & wait`,
		program, "-epochs", "1000000")
	// UCX, on which MPICH is based, aborts a process that copies from the memory of a dead one (docs/mpi.md).
	cmd.Env = append(append(cmd.Env, allMPI...), "HVD_NEGOTIATION="+negotiation, "ERRS="+errs,
		"UCX_TLS=^cma")
	t.Cleanup(func() {
		for _, pid := range ranksOf(program) { // if the test has failed
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	})
	startDigits(t, cmd)
	signalRank(t, program, victim, unix.SIGKILL)
	killed := time.Now()
	_ = cmd.Wait() // mpirun fails or succeeds, depending on the library
	awaitEnd(t, program, killed.Add(reportTime))
	took := time.Since(killed).Round(time.Millisecond)
	if t.Logf("the survivors had reported the rank and ended after %v", took); took > reportTime {
		t.Errorf("want at most %v", reportTime)
	}
	for r := range 3 {
		text := testnet.ReadFile(t, fmt.Sprintf("%s.%d", errs, r))
		report := fmt.Sprintf("rank %d failed: ", victim)
		if got := bytes.Contains(text, []byte(report)); got != (r != victim) {
			t.Errorf("rank %d has reported %q: %v, want %v:\n%s", r, report, got, !got, text)
		}
	}
}

// startDigits starts a job and returns when it trains.
func startDigits(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { out.Close() })
	cmd.Stdout = in
	err = cmd.Start()
	in.Close()
	if err != nil {
		t.Fatal(err)
	}
	var text []byte
	for buf := make([]byte, 4096); !bytes.Contains(text, []byte("epoch 2/")); {
		n, err := out.Read(buf)
		if text = append(text, buf[:n]...); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
	}
	go func() { _, _ = io.Copy(io.Discard, out) }()
}

// If a rank is stopped, the others name it within the liveness limit, even while they wait for it in MPI.
func TestStoppedRankWithMPI(t *testing.T) {
	testmpi.Each(t, func(t *testing.T, l testmpi.Library) {
		program := digitsWithMPI(t, l)
		cmd := l.Command(t, 3, program, "-epochs", "1000000")
		cmd.Env = append(append(cmd.Env, allMPI...), "HVD_NEGOTIATION=lockstep", "HVD_LIVENESS_SECONDS=3")
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		startDigits(t, cmd)
		signalRank(t, program, 2, unix.SIGSTOP)
		if err := cmd.Wait(); err == nil || !strings.Contains(stderr.String(), "rank 2 failed") {
			t.Errorf("got %v, want an error that names rank 2:\n%s", err, &stderr)
		}
	})
}

// awaitEnd waits until no process runs a program. It naps between looks, to leave the cores to the processes.
func awaitEnd(t *testing.T, program string, deadline time.Time) {
	t.Helper()
	for len(ranksOf(program)) > 0 {
		if time.Now().After(deadline) {
			t.Fatalf("processes %v are left", ranksOf(program))
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// signalRank sends a signal to the process that runs a rank of a program.
func signalRank(t *testing.T, program string, rank int, signal unix.Signal) {
	t.Helper()
	variable := regexp.MustCompile(fmt.Sprintf(`(OMPI_COMM_WORLD_RANK|PMI_RANK)=%d\x00`, rank))
	for _, pid := range ranksOf(program) {
		env := testnet.ReadFile(t, fmt.Sprintf("/proc/%d/environ", pid))
		if variable.Match(env) {
			send(t, pid, signal)
			return
		}
	}
	t.Fatalf("no process runs rank %d", rank)
}

// ranksOf returns the processes that run a program, in the order of their numbers.
func ranksOf(program string) (pids []int) {
	links, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, l := range links {
		if exe, err := os.Readlink(l); err == nil && exe == program {
			pid, _ := strconv.Atoi(strings.Split(l, "/")[2])
			pids = append(pids, pid)
		}
	}
	return pids
}

// A program that was built for another MPI library than the launcher's, and programs that were built without
// MPI, refuse to start, and say why.
func TestRefusalsWithMPI(t *testing.T) {
	self := testnet.Self(t)
	var programs []string
	var launchers []testmpi.Library
	testmpi.Each(t, func(t2 *testing.T, l testmpi.Library) {
		program := digitsWithMPI(t, l)
		programs, launchers = append(programs, program), append(launchers, l)
		refuses(t2, exec.Command(hvdrunPath, "-np", "2", program), "HOROVOD_CPU_OPERATIONS=mpi",
			"this program was built without MPI")
		t.Setenv(programVariable, "sums")
		refuses(t2, l.Command(t2, 2, self), "HOROVOD_CONTROLLER=mpi", "this program was built without MPI")
	})
	for i, l := range launchers {
		for j, program := range programs {
			if i != j {
				refuses(t, l.Command(t, 2, program), "HOROVOD_CONTROLLER=mpi",
					"has started a job of 2, but MPI sees a job of 1: this program was built with")
			}
		}
	}
}

// refuses checks that a job fails with a message.
func refuses(t *testing.T, cmd *exec.Cmd, setting, want string) {
	t.Helper()
	cmd.Env = append(cmd.Environ(), setting)
	if out, err := cmd.CombinedOutput(); err == nil || !bytes.Contains(out, []byte(want)) {
		t.Errorf("%v: got %v, want %q:\n%s", cmd.Args, err, want, out)
	}
}
