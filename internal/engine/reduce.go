package engine

import (
	"context"
	"slices"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/tensorqueue"
)

// maxStagedBytes bounds what of an allreduce is in the fusion buffer at a time, but for a tensor that is larger: what is packed there,
// or what a rank that is absent puts in its place. The fusion threshold,
// which does so for tensors that come one by one, need not be the same at all ranks; this is.
const maxStagedBytes = 64 << 20

// maxNeutralBytes bounds what the engine's loop writes for a rank that is absent, before it knows whether the operation can be started
// there.
const maxNeutralBytes = 64 << 10

// allreduce reduces the tensors of w, those of each type together.
func (l *lane) allreduce(ctx context.Context, backend ops.Backend, w *work) error {
	r := w.grant.Responses[0]
	if r.DType.Valid() {
		return l.allreduceType(ctx, backend, w, r.DType)
	}
	for dt := range r.Parts.Types() {
		if err := l.allreduceType(ctx, backend, w, dt); err != nil {
			return err
		}
	}
	return nil
}

// allreduceType reduces the tensors of one type.
func (l *lane) allreduceType(ctx context.Context, backend ops.Backend, w *work, dt tensor.DType) error {
	s := scalingOf(w.grant.Responses[0], dt, l.averageOver(w))
	fuser, whereTheyLie := backend.(ops.Fuser)
	whereTheyLie = whereTheyLie && fusible(w, s)
	tensors := l.tensors(w, dt)
	defer clear(tensors)
	if whereTheyLie && len(w.grant.Absent) == 0 {
		return l.allreduceFused(ctx, fuser, w, s, &batch{tensors: tensors}) // nobody needs a buffer
	}
	counts, losses := l.counts(w, dt), l.losses(w, dt)
	for from := 0; from < len(counts); {
		to, numBytes := from+1, counts[from]
		for to < len(counts) && counts[to] <= maxStagedBytes-numBytes {
			numBytes += counts[to]
			to++
		}
		b := batch{counts: counts[from:to]}
		if !w.absent {
			b.tensors = tensors[from:to]
		}
		if losses != nil {
			b.losses = losses[from:to]
		}
		var err error
		if whereTheyLie {
			err = l.allreduceFused(ctx, fuser, w, s, &b)
		} else {
			err = l.allreduceStaged(ctx, backend, w, s, &b)
		}
		if err != nil {
			return err
		}
		from = to
	}
	return nil
}

// batch is what is reduced at once.
type batch struct {
	counts []int64 // bytes that travel, by tensor
	// tensors are this rank's; none if it is absent. losses say for which it is made up what compression loses; nil if for none.
	tensors []ops.Tensor
	losses  []loss
}

// allreduceStaged reduces one tensor in its output, several in the fusion buffer, and so one that is compressed.
func (l *lane) allreduceStaged(ctx context.Context, backend ops.Backend, w *work, s scaling, b *batch) error {
	r := w.grant.Responses[0]
	wire := s.dt
	if r.Wire.Valid() {
		wire = r.Wire
	}
	direct := len(b.tensors) == 1 && !r.Wire.Valid()
	var buf []byte
	if direct {
		buf = b.tensors[0].Out
	} else {
		buf = l.scratch.fused.Bytes(int(sum(b.counts)))
	}
	var err error
	w.enter(packing)
	switch {
	case w.absent:
		err = neutral(r.Op, wire, buf)
	case r.Wire.Valid():
		err = l.compress(b, s, wire, buf)
	case direct:
		copyUnlessSame(buf, b.tensors[0].In)
		err = s.before(buf)
	default:
		at := 0
		for _, t := range b.tensors {
			at += copy(buf[at:], t.In)
		}
		err = s.before(buf)
	}
	if err != nil {
		return err
	}
	w.enter(exchanging)
	if r.Op == tensor.Adasum {
		err = backend.Adasum(ctx, w.grant.Algorithm, wire, buf, b.counts)
	} else {
		err = backend.Allreduce(ctx, w.grant.Algorithm, wire, r.Op.Base(), buf)
	}
	w.enter(unpacking)
	switch {
	case err != nil || w.absent:
		return err
	case r.Wire.Valid():
		return decompress(b, s, wire, buf)
	}
	if err := s.after(buf); err != nil || direct {
		return err
	}
	at := 0
	for _, t := range b.tensors {
		at += copy(t.Out, buf[at:])
	}
	return nil
}

// fusible reports whether a Fuser can reduce the tensors of an allreduce where they lie. All contributions are scaled by
// the same factor there: so if there is one, no rank may be absent, whose part does nothing to a reduction but would if it
// were scaled.
func fusible(w *work, s scaling) bool {
	r := w.grant.Responses[0]
	return r.Op != tensor.Adasum && !r.Wire.Valid() && (s.pre == 1 || len(w.grant.Absent) == 0)
}

// allreduceFused reduces tensors where they lie.
func (l *lane) allreduceFused(ctx context.Context, backend ops.Fuser, w *work, s scaling, b *batch) error {
	tensors, err := l.tensorsOrNeutral(w, s.dt, b)
	if err != nil {
		return err
	}
	w.enter(exchanging)
	return backend.AllreduceFused(ctx, w.grant.Algorithm, s.dt, w.grant.Responses[0].Op.Base(), s.ops(), tensors)
}

// startAllreduce starts an allreduce of tensors of one type, unless it is done in batches.
func (l *lane) startAllreduce(backend ops.Starter, w *work, long bool) (started bool, err error) {
	r := w.grant.Responses[0]
	s := scalingOf(r, r.DType, l.averageOver(w))
	if !r.DType.Valid() || !fusible(w, s) {
		return false, nil
	}
	b := batch{}
	if len(w.grant.Absent) > 0 {
		b.counts = l.counts(w, s.dt)
		if total := sum(b.counts); total > maxStagedBytes || w.absent && !long && total > maxNeutralBytes {
			return false, nil
		}
	}
	if !w.absent {
		b.tensors = l.tensors(w, s.dt)
		defer clear(b.tensors)
	}
	tensors, err := l.tensorsOrNeutral(w, s.dt, &b)
	if err != nil {
		return false, err
	}
	w.enter(exchanging)
	return backend.StartAllreduce(w.grant.Algorithm, r.DType, r.Op.Base(), s.ops(), tensors, long)
}

// tensorsOrNeutral are the tensors of b, or, for a rank that is absent, one that does nothing to a reduction.
func (l *lane) tensorsOrNeutral(w *work, dt tensor.DType, b *batch) ([]ops.Tensor, error) {
	if !w.absent {
		return b.tensors, nil
	}
	buf := l.scratch.fused.Bytes(int(sum(b.counts)))
	if err := neutral(w.grant.Responses[0].Op, dt, buf); err != nil {
		return nil, err
	}
	return []ops.Tensor{{In: buf, Out: buf}}, nil
}

// tensors are this rank's tensors of a type, for an allreduce, in memory of the lane that the next call uses again.
func (l *lane) tensors(w *work, dt tensor.DType) []ops.Tensor {
	tensors := l.scratch.tensors[:0]
	for i, e := range w.entries {
		switch r := w.grant.Responses[i]; {
		case len(r.Parts) == 0:
			tensors = append(tensors, ops.Tensor{In: e.Input, Out: e.Output})
		case r.DType.Valid():
			for _, p := range e.Parts {
				tensors = append(tensors, ops.Tensor{In: p.Input, Out: p.Output})
			}
		default:
			k := 0
			for each := range r.Parts.All() {
				if each == dt {
					tensors = append(tensors, ops.Tensor{In: e.Parts[k].Input, Out: e.Parts[k].Output})
				}
				k++
			}
		}
	}
	l.scratch.tensors = tensors
	return tensors
}

// counts are the bytes that travel of each tensor of a type, in memory of the lane.
func (l *lane) counts(w *work, dt tensor.DType) []int64 {
	counts := l.scratch.counts[:0]
	for _, r := range w.grant.Responses {
		if len(r.Parts) == 0 {
			counts = append(counts, r.WireBytes())
			continue
		}
		size := int64(dt.Size())
		if r.Wire.Valid() {
			size = int64(r.Wire.Size())
		}
		for each, shape := range r.Parts.All() {
			if each == dt {
				n, _ := shape.NumElems() // the response is sound: the message was checked
				counts = append(counts, n*size)
			}
		}
	}
	l.scratch.counts = counts
	return counts
}

// loss names what compression loses of a tensor: by the tensor's name, and, in a group of that name, by its place and of how many. It is
// made up for if there is a name.
type loss struct {
	name  string
	i, of int
}

// losses are those of the tensors of a type, in memory of the lane; nil if none is made up for.
func (l *lane) losses(w *work, dt tensor.DType) []loss {
	if w.absent || !slices.ContainsFunc(w.entries, func(e *tensorqueue.Entry) bool { return e.ErrorFeedback }) {
		return nil
	}
	all := l.scratch.losses[:0]
	for _, e := range w.entries {
		q, name := &e.Request, ""
		if e.ErrorFeedback {
			name = q.Name
		}
		if len(q.Parts) == 0 {
			all = append(all, loss{name: name})
		}
		i := 0
		for each := range q.Parts.All() {
			if each == dt {
				all = append(all, loss{name, i, len(e.Parts)})
			}
			i++
		}
	}
	l.scratch.losses = all
	return all
}

// reducescatter reduces in the fusion buffer, which has a block for each rank, and in it that rank's rows of each
// tensor; or, in place, in the tensor itself, which is laid out like that.
func (l *lane) reducescatter(ctx context.Context, backend ops.Backend, w *work) error {
	r := w.grant.Responses[0]
	s := scalingOf(r, r.DType, l.averageOver(w))
	counts := l.scratch.counts[:0]
	var mine int64 // where this rank's block begins
	for i := range l.set.Ranks {
		if i == l.me {
			mine = sum(counts)
		}
		var n int64
		for _, r := range w.grant.Responses {
			_, rows := tensor.Rows(r.Shape[0], len(l.set.Ranks), i)
			n += rows * rowBytes(r)
		}
		counts = append(counts, n)
	}
	l.scratch.counts = counts
	inPlace := len(w.entries) == 1 && w.entries[0].InPlace
	var buf []byte
	if inPlace {
		buf = w.entries[0].Input
	} else {
		buf = l.scratch.fused.Bytes(int(sum(counts)))
	}
	w.enter(packing)
	if err := l.fillBlocks(w, s, buf, inPlace); err != nil {
		return err
	}
	w.enter(exchanging)
	if err := backend.Reducescatter(ctx, w.grant.Algorithm, r.DType, r.Op.Base(), buf, counts); err != nil || w.absent {
		return err
	}
	w.enter(unpacking)
	result := buf[mine : mine+counts[l.me]]
	if err := s.after(result); err != nil || inPlace {
		return err
	}
	at := 0
	for _, e := range w.entries {
		at += copy(e.Output, result[at:])
	}
	return nil
}

// fillBlocks writes what this rank contributes to a reducescatter, by rank and in it by tensor.
func (l *lane) fillBlocks(w *work, s scaling, buf []byte, inPlace bool) error {
	if w.absent {
		return neutral(w.grant.Responses[0].Op, s.dt, buf)
	}
	if !inPlace {
		at := 0
		for i := range l.set.Ranks {
			for t, e := range w.entries {
				at += copy(buf[at:], block(w.grant.Responses[t], e.Input, len(l.set.Ranks), i))
			}
		}
	}
	return s.before(buf)
}

// block is rank i's part of a tensor that n ranks reduce and scatter.
func block(r *message.Response, whole []byte, n, i int) []byte {
	from, rows := tensor.Rows(r.Shape[0], n, i)
	row := rowBytes(r)
	return whole[from*row : (from+rows)*row]
}

// rowBytes is the size of what lies under one index of the first dimension.
func rowBytes(r *message.Response) int64 {
	n, err := r.RowElems()
	if err != nil {
		return 0 // the response is sound: the message was checked
	}
	return n * int64(r.DType.Size())
}

func sum(counts []int64) (total int64) {
	for _, n := range counts {
		total += n
	}
	return total
}
