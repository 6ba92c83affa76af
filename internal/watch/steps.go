package watch

import (
	"slices"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/trace"
)

const (
	// maxSteps is the maximum number of steps that are kept for a reader.
	maxSteps = 256
	// readerTime is how long steps are kept after a reader has asked for them. hvdrun asks every few seconds
	// while somebody reads them.
	readerTime = 10 * time.Second
)

// steps keeps the last steps of rank 0 while somebody reads them. The zero value keeps none.
type steps struct {
	on    bool
	asked time.Duration // when the last reader asked
	// now is the step in progress; its Sequence is 0 if it began before the steps were kept.
	now  trace.Step
	past []trace.Step // the oldest first; the last one has no Held until the loop has cut it
	// held is for how long each rank had held up all others when the last step was cut, or nil.
	held []trace.HeldUp
}

// Steps returns the steps of this epoch that have ended since the one with the given sequence number, at most
// 256 of them. From the first call on they are kept, until there is no call for 10 s. Only rank 0 has steps.
func (o *Observer) Steps(since uint64) (all []trace.Step) {
	o.mu.Lock()
	defer o.mu.Unlock()
	s := &o.steps
	s.on, s.asked = true, o.Since()
	for i := range s.past {
		if p := &s.past[i]; p.Sequence > since && p.Held != nil {
			all = append(all, *p)
		}
	}
	return all
}

// begin ends the step in progress and begins the one with the given numbers. It reports whether the loop must
// cut the steps. The caller holds mu of the Observer.
func (s *steps) begin(now time.Duration, sequence, number uint64) (cut bool) {
	if !s.on {
		return false
	}
	if now-s.asked > readerTime {
		*s = steps{}
		return false
	}
	if s.now.Sequence > 0 {
		s.now.Time = now - s.now.Begun
		if len(s.past) == maxSteps {
			s.past = slices.Delete(s.past, 0, 1)
		}
		s.past = append(s.past, s.now)
	}
	s.now = trace.Step{Sequence: sequence, Number: number, Begun: now}
	return true
}

// CutSteps attributes to the step that has ended for how long ranks have held up all others since its begin.
// The loop calls it before the coordinator handles the requests that a turn has taken. So it has handled only
// requests of the step that has ended.
func (o *Observer) CutSteps(c *controller.Coordinator) {
	if !o.cut.Load() {
		return
	}
	o.cut.Store(false) // a step that ends from now on is cut in the next turn, or together with this one
	held := c.Stats().Late
	o.mu.Lock()
	defer o.mu.Unlock()
	s := &o.steps
	first := true // of several steps that ended in one turn, the waiting counts for the last one
	for i := len(s.past) - 1; i >= 0 && s.past[i].Held == nil; i-- {
		p := &s.past[i]
		p.Held = make([]time.Duration, len(held))
		for r := range held {
			if first && r < len(s.held) {
				p.Held[r] = held[r].Held - s.held[r].Held
			}
		}
		first = false
	}
	s.held = held
}
