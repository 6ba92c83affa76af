package van

import (
	"math/bits"
	"sync"
)

const (
	// minPooled is the size in bytes from which on buffers are used again.
	minPooled = smallBytes + 1
	// alignBytes is the alignment of frames in a buffer.
	alignBytes = 64
)

// buffer is memory for the frames of a message.
type buffer struct{ mem []byte }

// pools[i] has buffers of 1<<i bytes.
var pools [64]sync.Pool

// newBuffer returns a buffer of at least n bytes. Their content is undefined.
func newBuffer(n int) *buffer {
	if b := pooled(n); b != nil {
		return b
	}
	if n < minPooled {
		return &buffer{make([]byte, (n+7)&^7)}
	}
	return &buffer{make([]byte, 1<<class(n))}
}

// class returns the index in pools of buffers with at least n bytes.
func class(n int) int { return bits.Len(uint(n - 1)) }

// pooled returns a free buffer of at least n bytes, or nil if there is none.
func pooled(n int) *buffer {
	if n < minPooled {
		return nil
	}
	b, _ := pools[class(n)].Get().(*buffer)
	return b
}

// grow frees b and returns a buffer of at least n bytes that begins with the bytes of b.
func (b *buffer) grow(n int) *buffer {
	larger := newBuffer(n)
	copy(larger.mem, b.mem)
	b.free()
	return larger
}

// free makes the buffer available to newBuffer. The caller must not use it any more.
func (b *buffer) free() {
	if n := len(b.mem); n >= minPooled {
		pools[class(n)].Put(b)
	}
}

// split appends consecutive parts of the buffer with the given sizes to parts. Each part begins at a multiple
// of alignBytes.
func (b *buffer) split(parts [][]byte, sizes []int) [][]byte {
	at := 0
	for _, n := range sizes {
		parts = append(parts, b.mem[at:at+n:at+n])
		at += aligned(n)
	}
	return parts
}

func aligned(n int) int { return (n + alignBytes - 1) &^ (alignBytes - 1) }

// room returns the size of a buffer for frames of the given sizes.
func room(sizes []int) (n int) {
	for i, size := range sizes {
		if i == len(sizes)-1 {
			return n + size // the last frame needs no padding behind it
		}
		n += aligned(size)
	}
	return n
}
