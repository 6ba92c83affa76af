// Package cuda calls the CUDA runtime library (libcudart), which it loads when a program asks for it. So a
// program with this package runs on machines without CUDA too, and no part of CUDA is needed to build it. It
// also records ranges with NVTX, if this library is there (Ranges).
//
// The package does this only if it is built with cgo and with the tag nccl. In other builds Load returns
// ErrNotBuilt.
//
// # Device memory
//
// A slice of bytes can describe memory of a device, like memory of the host. But a program crashes if it
// reads or writes the elements of such a slice. It can only pass the slice, or a part of it, to functions
// that expect device memory.
package cuda

import (
	"errors"
	"fmt"
)

// ErrNotBuilt is the error of programs that were built without the tag nccl or without cgo.
var ErrNotBuilt = errors.New("cuda: this program was built without NCCL and CUDA (tag nccl, with cgo)")

// Found describes which libraries for GPUs a program loads, and what they find.
type Found struct {
	// Built is set if the program was built with NCCL. If it is not, the other fields are zero.
	Built bool         `json:"built"`
	NCCL  FoundLibrary `json:"nccl"`
	CUDA  FoundLibrary `json:"cuda"`
	// Driver is the newest version of CUDA that the driver supports. It is empty if there is no driver.
	Driver string `json:"driver"`
	// Devices is the number of devices that the program may use. It is 0 if they were not counted. NoDevice
	// is the error with which CUDA has found none, or empty.
	Devices  int    `json:"devices"`
	NoDevice string `json:"no_device"`
}

// FoundLibrary describes a library that a program loads.
type FoundLibrary struct {
	File string `json:"file"`
	// Version is the version of the library, and Code is the number that the library returns as its version.
	// They are empty and 0 if the version is not known.
	Version string `json:"version"`
	Code    int    `json:"code"`
	// Error says why the program cannot use the library. It is empty if it can.
	Error string `json:"error"`
}

// Error is an error that a function of the CUDA runtime has returned.
type Error struct {
	Call string // the name of the function
	Code int
	Name string // the name of the code, such as cudaErrorMemoryAllocation
	Text string
}

func (e *Error) Error() string {
	return fmt.Sprintf("cuda: %s: %s (%s, %d)", e.Call, e.Text, e.Name, e.Code)
}
