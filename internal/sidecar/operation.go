package sidecar

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/tensorqueue"
)

// maxTensors is the maximum number of tensors in a group.
const maxTensors = maxInFlight

// plan is an operation as a client has described it. It can be executed any number of times.
type plan struct {
	rank.Call
	set     int    // ID of the process set
	event   uint32 // number of the event of an operation on a CUDA device, else 0
	stream  uint64 // the client's number of the stream of the event; 0 if it is not known
	root    int
	peer    int     // the other rank of a message
	tag     int     // the tag of a message
	splits  []int64 // splits of an alltoall; nil means equal splits
	grouped bool
	tensors []tensorSpec
	places  []location // for each tensor, the location of its input followed by the location of its output
	// A grouped allreduce is a single request. parts holds its tensors. whole is a one-dimensional shape with
	// as many elements as all its tensors together. For other operations parts is nil.
	parts message.Parts
	whole tensor.Shape
	makes bool  // the sidecar allocates at least one output
	wrong error // why the plan cannot be executed; nil if it can be executed

	bytes   int64        // size of the plan, once a slot has it
	holders atomic.Int32 // number of slots and operations that have the plan
}

// size returns about how many bytes of memory a plan takes.
func (p *plan) size() int64 {
	n := int(unsafe.Sizeof(*p)) + len(p.Name) + 8*(cap(p.splits)+cap(p.parts)) +
		cap(p.tensors)*int(unsafe.Sizeof(tensorSpec{})) + cap(p.places)*int(unsafe.Sizeof(location{}))
	for i := range p.tensors {
		n += 8 * cap(p.tensors[i].shape)
	}
	if p.wrong != nil {
		n += 2 * len(p.wrong.Error())
	}
	return int64(n)
}

// tensorSpec is the element type and the shape of a tensor, as a client has described them.
type tensorSpec struct {
	dtype tensor.DType
	shape tensor.Shape
}

// location is the position of an input or an output in an arena of the client.
type location struct {
	arena            uint32
	offset, numBytes uint64
	none             bool // this is an output that the sidecar allocates, so it has no location
	// The field to is the memory at this location. It is set again for each execution.
	to []byte
}

// groupable are the kinds of operations that have a grouped form.
var groupable = []message.Kind{message.Allreduce, message.Allgather, message.Reducescatter}

// newPlan returns the plan for the operation that a client describes. It makes the checks that are possible
// before the operation is executed. If a check fails, newPlan sets the field wrong of the plan to a usage
// error.
func newPlan(o *sidecarpb.Operation) *plan {
	kind := message.Kind(min(o.GetKind(), math.MaxUint8))
	misuse := func(format string, args ...any) *plan {
		return &plan{wrong: usage(kind.String(), o.GetName(), fmt.Errorf(format, args...))}
	}
	hasTensors := kind.MovesData() || kind.IsMessage()
	if !hasTensors && kind != message.Barrier && kind != message.Join {
		return misuse("operation %d is unknown", o.GetKind())
	}
	op := tensor.ReduceOp(min(o.ReduceOp, math.MaxUint8))
	p := &plan{
		Call: rank.NewCall(kind, tensor.DType(min(o.Dtype, math.MaxUint8))),
		set:  int(o.ProcessSet), root: int(o.RootRank), peer: int(o.Peer), tag: int(o.Tag), event: o.Event,
		stream:  o.Stream,
		grouped: o.Grouped, whole: tensor.Shape{0},
	}
	p.Name, p.Wire, p.ErrorFeedback, p.Empty = o.Name, tensor.DType(min(o.WireDtype, math.MaxUint8)),
		o.ErrorFeedback, o.Empty
	timeout, err := timeoutOf(o.TimeoutSeconds)
	p.Timeout = timeout
	switch {
	case hasTensors && !p.DType.Valid():
		return misuse("element type %d is unknown", o.Dtype)
	case op != tensor.NoReduce && !op.Valid():
		return misuse("reduction %d is unknown", o.ReduceOp)
	case p.Wire != tensor.Invalid && !p.Wire.IsHalf():
		return misuse("got compression to element type %d, want float16 or bfloat16", o.WireDtype)
	case err != nil:
		return misuse("%w", err)
	case len(o.Tensors) > maxTensors:
		return misuse("got %d tensors, want at most %d", len(o.Tensors), maxTensors)
	case !hasTensors && len(o.Tensors) > 0:
		return misuse("got %d tensors, want none", len(o.Tensors))
	}
	if len(o.Splits) > 0 {
		p.splits = o.Splits
	}
	for i, t := range o.Tensors {
		if err := p.add(t); err != nil {
			return misuse("tensor %d: %w", i, err)
		}
	}
	if err := p.overlaps(); err != nil {
		return misuse("%w", err)
	}
	pre, post := orOne(o.Prescale), orOne(o.Postscale)
	for _, given := range [...]struct {
		is bool
		rank.Option
	}{
		{o.Name != "", rank.OptName}, {op != tensor.NoReduce, rank.OptOp}, {pre != 1, rank.OptPrescale},
		{post != 1, rank.OptPostscale},
		{p.Wire != tensor.Invalid, rank.OptCompress}, {o.ErrorFeedback, rank.OptErrorFeedback},
		{o.Empty, rank.OptEmpty}, {timeout != 0, rank.OptTimeout},
	} {
		if given.is {
			if err := p.CheckOption(given.Option); err != nil {
				return &plan{wrong: err}
			}
		}
	}
	if op != tensor.NoReduce {
		p.Op = op
	}
	if kind.Reduces() {
		p.Prescale, p.Postscale = pre, post
	}
	switch n := len(o.Tensors); {
	case p.event != 0 && !kind.MovesData():
		return misuse("got an event, but this operation has no tensor on a device")
	case p.event != 0 && p.makes:
		return misuse("the sidecar does not allocate memory of CUDA devices: give all tensors an output")
	case o.Grouped && !slices.Contains(groupable, kind):
		return misuse("this operation has no grouped form")
	case !o.Grouped && hasTensors && n != 1:
		return misuse("got %d tensors, want one", n)
	}
	return p
}

// timeoutOf converts a timeout from a client, in seconds, to a Duration. 0 means that the timeout of the
// settings applies.
func timeoutOf(seconds float64) (time.Duration, error) {
	if seconds != 0 && !(seconds >= 1e-9 && seconds < math.MaxInt64/1e9) {
		return 0, fmt.Errorf("got a timeout of %v s, want 0 or at least 1e-9 s and less than 2^63 ns",
			seconds)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}

// orOne returns *f, or 1 if f is nil.
func orOne(f *float64) float64 {
	if f == nil {
		return 1
	}
	return *f
}

// add checks the tensor t and adds it to the plan.
func (p *plan) add(t *sidecarpb.Tensor) error {
	shape := tensor.Shape(t.GetShape())
	n, err := shape.NumElems()
	if err != nil {
		return err
	}
	in := location{arena: t.GetInput().GetArena(), offset: t.GetInput().GetOffset(),
		numBytes: t.GetInput().GetBytes()}
	out := location{arena: t.GetOutput().GetArena(), offset: t.GetOutput().GetOffset(),
		numBytes: t.GetOutput().GetBytes(), none: t.GetOutput() == nil}
	dt := tensor.DType(min(t.GetDtype(), math.MaxUint8))
	if dt == tensor.Invalid {
		dt = p.DType
	}
	if !dt.Valid() {
		return fmt.Errorf("element type %d is unknown", t.GetDtype())
	}
	size := uint64(dt.Size())
	switch {
	case dt != p.DType && !p.grouped:
		return fmt.Errorf("got element type %v in an operation on %v: only tensors of a group may have different types", dt, p.DType)
	case uint64(n) > in.numBytes/size || uint64(n)*size != in.numBytes:
		return fmt.Errorf("got an input of %d bytes, which does not match shape %v and element type %v", in.numBytes, shape, dt)
	case in.offset%size != 0 || out.offset%size != 0 || out.numBytes%size != 0:
		return fmt.Errorf("got an input at byte %d and an output of %d bytes at byte %d, want multiples of %d",
			in.offset, out.numBytes, out.offset, size)
	}
	p.tensors = append(p.tensors, tensorSpec{dt, shape})
	if p.grouped && p.Kind == message.Allreduce {
		p.parts = p.parts.Append(dt, shape)
		p.whole[0] += n
	}
	p.places = append(p.places, in, out)
	p.makes = p.makes || out.none && p.Kind != message.Send
	return nil
}

// overlaps returns an error if memory that the operation writes overlaps other memory that it uses. Inputs
// may overlap each other, and the output of a tensor may be the same memory as its input.
func (p *plan) overlaps() error {
	type stretch struct {
		*location
		tensor int
		output bool
	}
	all := make([]stretch, 0, len(p.places))
	for i := range p.places {
		at := stretch{&p.places[i], i / 2, i%2 == 1}
		if at.numBytes == 0 || at.output && at.same(&p.places[i-1]) {
			// The location is empty, or it is an output in the same memory as its input. The input itself is
			// checked.
			continue
		}
		all = append(all, at)
	}
	written := func(s stretch) bool { return s.output || s.same(&p.places[2*s.tensor+1]) }
	slices.SortFunc(all, func(a, b stretch) int {
		return cmp.Or(cmp.Compare(a.arena, b.arena), cmp.Compare(a.offset, b.offset))
	})
	// Both variables describe the stretches that the loop has seen in the current arena. reads is the one
	// with the greatest end. writes is the one with the greatest end among those that the operation writes.
	var reads, writes stretch
	for i, s := range all {
		if i == 0 || s.arena != all[i-1].arena {
			reads, writes = stretch{}, stretch{}
		}
		for _, before := range []stretch{reads, writes} {
			if before.location != nil && before.end() > s.offset && (written(s) || written(before)) {
				return fmt.Errorf("tensors %d and %d overlap in arena %d at byte %d; only the output of a tensor may be the same memory as its input", before.tensor, s.tensor, s.arena, s.offset)
			}
		}
		if reads.location == nil || s.end() > reads.end() {
			reads = s
		}
		if written(s) && (writes.location == nil || s.end() > writes.end()) {
			writes = s
		}
	}
	return nil
}

// end returns the offset in the arena at which p ends. If that offset does not fit in 64 bits, end returns
// 2^64-1, which is outside every arena.
func (p *location) end() uint64 {
	if p.offset > math.MaxUint64-p.numBytes {
		return math.MaxUint64
	}
	return p.offset + p.numBytes
}

// same reports whether p and q are the same location.
func (p *location) same(q *location) bool {
	return p.arena == q.arena && p.offset == q.offset && p.numBytes == q.numBytes && p.none == q.none
}

// weight returns by how much p counts towards the limit on operations in flight. This is the number of its
// tensors, but at least 1.
func (p *plan) weight() int { return max(len(p.tensors), 1) }

// operation is one execution of a plan.
type operation struct {
	plan *plan
	conn *conn
	id   uint64
	call uint32 // number that the client has given this call; 0 if it has given none
	uses []*clientArena
	// on is the event after which the tensors can be used, and their device. It is nil if they are in host
	// memory.
	on  *cuda.Imported
	set *rank.Set
	// entries has one entry for each tensor. A grouped allreduce is one request, so it has a single entry,
	// and the Parts of that entry are the tensors.
	entries []entry
	message p2p.Op                // the message, if the operation is a send or a recv
	left    atomic.Int64          // number of entries that are not done yet
	failed  atomic.Pointer[error] // error of the first allocation of an output that failed
	// allocated[i] is the output that the sidecar has allocated for tensor i. If the client provides all
	// outputs, allocated is nil.
	allocated [][]byte
}

// entry is one request of an operation.
type entry struct {
	tensorqueue.Entry
	err error // set when the entry is done
}

// newOperation returns an operation that executes p for the submission s, and marks its memory as in use
// until answer is called. If newOperation returns an error, it has marked nothing, and the caller must not
// call any method of the operation except answer.
func (c *conn) newOperation(p *plan, s submission) (*operation, error) {
	o := &operation{plan: p, conn: c, id: s.id, call: s.call}
	if p.wrong != nil {
		return o, p.wrong
	}
	var err error
	uses := make([]*clientArena, 0, len(p.places)+1)
	if o.on, o.uses, err = c.server.memory.use(c, p.event, p.places, uses); err != nil {
		return o, usage(p.Kind.String(), p.Name, err)
	}
	if p.makes {
		o.allocated = make([][]byte, len(p.tensors))
	}
	if p.parts != nil {
		o.entries = make([]entry, 1)
		o.entries[0].Parts = make([]tensorqueue.Part, len(p.tensors))
	} else {
		o.entries = make([]entry, len(p.tensors), p.weight())
	}
	for i := range p.tensors {
		in, out := o.buffers(i)
		*in, *out = p.places[2*i].to, p.places[2*i+1].to
	}
	return o, nil
}

// buffers returns pointers to the two fields of the entry that hold the input buffer and the output buffer of
// tensor i.
func (o *operation) buffers(i int) (in, out *[]byte) {
	if parts := o.entries[0].Parts; parts != nil {
		return &parts[i].Input, &parts[i].Output
	}
	return &o.entries[i].Input, &o.entries[i].Output
}

// rankRunner runs operations on a rank. It implements runner.
type rankRunner struct{ *rank.Rank }

// Drive implements runner.
func (r rankRunner) Drive(ctx context.Context, done func() bool) { r.Engine.Drive(ctx, done) }

// Notify implements runner.
func (r rankRunner) Notify() { r.Engine.Notify() }

// Begin implements runner. It fills the entries of o and submits them to the engine.
func (r rankRunner) Begin(o *operation) error {
	p := o.plan
	c := p.Call
	c.Rank = r.Rank
	if o.call != 0 {
		if c.Name == "" {
			return c.Misuse("got call number %d of an operation without a name", o.call)
		}
		c.Name = string(strconv.AppendUint(append([]byte(c.Name), '.'), uint64(o.call), 10))
	}
	if c.Set = r.FindSet(p.set); c.Set == nil {
		return c.Misuse("%w", engine.ErrNoProcessSet)
	}
	if err := c.Check(); err != nil {
		return err
	}
	o.set = c.Set
	if !c.Kind.MovesData() {
		o.entries = o.entries[:1]
	}
	o.left.Store(int64(len(o.entries)))
	if c.Kind.IsMessage() {
		return o.post(&c)
	}
	queued := make([]*tensorqueue.Entry, len(o.entries))
	for i := range o.entries {
		e := &o.entries[i]
		done := func(err error) { o.finished(e, err) }
		if c.Kind == message.Join {
			return c.Join(&e.Entry, done)
		}
		c.Fill(&e.Entry)
		if o.on != nil {
			r.Devices.Marked(o.on.Event, o.conn, p.stream)
			e.Request.Device, e.Ready = tensor.CUDA(o.on.Device), []*cuda.Event{o.on.Event}
		}
		e.Done, queued[i] = done, &e.Entry
	}
	for i := range p.tensors {
		if err := o.place(&c, i); err != nil {
			return err
		}
	}
	switch {
	case len(queued) == 0:
		o.done(nil)
		return nil
	case p.parts != nil:
		q := &queued[0].Request
		q.Shape, q.Parts, q.DType = p.whole, p.parts, p.parts.DType()
	case p.grouped:
		return c.SubmitMembers(queued)
	}
	return c.Submit(queued[0])
}

// post begins the message of o, a send or a recv.
func (o *operation) post(c *rank.Call) (err error) {
	in, out := o.buffers(0)
	want := 0
	o.message.Buf = *in
	if c.Kind == message.Recv {
		if want = len(*in); *out == nil {
			if *out, err = o.allocate(0, want); err != nil {
				return err
			}
		}
		o.message.Buf = *out
	}
	if len(*out) != want {
		return c.Misuse("the output has %d bytes, want %d", len(*out), want)
	}
	o.message.Done = func(err error) { o.finished(&o.entries[0], err) }
	return c.Post(&o.message, o.plan.peer, o.plan.tag)
}

// place copies the type and shape of tensor i to its entry. If the client provides the output, place checks
// the size of the output. Otherwise it allocates the output, or lets the engine do so later.
func (o *operation) place(c *rank.Call, i int) (err error) {
	in, out := o.buffers(i)
	numBytes, t := len(*in), &o.plan.tensors[i] // numBytes becomes the size of the output
	if e := &o.entries[min(i, len(o.entries)-1)]; e.Parts == nil {
		e.Request.DType, e.Request.Shape = t.dtype, t.shape
		e.InPlace = numBytes > 0 && numBytes == len(*out) && &(*in)[0] == &(*out)[0]
		if c.Kind.HasRoot() {
			if err := c.CheckRoot(o.plan.root); err != nil {
				return err
			}
			e.Request.Root = topo.Rank(o.plan.root)
		}
		switch c.Kind {
		case message.Reduce:
			if !c.Set.IsRoot(o.plan.root) {
				numBytes = 0
			}
		case message.Reducescatter:
			// A scalar has no rows, so the operation will fail. The negotiation reports that error at all
			// ranks.
			if len(t.shape) > 0 {
				numBytes = int(o.shape(i)[0]) * (numBytes / max(int(t.shape[0]), 1))
			}
		case message.Allgather, message.Alltoall, message.Gather, message.Scatter:
			if err := o.split(c, e); err != nil {
				return err
			}
			// The size of the output is known only after the negotiation, so the engine calls Allocate then.
			if *out == nil {
				e.Allocate = func(numBytes int) []byte {
					b, err := o.allocate(i, numBytes)
					if err != nil {
						o.failed.CompareAndSwap(nil, &err)
					}
					return b
				}
			}
			return nil
		}
	}
	if *out == nil {
		if *out, err = o.allocate(i, numBytes); err != nil {
			return err
		}
	}
	if len(*out) != numBytes {
		return c.Misuse("the output has %d bytes, want %d", len(*out), numBytes)
	}
	return nil
}

// split sets the splits of e, which say how many rows go to each member.
func (o *operation) split(c *rank.Call, e *entry) (err error) {
	switch shape := e.Request.Shape; {
	case c.Kind == message.Scatter:
		return rank.PrepareScatter(c, &e.Entry, o.plan.splits)
	case len(shape) == 0: // The negotiation reports the error at all ranks.
	case c.Kind == message.Alltoall:
		e.Splits, err = rank.Splits(c, o.plan.splits, shape[0])
	case c.Kind == message.Gather:
		e.Splits = rank.SplitsTo(c, o.plan.root, shape[0])
	}
	return err
}

// allocate allocates the output of tensor i in an arena of the sidecar.
func (o *operation) allocate(i, numBytes int) ([]byte, error) {
	if numBytes == 0 {
		return []byte{}, nil
	}
	b, err := arena.Alloc(numBytes)
	if err == nil {
		o.allocated[i] = b
	}
	return b, err
}

// finished records that the entry e has completed with err. It is the Done function of e. When the last entry
// has completed, finished ends the operation.
func (o *operation) finished(e *entry, err error) {
	if o.plan.Kind == message.Join {
		o.set.Release()
	}
	e.err = err
	if o.left.Add(-1) > 0 {
		return
	}
	for i := range o.entries {
		if err := o.entries[i].err; err != nil {
			if why := o.failed.Load(); why != nil {
				// The error of the engine says only that memory could not be allocated. The error *why gives
				// the reason.
				err = *why
			}
			o.done(err)
			return
		}
	}
	for i, t := range o.plan.tensors {
		if t.dtype == tensor.Bool && o.on == nil {
			_, out := o.buffers(i)
			rank.OnlyBools(*out)
		}
	}
	o.done(nil)
}

// shape returns the shape of the result of tensor i.
func (o *operation) shape(i int) tensor.Shape {
	shape := slices.Clone(o.plan.tensors[i].shape)
	var rows []int64
	switch o.plan.Kind {
	case message.Reducescatter:
		if len(shape) > 0 {
			_, shape[0] = tensor.Rows(shape[0], o.set.Size(), o.set.Me)
		}
		return shape
	case message.Reduce:
		if !o.set.IsRoot(o.plan.root) {
			return tensor.Shape{0}
		}
		return shape
	case message.Allgather:
		rows = o.entries[i].Response.FirstDims
	case message.Scatter:
		shape = slices.Clone(o.entries[i].Response.Shape)
		rows = o.entries[i].Received
	case message.Alltoall, message.Gather:
		rows = o.entries[i].Received
	default:
		return shape
	}
	shape[0] = 0
	for _, n := range rows {
		shape[0] += n
	}
	return shape
}

// freeOutputs frees the outputs that the sidecar has allocated.
func (o *operation) freeOutputs() {
	for _, b := range o.allocated {
		if b != nil {
			o.conn.server.check(arena.Free(b))
		}
	}
	o.allocated = nil
}

// plain reports whether a client needs to know no more about o than that it has succeeded. It is false if the
// sidecar provides an output, even an empty output, because the client then needs the shape of the output.
func (o *operation) plain() bool {
	p := o.plan
	return !p.makes && !p.Kind.SendsRows() && p.Kind != message.Join &&
		(p.Kind != message.Recv || p.peer != int(p2p.AnySource))
}

// completion returns the answer to an operation that has succeeded. For an empty output that the sidecar
// provides, the answer has arena 0.
func (o *operation) completion() *sidecarpb.Completion {
	a := new(sidecarpb.Completion)
	switch kind := o.plan.Kind; {
	case kind.SendsRows():
		a.ReceivedSplits = o.entries[0].Received
	case kind == message.Join:
		a.LastJoined = int32(o.entries[0].Response.Root)
	case kind == message.Recv:
		a.Source = int32(o.message.Source)
	}
	for i := range o.plan.tensors {
		_, out := o.buffers(i)
		at := &sidecarpb.Memory{Bytes: uint64(len(*out))}
		switch given := o.plan.places[2*i+1]; {
		case !given.none:
			at.Arena, at.Offset = given.arena, given.offset
		case len(*out) > 0:
			ref, _ := arena.Find(*out)
			at.Arena, at.Offset = ownArenas+ref.Chunk, uint64(ref.Offset)
		}
		a.Results = append(a.Results, &sidecarpb.Result{Shape: o.shape(i), Memory: at})
	}
	return a
}
