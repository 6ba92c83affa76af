package shm

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/shmem"
)

// waker wakes the parked goroutines of this rank. While a goroutine of this rank is parked, *word is not 0. A
// peer then writes to the eventfd fd to wake it.
type waker struct {
	fd   int
	file *os.File // owns fd, so that the runtime can poll it

	mu       sync.Mutex
	sleepers int
	word     *uint32 // points into this rank's control segment; nil when that is unmapped
}

func newWaker(word *uint32) (*waker, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("eventfd", err)
	}
	return &waker{fd: fd, file: os.NewFile(uintptr(fd), "eventfd"), word: word}, nil
}

// park records that a goroutine is about to park. After park the goroutine must check once more whether it
// has to wait.
func (w *waker) park() { w.count(1) }

// unpark reverses one call of park.
func (w *waker) unpark() { w.count(-1) }

func (w *waker) count(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sleepers += n
	// Write the word only if its value changes, because a write removes its cache line from the caches of all
	// peers.
	if w.word != nil && (w.sleepers == 0 || w.sleepers == n) {
		shmem.Store32(w.word, uint32(min(w.sleepers, 1)))
	}
}

// watch calls notified each time a peer has written to the eventfd. It returns when the waker is closed.
func (w *waker) watch(notified func()) {
	var count [8]byte
	for {
		if _, err := w.file.Read(count[:]); err != nil {
			return
		}
		notified()
	}
}

func (w *waker) close() error { return w.file.Close() }

// forget drops the pointer to the word, so that the control segment can be unmapped.
func (w *waker) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.word = nil
}

// peerWaker wakes the parked goroutines of a peer.
type peerWaker struct {
	fd     int     // this process's descriptor of the peer's eventfd
	parked *uint32 // in the peer's control segment; not 0 if a goroutine of the peer is parked
}

func (p *peerWaker) wakeIfParked() {
	if atomic.LoadUint32(p.parked) != 0 {
		p.wake()
	}
}

// wake wakes the parked goroutines of the peer. It never blocks, because the eventfd is non-blocking. The
// write fails only if the counter of the eventfd is at its maximum. In this case the peer has not read
// earlier writes yet, so it will wake anyway.
func (p *peerWaker) wake() {
	one := uint64(1)
	_, _, _ = unix.RawSyscall(unix.SYS_WRITE, uintptr(p.fd), uintptr(unsafe.Pointer(&one)), 8)
}

// checkEventfd returns an error if a descriptor from a peer is not a non-blocking eventfd. A write to another
// kind of file could block.
func checkEventfd(fd int) error {
	kind, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return err
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	if kind != "anon_inode:[eventfd]" || flags&unix.O_NONBLOCK == 0 {
		return fmt.Errorf("%w: got a descriptor of %s with flags %#x, want a non-blocking eventfd",
			errBreach, kind, flags)
	}
	return nil
}
