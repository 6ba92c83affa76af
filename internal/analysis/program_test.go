package analysis

import (
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/trace"
)

// If there are more steps than entries, the entries stand for more and more steps, and no time is lost.
func TestManySteps(t *testing.T) {
	for _, n := range []int{1, maxSteps, maxSteps + 1, 5*maxSteps + 3} {
		var s steps
		for i := range n {
			number := uint64(100 + i)
			s.begin(time.Duration(10*i), &number, 2)
			add(&s.current().Held, i%2, 1)
		}
		s.current().Length = time.Duration(10*n) - s.current().Begin
		next, at, held := uint64(100), time.Duration(0), time.Duration(0)
		for i, step := range s.all {
			if step.Number != next || step.Begin != at || step.Length != 10*time.Duration(step.Count) ||
				step.Count != s.per && i < len(s.all)-1 {
				t.Fatalf("%d steps: got %+v, want step %d, which begins at %v", n, step, next, at)
			}
			next, at = next+uint64(step.Count), at+step.Length
			for _, d := range step.Held {
				held += d
			}
		}
		if next != uint64(100+n) || held != time.Duration(n) || len(s.all) > maxSteps {
			t.Errorf("%d steps: got %d entries until step %d, and the time %v", n, len(s.all), next, held)
		}
	}
}

// A gap counts for the innermost range, also if ranges end after the gap, and for no range otherwise.
func TestDoing(t *testing.T) {
	p := new(program)
	p.inRange(interval{"inner", 10, 20})
	p.heldUp(5, 40)
	p.inRange(interval{"after", 42, 50})
	p.inRange(interval{"outer", 8, 60})
	p.inRange(interval{"end", 30, 70})
	want := []Doing{{"outer", 22}, {"inner", 10}, {"", 3}}
	if got := p.did(35); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// A range is not compared with the gaps before it, of which there are many in a long job.
func TestRangeAfterManyGaps(t *testing.T) {
	p := &program{ranges: make([]interval, 0, 2*maxRecent)}
	for i := range time.Duration(maxRecent) {
		p.heldUp(10*i, 10*i+1)
	}
	at := p.gaps[maxRecent-1].end
	if n := testing.AllocsPerRun(maxRecent, func() {
		p.inRange(interval{"range", at, at + 5})
		at += 5
	}); n > 0 || len(p.gaps) != maxRecent {
		t.Errorf("a range takes %g allocations, and %d gaps are left, want 0 and %d", n, len(p.gaps), maxRecent)
	}
}

// Late forgets names of tensors if a program has a new one for each operation. The times for which a rank
// held up the others with a tensor are added up nevertheless.
func TestNamesOfTensorsAreForgotten(t *testing.T) {
	l := NewLate(func(*Member, time.Duration, time.Duration, time.Duration) {})
	members := []*Member{l.Member(0, Clock{Known: true}), l.Member(1, Clock{Known: true})}
	late := func(number uint64) {
		at := time.Duration(number) * time.Second
		for rank, m := range members {
			l.Add(m, &trace.Operation{Records: []trace.Record{{Number: number, Kind: message.Allreduce,
				Name: "grad.0", Submitted: at + time.Duration(rank)*5, Granted: at + 6, Ended: at + 7}}})
		}
	}
	late(1)
	for i := range 3 * maxTensors {
		name := strconv.Itoa(i)
		if got := l.tensor(name); got.name != name || got != l.tensor(name) || len(l.tensors) > maxTensors {
			t.Fatalf("name %d: got %+v, and %d names are known, want at most %d", i, got, len(l.tensors), maxTensors)
		}
	}
	late(2)
	if r := l.Findings().Ranks[1]; r.Origin != "grad.0" || r.OriginHeld != 10 {
		t.Errorf("got %q for %v, want grad.0 for 10ns", r.Origin, r.OriginHeld)
	}
}
