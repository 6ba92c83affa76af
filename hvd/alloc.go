package hvd

import (
	"fmt"
	"math"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Alloc makes a tensor of n zeros in memory that the other ranks of the host can read: operations take it from where it
// lies, without the copies that an ordinary slice costs. It begins at a cache line.
//
// The memory is reserved in full, from chunks of 64 MiB or of the tensor's own size, and belongs to the process, not to an
// engine: it may be made before Init and outlives Shutdown. The garbage collector does not know it. Give it back by Free,
// or keep it as long as the process lives: a training program allocates its gradients once. A first use by an engine has
// the peers map its chunk, which takes some tens of microseconds.
//
// The error is a *NoMemoryError if the memory cannot be had: it says how many bytes and, where that can be told, because of
// which limit.
func Alloc[T Element](n int) ([]T, error) {
	var zero T
	size := int64(len(tensor.Bytes([]T{zero})))
	if n < 0 || int64(n) > math.MaxInt64/size {
		return nil, &UsageError{Op: "alloc", Err: fmt.Errorf("got %d elements of %d bytes, want 0 or more, and fewer than 2^63 bytes", n, size)}
	}
	if n == 0 {
		return []T{}, nil
	}
	b, err := arena.Alloc(int(int64(n) * size))
	if err != nil {
		return nil, fmt.Errorf("hvd: alloc: %d elements of %d bytes: %w", n, size, err)
	}
	return tensor.View[T](b), nil
}

// Free gives back what Alloc made. s must begin where that did, and no operation on it may be in flight; it must not be
// touched any more, nor any other slice of the same memory. To free a slice that did not come from Alloc, or twice, is an
// error and does nothing. An empty slice is nothing to free.
func Free[T Element](s []T) error {
	if cap(s) == 0 {
		return nil
	}
	if err := arena.Free(tensor.Bytes(s[:1:cap(s)])); err != nil {
		return &UsageError{Op: "free", Err: err}
	}
	return nil
}
