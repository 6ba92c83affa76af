package sidecar

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

// ring is the shared memory for submissions and states. The client can write to it at any time. So the
// sidecar reads each value only once, and then checks the value that it has read.
type ring struct {
	bytes             []byte
	n                 uint64
	submitted         *atomic.Uint64
	taken, state      *atomic.Uint64
	waiting           *atomic.Uint64
	changes, watchers *atomic.Uint32

	read uint64 // number of submissions that the reader has read; only the reader uses it

	mu        sync.Mutex
	segment   *shmem.Segment // nil after close
	completed uint64
}

// newRing returns the ring in the segment s. If newRing returns no error, the ring owns s.
func newRing(s *shmem.Segment) (*ring, error) {
	b := s.Bytes()
	n, err := wire.ReadRing(b)
	if err != nil {
		return nil, err
	}
	return &ring{bytes: b, n: n, segment: s, submitted: word(b, wire.RingSubmitted),
		taken: word(b, wire.RingTaken), state: word(b, wire.RingLooking), waiting: word(b, wire.RingWaiting),
		changes: word32(b, wire.RingChanges), watchers: word32(b, wire.RingWatchers)}, nil
}

// word returns the 64-bit word of b whose byte offset is at.
func word(b []byte, at int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&b[at])) }

// word32 returns the 32-bit word of b whose byte offset is at.
func word32(b []byte, at uint64) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&b[at])) }

// pending returns the number of submissions that the client has made so far, according to the client's
// counter. Only the reader calls it.
func (r *ring) pending() uint64 { return r.submitted.Load() }

// startLooking tells the client that the reader is looking at the ring until the next call of park, so that
// the client sends no doorbell in that time.
func (r *ring) startLooking() {
	if r.state.Load() != wire.Looking {
		r.state.Store(wire.Looking)
	}
}

// park stores state, which is asleep or polling, in the word at ringLooking. It tells the client what the
// reader is about to do. If there is a new submission, park returns false, and the reader must handle the
// submission first. Only the reader calls park.
func (r *ring) park(state uint64) bool {
	r.state.Store(state)
	return r.pending() == r.read
}

// awaited reports whether a thread of the client waits for operations.
func (r *ring) awaited() bool { return r.waiting.Load() != 0 }

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
			wire.ErrFrame, r.n, until, r.read, completed)
	}
	e := r.bytes[wire.RingEntries+wire.RingEntryBytes*(r.read&(r.n-1)):][:wire.RingEntryBytes]
	s = submission{id: binary.LittleEndian.Uint64(e), slot: binary.LittleEndian.Uint32(e[8:]),
		call: binary.LittleEndian.Uint32(e[12:])}
	if s.id == 0 {
		return s, false, fmt.Errorf("%w: submission %d of the ring has number 0, want at least 1", wire.ErrFrame,
			r.read)
	}
	r.read++
	r.taken.Store(r.read)
	return s, true, nil
}

// complete records that the operation with the number id has ended. If done is set, it changes the state of
// the operation. Otherwise the client learns of the end from the answer.
func (r *ring) complete(id uint64, done bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.segment == nil {
		return
	}
	r.completed++
	if done {
		r.wake(id)
	}
}

// wake changes the state of the operation with the number id, and wakes the threads of the client that sleep
// until it changes. The caller holds mu.
func (r *ring) wake(id uint64) {
	state := word32(r.bytes, wire.RingEntries+wire.RingEntryBytes*(r.n+id&(r.n-1)))
	if state.Swap(wire.StateDone) == wire.StateAwaited {
		shmem.Wake((*uint32)(unsafe.Pointer(state)))
	}
	r.changes.Add(1)
	if r.watchers.Load() != 0 {
		shmem.Wake((*uint32)(unsafe.Pointer(r.changes)))
	}
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
