//go:build nccl && cgo

package cuda

import (
	"context"
	"errors"
	"math/bits"
	"slices"
)

// Borrow returns n bytes of pinned memory of the host for copies from and to a device, whose contents are
// undefined. The caller must call GiveBack when no device uses the memory.
func (d *Devices) Borrow(index, n int) ([]byte, error) {
	size := pinnedSize(n)
	d.mu.Lock()
	p, err := d.pool(index)
	if err != nil {
		d.mu.Unlock()
		return nil, err
	}
	memory := p.take(size)
	d.mu.Unlock()
	if memory == nil {
		memory, err = p.AllocHost(size)
	}
	return memory[:min(n, len(memory))], err
}

// take removes a block of pinned memory of the given size from those that are not in use, and returns it. It
// returns nil if there is none. The caller holds d.mu.
func (p *pool) take(size int) []byte {
	for i, memory := range slices.Backward(p.pinned) {
		if len(memory) == size {
			p.pinned = slices.Delete(p.pinned, i, i+1)
			p.pinnedBytes -= size
			return memory
		}
	}
	return nil
}

// GiveBack ends the use of memory that Borrow has returned for the device. If more than maxPinned bytes are
// not in use then, those that were given back first are freed.
func (d *Devices) GiveBack(index int, memory []byte) {
	d.mu.Lock()
	p := d.pools[index]
	if p == nil {
		d.mu.Unlock()
		return
	}
	p.pinned = append(p.pinned, memory[:cap(memory)])
	p.pinnedBytes += cap(memory)
	var old [][]byte
	for len(p.pinned) > 1 && p.pinnedBytes > maxPinned {
		first := p.pinned[0]
		old = append(old, first)
		p.pinned = slices.Delete(p.pinned, 0, 1)
		p.pinnedBytes -= len(first)
	}
	d.mu.Unlock()
	for _, memory := range old {
		_ = p.FreeHost(memory) // an error of CUDA is that of an earlier call
	}
}

// maxPinned is the maximum number of bytes of pinned memory that is kept for a device and not in use, unless
// it is one larger block.
const maxPinned = 256 << 20

// pinnedSize returns the number of bytes that Borrow allocates for n bytes: the next power of two up to
// 1 MiB, and above it at most an eighth more than n.
func pinnedSize(n int) int {
	size := 1 << bits.Len(uint(max(n, 4096)-1))
	if size <= 1<<20 {
		return size
	}
	step := size / 16
	return (n + step - 1) / step * step
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
