package engine

import (
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/tensorqueue"
)

// timeoutReportInterval is the time between two reports of one expired operation by a rank. The rank repeats
// the report because the coordinator ignores the first one if the request or the grant was on its way.
const timeoutReportInterval = time.Second

// waitingPeriod is the time after which expire searches requests that wait for a lock-step cycle. The cycle
// may controller.Never come, because another rank has not entered the one before.
const waitingPeriod = 100 * time.Millisecond

// expire reports operations that have not ended by their deadlines to the coordinator. It searches the
// operations in flight only when the earliest known deadline has passed, so that it costs nothing while no
// operation is late.
func (e *Engine) expire() {
	if e.now < e.due {
		return
	}
	e.due = controller.Never
	for _, s := range e.sets.all {
		s.queue.Each(func(entry *tensorqueue.Entry) {
			switch {
			case entry.Deadline == 0:
			case entry.Deadline <= e.now:
				e.member.Timeout(entry.Set, entry.Request.Name, entry.Timeout)
				entry.Deadline = e.now + timeoutReportInterval
				fallthrough
			default:
				e.due = min(e.due, entry.Deadline)
			}
		})
		report := func(name string, timeout time.Duration) { e.member.Timeout(s.ID, name, timeout) }
		e.due = min(e.due, s.lane.Expire(e.now, timeoutReportInterval, report))
	}
}

// expireShutdown reports to the coordinator that the context of Shutdown has ended, and repeats the report.
func (e *Engine) expireShutdown(l *leaving) {
	if l.expired && (e.expiredDue == controller.Never || e.now >= e.expiredDue) {
		e.member.ExpireShutdown(l.waited)
		e.expiredDue = e.now + timeoutReportInterval
	}
}

// If a rank falls behind, all tensors of a training step stall at about the same time, but not always in the
// same turn. So the log summarizes the stalls of a window of length stallWindow. The first stallLines stalls
// in a window get a line each. If the launcher explains stalls, only the first explainedStallLines stalls get
// one. At the end of the window, the rank logs the number of stalls that got no line.
const (
	stallLines          = 10
	explainedStallLines = 1
	stallWindow         = time.Second
)

// stallLog counts the stalls in a window of time. The first stall begins the window.
type stallLog struct {
	named, unnamed int           // number of stalls with and without a line in the log
	end            time.Duration // the end of the window; meaningless if named is 0
}

// due returns the time at which the number of stalls without a line must be logged.
func (c *stallLog) due() time.Duration {
	if c.unnamed == 0 {
		return controller.Never
	}
	return c.end
}

// reportStalls logs the stalls that the stall inspector has found, and calls OnStall for each of them.
func (e *Engine) reportStalls(events []controller.Event) {
	c := &e.stallLog
	if e.now >= c.end {
		e.closeStallLog()
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

// closeStallLog ends the window and logs the number of stalls that got no line.
func (e *Engine) closeStallLog() {
	if n := e.stallLog.unnamed; n > 0 {
		e.log.Warn("stalled: more tensors have stalled, but are not listed one by one", zap.Int("tensors", n))
	}
	e.stallLog = stallLog{}
}

func (e *Engine) logStall(s *controller.Stall) {
	missing := make([]int, len(s.Missing))
	for i, r := range s.Missing {
		missing[i] = int(r)
	}
	e.log.Warn("stalled: "+s.String(), zap.String("tensor", s.Name), zap.Uint32("process_set", uint32(s.Set)),
		zap.Ints("missing", missing))
}
