package exec

import (
	"math"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/tensor"
)

// compress scales the tensors of b, converts them to the element type wire and writes them to buf, one after
// another. For a tensor with error feedback, compress first adds the compression loss that was stored under
// the tensor's name, and then stores the new loss (Seide et al., 1-Bit Stochastic Gradient Descent, 2014).
func (m *machine) compress(b *batch, s scaling, wire tensor.DType, buf []byte) error {
	narrow, err := kernel.Convert(wire, s.dt)
	if err != nil {
		return err
	}
	for i, t := range b.tensors {
		var key lossKey
		if b.losses != nil {
			key = b.losses[i]
		}
		wide := t.In
		if s.pre != 1 || key.name != "" {
			wide = m.scratch.wide.Bytes(len(t.In))
			copy(wide, t.In)
			if err := s.before(wide); err != nil {
				return err
			}
		}
		part := buf[:b.counts[i]]
		buf = buf[len(part):]
		if key.name == "" {
			narrow(part, wide)
			continue
		}
		lost, err := m.residual(key, len(t.In), s)
		if err != nil {
			return err
		}
		if err := addInto(s.dt, wide, lost); err != nil {
			return err
		}
		narrow(part, wide)
		if err := m.keepLoss(s.dt, wire, lost, wide, part); err != nil {
			return err
		}
	}
	return nil
}

// residual returns the accumulated compression loss of a tensor, multiplied by the tensor's prescale factor.
// The result has numBytes bytes, in elements of type s.dt. It is zero if the tensor is new, or if its type or
// length has changed. The lane owns the memory, and the caller updates the loss in place.
func (m *machine) residual(key lossKey, numBytes int, s scaling) ([]byte, error) {
	r := m.scratch.residuals[key]
	if r == nil || r.dt != s.dt || len(r.buf) != numBytes {
		r = &residual{s.dt, s.pre, tensor.Bytes(make([]float64, (numBytes+7)/8))[:numBytes]}
		if m.scratch.residuals == nil {
			m.scratch.residuals = make(map[lossKey]*residual)
		}
		m.scratch.residuals[key] = r
	}
	if r.pre == s.pre {
		return r.buf, nil
	}
	// The prescale factor has changed, for example because the program uses dynamic loss scaling. Rescale the
	// loss, or discard it if that would give numbers that are not finite.
	f := s.pre / r.pre
	r.pre = s.pre
	if f == 0 || math.IsInf(f, 0) || math.IsNaN(f) {
		clear(r.buf)
		return r.buf, nil
	}
	return r.buf, scale(s.dt, r.buf, f)
}

// keepLoss computes the loss of a conversion and stores it in residual. wide holds the elements before the
// conversion and part the elements after it. The loss is their difference. If a difference is not finite,
// keepLoss stores 0 in its place, because otherwise a single overflow would make every later tensor of the
// same name non-finite.
func (m *machine) keepLoss(dt, wire tensor.DType, residual, wide, part []byte) error {
	widen, err := kernel.Convert(dt, wire)
	if err != nil {
		return err
	}
	back := m.scratch.back.Bytes(len(wide))
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

func addInto(dt tensor.DType, dst, src []byte) error {
	f, err := kernel.Reduce(tensor.Sum, dt)
	if err != nil {
		return err
	}
	f(dst, src)
	return nil
}

// decompress copies the reduced tensors of b from buf to their outputs. The elements in buf have the type
// wire. decompress converts them to the element type of the outputs and scales the outputs.
func decompress(b *batch, s scaling, wire tensor.DType, buf []byte) error {
	widen, err := kernel.Convert(s.dt, wire)
	if err != nil {
		return err
	}
	for i, t := range b.tensors {
		part := buf[:b.counts[i]]
		buf = buf[len(part):]
		widen(t.Out, part)
		if err := s.after(t.Out); err != nil {
			return err
		}
	}
	return nil
}
