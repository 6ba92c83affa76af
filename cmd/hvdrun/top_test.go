package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/recorder"
	"github.com/gohvd/gohvd/internal/rundir"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/store"
)

// sleepingJob starts a job of two processes that never join it. xdg is hvdrun's XDG_RUNTIME_DIR. The function
// returns when hvdrun top can find the job.
func sleepingJob(t *testing.T, xdg string) (cmd *exec.Cmd) {
	t.Helper()
	cmd = hvdrun(t, "-np", "2", "sleep", "1000")
	cmd.Env = append(cmd.Env, "XDG_RUNTIME_DIR="+xdg)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for begun := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		jobs, err := runningJobs(xdg)
		if err != nil || time.Since(begun) > deadline {
			t.Fatalf("the job is not among %v after %v: %v", jobs, deadline, err)
		}
		for _, j := range jobs {
			if _, err := j.about(); j.pid == cmd.Process.Pid && err == nil {
				return cmd
			}
		}
	}
}

// topOf runs hvdrun top with args, and returns its output and its exit status.
func topOf(t *testing.T, xdg string, args ...string) (stdout, stderr string, status int) {
	t.Helper()
	cmd := hvdrun(t, append([]string{"top"}, args...)...)
	cmd.Env = append(cmd.Env, "XDG_RUNTIME_DIR="+xdg)
	var out, err bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &err
	_ = cmd.Run() // the exit status says more
	return out.String(), err.String(), cmd.ProcessState.ExitCode()
}

// If there is no such job, hvdrun top says so. If there are several, it prints what to type for each.
func TestTopFindsJobs(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	xdg := t.TempDir()
	if err := os.Mkdir(filepath.Join(xdg, "gohvd"), 0o700); err != nil {
		t.Fatal(err)
	}
	check := func(stderr string, status int, want ...string) {
		t.Helper()
		for _, text := range want {
			if !strings.Contains(stderr, text) || status != statusUsage {
				t.Errorf("got exit status %d and %q, want 2 and %q", status, stderr, text)
			}
		}
	}
	_, stderr, status := topOf(t, xdg)
	check(stderr, status, "no hvdrun of this user runs a job on this host", "hvdrun timeline FILE reads")
	_, stderr, status = topOf(t, xdg, "4711")
	check(stderr, status, "no hvdrun of this user with the process number 4711", "it runs none")
	_, stderr, status = topOf(t, xdg, "t.json")
	check(stderr, status, `JOB: got "t.json", want the number of the process of hvdrun`)
	_, stderr, status = topOf(t, xdg, "1", "2")
	check(stderr, status, "got 2 arguments")
	_, stderr, status = topOf(t, xdg, "--interval", "0")
	check(stderr, status, "--interval: got 0, want 0.1 to 3600 seconds")
	_, stderr, status = topOf(t, xdg, "--plain", "--json")
	check(stderr, status, "--plain and --json cannot be used together")
	_, stderr, status = topOf(t, xdg, "--start-timeline", "t.json", "--stop-timeline")
	check(stderr, status, "--start-timeline and --stop-timeline cannot be used together")
	_, stderr, status = topOf(t, xdg, "--start-timeline", "")
	check(stderr, status, "--start-timeline: got an empty file name")
	_, stderr, status = topOf(t, xdg, "--stop-timeline", "--interval", "2")
	check(stderr, status, "--interval cannot be used with --start-timeline and --stop-timeline")

	// A folder of a rank, and one with a socket at which nobody listens, are no jobs.
	d, err := rundir.New(xdg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrUnix{Name: filepath.Join(d.Path(), socketName)})
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)

	first := sleepingJob(t, xdg)
	second := sleepingJob(t, xdg)
	_, stderr, status = topOf(t, xdg)
	check(stderr, status, "this user runs 2 jobs on this host",
		fmt.Sprintf("\n  hvdrun top %d  2 ranks since ", first.Process.Pid),
		fmt.Sprintf("\n  hvdrun top %d  2 ranks since ", second.Process.Pid), ": sleep 1000\n")
	if stdout, _, status := topOf(t, xdg, "no"); status != statusUsage || stdout != "" {
		t.Errorf("got exit status %d and %q", status, stdout)
	}
	complete := hvdrun(t, "__complete", "top", "")
	complete.Env = append(complete.Env, "XDG_RUNTIME_DIR="+xdg)
	if out, err := complete.Output(); err != nil || !strings.Contains(string(out),
		strconv.Itoa(first.Process.Pid)+"\t2 ranks since ") {
		t.Errorf("got %q, %v, want the jobs completed", out, err)
	}

	// Other users cannot connect: the socket and its folder are only for this user.
	jobs, err := runningJobs(xdg)
	if err != nil || len(jobs) != 2 {
		t.Fatal(jobs, err)
	}
	socket, err := os.Stat(filepath.Join(jobs[0].folder, socketName))
	if err != nil || socket.Mode().Perm() != 0o600 {
		t.Errorf("got %v, %v, want a socket with mode 0600", socket.Mode(), err)
	}
	folder, err := os.Stat(jobs[0].folder)
	if err != nil || folder.Mode().Perm() != 0o700 {
		t.Errorf("got %v, %v, want a folder with mode 0700", folder.Mode(), err)
	}

	// Processes that have not joined are silent, and hvdrun says what it knows about them.
	state := make(chan *live.Job, 1)
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	jobs[0].follow(ctx, time.Second, func(u update) bool {
		if u.job != nil {
			state <- u.job
		}
		return u.job == nil
	})
	select {
	case j := <-state:
		if len(j.Processes) != 2 || j.Processes[1].Answered || len(j.Problems) == 0 ||
			!strings.Contains(j.Processes[1].Known, "is sleeping") {
			t.Errorf("got %+v, want that process 1 sleeps", j)
		}
	case <-ctx.Done():
		t.Error("no state of the job")
	}
}

// A job without a runtime folder runs, and says that hvdrun top cannot show it.
func TestJobThatTopCannotShow(t *testing.T) {
	cmd := hvdrun(t, "-np", "1", "true")
	cmd.Env = append(cmd.Env, "TMPDIR=/proc/nowhere")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "hvdrun: warning: hvdrun top cannot show this job: ") {
		t.Errorf("got %q, %v, want a warning and no error", out, err)
	}
}

// The server refuses requests that it cannot serve.
func TestRefusedReaders(t *testing.T) {
	l := &liveJob{about: live.About{Command: []string{"x"}}, ended: make(chan struct{}), readers: maxReaders}
	get := func(resource string) (int, string) {
		w := httptest.NewRecorder()
		l.handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, resource, nil))
		return w.Code, w.Body.String()
	}
	for resource, want := range map[string]int{
		"/": http.StatusNotFound, aboutPath: http.StatusOK,
		statesPath + "?every_ms=99": http.StatusBadRequest, statesPath + "?every_ms=x": http.StatusBadRequest,
		statesPath + "?every_ms=3600001": http.StatusBadRequest,
		statesPath:                       http.StatusServiceUnavailable,
		recordsPath + "?rank=0":          http.StatusBadRequest, recordsPath + "?rank=0:x": http.StatusBadRequest,
		recordsPath + strings.Replace(strings.Repeat("&rank=0:1", maxRecorded+1), "&", "?", 1): http.StatusBadRequest,
		recordsPath: http.StatusOK,
	} {
		if code, text := get(resource); code != want {
			t.Errorf("%s: got %d and %q, want %d", resource, code, text, want)
		}
	}
}

// The server refuses names that cannot be those of timelines, and says which ranks have not done what they
// were asked for.
func TestSwitchedTimelines(t *testing.T) {
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	reports := reporterOf(t, kv, 3, "", time.Second)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	questions := make(chan string, 3)
	for rank := range 3 {
		running.Go(func() {
			_ = joblink.New(kv, rank).Answer(ctx, func(question string) []byte {
				questions <- question
				return []byte([]string{`{"file":"/f/t.json"}`, `{"error":"timeline: the disk is full"}`, `no`}[rank])
			})
		})
	}
	l := &liveJob{about: live.About{What: live.Ranks}, reports: reports, ended: make(chan struct{})}
	post := func(body string) (int, string) {
		w := httptest.NewRecorder()
		l.handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, timelinePath, strings.NewReader(body)))
		return w.Code, w.Body.String()
	}
	code, text := post(`{"start":true,"path":"/f/a name.json.gz"}`)
	const want = `{"failed":true,"text":"1 of 3 ranks have started a timeline: rank 0 to /f/t.json; ` +
		`rank 1: the disk is full; rank 2: malformed answer: `
	if code != http.StatusOK || !strings.HasPrefix(text, want) {
		t.Errorf("got %d and %q, want %q", code, text, want)
	}
	for range 3 {
		if q := <-questions; !strings.HasPrefix(q, joblink.StartTimeline+" 20") || !strings.HasSuffix(q, " /f/a name.json.gz") {
			t.Errorf("a rank got the question %q", q)
		}
	}
	l.nodes = &launch.Nodes{Servers: 1, Workers: 1}
	for body, want := range map[string]string{
		`{"start":true,"path":"train.py"}`:  `got the file name "train.py", want one that ends with .json`,
		`{"start":true,"path":"a\nb.json"}`: "control characters",
		`{"start":true}`:                    "the nodes of a parameter server write none",
		"{":                                 "EOF",
		`{"path":"` + strings.Repeat("x", 8<<10) + `"}`: "too large",
	} {
		if code, text := post(body); code != http.StatusBadRequest || !strings.Contains(text, want) {
			t.Errorf("%.40s: got %d and %q, want %q", body, code, text, want)
		}
	}
	if w := httptest.NewRecorder(); true {
		l.handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, timelinePath, nil))
		if w.Code != http.StatusMethodNotAllowed {
			t.Errorf("GET: got %d, want that it changes nothing", w.Code)
		}
	}
}

func TestEndOf(t *testing.T) {
	killed, nodes := launch.Exit{Title: "h1:3", Signal: unix.SIGKILL}, &launch.Nodes{Servers: 1, Workers: 1}
	for _, c := range []struct {
		result launch.Result
		err    error
		nodes  *launch.Nodes
		want   live.End
	}{
		{launch.Result{}, nil, nil, live.End{Text: "all ranks ended with status 0"}},
		{launch.Result{}, nil, nodes, live.End{Text: "all nodes ended with status 0"}},
		{launch.Result{Status: 137, Roots: []int{1}, Ranks: []launch.Exit{{}, killed}}, nil, nil,
			live.End{Status: 137, Text: "h1:3: " + killed.Describe()}},
		{launch.Result{Status: 130, Signal: unix.SIGINT}, nil, nil,
			live.End{Status: 130, Text: "a signal has ended it: interrupt"}},
		{launch.Result{}, os.ErrPermission, nil, live.End{Status: 1, Text: "permission denied"}},
	} {
		if got := endOf(c.result, c.err, c.nodes); *got != c.want {
			t.Errorf("%+v, %v: got %+v, want %+v", c.result, c.err, *got, c.want)
		}
	}
}

// Errors of many ranks, each with a file of its own, make a sentence of limited length.
func TestOutcomeOfManyErrors(t *testing.T) {
	answers := make(map[int][]byte)
	for r := range 100 {
		answers[r] = fmt.Appendf(nil, `{"error":"timeline: rank %d: t.rank%d.json exists"}`, r, r)
	}
	const want = "0 of 100 ranks have started a timeline; rank 0: t.rank0.json exists; rank 1: t.rank1.json exists; " +
		"rank 2: t.rank2.json exists; and 97 more errors."
	if got := outcomeOf(true, answers, nil); got.Text != want {
		t.Errorf("got %q, want %q", got.Text, want)
	}
}

// If a rank uses a version of gohvd with another encoding of its state, the state of the job says so.
func TestStateOfAnotherVersion(t *testing.T) {
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	reports := reporterOf(t, kv, 1, "", time.Second)
	var running sync.WaitGroup
	defer running.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	running.Go(func() {
		_ = joblink.New(kv, 0).Answer(ctx, func(string) []byte { return []byte(`{"snapshot":{}}`) })
	})
	l := &liveJob{about: live.About{What: live.Ranks, Size: 1}, reports: reports, ended: make(chan struct{})}
	const want = "use one version of gohvd"
	if j := l.ask(ctx, time.Now()); !strings.Contains(j.Processes[0].Known, want) || len(j.Problems) != 1 ||
		!strings.Contains(j.Problems[0].Text, want) {
		t.Errorf("got the process %+v and the problems %+v, want %q", j.Processes[0], j.Problems, want)
	}
}

// recorded records what a handler has written.
type recorded struct{ *httptest.ResponseRecorder }

func (recorded) SetWriteDeadline(time.Time) error { return nil }

// Rank 0 keeps steps for 10 s after it was asked. So it is asked more often than that while there is a
// reader, however rarely the reader wants a state.
func TestReadersKeepSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := store.NewHashStore(store.Limits{})
		defer kv.Close()
		reports := reporterOf(t, kv, 1, "", time.Second)
		state, err := live.NewRank(recorder.New(8).Dump(recorder.About{Size: 1}), &trace.Stats{}).Encode()
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		asked := make(chan time.Time, 100)
		running.Go(func() {
			_ = joblink.New(kv, 0).Answer(ctx, func(string) []byte {
				asked <- time.Now()
				return state
			})
		})
		l := &liveJob{about: live.About{What: live.Ranks, Size: 1}, reports: reports,
			ended: make(chan struct{})}
		w := recorded{httptest.NewRecorder()}
		running.Go(func() {
			req := httptest.NewRequest(http.MethodGet, statesPath+"?"+everyParameter+"=60000", nil)
			l.stream(w, req.WithContext(ctx))
		})
		last := <-asked
		for range 50 {
			next := <-asked
			if d := next.Sub(last); d >= 10*time.Second {
				t.Errorf("rank 0 was not asked for %v", d)
			}
			last = next
		}
		cancel()
		running.Wait()
		if n := strings.Count(w.Body.String(), "\n"); n < 2 || n > 4 {
			t.Errorf("the reader got %d states in 150 s, want one each minute", n)
		}
	})
}

// FuzzSwitching checks that a path that is accepted reaches the ranks unchanged, and that a rank counts as
// failed exactly if its answer has an error or cannot be read.
func FuzzSwitching(f *testing.F) {
	f.Add(`{"start":true,"path":"t.json"}`)
	f.Add(`{"file":"t.json"}`)
	f.Add(`{"error":"timeline: rank 0: the disk is full"}`)
	f.Fuzz(func(t *testing.T, text string) {
		var s switching
		if json.Unmarshal([]byte(text), &s) == nil && s.check() == nil && s.Path != "" &&
			(strings.ContainsFunc(s.Path, unicode.IsControl) || !strings.Contains(s.Path, ".json")) {
			t.Errorf("the path %q was accepted", s.Path)
		}
		var a live.Switched
		failed := json.Unmarshal([]byte(text), &a) != nil || a.Error != ""
		got := outcomeOf(true, map[int][]byte{0: []byte(text)}, nil)
		if got.Failed != failed || failed != strings.Contains(got.Text, "ranks have started a timeline; rank 0: ") {
			t.Errorf("got %+v, want failed: %v", got, failed)
		}
	})
}
