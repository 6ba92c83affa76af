package shm

import (
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gohvd/gohvd/internal/shmem"
)

// A waiting rank first spins: it loads a word again and again. Then it alternates between spinning and
// yielding its core, and at last it sleeps. Spinning is fastest if each rank has a core of its own. If two
// ranks share a core, a rank that spins takes the core from the rank that it waits for. This can happen on
// every machine, because the kernel may put two ranks on one core even if another core is idle, until a rank
// moves to another core (shmem.Yielder). So a rank never spins for longer than one or two yields take.
const (
	// spins is the number of times that a rank loads the word before the first yield and between two yields.
	// This takes about 2 us.
	spins = 60
	// oversubscribedSpins replaces spins if there are more ranks than cores. It is enough to see a word that
	// is just being written.
	oversubscribedSpins = 2
	// yields is the number of times that a rank yields its core before it sleeps. oversubscribedYields
	// replaces yields if there are more ranks than cores. It is larger because then each yield may run
	// another rank for a while, and because a sleeping rank is woken late.
	yields               = 30
	oversubscribedYields = 100
	// yieldsPerGosched is the number of yields for each call of runtime.Gosched, because a call of Gosched
	// costs three times as much as a yield.
	yieldsPerGosched = 16
	// maxYielding limits the time of all yields together. One yield may run another process for milliseconds.
	// If it does, it is faster to sleep and be woken.
	maxYielding = time.Millisecond
	// maxSleep limits one sleep. The end of a context wakes no rank, so the rank checks its context after
	// each sleep.
	maxSleep = 20 * time.Millisecond
)

// post stores v in a word of this rank's segment and wakes ranks that sleep. A rank that sees v also sees all
// that this rank wrote before.
func (b *Backend) post(word *uint64, v uint64) {
	shmem.Store64(word, v)
	// This rank stores word and then loads parked. A rank that goes to sleep stores parked and then loads
	// word. All these accesses are sequentially consistent (shmem.Store64), so at least one of the two ranks
	// sees the store of the other (Dekker's algorithm).
	for i := range b.peers {
		if i != b.me && atomic.LoadUint32(b.peers[i].parked) != 0 {
			shmem.Wake(lowHalf(word))
			return
		}
	}
}

// await waits until the value of the given word, in the segment of member i, is at least want.
func (b *Backend) await(i int, word *uint64, want uint64) error {
	var began time.Time
	for k := 0; ; k++ {
		for range b.spins {
			if reached(word, want) {
				return nil
			}
			shmem.Pause(1)
		}
		if k == b.yields {
			break
		}
		if b.oversubscribed && k%yieldsPerGosched == yieldsPerGosched-1 {
			// The loop of this rank, or another rank in this process, may need the processor.
			runtime.Gosched()
		}
		if k == 0 {
			began = time.Now()
		} else if time.Since(began) > maxYielding {
			break
		}
		b.yielder.Yield()
	}
	shmem.Store32(b.parked, 1)
	defer shmem.Store32(b.parked, 0)
	for {
		v := atomic.LoadUint64(word)
		if int64(v-want) >= 0 {
			return nil
		}
		if err := b.waitError(i); err != nil {
			return err
		}
		shmem.Wait(lowHalf(word), uint32(v), maxSleep)
	}
}

// awaitAll waits until the number of rounds that each member has finished is at least want.
func (b *Backend) awaitAll(want uint64) error {
	for i := range b.peers {
		if i == b.me {
			continue
		}
		if err := b.await(i, b.peers[i].progress, want); err != nil {
			return err
		}
	}
	return nil
}

// arrived reports whether the number of rounds that each member has finished is at least want. If the
// parameter wait is set, arrived waits until it is.
func (b *Backend) arrived(want uint64, wait bool) (bool, error) {
	if wait {
		err := b.awaitAll(want)
		return err == nil, err
	}
	for i := range b.peers {
		if i != b.me && !reached(b.peers[i].progress, want) {
			return false, nil
		}
	}
	return true, nil
}

// waitError returns the reason why member i can no longer make progress, or why this rank must stop waiting.
// It returns nil if waiting still makes sense.
func (b *Backend) waitError(i int) error {
	if err := b.mem.Err(b.lane, b.ranks[i]); err != nil {
		return err
	}
	return contextError(b.ctx)
}

func reached(word *uint64, want uint64) bool { return int64(atomic.LoadUint64(word)-want) >= 0 }

// lowHalf returns the low 32 bits of a word, because a futex has 32 bits. The low half changes whenever the
// word increases. gohvd supports only little-endian processors, where the low half is at the address of the
// word.
func lowHalf(word *uint64) *uint32 { return (*uint32)(unsafe.Pointer(word)) }
