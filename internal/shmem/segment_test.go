package shmem_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/testnet"
)

func create(t *testing.T, n int64) *shmem.Segment {
	t.Helper()
	s, err := shmem.Create("test", n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func mapped(t *testing.T, fd int) *shmem.Segment {
	t.Helper()
	s, err := shmem.Map(fd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestSizes(t *testing.T) {
	page := int64(os.Getpagesize())
	for _, n := range []int64{1, page - 1, page, page + 1, 4<<20 - 1, 4<<20 + 1, 9 << 20} {
		s := create(t, n)
		want := (n + page - 1) / page * page
		if got := int64(len(s.Bytes())); got != want {
			t.Errorf("%d bytes: got %d, want %d", n, got, want)
		}
		var st unix.Stat_t
		if err := unix.Fstat(s.FD(), &st); err != nil {
			t.Fatal(err)
		}
		// Stat counts in blocks of 512 bytes, whatever the block size of the file system is.
		if st.Size != want || st.Blocks*512 < want {
			t.Errorf("%d bytes: the file has %d bytes and %d allocated, want %d", n, st.Size, st.Blocks*512,
				want)
		}
		for i, b := range s.Bytes() {
			if b != 0 {
				t.Fatalf("%d bytes: byte %d is %d, want 0", n, i, b)
			}
		}
		peer := mapped(t, s.FD())
		if len(peer.Bytes()) != len(s.Bytes()) || peer.FD() != -1 {
			t.Errorf("%d bytes: the peer maps %d and has descriptor %d", n, len(peer.Bytes()), peer.FD())
		}
		s.Bytes()[0], s.Bytes()[n-1] = 17, 18
		if peer.Bytes()[n-1] != 18 || n > 1 && peer.Bytes()[0] != 17 {
			t.Errorf("%d bytes: the peer does not see what was written", n)
		}
	}
}

// TestPeerMayOnlyRead checks that a peer that has the descriptor of a segment cannot write to the segment,
// change its size, remove pages or add seals.
func TestPeerMayOnlyRead(t *testing.T) {
	s := create(t, 2*int64(os.Getpagesize()))
	s.Bytes()[0] = 1
	peer := mapped(t, s.FD())
	if _, err := unix.Mmap(s.FD(), 0, len(s.Bytes()), unix.PROT_WRITE, unix.MAP_SHARED); err != unix.EPERM {
		t.Errorf("map to write: got %v, want %v", err, unix.EPERM)
	}
	if err := unix.Mprotect(peer.Bytes(), unix.PROT_READ|unix.PROT_WRITE); err != unix.EACCES {
		t.Errorf("make the mapping writable: got %v, want %v", err, unix.EACCES)
	}
	for _, size := range []int64{0, 1 << 30} {
		if err := unix.Ftruncate(s.FD(), size); err != unix.EPERM {
			t.Errorf("truncate to %d: got %v, want %v", size, err, unix.EPERM)
		}
	}
	const punch = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	if err := unix.Fallocate(s.FD(), punch, 0, int64(len(s.Bytes()))); err != unix.EPERM {
		t.Errorf("punch a hole: got %v, want %v", err, unix.EPERM)
	}
	if _, err := unix.Pwrite(s.FD(), []byte{2}, 0); err != unix.EPERM {
		t.Errorf("write: got %v, want %v", err, unix.EPERM)
	}
	if _, err := unix.FcntlInt(uintptr(s.FD()), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); err != unix.EPERM {
		t.Errorf("add a seal: got %v, want %v", err, unix.EPERM)
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	func() {
		defer func() {
			if recover() == nil {
				t.Error("writing through the peer's mapping did not fault")
			}
		}()
		peer.Bytes()[0] = 3
	}()
	if s.Bytes()[0] != 1 {
		t.Errorf("got %d, want 1", s.Bytes()[0])
	}
}

// TestMapChecks checks that Map refuses a file that is not sealed, and a file that does not consist of whole
// pages. The caller must then still own the descriptor.
func TestMapChecks(t *testing.T) {
	file := func(size int64, seals int) int {
		fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Close(fd); err != nil {
				t.Error(err)
			}
		})
		if err := unix.Ftruncate(fd, size); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
		return fd
	}
	page := int64(os.Getpagesize())
	pipe, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	defer w.Close()
	for name, fd := range map[string]int{
		"no seals": file(page, 0), "seal against growing": file(page, unix.F_SEAL_GROW),
		"empty": file(0, unix.F_SEAL_SHRINK), "no whole pages": file(page+1, unix.F_SEAL_SHRINK),
		"no memfd": int(pipe.Fd()), "not open": -1,
	} {
		if s, err := shmem.Map(fd); err == nil {
			t.Errorf("%s: got %d bytes, want an error", name, len(s.Bytes()))
		}
	}
	mapped(t, file(page, unix.F_SEAL_SHRINK))
}

// TestAdopt checks that Adopt maps another process's file for writing and prevents further writable mappings.
// If access to the file could raise SIGBUS, Adopt must refuse it.
func TestAdopt(t *testing.T) {
	const size, fixed = 8192, unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	for _, c := range []struct {
		name  string
		size  int64
		seals int
		spoil func(fd int) error
		says  string
	}{
		{"as it should be", size, fixed, nil, ""},
		{"cannot be written", size, fixed | unix.F_SEAL_FUTURE_WRITE, nil, "map"},
		{"unsealed", size, 0, nil, "sealed"},
		{"can grow", size, unix.F_SEAL_SHRINK, nil, "sealed"},
		{"can shrink", size, unix.F_SEAL_GROW, nil, "sealed"},
		{"cannot be sealed", size, fixed | unix.F_SEAL_SEAL, nil, "seal"},
		{"no pages", 0, fixed, nil, "a multiple of the page size"},
		{"part of a page", size + 1, fixed, nil, "a multiple of the page size"},
		{"a hole", size, fixed, func(fd int) error {
			return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 4096, 4096)
		}, "a file of 8192 bytes with 4096 bytes allocated"},
		{"only holes, and memory beyond the end", size, unix.F_SEAL_SHRINK, func(fd int) error {
			const keep = unix.FALLOC_FL_KEEP_SIZE
			if err := unix.Fallocate(fd, keep, size, 2*size); err != nil {
				return err
			}
			_, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_GROW)
			return errors.Join(err, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|keep, 0, size))
		}, "a file of 8192 bytes with 0 bytes allocated"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := testnet.OpenFiles(t)
			fd, err := unix.MemfdCreate("made elsewhere", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
			if err != nil {
				t.Fatal(err)
			}
			if c.size > 0 {
				if err := unix.Fallocate(fd, 0, 0, c.size); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, c.seals); err != nil {
				t.Fatal(err)
			}
			if c.spoil != nil {
				if err := c.spoil(fd); err != nil {
					t.Fatal(err)
				}
			}
			s, err := shmem.Adopt(fd)
			if c.says != "" {
				if err == nil || !strings.Contains(err.Error(), c.says) {
					t.Errorf("got %v, want %q", err, c.says)
				}
				if after := testnet.OpenFiles(t); after != before {
					t.Errorf("%d open files before, %d after", before, after)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			s.Bytes()[size-1] = 7
			if b, err := unix.Mmap(s.FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE,
				unix.MAP_SHARED); err == nil {
				unix.Munmap(b)
				t.Error("another process can map the segment for writing")
			}
			if _, err := unix.FcntlInt(uintptr(s.FD()), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); err == nil {
				t.Error("others can seal it")
			}
			peer := mapped(t, s.FD())
			if got := peer.Bytes()[size-1]; got != 7 {
				t.Errorf("a peer reads %d", got)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	if _, err := shmem.Adopt(-1); err == nil {
		t.Error("no file was adopted")
	}
}

func TestClose(t *testing.T) {
	before := testnet.OpenFiles(t)
	s, err := shmem.Create("test", 1)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Dup(s.FD())
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	peer, err := shmem.Map(fd) // the file exists as long as any process has a descriptor of it
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := peer.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := unix.Close(fd); err != nil {
		t.Error(err)
	}
	if n := testnet.OpenFiles(t); n != before {
		t.Errorf("got %d open files, want %d", n, before)
	}
}

// TestBlank checks that a peer's mapping reads as zeros after Blank and no longer maps the file. The owner's
// mapping must not change.
func TestBlank(t *testing.T) {
	s := create(t, 3*int64(os.Getpagesize()))
	for i := range s.Bytes() {
		s.Bytes()[i] = 5
	}
	peer := mapped(t, s.FD())
	if err := peer.Blank(); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(peer.Bytes(), make([]byte, len(peer.Bytes()))) {
		t.Error("the blanked mapping has bytes that are not 0")
	}
	if s.Bytes()[0] != 5 {
		t.Error("blanking changed the file")
	}
}

func TestImpossibleSizes(t *testing.T) {
	before := testnet.OpenFiles(t)
	for _, n := range []int64{0, -1} {
		if _, err := shmem.Create("test", n); err == nil {
			t.Errorf("%d bytes: got no error", n)
		}
	}
	for _, n := range []int64{1 << 50, 1<<63 - 1} {
		_, err := shmem.Create("huge", n)
		var none *shmem.NoMemoryError
		if !errors.As(err, &none) || none.NeedBytes < n || none.What != "huge" {
			t.Errorf("%d bytes: got %v, want a *NoMemoryError with the size", n, err)
		}
	}
	if got := testnet.OpenFiles(t); got != before {
		t.Errorf("got %d open files, want %d", got, before)
	}
}

// TestFileLimit limits the size of files (ulimit -f). Create must return an error with the size and the
// limit. No signal may end the process.
func TestFileLimit(t *testing.T) {
	exe := testnet.Self(t)
	for _, c := range []struct {
		n    int64
		want string
	}{
		{1 << 20, "false <nil>\n"},
		{1<<20 + 1, fmt.Sprintf(
			"true shmem: child: cannot allocate %d bytes of shared memory: files are limited to %d bytes (RLIMIT_FSIZE, ulimit -f)\n", 1<<20+os.Getpagesize(), 1<<20)},
	} {
		// In bash, the unit of ulimit -f is KiB.
		cmd := exec.Command("bash", "-c", `ulimit -f 1024 && exec "$0" create "$1"`, exe,
			strconv.FormatInt(c.n, 10))
		out, err := cmd.CombinedOutput()
		if err != nil || string(out) != c.want {
			t.Errorf("%d bytes: got %q, %v, want %q", c.n, out, err, c.want)
		}
	}
}

// TestCreateOpen checks that a process that has the descriptor of a segment from CreateOpen can write to it
// until the segment is sealed. The size must be fixed from the start. Both Seal and Adopt must seal the
// segment.
func TestCreateOpen(t *testing.T) {
	for _, how := range []string{"by its maker", "by who adopts it"} {
		s, err := shmem.CreateOpen("test", 1)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Ftruncate(s.FD(), 0); err != unix.EPERM {
			t.Errorf("truncate: got %v, want %v", err, unix.EPERM)
		}
		theirs, err := unix.Mmap(s.FD(), 0, len(s.Bytes()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			t.Fatalf("map to write before the seal: %v", err)
		}
		if how == "by its maker" {
			err = s.Seal()
		} else {
			var fd int
			if fd, err = unix.FcntlInt(uintptr(s.FD()), unix.F_DUPFD_CLOEXEC, 0); err != nil {
				t.Fatal(err)
			}
			var adopted *shmem.Segment
			if adopted, err = shmem.Adopt(fd); err == nil {
				defer adopted.Close()
			}
		}
		if err != nil {
			t.Fatalf("sealed %s: %v", how, err)
		}
		for range 2 {
			if err := s.Seal(); err != nil {
				t.Errorf("sealed %s: sealed again: %v", how, err)
			}
		}
		if b, err := unix.Mmap(s.FD(), 0, len(s.Bytes()), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_SHARED); err != unix.EPERM {
			t.Errorf("sealed %s: map to write: got %d bytes and %v, want %v", how, len(b), err, unix.EPERM)
		}
		s.Bytes()[0] = 1
		if theirs[0] != 1 { // existing mappings must stay writable
			t.Errorf("got %d, want 1", theirs[0])
		}
		if _, err := shmem.Adopt(dup(t, s.FD())); err == nil {
			t.Errorf("sealed %s: adopted again", how)
		}
		if err := errors.Join(unix.Munmap(theirs), s.Close()); err != nil {
			t.Error(err)
		}
	}
}

// TestSealIsRefused lets another process set seals that still allow writing, and then prevent further seals.
// Seal must fail.
func TestSealIsRefused(t *testing.T) {
	s, err := shmem.CreateOpen("test", 1)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := unix.FcntlInt(uintptr(s.FD()), unix.F_ADD_SEALS, unix.F_SEAL_SEAL); err != nil {
		t.Fatal(err)
	}
	if err := s.Seal(); !errors.Is(err, unix.EPERM) {
		t.Errorf("got %v, want %v", err, unix.EPERM)
	}
}

func dup(t *testing.T, fd int) int {
	d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return d
}
