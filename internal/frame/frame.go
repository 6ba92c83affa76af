// Package frame cuts a stream into frames: a length, four bytes, big-endian, and as many bytes.
package frame

import (
	"encoding/binary"
	"fmt"
	"io"
	"slices"
)

const (
	// HeaderBytes is the size of the length.
	HeaderBytes = 4
	// step is how much memory a frame gets on the word of its header alone.
	step = 4 << 10
)

// New returns a frame without a body, with room for one of the given capacity: to append to and then Seal.
func New(capacity int) []byte { return make([]byte, HeaderBytes, HeaderBytes+capacity) }

// Seal writes the length of a frame whose body is there, and returns the frame.
func Seal(frame []byte) []byte {
	binary.BigEndian.PutUint32(frame, uint32(len(frame)-HeaderBytes))
	return frame
}

// Read reads the body of one frame, at most limit bytes. Memory is allocated as bytes arrive: 4 KiB, then
// twice what is there. At the end of the stream the error is io.EOF between frames and io.ErrUnexpectedEOF within one.
func Read(r io.Reader, limit int) ([]byte, error) {
	var head [HeaderBytes]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if uint64(n) > uint64(limit) {
		return nil, fmt.Errorf("frame of %d bytes, want at most %d", n, limit)
	}
	return ReadBytes(r, nil, int(n))
}

// ReadBytes reads n bytes into buf, or into new memory where that is too small, which is allocated as bytes arrive. If not
// all come the error is io.ErrUnexpectedEOF.
func ReadBytes(r io.Reader, buf []byte, n int) ([]byte, error) {
	if buf = buf[:0]; buf == nil {
		buf = make([]byte, 0, min(n, step))
	}
	for len(buf) < n {
		have := len(buf)
		buf = slices.Grow(buf, min(n-have, max(have, step)))[:min(n, max(2*have, step))]
		if _, err := io.ReadFull(r, buf[have:]); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	}
	return buf, nil
}
