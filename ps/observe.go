package ps

import (
	"os"
	"strconv"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/recorder"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/timeline"
)

// observer measures the pushes and pulls of a node: at a worker from the call to the completion, at a server
// from the arrival to the response. It passes them to the timeline and the flight recorder.
type observer struct {
	clock trace.Clock
	node  string // name of the node

	mu        sync.Mutex
	recorder  *recorder.Recorder // nil if it is off
	timeline  *timeline.Timeline // nil if there is none
	durations [message.NumKinds]trace.Histogram
	tracks    []string // names of tracks. Events on a track do not overlap.
	free      []int    // tracks without an event
	op        trace.Operation
	shape     tensor.Shape // of the last event
}

// event is a push or pull that has begun.
type event struct {
	kind  message.Kind
	track int
	begun time.Duration
}

// outcome describes a push or pull that has ended.
type outcome struct {
	dtype tensor.DType
	keys  int
	bytes int
	// peer is the number of the other process, or -1 if there are several.
	peer int
	// accepted is when the worker's last part was in a queue, or 0.
	accepted time.Duration
	err      error
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

// now returns the time since the start of the node.
func (o *observer) now() time.Duration { return time.Since(o.clock.Start) }

// beginEvent returns the event of a push or pull that begins now. The caller must pass it to endEvent.
func (o *observer) beginEvent(kind message.Kind) event {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.free) == 0 {
		o.free = append(o.free, len(o.tracks))
		o.tracks = append(o.tracks, o.node+", request "+strconv.Itoa(len(o.tracks)))
	}
	last := len(o.free) - 1
	e := event{kind, o.free[last], o.now()}
	o.free = o.free[:last]
	return e
}

// endEvent records an event that ends now.
func (o *observer) endEvent(e event, out outcome) {
	o.mu.Lock()
	defer o.mu.Unlock()
	ended := o.now()
	o.durations[e.kind].Add(ended - e.begun)
	o.free = append(o.free, e.track)
	if o.recorder == nil && o.timeline == nil {
		return
	}
	accepted := max(out.accepted, e.begun)
	if o.shape == nil || o.shape[0] != int64(out.keys) {
		o.shape = tensor.Shape{int64(out.keys)} // the recorder keeps the old one
	}
	r := trace.Record{Kind: e.kind, Peer: topo.Rank(out.peer), Name: o.tracks[e.track], DType: out.dtype,
		Shape: o.shape, Bytes: int64(out.bytes), Submitted: e.begun, Sent: accepted, Granted: accepted,
		Begun: accepted, Ended: ended}
	if out.err != nil {
		r.Error = out.err.Error()
	}
	o.op.Records = append(o.op.Records[:0], r)
	o.recorder.Record(&o.op)
	if o.timeline != nil {
		o.timeline.Record(&o.op)
	}
}

// operations returns the durations of all events so far.
func (o *observer) operations() (all []trace.Operations) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for kind := range o.durations {
		if o.durations[kind].Count() > 0 {
			all = append(all, trace.Operations{Kind: message.Kind(kind), Durations: o.durations[kind]})
		}
	}
	return all
}

// observe starts timeline and flight recorder, as the settings say. The node has its id.
func (p *postoffice) observe() {
	set, o := &p.set, &p.observer
	o.mu.Lock()
	defer o.mu.Unlock()
	o.node = p.van.Stats().Name
	if set.FlightRecorder {
		o.recorder = recorder.New(recorder.DefaultOperations)
	}
	if set.Timeline == "" || set.Timeline == config.TimelineDynamic {
		return
	}
	process := p.process(p.van.ID())
	t, err := timeline.Start(timeline.Config{Path: timeline.PathOf(set.Timeline, process), Rank: process,
		Size: len(p.NodeIDs(AllGroup)), Host: set.Hostname, Epoch: 1, Clock: o.clock,
		About:    timeline.About{Version: config.Version(), Command: os.Args, Settings: set.Chosen()},
		MaxBytes: int64(set.TimelineMaxMiB) << 20, Log: p.log})
	if err != nil {
		p.log.Warn("ps: starting the timeline failed", zap.Error(err))
		return
	}
	if p.Role() == Scheduler {
		t.Offset(trace.Offset{At: o.now(), Job: o.clock.Job()})
	}
	o.timeline = t
}

// stopObserving ends the timeline.
func (p *postoffice) stopObserving() {
	o := &p.observer
	o.mu.Lock()
	t := o.timeline
	o.timeline = nil
	o.mu.Unlock()
	if t == nil {
		return
	}
	if err := t.Close(); err != nil {
		p.log.Warn("ps: closing the timeline failed", zap.Error(err))
	}
}

// startDump starts to write the last pushes and pulls, and those that have not completed, to a file, if
// HVD_DUMP_DIR says where. It closes the channel that it returns when the file is written.
func (p *postoffice) startDump(why string) (written <-chan struct{}) {
	o, dir := &p.observer, p.set.DumpDir
	done := make(chan struct{})
	o.mu.Lock()
	r := o.recorder
	o.mu.Unlock()
	if r == nil || dir == "" {
		close(done)
		return done
	}
	d := r.Dump(recorder.About{Rank: p.process(p.van.ID()),
		Size: len(p.NodeIDs(AllGroup)), Host: p.set.Hostname, PID: os.Getpid(), Epoch: 1,
		Version: config.Version(), Why: why, Now: time.Now(), At: o.now(), Clock: o.clock,
		Pending: p.pending()})
	p.mu.Lock()
	earlier := p.dumped
	p.dumped = done
	p.mu.Unlock()
	go func() { // stop waits for it, unless the file system hangs
		defer close(done)
		if earlier != nil {
			<-earlier // has the same file
		}
		path, err := recorder.WriteFile(dir, d)
		if err != nil {
			p.log.Warn("ps: writing the dump of the flight recorder failed", zap.Error(err))
			return
		}
		p.log.Warn("ps: wrote a dump of the flight recorder", zap.String("file", path))
	}()
	return done
}

// pending returns the pushes and pulls of this process that have not completed.
func (p *postoffice) pending() (all []trace.Record) {
	p.mu.Lock()
	customers := p.list()
	p.mu.Unlock()
	for _, c := range customers {
		c.mu.Lock()
		for _, r := range c.pending {
			if r.event.kind != message.NoKind {
				all = append(all, trace.Record{Kind: r.event.kind, Name: r.of.String(),
					Submitted: r.event.begun, Sent: r.accepted, Granted: r.accepted, Begun: r.accepted})
			}
		}
		c.mu.Unlock()
	}
	return all
}

// stats returns the counters of this node.
func (p *postoffice) stats() trace.Node {
	s := p.van.Stats()
	s.Operations = p.observer.operations()
	p.mu.Lock()
	customers := p.list()
	p.mu.Unlock()
	for _, c := range customers {
		for _, r := range c.replicas {
			r.addStats(&s)
		}
		c.addStats(&s)
	}
	return s
}

// addStats adds the responses to the pushes and pulls of the customer to the statistics, and the one that has
// waited longest.
func (c *customer) addStats(s *trace.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range s.Peers {
		if p := &s.Peers[i]; van.RoleOf(p.ID) == van.Server && len(c.answers) > 0 {
			a := &c.answers[van.Rank(p.ID)]
			p.Responses += a.count
			p.ResponseTime += a.time
		}
	}
	var oldest *Request
	for _, r := range c.pending {
		if r.event.kind != message.NoKind && (oldest == nil || r.event.begun < oldest.event.begun) {
			oldest = r
		}
	}
	if oldest == nil {
		return
	}
	w := trace.NodeWait{What: oldest.of.String(), Time: c.po.observer.now() - oldest.event.begun,
		Waiting: []string{s.Name}}
	for _, p := range oldest.parts {
		if !p.answered {
			w.Missing = append(w.Missing, van.Name(p.to))
		}
	}
	s.Waits = append(s.Waits, w)
}

// report logs how many pushes and pulls this node has made or handled, and how long they took.
func (p *postoffice) report() {
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
