package engine

import (
	"math"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/tensorqueue"
)

// never is a time that does not come.
const never = time.Duration(math.MaxInt64)

// complainAgain is the time between two complaints of a rank about one operation. The coordinator ignores
// the first if the answer was on its way.
const complainAgain = time.Second

// expire tells the coordinator of operations that have run out of time. The search over what is in flight happens only when
// the earliest deadline known has passed, so operations that are in time cost nothing.
func (e *Engine) expire() {
	if e.now < e.due {
		return
	}
	e.due = never
	for _, l := range e.lanes.all {
		l.queue.Each(func(entry *tensorqueue.Entry) {
			switch {
			case entry.Deadline == 0:
			case entry.Deadline <= e.now:
				e.member.Timeout(entry.Set, entry.Request.Name, entry.Timeout)
				entry.Deadline = e.now + complainAgain
				fallthrough
			default:
				e.due = min(e.due, entry.Deadline)
			}
		})
	}
}

// When a rank does not follow, all tensors of a step stall at once, if not in one turn: in a stallWindow so many are logged
// one by one, and at its end how many more there were.
const (
	stallLines          = 10
	explainedStallLines = 1
	stallWindow         = time.Second
)

// complaints counts the stalls of a window, which the first of them opens.
type complaints struct {
	named, unnamed int
	end            time.Duration // of the window; says nothing if none is named
}

// due returns when the unnamed are to be logged.
func (c *complaints) due() time.Duration {
	if c.unnamed == 0 {
		return never
	}
	return c.end
}

// reportStalls passes on what the stall inspector found.
func (e *Engine) reportStalls(events []controller.Event) {
	c := &e.complaints
	if e.now >= c.end {
		e.closeComplaints()
	}
	lines := stallLines
	if len(events) > 0 && e.cfg.StallsExplained != nil && e.cfg.StallsExplained() {
		lines = explainedStallLines
	}
	for _, ev := range events {
		s := ev.Stall
		if s == nil {
			continue
		}
		if c.named == 0 {
			c.end = e.now + stallWindow
		}
		if c.named < lines {
			c.named++
			e.logStall(s)
		} else {
			c.unnamed++
		}
		if e.cfg.OnStall != nil {
			e.cfg.OnStall(s)
		}
	}
}

// closeComplaints ends the window.
func (e *Engine) closeComplaints() {
	if n := e.complaints.unnamed; n > 0 {
		e.log.Warn("stalled: more tensors", zap.Int("tensors", n))
	}
	e.complaints = complaints{}
}

func (e *Engine) logStall(s *controller.Stall) {
	missing := make([]int, len(s.Missing))
	for i, r := range s.Missing {
		missing[i] = int(r)
	}
	e.log.Warn("stalled: "+s.String(), zap.String("tensor", s.Name), zap.Uint32("process_set", uint32(s.Set)), zap.Ints("missing", missing))
}
