package launch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/internal/joblink"
)

// phase is a stage in the life of a job, from its start to its forced end.
type phase int

const (
	preparing   phase = iota // the agents of the hosts get ready to start ranks
	running                  // the ranks run, and there is no deadline
	noticing                 // a rank has failed, and the other ranks may end by themselves
	terminating              // the ranks were sent a signal and may clean up
	killing                  // the ranks were sent SIGKILL
	forcing                  // the helpers were sent SIGKILL
	givenUp                  // the remaining processes cannot be killed
)

// job is the state of one Run. Its fields belong to the goroutine of Run unless noted otherwise.
type job struct {
	o    *Options
	spec *spec

	ranks []*rank
	begun bool // ranks were started

	restarts []Restart
	members  membership

	agents  agents
	inbox   inbox
	console *console

	phase    phase
	deadline time.Time // end of the phase; phase running has no deadline
	failed   bool      // a rank has failed
	failedAt time.Time // when failed was set
	first    int       // the rank because of which failed was set
	signal   syscall.Signal
	ending   syscall.Signal // the first signal that ended the job, even if a rank had failed before, or 0
	echoes   time.Time      // until when the signal in ending may arrive again as the same signal
	relayed  time.Time      // until when the launcher may get the SIGTERM that an agent got first, or 0
	asked    bool           // a signal or the end of ctx has ended the job
	cause    error          // the cause of ctx, if ctx ended the job
	aborted  error          // why some ranks could not be started
	settled  bool           // the verdict was read, if there was one
	verdict  *joblink.Verdict

	surveys     surveys
	supervision context.Context // cancelled when supervise returns
	watchers    sync.WaitGroup  // goroutines that wait for ranks that hang, and for hosts
}

func newJob(s *spec) *job {
	j := &job{o: s.o, spec: s, console: newConsole(s.o.Stdout, s.o.Stderr),
		inbox: inbox{calls: make(chan func()), done: make(chan struct{})}}
	j.console.verbose = s.o.Verbose
	j.agents = agents{spec: s, console: j.console, inbox: &j.inbox, supervisor: j}
	j.surveys = surveys{o: s.o, console: j.console, known: j.known, asked: make(chan struct{}, 1)}
	return j
}

// run starts the job on its hosts, supervises it and returns its result.
func (j *job) run(ctx context.Context) (Result, error) {
	if err := j.makeRanks(); err != nil {
		for _, c := range j.agents.conns {
			c.close()
		}
		j.console.close()
		return Result{}, err
	}
	j.enter(preparing, j.o.Start)
	if j.o.Elastic == nil {
		j.agents.connect(j.agents.conns, j.agents.routes(ctx, j.agents.conns, nil))
	}
	j.supervise(ctx)
	result, err := j.conclude(ctx)
	if j.aborted != nil {
		return result, errors.Join(j.aborted, err)
	}
	return result, err
}

// supervise handles events until no process of the ranks is left on any host, or until it gives up because
// processes cannot be killed.
func (j *job) supervise(ctx context.Context) {
	defer close(j.inbox.done)
	var end context.CancelFunc
	j.supervision, end = context.WithCancel(ctx)
	defer end()
	j.surveys.ctx = j.supervision
	j.watchHung()
	if j.o.Elastic != nil {
		j.beginElastic()
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	done := ctx.Done()
	unread := j.console.unread
	for (j.agents.open > 0 || j.mayStart()) && j.phase != givenUp {
		var expired <-chan time.Time
		at := j.deadline
		if j.phase == running {
			at = j.nextRestart()
			if j.o.Elastic != nil {
				at = j.nextTick()
			}
		}
		if !at.IsZero() {
			timer.Reset(time.Until(at))
			expired = timer.C
		}
		select {
		case f := <-j.inbox.calls:
			f()
		case f := <-j.memberEvents():
			j.tell(f)
		case s := <-j.o.Signals:
			if s != unix.SIGQUIT || !j.surveys.quit() {
				j.handleSignal(s)
			}
		case why := <-j.surveys.alarms():
			j.surveys.start(why)
		case look := <-j.surveys.looks():
			look(j.known())
		case <-j.surveys.asked:
			j.surveys.asking = false
		case <-j.o.Failed:
			j.handleFailure()
		case err := <-unread:
			unread = nil
			// Ctrl-C also ends the reader, and perhaps before its signal arrives here.
			time.AfterFunc(j.o.Echo, func() { j.inbox.post(func() { j.handleUnread(err) }) })
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

// handleReport updates the state of rank k from the report p and acts on the change.
func (j *job) handleReport(k *rank, p *report) {
	switch {
	case k.gone:
		return
	case p.Gone:
		k.gone = true
		if !k.ended {
			k.markLost(time.Now(), "")
		}
		j.console.verbosef("%s: all its processes have ended", k.title)
	case p.Errno != 0:
		k.ended = true // the command was never started
		err := newCommandError(j.o.Command[0], p.Errno)
		if j.spec.several {
			err.Host = k.exit.Host
		}
		if j.o.Elastic == nil && k.restarts == 0 || j.o.Elastic != nil && !j.members.machine.HasRoster() {
			j.stopMachine()
			j.abort(err)
			return
		}
		k.exit.Code, k.exit.At, k.exit.Why = err.Status, time.Now(), strings.TrimPrefix(err.Error(), "launch: ")
	case p.PID != 0:
		k.exit.PID, k.started = p.PID, time.Now()
		j.console.verbosef("%s: started as process %d", k.title, p.PID)
	case p.Ended:
		k.ended = true
		k.exit.Code, k.exit.Signal, k.exit.Sent, k.exit.At = p.Code, p.Signal, p.Sent, time.Unix(0, p.At)
		j.console.verbosef("%s: %s", k.title, k.exit.Describe())
	}
	j.consider(k)
	j.restartDue()
}

// markLost records that the launcher cannot learn how the rank's command ended. It stores at and why in
// k.exit.
func (k *rank) markLost(at time.Time, why string) {
	k.gone, k.ended = true, true
	k.exit.Lost, k.exit.Signal, k.exit.At, k.exit.Why = true, unix.SIGKILL, at, why
}

// handleReady records that a host is ready to start its ranks. When all hosts are ready, it orders their
// agents to begin.
func (j *job) handleReady(c *agentConn) {
	if c.ready {
		return
	}
	c.ready = true
	j.console.verbosef("host %s: ready", c.host)
	if j.o.Elastic != nil {
		j.handleElasticReady(c)
		return
	}
	waits := func(c *agentConn) bool { return !c.ready }
	if j.phase == preparing && !slices.ContainsFunc(j.agents.conns, waits) {
		j.begun, j.phase = true, running
		j.agents.sendAll(order{Begin: true})
	}
}

// handleRefusal handles that the agent of c cannot be started, or cannot start its ranks.
func (j *job) handleRefusal(c *agentConn, err error) {
	switch {
	case j.o.Elastic != nil:
		j.loseAgent(c, err)
	case slices.ContainsFunc(c.ranks, func(k *rank) bool { return k.restarts > 0 }):
		j.dropAgent(c, err)
	default:
		j.abort(err)
	}
}

// handleLoss records that the connection to an agent ended with err before the agent had sent everything.
// heard is when the launcher last received something from the agent.
func (j *job) handleLoss(c *agentConn, err error, heard time.Time) {
	if j.phase == preparing {
		j.abort(&HostError{c.host, err})
	}
	var lost []*rank
	for _, k := range j.ranks {
		if k.conn != c {
			continue
		}
		if (!k.ended || k.pending() || k.waits) && j.begun {
			k.again, k.waits = time.Time{}, false
			k.markLost(heard, fmt.Sprintf("lost host %s: %v", c.host, err))
			lost = append(lost, k)
		}
		k.gone = true
	}
	switch {
	case len(lost) > 0 || !j.begun || !c.ready || c.dropped.Load():
	case j.mayStart():
		j.console.note("lost host %s, which had no rank any more: %v", c.host, err)
	default:
		c.cutShort(&j.agents, err)
	}
	j.agents.setOver(c)
	if len(lost) > 0 {
		j.consider(lost...)
	}
}

// consider is called when the state of ranks has changed. It acts if a rank or the job has failed, or if the
// commands of all ranks have ended.
func (j *job) consider(ranks ...*rank) {
	if j.o.Elastic != nil {
		j.considerMembers(ranks...)
		return
	}
	for _, k := range ranks {
		j.considerRank(k)
	}
	j.endIfOver()
}

// considerRank acts if rank k has failed.
func (j *job) considerRank(k *rank) {
	if k.ended && !k.pending() && !j.asked && !j.failed && j.aborted == nil {
		switch {
		case k.exit.Status() != 0 && j.mayRestart(k):
			j.planRestart(k)
		case k.exit.Status() != 0:
			j.fail(k)
		case j.o.Starter != "":
			if j.settleVerdict(true); j.verdict != nil {
				j.fail(k)
			}
		case k.number == 0: // perhaps the scheduler, without which no node can return
			if first := j.cancelRestarts(); first != nil {
				first.exit.Restarting = false
				j.fail(first)
			}
		}
	}
}

// endIfOver kills what is left if the commands of all ranks have ended.
func (j *job) endIfOver() {
	if j.alive() == 0 && j.phase < terminating {
		// The helpers kill the remaining processes even without an order. j.kill is needed because it sets a
		// deadline for processes that the helpers cannot kill.
		j.kill()
	}
}

// alive returns the number of ranks whose commands have not ended or are to be started again.
func (j *job) alive() (n int) {
	for _, k := range j.ranks {
		if !k.ended || k.pending() || k.waits {
			n++
		}
	}
	return n
}

// fail records that the job has failed, because rank k has. The other ranks must end, and are killed if they
// do not.
func (j *job) fail(k *rank) {
	k.again = time.Time{}
	j.cancelRestarts()
	j.failed, j.failedAt, j.first = true, time.Now(), k.number
	if j.alive() > 0 && j.phase == running {
		how := k.exit.Describe()
		if !k.ended {
			how = k.hung
		}
		j.console.note("%s: %s%s; waiting %v for the other %s to end", k.title, how, k.restarted(),
			j.o.Notice, j.o.processes())
		j.enter(noticing, j.o.Notice)
	}
}

// handleFailure is called when a rank that Options.Starter has started has failed.
func (j *job) handleFailure() {
	if j.phase != running {
		return // it has ended, or must end already
	}
	j.failed, j.failedAt = true, time.Now()
	j.console.note("a rank has failed; waiting %v for %s to end", j.o.Notice, j.o.Starter)
	j.enter(noticing, j.o.Notice)
}

// handleSignal handles a signal that was sent to the launcher. It ends the job, kills the ranks, or forwards
// the signal.
func (j *job) handleSignal(s os.Signal) {
	sig, ok := s.(syscall.Signal)
	switch {
	case !ok:
	case !ends(sig):
		j.send(sig)
	case j.isEcho(sig):
	case j.asked:
		if j.phase < killing {
			j.console.note("%s again: killing the %s", unix.SignalName(sig), j.o.processes())
			j.kill()
		}
	default:
		j.asked, j.ending, j.echoes = true, sig, time.Now().Add(j.o.Echo)
		if !j.failed {
			j.signal = sig
		}
		if j.phase == preparing {
			j.console.note("%s: stopping before any %s was started", unix.SignalName(sig), j.o.process())
			j.kill()
			return
		}
		j.console.note("%s: waiting %v for the %s to end; a second signal kills them",
			unix.SignalName(sig), j.o.Grace, j.o.processes())
		if sig == unix.SIGINT {
			j.end(unix.SIGINT)
		} else {
			j.end(unix.SIGTERM)
		}
	}
}

// handleUnread ends the job as SIGTERM does, because its output is not read any more. err is the error of a
// write.
func (j *job) handleUnread(err error) {
	if j.asked || j.failed || j.phase >= terminating {
		return
	}
	j.asked, j.signal = true, unix.SIGPIPE
	reason := strings.TrimPrefix(err.Error(), "launch: ")
	if j.phase == preparing {
		j.console.note("%s: stopping before any %s was started", reason, j.o.process())
		j.kill()
		return
	}
	j.console.note("%s; waiting %v for the %s to end; a signal kills them", reason, j.o.Grace, j.o.processes())
	j.end(unix.SIGTERM)
}

// isEcho reports whether s repeats the signal that has ended the job, so soon after it that both probably
// come from the same sender. timeout(1), for instance, sends a signal to its child and then to the process
// group of both. If an agent got the signal first, the launcher may get it later, once.
func (j *job) isEcho(s syscall.Signal) bool {
	now := time.Now()
	if s == j.ending && now.Before(j.relayed) {
		j.relayed, j.echoes = time.Time{}, now.Add(j.o.Echo)
	}
	return s == j.ending && now.Before(j.echoes)
}

func ends(s syscall.Signal) bool { return s == unix.SIGINT || s == unix.SIGTERM || s == unix.SIGHUP }

func (j *job) expire() {
	switch j.phase {
	case running:
		j.restartDue()
		j.tell((*elastic.Machine).Tick)
	case preparing:
		var late []string
		for _, c := range j.agents.conns {
			if !c.ready {
				late = append(late, c.host)
			}
		}
		j.abort(&HostError{strings.Join(late, ", "), notReady(j.o.Start)})
	case noticing:
		j.console.verbosef("sending SIGTERM to the %s that are still alive", j.o.processes())
		j.end(unix.SIGTERM)
	case terminating:
		j.console.note("killing the %s that are still alive after %v", j.o.processes(), j.o.Grace)
		j.kill()
	case killing:
		j.enter(forcing, j.o.Kill)
		j.agents.sendAll(order{Force: true})
	case forcing:
		j.phase = givenUp
	}
}

func (j *job) enter(p phase, d time.Duration) { j.phase, j.deadline = p, time.Now().Add(d) }

// end asks the ranks to end by sending them signal s. If the ranks already have a deadline for their end, end
// does not change it.
func (j *job) end(s syscall.Signal) {
	if j.phase == preparing {
		j.kill()
		return
	}
	if j.failed {
		j.settleVerdict(false)
	}
	j.stopMachine()
	j.cancelRestarts()
	if j.phase < terminating {
		j.enter(terminating, j.o.Grace)
	}
	j.send(s)
}

func (j *job) kill() {
	if !j.begun {
		j.agents.cutAll() // there are only agents, because no rank was started
	}
	j.stopMachine()
	j.cancelRestarts()
	j.enter(killing, j.o.Kill)
	j.send(unix.SIGKILL)
}

// send sends s to the process groups of the ranks if the ranks were started.
func (j *job) send(s syscall.Signal) {
	if j.begun {
		j.agents.sendAll(order{Signal: s})
	}
}

// abort ends the job because ranks could not be started.
func (j *job) abort(err error) {
	if j.aborted == nil {
		j.aborted = err
	}
	if j.phase < killing {
		j.kill()
	}
}

// known returns a clause for each rank that says what the launcher knows about its process. It returns nil
// if the launcher has not started the ranks itself.
func (j *job) known() []string {
	switch {
	case j.o.Starter != "":
		return nil
	case j.o.Elastic != nil:
		return reporter{j.spec, j.members.ranks(j.members.roster)}.processes()
	}
	return reporter{j.spec, j.ranks}.processes()
}

// conclude determines the result, waits until the output is written, and reports a failure. If a signal or
// ctx has ended the job, conclude waits for the output only for a limited time. It stops waiting if ctx ends
// or a further signal that ends the job arrives.
func (j *job) conclude(ctx context.Context) (Result, error) {
	var errs []error
	all := reporter{j.spec, j.ranks}
	if j.phase == givenUp {
		errs = append(errs, fmt.Errorf("launch: processes of %s are still alive after SIGKILL", all.left()))
		// The remaining processes keep their output open, so the connections would never end.
		j.agents.cutAll()
	}
	result := j.result()
	if j.cause != nil {
		errs = append(errs, fmt.Errorf("launch: %w", j.cause))
	}

	known := j.known()
	failed := len(errs) > 0 || j.aborted != nil
	written := make(chan struct{})
	var agentsErr error // error of awaitAgents; valid after written is closed
	go func() {
		defer close(written)
		j.agents.writers.Wait()
		j.watchers.Wait()
		j.surveys.working.Wait() // its text would be lost after the end of the console
		agentsErr = j.agents.awaitAgents(j.o.Kill)
		for _, c := range j.agents.conns {
			agentsErr = errors.Join(agentsErr, c.lost)
		}
		text := all.failure(result)
		if j.o.Inquiry != nil && (j.failed || !j.asked) {
			text += j.o.Inquiry.Epilogue(known, result.culprits(), j.failed)
		}
		if text != "" {
			j.console.put(chunk{err: true, text: []byte(text)})
		}
		if text := all.restarts(result.Restarts) + j.members.changes.report(); text != "" {
			j.console.put(chunk{err: true, text: []byte(text)})
		}
		if failed || agentsErr != nil {
			j.console.put(chunk{err: true}) // the caller will print the error on standard error
		}
		j.console.close()
	}()
	// If a signal or ctx has ended the job, the output must be read within a limited time.
	var timeout <-chan time.Time
	done := ctx.Done()
	if j.asked {
		wait := j.o.Grace
		if j.spec.several {
			wait += endWait // because output from other hosts takes longer to arrive
		}
		timer := time.NewTimer(wait)
		defer timer.Stop()
		timeout, done = timer.C, nil
	}
	for {
		select {
		case <-written:
			errs = append(errs, agentsErr)
			for r, k := range j.ranks {
				result.Ranks[r].Stderr = k.lastLines()
				for _, s := range k.streams {
					if s.fileErr != nil {
						errs = append(errs, fmt.Errorf("launch: %s: output file is incomplete: %w", k.title,
							s.fileErr))
					}
				}
			}
			if errors.Is(j.console.lost, unix.EPIPE) && result.Status == 0 && !j.asked {
				// The ranks have ended before the job could end them.
				result.Status, result.Signal = 128+int(unix.SIGPIPE), unix.SIGPIPE
			}
			return result, errors.Join(append(errs, j.console.lost)...)
		case s := <-j.o.Signals:
			if sig, ok := s.(syscall.Signal); !ok || !ends(sig) || j.isEcho(sig) {
				continue
			}
		case <-done:
		case <-timeout:
		}
		j.console.abandon()
		j.agents.cutAll()
		errs = append(errs, j.agents.awaitAgents(j.o.Kill))
		return result, errors.Join(
			append(errs, errors.New(
				"launch: output was lost, because standard output or standard error was not read"))...)
	}
}
