package hvd

import (
	"fmt"
	"math"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Alloc allocates a tensor of n zeros in memory that the other ranks of the host can read, so that operations
// skip the copies that an ordinary slice costs. The tensor begins at a cache line.
//
// The memory is reserved in full, from chunks of 64 MiB or of the tensor's own size. It belongs to the
// process and not to an engine: it may be allocated before Init and outlives Shutdown. The garbage collector
// does not free it; Free does. A training program typically allocates its gradients once. The first use of a
// chunk by an engine makes the peers map it, which takes some tens of microseconds.
//
// If the memory cannot be allocated the error is a *NoMemoryError, which says how many bytes were needed and,
// if it is known, which limit was hit.
func Alloc[T Element](n int) ([]T, error) {
	var zero T
	size := int64(len(tensor.Bytes([]T{zero})))
	if n < 0 || int64(n) > math.MaxInt64/size {
		return nil, &UsageError{Op: "alloc",
			Err: fmt.Errorf("got %d elements of %d bytes, want at least 0 elements and less than 2^63 bytes",
				n, size)}
	}
	if n == 0 {
		return []T{}, nil
	}
	b, err := arena.Alloc(int(int64(n) * size))
	if err != nil {
		return nil, fmt.Errorf("hvd: alloc %d elements of %d bytes: %w", n, size, err)
	}
	return tensor.View[T](b), nil
}

// Free frees memory that Alloc returned. s must begin where the slice of Alloc did, and no operation on it
// may be in flight; neither s nor any other slice of the same memory may be used afterwards. Freeing a slice
// that Alloc did not return, or freeing it twice, is an error and has no effect. Freeing an empty slice does
// nothing.
func Free[T Element](s []T) error {
	if cap(s) == 0 {
		return nil
	}
	if err := arena.Free(tensor.Bytes(s[:1:cap(s)])); err != nil {
		return &UsageError{Op: "free", Err: err}
	}
	return nil
}
