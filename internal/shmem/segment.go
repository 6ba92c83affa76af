// Package shmem makes memory that other processes can map, from files without a name (memfd_create(2)), and
// waits for words in it (futex(2)). Package arena allocates tensors in it.
//
// Invariants of a Segment:
//
//  1. A Segment is allocated completely before any other process sees it: no access to it can raise SIGBUS for lack of
//     memory.
//  2. It cannot shrink or grow (seals), so no access can raise SIGBUS because of the actions of another process.
//  3. A process that is given the descriptor can map it only for reading (F_SEAL_FUTURE_WRITE, Linux 5.1). The only
//     writer is the process that made it. A Segment of CreateOpen has this property only from Seal on; until then it may be
//     given to one other process, which works for this one, also writes it, and seals it (Adopt).
//  4. It is not in any file system. The kernel frees it when the last mapping and the last descriptor are gone, however
//     their processes ended.
//
// Invariants of Wait and Wake. They may be called in different processes that have mapped the page at
// different addresses, and the process that waits may have mapped it read-only:
//
//  1. Wait checks the word after it has queued itself. So a waker that changes the word first and then calls Wake wakes
//     every waiter that saw the old value.
//  2. A return of Wait guarantees nothing: the caller must check the word again.
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
	// allocStep is the number of bytes of one fallocate call. A signal makes the kernel undo the whole call,
	// so calls are kept shorter than the time between two signals of a profiler.
	allocStep = 4 << 20
	// maxRetries is how many times in a row one step is retried after it was interrupted by a signal.
	maxRetries = 1000
)

// Segment is a mapping of a memfd. Its methods are safe for concurrent use, but no slice of Bytes may be used
// during or after Close.
type Segment struct {
	name  string // for the errors of Seal
	bytes []byte
	// own is the descriptor, or -1 if the Segment does not own one.
	own int

	closing sync.Once
	err     error
}

// NoMemoryError is the error if there is not enough memory for a segment.
type NoMemoryError struct {
	// What names the purpose of the memory.
	What string
	// NeedBytes is the size of the segment.
	NeedBytes int64
	// Err is the reason. It names the limit if that is known.
	Err error
}

func (e *NoMemoryError) Error() string {
	return fmt.Sprintf("shmem: %s: cannot allocate %d bytes of shared memory: %v", e.What, e.NeedBytes, e.Err)
}

func (e *NoMemoryError) Unwrap() error { return e.Err }

// Create makes a zeroed Segment of numBytes, rounded up to whole pages, that this process can write. name, up
// to 249 bytes, shows in /proc. The error is a *NoMemoryError if there is not enough memory.
//
// Create clears all of the memory, which takes about 0.2 s per GiB.
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

// CreateOpen is like Create, but seals only the size of the Segment: until Seal, any process that has the
// descriptor can map it for writing.
func CreateOpen(name string, numBytes int64) (*Segment, error) {
	if numBytes <= 0 {
		return nil, fmt.Errorf("shmem: %s: got a size of %d bytes, want at least 1", name, numBytes)
	}
	page := int64(os.Getpagesize())
	size := (numBytes + page - 1) / page * page
	if size < numBytes || int64(int(size)) != size {
		return nil, &NoMemoryError{name, numBytes, errors.New("the size exceeds the address space")}
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

// open makes the file. The file is not executable if the kernel supports that (6.3 and later), because a
// kernel may require it.
func open(name string) (int, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL {
		fd, err = unix.MemfdCreate(name, flags)
	}
	return fd, err
}

// fill allocates the memory of a new file. The Segment owns fd; if fill fails, the caller still owns it.
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

// populate touches b through the mapping, because the kernel uses huge pages only then. If it fails, the
// memory is only slower: allocate allocates the remaining pages.
func populate(b []byte) {
	if unix.Madvise(b, unix.MADV_HUGEPAGE) == nil && len(b) >= hugePage {
		for at := 0; at < len(b); at += allocStep {
			if unix.Madvise(b[at:min(at+allocStep, len(b))], unix.MADV_POPULATE_WRITE) != nil {
				return
			}
		}
	}
}

// hugePage is the size of a Segment from which huge pages are possible.
const hugePage = 2 << 20

// allocate makes the kernel reserve every page.
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

// retry calls f again while it is interrupted by signals, up to maxRetries times.
func retry(f func() error) (err error) {
	for range maxRetries {
		if err = f(); err != unix.EINTR {
			return err
		}
	}
	return err
}

// fixed are the seals that fix the size.
const fixed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW

// fix seals the size.
func fix(name string, fd int) error {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, fixed); err != nil {
		return fmt.Errorf("shmem: %s: seal: %w", name, err)
	}
	return nil
}

// seal seals the size and the writer. The last seal prevents further seals, so that a peer cannot add a
// harmful one. It is not an error if the file already has these seals.
func seal(name string, fd int) error {
	err := addSeals(fd, fixed|unix.F_SEAL_FUTURE_WRITE|unix.F_SEAL_SEAL)
	if err == unix.EINVAL { // Linux before 5.1, in which a peer could map the file for writing
		err = addSeals(fd, fixed|unix.F_SEAL_SEAL)
	}
	if err != nil {
		return fmt.Errorf("shmem: %s: seal: %w", name, err)
	}
	return nil
}

// addSeals adds seals to a descriptor. It succeeds if the descriptor has them already.
func addSeals(fd, seals int) error {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	if err == unix.EPERM { // the file allows no more seals
		if has, unknown := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); unknown == nil &&
			has&seals == seals {
			return nil
		}
	}
	return err
}

// Map maps all of a peer's segment for reading. The caller still owns fd, which is not needed afterwards. It
// is an error if the file could shrink, is empty, or does not have whole pages, because reading it might
// raise SIGBUS.
func Map(fd int) (*Segment, error) {
	size, err := check(fd, unix.F_SEAL_SHRINK)
	if err != nil {
		return nil, fmt.Errorf("shmem: map: %w", err)
	}
	b, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("shmem: map %d bytes: %w", size, err)
	}
	// An error does not matter: huge pages only make access faster.
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	return &Segment{bytes: b, own: -1}, nil
}

// Adopt maps all of a file that another process has made, for reading and writing, and then seals it as
// Create does: from then on no other process can map it for writing, but existing mappings remain. The
// Segment owns fd; if there is an error, Adopt closes it. It is an error if the file could raise SIGBUS: if
// it is not sealed against shrinking and growing, does not have whole pages, or has holes.
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
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("get the allocated memory of descriptor %d: %w", fd, err)
	}
	if have := st.Blocks * blockBytes; have < size {
		return nil, fmt.Errorf("got a file with %d of %d bytes allocated, want all", have, size)
	}
	b, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", size, err)
	}
	// An error does not matter: huge pages only make access faster.
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	if err := seal("adopt", fd); err != nil {
		return nil, errors.Join(err, unmap(b))
	}
	// Until the seals were set, a process that breaks the rules could punch a hole. So check again.
	if err := unix.Fstat(fd, &st); err != nil || st.Blocks*blockBytes < size {
		return nil, errors.Join(
			fmt.Errorf("another process has removed memory of descriptor %d: got %d bytes allocated, want %d",
				fd, st.Blocks*blockBytes, size), err, unmap(b))
	}
	return &Segment{name: "adopt", bytes: b, own: fd}, nil
}

// blockBytes is the unit of st_blocks, in bytes.
const blockBytes = 512

// check returns the size of a file. It is an error if the file lacks one of the seals in want, or does not
// have whole pages.
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
		return 0, fmt.Errorf("got a file of %d bytes, want whole pages of %d bytes", st.Size, page)
	}
	return st.Size, nil
}

// Bytes returns the memory. Writing to the memory of a segment from Map is a fault.
func (s *Segment) Bytes() []byte { return s.bytes }

// Seal ensures that from now on no process that has the descriptor can map the memory for writing. Existing
// mappings, such as the one of this process, remain. Seal may be called again. The segment comes from
// Create, CreateOpen or Adopt.
func (s *Segment) Seal() error { return seal(s.name, s.own) }

// FD returns the descriptor of a segment of Create, CreateOpen or Adopt, to pass to peers. For a segment of
// CreateOpen it must be called after Seal. The descriptor is valid until Close. FD returns -1 for a segment
// of Map.
func (s *Segment) FD() int { return s.own }

// Close unmaps the memory and closes the descriptor. Later calls return the result of the first call.
func (s *Segment) Close() error {
	s.closing.Do(func() {
		s.err = unmap(s.bytes)
		if s.own >= 0 {
			s.err = errors.Join(s.err, closeFD(s.own))
		}
	})
	return s.err
}

// Blank replaces the memory of a segment of Map with zeros, and releases the original memory. Until Close,
// readers of Bytes then read zeros instead of faulting.
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
