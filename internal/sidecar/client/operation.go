package client

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

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

// task is an operation that is about to be submitted: entries of one rank.Execution, or a message.
type task struct {
	set     topo.ProcessSetID
	kind    message.Kind
	entries []*tensorqueue.Entry
	message *p2p.Op
	// name is sent with the number appended, unless the number is 0.
	name    string
	number  uint32
	tensors []tensorPlaces
	plan    *plan
}

// tensorPlaces says where the sidecar finds a tensor.
type tensorPlaces struct {
	dtype   tensor.DType
	shape   tensor.Shape
	in, out []byte // the memory of the program
	// inAt and outAt are the places of in and out. They count only if the mode says so.
	inAt, outAt     place
	inMode, outMode mode
}

// mode says how the sidecar gets the memory of a tensor, or to the memory of its result.
type mode uint8

const (
	empty     mode = iota // there are no bytes
	inPlace               // the memory is in a chunk that the sidecar has mapped
	staged                // the memory is copied from or to a block of the heap
	asInput               // the output is the same memory as the input
	asOutput              // the input is not read, so it is the same memory as the output
	allocated             // the sidecar allocates the output
)

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

// ref returns the key of k in calls.of.
func (t *task) ref() any {
	if t.message != nil {
		return t.message
	}
	return t.entries[0]
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

// numbered splits a name of the form base.number, as generated names have it. All operations with the same
// base can use one plan.
func numbered(name string) (base string, number uint32) {
	at := strings.LastIndexByte(name, '.')
	if at < 1 || at+1 == len(name) || name[at+1] < '1' || name[at+1] > '9' {
		return name, 0
	}
	n, err := strconv.ParseUint(name[at+1:], 10, 32)
	if err != nil {
		return name, 0
	}
	return name[:at], uint32(n)
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

// rowBytes returns the number of bytes of a row.
func rowBytes(p *tensorPlaces) int64 {
	n := int64(p.dtype.Size())
	for _, d := range p.shape[1:] {
		n *= d
	}
	return n
}

// place decides how the sidecar gets at the memory of a tensor.
func (c *Client) place(t *task, p *tensorPlaces) error {
	same := len(p.in) == len(p.out) && unsafe.SliceData(p.in) == unsafe.SliceData(p.out)
	var err error
	defer func() {
		if t.kind.Ragged() && p.out == nil || t.kind == message.Allgather && len(p.shape) > 0 &&
			rowBytes(p) == 0 {
			p.outMode = allocated // the size of the result, or at least its shape, is known afterwards
		}
	}()
	if p.inMode, p.inAt, err = c.find(p.in, p.dtype); err != nil {
		return err
	}
	if p.outMode, p.outAt, err = c.find(p.out, p.dtype); err != nil {
		return err
	}
	switch {
	case t.kind == message.Scatter && len(p.shape) == 0: // this rank is not the root
		p.inMode = empty
	case t.kind == message.Recv, t.kind == message.Broadcast &&
		t.entries[0].Request.Root != topo.Rank(c.me.Load()):
		p.inMode = asOutput
		if len(p.out) == 0 {
			p.inMode = empty
		}
	case same && len(p.out) > 0:
		p.outMode = asInput
	case p.inMode == inPlace && p.outMode == inPlace && overlap(p.in, p.out):
		// The sidecar refuses memory that overlaps in part, so the smaller one is copied.
		if len(p.in) < len(p.out) {
			p.inMode = staged
		} else {
			p.outMode = staged
		}
	}
	return nil
}

func overlap(a, b []byte) bool {
	from, to := uintptr(unsafe.Pointer(unsafe.SliceData(a))), uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	return len(a) > 0 && len(b) > 0 && from < to+uintptr(len(b)) && to < from+uintptr(len(a))
}

// find returns how the sidecar gets at b.
func (c *Client) find(b []byte, dt tensor.DType) (mode, place, error) {
	if len(b) == 0 {
		return empty, place{}, nil
	}
	p, ok, err := c.memory.find(b)
	if ok && p.offset%int64(dt.Size()) == 0 {
		return inPlace, p, err
	}
	return staged, place{}, err
}

// key appends what a plan of t depends on to b.
func (t *task) key(b []byte) []byte {
	b = append(b, byte(t.kind))
	b = binary.AppendUvarint(b, uint64(t.set))
	b = append(binary.AppendUvarint(b, uint64(len(t.name))), t.name...)
	if o := t.message; o != nil {
		b = binary.AppendVarint(b, int64(o.Peer))
		b = binary.AppendUvarint(b, uint64(o.Tag))
		b = binary.AppendUvarint(b, uint64(o.Timeout))
	} else {
		e := t.entries[0]
		q := &e.Request
		flags := byte(0)
		for i, set := range [...]bool{t.number != 0, e.ErrorFeedback, q.Empty, q.Parts != nil,
			q.GroupSize > 0} {
			if set {
				flags |= 1 << i
			}
		}
		b = append(b, flags, byte(q.DType), byte(q.Op), byte(q.Wire))
		b = binary.AppendUvarint(b, uint64(q.Root))
		b = binary.AppendUvarint(b, uint64(e.Timeout))
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(q.Prescale))
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(q.Postscale))
		b = binary.AppendUvarint(b, uint64(len(e.Splits)))
		for _, n := range e.Splits {
			b = binary.AppendUvarint(b, uint64(n))
		}
	}
	for i := range t.tensors {
		p := &t.tensors[i]
		b = append(b, byte(p.dtype), byte(p.inMode), byte(p.outMode))
		b = binary.AppendUvarint(b, uint64(len(p.shape)))
		for _, d := range p.shape {
			b = binary.AppendUvarint(b, uint64(d))
		}
		b = binary.AppendUvarint(b, uint64(len(p.out)))
		for _, at := range [2]struct {
			mode
			place
		}{{p.inMode, p.inAt}, {p.outMode, p.outAt}} {
			if at.mode == inPlace {
				b = binary.LittleEndian.AppendUint32(b, at.arena)
				b = binary.AppendUvarint(b, uint64(at.offset))
			}
		}
	}
	return b
}

// describe returns the operation of the plan p, as the sidecar gets it.
func (t *task) describe(p *plan) *sidecarpb.Operation {
	o := &sidecarpb.Operation{Kind: uint32(t.kind), ProcessSet: int32(t.set)}
	if m := t.message; m != nil {
		o.Dtype, o.Peer, o.Tag, o.TimeoutSeconds = uint32(m.DType), int32(m.Peer), m.Tag, seconds(m.Timeout)
	} else {
		e := t.entries[0]
		q := &e.Request
		o.Dtype, o.WireDtype, o.RootRank, o.TimeoutSeconds = uint32(q.DType), uint32(q.Wire), int32(q.Root),
			seconds(e.Timeout)
		o.ErrorFeedback, o.Empty, o.Grouped = e.ErrorFeedback, q.Empty, q.Parts != nil || q.GroupSize > 0
		if t.kind.Reduces() {
			o.ReduceOp, o.Prescale, o.Postscale = uint32(q.Op), &q.Prescale, &q.Postscale
		}
		if t.kind != message.Join {
			o.Name = t.name
		}
		if t.kind == message.Alltoall || t.kind == message.Scatter {
			o.Splits = e.Splits
		}
		if len(t.tensors) > 0 {
			o.Dtype = uint32(t.tensors[0].dtype)
		}
	}
	for i := range t.tensors {
		o.Tensors = append(o.Tensors, t.tensor(p, i))
	}
	return o
}

// tensor describes tensor i.
func (t *task) tensor(p *plan, i int) *sidecarpb.Tensor {
	at := &t.tensors[i]
	out := &sidecarpb.Tensor{Dtype: uint32(at.dtype), Shape: at.shape}
	place := func(at place, b []byte) *sidecarpb.Memory {
		return &sidecarpb.Memory{Arena: at.arena, Offset: uint64(at.offset), Bytes: uint64(len(b))}
	}
	if t.kind == message.Scatter && len(at.shape) == 0 {
		out.Shape = []int64{0} // this rank is not the root, and a scalar would have an element
	}
	switch at.inMode {
	case empty:
		out.Input = new(sidecarpb.Memory)
	case inPlace:
		out.Input = place(at.inAt, at.in)
	case staged:
		out.Input = place(p.inAt[i], at.in)
	}
	switch at.outMode {
	case empty:
		out.Output = new(sidecarpb.Memory)
	case inPlace:
		out.Output = place(at.outAt, at.out)
	case staged:
		out.Output = place(p.outAt[i], at.out)
	case asInput:
		out.Output = out.Input
	}
	if at.inMode == asOutput {
		out.Input = out.Output
	}
	return out
}

func seconds(d time.Duration) float64 { return d.Seconds() }
