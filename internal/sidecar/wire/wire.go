// Package wire has what a sidecar and its client must agree on: the greeting, frames, the layout of the ring
// and the encoding of errors. docs/sidecar.md describes the protocol.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

const (
	// Magic begins a greeting.
	Magic = "GHVD"
	// Version is the version of the protocol.
	Version = 3
	// MaxFrameBytes is the maximum length of a frame, without its length prefix.
	MaxFrameBytes = 16 << 20
	// MaxHeadBytes is the maximum length of a length prefix. The longest frame needs a prefix of this length.
	MaxHeadBytes = 4
	// MaxInFlight is the maximum number of operations in flight on a connection.
	MaxInFlight = 1 << 16
	// MaxSlots is the number of slots of a connection; slot numbers are less than MaxSlots. MaxInFlight of
	// the slots are for operations in flight. The same number is for prepared operations that the client
	// keeps for later.
	MaxSlots = 2 * MaxInFlight
	// OwnArenas is the lowest number of an arena of the sidecar. Each such arena is a chunk of the allocator.
	// Its number is OwnArenas plus the ID of the chunk.
	OwnArenas = 1 << 31
)

// These constants describe the layout of a ring, which docs/sidecar.md defines. RingSubmitted to RingLooking
// are offsets of words of 8 bytes, except RingChanges and RingWatchers, which have 4 bytes. RingEntries is
// the offset of the first submission.
const (
	RingMagic   = 0x52564847 // "GHVR"
	RingVersion = 3

	RingSubmitted = 64
	RingTaken     = 128
	RingChanges   = 192
	RingWatchers  = 256
	RingWaiting   = 320
	RingLooking   = 384
	RingEntries   = 4096

	RingEntryBytes = 16
	MinRing        = 16
	MaxRing        = MaxInFlight
)

// The word at RingLooking has one of these values. From it the client learns what the sidecar is doing, and
// whether it needs to send a doorbell.
const (
	Asleep  = 0 // the sidecar waits for a doorbell
	Looking = 1 // the sidecar is looking at the ring
	Polling = 2 // the sidecar will look at the ring again within a millisecond
)

// These are the states of an operation in a ring.
const (
	StateFree    = 0 // no operation has this state
	StatePending = 1
	StateAwaited = 2 // the operation is pending, and a thread sleeps until the state changes
	StateDone    = 3 // all results are in the outputs
)

// RingBytes returns the size of a ring with n entries in bytes.
func RingBytes(n int) int { return RingEntries + 2*RingEntryBytes*n }

// ErrFrame is wrapped by every error about data that breaks the protocol. Both ends close the connection
// after such an error.
var ErrFrame = errors.New("protocol error")

// CutFrame returns the body of the first frame in b, and the length of that frame including its prefix. If
// the frame is incomplete, the length is 0.
func CutFrame(b []byte) (body []byte, numBytes int, err error) {
	n, head := binary.Uvarint(b[:min(len(b), MaxHeadBytes)])
	switch {
	case head == 0 && len(b) < MaxHeadBytes:
		return nil, 0, nil
	case head <= 0 || n > MaxFrameBytes:
		return nil, 0, fmt.Errorf("%w: got a frame of more than %d bytes", ErrFrame, MaxFrameBytes)
	case uint64(len(b)-head) < n:
		return nil, 0, nil
	}
	return b[head : head+int(n)], head + int(n), nil
}

// ReadRing checks the header of a ring in b. It returns the number of entries.
func ReadRing(b []byte) (n uint64, err error) {
	if len(b) < RingEntries {
		return 0, fmt.Errorf("got a ring of %d bytes, want at least %d", len(b), RingEntries)
	}
	magic, version := binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])
	n = uint64(binary.LittleEndian.Uint32(b[8:]))
	switch want := RingEntries + 2*RingEntryBytes*n; {
	case magic != RingMagic || version != RingVersion:
		return 0, fmt.Errorf("got a ring with magic %#x and version %d, want %#x and %d", magic, version, RingMagic,
			RingVersion)
	case n < MinRing || n > MaxRing || n&(n-1) != 0:
		return 0, fmt.Errorf("got a ring of %d entries, want a power of two from %d to %d", n, MinRing,
			MaxRing)
	case uint64(len(b)) < want:
		return 0, fmt.Errorf("got a ring of %d entries in %d bytes, want at least %d bytes", n, len(b), want)
	}
	return n, nil
}
