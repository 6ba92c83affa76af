package report

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden files")

// write writes the text of a rank's timeline to a folder.
func (f *file) write(t *testing.T, dir string, rank, end int) {
	put(t, dir, fmt.Sprintf("t.rank%d.json", rank), f.end(end, 0))
}

// each writes the timelines of all ranks of a job on one host. The function do adds the operations of a
// rank.
func each(ranks, end int, do func(r int, f *file)) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		for r := range ranks {
			f := newFile(rankID{rank: r, size: ranks, host: "h", domain: "a", epoch: 1})
			do(r, f)
			f.write(t, dir, r, end)
		}
	}
}

// op returns an operation on one tensor, which ends 1 ms after its grant.
func op(number int, name string, submitted, granted int) testOp {
	return testOp{number: number, granted: granted, begun: granted, ended: granted + 1*ms, backend: "shm",
		tensors: []testTensor{{name: name, submitted: submitted, bytes: 4096}}}
}

// steps writes a job of two ranks, 10 steps of 100 ms and n tensors a step, after the function change has
// changed each operation.
func steps(n int, change func(step, i int, o *testOp)) func(*testing.T, string) {
	return each(2, 1_000_000_000, func(_ int, f *file) {
		for step := range 10 {
			for i := range n {
				at := (step+1)*100*ms + i*100*us
				o := op(step*n+i+1, fmt.Sprint("grad/", i), at, at+1)
				o.begun, o.ended = at+2, at+3
				change(step, i, &o)
				f.op(o)
			}
		}
	})
}

// busy returns a function for steps that makes each operation spend 30 ms in the given activity.
func busy(activity, backend string) func(int, int, *testOp) {
	return func(_, _ int, o *testOp) {
		o.backend, o.ended = backend, o.begun+30*ms
		o.activities = []testActivity{{activity, 30 * ms}}
	}
}

// stragglers writes the job of a straggler, without the files of the given ranks.
func stragglers(change func(*straggler), remove ...int) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		s := oneClock()
		change(&s)
		s.write(t, dir, ".json")
		for _, r := range remove {
			name := "t.json"
			if r > 0 {
				name = fmt.Sprintf("t.rank%d.json", r)
			}
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// clocks writes a job on three hosts. Rank 0's clock is 5 s ahead of that of ranks 1 and 2, and drifts by
// 1 ms in 10 s. Rank 2 submits 50 us after rank 1. The clock of rank 3 is not known.
func clocks(t *testing.T, dir string) {
	for r, domain := range []string{"a", "b", "b", ""} {
		f := newFile(rankID{rank: r, size: 4, host: "h", domain: domain, epoch: 1,
			monotonic: []int{0, 100, 400, 0}[r]})
		if r == 1 {
			f.clock(-5000*ms, 5000*ms-500, 200)
			f.clock(5000*ms, 5000*ms+500, 100)
		}
		for n := 1; n <= 9; n++ {
			at, late := n*1000*ms, 0
			if r == 1 || r == 2 { // ts + 5 s + ts/10^4 is the time on rank 0's clock
				at, late = int(math.Round(float64(at-5000*ms)/(1+1e-4)))-(r-1)*300, (r-1)*50
			}
			f.op(op(n, "x", at+late, at+10*ms))
		}
		f.write(t, dir, r, 20_000*ms)
	}
}

// messages writes a job of two ranks. Rank 1 receives a message of rank 0 in each step, and rank 0 is 5
// ms late. Rank 1 receives another message long after it was sent, for which rank 0 does not wait. The
// numbers of messages are equal to those of operations, and of each other. If behind is not 0, rank 1 is
// on another host, and its clock is behind by more than the time that a message takes, but by less than
// its error.
func messages(behind int) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		for r, kind := range []string{"SEND", "RECV"} {
			f := newFile(rankID{rank: r, size: 2, domain: fmt.Sprint(r * min(behind, 1)), epoch: 1})
			f.clock(0, 0, 2*behind)
			for n := 1; n <= 20; n++ {
				at := n*100*ms - r*behind
				wait := func(name string, submitted, granted int) {
					o := op(n, name, submitted, granted)
					o.kind, o.ended = kind, granted+10
					o.activities = []testActivity{{"TCP_" + kind, 10}}
					f.op(o)
				}
				f.op(op(n, "x", at, at))
				wait("rank 0 to rank 1, tag 7", at+10*ms+(1-r)*5*ms, at+15*ms+r*100*us)
				wait("rank 0 to rank 1, tag 8", at+20*ms+r*20*ms, at+20*ms+r*20*ms)
			}
			f.write(t, dir, r, 4_000_000)
		}
	}
}

// processSets writes a job of 20 steps. Rank 1 is 1 ms late in set 1, rank 2 is 1 ms later than rank 1 in
// set 0, and no rank is late in set 2. The arrivals of set 2 say otherwise, but both ranks have files.
// The arrival at position 1 of that set is that of rank 2.
func processSets(r int, f *file) {
	for n := 1; n <= 20; n++ {
		at := n * 100 * ms
		f.op(op(n, "x", at+r*ms, at+20*ms))
		if r != 0 {
			o := op(n, "y [set 1]", at+30*ms-r*ms, at+50*ms)
			o.set = 1
			f.op(o)
		}
		if r != 1 {
			o := op(n, "z [set 2]", at+80*ms, at+90*ms)
			o.set = 2
			if r == 0 {
				o.tensors[0].arrivals = []int{at + 80*ms, at + 85*ms}
			}
			f.op(o)
		}
	}
}

// marked writes a job of 3 ranks and 10 steps of 100 ms, whose program marks steps and ranges. Each step has
// two operations with names that never repeat. Rank 1 is 20 ms late with the first one, of which it spends
// 12 ms in "read", inside of "data", 6 ms more in "data", and 2 ms in "forward". The programs do not wait for
// the first operation, and wait for 5 ms for the second, which is in flight for 10 ms. If optimizer is set,
// the marks are those of an optimizer: one at the end of each step.
func marked(optimizer bool) func(*testing.T, string) {
	return each(3, 2_000_000, func(r int, f *file) {
		late := 0
		if r == 1 {
			late = 20 * ms
		}
		for step := range 10 {
			at := (step + 1) * 100 * ms
			if !optimizer {
				f.step(at, 1000+step)
			}
			if r == 1 {
				f.span("range", "read", at+10*ms, at+22*ms)
			}
			f.span("range", "data", at+5*ms, at+10*ms+late*9/10)
			f.span("range", "forward", at+10*ms+late*9/10, at+12*ms+late)
			name := fmt.Sprint("noname.", 2*step)
			o := op(2*step+1, name, at+10*ms+late, at+30*ms)
			o.ended = at + 40*ms
			f.op(o)
			o = op(2*step+2, fmt.Sprint("noname.", 2*step+1), at+50*ms, at+50*ms)
			o.ended = at + 60*ms
			f.op(o)
			f.span("wait", o.tensors[0].name, at+55*ms, at+60*ms)
			if optimizer {
				f.step(at+95*ms, step+1)
			}
		}
	})
}

// pending writes that an operation was pending after 9 s.
func (f *file) pending(kind, name string, set, submitted int, more string) {
	f.event(`{"name":"hvd_pending","ph":"i","s":"p","ts":9000000,"pid":0,"args":{"tensor":%q,"kind":%q,"set":%d,"submitted":%d%s}}`,
		name, kind, set, submitted, more)
}

// The ranks stop their timelines at different moments. If the file of a rank has the end of an operation that
// is pending in another file, or in the same one, no rank was missing.
func TestPendingThatEnded(t *testing.T) {
	dir := t.TempDir()
	each(3, 9_000_001, func(r int, f *file) {
		f.op(op(1, "x", 1_000_000, 1_000_100))
		switch r {
		case 0:
			f.op(op(3, "v", 6_000_000, 6_000_100))
			f.pending("ALLREDUCE", "w", 0, 4_000_000, "")
			f.pending("ALLREDUCE", "v", 0, 6_000_000, "")
			f.pending("ALLREDUCE", "x", 0, 7_000_000, "")
		case 1:
			f.op(op(2, "w", 5_000_000, 5_000_100))
		case 2:
			f.pending("ALLREDUCE", "x", 0, 7_000_000, "")
		}
	})(t, dir)
	all := reportOf(t, dir).Pending
	if len(all) != 2 || all[0].Tensor != "w" || !all[0].Granted || len(all[0].Missing) != 0 ||
		all[1].Tensor != "x" || all[1].Granted || !slices.Equal(all[1].Missing, []int{1}) {
		t.Errorf("got %+v, want w, which all ranks had submitted, and x, for which rank 1 was missing", all)
	}
}

// ended writes a job of 4 ranks, of which rank 2 stays away from "x", and rank 3 from "y" of set 5 with ranks
// 1 and 3. All ranks have submitted "z".
func ended(r int, f *file) {
	f.event(`{"name":"hvd_job","ph":"M","pid":0,"args":{"gohvd":"0.7.0","command":["train"],"settings":{"HOROVOD_FUSION_THRESHOLD":"1"}}}`)
	f.event(`{"name":"hvd_set","ph":"M","pid":0,"args":{"set":5,"ranks":[1,3]}}`)
	f.op(op(1, "before", 1000, 2000))
	if r != 2 {
		f.pending("ALLREDUCE", "x", 0, 4_000_000+1000*r, "")
	}
	if r == 1 {
		f.pending("ALLGATHER", "y", 5, 6_000_000, "")
	}
	f.pending("BROADCAST", "z", 0, 3_000_000, `,"op":2,"granted":3000010`)
}

// killed writes the job of ended, but the process of rank 2 was killed.
func killed(t *testing.T, dir string) {
	each(4, 9_000_001, ended)(t, dir)
	f := newFile(rankID{rank: 2, size: 4, host: "h", domain: "a", epoch: 1})
	put(t, dir, "t.rank2.json", f.b.String()+"\n]\n")
}

// Each job has a known report, which is in testdata.
func TestReports(t *testing.T) {
	for name, write := range map[string]func(*testing.T, string){
		// Rank 2 submits 5.02 ms after rank 0. This is 4.99 ms after rank 3, which submits 30 us after
		// rank 0. The waits for the two operations overlap, so they count once in each step.
		"straggler": stragglers(func(*straggler) {}),
		"uncached":  stragglers(func(s *straggler) { s.cached = false }),
		// A difference within the error of the clocks does not count.
		"hosts": stragglers(func(s *straggler) {
			s.domains, s.started = []string{"a", "a", "b", "b"}, []int{0, 500, 3_000_000, 3_000_700}
			s.monotonic, s.clockError = []int{1000, 1500, 77, 777}, 150
		}),
		"clocks": clocks,
		// The bar in rank 0's file begins with the first arrival; the time of its own submission is an
		// argument.
		"root": stragglers(func(s *straggler) { s.late, s.arrivals = 0, true }),
		// The arrivals in rank 0's file stand for the files of the other ranks. Another rank's file has
		// none.
		"arrivals": stragglers(func(s *straggler) { s.arrivals = true }, 1, 2, 3),
		"one_rank": stragglers(func(*straggler) {}, 0, 1, 2),
		// Rank 0 waits 100 us until rank 1 submits. Then both wait 300 us for ranks 2 and 3, which share
		// the 600 us.
		"shares": each(4, 4000, func(r int, f *file) {
			f.op(op(1, "x", []int{1000, 1100, 1400, 1400}[r], 2000))
		}),
		"ended": each(4, 9_000_001, ended), "killed": killed,
		// Steps that the program has marked, and what it did.
		"marked": marked(false), "marked_optimizer": marked(true),
		"sets":     each(3, 4_000_000, processSets),
		"messages": messages(0), "messages_hosts": messages(300 * us),
		// A rank that has joined does not submit, and is never late.
		"join": each(2, 9000, func(r int, f *file) {
			o := op(1, "join", 1000+r*5000, 9000)
			o.kind = "JOIN"
			f.op(o)
		}),
		"refused": each(1, 100, func(_ int, f *file) {
			o := op(1, "x", 10, 20)
			o.tensors[0].fails = "mismatch"
			f.op(o)
		}),
		// Suggestions: to look at the program, and each of the settings.
		"idle":     steps(20, func(int, int, *testOp) {}),
		"capacity": steps(1100, func(_, _ int, o *testOp) { o.tensors[0].miss = true }),
		"shapes":   steps(20, func(_, _ int, o *testOp) { o.tensors[0].miss = true }),
		"no_names": steps(100, func(step, i int, o *testOp) {
			o.tensors[0].name = fmt.Sprint("noname.", step, ".", i)
		}),
		"tiny":     steps(200, func(_, _ int, o *testOp) { o.granted += 90; o.begun += 90; o.ended += 90 }),
		"queue":    steps(2, func(_, _ int, o *testOp) { o.begun += 40 * ms; o.ended += 40 * ms }),
		"one_host": steps(2, busy("SHM_ALLREDUCE", "shm")), "tcp": steps(2, busy("TCP_ALLREDUCE", "tcp")),
		"copies": steps(2, busy("MEMCPY_IN_FUSION_BUFFER", "shm")),
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir)
			var b bytes.Buffer
			if err := reportOf(t, dir).WriteText(&b); err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", name+".txt")
			if *rewrite {
				if err := os.WriteFile(golden, b.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if want, err := os.ReadFile(golden); err != nil || !bytes.Equal(b.Bytes(), want) {
				t.Errorf("got\n%s\nwant, %v,\n%s", b.Bytes(), err, want)
			}
		})
	}
}

// The list of steps has what happened in each step.
func TestStepList(t *testing.T) {
	dir := t.TempDir()
	marked(false)(t, dir)
	r := reportOf(t, dir)
	if len(r.StepList) != 9 || !r.StepsMarked {
		t.Fatalf("got the steps %+v, want 9, because the first one is part of the start-up", r.StepList)
	}
	for i, s := range r.StepList {
		length := 100_000.0
		if i == 8 {
			length = 60_000
		}
		if s.Number != uint64(1001+i) || s.Steps != 1 || s.BeginUS != float64(200_000+i*100_000) ||
			s.LengthUS != length || !slices.Equal(s.HeldUS, []float64{0, 20_000}) ||
			!slices.Equal(s.ExposedUS, []float64{5000, 5000, 5000}) {
			t.Errorf("got %+v, want step %d", s, 1001+i)
		}
	}
	if got, want := r.Lateness.Ranks[1].Doing, []Doing{{"read", 108_000, 0.6}, {"data", 54_000, 0.3},
		{"forward", 18_000, 0.1}}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if e := r.Exposed; !e.Known || e.US != 5000 || r.Phases[1].ExposedUS != 45_000 {
		t.Errorf("got %+v, want 5 ms of each step", e)
	}
}

// The report as JSON has no null, and is the same when it is read again. Texts from the files do nothing
// in a terminal.
func TestJSON(t *testing.T) {
	s := oneClock()
	r := reportOf(t, s.write(t, t.TempDir(), ".json.gz"))
	r.Problems = append(r.Problems, "a name with \x1b[31m in it")
	var b bytes.Buffer
	if err := r.WriteText(&b); err != nil ||
		!strings.Contains(b.String(), `note: a name with \x1b[31m in it`) {
		t.Errorf("got %s, %v", b.Bytes(), err)
	}
	b.Reset()
	if err := r.WriteJSON(&b); err != nil || bytes.Contains(b.Bytes(), []byte(": null")) {
		t.Errorf("got %s, %v, want empty lists rather than null", b.Bytes(), err)
	}
	var again Report
	if err := json.Unmarshal(b.Bytes(), &again); err != nil || again.Lateness.Verdict != r.Lateness.Verdict ||
		again.StepUS != r.StepUS {
		t.Errorf("got %v and %+v, want the same report back", err, again)
	}
}
