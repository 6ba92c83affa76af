package table

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/recorder"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/trace"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files")

// begun is when the jobs of the tests began.
var begun = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// jobAt returns the state of a job of ranks so many seconds after its begin. Rank 2 holds up the others for
// 80 % of the time. If stalled is set, they have waited for it for 12 s, and rank 5 does not answer.
func jobAt(seconds int, tensor string, stalled bool) *live.Job {
	const size = 6
	up := time.Duration(seconds) * time.Second
	ranks := make(map[int]*live.Rank)
	var hosts []string
	for r := range size {
		hosts = append(hosts, fmt.Sprintf("node%d", r/3))
		about := recorder.About{Rank: r, Size: size, Host: hosts[r], PID: 1000 + r, Epoch: 1, At: up}
		rec := recorder.New(8)
		ended := up - time.Second/4
		rec.Record(&trace.Operation{Records: []trace.Record{{Kind: message.Allreduce, Name: "fc.bias",
			Number: 1, Submitted: ended - 1, Ended: ended}}})
		since := up - 2*time.Millisecond
		if stalled {
			since = up - 12*time.Second
		}
		if r != 2 {
			about.Pending = []trace.Record{{Kind: message.Allreduce, Name: tensor, Submitted: since}}
		}
		st := &trace.Stats{InFlight: len(about.Pending),
			Moved:      []trace.Moved{{Bytes: uint64(seconds) * 3_500_000}},
			Phases:     [trace.NumPhases]time.Duration{up / 10, up * 7 / 10, 0, up / 5},
			Operations: make([]trace.Operations, 1)}
		for range seconds * 40 {
			st.Operations[0].Durations.Add(1)
		}
		if r == 0 {
			st.Coordinator = &trace.Coordinator{Late: []trace.HeldUp{{}, {Rank: 1, Held: up / 100},
				{Rank: 2, Held: up * 8 / 10}}}
		}
		k := live.NewRank(rec.Dump(about), st)
		if r == 0 && stalled {
			k.Stalls = []live.Stall{{Stall: recorder.Stall{Name: tensor}.Cut(), Ago: time.Second}}
		}
		if r != 5 || !stalled {
			ranks[r] = k
		}
	}
	return live.OfRanks(live.About{PID: 99, Host: "head", Command: []string{"python", "train.py"},
		Started: begun, What: live.Ranks, Size: size}, begun.Add(up), ranks, hosts,
		[]string{"", "", "", "", "", "process 1005 is stopped by a signal"})
}

// withSteps adds steps of 20 ms and, each fifth one, of 30 ms. Rank 2 is late in those, and rank 3 a little.
func withSteps(j *live.Job, from, to uint64) *live.Job {
	for n := from; n <= to; n++ {
		step := trace.Step{Sequence: n, Number: n + 1000, Time: 20 * time.Millisecond,
			Held: make([]time.Duration, j.Size)}
		step.Held[3] = 500 * time.Microsecond
		if n%5 == 0 {
			step.Time, step.Held[2] = 30*time.Millisecond, 10*time.Millisecond
		}
		j.Steps = append(j.Steps, step)
	}
	for i := range j.Processes {
		j.Processes[i].Marked = to
	}
	return j
}

// nodesAt returns the state of a job of nodes.
func nodesAt(seconds int) *live.Job {
	up := time.Duration(seconds) * time.Second
	nodes := map[int]*trace.Node{
		0: {Name: "scheduler", Role: "scheduler", Up: up,
			Peers: []trace.Peer{{Name: "worker 0", HeldUp: up / 2}},
			Waits: []trace.NodeWait{{What: "Clock", Time: 3 * time.Second, Waiting: []string{"worker 1"},
				Missing: []string{"worker 0"}}}},
		1: {Name: "server 0", Role: "server", Up: up,
			Peers: []trace.Peer{{Name: "worker 0", SentBytes: uint64(seconds) * 1000}}},
		2: {Name: "worker 0", Role: "worker", Up: up},
		3: {Name: "worker 1", Role: "worker", Up: up, Peers: []trace.Peer{{Name: "server 0", Waiting: 2}}},
	}
	return live.OfNodes(live.About{PID: 99, Host: "head", Command: []string{"./train"}, Started: begun,
		What: live.Nodes, Size: 4}, begun.Add(up), nodes,
		[]string{"scheduler", "server 0", "worker 0", "worker 1"}, []string{"a", "a", "b", "b"}, nil)
}

func end(status int, text string) *live.Job {
	j := jobAt(70, "fc.weight", false)
	return &live.Job{About: j.About, Time: j.Time, End: &live.End{Status: status, Text: text}}
}

// states returns what is shown after the given states.
func states(all ...*live.Job) *States {
	var h History
	var s States
	for _, j := range all {
		s = h.Add(j)
	}
	return &s
}

// TestScreens compares screens with the golden file. With -rewrite, it writes the file.
func TestScreens(t *testing.T) {
	normal := states(jobAt(50, "fc.weight", false), jobAt(55, "fc.weight", false))
	stalled := states(jobAt(50, "fc.weight", true), jobAt(55, "fc.weight", true))
	note := *normal
	note.Note, note.At = "hvdrun (process 99) has not answered for 4 s.", note.At.Add(4*time.Second)
	hostileName := "\x1b[31m\x1b]0;x\a\u202egrad\x00" + strings.Repeat("A", 1<<20)
	hostile := states(jobAt(50, hostileName, true), jobAt(55, hostileName, true))
	after := func(status int, text string) *States {
		return states(jobAt(55, "fc.weight", false), end(status, text))
	}
	stepped := states(withSteps(jobAt(50, "fc.weight", false), 1, 256),
		withSteps(jobAt(55, "fc.weight", false), 257, 300))
	quiet := states(jobAt(50, "fc.weight", true), jobAt(55, "fc.weight", true))
	for i := range quiet.Now.Processes {
		quiet.Now.Processes[i].Held = quiet.Before.Processes[i].Held
	}
	selected := View{Width: 120, Height: 16}
	var b strings.Builder
	for _, c := range []struct {
		name   string
		view   View
		keys   string
		states *States
	}{
		{"nothing yet", View{Width: 80, Height: 8}, "", &States{}},
		{"first state", View{Width: 80, Height: 12}, "", states(jobAt(50, "fc.weight", false))},
		{"80 columns", View{Width: 80, Height: 16}, "", normal},
		{"200 columns", View{Width: 200, Height: 16}, "", normal},
		{"steps", View{Width: 80, Height: 16}, "", stepped},
		{"steps, sorted by LATE", View{Width: 200, Height: 16}, "> > > > >", stepped},
		{"40 columns", View{Width: 40, Height: 16}, "", normal},
		{"5 lines", View{Width: 80, Height: 5}, "", normal},
		{"stalled", View{Width: 80, Height: 18}, "", stalled},
		{"stalled, nobody late before", View{Width: 80, Height: 18}, "", quiet},
		{"stalled, 200 columns", View{Width: 200, Height: 16}, "", stalled},
		{"sorted by HELD", View{Width: 120, Height: 16}, "> > > > >", normal},
		{"sorted by HELD, the other way, row selected", selected, "> > > > > I down down", normal},
		{"by host", View{Width: 120, Height: 16}, "h", stalled},
		{"filter being typed", View{Width: 80, Height: 16}, "/ n o d e 1", normal},
		{"filter kept", View{Width: 80, Height: 16}, "/ O U T enter", normal},
		{"filter without a match", View{Width: 80, Height: 16}, "/ x backspace y enter", normal},
		{"last row selected, 8 lines, paused", View{Width: 80, Height: 8}, "end space", normal},
		{"help", View{Width: 100, Height: 30}, "?", normal},
		{"hostile name", View{Width: 80, Height: 18}, "", hostile},
		{"note", View{Width: 80, Height: 16}, "", &note},
		{"nodes", View{Width: 120, Height: 12}, "", states(nodesAt(10), nodesAt(15))},
		{"ended", View{Width: 120, Height: 16}, "", after(0, "all ranks ended with status 0")},
		{"failed", View{Width: 120, Height: 16}, "", after(137, "rank 2: killed by SIGKILL")},
		{"lost", View{Width: 120, Height: 16}, "", after(-1, "hvdrun has ended")},
	} {
		for _, key := range strings.Fields(c.keys) {
			if !c.view.Key(key, c.states) {
				t.Errorf("%s: the key %s quits", c.name, key)
			}
		}
		fmt.Fprintf(&b, "# %s, %d x %d, keys: %s\n", c.name, c.view.Width, c.view.Height, c.keys)
		lines := c.view.Lines(c.states)
		if len(lines) > c.view.Height {
			t.Errorf("%s: got %d lines, want at most %d", c.name, len(lines), c.view.Height)
		}
		for _, l := range lines {
			text := l.String()
			if n := utf8.RuneCountInString(text); n > c.view.Width {
				t.Errorf("%s: got %d columns, want at most %d: %q", c.name, n, c.view.Width, text)
			}
			if strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
				t.Errorf("%s: the line has control characters: %q", c.name, text)
			}
			styles := ""
			for _, s := range l {
				if letter := "nsfWAP"[s.Style : s.Style+1]; !strings.HasSuffix(styles, letter) {
					styles += letter
				}
			}
			fmt.Fprintln(&b, strings.TrimRight(fmt.Sprintf("%-4s|%s", styles, text), " "))
		}
		fmt.Fprintf(&b, "%s\n\n", c.states.Text())
	}
	const file = "testdata/screens.txt"
	if *rewrite {
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want := testnet.ReadFile(t, file)
	if got := b.String(); got != string(want) {
		gotLines, wantLines := strings.Split(got, "\n"), strings.Split(string(want), "\n")
		for i, line := range gotLines {
			if i >= len(wantLines) || line != wantLines[i] {
				t.Fatalf("%s, line %d: got\n%s\nand more, want the golden file (-rewrite writes it)", file, i+1, line)
			}
		}
		t.Fatalf("%s has %d lines, got %d", file, len(wantLines), len(gotLines))
	}
}

// The keys that quit do so, but not while a filter is typed, except Ctrl-C.
func TestKeysThatQuit(t *testing.T) {
	s := states(jobAt(50, "x", false))
	for key, want := range map[string]bool{"q": false, "f10": false, "ctrl+c": false, "x": true,
		"esc": true} {
		if v := (&View{Width: 80, Height: 20}); v.Key(key, s) != want {
			t.Errorf("key %s: want %v", key, want)
		}
		if v := (&View{Width: 80, Height: 20, Typing: true}); v.Key(key, s) != (key != "ctrl+c") {
			t.Errorf("key %s while a filter is typed: want that only Ctrl-C quits", key)
		}
	}
}

// The key y does what the last line of the screen asks, also if the ranks begin timelines in the meantime.
func TestSwitchDoesWhatWasAsked(t *testing.T) {
	now := jobAt(50, "x", false)
	v, s := &View{Width: 100, Height: 20}, states(now)
	v.Key("t", s)
	now.Processes[0].Timeline = "/t.json"
	lines := v.Lines(s)
	if last := lines[len(lines)-1][0].Text; !strings.HasPrefix(last, "Press y to start the timelines") {
		t.Errorf("got %q", last)
	}
	done := false
	v.Switch = func(start bool) { done = start }
	if v.Key("y", s); !done {
		t.Error("the key y did not start timelines")
	}
}

// A selected row stays selected when the order changes.
func TestSelectedRowStays(t *testing.T) {
	s := states(jobAt(50, "x", false), jobAt(55, "x", false))
	v := &View{Width: 120, Height: 30}
	for _, key := range []string{"down", "down", "down", ">", ">", ">", ">", ">"} {
		v.Key(key, s)
	}
	if rows := v.rows(s); v.Selected != "rank 2" || rows[0].name != "rank 2" || v.Sort != "HELD" {
		t.Errorf("got %q selected and %q first, sorted by %s, want rank 2 in both, sorted by HELD",
			v.Selected, rows[0].name, v.Sort)
	}
}

// The history keeps the states of 5 s, whatever the interval is.
func TestHistory(t *testing.T) {
	var h History
	var s States
	for second := range 100 {
		s = h.Add(jobAt(second, "x", false))
	}
	if got := s.Now.Time.Sub(s.Before.Time); got != period || len(h.past) > 6 {
		t.Errorf("got rates of %v and %d states, want %v and 6", got, len(h.past), period)
	}
	next := jobAt(100, "x", false)
	next.Processes[3].Epoch++
	if s = h.Add(next); s.Before != nil || len(h.past) != 1 {
		t.Errorf("after the beginning of an epoch: got %d states, want only the new one", len(h.past))
	}
	text := s.Epochs[0].Text()
	if want := "Since 03:05:45: 6 ranks (epoch 2), before 6."; len(s.Epochs) != 1 || text != want ||
		!strings.Contains(fmt.Sprint((&View{Width: 80, Height: 24}).Lines(&s)), want) {
		t.Errorf("got %+v, want %q, also on the screen", s.Epochs, want)
	}
	h.Add(jobAt(110, "x", false))
	if s = h.Add(jobAt(1000, "x", false)); s.Now.Time.Sub(s.Before.Time) < period {
		t.Errorf("after a pause: got rates since %v", s.Before.Time)
	}
}
