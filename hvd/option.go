package hvd

import (
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
)

// Element is the constraint on element types: uint8, int32, int64, float32, float64 and types made of them.
type Element = tensor.Element

// ReduceOp says how the elements of all ranks become one.
type ReduceOp = tensor.ReduceOp

// The reductions. Sums and products of integers wrap around; Min and Max of floats are NaN where any rank's
// element is. Average is the sum divided by the number of ranks, truncated toward zero for integers.
const (
	Average = tensor.Average
	Sum     = tensor.Sum
	Min     = tensor.Min
	Max     = tensor.Max
	Product = tensor.Product
)

// Option changes one operation. An option that does not apply to the operation is an error.
type Option struct {
	kind   optionKind
	text   string
	op     ReduceOp
	factor float64
	shape  []int64
	engine *Engine
}

type optionKind uint8

const (
	optName optionKind = iota
	optOp
	optInPlace
	optShape
	optPrescale
	optPostscale
	optOn
)

func (k optionKind) String() string {
	return [...]string{"Name", "Op", "InPlace", "Shape", "Prescale", "Postscale", "On"}[k]
}

// Name names the tensor. The default is "<operation>.noname.<n>".
func Name(name string) Option { return Option{kind: optName, text: name} }

// Op chooses the reduction of an allreduce. The default is Average.
func Op(op ReduceOp) Option { return Option{kind: optOp, op: op} }

// InPlace makes the result overwrite the argument, and saves a copy.
func InPlace() Option { return Option{kind: optInPlace} }

// Shape gives the argument dimensions; their product is its length. The default is one dimension. Ranks must
// agree on it; an allgather joins along the first.
func Shape(dims ...int) Option {
	s := make([]int64, len(dims))
	for i, d := range dims {
		s[i] = int64(d)
	}
	return Option{kind: optShape, shape: s}
}

// Prescale multiplies the argument of an allreduce by f before the reduction: in float32 for float32, else in
// float64, truncated toward zero for integers.
func Prescale(f float64) Option { return Option{kind: optPrescale, factor: f} }

// Postscale multiplies the result of an allreduce by f.
func Postscale(f float64) Option { return Option{kind: optPostscale, factor: f} }

// On runs the operation on e instead of the engine that Init started.
func On(e *Engine) Option { return Option{kind: optOn, engine: e} }

// call is an operation as its options describe it.
type call struct {
	engine  *Engine
	request message.Request
	inPlace bool
}

// prepare reads the options for an operation on numElems elements of dt.
func prepare(kind message.Kind, dt tensor.DType, numElems int, opts []Option) (call, error) {
	c := call{request: message.Request{Kind: kind, DType: dt}}
	q := &c.request
	applies := []optionKind{optName, optOn}
	switch kind {
	case message.Allreduce:
		applies = append(applies, optShape, optInPlace, optOp, optPrescale, optPostscale)
		q.Op, q.Prescale, q.Postscale = Average, 1, 1
	case message.Allgather:
		applies = append(applies, optShape)
	case message.Broadcast:
		applies = append(applies, optShape, optInPlace)
	}
	if kind != message.Barrier {
		q.Shape = tensor.Shape{int64(numElems)}
	}
	for _, o := range opts {
		if o.kind == optName { // first, because every error says it
			q.Name = o.text
		}
	}
	for i := range opts {
		o := &opts[i]
		if !slices.Contains(applies, o.kind) {
			return c, fmt.Errorf("hvd: %s: option %v does not apply", c.label(), o.kind)
		}
		switch o.kind {
		case optOp:
			q.Op = o.op
		case optInPlace:
			c.inPlace = true
		case optShape:
			q.Shape = o.shape
		case optPrescale:
			q.Prescale = o.factor
		case optPostscale:
			q.Postscale = o.factor
		case optOn:
			c.engine = o.engine
		}
	}
	if c.engine == nil {
		if c.engine = current(); c.engine == nil {
			return c, fmt.Errorf("hvd: %s: %w", c.label(), ErrNotInitialized)
		}
	}
	if kind != message.Barrier {
		if n, err := q.Shape.NumElems(); err != nil || n != int64(numElems) {
			return c, fmt.Errorf("hvd: %s: shape %v does not describe %d elements", c.label(), q.Shape, numElems)
		}
	}
	return c, nil
}

// label is how errors name the operation.
func (c *call) label() string {
	if c.request.Name == "" {
		return fmt.Sprintf("%v without a name", c.request.Kind)
	}
	return fmt.Sprintf("%v %q", c.request.Kind, c.request.Name)
}
