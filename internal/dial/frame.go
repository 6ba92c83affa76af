package dial

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"slices"
)

// A frame is the length of its body (four bytes, big-endian) followed by the body.

const (
	// FrameHeaderBytes is the size of a frame's header, which contains only the length of the body.
	FrameHeaderBytes = 4
	// frameStep is the maximum number of bytes that are allocated for a body before the first byte of the
	// body has arrived.
	frameStep = 4 << 10
)

// NewFrame returns a frame with an empty body and room for a body of the given capacity. The caller appends
// the body and then calls SealFrame.
func NewFrame(capacity int) []byte { return make([]byte, FrameHeaderBytes, FrameHeaderBytes+capacity) }

// SealFrame writes the length of the body into the header of frame, and returns frame. The body must already
// be complete.
func SealFrame(frame []byte) []byte {
	binary.BigEndian.PutUint32(frame, uint32(len(frame)-FrameHeaderBytes))
	return frame
}

// ReadFrame reads one frame and returns its body. If the body is longer than limit bytes, it returns an
// error. It allocates memory as bytes arrive: first 4 KiB, then twice the number of bytes that have arrived.
// If the stream ends between two frames, the error is io.EOF. If it ends within a frame, the error is
// io.ErrUnexpectedEOF.
func ReadFrame(r io.Reader, limit int) ([]byte, error) {
	var head [FrameHeaderBytes]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if uint64(n) > uint64(limit) {
		return nil, fmt.Errorf("got a frame of %d bytes, want at most %d", n, limit)
	}
	return ReadBytes(r, nil, int(n))
}

// PeekFrame waits for the header of a frame and returns the length of the body, without reading it.
func PeekFrame(r *bufio.Reader) (int64, error) {
	head, err := r.Peek(FrameHeaderBytes)
	if err != nil {
		if len(head) > 0 && err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return 0, err
	}
	return int64(binary.BigEndian.Uint32(head)), nil
}

// ReadBytes reads n bytes and returns them. It reads into buf if buf is large enough. Otherwise it allocates
// new memory as bytes arrive. If the stream ends before n bytes have arrived, the error is
// io.ErrUnexpectedEOF.
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
