package recorder

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// rankAt is a rank of a simulated job. It has the rank's recorder and the other content of its dump.
type rankAt struct {
	*Recorder
	About
}

// job returns the ranks of a job. They have run each of grad/0 and grad/1 twice, and the last run ended at 1
// s. Their dumps are taken at 20 s.
func job(size int) []*rankAt {
	var all []*rankAt
	for r := range size {
		k := &rankAt{New(100), About{Rank: r, Size: size, Host: fmt.Sprintf("h%d", r/2), PID: 100 + r,
			Epoch: 1, At: 20 * time.Second}}
		k.Record(operation(1, 500*ms, "grad/0", "grad/1"))
		k.Record(operation(2, 1000*ms, "grad/0", "grad/1"))
		all = append(all, k)
	}
	return all
}

// waits adds allreduces that the rank submitted at the time in since. They have not been granted.
func (k *rankAt) waits(since time.Duration, names ...string) {
	for _, name := range names {
		k.Pending = append(k.Pending, trace.Record{Kind: message.Allreduce, Name: name, Submitted: since})
	}
}

// messageWaits adds a message for which the rank has waited for 5 s. among has the two ranks of the message.
func (k *rankAt) messageWaits(kind message.Kind, name string, among ...topo.Rank) {
	k.Pending = append(k.Pending, trace.Record{Kind: kind, Name: name, Among: among,
		Submitted: 5 * time.Second})
}

// runs adds an allreduce that the rank submitted at the time in since. The allreduce has been granted. If
// begun is not 0, it is the time at which the rank began to execute the allreduce.
func (k *rankAt) runs(since, begun time.Duration, number uint64, name string) {
	k.Pending = append(k.Pending, trace.Record{
		Kind: message.Allreduce, Backend: message.TCP, Name: name, Submitted: since, Granted: since + ms,
		Begun: begun, Number: number,
	})
}

// dumps returns the dumps of the ranks. It encodes and decodes them, as if they had been sent.
func dumps(t *testing.T, ranks ...*rankAt) (all []*analysis.Snapshot) {
	t.Helper()
	for _, k := range ranks {
		text, err := Encode(k.Dump(k.About), OperationsOf(k.Size))
		if err != nil {
			t.Fatal(err)
		}
		d, err := Decode(text)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, d)
	}
	return all
}

// head returns the part of a report before the states of the ranks.
func head(report string) string {
	text, _, _ := strings.Cut(report, "State of each rank:\n")
	return text
}

var rewrite = flag.Bool("rewrite", false, "rewrite the golden files")

// The part of each report before the states of the ranks is in testdata.
func TestReport(t *testing.T) {
	for _, c := range []struct {
		name   string
		size   int
		play   func(j []*rankAt)
		answer []int // the ranks that answer; nil means all ranks
		absent map[int]string
	}{
		{"one rank stays away", 4, func(j []*rankAt) {
			for _, r := range []int{0, 2, 3} {
				j[r].waits(time.Duration(r+2)*time.Second, "grad/0")
			}
		}, nil, nil},

		{"a receiver waits for a message", 3, func(j []*rankAt) {
			for _, r := range []int{0, 2} {
				j[r].Record(&trace.Operation{Records: []trace.Record{{Number: 5, Peer: topo.Rank(2 - r),
					Kind: []message.Kind{message.Send, 0, message.Recv}[r], Backend: message.TCP,
					Name: "rank 0 to rank 2, tag 7", Ended: 3 * time.Second}}})
			}
			j[2].messageWaits(message.Recv, "rank 0 to rank 2, tag 7", 0, 2)
			j[2].messageWaits(message.Recv, "any rank to rank 2, tag 9")
			j[1].messageWaits(message.Send, "rank 1 to rank 0, tag 8", 0, 1)
		}, nil, nil},

		{"a member has not asked for its process set", 4, func(j []*rankAt) {
			for _, r := range []int{0, 3} {
				j[r].waits(time.Duration(r+2)*time.Second, "process_set.add.x")
				j[r].Pending[0].Kind, j[r].Pending[0].Among = message.AddProcessSet, []topo.Rank{0, 1, 3}
			}
		}, nil, nil},

		{"ranks name different members", 4, func(j []*rankAt) {
			for r, among := range [][]topo.Rank{{0, 1}, nil, {2, 3}} {
				if among != nil {
					j[r].waits(2*time.Second, "process_set.add.x")
					j[r].Pending[0].Kind, j[r].Pending[0].Among = message.AddProcessSet, among
				}
			}
		}, nil, nil},

		{"two ranks at different names", 2, func(j []*rankAt) {
			j[0].waits(2*time.Second, "a")
			j[1].waits(3*time.Second, "b")
		}, nil, nil},

		{"many names, many ranks", 30, func(j []*rankAt) {
			for r := range 30 {
				if r%2 == 0 && r < 26 {
					for i := range 161 {
						j[r].waits(3*time.Second-time.Duration(i%7)*ms, fmt.Sprint("layer", i))
					}
				}
			}
		}, nil, nil},

		{"called once before, several names", 2, func(j []*rankAt) {
			j[1].Recorder = New(100)
			j[1].Record(operation(2, time.Second, "grad/0", "grad/1"))
			j[0].waits(2*time.Second, "grad/0", "grad/1")
		}, nil, nil},

		{"a recorder that does not go back", 2, func(j []*rankAt) {
			j[1].Recorder = New(1)
			j[1].Record(operation(1, 500*ms, "x"))
			j[1].Record(operation(2, time.Second, "grad/1"))
			j[0].waits(2*time.Second, "x")
		}, nil, nil},

		{"one gives no answer", 3, func(j []*rankAt) {
			j[0].waits(2*time.Second, "x")
			j[1].waits(2*time.Second, "x")
		}, []int{0, 1}, map[int]string{2: "process 5 on host \x1bh runs\n"}},

		{"one stays away and others give no answer", 5, func(j []*rankAt) {
			j[1].waits(2*time.Second, "x")
			j[3].waits(2*time.Second, "x")
		}, []int{0, 1, 3}, map[int]string{2: "killed by SIGKILL", 4: "killed by SIGKILL"}},

		{"one has joined and another gives no answer", 3, func(j []*rankAt) {
			j[0].Pending = []trace.Record{{Kind: message.Join, Name: "join", Submitted: 3 * time.Second}}
		}, []int{0, 1}, nil},

		{"no rank answers", 5, func([]*rankAt) {}, []int{}, map[int]string{1: "it has ended",
			2: "it has ended"}},

		{"nothing happens", 2, func([]*rankAt) {}, nil, nil},

		{"all have asked", 2, func(j []*rankAt) {
			j[0].waits(20*time.Second-5*ms, "x")
			j[1].waits(20*time.Second-4*ms, "x")
		}, nil, nil},

		{"executing, queued, not granted, completed", 5, func(j []*rankAt) {
			j[0].runs(2*time.Second, 3*time.Second, 3, "x")
			j[1].runs(3*time.Second, 4*time.Second, 3, "x")
			j[2].runs(3*time.Second, 0, 3, "x")
			j[3].waits(4*time.Second, "x")
			j[4].Record(operation(3, 3*time.Second, "x"))
		}, nil, nil},

		{"queued alone", 2, func(j []*rankAt) {
			j[0].runs(2*time.Second, 0, 0, "x")
			j[1].runs(2*time.Second, 0, 0, "x")
			j[0].runs(2*time.Second, 0, 0, "y")
			j[1].runs(2*time.Second, 0, 0, "y")
		}, nil, nil},

		// Rank 1's dump is taken later than the other dump, when rank 1 has completed the operation once
		// more.
		{"asked later", 2, func(j []*rankAt) {
			j[0].waits(2*time.Second, "grad/0")
			j[1].Record(operation(3, 3*time.Second, "grad/0"))
		}, nil, nil},

		{"a rank has joined", 3, func(j []*rankAt) {
			j[0].Pending = []trace.Record{{Kind: message.Join, Name: "join", Submitted: 3 * time.Second}}
			j[1].waits(4*time.Second, "x")
			j[2].waits(5*time.Second, "x")
		}, nil, nil},

		// The join has waited longest, but comes last because no rank is at fault. The queued operation comes
		// after the operation that is being executed, because the queued one waits for it.
		{"what says most is first", 4, func(j []*rankAt) {
			j[0].Pending = []trace.Record{{Kind: message.Join, Name: "join", Submitted: 3 * time.Second}}
			for _, r := range []int{1, 2} {
				j[r].waits(10*time.Second, "x")
			}
			for _, r := range []int{1, 2, 3} {
				j[r].runs(4*time.Second, 0, 5, "queued")
				j[r].runs(5*time.Second, 6*time.Second, 4, "inside")
			}
			op := operation(3, 1500*ms, "x")
			op.Records[0].Absent = true
			j[3].Record(op) // rank 3 took part in x as an absent rank and has never called it
			for _, r := range []int{1, 2} {
				j[r].Record(operation(3, 1500*ms, "x"))
			}
		}, nil, nil},

		{"a process set, of which some is known", 5, func(j []*rankAt) {
			j[1].Sets = map[topo.ProcessSetID][]topo.Rank{3: {1, 2, 4}}
			j[1].Pending = []trace.Record{{Set: 3, Kind: message.Broadcast, Name: "b",
				Submitted: 2 * time.Second}}
			j[4].Pending = []trace.Record{{Set: 3, Kind: message.Broadcast, Name: "b",
				Submitted: 3 * time.Second}}
		}, nil, nil},

		{"a process set, of which nothing is known", 5, func(j []*rankAt) {
			for _, r := range []int{1, 3} {
				op := operation(1, 1200*ms, "s")
				op.Records[0].Set = 3
				j[r].Record(op)
			}
			j[3].Pending = []trace.Record{{Set: 3, Kind: message.Allreduce, Name: "s",
				Submitted: 2 * time.Second}}
		}, nil, nil},

		{"epochs", 3, func(j []*rankAt) {
			j[0].Epoch, j[2].Epoch = 2, 2
			j[0].waits(2*time.Second, "x")
			j[1].waits(2*time.Second, "old")
		}, nil, map[int]string{1: "unknown"}},

		{"stalls, and names of all sorts", 2, func(j []*rankAt) {
			j[0].Stalls = []string{"allreduce \"\\n\" has waited\n\x1b[2J"}
			j[0].waits(2*time.Second, "a\n\x1b[2J\"\u202e")
			j[1].waits(2*time.Second, "a\n\x1b[2J\"\u202e")
		}, nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := job(c.size)
			c.play(j)
			who := j
			if c.answer != nil {
				who = nil
				for _, r := range c.answer {
					who = append(who, j[r])
				}
			}
			slices.Reverse(who) // the report must not depend on the order of the dumps
			all := dumps(t, who...)
			report := analysis.Analyse(all, c.size, c.absent).Text()
			golden := filepath.Join("testdata", strings.NewReplacer(",", "", " ", "_").Replace(c.name)+".txt")
			if *rewrite {
				if err := os.WriteFile(golden, []byte(head(report)), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if want, err := os.ReadFile(golden); err != nil || head(report) != string(want) {
				t.Errorf("got\n%s\nwant, %v,\n%s", head(report), err, want)
			}
			f := analysis.Analyse(all, c.size, c.absent)
			if want := len(j[0].Stalls) > 0 ||
				slices.ContainsFunc(who, func(k *rankAt) bool {
					return len(k.Pending) > 0
				}); f.HasEntries() != want {
				t.Errorf("the report has entries: %v, want %v", f.HasEntries(), want)
			}
			text, err := json.Marshal(f)
			if err != nil || strings.Contains(string(text), "null") {
				t.Errorf("got %s, error %v, want JSON without null", text, err)
			}
		})
	}
}

func TestStateOfEachRank(t *testing.T) {
	const atLast = "no operation is pending; its last operation was allreduce \"grad/1\", which ended 19.0 s ago"
	j := job(70)
	j[1].waits(3*time.Second, "later")
	j[1].waits(2*time.Second, "x")
	j[2].runs(2*time.Second, 3*time.Second, 3, "x")
	j[3].runs(19*time.Second, 0, 3, "x")
	j[4].Recorder = New(1)
	failed := operation(3, 19*time.Second, "bad")
	failed.Records[0].Error = fmt.Sprintf("rank 1 sent\n%s", strings.Repeat("x", 1<<10))
	j[5].Record(failed)
	_, got, _ := strings.Cut(analysis.Analyse(dumps(t, j...), 70, nil).Text(), "State of each rank:\n")
	lines := strings.Split(got, "\n")
	for i, want := range []string{
		"  rank 0 (host h0, pid 100): " + atLast,
		"  rank 1 (host h0, pid 101): it has waited for allreduce \"x\" for 18.0 s and for 1 more operation; its last operation was allreduce \"grad/1\", which ended 19.0 s ago",
		"  rank 2 (host h1, pid 102): it has executed allreduce \"x\" for 18.0 s; its last operation was allreduce \"grad/1\", which ended 19.0 s ago",
		"  rank 3 (host h1, pid 103): it has waited to execute allreduce \"x\" for 1.0 s; its last operation was allreduce \"grad/1\", which ended 19.0 s ago",
		"  rank 4 (host h2, pid 104): no operation is pending; no operation has ended",
		"  rank 5 (host h2, pid 105): no operation is pending; its last operation was allreduce \"bad\", which ended 1.0 s ago, with an error: rank 1 sent\\n" +
			strings.Repeat("x", 1024-12) + "... (1036 bytes)",
	} {
		if lines[i] != want {
			t.Errorf("got\n%s\nwant\n%s", lines[i], want)
		}
	}
	j[0].Recorder = nil
	j[1].waits(time.Second, "grad/0")
	text := analysis.Analyse(dumps(t, j[:2]...), 2, nil).Text()
	for _, want := range []string{"\n  rank 0 has not called it; no operation is pending\n",
		"\n  rank 0 (host h0, pid 100): no operation is pending\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("without a flight recorder: got\n%s\nwant %q", text, want)
		}
	}
	if len(lines) != 64+2 || lines[64] != "  ... and 6 more ranks" {
		t.Errorf("got %d lines, the last %q", len(lines), lines[len(lines)-2])
	}
}

// A rank has two dumps, and the report uses only the newer one. The report also ignores a dump of another
// job.
func TestDumpsThatDoNotCount(t *testing.T) {
	j := job(2)
	old := job(2)[0]
	old.waits(time.Second, "old")
	j[0].Epoch, j[1].Epoch = 2, 2
	outsider := job(9)[7]
	outsider.Epoch = 9
	outsider.waits(time.Second, "strange")
	want := "No rank that answered waits for an operation.\n"
	for _, order := range [][]*rankAt{{old, j[0], j[1], outsider}, {outsider, j[1], j[0], old}} {
		if got := head(analysis.Analyse(dumps(t, order...), 2, nil).Text()); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// Rank 0 has ended the job while rank 1 was about to call the operation. After Blame, the report does not
// name rank 1 as missing. The result is the same with and without a dump of rank 0.
func TestBlame(t *testing.T) {
	ranks := job(3)
	ranks[2].waits(19990*ms, "grad/0")
	for _, c := range []struct {
		dumps []*analysis.Snapshot
		want  string
	}{
		{dumps(t, ranks[1], ranks[2]),
			`Rank 2 has waited for allreduce "grad/0" for 10 ms, perhaps because it was not called by rank 0, which did not answer.`},
		{dumps(t, ranks...),
			`Rank 0 has not called allreduce "grad/0", for which rank 2 has waited for 10 ms.`},
	} {
		f := analysis.Analyse(c.dumps, 3, map[int]string{0: "exit status 0"})
		f.Blame([]int{0})
		if got, _, _ := strings.Cut(f.Text(), "\n"); got != c.want {
			t.Errorf("got %s\nwant %s", got, c.want)
		}
		if text := analysis.Analyse(c.dumps, 3, nil).Text(); !strings.HasPrefix(text, "Rank 1 has not") &&
			!strings.HasPrefix(text, "Ranks 0 and 1 have not") {
			t.Errorf("got %s, want that of ranks whose job goes on", text)
		}
	}
}

// A rank whose dump does not have all of its pending operations may wait for a tensor that the dump lacks. So
// it is not said that the rank has not called the operation.
func TestPendingThatAreNotShown(t *testing.T) {
	all := job(2)
	all[0].waits(5*time.Second, "grad/0", "grad/1")
	all[1].waits(5*time.Second, "grad/0", "grad/1")
	all[1].MaxPending = 1
	f := analysis.Analyse([]*analysis.Snapshot{all[0].Dump(all[0].About), all[1].Dump(all[1].About)}, 2, nil)
	for _, w := range f.Waiting {
		if len(w.Missing) > 0 {
			t.Errorf("got %q, want no missing rank", w.Text())
		}
	}
	if len(f.Waiting) != 2 || !slices.Equal(f.Waiting[0].Unknown, []int{1}) ||
		!strings.Contains(f.Waiting[0].Text(), "rank 1 may not have called it") {
		t.Errorf("got %+v, want that rank 1 may be missing at grad/1", f.Waiting)
	}
}
