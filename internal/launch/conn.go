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

	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/internal/logs"
)

const (
	// endWait is how long a command may take to end after its connection has ended. The standard error of the
	// command must end within the same time.
	endWait = 2 * time.Second
	// routeWait is the time limit for looking up the routes to all hosts.
	routeWait = 2 * time.Second
	// maxOrders is how many orders may wait for an agent to read them. If there are more, the launcher kills
	// the agent.
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

	// ready is set when the agent can start its ranks, and over when no process of its ranks is left. Only
	// the supervisor's goroutine uses the two fields.
	ready, over bool
	dropped     atomic.Bool // the launcher has cut the connection, because the agent has refused a rank

	// lost is an error if the agent ended after all its ranks but before it had sent all output. It does not
	// mean that a rank has failed. It is valid after job.writers is done.
	lost error
}

// connect starts the agents of hosts, and for each agent a goroutine that serves the connection to it.
func (j *job) connect(conns []*agentConn) {
	commands := newBatch()
	jobs, err := j.hostJobs(conns)
	if err == nil {
		err = j.family.adopt()
	}
	for i, c := range conns {
		if err == nil {
			c.orders <- order{Job: &jobs[i]}
			err = j.startAgent(commands, c)
		}
		switch {
		case err != nil && j.o.Elastic != nil:
			c.close()
			j.writers.Go(func() { j.post(func() { j.loseAgent(c, err) }) })
			continue
		case err != nil:
			j.abort(err)
			j.setOver(c)
			c.close()
			continue
		}
		j.writers.Go(func() { j.serveAgent(c) })
	}
	j.family.complete(commands)
	j.commands = append(j.commands, commands)
}

// startAgent starts the agent for c.host. The agent is a goroutine in this process, or the command that runs
// an agent on another host.
func (j *job) startAgent(commands *batch, c *agentConn) error {
	c.ended, c.silent = make(chan struct{}), make(chan struct{})
	if c.local {
		mine, theirs := net.Pipe()
		c.link = &link{in: mine, out: mine}
		go func() {
			defer close(c.ended)
			// serveLauncher fails only if the launcher has closed the link, and then the launcher knows the
			// reason.
			_ = serveLauncher(&link{in: theirs, out: theirs}, 0, j.o.Env, &j.family, nil)
		}()
		return nil
	}
	argv := j.o.Reach(c.host, []string{j.o.AgentPath, AgentArg, j.o.Liveness.String()})
	path, err := lookPath(argv[0], j.o.Env)
	if err != nil {
		return &HostError{c.host, fmt.Errorf("%s: %w", argv[0], err)}
	}
	j.console.verbosef("host %s: %s", c.host, strings.Join(argv, " "))
	var mine []*os.File
	c.command = argv[0]
	c.pid, err = j.family.start(commands, func() (pid int, err error) {
		mine, pid, err = startWithPipes(path, argv, j.o.Env, nil, []bool{false, true, true})
		return pid, err
	}, func(status unix.WaitStatus) {
		j.family.killOrphans(status)
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
		in: &pipeSource{file: mine[2]}, console: j.console, err: true, timestamp: j.o.Timestamp,
		prefix: "hvdrun: host " + c.host + ": ", tail: new(tail), done: make(chan struct{}),
	}
	j.commandErrs.Go(func() {
		defer close(c.silent)
		c.stderr.run()
	})
	return nil
}

// hostJobs returns for each of the hosts the job that is sent to its agent in the first order.
func (j *job) hostJobs(conns []*agentConn) ([]hostJob, error) {
	travelling := slices.DeleteFunc(slices.Clone(j.spec.env), func(v string) bool {
		return IsOfHost(nameOf(v)) && !has(j.o.Set, nameOf(v))
	})
	routes := j.routes(conns)
	jobs := make([]hostJob, len(conns))
	for i, c := range conns {
		jobs[i] = hostJob{Command: j.o.Command, Env: travelling, Secret: words{j.o.Secret},
			Scheduler: j.o.Nodes != nil && j.spec.several,
			BindTo:    j.o.BindTo,
			Restarts:  j.o.Nodes != nil && j.o.Nodes.Restarts > 0 || j.o.Elastic != nil,
			Elastic:   j.o.Elastic != nil}
		if j.o.Starter != "" {
			jobs[i].Grace = j.o.Grace
		}
		if !c.local {
			dir, err := os.Getwd()
			if err != nil {
				return nil, fmt.Errorf("launch: get the working directory: %w", err)
			}
			jobs[i].Dir = words{dir}
		}
		for _, k := range c.ranks {
			vars := slices.Concat(j.spec.torchVariables(j.spec.places[k.number]), j.spec.processVariables(k.number))
			if !j.spec.several {
				vars = append(vars, storeVariables(j.o.StoreAddrs[0])...)
			}
			jobs[i].Ranks = append(jobs[i].Ranks, vars)
		}
		for _, a := range j.o.StoreAddrs {
			switch {
			case !j.spec.several:
			case a.Addr() == routes[i]:
				jobs[i].Stores = slices.Insert(jobs[i].Stores, 0, a.String())
			default:
				jobs[i].Stores = append(jobs[i].Stores, a.String())
			}
		}
	}
	return jobs, nil
}

// routes returns, for each of the hosts, the address of this host from which it sends packets to that host.
// If the address is not known, the entry is invalid, for instance because the name is an alias that only ssh
// understands. The entry of this host itself is the first of the addresses found that is also an address of
// the store, because this host must reach the store at the same address as the other hosts.
func (j *job) routes(conns []*agentConn) []netip.Addr {
	ctx, cancel := context.WithTimeout(context.Background(), routeWait)
	defer cancel()
	found := make([]netip.Addr, len(conns))
	var searches sync.WaitGroup
	for i, c := range conns {
		if c.local {
			continue
		}
		searches.Go(func() {
			var d net.Dialer
			// Connecting a datagram socket sends nothing. It only looks up the route.
			conn, err := d.DialContext(ctx, "udp",
				net.JoinHostPort(c.host[strings.LastIndexByte(c.host, '@')+1:], "9"))
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
	for i, c := range conns {
		if first >= 0 && c.local {
			found[i] = found[first]
		}
	}
	return found
}

// serveAgent handles the notices from an agent until the connection ends.
func (j *job) serveAgent(c *agentConn) {
	err := j.runSession(c)
	if err != nil {
		err = j.explain(c, err)
	}
	heard := time.Now()
	if at := c.link.heard.Load(); at != 0 {
		heard = time.Unix(0, at)
	}
	c.close()
	if err != nil {
		// If the supervision has ended, all ranks have ended too, so only output can have been lost.
		if !j.post(func() { j.handleLoss(c, err, heard) }) {
			c.cutShort(j, err)
		}
	}
}

// cutShort records that output may be missing. It does nothing if the launcher itself has ended the
// connection.
func (c *agentConn) cutShort(j *job, err error) {
	if !j.dropped.Load() && !c.dropped.Load() {
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
func (j *job) runSession(c *agentConn) error {
	if err := readHello(c.link); err != nil {
		return err
	}
	c.greeted = true
	s, err := newSession(yamux.Client, c.link, c.liveness)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := j.openStreams(c, s); err != nil {
		return s.reason(err)
	}
	return nil
}

func (j *job) openStreams(c *agentConn, session *session) error {
	control, err := session.OpenStream()
	if err != nil {
		return err
	}
	c.serving = true
	j.writers.Go(func() {
		defer close(c.closed)
		for {
			select {
			case o := <-c.orders:
				// Errors are ignored, because handleNotices reports a broken connection.
				if j.openAll(session, o.streams) != nil {
					session.Close()
					return
				}
				_ = send(control, o)
			case <-session.CloseChan():
				return
			}
		}
	})
	if err := j.openAll(session, c.streams); err != nil {
		return err
	}
	return j.handleNotices(c, control)
}

// openAll opens the streams for the output of ranks, and starts to copy it.
func (j *job) openAll(session *session, streams []*stream) error {
	for _, s := range streams {
		in, err := session.OpenStream()
		if err != nil {
			return err
		}
		s.in = in
		s.opened.Store(true)
		j.writers.Go(s.run)
	}
	return nil
}

// handleNotices passes the notices from an agent to the supervisor. It returns nil when it receives Bye. It
// returns an error if Bye arrives before Over.
func (j *job) handleNotices(c *agentConn, control io.Reader) error {
	over := false
	for {
		var n notice
		if err := receive(control, maxNoticeBytes, &n); err != nil {
			return err
		}
		switch {
		case n.Ready:
			j.post(func() { j.handleReady(c) })
		case n.Refused != nil:
			err := n.Refused.error(j, c)
			j.post(func() { j.refused(c, err) })
		case n.Report != nil && j.o.Elastic == nil && (n.Rank < 0 || n.Rank >= len(c.ranks)):
			return fmt.Errorf("malformed notice from the agent: got rank index %d, want less than %d",
				n.Rank, len(c.ranks))
		case n.Report != nil:
			if !c.local {
				// Use the clock of this host, because the clock of the agent's host may differ.
				n.Report.At = time.Now().UnixNano()
			}
			j.post(func() {
				// In an elastic job, only the supervisor may read c.ranks.
				if n.Rank >= 0 && n.Rank < len(c.ranks) && c.ranks[n.Rank].conn == c {
					j.handleReport(c.ranks[n.Rank], n.Report)
				}
			})
		case n.Leave:
			j.post(func() {
				j.tell(func(m *elastic.Machine, now time.Time) elastic.Output {
					return m.LeaveHost(now, c.host, "SIGTERM to the agent on its host")
				})
			})
		case n.Over:
			over = true
			j.post(func() { j.setOver(c) })
		case n.Bye && !over:
			return errors.New("the agent sent Bye before its ranks had ended")
		case n.Bye:
			return nil
		}
	}
}

// error converts a refusal into the error that Run returns: a *CommandError or a *HostError.
func (r *refusal) error(j *job, c *agentConn) error {
	text := logs.Plain(r.Text)
	if r.Status != 0 {
		err := &CommandError{Command: r.Command, Status: r.Status & 0xff, Err: errors.New(text)}
		if j.spec.several {
			err.Host = c.host
		}
		return err
	}
	return &HostError{c.host, errors.New(text)}
}

// explain returns an error that says why an agent ended without sending Bye. If err says more than that the
// connection ended, explain returns err. Otherwise the error contains the exit status of the command and the
// last line of its standard error. If the command has not ended after endWait, explain kills it.
func (j *job) explain(c *agentConn, err error) error {
	if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) || c.local {
		j.cut(c)
		return err
	}
	timer := time.NewTimer(endWait)
	defer timer.Stop()
	for _, over := range []<-chan struct{}{c.ended, c.silent} {
		select {
		case <-over:
		case <-timer.C:
			j.cut(c)
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
			j.o.AgentPath, how)
	}
	return errors.New(how)
}

// cut ends an agent. If the agent is in this process, cut closes the link to it. Otherwise cut kills the
// command that reaches the agent. The processes that the command leaves behind are killed as orphans.
func (j *job) cut(c *agentConn) {
	switch {
	case c.link == nil: // the agent was not started
	case c.local:
		c.link.Close()
	default:
		j.family.kill(c.pid)
	}
}

// cutAll cuts the connections to all agents.
func (j *job) cutAll() {
	j.dropped.Store(true)
	for _, c := range j.conns {
		j.cut(c)
	}
}

// awaitAgents waits until all agents, and the commands that reach them, have ended. They end when they have
// sent everything. When timeout has passed, awaitAgents kills the ones that are left and waits for the same
// time again. If some are still left then, it returns an error.
func (j *job) awaitAgents(timeout time.Duration) error {
	all := make(chan struct{})
	go func() {
		defer close(all)
		for _, b := range j.commands {
			<-b.gone
		}
		for _, c := range j.conns {
			if c.local && c.link != nil {
				<-c.ended
			}
		}
		j.family.reaper.Wait()
	}()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for range 2 {
		select {
		case <-all:
			j.commandErrs.Wait()
			return j.family.err
		case <-timer.C:
			j.cutAll()
			timer.Reset(timeout)
		}
	}
	for _, c := range j.conns {
		if c.link != nil {
			c.link.Close()
		}
	}
	return errors.New("launch: the commands that reach other hosts, such as ssh, are still alive after SIGKILL")
}
