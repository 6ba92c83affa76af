package library

import (
	"context"
	"errors"
	"math"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

// Op is an operation of the program. The caller sets the exported fields before Submit or Run, and does not
// use the Op afterwards.
type Op struct {
	Spec rank.Spec
	// Places has the memory of each tensor. If Out is nil, Memory provides the output. SetTensors and
	// SetTensor set it, and the tensors of Spec.
	Places []Place
	// If OnDevice is set, the tensors are on the CUDA device with the number Device, and the operation begins
	// after the work that is on Stream, a cudaStream_t.
	OnDevice bool
	Device   int
	Stream   uintptr

	event
	operation rank.Operation
	execution rank.Execution
	rank      *rank.Rank
	memory    Memory
	made      [][]byte // the outputs that memory has provided, by tensor; nil if each has one
	freed     atomic.Bool

	// These arrays back the slices of an operation on one tensor.
	oneTensor [1]rank.TensorSpec
	onePlace  [1]Place
	oneBuffer [1]rank.Buffer
	dims      [4]int64
}

// SetTensors makes o an operation on n tensors, whose specs and places the caller then sets.
func (o *Op) SetTensors(n int) {
	if o.Spec.Tensors, o.Places = o.oneTensor[:], o.onePlace[:]; n != 1 {
		o.Spec.Tensors, o.Places = make([]rank.TensorSpec, n), make([]Place, n)
	}
}

// SetTensor sets the spec and the place of tensor i. o copies the shape.
func (o *Op) SetTensor(i int, dtype uint32, shape []int64, at Place) {
	to := o.dims[:0] // the shape of a tensor is not changed after its operation
	if len(o.Places) != 1 {
		to = nil
	}
	o.Spec.Tensors[i] = rank.TensorSpec{DType: dtype, Shape: append(to, shape...)}
	o.Places[i] = at
}

// Place is the memory of a tensor: the input, and an output of OutBytes bytes.
type Place struct {
	In, Out  unsafe.Pointer
	OutBytes uint64
}

// Memory provides memory for results whose size only the engine knows. Any goroutine may call its functions.
type Memory struct {
	Alloc func(numBytes int) ([]byte, error)
	Free  func([]byte)
}

// Result is the result of something that has succeeded.
type Result struct {
	Outputs                 []Output // one for each tensor
	Received                []int64  // the rows that came from each member, if the operation sends rows
	Source, LastJoined, Set int
}

// Output is the result of one tensor.
type Output struct {
	Data  []byte
	Shape tensor.Shape
	Made  bool // whether Memory has provided Data
}

// begin submits o.
func (l *Library) begin(o *Op, memory Memory) error {
	if err := o.operation.Describe(&o.Spec); err != nil {
		return err
	}
	x := &o.execution
	if o.rank = l.running.Load(); o.rank == nil {
		return o.operation.Misuse("%w", rank.ErrNotInitialized)
	}
	o.memory = memory
	o.operation.Hold = o.Spec.Name != ""
	x.Operation, x.Rank, x.Owner = &o.operation, o.rank, o
	if err := o.setBuffers(); err != nil {
		return err
	}
	if o.OnDevice {
		if err := o.mark(); err != nil {
			return o.operation.Misuse("%w", err)
		}
	}
	if err := x.Begin(); err != nil {
		o.unmark()
		o.free()
		return err
	}
	return nil
}

// setBuffers sets the buffers of the execution to the places of the tensors.
func (o *Op) setBuffers() error {
	x := &o.execution
	if x.Buffers = o.oneBuffer[:]; len(o.operation.Tensors) != 1 {
		x.Buffers = make([]rank.Buffer, len(o.operation.Tensors))
	}
	isRoot := o.Spec.Root == o.rank.Place.Rank
	for i := range x.Buffers {
		p, t, b := &o.Places[i], &o.operation.Tensors[i], &x.Buffers[i]
		size := uintptr(t.DType.Size())
		kind := o.operation.Kind
		switch {
		case kind == message.Recv, (kind == message.Broadcast || kind == message.Scatter) && !isRoot:
			p.In = nil // it is not used
		case p.In == nil && t.NumBytes > 0:
			return o.operation.Misuse("tensor %d: got no input", i)
		}
		if kind == message.Send || kind == message.Reduce && !isRoot {
			p.Out = nil // it is not used either
		}
		switch {
		case uintptr(p.In)%size != 0:
			return o.operation.Misuse("tensor %d: got an input at address %p, want a multiple of %d", i, p.In, size)
		case uintptr(p.Out)%size != 0:
			return o.operation.Misuse("tensor %d: got an output at address %p, want a multiple of %d", i, p.Out, size)
		case p.Out != nil && p.OutBytes > math.MaxInt:
			return o.operation.Misuse("tensor %d: got an output of %d bytes", i, p.OutBytes)
		}
		if p.Out != nil {
			b.Out = unsafe.Slice((*byte)(p.Out), p.OutBytes)
		} else if o.made == nil {
			o.made = make([][]byte, len(x.Buffers))
		}
		switch {
		case p.In != nil:
			b.In = unsafe.Slice((*byte)(p.In), t.NumBytes)
		case kind == message.Broadcast:
			b.In = b.Out
		}
	}
	return nil
}

// perThread is the cudaStream_t that names the default stream of the calling thread.
const perThread = 2

// mark makes o begin after the work that is on its stream now.
func (o *Op) mark() error {
	switch {
	case o.rank.Remote != nil:
		return errors.New("the sidecar cannot use memory of a CUDA device of this process: use host memory, or unset HVD_SIDECAR")
	case !o.operation.Kind.MovesData():
		return errors.New("got a device, but this operation has no tensor on a device")
	case o.Device >= tensor.MaxCUDADevices:
		return errors.New("got a device that no host has")
	case o.Stream == perThread:
		return errors.New("got stream 2, which is another stream in each thread")
	}
	noOutput := o.operation.Kind == message.Reduce && o.Spec.Root != o.rank.Place.Rank
	for _, b := range o.execution.Buffers {
		if b.Out == nil && b.In != nil && !noOutput {
			return errors.New("the library does not allocate memory of CUDA devices: give all tensors an output")
		}
	}
	e, err := o.rank.Devices.Mark(o.Device, o.Stream)
	if err != nil {
		return err
	}
	x := &o.execution
	x.Device, x.Ready = tensor.CUDA(o.Device), []*cuda.Event{e}
	if o.rank.AsyncCompletion {
		x.Streams = []uintptr{o.Stream}
	}
	return nil
}

// unmark gives the event of mark back.
func (o *Op) unmark() {
	for _, e := range o.execution.Ready {
		o.rank.Devices.Release(e)
	}
	o.execution.Ready = nil
}

// Allocate implements rank.Owner. It provides the output of tensor i.
func (o *Op) Allocate(i, numBytes int) ([]byte, error) {
	b, err := o.memory.Alloc(numBytes)
	if err == nil {
		o.made[i] = b
	}
	return b, err
}

// Finished implements rank.Owner. It is called when the operation has ended.
func (o *Op) Finished(err error) {
	o.unmark()
	if err != nil {
		if _, is := errors.AsType[*ops.InUseError](err); !is {
			o.free()
		}
	}
	o.complete(err)
}

// free frees the outputs that memory has provided.
func (o *Op) free() {
	for _, b := range o.made {
		if b != nil {
			o.memory.Free(b)
		}
	}
	o.made = nil
}

func (o *Op) drive(deadline time.Time, quit func() bool) {
	ctx := context.Background()
	switch {
	case deadline.IsZero():
	case o.rank.Remote == nil:
		quit = until(deadline, quit)
	default: // the thread may sleep, so it cannot look at the clock
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, deadline)
		defer cancel()
	}
	o.execution.Drive(ctx, quit)
}

func (o *Op) notify() { o.execution.Flush() }

func (o *Op) seen() {
	if !o.freed.Swap(true) {
		o.execution.Seen()
	}
}

func (o *Op) take(into *Result) error {
	if o.err != nil {
		return o.err
	}
	if into == nil {
		o.free()
		return nil
	}
	x := &o.execution
	into.Received = x.Received()
	switch x.Kind {
	case message.Join:
		into.LastJoined = x.LastJoined()
	case message.Recv:
		into.Source = x.Source()
	}
	for i, b := range x.Buffers {
		into.Outputs = append(into.Outputs, Output{Data: b.Out, Shape: x.Shape(i),
			Made: o.made != nil && o.made[i] != nil})
	}
	return nil
}

// Submit submits o. memory provides the outputs for which o has no memory.
func (l *Library) Submit(o *Op, memory Memory) (Handle, error) {
	if err := l.begin(o, memory); err != nil {
		return 0, err
	}
	o.execution.NotifyLater()
	return l.handles.add(o), nil
}

// Run submits o and waits as Wait does. If it returns ErrPending, the handle is that of o.
func (l *Library) Run(o *Op, memory Memory, limit time.Duration, into *Result) (Handle, error) {
	if err := l.begin(o, memory); err != nil {
		return 0, err
	}
	if !await(o, limit) {
		o.execution.NotifyLater()
		return l.handles.add(o), ErrPending
	}
	o.seen()
	return 0, o.take(into)
}
