package view

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/timeline/report"
)

// records returns the operations of the timelines of a job as its ranks would record them. Only the given
// ranks are recorded.
func (j testJob) records(t *testing.T, ranks ...int) (all map[int]*live.Records, want *report.Report) {
	t.Helper()
	job, bad, err := report.Open([]string{j.write(t, t.TempDir())})
	if err != nil || bad != nil {
		t.Fatal(err, bad)
	}
	recorders := make([]*live.Recorder, j.ranks)
	for rank := range recorders {
		recorders[rank] = live.NewRecorder()
	}
	want, _, err = job.Examine(report.Options{}, func(rank int, o *trace.Operation) {
		op := *o
		op.Arrivals = nil // the files have none
		recorders[rank].Record(&op)
	})
	if err != nil {
		t.Fatal(err)
	}
	all = make(map[int]*live.Records)
	for _, rank := range ranks {
		r := recorders[rank].Since(0)
		r.Rank, r.Size, r.Host, r.Epoch, r.Clock = rank, j.ranks, "h", 1, trace.Clock{Domain: "d"}
		all[rank] = r
	}
	answers := make(map[int][]byte) // as the ranks send them
	for rank, r := range all {
		answers[rank] = r.Encode()
	}
	if all, err = live.DecodeRecords(live.EncodeAnswers(answers)); err != nil {
		t.Fatal(err)
	}
	return all, want
}

// part returns the entries from one to another of all ranks.
func part(all map[int]*live.Records, from, to int) map[int]*live.Records {
	some := make(map[int]*live.Records)
	for rank, r := range all {
		p := *r
		p.First, p.Entries = r.First+uint64(from), slices.Clone(r.Entries[from:to])
		some[rank] = &p
	}
	return some
}

func newLive(t *testing.T, size int) *Live {
	t.Helper()
	l, err := NewLive("a job", report.Options{}, size)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// update calls Update and does not wait until the next analysis may begin.
func (l *Live) update(t *testing.T, size int, s State, all map[int]*live.Records) {
	t.Helper()
	l.next = time.Time{}
	if err := l.Update(size, s, all); err != nil {
		t.Fatal(err)
	}
}

// Operations that are recorded in several parts give the same report as the timelines.
func TestRecordsGiveTheReportOfTimelines(t *testing.T) {
	all, want := straggler.records(t, 0, 1, 2, 3)
	l := newLive(t, 4)
	n := len(all[0].Entries)
	for from := 0; from < n; from += 30 {
		l.update(t, 4, State{}, part(all, from, min(from+30, n)))
	}
	if known := l.Known(2); known != all[2].Next() {
		t.Errorf("got the next entry %d, want %d", known, all[2].Next())
	}
	run, _ := l.at(0)
	got := run.Report()
	for what, pair := range map[string][2]any{"lateness": {got.Lateness, want.Lateness},
		"steps": {got.StepList, want.StepList}, "phases": {got.Phases, want.Phases},
		"tensors": {got.TensorTable, want.TensorTable}} {
		if !reflect.DeepEqual(pair[0], pair[1]) {
			t.Errorf("%s: got\n%+v, want\n%+v", what, pair[0], pair[1])
		}
	}
	if len(got.Problems) > 0 {
		t.Errorf("got the problems %q", got.Problems)
	}
}

// If entries are missing, or another epoch has begun, only the later entries are used. The number and the
// time of the entries are limited.
func TestOldEntriesAreForgotten(t *testing.T) {
	all, _ := straggler.records(t, 0, 1, 2, 3)
	l := newLive(t, 4)
	count := func() (n int64) {
		run, _ := l.at(0)
		return run.report.Operations
	}
	l.update(t, 4, State{}, part(all, 0, 30))
	l.update(t, 4, State{}, part(all, 40, 50))
	if got := count(); got != 40 {
		t.Errorf("after a gap: got %d operations, want 40", got)
	}
	only := func(rank int) map[int]*live.Records { return map[int]*live.Records{rank: all[rank]} }
	next := part(only(0), 0, 5)
	next[0].Epoch = 2
	l.update(t, 4, State{}, next)
	if got := count(); got != 5 {
		t.Errorf("in another epoch: got %d operations, want 5", got)
	}
	l.update(t, 4, State{}, part(only(1), 50, 60))
	if got := count(); got != 5 {
		t.Errorf("after an answer of the earlier epoch: got %d operations, want 5", got)
	}
	many := part(all, 0, 1)
	for _, r := range many {
		for i := range 2 * int(liveWindow/time.Second) {
			op := *all[0].Entries[0].Operation
			op.Records = slices.Clone(op.Records)
			op.Records[0].Ended += time.Duration(i) * time.Second
			r.Entries = append(r.Entries, live.Entry{Operation: &op})
		}
		r.Epoch = 3
	}
	l.update(t, 4, State{}, many)
	if got, want := count(), 4*(int64(liveWindow/time.Second)+1); got != want {
		t.Errorf("of two minutes: got %d operations, want %d", got, want)
	}
	for _, r := range many {
		r.Epoch, r.Entries = 4, nil
		for i := range 4 * maxLiveBytes / (4 << 10) / 4 {
			op := *all[0].Entries[0].Operation
			op.Records = slices.Clone(op.Records)
			op.Records[0].Ended += time.Duration(i)
			op.Records[0].Name = strings.Repeat("x", 4<<10)
			r.Entries = append(r.Entries, live.Entry{Operation: &op})
		}
	}
	l.room = maxLiveBytes // whatever the analyses before have taken
	l.update(t, 4, State{}, many)
	size := l.bytes()
	if size > maxLiveBytes+4*8<<10 || size < maxLiveBytes/2 {
		t.Errorf("got entries of %d bytes, want at most %d", size, maxLiveBytes)
	}
}

// All ranks keep the entries of the same time, whatever their clocks show. A rank that is not asked any more
// is forgotten. If a rank that is asked has had no room, all begin again.
func TestRanksKeepTheSameTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLive(t, 3)
		begun := time.Now()
		// second lets a second pass in which ranks have begun a step each. Before it, rank 0 has lost some
		// entries.
		second := func(lost uint64, ranks ...int) {
			t.Helper()
			time.Sleep(time.Second)
			all := make(map[int]*live.Records)
			for _, rank := range ranks {
				at := time.Since(begun) + time.Duration(rank)*time.Hour
				all[rank] = &live.Records{Rank: rank, First: l.Known(rank), Entries: []live.Entry{
					{Step: &live.Mark{At: at}}}}
			}
			if all[0] != nil {
				all[0].First += lost
			}
			l.update(t, 3, State{}, all)
		}
		check := func(when string, want map[int]int) {
			t.Helper()
			got := make(map[int]int)
			for rank, r := range l.ranks {
				got[rank] = len(r.Entries)
			}
			if !maps.Equal(got, want) {
				t.Errorf("%s: got entries of ranks %v, want %v", when, got, want)
			}
		}
		for range 10 {
			second(0, 0, 1, 2)
		}
		for range 55 {
			second(0, 0, 1)
		}
		check("after 65 s", map[int]int{0: 61, 1: 61, 2: 6})
		for range 10 {
			second(0, 0, 1)
		}
		check("rank 2 has answered 65 s ago", map[int]int{0: 61, 1: 61})
		run, _ := l.at(0)
		if got := run.report.Missing; !slices.Equal(got, []int{2}) {
			t.Errorf("got the missing ranks %v, want 2", got)
		}
		second(5, 0, 1)
		check("rank 0 has lost entries", map[int]int{0: 1, 1: 1})
		second(0, 1, 2)
		second(0, 1, 2)
		second(5, 0, 1)
		check("rank 0 has not been asked for a while", map[int]int{0: 1, 1: 4, 2: 2})
	})
}

// The operations are analysed only if there are others, and, before the end of the job, not soon after an
// analysis.
func TestAnalysisIsLimited(t *testing.T) {
	all, _ := straggler.records(t, 0, 1, 2, 3)
	l := newLive(t, 4)
	update := func(s State, all map[int]*live.Records) (operations int64, version int) {
		t.Helper()
		if err := l.Update(4, s, all); err != nil {
			t.Fatal(err)
		}
		run, version := l.at(0)
		return run.report.Operations, version
	}
	l.next = time.Time{}
	n, first := update(State{}, part(all, 0, 10))
	if n != 40 || !l.next.After(time.Now().Add(-time.Minute)) {
		t.Errorf("got %d operations, and the next analysis at %v", n, l.next)
	}
	l.rest(maxRestTime)
	if rest := time.Until(l.next); rest < 2*maxRestTime || l.room != minLiveBytes {
		t.Errorf("after a long analysis: got a pause of %v and room for %d bytes, want %d", rest, l.room, minLiveBytes)
	}
	for range 20 {
		l.rest(maxRestTime)
	}
	if rest := time.Until(l.next); rest < 8*maxRestTime {
		t.Errorf("after many long analyses: got a pause of %v", rest)
	}
	for range 60 {
		l.rest(time.Microsecond)
	}
	if l.room != maxLiveBytes {
		t.Errorf("after short ones: got room for %d bytes, want %d", l.room, maxLiveBytes)
	}
	l.next = time.Time{}
	if _, version := update(State{}, nil); version != first {
		t.Errorf("without new operations: got version %d, want %d", version, first)
	}
	l.next = time.Now().Add(time.Hour)
	if n, version := update(State{}, part(all, 10, 20)); n != 40 || version != first {
		t.Errorf("soon: got %d operations and version %d, want 40 and %d", n, version, first)
	}
	l.next = time.Time{}
	if n, version := update(State{}, nil); n != 80 || version != first+1 {
		t.Errorf("later: got %d operations and version %d, want 80 and %d", n, version, first+1)
	}
	l.next, l.room = time.Now().Add(time.Hour), l.bytes()/4 // as after a long analysis
	if n, version := update(State{Ended: true}, part(all, 20, 30)); n != 120 || version != first+2 {
		t.Errorf("at the end: got %d operations and version %d, want 120 and %d", n, version, first+2)
	}
}

// The row of the program shows its ranges and waits, and has none if nothing was recorded.
func TestProgramRow(t *testing.T) {
	all, _ := straggler.records(t, 0, 1, 2, 3)
	o := all[2].Entries[40].Operation.Records[0]
	for i, s := range []trace.Span{{Kind: trace.Range, Name: "data", Begun: o.Submitted - 5000, End: o.Submitted},
		{Kind: trace.Wait, Name: "layer0.weight", Begun: o.Submitted, End: o.Ended}} {
		all[2].Entries = slices.Insert(all[2].Entries, 41+i, live.Entry{Span: &s})
	}
	l := newLive(t, 4)
	l.update(t, 4, State{}, all)
	run, _ := l.at(0)
	labels, err := run.Labels("rank:2")
	if err != nil || labels[0].Text != "program" || len(labels) != 1+straggler.tensors {
		t.Errorf("rank 2: got the rows %+v, %v, want the program and its tensors", labels, err)
	}
	if labels, err := run.Labels("rank:1"); err != nil || len(labels) != straggler.tensors {
		t.Errorf("rank 1: got the rows %+v, %v, want its tensors", labels, err)
	}
	sums := covered(t, run, "rank:2", "", 8)
	for phase, want := range map[phase]time.Duration{inRange: 5000, waitsForResult: o.Ended - o.Submitted} {
		if got := sums[[2]int{0, int(phase)}]; math.Abs(got-micros(want)) > 0.01 {
			t.Errorf("got %g us of %s, want %g us", got, phaseNames[phase], micros(want))
		}
	}
	if _, err := run.Find("rank:2", 0, "", micros(o.Submitted-run.Begin)); err == nil {
		t.Error("the row of the program has an operation")
	}
}

// client returns a browser that has access to a page, and the address of the page.
func client(t *testing.T, s *Server) (*http.Client, string) {
	t.Helper()
	c := testnet.Browser(t)
	a, err := c.Get(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	a.Body.Close()
	base, _, _ := strings.Cut(s.URL(), "?")
	return c, base
}

// The job is watched only while a page reads the stream. A state names the data that belong to it, as long as
// they are kept.
func TestStream(t *testing.T) {
	all, _ := straggler.records(t, 0, 1, 2, 3)
	l := newLive(t, 4)
	c, base := client(t, serveLive(t, l))
	short, stop := context.WithCancel(t.Context())
	stop()
	if _, _, err := l.Watched(short); err == nil {
		t.Error("the job is watched, but there is no page")
	}
	a, err := c.Get(base + "live")
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	if _, _, err := l.Watched(short); err == nil {
		t.Error("the job is watched after its end")
	}
	watched, cancel, err := l.Watched(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer cancel()
	lines := bufio.NewReader(a.Body)
	next := func() (s State) {
		t.Helper()
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			if text, is := strings.CutPrefix(line, "data: "); is {
				if err := json.Unmarshal([]byte(text), &s); err != nil {
					t.Fatal(err)
				}
				return s
			}
		}
	}
	operations := func(run string) (int64, int) {
		t.Helper()
		a, err := c.Get(base + "data/report?run=" + run)
		if err != nil {
			t.Fatal(err)
		}
		defer a.Body.Close()
		var r report.Report
		if a.StatusCode == http.StatusOK {
			err = json.NewDecoder(a.Body).Decode(&r)
		}
		if err != nil {
			t.Fatal(err)
		}
		return r.Operations, a.StatusCode
	}
	first := next()
	l.update(t, 4, State{Verdict: "one"}, part(all, 0, 10))
	second := next()
	l.update(t, 4, State{Verdict: "two"}, part(all, 10, 20))
	third := next()
	for i, s := range []State{first, second, third} {
		if n, status := operations(s.Run); n != int64(40*i) || status != http.StatusOK {
			t.Errorf("state %d: got %d operations and status %d, want %d", i, n, status, 40*i)
		}
	}
	if n, _ := operations(""); n != 80 || second.Verdict != "one" || third.Verdict != "two" {
		t.Errorf("got %d operations and the states %+v, %+v", n, second, third)
	}
	versions := func() {
		for range maxMoments {
			l.stale = true
			l.update(t, 4, State{}, nil)
		}
	}
	versions()
	for _, run := range []string{second.Run, "x", first.Run + "00"} {
		if _, status := operations(run); status != http.StatusGone {
			t.Errorf("%s: got status %d, want %d", run, status, http.StatusGone)
		}
	}
	l.update(t, 4, State{Verdict: "last"}, part(all, 20, 30))
	last := next()
	for last.Verdict != "last" {
		last = next()
	}
	a.Body.Close()
	select {
	case <-watched.Done():
	case <-time.After(time.Minute):
		t.Error("the job is still watched a minute after the page has gone")
	}
	l.Followed(t.Context())
	// The page may still show what it has received last.
	if n := len(l.moments); n != 1 {
		t.Errorf("got %d versions while no page follows, want 1", n)
	}
	versions()
	if n, status := operations(last.Run); n != 120 || status != http.StatusOK {
		t.Errorf("got %d operations and status %d of the last version of the page, want 120", n, status)
	}
}

// relay passes connections on to an address until cut is called, and again after restore.
type relay struct {
	net.Listener
	mu   sync.Mutex
	off  bool
	open []net.Conn
}

func relayTo(t *testing.T, address string) *relay {
	t.Helper()
	l := testnet.Listen(t)
	r := &relay{Listener: l}
	t.Cleanup(func() {
		l.Close()
		r.set(true)
	})
	go func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			to, err := net.Dial("tcp", address)
			r.mu.Lock()
			if err != nil || r.off {
				from.Close()
			} else {
				go io.Copy(from, to)
				go io.Copy(to, from)
			}
			r.open = append(r.open, from, to)
			r.mu.Unlock()
		}
	}()
	return r
}

// set cuts the connections, and refuses new ones, or allows them.
func (r *relay) set(off bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.off = off
	for _, c := range r.open {
		if off && c != nil {
			c.Close()
		}
	}
}

// The page of a running job survives that the connection to hvdrun breaks.
func TestPageConnectsAgain(t *testing.T) {
	all, _ := straggler.records(t, 0, 1, 2, 3)
	l := newLive(t, 4)
	url := serveLive(t, l).URL()
	address := strings.TrimPrefix(url[:strings.LastIndex(url, "/")], "http://")
	r := relayTo(t, address)
	p := openTab(t, strings.Replace(url, address, r.Addr().String(), 1))
	p.ready()
	l.update(t, 4, State{Verdict: "before"}, part(all, 0, 60))
	p.wait(`document.getElementById("numbers").innerText.includes("240 operations")`)
	r.set(true)
	p.wait(`document.getElementById("live-note").textContent === "The connection to hvdrun is broken. Trying again."`)
	l.update(t, 4, State{Verdict: "after", Timelines: "4 of 4 ranks write a timeline", Epochs: []string{"Since 1: 4 ranks", "older"}},
		part(all, 60, len(all[0].Entries)))
	r.set(false)
	p.wait(`document.getElementById("live-verdict").innerText === "after" && document.getElementById("numbers").innerText.includes("480 operations")`)
	p.wait(`document.getElementById("live-timelines").innerText + document.getElementById("live-epochs").innerText === "4 of 4 ranks write a timelineSince 1: 4 ranks\nolder"`)
	p.wait(`document.getElementById("live-note").textContent.startsWith("The numbers below")`)
}

// A page that hears nothing of hvdrun, because hvdrun is stopped, says so.
func TestPageOfAStoppedHvdrun(t *testing.T) {
	l := newLive(t, 4)
	p := openTab(t, serveLive(t, l).URL())
	p.ready()
	p.text(`(() => {
		const real = setTimeout;
		globalThis.silence = 100;
		globalThis.setTimeout = (f, ms) => real(f, ms === 10e3 ? silence : ms);
		return "";
	})()`)
	l.update(t, 4, State{Verdict: "before"}, nil)
	p.wait(`document.getElementById("live-note").textContent.startsWith("hvdrun has sent nothing for 10 s")`)
	p.text(`(globalThis.silence = 1e9, "")`)
	l.update(t, 4, State{Verdict: "after"}, nil)
	p.wait(`document.getElementById("live-note").textContent.startsWith("The numbers below")`)
}

// The page goes on if the cell that is read is not in the next state.
func TestCellThatDisappears(t *testing.T) {
	all, _ := straggler.records(t, 0, 1, 2, 3)
	l := newLive(t, 4)
	p := openTab(t, serveLive(t, l).URL())
	p.ready()
	l.update(t, 4, State{Verdict: "many steps"}, part(all, 0, len(all[0].Entries)))
	p.wait(`document.getElementById("numbers").innerText.includes("480 operations")`)
	p.still()
	p.text(`document.getElementById("heat").focus() ?? ""`)
	p.do(chromedp.KeyEvent(strings.Repeat(kb.ArrowRight, 40)))
	l.ranks = make(map[int]*recorded)
	l.update(t, 4, State{Verdict: "fewer steps"}, part(all, 0, 60))
	p.wait(`document.getElementById("numbers").innerText.includes("240 operations") && document.getElementById("live-note").textContent !== ""`)
	p.still()
	if got := p.text(`document.getElementById("live-note").textContent`); !strings.HasPrefix(got, "The numbers below") {
		t.Errorf("the page says %q", got)
	}
	p.noFaults()
}

// The page follows a running job, shows in red which rank is missing, pauses, and stays with the verdict.
func TestPageOfARunningJob(t *testing.T) {
	all, want := straggler.records(t, 0, 1, 2, 3)
	l := newLive(t, 4)
	p := openTab(t, serveLive(t, l).URL())
	p.ready()
	text := func(id string) string { return p.text(`document.getElementById("` + id + `").innerText`) }
	l.update(t, 4, State{Verdict: "Measuring for 5 s.", Columns: []string{"RANK", "STATE"},
		Rows: [][]string{{"0", "waiting"}, {"1", "MISSING"}}, Missing: []int{1},
		Problems: []Problem{{`STALLED: Rank 1 has not called allreduce "w"`, true}}}, part(all, 0, 60))
	p.wait(`document.getElementById("live-problems").innerText.includes('STALLED: Rank 1 has not called allreduce "w"')`)
	color := func(selector string) string {
		return p.text(`getComputedStyle(document.querySelector("` + selector + `")).color`)
	}
	if got, quiet := color("#live-problems li"), color("h1"); got == quiet {
		t.Errorf("the stall has the colour %s of other texts", got)
	}
	p.wait(`document.querySelector("#live-table tr.alarm").innerText.includes("MISSING")`)
	p.wait(`document.getElementById("numbers").innerText.includes("240 operations")`)
	l.update(t, 4, State{Verdict: "Rank 2 held up all others."}, part(all, 60, len(all[0].Entries)))
	p.wait(`document.getElementById("numbers").innerText.includes("480 operations")`)
	if got := text("sentence"); !strings.EqualFold(got, want.Lateness.Verdict+".") {
		t.Errorf("got %q, want %q", got, want.Lateness.Verdict)
	}
	p.wait(`document.getElementById("live-verdict").innerText === "Rank 2 held up all others." && document.getElementById("live-problems").innerText === ""`)
	p.still()

	// A key or a click that chooses nothing new does not pause the page.
	p.text(`document.getElementById("timeline").focus() ?? ""`)
	p.do(chromedp.KeyEvent(kb.Escape))
	p.text(`document.querySelector("#table button.link").click() ?? ""`)
	p.wait(`location.hash.includes("rank=")`)
	p.still()
	if got := text("follow"); got != "Pause" {
		t.Errorf("after Esc and a click on a rank the page offers %q, want that it follows", got)
	}
	// To look at a step pauses the page. Nothing changes then, and the job is not followed.
	p.text(`document.getElementById("late-next").click() ?? ""`)
	p.wait(`document.getElementById("follow").textContent === "Follow"`)
	l.Followed(t.Context())
	l.stale = true // so that there is another version of the operations
	l.update(t, 4, State{Verdict: "nobody sees this"}, nil)
	p.still()
	if got := text("live-verdict"); got != "Rank 2 held up all others." {
		t.Errorf("the page that pauses shows %q", got)
	}
	p.text(`document.getElementById("follow").click() ?? ""`)
	p.wait(`document.getElementById("live-verdict").innerText === "nobody sees this"`)

	// The address of a picture of another version is not used, so the page follows.
	p.still()
	p.text(`history.back() ?? ""`)
	p.wait(`location.hash.includes("from=")`)
	p.still()
	if got := text("follow"); got != "Pause" {
		t.Errorf("after Back to an earlier version the page offers %q, want that it follows", got)
	}
	// The button pauses, and the picture stays: its time is in the address then.
	p.text(`location.hash = "" ?? ""`)
	p.wait(`!location.hash.includes("from=")`)
	p.still()
	p.text(`document.getElementById("follow").click() ?? ""`)
	p.wait(`document.getElementById("follow").textContent === "Follow" && location.hash.includes("from=")`)
	p.text(`document.getElementById("follow").click() ?? ""`)
	p.wait(`document.getElementById("follow").textContent === "Pause"`)

	// At the end of the job the page stays, and closes the stream.
	l.update(t, 4, State{Verdict: "The job has ended with exit status 3 after 9 s: rank 1", Alarm: true, Ended: true,
		Report: "what the ranks did\n  rank 1 <b>waits</b>\n"}, nil)
	p.wait(`document.getElementById("live-report").innerText === "what the ranks did\n  rank 1 <b>waits</b>\n"`)
	p.wait(`document.getElementById("live-verdict").classList.contains("alarm")`)
	l.Followed(t.Context())
	if got := text("live-verdict"); !strings.Contains(got, "exit status 3") {
		t.Errorf("at the end the page says %q", got)
	}
	p.wait(`document.getElementById("follow").hidden`)
	p.still()
	p.text(axe(t) + `; ""`)
	found := p.text(`axe.run(document, { resultTypes: ["violations"] }).then(r => JSON.stringify(r.violations.map(v => v.id + ": " + v.help)))`)
	if found != "[]" {
		t.Error(found)
	}
	p.noFaults()
}
