package watch

import (
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/controller"
)

// If a rank falls behind, all tensors of a training step stall at about the same time, but not always in the
// same turn. So the log summarizes the stalls of a window of length stallWindow. The first stallLines stalls
// in a window get a line each. If the launcher explains stalls, only the first explainedStallLines stalls get
// one. At the end of the window, the rank logs the number of stalls that got no line.
const (
	stallLines          = 10
	explainedStallLines = 1
	stallWindow         = time.Second
)

// Stalls logs the stalls that the stall inspector finds at rank 0. Only the loop may use it.
type Stalls struct {
	log *zap.Logger
	// explained reports whether the launcher explains stalls. It may be nil.
	explained func() bool
	// report is called with each stall. It may be nil.
	report func(*controller.Stall)
	window
}

// window counts the stalls in a window of time. The first stall begins the window.
type window struct {
	named, unnamed int           // number of stalls with and without a line in the log
	end            time.Duration // the end of the window; meaningless if named is 0
}

// NewStalls returns a log of stalls. explained reports whether the launcher prints a report of all waiting
// operations when it receives a stall, and report is called with each stall. Both may be nil.
func NewStalls(log *zap.Logger, explained func() bool, report func(*controller.Stall)) *Stalls {
	return &Stalls{log: log, explained: explained, report: report}
}

// Due returns the time at which Add must be called, because the number of stalls without a line must be
// logged.
func (s *Stalls) Due() time.Duration {
	if s.unnamed == 0 {
		return controller.Never
	}
	return s.end
}

// Add logs the stalls among the events that have happened by the time now, and reports each of them.
func (s *Stalls) Add(now time.Duration, events []controller.Event) {
	if now >= s.end {
		s.Close()
	}
	lines := stallLines
	if len(events) > 0 && s.explained != nil && s.explained() {
		lines = explainedStallLines
	}
	for _, ev := range events {
		if ev.Stall == nil {
			continue
		}
		if s.named == 0 {
			s.end = now + stallWindow
		}
		if s.named < lines {
			s.named++
			s.logStall(ev.Stall)
		} else {
			s.unnamed++
		}
		if s.report != nil {
			s.report(ev.Stall)
		}
	}
}

// Close ends the window and logs the number of stalls that got no line.
func (s *Stalls) Close() {
	if n := s.unnamed; n > 0 {
		s.log.Warn("stalled: more tensors have stalled, but are not listed one by one", zap.Int("tensors", n))
	}
	s.window = window{}
}

func (s *Stalls) logStall(stall *controller.Stall) {
	missing := make([]int, len(stall.Missing))
	for i, r := range stall.Missing {
		missing[i] = int(r)
	}
	s.log.Warn("stalled: "+stall.String(), zap.String("tensor", stall.Name),
		zap.Uint32("process_set", uint32(stall.Set)), zap.Ints("missing", missing))
}
