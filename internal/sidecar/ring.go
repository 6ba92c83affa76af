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

// The layout of a ring, which docs/sidecar.md defines. The first six offsets are words, the last is the first
// entry.
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

// Values of the word at ringLooking. It says what the reader does, and so whether the client has to send a
// doorbell.
const (
	asleep  = 0 // the reader waits for a doorbell
	looking = 1 // the reader looks at the ring
	polling = 2 // the reader looks at the ring again within pollInterval
)

// Statuses of a completion.
const (
	statusDone  = 0 // all results are in their outputs
	statusReply = 1 // a frame has the answer
)

// ring is the shared memory of submissions and completions. The client can write to it at any time, so each
// value is read from it once and then checked.
type ring struct {
	bytes              []byte
	n                  uint64
	submitted          *atomic.Uint64
	taken, completedAt *atomic.Uint64
	wanted, state      *atomic.Uint64

	read uint64 // submissions that were taken; belongs to the reader

	mu        sync.Mutex
	segment   *shmem.Segment // nil after close
	completed uint64
	notified  uint64 // completions at the last doorbell
}

// newRing returns the ring in a segment. The ring owns the segment unless newRing returns an error.
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

// word returns the 64-bit word at byte at of b.
func word(b []byte, at int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&b[at])) }

// pending returns how many submissions the client has made, as the client counts. Only the reader calls it.
func (r *ring) pending() uint64 { return r.submitted.Load() }

// startLooking tells the client that no doorbell is needed, because the reader looks at the ring until it
// calls park.
func (r *ring) startLooking() {
	if r.state.Load() != looking {
		r.state.Store(looking)
	}
}

// park tells the client that the reader is asleep or polling. It reports whether the reader may park, which
// is so if there is no new submission. Only the reader calls it.
func (r *ring) park(state uint64) bool {
	r.state.Store(state)
	return r.pending() == r.read
}

// awaited reports whether the client waits for completions, or has not said that it does not.
func (r *ring) awaited() bool { return r.wanted.Load() != math.MaxUint64 }

// next takes the next submission with an index below until; ok is false if there is none. Only the reader
// calls it.
func (r *ring) next(until uint64) (id uint64, slot uint32, ok bool, err error) {
	if r.read == until {
		return 0, 0, false, nil
	}
	r.mu.Lock()
	completed := r.completed
	r.mu.Unlock()
	if until-r.read > r.n || r.read+1-completed > r.n {
		return 0, 0, false, fmt.Errorf(
			"%w: the ring of %d entries has %d submissions, of which %d were taken and %d completed",
			errFrame, r.n, until, r.read, completed)
	}
	e := r.bytes[ringEntries+ringEntryBytes*(r.read&(r.n-1)):][:ringEntryBytes]
	id, slot = binary.LittleEndian.Uint64(e), binary.LittleEndian.Uint32(e[8:])
	if zero := binary.LittleEndian.Uint32(e[12:]); zero != 0 || id == 0 {
		return 0, 0, false, fmt.Errorf(
			"%w: submission %d of the ring has number %d and %#x after the slot, want a number of 1 or more and 0", errFrame, r.read, id, zero)
	}
	r.read++
	r.taken.Store(r.read)
	return id, slot, true, nil
}

// complete writes the completion of operation id, and reports whether the client waits for a doorbell.
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

// overdue reports whether there are completions for which the client did not want a doorbell before, but
// wants one now.
func (r *ring) overdue() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.segment != nil && r.notified != r.completed && r.due()
}

// due reports whether the client waits for a doorbell, which the caller then sends. The caller holds mu.
func (r *ring) due() bool {
	if r.wanted.Load() > r.completed {
		return false
	}
	r.notified = r.completed
	return true
}

// close unmaps the ring. The reader must have ended.
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
