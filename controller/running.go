package controller

import (
	"time"

	"github.com/gohvd/gohvd/internal/message"
)

// grantList is a list of the grants that a member has not finished, oldest first.
type grantList struct {
	oldest, newest *Grant
}

// add appends the grant g, which has arrived at the time now.
func (l *grantList) add(g *Grant, now time.Duration) {
	g.since, g.older, g.newer = now, l.newest, nil
	if l.newest != nil {
		l.newest.newer = g
	} else {
		l.oldest = g
	}
	l.newest = g
}

// remove removes a grant from the list.
func (l *grantList) remove(g *Grant) {
	if g.older != nil {
		g.older.newer = g.newer
	} else {
		l.oldest = g.newer
	}
	if g.newer != nil {
		g.newer.older = g.older
	} else {
		l.newest = g.older
	}
	g.older, g.newer = nil, nil
}

// nextHeartbeat returns the time at which the next heartbeat is due. sends is set if this turn sends another
// frame. That frame also shows that the rank is alive, but it does not name unfinished grants. So the rank
// sends heartbeats while a grant takes long, and one more when the grant has finished.
func (m *Member) nextHeartbeat(sends bool) time.Duration {
	next := m.lastSent + heartbeatPeriod
	if sends {
		next = Never
	}
	if g := m.running.oldest; g != nil {
		next = min(next, max(g.since, m.lastBeat)+heartbeatPeriod)
	}
	if m.reported {
		next = min(next, m.lastBeat+heartbeatPeriod)
	}
	return next
}

// heartbeatFrame returns a heartbeat. If this rank has unfinished grants, the heartbeat names the oldest of
// them.
func (m *Member) heartbeatFrame() *message.Up {
	m.heartbeat = message.Up{Type: message.UpHeartbeat, Seen: m.seen}
	if g := m.running.oldest; g != nil {
		m.heartbeat.Tensor, m.heartbeat.Set = g.Responses[0].Name, g.Set
		m.heartbeat.Millis = millis(m.now - g.since)
	}
	return &m.heartbeat
}

// millis converts d to milliseconds, the unit of times in frames.
func millis(d time.Duration) uint32 {
	return uint32(min(d/time.Millisecond, 1<<32-1))
}
