package shm

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// bell is this rank's doorbell: an eventfd to which peers write if the word says that a goroutine of this
// rank sleeps.
type bell struct {
	fd   int
	file *os.File // of fd, in the netpoller

	mu       sync.Mutex
	sleepers int
	word     *uint32 // nil when the segment has gone
}

func newBell(word *uint32) (*bell, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("eventfd", err)
	}
	return &bell{fd: fd, file: os.NewFile(uintptr(fd), "doorbell"), word: word}, nil
}

// rest counts a goroutine that is about to sleep. It must look once more before it sleeps; wake uncounts it.
func (b *bell) rest() { b.count(1) }
func (b *bell) wake() { b.count(-1) }

func (b *bell) count(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sleepers += n
	// Only changes: the word's line is in the caches of all peers.
	if b.word != nil && (b.sleepers == 0 || b.sleepers == n) {
		atomic.StoreUint32(b.word, uint32(min(b.sleepers, 1)))
	}
}

// hear calls rung whenever the bell was rung, until close.
func (b *bell) hear(rung func()) {
	var count [8]byte
	for {
		if _, err := b.file.Read(count[:]); err != nil {
			return
		}
		rung()
	}
}

func (b *bell) close() error { return b.file.Close() }

// forget drops the pointer into the segment before that is unmapped.
func (b *bell) forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.word = nil
}

// doorbell is the bell of a peer.
type doorbell struct {
	fd    int // a descriptor of the peer's eventfd
	rests *uint32
}

func (d *doorbell) ringIfRests() {
	if atomic.LoadUint32(d.rests) != 0 {
		d.ring()
	}
}

// ring notifies the peer. It never blocks, because the eventfd is non-blocking. It fails only if the bell was
// rung 2^64 times unread, which notifies too.
func (d *doorbell) ring() {
	one := uint64(1)
	_, _, _ = unix.RawSyscall(unix.SYS_WRITE, uintptr(d.fd), uintptr(unsafe.Pointer(&one)), 8)
}

// checkBell returns an error if a descriptor from a peer is not an eventfd: writing to another kind of file
// could block.
func checkBell(fd int) error {
	kind, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return err
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	if kind != "anon_inode:[eventfd]" || flags&unix.O_NONBLOCK == 0 {
		return fmt.Errorf("%w: got a descriptor of %s with flags %#x, want an eventfd that does not block", errBreach, kind, flags)
	}
	return nil
}
