package main

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/tensor"
)

// memory allocates the benchmark's tensors and counts their bytes.
type memory struct {
	live   int64 // total bytes of the tensors that are not freed
	offset int64 // where in a page the tensors begin that are ordinary slices, or 0 for anywhere
}

// alloc allocates a tensor of zeros, in the arena or as an ordinary slice, and makes all its pages resident.
func (m *memory) alloc(numBytes int64, inArena bool) ([]byte, error) {
	// Check first that the host has enough memory. Otherwise the process would end without an explanation.
	var host unix.Sysinfo_t
	if err := unix.Sysinfo(&host); err != nil {
		return nil, fmt.Errorf("read the memory size of this host: %w", err)
	}
	if total := int64(host.Totalram) * int64(host.Unit); numBytes > total-m.live {
		return nil, fmt.Errorf("the tensors need %s of memory, but this host has only %s",
			formatSize(m.live+numBytes), formatSize(total))
	}
	m.live += numBytes
	if inArena {
		return hvd.Alloc[uint8](int(numBytes))
	}
	room := numBytes
	if m.offset > 0 {
		room += 2 * pageBytes
	}
	b := tensor.Bytes(make([]int64, (room+7)/8))
	if m.offset > 0 {
		b = b[(m.offset-addressOf(b))&(pageBytes-1):]
	}
	b = b[:numBytes]
	touchPages(b)
	return b, nil
}

// addressOf returns the address of b, which is not empty.
func addressOf(b []byte) int64 { return int64(uintptr(unsafe.Pointer(&b[0]))) }

// free frees a tensor. No operation may use the tensor any more.
func (m *memory) free(b []byte, inArena bool) error {
	m.live -= int64(len(b))
	if inArena {
		return hvd.Free(b)
	}
	return nil
}

const pageBytes = 4096

// touchPages writes a byte in every page, so that the pages become resident.
func touchPages(b []byte) {
	for i := 0; i < len(b); i += pageBytes {
		b[i] = 0
	}
}

// touch writes every byte of b, as a training step does before its gradients are reduced. The bytes of
// pattern must be valid elements of every type: finite floats, small integers, or true.
func touch(b []byte, pattern uint64) {
	words := tensor.View[int64](b)
	for i := range words {
		words[i] = int64(pattern)
	}
	for i := len(words) * 8; i < len(b); i++ {
		b[i] = byte(pattern)
	}
}

const (
	// Patterns for the function touch.
	touchNumbers = 0x3c003c003c003c00 // 1 in float16, 0.0078 in bfloat16 and float32
	touchBools   = 0x0101010101010101
)
