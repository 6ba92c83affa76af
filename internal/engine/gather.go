package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/ops"
)

// allgather gathers one tensor in its output, several in the fusion buffer, which then has a block from each rank, and in
// it that rank's rows of each tensor.
func (l *lane) allgather(ctx context.Context, backend ops.Backend, w *work) error {
	out, counts, err := l.gathered(w)
	if err != nil {
		return err
	}
	gathered := out != nil
	if !gathered {
		out = l.scratch.fused.Bytes(int(sum(counts)))
	}
	w.enter(packing)
	l.contribute(w, out, counts)
	w.enter(exchanging)
	if err := backend.Allgather(ctx, w.grant.Algorithm, out, counts); err != nil || gathered {
		return err
	}
	w.enter(unpacking)
	l.ungather(w, out)
	return nil
}

// startAllgather starts an allgather of one tensor.
func (l *lane) startAllgather(backend ops.Starter, w *work) (started bool, err error) {
	out, counts, err := l.gathered(w)
	if err != nil || out == nil {
		return false, err
	}
	w.enter(packing)
	l.contribute(w, out, counts)
	w.enter(exchanging)
	return backend.StartAllgather(w.grant.Algorithm, out, counts)
}

// gathered is where the result of an allgather goes, nil if that is not one tensor's output, and how many bytes each rank
// contributes.
func (l *lane) gathered(w *work) (out []byte, counts []int64, err error) {
	counts = l.scratch.counts[:0]
	for i := range l.set.Ranks {
		var n int64
		for _, r := range w.grant.Responses {
			n += r.FirstDims[i] * rowBytes(r)
		}
		counts = append(counts, n)
	}
	l.scratch.counts = counts
	if err := l.checkResult(message.Allgather, sum(counts)); err != nil {
		return nil, nil, err
	}
	if len(w.entries) == 1 {
		out = output(w.entries[0], int(sum(counts)))
	}
	return out, counts, nil
}

// contribute writes this rank's part of an allgather.
func (l *lane) contribute(w *work, out []byte, counts []int64) {
	at := sum(counts[:l.me])
	for _, e := range w.entries {
		copyUnlessSame(out[at:], e.Input)
		at += int64(len(e.Input))
	}
}

// ungather copies gathered blocks to the outputs of w.
func (l *lane) ungather(w *work, from []byte) {
	outs := make([][]byte, len(w.entries))
	for t, e := range w.entries {
		numBytes := int(w.grant.Responses[t].NumBytes())
		if outs[t] = output(e, numBytes); outs[t] == nil && numBytes != len(e.Output) {
			refuseSize(w, t, numBytes)
		}
	}
	for i := range l.set.Ranks {
		for t := range outs {
			r := w.grant.Responses[t]
			n := r.FirstDims[i] * rowBytes(r)
			if outs[t] != nil {
				outs[t] = outs[t][copy(outs[t], from[:n]):]
			}
			from = from[n:]
		}
	}
}

// broadcast sends one tensor from where the root has it, several from the fusion buffer.
func (l *lane) broadcast(ctx context.Context, backend ops.Backend, w *work) error {
	root := l.root(w)
	if len(w.entries) == 1 {
		w.enter(exchanging)
		return backend.Broadcast(ctx, w.grant.Algorithm, root, l.offer(w))
	}
	buf := l.scratch.fused.Bytes(int(total(w)))
	w.enter(packing)
	if root == l.me {
		at := 0
		for _, e := range w.entries {
			at += copy(buf[at:], e.Input)
		}
	}
	w.enter(exchanging)
	if err := backend.Broadcast(ctx, w.grant.Algorithm, root, buf); err != nil {
		return err
	}
	w.enter(unpacking)
	for _, e := range w.entries {
		buf = buf[copy(e.Output, buf):]
	}
	return nil
}

// root is the position of a broadcast's root.
func (l *lane) root(w *work) int { return slices.Index(l.set.Ranks, w.grant.Responses[0].Root) }

// offer is the buffer of a broadcast of one tensor, in which the root has it.
func (l *lane) offer(w *work) []byte {
	e := w.entries[0]
	if l.root(w) == l.me {
		copyUnlessSame(e.Output, e.Input)
	}
	return e.Output
}

// splitBytes is the size of a number of rows on the wire.
const splitBytes = 8

// alltoall exchanges the rows of one tensor. How many go where only their owners know until now.
func (l *lane) alltoall(ctx context.Context, backend ops.Backend, w *work) error {
	r := w.grant.Responses[0]
	row := rowBytes(r)
	if row == 0 {
		return l.exchangeSplits(ctx, backend, w)
	}
	counts := l.scratch.counts[:0]
	var in []byte
	for i := range l.set.Ranks {
		var n int64
		if !w.absent {
			n = w.entries[0].Splits[i] * row
		}
		counts = append(counts, n)
	}
	l.scratch.counts = counts
	if !w.absent {
		in = w.entries[0].Input[:sum(counts)]
	}
	direct := false // the result is received where it belongs
	var out []byte  // or here
	w.enter(exchanging)
	err := backend.Alltoall(ctx, w.grant.Algorithm, in, counts, func(counts []int64) ([]byte, error) {
		numBytes := sum(counts)
		if err := l.checkResult(message.Alltoall, numBytes); err != nil {
			return nil, fmt.Errorf("alltoall %q: ranks %v give %v bytes: %w", r.Name, l.set.Ranks, counts, err)
		}
		for i, n := range counts {
			if n%row != 0 {
				return nil, fmt.Errorf("alltoall %q: rank %d gives %d bytes, want whole rows of %d", r.Name, l.set.Ranks[i], n, row)
			}
			if !w.absent {
				w.entries[0].Received = append(w.entries[0].Received, n/row)
			}
		}
		// In place the result replaces what is still being sent.
		if !w.absent && !w.entries[0].InPlace {
			if result := output(w.entries[0], int(numBytes)); result != nil {
				direct = true
				return result, nil
			}
		}
		out = l.scratch.fused.Bytes(int(numBytes))
		return out, nil
	})
	if err != nil || direct || w.absent {
		return err
	}
	w.enter(unpacking)
	if e := w.entries[0]; len(e.Output) == len(out) {
		copy(e.Output, out)
	} else {
		refuseSize(w, 0, len(out))
	}
	return nil
}

// exchangeSplits is an alltoall of rows without elements: all there is to tell is how many.
func (l *lane) exchangeSplits(ctx context.Context, backend ops.Backend, w *work) error {
	var in []byte
	counts := make([]int64, len(l.set.Ranks))
	for i := range counts {
		counts[i] = splitBytes
		var rows int64
		if !w.absent {
			rows = w.entries[0].Splits[i]
		}
		in = binary.LittleEndian.AppendUint64(in, uint64(rows))
	}
	out := make([]byte, len(in))
	w.enter(exchanging)
	err := backend.Alltoall(ctx, w.grant.Algorithm, in, counts, func(got []int64) ([]byte, error) {
		if !slices.Equal(got, counts) {
			return nil, fmt.Errorf("got splits of %v bytes, want %d from each rank", got, splitBytes)
		}
		return out, nil
	})
	if err != nil || w.absent {
		return err
	}
	e := w.entries[0]
	for ; len(out) > 0; out = out[splitBytes:] {
		e.Received = append(e.Received, int64(binary.LittleEndian.Uint64(out)))
	}
	if !e.InPlace {
		output(e, 0)
	}
	if len(e.Output) != 0 {
		refuseSize(w, 0, 0)
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
