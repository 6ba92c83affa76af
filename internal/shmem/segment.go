// Package shmem makes memory that other processes can map, from files without a name (memfd_create(2)). It
// also lets a process wait until another process changes a word in such memory (futex(2)). Package arena
// allocates tensors in such memory.
//
// Invariants of a Segment:
//
//  1. A Segment is allocated completely before any other process sees it. So no access to it can raise SIGBUS
//     because memory is missing.
//  2. Seals prevent a Segment from shrinking or growing. So no access can raise SIGBUS because of what another
//     process does.
//  3. A process that gets the descriptor can map it only for reading (F_SEAL_FUTURE_WRITE, Linux 5.1). Only
//     the process that made the Segment writes to it. A Segment made by CreateOpen has this property only
//     after Seal. Before that, its descriptor may be sent to one other process, which works for this process.
//     That process also writes to the Segment, and seals it (Adopt).
//  4. A Segment is not in any file system. The kernel frees it when the last mapping and the last descriptor
//     are gone, no matter how the processes ended.
//
// Different processes may call Wait and Wake for the same word. They may have mapped its page at different
// addresses, and the waiting process may have mapped it read-only. Invariants of Wait and Wake:
//
//  1. Wait checks the word after it has queued itself. So if a waker first changes the word and then calls
//     Wake, it wakes every waiter that saw the old value.
//  2. When Wait returns, the word may not have changed. So the caller must check it again.
//
// The word must not be in a mapping that is both private and read-only.
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
	// allocStep is the number of bytes that one call of fallocate allocates. If a signal arrives, the kernel
	// undoes the whole call. So a call must take less time than passes between two signals of a profiler.
	allocStep = 4 << 20
	// maxRetries is how many times in a row a call is retried because a signal has interrupted it.
	maxRetries = 1000
)

// Segment is a mapping of a memfd. Its methods are safe for concurrent use. But a slice from Bytes must not
// be used during Close or afterwards.
type Segment struct {
	name  string // appears in the errors of Seal
	bytes []byte
	// own is the descriptor, or -1 if the Segment does not own one.
	own int

	closing sync.Once
	err     error
}

// NoMemoryError reports that there is not enough memory for a segment.
type NoMemoryError struct {
	// What names the purpose of the memory, such as "tensor".
	What string
	// NeedBytes is the size of the segment that the call needs.
	NeedBytes int64
	// Err is the reason. It names the limit if the limit is known.
	Err error
}

func (e *NoMemoryError) Error() string {
	return fmt.Sprintf("shmem: %s: cannot allocate %d bytes of shared memory: %v", e.What, e.NeedBytes, e.Err)
}

func (e *NoMemoryError) Unwrap() error { return e.Err }

// Create makes a Segment that this process can write to. The Segment has numBytes bytes, rounded up to whole
// pages, all zero. The name appears in /proc and may have at most 249 bytes. If there is not enough memory,
// the error is a *NoMemoryError.
//
// Create clears the memory, which takes about 0.2 s per GiB.
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

// CreateOpen is like Create, but seals only the size of the Segment. Until Seal is called, any process that
// has the descriptor can map the Segment for writing.
func CreateOpen(name string, numBytes int64) (*Segment, error) {
	if numBytes <= 0 {
		return nil, fmt.Errorf("shmem: %s: got a size of %d bytes, want at least 1", name, numBytes)
	}
	page := int64(os.Getpagesize())
	size := (numBytes + page - 1) / page * page
	if size < numBytes || int64(int(size)) != size {
		return nil, &NoMemoryError{name, numBytes, errors.New("the size in bytes exceeds the address space")}
	}
	if err := checkLimits(size); err != nil {
		return nil, &NoMemoryError{name, size, err}
	}
	fd, err := open(name)
	if err != nil {
		return nil, fmt.Errorf("shmem: %s: memfd_create: %w", name, err)
	}
	s, err := fill(name, fd, size)
	if err != nil {
		return nil, errors.Join(err, closeFD(fd))
	}
	return s, nil
}

// open creates the file. If the kernel supports it (Linux 6.3 and later), the file is not executable, because
// some kernels are configured to refuse executable files.
func open(name string) (int, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL {
		fd, err = unix.MemfdCreate(name, flags)
	}
	return fd, err
}

// fill allocates the memory of a new file. If it succeeds, the Segment owns fd. If it fails, the caller still
// owns fd.
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

// populate writes to b through the mapping, because only then does the kernel use huge pages. If populate
// fails, allocate allocates the remaining pages. The only consequence is that access to the memory is slower.
func populate(b []byte) {
	if unix.Madvise(b, unix.MADV_HUGEPAGE) == nil && len(b) >= hugePage {
		for at := 0; at < len(b); at += allocStep {
			if unix.Madvise(b[at:min(at+allocStep, len(b))], unix.MADV_POPULATE_WRITE) != nil {
				return
			}
		}
	}
}

// hugePage is the size of a huge page. Smaller Segments cannot use one.
const hugePage = 2 << 20

// allocate makes the kernel allocate every page of the file.
func allocate(fd int, size int64) error {
	for at := int64(0); at < size; at += allocStep {
		if err := retry(func() error {
			return unix.Fallocate(fd, 0, at, min(allocStep, size-at))
		}); err != nil {
			return err
		}
	}
	return nil
}

// retry calls f again and again while a signal interrupts it, at most maxRetries times.
func retry(f func() error) (err error) {
	for range maxRetries {
		if err = f(); err != unix.EINTR {
			return err
		}
	}
	return err
}

// fixed is the set of seals against shrinking and growing.
const fixed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW

// fix seals the size of a file.
func fix(name string, fd int) error {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, fixed); err != nil {
		return fmt.Errorf("shmem: %s: seal: %w", name, err)
	}
	return nil
}

// seal fixes the size of a file and prevents other processes from mapping the file for writing. It also
// prevents further seals, so that a peer cannot add a harmful one. If the file already has these seals, seal
// returns no error.
func seal(name string, fd int) error {
	err := addSeals(fd, fixed|unix.F_SEAL_FUTURE_WRITE|unix.F_SEAL_SEAL)
	if err == unix.EINVAL { // Linux is older than 5.1, so peers can map the file for writing
		err = addSeals(fd, fixed|unix.F_SEAL_SEAL)
	}
	if err != nil {
		return fmt.Errorf("shmem: %s: seal: %w", name, err)
	}
	return nil
}

// addSeals adds seals to the file fd. If the file already has them, it returns no error.
func addSeals(fd, seals int) error {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	if err == unix.EPERM { // the seals of the file can no longer change
		if has, unknown := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); unknown == nil &&
			has&seals == seals {
			return nil
		}
	}
	return err
}

// Map maps all of a peer's segment for reading. The caller still owns fd, and may close it afterwards. Map
// returns an error if reading could raise SIGBUS: if the file could shrink, is empty, or does not consist of
// whole pages.
func Map(fd int) (*Segment, error) {
	size, err := check(fd, unix.F_SEAL_SHRINK)
	if err != nil {
		return nil, fmt.Errorf("shmem: map: %w", err)
	}
	b, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("shmem: map %d bytes: %w", size, err)
	}
	// The error is ignored, because huge pages only make access faster.
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	return &Segment{bytes: b, own: -1}, nil
}

// Adopt maps all of a file that another process has made, for reading and writing. It seals the file as
// Create does. From then on no other process can map the file for writing, but existing mappings remain. The
// Segment owns fd. If Adopt returns an error, it has closed fd. Adopt returns an error if access to the file
// could raise SIGBUS: if the file is not sealed against shrinking and growing, does not consist of whole
// pages, or has holes.
func Adopt(fd int) (*Segment, error) {
	s, err := adopt(fd)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("shmem: adopt: %w", err), closeFD(fd))
	}
	return s, nil
}

func adopt(fd int) (*Segment, error) {
	size, err := check(fd, fixed)
	if err != nil {
		return nil, err
	}
	// This refuses a file that is much larger than its memory before any address space is used for it.
	if err := checkAllocated(fd, size); err != nil {
		return nil, err
	}
	b, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", size, err)
	}
	// The error is ignored, because huge pages only make access faster.
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	if err := seal("adopt", fd); err != nil {
		return nil, errors.Join(err, unmap(b))
	}
	// Another process could punch a hole into the file until seal had set the seals. So Adopt checks once
	// more whether all of the file is allocated.
	if err := checkAllocated(fd, size); err != nil {
		return nil, errors.Join(err, unmap(b))
	}
	return &Segment{name: "adopt", bytes: b, own: fd}, nil
}

// blockBytes is the unit of st_blocks, in bytes.
const blockBytes = 512

// check returns the size of the file fd. If the file lacks a seal in want, or does not consist of whole
// pages, check returns an error.
func check(fd int, want int) (size int64, err error) {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return 0, fmt.Errorf("get the seals of descriptor %d: %w", fd, err)
	}
	if seals&want != want {
		return 0, fmt.Errorf("got a file with seals %#x, want at least %#x: its size is not sealed", seals,
			want)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("get the size of descriptor %d: %w", fd, err)
	}
	if page := int64(os.Getpagesize()); st.Size <= 0 || st.Size%page != 0 || int64(int(st.Size)) != st.Size {
		return 0, fmt.Errorf("got a file of %d bytes, want a multiple of the page size, %d bytes", st.Size, page)
	}
	return st.Size, nil
}

// checkAllocated returns an error if the file fd has holes. size is its size in bytes, which is sealed. An
// access to a hole makes the kernel allocate memory, and raises SIGBUS if there is none.
func checkAllocated(fd int, size int64) error {
	// Memory beyond the end of the file (FALLOC_FL_KEEP_SIZE) would count as if it filled the holes. This
	// call frees it.
	if err := retry(func() error { return unix.Ftruncate(fd, size) }); err != nil {
		return fmt.Errorf("free the memory beyond the end of descriptor %d: %w", fd, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("get the allocated size of descriptor %d: %w", fd, err)
	}
	if have := st.Blocks * blockBytes; have < size {
		return fmt.Errorf("got a file of %d bytes with %d bytes allocated, want all bytes allocated", size, have)
	}
	return nil
}

// Bytes returns the memory. If the segment was made by Map, the process must not write to the memory, because
// a write raises SIGSEGV.
func (s *Segment) Bytes() []byte { return s.bytes }

// Seal prevents all processes from mapping the memory for writing from now on. Existing mappings stay valid,
// such as the mapping of this process. Seal may be called more than once. The segment must have been made by
// Create, CreateOpen or Adopt.
func (s *Segment) Seal() error { return seal(s.name, s.own) }

// FD returns the descriptor, which can be sent to peers. It is valid until Close. If the segment was made by
// CreateOpen, Seal must be called first. If it was made by Map, FD returns -1.
func (s *Segment) FD() int { return s.own }

// Close unmaps the memory and closes the descriptor. Later calls return the same result as the first call.
func (s *Segment) Close() error {
	s.closing.Do(func() {
		s.err = unmap(s.bytes)
		if s.own >= 0 {
			s.err = errors.Join(s.err, closeFD(s.own))
		}
	})
	return s.err
}

// Blank replaces the memory of a segment made by Map with zeros, and releases the original memory. So until
// Close, a goroutine that still reads Bytes reads zeros and does not fault.
func (s *Segment) Blank() error {
	const flags = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_FIXED | unix.MAP_NORESERVE
	at := unsafe.Pointer(unsafe.SliceData(s.bytes))
	if _, err := unix.MmapPtr(-1, 0, at, uintptr(len(s.bytes)), unix.PROT_READ, flags); err != nil {
		return fmt.Errorf("shmem: replace a mapping of %d bytes with zeros: %w", len(s.bytes), err)
	}
	return nil
}

func unmap(b []byte) error {
	if err := unix.Munmap(b); err != nil {
		return fmt.Errorf("shmem: unmap %d bytes: %w", len(b), err)
	}
	return nil
}

func closeFD(fd int) error {
	if err := unix.Close(fd); err != nil {
		return fmt.Errorf("shmem: close: %w", err)
	}
	return nil
}
