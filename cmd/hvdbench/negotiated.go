package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/hvd/cuda"
	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// negotiated implements the interface path with package hvd, which negotiates each operation.
type negotiated struct{ *hvd.Engine }

func (negotiated) String() string { return "negotiated" }

func (p negotiated) prepare(s opSpec, name string, buf []byte) (*action, error) {
	if s.kind == message.Barrier {
		opts := []hvd.BarrierOption{hvd.On(p.Engine), hvd.Name(name)}
		return &action{
			run: func(ctx context.Context) error { return hvd.Barrier(ctx, opts...) },
			ran: func() (ways, error) { return nil, nil },
		}, nil
	}
	t, ok := typed[s.dt]
	if !ok {
		return nil, errUnsupported{fmt.Sprintf("package hvd has no element type %v", s.dt)}
	}
	a, err := t.prepare(p.Engine, s, name, buf)
	if err == nil {
		a.ran = func() (ways, error) { return p.ran(name) }
	}
	return a, err
}

// ran returns the ways in which this rank has run operations on tensors whose names begin with prefix. It
// reads the flight recorder, which has the last 10000 tensors.
func (p negotiated) ran(prefix string) (ran ways, err error) {
	text, err := p.Dump()
	if err != nil {
		return nil, err
	}
	var dump analysis.Snapshot
	if err := json.Unmarshal(text, &dump); err != nil {
		return nil, fmt.Errorf("read the flight recorder: %w", err)
	}
	for i := range dump.Operations {
		o := &dump.Operations[i]
		if strings.HasPrefix(o.Name, prefix) {
			way := ""
			if o.Backend != message.NoBackend {
				way = o.Backend.String()
			}
			if o.Algorithm != message.NoAlgorithm {
				way += " " + o.Algorithm.String()
			}
			ran = ran.add(way)
		}
	}
	return ran, nil
}

func (p negotiated) step(mode stepMode, dt tensor.DType, tensors,
	flats []named) (*action, error) {
	t, ok := typed[dt]
	if !ok {
		return nil, errUnsupported{fmt.Sprintf("package hvd has no element type %v", dt)}
	}
	// Steps in other modes and on other types have tensors with the same names.
	prefix := fmt.Sprintf("hvdbench.%v.%v.", dt, mode)
	run, err := t.step(p.Engine, mode, prefix, tensors, flats)
	return &action{run: run, ran: func() (ways, error) { return p.ran(prefix) }}, err
}

// deviceOperation describes the tensors of an allreduce on a device: their addresses and their size in
// bytes, and the number and a cudaStream_t of the device.
type deviceOperation struct {
	input, output    uintptr
	numBytes, device int
	stream           uintptr
}

// ofType holds the functions that prepare operations and steps of package hvd for one element type.
type ofType struct {
	// onDevice returns a function that runs the allreduce s on a device.
	onDevice func(e *hvd.Engine, s opSpec, name string, o deviceOperation) func(ctx context.Context) error
	prepare  func(e *hvd.Engine, s opSpec, name string, buf []byte) (*action, error)
	step     func(e *hvd.Engine, mode stepMode, prefix string, tensors,
		flats []named) (func(ctx context.Context) error, error)
}

func forType[T tensor.Element]() ofType { return ofType{deviceTyped[T], prepareTyped[T], stepTyped[T]} }

// deviceTyped implements ofType.onDevice for elements of type T.
func deviceTyped[T tensor.Element](e *hvd.Engine, s opSpec, name string,
	o deviceOperation) func(ctx context.Context) error {
	in := cuda.Buffer[T]{Pointer: o.input, Len: o.numBytes / s.dt.Size(), Device: o.device,
		Stream: o.stream}
	out := in
	out.Pointer = o.output
	opts := []cuda.AllreduceOption{hvd.On(e), hvd.Name(name), hvd.Op(hvd.ReduceOp(s.op))}
	return func(ctx context.Context) error { return cuda.Allreduce(ctx, in, out, opts...) }
}

var typed = map[tensor.DType]ofType{
	tensor.Uint8: forType[uint8](), tensor.Int8: forType[int8](),
	tensor.Uint16: forType[uint16](), tensor.Int16: forType[int16](),
	tensor.Int32: forType[int32](), tensor.Int64: forType[int64](),
	tensor.Float16: forType[half.Float16](), tensor.BFloat16: forType[half.BFloat16](),
	tensor.Float32: forType[float32](), tensor.Float64: forType[float64](),
	tensor.Bool: forType[bool](),
}

// prepareTyped prepares an operation on elements of type T.
func prepareTyped[T tensor.Element](e *hvd.Engine, s opSpec, name string, buf []byte) (*action, error) {
	x := tensor.View[T](buf)
	allreduces := []hvd.AllreduceOption{hvd.On(e), hvd.Name(name), hvd.Op(hvd.ReduceOp(s.op))}
	reduces := []hvd.ReduceOption{hvd.On(e), hvd.Name(name), hvd.Op(hvd.ReduceOp(s.op))}
	moves := []hvd.MoveOption{hvd.On(e), hvd.Name(name)}
	if s.inPlace {
		allreduces, reduces = append(allreduces, hvd.InPlace()), append(reduces, hvd.InPlace())
		moves = append(moves, hvd.InPlace())
	}
	var out []T
	a := &action{result: func() []byte { return tensor.Bytes(out) }}
	switch s.kind {
	case message.Allreduce:
		a.run = func(ctx context.Context) (err error) {
			out, err = hvd.Allreduce(ctx, x, allreduces...)
			return err
		}
	case message.Allgather:
		a.run = func(ctx context.Context) (err error) {
			out, err = hvd.Allgather(ctx, x, moves...)
			return err
		}
	case message.Broadcast:
		a.run = func(ctx context.Context) (err error) {
			out, err = hvd.Broadcast(ctx, x, s.root, moves...)
			return err
		}
	case message.Reducescatter:
		a.run = func(ctx context.Context) (err error) {
			out, err = hvd.Reducescatter(ctx, x, reduces...)
			return err
		}
	case message.Alltoall:
		a.run = func(ctx context.Context) (err error) {
			out, _, err = hvd.Alltoall(ctx, x, nil, moves...)
			return err
		}
	default:
		return nil, errUnsupported{fmt.Sprintf("hvdbench does not measure %v", s.kind)}
	}
	return a, nil
}

// stepTyped prepares a step, in any mode, that reduces tensors with elements of type T. The names of the
// operations begin with prefix.
func stepTyped[T tensor.Element](e *hvd.Engine, mode stepMode, prefix string, tensors,
	flats []named) (func(ctx context.Context) error, error) {
	xs := make([][]T, len(tensors))
	opts := make([][]hvd.AllreduceOption, len(tensors))
	for i, t := range tensors {
		xs[i] = tensor.View[T](t.buf)
		opts[i] = []hvd.AllreduceOption{hvd.On(e), hvd.Name(prefix + t.name), hvd.Op(hvd.Sum), hvd.InPlace()}
	}
	switch mode {
	case perTensor:
		return func(ctx context.Context) error {
			for i, x := range xs {
				if _, err := hvd.Allreduce(ctx, x, opts[i]...); err != nil {
					return err
				}
			}
			return nil
		}, nil
	case asynchronous:
		handles := make([]*hvd.Handle[[]T], len(xs))
		return func(ctx context.Context) (err error) {
			for i, x := range xs {
				if handles[i], err = hvd.AllreduceAsync(x, opts[i]...); err != nil {
					return err
				}
			}
			for _, h := range handles {
				if _, err := h.Wait(ctx); err != nil {
					return err
				}
			}
			return nil
		}, nil
	case bucketed:
		return stepBuckets[T](e, prefix, tensors, flats)
	case grouped:
		group := []hvd.GroupedAllreduceOption{hvd.On(e), hvd.Name(prefix + "group"), hvd.Op(hvd.Sum),
			hvd.InPlace()}
		return func(ctx context.Context) error {
			_, err := hvd.GroupedAllreduce(ctx, xs, group...)
			return err
		}, nil
	}
	return nil, errUnsupported{fmt.Sprintf("package hvd has no mode %v", mode)}
}

// stepBuckets prepares a step that reduces tensors in buckets. The step copies the tensors into the buckets
// and starts the reduction of each bucket when the bucket is full. Then it waits for the buckets in order and
// copies their contents back.
func stepBuckets[T tensor.Element](e *hvd.Engine, prefix string, tensors,
	flats []named) (func(ctx context.Context) error, error) {
	reduce := make([]*hvd.Handle[[]T], len(flats))
	xs := make([][]T, len(flats))
	opts := make([][]hvd.AllreduceOption, len(flats))
	for b, f := range flats {
		xs[b] = tensor.View[T](f.buf)
		opts[b] = []hvd.AllreduceOption{hvd.On(e), hvd.Name(prefix + f.name), hvd.Op(hvd.Sum), hvd.InPlace()}
	}
	first := buckets(tensors)
	return func(ctx context.Context) (err error) {
		for b, f := range flats {
			at := 0
			for _, t := range tensors[first[b]:first[b+1]] {
				at += copy(f.buf[at:], t.buf)
			}
			if reduce[b], err = hvd.AllreduceAsync(xs[b], opts[b]...); err != nil {
				return err
			}
		}
		for b, f := range flats {
			if _, err := reduce[b].Wait(ctx); err != nil {
				return err
			}
			at := 0
			for _, t := range tensors[first[b]:first[b+1]] {
				at += copy(t.buf, f.buf[at:])
			}
		}
		return nil
	}, nil
}
