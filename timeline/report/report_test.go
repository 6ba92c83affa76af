package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/timeline/timelinetest"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden files")

// near reports whether got and want differ by at most the width of a sketch's bucket.
func near(got, want float64) bool { return math.Abs(got-want) <= 0.02*math.Abs(want)+0.001 }

func TestTheLateRankIsNamed(t *testing.T) {
	ownClocks := straggler{
		late: 2, domains: []string{"a", "a", "b", "b"},
		started: []int{0, 500, 3_000_000, 3_000_700}, monotonic: []int{1000, 1500, 77, 777}, clockError: 150,
	}
	uncached := oneClock()
	uncached.cached = false
	for name, s := range map[string]straggler{"cached": oneClock(), "uncached": uncached,
		"own clocks": ownClocks} {
		t.Run(name, func(t *testing.T) {
			r := reportOf(t, s.write(t, t.TempDir(), ".json"))
			l := r.Lateness
			if want := "rank 2 held up all others for 4.99 ms per step (5.1 % of the time); no other rank did"; l.Verdict != want {
				t.Errorf("got verdict %q, want %q", l.Verdict, want)
			}
			if len(l.Ranks) != 4 || l.Compared != 2*(stragglerSteps-1) || l.Alone != 0 || l.Arrivals {
				t.Fatalf("got %+v", l)
			}
			late, third := l.Ranks[2], l.Ranks[3]
			if late.Rank != 2 || late.Last != 2*(stragglerSteps-1) || third.Last != 0 {
				t.Errorf("got %+v and %+v, want rank 2 the last always", late, third)
			}
			// Rank 2 submits 5.02 ms after rank 0. This is 4.99 ms after rank 3, which submits 30 us after
			// rank 0. The waits for the two operations overlap, so they count once in each step.
			if !near(late.HeldPerStepUS, 4990) || !near(late.P50US, 5020) || !near(late.MaxUS, 5020) {
				t.Errorf("got %+v, want 4990 us a step and 5020 us late", late)
			}
			if want := 30.0; name != "own clocks" && !near(third.P50US, want) {
				t.Errorf("got %+v, want it late by %g us", third, want)
			} else if name == "own clocks" && third.P50US != 0 {
				t.Errorf("got %+v, want what is within the clocks' error to be none", third)
			}
			if r.Steps != stragglerSteps-1 || !near(r.StepUS, 100*ms) || !near(r.StartupUS, 100*ms) {
				t.Errorf("got %d steps of %g us after %g us, want %d of 100 ms after as many", r.Steps,
					r.StepUS, r.StartupUS, stragglerSteps-1)
			}
			if want := float64(s.clockError); r.ClockErrorUS != want {
				t.Errorf("got a clock error of %g us, want %g", r.ClockErrorUS, want)
			}
			if len(r.Problems) > 0 {
				t.Errorf("got %q, want no problems", r.Problems)
			}
			if !slices.ContainsFunc(r.Suggestions, func(s Suggestion) bool {
				return strings.Contains(s.Do, "look at what rank 2 does")
			}) {
				t.Errorf("got %+v, want to look at rank 2", r.Suggestions)
			}
			steady := r.Cache
			want := Cache{Hits: 4 * 3 * (stragglerSteps - 1), Misses: 4 * 3,
				SteadyHits: 4 * 3 * (stragglerSteps - 1)}
			if !s.cached {
				want = Cache{Misses: 4 * 3 * stragglerSteps, SteadyMisses: 4 * 3 * (stragglerSteps - 1)}
			}
			if steady != want {
				t.Errorf("got %+v, want %+v", steady, want)
			}
		})
	}
}

// The verdict names a rank only if it held up the others for at least 5 % of the time and for at least 100 us
// per step. A shorter wait may only be the time that it takes to wake a process.
func TestWhatIsWorthwhile(t *testing.T) {
	for _, c := range []struct {
		held  time.Duration
		steps int64
		want  string
	}{
		{60 * time.Millisecond, 100,
			"rank 1 held up all others for 600 us per step (6.0 % of the time); no other rank did"},
		{40 * time.Millisecond, 100,
			"no rank held up all others for long: rank 1 did for the longest time, 400 us per step (4.0 % of the time)"},
		{60 * time.Millisecond, 1000,
			"no rank held up all others for long: rank 1 did for the longest time, 60.0 us per step (6.0 % of the time)"},
	} {
		r := Report{DurationUS: 1e6, Steps: c.steps}
		f := &analysis.Lateness{Compared: 1, Ranks: []*analysis.RankLateness{{}, {Rank: 1, Held: c.held}}}
		if got := r.verdict(f); got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
}

// All waiting time is charged to the ranks that caused it. The sum of the charges equals the waiting time
// exactly.
func TestWaitingIsDistributedExactly(t *testing.T) {
	dir := t.TempDir()
	submitted := []int{1000, 1100, 1400, 1400}
	for r, at := range submitted {
		f := newFile(rankID{rank: r, size: 4, domain: "a", epoch: 1})
		f.op(testOp{number: 1, granted: 2000, begun: 2000, ended: 3000,
			tensors: []testTensor{{name: "x", submitted: at}}})
		put(t, dir, fmt.Sprintf("t.rank%d.json", r), f.end(4000, 0))
	}
	l := reportOf(t, dir).Lateness
	if want := 400.0 + 300; l.WaitedUS != want {
		t.Errorf("got %g us of waiting, want %g", l.WaitedUS, want)
	}
	// Rank 0 waits until rank 1 submits. Then both wait for ranks 2 and 3, which submit at the same time.
	for r, want := range []float64{0, 100, 300, 300} {
		if got := l.Ranks[r].CausedUS; got != want {
			t.Errorf("rank %d: got %g us, want %g", r, got, want)
		}
	}
	for r, want := range []int64{0, 0, 1, 1} {
		if got := l.Ranks[r].Last; got != want {
			t.Errorf("rank %d: got last %d times, want %d", r, got, want)
		}
	}
}

// The report has the time that a rank spent in each phase. The error is at most 2 us per step.
func TestPhases(t *testing.T) {
	r := reportOf(t, oneClock().write(t, t.TempDir(), ".json.gz"))
	if len(r.Phases) != 4 {
		t.Fatalf("got %+v", r.Phases)
	}
	const steps = stragglerSteps - 1
	// The second operation begins 1 ms after the first, and takes 2 ms from its grant to its end. So longer
	// phases of the two operations overlap.
	want := map[string]float64{
		"waiting": 6020 * steps, "negotiation": 400 * steps, "queue": 600 * steps, "copies": 400 * steps,
		"exchange": 2000 * steps, "reduce": 0, "other": 1000 * steps,
		"outside": (100*ms - 8221) * steps,
	}
	// The short phases do not overlap. The first operation copies from 1.4 to 1.5 ms after its grant, and the
	// second copies from 1.3 to 1.4 ms after its own grant.
	got := r.Phases[0].US
	for name, us := range want {
		if math.Abs(got[name]-us) > 2 {
			t.Errorf("%s: got %g us, want %g", name, got[name]/steps, us/steps)
		}
	}
	if got := r.Phases[2].US["waiting"]; got != 0 {
		t.Errorf("the late rank waited %g us, want 0", got)
	}
}

func TestFusionAndTensors(t *testing.T) {
	r := reportOf(t, oneClock().write(t, t.TempDir(), ".json"))
	f := r.Fusion
	if f.Responses != 8*stragglerSteps/1 || f.MeanTensors != 1.5 || f.MaxTensors != 2 ||
		f.MeanBytes != (4096*3+4096)/2 || !near(f.Fill, 8192.0/(1<<20)) {
		t.Errorf("got %+v", f)
	}
	var names []string
	for _, n := range r.Slowest {
		names = append(names, n.Name)
	}
	if len(names) != 3 || r.Names != 3 || r.Slowest[0].Count != 4*stragglerSteps ||
		r.Largest[0].Name != "grad/1" || r.Largest[0].Bytes != 8192 {
		t.Errorf("got slowest %q of %d, largest %+v", names, r.Names, r.Largest)
	}
	// Rank 0 submits grad/1 1 us before grad/0. It waits for 5020 us, and the operation ends 2200 us later.
	if s := r.Slowest[0]; s.Name != "grad/1" || s.MaxUS != 7221 {
		t.Errorf("got %+v, want grad/1 with 7221 us at most", s)
	}
}

// Only rank 0's file exists. It contains the arrival times of all ranks' requests, and the report uses them.
func TestArrivalsStandForFiles(t *testing.T) {
	s := oneClock()
	s.arrivals = true
	dir := t.TempDir()
	path := s.write(t, dir, ".json")
	for r := 1; r < 4; r++ {
		if err := os.Remove(filepath.Join(dir, fmt.Sprintf("t.rank%d.json", r))); err != nil {
			t.Fatal(err)
		}
	}
	r := reportOf(t, path)
	l := r.Lateness
	if !strings.HasPrefix(l.Verdict, "rank 2 held up all others for 4.99 ms per step") || !l.Arrivals ||
		len(l.Ranks) != 4 || !near(l.Ranks[2].P50US, 5020) {
		t.Errorf("got %+v", l)
	}
	if !slices.Equal(r.Missing, []int{1, 2, 3}) || len(r.Problems) != 1 ||
		!strings.Contains(r.Problems[0], "no file of ranks 1-3") {
		t.Errorf("got %v and %q, want that ranks 1 to 3 have no files", r.Missing, r.Problems)
	}
	// The file of another rank has no arrivals, so the report on it cannot say which rank is late.
	s.arrivals = false
	r = reportOf(t, filepath.Join(filepath.Dir(s.write(t, t.TempDir(), ".json")), "t.rank3.json"))
	if !strings.HasPrefix(r.Lateness.Verdict, "lateness is unknown") || r.Lateness.WaitedUS != 0 {
		t.Errorf("got %+v", r.Lateness)
	}
}

// Rank 0 is late. In its file the bar of an operation begins with the first arrival, and the time of rank 0's
// own submission is an argument. The report uses this argument.
func TestRankZeroIsLate(t *testing.T) {
	s := oneClock()
	s.late, s.arrivals = 0, true
	l := reportOf(t, s.write(t, t.TempDir(), ".json")).Lateness
	if !strings.HasPrefix(l.Verdict, "rank 0 held up all others for 4.97 ms per step") ||
		!near(l.Ranks[0].P50US, 4990) || l.Arrivals {
		t.Errorf("got %+v", l)
	}
}

// Each segment has tracks of its own. An operation that has no end in its segment is left out of the report,
// and its bar is closed in the merged trace.
func TestSegments(t *testing.T) {
	dir := t.TempDir()
	f := newFile(rankID{rank: 0, size: 1, domain: "a", epoch: 1, segment: 1})
	f.op(testOp{number: 1, granted: 20, begun: 20, ended: 30,
		tensors: []testTensor{{name: "x", submitted: 10}}})
	f.event(`{"name":"NEGOTIATE_ALLREDUCE","ph":"B","ts":40,"pid":1,"args":{"set":0,"op":2}}`)
	put(t, dir, "t.1.json", f.b.String())
	f = newFile(rankID{rank: 0, size: 1, domain: "a", epoch: 1, segment: 2})
	f.event(`{"name":"NEGOTIATE_ALLREDUCE","ph":"B","ts":50,"pid":1,"args":{"set":0,"op":3}}`)
	f.event(`{"ph":"E","ts":51,"pid":1}`)
	f.event(`{"name":"ALLREDUCE","ph":"B","ts":51,"pid":1}`)
	f.event(`{"ph":"E","ts":52,"pid":1,"args":{"bytes":4,"fused":1}}`)
	f.pids["unused"] = 1
	f.op(testOp{number: 4, granted: 70, begun: 70, ended: 80,
		tensors: []testTensor{{name: "x", submitted: 60}}})
	path := put(t, dir, "t.json", f.end(100, 0))
	j := openJob(t, path)
	r, err := j.Report(Options{})
	if err != nil {
		t.Fatal(err)
	}
	if r.Operations != 3 || r.Slowest[0].Name != "x" || r.Slowest[0].Count != 2 ||
		!strings.Contains(strings.Join(r.Problems, "\n"), "a truncated file is used only up to the error") {
		t.Errorf("got %+v, want 3 operations, of which the second has no name", r)
	}
	threads, _ := checkTrace(t, merged(t, j))
	// The two operations of x have six events each. The other two events are the bar that the first segment
	// left open and its end event.
	if x := threads[lane{0, 1}]; len(x) != 14 || x[7].Ph != "E" || *x[7].Ts != 40 {
		t.Errorf("got %d events of x, want 14 and the bar closed at 40", len(x))
	}
}

// For ranks of one host, lateness is measured without a clock error. For ranks of different hosts, a rank
// counts as late only if the difference exceeds the clock error.
func TestClocks(t *testing.T) {
	dir := t.TempDir()
	drift := 1000 // in us, over the 10 s of the job
	for r := range 4 {
		id := rankID{rank: r, size: 4, host: "h", domain: []string{"a", "b", "b", ""}[r], epoch: 1,
			monotonic: []int{0, 100, 400, 0}[r]}
		f := newFile(id)
		if r == 1 {
			f.clock(-5_000_000, 5_000_000-drift/2, 200)
			f.clock(5_000_000, 5_000_000+drift/2, 100)
		}
		for n := 1; n <= 9; n++ {
			at, late := n*1_000_000, 0 // at is the time at which rank 0 submits
			switch r {
			case 1, 2:
				at = n*1_000_000 - 5_000_000
				// Rank 0's clock is 5 s ahead and drifts by 1/10^4. So at n s on rank 0's clock, this rank's
				// ts satisfies ts + 5 s + ts/10^4 = n s.
				at = int(math.Round(float64(at) / (1 + float64(drift)/1e7)))
				if r == 2 {
					at, late = at-300, 50 // rank 2 submits 50 us after rank 1, and its clock is 300 us ahead
				}
			}
			f.op(testOp{number: n, granted: at + 10*ms, begun: at + 10*ms, ended: at + 11*ms,
				tensors: []testTensor{{name: "x", submitted: at + late}}})
		}
		put(t, dir, fmt.Sprintf("t.rank%d.json", r), f.end(20_000_000, 0))
	}
	r := reportOf(t, dir)
	if !slices.Equal(r.Unaligned, []int{3}) || r.ClockErrorUS != 200 {
		t.Errorf("got %v not aligned and an error of %g us, want rank 3 and 200", r.Unaligned, r.ClockErrorUS)
	}
	if len(r.Lateness.Ranks) != 3 {
		t.Fatalf("got %+v, want rank 3 not judged", r.Lateness)
	}
	// The submission times of rank 0 differ from those of ranks 1 and 2 by less than the clock error. So only
	// rank 2 is late, in comparison with rank 1 on the same host.
	for rank, want := range []float64{0, 0, 8 * 50} {
		if got := r.Lateness.Ranks[rank].CausedUS; math.Abs(got-want) > 9 {
			t.Errorf("rank %d: got %g us caused, want %g", rank, got, want)
		}
	}
}

// Files of an earlier job have the same operation numbers. They are left out, and no rank counts as late
// because of them. A file without a job name counts as a file of the reported job.
func TestFilesOfAnEarlierJob(t *testing.T) {
	const early, late = 1_700_000_000_000_000, 1_700_000_100_000_000
	for name, c := range map[string]struct {
		jobs, starts []int // indexed by rank; job 0 means that the file has no job name
		leftOut      []int
	}{
		"one job":            {[]int{2, 2, 2}, []int{late, late + 5, late - 5}, nil},
		"an earlier one":     {[]int{2, 1, 2}, []int{late, early, late}, []int{1}},
		"of two ranks":       {[]int{1, 1, 2}, []int{early, early, late}, []int{0, 1}},
		"none named":         {[]int{0, 0, 0}, []int{late, early, early}, nil},
		"an older version's": {[]int{2, 2, 0}, []int{late, late, early}, nil},
		"the newest unnamed": {[]int{2, 1, 0}, []int{late, early, late + 5}, []int{1}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for r := range 3 {
				id := rankID{rank: r, size: 3, domain: "a", epoch: 1, start: c.starts[r],
					monotonic: c.starts[r] - early}
				if c.jobs[r] > 0 {
					id.job = fmt.Sprint("job", c.jobs[r])
				}
				f := newFile(id)
				f.op(testOp{number: 1, granted: 9000, begun: 9000, ended: 9500,
					tensors: []testTensor{{name: "x", submitted: 1000}}})
				name := "t.json"
				if r > 0 {
					name = fmt.Sprintf("t.rank%d.json", r)
				}
				put(t, dir, name, f.end(10_000, 0))
			}
			r := reportOf(t, filepath.Join(dir, "t.json"))
			if !slices.Equal(r.Missing, c.leftOut) {
				t.Errorf("got no files of %v, want none of %v", r.Missing, c.leftOut)
			}
			for _, rank := range c.leftOut {
				file := "t.json"
				if rank > 0 {
					file = fmt.Sprintf("t.rank%d.json", rank)
				}
				if !slices.ContainsFunc(r.Problems, func(p string) bool {
					return strings.Contains(p,
						file+" is left out: it is of another job, whose rank started at 2023-11-14T22:13:20Z, but the rank of ") &&
						strings.Contains(p, "2023-11-14T22:15:00Z")
				}) {
					t.Errorf("got %q, want %s left out", r.Problems, file)
				}
			}
			if c.leftOut != nil && r.Lateness.WaitedUS > 10 { // in one job, start times differ by up to 5 us
				t.Errorf("got %+v, want no late rank", r.Lateness)
			}
		})
	}
}

// Each process set other than 0 numbers its own operations and has only some of the ranks. Lateness in these
// sets is attributed to the right ranks.
func TestProcessSets(t *testing.T) {
	dir := t.TempDir()
	for r := range 3 {
		f := newFile(rankID{rank: r, size: 3, domain: "a", epoch: 1})
		for n := 1; n <= 20; n++ {
			at := n * 100 * ms
			f.op(testOp{number: n, granted: at + 20*ms, begun: at + 20*ms, ended: at + 21*ms,
				tensors: []testTensor{{name: "x", submitted: at + r*ms}}})
			if r != 0 {
				f.op(testOp{set: 1, number: n, granted: at + 50*ms, begun: at + 50*ms, ended: at + 51*ms,
					tensors: []testTensor{{name: "y [set 1]", submitted: at + 30*ms - r*ms}}})
			}
			if r != 1 { // the arrival at position 1 of this set is the arrival of rank 2's request
				o := testOp{set: 2, number: n, granted: at + 90*ms, begun: at + 90*ms, ended: at + 91*ms,
					tensors: []testTensor{{name: "z [set 2]", submitted: at + 80*ms}}}
				if r == 0 {
					o.tensors[0].arrivals = []int{at + 80*ms, at + 85*ms}
				}
				f.op(o)
			}
		}
		put(t, dir, fmt.Sprintf("t.rank%d.json", r), f.end(4_000_000, 0))
	}
	l := reportOf(t, dir).Lateness
	if l.Compared != 3*19 || l.WaitedUS != 19*(3000+1000) {
		t.Errorf("got %+v, want 57 operations with 76 ms of waiting", l)
	}
	for rank, want := range []float64{0, 19*1000 + 19*1000, 19 * 2000} {
		if got := l.Ranks[rank].CausedUS; got != want {
			t.Errorf("rank %d: got %g us caused, want %g", rank, got, want)
		}
	}
	// Rank 1 held up set 1, and rank 2 held up set 0. In set 2 no rank was late, because the ranks submitted
	// at the same time. The arrivals say otherwise, but are not used, because the files of both ranks exist.
	for rank, want := range []float64{0, 19 * 1000, 19 * 1000} {
		if got := l.Ranks[rank].HeldUS; got != want {
			t.Errorf("rank %d: got %g us for which it held up all others, want %g", rank, got, want)
		}
	}
}

// Rank 1 receives a message of rank 0 in each step, and rank 0 is late. Rank 1 receives another message long
// after it was sent, for which rank 0 does not wait. The numbers of messages are equal to those of operations
// of all ranks, and of each other. On another host, the clock of rank 1 is behind by more than the time that
// a message takes, but by less than its error.
func TestMessages(t *testing.T) {
	for name, behind := range map[string]int{"one host": 0, "two hosts": 300 * us} {
		t.Run(name, func(t *testing.T) { testMessages(t, behind) })
	}
}

func testMessages(t *testing.T, behind int) {
	dir := t.TempDir()
	for r, kind := range []string{"SEND", "RECV"} {
		id := rankID{rank: r, size: 2, domain: "a", epoch: 1}
		if r == 1 && behind > 0 {
			id.domain = "b"
		}
		f := newFile(id)
		f.clock(0, 0, 2*behind)
		for n := 1; n <= 20; n++ {
			at := n*100*ms - r*behind
			wait := func(name string, submitted, granted int) {
				f.op(testOp{number: n, kind: kind, granted: granted, begun: granted, ended: granted + 10,
					activities: []testActivity{{"TCP_" + kind, 10}}, backend: "tcp",
					tensors: []testTensor{{name: name, submitted: submitted, bytes: 4}}})
			}
			f.op(testOp{number: n, granted: at, begun: at, ended: at + 1*ms,
				tensors: []testTensor{{name: "x", submitted: at}}})
			wait("rank 0 to rank 1, tag 7", at+10*ms+(1-r)*5*ms, at+15*ms+r*100*us)
			wait("rank 0 to rank 1, tag 8", at+20*ms+r*20*ms, at+20*ms+r*20*ms)
		}
		put(t, dir, fmt.Sprintf("t.rank%d.json", r), f.end(4_000_000, 0))
	}
	r := reportOf(t, dir)
	l := r.Lateness
	if l.Compared != 2*19 || l.WaitedUS != 19*5000 || l.Ranks[0].HeldUS != 19*5000 ||
		l.Ranks[1].HeldUS != 0 || !strings.HasPrefix(l.Verdict, "rank 0 held up all others for 5.00 ms per step") {
		t.Errorf("got %+v, want rank 0 late by 5 ms in each step", l)
	}
	if got := r.Phases[1].US["exchange"]; got != 2*19*10 {
		t.Errorf("got %v us of exchange at rank 1, want 380", got)
	}
}

// A rank that has joined does not submit, and is never counted as late.
func TestJoinIsNoLateness(t *testing.T) {
	dir := t.TempDir()
	for r := range 2 {
		f := newFile(rankID{rank: r, size: 2, domain: "a", epoch: 1})
		f.op(testOp{number: 1, kind: "JOIN", granted: 9000, begun: 9000, ended: 9000,
			tensors: []testTensor{{name: "join", submitted: 1000 + r*5000}}})
		put(t, dir, fmt.Sprintf("t.rank%d.json", r), f.end(9000, 0))
	}
	if l := reportOf(t, dir).Lateness; l.WaitedUS != 0 || len(l.Ranks) != 0 {
		t.Errorf("got %+v, want no waiting", l)
	}
}

// The timelines that the tests of this package write pass the checks of timelinetest.
func TestTheFilesAreTimelines(t *testing.T) {
	dir := t.TempDir()
	s := straggler{
		late: 2, domains: []string{"a", "a", "b", "b"}, arrivals: true,
		started: []int{0, 500, 3_000_000, 3_000_700}, monotonic: []int{1000, 1500, 77, 777}, clockError: 150,
	}
	s.write(t, dir, ".json")
	for _, name := range []string{"t.json", "t.rank2.json"} {
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(timelinetest.Check(f), f.Close()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestGoldenText(t *testing.T) {
	s := oneClock()
	r := reportOf(t, s.write(t, t.TempDir(), ".json"))
	r.Problems = append(r.Problems, "a name with \x1b[31m in it")
	var b bytes.Buffer
	if err := r.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join("testdata", "straggler.txt")
	if *rewrite {
		if err := os.WriteFile(golden, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b.Bytes(), want) {
		t.Errorf("got\n%s\nwant\n%s", b.Bytes(), want)
	}
	b.Reset()
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(b.Bytes(), []byte(": null")) {
		t.Errorf("got %s, want empty lists rather than null", b.Bytes())
	}
	var again Report
	if err := json.Unmarshal(b.Bytes(), &again); err != nil || again.Lateness.Verdict != r.Lateness.Verdict ||
		again.StepUS != r.StepUS {
		t.Errorf("got %v and %+v, want the same report back", err, again)
	}
}

func TestOtherJobsFilesAreLeftOut(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, id rankID) {
		f := newFile(id)
		f.op(testOp{number: max(id.segment, 1), granted: 20, begun: 20, ended: 30,
			tensors: []testTensor{{name: "x", submitted: 10 + id.rank}}})
		put(t, dir, name, f.end(100, 3))
	}
	now := 1_800_000_000_000_000
	write("t.json", rankID{rank: 0, size: 2, domain: "a", epoch: 2, segment: 2, start: now})
	write("t.1.json", rankID{rank: 0, size: 2, domain: "a", epoch: 2, segment: 1, start: now})
	write("t.rank1.json", rankID{rank: 1, size: 2, domain: "a", epoch: 2, segment: 1, start: now})
	write("t.rank1.7.json", rankID{rank: 1, size: 2, domain: "a", epoch: 2, segment: 1, start: now})
	write("t.rank3.json", rankID{rank: 3, size: 4, domain: "a", epoch: 2})
	write("t.rank2.json", rankID{rank: 0, size: 2, domain: "a", epoch: 1})
	write("u.json", rankID{rank: 0, size: 9, domain: "a", epoch: 1, start: now + 1})
	put(t, dir, "t.rank9.json", "not a timeline")
	r := reportOf(t, filepath.Join(dir, "t.json"))
	if !slices.Equal(r.Files, []int{0, 1}) || r.Operations != 3 || r.Dropped != 6 {
		t.Errorf("got files of %v, %d operations and %d dropped, want ranks 0 and 1, 3 and 6", r.Files,
			r.Operations, r.Dropped)
	}
	text := strings.Join(r.Problems, "\n")
	for _, want := range []string{"t.rank1.json is left out: another file is already segment 1 of rank 1",
		"t.rank3.json is left out: it is of another job", "t.rank2.json is left out: it is of another job",
		`t.rank9.json: byte 1: invalid character 'o'`, "6 operations are missing in the files"} {
		if !strings.Contains(text, want) &&
			!strings.Contains(text, strings.Replace(want, "t.rank1.json: segment", "t.rank1.7.json: segment",
				1)) {
			t.Errorf("got %q, want %q in it", text, want)
		}
	}
	// The path is the file of rank 1. The report reads only the segments of this rank.
	r = reportOf(t, filepath.Join(dir, "t.rank1.json"))
	if !slices.Equal(r.Files, []int{1}) {
		t.Errorf("got files of %v, want rank 1 alone", r.Files)
	}
}

func TestSuggestions(t *testing.T) {
	// job writes the files of a job with n tensors in each step and returns the report. The function change
	// is called with each operation before the operation is written, and may change it.
	job := func(t *testing.T, ranks, steps, n int, change func(step, i int, o *testOp)) *Report {
		dir := t.TempDir()
		for r := range ranks {
			f := newFile(rankID{rank: r, size: ranks, host: "h", domain: "a", epoch: 1})
			for step := range steps {
				for i := range n {
					at := (step+1)*100*ms + i*100*us
					o := testOp{number: step*n + i + 1, granted: at + 1, begun: at + 2, ended: at + 3,
						backend: "shm",
						tensors: []testTensor{{name: fmt.Sprint("grad/", i), submitted: at, bytes: 4096}}}
					change(step, i, &o)
					f.op(o)
				}
			}
			put(t, dir, fmt.Sprintf("t.rank%d.json", r), f.end(1_000_000_000, 0))
		}
		return reportOf(t, dir)
	}
	for name, c := range map[string]struct {
		change func(step, i int, o *testOp)
		n      int
		want   string
	}{
		"nothing": {func(int, int, *testOp) {}, 20,
			"|look at the program|every rank has no operation in flight for at least 99.9 ms of 100 ms per step"},
		"capacity": {func(_, _ int, o *testOp) { o.tensors[0].miss = true }, 1100,
			"HOROVOD_CACHE_CAPACITY|set it to 1100 or more|there are 1100 names, but the cache holds only 1024"},
		"shapes": {func(_, _ int, o *testOp) { o.tensors[0].miss = true }, 20,
			"|keep shapes|100 % of the requests"},
		"no names": {func(step, i int, o *testOp) { o.tensors[0].name = fmt.Sprint("noname.", step, ".", i) },
			100,
			"|give tensors names|occur only once"},
		"tiny": {func(_, _ int, o *testOp) { o.granted += 90; o.begun += 90; o.ended += 90 }, 200,
			"HOROVOD_CYCLE_TIME|set it to 1|a response has 1.0 tensors and 4.00 KiB on average"},
		"one host": {tcp("SHM_ALLREDUCE", "shm"), 2,
			"|give each rank processor cores that nothing else uses|no rank is late, the exchange of data takes 33 % of the time"},
		"queue": {func(_, _ int, o *testOp) { o.begun += 40 * ms; o.ended += 40 * ms }, 2,
			"|put operations that do not depend|wait for earlier operations"},
		"tcp": {tcp("TCP_ALLREDUCE", "tcp"), 2,
			"HOROVOD_CPU_OPERATIONS|set it to shm|all ranks are on one host"},
		"copies": {tcp("MEMCPY_IN_FUSION_BUFFER", "shm"), 2, "|allocate tensors with hvd.Alloc|copies take"},
	} {
		t.Run(name, func(t *testing.T) {
			r := job(t, 2, 10, c.n, c.change)
			want := strings.Split(c.want, "|")
			if len(r.Suggestions) == 2 {
				// In these jobs the ranks are idle most of the time. So the report suggests looking at the
				// program. The test ignores this suggestion.
				r.Suggestions = slices.DeleteFunc(r.Suggestions, func(s Suggestion) bool {
					return strings.HasPrefix(s.Do, "look at the program")
				})
			}
			if len(r.Suggestions) != 1 {
				t.Fatalf("got %+v, want one about %q", r.Suggestions, want)
			}
			if s := r.Suggestions[0]; s.Setting != want[0] || !strings.HasPrefix(s.Do, want[1]) ||
				!strings.Contains(s.Because, want[2]) {
				t.Errorf("got %+v, want %q", s, want)
			}
		})
	}
}

// tcp returns a function for the parameter change of job. The function makes each operation spend 30 ms in
// the given activity.
func tcp(activity, backend string) func(int, int, *testOp) {
	return func(_, _ int, o *testOp) {
		o.backend, o.ended = backend, o.begun+30*ms
		o.activities = []testActivity{{activity, 30 * ms}}
	}
}

func TestErrorsAreCounted(t *testing.T) {
	f := newFile(rankID{rank: 0, size: 1, domain: "a", epoch: 1})
	f.op(testOp{number: 1, granted: 20, begun: 20, ended: 30,
		tensors: []testTensor{{name: "x", submitted: 10, fails: "mismatch"}}})
	r := reportOf(t, put(t, t.TempDir(), "t.json", f.end(100, 0)))
	if r.Errors != 1 || r.Slowest[0].Errors != 1 {
		t.Errorf("got %d errors and %+v, want one", r.Errors, r.Slowest)
	}
}

// A name that occurs more than once within a step does not end the step. Names that occur only before the
// first step do not prevent the report from finding the steps.
func TestSteps(t *testing.T) {
	for name, c := range map[string]struct {
		before, repeats int
		objects         int // the number of names that occur twice before the first step
		names           int // the number of names in a step
	}{
		"plain": {names: 10}, "broadcasts before": {before: 20, names: 10},
		"micro-batches":          {repeats: 4, names: 10},
		"many broadcasts before": {before: 60, names: 10}, "objects before": {objects: 2, names: 10},
		"one name": {before: 14, objects: 2, names: 1},
	} {
		t.Run(name, func(t *testing.T) {
			var f stepFinder
			id := 1000
			for range c.before {
				id++
				f.see(id, 0)
			}
			for i := range 2 * c.objects {
				f.see(900+i%c.objects, 100)
			}
			for step := range time.Duration(20) {
				for range c.repeats {
					f.see(500, step*1000)
				}
				for i := range c.names {
					f.see(1+i, step*1000+time.Duration(i))
				}
			}
			if n := f.steps(); n < 16 || n > 23 || !near(float64(f.lengths.Quantile(.5)), 1000) {
				t.Errorf("got %d steps of %d, want about 20 of 1000", n, f.lengths.Quantile(.5))
			}
			// The start-up includes the first training step.
			if f.firstBegin < 1000 || f.firstBegin > 4000 {
				t.Errorf("the first complete step begins at %d, want some time after 1000", f.firstBegin)
			}
		})
	}
}

// Random intervals are added to a cover. Its sum equals that of a reference, which marks every covered moment
// in an array.
func TestCover(t *testing.T) {
	var c cover
	marked := make([]bool, 20_000)
	seed := uint32(1)
	for i := range 2000 {
		seed = seed*1664525 + 1013904223
		begin := i*9 + int(seed>>16)%100
		end := begin + int(seed>>24)%30
		c.add(time.Duration(begin), time.Duration(end))
		for at := begin; at < end; at++ {
			marked[at] = true
		}
	}
	want := 0
	for _, m := range marked {
		if m {
			want++
		}
	}
	if got := c.sum(); got != time.Duration(want) {
		t.Errorf("got %d, want %d", got, want)
	}
	if len(c.open) > maxStretches {
		t.Errorf("%d stretches are kept", len(c.open))
	}
	var two cover
	two.add(0, 10)
	two.add(5, 12)
	two.add(20, 23)
	if total := two.sum(); total != 15 {
		t.Errorf("got %d, want 15", total)
	}
}
