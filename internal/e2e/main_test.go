// Package e2e tests what users run: hvdrun, and the processes that it starts, which communicate over real
// sockets.
package e2e

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// programVariable names a variable. If it is set, this test binary runs a rank's program instead of the
// tests.
const programVariable = "GOHVD_E2E_PROGRAM"

var hvdrunPath string

// The tests of deaths have too many combinations to run all of them each time. So they run samples of the
// combinations, unless the flag -whole is set.
var (
	whole = flag.Int("whole", 0,
		"run the matrices of deaths, faults and endings so often; 0 runs a sample of each once")
	many     = flag.Int("many", 32, "number of ranks of the job with many ranks on a host")
	seedFlag = flag.Uint64("seed", 0, "draw samples and times by this seed; 0 makes one")
)

// draws returns a source of random numbers for a test and logs its seed.
func draws(t *testing.T) *rand.Rand {
	t.Helper()
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("to draw the same: -args -seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// sample returns n random elements of cells. With -whole it returns all cells, as often as the flag says.
func sample[T any](random *rand.Rand, cells []T, n int) []T {
	if *whole > 0 {
		return slices.Repeat(cells, *whole)
	}
	cells = slices.Clone(cells)
	random.Shuffle(len(cells), func(i, k int) { cells[i], cells[k] = cells[k], cells[i] })
	return cells[:min(n, len(cells))]
}

func TestMain(m *testing.M) {
	if p := os.Getenv(programVariable); p != "" {
		os.Exit(program(p))
	}
	flag.Parse()
	// Four tests run in parallel even on small machines, because parallel tests mostly wait for timeouts and
	// processes.
	_ = flag.Set("test.parallel", "4")
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "hvdrun")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		hvdrunPath = filepath.Join(dir, "hvdrun")
		if err := testnet.Link(dir, "cmd/hvdrun"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}())
}

// jobLimit is how long a job may take, and each event that a test awaits. On a busy machine it takes much
// longer than usual.
const jobLimit = 5 * time.Minute

// job is a running hvdrun with its output so far.
type job struct {
	t     testing.TB
	cmd   *exec.Cmd
	lines chan line // the lines of the ranks' standard output
	// complained gets an element when the standard error output has grown.
	complained chan struct{}
	wg         sync.WaitGroup

	mu     sync.Mutex
	output strings.Builder // all lines of standard output
	stderr strings.Builder
}

// line is a line that a rank has printed, with the time at which the test read it.
type line struct {
	rank int
	node string // name of the node of a parameter server that has printed the line; empty for a rank
	text string
	at   time.Time
}

// prefix matches a line with the label of hvdrun, or with that of mpirun: of Open MPI or MPICH. In an elastic
// job on several hosts, the label of hvdrun is host:slot, and the slot counts as the rank.
var prefix = regexp.MustCompile(`^\[(?:(?:1,|[^ :\]]+:)?(\d+)|([a-z]+(?: \d+)?))\](?:<stdout>:| )(.*)$`)

// start runs this binary as the given program on n ranks under hvdrun.
func start(t testing.TB, n int, program string, env ...string) *job {
	return startWith(t, nil, n, program, env...)
}

// startWith is like start, but uses command as a prefix that runs hvdrun by executing its arguments.
func startWith(t testing.TB, command []string, n int, program string, env ...string) *job {
	return startHvdrun(t, command, []string{"-np", strconv.Itoa(n)}, program, env...)
}

// startHvdrun runs hvdrun with the given flags, and under it this binary as the given program. If command is
// not nil, it is a prefix that runs hvdrun by executing its arguments.
func startHvdrun(t testing.TB, command, flags []string, program string, env ...string) *job {
	self := testnet.Self(t)
	return startCommand(t, slices.Concat(command, []string{hvdrunPath}, flags, []string{self}),
		append([]string{programVariable + "=" + program}, env...)...)
}

// startCommand runs a command line that contains hvdrun and its arguments, and reads the output.
func startCommand(t testing.TB, command []string, env ...string) *job {
	return startIn(t, "", command, env...)
}

// startIn is like startCommand, with dir as the working directory.
func startIn(t testing.TB, dir string, command []string, env ...string) *job {
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit*time.Duration(max(*whole, 1)))
	j := &job{t: t, lines: make(chan line, 1000), complained: make(chan struct{}, 1)}
	j.cmd = exec.CommandContext(ctx, command[0], command[1:]...)
	// At the limit hvdrun gets an interrupt, as if from a user, so that it can end its ranks.
	j.cmd.Cancel = func() error { return j.cmd.Process.Signal(os.Interrupt) }
	j.cmd.WaitDelay = 15 * time.Second
	j.cmd.Env = append(os.Environ(), env...)
	j.cmd.Dir = dir
	stdout, err := j.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	stderr, err := j.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := j.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// A test that fails leaves the job running. Its processes must have ended before the test removes its
	// folders, in which they write.
	t.Cleanup(func() {
		cancel()
		_ = j.cmd.Wait() // fails if the test has waited
		for range j.lines {
		}
		j.wg.Wait()
	})
	j.wg.Go(func() {
		defer close(j.lines)
		for s := bufio.NewScanner(stdout); s.Scan(); {
			now := time.Now()
			j.mu.Lock()
			j.output.WriteString(s.Text() + "\n")
			j.mu.Unlock()
			if m := prefix.FindStringSubmatch(s.Text()); m != nil {
				rank, _ := strconv.Atoi(m[1])
				j.lines <- line{rank, m[2], m[3], now}
			}
		}
	})
	j.wg.Go(func() {
		buf := make([]byte, 64<<10)
		for {
			n, err := stderr.Read(buf)
			j.mu.Lock()
			j.stderr.Write(buf[:n])
			j.mu.Unlock()
			if err != nil {
				return
			}
			select {
			case j.complained <- struct{}{}:
			default:
			}
		}
	})
	return j
}

// until reads lines until the function enough returns true for a line. The test fails if the job ends before
// that, or when jobLimit has passed. what describes the awaited event in the failure message.
func (j *job) until(what string, enough func(l line) bool) {
	j.t.Helper()
	timeout := time.After(jobLimit)
	for {
		select {
		case l, ok := <-j.lines:
			if !ok {
				status := j.wait()
				j.t.Fatalf("the job ended with status %d before %s; standard error:\n%s", status, what, j.err())
			}
			if enough(l) {
				return
			}
		case <-timeout:
			j.t.Fatalf("no %s after %v; output:\n%s\nstandard error:\n%s", what, jobLimit, j.out(), j.err())
		}
	}
}

// awaitLines waits until n lines have come that begin with a text.
func (j *job) awaitLines(n int, text string) {
	j.t.Helper()
	j.until(fmt.Sprintf("%d lines with %q", n, text), func(l line) bool {
		if strings.HasPrefix(l.text, text) {
			n--
		}
		return n == 0
	})
}

// untilError waits until the function enough returns true for the standard error output so far. The test
// fails when jobLimit has passed. what describes the awaited event in the failure message.
func (j *job) untilError(what string, enough func(text string) bool) {
	j.t.Helper()
	timeout := time.After(jobLimit)
	for !enough(j.err()) {
		select {
		case <-j.complained:
		case <-timeout:
			j.t.Fatalf("no %s after %v; standard error:\n%s", what, jobLimit, j.err())
		}
	}
}

// metricsURL waits until hvdrun says where it serves the metrics, and returns the address.
func (j *job) metricsURL() (url string) {
	j.t.Helper()
	j.untilError("address of the metrics", func(text string) bool {
		if at := regexp.MustCompile(`metrics at (http://\S+)\n`).FindStringSubmatch(text); at != nil {
			url = at[1]
		}
		return url != ""
	})
	return url
}

// ready waits until each of the given number of ranks has printed its process ID and that it is ready. It
// returns the process IDs, indexed by rank.
func (j *job) ready(ranks int) []int {
	j.t.Helper()
	pids, known, ready := make([]int, ranks), 0, 0
	j.until("all ranks were ready", func(l line) bool {
		if text, ok := strings.CutPrefix(l.text, "pid "); ok {
			var err error
			if pids[l.rank], err = strconv.Atoi(text); err != nil {
				j.t.Fatal(err)
			}
			known++
		}
		if l.text == "ready" {
			ready++
		}
		return known == ranks && ready == ranks
	})
	return pids
}

func (j *job) out() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.output.String()
}

func (j *job) err() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.stderr.String()
}

// wait reads the rest of the output and returns the exit status of hvdrun.
func (j *job) wait() int {
	j.t.Helper()
	for range j.lines {
	}
	j.wg.Wait()
	if j.cmd == nil {
		return 0 // the test has started the ranks itself, and knows their statuses
	}
	err := j.cmd.Wait()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	default:
		j.t.Fatalf("hvdrun: %v", err)
		return -1
	}
}

// signal sends a signal to hvdrun.
func (j *job) signal(s os.Signal) {
	j.t.Helper()
	if err := j.cmd.Process.Signal(s); err != nil {
		j.t.Fatal(err)
	}
}

// send sends a signal to a process.
func send(t testing.TB, pid int, s syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(pid, s); err != nil {
		t.Fatal(err)
	}
}

// ends waits until hvdrun ends, which must have the given exit status.
func (j *job) ends(status int) {
	j.t.Helper()
	if got := j.wait(); got != status {
		j.t.Errorf("hvdrun ended with status %d, want %d:\n%s", got, status, j.err())
	}
}
