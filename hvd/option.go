package hvd

import (
	"fmt"
	"time"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
)

// Element is the constraint on element types: the integers of 8 to 64 bits (without uint32 and uint64), float32, float64,
// bool, types made of them, Float16 and BFloat16.
type Element = tensor.Element

// The floats of 16 bits. They have no arithmetic in Go, but conversions: hvd.Float16FromFloat32, x.Float32().
type (
	Float16  = half.Float16
	BFloat16 = half.BFloat16
)

// Float16FromFloat32 rounds to the nearest, ties to even; what is too large becomes infinite.
func Float16FromFloat32(f float32) Float16 { return half.Float16FromFloat32(f) }

// BFloat16FromFloat32 rounds to the nearest, ties to even.
func BFloat16FromFloat32(f float32) BFloat16 { return half.BFloat16FromFloat32(f) }

// ReduceOp says how the elements of all ranks become one.
type ReduceOp = tensor.ReduceOp

// The reductions. Sums and products of integers wrap around; Min and Max of floats are NaN where any rank's
// element is. Average is the sum divided by the number of ranks, truncated toward zero for integers; AverageActive
// divides by the number of those that have not joined. Adasum is for allreduce of floats: it adds what is orthogonal and
// averages what is parallel (Maleki et al., Scaling Distributed Training with Adaptive Summation, 2020), for any number
// of ranks. Bools have Min (all) and Max (any).
const (
	Average       = tensor.Average
	Sum           = tensor.Sum
	Min           = tensor.Min
	Max           = tensor.Max
	Product       = tensor.Product
	Adasum        = tensor.Adasum
	AverageActive = tensor.AverageActive
)

// Option changes one operation. An option that does not apply to the operation is an error.
type Option struct {
	kind     optionKind
	text     string
	op       ReduceOp
	wire     tensor.DType
	factor   float64
	shapes   [][]int
	duration time.Duration
	engine   *Engine
	set      *ProcessSet
}

type optionKind uint8

const (
	optName optionKind = iota
	optOp
	optInPlace
	optShape
	optShapes
	optPrescale
	optPostscale
	optCompress
	optErrorFeedback
	optEmpty
	optTimeout
	optOver
	optOn
)

func (k optionKind) String() string {
	return [...]string{
		"Name", "Op", "InPlace", "Shape", "Shapes", "Prescale", "Postscale", "CompressFP16 or CompressBF16", "ErrorFeedback", "Empty", "Timeout", "Over", "On",
	}[k]
}

// Name names the tensor. The default is "<operation>.noname.<n>". The name is in use until the program has seen that the
// operation is done (see the package comment).
func Name(name string) Option { return Option{kind: optName, text: name} }

// Op chooses the reduction of an allreduce or reducescatter. The default is Average.
func Op(op ReduceOp) Option { return Option{kind: optOp, op: op} }

// InPlace makes the result overwrite the argument, and saves memory and mostly a copy. For an allgather the argument has
// room for the rows of all ranks, equally many, and this rank's are in their place. For a reducescatter all of the
// argument is working memory, and the result is this rank's part of it. For an alltoall as many rows must come as go.
func InPlace() Option { return Option{kind: optInPlace} }

// Shape gives the argument dimensions; their product is its length. The default is one dimension. Ranks must
// agree on it, but for the first dimension of an allgather or alltoall.
func Shape(dims ...int) Option { return Option{kind: optShape, shapes: [][]int{dims}} }

// Shapes gives each tensor of a group dimensions, as Shape does.
func Shapes(shapes ...[]int) Option { return Option{kind: optShapes, shapes: shapes} }

// Prescale multiplies the argument by f before the reduction: in float32 for float32 and the halves, else in
// float64, truncated toward zero for integers.
func Prescale(f float64) Option { return Option{kind: optPrescale, factor: f} }

// Postscale multiplies the result by f. An average then multiplies the sum by f/n, once.
func Postscale(f float64) Option { return Option{kind: optPostscale, factor: f} }

// CompressFP16 sends an allreduce of float32 or float64 as float16: half the bytes, 11 bits of precision, nothing beyond
// 65504. The argument is scaled and rounded once, the sums are formed in float32 and rounded once.
func CompressFP16() Option { return Option{kind: optCompress, wire: tensor.Float16} }

// CompressBF16 sends an allreduce of float32 or float64 as bfloat16: half the bytes, 8 bits of precision, the range of
// float32.
func CompressBF16() Option { return Option{kind: optCompress, wire: tensor.BFloat16} }

// ErrorFeedback adds what compression lost of an argument to the next one of the same name, type and length at this rank,
// for sums and averages. The tensor must have a name. (The rounding of the sum is not made up for.) It keeps as many
// bytes as the tensor has for each name, until the shutdown.
func ErrorFeedback() Option { return Option{kind: optErrorFeedback} }

// Empty makes a joined rank take part with nothing in allgather, broadcast, alltoall and reducescatter, which are errors
// under a plain join.
func Empty() Option { return Option{kind: optEmpty} }

// Timeout is how long the operation may take. One that takes longer ends the job with a *PeerError at all ranks, because
// nobody can tell a late rank from one that will never come. The default is HVD_OPERATION_TIMEOUT_SECONDS, but for Join
// none.
func Timeout(d time.Duration) Option { return Option{kind: optTimeout, duration: d} }

// Over runs the operation among the members of a process set instead of all ranks.
func Over(set *ProcessSet) Option { return Option{kind: optOver, set: set} }

// On runs the operation on e instead of the engine that Init started.
func On(e *Engine) Option { return Option{kind: optOn, engine: e} }

// optionSet is a set of options, a bit for each kind.
type optionSet uint16

func optionsOf(kinds ...optionKind) (s optionSet) {
	for _, k := range kinds {
		s |= 1 << k
	}
	return s
}

func (s optionSet) has(k optionKind) bool { return s>>k&1 != 0 }

// applies are the options of each operation.
var applies = func() (sets [message.Error]optionSet) {
	always := optionsOf(optTimeout, optOver, optOn)
	moves := always | optionsOf(optName, optShape, optInPlace)
	reduces := moves | optionsOf(optOp, optPrescale, optPostscale)
	for k := range sets {
		sets[k] = always
	}
	sets[message.Allreduce] = reduces | optionsOf(optCompress, optErrorFeedback)
	sets[message.Reducescatter] = reduces
	sets[message.Allgather], sets[message.Alltoall], sets[message.Broadcast] = moves, moves, moves
	sets[message.Barrier] |= optionsOf(optName)
	sets[message.Join] |= optionsOf(optEmpty)
	return sets
}()

// call is an operation as its options describe it.
type call struct {
	kind          message.Kind
	dtype         tensor.DType
	name          string
	engine        *Engine
	set           *ProcessSet
	op            ReduceOp
	pre, post     float64
	wire          tensor.DType
	shapes        [][]int // nil is one dimension each
	inPlace       bool
	errorFeedback bool
	empty         bool
	hold          bool // the name stays in use until the handle was seen done
	timeout       time.Duration
}

// prepare reads the options of an operation on elements of dt.
func prepare(kind message.Kind, dt tensor.DType, group bool, opts []Option) (call, error) {
	c := call{kind: kind, dtype: dt, timeout: -1}
	if kind.Reduces() {
		c.op, c.pre, c.post = Average, 1, 1
	}
	for _, o := range opts {
		if o.kind == optName { // first, because every error says it
			c.name = o.text
		}
	}
	for i := range opts {
		if err := c.take(&opts[i], group); err != nil {
			return call{}, err
		}
	}
	if err := c.locate(); err != nil {
		return call{}, err
	}
	c.hold = c.name != "" // a name that is counted does not come again
	if c.timeout < 0 {
		if c.timeout = 0; kind != message.Join {
			c.timeout = c.engine.timeout
		}
	}
	return c, nil
}

func (c *call) take(o *Option, group bool) error {
	// A group has a shape for each of its tensors.
	wanted := o.kind
	if group && wanted == optShape || !group && wanted == optShapes {
		return c.misuse("option %v does not apply", o.kind)
	} else if wanted == optShapes {
		wanted = optShape
	}
	if !applies[c.kind].has(wanted) {
		return c.misuse("option %v does not apply", o.kind)
	}
	switch o.kind {
	case optOp:
		c.op = o.op
	case optInPlace:
		c.inPlace = true
	case optShape, optShapes:
		c.shapes = o.shapes
	case optPrescale:
		c.pre = o.factor
	case optPostscale:
		c.post = o.factor
	case optCompress:
		c.wire = o.wire
	case optErrorFeedback:
		c.errorFeedback = true
	case optEmpty:
		c.empty = true
	case optTimeout:
		if c.timeout = o.duration; c.timeout <= 0 {
			return c.misuse("timeout %v, want more than 0", o.duration)
		}
	case optOver:
		if c.set = o.set; c.set == nil || c.set.engine == nil {
			return c.misuse("process set is nil or empty: AddProcessSet makes them")
		}
	case optOn:
		if c.engine = o.engine; c.engine == nil || c.engine.engine == nil {
			return c.misuse("engine is nil or empty: New makes them")
		}
	}
	return nil
}

// locate finds engine and process set.
func (c *call) locate() error {
	switch {
	case c.set != nil && c.engine == nil:
		c.engine = c.set.engine
	case c.set != nil && c.engine != c.set.engine:
		return c.misuse("%v belongs to another engine", c.set)
	case c.engine == nil:
		if c.engine = current(); c.engine == nil {
			return c.misuse("%w", ErrNotInitialized)
		}
	}
	if c.set == nil {
		c.set = c.engine.global
	}
	switch {
	case !c.set.Included():
		return c.misuse("rank %d is not a member of %v", c.engine.Rank(), c.set)
	case c.errorFeedback && !c.wire.Valid():
		return c.misuse("option ErrorFeedback does not apply without compression")
	case c.errorFeedback && c.op != Sum && !c.op.IsAverage():
		return c.misuse("error feedback with reduction %v, want a sum or an average", c.op)
	case c.errorFeedback && c.name == "":
		return c.misuse("error feedback needs a name: what was lost is made up for in the next tensor of the same name")
	case c.set.joined.Load() && c.kind != message.Join:
		return c.misuse("this rank has joined %v; wait for the join", c.set)
	}
	return nil
}

// shape is the one given for tensor i, which has numElems elements.
func (c *call) shape(i, numElems int) (tensor.Shape, error) {
	s := make(tensor.Shape, len(c.shapes[i]))
	for d, n := range c.shapes[i] {
		s[d] = int64(n)
	}
	if n, err := s.NumElems(); err != nil || n != int64(numElems) {
		return nil, c.misuse("shape %v does not describe %d elements", s, numElems)
	}
	return s, nil
}

// misuse is a call that the engine never sees.
func (c *call) misuse(format string, args ...any) error {
	return &UsageError{Op: c.kind.String(), Tensor: c.name, Err: fmt.Errorf(format, args...)}
}
