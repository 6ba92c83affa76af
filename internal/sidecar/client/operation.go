package client

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/tensorqueue"
)

const (
	// maxCalls is the number of operations that this client has in flight at most. The rest of MaxInFlight is
	// for requests.
	maxCalls = wire.MaxInFlight - 1024
	// firstSweep is the number of operations in flight at which those that are done are ended first, although
	// nobody waits for them.
	firstSweep = 1024
)

// errUnexpected is the error of an answer that does not fit its operation.
var errUnexpected = fmt.Errorf("%w: the answer does not fit the operation", wire.ErrFrame)

// call is an operation in flight.
type call struct {
	id     uint64
	weight int
	task
	// finished is set when the call no longer has its state in the ring. ending is held while the operation
	// is ended; it was ended when finished is set and ending is free.
	finished atomic.Bool
	ending   sync.Mutex
}

// calls are the operations in flight. A lock of its own guards them, which is locked after Client.mu.
type calls struct {
	at   [numEntries]atomic.Pointer[call] // by index
	high atomic.Int64                     // no call has had this index or a higher one

	mu      sync.Mutex
	free    []uint32 // indexes without a call
	round   uint64   // the upper bits of the number of the next call
	weight  int      // as the sidecar counts operations in flight
	sweepAt int
	of      map[any]*call // by message or first entry
}

func (s *calls) init() {
	s.of, s.sweepAt = make(map[any]*call), firstSweep
	s.free = make([]uint32, numEntries)
	for i := range s.free {
		s.free[i] = uint32(numEntries - 1 - i)
	}
}

func (s *calls) number() int { return numEntries - len(s.free) }

// none reports whether no operation is in flight.
func (s *calls) none() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.number() == 0
}

// each calls f for each operation in flight.
func (s *calls) each(f func(*call)) {
	for i := range s.high.Load() {
		if k := s.at[i].Load(); k != nil {
			f(k)
		}
	}
}

func (s *calls) find(of any) *call {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.of[of]
}

// Queue implements rank.Remote. The sidecar sees the operation after a call of NotifyLater, Drive or Flush,
// or before that.
func (c *Client) Queue(entries ...*tensorqueue.Entry) error {
	e := entries[0]
	q := &e.Request
	if q.Kind == message.AddProcessSet || q.Kind == message.RemoveProcessSet {
		return c.changeSets(e)
	}
	t := task{set: e.Set, kind: q.Kind, entries: entries}
	t.name, t.number = numbered(q.Name)
	if q.GroupSize > 0 {
		t.name, t.number = numbered(q.Group)
	}
	if q.Parts != nil {
		t.tensors = make([]tensorPlaces, 0, len(e.Parts))
		for dt, shape := range q.Parts.All() {
			p := e.Parts[len(t.tensors)]
			t.tensors = append(t.tensors, tensorPlaces{dtype: dt, shape: shape, in: p.Input, out: p.Output})
		}
	} else if q.Kind.MovesData() {
		t.tensors = make([]tensorPlaces, len(entries))
		for i, e := range entries {
			t.tensors[i] = tensorPlaces{dtype: e.Request.DType, shape: e.Request.Shape, in: e.Input,
				out: e.Output}
		}
	}
	if err := c.submit(&t); err != nil {
		return &engine.OpError{Op: q.Kind.String(), Tensor: q.Name, Err: err}
	}
	return nil
}

// Post implements rank.Remote.
func (c *Client) Post(set topo.ProcessSetID, o *p2p.Op, receive bool) error {
	t := task{set: set, kind: message.Send, message: o}
	size := o.DType.Size()
	of := tensorPlaces{dtype: o.DType, shape: tensor.Shape{int64(len(o.Buf) / size)}, in: o.Buf}
	if receive {
		t.kind, of.in, of.out = message.Recv, o.Buf, o.Buf
	}
	t.tensors = []tensorPlaces{of}
	return c.submit(&t)
}

// submit submits t. An error says why nothing was submitted, without the operation and the tensor.
func (c *Client) submit(t *task) error {
	c.using.RLock()
	defer c.using.RUnlock()
	if err := c.Over(); err != nil {
		return err
	}
	if len(t.entries) > 0 && t.entries[0].Request.Device != tensor.Host {
		return errors.New("the sidecar cannot use memory of a CUDA device of this process: use host memory, or unset HVD_SIDECAR")
	}
	for i := range t.tensors {
		if err := c.place(t, &t.tensors[i]); err != nil {
			return err
		}
	}
	var err error
	if t.plan, err = c.plans.take(c, t); err != nil {
		return err
	}
	for i := range t.tensors {
		if p := &t.tensors[i]; p.inMode == staged {
			copy(t.plan.in[i], p.in)
		}
	}
	if err := c.push(t); err != nil {
		c.plans.give(c, t.plan)
		return err
	}
	return nil
}

// push queues the entries of t and writes the submission.
func (c *Client) push(t *task) error {
	k := &call{task: *t, weight: max(len(t.tensors), 1)}
	if c.calls.full(k.weight) {
		c.sweep()
	}
	err := c.tryPush(k)
	if _, duplicate := errors.AsType[*tensorqueue.DuplicateNameError](err); duplicate {
		// The operation with the name may be done without anybody having waited for it.
		c.sweep()
		err = c.tryPush(k)
	}
	return err
}

// full reports whether operations that are done must be ended before a call of the given weight is submitted.
func (s *calls) full(weight int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.number(); n >= s.sweepAt {
		s.sweepAt = 2 * n
		return true
	}
	return s.weight+weight > wire.MaxInFlight || s.number() >= maxCalls
}

func (c *Client) tryPush(k *call) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.over != nil:
		return c.over
	case c.job == nil:
		return rank.ErrNotInitialized
	case k.message != nil && c.job.ended && c.job.why != nil:
		return c.job.why
	case k.message != nil && c.job.ended:
		return engine.ErrShutDown
	}
	s := &c.calls
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.number() >= maxCalls || s.weight+k.weight > wire.MaxInFlight {
		return fmt.Errorf("%d operations on %d tensors are in flight, want at most %d on %d: wait for some of them first",
			s.number(), s.weight, maxCalls, wire.MaxInFlight)
	}
	if len(k.entries) > 0 {
		q := c.queueOf(k.set)
		if err := q.Add(k.entries...); err != nil {
			return err
		}
		q.Pop(nil)
	}
	index := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	if s.number() == 1 {
		s.sweepAt = firstSweep
	}
	s.weight += k.weight
	s.round++
	k.id = s.round*numEntries%firstRequest + uint64(index)
	s.of[k.ref()] = k
	c.ring.state(index).Store(wire.StatePending)
	s.at[index].Store(k)
	s.high.Store(max(s.high.Load(), int64(index)+1))
	c.ring.push(k.id, k.plan.slot, k.number)
	return nil
}

// index returns the index of the state of k.
func (k *call) index() uint32 { return uint32(k.id % numEntries) }

// done reports whether the state of k in the ring says that k is done. Then finish must be called. The state
// means nothing if k has finished.
func (c *Client) done(k *call) bool { return c.ring.state(k.index()).Load() == wire.StateDone }

// sweep ends all operations that are done.
func (c *Client) sweep() {
	c.calls.each(func(k *call) {
		if c.done(k) {
			c.finish(k, nil, nil)
		}
	})
}

// answered handles the answer to an operation.
func (c *Client) answered(r *sidecarpb.Reply) error {
	k := c.calls.at[r.GetId()%numEntries].Load()
	if k == nil || k.id != r.GetId() {
		return fmt.Errorf("%w: got an answer to operation %d, which is not in flight", wire.ErrFrame, r.GetId())
	}
	if e := r.GetError(); e != nil {
		err := wire.ErrorOf(e)
		if of, is := errors.AsType[*engine.OpError](err); is && k.message != nil {
			err = of.Err // package rank adds the operation
		}
		c.finish(k, nil, err)
		return nil
	}
	a := r.GetCompletion()
	if len(a.GetResults()) != len(k.tensors) {
		return errUnexpected
	}
	c.finish(k, a, nil)
	return nil
}

// finish ends k: with err, or with success. a is the answer of the sidecar, or nil if it has sent none. If k
// has ended already, finish waits until Done was called.
func (c *Client) finish(k *call, a *sidecarpb.Completion, err error) {
	k.ending.Lock()
	defer k.ending.Unlock()
	if k.finished.Load() {
		return
	}
	if err == nil {
		err = c.results(k, a)
	}
	k.finished.Store(true)
	state := c.ring.state(k.index())
	if state.Swap(wire.StateFree) == wire.StateAwaited {
		shmem.Wake(word(state))
	}
	c.plans.give(c, k.plan)
	s := &c.calls
	s.mu.Lock()
	s.at[k.index()].Store(nil)
	delete(s.of, k.ref())
	s.free = append(s.free, k.index())
	s.weight -= k.weight
	s.mu.Unlock()
	if k.message != nil {
		k.message.Done(err)
	}
	for _, e := range k.entries {
		of := err
		if _, dead := err.(*DeadError); dead {
			of = &engine.OpError{Op: e.Request.Kind.String(), Tensor: e.Request.Name, Err: err}
		}
		e.Finish(of)
	}
	c.ring.changed()
}

// results copies the results of k to the memory of the program, and completes its entries.
func (c *Client) results(k *call, a *sidecarpb.Completion) error {
	var failed error
	for i := range k.tensors {
		switch p := &k.tensors[i]; {
		case p.outMode == staged:
			copy(p.out, k.plan.out[i])
		case p.outMode == asInput && p.inMode == staged && !k.unchanged():
			copy(p.out, k.plan.in[i])
		case p.outMode == allocated && a == nil:
			return errUnexpected
		// after an error, the other results are still fetched, because that frees them
		case p.outMode == allocated:
			failed = errors.Join(failed, c.fetch(k.entries[i], a.Results[i].GetMemory()))
		}
	}
	if failed != nil {
		return failed
	}
	if k.message != nil {
		k.message.Source = k.message.Peer
		if a != nil && k.message.Peer == p2p.AnySource {
			k.message.Source = topo.Rank(a.GetSource())
		}
		return nil
	}
	if k.kind != message.Join && !k.kind.Ragged() {
		return nil
	}
	for i, e := range k.entries {
		r := &message.Response{Kind: k.kind, Root: topo.Rank(a.GetLastJoined())}
		switch {
		case k.kind == message.Allgather && a == nil:
			r.FirstDims = []int64{int64(len(e.Output)) / rowBytes(&k.tensors[i])}
		case k.kind == message.Allgather:
			shape := a.Results[i].GetShape()
			if len(shape) == 0 {
				return errUnexpected
			}
			r.FirstDims = shape[:1]
		case k.kind.SendsRows():
			if a == nil {
				return errUnexpected
			}
			r.Shape, e.Received = a.Results[i].GetShape(), a.GetReceivedSplits()
		}
		e.Response = r
	}
	return nil
}

// unchanged reports whether the operation does not change the input of this rank, although it is in place.
func (k *call) unchanged() bool {
	return k.kind == message.Broadcast && k.tensors[0].inMode != asOutput
}

// fetch copies a result from memory of the sidecar, and frees it there.
func (c *Client) fetch(e *tensorqueue.Entry, at *sidecarpb.Memory) error {
	n := at.GetBytes()
	var from []byte
	if n > 0 {
		s := c.maps[at.GetArena()]
		if s == nil {
			return fmt.Errorf("%w: the result is in arena %d, which the sidecar has not announced", wire.ErrFrame,
				at.GetArena())
		}
		all := uint64(len(s.Bytes()))
		if at.GetOffset() > all || n > all-at.GetOffset() {
			return fmt.Errorf("%w: the result has %d bytes at byte %d of arena %d, which has only %d bytes", wire.ErrFrame, n,
				at.GetOffset(), at.GetArena(), all)
		}
		from = s.Bytes()[at.GetOffset():][:n]
		defer c.sendLater(&sidecarpb.Request{What: &sidecarpb.Request_Free{
			Free: &sidecarpb.Free{Arena: at.GetArena(), Offset: at.GetOffset()}}})
	}
	if e.Output == nil && e.Allocate != nil {
		e.Output = e.Allocate(int(n))
		if e.Output == nil && n > 0 {
			return fmt.Errorf("cannot allocate %d bytes for the result", n)
		}
	}
	if len(e.Output) != int(n) {
		return errUnexpected
	}
	copy(e.Output, from)
	return nil
}
