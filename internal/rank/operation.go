package rank

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/tensorqueue"
)

// MaxTensors is the maximum number of tensors of an Operation.
const MaxTensors = 65536

// Spec describes an operation with the numbers that a program in another language has given. Nothing in it
// has been checked yet.
type Spec struct {
	// Kind is a message.Kind, DType and Wire are a tensor.DType, and ReduceOp is a tensor.ReduceOp. Except
	// for Kind, 0 means that none was given.
	Kind, DType, ReduceOp, Wire   uint32
	Name                          string
	Prescale, Postscale           float64 // 1 has no effect
	TimeoutSeconds                float64 // 0 stands for the timeout of the settings
	Set                           int     // the ID of the process set
	Root                          int
	Peer, Tag                     int     // the other rank and the tag of a message
	Splits                        []int64 // of an alltoall or a scatter; if it is empty, the splits are equal
	ErrorFeedback, Empty, Grouped bool
	Tensors                       []TensorSpec
}

// Equal reports whether s and t describe the same operation.
func (s *Spec) Equal(t *Spec) bool {
	return s.Kind == t.Kind && s.DType == t.DType && s.ReduceOp == t.ReduceOp && s.Wire == t.Wire &&
		s.Prescale == t.Prescale && s.Postscale == t.Postscale && s.TimeoutSeconds == t.TimeoutSeconds &&
		s.Set == t.Set && s.Root == t.Root && s.Peer == t.Peer && s.Tag == t.Tag &&
		s.ErrorFeedback == t.ErrorFeedback && s.Empty == t.Empty && s.Grouped == t.Grouped &&
		s.Name == t.Name && slices.Equal(s.Splits, t.Splits) &&
		slices.EqualFunc(s.Tensors, t.Tensors, TensorSpec.equal)
}

// Clone returns a copy of s that has no memory in common with s. The copy is made field by field, so that s
// and its tensors can be on the stack of the caller.
func (s *Spec) Clone() Spec {
	t := Spec{Kind: s.Kind, DType: s.DType, ReduceOp: s.ReduceOp, Wire: s.Wire, Name: strings.Clone(s.Name),
		Prescale: s.Prescale, Postscale: s.Postscale, TimeoutSeconds: s.TimeoutSeconds, Set: s.Set,
		Root: s.Root, Peer: s.Peer, Tag: s.Tag, Splits: slices.Clone(s.Splits),
		ErrorFeedback: s.ErrorFeedback, Empty: s.Empty, Grouped: s.Grouped,
		Tensors: make([]TensorSpec, len(s.Tensors))}
	for i, of := range s.Tensors {
		t.Tensors[i] = TensorSpec{of.DType, slices.Clone(of.Shape)}
	}
	return t
}

// TensorSpec is the element type and the shape of a tensor of a Spec. A DType of 0 stands for the type of the
// operation.
type TensorSpec struct {
	DType uint32
	Shape tensor.Shape
}

func (t TensorSpec) equal(u TensorSpec) bool { return t.DType == u.DType && t.Shape.Equal(u.Shape) }

// Operation is an operation on tensors whose types are known only when the program runs. After Describe, it
// can be executed any number of times.
type Operation struct {
	Call
	SetID     int
	Root      int
	Peer, Tag int
	Splits    []int64 // nil means equal splits
	Grouped   bool
	Tensors   []Tensor
	// A grouped allreduce is a single request. parts holds its tensors. whole is a one-dimensional shape with
	// as many elements as all its tensors together. For other operations parts is nil.
	parts message.Parts
	whole tensor.Shape

	one [1]Tensor // backs Tensors of an operation on one tensor

	name atomic.Pointer[tensorqueue.Name] // the name of the last execution with one entry, or nil
}

// Tensor is the element type, the shape and the size of a tensor of an Operation.
type Tensor struct {
	DType    tensor.DType
	Shape    tensor.Shape
	NumBytes int
}

func (t Tensor) isBool() bool { return t.DType == tensor.Bool }

// groupable are the kinds of operations that have a grouped form.
var groupable = []message.Kind{message.Allreduce, message.Allgather, message.Reducescatter}

// Describe makes o the operation that s describes. It makes the checks that are possible before the operation
// is executed. If it returns an error, which is an *engine.UsageError, o cannot be executed. o keeps the
// slices of s.
func (o *Operation) Describe(s *Spec) error {
	kind := message.Kind(min(s.Kind, math.MaxUint8))
	*o = Operation{Call: NewCall(kind, tensor.DType(min(s.DType, math.MaxUint8))), SetID: s.Set, Root: s.Root,
		Peer: s.Peer, Tag: s.Tag, Grouped: s.Grouped}
	o.Tensors = o.one[:0]
	o.Name, o.Wire, o.ErrorFeedback, o.Empty = s.Name, tensor.DType(min(s.Wire, math.MaxUint8)),
		s.ErrorFeedback, s.Empty
	hasTensors := kind.MovesData() || kind.IsMessage()
	if !hasTensors && kind != message.Barrier && kind != message.Join {
		return o.Misuse("operation %d is unknown", s.Kind)
	}
	op := tensor.ReduceOp(min(s.ReduceOp, math.MaxUint8))
	var err error
	o.Timeout, err = TimeoutOf(s.TimeoutSeconds)
	switch n := len(s.Tensors); {
	case !o.DType.Valid() && (hasTensors || s.DType != 0):
		return o.Misuse("element type %d is unknown", s.DType)
	case op != tensor.NoReduce && !op.Valid():
		return o.Misuse("reduction %d is unknown", s.ReduceOp)
	case o.Wire != tensor.Invalid && !o.Wire.IsHalf():
		return o.Misuse("got compression to element type %d, want float16 or bfloat16", s.Wire)
	case err != nil:
		return o.Misuse("%w", err)
	case n > MaxTensors:
		return o.Misuse("got %d tensors, want at most %d", n, MaxTensors)
	case !hasTensors && n > 0:
		return o.Misuse("got %d tensors, want none", n)
	case s.Grouped && !slices.Contains(groupable, kind):
		return o.Misuse("this operation has no grouped form")
	case !s.Grouped && hasTensors && n != 1:
		return o.Misuse("got %d tensors, want one", n)
	}
	if !hasTensors {
		o.DType = tensor.Invalid
	}
	if len(s.Splits) > 0 {
		o.Splits = s.Splits
	}
	for i := range s.Tensors {
		if err := o.add(&s.Tensors[i]); err != nil {
			return o.Misuse("tensor %d: %w", i, err)
		}
	}
	return o.applyOptions(s, op)
}

// applyOptions sets the options of o. It returns an error if one of them does not apply to the operation.
func (o *Operation) applyOptions(s *Spec, op tensor.ReduceOp) error {
	for _, given := range [...]struct {
		is bool
		Option
	}{
		{s.Name != "", OptName}, {op != tensor.NoReduce, OptOp}, {s.Prescale != 1, OptPrescale},
		{s.Postscale != 1, OptPostscale}, {o.Wire != tensor.Invalid, OptCompress},
		{s.ErrorFeedback, OptErrorFeedback}, {s.Empty, OptEmpty}, {s.TimeoutSeconds != 0, OptTimeout},
	} {
		if given.is {
			if err := o.CheckOption(given.Option); err != nil {
				return err
			}
		}
	}
	if op != tensor.NoReduce {
		o.Op = op
	}
	if o.Kind.Reduces() {
		o.Prescale, o.Postscale = s.Prescale, s.Postscale
	}
	return nil
}

// add checks the tensor s and adds it to o.
func (o *Operation) add(s *TensorSpec) error {
	n, err := s.Shape.NumElems()
	if err != nil {
		return err
	}
	dt := tensor.DType(min(s.DType, math.MaxUint8))
	if dt == tensor.Invalid {
		dt = o.DType
	}
	switch {
	case !dt.Valid():
		return fmt.Errorf("element type %d is unknown", s.DType)
	case dt != o.DType && !o.Grouped:
		return fmt.Errorf("got element type %v in an operation on %v: only tensors of a group may have different types",
			dt, o.DType)
	case n > math.MaxInt/int64(dt.Size()):
		return fmt.Errorf("got shape %v of %v, which has more than 2^63 bytes", s.Shape, dt)
	}
	o.Tensors = append(o.Tensors, Tensor{dt, s.Shape, int(n) * dt.Size()})
	if o.Grouped && o.Kind == message.Allreduce {
		if o.whole == nil {
			o.whole = tensor.Shape{0}
		}
		o.parts = o.parts.Append(dt, s.Shape)
		o.whole[0] += n
	}
	return nil
}

// Weight returns the number of tensors of o, but at least 1.
func (o *Operation) Weight() int { return max(len(o.Tensors), 1) }

// Execution is one execution of an Operation. The caller sets the exported fields before Begin, and may read
// the results when Finished of Owner has been called with nil. After Reset it can be another execution.
type Execution struct {
	*Operation
	Rank *Rank
	// If Number is not 0, a point and Number are appended to the name of the operation.
	Number uint32
	// Buffers has the memory of each tensor.
	Buffers []Buffer
	// Device has the tensors. DevicePart is used only if it is a CUDA device.
	Device tensor.Device
	cuda.DevicePart
	Owner Owner

	set *Set
	// entries has one entry for each tensor. A grouped allreduce is one request, so it has a single entry,
	// and the Parts of that entry are the tensors.
	entries []executionEntry
	message *p2p.Op // the message, if the operation is a send or a recv
	// hasBools is set if a tensor in host memory has elements of type bool. It is read instead of Tensors
	// when the operation is done, because another thread has those in its cache.
	hasBools bool
	left     atomic.Int64          // number of entries that are not done yet
	failed   atomic.Pointer[error] // error of the first call of Owner.Allocate that failed
	held     *tensorqueue.Name
	one      [1]executionEntry // backs entries if there is one
}

// Owner is what has an Execution.
type Owner interface {
	// Allocate returns memory for the output of tensor i. Any goroutine may call it. It is called only if the
	// buffer of the tensor has no output. If it returns an error, the operation fails.
	Allocate(i, numBytes int) ([]byte, error)
	// Finished is called exactly once if Begin has returned nil, when the engine no longer uses the buffers.
	Finished(err error)
}

// Buffer is the memory of a tensor. If Out is nil, the Owner of the Execution provides the output.
type Buffer struct{ In, Out []byte }

// executionEntry is one request of an Execution.
type executionEntry struct {
	tensorqueue.Entry
	err error // set when the entry is done
}

// Begin queues x for the engine, which processes it at the next call of Notify or Drive. The engine must
// belong to x.Rank. If Begin returns an error, x is not queued and Finished is not called.
func (x *Execution) Begin() error {
	o, r := x.Operation, x.Rank
	c := o.Call
	c.Rank = r
	if x.Number != 0 {
		if c.Name == "" {
			return c.Misuse("got call number %d of an operation without a name", x.Number)
		}
		c.Name = string(strconv.AppendUint(append([]byte(c.Name), '.'), uint64(x.Number), 10))
	}
	c.Set = r.FindSet(o.SetID)
	if c.Set == nil {
		return c.Misuse("%w", engine.ErrNoProcessSet)
	}
	if err := c.Check(); err != nil {
		return err
	}
	x.set, x.hasBools = c.Set, x.Device == tensor.Host && slices.ContainsFunc(o.Tensors, Tensor.isBool)
	switch {
	case c.Kind.IsMessage():
		return x.post(&c)
	case c.Kind == message.Join:
		x.addEntries(1)
		return c.Join(&x.entries[0].Entry, x.entries[0].Done)
	case o.parts != nil:
		return x.beginGroup(&c)
	case c.Kind == message.Barrier:
		x.addEntries(1)
		c.Fill(&x.entries[0].Entry)
		return c.Submit(&x.entries[0].Entry)
	case len(o.Tensors) == 0: // an empty group
		x.Owner.Finished(nil)
		return nil
	}
	x.addEntries(len(o.Tensors))
	for i := range x.entries {
		x.fill(&c, &x.entries[i])
		if err := x.place(&c, i); err != nil {
			return err
		}
	}
	if !o.Grouped {
		e := &x.entries[0].Entry
		e.Guess = o.name.Load()
		if err := c.Submit(e); err != nil {
			return err
		}
		if n := e.Name(); n != e.Guess {
			o.name.Store(n)
		}
		return nil
	}
	queued := make([]*tensorqueue.Entry, len(x.entries))
	for i := range x.entries {
		queued[i] = &x.entries[i].Entry
	}
	return c.SubmitMembers(queued)
}

// addEntries makes x consist of n entries.
func (x *Execution) addEntries(n int) {
	x.entries = x.one[:]
	if n != 1 {
		x.entries = make([]executionEntry, n)
	}
	x.left.Store(int64(n))
	for i := range x.entries {
		if e := &x.entries[i]; e.Done == nil {
			e.Done = func(err error) { x.finished(e, err) }
		}
	}
}

// Reset makes x the empty Execution. Unless x was not begun, Finished must have been called. Further
// executions of x then allocate less memory.
func (x *Execution) Reset() {
	done := x.one[0].Done
	*x = Execution{}
	x.one[0].Done = done
}

// fill sets the fields of e that do not depend on its tensor.
func (x *Execution) fill(c *Call, e *executionEntry) {
	c.Fill(&e.Entry)
	e.Request.Device, e.Device = x.Device, nil
	if x.Device != tensor.Host {
		e.Device = &x.DevicePart
	}
}

// beginGroup queues an allreduce of a group, which is one request.
func (x *Execution) beginGroup(c *Call) error {
	x.addEntries(1)
	e := &x.entries[0]
	x.fill(c, e)
	e.Parts = make([]tensorqueue.Part, len(x.Tensors))
	for i, t := range x.Tensors {
		b := &x.Buffers[i]
		if err := x.output(c, i, t.NumBytes); err != nil {
			return err
		}
		if overlap(b.In, b.Out) && !same(b.In, b.Out) {
			return c.Misuse("tensor %d: the output overlaps the input, but is not the input", i)
		}
		e.Parts[i] = tensorqueue.Part{Input: b.In, Output: b.Out}
	}
	q := &e.Request
	q.Shape, q.Parts, q.DType = x.whole, x.parts, x.parts.DType()
	return c.Submit(&e.Entry)
}

// post begins the message of x, a send or a recv.
func (x *Execution) post(c *Call) (err error) {
	x.addEntries(1)
	b := &x.Buffers[0]
	want := 0
	x.message = &p2p.Op{Buf: b.In, Done: x.entries[0].Done}
	if c.Kind == message.Recv {
		want = x.Tensors[0].NumBytes
	}
	if err := x.output(c, 0, want); err != nil {
		return err
	}
	if c.Kind == message.Recv {
		x.message.Buf = b.Out
	}
	return c.Post(x.message, x.Peer, x.Tag)
}

// output checks the size of the output of tensor i, or allocates the output if there is none.
func (x *Execution) output(c *Call, i, want int) (err error) {
	b := &x.Buffers[i]
	if b.Out == nil && want > 0 {
		if b.Out, err = x.Owner.Allocate(i, want); err != nil {
			return err
		}
	}
	if len(b.Out) != want {
		return c.Misuse("the output has %d bytes, want %d", len(b.Out), want)
	}
	return nil
}

// place copies the type and shape of tensor i to its entry, and sets its buffers. If the caller provides the
// output, place checks it. Otherwise it allocates the output, or lets the engine do so later.
func (x *Execution) place(c *Call, i int) error {
	b, t, e := &x.Buffers[i], &x.Tensors[i], &x.entries[i]
	e.Request.DType, e.Request.Shape, e.Input = t.DType, t.Shape, b.In
	if c.Kind.HasRoot() {
		if err := c.CheckRoot(x.Root); err != nil {
			return err
		}
		e.Request.Root = topo.Rank(x.Root)
	}
	ragged := c.Kind.Ragged()
	if want := t.NumBytes; !ragged {
		switch {
		case c.Kind == message.Reduce && !c.Set.IsRoot(x.Root):
			want = 0
		case c.Kind == message.Reducescatter && len(t.Shape) > 0:
			want = int(x.Shape(i)[0]) * (t.NumBytes / max(int(t.Shape[0]), 1))
		}
		if err := x.output(c, i, want); err != nil {
			return err
		}
		if c.Kind == message.Broadcast && b.In == nil {
			b.In, e.Input = b.Out, b.Out // only the root has an input
		}
	} else if err := x.split(c, e); err != nil {
		return err
	} else if b.Out == nil {
		// The size of the output is known only after the negotiation, so the engine allocates it then.
		e.Allocate = func(numBytes int) []byte {
			out, err := x.Owner.Allocate(i, numBytes)
			if err != nil {
				x.failed.CompareAndSwap(nil, &err)
			}
			x.Buffers[i].Out = out
			return out
		}
	}
	e.Output = b.Out
	if overlap(b.In, b.Out) {
		return x.inPlace(c, i)
	}
	return nil
}

// inPlace sets InPlace of the entry of tensor i, whose input and output overlap. It returns an error if the
// operation cannot run in place in this memory. Backends for devices compare the addresses themselves.
func (x *Execution) inPlace(c *Call, i int) error {
	b, t := &x.Buffers[i], &x.Tensors[i]
	at := 0 // the offset of the output in the input
	switch c.Kind {
	case message.Allgather:
		// The place of this rank's rows is known when the ranks have agreed, and the engine checks it then.
		if !within(b.In, b.Out) {
			return c.Misuse("tensor %d: the input overlaps the output, but is no part of it", i)
		}
		x.entries[i].InPlace = x.Device == tensor.Host
		return nil
	case message.Reducescatter:
		if len(t.Shape) > 0 { // the negotiation refuses a scalar at all ranks
			first, _ := tensor.Rows(t.Shape[0], c.Set.Size(), c.Set.Me)
			at = int(first) * (t.NumBytes / int(t.Shape[0]))
		}
	}
	if !same(b.In[at:], b.Out) {
		return c.Misuse("tensor %d: the output overlaps the input, want an output that begins at byte %d of the input or does not overlap it",
			i, at)
	}
	x.entries[i].InPlace = x.Device == tensor.Host
	return nil
}

// overlap reports whether a and b have memory in common.
func overlap(a, b []byte) bool {
	return len(a) > 0 && len(b) > 0 && addressOf(a) < addressOf(b)+uintptr(len(b)) &&
		addressOf(b) < addressOf(a)+uintptr(len(a))
}

// same reports whether a and b begin at the same address.
func same(a, b []byte) bool { return addressOf(a) == addressOf(b) }

// within reports whether a is a part of b.
func within(a, b []byte) bool {
	return addressOf(a) >= addressOf(b) && addressOf(a)+uintptr(len(a)) <= addressOf(b)+uintptr(len(b))
}

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// split sets the splits of e, which say how many rows go to each member.
func (x *Execution) split(c *Call, e *executionEntry) (err error) {
	switch shape := e.Request.Shape; {
	case c.Kind == message.Scatter:
		return PrepareScatter(c, &e.Entry, x.Splits)
	case len(shape) == 0: // The negotiation reports the error at all ranks.
	case c.Kind == message.Alltoall:
		e.Splits, err = Splits(c, x.Splits, shape[0])
	case c.Kind == message.Gather:
		e.Splits = SplitsTo(c, x.Root, shape[0])
	}
	return err
}

// finished records that the entry e has completed with err. When the last entry has completed, finished ends
// the execution.
func (x *Execution) finished(e *executionEntry, err error) {
	switch {
	case e.Request.Kind == message.Join:
		x.set.Release()
	case e == &x.entries[0]:
		x.held = e.Held()
	}
	e.err = err
	if x.left.Add(-1) > 0 {
		return
	}
	for i := range x.entries {
		if err := x.entries[i].err; err != nil {
			if why := x.failed.Load(); why != nil {
				// The error of the engine says only that memory could not be allocated. The error *why gives
				// the reason.
				err = *why
			}
			x.Owner.Finished(err)
			return
		}
	}
	if x.hasBools {
		for i, t := range x.Tensors {
			if t.isBool() {
				OnlyBools(x.Buffers[i].Out)
			}
		}
	}
	x.Owner.Finished(nil)
}

// Seen frees the name of x, because the program has observed that x is done. It has an effect only if Hold is
// set in the Call. It must be called at most once, after Finished.
func (x *Execution) Seen() {
	if x.held != nil {
		x.held.Release()
	}
}

// Shape returns the shape of the result of tensor i.
func (x *Execution) Shape(i int) tensor.Shape {
	shape := slices.Clone(x.Tensors[i].Shape)
	var rows []int64
	switch x.Kind {
	case message.Reducescatter:
		if len(shape) > 0 {
			_, shape[0] = tensor.Rows(shape[0], x.set.Size(), x.set.Me)
		}
		return shape
	case message.Reduce:
		if !x.set.IsRoot(x.Root) {
			return tensor.Shape{0}
		}
		return shape
	case message.Allgather:
		rows = x.entries[i].Response.FirstDims
	case message.Scatter:
		shape = slices.Clone(x.entries[i].Response.Shape)
		rows = x.entries[i].Received
	case message.Alltoall, message.Gather:
		rows = x.entries[i].Received
	default:
		return shape
	}
	shape[0] = 0
	for _, n := range rows {
		shape[0] += n
	}
	return shape
}

// Received returns how many rows came from each member, if x is an alltoall, a gather or a scatter.
func (x *Execution) Received() []int64 {
	if !x.Kind.SendsRows() {
		return nil
	}
	return x.entries[0].Received
}

// LastJoined returns the rank that has joined last, if x is a join.
func (x *Execution) LastJoined() int { return int(x.entries[0].Response.Root) }

// Source returns the rank that has sent the message, if x is a recv.
func (x *Execution) Source() int { return int(x.message.Source) }
