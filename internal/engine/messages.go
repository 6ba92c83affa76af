package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// messages has the exchanges of messages of a rank. Any goroutine may use it.
type messages struct {
	mu   sync.Mutex
	all  map[topo.ProcessSetID]*p2p.Exchange // the exchanges that were used
	left map[topo.Rank]bool                  // ranks that have shut down
	err  error                               // why no message can begin any more, or nil
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
	l := e.lanes.find(set)
	if l == nil {
		return nil, ErrNoProcessSet
	}
	x := p2p.New(p2p.Config{
		Mesh: e.cfg.Mesh, Lane: transport.MessageLane(set), Ranks: l.set.Ranks, Me: l.me,
		Memory: e.cfg.Memory, Groups: e.cfg.Groups,
		Failed:       func(err error) { e.channelFailed(set, err) },
		StallWarning: e.cfg.StallWarning, OnStall: e.messageStalled,
		OnTimeout: func(o *p2p.Op) { e.messageTimedOut(set, o) },
	})
	for r := range e.messages.left {
		x.Left(r)
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
	e.mu.Unlock()
	e.sched.notify()
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
	e.mu.Unlock()
	e.sched.notify()
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

// ranksLeft records that ranks have shut down, so that no operation waits for messages of them.
func (e *Engine) ranksLeft(ranks []topo.Rank) {
	e.messages.mu.Lock()
	defer e.messages.mu.Unlock()
	for _, r := range ranks {
		if e.messages.left == nil {
			e.messages.left = make(map[topo.Rank]bool)
		}
		if e.messages.left[r] {
			continue
		}
		e.messages.left[r] = true
		for _, x := range e.messages.all {
			x.Left(r)
		}
	}
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
