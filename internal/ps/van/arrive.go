package van

import (
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/ps/pspb"
)

// loop delivers a message that this process has sent to itself.
func (v *Van) loop(l *link, m *Message) {
	c := m.Clone()
	m.Drop()
	if err := v.arrive(l, c); err != nil {
		v.log.Warn("ps: a message to this node is malformed", zap.Error(err))
	}
}

// arrive handles a message that has arrived and is not a duplicate.
func (v *Van) arrive(l *link, m *Message) error {
	c := m.Header.Control
	if c == nil {
		v.handler.Receive(l.process, m)
		return nil
	}
	defer m.Release()
	switch c.Command {
	case pspb.Command_ACK:
		l.acked(c.Acks)
	case pspb.Command_HEARTBEAT:
		switch {
		case v.sched == nil:
		case m.Header.Request && v.failing.Load():
			// The peer whose connection with the sender has ended knows already that this process has failed.
			// With an answer, the sender would blame that peer.
		case m.Header.Request: // an answer says that the sender takes part in the job
			v.sched.telling.Lock()
			entry{l, m.Header.CustomerId, c.Barrier}.answer("", nil)
			v.sched.telling.Unlock()
		default:
			l.heartbeat()
		}
	case pspb.Command_TERMINATE:
		l.mu.Lock()
		if len(c.Nodes) > 0 && c.Nodes[0].Gone != "" {
			l.failure = errors.New(c.Nodes[0].Gone)
		} else {
			l.left = true
		}
		l.mu.Unlock()
	case pspb.Command_BARRIER, pspb.Command_CLOCK:
		switch {
		case !m.Header.Request:
			if v.sched == nil {
				v.learn(c.Nodes)
			}
			v.calls.answer(m.Header)
		case v.sched == nil:
		case c.Command == pspb.Command_CLOCK:
			v.sched.clock(l, m.Header)
		default:
			v.sched.enter(l, m.Header)
		}
	case pspb.Command_RELEASE:
		l.own.released(c.Blocks)
	case pspb.Command_UNMAP:
		l.theirs.free(c.Blocks)
	case pspb.Command_EVICT:
		if v.sched != nil {
			v.sched.evict(l, c.Nodes)
		}
	case pspb.Command_LOST, pspb.Command_ADD_NODE:
		if l.peer != SchedulerID {
			break
		}
		if n := c.Nodes; len(n) > 0 && n[0].Incarnation == v.members.self[0].Incarnation && n[0].Gone != "" {
			return &NodeError{v.ID(), errors.New("the scheduler has declared it dead: " + n[0].Gone)}
		}
		v.learn(c.Nodes)
	default:
		v.log.Warn("ps: dropped an unknown message", zap.String("from", Name(l.peer)),
			zap.Int32("command", int32(c.Command)))
	}
	return nil
}

// linkEnded handles the end of a link because of err, for which the process culprit is to blame.
func (v *Van) linkEnded(l *link, culprit Process, left bool, err error) {
	l.mu.Lock()
	said := left || l.failure != nil // the process has said that it ends
	l.mu.Unlock()
	ended, leaving := v.members.recordEnd(l.process, said, err)
	if leaving {
		return
	}
	if v.cfg.Verbose > 0 || !left {
		v.log.Info("ps: a connection has ended", zap.String("node", Name(v.ID())),
			zap.String("with", Name(l.peer)), zap.Error(err))
	}
	switch {
	case v.sched != nil:
		v.sched.lost(ended, left, err)
	case l.peer == SchedulerID:
		v.schedulerGone(culprit, left, err)
	case v.cfg.Role == Server && RoleOf(l.peer) == Server && !left &&
		v.members.self[0].Generation <= l.process.Generation:
		// The older server has the values, and the other one perhaps not yet. So the younger one lets the
		// older one accuse it.
		v.Evict(l.process, fmt.Errorf("its connection with %s has ended: %w", Name(v.ID()), err))
	}
	v.handler.Lost(l.peer, nodeError(l.peer, err))
	v.handler.News()
}

// schedulerGone handles the end of the connection with the scheduler. If the scheduler has left, the other
// nodes can go on without barriers. If it has died, the job has failed. If it has declared this process dead,
// which is p then, this process has failed.
func (v *Van) schedulerGone(p Process, left bool, why error) {
	if failed, reason := v.members.died(); failed.ID != 0 && left {
		p, why = failed, reason
	}
	err := nodeError(p.ID, why)
	if v.calls.any() {
		v.blames.blame(p, why)
	}
	if left {
		v.calls.fail(err)
		v.members.schedulerLeft()
		return
	}
	// With mu, addLink makes no link that nobody ends, and no call that is woken finds the context still
	// valid.
	v.members.mu.Lock()
	v.calls.fail(err)
	v.cancel(err)
	v.members.mu.Unlock()
	for _, l := range *v.links.Load() {
		l.fail(err)
	}
}
