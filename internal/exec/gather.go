package exec

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/ops"
)

// startAllgather prepares an allgather. A single tensor is gathered directly in its output. Several tensors
// are gathered in the fusion buffer, which has a block for each rank. The block contains that rank's rows of
// every tensor.
func (m *machine) startAllgather() error {
	x := &m.execution
	out, counts, err := m.gathered(x.work)
	if err != nil {
		return err
	}
	if out == nil {
		out = m.scratch.fused.Bytes(int(sum(counts)))
		x.buf = out
	}
	x.work.enter(ops.Packing)
	m.contribute(x.work, out, counts)
	x.op.Buf, x.op.Counts = out, counts
	return nil
}

// gathered returns the buffer for the result of an allgather and the number of bytes that each rank
// contributes. If there is a single tensor and its output has the right size, the buffer is this output.
// Otherwise the buffer is nil.
func (m *machine) gathered(w *Work) (out []byte, counts []int64, err error) {
	counts = m.scratch.counts[:0]
	for i := range m.set.Ranks {
		var n int64
		for _, r := range w.Grant.Responses {
			n += r.FirstDims[i] * rowBytes(r)
		}
		counts = append(counts, n)
	}
	m.scratch.counts = counts
	if err := m.cfg.checkResult(message.Allgather, w.OnDevices(), sum(counts)); err != nil {
		return nil, nil, err
	}
	if len(w.Entries) == 1 {
		out = output(w.Entries[0], int(sum(counts)))
	}
	return out, counts, nil
}

// contribute copies this rank's inputs into this rank's block of the buffer out of an allgather.
func (m *machine) contribute(w *Work, out []byte, counts []int64) {
	at := sum(counts[:m.me])
	for _, e := range w.Entries {
		copyUnlessSame(out[at:], e.Input)
		at += int64(len(e.Input))
	}
}

// unpackAllgather copies the gathered blocks to the outputs of w. If the size of an output differs from the
// size of its result, unpackAllgather refuses the tensor.
func (m *machine) unpackAllgather(w *Work, from []byte) {
	outs := make([][]byte, len(w.Entries))
	for t, e := range w.Entries {
		numBytes := int(w.Grant.Responses[t].NumBytes())
		outs[t] = output(e, numBytes)
		if outs[t] == nil && numBytes != len(e.Output) {
			refuseSize(w, t, numBytes)
		}
	}
	for i := range m.set.Ranks {
		for t := range outs {
			r := w.Grant.Responses[t]
			n := r.FirstDims[i] * rowBytes(r)
			if outs[t] != nil {
				outs[t] = outs[t][copy(outs[t], from[:n]):]
			}
			from = from[n:]
		}
	}
}

// startBroadcast prepares a broadcast. A single tensor is broadcast from the output of the root to the
// outputs of the other ranks. Several tensors are broadcast from fusion buffer to fusion buffer.
func (m *machine) startBroadcast() {
	x := &m.execution
	w := x.work
	if len(w.Entries) == 1 {
		x.op.Buf = m.broadcastBuffer(w)
		return
	}
	x.buf = m.scratch.fused.Bytes(int(total(w)))
	x.op.Buf = x.buf
	w.enter(ops.Packing)
	if x.op.Root == m.me {
		at := 0
		for _, e := range w.Entries {
			at += copy(x.buf[at:], e.Input)
		}
	}
}

// root returns the position of the operation's root rank in the process set.
func (m *machine) root(w *Work) int { return slices.Index(m.set.Ranks, w.Grant.Responses[0].Root) }

// broadcastBuffer returns the buffer for a broadcast of one tensor, which is the output of the tensor. At the
// root it first copies the input to the output.
func (m *machine) broadcastBuffer(w *Work) []byte {
	e := w.Entries[0]
	if m.execution.op.Root == m.me {
		copyUnlessSame(e.Output, e.Input)
	}
	return e.Output
}

// splitBytes is the number of bytes of an encoded row count.
const splitBytes = 8

// startAlltoall prepares an alltoall, a gather or a scatter of one tensor. Ranks learn only during the
// exchange how many rows they receive. If the rows have no elements, the ranks exchange only the row counts.
func (m *machine) startAlltoall() {
	x := &m.execution
	w := x.work
	r := w.Grant.Responses[0]
	row := rowBytes(r)
	counts := m.scratch.counts[:0]
	for i := range m.set.Ranks {
		if !x.op.Sends(m.me, i) {
			counts = append(counts, 0)
			continue
		}
		var rows int64
		if !w.Absent {
			rows = w.Entries[0].Splits[i]
		}
		if row == 0 {
			x.op.Buf = binary.LittleEndian.AppendUint64(x.op.Buf, uint64(rows))
			counts = append(counts, splitBytes)
		} else {
			counts = append(counts, rows*row)
		}
	}
	m.scratch.counts = counts
	x.op.Counts = counts
	if row > 0 && !w.Absent {
		x.op.Buf = w.Entries[0].Input[:sum(counts)]
	}
	x.op.Allocate = func(got []int64) ([]byte, error) {
		if row == 0 {
			return m.receiveSplits(got)
		}
		b, err := m.receiveRows(r, row, got)
		if w.OnDevices() {
			x.device.Ready = m.ready(w) // also for an output that was allocated just now
		}
		return b, err
	}
}

// receiveRows returns the buffer for the rows that this rank receives from other ranks, and records how many
// rows come from each rank. The slice counts holds the number of bytes that come from each rank.
func (m *machine) receiveRows(r *message.Response, row int64, counts []int64) ([]byte, error) {
	x := &m.execution
	w := x.work
	numBytes := sum(counts)
	if err := m.cfg.checkResult(r.Kind, w.OnDevices(), numBytes); err != nil {
		return nil, fmt.Errorf("%v %q: ranks %v send %v bytes: %w", r.Kind, r.Name, m.set.Ranks, counts, err)
	}
	for i, n := range counts {
		if n%row != 0 {
			return nil, fmt.Errorf(
				"%v %q: got %d bytes from rank %d, want a multiple of the row size of %d bytes", r.Kind,
				r.Name, n, m.set.Ranks[i], row)
		}
		if !w.Absent {
			w.Entries[0].Received = append(w.Entries[0].Received, n/row)
		}
	}
	// An operation in place cannot receive into its output, because that would overwrite rows that have yet
	// to be sent.
	if !w.Absent && !w.Entries[0].InPlace {
		if result := output(w.Entries[0], int(numBytes)); result != nil {
			return result, nil
		}
	}
	if w.OnDevices() {
		if !w.Absent && len(w.Entries[0].Output) != int(numBytes) {
			refuseSize(w, 0, int(numBytes))
		}
		return nil, nil // the backend uses memory of its own
	}
	x.buf = m.scratch.fused.Bytes(int(numBytes))
	return x.buf, nil
}

// receiveSplits returns the buffer for the row counts if the rows have no elements. The slice counts holds
// the number of bytes that come from each rank.
func (m *machine) receiveSplits(counts []int64) ([]byte, error) {
	x := &m.execution
	for i, n := range counts {
		if x.op.Sends(i, m.me) != (n == splitBytes) || n != 0 && n != splitBytes {
			r := x.work.Grant.Responses[0]
			return nil, fmt.Errorf(
				"%v %q: got row counts of %v bytes, want %d bytes from each rank that sends rows", r.Kind,
				r.Name, counts, splitBytes)
		}
	}
	x.buf = make([]byte, sum(counts))
	return x.buf, nil
}

func (m *machine) unpackAlltoall() {
	x := &m.execution
	e := x.work.Entries[0]
	out := x.buf
	if rowBytes(x.work.Grant.Responses[0]) == 0 {
		for i := range m.set.Ranks {
			var rows int64
			if x.op.Sends(i, m.me) {
				rows, out = int64(binary.LittleEndian.Uint64(out)), out[splitBytes:]
			}
			e.Received = append(e.Received, rows)
		}
		if !e.InPlace {
			output(e, 0)
		}
	}
	if len(e.Output) == len(out) {
		copy(e.Output, out)
	} else {
		refuseSize(x.work, 0, len(out))
	}
}

// total returns the number of bytes of the tensors of w in the element types in which they are sent.
func total(w *Work) (numBytes int64) {
	for _, r := range w.Grant.Responses {
		numBytes += r.WireBytes()
	}
	return numBytes
}
