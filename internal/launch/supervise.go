package launch

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/hostlist"
)

// phase is how far the end of the job has come.
type phase int

const (
	preparing   phase = iota // the hosts get ready
	running                  // no deadline
	noticing                 // a rank has failed: the others may end by themselves
	terminating              // the others were sent a signal: they may clean up
	killing                  // the others were sent SIGKILL
	forcing                  // the helpers were
	givenUp                  // what is left cannot be killed
)

// event is news of one rank: a report of its helper, or nil for the helper's end. Or it is news of a host, if that is not nil.
type event struct {
	rank   int
	report *report

	host *remote
	// ready says that the host is, refused that it can start no ranks. Else the host is no more, and was heard last at that time.
	ready, refused bool
	store          netip.AddrPort // where it has reached that, if it is ready
	err            error          // why it is not, or no more
	heard          time.Time
}

const (
	// maxNews bounds the events of one rank: two reports and the end.
	maxNews = 3
	// maxHostNews bounds those of a host: ready, refused, and the end.
	maxHostNews = 3
)

// verdictWait is how long a verdict may take to be read. The ranks are gone then: it is there, or it never will be.
const verdictWait = 100 * time.Millisecond

// part is the ranks of one host.
type part interface {
	// send sends s to the process group of the rank with an index, or kills everything of it if it is SIGKILL. It does not wait.
	send(index int, s syscall.Signal)
	// force kills the helpers.
	force()
	// done is closed when nothing of the ranks is left, and all events were told.
	done() <-chan struct{}
	// release has the outputs end. Nothing is sent any more. The error is of the supervision itself.
	release() error
}

// job is one run. Its fields belong to the goroutine of Run, except where noted.
type job struct {
	o       Options
	places  []hostlist.Place // by rank
	hosts   int              // that have ranks
	several bool             // not all ranks are of this host, and each host has an agent
	id      string
	path    string   // of the command
	env     []string // of all ranks

	ranks   []*rank
	parts   []part
	fleet   fleet // of agents
	waiting int   // for hosts that are not ready
	begun   bool  // ranks were started
	console *console
	events  chan event // has room for all that come
	settled chan struct{}
	writers sync.WaitGroup

	phase    phase
	deadline time.Time // of phase, unless running
	failed   bool      // a rank has failed
	signal   syscall.Signal
	first    syscall.Signal // that ended the job, whatever its result, and when it came; 0 if none did
	firstAt  time.Time
	asked    bool  // a signal or ctx has ended the job
	cause    error // ctx's
	aborted  error // why not all ranks could be started

	surveys   context.Context // ends when nobody is left to ask
	surveying bool
	surveyed  chan struct{} // a survey has been made
	quitAt    time.Time     // when SIGQUIT asked for one
}

// run runs the ranks that start starts. That gets the files of their output.
func (j *job) run(ctx context.Context, start func([][2]*os.File) error) (Result, error) {
	files, err := j.openFiles()
	if err != nil {
		return Result{}, err
	}
	j.console = newConsole(j.o.Stdout, j.o.Stderr)
	if err := start(files); err != nil {
		j.abort(err)
	}
	j.supervise(ctx)
	result, err := j.conclude(ctx)
	if j.aborted != nil {
		return result, errors.Join(j.aborted, err)
	}
	return result, err
}

// supervise returns when all helpers are gone, and the orphans of those that were killed, or when that has
// proved impossible.
func (j *job) supervise(ctx context.Context) {
	for _, k := range j.ranks {
		for _, s := range k.streams {
			j.writers.Go(s.run)
		}
	}
	var nobodyLeft context.CancelFunc
	j.surveys, nobodyLeft = context.WithCancel(ctx)
	defer nobodyLeft()
	j.surveyed = make(chan struct{}, 1)
	j.settled = make(chan struct{})
	go func() {
		for _, p := range j.parts {
			<-p.done()
		}
		close(j.settled)
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	done := ctx.Done()
	for j.phase != givenUp {
		var expired <-chan time.Time
		if j.phase != running {
			timer.Reset(time.Until(j.deadline))
			expired = timer.C
		}
		select {
		case e := <-j.events:
			j.hear(e)
		case s := <-j.o.Signals:
			if s != unix.SIGQUIT || !j.heedQuit() {
				j.heed(s)
			}
		case why := <-j.alarms():
			j.survey(why)
		case <-j.surveyed:
			j.surveying = false
		case <-done:
			done = nil
			j.cause = context.Cause(ctx)
			j.asked = true
			j.end(unix.SIGTERM)
		case <-expired:
			j.expire()
		case <-j.settled:
			for len(j.events) > 0 {
				j.hear(<-j.events)
			}
			return
		}
	}
}

// hear takes in the news of a rank.
func (j *job) hear(e event) {
	if e.host != nil {
		j.hearHost(e)
		return
	}
	k := j.ranks[e.rank]
	switch p := e.report; {
	case p == nil:
		k.gone = true
		if !k.ended {
			k.ended = true
			k.exit.Lost, k.exit.Signal, k.exit.At = true, unix.SIGKILL, time.Now()
		}
		j.tell("rank %d: all its processes are gone", e.rank)
	case p.Errno != 0:
		k.ended = true // before it began
		err := newCommandError(j.o.Command[0], p.Errno)
		if j.several {
			err.Host = k.exit.Host
		}
		j.abort(err)
		return
	case p.PID != 0:
		k.exit.PID = p.PID
		j.tell("rank %d: started as process %d", e.rank, p.PID)
	case p.Ended:
		k.ended = true
		k.exit.Code, k.exit.Signal, k.exit.Sent, k.exit.At = p.Code, p.Signal, p.Sent, time.Unix(0, p.At)
		j.tell("rank %d: %s", e.rank, k.exit.describe())
	}
	j.consider(e.rank)
}

// hearHost takes in the news of a host.
func (j *job) hearHost(e event) {
	h := e.host
	switch {
	case e.ready:
		h.ready = true
		j.waiting--
		j.tell("host %s: ready; its ranks meet the others at %v", h.name, e.store)
		if j.waiting == 0 && j.phase == preparing {
			j.begun, j.phase = true, running
			for _, h := range j.fleet.hosts {
				h.out.put(encodeKind(kindBegin))
			}
		}
		return
	case e.refused:
		j.abort(e.err)
		return
	case j.phase == preparing:
		j.abort(&HostError{h.name, e.err})
	}
	var lost []int
	for _, r := range h.ranks {
		k := j.ranks[r]
		k.gone = true
		if !k.ended && j.begun {
			k.ended = true
			k.exit.Lost, k.exit.Signal, k.exit.At = true, unix.SIGKILL, e.heard
			k.exit.Why = fmt.Sprintf("host %s is lost: %v", h.name, e.err)
			lost = append(lost, r)
		}
	}
	for _, r := range lost {
		j.consider(r)
	}
}

// consider decides what rank r's news mean for the others.
func (j *job) consider(r int) {
	k := j.ranks[r]
	alive := 0
	for _, k := range j.ranks {
		if !k.ended {
			alive++
		}
	}
	if k.ended && k.exit.Status() != 0 && !j.asked && !j.failed && j.aborted == nil {
		j.failed = true
		if alive > 0 && j.phase == running {
			j.console.note("rank %d: %s; the others have %v to end", r, k.exit.describe(), j.o.Notice)
			j.enter(noticing, j.o.Notice)
		}
	}
	if alive == 0 && j.phase < terminating {
		// The helpers kill what is left behind without being told; the deadline is for what they cannot.
		j.kill()
	}
}

// heed obeys a signal to the launcher.
func (j *job) heed(s os.Signal) {
	sig, ok := s.(syscall.Signal)
	switch {
	case !ok:
	case !ends(sig):
		j.send(sig)
	case j.isEcho(sig):
	case j.asked:
		if j.phase < killing {
			j.console.note("%s again: killing the ranks", unix.SignalName(sig))
			j.kill()
		}
	default:
		j.asked, j.first, j.firstAt = true, sig, time.Now()
		if !j.failed {
			j.signal = sig
		}
		if j.phase == preparing {
			j.console.note("%s: no rank was started", unix.SignalName(sig))
			j.kill()
			return
		}
		j.console.note("%s: the ranks have %v to end; once more kills them", unix.SignalName(sig), j.o.Grace)
		if sig == unix.SIGINT {
			j.end(unix.SIGINT)
		} else {
			j.end(unix.SIGTERM)
		}
	}
}

// isEcho reports whether s is the signal that has ended the job come again, from the same sender: timeout(1) sends it to its child and
// then to the group that they both are in.
func (j *job) isEcho(s syscall.Signal) bool { return s == j.first && time.Since(j.firstAt) < j.o.Echo }

func ends(s syscall.Signal) bool { return s == unix.SIGINT || s == unix.SIGTERM || s == unix.SIGHUP }

func (j *job) expire() {
	switch j.phase {
	case preparing:
		var late []string
		for _, h := range j.fleet.hosts {
			if !h.ready {
				late = append(late, h.name)
			}
		}
		j.abort(&HostError{strings.Join(late, ", "), fmt.Errorf("not ready within %v", j.o.Start)})
	case noticing:
		j.tell("sending SIGTERM to the ranks that are left")
		j.end(unix.SIGTERM)
	case terminating:
		j.console.note("killing the ranks that are left after %v", j.o.Grace)
		j.kill()
	case killing:
		j.enter(forcing, j.o.Kill)
		for _, p := range j.parts {
			p.force()
		}
	case forcing:
		j.phase = givenUp
	}
}

func (j *job) enter(p phase, d time.Duration) { j.phase, j.deadline = p, time.Now().Add(d) }

// end asks the ranks to end. It shortens no time that is already running out.
func (j *job) end(s syscall.Signal) {
	if j.phase == preparing {
		j.kill()
		return
	}
	if j.phase < terminating {
		j.enter(terminating, j.o.Grace)
	}
	j.send(s)
}

func (j *job) kill() {
	if !j.begun {
		j.fleet.cut() // there is nothing but agents
	}
	j.enter(killing, j.o.Kill)
	j.send(unix.SIGKILL)
}

// send sends s to the ranks' process groups.
func (j *job) send(s syscall.Signal) {
	for _, k := range j.ranks {
		if !k.gone && j.begun {
			k.part.send(k.index, s)
		}
	}
}

// abort ends the job because of a rank that could not be started.
func (j *job) abort(err error) {
	if j.aborted == nil {
		j.aborted = err
	}
	if j.phase < killing {
		j.kill()
	}
}

func (j *job) tell(format string, args ...any) {
	if j.o.Verbose {
		j.console.note(format, args...)
	}
}

// conclude finds the result, lets the output drain and reports.
func (j *job) conclude(ctx context.Context) (Result, error) {
	var errs []error
	if j.phase == givenUp {
		var left []int
		for r, k := range j.ranks {
			if !k.gone {
				left = append(left, r)
			}
		}
		errs = append(errs, fmt.Errorf("launch: processes of ranks %v were sent SIGKILL and are not gone", left))
		j.fleet.cut() // or the output of those would not end
	}
	for _, p := range j.parts {
		errs = append(errs, p.release())
	}
	result := j.result(ctx)
	if j.cause != nil {
		errs = append(errs, fmt.Errorf("launch: %w", j.cause))
	}

	known := j.known()
	written := make(chan struct{})
	var agents error // valid after it
	go func() {
		defer close(written)
		j.writers.Wait()
		agents = j.fleet.dismiss(j.o.Kill)
		if text := j.report(result); text != "" {
			if j.o.Inquiry != nil {
				text += j.o.Inquiry.Epilogue(known, result.culprits())
			}
			j.console.put(chunk{err: true, text: []byte(text)})
		}
		close(j.console.queue)
		<-j.console.done
	}()
	// A job that somebody has ended does not wait long for a reader.
	var patience <-chan time.Time
	done := ctx.Done()
	if j.asked {
		wait := j.o.Grace
		if j.several {
			wait += lastWords // which have a longer way
		}
		timer := time.NewTimer(wait)
		defer timer.Stop()
		patience, done = timer.C, nil
	}
	for {
		select {
		case <-written:
			errs = append(errs, agents)
			for r, k := range j.ranks {
				result.Ranks[r].Stderr = k.streams[1].tail.lines
				for _, s := range k.streams {
					if s.fileErr != nil {
						errs = append(errs, fmt.Errorf("launch: rank %d: output file is incomplete: %w", r, s.fileErr))
					}
				}
			}
			return result, errors.Join(append(errs, j.console.lost)...)
		case s := <-j.o.Signals:
			if sig, ok := s.(syscall.Signal); !ok || !ends(sig) || j.isEcho(sig) {
				continue
			}
		case <-done:
		case <-patience:
		}
		j.console.abandon()
		j.fleet.cut()
		errs = append(errs, j.fleet.dismiss(j.o.Kill))
		return result, errors.Join(append(errs, errors.New("launch: output was lost: nobody has read it"))...)
	}
}
