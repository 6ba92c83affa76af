package ps

import (
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/trace"
)

// observer measures the pushes and pulls of a node: at a worker from the call to the completion, at a server
// from the arrival to the response.
type observer struct {
	started time.Time

	mu        sync.Mutex
	durations [message.NumKinds]trace.Histogram
}

// event is a push or pull that has begun.
type event struct {
	kind  message.Kind
	begun time.Duration
}

// kindOf returns the kind of a push or pull.
func kindOf(push, pull bool) message.Kind {
	switch {
	case push && pull:
		return message.PushPull
	case push:
		return message.Push
	}
	return message.Pull
}

// begin returns the event of a push or pull that begins now.
func (o *observer) begin(kind message.Kind) event { return event{kind, time.Since(o.started)} }

// end counts an event that ends now.
func (o *observer) end(e event) {
	took := time.Since(o.started) - e.begun
	o.mu.Lock()
	defer o.mu.Unlock()
	o.durations[e.kind].Add(took)
}

// stats returns the durations of all events so far.
func (o *observer) stats() (all []trace.NodeOperations) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for kind := range o.durations {
		if o.durations[kind].Count() > 0 {
			all = append(all, trace.NodeOperations{Kind: message.Kind(kind), Durations: o.durations[kind]})
		}
	}
	return all
}

// stats returns the counters of this node.
func (p *Postoffice) stats() trace.Node {
	s := p.van.Stats()
	s.Operations = p.observer.stats()
	return s
}

// report logs how many pushes and pulls this node has made or handled, and how long they took.
func (p *Postoffice) report() {
	s := p.stats()
	sent, received := p.Traffic()
	for i := range s.Operations {
		op := &s.Operations[i]
		n := op.Durations.Count()
		p.log.Info("ps: all requests of a kind", zap.String("node", s.Name), zap.Stringer("kind", op.Kind),
			zap.Uint64("count", n), zap.Duration("mean", op.Durations.Sum/time.Duration(n)),
			zap.Uint64("sent_bytes", sent), zap.Uint64("received_bytes", received))
	}
}
