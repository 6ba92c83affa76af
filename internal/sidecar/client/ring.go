package client

import (
	"encoding/binary"
	"math"
	"sync/atomic"
	"unsafe"

	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

// numEntries is the number of entries of a ring, and of operations that can be in flight. The lowest bits of
// the number of an operation are the index of its state.
const numEntries = wire.MaxRing

// ring is the memory through which operations are submitted.
type ring struct {
	segment           *shmem.Segment
	bytes             []byte
	submitted         *atomic.Uint64
	taken, looking    *atomic.Uint64
	waiting           *atomic.Uint64
	changes, watchers *atomic.Uint32

	// The caller of push and doorbell holds a lock.
	next            uint64 // number of submissions so far
	takenAtDoorbell uint64 // number of submissions that the sidecar had taken when the last doorbell was sent
}

func newRing() (*ring, error) {
	s, err := shmem.CreateOpen("gohvd-ring", int64(wire.RingBytes(numEntries)))
	if err != nil {
		return nil, err
	}
	b := s.Bytes()
	binary.LittleEndian.PutUint32(b, wire.RingMagic)
	binary.LittleEndian.PutUint32(b[4:], wire.RingVersion)
	binary.LittleEndian.PutUint32(b[8:], numEntries)
	word := func(at int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&b[at])) }
	half := func(at int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&b[at])) }
	return &ring{segment: s, bytes: b, submitted: word(wire.RingSubmitted), taken: word(wire.RingTaken),
		looking: word(wire.RingLooking), waiting: word(wire.RingWaiting), changes: half(wire.RingChanges),
		watchers: half(wire.RingWatchers), takenAtDoorbell: math.MaxUint64}, nil
}

// state returns the state of operations whose number has the given index.
func (r *ring) state(index uint32) *atomic.Uint32 {
	at := wire.RingEntries + wire.RingEntryBytes*(numEntries+int(index))
	return (*atomic.Uint32)(unsafe.Pointer(&r.bytes[at]))
}

// push submits the operation in a slot.
func (r *ring) push(id uint64, slot, number uint32) {
	e := r.bytes[wire.RingEntries+wire.RingEntryBytes*(r.next%numEntries):][:wire.RingEntryBytes]
	binary.LittleEndian.PutUint64(e, id)
	binary.LittleEndian.PutUint32(e[8:], slot)
	binary.LittleEndian.PutUint32(e[12:], number)
	r.next++
	r.submitted.Store(r.next)
}

// quiet reports whether the sidecar needs no doorbell for the submissions so far. If soon is set, it is
// enough if it reads them within a millisecond.
func (r *ring) quiet(soon bool) bool {
	state := r.looking.Load()
	return state == wire.Looking || soon && state == wire.Polling || r.taken.Load() == r.submitted.Load()
}

// doorbell reports whether the caller must send a doorbell. If the sidecar sleeps and has taken no submission
// since the last doorbell, that doorbell is about to wake it.
func (r *ring) doorbell(soon bool) bool {
	if r.quiet(soon) {
		return false
	}
	taken := r.taken.Load()
	if r.looking.Load() == wire.Asleep && taken == r.takenAtDoorbell {
		return false
	}
	r.takenAtDoorbell = taken
	return true
}

// changed wakes the threads that wait for any operation.
func (r *ring) changed() {
	r.changes.Add(1)
	if r.watchers.Load() != 0 {
		shmem.Wake(word(r.changes))
	}
}

func word(w *atomic.Uint32) *uint32 { return (*uint32)(unsafe.Pointer(w)) }
