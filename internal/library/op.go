package library

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

// Op is an operation of the program. The caller sets its fields before Submit or Run. The Library keeps no
// reference to the Op, to its slices or to its name, but the places of its tensors are in use until the
// operation is done.
type Op struct {
	Spec rank.Spec
	// Places has the memory of each tensor of Spec. If Out is nil, the Library provides the output.
	Places []Place
	// If OnDevice is set, the tensors are on the CUDA device with the number Device, and the operation begins
	// after the work that is on Stream, a cudaStream_t.
	OnDevice bool
	Device   int
	Stream   uintptr
	// If Launched is set, an operation that a backend runs on the device is done when it has been launched,
	// and ResultStream, a cudaStream_t of the device, waits for it. Otherwise the setting of the rank
	// decides, and so it does in an elastic job, where a commit must not be granted before the operations
	// have ended.
	Launched     bool
	ResultStream uintptr
	// Allocate returns memory of the device for the output of tensor i, or nil. It is called with the device
	// as the current one of the thread. If it is nil itself, all results on a device that have elements need
	// an output.
	Allocate func(i, numBytes int) unsafe.Pointer
}

// Place is the memory of a tensor: the input, and an output of OutBytes bytes.
type Place struct {
	In, Out  unsafe.Pointer
	OutBytes uint64
}

// call is an Op in flight.
type call struct {
	event
	library   *Library
	execution rank.Execution
	made      [][]byte // the outputs that the library has provided, by tensor; nil if each has one
	freed     atomic.Bool
	over      func() bool // the method ended

	// device, stream and allocate are those of the Op if its tensors are on a device.
	device   int
	stream   uintptr
	allocate func(i, numBytes int) unsafe.Pointer

	oneBuffer [1]rank.Buffer // backs the buffers of an operation on one tensor
}

// begin submits o.
func (l *Library) begin(o *Op) (*call, error) {
	described, err := l.operations.find(&o.Spec)
	if err != nil {
		return nil, err
	}
	r := l.running.Load()
	if r == nil {
		return nil, described.Misuse("%w", l.absence())
	}
	c := l.calls.take()
	if c == nil {
		c = &call{library: l}
		c.over = c.ended
	}
	x := &c.execution
	x.Operation, x.Rank, x.Owner = described, r, c
	if err := c.setBuffers(o); err != nil {
		return nil, err
	}
	if o.OnDevice {
		if err := c.mark(o); err != nil {
			return nil, described.OnDevice(r, err)
		}
	}
	if err := x.Begin(); err != nil {
		c.unmark()
		c.free()
		return nil, err
	}
	return c, nil
}

// reset makes c the call that begin has made.
func (c *call) reset() {
	c.event = event{}
	c.execution.Reset()
	c.made, c.oneBuffer = nil, [1]rank.Buffer{}
	if c.freed.Load() {
		c.freed.Store(false)
	}
}

// maxFree bounds the memory of free calls, to some 4 MB.
const maxFree = 4096

// freeCalls are calls that have succeeded and that nobody uses, so that further operations can use their
// memory.
type freeCalls struct {
	mu  sync.Mutex
	all []*call
}

func (f *freeCalls) add(c *call) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.all) < maxFree {
		f.all = append(f.all, c)
	}
}

// take returns a call that was reset, or nil if there is none. A call is reset only now, because its memory
// comes into the cache of this thread anyway.
func (f *freeCalls) take() *call {
	f.mu.Lock()
	n := len(f.all) - 1
	if n < 0 {
		f.mu.Unlock()
		return nil
	}
	c := f.all[n]
	f.all[n] = nil
	f.all = f.all[:n]
	f.mu.Unlock()
	c.reset()
	return c
}

// clear drops all calls, because they refer to the last job.
func (f *freeCalls) clear() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all = nil
}

// setBuffers sets the buffers of the execution to the places of the tensors of o.
func (c *call) setBuffers(o *Op) error {
	x := &c.execution
	x.Buffers = c.oneBuffer[:]
	if len(x.Tensors) != 1 {
		x.Buffers = make([]rank.Buffer, len(x.Tensors))
	}
	kind, isRoot := x.Kind, x.Root == x.Rank.Place.Rank
	for i := range x.Buffers {
		p, t, b := o.Places[i], &x.Tensors[i], &x.Buffers[i]
		size := uintptr(t.DType.Size())
		switch {
		case kind == message.Recv, (kind == message.Broadcast || kind == message.Scatter) && !isRoot:
			p.In = nil // it is not used
		case p.In == nil && t.NumBytes > 0:
			return x.Misuse("tensor %d: got no input", i)
		}
		if kind == message.Send || kind == message.Reduce && !isRoot {
			p.Out = nil // it is not used either
		}
		switch {
		case uintptr(p.In)%size != 0:
			return x.Misuse("tensor %d: got an input at address %p, want a multiple of %d", i, p.In, size)
		case uintptr(p.Out)%size != 0:
			return x.Misuse("tensor %d: got an output at address %p, want a multiple of %d", i, p.Out, size)
		case p.Out != nil && p.OutBytes > math.MaxInt:
			return x.Misuse("tensor %d: got an output of %d bytes", i, p.OutBytes)
		}
		if p.Out != nil {
			b.Out = unsafe.Slice((*byte)(p.Out), p.OutBytes)
		} else if c.made == nil {
			c.made = make([][]byte, len(x.Buffers))
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

// mark makes c begin after the work that is on the stream of o now.
func (c *call) mark(o *Op) error {
	x := &c.execution
	switch {
	case x.Rank.Remote != nil:
		return errors.New("the sidecar cannot use memory of a CUDA device of this process: use host memory, or unset HVD_SIDECAR")
	case !x.Kind.MovesData():
		return errors.New("got a device, but this operation has no tensor on a device")
	case o.Device >= tensor.MaxCUDADevices:
		return errors.New("got a device that no host has")
	case o.Stream == perThread, o.Launched && o.ResultStream == perThread:
		return errors.New("got stream 2, which is another stream in each thread")
	}
	e, err := x.Rank.Mark(o.Device, o.Stream)
	if err != nil {
		return err
	}
	x.Device, x.Ready = tensor.CUDA(o.Device), []*cuda.Event{e}
	c.device, c.stream, c.allocate = o.Device, o.Stream, o.Allocate
	switch {
	case o.Launched && (x.Rank.AsyncCompletion || rank.ProcessMembership() == nil):
		x.Streams = []uintptr{o.ResultStream}
	case x.Rank.AsyncCompletion:
		x.Streams = []uintptr{o.Stream}
	}
	return nil
}

// unmark gives the event of mark back.
func (c *call) unmark() {
	for _, e := range c.execution.Ready {
		c.execution.Rank.Devices.Release(e)
	}
	c.execution.Ready = nil
}

// Allocate implements rank.Owner. It provides the output of tensor i.
func (c *call) Allocate(i, numBytes int) ([]byte, error) {
	if c.execution.Device != tensor.Host {
		return c.allocateOnDevice(i, numBytes)
	}
	b, err := c.library.memory.Alloc(numBytes)
	if err == nil {
		c.made[i] = b
	}
	return b, err
}

// allocateOnDevice returns memory of the program for the output of tensor i. Earlier work on the stream may
// still use it, so the operation must wait for that too.
func (c *call) allocateOnDevice(i, numBytes int) ([]byte, error) {
	if numBytes == 0 {
		return nil, nil
	}
	x := &c.execution
	if c.allocate == nil {
		return nil, x.Misuse("tensor %d: the result has %d bytes on device %d, of which the library does not "+
			"allocate memory: give the tensor an output, or the operation a function that allocates it", i,
			numBytes, c.device)
	}
	var p unsafe.Pointer
	err := x.Rank.Devices.Use(c.device, func() error {
		p = c.allocate(i, numBytes)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if p == nil {
		return nil, fmt.Errorf("the program has not allocated the result of tensor %d, which has %d bytes, on "+
			"device %d", i, numBytes, c.device)
	}
	e, err := x.Rank.Devices.Mark(c.device, c.stream)
	if err != nil {
		return nil, err
	}
	x.Ready = append(x.Ready, e)
	return unsafe.Slice((*byte)(p), numBytes), nil
}

// Finished implements rank.Owner. It is called when the operation has ended.
func (c *call) Finished(err error) {
	c.unmark()
	if err != nil {
		if _, is := errors.AsType[*ops.InUseError](err); !is {
			c.free()
		}
	}
	c.complete(err)
}

// free frees the outputs that memory has provided.
func (c *call) free() {
	for _, b := range c.made {
		if b != nil {
			c.library.memory.Free(b)
		}
	}
	c.made = nil
}

func (c *call) drive(deadline time.Time, quit func() bool) {
	if quit == nil {
		quit = c.over
	}
	c.execution.Drive(deadline, quit)
}

func (c *call) beginWait() time.Duration { return c.execution.BeginWait() }

func (c *call) endWait(begun time.Duration) { c.execution.EndWait(begun) }

func (c *call) notify() { c.execution.Flush() }

func (c *call) seen() {
	if !c.freed.Swap(true) {
		c.execution.Seen()
	}
}

func (c *call) take(into *Result) error {
	if c.err != nil {
		return c.err
	}
	if into == nil {
		c.free()
		return nil
	}
	x := &c.execution
	into.Received = x.Received()
	switch x.Kind {
	case message.Join:
		into.LastJoined = x.LastJoined()
	case message.Recv:
		into.Source = x.Source()
	}
	for i, b := range x.Buffers {
		into.Outputs = append(into.Outputs, Output{Data: b.Out, Shape: x.Shape(i),
			Made: c.made != nil && c.made[i] != nil})
	}
	return nil
}

// Submit submits o.
func (l *Library) Submit(o *Op) (Handle, error) {
	c, err := l.begin(o)
	if err != nil {
		return 0, err
	}
	c.execution.NotifyLater()
	return l.handles.add(c), nil
}

// Run submits o and waits as Wait does. If it returns ErrPending, the handle is that of o.
func (l *Library) Run(o *Op, limit time.Duration, into *Result) (Handle, error) {
	c, err := l.begin(o)
	if err != nil {
		return 0, err
	}
	if !await(c, limit) {
		c.execution.NotifyLater()
		return l.handles.add(c), ErrPending
	}
	return 0, l.finish(c, into, true)
}
