// Package shmem makes memory that other processes can map, from files without a name (memfd_create(2)), and waits for words in it
// (futex(2)). Package arena allocates tensors in it.
//
// Invariants of a Segment:
//
//  1. A Segment is allocated in full before anybody sees it: no access to it can raise SIGBUS for want of memory.
//  2. It cannot shrink, nor grow (seals), so no access can raise SIGBUS because of what another process did.
//  3. Whoever is given the descriptor can map it only to read (F_SEAL_FUTURE_WRITE, Linux 5.1): it has one writer, the
//     process that made it. One of CreateOpen is so from Seal on; until then it may be given to one other process, which works
//     for this one, writes it too, and seals it (Adopt).
//  4. Nothing of it is in any file system. The kernel frees it when the last mapping and descriptor have gone, however
//     their processes ended.
//
// Invariants of Wait and Wake, whose two ends may be different processes that have mapped the page at different addresses, the one
// that waits read-only:
//
//  1. Wait looks at the word after it has queued itself. A waker that changes the word first and calls Wake then wakes
//     every waiter that saw the old value.
//  2. A return of Wait says nothing: the caller looks again.
//
// The word must not be in private memory of a read-only mapping.
package shmem

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// allocStep is what one fallocate asks for. A signal makes the kernel undo all of a call, so calls are kept shorter
	// than the pause between two signals of a profiler.
	allocStep = 4 << 20
	// maxRetries bounds how often in a row a signal may break off one step.
	maxRetries = 1000
)

// Segment is a mapping of a memfd. Its methods are safe for concurrent use, but no slice of Bytes may be used after
// Close, nor while it runs.
type Segment struct {
	name  string // for errors of Seal
	bytes []byte
	// own is the descriptor, -1 if it is not the Segment's.
	own int

	closing sync.Once
	err     error
}

// NoMemoryError says that memory for a segment cannot be had.
type NoMemoryError struct {
	// What is what the memory was for.
	What string
	// NeedBytes is the size of the segment.
	NeedBytes int64
	// Err names the limit, where that can be told.
	Err error
}

func (e *NoMemoryError) Error() string {
	return fmt.Sprintf("memfd: %s: no %d bytes of shared memory: %v", e.What, e.NeedBytes, e.Err)
}

func (e *NoMemoryError) Unwrap() error { return e.Err }

// Create makes a zeroed Segment of numBytes, rounded up to whole pages, that this process can write. name, up to 249
// bytes, shows in /proc. The error is a *NoMemoryError if the memory cannot be had.
//
// Time: all of the memory is cleared here, about 0.2 s per GiB.
func Create(name string, numBytes int64) (*Segment, error) {
	s, err := CreateOpen(name, numBytes)
	if err != nil {
		return nil, err
	}
	if err := s.Seal(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// CreateOpen is Create of a Segment whose size alone is sealed: whoever has the descriptor can map it to write, until Seal.
func CreateOpen(name string, numBytes int64) (*Segment, error) {
	if numBytes <= 0 {
		return nil, fmt.Errorf("memfd: %s: got a size of %d bytes, want at least 1", name, numBytes)
	}
	page := int64(os.Getpagesize())
	size := (numBytes + page - 1) / page * page
	if size < numBytes || int64(int(size)) != size {
		return nil, &NoMemoryError{name, numBytes, errors.New("more than the address space")}
	}
	if err := checkLimits(size); err != nil {
		return nil, &NoMemoryError{name, size, err}
	}
	fd, err := open(name)
	if err != nil {
		return nil, fmt.Errorf("memfd: %s: memfd_create: %w", name, err)
	}
	s, err := fill(name, fd, size)
	if err != nil {
		return nil, errors.Join(err, closeFD(fd))
	}
	return s, nil
}

// open makes the file, not executable where the kernel (6.3) knows that: it may insist on it.
func open(name string) (int, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL {
		fd, err = unix.MemfdCreate(name, flags)
	}
	return fd, err
}

// fill gives a new file its memory. The Segment owns fd; if there is none the caller still does.
func fill(name string, fd int, size int64) (*Segment, error) {
	if err := retry(func() error { return unix.Ftruncate(fd, size) }); err != nil {
		return nil, &NoMemoryError{name, size, explain(err)}
	}
	b, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, &NoMemoryError{name, size, fmt.Errorf("mmap: %w", err)}
	}
	populate(b)
	if err = allocate(fd, size); err != nil {
		err = &NoMemoryError{name, size, explain(err)}
	} else {
		err = fix(name, fd)
	}
	if err != nil {
		return nil, errors.Join(err, unmap(b))
	}
	return &Segment{name: name, bytes: b, own: fd}, nil
}

// populate touches b through the mapping, because only so does the kernel heed the wish for huge pages. That it fails
// costs speed alone: allocate does what is left.
func populate(b []byte) {
	if unix.Madvise(b, unix.MADV_HUGEPAGE) == nil && len(b) >= hugePage {
		for at := 0; at < len(b); at += allocStep {
			if unix.Madvise(b[at:min(at+allocStep, len(b))], unix.MADV_POPULATE_WRITE) != nil {
				return
			}
		}
	}
}

// hugePage is the size from which huge pages can be hoped for.
const hugePage = 2 << 20

// allocate has the kernel reserve every page.
func allocate(fd int, size int64) error {
	for at := int64(0); at < size; at += allocStep {
		if err := retry(func() error { return unix.Fallocate(fd, 0, at, min(allocStep, size-at)) }); err != nil {
			return err
		}
	}
	return nil
}

// retry calls f again while signals break it off.
func retry(f func() error) (err error) {
	for range maxRetries {
		if err = f(); err != unix.EINTR {
			return err
		}
	}
	return err
}

// fixed are the seals of a size.
const fixed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW

// fix fixes the size.
func fix(name string, fd int) error {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, fixed); err != nil {
		return fmt.Errorf("memfd: %s: seal: %w", name, err)
	}
	return nil
}

// seal fixes size and writer. The last seal fixes the seals, lest a peer add one that hurts. What has them already is left.
func seal(name string, fd int) error {
	err := add(fd, fixed|unix.F_SEAL_FUTURE_WRITE|unix.F_SEAL_SEAL)
	if err == unix.EINVAL { // before Linux 5.1: peers could map it writable, if they wanted to
		err = add(fd, fixed|unix.F_SEAL_SEAL)
	}
	if err != nil {
		return fmt.Errorf("memfd: %s: seal: %w", name, err)
	}
	return nil
}

func add(fd, seals int) error {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	if err == unix.EPERM { // no more can be added
		if has, unknown := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); unknown == nil && has&seals == seals {
			return nil
		}
	}
	return err
}

// Map maps a peer's segment, all of it, to read. fd stays the caller's and is not needed afterwards. A file that could
// shrink, is empty, or is not whole pages is refused: reading it might raise SIGBUS.
func Map(fd int) (*Segment, error) {
	size, err := check(fd, unix.F_SEAL_SHRINK)
	if err != nil {
		return nil, fmt.Errorf("memfd: map: %w", err)
	}
	b, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("memfd: map %d bytes: %w", size, err)
	}
	// It is only advice.
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	return &Segment{bytes: b, own: -1}, nil
}

// Adopt maps a file that another process has made, all of it, to read and write, and then seals it as Create does: from then on
// nobody else can map it to write, but for the mappings that there are. fd is the Segment's, and is closed if there is an error.
// What could raise SIGBUS is refused: a file that is not sealed against shrinking and growing, is not whole pages, or has holes.
func Adopt(fd int) (*Segment, error) {
	s, err := adopt(fd)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("memfd: adopt: %w", err), closeFD(fd))
	}
	return s, nil
}

func adopt(fd int) (*Segment, error) {
	size, err := check(fd, fixed)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("memory of descriptor %d: %w", fd, err)
	}
	if have := st.Blocks * blockBytes; have < size {
		return nil, fmt.Errorf("got a file with %d of %d bytes allocated, want all", have, size)
	}
	b, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", size, err)
	}
	// It is only advice.
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	if err := seal("adopt", fd); err != nil {
		return nil, errors.Join(err, unmap(b))
	}
	// A hole could be punched until the seals were there, though not by who plays by the rules.
	if err := unix.Fstat(fd, &st); err != nil || st.Blocks*blockBytes < size {
		return nil, errors.Join(fmt.Errorf("memory was taken out of descriptor %d: %d bytes left of %d", fd, st.Blocks*blockBytes, size), err, unmap(b))
	}
	return &Segment{name: "adopt", bytes: b, own: fd}, nil
}

// blockBytes is the unit of st_blocks.
const blockBytes = 512

// check wants a file that has all of these seals and is whole pages, and gives its size.
func check(fd int, want int) (size int64, err error) {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return 0, fmt.Errorf("seals of descriptor %d: %w", fd, err)
	}
	if seals&want != want {
		return 0, fmt.Errorf("got a file with seals %#x, want one that is sealed against shrinking, at least %#x", seals, want)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("size of descriptor %d: %w", fd, err)
	}
	if page := int64(os.Getpagesize()); st.Size <= 0 || st.Size%page != 0 || int64(int(st.Size)) != st.Size {
		return 0, fmt.Errorf("got a file of %d bytes, want whole pages of %d bytes", st.Size, page)
	}
	return st.Size, nil
}

// Bytes returns the memory. Writing to that of a mapped segment is a fault.
func (s *Segment) Bytes() []byte { return s.bytes }

// Seal makes this process the only one that can map the memory to write, from now on and whoever has the descriptor. It may be
// called again. The segment is one of Create, CreateOpen or Adopt.
func (s *Segment) Seal() error { return seal(s.name, s.own) }

// FD returns the descriptor of a segment that Create, CreateOpen or Adopt made, to hand to peers, of one of CreateOpen after Seal; it
// ends with Close. It is -1 for one of Map.
func (s *Segment) FD() int { return s.own }

// Close unmaps the memory and closes the descriptor. Later calls return what the first did.
func (s *Segment) Close() error {
	s.closing.Do(func() {
		s.err = unmap(s.bytes)
		if s.own >= 0 {
			s.err = errors.Join(s.err, closeFD(s.own))
		}
	})
	return s.err
}

// Blank puts zeros in place of the memory of a mapped segment, and lets go of it. Who still reads Bytes reads zeros
// instead of a fault, until Close.
func (s *Segment) Blank() error {
	const flags = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_FIXED | unix.MAP_NORESERVE
	at := unsafe.Pointer(unsafe.SliceData(s.bytes))
	if _, err := unix.MmapPtr(-1, 0, at, uintptr(len(s.bytes)), unix.PROT_READ, flags); err != nil {
		return fmt.Errorf("memfd: blank %d bytes: %w", len(s.bytes), err)
	}
	return nil
}

func unmap(b []byte) error {
	if err := unix.Munmap(b); err != nil {
		return fmt.Errorf("memfd: unmap %d bytes: %w", len(b), err)
	}
	return nil
}

func closeFD(fd int) error {
	if err := unix.Close(fd); err != nil {
		return fmt.Errorf("memfd: close: %w", err)
	}
	return nil
}
