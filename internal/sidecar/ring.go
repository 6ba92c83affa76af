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

// The layout of a ring; docs/sidecar.md owns it.
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

// Values of the looking word: what the reader does, and so when the client has to ring for it.
const (
	asleep  = 0 // it waits for a doorbell
	looking = 1 // it looks at the ring
	dozing  = 2 // it looks at the ring again within dozeTime
)

// Statuses of a completion.
const (
	statusDone  = 0 // all results are in their outputs
	statusReply = 1 // a frame has the answer
)

// ring is memory that a client writes too: all that is read from it is read once and then checked.
type ring struct {
	bytes              []byte
	n                  uint64
	submitted          *atomic.Uint64
	taken, completedAt *atomic.Uint64
	wanted, state      *atomic.Uint64

	read uint64 // submissions that were taken; the reader's

	mu        sync.Mutex
	segment   *shmem.Segment // nil after close
	completed uint64
	told      uint64 // completions at the last doorbell
}

// newRing is the ring in a segment, which it owns unless there is an error.
func newRing(s *shmem.Segment) (*ring, error) {
	b := s.Bytes()
	if len(b) < ringEntries {
		return nil, fmt.Errorf("a ring of %d bytes, want at least %d", len(b), ringEntries)
	}
	magic, version := binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])
	n := binary.LittleEndian.Uint32(b[8:])
	switch want := ringEntries + 2*ringEntryBytes*uint64(n); {
	case magic != ringMagic || version != ringVersion:
		return nil, fmt.Errorf("a ring with magic %#x and version %d, want %#x and %d", magic, version, ringMagic, ringVersion)
	case n < minRing || n > maxRing || n&(n-1) != 0:
		return nil, fmt.Errorf("a ring of %d entries, want a power of two from %d to %d", n, minRing, maxRing)
	case uint64(len(b)) < want:
		return nil, fmt.Errorf("a ring of %d entries in %d bytes, want %d", n, len(b), want)
	}
	return &ring{
		bytes: b, n: uint64(n), segment: s,
		submitted: word(b, ringSubmitted), taken: word(b, ringTaken), completedAt: word(b, ringCompleted),
		wanted: word(b, ringWanted), state: word(b, ringLooking),
	}, nil
}

func word(b []byte, at int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&b[at])) }

// pending is how many submissions the client says it has made. It is the reader's.
func (r *ring) pending() uint64 { return r.submitted.Load() }

// watch tells the client that it need not ring: the reader looks by itself until it rests.
func (r *ring) watch() {
	if r.state.Load() != looking {
		r.state.Store(looking)
	}
}

// rest tells the client that the reader is asleep or dozing, and reports whether it may be. It is the reader's.
func (r *ring) rest(state uint64) bool {
	r.state.Store(state)
	return r.pending() == r.read
}

// awaited reports whether the client waits, or does not say.
func (r *ring) awaited() bool { return r.wanted.Load() != math.MaxUint64 }

// next takes a submission before number until. It is the reader's.
func (r *ring) next(until uint64) (id uint64, slot uint32, ok bool, err error) {
	if r.read == until {
		return 0, 0, false, nil
	}
	r.mu.Lock()
	completed := r.completed
	r.mu.Unlock()
	if until-r.read > r.n || r.read+1-completed > r.n {
		return 0, 0, false, fmt.Errorf("%w: the ring of %d has %d submissions, of which %d were taken and %d completed", errFrame, r.n, until, r.read, completed)
	}
	e := r.bytes[ringEntries+ringEntryBytes*(r.read&(r.n-1)):][:ringEntryBytes]
	id, slot = binary.LittleEndian.Uint64(e), binary.LittleEndian.Uint32(e[8:])
	if zero := binary.LittleEndian.Uint32(e[12:]); zero != 0 || id == 0 {
		return 0, 0, false, fmt.Errorf("%w: submission %d of the ring has number %d and %#x after its slot", errFrame, r.read, id, zero)
	}
	r.read++
	r.taken.Store(r.read)
	return id, slot, true, nil
}

// complete tells of an operation's end, and reports whether the client waits for a doorbell.
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

// overdue reports whether there are completions for whose doorbell the client did not wait before, but waits now.
func (r *ring) overdue() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.segment != nil && r.told != r.completed && r.due()
}

// due reports whether the client waits for a doorbell. The caller holds mu and rings.
func (r *ring) due() bool {
	if r.wanted.Load() > r.completed {
		return false
	}
	r.told = r.completed
	return true
}

// close gives the memory up. The reader has gone.
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
