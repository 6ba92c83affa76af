package launch

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/frame"
)

const (
	minLiveness = 3 * time.Second
	// lastWords is how long a command that ends may take to be reaped, and to be read.
	lastWords = 2 * time.Second
	// routeWait bounds the search for the addresses of all hosts' names.
	routeWait = 2 * time.Second
)

// fleet is the agents of a job.
type fleet struct {
	hosts   []*remote
	family  family
	over    chan struct{} // closed when the commands that reach the agents are gone
	reapErr error         // valid then
	workers sync.WaitGroup
	dropped atomic.Bool // cut was called: nobody wants to know what the agents have to say
}

// remote is the launcher's end of an agent. It is the part of the agent's ranks.
type remote struct {
	name   string
	ranks  []int  // by index on the host
	job    []byte // the first order
	fleet  *fleet
	events chan<- event

	command  string // its first word
	agent    string // what it is to run
	liveness time.Duration
	orders   *os.File // to its standard input
	answers  pulse    // its standard output
	stderr   *stream
	out      outbox
	outputs  []*inflow // twice the index, and the stream
	answered []kind    // ready and refused, if they came
	told     []int     // events of each rank
	ended    []bool    // the commands of the ranks, or they are gone
	gone     int       // ranks

	// lost is why the agent ended before all that the ranks had printed was there, though they had ended, so that none of them is to
	// blame; valid after the workers.
	lost error

	settle  func() // closes settled
	settled chan struct{}

	pid    int
	reaped chan struct{} // closed when the command was
	status unix.WaitStatus
	silent chan struct{} // closed when its standard error was read

	ready bool // belongs to the supervisor
}

// startAgents starts an agent for each host.
func (j *job) startAgents(files [][2]*os.File) error {
	f := &j.fleet
	f.over = make(chan struct{})
	f.family.own = make(map[int]func(unix.WaitStatus), j.hosts)
	for _, h := range j.o.Hosts[:j.hosts] {
		settled := make(chan struct{})
		f.hosts = append(f.hosts, &remote{
			name: h.Name, fleet: f, events: j.events, agent: j.o.AgentPath, liveness: j.o.Liveness,
			out:     outbox{more: make(chan struct{}, 1)},
			settled: settled, settle: sync.OnceFunc(func() { close(settled) }),
			reaped: make(chan struct{}), silent: make(chan struct{}),
		})
	}
	for r, p := range j.places {
		h := f.hosts[p.Host]
		h.ranks, h.told, h.ended = append(h.ranks, r), append(h.told, 0), append(h.ended, false)
		var in [2]source
		for i := range in {
			flow := &inflow{out: &h.out, id: len(h.outputs), more: make(chan struct{}, 1)}
			in[i], h.outputs = flow, append(h.outputs, flow)
		}
		j.ranks = append(j.ranks, j.newRank(r, h, p.LocalRank, in, files[r]))
	}
	for _, h := range f.hosts {
		j.parts = append(j.parts, h)
	}
	j.waiting = j.hosts
	j.enter(preparing, j.o.Start)

	err := j.startCommands()
	for _, h := range f.hosts {
		if h.pid == 0 {
			h.leave()
			continue
		}
		f.workers.Go(func() {
			defer close(h.silent)
			h.stderr.run()
		})
		f.workers.Go(h.attend)
	}
	go func() {
		defer close(f.over)
		f.reapErr = f.family.reap()
	}()
	return err
}

// startCommands starts the commands that reach the agents.
func (j *job) startCommands() error {
	before, err := adopt()
	if err != nil {
		return err
	}
	jobs, err := j.hostJobs()
	if err != nil {
		return err
	}
	for i, h := range j.fleet.hosts {
		if h.job, err = encodeJSON(kindJob, jobs[i]); err != nil {
			return fmt.Errorf("launch: %w", err)
		}
		if len(h.job) > maxOrderBytes {
			return &OptionError{fmt.Sprintf("environment and command: %d bytes, want at most %d for another host", len(h.job), maxOrderBytes)}
		}
		path, argv := "/proc/self/exe", []string{"hvdrun", AgentArg}
		if !IsThisHost(h.name) {
			argv = j.o.Reach(h.name, []string{j.o.AgentPath, AgentArg})
			if path, err = lookPath(argv[0], j.o.Env); err != nil {
				return &HostError{h.name, fmt.Errorf("%s: %w", argv[0], err)}
			}
		}
		j.tell("host %s: %s", h.name, strings.Join(argv, " "))
		mine, pid, err := startWithPipes(path, argv, j.o.Env, nil, []bool{false, true, true})
		if err != nil {
			return &HostError{h.name, fmt.Errorf("%s: %w", argv[0], err)}
		}
		h.command, h.pid, h.orders, h.answers.file = argv[0], pid, mine[0], mine[1]
		h.stderr = &stream{
			in: &pipeSource{File: mine[2]}, console: j.console, err: true, timestamp: j.o.Timestamp,
			prefix: "hvdrun: host " + h.name + ": ", tail: new(tail),
		}
		doom := doomOrphans(&j.fleet.family, before)
		j.fleet.family.own[pid] = func(status unix.WaitStatus) {
			doom(status)
			h.status = status
			h.stderr.in.finish()
			close(h.reaped)
		}
	}
	return nil
}

// hostJobs are the orders to all hosts.
func (j *job) hostJobs() ([]hostJob, error) {
	dir, err := os.Getwd()
	if err != nil {
		return nil, fmt.Errorf("launch: working directory: %w", err)
	}
	travelling := slices.DeleteFunc(slices.Clone(j.env), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return IsOfHost(name) && !slices.ContainsFunc(j.o.Set, func(set string) bool { return strings.HasPrefix(set, name+"=") })
	})
	routes := j.routes()
	jobs := make([]hostJob, j.hosts)
	for i, h := range j.fleet.hosts {
		jobs[i] = hostJob{
			Host: h.name, Dir: words{dir}, Command: j.o.Command, Env: travelling,
			Secret: words{j.o.Secret}, TLS: j.o.TLS, Liveness: j.o.Liveness,
		}
		for _, r := range h.ranks {
			jobs[i].Ranks = append(jobs[i].Ranks, slices.Concat(j.torchVariables(r), j.rankVariables(r)))
		}
		for _, a := range j.o.StoreAddrs {
			if a.Addr() == routes[i] {
				jobs[i].Stores = slices.Insert(jobs[i].Stores, 0, a.String())
			} else {
				jobs[i].Stores = append(jobs[i].Stores, a.String())
			}
		}
	}
	return jobs, nil
}

// routes are the addresses of this host from which the others are reached, as far as they can be known: a name may be one that
// ssh alone understands. This host gets that of the first other one, for it must be reached there too.
func (j *job) routes() []netip.Addr {
	ctx, cancel := context.WithTimeout(context.Background(), routeWait)
	defer cancel()
	found := make([]netip.Addr, j.hosts)
	var searches sync.WaitGroup
	for i, h := range j.fleet.hosts {
		if IsThisHost(h.name) {
			continue
		}
		searches.Go(func() {
			var d net.Dialer
			// Connecting a datagram socket sends nothing; it only asks for the route.
			conn, err := d.DialContext(ctx, "udp", net.JoinHostPort(h.name[strings.LastIndexByte(h.name, '@')+1:], "9"))
			if err != nil {
				return
			}
			defer conn.Close()
			if addr, ok := conn.LocalAddr().(*net.UDPAddr); ok {
				found[i] = addr.AddrPort().Addr().Unmap()
			}
		})
	}
	searches.Wait()
	first := slices.IndexFunc(found, func(a netip.Addr) bool {
		return slices.ContainsFunc(j.o.StoreAddrs, func(s netip.AddrPort) bool { return s.Addr() == a })
	})
	for i, h := range j.fleet.hosts {
		if first >= 0 && IsThisHost(h.name) {
			found[i] = found[first]
		}
	}
	return found
}

// attend listens to the agent until it ends.
func (h *remote) attend() {
	err := h.listen()
	if err == nil {
		err = errors.New("its agent has ended")
	} else {
		err = h.explain(err)
		if !slices.Contains(h.ended, false) && !h.fleet.dropped.Load() {
			h.lost = fmt.Errorf("launch: host %s: the end of the output is lost: %w", h.name, err)
		}
	}
	h.events <- event{host: h, err: err, heard: h.answers.heard}
	h.leave()
}

// leave ends what waits for the agent.
func (h *remote) leave() {
	for _, flow := range h.outputs {
		flow.end()
	}
	h.out.close()
	h.settle()
}

// listen returns nil when the agent says bye, in its turn.
func (h *remote) listen() error {
	in := bufio.NewReader(&h.answers)
	if err := readHello(in); err != nil {
		return err
	}
	h.answers.limit = h.liveness
	h.out.put(h.job)
	h.job = nil
	h.fleet.workers.Go(func() { h.out.run(h.orders) })
	for {
		body, err := frame.Read(in, maxAnswerBytes)
		if err != nil {
			return err
		}
		m, err := decode(body)
		if err == nil && m.kind == kindBye && h.complete() {
			return nil
		}
		if err == nil {
			err = h.take(&m)
		}
		if err != nil {
			return fmt.Errorf("its agent has sent %w", err)
		}
	}
}

// complete reports whether the agent has told all: the ends of all ranks and of their output, or that it could not start them.
func (h *remote) complete() bool {
	open := func(f *inflow) bool { return !f.isEnded() }
	return slices.Contains(h.answered, kindRefused) || h.gone == len(h.ranks) && !slices.ContainsFunc(h.outputs, open)
}

// take does what the agent says.
func (h *remote) take(m *message) error {
	switch m.kind {
	case kindReport, kindGone:
		if m.index < 0 || m.index >= len(h.ranks) || h.told[m.index] == maxNews || m.kind == kindReport && h.told[m.index] == maxNews-1 {
			return fmt.Errorf("a %v on rank %d of %d, which cannot be", m.kind, m.index, len(h.ranks))
		}
	case kindOutput, kindClosed:
		if m.index >= len(h.outputs) {
			return fmt.Errorf("an %v of stream %d of %d", m.kind, m.index, len(h.outputs))
		}
	}
	switch m.kind {
	case kindPing:
	case kindReady, kindRefused:
		if slices.Contains(h.answered, m.kind) {
			return fmt.Errorf("a second %v", m.kind)
		}
		h.answered = append(h.answered, m.kind)
		e := event{host: h, ready: m.kind == kindReady, refused: m.kind == kindRefused}
		if e.refused {
			e.err = m.refusal.error(h.name)
		}
		if at, err := netip.ParseAddrPort(m.store); err == nil {
			e.store = at
		}
		h.events <- e
	case kindReport:
		h.told[m.index]++
		h.ended[m.index] = h.ended[m.index] || m.report.Ended
		// Its clock is another.
		m.report.At = time.Now().UnixNano()
		h.events <- event{rank: h.ranks[m.index], report: &m.report}
	case kindGone:
		h.told[m.index], h.ended[m.index] = maxNews, true
		h.events <- event{rank: h.ranks[m.index]}
		if h.gone++; h.gone == len(h.ranks) {
			h.settle()
		}
	case kindOutput:
		return h.outputs[m.index].push(m.text)
	case kindClosed:
		h.outputs[m.index].end()
	case kindBye:
		return errors.New("a bye before the end of its ranks and their output")
	default:
		return fmt.Errorf("a %v, which is the launcher's to send", m.kind)
	}
	return nil
}

// error is what a refusal on a host means.
func (r *refusal) error(host string) error {
	text := printable(r.Text[:min(len(r.Text), maxTextBytes)])
	if r.Status != 0 {
		return &CommandError{Command: printable(r.Command), Host: host, Status: r.Status & 0xff, Err: errors.New(text)}
	}
	return &HostError{host, errors.New(text)}
}

// explain says why an agent ended that did not say bye.
func (h *remote) explain(err error) error {
	if errors.Is(err, errSilent) || !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		h.cut()
		return err
	}
	timer := time.NewTimer(lastWords)
	defer timer.Stop()
	for _, over := range []<-chan struct{}{h.reaped, h.silent} {
		select {
		case <-over:
		case <-timer.C:
			h.cut()
			return fmt.Errorf("its agent has closed its output, and %s goes on", h.command)
		}
	}
	how := fmt.Sprintf("exit status %d", h.status.ExitStatus())
	if h.status.Signaled() {
		how = "killed by " + unix.SignalName(h.status.Signal())
	}
	how = h.command + ": " + how
	if lines := h.stderr.tail.lines; len(lines) > 0 {
		how += ": " + printable(lines[len(lines)-1])
	}
	if err != io.EOF { // of readHello or the middle of a frame
		how = fmt.Sprintf("%v (%s)", err, how)
	}
	if h.answers.limit == 0 && (h.status.ExitStatus() == statusNotFound || h.status.ExitStatus() == statusNotExecutable) {
		return fmt.Errorf("hvdrun is not at %s there; --remote-hvdrun says where it is (%s)", h.agent, how)
	}
	return errors.New(how)
}

// cut kills the command that reaches the agent. What it has started is killed then too, as all orphans are.
func (h *remote) cut() {
	mu := &h.fleet.family.mu
	mu.Lock()
	defer mu.Unlock()
	if _, ok := h.fleet.family.own[h.pid]; ok {
		_ = unix.Kill(h.pid, unix.SIGKILL) // it is a child and not reaped
	}
}

func (h *remote) send(index int, s syscall.Signal) { h.out.put(encodeSignal(index, s)) }
func (h *remote) force()                           { h.out.put(encodeKind(kindForce)) }
func (h *remote) done() <-chan struct{}            { return h.settled }
func (h *remote) release() error                   { return nil } // the agent ends by itself, and the outputs with it

// cut kills the commands of all agents.
func (f *fleet) cut() {
	f.dropped.Store(true)
	for _, h := range f.hosts {
		h.cut()
	}
}

// dismiss returns when all agents have ended, as they do when they have told all, and the commands that reach them. Those that
// have not after the time given are killed, and given up after it has passed once more.
func (f *fleet) dismiss(patience time.Duration) error {
	if len(f.hosts) == 0 {
		return nil
	}
	var err error
	for tries := 0; ; tries++ {
		timer := time.NewTimer(patience)
		select {
		case <-f.over:
			err = f.reapErr
		case <-timer.C:
			if tries == 0 {
				f.cut()
				continue
			}
			err = errors.New("launch: the commands that reach other hosts were sent SIGKILL and are not gone")
		}
		timer.Stop()
		break
	}
	idle := make(chan struct{})
	go func() {
		f.workers.Wait()
		close(idle)
	}()
	// What an agent has said last may not be read yet. After that somebody else holds its output.
	timer := time.NewTimer(lastWords)
	defer timer.Stop()
	select {
	case <-idle:
	case <-timer.C:
	}
	for _, h := range f.hosts {
		h.orders.Close() // nil is refused
		h.answers.file.Close()
		if h.stderr != nil {
			h.stderr.in.finish()
		}
	}
	<-idle
	for _, h := range f.hosts {
		err = errors.Join(err, h.lost)
	}
	return err
}

// outbox holds what is to be sent to an agent. Putting never waits.
type outbox struct {
	more chan struct{} // capacity 1: there is more, or the end

	mu     sync.Mutex
	queue  []byte
	closed bool
}

// maxQueuedBytes bounds what an agent does not read. Beyond it the agent is given up: its input ends.
const maxQueuedBytes = maxOrderBytes + 1<<20

func (o *outbox) put(frame []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return
	}
	if o.queue = append(o.queue, frame...); len(o.queue) > maxQueuedBytes {
		o.closed, o.queue = true, nil
	}
	o.wake()
}

// wake is called with mu held.
func (o *outbox) wake() {
	select {
	case o.more <- struct{}{}:
	default:
	}
}

func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	o.wake()
}

func (o *outbox) take() (frames []byte, closed bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	frames, o.queue = o.queue, nil
	return frames, o.closed
}

// run sends what is put, and a ping now and then, until the outbox or the file is closed. Then the file is.
func (o *outbox) run(file *os.File) {
	defer file.Close()
	tick := time.NewTicker(pingInterval)
	defer tick.Stop()
	for {
		frames, closed := o.take()
		if _, err := file.Write(frames); err != nil || closed {
			return // why is seen where its answers are read
		}
		select {
		case <-o.more:
		case <-tick.C:
			o.put(encodeKind(kindPing))
		}
	}
}

// inflow is what a rank has printed and an agent has sent, until the rank's stream reads it.
type inflow struct {
	out  *outbox
	id   int
	more chan struct{} // capacity 1: there is more, or the end

	mu    sync.Mutex
	text  []byte // at most streamWindow bytes
	ended bool

	taken int // bytes that no credit was given for; of the reader
}

// push adds to the flow. It does not wait: there is room, or the agent has sent more than it may.
func (f *inflow) push(text []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.text)+len(text) > streamWindow || f.ended {
		return fmt.Errorf("%d bytes of output more than it may", len(text))
	}
	f.text = append(f.text, text...)
	f.wake()
	return nil
}

// wake is called with mu held.
func (f *inflow) wake() {
	select {
	case f.more <- struct{}{}:
	default:
	}
}

func (f *inflow) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = true
	f.wake()
}

func (f *inflow) isEnded() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ended
}

func (f *inflow) Read(b []byte) (int, error) {
	for {
		f.mu.Lock()
		n, ended := copy(b, f.text), f.ended
		f.text = f.text[n:]
		f.mu.Unlock()
		if n > 0 {
			// Fewer and larger credits cost less; the agent is never without any.
			if f.taken += n; f.taken >= streamWindow/4 {
				f.out.put(encodeCredit(f.id, f.taken))
				f.taken = 0
			}
			return n, nil
		}
		if ended {
			return 0, io.EOF
		}
		<-f.more
	}
}

// finish does nothing: the agent ends the flow, when nobody is left to write.
func (f *inflow) finish()      {}
func (f *inflow) Close() error { return nil }
