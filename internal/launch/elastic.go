package launch

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/elastic"
)

// MemberVariable tells a process of an elastic job which member it is, in the form that ParseMember of
// package elastic reads. It also says that the job is elastic.
const MemberVariable = "HVD_MEMBER"

// Elastic makes a job elastic: its ranks may die, leave and be added. Then Options.NP is the number of slots
// that there must be at the start.
type Elastic struct {
	// Config says what the job wants. Run sets Start, Notice and Random, and Max to MaxRanks if it is 0.
	Config elastic.Config
	// Discovery finds the hosts. The job fails if the first run of its program fails. If a later one fails,
	// the hosts stay as they were. If Discovery is nil, the hosts are Options.Hosts.
	Discovery *Discovery
	// Publish tells the processes the new ranks. Resumed is called when they train. Both must not block.
	Publish func(r *elastic.Roster)
	Resumed func(r *elastic.Resume)
	// Events delivers what the processes say. Run calls each function, which calls a method of the machine.
	Events <-chan func(m *elastic.Machine, now time.Time) elastic.Output
}

// membership is the state that only an elastic job has. The supervisor's goroutine uses it.
type membership struct {
	machine *elastic.Machine
	// queue are the events of which the machine does not know yet; the first is in progress.
	queue   []func(*elastic.Machine, time.Time) elastic.Output
	over    bool                   // the machine has ended, or a signal has ended the job
	slots   map[elastic.Slot]*rank // the state of each slot at which a process was started
	roster  *elastic.Roster        // the newest one, or nil
	changes changes
	warned  string // what was wrong with the last run of discovery: "failed", "no hosts", or ""
	ending  string // why the job has failed, or ""
	// ends has the ends of the processes that may be the root cause if the job fails now.
	ends map[elastic.Member]*ending
}

// ending is the end of a process. Another process may run in its slot since.
type ending struct {
	exit Exit
	tail *tail // of its standard error
}

// beginElastic starts an elastic job.
func (j *job) beginElastic() {
	e := j.o.Elastic
	j.begun, j.phase = true, running
	if err := j.agents.family.adopt(); err != nil {
		j.stopMachine()
		j.abort(err)
		return
	}
	j.members.changes.console = j.console
	j.members.machine = elastic.New(e.Config, time.Now())
	j.members.slots = make(map[elastic.Slot]*rank)
	j.members.ends = make(map[elastic.Member]*ending)
	if e.Discovery == nil {
		j.discovered(j.o.Hosts)
		return
	}
	ctx := j.supervision
	j.watchers.Go(func() {
		for first := true; ; first = false {
			hosts, warning, err := e.Discovery.run(ctx, &j.agents.family, j.o.Env)
			if ctx.Err() != nil || !j.inbox.post(func() { j.handleDiscovery(hosts, warning, err, first) }) {
				return
			}
			select {
			case <-time.After(e.Discovery.Interval):
			case <-ctx.Done():
				return
			}
		}
	})
}

// handleDiscovery handles the result of a call of Discovery.run.
func (j *job) handleDiscovery(hosts []Host, warning string, err error, first bool) {
	if err != nil && first {
		j.stopMachine()
		j.abort(err)
		return
	}
	state := ""
	switch {
	case err != nil:
		state, warning = "failed", err.Error()+"; the hosts stay as they were"
	case warning != "":
		state = "no hosts"
	}
	if state != "" && state != j.members.warned { // the text may have a time, and differ in each run
		j.console.note("warning: %s", warning)
	}
	j.members.warned = state
	if err == nil {
		j.discovered(hosts)
	}
}

func (j *job) discovered(hosts []Host) {
	all, names := make([]elastic.Host, len(hosts)), make([]string, len(hosts))
	for i, h := range hosts {
		all[i], names[i] = elastic.Host(h), h.Name
	}
	j.agents.hosts = names
	j.tell(func(m *elastic.Machine, now time.Time) elastic.Output { return m.Discovered(now, all) })
}

// memberEvents returns the channel of what processes say, or nil if the job is not elastic.
func (j *job) memberEvents() <-chan func(*elastic.Machine, time.Time) elastic.Output {
	if j.o.Elastic == nil {
		return nil
	}
	return j.o.Elastic.Events
}

// nextTick returns when the machine must learn the time, or the zero time.
func (j *job) nextTick() time.Time {
	if !j.mayStart() {
		return time.Time{}
	}
	return j.members.machine.Next()
}

// tell calls f with the machine, and does what the machine answers. If it is called meanwhile, it does so
// afterwards.
func (j *job) tell(f func(m *elastic.Machine, now time.Time) elastic.Output) {
	m := &j.members
	if m.machine == nil {
		return
	}
	m.queue = append(m.queue, f)
	if len(m.queue) > 1 {
		return
	}
	for len(m.queue) > 0 {
		j.carryOut(m.queue[0](m.machine, time.Now()))
		m.queue = m.queue[1:]
	}
	m.queue = nil
}

func (j *job) carryOut(o elastic.Output) {
	for _, p := range o.Kill {
		j.killMember(p)
	}
	if o.Publish != nil {
		j.members.roster = o.Publish
		j.o.Elastic.Publish(o.Publish)
		j.members.changes.addRoster(o.Publish)
	}
	for _, p := range o.Start {
		j.startMember(p)
	}
	j.agents.connectAdded(j.supervision)
	if o.Resume != nil {
		j.o.Elastic.Resumed(o.Resume)
		j.members.changes.addResume(o.Resume)
	}
	for _, n := range o.Notes {
		j.console.note("%s", n)
	}
	if o.End != nil {
		j.endElastic(o.End)
	}
}

// ranks returns the state of the slot of each rank of r, which may be nil.
func (m *membership) ranks(r *elastic.Roster) (ranks []*rank) {
	if r != nil {
		for _, p := range r.Members {
			ranks = append(ranks, m.slots[p.Slot])
		}
	}
	return ranks
}

// startMember starts process p when its host is ready and the process before it at the slot is gone.
func (j *job) startMember(p elastic.Member) {
	if j.members.over {
		return
	}
	k := j.members.slots[p.Slot]
	if k == nil {
		k = j.addSlot(p.Slot)
	}
	if k == nil {
		return
	}
	k.conn = j.agents.to(p.Host)
	k.member, k.waits = p, true
	j.startWaiting(k)
}

// startWaiting starts the process for which slot k waits, if there is one and it is possible now.
func (j *job) startWaiting(k *rank) {
	if !k.waits || !k.gone || !k.conn.ready || j.members.over {
		return
	}
	k.waits, k.ended, k.gone, k.started = false, false, false, time.Now()
	k.exit = Exit{Host: k.exit.Host}
	index := slices.Index(k.conn.ranks, k)
	if index < 0 {
		index = len(k.conn.ranks)
		k.conn.ranks = append(k.conn.ranks, k)
	}
	for i, before := range k.streams {
		if k.opened {
			k.streams[i] = before.next()
		}
		k.streams[i].unused = k.conn.closed
	}
	k.opened = true
	env := j.spec.memberVariables(k.exit.Host, k.member)
	if !j.spec.several {
		env = append(env, storeVariables(j.o.StoreAddrs[0])...)
	}
	j.agents.send(k.conn, order{Start: &index, Env: env, streams: slices.Clone(k.streams[:])})
}

// addSlot makes the state of a slot at which no process was started before. If its output files cannot be
// made, it returns nil and ends the job, as for other mistakes of the user, unless there have been ranks. A
// job that trains goes on without these files.
func (j *job) addSlot(s elastic.Slot) *rank {
	title := s.String()
	label := title
	if !j.spec.several {
		label = strconv.Itoa(s.Index)
	}
	k := &rank{number: len(j.ranks), title: title, ended: true, gone: true, exit: Exit{Host: s.Host}}
	k.makeStreams(j.o, j.console, label)
	if err := k.createFiles(j.o.OutputDir, fmt.Sprintf("%s.%d", s.Host, s.Index)); err != nil {
		if !j.members.machine.HasRoster() {
			j.stopMachine()
			j.abort(err)
			return nil
		}
		j.console.note("warning: %s: %s", title, strings.TrimPrefix(err.Error(), "launch: "))
		k.streams[0].path, k.streams[1].path = "", ""
		k.streams[0].fileErr = errors.Unwrap(err)
	}
	j.ranks = append(j.ranks, k)
	j.members.slots[s] = k
	return k
}

// mayStart reports whether the machine of an elastic job may still start processes.
func (j *job) mayStart() bool { return j.o.Elastic != nil && !j.members.over }

// handleLeave handles SIGTERM to the agent of c. It takes the ranks on that host out of an elastic job.
// Another job ends as if the launcher had got the signal. A batch system that ends a job may send SIGTERM to
// each agent and, somewhat later, to the launcher. The later SIGTERM does not count as a second signal.
func (j *job) handleLeave(c *agentConn) {
	if j.o.Elastic == nil {
		if !j.asked && j.alive() > 0 {
			j.console.note("SIGTERM to the agent on host %s", c.host)
			j.handleSignal(unix.SIGTERM)
			j.relayed = time.Now().Add(max(j.o.Grace, j.o.Echo))
		}
		return
	}
	j.tell(func(m *elastic.Machine, now time.Time) elastic.Output {
		return m.LeaveHost(now, c.host, "SIGTERM to the agent on its host")
	})
}

// handleElasticReady begins to start processes on the host of c.
func (j *job) handleElasticReady(c *agentConn) {
	c.late.Stop()
	j.agents.send(c, order{Begin: true})
	for _, k := range j.ranks {
		if k.conn == c {
			j.startWaiting(k)
		}
	}
}

// loseAgent handles that the agent of c could not be reached, or has refused to start processes. Before the
// first ranks this ends the job, because then it is most likely a mistake of the user.
func (j *job) loseAgent(c *agentConn, err error) {
	if j.members.over || j.members.machine.HasRoster() {
		j.dropAgent(c, err)
		return
	}
	j.stopMachine()
	j.abort(err)
}

// dropAgent handles that the agent of c cannot be used any more: the ranks there are lost.
func (j *job) dropAgent(c *agentConn, err error) {
	if e, ok := errors.AsType[*HostError](err); ok {
		err = e.Err
	}
	j.handleLoss(c, err, time.Now())
	if c.ready {
		// The agent waits for orders, and gets none any more.
		c.dropped.Store(true)
		j.agents.cut(c)
	}
}

// killMember kills process p.
func (j *job) killMember(p elastic.Member) {
	k := j.members.slots[p.Slot]
	switch {
	case k.member != p || k.ended && !k.waits:
	case k.waits:
		k.waits, k.told = false, p
		j.tell(func(m *elastic.Machine, now time.Time) elastic.Output {
			return m.Ended(now, elastic.Exit{Member: p, How: "not started"})
		})
	default:
		index := slices.Index(k.conn.ranks, k)
		j.agents.send(k.conn, order{Kill: &index})
	}
}

// considerMembers is called when the state of slots has changed, of several if their host is lost. It tells
// the machine which processes have ended.
func (j *job) considerMembers(slots ...*rank) {
	var exits []elastic.Exit
	for _, k := range slots {
		p := k.member
		if !k.ended || k.waits || k.told == p {
			continue
		}
		k.told = p
		j.members.ends[p] = &ending{k.exit, k.streams[1].tail}
		exits = append(exits, elastic.Exit{Member: p, Status: k.exit.Status(), How: k.exit.Describe()})
	}
	if len(exits) > 0 {
		j.tell(func(m *elastic.Machine, now time.Time) elastic.Output { return m.Ended(now, exits...) })
		maps.DeleteFunc(j.members.ends, func(p elastic.Member, _ *ending) bool {
			return !j.members.machine.Blames(p)
		})
	}
	for _, k := range slots {
		j.startWaiting(k)
	}
	if j.members.over {
		j.endIfOver()
	}
}

// endElastic ends the job as the machine wants.
func (j *job) endElastic(e *elastic.End) {
	if e.Reason != "" {
		j.members.ending = e.Reason
		j.console.note("%s", e.Reason)
		j.failed, j.failedAt, j.first = true, time.Now(), -1
		if e.Culprit != nil {
			k := j.members.slots[e.Culprit.Slot]
			j.first, k.cause = k.number, j.members.ends[*e.Culprit]
		}
	}
	if j.stopMachine(); j.alive() == 0 {
		j.endIfOver()
		return
	}
	j.end(unix.SIGTERM)
}

// stopMachine makes the job start no processes any more.
func (j *job) stopMachine() {
	if j.o.Elastic == nil || j.members.over {
		return
	}
	j.members.over = true
	if j.members.machine != nil {
		j.members.machine.Stop()
	}
	for _, k := range j.ranks {
		k.waits = false
	}
	for _, c := range j.agents.conns {
		switch {
		case c.over || c.ready:
		case c.pending:
			j.agents.setOver(c)
			c.close()
		default:
			j.agents.cut(c) // it would wait for an order to begin
		}
	}
}
