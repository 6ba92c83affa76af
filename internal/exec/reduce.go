package exec

import (
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// maxStagedBytes is the maximum number of bytes of an allreduce that are packed into the fusion buffer at
// once, also into that of a backend for devices. It also bounds the neutral elements that an absent rank
// provides at once. A single larger tensor is not split. All ranks must split an allreduce into the same
// parts, so maxStagedBytes is a constant. The fusion threshold cannot be used for this, because it may differ
// between ranks; it bounds the fusion of tensors that are submitted one by one.
const maxStagedBytes = 64 << 20

// startAllreduce prepares the first part of an allreduce or of a reduce.
func (m *machine) startAllreduce() error {
	x := &m.execution
	r := x.work.Grant.Responses[0]
	x.types = append(m.scratch.types[:0], r.DType)
	if !r.DType.Valid() {
		x.types = slices.AppendSeq(x.types[:0], r.Parts.Types())
	}
	m.scratch.types = x.types
	return m.nextPart()
}

// hasParts reports whether the allreduce has parts after the current one.
func (x *execution) hasParts() bool { return x.next < len(x.counts) || len(x.types) > 0 }

// nextPart prepares the next part of an allreduce.
func (m *machine) nextPart() error {
	x := &m.execution
	w := x.work
	if x.next == len(x.counts) {
		dt := x.types[0]
		x.types = x.types[1:]
		x.scaling = scalingOf(w.Grant.Responses[0], dt, m.averageOver(w))
		x.staged = !w.OnDevices() && (!x.lists || !reducibleInPlace(w, x.scaling))
		x.tensors, x.counts, x.next = m.tensors(w, dt), nil, 0
		if x.staged || w.OnDevices() || len(w.Grant.Absent) > 0 {
			x.counts, x.losses = m.counts(w, dt), m.losses(w, dt)
		}
	}
	x.batch = batch{tensors: x.tensors}
	if x.counts != nil {
		from := x.next
		numBytes := x.counts[from]
		for x.next++; x.next < len(x.counts) && x.counts[x.next] <= maxStagedBytes-numBytes; x.next++ {
			numBytes += x.counts[x.next]
		}
		x.batch.counts = x.counts[from:x.next]
		if !w.Absent {
			x.batch.tensors = x.tensors[from:x.next]
		}
		if x.losses != nil {
			x.batch.losses = x.losses[from:x.next]
		}
	}
	x.device.More = x.hasParts()
	if x.staged {
		return m.pack()
	}
	return m.list()
}

// list sets up the backend's operation for a part whose tensors are reduced in place.
func (m *machine) list() (err error) {
	x := &m.execution
	x.op.DType, x.op.Op, x.op.Scaling = x.scaling.dt, x.work.Grant.Responses[0].Op.Base(), x.scaling.ops()
	if x.work.Absent && x.work.OnDevices() {
		x.device.NumBytes = x.batch.counts[0]
		if len(x.batch.counts) > 1 {
			x.device.NumBytes = 0
			for _, n := range x.batch.counts {
				x.device.NumBytes += ops.Padded(n)
			}
		}
		return nil
	}
	x.op.Tensors, err = m.tensorsOrNeutral(x.work, x.scaling.dt, &x.batch)
	return err
}

// getsResult reports whether this rank gets the result of the reduction.
func (x *execution) getsResult(me int) bool {
	return !x.work.Absent && (x.op.Kind != message.Reduce || x.op.Root == me)
}

// pack sets up the backend's operation for a part that is reduced in one buffer. If the part is a single
// tensor without compression and this rank gets the result, the buffer is the output of the tensor. Otherwise
// it is the fusion buffer.
func (m *machine) pack() (err error) {
	x := &m.execution
	w, b, s := x.work, &x.batch, x.scaling
	r := w.Grant.Responses[0]
	wire := s.dt
	if r.Wire.Valid() {
		wire = r.Wire
	}
	x.direct = len(b.tensors) == 1 && !r.Wire.Valid() && x.getsResult(m.me)
	if x.direct {
		x.buf = b.tensors[0].Out
	} else {
		x.buf = m.scratch.fused.Bytes(int(sum(b.counts)))
	}
	w.enter(ops.Packing)
	switch {
	case w.Absent:
		err = neutral(r.Op, wire, x.buf)
	case r.Wire.Valid():
		err = m.compress(b, s, wire, x.buf)
	case x.direct:
		copyUnlessSame(x.buf, b.tensors[0].In)
		err = s.before(x.buf)
	default:
		at := 0
		for _, t := range b.tensors {
			at += copy(x.buf[at:], t.In)
		}
		err = s.before(x.buf)
	}
	x.one[0] = ops.Tensor{In: x.buf, Out: x.buf}
	x.op.DType, x.op.Op, x.op.Tensors, x.op.Scaling = wire, r.Op.Base(), x.one[:],
		ops.Scaling{Pre: 1, Post: 1}
	if r.Op == tensor.Adasum {
		x.op.Counts = b.counts
	}
	return err
}

// finishPart scales the result of a part and copies it to the outputs. If the part was reduced in place, the
// backend has already done both.
func (m *machine) finishPart() error {
	x := &m.execution
	w, b, s := x.work, &x.batch, x.scaling
	if !x.staged || !x.getsResult(m.me) {
		return nil
	}
	w.enter(ops.Unpacking)
	if w.Grant.Responses[0].Wire.Valid() {
		return decompress(b, s, x.op.DType, x.buf)
	}
	if err := s.after(x.buf); err != nil || x.direct {
		return err
	}
	at := 0
	for _, t := range b.tensors {
		at += copy(t.Out, x.buf[at:])
	}
	return nil
}

// reducibleInPlace reports whether a backend can reduce the tensors of an allreduce in place. A backend
// multiplies the contributions of all ranks by the same prescale factor, but the neutral elements of an
// absent rank must not be scaled. So if there is a prescale factor, an allreduce in place is possible only
// without absent ranks.
func reducibleInPlace(w *Work, s scaling) bool {
	r := w.Grant.Responses[0]
	return r.Op != tensor.Adasum && !r.Wire.Valid() && (s.pre == 1 || len(w.Grant.Absent) == 0)
}

// tensorsOrNeutral returns the tensors of b. If this rank is absent, it returns neutral elements instead, as
// one tensor.
func (m *machine) tensorsOrNeutral(w *Work, dt tensor.DType, b *batch) ([]ops.Tensor, error) {
	if !w.Absent {
		return b.tensors, nil
	}
	buf := m.scratch.fused.Bytes(int(sum(b.counts)))
	if err := neutral(w.Grant.Responses[0].Op, dt, buf); err != nil {
		return nil, err
	}
	return []ops.Tensor{{In: buf, Out: buf}}, nil
}

// tensors returns this rank's tensors of element type dt for an allreduce. The slice belongs to the lane, and
// the next call overwrites it.
func (m *machine) tensors(w *Work, dt tensor.DType) []ops.Tensor {
	tensors := m.scratch.tensors[:0]
	for i, e := range w.Entries {
		switch r := w.Grant.Responses[i]; {
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
	m.scratch.tensors = tensors
	return tensors
}

// counts returns the number of bytes to send for each tensor of element type dt. The slice belongs to the
// lane, and the next call overwrites it.
func (m *machine) counts(w *Work, dt tensor.DType) []int64 {
	counts := m.scratch.counts[:0]
	for _, r := range w.Grant.Responses {
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
				n, _ := shape.NumElems() // cannot fail, because the decoder has checked the shape
				counts = append(counts, n*size)
			}
		}
	}
	m.scratch.counts = counts
	return counts
}

// losses returns the keys of the compression losses of the tensors of element type dt, or nil if no tensor
// has error feedback. The slice belongs to the lane, and the next call overwrites it.
func (m *machine) losses(w *Work, dt tensor.DType) []lossKey {
	if w.Absent || !slices.ContainsFunc(w.Entries, func(e *tensorqueue.Entry) bool {
		return e.ErrorFeedback
	}) {
		return nil
	}
	all := m.scratch.losses[:0]
	for _, e := range w.Entries {
		q, name := &e.Request, ""
		if e.ErrorFeedback {
			name = q.Name
		}
		if len(q.Parts) == 0 {
			all = append(all, lossKey{name: name})
		}
		i := 0
		for each := range q.Parts.All() {
			if each == dt {
				all = append(all, lossKey{name, i, len(e.Parts)})
			}
			i++
		}
	}
	m.scratch.losses = all
	return all
}

// averageOver returns the divisor of an average: the number of ranks, or only of those that have not joined.
func (m *machine) averageOver(w *Work) int {
	if w.Grant.Responses[0].Op == tensor.AverageActive {
		return len(m.set.Ranks) - len(w.Grant.Absent)
	}
	return len(m.set.Ranks)
}

// startReducescatter prepares a reducescatter. The tensors are reduced in the fusion buffer, which has a
// block for each rank. The block contains that rank's rows of every tensor. A single tensor has this layout
// already. It is reduced in its own memory if it is in place, or if the backend reads and writes tensors
// where they are.
func (m *machine) startReducescatter() error {
	x := &m.execution
	w := x.work
	r := w.Grant.Responses[0]
	x.scaling = scalingOf(r, r.DType, m.averageOver(w))
	counts := m.scatterCounts(w)
	x.staged = !x.lists || len(w.Grant.Responses) > 1 || !reducibleInPlace(w, x.scaling)
	x.direct = len(w.Entries) == 1 && (w.Entries[0].InPlace || !x.staged)
	if x.direct {
		x.buf = w.Entries[0].Input
		if !w.Entries[0].InPlace {
			x.op.Result = w.Entries[0].Output
		}
	} else {
		x.buf = m.scratch.fused.Bytes(int(sum(counts)))
	}
	x.op.Buf, x.op.Counts, x.op.DType, x.op.Op = x.buf, counts, r.DType, r.Op.Base()
	if !x.staged {
		x.op.Scaling = x.scaling.ops()
		if w.Absent {
			return neutral(r.Op, r.DType, x.buf)
		}
		return nil
	}
	x.op.Scaling = ops.Scaling{Pre: 1, Post: 1}
	w.enter(ops.Packing)
	return m.fillBlocks(w, x.scaling, x.buf, x.direct)
}

// scatterCounts returns the number of bytes of each rank's block in a reducescatter. The slice belongs to the
// lane, and the next call overwrites it.
func (m *machine) scatterCounts(w *Work) []int64 {
	counts := m.scratch.counts[:0]
	for i := range m.set.Ranks {
		var n int64
		for _, r := range w.Grant.Responses {
			_, rows := tensor.Rows(r.Shape[0], len(m.set.Ranks), i)
			n += rows * rowBytes(r)
		}
		counts = append(counts, n)
	}
	m.scratch.counts = counts
	return counts
}

// unpackReducescatter scales this rank's block and copies it to the outputs.
func (m *machine) unpackReducescatter() error {
	x := &m.execution
	if !x.staged {
		return nil
	}
	mine := sum(x.op.Counts[:m.me])
	result := x.buf[mine : mine+x.op.Counts[m.me]]
	if err := x.scaling.after(result); err != nil || x.direct {
		return err
	}
	at := 0
	for _, e := range x.work.Entries {
		at += copy(e.Output, result[at:])
	}
	return nil
}

// fillBlocks writes this rank's contribution to a reducescatter into buf. The contribution consists of one
// block for each rank, which holds that rank's rows of every tensor.
func (m *machine) fillBlocks(w *Work, s scaling, buf []byte, inPlace bool) error {
	if w.Absent {
		return neutral(w.Grant.Responses[0].Op, s.dt, buf)
	}
	if !inPlace {
		at := 0
		for i := range m.set.Ranks {
			for t, e := range w.Entries {
				at += copy(buf[at:], block(w.Grant.Responses[t], e.Input, len(m.set.Ranks), i))
			}
		}
	}
	return s.before(buf)
}

// block returns the rows that the rank at position i of n ranks receives in a reducescatter. whole is the
// complete tensor.
func block(r *message.Response, whole []byte, n, i int) []byte {
	from, rows := tensor.Rows(r.Shape[0], n, i)
	row := rowBytes(r)
	return whole[from*row : (from+rows)*row]
}

// rowBytes returns the number of bytes of a row. A row consists of all elements at one index of the first
// dimension.
func rowBytes(r *message.Response) int64 {
	n, err := r.RowElems()
	if err != nil {
		return 0 // cannot happen, because the decoder has checked the shape
	}
	return n * int64(r.DType.Size())
}

func sum(counts []int64) (total int64) {
	for _, n := range counts {
		total += n
	}
	return total
}
