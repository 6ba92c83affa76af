package engine

import (
	"math"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/tensorqueue"
)

// compress writes the scaled tensors of w to buf in their wire type, one behind the other. With error feedback it adds
// what the last tensor of the name lost and keeps what this one loses (Seide et al., 1-Bit Stochastic Gradient Descent,
// 2014).
func (l *lane) compress(w *work, s scaling, buf []byte) error {
	wire := w.grant.Responses[0].Wire
	narrow, err := kernel.Convert(wire, s.dt)
	if err != nil {
		return err
	}
	for i, e := range w.entries {
		wide := e.Input
		if s.pre != 1 || e.ErrorFeedback {
			wide = l.scratch.wide.Bytes(len(e.Input))
			copy(wide, e.Input)
			if err := s.before(wide); err != nil {
				return err
			}
		}
		part := buf[:w.grant.Responses[i].WireBytes()]
		buf = buf[len(part):]
		if !e.ErrorFeedback {
			narrow(part, wide)
			continue
		}
		lost, err := l.residual(e, s)
		if err != nil {
			return err
		}
		if err := add(s.dt, wide, lost); err != nil {
			return err
		}
		narrow(part, wide)
		if err := l.keepLoss(s.dt, wire, lost, wide, part); err != nil {
			return err
		}
	}
	return nil
}

// residual is what compression has lost of a tensor.
type residual struct {
	dt  tensor.DType
	pre float64 // the factor by which it was scaled
	buf []byte
}

// residual is what compression has lost so far of the tensor of this name, as s scales it: zeros for a new name, or one
// that has another type or length now.
func (l *lane) residual(e *tensorqueue.Entry, s scaling) ([]byte, error) {
	r := l.scratch.residuals[e.Request.Name]
	if r == nil || r.dt != s.dt || len(r.buf) != len(e.Input) {
		r = &residual{s.dt, s.pre, tensor.Bytes(make([]float64, (len(e.Input)+7)/8))[:len(e.Input)]}
		if l.scratch.residuals == nil {
			l.scratch.residuals = make(map[string]*residual)
		}
		l.scratch.residuals[e.Request.Name] = r
	}
	if r.pre == s.pre {
		return r.buf, nil
	}
	// As with a loss scale that moves. What is not finite then is lost for good.
	f := s.pre / r.pre
	r.pre = s.pre
	if f == 0 || math.IsInf(f, 0) || math.IsNaN(f) {
		clear(r.buf)
		return r.buf, nil
	}
	return r.buf, scale(s.dt, r.buf, f)
}

// keepLoss sets residual to wide less what part holds of it. What is not finite is no loss that could be made up for:
// an overflow would otherwise poison all that follows.
func (l *lane) keepLoss(dt, wire tensor.DType, residual, wide, part []byte) error {
	widen, err := kernel.Convert(dt, wire)
	if err != nil {
		return err
	}
	back := l.scratch.back.Bytes(len(wide))
	widen(back, part)
	if dt == tensor.Float32 {
		subtract(tensor.View[float32](residual), tensor.View[float32](wide), tensor.View[float32](back))
	} else {
		subtract(tensor.View[float64](residual), tensor.View[float64](wide), tensor.View[float64](back))
	}
	return nil
}

func subtract[T float32 | float64](dst, a, b []T) {
	for i := range dst {
		d := a[i] - b[i]
		if math.IsNaN(float64(d)) || math.IsInf(float64(d), 0) {
			d = 0
		}
		dst[i] = d
	}
}

func add(dt tensor.DType, dst, src []byte) error {
	f, err := kernel.Reduce(tensor.Sum, dt)
	if err != nil {
		return err
	}
	f(dst, src)
	return nil
}

// decompress reads the reduced tensors of w from buf, and scales them.
func decompress(w *work, s scaling, buf []byte) error {
	widen, err := kernel.Convert(s.dt, w.grant.Responses[0].Wire)
	if err != nil {
		return err
	}
	for i, e := range w.entries {
		part := buf[:w.grant.Responses[i].WireBytes()]
		buf = buf[len(part):]
		widen(e.Output, part)
		if err := s.after(e.Output); err != nil {
			return err
		}
	}
	return nil
}
