package van

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/ps/pspb"
)

const (
	// aliveTime is the least time after which a message shows that its sender has not ended before.
	aliveTime = 100 * time.Millisecond
	// newsTime is how long a server waits for the scheduler's news of a worker that has connected already.
	newsTime = 5 * time.Second
	// verdictTime is how long the scheduler tries to tell a process that it has declared it dead.
	verdictTime = 200 * time.Millisecond
)

// learn records what the scheduler says of the nodes of a process: it has ended, or it has taken the place of
// another one. News of the same place may arrive in any order.
func (v *Van) learn(nodes []*pspb.Node) {
	if len(nodes) == 0 {
		return
	}
	n := nodes[0]
	known, fresh := v.members.hear(n)
	if !fresh {
		return
	}
	if n.Gone != ErrLeft.Error() { // a node that leaves says so on its connection, after all other messages
		v.disconnect(n, known)
	}
	v.members.update(nodes)
	v.handler.News()
	v.members.mu.Lock()
	defer v.members.mu.Unlock()
	v.reconnect(processOf(n))
}

// disconnect ends the link with the process that has had the place of n until now, and waits until the
// handler has been told of its end.
func (v *Van) disconnect(n, known *pspb.Node) {
	l := (*v.links.Load())[int(n.Id)]
	if l == nil || l.process.Incarnation != known.Incarnation {
		return
	}
	if n.Generation == known.Generation {
		l.fail(errors.New(n.Gone))
	} else {
		l.fail(errReplaced)
	}
	<-l.over
}

// reconnect makes this worker connect with the server p, with which it has no connection: p has taken the
// place of another process, or the connection has ended although p has not. The worker tries until p has
// ended. At other nodes, and for other peers, reconnect does nothing. The caller holds mu.
func (v *Van) reconnect(p Process) {
	if v.cfg.Role != Worker || RoleOf(p.ID) != Server || !v.members.takesPart(p) || v.members.leaving || v.ctx.Err() != nil {
		return
	}
	n := v.members.nodes[p.ID]
	v.wg.Go(func() {
		var wait dial.Backoff
		for warned := false; ; warned = true {
			ctx, cancel := context.WithTimeout(v.ctx, v.cfg.StartTimeout)
			err := v.connect(ctx, n)
			cancel()
			if err == nil || v.ctx.Err() != nil {
				return
			}
			if !warned {
				v.log.Warn("ps: no connection with a server yet", zap.String("node", Name(v.members.id)), zap.Error(err))
			}
			dial.Pause(v.ctx, wait.Next(), nil)
		}
	})
}

// connectServers connects this process with the servers that take part in the job and that it has to dial.
func (v *Van) connectServers(ctx context.Context, table []*pspb.Node) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(v.ctx, func() { cancel(context.Cause(v.ctx)) })
	defer stop()
	var wg sync.WaitGroup
	late := make(chan error, len(table))
	for _, n := range table {
		if v.members.dials(n) && n.Gone == "" {
			wg.Go(func() {
				err := v.connect(ctx, n)
				if err != nil && isLate(ctx) {
					err = fmt.Errorf("connect to %s: %w: %w", Name(int(n.Id)), context.Cause(ctx), err)
					v.blames.blameAll([]Process{processOf(n)}, err)
					late <- err
				}
				if err != nil {
					cancel(err)
				}
			})
		}
	}
	wg.Wait()
	select {
	case err := <-late:
		return err // it says which server has not answered
	default:
	}
	// Other servers may have to dial this one, and one may have returned meanwhile.
	var missing []Process
	if !v.members.await(ctx, func() bool {
		missing = nil
		for id, n := range v.members.nodes {
			if RoleOf(id) == Server && v.members.takesPart(processOf(n)) && !v.reaches(id) {
				missing = append(missing, processOf(n))
			}
		}
		return len(missing) == 0
	}) && isLate(ctx) {
		err := fmt.Errorf("%s has not connected: %w", Name(missing[0].ID), context.Cause(ctx))
		v.blames.blameAll(missing, err)
		return err
	}
	return context.Cause(ctx)
}

// connect connects this process with the server n. If the connection ends before the server has answered, the
// server may have ended: connect tries again until it knows, and then returns nil.
func (v *Van) connect(ctx context.Context, n *pspb.Node) error {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	p := processOf(n)
	watching.Go(func() {
		v.members.await(ctx, func() bool { return !v.members.takesPart(p) })
		cancel()
	})
	var conn net.Conn
	var r *reader
	err := dial.Retry(ctx, func() (err error) {
		conn, r, err = v.endpoint.dialServer(ctx, n)
		return err
	})
	if err == nil {
		var l *link
		if l, err = v.addLink([]*pspb.Node{n}, conn, r); err == nil {
			l.run(r)
			v.up(l)
			return nil
		}
		conn.Close()
	}
	if v.members.isOver(p) {
		return nil
	}
	return err
}

// supersede ends the link with a worker that has connected again, because its end of the link has ended. The
// network may have dropped the news of that.
func (v *Van) supersede(p Process) {
	if l := (*v.links.Load())[p.ID]; RoleOf(p.ID) == Worker && l != nil && l.process.Whole() == p {
		l.fail(errAgain)
		<-l.over
	}
}

// Ended reports whether the scheduler, or the process p itself, has said that p has ended. If only the
// connection with p has ended, p may live and serve others.
func (v *Van) Ended(p Process) bool { return v.members.ended(p) }

// Current returns the process that has the place of node id, even if it has ended. Before Start has returned,
// it may have no incarnation.
func (v *Van) Current(id int) Process { return v.members.current(id) }

// Gone returns the reason why node id has ended as far as this process knows, or nil.
func (v *Van) Gone(id int) error { return v.members.goneError(id) }

// Done returns a channel that is closed when the van is stopped or has failed.
func (v *Van) Done() <-chan struct{} { return v.ctx.Done() }

// Err returns the reason why the van was stopped or has failed, or nil.
func (v *Van) Err() error { return context.Cause(v.ctx) }

// Evict asks the scheduler to declare the server p dead, for the given reason. It does nothing if the
// scheduler has declared this process dead before, or p has ended.
func (v *Van) Evict(p Process, reason error) {
	l, err := v.link(SchedulerID)
	if err != nil {
		return // this van has ended
	}
	n := &pspb.Node{Role: pspb.Role_SERVER, Id: int32(p.ID), Incarnation: p.Incarnation,
		Generation: p.Generation, Gone: reason.Error()}
	// An error means that the scheduler has gone.
	_ = l.reply(controlMessage(&pspb.Control{Command: pspb.Command_EVICT, Nodes: []*pspb.Node{n}}))
}

// evict declares a server dead because another one asks for it, on the link l. Requests of a server that was
// declared dead before are ignored.
func (s *scheduler) evict(l *link, nodes []*pspb.Node) {
	if len(nodes) == 0 || s.van.cfg.Replicas == 0 || RoleOf(l.peer) != Server {
		return
	}
	p := processOf(nodes[0])
	s.mu.Lock()
	defer s.mu.Unlock()
	if accused, err := s.van.linkTo(p); err == nil && RoleOf(p.ID) == Server && !l.ended() {
		s.declareDead(accused, fmt.Errorf("%s says: %s", Name(l.peer), nodes[0].Gone))
	}
}

// declareDead ends the link with a process because of err. It tells the process first, because the process
// may be alive, for example if it was stopped.
func (s *scheduler) declareDead(l *link, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.end != nil || l.aborted != nil {
		return
	}
	l.aborted = err
	s.van.wg.Go(func() {
		defer l.conn.Close()
		// The time limit also ends a write in progress. Without a message the process does not learn the
		// reason.
		_ = l.conn.SetWriteDeadline(time.Now().Add(verdictTime))
		l.writing.Lock()
		defer l.writing.Unlock()
		if l.writer.err == nil && len(l.writer.rest) == 0 {
			_ = writeMessage(l.conn, controlMessage(&pspb.Control{Command: pspb.Command_LOST,
				Nodes: s.van.members.dead(l.process, err)}))
		}
	})
}

// IsRecovery reports whether this process has taken the place of one that has ended. If the old process has
// ended before all nodes have met (Config.Meets), the new one takes part from the beginning, and IsRecovery
// returns false.
func (v *Van) IsRecovery() bool { return v.members.self[0].IsRecovery }

// AwaitReturn waits until node id takes part in the job and is connected with this process, if the two have a
// connection. It returns an error if ctx ends first, or the van.
func (v *Van) AwaitReturn(ctx context.Context, id int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(v.ctx, func() { cancel(context.Cause(v.ctx)) })
	defer stop()
	if !v.members.await(ctx, func() bool { return v.ctx.Err() == nil && v.members.gone[id] == nil && v.reaches(id) }) {
		return context.Cause(ctx)
	}
	return nil
}

// reaches reports whether this process is connected with node id, or never is. The caller holds mu.
func (v *Van) reaches(id int) bool {
	if v.cfg.Role == RoleOf(id) && !v.members.neighbour(id) {
		return true
	}
	l := (*v.links.Load())[id]
	return l != nil && !isClosed(l.done) && l.process.Incarnation == v.members.nodes[id].GetIncarnation()
}

// replace gives a process the place of one that has ended. If there is none, it waits until all processes
// that might have ended have shown that they are alive.
func (s *scheduler) replace(ctx context.Context, hello *pspb.Control,
	a *applicant) (nodes []*pspb.Node, err error) {
	v := s.van
	if v.cfg.Staleness >= 0 {
		return nil, errors.New("all nodes have registered, and in a job with a clock none can return")
	}
	for began, late := v.timing.now(), false; ; {
		v.members.mu.Lock()
		nodes, change := s.takePlace(hello, late), v.members.change
		v.members.mu.Unlock()
		switch {
		case nodes != nil:
			s.forget(nodes)
			return nodes, nil
		case late:
			n := len(Members(groupOf(hello.Nodes[0].Role), v.cfg.NumServers, v.cfg.NumWorkers))
			return nil, tooMany(hello, n, n)
		}
		dial.Pause(ctx, v.timing.interval(), change)
		switch {
		case ctx.Err() != nil:
			return nil, ErrStopped
		case isClosed(a.lost):
			return nil, a.err
		}
		late = s.allAlive(hello.Nodes[0].Role, began)
	}
}

// takePlace gives a process the place of one with the same role and number of nodes, which has ended. If the
// process wants a rank, it gets the place of another rank only if any is set. If there is no place, takePlace
// returns nil. The caller holds the van's mu.
func (s *scheduler) takePlace(hello *pspb.Control, any bool) (nodes []*pspb.Node) {
	v, first := s.van, hello.Nodes[0]
	for _, id := range Members(groupOf(first.Role), v.cfg.NumServers, v.cfg.NumWorkers) {
		old := v.members.nodes[id]
		l := (*v.links.Load())[id]
		own := nodesOf(slices.Collect(maps.Values(v.members.nodes)), old.Incarnation)
		if old.CustomerId != 0 || v.members.gone[id] == nil || l != nil && !isClosed(l.over) ||
			len(own) != len(hello.Nodes) || !any && first.Rank > 0 && Rank(id) != int(first.Rank)-1 {
			continue
		}
		s.generation++
		for i, n := range hello.Nodes {
			n.Id, n.Generation = own[i].Id, s.generation
			n.IsRecovery = s.met.Load() || !hello.Meets
			v.members.setNode(n)
		}
		v.blames.forgive()
		v.members.changed()
		return hello.Nodes
	}
	return nil
}

// allAlive reports whether all processes with the given role have shown since the time began that they have
// not ended. A message may have been on its way for the time of a heartbeat.
func (s *scheduler) allAlive(role pspb.Role, began time.Duration) bool {
	v := s.van
	seen := began + max(v.cfg.HeartbeatInterval, aliveTime)
	if !v.timing.beats() {
		return v.timing.now() > seen
	}
	links := *v.links.Load()
	for _, id := range Members(groupOf(role), v.cfg.NumServers, v.cfg.NumWorkers) {
		l := links[id]
		if l == nil { // it has registered a moment ago
			return false
		}
		if !isClosed(l.over) && (isClosed(l.done) || time.Duration(l.heard.Load()) < seen) {
			return false
		}
	}
	return true
}

// forget drops what concerns the process that has had a place before.
func (s *scheduler) forget(nodes []*pspb.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.withdrawn, func(place [2]int, _ int64) bool {
		return slices.ContainsFunc(nodes, func(n *pspb.Node) bool { return int(n.Id) == place[1] })
	})
}

// groupOf returns the group of all nodes with a role.
func groupOf(r pspb.Role) int {
	if r == pspb.Role_SERVER {
		return GroupServers
	}
	return GroupWorkers
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// announce tells all other nodes that a process has taken a place.
func (s *scheduler) announce(nodes []*pspb.Node) {
	if nodes[0].Generation > 0 {
		s.broadcast(pspb.Command_ADD_NODE, nodes)
	}
}
