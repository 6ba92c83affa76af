package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// A rank is stopped in the middle of an operation on shared memory, and counts as dead. The other ranks then
// use their buffers for something else. When the stopped rank continues, it changes no byte of these buffers.
func TestStoppedRankWritesNothing(t *testing.T) {
	for i := range 3 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel() // run in parallel, because the test mostly waits
			j := start(t, 3, "refill", "HVD_LIVENESS_SECONDS=3")
			victim := j.ready(3)[i]
			send(t, victim, syscall.SIGSTOP)
			j.awaitLines(2, "refilled")
			send(t, victim, syscall.SIGCONT)
			j.wait()
			if n := strings.Count(j.out(), ">:unchanged"); n != 3 || strings.Contains(j.out(), ">:changed") {
				t.Errorf("%d of 3 ranks found their buffers unchanged:\n%s\n%s", n, j.out(), j.err())
			}
		})
	}
}

// Shared memory cannot be allocated. The job fails before any operation, with one clear error that states the
// size. If the user's list of backends has TCP too, the job uses TCP instead.
func TestNoSharedMemory(t *testing.T) {
	// The constants are limits in KiB. The limit "nothing" is too low for the control channels. The limit
	// "controlAlone" is high enough for the control channels, but too low for a lane.
	const nothing, controlAlone = 40, 1000
	for _, c := range []struct {
		operations string
		limit      int
		want       int
		says       []string
	}{
		{"gloo", controlAlone, 1, []string{"bytes", "RLIMIT_FSIZE"}},
		{"shm", controlAlone, 1, []string{"bytes", "RLIMIT_FSIZE"}},
		{"gloo", nothing, 1, []string{"bytes", "RLIMIT_FSIZE", "HOROVOD_CPU_OPERATIONS=shm,tcp"}},
		{"shm,tcp", nothing, 0, []string{"use TCP", "bytes", "RLIMIT_FSIZE"}},
		{"shm,tcp", controlAlone, 0, []string{"use TCP", "bytes", "RLIMIT_FSIZE"}},
		{"tcp", nothing, 0, nil},
	} {
		t.Run(fmt.Sprintf("%s/%d", c.operations, c.limit), func(t *testing.T) {
			limit := fmt.Sprintf(`ulimit -f %d && exec "$@"`, c.limit)
			j := startWith(t, []string{"bash", "-c", limit, "bash"}, 2, "sums", "HOROVOD_CPU_OPERATIONS="+
				c.operations)
			j.ends(c.want)
			for _, text := range c.says {
				if !strings.Contains(j.err(), text) {
					t.Errorf("nobody says %q", text)
				}
			}
			if results := strings.Count(j.out(), ">:done"); c.want == 0 && results != 2 {
				t.Errorf("%d of 2 ranks got results", results)
			}
			if t.Failed() {
				t.Logf("output:\n%s\n%s", j.out(), j.err())
			}
		})
	}
}

// The arena cannot be allocated. Alloc returns an error that states the size, and the job goes on.
func TestNoArena(t *testing.T) {
	j := startWith(t, []string{"bash", "-c", `ulimit -f 8000 && exec "$@"`, "bash"}, 2, "noarena")
	j.ends(0)
	if n := strings.Count(j.out(), ">:refused: "); n != 2 ||
		!strings.Contains(j.out(), strconv.Itoa(64<<20)+" bytes") {
		t.Errorf("%d of 2 ranks were refused with the size", n)
	}
	if t.Failed() {
		t.Logf("output:\n%s\n%s", j.out(), j.err())
	}
}

// A rank or hvdrun is killed. Afterwards there are no new files in the directory of the sockets or in
// /dev/shm.
func TestNothingStaysBehind(t *testing.T) {
	dir := t.TempDir()
	files := func() (all []string) {
		for _, pattern := range []string{filepath.Join(dir, "*", "*"), "/dev/shm/*"} {
			found, err := filepath.Glob(pattern)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, found...)
		}
		return all
	}
	before := files()
	nothingNew := func() { // it waits, because other programs make and remove files in /dev/shm too
		t.Helper()
		testnet.Eventually(t, fmt.Sprintf("nothing is left but %s", before), func() bool {
			return !slices.ContainsFunc(files(), func(name string) bool {
				return !slices.Contains(before, name)
			})
		})
	}
	for after := range 2 {
		kill(t, "arena", 1, time.Duration(after)*10*time.Millisecond, "TMPDIR="+dir, "XDG_RUNTIME_DIR=")
	}
	nothingNew()
	// In this part hvdrun itself is killed, at different times after its start.
	for i := range 10 {
		j := start(t, 3, "sums", "TMPDIR="+dir, "XDG_RUNTIME_DIR=")
		<-time.After(time.Duration(i) * 10 * time.Millisecond)
		if err := j.cmd.Process.Kill(); err != nil && err != os.ErrProcessDone {
			t.Fatal(err)
		}
		j.wait()
	}
	// The socket of a rank that was killed before it had joined stays. The next job removes it.
	if status := start(t, 3, "sums", "TMPDIR="+dir, "XDG_RUNTIME_DIR=").wait(); status != 0 {
		t.Errorf("hvdrun ended with status %d", status)
	}
	nothingNew()
}
