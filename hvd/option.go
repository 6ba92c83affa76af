package hvd

import (
	"errors"
	"time"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Element is the constraint that element types satisfy: integers of 8 to 64 bits except uint32 and uint64,
// float32, float64, bool, and types whose underlying type is one of these. Float16 and BFloat16 are elements
// too.
type Element interface {
	~uint8 | ~int8 | ~uint16 | ~int16 | ~int32 | ~int64 | ~float32 | ~float64 | ~bool | Float16 | BFloat16
}

// Float16 is an IEEE 754 floating-point number of 16 bits. Go has no arithmetic for it: convert it with
// Float16FromFloat32 and the method Float32 (package half).
type Float16 = half.Float16

// BFloat16 is a floating-point number of 16 bits. It has the exponent of a float32 and 8 bits of precision.
// Go has no arithmetic for it: convert it with BFloat16FromFloat32 and the method Float32.
type BFloat16 = half.BFloat16

// Float16FromFloat32 rounds f to the nearest Float16, ties to even. Values that are too large become
// infinite.
func Float16FromFloat32(f float32) Float16 { return half.Float16FromFloat32(f) }

// BFloat16FromFloat32 rounds f to the nearest BFloat16, ties to even.
func BFloat16FromFloat32(f float32) BFloat16 { return half.BFloat16FromFloat32(f) }

// ReduceOp is a reduction: it says how the elements of all ranks are combined into one.
type ReduceOp uint8

// String returns the name of op, such as "sum".
func (op ReduceOp) String() string { return tensor.ReduceOp(op).String() }

// The reductions. Sums and products of integers wrap around on overflow.
const (
	// Average is the sum divided by the number of ranks, truncated toward zero for integers. The sum of
	// integers wraps around before the division.
	Average ReduceOp = iota + 1
	// Sum is the sum of the elements.
	Sum
	// Min is the smallest element, or NaN if any rank's element is NaN. For bools it is true if all elements
	// are true.
	Min
	// Max is the largest element, or NaN if any rank's element is NaN. For bools it is true if any element is
	// true.
	Max
	// Product is the product of the elements.
	Product
	// Adasum adds the parts of the tensors that are orthogonal to each other and averages the parts that are
	// parallel (Maleki et al., Scaling Distributed Training with Adaptive Summation, 2020). It is for
	// allreduce of floats, with any number of ranks.
	Adasum
	// AverageActive is the sum divided by the number of ranks that have not joined, truncated toward zero for
	// integers.
	AverageActive
)

// These are the options of operations, by the operations to which they apply. The functions that make options
// return types that have the methods of these interfaces, so an option that does not apply does not compile.
type (
	// An AllreduceOption is an option of Allreduce: On, Over, Timeout, Name, Shape, InPlace, Op, Prescale,
	// Postscale, CompressFP16, CompressBF16 or ErrorFeedback.
	AllreduceOption interface {
		allreduce()
		single()
	}
	// A ReduceOption is an option of Reduce and Reducescatter: On, Over, Timeout, Name, Shape, InPlace, Op,
	// Prescale or Postscale.
	ReduceOption interface {
		reduce()
		single()
	}
	// A MoveOption is an option of Allgather, Broadcast and Alltoall: On, Over, Timeout, Name, Shape or
	// InPlace.
	MoveOption interface {
		move()
		single()
	}
	// A GatherOption is an option of Gather and Scatter: On, Over, Timeout, Name or Shape.
	GatherOption interface {
		gather()
		single()
	}
	// A GroupedAllreduceOption is an option of GroupedAllreduce: an AllreduceOption except Shape, or Shapes.
	GroupedAllreduceOption interface {
		allreduce()
		group()
	}
	// A GroupedReduceOption is an option of GroupedReducescatter: a ReduceOption except Shape, or Shapes.
	GroupedReduceOption interface {
		reduce()
		group()
	}
	// A GroupedMoveOption is an option of GroupedAllgather: a MoveOption except Shape, or Shapes.
	GroupedMoveOption interface {
		move()
		group()
	}
	// A BarrierOption is an option of Barrier: On, Over, Timeout or Name.
	BarrierOption interface{ barrier() }
	// A MessageOption is an option of Send and Recv: On, Over or Timeout.
	MessageOption interface{ message() }
	// A JoinOption is an option of Join: On, Over, Timeout or Empty.
	JoinOption interface{ join() }
	// An AddProcessSetOption is an option of AddProcessSet: On, Timeout, Name or MembersOnly.
	AddProcessSetOption interface{ add() }
	// A RemoveProcessSetOption is an option of RemoveProcessSet: On or Timeout.
	RemoveProcessSetOption interface{ remove() }
	// A DeviceOption is an option that applies to the operations of package hvd/cuda too: all of them but
	// InPlace.
	DeviceOption interface{ device() }
)

// The markers below are parts of the types of options. They give these types the methods of the interfaces.
type (
	ofAllreduce struct{}
	ofReduce    struct{ ofAllreduce }
	ofMove      struct{ ofReduce }
	ofTensor    struct{ ofMove }   // of every operation on tensors
	ofSet       struct{ ofTensor } // of every operation on a process set
	ofSingle    struct{}
	ofGroup     struct{}
	ofAnyNumber struct {
		ofSingle
		ofGroup
	}
	ofDevice struct{}
	ofAdd    struct{}
)

func (ofAllreduce) allreduce() {}
func (ofReduce) reduce()       {}
func (ofMove) move()           {}
func (ofTensor) gather()       {}
func (ofSet) barrier()         {}
func (ofSet) message()         {}
func (ofSet) join()            {}
func (ofSingle) single()       {}
func (ofGroup) group()         {}
func (ofDevice) device()       {}
func (ofAdd) add()             {}

// AnyOption is an option of every operation.
type AnyOption struct {
	ofSet
	ofAnyNumber
	ofDevice
	ofAdd
	engine  *Engine
	timeout time.Duration
	kind    rank.Option
}

func (AnyOption) remove() {}

// SetOption is the option Over.
type SetOption struct {
	ofSet
	ofAnyNumber
	ofDevice
	set *ProcessSet
	// With a second field, the pointer is not itself the value of an interface. Otherwise the compiler moves
	// all options of a call to the heap.
	_ bool
}

// NameOption is the option Name.
type NameOption struct {
	ofTensor
	ofAnyNumber
	ofDevice
	ofAdd
	text string
}

func (NameOption) barrier() {}

// ShapeOption is the option Shape.
type ShapeOption struct {
	ofTensor
	ofSingle
	ofDevice
	dims []int
}

// ShapesOption is the option Shapes.
type ShapesOption struct {
	ofTensor
	ofGroup
	ofDevice
	shapes [][]int
}

// InPlaceOption is the option InPlace.
type InPlaceOption struct {
	ofMove
	ofAnyNumber
	set bool
}

// ReductionOption is an option of all reductions: Op, Prescale or Postscale.
type ReductionOption struct {
	ofReduce
	ofAnyNumber
	ofDevice
	op     ReduceOp
	kind   rank.Option
	factor float64
}

// CompressionOption is an option of allreduces: CompressFP16, CompressBF16 or ErrorFeedback.
type CompressionOption struct {
	ofAllreduce
	ofAnyNumber
	ofDevice
	wire          tensor.DType
	errorFeedback bool
}

// EmptyOption is the option Empty.
type EmptyOption struct{ set bool }

func (EmptyOption) join() {}

// MembersOnlyOption is the option MembersOnly.
type MembersOnlyOption struct {
	ofAdd
	set bool
}

// The compiler refuses this index if the numbers of the reductions differ from those of the engine.
var _ = [1]struct{}{}[AverageActive-ReduceOp(tensor.AverageActive)]

// Name gives the tensor a name, which has 1 to 4096 bytes of UTF-8. The default, also for "", is a generated
// name (see Names in the package comment). Name applies to all operations except Join, Send, Recv and
// RemoveProcessSet.
func Name(name string) NameOption { return NameOption{text: name} }

// Op chooses the reduction of an allreduce, a reduce or a reducescatter, or of a group of these. The default
// is Average. Bools can have only Min and Max, so they need this option. Adasum can have only the allreduce
// of floats.
func Op(op ReduceOp) ReductionOption { return ReductionOption{kind: rank.OptOp, op: op} }

// InPlace makes the result overwrite the argument, which saves memory and usually also a copy. By default,
// the result is a new slice. InPlace applies to allreduce, reduce, allgather, broadcast, alltoall,
// reducescatter and groups of these, but not to device buffers.
//
// In an allgather, every rank must contribute the same number of rows. The argument must have room for the
// rows of all ranks in rank order, and must hold the rows of this rank at their place. So its length must be
// a multiple of the number of ranks. A reducescatter uses the whole argument as working memory, and returns
// the slice of the argument that holds the rows of this rank. In an alltoall, this rank must receive as many
// rows as it sends. If the result of an allgather or alltoall does not fit the argument, the operation fails
// with a *MismatchError at this rank only.
func InPlace() InPlaceOption { return InPlaceOption{set: true} }

// Shape sets the dimensions of the argument, at most 64. By default, the argument has one dimension. The
// product of dims must be the length of the argument. Ranks that give different shapes get a *MismatchError,
// but the first dimension may differ in an allgather, alltoall or gather. Shape() is the shape of a scalar. A
// scalar has no rows, so operations on rows fail. Shape applies to operations on a single tensor: groups have
// Shapes.
func Shape(dims ...int) ShapeOption { return ShapeOption{dims: dims} }

// Shapes sets the dimensions of each tensor of a group, in the order of the tensors, as Shape does for a
// single tensor. There must be one shape for each tensor. By default, every tensor has one dimension.
func Shapes(shapes ...[]int) ShapesOption { return ShapesOption{shapes: shapes} }

// Prescale multiplies the argument of an allreduce, a reduce or a reducescatter by f before the reduction.
// The default is 1. f must not be NaN, and must be 1 for bools. The product is computed in float32 for
// float32 and the 16-bit floats, and in float64 for other types. It is truncated toward zero for integers.
func Prescale(f float64) ReductionOption { return ReductionOption{kind: rank.OptPrescale, factor: f} }

// Postscale multiplies the result of an allreduce, a reduce or a reducescatter by f. The default is 1. f is
// restricted, and the product is computed and truncated, as for Prescale. If the reduction is an average over
// n ranks, the sum is multiplied once, by f/n.
func Postscale(f float64) ReductionOption { return ReductionOption{kind: rank.OptPostscale, factor: f} }

// CompressFP16 sends the elements of an allreduce as float16. By default, elements are not compressed. The
// elements must be of type float32 or float64, so that half or a quarter of the bytes are sent. They keep 11
// bits of precision, and values above 65504 become infinite. Each rank scales its argument and then rounds it
// once. Sums are computed in float32 and rounded once, before the division of an average. So if a sum may be
// above 65504, use Op(Sum) and Prescale(1/n) for n ranks. For other operations than an allreduce, convert the
// elements to Float16 or BFloat16.
func CompressFP16() CompressionOption { return CompressionOption{wire: tensor.Float16} }

// CompressBF16 is like CompressFP16, but sends bfloat16, with 8 bits of precision and the range of float32.
func CompressBF16() CompressionOption { return CompressionOption{wire: tensor.BFloat16} }

// ErrorFeedback adds the rounding error of a compressed argument to the next argument that has the same name,
// type and length at this rank. By default, rounding errors are lost. ErrorFeedback applies to sums and
// averages, and needs the options Name and CompressFP16 or CompressBF16. The rounding error of the sum is not
// compensated. For each name, the engine keeps as many bytes as the tensor has, until Shutdown.
func ErrorFeedback() CompressionOption { return CompressionOption{errorFeedback: true} }

// Empty makes this rank, while it has joined, take part in the allgathers, broadcasts, alltoalls,
// reducescatters, gathers and scatters of the other ranks with an empty tensor. By default, such an operation
// fails with a *MismatchError while this rank has joined. Empty applies to Join and JoinAsync.
func Empty() EmptyOption { return EmptyOption{set: true} }

// Timeout limits the time from the submission of the operation to its completion. d must be positive. If the
// operation takes longer, the job fails at all ranks with a *PeerError, because no rank can distinguish a
// late rank from one that will never submit. A context of a call limits only the wait. The default is
// HVD_OPERATION_TIMEOUT_SECONDS, which by default sets no limit. A Join has no limit by default.
func Timeout(d time.Duration) AnyOption { return AnyOption{kind: rank.OptTimeout, timeout: d} }

// Over runs the operation among the members of set, and on the engine of set. The default is all ranks. This
// rank must be a member. Over does not apply to AddProcessSet and RemoveProcessSet, in which all ranks take
// part.
func Over(set *ProcessSet) SetOption { return SetOption{set: set} }

// MembersOnly makes a call of AddProcessSet an operation of the members only: the other ranks do not call it
// and do not know the set. By default, all ranks call it. MembersOnly applies to AddProcessSet.
func MembersOnly() MembersOnlyOption { return MembersOnlyOption{set: true} }

// On runs the operation on e, which New has returned. The default is the engine of the process set, if the
// call has one, and otherwise the engine that Init started. A process set of another engine is an error.
func On(e *Engine) AnyOption { return AnyOption{kind: rank.OptOn, engine: e} }

// call is an operation with the options that the program passed.
type call struct {
	rank.Call
	engine *Engine
	over   *ProcessSet // the argument of Over, or nil without that option
	shapes [][]int     // if nil, every tensor has one dimension
}

// prepare makes a call for an operation of the given kind on elements of type dt, and applies opts to it. O
// is an interface of options. A switch over the types of the options, unlike a method of theirs, lets them
// stay on the stack of the caller.
func prepare[O any](kind message.Kind, dt tensor.DType, opts []O) (c call, err error) {
	c.Call = rank.NewCall(kind, dt)
	for i := range opts {
		if o, ok := any(opts[i]).(NameOption); ok { // the name comes first, because errors show it
			c.Name = o.text
		}
	}
	for i := range opts {
		if err := c.take(opts[i]); err != nil {
			return c, err
		}
	}
	if err := c.locate(); err != nil {
		return c, err
	}
	c.Hold = c.Name != "" // a generated name is never used twice, so it need not be held
	err = c.Check()
	return c, err
}

// take applies the option.
func (c *call) take(option any) error {
	switch o := option.(type) {
	case NameOption:
	case InPlaceOption:
		c.InPlace = o.set
	case ShapeOption:
		c.shapes = [][]int{o.dims}
	case ShapesOption:
		c.shapes = o.shapes
		if c.shapes == nil {
			c.shapes = [][]int{} // Shapes without arguments is wrong unless the group is empty
		}
	case ReductionOption:
		switch o.kind {
		case rank.OptOp:
			c.Op = tensor.ReduceOp(o.op)
		case rank.OptPrescale:
			c.Prescale = o.factor
		case rank.OptPostscale:
			c.Postscale = o.factor
		}
	case CompressionOption:
		if o.errorFeedback {
			c.ErrorFeedback = true
		} else {
			c.Wire = o.wire
		}
	case EmptyOption:
		c.Empty = o.set
	case MembersOnlyOption:
		c.MembersOnly = o.set
	case SetOption:
		c.over = o.set
		if c.over == nil || c.over.engine == nil {
			return c.Misuse("%w", errNoSet)
		}
	case AnyOption:
		return c.takeAny(&o)
	default:
		return c.Misuse("an option is nil")
	}
	return nil
}

func (c *call) takeAny(o *AnyOption) error {
	switch o.kind {
	case rank.OptTimeout:
		c.Timeout = o.timeout
		if c.Timeout <= 0 {
			return c.Misuse("got timeout %v, want more than 0", o.timeout)
		}
	case rank.OptOn:
		c.engine = o.engine
		if c.engine == nil || c.engine.rank.Engine == nil {
			return c.Misuse("engine is nil or a zero Engine, want one from New")
		}
	}
	return nil
}

// errNoSet is the cause of the error of a call with a process set that belongs to no engine.
var errNoSet = errors.New("process set is nil or a zero ProcessSet, want one from AddProcessSet or ProcessSets")

// ofFormerEngine is the format of the error of a call whose process set is of an engine that has failed and
// was shut down. The error is not the reason of that failure, because a program would believe that the engine
// of the next Init has failed.
const ofFormerEngine = "%v is of a job that has failed and that this rank has left: add it again in the next job"

// ofAnotherEngine is the format of the error of a call whose process set is not of the engine of option On.
const ofAnotherEngine = "%v belongs to another engine"

// locate sets the engine and the process set of the call.
func (c *call) locate() error {
	switch {
	case c.over != nil && c.over.engine.former():
		return c.Misuse(ofFormerEngine, c.over)
	case c.over != nil && c.engine == nil:
		c.engine = c.over.engine
	case c.over != nil && c.engine != c.over.engine:
		return c.Misuse(ofAnotherEngine, c.over)
	case c.engine == nil:
		c.engine = current()
		if c.engine == nil {
			return c.Misuse("%w", ErrNotInitialized)
		}
	}
	c.Rank = &c.engine.rank
	if c.over != nil {
		c.Set = c.over.set
	}
	return nil
}

// shape returns the shape that the option Shape or Shapes gives for tensor i. It fails if that shape does not
// have numElems elements, which is the length of the tensor.
func (c *call) shape(i, numElems int) (tensor.Shape, error) {
	s := make(tensor.Shape, len(c.shapes[i]))
	for d, n := range c.shapes[i] {
		s[d] = int64(n)
	}
	if n, err := s.NumElems(); err != nil || n != int64(numElems) {
		return nil, c.Misuse("shape %v does not match the tensor, which has %d elements", s, numElems)
	}
	return s, nil
}
