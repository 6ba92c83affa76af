package launch

import (
	"context"
	"sync"
	"time"
)

// quitRepeat is the time after a SIGQUIT during which the launcher forwards another SIGQUIT to the ranks.
const quitRepeat = 5 * time.Second

// Inquiry holds functions that find out what the ranks are doing. The launcher itself sees only that their
// processes are alive, which is also the case if they hang. Survey and Epilogue are called in a goroutine of
// their own, one call at a time. The launcher prints the texts that the functions return on Options.Stderr.
type Inquiry struct {
	// Survey asks the ranks what they are doing and returns a text about it. The parameter why is the reason
	// for the survey. known[r] is a clause that says what the launcher knows about the process of rank r.
	// When no rank is left to ask, ctx is cancelled and Survey must return soon.
	Survey func(ctx context.Context, why string, known []string) string
	// Alarms delivers reasons for surveys. SIGQUIT starts a survey too, unless it is the second SIGQUIT
	// within 5 s. A reason that arrives during a survey is dropped.
	Alarms <-chan string
	// Looks delivers functions that get what the launcher knows about the processes, in the form of the
	// parameter known of Survey. The supervisor's goroutine calls them, so they must not block.
	Looks <-chan func(known []string)
	// Epilogue returns a text that is printed at the end, after the report of a failure if failed is set. It
	// is called when all ranks have ended, unless a signal or ctx has ended the job, and must return soon.
	// known has the same meaning as in Survey. culprits holds the ranks that the verdict of the survivors
	// names. It is nil if there is no verdict.
	Epilogue func(known []string, culprits []int, failed bool) string
}

// surveys starts surveys of what the ranks are doing, one at a time. The supervisor's goroutine uses it.
type surveys struct {
	o       *Options
	console *console
	known   func() []string // what the launcher knows about the processes
	ctx     context.Context // cancelled when no rank is left to ask
	asking  bool
	asked   chan struct{}  // receives a value when a survey has ended
	working sync.WaitGroup // the goroutine of the survey
	quitAt  time.Time      // when SIGQUIT last started a survey
}

// quit handles SIGQUIT. If the signal starts a survey, or is dropped because a survey is in progress, quit
// returns true. If the signal must be forwarded to the ranks, it returns false.
func (s *surveys) quit() bool {
	if s.o.Inquiry == nil || !s.quitAt.IsZero() && time.Since(s.quitAt) < quitRepeat {
		return false
	}
	s.quitAt = time.Now()
	s.start("SIGQUIT")
	return true
}

// start starts a survey and passes the reason in why to it. If a survey is in progress, it does nothing.
func (s *surveys) start(why string) {
	if s.asking {
		s.console.verbosef("%s: ignored, because the %s are already being asked for a report", why,
			s.o.processes())
		return
	}
	s.asking = true
	known := s.known()
	s.working.Go(func() {
		text := s.o.Inquiry.Survey(s.ctx, why, known)
		if text != "" {
			s.console.put(chunk{err: true, text: []byte(text)})
		}
		// This send does not block, because the channel has room for one value and only one survey runs at a
		// time.
		s.asked <- struct{}{}
	})
}

// alarms returns the channel of reasons for surveys, or nil if the job has no such channel.
func (s *surveys) alarms() <-chan string {
	if s.o.Inquiry == nil {
		return nil
	}
	return s.o.Inquiry.Alarms
}

// looks returns the channel of functions that get what is known about the processes, or nil.
func (s *surveys) looks() <-chan func(known []string) {
	if s.o.Inquiry == nil {
		return nil
	}
	return s.o.Inquiry.Looks
}
