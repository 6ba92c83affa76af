package rendezvous

import (
	"encoding/binary"
	"fmt"
	"io"
	"slices"
)

// Both protocols of this package, of the store and of the root, begin with a greeting in each direction, the
// client's first: four bytes of magic that name the protocol, and its version. Frames follow: a length and as many
// bytes. Numbers are big-endian.
const (
	greetingBytes = 8
	frameHeader   = 4
	// frameStep is how much memory a frame gets on the word of its header alone.
	frameStep = 4 << 10
)

func greeting(magic string, version uint32) []byte {
	return binary.BigEndian.AppendUint32([]byte(magic), version)
}

// readGreeting reads the greeting of a peer and returns its version. An error means that the peer speaks something
// else.
func readGreeting(r io.Reader, magic string) (version uint32, err error) {
	var g [greetingBytes]byte
	if _, err := io.ReadFull(r, g[:]); err != nil {
		return 0, fmt.Errorf("reading the greeting: %w", err)
	}
	if string(g[:4]) != magic {
		return 0, fmt.Errorf("greeting is %q, want %q", g[:4], magic)
	}
	return binary.BigEndian.Uint32(g[4:]), nil
}

// newFrame returns a frame without a body, to append to and then seal.
func newFrame(capacity int) []byte { return make([]byte, frameHeader, frameHeader+capacity) }

func sealFrame(frame []byte) []byte {
	binary.BigEndian.PutUint32(frame, uint32(len(frame)-frameHeader))
	return frame
}

// readFrame reads the body of one frame, at most limit bytes. Memory is allocated as bytes arrive: frameStep, then
// twice what is there. At the end of the stream the error is io.EOF between frames and io.ErrUnexpectedEOF within one.
func readFrame(r io.Reader, limit int) ([]byte, error) {
	var head [frameHeader]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if uint64(n) > uint64(limit) {
		return nil, fmt.Errorf("frame of %d bytes, want at most %d", n, limit)
	}
	body := make([]byte, 0, min(int(n), frameStep))
	for len(body) < int(n) {
		have := len(body)
		body = slices.Grow(body, min(int(n)-have, max(have, frameStep)))[:min(int(n), max(2*have, frameStep))]
		if _, err := io.ReadFull(r, body[have:]); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	}
	return body, nil
}
