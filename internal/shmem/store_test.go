package shmem_test

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/shmem"
)

// await waits until the value of word is v.
func await(word *atomic.Uint32, v uint32) {
	for spins := 0; word.Load() != v; spins++ {
		if spins%1000 == 999 {
			runtime.Gosched() // there may be one processor only
		}
	}
}

// Two goroutines each store a word of shared memory and then load the word of the other. At least one of them
// must see the store of the other.
func TestStoreBeforeLoad(t *testing.T) {
	mem, err := unix.Mmap(-1, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	x, y := (*uint32)(unsafe.Pointer(&mem[0])), (*uint64)(unsafe.Pointer(&mem[4096]))
	const rounds = 200_000
	var begun, done atomic.Uint32
	var seenX uint32
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := uint32(1); i <= rounds; i++ {
			await(&begun, i)
			shmem.Store64(y, 1)
			seenX = atomic.LoadUint32(x)
			done.Store(i)
		}
	})
	missed := 0
	for i := uint32(1); i <= rounds; i++ {
		atomic.StoreUint32(x, 0)
		atomic.StoreUint64(y, 0)
		begun.Store(i)
		for range i % 8 { // the other goroutine takes some time to begin
			begun.Load()
		}
		shmem.Store32(x, 1)
		seenY := atomic.LoadUint64(y)
		await(&done, i)
		if seenX == 0 && seenY == 0 {
			missed++
		}
	}
	wg.Wait()
	if missed > 0 {
		t.Errorf("in %d of %d rounds, neither goroutine has seen the store of the other", missed, rounds)
	}
}
