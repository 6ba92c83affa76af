package hvd

import (
	"fmt"
	"math"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Alloc allocates a tensor of n zeros in memory that the other ranks of the host can read. So operations on
// the tensor skip the copies that an ordinary slice needs. The tensor is aligned to a cache line. If n is 0,
// the result is an empty slice.
//
// Alloc reserves memory in chunks of 64 MiB. A tensor that is larger than a chunk gets a chunk of its own
// size. All memory of a chunk is reserved at once. The memory belongs to the process and not to an engine:
// Alloc may be called before Init, and the memory outlives Shutdown. The garbage collector does not free the
// memory, so the program must call Free. A training program typically allocates its gradients once. When an
// engine uses a chunk for the first time, the other ranks of the host map it, which takes tens of
// microseconds.
//
// If n is negative or the tensor would have 2^63 bytes or more, the error is a *UsageError. If the memory
// cannot be allocated, it is a *NoMemoryError, which says how many bytes were needed and, if known, which
// limit was reached.
func Alloc[T Element](n int) ([]T, error) {
	var zero T
	size := int64(len(tensor.Bytes([]T{zero})))
	if n < 0 || int64(n) > math.MaxInt64/size {
		return nil, &UsageError{Op: "alloc",
			Err: fmt.Errorf("got %d elements of %d bytes, want at least 0 elements and less than 2^63 bytes in total",
				n, size)}
	}
	if n == 0 {
		return []T{}, nil
	}
	b, err := arena.Alloc(int(int64(n) * size))
	if err != nil {
		return nil, fmt.Errorf("hvd: alloc %d elements of %d bytes: %w", n, size, public(err))
	}
	return tensor.View[T](b), nil
}

// Free frees memory that Alloc returned. s must begin at the first element of the slice that Alloc returned,
// and no operation on it may be in flight. Afterwards neither s nor any other slice of the same memory may be
// used. Freeing a slice that Alloc did not return, or freeing it twice, has no effect, and the error is a
// *UsageError. Freeing an empty slice does nothing.
func Free[T Element](s []T) error {
	if cap(s) == 0 {
		return nil
	}
	if err := arena.Free(tensor.Bytes(s[:1:cap(s)])); err != nil {
		return &UsageError{Op: "free", Err: public(err)}
	}
	return nil
}
