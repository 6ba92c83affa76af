package report

import (
	"errors"
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

// near reports whether got and want differ by at most the width of a sketch's bucket.
func near(got, want float64) bool { return math.Abs(got-want) <= 0.02*math.Abs(want)+0.001 }

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

// Each segment has tracks of its own. An operation that has no end in its segment is left out of the report,
// and its bar is closed in the merged trace.
func TestSegments(t *testing.T) {
	dir := t.TempDir()
	f := newFile(rankID{rank: 0, size: 1, domain: "a", epoch: 1, segment: 1})
	f.op(testOp{number: 1, granted: 20, begun: 20, ended: 30,
		tensors: []testTensor{{name: "x", submitted: 10}}})
	f.event(`{"name":"hvd_set","ph":"M","pid":0,"args":{"set":5,"ranks":[0]}}`)
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
	if fmt.Sprint(r.Job.Sets) != "[{5 [0]}]" { // it was removed before the last segment
		t.Errorf("got the process sets %v, want set 5", r.Job.Sets)
	}
	threads, _ := checkTrace(t, merged(t, j))
	// The two operations of x have six events each. The other two events are the bar that the first segment
	// left open and its end event.
	if x := threads[lane{0, 1}]; len(x) != 14 || x[7].Ph != "E" || *x[7].Ts != 40 {
		t.Errorf("got %d events of x, want 14 and the bar closed at 40", len(x))
	}
}

// Files of an earlier or later job than that of the given file have the same operation numbers. They are left
// out, and no rank counts as late because of them. A file without a job name counts as a file of the job.
func TestFilesOfAnotherJob(t *testing.T) {
	const early, late = 1_700_000_000_000_000, 1_700_000_100_000_000
	for name, c := range map[string]struct {
		jobs, starts []int // indexed by rank; job 0 means that the file has no job name
		leftOut      []int
	}{
		"one job":            {[]int{2, 2, 2}, []int{late, late + 5, late - 5}, nil},
		"an earlier one":     {[]int{2, 1, 2}, []int{late, early, late}, []int{1}},
		"a later one":        {[]int{1, 1, 2}, []int{early, early, late}, []int{2}},
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
				file := fmt.Sprintf("t.rank%d.json", rank)
				if !slices.ContainsFunc(r.Problems, func(p string) bool {
					return strings.Contains(p,
						file+" is left out: it is of another job, whose rank started at 2023-11-14T22:1") &&
						strings.Contains(p, "2023-11-14T22:13:20Z") && strings.Contains(p, "2023-11-14T22:15:00Z")
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
	write("t.rank4.json", rankID{rank: 4, size: 4, domain: "a", epoch: 2})
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
		"t.rank2.json is left out: it is of another epoch or job, with epoch 1 and 2 ranks, but ",
		"t.rank3.json and 1 more are left out: they are of another epoch or job, with epoch 2 and 4 ranks, but ",
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
