package engine

import (
	"context"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensor"
)

// allreduce reduces one tensor in its output, several in the fusion buffer, and so one that is compressed.
func (l *lane) allreduce(ctx context.Context, backend ops.Backend, w *work) error {
	r := w.grant.Responses[0]
	s := scalingOf(r, l.averageOver(w))
	if f, ok := backend.(ops.Fuser); ok && fusible(w, s) {
		return l.allreduceFused(ctx, f, w, s)
	}
	direct := len(w.entries) == 1 && !r.Wire.Valid()
	var buf []byte
	if direct {
		buf = w.entries[0].Output
	} else {
		buf = l.scratch.fused.Bytes(int(total(w)))
	}
	var err error
	w.enter(packing)
	switch {
	case w.absent:
		err = neutral(r.Op, r.WireType(), buf)
	case r.Wire.Valid():
		err = l.compress(w, s, buf)
	case direct:
		copyUnlessSame(buf, w.entries[0].Input)
		err = s.before(buf)
	default:
		at := 0
		for _, e := range w.entries {
			at += copy(buf[at:], e.Input)
		}
		err = s.before(buf)
	}
	if err != nil {
		return err
	}
	w.enter(exchanging)
	if r.Op == tensor.Adasum {
		l.scratch.counts = l.scratch.counts[:0]
		for _, r := range w.grant.Responses {
			l.scratch.counts = append(l.scratch.counts, r.WireBytes())
		}
		err = backend.Adasum(ctx, w.grant.Algorithm, r.WireType(), buf, l.scratch.counts)
	} else {
		err = backend.Allreduce(ctx, w.grant.Algorithm, r.WireType(), r.Op.Base(), buf)
	}
	w.enter(unpacking)
	switch {
	case err != nil || w.absent:
		return err
	case r.Wire.Valid():
		return decompress(w, s, buf)
	}
	if err := s.after(buf); err != nil || direct {
		return err
	}
	at := 0
	for _, e := range w.entries {
		at += copy(e.Output, buf[at:])
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

// allreduceFused reduces the tensors where they lie.
func (l *lane) allreduceFused(ctx context.Context, backend ops.Fuser, w *work, s scaling) error {
	tensors, err := l.tensors(w)
	if err != nil {
		return err
	}
	defer clear(tensors)
	r := w.grant.Responses[0]
	w.enter(exchanging)
	return backend.AllreduceFused(ctx, w.grant.Algorithm, r.DType, r.Op.Base(), s.ops(), tensors)
}

// startAllreduce starts an allreduce.
func (l *lane) startAllreduce(backend ops.Starter, w *work, long bool) (started bool, err error) {
	r := w.grant.Responses[0]
	s := scalingOf(r, l.averageOver(w))
	if !fusible(w, s) {
		return false, nil
	}
	tensors, err := l.tensors(w)
	if err != nil {
		return false, err
	}
	defer clear(tensors)
	w.enter(exchanging)
	return backend.StartAllreduce(w.grant.Algorithm, r.DType, r.Op.Base(), s.ops(), tensors, long)
}

// tensors are those of an allreduce, in memory of the lane that the next call uses again.
func (l *lane) tensors(w *work) ([]ops.Tensor, error) {
	tensors := l.scratch.tensors[:0]
	if w.absent {
		r := w.grant.Responses[0]
		buf := l.scratch.fused.Bytes(int(total(w)))
		if err := neutral(r.Op, r.DType, buf); err != nil {
			return nil, err
		}
		tensors = append(tensors, ops.Tensor{In: buf, Out: buf})
	}
	for _, e := range w.entries {
		tensors = append(tensors, ops.Tensor{In: e.Input, Out: e.Output})
	}
	l.scratch.tensors = tensors
	return tensors, nil
}

// reducescatter reduces in the fusion buffer, which has a block for each rank, and in it that rank's rows of each
// tensor; or, in place, in the tensor itself, which is laid out like that.
func (l *lane) reducescatter(ctx context.Context, backend ops.Backend, w *work) error {
	r := w.grant.Responses[0]
	s := scalingOf(r, l.averageOver(w))
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

// total is the sum of the sizes of w's responses, in elements of their wire type.
func total(w *work) (numBytes int64) {
	for _, r := range w.grant.Responses {
		numBytes += r.WireBytes()
	}
	return numBytes
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
