// Package cuda calls the CUDA runtime library (libcudart), which it loads when a program asks for it. So a
// program with this package runs on machines without CUDA too, and no part of CUDA is needed to build it.
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

// Handle names memory or an event of a device for the other processes of the host. It is a
// cudaIpcMemHandle_t or a cudaIpcEventHandle_t.
type Handle [64]byte

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
