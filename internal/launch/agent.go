package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/yamux"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/binding"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
)

// AgentArg is the first argument of a process whose main must call AgentMain.
const AgentArg = "__hvdrun-host-agent"

const (
	// storeWait is how long an agent tries to reach the job's store. headStart is the delay between the
	// attempts at two successive addresses. Usually the first address works within that time, so the agent
	// does not dial another one.
	storeWait = 5 * time.Second
	headStart = 250 * time.Millisecond
	// killWait is how long the agent waits for the ranks to end after it has killed them because the launcher
	// is gone. If ranks are left then, the agent kills their helpers and waits for the same time again.
	killWait = 2 * time.Second
	// shutdownWait is how long the agent waits for SIGTERM when the launcher is gone. A host that shuts down
	// sends SIGTERM to all processes, also to the sshd that connects the agent with the launcher.
	shutdownWait = 100 * time.Millisecond
	// againWait is how long after a SIGTERM another one counts as the same.
	againWait = time.Second
)

// agent runs the ranks on one host for a launcher.
type agent struct {
	environ []string // environment of this process
	family  *family  // children of this process
	session *session

	notifying sync.Mutex
	control   *yamux.Stream

	job     hostJob
	path    string         // path of the program that each rank runs
	env     []string       // environment that the ranks on this host have in common
	envs    [][]string     // environment of each rank on this host
	cpus    []binding.CPUs // the CPUs to which each rank on this host is bound, if the ranks are bound
	outputs []io.WriteCloser

	members []*member // the newest helper of each rank that was started, in the order of the ranks
	reports sync.WaitGroup
	relays  sync.WaitGroup
	// running counts the batches of helpers that are not gone. While ranks may be started again, it counts
	// one more.
	running sync.WaitGroup
	// endRestarts declares that no rank is started again. ending is set from then on.
	endRestarts func()
	ending      atomic.Bool

	// prepared is closed when the ranks can be started. begun is closed when the ranks were started, or when
	// starting them has failed. over is closed when no helper is left and none will be started. lost is
	// closed when the connection to the launcher has ended. After that the agent carries out no more orders.
	prepared, begun, over, lost chan struct{}
	// terminated is closed when this process has got SIGTERM. It is nil if notices of serveLauncher is nil.
	terminated chan struct{}
}

// member is a helper that the agent has started for a rank.
type member struct {
	helper  int      // process ID
	orders  *os.File // pipe to the helper; closing it ends the rank
	reports *os.File // pipe from the helper, which carries its reports
	outputs [2]*pipeSource
}

// AgentMain runs the ranks of a host for the launcher at the other end of standard input and output, and
// returns the exit status of the process. If the first argument of the program is AgentArg, its main must
// call AgentMain before anything else. args holds the arguments after AgentArg. There is one, the liveness
// timeout. environ is the environment of the process. The process must exit when AgentMain returns.
//
// AgentMain kills all processes of the ranks when standard input ends, or when nothing arrives from the
// launcher for longer than the timeout. SIGTERM makes the launcher end the job, as SIGTERM to the launcher
// itself does. In an elastic job it takes the ranks of this host out of the job. If the launcher is gone
// then, or if SIGTERM arrives again before the launcher has ended the ranks of a job that is not elastic,
// AgentMain itself sends them SIGTERM, and kills them after the grace of the job. AgentMain writes messages
// for the user to standard error.
func AgentMain(args, environ []string) int {
	catchSIGPIPE()
	err := func() error {
		if len(args) != 1 {
			return fmt.Errorf("%s is an internal argument of hvdrun", AgentArg)
		}
		liveness, err := time.ParseDuration(args[0])
		if err != nil {
			return err
		}
		l, err := standardLink()
		if err != nil {
			return err
		}
		return serveLauncher(l, max(liveness, minLiveness), environ, new(family), make(chan os.Signal, 1))
	}()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s\n", strings.TrimPrefix(err.Error(), "launch: "))
		return 1
	}
	return 0
}

// standardLink returns a link over standard input and output. Closing the link ends pending reads and writes,
// except on files that do not support this, such as regular files.
func standardLink() (*link, error) {
	for _, fd := range []int{unix.Stdin, unix.Stdout} {
		if err := unix.SetNonblock(fd, true); err != nil {
			return nil, os.NewSyscallError("fcntl", err)
		}
	}
	return &link{in: os.NewFile(uintptr(unix.Stdin), "orders"), out: os.NewFile(uintptr(unix.Stdout),
		"notices")}, nil
}

// serveLauncher runs the ranks of this host for the launcher at the other end of l. It closes l and returns
// when no process of the ranks is left and all their output is sent. If the launcher disappears before that,
// it returns an error. If notices is not nil, it tells the launcher of each SIGTERM, and uses notices for the
// signal. Then it drops other signals that would end this process, and with it the ranks.
func serveLauncher(l *link, liveness time.Duration, environ []string, f *family,
	notices chan os.Signal) error {
	defer l.Close()
	if _, err := l.out.Write(hello()); err != nil {
		return err
	}
	session, err := newSession(yamux.Server, l, liveness)
	if err != nil {
		return err
	}
	defer session.Close()
	a := &agent{
		environ: environ, family: f, session: session,
		prepared: make(chan struct{}), begun: make(chan struct{}), over: make(chan struct{}),
		lost: make(chan struct{}),
	}
	if a.control, err = session.AcceptStream(); err == nil {
		err = a.accept()
	}
	if err != nil {
		return fmt.Errorf("waiting for the launcher's orders: %w", err)
	}
	if notices != nil {
		catch(make(chan os.Signal, 1), unix.SIGINT, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2)
		a.terminated = make(chan struct{})
		catch(notices, unix.SIGTERM)
		returned := make(chan struct{})
		defer close(returned)
		go a.handleSIGTERM(notices, returned)
	}
	var why error // error that ended handleOrders; valid once a.lost is closed
	go func() {
		defer close(a.lost)
		why = session.reason(a.handleOrders())
	}()
	err = a.run()
	session.Close()
	if <-a.lost; err != nil {
		err = fmt.Errorf("%w (connection to the launcher: %w)", err, why)
	}
	return err
}

// accept receives the first order, which contains the job, and accepts the streams that carry the output of
// the ranks.
func (a *agent) accept() error {
	var o order
	if err := receive(a.control, maxOrderBytes, &o); err != nil {
		return err
	}
	if o.Job == nil || len(o.Job.Command) == 0 || len(o.Job.Ranks) == 0 && !o.Job.Restarts ||
		len(o.Job.Stores) > 0 && len(o.Job.Secret) != 1 {
		return errors.New("got a malformed first order, want a job with command, ranks and secret")
	}
	a.job = *o.Job
	for range 2 * len(a.job.Ranks) {
		s, err := a.session.Accept()
		if err != nil {
			return err
		}
		a.outputs = append(a.outputs, s)
	}
	return nil
}

// notify sends n to the launcher. It blocks until the launcher has received n or is gone. It ignores errors,
// because handleOrders detects that the launcher is gone.
func (a *agent) notify(n notice) {
	a.notifying.Lock()
	defer a.notifying.Unlock()
	_ = send(a.control, n)
}

// handleSIGTERM tells the launcher of each SIGTERM until returned is closed. If the launcher has not ended
// the ranks of a job that is not elastic when SIGTERM arrives again, handleSIGTERM ends the connection.
func (a *agent) handleSIGTERM(notices <-chan os.Signal, returned <-chan struct{}) {
	var first time.Time
	for {
		select {
		case <-notices:
			switch {
			case first.IsZero():
				first = time.Now()
				close(a.terminated)
			case time.Since(first) > againWait && len(a.job.Ranks) > 0 && !a.ending.Load():
				a.session.Close()
			}
			go a.notify(notice{Leave: true}) // may block as long as the launcher hangs
		case <-returned:
			return
		}
	}
}

// run prepares the ranks, which start when the launcher orders it. run returns when all ranks have ended and
// their output is sent.
func (a *agent) run() error {
	if no := a.prepare(); no != nil {
		a.notify(notice{Refused: no})
		a.notify(notice{Over: true})
		a.notify(notice{Bye: true})
		return nil
	}
	select {
	case <-a.begun:
	case <-a.lost:
		if !isClosed(a.begun) {
			return errors.New("the connection to the launcher ended before the ranks were started")
		}
	}
	select {
	case <-a.over:
	case <-a.lost:
		err := a.killAll()
		a.release()
		return err
	}
	a.reports.Wait()
	a.notify(notice{Over: true})
	a.release()
	if a.session.IsClosed() {
		return errors.New("the connection to the launcher ended before all output was sent")
	}
	a.notify(notice{Bye: true})
	return nil
}

// killAll ends the ranks after the connection to the launcher was lost. It kills them at once, or after the
// grace of the job if this process has got SIGTERM. It always returns an error, which says whether ranks are
// still alive.
func (a *agent) killAll() error {
	a.endRestarts()
	if a.terminated != nil {
		select {
		case <-a.terminated:
		case <-time.After(shutdownWait):
		}
	}
	if isClosed(a.terminated) {
		a.signal(unix.SIGTERM)
		select {
		case <-a.over:
			return errors.New("the launcher is gone, and the ranks have ended after SIGTERM")
		case <-time.After(a.job.Grace):
		}
	}
	a.signal(unix.SIGKILL)
	timer := time.NewTimer(killWait)
	defer timer.Stop()
	for _, how := range []string{"the ranks were killed", "the ranks were killed with their helpers"} {
		select {
		case <-a.over:
			return fmt.Errorf("the launcher is gone, and %s", how)
		case <-timer.C:
			a.force()
			timer.Reset(killWait)
		}
	}
	return errors.New("the launcher is gone; ranks are still alive after SIGKILL")
}

// handleOrders carries out orders until the launcher is gone. It returns the error that ended the connection.
func (a *agent) handleOrders() error {
	for {
		var o order
		if err := receive(a.control, maxOrderBytes, &o); err != nil {
			return err
		}
		running := isClosed(a.begun)
		switch {
		case o.Begin && (running || !isClosed(a.prepared)):
			return errors.New("got an unexpected Begin order, want one Begin order after this agent has sent Ready")
		case o.Begin:
			a.begin()
		case o.Force && running:
			a.force()
			a.end()
		case o.Signal != 0 && running:
			a.signal(o.Signal)
			if ends(o.Signal) || o.Signal == unix.SIGKILL {
				a.end()
			}
		case o.Kill != nil && running:
			if err := a.killOne(*o.Kill); err != nil {
				return err
			}
		case o.Start != nil:
			if err := a.restart(*o.Start, o.Env); err != nil {
				return err
			}
		}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// begin starts the helpers of the ranks, and the goroutines that forward their reports and output.
func (a *agent) begin() {
	defer close(a.begun)
	a.endRestarts = func() {}
	if a.job.Restarts {
		a.running.Add(1)
		a.endRestarts = sync.OnceFunc(a.running.Done)
	}
	a.start(0, a.envs, a.outputs)
	go func() {
		a.running.Wait()
		close(a.over)
	}()
}

// restart carries out the order to start a rank again. i is the index of the rank on this host. In an elastic
// job, vars are its variables, and the rank may be new.
func (a *agent) restart(i int, vars []string) error {
	if !a.job.Restarts || a.ending.Load() || i < 0 || i > len(a.members) ||
		i == len(a.members) && vars == nil {
		return fmt.Errorf("got an unexpected order to start the rank with index %d", i)
	}
	if vars != nil {
		if i == len(a.envs) {
			a.envs = append(a.envs, nil)
		}
		a.envs[i] = append(without(a.env, vars), vars...)
	}
	var outputs []io.WriteCloser
	for range 2 {
		s, err := a.session.Accept()
		if err != nil {
			return err
		}
		outputs = append(outputs, s)
	}
	if i < len(a.members) {
		a.members[i].release()
	}
	a.start(i, a.envs[i:i+1], outputs)
	return nil
}

// end carries out an order to end the ranks.
func (a *agent) end() {
	a.ending.Store(true)
	a.endRestarts()
}

// start starts a helper with each environment in envs for the rank with the index first and those after it,
// and starts the goroutines that forward its reports and output. outputs holds two streams for each helper.
func (a *agent) start(first int, envs [][]string, outputs []io.WriteCloser) {
	helpers := newBatch()
	members, err := a.startHelpers(helpers, envs)
	for i, m := range members {
		index := first + i
		if index == len(a.members) {
			a.members = append(a.members, nil)
		}
		a.members[index] = m
		a.reports.Go(func() { a.forwardReports(index, m) })
		for j, in := range m.outputs {
			a.relays.Go(func() { a.relay(in, outputs[2*i+j]) })
		}
	}
	for _, out := range outputs[2*len(members):] {
		out.Close()
	}
	a.family.complete(helpers)
	a.running.Go(func() { <-helpers.gone })
	if err != nil {
		a.notify(notice{Refused: &refusal{Text: strings.TrimPrefix(err.Error(), "launch: ")}})
		a.signal(unix.SIGKILL)
	}
}

// startHelpers starts a helper with each environment in envs and adds it to the batch helpers. If it returns
// an error, it has started those that it returns.
func (a *agent) startHelpers(helpers *batch, envs [][]string) (members []*member, err error) {
	if err := a.family.adopt(); err != nil {
		return nil, err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, fmt.Errorf("launch: open the standard input of the ranks: %w", err)
	}
	defer null.Close()
	var grace time.Duration
	if a.job.Starter {
		grace = a.job.Grace
	}
	argv := append([]string{"hvdrun", HelperArg, grace.String(), a.path}, a.job.Command...)
	for i, env := range envs {
		var mine []*os.File // mine[i] is this process's end of the pipe to the helper's descriptor i+1
		pid, err := a.family.start(helpers, func() (pid int, err error) {
			start := func() error {
				mine, pid, err = startWithPipes("/proc/self/exe", argv, env, null,
					[]bool{true, true, false, true})
				return err
			}
			if a.cpus != nil {
				return pid, binding.Start(a.cpus[i], start)
			}
			return pid, start()
		}, a.family.killOrphans)
		if err != nil {
			return members, fmt.Errorf("launch: start a rank: %w", err)
		}
		members = append(members, &member{
			helper: pid, orders: mine[2], reports: mine[3],
			outputs: [2]*pipeSource{{file: mine[0]}, {file: mine[1]}},
		})
	}
	return members, nil
}

// forwardReports forwards the reports of the helper m to the launcher. i is the index of m's rank among the
// ranks on this host.
func (a *agent) forwardReports(i int, m *member) {
	reports := json.NewDecoder(m.reports)
	for {
		var p report
		if reports.Decode(&p) != nil {
			break
		}
		a.notify(notice{Rank: i, Report: &p})
	}
	// Only the helper holds the other end of the pipe. So Copy returns when the helper has ended.
	_, _ = io.Copy(io.Discard, m.reports)
	a.notify(notice{Rank: i, Report: &report{Gone: true}})
}

// relay copies the output of a rank to its stream, then closes both.
func (a *agent) relay(in *pipeSource, out io.WriteCloser) {
	defer in.Close()
	// The blocks are small, because up to 64 blocks may be queued before a notice, which is sent after them.
	if _, err := io.CopyBuffer(out, in, make([]byte, 16<<10)); err != nil {
		// The session has ended. A rank that writes to a closed pipe would die of SIGPIPE, before run learns
		// from a.lost that the launcher is gone.
		_, _ = io.Copy(io.Discard, in)
	}
	out.Close()
}

// signal makes the helpers send s to the process groups of the ranks. If s is SIGKILL, the helpers kill all
// processes of their ranks. signal does not block, because a pipe has room for 65536 signals.
func (a *agent) signal(s syscall.Signal) {
	for _, m := range a.members {
		_, _ = m.orders.Write([]byte{byte(s)}) // fails only if the helper has ended
	}
}

// killOne makes the helper of the rank with the given index kill all processes of the rank.
func (a *agent) killOne(index int) error {
	if index < 0 || index >= len(a.members) {
		return fmt.Errorf("got an order to kill rank %d of %d on this host", index, len(a.members))
	}
	_, _ = a.members[index].orders.Write([]byte{byte(unix.SIGKILL)}) // fails only if the helper has ended
	return nil
}

// force kills the helpers. When a helper dies, its rank dies too.
func (a *agent) force() {
	for _, m := range a.members {
		a.family.kill(m.helper)
	}
}

// release closes the pipes to the helpers. It is called when the helpers have ended or could not be killed.
// It returns when all output of the ranks is sent, or the launcher is gone.
func (a *agent) release() {
	for _, m := range a.members {
		m.release()
	}
	a.reports.Wait()
	a.relays.Wait()
}

// release closes the pipes to the helper.
func (m *member) release() {
	m.orders.Close()
	m.reports.Close()
	for _, p := range m.outputs {
		p.finish()
	}
}

// prepare finds what the ranks need: the working directory, the program and the job's store. Then it sends
// Ready. If something cannot be found, it returns a refusal instead.
func (a *agent) prepare() *refusal {
	if len(a.job.Dir) > 0 {
		if err := os.Chdir(a.job.Dir[0]); err != nil {
			return &refusal{Text: fmt.Sprintf("cannot run the ranks in the launcher's working directory: %v",
				err)}
		}
	}
	env := a.environment()
	var err error
	if a.path, err = lookPath(a.job.Command[0], env); err != nil {
		e := newCommandError(a.job.Command[0], err)
		return &refusal{Text: e.Err.Error(), Command: e.Command, Status: e.Status}
	}
	if len(a.job.Stores) > 0 {
		at, err := a.reachStore()
		if err != nil {
			return &refusal{Text: err.Error()}
		}
		env = append(env, storeVariables(at)...)
		if a.job.Scheduler {
			env = append(env, schedulerVariable(at.Addr()))
		}
	}
	if err := a.bind(); err != nil {
		return &refusal{Text: err.Error()}
	}
	a.env = env
	for _, r := range a.job.Ranks {
		a.envs = append(a.envs, slices.Concat(env, r))
	}
	close(a.prepared)
	a.notify(notice{Ready: true})
	return nil
}

// environment returns the variables that all ranks have in common. They are the environment of this host,
// without the settings of Horovod and gohvd, plus the variables of the job.
func (a *agent) environment() []string {
	given := a.job.Env
	if len(a.job.Dir) > 0 && !has(given, "PWD") {
		given = append(given, "PWD="+a.job.Dir[0])
	}
	own := without(a.environ, given)
	if len(a.job.Ranks) > 0 { // the variables of the others have the same names
		own = without(own, a.job.Ranks[0])
	} else { // those of an outer launcher
		own = without(own, torchVariables(netip.AddrPort{}, Assignment{}, 0))
	}
	own = slices.DeleteFunc(own, func(v string) bool {
		name := nameOf(v)
		return (strings.HasPrefix(name, "HOROVOD_") || strings.HasPrefix(name, "HVD_")) && !IsOfHost(name)
	})
	return append(own, given...)
}

// bind finds the CPUs to which each rank of this host is bound.
func (a *agent) bind() error {
	if a.job.BindTo == "" {
		return nil
	}
	fail := func(err error) error { return fmt.Errorf("--bind-to %s: %w", a.job.BindTo, err) }
	allowed, err := binding.Allowed()
	if err != nil {
		return fail(err)
	}
	t, err := binding.Read(os.DirFS("/"), allowed)
	if err != nil {
		return fail(err)
	}
	for i := range a.job.Ranks {
		cpus, err := t.Place(a.job.BindTo, i, len(a.job.Ranks))
		if err != nil {
			return fail(err)
		}
		a.cpus = append(a.cpus, cpus)
	}
	return nil
}

// reachStore dials the addresses of the job's store and returns the first one at which a server proves that
// it knows the job's secret. It starts the attempts headStart apart and does not wait for earlier attempts to
// fail.
func (a *agent) reachStore() (at netip.AddrPort, err error) {
	key, err := secret.Parse(a.job.Secret[0])
	if err != nil {
		return at, fmt.Errorf("parse the job's secret: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), storeWait)
	defer cancel()
	type attempt struct {
		addr string
		err  error
	}
	attempts := make(chan attempt, len(a.job.Stores))
	for i, addr := range a.job.Stores {
		time.AfterFunc(time.Duration(i)*min(headStart, storeWait/time.Duration(2*len(a.job.Stores))), func() {
			kv, err := store.Dial(ctx, addr, store.Config{Secret: key})
			if err == nil {
				err = kv.Close()
			}
			attempts <- attempt{addr, err}
		})
	}
	for range a.job.Stores {
		select {
		case t := <-attempts:
			if t.err == nil {
				return netip.ParseAddrPort(t.addr)
			}
			if err == nil || t.addr == a.job.Stores[0] {
				err = t.err
			}
		case <-a.lost:
			return at, errors.New("the launcher is gone")
		}
	}
	return at, fmt.Errorf("cannot reach the job's store on the launcher's host, at %s: "+
		"check for a firewall between the hosts, or choose another network with --network-interfaces (%w)",
		strings.Join(a.job.Stores, ", "), err)
}
