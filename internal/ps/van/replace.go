package van

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/ps/pspb"
)

const (
	// aliveTime is the least time after which a message shows that its sender has not ended before.
	aliveTime = 100 * time.Millisecond
	// verdictTime is how long the scheduler tries to tell a process that it has declared it dead.
	verdictTime = 200 * time.Millisecond
)

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

// declareDead ends the link with a process because of err. It tells the others, so that they know the
// reason when the process ends its connections with them, and then the process, which may be alive, for
// example if it was stopped. A process that has lost its peers before it learns that waits for it
// (link.confirm).
func (s *scheduler) declareDead(l *link, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.end != nil || l.aborted != nil {
		return
	}
	l.aborted = err
	s.van.wg.Go(func() {
		defer l.conn.Close()
		if dead := s.tellOthers(l.process, err); len(dead) > 0 {
			l.tellDeath(dead)
		}
	})
}

// tellOthers tells the other processes that p was declared dead because of err, and returns the nodes of p.
// If another process has its place already, there are none.
func (s *scheduler) tellOthers(p Process, err error) []*pspb.Node {
	s.telling.Lock()
	defer s.telling.Unlock()
	dead := s.van.members.dead(p, err)
	if len(dead) > 0 {
		s.broadcast(pspb.Command_LOST, dead)
	}
	return dead
}

// tellDeath tells the peer that its process, which has the given nodes, was declared dead.
func (l *link) tellDeath(dead []*pspb.Node) {
	// The time limit also ends a write in progress. Without a message the process does not learn the reason.
	_ = l.conn.SetWriteDeadline(time.Now().Add(verdictTime))
	l.writing.Lock()
	defer l.writing.Unlock()
	if l.writer.err == nil && len(l.writer.rest) == 0 {
		_ = writeMessage(l.conn, controlMessage(&pspb.Control{Command: pspb.Command_LOST, Nodes: dead}))
	}
}

// replace gives a process the place of one that has ended. If there is none, it waits until all processes
// that might have ended have shown that they are alive.
func (s *scheduler) replace(ctx context.Context, hello *pspb.Control,
	a *applicant) (nodes []*pspb.Node, err error) {
	v := s.van
	if s.over.Load() {
		return nil, ErrStopped
	}
	if v.cfg.Staleness >= 0 {
		return nil, errors.New("all nodes have registered, and in a job with a clock none can return")
	}
	for began, late := v.timing.now(), false; ; {
		v.members.mu.Lock()
		over, change := v.members.leaving || s.over.Load(), v.members.change
		if !over {
			nodes = s.takePlace(hello, late)
		}
		v.members.mu.Unlock()
		switch {
		case over:
			return nil, ErrStopped
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
// returns nil. The caller holds the mu of members.
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

// announce tells all other nodes that a process has taken a place.
func (s *scheduler) announce(nodes []*pspb.Node) {
	if nodes[0].Generation > 0 {
		s.broadcast(pspb.Command_ADD_NODE, nodes)
	}
}
