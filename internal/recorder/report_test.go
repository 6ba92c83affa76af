package recorder

import (
	"encoding/json"
	"fmt"
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

const (
	atLast = "no operation is pending; its last operation was allreduce \"grad/1\", which ended 19.0 s ago"
	where1 = "; " + atLast + "\n"
	sent   = "; its last operation was send \"rank 0 to rank 2, tag 7\", which ended 17.0 s ago\n"
)

func TestReport(t *testing.T) {
	for _, c := range []struct {
		name   string
		size   int
		play   func(j []*rankAt)
		answer []int // the ranks that answer; nil means all ranks
		absent map[int]string
		want   string
	}{
		{"one rank stays away", 4, func(j []*rankAt) {
			for _, r := range []int{0, 2, 3} {
				j[r].waits(time.Duration(r+2)*time.Second, "grad/0")
			}
		}, nil, nil,
			"Rank 1 has not called allreduce \"grad/0\", for which ranks 0, 2 and 3 have waited for 18.0 s.\n" +
				"  rank 1 called it 2 times before; the last call ended 19.0 s ago" + where1},

		{"a receiver waits for a message", 3, func(j []*rankAt) {
			for _, r := range []int{0, 2} {
				j[r].Record(&trace.Operation{Records: []trace.Record{{Number: 5, Peer: topo.Rank(2 - r),
					Kind: []message.Kind{message.Send, 0, message.Recv}[r], Backend: message.TCP,
					Name: "rank 0 to rank 2, tag 7", Ended: 3 * time.Second}}})
			}
			j[2].messageWaits(message.Recv, "rank 0 to rank 2, tag 7", 0, 2)
			j[2].messageWaits(message.Recv, "any rank to rank 2, tag 9")
			j[1].messageWaits(message.Send, "rank 1 to rank 0, tag 8", 0, 1)
		}, nil, nil,
			"Rank 0 has not called recv \"rank 1 to rank 0, tag 8\", for which rank 1 has waited for 15.0 s.\n" +
				"  rank 0 never called it in this epoch; no operation is pending" + sent +
				"Rank 0 has not called send \"rank 0 to rank 2, tag 7\", for which rank 2 has waited for 15.0 s.\n" +
				"  rank 0 called it once before; the last call ended 17.0 s ago; no operation is pending" + sent +
				"Ranks 0 and 1 have not called send \"any rank to rank 2, tag 9\", for which rank 2 has waited for 15.0 s.\n" +
				"  rank 0 has not called it; no operation is pending" + sent +
				"  rank 1 has not called it; it has waited for send \"rank 1 to rank 0, tag 8\" for 15.0 s; its last operation was allreduce \"grad/1\", which ended 19.0 s ago\n"},

		{"a member has not asked for its process set", 4, func(j []*rankAt) {
			for _, r := range []int{0, 3} {
				j[r].waits(time.Duration(r+2)*time.Second, "process_set.add.x")
				j[r].Pending[0].Kind, j[r].Pending[0].Among = message.AddProcessSet, []topo.Rank{0, 1, 3}
			}
		}, nil, nil,
			"Rank 1 has not called add process set \"process_set.add.x\", for which ranks 0 and 3 have waited for 18.0 s.\n" +
				"  rank 1 never called it in this epoch" + where1},

		{"ranks name different members", 4, func(j []*rankAt) {
			for r, among := range [][]topo.Rank{{0, 1}, nil, {2, 3}} {
				if among != nil {
					j[r].waits(2*time.Second, "process_set.add.x")
					j[r].Pending[0].Kind, j[r].Pending[0].Among = message.AddProcessSet, among
				}
			}
		}, nil, nil,
			"Ranks 1 and 3 have not called add process set \"process_set.add.x\", for which ranks 0 and 2 have waited for 18.0 s.\n" +
				"  rank 1 never called it in this epoch" + where1 + "  rank 3 never called it in this epoch" + where1},

		{"two ranks at different names", 2, func(j []*rankAt) {
			j[0].waits(2*time.Second, "a")
			j[1].waits(3*time.Second, "b")
		}, nil, nil, "Rank 1 has not called allreduce \"a\", for which rank 0 has waited for 18.0 s.\n" +
			"  rank 1 never called it in this epoch; it has waited for allreduce \"b\" for 17.0 s; its last operation was allreduce \"grad/1\", which ended 19.0 s ago\n" +
			"Rank 0 has not called allreduce \"b\", for which rank 1 has waited for 17.0 s.\n" +
			"  rank 0 never called it in this epoch; it has waited for allreduce \"a\" for 18.0 s; its last operation was allreduce \"grad/1\", which ended 19.0 s ago\n"},

		{"many names, many ranks", 30, func(j []*rankAt) {
			for r := range 30 {
				if r%2 == 0 && r < 26 {
					for i := range 161 {
						j[r].waits(3*time.Second-time.Duration(i%7)*ms, fmt.Sprint("layer", i))
					}
				}
			}
		}, nil, nil, "Ranks 1, 3, 5, 7, 9, 11, 13, 15, 17, 19 and 7 more have not called allreduce " +
			`"layer6", "layer13", "layer20", "layer27", "layer34", "layer41", "layer48", "layer55", "layer62", "layer69" ... and 151 more` +
			", for which ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18 and 3 more have waited for 17.0 s.\n" +
			func() (lines string) {
				for r := 1; r < 21; r += 2 {
					lines += fmt.Sprintf("  rank %d never called it in this epoch%s", r, where1)
				}
				return lines
			}() + "  ... and 7 more ranks\n"},

		{"called once before, several names", 2, func(j []*rankAt) {
			j[1].Recorder = New(100)
			j[1].Record(operation(2, time.Second, "grad/0", "grad/1"))
			j[0].waits(2*time.Second, "grad/0", "grad/1")
		}, nil, nil,
			"Rank 1 has not called allreduce \"grad/0\", \"grad/1\", for which rank 0 has waited for 18.0 s.\n" +
				"  rank 1 called \"grad/0\" once before; the last call ended 19.0 s ago" + where1},

		{"a recorder that does not go back", 2, func(j []*rankAt) {
			j[1].Recorder = New(1)
			j[1].Record(operation(1, 500*ms, "x"))
			j[1].Record(operation(2, time.Second, "grad/1"))
			j[0].waits(2*time.Second, "x")
		}, nil, nil, "Rank 1 has not called allreduce \"x\", for which rank 0 has waited for 18.0 s.\n" +
			"  rank 1 has not called it since the oldest entry of its flight recorder" + where1},

		{"one gives no answer", 3, func(j []*rankAt) {
			j[0].waits(2*time.Second, "x")
			j[1].waits(2*time.Second, "x")
		}, []int{0, 1}, map[int]string{2: "process 5 on host \x1bh runs\n"},
			"Ranks 0 and 1 have waited for allreduce \"x\" for 18.0 s, perhaps because it was not called by rank 2, which did not answer.\n" +
				"Rank 2 did not answer: process 5 on host \\x1bh runs\\n.\n"},

		{"one stays away and others give no answer", 5, func(j []*rankAt) {
			j[1].waits(2*time.Second, "x")
			j[3].waits(2*time.Second, "x")
		}, []int{0, 1, 3}, map[int]string{2: "killed by SIGKILL", 4: "killed by SIGKILL"},
			"Rank 0 has not called allreduce \"x\", for which ranks 1 and 3 have waited for 18.0 s; ranks 2 and 4 did not answer and may be missing too.\n" +
				"  rank 0 never called it in this epoch" + where1 +
				"Ranks 2 and 4 did not answer: killed by SIGKILL.\n"},

		{"one has joined and another gives no answer", 3, func(j []*rankAt) {
			j[0].Pending = []trace.Record{{Kind: message.Join, Name: "join", Submitted: 3 * time.Second}}
		}, []int{0, 1}, nil,
			"Rank 0 has joined, but rank 1 has not; the join has waited for 17.0 s; rank 2 did not answer and may be missing too.\n" +
				"  rank 1 has not joined" + where1 + "Rank 2 did not answer.\n"},

		{"no rank answers", 5, func([]*rankAt) {}, []int{}, map[int]string{1: "it has ended",
			2: "it has ended"},
			"Ranks 0, 3 and 4 did not answer.\nRanks 1 and 2 did not answer: it has ended.\n"},

		{"nothing happens", 2, func([]*rankAt) {}, nil, nil,
			"No rank that answered waits for an operation.\n"},

		{"all have asked", 2, func(j []*rankAt) {
			j[0].waits(20*time.Second-5*ms, "x")
			j[1].waits(20*time.Second-4*ms, "x")
		}, nil, nil,
			"Ranks 0 and 1 have called allreduce \"x\", which has not been granted for 5 ms: the grant is in progress, or other tensors of its group are missing.\n"},

		{"executing, queued, not granted, completed", 5, func(j []*rankAt) {
			j[0].runs(2*time.Second, 3*time.Second, 3, "x")
			j[1].runs(3*time.Second, 4*time.Second, 3, "x")
			j[2].runs(3*time.Second, 0, 3, "x")
			j[3].waits(4*time.Second, "x")
			j[4].Record(operation(3, 3*time.Second, "x"))
		}, nil, nil,
			"Ranks 0 and 1 are executing allreduce \"x\" (tcp), submitted 18.0 s ago; rank 2: not started; rank 3: not granted yet; rank 4: completed.\n"},

		{"queued alone", 2, func(j []*rankAt) {
			j[0].runs(2*time.Second, 0, 0, "x")
			j[1].runs(2*time.Second, 0, 0, "x")
			j[0].runs(2*time.Second, 0, 0, "y")
			j[1].runs(2*time.Second, 0, 0, "y")
		}, nil, nil,
			"No rank is executing allreduce \"x\", \"y\" (tcp), submitted 18.0 s ago; ranks 0 and 1: not started.\n"},

		// Rank 1's dump is taken later than the other dump, when rank 1 has completed the operation once
		// more.
		{"asked later", 2, func(j []*rankAt) {
			j[0].waits(2*time.Second, "grad/0")
			j[1].Record(operation(3, 3*time.Second, "grad/0"))
		}, nil, nil,
			"No rank is executing allreduce \"grad/0\", submitted 18.0 s ago; rank 0: not granted yet; rank 1: completed.\n"},

		{"a rank has joined", 3, func(j []*rankAt) {
			j[0].Pending = []trace.Record{{Kind: message.Join, Name: "join", Submitted: 3 * time.Second}}
			j[1].waits(4*time.Second, "x")
			j[2].waits(5*time.Second, "x")
		}, nil, nil, "Rank 0 has joined, but ranks 1 and 2 have not; the join has waited for 17.0 s.\n" +
			"  rank 1 has not joined; it has waited for allreduce \"x\" for 16.0 s; its last operation was allreduce \"grad/1\", which ended 19.0 s ago\n" +
			"  rank 2 has not joined; it has waited for allreduce \"x\" for 15.0 s; its last operation was allreduce \"grad/1\", which ended 19.0 s ago\n" +
			"Ranks 1 and 2 have called allreduce \"x\", which has not been granted for 16.0 s: the grant is in progress, or other tensors of its group are missing.\n"},

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
		}, nil, nil,
			"Rank 3 has not called allreduce \"x\", for which ranks 1 and 2 have waited for 10.0 s.\n" +
				"  rank 3 never called it in this epoch; it has waited to execute allreduce \"queued\" for 16.0 s and for 1 more operation; " +
				"its last operation was allreduce \"x\", which ended 18.5 s ago\n" +
				"Rank 0 has joined, but ranks 1-3 have not; the join has waited for 17.0 s.\n" +
				func() (lines string) {
					for r := 1; r < 4; r++ {
						more := "2 more operations"
						if r == 3 {
							more = "1 more operation"
						}
						lines += fmt.Sprintf(
							"  rank %d has not joined; it has waited to execute allreduce \"queued\" for 16.0 s and for %s; "+
								"its last operation was allreduce \"x\", which ended 18.5 s ago\n", r, more)
					}
					return lines
				}() +
				"Ranks 1-3 are executing allreduce \"inside\" (tcp), submitted 15.0 s ago.\n" +
				"No rank is executing allreduce \"queued\" (tcp), submitted 16.0 s ago; ranks 1-3: not started.\n"},

		{"a process set, of which some is known", 5, func(j []*rankAt) {
			j[1].Sets = map[topo.ProcessSetID][]topo.Rank{3: {1, 2, 4}}
			j[1].Pending = []trace.Record{{Set: 3, Kind: message.Broadcast, Name: "b",
				Submitted: 2 * time.Second}}
			j[4].Pending = []trace.Record{{Set: 3, Kind: message.Broadcast, Name: "b",
				Submitted: 3 * time.Second}}
		}, nil, nil,
			"Rank 2 has not called broadcast \"b\" of process set 3, for which ranks 1 and 4 have waited for 18.0 s.\n" +
				"  rank 2 never called it in this epoch" + where1},

		{"a process set, of which nothing is known", 5, func(j []*rankAt) {
			for _, r := range []int{1, 3} {
				op := operation(1, 1200*ms, "s")
				op.Records[0].Set = 3
				j[r].Record(op)
			}
			j[3].Pending = []trace.Record{{Set: 3, Kind: message.Allreduce, Name: "s",
				Submitted: 2 * time.Second}}
		}, nil, nil,
			"Rank 1 has not called allreduce \"s\" of process set 3, for which rank 3 has waited for 18.0 s.\n" +
				"  rank 1 called it once before; the last call ended 18.8 s ago; no operation is pending; its last operation was allreduce \"s\" of process set 3, which ended 18.8 s ago\n"},

		{"epochs", 3, func(j []*rankAt) {
			j[0].Epoch, j[2].Epoch = 2, 2
			j[0].waits(2*time.Second, "x")
			j[1].waits(2*time.Second, "old")
		}, nil, map[int]string{1: "unknown"},
			"Rank 2 has not called allreduce \"x\", for which rank 0 has waited for 18.0 s; rank 1 did not answer and may be missing too.\n" +
				"  rank 2 never called it in this epoch" + where1 +
				"Rank 1 did not answer: it is still in epoch 1, other ranks are in epoch 2.\n"},

		{"stalls, and names of all sorts", 2, func(j []*rankAt) {
			j[0].Stalls = []string{"allreduce \"\\n\" has waited\n\x1b[2J"}
			j[0].waits(2*time.Second, "a\n\x1b[2J\"\u202e")
			j[1].waits(2*time.Second, "a\n\x1b[2J\"\u202e")
		}, nil, nil,
			"Ranks 0 and 1 have called allreduce \"a\\n\\x1b[2J\\\"\\u202e\", which has not been granted for 18.0 s: the grant is in progress, or other tensors of its group are missing.\n" +
				"Stalls that the coordinator reports:\n  allreduce \"\\n\" has waited\\n\\x1b[2J\n"},
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
			if got := head(report); got != c.want {
				t.Errorf("got\n%s\nwant\n%s", got, c.want)
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
