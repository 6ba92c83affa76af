package sidecar

import (
	"encoding/binary"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gohvd/gohvd/internal/shmem"
)

// These constants describe the layout of a ring, which docs/sidecar.md defines. ringSubmitted to ringLooking
// are offsets of words. ringEntries is the offset of the first entry.
const (
	ringMagic   = 0x52564847 // "GHVR"
	ringVersion = 2

	ringSubmitted = 64
	ringTaken     = 128
	ringCompleted = 192
	ringWanted    = 320
	ringLooking   = 384
	ringEntries   = 4096

	ringEntryBytes = 16
	minRing        = 16
	maxRing        = maxInFlight
)

// The word at ringLooking has one of these values. From it the client learns what the reader is doing, and
// whether it needs to send a doorbell.
const (
	asleep  = 0 // the reader waits for a doorbell
	looking = 1 // the reader is looking at the ring
	polling = 2 // the reader will look at the ring again within pollInterval
)

// These are the statuses of a completion.
const (
	statusDone  = 0 // all results are in the outputs, and no answer is sent
	statusReply = 1 // the answer is sent in a frame
)

// ring is the shared memory for submissions and completions. The client can write to it at any time. So the
// sidecar reads each value only once, and then checks the value that it has read.
type ring struct {
	bytes              []byte
	n                  uint64
	submitted          *atomic.Uint64
	taken, completedAt *atomic.Uint64
	wanted, state      *atomic.Uint64

	read uint64 // number of submissions that the reader has read; only the reader uses it

	mu        sync.Mutex
	segment   *shmem.Segment // nil after close
	completed uint64
	notified  uint64 // number of completions when the last doorbell was sent
}

// newRing returns the ring in the segment s. If newRing returns no error, the ring owns s.
func newRing(s *shmem.Segment) (*ring, error) {
	b := s.Bytes()
	if len(b) < ringEntries {
		return nil, fmt.Errorf("got a ring of %d bytes, want at least %d", len(b), ringEntries)
	}
	magic, version := binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])
	n := binary.LittleEndian.Uint32(b[8:])
	switch want := ringEntries + 2*ringEntryBytes*uint64(n); {
	case magic != ringMagic || version != ringVersion:
		return nil, fmt.Errorf("got a ring with magic %#x and version %d, want %#x and %d", magic, version,
			ringMagic, ringVersion)
	case n < minRing || n > maxRing || n&(n-1) != 0:
		return nil, fmt.Errorf("got a ring of %d entries, want a power of two from %d to %d", n, minRing,
			maxRing)
	case uint64(len(b)) < want:
		return nil, fmt.Errorf("got a ring of %d entries in %d bytes, want at least %d bytes", n, len(b),
			want)
	}
	return &ring{
		bytes: b, n: uint64(n), segment: s,
		submitted: word(b, ringSubmitted), taken: word(b, ringTaken), completedAt: word(b, ringCompleted),
		wanted: word(b, ringWanted), state: word(b, ringLooking),
	}, nil
}

// word returns the 64-bit word of b whose byte offset is at.
func word(b []byte, at int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&b[at])) }

// pending returns the number of submissions that the client has made so far, according to the client's
// counter. Only the reader calls it.
func (r *ring) pending() uint64 { return r.submitted.Load() }

// startLooking tells the client that the reader is looking at the ring until the next call of park, so that
// the client sends no doorbell in that time.
func (r *ring) startLooking() {
	if r.state.Load() != looking {
		r.state.Store(looking)
	}
}

// park stores state, which is asleep or polling, in the word at ringLooking. It tells the client what the
// reader is about to do. If there is a new submission, park returns false, and the reader must handle the
// submission first. Only the reader calls park.
func (r *ring) park(state uint64) bool {
	r.state.Store(state)
	return r.pending() == r.read
}

// awaited reports whether the client wants doorbells for completions. The client can switch them off in the
// ring.
func (r *ring) awaited() bool { return r.wanted.Load() != math.MaxUint64 }

// submission is an entry of a ring: the client submits the operation in a slot. id is the number of the
// submission. If call is not 0, it is appended to the name of the operation.
type submission struct {
	id         uint64
	slot, call uint32
}

// next returns the next submission if its index is less than the parameter until. If there is no such
// submission, ok is false. Only the reader calls next.
func (r *ring) next(until uint64) (s submission, ok bool, err error) {
	if r.read == until {
		return s, false, nil
	}
	r.mu.Lock()
	completed := r.completed
	r.mu.Unlock()
	if until-r.read > r.n || r.read+1-completed > r.n {
		return s, false, fmt.Errorf(
			"%w: the ring has %d entries, but %d submissions, of which hvdd has taken %d and completed %d",
			errFrame, r.n, until, r.read, completed)
	}
	e := r.bytes[ringEntries+ringEntryBytes*(r.read&(r.n-1)):][:ringEntryBytes]
	s = submission{id: binary.LittleEndian.Uint64(e), slot: binary.LittleEndian.Uint32(e[8:]),
		call: binary.LittleEndian.Uint32(e[12:])}
	if s.id == 0 {
		return s, false, fmt.Errorf("%w: submission %d of the ring has number 0, want at least 1", errFrame,
			r.read)
	}
	r.read++
	r.taken.Store(r.read)
	return s, true, nil
}

// complete writes the completion of the operation with the number id. If it returns true, the caller must
// send a doorbell.
func (r *ring) complete(id uint64, status uint32) (ring bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.segment == nil {
		return false
	}
	e := r.bytes[ringEntries+ringEntryBytes*(r.n+r.completed&(r.n-1)):][:ringEntryBytes]
	clear(e)
	binary.LittleEndian.PutUint64(e, id)
	binary.LittleEndian.PutUint32(e[8:], status)
	r.completed++
	r.completedAt.Store(r.completed)
	return r.due()
}

// overdue reports whether there are completions for which the client did not want a doorbell at the time when
// they were written, but wants one now.
func (r *ring) overdue() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.segment != nil && r.notified != r.completed && r.due()
}

// due reports whether the client waits for a doorbell. If it returns true, the caller must send one. The
// caller holds mu.
func (r *ring) due() bool {
	if r.wanted.Load() > r.completed {
		return false
	}
	r.notified = r.completed
	return true
}

// close unmaps the ring. It must not be called before the reader has ended.
func (r *ring) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.segment == nil {
		return nil
	}
	err := r.segment.Close()
	r.segment = nil
	return err
}
