package launch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
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

// reaction is what the supervisor does about the end of a rank's command.
type reaction int

const (
	goOn    reaction = iota // the other ranks go on
	failJob                 // the job has failed: the other ranks end by themselves or are ended
)

// policy decides what follows the end of a rank's command.
type policy func(rank int, e Exit) reaction

// endAll returns the policy of a job in which no rank is of use without the others.
func endAll(_ int, e Exit) reaction {
	if e.Status() != 0 {
		return failJob
	}
	return goOn
}

// verdictWait is how long a verdict may take to be read. The ranks are gone then: it is there, or it never will be.
const verdictWait = 100 * time.Millisecond

// job is one run. Its fields belong to the goroutine of Run, except where noted.
type job struct {
	o       Options
	places  []Place // by rank
	hosts   int     // that have ranks
	several bool    // not all ranks are of this host
	id      string
	env     []string // of all ranks
	policy  policy

	ranks   []*rank
	conns   []*agentConn // by host
	waiting int          // for agents that are not ready
	open    int          // conns that are not over
	begun   bool         // ranks were started

	family      family
	commands    *batch         // those that reach agents
	commandErrs sync.WaitGroup // goroutines that read the standard error of those
	dropped     atomic.Bool    // cutAll was called: nobody wants to know what the agents have to say

	console *console
	events  chan func()    // run by supervise
	done    chan struct{}  // closed when supervise has returned
	writers sync.WaitGroup // the goroutines that attend to the agents, and the streams

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

// run runs the job on its hosts.
func (j *job) run(ctx context.Context) (Result, error) {
	j.console = newConsole(j.o.Stdout, j.o.Stderr)
	if err := j.makeRanks(); err != nil {
		for _, c := range j.conns {
			c.close()
		}
		j.console.close()
		return Result{}, err
	}
	j.enter(preparing, j.o.Start)
	j.connect()
	j.supervise(ctx)
	result, err := j.conclude(ctx)
	if j.aborted != nil {
		return result, errors.Join(j.aborted, err)
	}
	return result, err
}

// post has the supervisor call f. It reports whether there still is one.
func (j *job) post(f func()) bool {
	select {
	case j.events <- f:
		return true
	case <-j.done:
		return false
	}
}

// supervise returns when no process of the ranks is left on any host, or when that has proved impossible.
func (j *job) supervise(ctx context.Context) {
	defer close(j.done)
	var nobodyLeft context.CancelFunc
	j.surveys, nobodyLeft = context.WithCancel(ctx)
	defer nobodyLeft()
	timer := time.NewTimer(0)
	defer timer.Stop()
	done := ctx.Done()
	for j.open > 0 && j.phase != givenUp {
		var expired <-chan time.Time
		if j.phase != running {
			timer.Reset(time.Until(j.deadline))
			expired = timer.C
		}
		select {
		case f := <-j.events:
			f()
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
		}
	}
}

// handleReport records a report on a rank and decides what it means for the others.
func (j *job) handleReport(k *rank, p *report) {
	switch {
	case k.gone:
		return
	case p.Gone:
		k.gone = true
		if !k.ended {
			k.lose(time.Now(), "")
		}
		j.tell("rank %d: all its processes are gone", k.number)
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
		j.tell("rank %d: started as process %d", k.number, p.PID)
	case p.Ended:
		k.ended = true
		k.exit.Code, k.exit.Signal, k.exit.Sent, k.exit.At = p.Code, p.Signal, p.Sent, time.Unix(0, p.At)
		j.tell("rank %d: %s", k.number, k.exit.describe())
	}
	j.consider(k)
}

// lose records that nobody can say how the rank's command ended.
func (k *rank) lose(at time.Time, why string) {
	k.gone, k.ended = true, true
	k.exit.Lost, k.exit.Signal, k.exit.At, k.exit.Why = true, unix.SIGKILL, at, why
}

// handleReady records that a host can start its ranks. When all can, they are started.
func (j *job) handleReady(c *agentConn) {
	if c.ready {
		return
	}
	c.ready = true
	j.waiting--
	j.tell("host %s: ready", c.host)
	if j.waiting == 0 && j.phase == preparing {
		j.begun, j.phase = true, running
		j.order(order{Begin: true})
	}
}

// handleLoss records that the connection to an agent ended before the agent had sent everything, and at what time the agent was
// last heard.
func (j *job) handleLoss(c *agentConn, err error, heard time.Time) {
	if j.phase == preparing {
		j.abort(&HostError{c.host, err})
	}
	var lost []*rank
	for _, k := range c.ranks {
		if !k.ended && j.begun {
			k.lose(heard, fmt.Sprintf("host %s is lost: %v", c.host, err))
			lost = append(lost, k)
		}
		k.gone = true
	}
	if len(lost) == 0 && j.begun {
		c.cutShort(j, err)
	}
	j.setOver(c)
	for _, k := range lost {
		j.consider(k)
	}
}

// setOver records that no process of a host's ranks is left.
func (j *job) setOver(c *agentConn) {
	if !c.over {
		c.over = true
		j.open--
	}
}

// consider decides what the state of a rank means for the others.
func (j *job) consider(k *rank) {
	alive := 0
	for _, k := range j.ranks {
		if !k.ended {
			alive++
		}
	}
	if k.ended && !j.asked && !j.failed && j.aborted == nil && j.policy(k.number, k.exit) == failJob {
		j.failed = true
		if alive > 0 && j.phase == running {
			j.console.note("rank %d: %s; the others have %v to end", k.number, k.exit.describe(), j.o.Notice)
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
		for _, c := range j.conns {
			if !c.ready {
				late = append(late, c.host)
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
		j.order(order{Force: true})
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
		j.cutAll() // there is nothing but agents
	}
	j.enter(killing, j.o.Kill)
	j.send(unix.SIGKILL)
}

// send sends s to the ranks' process groups.
func (j *job) send(s syscall.Signal) {
	if j.begun {
		j.order(order{Signal: s})
	}
}

// order sends an order to all agents. It does not wait.
func (j *job) order(o order) {
	for _, c := range j.conns {
		if c.over {
			continue
		}
		select {
		case c.orders <- o:
		default:
			j.cut(c) // it takes none
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
		j.cutAll() // or the output of those would not end
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
		agents = j.dismiss(j.o.Kill)
		for _, c := range j.conns {
			agents = errors.Join(agents, c.lost)
		}
		if text := j.report(result); text != "" {
			if j.o.Inquiry != nil {
				text += j.o.Inquiry.Epilogue(known, result.culprits())
			}
			j.console.put(chunk{err: true, text: []byte(text)})
		}
		j.console.close()
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
		j.cutAll()
		errs = append(errs, j.dismiss(j.o.Kill))
		return result, errors.Join(append(errs, errors.New("launch: output was lost: nobody has read it"))...)
	}
}
