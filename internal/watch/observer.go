// Package watch records what a rank does: it makes the record of every operation that has ended, for the
// flight recorder, the timeline and the counters, and logs stalls and negotiation frames.
package watch

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/exec"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
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
	// Span records what the program did.
	Span(s trace.Span)
	// Step records that the training step with the given number begins at the given time.
	Step(at time.Duration, number uint64)
	// Tuned records, at rank 0 only, that the settings have the values v from the given time on. The engine
	// does not change v afterwards.
	Tuned(at time.Duration, v *message.Tuning)
}

// Observer records the operations of a rank for Stats, the Recorder and the Timeline. The loop and the lanes
// call its methods.
type Observer struct {
	start    time.Time
	recorder Recorder // may be nil
	// timelines are those that are on. The list is replaced, never changed.
	timelines atomic.Pointer[[]Timeline]
	// published is a copy of the coordinator's counters, and publishedAt is when it was made. Only the loop
	// uses publishedAt.
	published   atomic.Pointer[trace.Coordinator]
	publishedAt time.Duration
	cut         atomic.Bool // a step has ended, and CutSteps must be called

	mu              sync.Mutex
	fusionThreshold int64
	tunes           bool            // whether the timeline of this rank shows changes of settings
	tuning          *message.Tuning // the last change, or nil
	counts          counts
	phases          phases
	offset          trace.Offset
	aligned         bool // whether offset is set
	steps           steps
	op              trace.Operation // scratch memory
	labels          map[labelKey]label
}

// New returns an observer of an engine that has started at the time start. The recorder may be nil.
// fusionThreshold is the size of the fusion buffer in bytes. tunes is set at rank 0, whose timeline shows
// changes of settings.
func New(start time.Time, recorder Recorder, fusionThreshold int64, tunes bool) *Observer {
	return &Observer{start: start, recorder: recorder, fusionThreshold: fusionThreshold, tunes: tunes}
}

// Since returns the time since the engine's start. All times of the engine are counted from its start.
func (o *Observer) Since() time.Duration { return time.Since(o.start) }

// Watched reports whether a timeline is on.
func (o *Observer) Watched() bool { return len(o.watching()) > 0 }

// watching returns the timelines that are on.
func (o *Observer) watching() []Timeline {
	if all := o.timelines.Load(); all != nil {
		return *all
	}
	return nil
}

// Ended records that w has ended. It must be called before the results of w's tensors are reported. err is
// nil if w has completed. Otherwise it is the reason why w has failed.
func (o *Observer) Ended(w *exec.Work, err error) {
	now := o.Since()
	o.mu.Lock()
	defer o.mu.Unlock()
	op := &o.op
	g := w.Grant
	op.Records, op.Activities, op.Arrivals = op.Records[:0], op.Activities[:0], nil
	whole := trace.Record{
		Set: g.Set, Number: g.Number, Kind: g.Responses[0].Kind, Backend: g.Backend, Algorithm: g.Algorithm,
		Absent: w.Absent, Granted: w.Granted, Begun: max(w.Begun, w.Granted), Ended: now, Error: textOf(err),
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
	op.Arrivals = w.Arrivals[:min(len(w.Entries)*members, len(w.Arrivals))]
	for i, e := range w.Entries {
		q := &e.Request
		whole.Kind = q.Kind // do not use the kind of the response, which may be Error
		t := whole
		t.Name, t.DType, t.Shape, t.Bytes = q.Name, q.DType, ownShape(q, g.Responses[i]), int64(len(e.Input))
		t.Cached, t.Parts = i < len(g.Bits), int32(len(e.Parts))
		t.Submitted, t.Sent = e.Times.Submitted, time.Duration(e.Times.Sent.Load())
		switch {
		case q.Kind == message.Broadcast:
			t.Bytes = int64(len(e.Output))
		case len(e.Parts) > 0:
			t.Bytes = numBytes(e.Parts)
		}
		// If the timeline was switched on after the first request for a tensor had arrived, the arrival times
		// of the earlier requests are missing.
		t.Partial = zeros(op.Arrivals[i*members:(i+1)*members]) > len(g.Absent)
		if i < len(w.Refused) && w.Refused[i] != nil {
			t.Refused, t.Error = true, textOf(w.Refused[i])
		}
		op.Records = append(op.Records, t)
	}
	if len(op.Records) == 0 {
		op.Records = append(op.Records, whole)
	}
	o.counts.add(op, g.Responses, err != nil, o.fusionThreshold)
	if first := firstSubmitted(op.Records); first > 0 {
		o.phases.operation(first, whole.Granted, whole.Begun, now)
	}
	o.record()
}

// firstSubmitted returns when the first of the tensors of an operation was submitted. It returns 0 if this
// rank has submitted none.
func firstSubmitted(records []trace.Record) (first time.Duration) {
	for i := range records {
		if at := records[i].Submitted; at > 0 && (first == 0 || at < first) {
			first = at
		}
	}
	return first
}

// textOf returns the text of an error, or "" if it is nil.
func textOf(err error) string {
	if err == nil {
		return ""
	}
	return cmp.Or(err.Error(), "unknown error")
}

// record passes the operation in o.op to the recorder and the timeline. The caller holds mu.
func (o *Observer) record() {
	if o.recorder != nil {
		o.recorder.Record(&o.op)
	}
	for _, t := range o.watching() {
		t.Record(&o.op)
	}
	clear(o.op.Records)
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

// Tuned records that rank 0 has changed settings. v must not be changed afterwards.
func (o *Observer) Tuned(at time.Duration, v *message.Tuning) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.fusionThreshold, o.tuning = v.FusionThresholdBytes, v
	if !o.tunes {
		return
	}
	for _, t := range o.watching() {
		t.Tuned(at, v)
	}
}

// BeginSpan returns the time at which a Span begins, for EndSpan. If there is no timeline, it returns 0.
func (o *Observer) BeginSpan() time.Duration {
	if !o.Watched() {
		return 0
	}
	return max(o.Since(), 1)
}

// maxSpanName limits the bytes of the name of a Span. The rest of a longer name is not recorded.
const maxSpanName = 512

// EndSpan records a Span that ends now. begun is the result of BeginSpan. If it is 0, EndSpan does nothing.
func (o *Observer) EndSpan(kind trace.SpanKind, name string, begun time.Duration) {
	if begun == 0 {
		return
	}
	name = name[:min(len(name), maxSpanName)]
	now := o.Since()
	if begun > now {
		return // a program in C may give any time
	}
	for _, t := range o.watching() {
		t.Span(trace.Span{Kind: kind, Name: name, Begun: begun, End: now})
	}
}

// MarkStep records that the program begins the training step with the given number.
func (o *Observer) MarkStep(number uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.counts.Steps++
	if o.steps.begin(o.Since(), o.counts.Steps, number) {
		o.cut.Store(true)
	}
	for _, t := range o.watching() {
		t.Step(o.Since(), number)
	}
}

// Abandoned counts tensors that have ended without a grant, because the epoch has ended or their process set
// was removed. submitted is when they were submitted.
func (o *Observer) Abandoned(tensors int, submitted time.Duration) {
	now := o.Since()
	o.mu.Lock()
	o.counts.Failed += uint64(tensors)
	o.phases.operation(submitted, 0, 0, now)
	o.mu.Unlock()
}

// MessageEnded records that the message m of process set set has ended at rank me. It must be called before
// the result of m is reported. err is its error or nil.
func (o *Observer) MessageEnded(me topo.Rank, set topo.ProcessSetID, m *p2p.Op, err error) {
	r, now := o.pendingMessage(set, m), o.Since()
	r.Bytes, r.Backend, r.Ended, r.Error = int64(len(m.Buf)), message.TCP, now, textOf(err)
	if m.Shared() {
		r.Backend = message.SHM
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	op := &o.op
	op.Activities, op.Arrivals = op.Activities[:0], nil
	if r.Granted == 0 {
		r.Granted, r.Begun = now, now
	} else {
		op.Activities = append(op.Activities, trace.Activity{Name: exchangeNames[r.Backend][r.Kind],
			Begun: r.Granted, End: now})
	}
	if o.recorder != nil || o.Watched() {
		l := o.label(labelKeyOf(me, m))
		r.Name, r.Shape = l.name, l.shape
	}
	op.Records = append(op.Records[:0], r)
	o.counts.addMessage(&r, err)
	o.phases.operation(r.Submitted, r.Granted, r.Begun, now)
	o.record()
}

// pendingMessage describes the message m of process set set, without its name and its shape.
func (o *Observer) pendingMessage(set topo.ProcessSetID, m *p2p.Op) trace.Record {
	p := trace.Record{Set: set, Number: m.Number, Peer: m.Other(), Kind: message.Send, DType: m.DType,
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

// label returns the label of a message. If the observer has kept it, label allocates no memory. The caller
// holds mu.
func (o *Observer) label(k labelKey) label {
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

// Align records a measurement of the offset of this rank's clock from rank 0's clock.
func (o *Observer) Align(m trace.Offset) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.offset, o.aligned = m, true
	for _, t := range o.watching() {
		t.Offset(m)
	}
}

// Watch switches a timeline on. From now on, it receives a record of every operation that ends. The observer
// does not own it.
func (o *Observer) Watch(t Timeline) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.aligned {
		t.Offset(o.offset)
	}
	if o.tuning != nil && o.tunes {
		t.Tuned(o.Since(), o.tuning)
	}
	all := append(slices.Clone(o.watching()), t)
	o.timelines.Store(&all)
}

// Unwatch switches a timeline off. It may still receive the end of an operation in progress.
func (o *Observer) Unwatch(t Timeline) {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := slices.DeleteFunc(slices.Clone(o.watching()), func(other Timeline) bool { return other == t })
	o.timelines.Store(&all)
}

// Cycle records that this rank has applied a cycle of the negotiation at the given time.
func (o *Observer) Cycle(at time.Duration) {
	for _, t := range o.watching() {
		t.Cycle(at)
	}
}

// Offset returns the last measurement of the offset of this rank's clock from rank 0's clock, and whether
// there has been a measurement.
func (o *Observer) Offset() (of trace.Offset, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.offset, o.aligned
}

// Pending describes an entry that was submitted to a process set and has not ended.
func Pending(set topo.ProcessSetID, e *tensorqueue.Entry) trace.Record {
	q, t := &e.Request, &e.Times
	grant := t.Grant.Load()
	var among []topo.Rank
	if q.MembersOnly {
		among = q.Ranks
	}
	return trace.Record{
		Set: set, Number: grant >> 8, Backend: message.Backend(grant), Kind: q.Kind,
		Name: q.Name, DType: q.DType, Shape: q.Shape, Submitted: t.Submitted,
		Sent: time.Duration(t.Sent.Load()), Granted: time.Duration(t.Granted.Load()),
		Begun: time.Duration(t.Begun.Load()), Among: among,
	}
}

// PendingMessage describes the message m of process set set, at rank me.
func (o *Observer) PendingMessage(me topo.Rank, set topo.ProcessSetID, m *p2p.Op) trace.Record {
	p, l := o.pendingMessage(set, m), labelKeyOf(me, m).label()
	p.Name, p.Shape = l.name, l.shape
	if m.Other() != p2p.AnySource {
		p.Among = []topo.Rank{min(me, m.Other()), max(me, m.Other())}
	}
	return p
}

// Stats returns the counters of the operations that have ended, the phases until the time now, the offset of
// the clock and the published counters of the coordinator. pending has the operations in flight, as they are
// after the time now.
func (o *Observer) Stats(now time.Duration, pending []trace.Record) trace.Stats {
	o.mu.Lock()
	defer o.mu.Unlock()
	for i := range pending {
		r := &pending[i]
		o.phases.operation(r.Submitted, r.Granted, r.Begun, now)
	}
	st := o.counts.stats()
	st.Phases = o.phases.until(now)
	st.ClockOffset, st.ClockError, st.ClockKnown = o.offset.Offset, o.offset.Error, o.aligned
	st.FusionThresholdBytes = o.fusionThreshold
	st.Coordinator = o.published.Load()
	return st
}

// publishPeriod is the maximum age of the coordinator's counters in Stats while the loop runs turns. An idle
// loop runs only one turn a second, so its counters may be older.
const publishPeriod = 100 * time.Millisecond

// Publish makes a copy of the coordinator's counters for Stats, because Stats must not read them during a
// turn. If atOnce is set, Publish makes the copy now. Otherwise it makes at most one copy in each
// publishPeriod. Only the loop calls it.
func (o *Observer) Publish(c *controller.Coordinator, now time.Duration, atOnce bool) {
	if !atOnce && o.published.Load() != nil && now-o.publishedAt < publishPeriod {
		return
	}
	st := c.Stats()
	o.published.Store(&st)
	o.publishedAt = now
}
