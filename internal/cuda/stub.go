//go:build !nccl || !cgo

package cuda

import "context"

// Built says whether this program was built with NCCL and CUDA.
const Built = false

// Runtime is the CUDA runtime library. This build has none.
type Runtime struct{}

// Load returns ErrNotBuilt.
func Load(string) (*Runtime, error) { return nil, ErrNotBuilt }

// Event marks a position in a stream. This build has none.
type Event struct{}

// Latest returns its argument.
func Latest(events []*Event) []*Event { return events }

// Devices makes events. This build has none.
type Devices struct{}

// NewDevices panics. It cannot be called, because Load returns no Runtime.
func NewDevices(*Runtime) *Devices { panic("cuda: not built") }

// Mark returns an error.
func (d *Devices) Mark(int, uintptr) (*Event, error) { return nil, ErrNotBuilt }

// Use returns an error.
func (d *Devices) Use(int, func() error) error { return ErrNotBuilt }

// Release does nothing.
func (d *Devices) Release(*Event) {}

// Borrow returns an error.
func (d *Devices) Borrow(int, int) ([]byte, error) { return nil, ErrNotBuilt }

// GiveBack does nothing.
func (d *Devices) GiveBack(int, []byte) {}

// Copy is a copy of From to To, which have the same length.
type Copy struct{ To, From []byte }

// Copy returns an error.
func (d *Devices) Copy(context.Context, int, []*Event, ...Copy) (bool, error) {
	return false, ErrNotBuilt
}

// Close does nothing.
func (d *Devices) Close() error { return nil }
