package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/testnet"
	timelines "github.com/gohvd/gohvd/timeline/report"
	"github.com/gohvd/gohvd/timeline/view"
)

// livePage is the page of a running job, as a browser loads it.
type livePage struct {
	t     testing.TB
	http  *http.Client
	base  string
	lines *bufio.Reader
}

// page waits until hvdrun says where the page of the job is, and opens it.
func (j *job) page() (p *livePage) {
	j.t.Helper()
	j.untilError("the address of the page", func(text string) bool {
		if strings.Contains(text, "open http://127.0.0.1:") {
			p = openPage(j.t, text)
		}
		return p != nil
	})
	return p
}

// openPage opens the page with the address in a line of hvdrun, and begins to follow the job.
func openPage(t testing.TB, line string) *livePage {
	t.Helper()
	url := regexp.MustCompile(`http://\S+`).FindString(line)
	p := &livePage{t: t, http: testnet.Browser(t)}
	a, err := p.http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	a.Body.Close()
	p.base, _, _ = strings.Cut(url, "?")
	if a, err = p.http.Get(p.base + "live"); err != nil || a.StatusCode != http.StatusOK {
		t.Fatalf("got %+v, %v, want the states of the job", a, err)
	}
	t.Cleanup(func() { a.Body.Close() })
	p.lines = bufio.NewReader(a.Body)
	return p
}

// until reads states until a condition holds, and returns that state.
func (p *livePage) until(what string, is func(s *view.State) bool) *view.State {
	p.t.Helper()
	last := ""
	for {
		line, err := p.lines.ReadString('\n')
		if err != nil {
			p.t.Fatalf("%v before %s; the last state is %s", err, what, last)
		}
		if text, has := strings.CutPrefix(line, "data: "); has {
			last = text
			s := new(view.State)
			if err := json.Unmarshal([]byte(text), s); err != nil {
				p.t.Fatal(err)
			}
			if is(s) {
				return s
			}
		}
	}
}

// get returns data that belong to a state, or nil if they were replaced meanwhile. what ends where another
// parameter can follow.
func (p *livePage) get(what string, s *view.State) []byte {
	p.t.Helper()
	a, err := p.http.Get(p.base + "data/" + what + "run=" + s.Run)
	if err != nil {
		p.t.Fatal(err)
	}
	defer a.Body.Close()
	text, err := io.ReadAll(a.Body)
	if err != nil {
		p.t.Fatal(err)
	}
	if a.StatusCode == http.StatusGone {
		return nil
	}
	if a.StatusCode != http.StatusOK {
		p.t.Fatalf("%s: got the status %d and %s", what, a.StatusCode, text)
	}
	return text
}

// report returns the report that belongs to a state.
func (p *livePage) report(s *view.State) *timelines.Report {
	p.t.Helper()
	r := new(timelines.Report)
	if text := p.get("report?", s); text != nil {
		if err := json.Unmarshal(text, r); err != nil {
			p.t.Fatal(err)
		}
	}
	return r
}

// The page of hvdrun --view shows the operations and steps of all ranks while the job runs, and its end. The
// end of the job does not wait for the page.
func TestViewOfARunningJob(t *testing.T) {
	t.Parallel()
	file := t.TempDir() + "/end"
	j := startHvdrun(t, nil, []string{"-np", "4", "--view"}, "steps", "E2E_END="+file)
	p := j.page()
	seen := int64(0)
	p.until("operations of four ranks, and more of them later", func(s *view.State) bool {
		r := p.report(s)
		if len(r.Files) != 4 || r.Steps == 0 || !r.StepsMarked || len(r.Problems) > 0 {
			return false
		}
		first := seen == 0
		later := r.Operations > seen
		seen = max(seen, r.Operations)
		return !first && later && len(s.Rows) == 4
	})
	testnet.WriteFile(t, file, "")
	s := p.until("the end", func(s *view.State) bool { return s.Ended })
	if !strings.Contains(s.Verdict, "all ranks ended with status 0") || s.Alarm {
		t.Errorf("got the verdict %q", s.Verdict)
	}
	// On a busy machine, hvdrun may have ended already, and the page has lost records that it did not read in
	// time.
	if a, err := p.http.Get(p.base + "data/report?run=" + s.Run); err == nil {
		defer a.Body.Close()
		r := new(timelines.Report)
		if err := json.NewDecoder(a.Body).Decode(r); err == nil && (r.Operations == 0 || len(r.Files) != 4) {
			t.Errorf("at the end the page has %d operations of %d ranks, want some of 4", r.Operations, len(r.Files))
		}
	}
	j.ends(0)
}

// hvdrun view shows a stall with its tensor and the missing rank, and processes that are stopped, and stays
// when the job has ended.
func TestViewOfAStall(t *testing.T) {
	t.Parallel()
	xdg := t.TempDir()
	j := startHvdrun(t, nil, []string{"-np", "4", "--stall-check-warning-time-seconds", "2"}, "stalls",
		"XDG_RUNTIME_DIR="+xdg, "HVD_LIVENESS_SECONDS=300")
	pids := j.ready(4)
	v := exec.CommandContext(t.Context(), hvdrunPath, "view")
	v.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+xdg, "TMPDIR="+xdg)
	out, err := v.StdoutPipe()
	if err == nil {
		err = v.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(line, err)
	}
	p := openPage(t, line)
	s := p.until("the stall", func(s *view.State) bool {
		return len(s.Problems) > 0 && s.Problems[0].Alarm && strings.HasPrefix(s.Problems[0].Text,
			`STALLED: Rank 2 has not called allreduce "grad/7", for which ranks 0, 1 and 3 have waited for`)
	})
	if len(s.Missing) != 1 || s.Missing[0] != 2 {
		t.Errorf("got the missing ranks %v, want 2", s.Missing)
	}
	// The page survives that a rank or hvdrun is stopped.
	for _, c := range []struct {
		pid  int
		what string
	}{{pids[1], "is stopped by a signal"}, {j.cmd.Process.Pid, "has not answered for"}} {
		says := func(s *view.State) bool { return strings.Contains(fmt.Sprint(s.Rows, s.Problems), c.what) }
		send(t, c.pid, unix.SIGSTOP)
		p.until("a stopped process", says)
		send(t, c.pid, unix.SIGCONT)
		p.until("that it goes on", func(s *view.State) bool { return !says(s) })
	}
	send(t, pids[3], unix.SIGKILL)
	s = p.until("the end", func(s *view.State) bool { return s.Ended })
	if !strings.Contains(s.Verdict, "exit status 137") || !s.Alarm ||
		!strings.HasPrefix(s.Report, "hvdrun: what the ranks did when the job failed, from ") ||
		!strings.Contains(s.Report, "grad/7") {
		t.Errorf("got the verdict %q and the report %q", s.Verdict, s.Report)
	}
	j.wait()
	if a, err := p.http.Get(p.base + "data/report"); err != nil || a.StatusCode != http.StatusOK {
		t.Errorf("after the end of the job: got %v, %v, want the report", a, err)
	} else {
		a.Body.Close()
	}
	if err := v.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	if err := v.Wait(); err != nil {
		t.Errorf("hvdrun view: %v", err)
	}
}
