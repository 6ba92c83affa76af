//go:build !nccl || !cgo

package cuda

// Runtime is the CUDA runtime library. This build has none.
type Runtime struct{}

// Load returns ErrNotBuilt.
func Load(string) (*Runtime, error) { return nil, ErrNotBuilt }

// Event marks a position in a stream. This build has none.
type Event struct{}

// Devices makes events. This build has none.
type Devices struct{}

// Mark returns an error.
func (d *Devices) Mark(int, uintptr) (*Event, error) { return nil, errNoDevices }

// Release does nothing.
func (d *Devices) Release(*Event) {}

// Close does nothing.
func (d *Devices) Close() error { return nil }
