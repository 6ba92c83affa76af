package exec

import (
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

// scaling describes how elements are scaled before and after a reduction.
type scaling struct {
	dt        tensor.DType
	pre, post float64
	// divisor is the divisor of an average of integers, or 0 for other reductions. gohvd divides integers
	// because a multiplication by 1/n, as in Horovod, is not exact.
	divisor int64
}

// scalingOf returns the scaling that a response requires for its elements of type dt. ranks is the divisor of
// an average.
func scalingOf(r *message.Response, dt tensor.DType, ranks int) scaling {
	s := scaling{dt: dt, pre: r.Prescale, post: r.Postscale}
	if r.Op.IsAverage() {
		if dt.IsInteger() && s.post == 1 {
			s.divisor = int64(ranks)
		} else {
			s.post /= float64(ranks)
		}
	}
	return s
}

// ops converts s to the type that backends accept.
func (s scaling) ops() ops.Scaling { return ops.Scaling{Pre: s.pre, Post: s.post, Divisor: s.divisor} }

func (s scaling) before(buf []byte) error { return scale(s.dt, buf, s.pre) }

func (s scaling) after(buf []byte) error {
	if s.divisor > 0 {
		kernel.Divide(s.dt)(buf, s.divisor)
	}
	return scale(s.dt, buf, s.post)
}

func scale(dt tensor.DType, buf []byte, factor float64) error {
	if factor == 1 || len(buf) == 0 {
		return nil
	}
	f, err := kernel.Scale(dt)
	if err != nil {
		return err
	}
	f(buf, factor)
	return nil
}

// neutral fills buf with elements that do not change the result of a reduction. They are the contribution of
// a rank that has joined.
func neutral(op tensor.ReduceOp, dt tensor.DType, buf []byte) error {
	f, err := kernel.Neutral(op, dt)
	if err != nil {
		return err
	}
	f(buf)
	return nil
}
