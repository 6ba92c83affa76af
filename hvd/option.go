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
// Float16FromFloat32 and the method Float32.
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
	// Average is the sum divided by the number of ranks, truncated toward zero for integers.
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

// An Option configures one operation. Which options an operation accepts and what happens if one is wrong is
// the same for all of them: see Options in the package comment.
type Option struct {
	kind     rank.Option
	text     string
	op       ReduceOp
	wire     tensor.DType
	factor   float64
	shapes   [][]int
	duration time.Duration
	engine   *Engine
	set      *ProcessSet
}

// The compiler refuses this index if the numbers of the reductions differ from those of the engine.
var _ = [1]struct{}{}[AverageActive-ReduceOp(tensor.AverageActive)]

// Name gives the tensor a name, which has 1 to 4096 bytes of UTF-8. The default, also for "", is a generated
// name (see Names in the package comment). Name applies to all operations except Join, Send, Recv and
// RemoveProcessSet.
func Name(name string) Option { return Option{kind: rank.OptName, text: name} }

// Op chooses the reduction of an allreduce, a reduce or a reducescatter, or of a group of these. The default
// is Average. Bools can have only Min and Max, so they need this option. Adasum can have only the allreduce
// of floats.
func Op(op ReduceOp) Option { return Option{kind: rank.OptOp, op: op} }

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
func InPlace() Option { return Option{kind: rank.OptInPlace} }

// Shape sets the dimensions of the argument, at most 64. By default, the argument has one dimension. The
// product of dims must be the length of the argument. Ranks that give different shapes get a *MismatchError,
// but the first dimension may differ in an allgather, alltoall or gather. Shape() is the shape of a scalar. A
// scalar has no rows, so operations on rows fail. Shape applies to operations on a single tensor: groups have
// Shapes.
func Shape(dims ...int) Option { return Option{kind: rank.OptShape, shapes: [][]int{dims}} }

// Shapes sets the dimensions of each tensor of a group, in the order of the tensors, as Shape does for a
// single tensor. There must be one shape for each tensor. By default, every tensor has one dimension.
func Shapes(shapes ...[]int) Option { return Option{kind: rank.OptShapes, shapes: shapes} }

// Prescale multiplies the argument of an allreduce, a reduce or a reducescatter by f before the reduction.
// The default is 1. f must not be NaN, and must be 1 for bools. The product is computed in float32 for
// float32 and the 16-bit floats, and in float64 for other types. It is truncated toward zero for integers.
func Prescale(f float64) Option { return Option{kind: rank.OptPrescale, factor: f} }

// Postscale multiplies the result of an allreduce, a reduce or a reducescatter by f. The default is 1. f is
// restricted, and the product is computed and truncated, as for Prescale. If the reduction is an average over
// n ranks, the sum is multiplied once, by f/n.
func Postscale(f float64) Option { return Option{kind: rank.OptPostscale, factor: f} }

// CompressFP16 sends the elements of an allreduce as float16. By default, elements are not compressed. The
// elements must be of type float32 or float64, so that half or a quarter of the bytes are sent. They keep 11
// bits of precision, and values above 65504 become infinite. Each rank scales its argument and then rounds it
// once. Sums are computed in float32 and rounded once.
func CompressFP16() Option { return Option{kind: rank.OptCompress, wire: tensor.Float16} }

// CompressBF16 is like CompressFP16, but sends bfloat16, with 8 bits of precision and the range of float32.
func CompressBF16() Option { return Option{kind: rank.OptCompress, wire: tensor.BFloat16} }

// ErrorFeedback adds the rounding error of a compressed argument to the next argument that has the same name,
// type and length at this rank. By default, rounding errors are lost. ErrorFeedback applies to sums and
// averages, and needs the options Name and CompressFP16 or CompressBF16. The rounding error of the sum is not
// compensated. For each name, the engine keeps as many bytes as the tensor has, until Shutdown.
func ErrorFeedback() Option { return Option{kind: rank.OptErrorFeedback} }

// Empty makes this rank, while it has joined, take part in the allgathers, broadcasts, alltoalls,
// reducescatters, gathers and scatters of the other ranks with an empty tensor. By default, such an operation
// fails with a *MismatchError while this rank has joined. Empty applies to Join and JoinAsync.
func Empty() Option { return Option{kind: rank.OptEmpty} }

// Timeout limits the time from the submission of the operation to its completion. d must be positive. If the
// operation takes longer, the job fails at all ranks with a *PeerError, because no rank can distinguish a
// late rank from one that will never submit. The default is HVD_OPERATION_TIMEOUT_SECONDS, which by default
// sets no limit. A Join has no limit by default.
func Timeout(d time.Duration) Option { return Option{kind: rank.OptTimeout, duration: d} }

// Over runs the operation among the members of set, and on the engine of set. The default is all ranks. This
// rank must be a member. Over does not apply to AddProcessSet and RemoveProcessSet, in which all ranks take
// part.
func Over(set *ProcessSet) Option { return Option{kind: rank.OptOver, set: set} }

// MembersOnly makes a call of AddProcessSet an operation of the members only: the other ranks do not call it
// and do not know the set. By default, all ranks call it. MembersOnly applies to AddProcessSet.
func MembersOnly() Option { return Option{kind: rank.OptMembersOnly} }

// On runs the operation on e, which New has returned. The default is the engine of the process set, if the
// call has one, and otherwise the engine that Init started. A process set of another engine is an error.
func On(e *Engine) Option { return Option{kind: rank.OptOn, engine: e} }

// call is an operation with the options that the program passed.
type call struct {
	rank.Call
	engine *Engine
	over   *ProcessSet // the argument of Over, or nil without that option
	shapes [][]int     // if nil, every tensor has one dimension
}

// prepare makes a call for an operation of the given kind on elements of type dt, and applies opts to it.
func prepare(kind message.Kind, dt tensor.DType, group bool, opts []Option) (c call, err error) {
	c.Call = rank.NewCall(kind, dt)
	for i := range opts {
		if opts[i].kind == rank.OptName { // the name comes first, because errors about options show it
			c.Name = opts[i].text
		}
	}
	for i := range opts {
		if err := c.take(&opts[i], group); err != nil {
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

func (c *call) take(o *Option, group bool) error {
	// A group needs one shape for each of its tensors, so it accepts only Shapes. A single tensor accepts
	// only Shape.
	what, instead := "group", rank.OptShapes
	if !group {
		what, instead = "single tensor", rank.OptShape
	}
	if group && o.kind == rank.OptShape || !group && o.kind == rank.OptShapes {
		return c.Misuse("option %v does not apply to a %s: use %v", o.kind, what, instead)
	}
	if err := c.CheckOption(o.kind); err != nil {
		return err
	}
	switch o.kind {
	case rank.OptOp:
		c.Op = tensor.ReduceOp(o.op)
	case rank.OptInPlace:
		c.InPlace = true
	case rank.OptShape, rank.OptShapes:
		if c.shapes = o.shapes; c.shapes == nil {
			c.shapes = [][]int{} // Shapes without arguments is wrong unless the group is empty
		}
	case rank.OptPrescale:
		c.Prescale = o.factor
	case rank.OptPostscale:
		c.Postscale = o.factor
	case rank.OptCompress:
		c.Wire = o.wire
	case rank.OptErrorFeedback:
		c.ErrorFeedback = true
	case rank.OptEmpty:
		c.Empty = true
	case rank.OptMembersOnly:
		c.MembersOnly = true
	case rank.OptTimeout:
		if c.Timeout = o.duration; c.Timeout <= 0 {
			return c.Misuse("got timeout %v, want more than 0", o.duration)
		}
	case rank.OptOver:
		if c.over = o.set; c.over == nil || c.over.engine == nil {
			return c.Misuse("%w", errNoSet)
		}
	case rank.OptOn:
		if c.engine = o.engine; c.engine == nil || c.engine.rank.Engine == nil {
			return c.Misuse("engine is nil or a zero Engine, want one from New")
		}
	}
	return nil
}

// errNoSet is the cause of the error of a call with a process set that belongs to no engine.
var errNoSet = errors.New("process set is nil or a zero ProcessSet, want one from AddProcessSet or ProcessSets")

// ofAnotherEngine is the format of the error of a call whose process set is not of the engine of option On.
const ofAnotherEngine = "%v belongs to another engine"

// locate sets the engine and the process set of the call.
func (c *call) locate() error {
	switch {
	case c.over != nil && c.engine == nil:
		c.engine = c.over.engine
	case c.over != nil && c.engine != c.over.engine:
		return c.Misuse(ofAnotherEngine, c.over)
	case c.engine == nil:
		if c.engine = current(); c.engine == nil {
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
