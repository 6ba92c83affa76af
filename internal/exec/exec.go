// Package exec executes the granted operations of a rank: it packs and scales tensors, copies them from and
// to devices, and has the backends run the collectives.
//
// Each process set has a Lane, a goroutine that executes the grants of the set in order. Turns of the loop
// also execute work that does not wait: a barrier, or steps of an operation of few bytes (StartInTurn, Step).
// If a step has to wait for long, the operation moves to the goroutine of its lane.
package exec

import (
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/ops"
)

// Observer learns what happens to work. Lanes and turns call its methods.
type Observer interface {
	// Since returns the time since the engine's start. All times are counted from this start.
	Since() time.Duration
	// Watched reports whether a timeline is on. If so, lanes record the activities of their work.
	Watched() bool
	// Ended is called when w has ended, before the results of its tensors are reported. err is nil if w has
	// completed.
	Ended(w *Work, err error)
}

// Config has what the lanes of a rank have in common.
type Config struct {
	Backends ops.Registry
	// Devices copies tensors on CUDA devices to host memory for operations that no backend for devices can
	// run. If it is nil, such operations fail.
	Devices *cuda.Devices
	// MaxResultBytes is the maximum size of a result that other ranks determine. MaxDeviceBytes is that of a
	// result on a device.
	MaxResultBytes, MaxDeviceBytes int64
	Observer                       Observer
	// Finished is called once for each piece of work: with nil when the results of its tensors were reported,
	// or with an error as soon as the work has failed. Any goroutine may call it.
	Finished func(w *Work, err error)
	// Retire is called instead of Finished if Step has finished work without an error. It reports whether a
	// turn must follow.
	Retire func(w *Work) (turn bool)
	// Pin is called at the start of the goroutine of each lane.
	Pin func()
	Log *zap.Logger
}
