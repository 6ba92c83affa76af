package report

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/trace"
)

const (
	negotiate = "NEGOTIATE_"
	queued    = "QUEUE"
	failed    = "ERROR"
)

// kindOf has the kind of an operation by its name in the files.
var kindOf = func() map[string]message.Kind {
	kinds := make(map[string]message.Kind)
	for k := message.NoKind + 1; int(k) < message.NumKinds; k++ {
		kinds[strings.ToUpper(strings.ReplaceAll(k.String(), " ", "_"))] = k
	}
	return kinds
}()

// operation is an operation of a rank as its timeline has it: with the number of all tensors that were fused
// in it, also of those that are not in its records. Times are on rank 0's clock.
type operation struct {
	trace.Operation
	fused int64
	// arrivals has, for each record, the times at which the requests for its tensor arrived at rank 0, by
	// position in the process set. Operation.Arrivals has the same when the operation is complete.
	arrivals [][]time.Duration
}

// mark is a span of the program, or the beginning of a step. Times are on rank 0's clock.
type mark struct {
	isSpan bool
	span   trace.Span
	at     time.Duration
	step   uint64
}

// stage says which part of the events of a tensor has been read. The events of a tensor in an operation
// follow each other, in the order of these constants.
type stage uint8

const (
	outside     stage = iota // of the events of a tensor
	negotiating              // in the bar of the negotiation
	granted                  // after this bar
	running                  // in the bar of the operation
	active                   // in an activity within this bar
)

// rankReader reads the operations from a rank's files, in the order in which they ended.
type rankReader struct {
	files *rankFiles
	// ranks is the number of ranks in the job. The positions of arrivals must be less than ranks.
	ranks int
	// mark is called for each span of the program, and each step that it has marked.
	mark func(mark)

	shift  int64            // added to times of the current segment to get times of the first segment
	tracks map[int64]*track // the tracks of the current segment

	whole *operation // the operation whose records are being read, or nil
	stage stage
	pid   int64      // the track of the tensor that is being read
	track *track     // the same; it has no name if the file has none
	op    *operation // has one record, of this tensor
	// free has operations that are not used any more, whose memory is reused.
	free []*operation
}

// track has the name of a tensor, and the text and the value of its last shape and element type.
type track struct {
	name, dtype, shape string
	elements           tensor.DType
	dims               tensor.Shape
}

func newRankReader(f *rankFiles) *rankReader {
	ranks := maxRanks
	if size := f.segments[0].size; size > 0 {
		ranks = size
	}
	return &rankReader{files: f, ranks: ranks, mark: func(mark) {}}
}

// operations passes the operations of all segments to yield until yield returns false. Consecutive tensors of
// a process set with the same operation number form one operation, unless they are messages.
func (r *rankReader) operations(yield func(*operation) bool) error {
	for _, s := range r.files.segments {
		r.shift, r.tracks, r.stage = s.monotonic-r.files.clock.base, make(map[int64]*track), outside
		more := true
		if s.path == "" {
			if !r.recorded(s, yield) {
				return nil
			}
			continue
		}
		err := s.events(func(e *event, _ jsontext.Value, malformed error) error {
			ended, err := false, malformed
			if err == nil {
				ended, err = r.apply(e)
			}
			if err != nil || !ended {
				return err
			}
			if whole := r.join(); whole != nil {
				if more = yield(whole.complete()); !more {
					return errStop
				}
			}
			return nil
		})
		if err != nil || !more {
			return err
		}
	}
	if r.whole != nil {
		yield(r.whole.complete())
	}
	return nil
}

// join adds the tensor that has been read to the operation. If it belongs to another operation, join returns
// the previous one.
func (r *rankReader) join() (previous *operation) {
	op := r.op
	r.op = nil
	if w := r.whole; w != nil && w.hasPart(&op.Records[0]) {
		w.Records, w.arrivals = append(w.Records, op.Records[0]), append(w.arrivals, op.arrivals[0])
		w.fused = max(w.fused, op.fused)
		op.arrivals[0] = nil // the operation has its memory now
		r.free = append(r.free, op)
		return nil
	}
	previous, r.whole = r.whole, op
	return previous
}

// fresh returns an operation with one empty record.
func (r *rankReader) fresh() *operation {
	n := len(r.free)
	if n == 0 {
		return &operation{Operation: trace.Operation{Records: make([]trace.Record, 1)},
			arrivals: make([][]time.Duration, 1)}
	}
	op := r.free[n-1]
	r.free = r.free[:n-1]
	op.Records, op.Activities, op.fused = op.Records[:1], op.Activities[:0], 0
	op.Records[0] = trace.Record{}
	op.arrivals = op.arrivals[:1]
	op.arrivals[0] = op.arrivals[0][:0]
	return op
}

// hasPart reports whether a record that follows those of o belongs to the same operation.
func (o *operation) hasPart(n *trace.Record) bool {
	first := &o.Records[0]
	return n.Number != 0 && n.Number == first.Number && n.Set == first.Set && !n.Kind.IsMessage() &&
		!first.Kind.IsMessage()
}

// complete sets o.Arrivals.
func (o *operation) complete() *operation {
	members := 0
	for _, a := range o.arrivals {
		members = max(members, len(a))
	}
	o.Arrivals = slices.Grow(o.Arrivals[:0], members*len(o.Records))[:members*len(o.Records)]
	clear(o.Arrivals)
	for i, a := range o.arrivals {
		copy(o.ArrivalsOf(i), a)
	}
	return o
}

// reference converts a time of the current segment to rank 0's clock. It never returns 0, because 0 means
// that a time is not known.
func (r *rankReader) reference(at stamp) time.Duration {
	ns := r.files.clock.reference(int64(at) + r.shift)
	if ns == 0 {
		ns = 1
	}
	return time.Duration(ns)
}

// exact returns the time that an argument of an event has or, if it is missing, the given one.
func (r *rankReader) exact(at stamp, otherwise time.Duration) time.Duration {
	if at == never {
		return otherwise
	}
	return r.reference(at)
}

// apply processes an event. It returns true if the event is the last one of a tensor in an operation, which
// is then in r.op.
func (r *rankReader) apply(e *event) (ended bool, err error) {
	switch {
	case e.Phase == "M":
		if e.PID != 0 && e.Name == "process_name" {
			r.tracks[e.PID] = &track{name: clip(e.Args.Name)}
		}
		return false, nil
	case e.PID == 0:
		r.event(e)
		return false, nil
	case r.stage == outside:
		name, is := strings.CutPrefix(e.Name, negotiate)
		if e.Phase != "B" || !is {
			return false, violationf("got %s %q, want the beginning of a negotiation", e.Phase, e.Name)
		}
		r.beginTensor(e, name)
		return false, nil
	case e.PID != r.pid:
		return false, violationf("got an event of track %d within an operation of track %d", e.PID, r.pid)
	}
	n, now := &r.op.Records[0], r.reference(e.Time)
	switch p := e.Phase; {
	case r.stage == negotiating && p == "X":
		return false, r.arrive(e, now)
	case r.stage == negotiating && p == "E":
		r.stage, n.Granted, n.Cached = granted, now, e.Args.Cached
		n.Sent = r.exact(e.Args.Sent, n.Submitted)
	case r.stage == granted && p == "B":
		r.stage, n.Refused = running, e.Name == failed && n.Kind != message.Error
	case r.stage == running && p == "B":
		r.stage = active
		r.op.Activities = append(r.op.Activities, trace.Activity{Name: clip(e.Name), Begun: now})
	case r.stage == active && p == "E":
		r.stage = running
		if last := len(r.op.Activities) - 1; last == 0 && n.Begun == 0 && r.op.Activities[0].Name == queued {
			n.Begun, r.op.Activities = now, r.op.Activities[:0]
		} else {
			r.op.Activities[last].End = now
		}
	case r.stage == running && p == "E":
		r.stage = outside
		return true, r.endTensor(e, now)
	default:
		return false, violationf("got %s %q at a wrong place within an operation", p, e.Name)
	}
	return false, nil
}

// event passes an event that does not belong to a tensor to mark.
func (r *rankReader) event(e *event) {
	span := trace.Span{Begun: r.reference(e.Time), End: r.reference(e.Time + e.Duration)}
	switch {
	case e.Name == "hvd_step":
		r.mark(mark{at: span.Begun, step: e.Args.Step})
		return
	case e.Phase == "X" && e.Category == "range":
		span.Kind, span.Name = trace.Range, clip(e.Name)
	case e.Phase == "X" && e.Category == "wait":
		span.Kind, span.Name = trace.Wait, clip(e.Args.Tensor)
	default:
		return
	}
	r.mark(mark{isSpan: true, span: span})
}

// beginTensor begins to read a tensor.
func (r *rankReader) beginTensor(e *event, kind string) {
	r.stage, r.pid = negotiating, e.PID
	r.track = r.tracks[e.PID]
	if r.track == nil {
		r.track = new(track)
	}
	if r.op != nil { // the previous segment ends within a tensor
		r.free = append(r.free, r.op)
	}
	r.op = r.fresh()
	n := &r.op.Records[0]
	n.Set, n.Number, n.Kind, n.Name = e.Args.Set, e.Args.Op, message.Error, r.track.name
	if k, known := kindOf[kind]; known {
		n.Kind = k
	}
	n.Submitted = r.exact(e.Args.Submitted, r.reference(e.Time))
}

// arrive reads when the request of a rank arrived at rank 0.
func (r *rankReader) arrive(e *event, now time.Duration) error {
	position, err := strconv.Atoi(e.Name)
	if err != nil || position < 0 || position >= r.ranks {
		return violationf("got the position %.64q of a rank, want 0 to %d", e.Name, r.ranks-1)
	}
	for at := &r.op.arrivals[0]; len(*at) <= position; {
		*at = append(*at, 0)
	}
	r.op.arrivals[0][position] = r.exact(e.Args.At, now)
	return nil
}

// endTensor reads the last event of a tensor in an operation.
func (r *rankReader) endTensor(e *event, now time.Duration) error {
	n, a := &r.op.Records[0], &e.Args
	n.Ended, n.Bytes, n.Error, r.op.fused = now, max(a.Bytes, 0), clip(a.Error), a.Fused
	n.Backend, n.Algorithm = a.Backend, a.Algorithm
	if a.Peer != noPeer {
		n.Peer = a.Peer
	} else if n.Kind.IsMessage() || n.Kind.IsRequest() {
		n.Peer = noPeer
	}
	if a.DType == "" {
		return nil
	}
	t := r.track
	if a.DType != t.dtype || a.Shape != t.shape {
		if err := t.elements.UnmarshalText([]byte(a.DType)); err != nil {
			return violation{err}
		}
		var err error
		if t.dims, err = parseShape(a.Shape); err != nil {
			return err
		}
		t.dtype, t.shape = a.DType, a.Shape
	}
	n.DType, n.Shape = t.elements, t.dims
	return nil
}
