package launch

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/frame"
	"github.com/gohvd/gohvd/secret"
	"github.com/gohvd/gohvd/store"
)

// AgentArg is the first argument of a process that is to run AgentMain.
const AgentArg = "__hvdrun-host-agent"

const (
	// jobWait is how long an agent waits for its job.
	jobWait = 30 * time.Second
	// storeWait is how long it tries to reach the job's store, and headStart how long an address is tried before the next is
	// as well: the one that should work mostly does, and the store is spared the others.
	storeWait = 5 * time.Second
	headStart = 250 * time.Millisecond
	// killWait is how long ranks and helpers may take to be gone when the launcher is.
	killWait = 2 * time.Second
)

// agent runs the ranks of one host for a launcher.
type agent struct {
	environ []string // of this process
	job     hostJob
	in      *bufio.Reader

	sending sync.Mutex
	out     *os.File

	path string     // of the command
	envs [][]string // of the ranks

	crew   crew
	relays []*relay // twice the index, and the stream
	flows  sync.WaitGroup

	// prepared is closed when path and envs are there, begun when the ranks were started, or could not be, and lost when the
	// launcher is gone.
	prepared, begun, lost chan struct{}
}

// AgentMain runs the ranks of a host for the launcher at the other end of standard input and output, and returns the process's exit
// status. The program's main must call it, before anything else, when its first argument is AgentArg; environ is the
// environment. It ends with the process.
//
// When its input ends, or the launcher was not heard for as long as that has said, everything is killed. What it says on
// standard error is for the user.
func AgentMain(environ []string) int {
	if err := serveLauncher(environ); err != nil {
		fmt.Fprintf(os.Stderr, "%s\n", strings.TrimPrefix(err.Error(), "launch: "))
		return 1
	}
	return 0
}

func serveLauncher(environ []string) error {
	// Who writes to standard output by mistake writes to standard error, and a rank reads nothing.
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close()
	input, err := own(unix.Stdin, int(null.Fd()), "orders")
	if err != nil {
		return err
	}
	output, err := own(unix.Stdout, unix.Stderr, "answers")
	if err != nil {
		return err
	}
	if _, err := output.Write(hello()); err != nil {
		return err
	}
	orders := &pulse{file: input, limit: jobWait}
	a := &agent{
		environ: environ, in: bufio.NewReader(orders), out: output,
		prepared: make(chan struct{}), begun: make(chan struct{}), lost: make(chan struct{}),
	}
	m, err := a.read()
	if err == nil && m.kind != kindJob {
		err = fmt.Errorf("got a %v, want a job", m.kind)
	}
	if err != nil {
		return fmt.Errorf("waiting for the launcher's orders: %w", err)
	}
	a.job = m.job
	orders.limit = max(a.job.Liveness, minLiveness)
	go a.ping()
	why := make(chan error, 1)
	go func() {
		why <- a.obey()
		// A launcher that is stopped reads nothing. The news that wait for it would hold up who kills the ranks; what is no pipe and
		// no socket has no deadline.
		_ = a.out.SetWriteDeadline(time.Unix(1, 0))
		close(a.lost)
	}()
	err = a.run()
	select {
	case because := <-why:
		if err != nil {
			err = fmt.Errorf("%w (%w)", err, because)
		}
	default: // it is there still, or nobody cares
	}
	return err
}

func (a *agent) read() (message, error) {
	body, err := frame.Read(a.in, maxOrderBytes)
	if err != nil {
		return message{}, err
	}
	return decode(body)
}

// send waits until the launcher takes the frame or is gone, which obey finds out.
func (a *agent) send(frame []byte) {
	a.sending.Lock()
	defer a.sending.Unlock()
	_, _ = a.out.Write(frame)
}

func (a *agent) tell(k kind, v any) {
	f, err := encodeJSON(k, v)
	if err != nil {
		panic(err) // of types of our own, which can be encoded
	}
	a.send(f)
}

func (a *agent) ping() {
	tick := time.NewTicker(pingInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			a.send(encodeKind(kindPing))
		case <-a.lost:
			return
		}
	}
}

// run returns when nothing of the ranks is left and all that they have printed is sent. It is an error if the launcher went
// before.
func (a *agent) run() error {
	if no := a.prepare(); no != nil {
		a.tell(kindRefused, no)
		a.send(encodeKind(kindBye))
		return nil
	}
	select {
	case <-a.begun:
	case <-a.lost:
		return errors.New("the launcher was gone before the ranks were started")
	}
	select {
	case <-a.crew.done():
	case <-a.lost:
		return a.killAll()
	}
	sent := make(chan struct{})
	err := a.crew.release()
	go func() {
		a.flows.Wait()
		close(sent)
	}()
	select {
	case <-sent:
	case <-a.lost:
		return errors.New("the launcher was gone before the end of the output")
	}
	a.send(encodeKind(kindBye))
	return err
}

// killAll kills the ranks of a launcher that is gone.
func (a *agent) killAll() error {
	for i := range a.crew.members {
		a.crew.send(i, unix.SIGKILL)
	}
	timer := time.NewTimer(killWait)
	defer timer.Stop()
	for _, how := range []string{"the ranks were killed", "the ranks were killed with their helpers"} {
		select {
		case <-a.crew.done():
			return fmt.Errorf("the launcher is gone, and %s", how)
		case <-timer.C:
			a.crew.force()
			timer.Reset(killWait)
		}
	}
	return errors.New("the launcher is gone; ranks were sent SIGKILL and are not gone")
}

// obey carries out orders until the launcher is gone, and says why it is thought to be.
func (a *agent) obey() error {
	for {
		m, err := a.read()
		if err == nil {
			err = a.do(&m)
		}
		if err != nil {
			return fmt.Errorf("the launcher's orders: %w", err)
		}
	}
}

func (a *agent) do(m *message) error {
	running := isClosed(a.begun)
	switch m.kind {
	case kindPing:
		return nil
	case kindBegin:
		if running || !isClosed(a.prepared) {
			return errors.New("a begin out of turn")
		}
		a.begin()
		return nil
	case kindForce:
		if running {
			a.crew.force()
		}
		return nil
	case kindSignal:
		if running && m.index < len(a.crew.members) {
			a.crew.send(m.index, m.signal)
		}
		return nil
	case kindCredit:
		if !running || m.index >= len(a.relays) {
			return fmt.Errorf("a credit for stream %d, which is not there", m.index)
		}
		return a.relays[m.index].allow(m.credit)
	}
	return fmt.Errorf("a %v, which is not the launcher's to send", m.kind)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// begin starts the ranks.
func (a *agent) begin() {
	defer close(a.begun)
	a.crew.news = func(i int, p *report) {
		if p == nil {
			a.send(encodeIndex(kindGone, i))
			return
		}
		a.tell(kindReport, hostReport{i, *p})
	}
	err := a.crew.start(a.path, a.job.Command, a.envs)
	for _, m := range a.crew.members {
		for _, in := range m.outputs {
			r := &relay{agent: a, id: len(a.relays), in: in, credit: streamWindow, more: make(chan struct{}, 1)}
			a.relays = append(a.relays, r)
			a.flows.Go(r.run)
		}
	}
	a.crew.lead()
	if err != nil {
		a.tell(kindRefused, refusal{Text: strings.TrimPrefix(err.Error(), "launch: ")})
		for i := range a.crew.members {
			a.crew.send(i, unix.SIGKILL)
		}
	}
}

// prepare finds all that the ranks need. It returns what is missing.
func (a *agent) prepare() *refusal {
	if len(a.job.Command) == 0 || len(a.job.Dir) != 1 || len(a.job.Secret) != 1 || len(a.job.Stores) == 0 || len(a.job.Ranks) == 0 {
		return &refusal{Text: "the job that it was given lacks its command, directory, secret, store or ranks"}
	}
	if err := os.Chdir(a.job.Dir[0]); err != nil {
		return &refusal{Text: fmt.Sprintf("the launcher's working directory, in which the ranks are to run: %v", err)}
	}
	env := a.environment()
	var err error
	if a.path, err = lookPath(a.job.Command[0], env); err != nil {
		e := newCommandError(a.job.Command[0], err)
		return &refusal{Text: e.Err.Error(), Command: e.Command, Status: e.Status}
	}
	at, err := a.reachStore()
	if err != nil {
		return &refusal{Text: err.Error()}
	}
	for _, r := range a.job.Ranks {
		a.envs = append(a.envs, slices.Concat(env, r, storeVariables(at)))
	}
	close(a.prepared)
	a.tell(kindReady, at.String())
	return nil
}

// environment is that of all ranks: this host's own, and over it what comes from the launcher, which has the job's settings
// alone.
func (a *agent) environment() []string {
	given := make(map[string]bool, len(a.job.Env))
	for _, of := range append(a.job.Ranks[:1:1], a.job.Env) { // all ranks have the same names
		for _, v := range of {
			name, _, _ := strings.Cut(v, "=")
			given[name] = true
		}
	}
	env := slices.DeleteFunc(slices.Clone(a.environ), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		isSetting := strings.HasPrefix(name, "HOROVOD_") || strings.HasPrefix(name, "HVD_")
		return given[name] || name == "PWD" || isSetting && !IsOfHost(name)
	})
	env = append(env, a.job.Env...)
	if !given["PWD"] {
		env = append(env, "PWD="+a.job.Dir[0])
	}
	return env
}

// reachStore tries the addresses of the store, each a little after the one before, and takes the first that proves the job's secret.
func (a *agent) reachStore() (netip.AddrPort, error) {
	key, err := secret.Parse(a.job.Secret[0])
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("the job's secret: %w", err)
	}
	if a.job.TLS {
		key = key.Encrypted()
	}
	ctx, cancel := context.WithTimeout(context.Background(), storeWait)
	defer cancel()
	type attempt struct {
		index int
		err   error
	}
	n := len(a.job.Stores)
	errs, done := make([]error, n), make(chan attempt, n)
	next := time.NewTicker(min(headStart, storeWait/time.Duration(2*n)))
	defer next.Stop()
	started := 0
	begin := func() {
		if started == n {
			return
		}
		go func(i int) {
			kv, err := store.Dial(ctx, a.job.Stores[i], store.Config{Secret: key})
			if err == nil {
				err = kv.Close()
			}
			done <- attempt{i, err}
		}(started)
		started++
	}
	begin()
	for failed := 0; failed < n; {
		select {
		case t := <-done:
			if t.err == nil {
				return netip.ParseAddrPort(a.job.Stores[t.index])
			}
			errs[t.index] = t.err
			if failed++; failed == started {
				begin()
			}
		case <-next.C:
			begin()
		case <-a.lost:
			return netip.AddrPort{}, errors.New("the launcher is gone")
		}
	}
	return netip.AddrPort{}, fmt.Errorf("it does not reach the job's store on the launcher's host, at %s: "+
		"is there a firewall between them? --network-interfaces chooses the network (%w)", strings.Join(a.job.Stores, ", "), errs[0])
}

// relay carries what a rank writes to the launcher, as far as there is credit.
type relay struct {
	agent *agent
	id    int
	in    source
	more  chan struct{} // capacity 1: there is credit

	mu     sync.Mutex
	credit int
}

// allow adds to the credit.
func (r *relay) allow(numBytes int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.credit += numBytes; r.credit > streamWindow {
		return fmt.Errorf("a credit for stream %d above %d bytes", r.id, streamWindow)
	}
	select {
	case r.more <- struct{}{}:
	default:
	}
	return nil
}

// await waits for credit.
func (r *relay) await() int {
	for {
		r.mu.Lock()
		credit := r.credit
		r.mu.Unlock()
		if credit > 0 {
			return credit
		}
		<-r.more
	}
}

// run reads until the end of the source. If the launcher is gone it may wait for ever, and ends with the process.
func (r *relay) run() {
	buf := make([]byte, readBytes)
	for {
		n, err := r.in.Read(buf[:min(len(buf), r.await())])
		if n > 0 {
			r.mu.Lock()
			r.credit -= n
			r.mu.Unlock()
			r.agent.send(encodeOutput(r.id, buf[:n]))
		}
		if err != nil {
			break
		}
	}
	r.in.Close()
	r.agent.send(encodeIndex(kindClosed, r.id))
}
