package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/watch"
)

// messages has the exchanges of messages of a rank. Any goroutine may use it, unless a method says otherwise.
type messages struct {
	cfg      *Config
	sets     *setTable
	observer *watch.Observer
	notify   func()
	// receives tells the member which ranks this rank must not release yet.
	receives func([]topo.Rank)
	// receiving has the channels over which messages of ranks that have shut down may still arrive. Only the
	// loop uses it.
	receiving []message.Channel

	failed atomic.Bool // whether broken or late has elements; stored with mu held
	mu     sync.Mutex
	all    map[topo.ProcessSetID]*p2p.Exchange // the exchanges that were used
	// departed has the ranks that have announced their shutdown, and the process sets in which messages of
	// them may still arrive.
	departed map[topo.Rank][]topo.ProcessSetID
	err      error           // why no message can begin any more, or nil
	broken   []brokenChannel // channels that have failed
	late     []lateMessage   // messages that have timed out
}

// Post begins a message: it sends o to another member of the process set or, if receive is set, receives it
// from one. Messages are not negotiated, and turns of the loop do not move them. An error means that nothing
// was begun and Done of o is never called. Errors that are given to Done and mean that ranks have shut down
// are of type *PeerError.
func (e *Engine) Post(set topo.ProcessSetID, o *p2p.Op, receive bool) error {
	return e.messages.post(set, o, receive)
}

func (m *messages) post(set topo.ProcessSetID, o *p2p.Op, receive bool) error {
	x, err := m.exchange(set)
	if err != nil {
		return err
	}
	done := o.Done
	o.Done = func(err error) {
		m.observer.MessageEnded(m.cfg.Rank, set, o, err)
		done(departed(err, o))
	}
	if receive {
		return departed(x.Receive(o), o)
	}
	return departed(x.Send(o), o)
}

// departed returns err, or a *PeerError if err says that ranks have shut down while o waits for them.
func departed(err error, o *p2p.Op) error {
	var left *p2p.LeftError
	if !errors.As(err, &left) {
		return err
	}
	p := &PeerError{Reason: fmt.Sprintf("shut down while this rank waits for a message (%v)", o),
		ShutDown: true}
	for _, r := range left.Ranks {
		p.Ranks = append(p.Ranks, int(r))
	}
	return p
}

// exchange returns the exchange of messages of a process set, and makes it if there is none.
func (m *messages) exchange(set topo.ProcessSetID) (*p2p.Exchange, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if x := m.all[set]; x != nil {
		return x, nil
	}
	if m.err != nil {
		return nil, m.err
	}
	s := m.sets.find(set)
	if s == nil {
		return nil, ErrNoProcessSet
	}
	x := p2p.New(p2p.Config{
		Mesh: m.cfg.Mesh, Lane: transport.MessageLane(set), Ranks: s.Ranks, Me: s.me,
		Memory: m.cfg.Memory, Groups: m.cfg.Groups,
		Failed:       func(err error) { m.channelFailed(set, err) },
		Silent:       m.notify,
		StallWarning: m.cfg.StallWarning, OnStall: m.stalled,
		OnTimeout: func(o *p2p.Op) { m.timedOut(set, o) },
	})
	for r, sets := range m.departed {
		x.Left(r, slices.Contains(sets, set))
	}
	if m.all == nil {
		m.all = make(map[topo.ProcessSetID]*p2p.Exchange)
	}
	m.all[set] = x
	return x, nil
}

// brokenChannel is a channel for messages of a process set that has failed.
type brokenChannel struct {
	set topo.ProcessSetID
	err error
}

// channelFailed reports to the next turn that a channel for messages has failed, perhaps only because the
// peer has removed the process set earlier than this rank.
func (m *messages) channelFailed(set topo.ProcessSetID, err error) {
	m.mu.Lock()
	m.broken = append(m.broken, brokenChannel{set, err})
	m.failed.Store(true)
	m.mu.Unlock()
	m.notify()
}

func (m *messages) stalled(o *p2p.Op, waited time.Duration) {
	m.cfg.Log.Warn("a message has waited for long", zap.Stringer("operation", o),
		zap.Duration("waited", waited.Round(time.Millisecond)))
}

// lateMessage is a message that has timed out. peer is this rank if the message may come from any rank.
type lateMessage struct {
	set     topo.ProcessSetID
	name    string
	peer    topo.Rank
	timeout time.Duration
}

// timedOut makes the next turn report to the coordinator that the message o has timed out.
func (m *messages) timedOut(set topo.ProcessSetID, o *p2p.Op) {
	late := lateMessage{set, o.String(), o.Peer, o.Timeout}
	if o.Peer == p2p.AnySource {
		late.peer = m.cfg.Rank
	}
	m.mu.Lock()
	m.late = append(m.late, late)
	m.failed.Store(true)
	m.mu.Unlock()
	m.notify()
}

// takeFailed removes and returns the channels that have failed and the messages that have timed out.
func (m *messages) takeFailed() (broken []brokenChannel, late []lateMessage) {
	if !m.failed.Load() {
		return nil, nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failed.Store(false)
	broken, late = m.broken, m.late
	m.broken, m.late = nil, nil
	return broken, late
}

// each calls f with each message in flight.
func (m *messages) each(f func(set topo.ProcessSetID, o *p2p.Op)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for set, x := range m.all {
		x.Each(func(o *p2p.Op) { f(set, o) })
	}
}

// inFlight returns the number of messages in flight.
func (m *messages) inFlight() (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, x := range m.all {
		n += x.InFlight()
	}
	return n
}

// ranksLeft records that ranks have shut down, so that operations wait only for the messages that these ranks
// have sent before. These come over the given channels.
func (m *messages) ranksLeft(ranks []topo.Rank, channels []message.Channel) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range ranks {
		if _, known := m.departed[r]; known {
			continue
		}
		if m.departed == nil {
			m.departed = make(map[topo.Rank][]topo.ProcessSetID)
		}
		m.departed[r] = nil
		for _, c := range channels {
			if c.Rank == r {
				m.departed[r] = append(m.departed[r], c.Set)
				m.receiving = append(m.receiving, c)
			}
		}
		for set, x := range m.all {
			x.Left(r, slices.Contains(m.departed[r], set))
		}
	}
	if len(m.receiving) > 0 {
		m.setReceiving()
		m.notify() // the next turn calls receive, when this one has added the process sets
	}
}

// receive opens the channels over which messages of ranks that have shut down may still arrive, and
// forgets those over which everything has arrived.
func (m *messages) receive() {
	if len(m.receiving) == 0 {
		return
	}
	m.receiving = slices.DeleteFunc(m.receiving, func(c message.Channel) bool {
		x, err := m.exchange(c.Set)
		return err != nil || !x.Receives(c.Rank)
	})
	m.setReceiving()
}

// setReceiving tells the member which ranks this rank must not release yet.
func (m *messages) setReceiving() {
	var from []topo.Rank
	for _, c := range m.receiving {
		from = append(from, c.Rank)
	}
	m.receives(from)
}

// channels returns the channels over which this rank has sent its last frame, after quit.
func (m *messages) channels() (all []message.Channel) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for set, x := range m.all {
		for _, r := range x.Quitted() {
			all = append(all, message.Channel{Set: set, Rank: r})
		}
	}
	return all
}

// quit makes calls of Post fail with err, and says to the peers that this rank sends no more
// messages.
func (m *messages) quit(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
	for _, x := range m.all {
		x.Quit(err)
	}
}

// end ends all messages with err. If flush is set, it first waits until they have left this rank, for
// at most the liveness limit, and not after the context of Shutdown has ended.
func (m *messages) end(err error, flush bool, flushing context.Context) {
	m.quit(err)
	if flush {
		ctx, cancel := context.WithTimeout(flushing, m.cfg.LivenessTimeout)
		defer cancel()
		for _, x := range m.all {
			x.Flush(ctx)
		}
	}
	for _, x := range m.all {
		x.Close(err)
	}
}

// drop ends the messages of a process set that was removed.
func (m *messages) drop(set topo.ProcessSetID) {
	m.mu.Lock()
	x := m.all[set]
	delete(m.all, set)
	m.mu.Unlock()
	if x != nil {
		x.Close(ErrNoProcessSet)
	}
	m.cfg.Mesh.Release(transport.MessageLane(set))
}
