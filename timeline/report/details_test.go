package report

import (
	"bytes"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/trace"
)

// The details of a job have the same sums as its report, and Examine returns the same report as Report.
func TestDetailsAddUp(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	job := training{ranks: 4, steps: 30, gradients: 3, backward: 500 * us, exchange: ms, hosts: 2,
		trip: 100 * us, lateBy: 1000 * ms,
		compute: func(rank, _ int) int { return 10*ms + rng.IntN(ms) + rank/3*4*ms }}
	dir := t.TempDir()
	job.write(t, dir, rng)
	o := Options{FusionThresholdBytes: 1 << 20, CacheCapacity: 1024}
	want := reportOf(t, dir)
	seen := int64(0)
	r, d, err := openJob(t, dir).Examine(o, func(_ int, op *trace.Operation) { seen++ })
	if err != nil {
		t.Fatal(err)
	}
	if got, want := textOf(t, r), textOf(t, want); got != want {
		t.Errorf("got the report\n%s\nwant\n%s", got, want)
	}
	if seen != r.Operations {
		t.Errorf("saw %d operations, want %d", seen, r.Operations)
	}
	if len(d.Steps) != int(r.Steps) || len(r.StepList) != int(r.Steps) || r.Steps == 0 {
		t.Errorf("got %d steps and %d in the list, want %d", len(d.Steps), len(r.StepList), r.Steps)
	}
	same := func(what string, got, want float64) {
		t.Helper()
		if math.Abs(got-want) > 1e-5*want+1e-3 {
			t.Errorf("%s: got %v us, want %v us", what, got, want)
		}
	}
	sum := func(table [][]float32, rank int) (us float64) {
		for _, row := range table {
			if rank < len(row) {
				us += micros(float64(row[rank]))
			}
		}
		return us
	}
	waited, waits := 0.0, 0.0
	for _, l := range r.Lateness.Ranks {
		same("held by step", sum(d.HeldBy, l.Rank), l.HeldUS)
		same("caused by step", sum(d.CausedBy, l.Rank), l.CausedUS)
		waited += sum(d.WaitedBy, l.Rank)
		matrix, periods := 0.0, 0.0
		for w := range d.WaitsFor {
			matrix += micros(d.WaitsFor[l.Rank][w])
		}
		same("caused by waiter", matrix, l.CausedUS)
		waits += matrix
		for _, p := range d.Periods {
			if p.Rank == l.Rank && p.Steady {
				periods += micros(p.To - p.From)
			}
		}
		same("periods", periods, l.HeldUS)
	}
	same("waited", waited, r.Lateness.WaitedUS)
	same("waits", waits, r.Lateness.WaitedUS)
	if r.Lateness.WaitedUS == 0 || r.Lateness.GainUS == 0 || r.Lateness.Where == "" {
		t.Errorf("got %+v, want that a rank was late", r.Lateness)
	}
	tensors, steps, inSteps := 0.0, 0.0, 0.0
	for _, x := range r.TensorTable {
		tensors += x.WaitedUS
	}
	same("waited for tensors", tensors, r.Lateness.WaitedUS)
	for i, s := range r.StepList {
		steps, inSteps = steps+s.AnyHeldUS, inSteps+s.WaitedUS
		for rank, us := range s.HeldUS {
			same("held in a step", micros(float64(d.HeldBy[i][rank])), us)
		}
	}
	same("held in steps", steps, r.Lateness.HeldUS)
	same("waited in steps", inSteps, r.Lateness.WaitedUS)
	same("hosts", r.Hosts[0].CausedUS+r.Hosts[1].CausedUS, r.Lateness.WaitedUS)
	if r.Hosts[0].Host != "h1" || len(r.Hosts[0].Ranks) != 2 {
		t.Errorf("got the hosts %+v, want h1, the host of rank 3, first", r.Hosts)
	}
}

// If there are more steps than rows, successive steps share a row, from the first to the last.
func TestRowsOfManySteps(t *testing.T) {
	d := newDetailer(&Job{size: 2}, nil, true)
	d.maxRows, d.maxAll = 4, 3
	const steps = 21
	for i := range steps {
		at := time.Duration(10 * i)
		if i == 0 {
			d.steady(at)
		} else {
			d.step(at)
		}
		d.HeldUp(1, at, at+1, true)
		d.Waited("w", []int{0}, []int{1}, at, 2)
		d.wait(0, at, at+2, at+3)
	}
	if d.per != 8 || len(d.HeldBy) != 3 || len(d.CausedBy) != 3 || len(d.WaitedBy) != 3 {
		t.Fatalf("got %d steps in each of %d rows", d.per, len(d.HeldBy))
	}
	for i, want := range []float32{8, 8, 5} {
		if d.HeldBy[i][1] != want || d.CausedBy[i][1] != 2*want || d.WaitedBy[i][0] != 2*want {
			t.Errorf("row %d: got %v, %v and %v, want %g steps", i, d.HeldBy[i], d.CausedBy[i], d.WaitedBy[i], want)
		}
	}
	if len(d.Periods) != 3 || len(d.Pending) != 3 || d.LeftOut != 2*(steps-3) {
		t.Errorf("got %d periods, %d waits and %d left out", len(d.Periods), len(d.Pending), d.LeftOut)
	}
	d.group([]Step{{BeginUS: 0}, {BeginUS: .16}})
	if len(d.HeldBy) != 2 || d.HeldBy[0][1] != 16 || d.HeldBy[1][1] != 5 {
		t.Errorf("got the groups %v, want 16 and 5 steps", d.HeldBy)
	}
}

func textOf(t *testing.T, r *Report) string {
	t.Helper()
	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}
