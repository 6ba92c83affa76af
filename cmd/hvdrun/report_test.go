package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/recorder"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/store"
)

// dumpOf returns the dump of a rank that has run the allreduces grad/0 to grad/9. The time of the dump is 20
// s. At this time the rank has waited 5 s for each allreduce in waits.
func dumpOf(rank, size int, why string, waits ...string) []byte {
	return dumpAt(20*time.Second, 15*time.Second, rank, size, why, waits...)
}

// dumpAt is like dumpOf, but the parameter at is the time of the dump, and submitted is the time at which the
// rank submitted the allreduces that it waits for.
func dumpAt(at, submitted time.Duration, rank, size int, why string, waits ...string) []byte {
	r := recorder.New(100)
	for i := range 10 {
		r.Record(&trace.Operation{Records: []trace.Record{{Number: uint64(i + 1), Kind: message.Allreduce,
			Name: "grad/" + strconv.Itoa(i), Ended: 10 * time.Second}}})
	}
	about := recorder.About{Rank: rank, Size: size, Host: "here", PID: os.Getpid(), Epoch: 1, Why: why,
		At: at}
	for _, name := range waits {
		about.Pending = append(about.Pending, trace.Record{Kind: message.Allreduce, Name: name,
			Submitted: submitted})
	}
	text, err := recorder.Encode(r.Dump(about), 100)
	if err != nil {
		panic(err)
	}
	return text
}

// pretend runs a rank without an engine. It sends to hvdrun what an engine would send if all ranks except
// rank 1 waited for grad/7. do is one of
//
//	hang: ranks from 2 on do not answer; all ranks end on SIGQUIT and print that they got it
//	stall: rank 0 reports the stall twice; all ranks answer, and end on a signal
//	fail: ranks other than 1 send their dumps, and then rank 1 dies
func pretend(do string) error {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	key, err := secret.Parse(os.Getenv("HVD_SECRET"))
	if err != nil {
		return err
	}
	addr := net.JoinHostPort(os.Getenv("HOROVOD_GLOO_RENDEZVOUS_ADDR"),
		os.Getenv("HOROVOD_GLOO_RENDEZVOUS_PORT"))
	kv, err := store.Dial(ctx, addr, store.Config{Secret: key})
	if err != nil {
		return err
	}
	defer kv.Close()
	rank, err := strconv.Atoi(os.Getenv("HOROVOD_RANK"))
	if err != nil {
		return err
	}
	size, err := strconv.Atoi(os.Getenv("HOROVOD_SIZE"))
	if err != nil {
		return err
	}
	waits := []string{"grad/7"}
	if rank == 1 {
		waits = nil
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGQUIT, unix.SIGTERM)
	asked := make(chan struct{}, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	answering, stop := context.WithCancel(ctx)
	defer stop()
	if do != "hang" || rank < 2 {
		if err := kv.Set(ctx, "answers/"+strconv.Itoa(rank), nil); err != nil {
			return err
		}
		wg.Go(func() {
			joblink.New(kv, rank).Answer(answering, func(what string) []byte {
				select {
				case asked <- struct{}{}:
				default:
				}
				return dumpOf(rank, size, what, waits...)
			})
		})
	}
	stalled, err := recorder.EncodeStall(recorder.Stall{Name: "grad/7",
		Text: `allreduce "grad/7" has waited 5.0 s for rank 1`})
	if err != nil {
		return err
	}
	switch do {
	case "hang":
		fmt.Println("ready")
		fmt.Println("got", <-signals)
	case "stall":
		for r := range size { // wait for all ranks, because hvdrun does not ask ranks that start later
			if err := kv.Wait(ctx, "answers/"+strconv.Itoa(r)); err != nil {
				return err
			}
		}
		for i := 0; rank == 0 && i < 2; {
			switch err := joblink.New(kv, 0).Report(ctx, joblink.Stall, stalled); {
			case err == nil:
				i++
			case !strings.Contains(err.Error(), joblink.ErrNoLauncher.Error()):
				return err
			}
		}
		<-asked
		fmt.Println("asked")
		fmt.Println("got", <-signals)
	case "fail":
		if rank == 1 {
			if err := kv.Wait(ctx, "notified/0", "notified/2"); err != nil {
				return err
			}
			return unix.Kill(os.Getpid(), unix.SIGKILL)
		}
		if err := joblink.New(kv, rank).Report(ctx, joblink.Failure, dumpOf(rank, size, "rank 1 is dead",
			waits...)); err != nil {
			return err
		}
		return kv.Set(ctx, "notified/"+strconv.Itoa(rank), nil)
	}
	return nil
}

// watched is a running hvdrun whose ranks run pretend. It has the lines that hvdrun prints.
type watched struct {
	t     *testing.T
	lines chan string
	cmd   *exec.Cmd
	wait  func() (status int)
}

// kill sends signals to hvdrun.
func (w *watched) kill(signals ...os.Signal) {
	w.t.Helper()
	for _, s := range signals {
		if err := w.cmd.Process.Signal(s); err != nil {
			w.t.Fatal(err)
		}
	}
}

// ends waits until hvdrun ends, and checks its exit status.
func (w *watched) ends(want int) {
	w.t.Helper()
	if status := w.wait(); status != want {
		w.t.Errorf("got exit status %d, want %d", status, want)
	}
}

// watch starts an hvdrun whose ranks run pretend(do).
func watch(t *testing.T, do string, args ...string) *watched {
	t.Helper()
	self := testnet.Self(t)
	return watchCommand(t, append(args, self, "pretend", do)...)
}

// watchCommand starts hvdrun with the given arguments and reads its output.
func watchCommand(t *testing.T, args ...string) *watched {
	t.Helper()
	cmd := hvdrun(t, args...)
	in, out := io.Pipe()
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w := &watched{t: t, lines: make(chan string, 10000), cmd: cmd}
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(w.lines)
		for s := bufio.NewScanner(in); s.Scan(); {
			w.lines <- s.Text()
		}
	})
	w.wait = func() int {
		cmd.Wait()
		out.Close()
		wg.Wait()
		return cmd.ProcessState.ExitCode()
	}
	return w
}

// until reads the output up to and including the n-th line that contains text, and returns all lines that it
// has read. It fails the test if the output ends before that line.
func (w *watched) until(text string, n int) string {
	w.t.Helper()
	var b strings.Builder
	for line := range w.lines {
		b.WriteString(line + "\n")
		if strings.Contains(line, text) {
			if n--; n == 0 {
				return b.String()
			}
		}
	}
	w.t.Fatalf("got %s, want %q %d times more", &b, text, n)
	return ""
}

// rule is the first line and the last line of a report.
var rule = strings.Repeat("-", 72)

// quit starts a job in which ranks 0 and 1 answer and the others do not, sends SIGQUIT to hvdrun and returns
// hvdrun's report. If the two have not answered in time because the machine is busy, it asks again. It fails
// the test if hvdrun waits less than surveyTime for the others.
func quit(t *testing.T, np int, args ...string) (w *watched, report string) {
	t.Helper()
	w = watch(t, "hang", args...)
	w.until("<stdout>:ready", np)
	for tries := 1; ; tries++ {
		begun := time.Now()
		w.kill(unix.SIGQUIT)
		report = w.until(rule, 2)
		if took := time.Since(begun); took < surveyTime {
			t.Errorf("the report took %v, want at least the time limit for the ranks' answers", took)
		}
		if tries == 5 || strings.Contains(report, fmt.Sprintf("hvdrun: SIGQUIT: 2 of %d ranks answered", np)) {
			return w, report
		}
		<-time.After(5 * time.Second) // until then hvdrun forwards another signal to the ranks
	}
}

// quitAgain sends SIGQUIT until hvdrun forwards it to the ranks, which print that they have got it. hvdrun
// makes a report instead if more than 5 s have passed since the last one, as on a busy machine.
func (w *watched) quitAgain(ranks int) {
	w.t.Helper()
	for {
		w.kill(unix.SIGQUIT)
		for rules := 0; rules < 2; {
			line, ok := <-w.lines
			switch {
			case !ok:
				w.t.Fatalf("%d ranks have not got SIGQUIT", ranks)
			case line == rule:
				rules++
			case strings.Contains(line, "<stdout>:got quit"):
				if ranks--; ranks == 0 {
					return
				}
			}
		}
	}
}

// TestSurveyTime checks that hvdrun waits exactly surveyTime for ranks that do not answer, and that
// surveyTime is short enough for a report within 2 s.
func TestSurveyTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := store.NewHashStore(store.Limits{})
		defer kv.Close()
		r := reporterOf(t, kv, 2, "", time.Hour)
		begun := time.Now()
		text := r.survey(t.Context(), "SIGQUIT", nil)
		if took := time.Since(begun); took != surveyTime || took > 1500*time.Millisecond {
			t.Errorf("the survey took %v, want %v, and at most 1.5 s", took, surveyTime)
		}
		if !strings.Contains(text, "hvdrun: SIGQUIT: 0 of 2 ranks answered, in 1.5s\n") {
			t.Errorf("got %s", text)
		}
	})
}

// TestQuitPrintsReport checks that SIGQUIT makes hvdrun print a report and write it to files, even if some
// ranks do not answer. hvdrun must forward a second SIGQUIT within 5 s to the ranks.
func TestQuitPrintsReport(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dumps")
	w, report := quit(t, 4, "-np", "4", "--dump-dir", dir)
	testnet.WantText(t, report,
		"hvdrun: SIGQUIT: 2 of 4 ranks answered, in ",
		"Rank 1 has not called allreduce \"grad/7\", for which rank 0 has waited for 5.0 s; ranks 2 and 3 did not answer and may be missing too.\n"+
			"  rank 1 called it once before; the last call ended 10.0 s ago; no operation is pending; its last operation was allreduce \"grad/9\", which ended 10.0 s ago\n",
		"The report and the dumps are in "+dir+"\n",
	)
	// A process that waits for a signal is usually sleeping, but may be running for a moment.
	if !regexp.MustCompile(
		`\nRank 2 did not answer: process \d+ is (sleeping|running)\.\nRank 3 did not answer: process \d+ is (sleeping|running)\.\n`).MatchString(report) {
		t.Errorf("got %s, want the states of the processes of ranks 2 and 3", report)
	}
	left := map[string]string{"report.txt": "has not called", "report.json": `"waiting"`,
		"rank0.json": `"why": "dump"`, "rank1.json": `"rank": 1`}
	for name, want := range left {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s: got %.200s, error %v, want %q", name, text, err, want)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != len(left) {
		t.Errorf("got %v, error %v, want %d files", entries, err, len(left))
	}
	// A second SIGQUIT within 5 s is forwarded to the ranks.
	w.quitAgain(4)
	w.ends(0)
}

// TestStallPrintsReport checks that hvdrun prints one report about a stall that rank 0 reports twice.
func TestStallPrintsReport(t *testing.T) {
	w := watch(t, "stall", "-np", "3")
	report := w.until(rule, 2)
	testnet.WantText(t, report,
		`hvdrun: a stall: allreduce "grad/7" has waited 5.0 s for rank 1: 3 of 3 ranks answered, in `,
		"Rank 1 has not called allreduce \"grad/7\", for which ranks 0 and 2 have waited for 5.0 s.\n",
	)
	if strings.Contains(report, "are in") {
		t.Errorf("got %s, want no line about a folder", report)
	}
	w.kill(unix.SIGTERM)
	w.ends(143)
	for line := range w.lines {
		if strings.Contains(line, "stall") || line == rule {
			t.Errorf("got %q after the report", line)
		}
	}
}

// TestFailurePrintsReport checks that, after a failure, hvdrun first prints the root cause and then a report
// on what the ranks waited for.
func TestFailurePrintsReport(t *testing.T) {
	w := watch(t, "fail", "-np", "3")
	text := w.until(rule, 4)
	w.ends(137)
	_, report, found := strings.Cut(text,
		rule+"\nhvdrun: what the ranks did when the job failed, from 2 of 3 ranks\n")
	if !found || strings.Index(text, "Root cause") > strings.Index(text, "what the ranks did when") {
		t.Fatalf("got %s, want a report after the root cause", text)
	}
	testnet.WantText(t, report,
		"Ranks 0 and 2 have waited for allreduce \"grad/7\" for 5.0 s, perhaps because it was not called by rank 1, which did not answer.\n",
		"Rank 1 did not answer: killed by SIGKILL, which hvdrun did not send",
	)
}

// TestReportsOfOtherPrograms runs ranks that do not use gohvd. After a failure hvdrun must print only the
// root cause. On SIGQUIT it must report what it knows about their processes.
func TestReportsOfOtherPrograms(t *testing.T) {
	_, stderr, status := output(t, "-np", "2", "sh", "-c", "exit 3")
	if status != 3 || strings.Count(stderr, rule) != 2 {
		t.Errorf("got exit status %d and %s, want only the root cause", status, stderr)
	}
	w := watchCommand(t, "-np", "2", "--verbose", "sh", "-c",
		`[ $HOROVOD_RANK = 0 ] || exit 0; echo process $$; kill -STOP $$`)
	var said string
	// The lines may come in any order.
	for _, line := range []string{"rank 1: exit status 0", "rank 0: started as process ",
		"<stdout>:process "} {
		if !strings.Contains(said, line) {
			said += w.until(line, 1)
		}
	}
	_, pid, _ := strings.Cut(said, "<stdout>:process ")
	pid, _, _ = strings.Cut(pid, "\n")
	testnet.Eventually(t, "rank 0 is stopped", func() bool {
		stat, err := os.ReadFile("/proc/" + pid + "/stat")
		return err == nil && bytes.Contains(stat, []byte(") T "))
	})
	w.kill(unix.SIGQUIT)
	report := w.until(rule, 2)
	testnet.WantText(t, report,
		"hvdrun: SIGQUIT: 0 of 2 ranks answered", "Rank 0 did not answer: process "+pid+
			" is stopped by a signal.\n", "Rank 1 did not answer: exit status 0, at ",
	)
	w.kill(unix.SIGTERM, unix.SIGINT) // the second signal kills the stopped process
	w.wait()
}

// TestQuitOnSeveralHosts checks that hvdrun also asks ranks on other hosts. About the process of such a rank,
// the report must say only that it has not ended.
func TestQuitOnSeveralHosts(t *testing.T) {
	w, report := quit(t, 4, "-H", "h1:2,h2:2", "--agent", "env AT={host}")
	testnet.WantText(t, report, "hvdrun: SIGQUIT: 2 of 4 ranks answered",
		" on host h2 has not ended.\nRank 3 did not answer: process ")
	w.quitAgain(4)
	w.ends(0)
}

// TestJobEndsWhileRanksAreAsked ends a job while hvdrun asks its ranks. hvdrun must not wait for their
// answers.
func TestJobEndsWhileRanksAreAsked(t *testing.T) {
	w := watch(t, "hang", "-np", "3")
	w.until("<stdout>:ready", 3)
	w.kill(unix.SIGQUIT, unix.SIGTERM)
	w.ends(143)
	w.until(rule, 2) // the report has what was known when the job ended
}

// reporterOf returns the reporter of a job with the given store. It is closed when the test has ended.
func reporterOf(t *testing.T, kv *store.HashStore, size int, dir string, period time.Duration) *reporter {
	t.Helper()
	r, err := newReporter(kv, nil, size, dir, period)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	return r
}

// connected returns the reporter of a job with two ranks, and a client of its store, as the ranks have it. It
// closes all of them when the test has ended.
func connected(t *testing.T) (*reporter, *store.Client) {
	t.Helper()
	kv := store.NewHashStore(store.Limits{})
	t.Cleanup(func() { kv.Close() })
	server, err := store.Serve("127.0.0.1:0", kv, store.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	r, err := newReporter(kv, server, 2, "", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	rank, err := store.Dial(testnet.Context(t), server.Addr(), store.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { rank.Close() })
	return r, rank
}

// TestNamesInNodeReport checks that a report leaves out a state with a name that is not that of the process.
func TestNamesInNodeReport(t *testing.T) {
	r := &nodeReporter{reporter: &reporter{size: 3}, nodes: &launch.Nodes{Servers: 1, Workers: 1}}
	for name, want := range map[string]bool{"server 0": true, "server": true, "server 1": false, "worker": false,
		"\x1b[2J": false} {
		text, err := (&trace.Node{Name: name, Role: name}).Encode()
		if err != nil {
			t.Fatal(err)
		}
		if _, got := r.read(map[int][]byte{1: text})[1]; got != want {
			t.Errorf("the report has a state of process 1 with the name %q: %v, want %v", name, got, want)
		}
	}
}

// TestVerdictOfEndedRanks checks that a verdict that a rank has sent before its end is received, and that the
// reporter does not wait for one if no rank is connected any more.
func TestVerdictOfEndedRanks(t *testing.T) {
	for _, sends := range []bool{true, false} {
		r, rank := connected(t)
		ctx := testnet.Context(t)
		var end sync.WaitGroup
		end.Go(func() {
			if sends {
				want := joblink.Verdict{Epoch: 1, Ranks: []topo.Rank{0}, Reason: "it is gone"}
				if err := joblink.New(rank, 1).ReportVerdict(ctx, want); err != nil {
					t.Error(err)
				}
			}
			rank.Close()
		})
		v, err := r.verdict(ctx, true)
		end.Wait()
		if sends && (err != nil || v.Reason != "it is gone") {
			t.Errorf("got %+v, %v, want the verdict", v, err)
		}
		if !sends && !errors.Is(err, store.ErrClosed) {
			t.Errorf("without a verdict: got %v, want %v", err, store.ErrClosed)
		}
	}
}

// TestStallsAreReportedOnce checks that each stall is reported once, and that there is one report at a time.
// If the report of one stall shows another stall too, that stall must not be reported again.
func TestStallsAreReportedOnce(t *testing.T) {
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	const size = 2
	r := reporterOf(t, kv, size, "", time.Hour)
	sendStall := func(name string) {
		body, err := recorder.EncodeStall(recorder.Stall{Name: name, Text: "stalled " + name + "\x1b"})
		if err != nil {
			t.Fatal(err)
		}
		r.handleMessage(t.Context(), 0, joblink.Stall, body)
	}
	expectAlarm := func(want string) {
		t.Helper()
		select {
		case got := <-r.alarms:
			if got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		default:
			if want != "" {
				t.Errorf("got nothing, want %q", want)
			}
		}
	}
	advancePeriod := func() { // moves the time of the last report two periods back
		r.mu.Lock()
		defer r.mu.Unlock()
		r.lastStall = r.lastStall.Add(-2 * time.Hour)
	}
	sendStall("a")
	expectAlarm("a stall: stalled a\x1b")
	sendStall("b") // less than a period after the last report
	expectAlarm("")
	// This report shows that the ranks wait for b and c.
	ctx, cancel := context.WithCancel(testnet.Context(t))
	var wg sync.WaitGroup
	for rank := range size {
		wg.Go(func() {
			joblink.New(kv, rank).Answer(ctx, func(string) []byte { return dumpOf(rank, size, "", "b", "c") })
		})
	}
	text := r.survey(ctx, "a stall: stalled a\x1b", []string{"x", "y"})
	cancel()
	wg.Wait()
	if !strings.Contains(text, "hvdrun: a stall: stalled a\\x1b: 2 of 2 ranks answered") {
		t.Errorf("got %s", text)
	}
	advancePeriod()
	sendStall("b")
	sendStall("c")
	expectAlarm("")
	sendStall("d")
	expectAlarm("a stall: stalled d\x1b")
	advancePeriod()
	r.handleMessage(t.Context(), 0, joblink.Stall, []byte("x"))
	r.handleMessage(t.Context(), 0, "what", nil)
	expectAlarm("")
	// The report about e has not been printed yet. So the message about f is dropped, and handling it must
	// not block.
	sendStall("e")
	advancePeriod()
	sendStall("f")
	expectAlarm("a stall: stalled e\x1b")
	expectAlarm("")
}

// TestEachStallIsReported checks that a new stall is reported in two cases. In the first, an earlier stall
// was about a tensor of the same name, because names recur in each step. In the second, a report after
// SIGQUIT has already shown the stall. No stall must be reported again while it lasts.
func TestEachStallIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const (
			size   = 3
			period = time.Minute
		)
		kv := store.NewHashStore(store.Limits{})
		defer kv.Close()
		r := reporterOf(t, kv, size, "", period)
		begun := time.Now()
		var (
			mu    sync.Mutex
			since time.Duration // when ranks 0 and 2 began to wait; 0 if they do not wait
			mute  []int         // ranks that do not answer
			asked int
			wg    sync.WaitGroup
		)
		ctx, cancel := context.WithCancel(t.Context())
		defer wg.Wait()
		defer cancel()
		for rank := range size {
			wg.Go(func() {
				joblink.New(kv, rank).Answer(ctx, func(string) []byte {
					mu.Lock()
					defer mu.Unlock()
					asked++
					switch {
					case slices.Contains(mute, rank):
						return nil
					case rank == 1 || since == 0:
						return dumpOf(rank, size, "")
					}
					return dumpAt(time.Since(begun), since, rank, size, "", "grad/7", "grad/8")
				})
			})
		}
		set := func(f func()) {
			mu.Lock()
			defer mu.Unlock()
			f()
		}
		begins := func() { set(func() { since = time.Since(begun) }) }
		ends := func() { set(func() { since = 0 }) }
		// expectReports sends the messages about both stalls as rank 0 would. It checks that the number of
		// reports that they trigger equals want.
		expectReports := func(want int) {
			t.Helper()
			got := 0
			for _, name := range []string{"grad/7", "grad/8"} {
				body, err := recorder.EncodeStall(recorder.Stall{Name: name, Text: name + " stalled"})
				if err != nil {
					t.Fatal(err)
				}
				if err := joblink.New(kv, 0).Report(ctx, joblink.Stall, body); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				time.Sleep(2 * surveyTime) // hvdrun may be waiting for a rank
				select {
				case why := <-r.alarms:
					r.survey(ctx, why, nil)
					got++
				default:
				}
			}
			if got != want {
				t.Errorf("%v: got %d reports, want %d", time.Since(begun), got, want)
			}
		}
		synctest.Wait() // waits until the reporter is ready for messages

		begins()
		r.survey(ctx, "SIGQUIT", nil)
		ends()
		for range 2 {
			time.Sleep(period)
			begins()
			r.survey(ctx, "SIGQUIT", nil)
			time.Sleep(period)
			expectReports(1)
			for range 3 {
				time.Sleep(period)
				set(func() { asked = 0 })
				expectReports(0)
				set(func() {
					if asked > size {
						t.Errorf("the ranks were asked %d times for a stall that lasts, want at most %d",
							asked, size)
					}
				})
			}
			ends()
		}
		time.Sleep(period)
		expectReports(0) // the stall has ended
		time.Sleep(period)
		begins()
		expectReports(0) // the waits belong to a later step and have just begun
		set(func() { mute = []int{2} })
		time.Sleep(period)
		expectReports(1)
		time.Sleep(period)
		expectReports(0)
		// Now other waiting ranks answer than before. It is still the same stall.
		ends()
		time.Sleep(period)
		begins()
		set(func() { mute = nil })
		time.Sleep(period)
		expectReports(1)
		for _, mutes := range [][]int{{2}, {0}, {2}, {0, 2}, {0}} {
			set(func() { mute = mutes })
			time.Sleep(period)
			expectReports(0)
		}
	})
}

// TestStallOfSilentRanks checks that a stall is reported only once even if none of the waiting ranks answers.
func TestStallOfSilentRanks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := store.NewHashStore(store.Limits{})
		defer kv.Close()
		r := reporterOf(t, kv, 2, "", time.Minute)
		body, err := recorder.EncodeStall(recorder.Stall{Name: "grad/7", Text: "grad/7 stalled"})
		if err != nil {
			t.Fatal(err)
		}
		for i := range 3 {
			r.handleMessage(t.Context(), 0, joblink.Stall, body)
			select {
			case why := <-r.alarms:
				if i > 0 {
					t.Errorf("the stall is reported again: %s", why)
				}
				r.survey(t.Context(), why, nil)
			default:
				if i == 0 {
					t.Error("the stall is not reported")
				}
			}
			time.Sleep(2 * time.Minute)
		}
	})
}

// TestDumpsOfFailures checks that the reporter limits the total size of the dumps that it keeps after a
// failure. If a dump is malformed, the report must say so.
func TestDumpsOfFailures(t *testing.T) {
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	r := reporterOf(t, kv, 4, "", time.Hour)
	good, other := dumpOf(0, 4, "", "grad/7"), dumpOf(1, 4, "")
	r.handleMessage(t.Context(), 0, joblink.Failure, []byte("replaced"))
	r.handleMessage(t.Context(), 0, joblink.Failure, good)
	r.handleMessage(t.Context(), 1, joblink.Failure, other)
	r.handleMessage(t.Context(), 2, joblink.Failure, []byte("\x1f\x8bnothing"))
	r.handleMessage(t.Context(), 4, joblink.Failure, good) // the job has no rank 4
	if want := len(good) + len(other) + 9; r.kept != want || len(r.failures) != 3 {
		t.Errorf("got %d bytes of %d ranks, want %d of 3", r.kept, len(r.failures), want)
	}
	r.handleMessage(t.Context(), 3, joblink.Failure, make([]byte, maxFailureBytes-r.kept+1))
	if r.failures[3] != nil {
		t.Error("a dump was kept that exceeds the limit")
	}
	r.handleMessage(t.Context(), 3, joblink.Failure, make([]byte, maxFailureBytes-r.kept))
	if r.failures[3] == nil {
		t.Error("a dump within the limit was not kept")
	}
	delete(r.failures, 3)
	got := r.epilogue([]string{"a", "b", "c", "exit status 7"}, nil, true)
	testnet.WantText(t, got,
		"from 2 of 4 ranks", "Rank 1 has not called allreduce \"grad/7\"",
		"Rank 2 did not answer: cannot decode its dump: recorder: malformed dump",
		"Rank 3 did not answer: exit status 7.",
	)
	// Dumps that have arrived before the job ends must be in the report even if the reporter has not handled
	// them yet.
	late := reporterOf(t, kv, 4, "", time.Hour)
	ctx := testnet.Context(t)
	testnet.Eventually(t, "the launcher listens", func() bool { return kv.Waits() == 2 })
	late.mu.Lock()
	for rank := range 4 {
		if err := joblink.New(kv, rank).Report(ctx, joblink.Failure,
			dumpOf(rank, 4, "", "grad/7")); err != nil {
			t.Fatal(err)
		}
	}
	late.mu.Unlock()
	if got := late.epilogue(nil, nil, true); !strings.Contains(got, "from 4 of 4 ranks") {
		t.Errorf("got %s, want the dumps of all ranks", got)
	}
	quiet := reporterOf(t, kv, 1, "", time.Hour)
	quiet.handleMessage(t.Context(), 0, joblink.Failure, dumpOf(0, 1, ""))
	if got := quiet.epilogue(nil, nil, true); got != "" {
		t.Errorf("the rank waits for nothing: got %s, want no report", got)
	}
}

// TestReportsInTrouble checks that the report has a warning if the folder for dumps is not writable, and
// another warning if the store is gone.
func TestReportsInTrouble(t *testing.T) {
	kv := store.NewHashStore(store.Limits{})
	file := filepath.Join(t.TempDir(), "file")
	testnet.WriteFile(t, file, "")
	r := reporterOf(t, kv, 2, file, time.Hour)
	kv.Close()
	testnet.Eventually(t, "the launcher no longer listens", func() bool { return r.ranks.Err() != nil })
	got := r.survey(testnet.Context(t), "SIGQUIT", []string{"runs"})
	testnet.WantText(t, got, "hvdrun: warning: report: ", "store is closed",
		"joblink: receiving from the ranks", file, "Rank 0 did not answer: runs.\nRank 1 did not answer.\n")
}

// TestLongReportsAreCut checks that hvdrun prints only the first part of a long report but writes the
// complete report to files.
func TestLongReportsAreCut(t *testing.T) {
	dir := t.TempDir()
	r := &reporter{size: 1, dir: dir}
	f := &analysis.Findings{}
	for i := range 300 {
		f.Waiting = append(f.Waiting, analysis.Waiting{Kind: message.Allreduce,
			Names: []string{strconv.Itoa(i)}, NumNames: 1, Ranks: []int{0}})
		for rank := range 12 {
			f.Waiting[i].Missing = append(f.Waiting[i].Missing, analysis.Missing{Rank: rank})
		}
	}
	lines := strings.Split(r.text("title", f, nil, nil), "\n")
	at := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, "... (") })
	if len(lines) > maxReportLines+6 || at != maxReportLines+1 {
		t.Errorf("got %d lines, with the line about further lines at %d", len(lines), at)
	}
	full, err := os.ReadFile(filepath.Join(dir, "report.txt"))
	if n := bytes.Count(full, []byte("\n")); err != nil || n <= maxReportLines {
		t.Errorf("got %d lines in the file, error %v, want all", n, err)
	}
	var again analysis.Findings
	if text, err := os.ReadFile(filepath.Join(dir, "report.json")); err != nil ||
		json.Unmarshal(text, &again) != nil || len(again.Waiting) != 300 {
		t.Errorf("got %.100s, error %v", text, err)
	}
}
