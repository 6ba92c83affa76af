//go:build nccl && cgo

package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// errClosed is the error of Mark after Close.
var errClosed = errors.New("cuda: the rank has left its job")

// Devices makes events that mark how far the streams of other libraries have come, and copies tensors between
// devices and the host. Its methods are safe for concurrent use.
type Devices struct {
	// EndTimeout bounds how long Copy waits after its context has ended. NewDevices sets it to 5 s.
	EndTimeout time.Duration

	runtime *Runtime
	marks   atomic.Uint64 // the greatest number of an event
	mu      sync.Mutex
	pools   map[int]*pool // of the devices that are used; nil after Close
}

// pool has what Devices keeps for a device.
type pool struct {
	*Device
	unused []*Event
	copies *Stream // for copies, or nil
	// pinned has the blocks of Borrow that are not in use, in the order in which they were given back. They
	// have pinnedBytes bytes.
	pinned      [][]byte
	pinnedBytes int
}

// NewDevices returns the devices of r.
func NewDevices(r *Runtime) *Devices {
	return &Devices{EndTimeout: 5 * time.Second, runtime: r, pools: make(map[int]*pool)}
}

// Mark returns an event after all work that is on the stream now. stream is a cudaStream_t of the device with
// the given index. The caller must call Release when nothing waits for the event any more.
func (d *Devices) Mark(index int, stream uintptr) (*Event, error) {
	e, err := d.event(index)
	if err != nil {
		return nil, err
	}
	// The event gets its number first, so that it follows all work that another thread puts on the stream
	// before it marks the stream under a smaller number.
	e.number, e.stream = d.marks.Add(1), stream
	if err := e.mark(e.device.OfHandle(stream)); err != nil {
		d.Release(e)
		return nil, err
	}
	return e, nil
}

// Use calls f as Device.Use does for the device with the given index.
func (d *Devices) Use(index int, f func() error) error {
	d.mu.Lock()
	p, err := d.pool(index)
	d.mu.Unlock()
	if err != nil {
		return err
	}
	return p.Device.Use(f)
}

// Latest removes the events of Mark that need not be waited for, because a later event of the same stream is
// in the list. It changes the list in place.
func Latest(events []*Event) []*Event {
	latest := events[:0]
	for _, e := range events {
		i := slices.IndexFunc(latest, func(o *Event) bool {
			return o.stream == e.stream && o.device.index == e.device.index
		})
		if i < 0 {
			latest = append(latest, e)
		} else if latest[i].number < e.number {
			latest[i] = e
		}
	}
	return latest
}

// event returns an event of the device that is not in use.
func (d *Devices) event(index int) (*Event, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p, err := d.pool(index)
	if err != nil {
		return nil, err
	}
	if n := len(p.unused); n > 0 {
		e := p.unused[n-1]
		p.unused = p.unused[:n-1]
		return e, nil
	}
	return p.NewEvent()
}

// pool returns the pool of the device with the given index. The caller holds mu.
func (d *Devices) pool(index int) (*pool, error) {
	if d.pools == nil {
		return nil, errClosed
	}
	p := d.pools[index]
	if p == nil {
		of, err := d.runtime.Device(index)
		if err != nil {
			return nil, err
		}
		p = &pool{Device: of}
		d.pools[index] = p
	}
	return p, nil
}

// Release gives an event back. e may be nil.
func (d *Devices) Release(e *Event) {
	if e == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if p := d.pools[e.device.Index()]; p != nil {
		p.unused = append(p.unused, e)
	} else {
		e.Close()
	}
}

// Close destroys the events and frees the memory that are not in use.
func (d *Devices) Close() error {
	if d == nil {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for index, p := range d.pools {
		if err := p.close(); err != nil {
			errs = append(errs, fmt.Errorf("device %d: %w", index, err))
		}
	}
	d.pools = nil
	return errors.Join(errs...)
}

func (p *pool) close() (err error) {
	for _, e := range p.unused {
		err = errors.Join(err, e.Close())
	}
	if p.copies != nil {
		err = errors.Join(err, p.copies.Close())
	}
	for _, memory := range p.pinned {
		err = errors.Join(err, p.FreeHost(memory))
	}
	return err
}
