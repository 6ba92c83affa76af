package dial

import (
	"encoding/binary"
	"fmt"
	"io"
	"slices"
)

// A frame is a length, four bytes, big-endian, and as many bytes.

const (
	// FrameHeaderBytes is the size of the length in bytes.
	FrameHeaderBytes = 4
	// frameStep is the most bytes that are allocated for a frame before any byte of its body has arrived.
	frameStep = 4 << 10
)

// NewFrame returns a frame without a body, with capacity for a body of the given size. The caller appends the
// body and then calls SealFrame.
func NewFrame(capacity int) []byte { return make([]byte, FrameHeaderBytes, FrameHeaderBytes+capacity) }

// SealFrame writes the length into the header of a frame whose body is complete, and returns the frame.
func SealFrame(frame []byte) []byte {
	binary.BigEndian.PutUint32(frame, uint32(len(frame)-FrameHeaderBytes))
	return frame
}

// ReadFrame reads the body of one frame. It is an error if the body is longer than limit bytes. Memory is
// allocated as bytes arrive: 4 KiB first, then twice the bytes that have arrived. At the end of the stream
// the error is io.EOF between frames and io.ErrUnexpectedEOF within a frame.
func ReadFrame(r io.Reader, limit int) ([]byte, error) {
	var head [FrameHeaderBytes]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if uint64(n) > uint64(limit) {
		return nil, fmt.Errorf("frame of %d bytes, want at most %d", n, limit)
	}
	return ReadBytes(r, nil, int(n))
}

// ReadBytes reads n bytes into buf, or into new memory if buf is too small. New memory is allocated as bytes
// arrive. If the stream ends before n bytes have arrived, the error is io.ErrUnexpectedEOF.
func ReadBytes(r io.Reader, buf []byte, n int) ([]byte, error) {
	if buf = buf[:0]; buf == nil {
		buf = make([]byte, 0, min(n, frameStep))
	}
	for len(buf) < n {
		have := len(buf)
		buf = slices.Grow(buf, min(n-have, max(have, frameStep)))[:min(n, max(2*have, frameStep))]
		if _, err := io.ReadFull(r, buf[have:]); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	}
	return buf, nil
}
