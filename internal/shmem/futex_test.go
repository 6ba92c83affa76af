package shmem_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/testnet"
)

const (
	never    = time.Hour // longer than any test, so no call of Wait returns because of its timeout
	pageSize = 4096
)

// TestMain runs the tests. In a child process, it runs the child of TestProcesses, or the child of
// TestFileLimit, for which the size of files is limited.
func TestMain(m *testing.M) {
	switch {
	case len(os.Args) > 1 && os.Args[1] == "wake":
		if err := wakeParent(); err != nil {
			panic(err)
		}
		return
	case len(os.Args) > 2 && os.Args[1] == "create":
		n, err := strconv.ParseInt(os.Args[2], 10, 64)
		if err != nil {
			panic(err)
		}
		_, err = shmem.Create("child", n)
		var none *shmem.NoMemoryError
		fmt.Println(errors.As(err, &none), err)
		return
	}
	os.Exit(m.Run())
}

// wakeParent waits until the word in the file with descriptor 3 is 1. Then it sets the word in the file with
// descriptor 4 to 1 and wakes the threads that wait for it.
func wakeParent() error {
	b, err := mapFD(3, unix.PROT_READ) // a waiter needs only read access
	if err != nil {
		return err
	}
	for words := word(b); atomic.LoadUint32(words) != 1; {
		shmem.Wait(words, 0, never)
	}
	w, err := mapFD(4, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return err
	}
	atomic.StoreUint32(word(w), 1)
	shmem.Wake(word(w))
	return nil
}

func word(b []byte) *uint32 { return (*uint32)(unsafe.Pointer(unsafe.SliceData(b))) }

func mapFD(fd, prot int) ([]byte, error) {
	return unix.Mmap(fd, 0, pageSize, prot, unix.MAP_SHARED)
}

// page allocates a page of shared memory and maps it once for each element of prots, with that protection. It
// returns the first word of each mapping, and the file.
func page(t *testing.T, prots ...int) ([]*uint32, *os.File) {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "test")
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(pageSize); err != nil {
		t.Fatal(err)
	}
	var words []*uint32
	for _, prot := range prots {
		b, err := mapFD(fd, prot)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Munmap(b); err != nil {
				t.Error(err)
			}
		})
		words = append(words, word(b))
	}
	return words, f
}

const (
	readOnly  = unix.PROT_READ
	readWrite = unix.PROT_READ | unix.PROT_WRITE
)

// TestMappings checks that Wake wakes waiters that have another mapping of the same page, even if the
// mappings of the waiters and of the waker are read-only.
func TestMappings(t *testing.T) {
	for _, waker := range []int{readOnly, readWrite} {
		words, _ := page(t, readWrite, readOnly, waker)
		const waiters = 3
		var returned atomic.Int32
		for range waiters {
			go func() {
				for atomic.LoadUint32(words[1]) == 0 {
					shmem.Wait(words[1], 0, never)
				}
				returned.Add(1)
			}()
		}
		// The test cannot see whether a thread sleeps. So perhaps some waiters have not begun to wait, and
		// then the test passes too. It fails if a sleeping waiter is not woken.
		for range 1000 {
			shmem.Yield()
		}
		atomic.StoreUint32(words[0], 1)
		shmem.Wake(words[2])
		testnet.Eventually(t, "all waiters are woken", func() bool { return returned.Load() == waiters })
	}
}

// TestProcesses lets two processes wake each other. Each waits on a page that it has mapped read-only, and
// wakes the other process on a second page.
func TestProcesses(t *testing.T) {
	here, toChild := page(t, readWrite)
	there, toParent := page(t, readOnly)
	exe := testnet.Self(t)
	cmd := exec.Command(exe, "wake")
	var out strings.Builder
	cmd.Stderr = &out
	cmd.ExtraFiles = []*os.File{toChild, toParent}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for range 1000 {
		shmem.Yield()
	}
	atomic.StoreUint32(here[0], 1)
	shmem.Wake(here[0])
	for atomic.LoadUint32(there[0]) == 0 {
		shmem.Wait(there[0], 0, never)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
}

func TestWaitReturns(t *testing.T) {
	words, _ := page(t, readWrite)
	shmem.Wait(words[0], 1, never) // must return at once, because the word is not 1
	shmem.Wait(words[0], 0, 0)
	shmem.Wait(words[0], 0, -time.Second)
	const d = 20 * time.Millisecond
	began := time.Now()
	for time.Since(began) < d { // the loop is needed because Wait may return early
		shmem.Wait(words[0], 0, d)
	}
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("a wait of %v took %v", d, took)
	}
	// If Wait returned at once instead of sleeping, this loop would make many more calls.
	began = time.Now()
	waits := 0
	for time.Since(began) < d {
		shmem.Wait(words[0], 0, d)
		waits++
	}
	if waits > 100 {
		t.Errorf("got %d waits in %v, want them to sleep", waits, d)
	}
	shmem.Wake(words[0]) // a Wake without waiters must have no effect
}

// TestFence lets two threads each store to one word and then load the word of the other thread. At least one
// of them must see the store of the other. The test uses ordinary loads and stores, and the threads meet
// before each round. So without Fence the test would fail even on amd64.
func TestFence(t *testing.T) {
	if raceEnabled {
		t.Skip("plain words, on purpose")
	}
	const rounds = 50_000
	var words [2]struct {
		v, saw uint32
		_      [120]byte
	}
	var arrived atomic.Uint32
	meet := func(n uint32) {
		arrived.Add(1)
		for spins := 0; arrived.Load() < n; spins++ {
			if spins > 1000 {
				shmem.Yield()
			}
		}
	}
	missed := 0
	run := func(me int) {
		for i := uint32(0); i < rounds; i++ {
			meet(4*i + 2)
			words[me].v = i + 1
			shmem.Fence()
			words[me].saw = words[1-me].v
			meet(4*i + 4)
			if me == 0 && words[0].saw != i+1 && words[1].saw != i+1 {
				missed++
			}
		}
	}
	done := make(chan struct{})
	go func() { run(1); close(done) }()
	run(0)
	<-done
	if missed > 0 {
		t.Errorf("in %d of %d rounds neither saw the other's store", missed, rounds)
	}
}

func TestPause(t *testing.T) {
	took := func(n int) time.Duration {
		least := time.Hour
		for range 10 {
			began := time.Now()
			shmem.Pause(n)
			least = min(least, time.Since(began))
		}
		return least
	}
	shmem.Pause(0)
	shmem.Pause(-1)
	// If the thread is interrupted often, even the fastest of ten measurements may be slow. So the test
	// repeats them.
	for end := time.Now().Add(20 * time.Second); ; {
		few, many := took(1000), took(100_000)
		if many >= 10*few {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("1000 pauses took %v, 100000 took %v", few, many)
		}
	}
}

func TestAllocatesNothing(t *testing.T) {
	words, _ := page(t, readWrite)
	if n := testing.AllocsPerRun(100, func() {
		shmem.Wait(words[0], 1, never)
		shmem.Wake(words[0])
		shmem.Yield()
		shmem.Pause(1)
		shmem.Fence()
	}); n != 0 {
		t.Errorf("got %v allocations, want none", n)
	}
}

func BenchmarkPause(b *testing.B) { shmem.Pause(b.N) }
func BenchmarkFence(b *testing.B) {
	for range b.N {
		shmem.Fence()
	}
}
