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

var errNoDevices = errors.New("CUDA was not loaded: set HOROVOD_GPU_OPERATIONS=nccl, or host (docs/nccl.md)")

// errClosed is the error of Mark after Close.
var errClosed = errors.New("cuda: the rank has left its job")

// Devices makes events that mark how far the streams of other libraries have come, and copies tensors between
// devices and the host. A nil *Devices has no device. Its methods are safe for concurrent use.
type Devices struct {
	// EndTimeout bounds how long Copy waits after its context has ended. NewDevices sets it to 5 s.
	EndTimeout time.Duration

	runtime *Runtime
	marks   atomic.Uint64 // the greatest number of an event
	mu      sync.Mutex
	devices map[int]*Device
	unused  map[int][]*Event // nil after Close
	streams map[int]*Stream  // for copies
	// pinned has the memory of Borrow that is not in use, by the binary logarithm of its size.
	pinned [64][][]byte
}

// NewDevices returns the devices of r.
func NewDevices(r *Runtime) *Devices {
	return &Devices{EndTimeout: 5 * time.Second, runtime: r, devices: make(map[int]*Device),
		unused: make(map[int][]*Event), streams: make(map[int]*Stream)}
}

// Mark returns an event after all work that is on the stream now. stream is a cudaStream_t of the device with
// the given index. The caller must call Release when nothing waits for the event any more.
func (d *Devices) Mark(index int, stream uintptr) (*Event, error) {
	if d == nil {
		return nil, errNoDevices
	}
	e, err := d.event(index)
	if err != nil {
		return nil, err
	}
	// The event gets its number first, so that it follows all work that another thread puts on the stream
	// before it marks the stream under a smaller number.
	e.number, e.stream = d.marks.Add(1), stream
	return e, e.Record(e.device.OfHandle(stream))
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
func (d *Devices) event(index int) (e *Event, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.unused == nil {
		return nil, errClosed
	}
	if n := len(d.unused[index]); n > 0 {
		e, d.unused[index] = d.unused[index][n-1], d.unused[index][:n-1]
		return e, nil
	}
	of, err := d.device(index)
	if err != nil {
		return nil, err
	}
	return of.NewEvent()
}

// device returns the device with the given index. The caller holds mu.
func (d *Devices) device(index int) (of *Device, err error) {
	if of = d.devices[index]; of == nil {
		if of, err = d.runtime.Device(index); err != nil {
			return nil, err
		}
		d.devices[index] = of
	}
	return of, nil
}

// Release gives an event back. e may be nil.
func (d *Devices) Release(e *Event) {
	if e == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.unused == nil {
		e.Close()
		return
	}
	d.unused[e.device.Index()] = append(d.unused[e.device.Index()], e)
}

// Close destroys the events and frees the memory that are not in use.
func (d *Devices) Close() error {
	if d == nil {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var first error
	for index, events := range d.unused {
		for _, e := range events {
			if err := e.Close(); err != nil && first == nil {
				first = fmt.Errorf("device %d: %w", index, err)
			}
		}
	}
	keep := func(err error) {
		if first == nil {
			first = err
		}
	}
	for _, s := range d.streams {
		keep(s.Close())
	}
	for _, free := range d.pinned {
		for _, memory := range free {
			keep(d.runtime.FreeHost(memory))
		}
	}
	clear(d.streams)
	clear(d.pinned[:])
	d.unused = nil
	return first
}
