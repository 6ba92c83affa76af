package shm

import (
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gohvd/gohvd/internal/shmem"
)

// A rank that waits looks, then looks and offers its core by turns, and then sleeps. Looking is quick where each rank has a
// core to itself; where not, it takes the core from the rank that is waited for. That can happen anywhere: the kernel may put
// two ranks on one core though another is idle. So nobody looks for longer than a yield or two take.
const (
	// looks is how often a rank looks before it yields, and between two yields: for about 2 us.
	looks = 60
	// crowdedLooks is that where there are more ranks than cores: as long as it takes to see a word that is being written.
	crowdedLooks = 2
	// yields is how often a rank offers its core before it sleeps, and crowdedYields that with more ranks than cores,
	// where each may run another rank for a while, and where to be woken takes longest.
	yields        = 30
	crowdedYields = 100
	// yieldsPerGosched keeps small what it costs to offer the processor to other goroutines: three times a yield.
	yieldsPerGosched = 16
	// maxYielding bounds the time of all yields together: each may run another process for milliseconds, in which a rank that sleeps would
	// have been woken.
	maxYielding = time.Millisecond
	// nap bounds a sleep. Nobody wakes a rank because its context has ended.
	nap = 20 * time.Millisecond
)

// post publishes word v of this rank's segment, with all that was written before, and wakes ranks that sleep.
func (b *Backend) post(word *uint64, v uint64) {
	atomic.StoreUint64(word, v)
	// This load comes after that store, and a sleeper's look at the word after the store of its rest word: one of the two
	// sees the other (Dekker). Both are sequentially consistent.
	for i := range b.peers {
		if i != b.me && atomic.LoadUint32(b.peers[i].rest) != 0 {
			shmem.Wake(lowHalf(word))
			return
		}
	}
}

// await waits until the word of member i of the set has reached want.
func (b *Backend) await(i int, word *uint64, want uint64) error {
	var began time.Time
	for k := 0; ; k++ {
		for range b.looks {
			if reached(word, want) {
				return nil
			}
			shmem.Pause(1)
		}
		if k == b.yields {
			break
		}
		if b.crowded && k%yieldsPerGosched == yieldsPerGosched-1 {
			runtime.Gosched() // the loop of this rank, or another rank of this process, may need the processor
		}
		if k == 0 {
			began = time.Now()
		} else if time.Since(began) > maxYielding {
			break
		}
		shmem.Yield()
	}
	atomic.StoreUint32(b.rest, 1)
	defer atomic.StoreUint32(b.rest, 0)
	for {
		v := atomic.LoadUint64(word)
		if int64(v-want) >= 0 {
			return nil
		}
		if err := b.inVain(i); err != nil {
			return err
		}
		shmem.Wait(lowHalf(word), uint32(v), nap)
	}
}

// awaitAll waits until all members have finished the rounds before want.
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

// arrived reports whether all members have finished the rounds before want. If wait is set it waits for that.
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

// inVain returns why waiting for member i is useless, or nil.
func (b *Backend) inVain(i int) error {
	if err := b.mem.Err(b.lane, b.ranks[i]); err != nil {
		return err
	}
	return contextError(b.ctx)
}

func reached(word *uint64, want uint64) bool { return int64(atomic.LoadUint64(word)-want) >= 0 }

// lowHalf returns the half of a word that changes with every step, because a futex has 32 bits. On the
// processors that gohvd supports it comes first.
func lowHalf(word *uint64) *uint32 { return (*uint32)(unsafe.Pointer(word)) }
