package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// phase is how far the end of the job has come.
type phase int

const (
	running     phase = iota // no deadline
	noticing                 // a rank has failed: the others may end by themselves
	terminating              // the others were sent a signal: they may clean up
	killing                  // the others were sent SIGKILL
	forcing                  // the helpers were
	givenUp                  // what is left cannot be killed
)

// event is news of one rank: a report of its helper, or nil for the helper's end.
type event struct {
	rank   int
	report *report
}

// maxEvents bounds the events of one rank: two reports and the end.
const maxEvents = 3

// verdictWait is how long a verdict may take to be read. The ranks are gone then: it is there, or it never will be.
const verdictWait = 100 * time.Millisecond

// job is one run. Its fields belong to the goroutine of Run, except where noted.
type job struct {
	o    Options
	host string
	id   string
	path string   // of the command
	env  []string // of all ranks

	ranks   []*rank
	family  family       // of helpers
	before  map[int]bool // children that this process had before
	console *console
	events  chan event // has room for all that come

	// workers are the goroutines that end with the last helper: the one that reaps and one per rank's reports.
	workers sync.WaitGroup
	settled chan struct{} // closed after them
	reapErr error         // valid after settled
	writers sync.WaitGroup

	phase    phase
	deadline time.Time // of phase, unless running
	failed   bool      // a rank has failed
	signal   syscall.Signal
	asked    bool  // a signal or ctx has ended the job
	cause    error // ctx's
	aborted  error // why not all ranks could be started
}

func (j *job) run(ctx context.Context) (Result, error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return Result{}, fmt.Errorf("launch: standard input of the ranks: %w", err)
	}
	defer null.Close()
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return Result{}, fmt.Errorf("launch: become a subreaper: %w", err)
	}
	// A program that replaces itself by the launcher leaves it its children.
	children, err := listChildren()
	if err != nil {
		return Result{}, err
	}
	j.before = make(map[int]bool, len(children))
	for _, c := range children {
		j.before[c.pid] = true
	}
	files, err := j.openFiles()
	if err != nil {
		return Result{}, err
	}
	j.console = newConsole(j.o.Stdout, j.o.Stderr)
	startErr := j.startAll(null, files)
	if startErr != nil {
		j.abort(startErr)
	}
	j.supervise(ctx)
	result, err := j.conclude(ctx)
	if j.aborted != nil {
		return result, errors.Join(j.aborted, err)
	}
	return result, err
}

// startAll starts the helpers. family.own is complete before anything is reaped.
func (j *job) startAll(null *os.File, files [][2]*os.File) error {
	j.family.own = make(map[int]func(unix.WaitStatus), j.o.NP)
	for r := range j.o.NP {
		k, err := j.start(r, null, files[r])
		if err != nil {
			closeFiles(files[r:])
			return fmt.Errorf("launch: start rank %d: %w", r, err)
		}
		j.ranks = append(j.ranks, k)
		j.family.own[k.helper] = j.helperEnded
	}
	return nil
}

// helperEnded is called with family.mu held.
func (j *job) helperEnded(status unix.WaitStatus) {
	if status.Exited() && status.ExitStatus() == 0 {
		return // it has left nobody behind
	}
	j.family.fate = func(pid, _ int) fate {
		if j.before[pid] {
			return ignored
		}
		return doomed
	}
}

// supervise returns when all helpers are gone, and the orphans of those that were killed, or when that has
// proved impossible.
func (j *job) supervise(ctx context.Context) {
	j.workers.Go(func() { j.reapErr = j.family.reap() })
	for r, k := range j.ranks {
		j.workers.Go(func() { j.listen(r, k) })
		for _, s := range k.streams {
			j.writers.Go(s.run)
		}
	}
	go func() {
		j.workers.Wait()
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
			j.heed(s)
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

// listen turns the helper's reports into events.
func (j *job) listen(r int, k *rank) {
	reports := json.NewDecoder(k.reports)
	for range maxEvents - 1 {
		var p report
		if reports.Decode(&p) != nil {
			break
		}
		j.events <- event{rank: r, report: &p}
	}
	// Only the helper has the other end, so this is the helper's end.
	_, _ = io.Copy(io.Discard, k.reports)
	j.events <- event{rank: r}
}

// hear takes in the news of a rank.
func (j *job) hear(e event) {
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
		j.abort(newCommandError(j.o.Command[0], p.Errno))
		return
	case p.PID != 0:
		k.exit.PID = p.PID
		j.tell("rank %d: started as process %d", e.rank, p.PID)
	case p.Ended:
		k.ended = true
		k.exit.Code, k.exit.Signal, k.exit.Sent, k.exit.At = p.Code, p.Signal, p.Sent, time.Unix(0, p.At)
		j.tell("rank %d: %s", e.rank, k.exit.describe())
	}
	alive := 0
	for _, k := range j.ranks {
		if !k.ended {
			alive++
		}
	}
	if k.ended && k.exit.Status() != 0 && !j.asked && !j.failed && j.aborted == nil {
		j.failed = true
		if alive > 0 && j.phase == running {
			j.console.note("rank %d: %s; the others have %v to end", e.rank, k.exit.describe(), j.o.Notice)
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
	case j.asked:
		if j.phase < killing {
			j.console.note("%s again: killing the ranks", unix.SignalName(sig))
			j.kill()
		}
	default:
		j.asked = true
		if !j.failed {
			j.signal = sig
		}
		j.console.note("%s: the ranks have %v to end; once more kills them", unix.SignalName(sig), j.o.Grace)
		if sig == unix.SIGINT {
			j.end(unix.SIGINT)
		} else {
			j.end(unix.SIGTERM)
		}
	}
}

func ends(s syscall.Signal) bool { return s == unix.SIGINT || s == unix.SIGTERM || s == unix.SIGHUP }

func (j *job) expire() {
	switch j.phase {
	case noticing:
		j.tell("sending SIGTERM to the ranks that are left")
		j.end(unix.SIGTERM)
	case terminating:
		j.console.note("killing the ranks that are left after %v", j.o.Grace)
		j.kill()
	case killing:
		j.enter(forcing, j.o.Kill)
		j.family.mu.Lock()
		defer j.family.mu.Unlock()
		for pid := range j.family.own {
			_ = unix.Kill(pid, unix.SIGKILL) // it is a child and not reaped
		}
	case forcing:
		j.phase = givenUp
	}
}

func (j *job) enter(p phase, d time.Duration) { j.phase, j.deadline = p, time.Now().Add(d) }

// end asks the ranks to end. It shortens no time that is already running out.
func (j *job) end(s syscall.Signal) {
	if j.phase < terminating {
		j.enter(terminating, j.o.Grace)
	}
	j.send(s)
}

func (j *job) kill() {
	j.enter(killing, j.o.Kill)
	j.send(unix.SIGKILL)
}

// send has the helpers send s to their rank's process group, or kill everything if it is SIGKILL. It does not wait: a pipe
// holds 65536 signals.
func (j *job) send(s syscall.Signal) {
	for _, k := range j.ranks {
		if !k.gone {
			_, _ = k.orders.Write([]byte{byte(s)}) // an error is a helper that has just ended
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
	} else if j.reapErr != nil {
		errs = append(errs, j.reapErr)
	}
	for _, k := range j.ranks {
		k.orders.Close()
		k.reports.Close()
		for _, s := range k.streams {
			s.finish()
		}
	}
	result := j.result(ctx)
	if j.cause != nil {
		errs = append(errs, fmt.Errorf("launch: %w", j.cause))
	}

	written := make(chan struct{})
	go func() {
		defer close(written)
		j.writers.Wait()
		if text := j.report(result); text != "" {
			j.console.put(chunk{err: true, text: []byte(text)})
		}
		close(j.console.queue)
		<-j.console.done
	}()
	// A job that somebody has ended does not wait long for a reader.
	var patience <-chan time.Time
	done := ctx.Done()
	if j.asked {
		timer := time.NewTimer(j.o.Grace)
		defer timer.Stop()
		patience, done = timer.C, nil
	}
	for {
		select {
		case <-written:
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
			if sig, ok := s.(syscall.Signal); !ok || !ends(sig) {
				continue
			}
		case <-done:
		case <-patience:
		}
		j.console.abandon()
		return result, errors.Join(append(errs, errors.New("launch: output was lost: nobody has read it"))...)
	}
}
