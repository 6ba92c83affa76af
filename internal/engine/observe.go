package engine

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/exec"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Recorder receives a record of every operation. Record is called when the operation has ended but before the
// results of its tensors are reported. Calls of Record do not overlap. Record delays the results, so it must
// return soon. It must not keep op.
type Recorder interface {
	Record(op *trace.Operation)
}

// Timeline is a Recorder that also receives cycles and clock measurements.
type Timeline interface {
	Recorder
	// Cycle records that this rank has applied a cycle of the negotiation at the given time. Offset records a
	// measurement of the offset of this rank's clock from rank 0's clock.
	Cycle(at time.Duration)
	Offset(o trace.Offset)
	// Tuned records, at rank 0 only, that the settings have the values v from the given time on. The engine
	// does not change v afterwards.
	Tuned(at time.Duration, v *message.Tuning)
}

// observer records the operations of a rank for Stats, the Recorder and the Timeline. The loop and the lanes
// call its methods.
type observer struct {
	start    time.Time
	recorder Recorder // may be nil
	timeline atomic.Pointer[Timeline]

	mu              sync.Mutex
	fusionThreshold int64
	tunes           bool            // whether the timeline of this rank shows changes of settings
	tuning          *message.Tuning // the last change, or nil
	counts          counts
	offset          trace.Offset
	aligned         bool            // whether offset is set
	op              trace.Operation // scratch memory
	labels          map[labelKey]label
}

// maxLabels is the greatest number of labels of messages that an observer keeps.
const maxLabels = 1024

// labelKey identifies the messages of one size that one rank sends to another with a tag.
type labelKey struct {
	from, to topo.Rank
	tag      uint32
	numElems int64
}

// label is the name and the shape of messages in records. A Recorder may keep both.
type label struct {
	name  string
	shape tensor.Shape
}

// counts holds the counters from which Stats computes its result.
type counts struct {
	trace.Stats
	operations [message.NumKinds][message.NumBackends]trace.Operations
	moved      [message.NumKinds][message.NumBackends][tensor.NumDTypes]uint64
}

// Since returns the time since the engine's start. All times of the engine are counted from its start.
func (o *observer) Since() time.Duration { return time.Since(o.start) }

// Watched reports whether a timeline is on.
func (o *observer) Watched() bool { return o.timeline.Load() != nil }

// exchangeNames holds the timeline names of the activity Exchanging, by backend and kind. They follow the
// pattern of Horovod's names, such as MPI_ALLREDUCE. adasumNames holds those of Adasum.
var exchangeNames, adasumNames = func() (names [message.NumBackends][message.NumKinds]string,
	adasum [message.NumBackends]string) {
	kinds := map[message.Kind]string{
		message.Allreduce: "ALLREDUCE", message.Allgather: "ALLGATHER", message.Broadcast: "BCAST",
		message.Alltoall:      "ALLTOALL",
		message.Reducescatter: "REDUCESCATTER", message.Reduce: "REDUCE",
		message.Gather: "GATHER", message.Scatter: "SCATTER",
		message.Send: "SEND", message.Recv: "RECV",
	}
	for b := range message.Backend(message.NumBackends) {
		prefix := strings.ToUpper(b.String()) + "_"
		adasum[b] = prefix + "ADASUM_ALLREDUCE"
		for k, kind := range kinds {
			names[b][k] = prefix + kind
		}
	}
	return names, adasum
}()

// activityName returns the name of an activity for timelines. It is Horovod's name if Horovod has the same
// activity.
func activityName(a ops.Activity, r *message.Response, b message.Backend) string {
	switch {
	case a == ops.Connecting:
		return "INIT_" + strings.ToUpper(b.String())
	case a == ops.AwaitingData:
		return "WAIT_FOR_DATA"
	case a == ops.CopyingIn:
		return "MEMCPY_IN_HOST_BUFFER"
	case a == ops.CopyingOut:
		return "MEMCPY_OUT_HOST_BUFFER"
	case a == ops.Packing:
		return "MEMCPY_IN_FUSION_BUFFER"
	case a == ops.Unpacking:
		return "MEMCPY_OUT_FUSION_BUFFER"
	case r.Op == tensor.Adasum:
		return adasumNames[b]
	}
	return exchangeNames[b][r.Kind]
}

// Ended records that w has ended. It must be called before the results of w's tensors are reported. err is
// nil if w has completed. Otherwise it is the reason why w has failed.
func (o *observer) Ended(w *exec.Work, err error) {
	now := o.Since()
	o.mu.Lock()
	defer o.mu.Unlock()
	op := &o.op
	g := w.Grant
	*op = trace.Operation{
		Set: g.Set, Number: g.Number, Kind: g.Responses[0].Kind, Backend: g.Backend, Algorithm: g.Algorithm,
		Absent:  w.Absent,
		Granted: w.Granted, Begun: max(w.Begun, w.Granted), Ended: now, Failed: err,
		Activities: op.Activities[:0], Tensors: op.Tensors[:0],
	}
	for i, m := range w.Marks {
		end := now
		if i+1 < len(w.Marks) {
			end = w.Marks[i+1].At
		}
		op.Activities = append(op.Activities, trace.Activity{
			Name:  activityName(m.Activity, g.Responses[0], g.Backend),
			Begun: m.At, End: end})
	}
	members := len(w.Arrivals) / max(len(g.Responses), 1)
	for i, e := range w.Entries {
		q := &e.Request
		op.Kind = q.Kind // do not use the kind of the response, which may be Error
		t := trace.Tensor{
			Name: q.Name, DType: q.DType, Shape: ownShape(q, g.Responses[i]), Bytes: int64(len(e.Input)),
			Cached:    i < len(g.Bits),
			Submitted: e.Times.Submitted, Sent: time.Duration(e.Times.Sent.Load()), Parts: len(e.Parts),
		}
		switch {
		case q.Kind == message.Broadcast:
			t.Bytes = int64(len(e.Output))
		case len(e.Parts) > 0:
			t.Bytes = numBytes(e.Parts)
		}
		if members > 0 {
			t.Arrivals = w.Arrivals[i*members : (i+1)*members]
			// If the timeline was switched on after the first request for a tensor had arrived, the arrival
			// times of the earlier requests are missing.
			t.Partial = zeros(t.Arrivals) > len(g.Absent)
		}
		if i < len(w.Refused) {
			t.Refused = w.Refused[i]
		}
		op.Tensors = append(op.Tensors, t)
	}
	o.count(op, g.Responses)
	o.record()
}

// record passes the operation in o.op to the recorder and the timeline. The caller holds mu.
func (o *observer) record() {
	if o.recorder != nil {
		o.recorder.Record(&o.op)
	}
	if t := o.timeline.Load(); t != nil {
		(*t).Record(&o.op)
	}
	clear(o.op.Tensors)
}

func zeros(arrivals []time.Duration) (n int) {
	for _, at := range arrivals {
		if at == 0 {
			n++
		}
	}
	return n
}

// numBytes returns the total number of input bytes of the tensors of a group.
func numBytes(parts []tensorqueue.Part) (total int64) {
	for _, p := range parts {
		total += int64(len(p.Input))
	}
	return total
}

// ownShape returns the shape of a request in memory that a Recorder may keep. The request's own shape may be
// part of an allocation with the tensor, which would then stay in memory. In most cases ownShape returns the
// response's shape, because the cache keeps that anyway.
func ownShape(q *message.Request, r *message.Response) tensor.Shape {
	if r.Kind == message.Error || r.Kind.Ragged() {
		return slices.Clone(q.Shape)
	}
	return r.Shape
}

// tuned records that rank 0 has changed settings. v must not be changed afterwards.
func (o *observer) tuned(at time.Duration, v *message.Tuning) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.fusionThreshold, o.tuning = v.FusionThresholdBytes, v
	if t := o.timeline.Load(); t != nil && o.tunes {
		(*t).Tuned(at, v)
	}
}

// abandoned counts tensors that have ended without a grant, because the epoch has ended or their process set
// was removed.
func (o *observer) abandoned(tensors int) {
	o.mu.Lock()
	o.counts.Failed += uint64(tensors)
	o.mu.Unlock()
}

// count adds an operation and its responses to the counters. If the ranks disagreed, count adds no bytes,
// because the operation has moved no data.
func (o *observer) count(op *trace.Operation, responses []*message.Response) {
	c, disagreed := &o.counts, responses[0].Kind == message.Error
	if op.Failed != nil {
		for i := range op.Tensors {
			c.Failed += uint64(max(op.Tensors[i].Parts, 1))
		}
		return
	}
	var (
		numBytes int64
		tensors  uint64
	)
	for i := range op.Tensors {
		t := &op.Tensors[i]
		c.Negotiation.Add(op.Granted - t.Submitted)
		if t.Cached {
			c.CacheHits++
		} else {
			c.CacheMisses++
		}
		if t.Refused != nil {
			c.Refused += uint64(max(t.Parts, 1))
		}
		if disagreed {
			continue
		}
		tensors += uint64(max(t.Parts, 1))
		numBytes += t.Bytes
		if moved := &c.moved[op.Kind][op.Backend]; t.DType.Valid() || t.Parts == 0 {
			moved[t.DType] += uint64(t.Bytes)
		} else {
			for dt, shape := range responses[i].Parts.All() {
				n, _ := shape.NumElems() // cannot fail, because the decoder has checked the shape
				moved[dt] += uint64(n) * uint64(dt.Size())
			}
		}
	}
	if disagreed {
		return
	}
	c.Queued.Add(op.Begun - op.Granted)
	done := &c.operations[op.Kind][op.Backend]
	done.Durations.Add(op.Ended - op.Begun)
	done.Tensors += tensors
	if op.Kind.MovesData() && !op.Kind.SendsRows() && len(op.Tensors) > 0 {
		c.FusionResponses++
		c.FusedTensors += tensors
		// A single tensor that is larger than the fusion buffer counts as one full buffer.
		c.FusionRoomBytes += uint64(max(o.fusionThreshold, 0))
		c.FusedBytes += uint64(min(numBytes, max(o.fusionThreshold, 0)))
	}
}

// messageEnded records that the message m of process set set has ended at rank me. It must be called before
// the result of m is reported. err is its error or nil.
func (o *observer) messageEnded(me topo.Rank, set topo.ProcessSetID, m *p2p.Op, err error) {
	p, now := o.pendingMessage(set, m), o.Since()
	n := trace.Tensor{DType: p.DType, Bytes: int64(len(m.Buf)), Submitted: p.Submitted}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.recorder != nil || o.timeline.Load() != nil {
		l := o.label(labelKeyOf(me, m))
		n.Name, n.Shape = l.name, l.shape
	}
	op := &o.op
	*op = trace.Operation{
		Set: set, Number: p.Number, Peer: m.Other(), Kind: p.Kind, Backend: message.TCP, Granted: now,
		Begun: now, Ended: now, Failed: err, Activities: op.Activities[:0], Tensors: op.Tensors[:0],
	}
	if m.Shared() {
		op.Backend = message.SHM
	}
	if p.Granted > 0 {
		op.Granted, op.Begun = p.Granted, p.Granted
		op.Activities = append(op.Activities, trace.Activity{Name: exchangeNames[op.Backend][op.Kind],
			Begun: p.Granted, End: now})
	}
	op.Tensors = append(op.Tensors, n)
	o.countMessage(op)
	o.record()
}

// countMessage adds a Send or a Recv to the counters. Its duration begins with the call.
func (o *observer) countMessage(op *trace.Operation) {
	switch _, refused := errors.AsType[*p2p.SizeError](op.Failed); {
	case refused:
		o.counts.Refused++
	case op.Failed != nil:
		o.counts.Failed++
	default:
		n, done := &op.Tensors[0], &o.counts.operations[op.Kind][op.Backend]
		done.Durations.Add(op.Ended - n.Submitted)
		done.Tensors++
		o.counts.moved[op.Kind][op.Backend][n.DType] += uint64(n.Bytes)
	}
}

// pendingMessage describes the message m of process set set, without its name and its shape.
func (o *observer) pendingMessage(set topo.ProcessSetID, m *p2p.Op) trace.Pending {
	p := trace.Pending{Set: set, Number: m.Number, Kind: message.Send, DType: m.DType,
		Submitted: max(m.Begun.Sub(o.start), 1)}
	if m.Receives() {
		p.Kind = message.Recv
	}
	if !m.Matched.IsZero() {
		p.Granted = max(m.Matched.Sub(o.start), p.Submitted)
		p.Begun = p.Granted
	}
	return p
}

// labelKeyOf returns the key of the message m of rank me.
func labelKeyOf(me topo.Rank, m *p2p.Op) labelKey {
	k := labelKey{me, m.Other(), m.Tag, int64(len(m.Buf) / m.DType.Size())}
	if m.Receives() {
		k.from, k.to = k.to, k.from
	}
	return k
}

// label returns the label of a message. If the observer has kept it, label allocates no memory. The caller
// holds mu.
func (o *observer) label(k labelKey) label {
	l, found := o.labels[k]
	if found {
		return l
	}
	if o.labels == nil {
		o.labels = make(map[labelKey]label)
	}
	if len(o.labels) == maxLabels {
		clear(o.labels)
	}
	l = k.label()
	o.labels[k] = l
	return l
}

func (k labelKey) label() label {
	return label{p2p.Name(k.from, k.to, k.tag), tensor.Shape{k.numElems}}
}

// align records a measurement of the offset of this rank's clock from rank 0's clock.
func (o *observer) align(m trace.Offset) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.offset, o.aligned = m, true
	if t := o.timeline.Load(); t != nil {
		(*t).Offset(m)
	}
}

// Watch makes t the timeline and returns the previous timeline. From now on, t receives a record of every
// operation that ends. If t is nil, Watch switches the timeline off. An operation in progress may be reported
// to either timeline. The engine does not own t.
func (e *Engine) Watch(t Timeline) (before Timeline) {
	o := &e.observer
	o.mu.Lock()
	defer o.mu.Unlock()
	var next *Timeline
	if t != nil {
		next = &t
		if o.aligned {
			t.Offset(o.offset)
		}
		if o.tuning != nil && o.tunes {
			t.Tuned(o.Since(), o.tuning)
		}
	}
	if old := o.timeline.Swap(next); old != nil {
		before = *old
	}
	return before
}

// Offset returns the last measurement of the offset of this rank's clock from rank 0's clock, and whether
// there has been a measurement.
func (e *Engine) Offset() (o trace.Offset, ok bool) {
	e.observer.mu.Lock()
	defer e.observer.mu.Unlock()
	return e.observer.offset, e.observer.aligned
}

// Clock returns the engine's clock. The engine's times are counted from the clock's Start.
func (e *Engine) Clock() trace.Clock { return e.clock.Clock }

// Pending returns the operations, also messages, that were submitted and have not ended, oldest first. Any
// goroutine may call Pending.
func (e *Engine) Pending() []trace.Pending {
	var all []trace.Pending
	for _, s := range e.sets.snapshot() {
		s.queue.Each(func(entry *tensorqueue.Entry) {
			q, t := &entry.Request, &entry.Times
			grant := t.Grant.Load()
			var among []topo.Rank
			if q.MembersOnly {
				among = q.Ranks
			}
			all = append(all, trace.Pending{
				Set: s.ID, Number: grant >> 8, Backend: message.Backend(grant), Kind: q.Kind,
				Name: q.Name, DType: q.DType, Shape: q.Shape, Submitted: t.Submitted,
				Sent: time.Duration(t.Sent.Load()), Granted: time.Duration(t.Granted.Load()),
				Begun: time.Duration(t.Begun.Load()), Among: among,
			})
		})
	}
	e.pendingMessages(func(set topo.ProcessSetID, o *p2p.Op) {
		p, l := e.observer.pendingMessage(set, o), labelKeyOf(e.cfg.Rank, o).label()
		p.Name, p.Shape = l.name, l.shape
		if o.Other() != p2p.AnySource {
			p.Among = []topo.Rank{min(e.cfg.Rank, o.Other()), max(e.cfg.Rank, o.Other())}
		}
		all = append(all, p)
	})
	slices.SortFunc(all, func(a, b trace.Pending) int {
		return cmp.Or(cmp.Compare(a.Submitted, b.Submitted), cmp.Compare(a.Set, b.Set),
			cmp.Compare(a.Name, b.Name))
	})
	return all
}

// Stats returns the counters of this rank. It leaves Host, Epoch and the fields of the timeline empty, and
// the caller sets them. Any goroutine may call Stats, even in a callback from the engine. The coordinator's
// counters may be up to one second old.
func (e *Engine) Stats() trace.Stats {
	o := &e.observer
	o.mu.Lock()
	st := o.counts.Stats
	for k := range o.counts.operations {
		for b := range o.counts.operations[k] {
			ops := o.counts.operations[k][b]
			if ops.Tensors > 0 {
				ops.Kind, ops.Backend = message.Kind(k), message.Backend(b)
				st.Operations = append(st.Operations, ops)
			}
			for d, n := range o.counts.moved[k][b] {
				if n > 0 {
					st.Moved = append(st.Moved, trace.Moved{Kind: message.Kind(k),
						Backend: message.Backend(b), DType: tensor.DType(d), Bytes: n})
				}
			}
		}
	}
	st.ClockOffset, st.ClockError, st.ClockKnown = o.offset.Offset, o.offset.Error, o.aligned
	st.FusionThresholdBytes = o.fusionThreshold
	o.mu.Unlock()
	st.Rank, st.Size = int(e.cfg.Rank), e.cfg.Size
	for _, s := range e.sets.snapshot() {
		st.InFlight += s.queue.Len()
	}
	st.InFlight += e.messagesInFlight()
	st.Coordinator = e.published.Load()
	if e.cfg.Tuner != nil {
		st.Tuning = e.cfg.Tuner.Stats()
	}
	return st
}

// publishPeriod is the maximum age of the coordinator's counters in Stats while the loop runs turns. An idle
// loop runs only one turn a second, so its counters may be older.
const publishPeriod = 100 * time.Millisecond

// publish makes a copy of the coordinator's counters for Stats, because Stats must not read them during a
// turn. If atOnce is set, publish makes the copy now. Otherwise it makes at most one copy in each
// publishPeriod.
func (e *Engine) publish(atOnce bool) {
	if !atOnce && e.published.Load() != nil && e.now-e.publishedAt < publishPeriod {
		return
	}
	c := e.coordinator.Stats()
	e.published.Store(&c)
	e.publishedAt = e.now
}
