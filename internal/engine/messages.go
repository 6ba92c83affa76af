package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// messages has the exchanges of messages of a rank. Any goroutine may use it.
type messages struct {
	mu  sync.Mutex
	all map[topo.ProcessSetID]*p2p.Exchange // the exchanges that were used
	// left has the ranks that have announced their shutdown, and the process sets in which messages of them
	// may still arrive.
	left map[topo.Rank][]topo.ProcessSetID
	err  error // why no message can begin any more, or nil
}

// Post begins a message: it sends o to another member of the process set or, if receive is set, receives it
// from one. Messages are not negotiated, and turns of the loop do not move them. An error means that nothing
// was begun and Done of o is never called. Errors that are given to Done and mean that ranks have shut down
// are of type *PeerError.
func (e *Engine) Post(set topo.ProcessSetID, o *p2p.Op, receive bool) error {
	x, err := e.exchange(set)
	if err != nil {
		return err
	}
	done := o.Done
	o.Done = func(err error) {
		e.observer.messageEnded(e.cfg.Rank, set, o, err)
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
func (e *Engine) exchange(set topo.ProcessSetID) (*p2p.Exchange, error) {
	e.messages.mu.Lock()
	defer e.messages.mu.Unlock()
	if x := e.messages.all[set]; x != nil {
		return x, nil
	}
	if e.messages.err != nil {
		return nil, e.messages.err
	}
	s := e.sets.find(set)
	if s == nil {
		return nil, ErrNoProcessSet
	}
	x := p2p.New(p2p.Config{
		Mesh: e.cfg.Mesh, Lane: transport.MessageLane(set), Ranks: s.Ranks, Me: s.me,
		Memory: e.cfg.Memory, Groups: e.cfg.Groups,
		Failed:       func(err error) { e.channelFailed(set, err) },
		Silent:       e.sched.Notify,
		StallWarning: e.cfg.StallWarning, OnStall: e.messageStalled,
		OnTimeout: func(o *p2p.Op) { e.messageTimedOut(set, o) },
	})
	for r, sets := range e.messages.left {
		x.Left(r, slices.Contains(sets, set))
	}
	if e.messages.all == nil {
		e.messages.all = make(map[topo.ProcessSetID]*p2p.Exchange)
	}
	e.messages.all[set] = x
	return x, nil
}

// brokenChannel is a channel for messages of a process set that has failed.
type brokenChannel struct {
	set topo.ProcessSetID
	err error
}

// channelFailed reports to the next turn that a channel for messages has failed, perhaps only because the
// peer has removed the process set earlier than this rank.
func (e *Engine) channelFailed(set topo.ProcessSetID, err error) {
	e.mu.Lock()
	e.broken = append(e.broken, brokenChannel{set, err})
	e.reported.Store(true)
	e.mu.Unlock()
	e.sched.Notify()
}

func (e *Engine) messageStalled(o *p2p.Op, waited time.Duration) {
	e.log.Warn("a message has waited for long", zap.Stringer("operation", o),
		zap.Duration("waited", waited.Round(time.Millisecond)))
}

// lateMessage is a message that has timed out. peer is this rank if the message may come from any rank.
type lateMessage struct {
	set     topo.ProcessSetID
	name    string
	peer    topo.Rank
	timeout time.Duration
}

// messageTimedOut makes the next turn report to the coordinator that the message o has timed out.
func (e *Engine) messageTimedOut(set topo.ProcessSetID, o *p2p.Op) {
	late := lateMessage{set, o.String(), o.Peer, o.Timeout}
	if o.Peer == p2p.AnySource {
		late.peer = e.cfg.Rank
	}
	e.mu.Lock()
	e.late = append(e.late, late)
	e.reported.Store(true)
	e.mu.Unlock()
	e.sched.Notify()
}

// pendingMessages calls f with each message in flight.
func (e *Engine) pendingMessages(f func(set topo.ProcessSetID, o *p2p.Op)) {
	e.messages.mu.Lock()
	defer e.messages.mu.Unlock()
	for set, x := range e.messages.all {
		x.Each(func(o *p2p.Op) { f(set, o) })
	}
}

// messagesInFlight returns the number of messages in flight.
func (e *Engine) messagesInFlight() (n int) {
	e.messages.mu.Lock()
	defer e.messages.mu.Unlock()
	for _, x := range e.messages.all {
		n += x.InFlight()
	}
	return n
}

// ranksLeft records that ranks have shut down, so that operations wait only for the messages that these ranks
// have sent before. These come over the given channels.
func (e *Engine) ranksLeft(ranks []topo.Rank, channels []message.Channel) {
	e.messages.mu.Lock()
	defer e.messages.mu.Unlock()
	for _, r := range ranks {
		if _, known := e.messages.left[r]; known {
			continue
		}
		if e.messages.left == nil {
			e.messages.left = make(map[topo.Rank][]topo.ProcessSetID)
		}
		e.messages.left[r] = nil
		for _, c := range channels {
			if c.Rank == r {
				e.messages.left[r] = append(e.messages.left[r], c.Set)
				e.receiving = append(e.receiving, c)
			}
		}
		for set, x := range e.messages.all {
			x.Left(r, slices.Contains(e.messages.left[r], set))
		}
	}
	if len(e.receiving) > 0 {
		e.setReceiving()
		e.sched.Notify() // the next turn calls receiveMessages, when this one has added the process sets
	}
}

// receiveMessages opens the channels over which messages of ranks that have shut down may still arrive, and
// forgets those over which everything has arrived.
func (e *Engine) receiveMessages() {
	if len(e.receiving) == 0 {
		return
	}
	e.receiving = slices.DeleteFunc(e.receiving, func(c message.Channel) bool {
		x, err := e.exchange(c.Set)
		return err != nil || !x.Receives(c.Rank)
	})
	e.setReceiving()
}

// setReceiving tells the member which ranks this rank must not release yet.
func (e *Engine) setReceiving() {
	var from []topo.Rank
	for _, c := range e.receiving {
		from = append(from, c.Rank)
	}
	e.member.Receives(from)
}

// channels returns the channels over which this rank has sent its last frame, after quitMessages.
func (e *Engine) channels() (all []message.Channel) {
	e.messages.mu.Lock()
	defer e.messages.mu.Unlock()
	for set, x := range e.messages.all {
		for _, r := range x.Quitted() {
			all = append(all, message.Channel{Set: set, Rank: r})
		}
	}
	return all
}

// quitMessages makes calls of Post fail with err, and says to the peers that this rank sends no more
// messages.
func (e *Engine) quitMessages(err error) {
	e.messages.mu.Lock()
	defer e.messages.mu.Unlock()
	e.messages.err = err
	for _, x := range e.messages.all {
		x.Quit(err)
	}
}

// endMessages ends all messages with err. If flush is set, it first waits until they have left this rank, for
// at most the liveness limit, and not after the context of Shutdown has ended.
func (e *Engine) endMessages(err error, flush bool) {
	e.quitMessages(err)
	if flush {
		ctx, cancel := context.WithTimeout(e.flushing, e.cfg.LivenessTimeout)
		defer cancel()
		for _, x := range e.messages.all {
			x.Flush(ctx)
		}
	}
	for _, x := range e.messages.all {
		x.Close(err)
	}
}

// dropMessages ends the messages of a process set that was removed.
func (e *Engine) dropMessages(set topo.ProcessSetID) {
	e.messages.mu.Lock()
	x := e.messages.all[set]
	delete(e.messages.all, set)
	e.messages.mu.Unlock()
	if x != nil {
		x.Close(ErrNoProcessSet)
	}
	e.cfg.Mesh.Release(transport.MessageLane(set))
}
