package ps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/tensor"
)

// KVWorker pushes values to the servers and pulls values from them. Its methods are safe for concurrent use.
//
// Keys must be sorted and unique. A list of keys is sent to a server once; after that, requests with the same
// list only name it. Each key has the same number of values, len(vals)/len(keys), unless the option Lens says
// otherwise.
//
// Push, Pull and PushPull wait until all servers have answered. If ctx ends meanwhile, they return its error,
// and the request goes on. PushAsync, PullAsync and PushPullAsync return a Request, with which the program
// waits later, so that several requests are in flight together. If ctx ends while a request waits for room in
// the queue to a server, the request fails. Parts of it may have been sent to other servers.
type KVWorker[T Value] struct {
	*SimpleApp
	slicer Slicer
	lists  keyLists
}

// NewKVWorker makes the worker of an app at node n, whose role is Worker, in a job with servers. The worker
// is a SimpleApp too, for commands to the servers.
func NewKVWorker[T Value](n *Node, opts ...WorkerOption) (*KVWorker[T], error) {
	if n.Role() != Worker {
		return nil, &UsageError{fmt.Errorf("ps: new KVWorker: this process is a %s", n.Role())}
	}
	if n.NumServers() == 0 {
		return nil, &UsageError{errors.New("ps: new KVWorker: the job has no servers: DMLC_NUM_SERVER is 0")}
	}
	o := appOptions{slicer: rangeSlicer}
	for _, opt := range opts {
		opt.setApp(&o)
	}
	a, err := newApp(n, &o)
	w := &KVWorker[T]{SimpleApp: a, slicer: o.slicer}
	if err == nil {
		err = a.register(func(from van.Process, m *van.Message) {
			n.refuse(from, m, fmt.Errorf("app %d is a worker here and handles no push or pull", o.app))
		})
	}
	if err != nil {
		return nil, fmt.Errorf("ps: new KVWorker of app %d: %w", o.app, err)
	}
	return w, nil
}

// Push sends values to the servers, and waits until they have handled them.
func (w *KVWorker[T]) Push(ctx context.Context, keys []uint64, vals []T, opts ...PushOption) error {
	return await(ctx)(w.PushAsync(ctx, keys, vals, opts...))
}

// PushAsync is like Push, but does not wait. It copies vals unless the option ZeroCopy is given, so the
// caller may change vals when PushAsync returns.
func (w *KVWorker[T]) PushAsync(ctx context.Context, keys []uint64, vals []T, opts ...PushOption) (*Request,
	error) {
	op := &operation[T]{keys: keys, vals: vals, push: true}
	setAll(&op.options, opts)
	return w.start(ctx, op)
}

// Pull gets values from the servers, and stores them in *out, in the order of the keys. If *out is not empty
// before, its length must be the number of values, and the values are written to its memory. Otherwise Pull
// allocates memory unless the capacity suffices. If the request fails, that memory may have any content. If
// ctx ends first, the request goes on, so the caller must not use *out any more.
func (w *KVWorker[T]) Pull(ctx context.Context, keys []uint64, out *[]T, opts ...PullOption) error {
	return await(ctx)(w.PullAsync(ctx, keys, out, opts...))
}

// PullAsync is like Pull, but does not wait. The caller must not use *out before the request has completed.
func (w *KVWorker[T]) PullAsync(ctx context.Context, keys []uint64, out *[]T, opts ...PullOption) (*Request,
	error) {
	op := &operation[T]{keys: keys, out: out, pull: true}
	setAll(&op.options, opts)
	return w.start(ctx, op)
}

// PushPull pushes values and pulls the values of the same keys after that. out is as in Pull.
func (w *KVWorker[T]) PushPull(ctx context.Context, keys []uint64, vals []T, out *[]T,
	opts ...PushPullOption) error {
	return await(ctx)(w.PushPullAsync(ctx, keys, vals, out, opts...))
}

// PushPullAsync is like PushPull, but does not wait. It copies vals unless the option ZeroCopy is given.
func (w *KVWorker[T]) PushPullAsync(ctx context.Context, keys []uint64, vals []T, out *[]T,
	opts ...PushPullOption) (*Request, error) {
	op := &operation[T]{keys: keys, vals: vals, out: out, push: true, pull: true}
	setAll(&op.options, opts)
	return w.start(ctx, op)
}

// await returns a function that waits for a request.
func await(ctx context.Context) func(*Request, error) error {
	return func(r *Request, err error) error {
		if err != nil {
			return err
		}
		return r.Wait(ctx)
	}
}

// operation is a push or pull, with its arguments. It implements subject.
type operation[T Value] struct {
	Request
	w          *KVWorker[T]
	keys       []uint64
	vals       []T
	out        *[]T
	push, pull bool
	clock      int64 // number of the iteration plus one; 0 in asynchronous mode
	list       *keyList
	options
	first [1]part // memory for the parts, if there is only one
}

func (op *operation[T]) String() string {
	return fmt.Sprintf("%s of %d keys", kindOf(op.push, op.pull), len(op.keys))
}

// start begins an operation.
func (w *KVWorker[T]) start(ctx context.Context, op *operation[T]) (*Request, error) {
	r := &op.Request
	op.w, r.of, r.callback = w, op, op.options.callback
	list, err := w.lists.get(op.keys, func(keys []uint64) ([]int, error) {
		return sliced(w.slicer, keys, w.c.po.ServerKeyRanges())
	})
	if err == nil {
		err = op.checkValues()
	}
	if err != nil {
		return nil, &UsageError{fmt.Errorf("ps: %s: %w", op, err)}
	}
	op.list = list
	clock := &w.c.po.clocks[w.c.key.id]
	now, err := clock.beginRequest()
	if err != nil {
		return nil, fmt.Errorf("ps: %s: %w", op, err)
	}
	if w.c.po.synchronous() {
		op.clock = now + 1
	}
	r.event = w.c.po.observer.beginEvent(kindOf(op.push, op.pull))
	replicas := w.c.po.set.PS.Replicas > 0
	if replicas {
		op.keep()
	}
	r.parts = op.first[:0]
	at := 0 // position in vals
	for rank := range len(list.bounds) - 1 {
		from, to := list.bounds[rank], list.bounds[rank+1]
		if from == to {
			continue
		}
		n := op.numVals(from, to)
		begin, first := at, van.ServerID(rank)
		server := part{to: first, home: int32(rank + 1)}
		if replicas {
			server.to = cmp.Or(w.c.po.route(rank, int(w.c.po.primaries[rank].Load())), first)
			server.reading = new(atomic.Int32)
			server.again = func(id int) *van.Message {
				return op.makeMessage(id, from, to, begin, begin+n, true)
			}
		}
		server.m = op.makeMessage(server.to, from, to, begin, begin+n,
			w.lists.first(list, rank, server.to != first))
		r.parts = append(r.parts, server)
		at += n
	}
	return r, w.c.start(ctx, r)
}

// keep copies the arguments, from which messages may have to be made again later. Values that are not copied
// belong to the request until it has completed.
func (op *operation[T]) keep() {
	op.lens = slices.Clone(op.lens)
	if !op.zeroCopy {
		op.vals, op.zeroCopy = slices.Clone(op.vals), true
	}
}

func (op *operation[T]) keysOf(rank int) []uint64 {
	return op.list.keys[op.list.bounds[rank]:op.list.bounds[rank+1]]
}

func (op *operation[T]) completed(err error) {
	op.w.c.po.clocks[op.w.c.key.id].endRequest(&op.Request, op.push, err)
	op.w.c.po.observer.endEvent(op.event, op.outcome(&op.Request, err))
}

func (op *operation[T]) finish(parts []part) error {
	if !op.pull {
		return nil
	}
	return op.assemble(op.list, parts)
}

// outcome describes the operation, whose request has completed.
func (op *operation[T]) outcome(r *Request, err error) outcome {
	vals := op.vals
	if op.pull && err == nil {
		vals = *op.out
	}
	out := outcome{dtype: tensor.Of[T](), keys: len(op.keys), bytes: len(tensor.Bytes(vals)), peer: -1,
		accepted: r.accepted, err: err}
	if len(r.parts) == 1 {
		out.peer = r.c.po.process(r.parts[0].to)
	}
	return out
}

// sliced calls a Slicer and checks its result.
func sliced(s Slicer, keys []uint64, ranges []Range) ([]int, error) {
	bounds, err := s(keys, ranges)
	if err != nil {
		return nil, err
	}
	ok := len(bounds) == len(ranges)+1 && bounds[0] == 0 && bounds[len(bounds)-1] == len(keys)
	for i := 1; ok && i < len(bounds); i++ {
		ok = bounds[i] >= bounds[i-1]
	}
	if !ok {
		return nil, fmt.Errorf("the slicer returned the bounds %v for %d keys and %d servers", bounds,
			len(keys),
			len(ranges))
	}
	return bounds, nil
}

// checkValues returns an error if the values do not fit the keys.
func (op *operation[T]) checkValues() error {
	if op.pull && op.out == nil {
		return errors.New("the pointer to the slice for the values is nil")
	}
	if !op.push {
		return nil
	}
	if op.lens == nil {
		if len(op.keys) == 0 && len(op.vals) > 0 || len(op.keys) > 0 && len(op.vals)%len(op.keys) != 0 {
			return fmt.Errorf("%d values do not fit %d keys: want a multiple, or the option Lens",
				len(op.vals),
				len(op.keys))
		}
		return nil
	}
	sum := 0
	for i, n := range op.lens {
		if n < 0 {
			return fmt.Errorf("key %d has %d values", i, n)
		}
		sum += int(n)
	}
	if len(op.lens) != len(op.keys) || sum != len(op.vals) {
		return fmt.Errorf("Lens gives %d values for %d keys, want %d and %d", sum, len(op.lens), len(op.vals),
			len(op.keys))
	}
	return nil
}

// numVals returns the number of values of the keys from the index from to the index to.
func (op *operation[T]) numVals(from, to int) (n int) {
	if op.lens == nil {
		return len(op.vals) / max(len(op.keys), 1) * (to - from)
	}
	for _, l := range op.lens[from:to] {
		n += int(l)
	}
	return n
}

// makeMessage returns the message to the server to for the keys with the indices first and last, whose values
// have the indices begin and end. Without keys, it only names them.
func (op *operation[T]) makeMessage(to, first, last, begin, end int, withKeys bool) *van.Message {
	m := van.Make()
	h := m.Header
	h.Head, h.Push, h.Pull, h.Priority = op.cmd, op.push, op.pull, op.priority
	h.KeyList, h.Clock = op.list.number, op.clock
	var keys, vals, lens []byte
	if withKeys {
		keys = bytesOfKeys(op.list.keys[first:last])
	}
	if op.push {
		vals = tensor.Bytes(op.vals[begin:end])
	}
	if op.lens != nil {
		lens = tensor.Bytes(op.lens[first:last])
	}
	m.SetTypes(pspb.DataType_UINT64, wireTypes[tensor.Of[T]()], pspb.DataType_INT32)
	if op.zeroCopy {
		m.SetData(keys, vals, slices.Clone(lens))
		return m
	}
	op.w.c.po.van.Allocate(to, m, len(keys), len(vals), len(lens))
	copy(m.Data[0], keys)
	op.w.c.po.copyValues(m.Data[1], vals)
	copy(m.Data[2], lens)
	return m
}

// assemble writes the values of the responses to *op.out. The parts are in the order of the keys.
func (op *operation[T]) assemble(list *keyList, parts []part) error {
	total := 0
	for i := range parts {
		m := parts[i].response
		if len(m.Data) != 2 || m.Header.Frames[0].Type != wireTypes[tensor.Of[T]()] ||
			len(m.Data[0])%tensor.Of[T]().Size() != 0 {
			return &RemoteError{NodeID(parts[i].to), "malformed response to a pull"}
		}
		total += len(m.Data[0]) / tensor.Of[T]().Size()
	}
	out := *op.out
	switch {
	case len(out) == 0 && cap(out) >= total:
		out = out[:total]
	case len(out) == 0:
		out = make([]T, total)
	case len(out) != total:
		return &UsageError{fmt.Errorf("the keys have %d values, but the slice for them has the length %d",
			total, len(out))}
	}
	at := 0
	for i := range parts {
		at += copy(out[at:], tensor.View[T](parts[i].response.Data[0]))
	}
	for i := range parts { // a push may have changed what was copied if a connection has ended
		if err := parts[i].response.Intact(); err != nil {
			return err
		}
	}
	*op.out = out
	if op.outLens == nil {
		return nil
	}
	return op.assembleLens(list, parts)
}

// assembleLens writes the number of values of each key to *op.outLens.
func (op *operation[T]) assembleLens(list *keyList, parts []part) error {
	all := make([]int32, 0, len(list.keys))
	for i := range parts {
		rank := parts[i].home - 1
		n := list.bounds[rank+1] - list.bounds[rank]
		lens := tensor.View[int32](parts[i].response.Data[1])
		if vals := len(parts[i].response.Data[0]) / tensor.Of[T]().Size(); len(lens) == 0 && vals%n == 0 {
			for range n {
				all = append(all, int32(vals/n))
			}
			continue
		}
		if len(lens) != n {
			return &RemoteError{NodeID(parts[i].to), "malformed response to a pull"}
		}
		all = append(all, lens...)
	}
	*op.outLens = all
	return nil
}
