//go:build nccl && cgo

package cuda

import (
	"context"
	"errors"
	"math/bits"
)

// Borrow returns n bytes of pinned memory of the host for copies from and to a device, whose contents are
// undefined. The caller must call GiveBack when no device uses the memory.
func (d *Devices) Borrow(index, n int) ([]byte, error) {
	class := bits.Len(uint(max(n, 4096) - 1))
	d.mu.Lock()
	p, err := d.pool(index)
	if err != nil {
		d.mu.Unlock()
		return nil, err
	}
	free := p.pinned[class]
	if len(free) > 0 {
		p.pinned[class] = free[:len(free)-1]
	}
	d.mu.Unlock()
	if len(free) > 0 {
		return free[len(free)-1][:n], nil
	}
	memory, err := p.AllocHost(1 << class)
	return memory[:min(n, len(memory))], err
}

// GiveBack ends the use of memory that Borrow has returned for the device.
func (d *Devices) GiveBack(index int, memory []byte) {
	class := bits.Len(uint(cap(memory) - 1))
	d.mu.Lock()
	defer d.mu.Unlock()
	if p := d.pools[index]; p != nil {
		p.pinned[class] = append(p.pinned[class], memory[:cap(memory)])
	}
}

// Copy is a copy of From to To, which have the same length.
type Copy struct{ To, From []byte }

// Copy makes copies between the memory of a device and memory of Borrow, after the work before the events. It
// waits until they are done, but not in CUDA. If ctx ends first, Copy waits for at most EndTimeout and
// returns the cause. pending says whether the device may still use the memory.
func (d *Devices) Copy(ctx context.Context, index int, after []*Event, copies ...Copy) (pending bool,
	err error) {
	s, err := d.copyStream(index)
	if err != nil {
		return false, err
	}
	for _, e := range after {
		err = errors.Join(err, s.Wait(e))
	}
	for _, c := range copies {
		if len(c.To) > 0 && err == nil {
			err = s.Copy(c.To, c.From)
		}
	}
	end, markErr := d.Mark(index, s.Handle())
	if err = errors.Join(err, markErr); markErr != nil {
		return true, err
	}
	stopped := Poll(ctx, end.Query)
	if ctx.Err() != nil {
		late, cancel := context.WithTimeoutCause(context.Background(), d.EndTimeout, context.Cause(ctx))
		defer cancel()
		if stopped = Poll(late, end.Query); stopped == nil {
			err = errors.Join(err, context.Cause(ctx))
		}
	}
	if stopped != nil {
		return true, errors.Join(err, stopped)
	}
	d.Release(end)
	return false, err
}

// copyStream returns the stream of the device for copies.
func (d *Devices) copyStream(index int) (*Stream, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p, err := d.pool(index)
	if err != nil {
		return nil, err
	}
	if p.copies != nil {
		return p.copies, nil
	}
	s, err := p.NewStream()
	if err == nil {
		p.copies = s
	}
	return s, err
}
