package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/testnet"
)

// terminal is a terminal of tmux in which a command runs.
type terminal struct {
	t      testing.TB
	socket string
}

// openTerminal runs hvdrun top in a terminal of the given size. xdg is its XDG_RUNTIME_DIR and TMPDIR, so it
// finds no job of another test. env is another variable. If tmux is missing, openTerminal skips the test. In
// CI, which has it, it fails the test instead.
func openTerminal(t testing.TB, width, height int, xdg, env string) *terminal {
	t.Helper()
	if _, err := exec.LookPath("tmux"); err != nil {
		const needs = "it is in Debian's package tmux"
		if os.Getenv("CI") != "" {
			t.Fatalf("%v; %s", err, needs)
		}
		t.Skipf("%v; %s", err, needs)
	}
	dir, err := os.MkdirTemp("", "tmux") // the path of the socket must be short
	if err != nil {
		t.Fatal(err)
	}
	m := &terminal{t, filepath.Join(dir, "s")}
	t.Cleanup(func() {
		_ = exec.Command("tmux", "-S", m.socket, "kill-server").Run() // fails if the server has ended
		_ = os.RemoveAll(dir)
	})
	m.tmux("-f", "/dev/null", "new-session", "-d", "-x", strconv.Itoa(width), "-y", strconv.Itoa(height),
		fmt.Sprintf("env XDG_RUNTIME_DIR=%[1]s TMPDIR=%[1]s %[2]s %[3]s top; echo status $?; cat", xdg, env, hvdrunPath))
	return m
}

func (m *terminal) tmux(args ...string) string {
	m.t.Helper()
	out, err := exec.Command("tmux", append([]string{"-S", m.socket}, args...)...).CombinedOutput()
	if err != nil {
		m.t.Fatalf("tmux %q: %v\n%s", args, err, out)
	}
	return string(out)
}

// screen returns the screen, with sequences for styles if styled is set.
func (m *terminal) screen(styled bool) string {
	m.t.Helper()
	args := []string{"capture-pane", "-p"}
	if styled {
		args = append(args, "-e")
	}
	return m.tmux(args...)
}

// until waits until a part of the screen matches the pattern, and returns the screen.
func (m *terminal) until(pattern string) string {
	m.t.Helper()
	match := regexp.MustCompile(pattern)
	for begun := time.Now(); ; {
		text := m.screen(false)
		if match.MatchString(text) {
			return text
		}
		if time.Since(begun) > jobLimit {
			m.t.Fatalf("nothing on the screen matches %s after %v:\n%s", pattern, jobLimit, text)
		}
		time.Sleep(50 * time.Millisecond) // tmux cannot wait for a change
	}
}

// stepsJob starts a job of 4 ranks that runs steps until the function end is called. Its hvdrun has the
// returned XDG_RUNTIME_DIR, and env.
func stepsJob(t *testing.T, env ...string) (j *job, xdg string, end func()) {
	t.Helper()
	xdg = t.TempDir()
	file := filepath.Join(t.TempDir(), "end")
	j = start(t, 4, "steps", append(env, "XDG_RUNTIME_DIR="+xdg, "E2E_END="+file)...)
	j.awaitLines(4, "ready")
	return j, xdg, func() {
		testnet.WriteFile(t, file, "")
	}
}

// hvdrun top shows a running job on screens of different sizes, with and without colours, follows a resize,
// and stays with the verdict when the job has ended. A key switches timelines off and on.
func TestTopOnATerminal(t *testing.T) {
	t.Parallel()
	timelines := t.TempDir()
	j, xdg, end := stepsJob(t, "HOROVOD_TIMELINE="+filepath.Join(timelines, "t.json"))
	small := openTerminal(t, 80, 24, xdg, "")
	wide := openTerminal(t, 200, 24, xdg, "NO_COLOR=1")
	text := small.until(`(?m)^3 +\S+ +(waiting|outside|running|queued) `)
	testnet.WantText(t, text, "4 of 4 ranks", "RANK   HOST         STATE      STEP  HELD WAIT COMM DOING", "q quit")
	text = wide.until(`(?m)^0 .* [0-9.]+k? +[0-9.]+[kM] `) // operations and bytes in a second
	testnet.WantText(t, text, "4 of 4 ranks", " OPS/S BYTES/S PENDING FAILED DOING")
	small.tmux("resize-window", "-x", "120", "-y", "30")
	small.until(`LATE  HELD WAIT COMM HELD UP   OPS/S BYTES/S`)
	small.tmux("send-keys", "?")
	small.until(`Columns, over the last 5 s`)
	small.tmux("send-keys", "?", "/", "k", "3", "BSpace", "BSpace")
	small.until(`(?m)^Filter: _`)
	small.tmux("send-keys", "Escape")
	small.until(`(?m)^q quit`)

	wide.until(`4 of 4 ranks write a timeline: rank 0 to \S+/t\.json`)
	wide.tmux("send-keys", "t")
	wide.until(`(?m)^Press y to stop the timelines of all ranks`)
	wide.tmux("send-keys", "y")
	wide.until(`4 of 4 ranks have stopped a timeline: rank 0 to \S+/t\.json\.`)
	for begun := time.Now(); strings.Contains(wide.screen(false), "write a timeline"); time.Sleep(50 * time.Millisecond) {
		if time.Since(begun) > jobLimit {
			t.Fatalf("the ranks write timelines %v after they have stopped", jobLimit)
		}
	}
	wide.tmux("send-keys", "t")
	wide.until(`(?m)^Press y to start the timelines of all ranks`)
	wide.tmux("send-keys", "n", "t", "y")
	wide.until(`4 of 4 ranks have started a timeline: rank 0 to \S+/t-\d+T\d+\.json\.`)
	wide.until(`4 of 4 ranks write a timeline: rank 0 to \S+/t-\d+T\d+\.json`)

	end()
	if status := j.wait(); status != 0 {
		t.Fatalf("the job ended with status %d:\n%s", status, j.err())
	}
	const ended = `The job has ended after .*: all ranks ended with status 0\.`
	small.until(ended)
	wide.until(ended)
	colour := regexp.MustCompile(`\x1b\[[0-9;]*3[0-7]m`)
	if text := wide.screen(true); colour.MatchString(text) {
		t.Errorf("with NO_COLOR there are colours: %q", text)
	}
	small.tmux("send-keys", "q")
	small.until(`(?m)^status 0$`)
	checkTimeline(t, filepath.Join(timelines, "*.json"), 8)
}

// A stall is on the screen, in red, with the tensor and the missing rank; a rank that is stopped by a signal
// is silent, and comes back.
func TestTopShowsAStall(t *testing.T) {
	t.Parallel()
	xdg := t.TempDir()
	j := startHvdrun(t, nil, []string{"-np", "4", "--stall-check-warning-time-seconds", "2"}, "stalls",
		"XDG_RUNTIME_DIR="+xdg, "HVD_LIVENESS_SECONDS=300")
	pids := j.ready(4)
	m := openTerminal(t, 200, 24, xdg, "")
	m.until(`STALLED: Rank 2 has not called allreduce "grad/7", for which ranks 0, 1 and 3 have waited for`)
	m.until(`(?m)^2 .* MISSING `)
	red := regexp.MustCompile(`\x1b\[[0-9;]*31m[^\n]*STALLED: Rank 2`)
	if text := m.screen(true); !red.MatchString(text) {
		t.Errorf("the stall is not red: %q", text)
	}
	signal := func(s syscall.Signal) {
		send(t, pids[3], s)
	}
	signal(unix.SIGSTOP)
	m.until(`Rank 3 did not answer: process ` + strconv.Itoa(pids[3]) + ` is stopped by a signal`)
	signal(unix.SIGCONT)
	m.until(`4 of 4 ranks`)
	j.signal(os.Interrupt)
	m.until(`The job has ended with exit status 130 after .*: a signal has ended it: interrupt`)
	j.wait()
}

// Without a terminal, hvdrun top prints a line in each interval, or a JSON object, and ends with the job. It
// survives that hvdrun is stopped.
func TestTopWithoutATerminal(t *testing.T) {
	t.Parallel()
	j, xdg, end := stepsJob(t)
	top := func(args ...string) (lines *bufio.Reader, wait func() int) {
		cmd := exec.CommandContext(t.Context(), hvdrunPath, append([]string{"top"}, args...)...)
		cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+xdg, "TMPDIR="+xdg)
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		return bufio.NewReader(out), func() int {
			_ = cmd.Wait() // the exit status says more
			return cmd.ProcessState.ExitCode()
		}
	}
	until := func(lines *bufio.Reader, pattern string) string {
		t.Helper()
		match := regexp.MustCompile(pattern)
		for {
			text, err := lines.ReadString('\n')
			if match.MatchString(text) {
				return text
			}
			if err != nil {
				t.Fatalf("%v before a line that matches %s; the last one is %q", err, pattern, text)
			}
		}
	}
	plain, waitPlain := top("--interval", "0.2")
	objects, waitObjects := top("--json", "--interval", "0.1", strconv.Itoa(j.cmd.Process.Pid))
	until(plain, `^\d\d:\d\d:\d\d 4 of 4 ranks, [1-9.]+k? ops/s, [1-9.]+\S*B/s, \d+ pending\. `)
	until(plain, ` The last \d+ steps took [0-9.]+ m?s \(median\) and [0-9.]+ m?s \(p99\)\.`)
	var state struct {
		What      string
		Processes []struct {
			Name       string
			Operations int
			Marked     int `json:"steps_marked"`
		}
		Steps []struct {
			Sequence int
			Held     []int `json:"held_ns"`
		}
	}
	text := until(objects, `^(.*"operations":[1-9]){4}.*"steps":\[`) // a state in which all ranks have answered
	if err := json.Unmarshal([]byte(text), &state); err != nil {
		t.Fatal(err)
	}
	if state.What != "ranks" || len(state.Processes) != 4 || state.Processes[3].Name != "rank 3" ||
		state.Processes[3].Operations == 0 || state.Processes[3].Marked == 0 ||
		state.Steps[0].Sequence == 0 || len(state.Steps[0].Held) != 4 {
		t.Errorf("got %+v", state)
	}

	j.signal(unix.SIGSTOP)
	until(plain, `hvdrun \(process \d+\) has not answered for \d+ s\. It may have been stopped\.`)
	j.signal(unix.SIGCONT)
	until(plain, `^\S+ 4 of 4 ranks.*\(p99\)\.\n$`) // without a note at the end
	end()
	until(plain, `The job has ended after .*: all ranks ended with status 0\.`)
	until(objects, `"end":\{"status":0,"text":"all ranks ended with status 0"\}`)
	for _, lines := range []*bufio.Reader{plain, objects} {
		if rest, err := io.ReadAll(lines); len(rest) > 0 || err != nil {
			t.Errorf("got %q, %v after the end of the job", rest, err)
		}
	}
	if status := waitPlain(); status != 0 {
		t.Errorf("hvdrun top ended with status %d, want 0", status)
	}
	waitObjects()
	j.ends(0)
}

// If hvdrun is killed, hvdrun top says so. Then its socket is no job.
func TestTopOfAKilledHvdrun(t *testing.T) {
	t.Parallel()
	j, xdg, _ := stepsJob(t)
	cmd := exec.CommandContext(t.Context(), hvdrunPath, "top")
	cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+xdg, "TMPDIR="+xdg)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	if text, err := lines.ReadString('\n'); err != nil {
		t.Fatal(text, err)
	}
	if err := j.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(lines)
	want := fmt.Sprintf("hvdrun (process %d) has ended and has not said how the job has ended", j.cmd.Process.Pid)
	if !strings.Contains(string(rest), want) || err != nil {
		t.Errorf("got %q, %v, want %q", rest, err, want)
	}
	if cmd.Wait(); cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("hvdrun top ended with status %d, want 1", cmd.ProcessState.ExitCode())
	}
	j.wait()
	again := exec.CommandContext(t.Context(), hvdrunPath, "top", strconv.Itoa(j.cmd.Process.Pid))
	again.Env = cmd.Env
	text, err := again.CombinedOutput()
	if !strings.Contains(string(text), "no hvdrun of this user with the process number") ||
		again.ProcessState.ExitCode() != 2 {
		t.Errorf("got %q, %v, want that there is no such job", text, err)
	}
}
