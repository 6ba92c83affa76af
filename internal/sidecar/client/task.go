package client

import (
	"encoding/binary"
	"math"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/tensorqueue"
)

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

// ref returns the key of k in calls.of.
func (t *task) ref() any {
	if t.message != nil {
		return t.message
	}
	return t.entries[0]
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
