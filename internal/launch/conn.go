package launch

import (
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
	"time"

	"github.com/hashicorp/yamux"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/logs"
)

const (
	// endWait is how long a command may take to end after its connection has ended. The standard error of the
	// command must end within the same time.
	endWait = 2 * time.Second
	// routeWait is the time limit for looking up the routes to all hosts.
	routeWait = 2 * time.Second
	// maxOrders is how many orders may wait for an agent to read them, besides those of an elastic job to
	// start ranks. If there are more, the launcher kills the agent.
	maxOrders = 1000
)

// agentConn is the launcher's end of the connection to an agent.
type agentConn struct {
	host     string
	local    bool // the agent runs in this process
	ranks    []*rank
	streams  []*stream     // of the first processes of the ranks, two for each
	liveness time.Duration // how long the agent may send nothing; 0 means no limit, for a local agent
	orders   chan order

	link    *link
	command string  // the first word of the command that reaches the agent
	pid     int     // process ID of the command
	stderr  *stream // standard error of the command
	greeted bool    // the launcher has received the agent's hello
	status  unix.WaitStatus
	// ended is closed when the command was reaped or, for the agent in this process, when serveLauncher has
	// returned.
	ended  chan struct{}
	silent chan struct{} // closed when stderr was read to its end
	// closed is closed when no order reaches the agent any more. serving is set when a goroutine sends
	// orders, and closes closed at its end.
	closed  chan struct{}
	serving bool

	// pending is set until connect begins to start the agent. ready is set when the agent can start its
	// ranks, and over when no process of its ranks is left. late is the time limit until ready in an elastic
	// job. Only the supervisor's goroutine uses the four fields.
	pending, ready, over bool
	late                 *time.Timer
	// dropped is set when the launcher has cut the connection, because the agent has refused a rank or was
	// not ready in time.
	dropped atomic.Bool

	// lost is an error if the agent ended after all its ranks but before it had sent all output. It does not
	// mean that a rank has failed. It is valid after agents.writers is done.
	lost error
}

// supervisor decides what follows from what agents say or do. The supervisor's goroutine calls its methods.
type supervisor interface {
	// handleReady handles that the agent of c is ready to start its ranks.
	handleReady(c *agentConn)
	// handleRefusal handles that the agent of c cannot be started, or cannot start its ranks.
	handleRefusal(c *agentConn, err error)
	// handleReport handles the report p about the rank k.
	handleReport(k *rank, p *report)
	// handleLeave handles SIGTERM to the agent of c.
	handleLeave(c *agentConn)
	// handleLoss handles that the connection to an agent ended with err before the agent had sent everything.
	// heard is when the launcher last received something from the agent.
	handleLoss(c *agentConn, err error, heard time.Time)
}

// inbox passes functions to the supervisor's goroutine.
type inbox struct {
	calls chan func()
	done  chan struct{} // closed when the supervision has ended
}

// post makes the supervisor's goroutine call f. If the supervision has ended, post returns false, and f is
// not called.
func (b *inbox) post(f func()) bool {
	select {
	case b.calls <- f:
		return true
	case <-b.done:
		return false
	}
}

// agents starts the agents of the hosts and has the connections to them. The first four fields do not change,
// and the others belong to the supervisor's goroutine unless noted otherwise. A goroutine may read the
// elements of hosts. Goroutines that serve connections post calls of supervisor to inbox.
type agents struct {
	spec       *spec
	console    *console
	inbox      *inbox
	supervisor supervisor

	conns []*agentConn
	open  int          // number of hosts with processes of ranks: elements of conns whose over is not set
	added []*agentConn // connections for connectAdded
	hosts []string     // the hosts that an elastic job may use now

	family      family         // has a lock of its own
	commands    []*batch       // the commands that reach agents
	commandErrs sync.WaitGroup // goroutines that read the commands' standard error
	dropped     atomic.Bool    // set by cutAll: from then on errors of agents do not matter
	writers     sync.WaitGroup // goroutines for connections and for streams
}

// add adds a connection to a host, whose agent connect is to start.
func (a *agents) add(host string) *agentConn {
	size := maxOrders
	if a.spec.o.Elastic != nil {
		size += MaxRanks
	}
	c := &agentConn{host: host, local: IsThisHost(host), pending: true, orders: make(chan order, size),
		closed: make(chan struct{})}
	if !c.local {
		c.liveness = a.spec.o.Liveness
	}
	a.conns = append(a.conns, c)
	a.open++
	return c
}

// to returns the connection to the agent of a host. If there is none, it adds one for connectAdded.
func (a *agents) to(host string) *agentConn {
	if i := slices.IndexFunc(a.conns, func(c *agentConn) bool { return c.host == host && !c.over }); i >= 0 {
		return a.conns[i]
	}
	c := a.add(host)
	a.added = append(a.added, c)
	return c
}

// connectAdded starts the agents of hosts that were added. A goroutine looks up the routes before, until ctx
// ends, because the supervision must not wait for a name server.
func (a *agents) connectAdded(ctx context.Context) {
	conns, hosts := a.added, a.hosts
	a.added = nil
	if len(conns) == 0 {
		return
	}
	a.writers.Go(func() {
		routes := a.routes(ctx, conns, hosts)
		a.inbox.post(func() { a.connect(conns, routes) })
	})
}

// setOver records that no process of the ranks is left on the host of c.
func (a *agents) setOver(c *agentConn) {
	if !c.over {
		c.over = true
		a.open--
		if c.late != nil {
			c.late.Stop()
		}
	}
}

// connect starts the agents of hosts, and for each agent a goroutine that serves the connection to it. It
// omits those whose over is set. routes is what the method routes has returned for conns.
func (a *agents) connect(conns []*agentConn, routes []netip.Addr) {
	commands := newBatch()
	jobs, all := a.hostJobs(conns, routes)
	if all == nil {
		all = a.family.adopt()
	}
	for i, c := range conns {
		if c.over {
			continue
		}
		c.pending = false
		err := all
		if err == nil {
			c.orders <- order{Job: &jobs[i]}
			err = a.startAgent(commands, c)
		}
		switch {
		case err != nil && a.spec.o.Elastic != nil:
			c.close()
			a.writers.Go(func() { a.inbox.post(func() { a.supervisor.handleRefusal(c, err) }) })
			continue
		case err != nil:
			a.supervisor.handleRefusal(c, err)
			a.setOver(c)
			c.close()
			all = err // the job ends
			continue
		}
		a.writers.Go(func() { a.serveAgent(c) })
		if o := a.spec.o; o.Elastic != nil {
			c.late = time.AfterFunc(o.Start, func() {
				a.inbox.post(func() {
					if !c.ready && !c.over {
						c.dropped.Store(true)
						a.supervisor.handleLoss(c, notReady(o.Start), time.Now())
						a.cut(c)
					}
				})
			})
		}
	}
	a.family.complete(commands)
	a.commands = append(a.commands, commands)
}

// notReady returns the error for an agent that was not ready in time.
func notReady(limit time.Duration) error {
	return fmt.Errorf("its agent was not ready within %v", limit)
}

// startAgent starts the agent for c.host. The agent is a goroutine in this process, or the command that runs
// an agent on another host.
func (a *agents) startAgent(commands *batch, c *agentConn) error {
	c.ended, c.silent = make(chan struct{}), make(chan struct{})
	if c.local {
		mine, theirs := net.Pipe()
		c.link = &link{in: mine, out: mine}
		go func() {
			defer close(c.ended)
			// serveLauncher fails only if the launcher has closed the link, and then the launcher knows the
			// reason.
			_ = serveLauncher(&link{in: theirs, out: theirs}, 0, a.spec.o.Env, &a.family, nil)
		}()
		return nil
	}
	argv := a.spec.o.Reach(c.host, []string{a.spec.o.AgentPath, AgentArg, a.spec.o.Liveness.String()})
	path, err := lookPath(argv[0], a.spec.o.Env)
	if err != nil {
		return &HostError{c.host, fmt.Errorf("%s: %w", argv[0], err)}
	}
	a.console.verbosef("host %s: %s", c.host, strings.Join(argv, " "))
	var mine []*os.File
	c.command = argv[0]
	c.pid, err = a.family.start(commands, func() (pid int, err error) {
		mine, pid, err = startWithPipes(path, argv, a.spec.o.Env, nil, []bool{false, true, true})
		return pid, err
	}, func(status unix.WaitStatus) {
		a.family.killOrphans(status)
		c.status = status
		c.stderr.in.(*pipeSource).finish()
		// A process outside the job may keep the other end of the link open, so that reading would never end.
		time.AfterFunc(endWait, func() { c.link.Close() })
		close(c.ended)
	})
	if err != nil {
		return &HostError{c.host, fmt.Errorf("%s: %w", argv[0], err)}
	}
	c.link = &link{in: mine[1], out: mine[0]}
	c.stderr = &stream{
		in: &pipeSource{file: mine[2]}, console: a.console, err: true, timestamp: a.spec.o.Timestamp,
		prefix: "hvdrun: host " + c.host + ": ", tail: new(tail), done: make(chan struct{}),
	}
	a.commandErrs.Go(func() {
		defer close(c.silent)
		c.stderr.run()
	})
	return nil
}

// hostJobs returns for each of the hosts the job that is sent to its agent in the first order.
func (a *agents) hostJobs(conns []*agentConn, routes []netip.Addr) ([]hostJob, error) {
	travelling := slices.DeleteFunc(slices.Clone(a.spec.env), func(v string) bool {
		return IsOfHost(nameOf(v)) && !has(a.spec.o.Set, nameOf(v))
	})
	jobs := make([]hostJob, len(conns))
	for i, c := range conns {
		jobs[i] = hostJob{Command: a.spec.o.Command, Env: travelling, Secret: words{a.spec.o.Secret},
			Scheduler: a.spec.o.Nodes != nil && a.spec.several,
			BindTo:    a.spec.o.BindTo,
			Restarts:  a.spec.o.Nodes != nil && a.spec.o.Nodes.Restarts > 0 || a.spec.o.Elastic != nil,
			Grace:     a.spec.o.Grace, Starter: a.spec.o.Starter != ""}
		if !c.local {
			dir, err := os.Getwd()
			if err != nil {
				return nil, fmt.Errorf("launch: get the working directory: %w", err)
			}
			jobs[i].Dir = words{dir}
		}
		for _, k := range c.ranks {
			vars := slices.Concat(a.spec.torchVariables(a.spec.places[k.number]),
				a.spec.processVariables(k.number))
			if !a.spec.several {
				vars = append(vars, storeVariables(a.spec.o.StoreAddrs[0])...)
			}
			jobs[i].Ranks = append(jobs[i].Ranks, vars)
		}
		for _, addr := range a.spec.o.StoreAddrs {
			switch {
			case !a.spec.several:
			case addr.Addr() == routes[i]:
				jobs[i].Stores = slices.Insert(jobs[i].Stores, 0, addr.String())
			default:
				jobs[i].Stores = append(jobs[i].Stores, addr.String())
			}
		}
	}
	return jobs, nil
}

// routes returns, for each of the hosts of conns, the address of this host from which it sends packets to
// that host. If the address is not known, the entry is invalid, for instance because the name is an alias
// that only ssh understands. The entry of this host itself is the first of the addresses found that is also
// an address of the store, because this host must reach the store at the same address as the other hosts. It
// may be that of one of others, which are further hosts of the job.
func (a *agents) routes(ctx context.Context, conns []*agentConn, others []string) []netip.Addr {
	ctx, cancel := context.WithTimeout(ctx, routeWait)
	defer cancel()
	var hosts []string
	for _, c := range conns {
		hosts = append(hosts, c.host)
	}
	if slices.ContainsFunc(conns, func(c *agentConn) bool { return c.local }) {
		for _, h := range others {
			if !slices.Contains(hosts, h) {
				hosts = append(hosts, h)
			}
		}
	}
	found := make([]netip.Addr, len(hosts))
	var searches sync.WaitGroup
	for i, host := range hosts {
		if IsThisHost(host) {
			continue
		}
		searches.Go(func() {
			var d net.Dialer
			// Connecting a datagram socket sends nothing. It only looks up the route.
			conn, err := d.DialContext(ctx, "udp",
				net.JoinHostPort(host[strings.LastIndexByte(host, '@')+1:], "9"))
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
	first := slices.IndexFunc(found, func(f netip.Addr) bool {
		return slices.ContainsFunc(a.spec.o.StoreAddrs, func(s netip.AddrPort) bool { return s.Addr() == f })
	})
	for i, c := range conns {
		if first >= 0 && c.local {
			found[i] = found[first]
		}
	}
	return found[:len(conns)]
}

// serveAgent handles the notices from an agent until the connection ends.
func (a *agents) serveAgent(c *agentConn) {
	err := a.runSession(c)
	if err != nil {
		err = a.explain(c, err)
	}
	heard := time.Now()
	if at := c.link.heard.Load(); at != 0 {
		heard = time.Unix(0, at)
	}
	c.close()
	if err != nil {
		// If the supervision has ended, all ranks have ended too, so only output can have been lost.
		if !a.inbox.post(func() { a.supervisor.handleLoss(c, err, heard) }) {
			c.cutShort(a, err)
		}
	}
}

// cutShort records that output may be missing. It does nothing if the launcher itself has ended the
// connection.
func (c *agentConn) cutShort(a *agents, err error) {
	if !a.dropped.Load() && !c.dropped.Load() {
		c.lost = fmt.Errorf("launch: host %s: the last output was lost: %w", c.host, err)
	}
}

// close closes the link. It also closes the output files of ranks whose streams were not opened.
func (c *agentConn) close() {
	if !c.serving {
		close(c.closed)
	}
	if c.link != nil {
		c.link.Close()
	}
	for _, s := range c.streams {
		if s.in == nil {
			s.file.Close() // the error is ignored, because nothing was written; s.file may be nil
		}
	}
}

// runSession opens the session with an agent and handles its notices. It returns nil after the notice Bye.
func (a *agents) runSession(c *agentConn) error {
	if err := readHello(c.link); err != nil {
		return err
	}
	c.greeted = true
	s, err := newSession(yamux.Client, c.link, c.liveness)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := a.openStreams(c, s); err != nil {
		return s.reason(err)
	}
	return nil
}

func (a *agents) openStreams(c *agentConn, session *session) error {
	control, err := session.OpenStream()
	if err != nil {
		return err
	}
	c.serving = true
	a.writers.Go(func() {
		defer close(c.closed)
		for {
			select {
			case o := <-c.orders:
				// Errors are ignored, because handleNotices reports a broken connection.
				if a.openAll(session, o.streams) != nil {
					session.Close()
					return
				}
				_ = send(control, o)
			case <-session.CloseChan():
				return
			}
		}
	})
	if err := a.openAll(session, c.streams); err != nil {
		return err
	}
	return a.handleNotices(c, control)
}

// openAll opens the streams for the output of ranks, and starts to copy it.
func (a *agents) openAll(session *session, streams []*stream) error {
	for _, s := range streams {
		in, err := session.OpenStream()
		if err != nil {
			return err
		}
		s.in = in
		s.opened.Store(true)
		a.writers.Go(s.run)
	}
	return nil
}

// handleNotices passes the notices from an agent to the supervisor. It returns nil when it receives Bye. It
// returns an error if Bye arrives before Over.
func (a *agents) handleNotices(c *agentConn, control io.Reader) error {
	over := false
	for {
		var n notice
		if err := receive(control, maxNoticeBytes, &n); err != nil {
			return err
		}
		switch {
		case n.Ready:
			a.inbox.post(func() { a.supervisor.handleReady(c) })
		case n.Refused != nil:
			err := n.Refused.error(a.spec.several, c)
			a.inbox.post(func() { a.supervisor.handleRefusal(c, err) })
		case n.Report != nil && a.spec.o.Elastic == nil && (n.Rank < 0 || n.Rank >= len(c.ranks)):
			return fmt.Errorf("malformed notice from the agent: got rank index %d, want less than %d",
				n.Rank, len(c.ranks))
		case n.Report != nil:
			if !c.local {
				// Use the clock of this host, because the clock of the agent's host may differ.
				n.Report.At = time.Now().UnixNano()
			}
			a.inbox.post(func() {
				// In an elastic job, only the supervisor may read c.ranks.
				if n.Rank >= 0 && n.Rank < len(c.ranks) && c.ranks[n.Rank].conn == c {
					a.supervisor.handleReport(c.ranks[n.Rank], n.Report)
				}
			})
		case n.Leave:
			a.inbox.post(func() { a.supervisor.handleLeave(c) })
		case n.Over:
			over = true
			a.inbox.post(func() { a.setOver(c) })
		case n.Bye && !over:
			return errors.New("the agent sent Bye before its ranks had ended")
		case n.Bye:
			return nil
		}
	}
}

// error converts a refusal into the error that Run returns: a *CommandError or a *HostError.
func (r *refusal) error(several bool, c *agentConn) error {
	text := logs.Plain(r.Text)
	if r.Status != 0 {
		err := &CommandError{Command: r.Command, Status: r.Status & 0xff, Err: errors.New(text)}
		if several {
			err.Host = c.host
		}
		return err
	}
	return &HostError{c.host, errors.New(text)}
}

// explain returns an error that says why an agent ended without sending Bye. If err says more than that the
// connection ended, explain returns err. Otherwise the error contains the exit status of the command and the
// last line of its standard error. If the command has not ended after endWait, explain kills it.
func (a *agents) explain(c *agentConn, err error) error {
	if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) || c.local {
		a.cut(c)
		return err
	}
	timer := time.NewTimer(endWait)
	defer timer.Stop()
	for _, over := range []<-chan struct{}{c.ended, c.silent} {
		select {
		case <-over:
		case <-timer.C:
			a.cut(c)
			return fmt.Errorf("the agent closed its output, but %s is still running", c.command)
		}
	}
	how := fmt.Sprintf("%s: exit status %d", c.command, c.status.ExitStatus())
	switch {
	case c.status.Signaled():
		how = c.command + ": killed by " + unix.SignalName(c.status.Signal())
	case c.greeted && c.status.ExitStatus() == 0:
		how = "its agent has ended"
	}
	if lines := c.stderr.tail.lines; len(lines) > 0 {
		how += ": " + logs.Plain(lines[len(lines)-1])
	}
	if err != io.EOF { // the error came from readHello, or in the middle of a frame
		how = fmt.Sprintf("%v (%s)", err, how)
	}
	if !c.greeted && (c.status.ExitStatus() == statusNotFound ||
		c.status.ExitStatus() == statusNotExecutable) {
		return fmt.Errorf("found no hvdrun at %s on that host: give its path with --remote-hvdrun (%s)",
			a.spec.o.AgentPath, how)
	}
	return errors.New(how)
}

// cut ends an agent. If the agent is in this process, cut closes the link to it. Otherwise cut kills the
// command that reaches the agent. The processes that the command leaves behind are killed as orphans.
func (a *agents) cut(c *agentConn) {
	switch {
	case c.link == nil: // the agent was not started
	case c.local:
		c.link.Close()
	default:
		a.family.kill(c.pid)
	}
}

// cutAll cuts the connections to all agents.
func (a *agents) cutAll() {
	a.dropped.Store(true)
	for _, c := range a.conns {
		a.cut(c)
	}
}

// awaitAgents waits until all agents, and the commands that reach them, have ended. They end when they have
// sent everything. When timeout has passed, awaitAgents kills the ones that are left and waits for the same
// time again. If some are still left then, it returns an error.
func (a *agents) awaitAgents(timeout time.Duration) error {
	all := make(chan struct{})
	go func() {
		defer close(all)
		for _, b := range a.commands {
			<-b.gone
		}
		for _, c := range a.conns {
			if c.local && c.link != nil {
				<-c.ended
			}
		}
		a.family.reaper.Wait()
	}()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for range 2 {
		select {
		case <-all:
			a.commandErrs.Wait()
			return a.family.err
		case <-timer.C:
			a.cutAll()
			timer.Reset(timeout)
		}
	}
	for _, c := range a.conns {
		if c.link != nil {
			c.link.Close()
		}
	}
	return errors.New("launch: the commands that reach other hosts, such as ssh, are still alive after SIGKILL")
}

// sendAll queues o for all agents.
func (a *agents) sendAll(o order) {
	for _, c := range a.conns {
		if !c.over {
			a.send(c, o)
		}
	}
}

// send queues o for an agent, unless connect has not begun to start it. It does not block: if the queue of
// the agent is full, the agent is killed.
func (a *agents) send(c *agentConn, o order) {
	if c.pending {
		return
	}
	select {
	case c.orders <- o:
	default:
		a.cut(c) // the agent does not read its orders
	}
}
