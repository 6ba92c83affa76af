package store_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// If a process has died in the middle of a write, readers ignore the incomplete record, and the next write
// overwrites it.
func TestFileStoreRepairs(t *testing.T) {
	ctx := testnet.Context(t)
	path := filepath.Join(t.TempDir(), "store")
	s, err := store.NewFileStore(ctx, path, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	record := "\x03\x00\x00\x00/ab\x04\x00\x00\x00text"
	for cut := 1; cut < len(record); cut++ {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(record[:cut]); err != nil {
			t.Fatal(err)
		}
		f.Close()
		if ok, err := s.Check(ctx, "ab"); ok || err != nil {
			t.Errorf("cut at %d: got %v, %v", cut, ok, err)
		}
		if n, err := s.Add(ctx, "n", 1); n != int64(cut) || err != nil {
			t.Fatalf("cut at %d: got %d, %v", cut, n, err)
		}
		if all, err := os.ReadFile(path); err != nil ||
			!strings.HasSuffix(string(all), "/n"+string(rune(len(fmt.Sprint(cut))))+"\x00\x00\x00"+
				fmt.Sprint(cut)) {
			t.Errorf("cut at %d: the file ends in %q, %v", cut, all, err)
		}
		other, err := store.NewFileStore(ctx, path, 0) // the new store reads the whole file
		if err != nil {
			t.Fatal(err)
		}
		if n, err := other.Add(ctx, "n", 0); n != int64(cut) || err != nil {
			t.Errorf("cut at %d: another reads %d, %v", cut, n, err)
		}
		if err := other.Close(); err != nil {
			t.Error(err)
		}
	}
}

// If the file is not a store, NewFileStore returns an error and does not change the file, so a wrong path
// does no damage.
func TestFileStoreLeavesOthers(t *testing.T) {
	for _, content := range []string{"precious\n", "\x03\x00\x00\x00abc\x01\x00\x00\x00x",
		"\x02\x00\x00\x00/a\x00\x00\x00\x00\x01\x00\x00\x00b\x00\x00\x00\x00"} {
		path := filepath.Join(t.TempDir(), "file")
		testnet.WriteFile(t, path, content)
		_, err := store.NewFileStore(testnet.Context(t), path, 1)
		testnet.WantError(t, err, path, "the file is not a store: malformed record at byte")
		if got, err := os.ReadFile(path); err != nil || string(got) != content {
			t.Errorf("%q became %q, %v", content, got, err)
		}
	}
}

// If another user has put a link or a FIFO at the path, NewFileStore returns an error. It neither waits nor
// writes to the file that the link names.
func TestFileStoreRefusesLinksOfOthers(t *testing.T) {
	dir := t.TempDir()
	path, fifo := filepath.Join(dir, "link"), filepath.Join(dir, "fifo")
	precious := filepath.Join(dir, "precious")
	if err := errors.Join(os.WriteFile(precious, nil, 0o600), os.Symlink(precious, path),
		unix.Mkfifo(fifo, 0o600)); err != nil {
		t.Fatal(err)
	}
	_, err := store.NewFileStore(testnet.Context(t), fifo, 1)
	testnet.WantError(t, err, fifo, "want a regular file")
	if os.Geteuid() != 0 {
		return // only root can give the link to another user
	}
	if err := os.Lchown(path, 1234, 1234); err != nil {
		t.Fatal(err)
	}
	_, err = store.NewFileStore(testnet.Context(t), path, 1)
	testnet.WantError(t, err, path, "is a link of user 1234")
	if got, err := os.ReadFile(precious); len(got) > 0 || err != nil {
		t.Errorf("the other file has %q, %v", got, err)
	}
}

// If another process holds the lock of the file, a call returns when its context ends.
func TestFileStoreLocked(t *testing.T) {
	s, lock := lockedStore(t)
	defer s.Close()
	lock(unix.LOCK_EX)
	err := briefly(t, func(ctx context.Context) error { return s.Set(ctx, "k", nil) })
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want that the time is over", err)
	}
	testnet.WantError(t, err, "waiting for the lock of the file, which another process holds", s.Path())
	lock(unix.LOCK_UN)
	if err := s.Set(testnet.Context(t), "k", nil); err != nil {
		t.Error(err)
	}
}

// If two calls wait for the lock of the file, each returns when its own context ends. Close makes waiting
// calls return.
func TestFileStoreWaitsForLock(t *testing.T) {
	s, lock := lockedStore(t)
	lock(unix.LOCK_EX)
	long := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	go func() {
		_, err := s.Get(ctx, "k")
		long <- err
	}()
	for range 3 { // from the second iteration on, the other call waits too
		err := briefly(t, func(ctx context.Context) error {
			_, err := s.Check(ctx, "k")
			return err
		})
		if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			t.Fatalf("got %v, the other call's context %v; want that this one's time is over", err, ctx.Err())
		}
	}
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	if err := <-long; !errors.Is(err, store.ErrClosed) {
		t.Errorf("got %v, want %v", err, store.ErrClosed)
	}
	lock(unix.LOCK_UN)
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// If another process holds a shared lock, a call that writes waits for it. Calls that read wait neither for
// the lock nor for the waiting call.
func TestFileStoreReadsBesideWaitingWrite(t *testing.T) {
	s, lock := lockedStore(t)
	defer s.Close()
	lock(unix.LOCK_SH)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	written := make(chan error, 1)
	go func() { written <- s.Set(ctx, "k", nil) }()
	for range 30 {
		if ok, err := s.Check(ctx, "k"); ok || err != nil {
			t.Fatalf("got %v, %v", ok, err)
		}
		time.Sleep(time.Millisecond)
	}
	lock(unix.LOCK_UN)
	if err := <-written; err != nil {
		t.Error(err)
	}
}

// The last Close removes the file while other calls are running. These calls do not create the file again.
func TestFileStoreStaysRemoved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store")
	for range 200 {
		s, err := store.NewFileStore(t.Context(), path, 1)
		if err != nil {
			t.Fatal(err)
		}
		var calls sync.WaitGroup
		for range 4 {
			calls.Go(func() {
				for s.Set(t.Context(), "k", nil) == nil {
				}
			})
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		calls.Wait()
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("the file: got %v, want that it is gone", err)
		}
	}
}

// lockedStore returns a store, and a function that locks the store's file as another process would.
func lockedStore(t *testing.T) (s *store.FileStore, lock func(how int)) {
	path := filepath.Join(t.TempDir(), "store")
	s, err := store.NewFileStore(t.Context(), path, 0)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return s, func(how int) {
		t.Helper()
		if err := unix.Flock(int(f.Fd()), how); err != nil {
			t.Fatal(err)
		}
	}
}

// briefly runs call with a context that ends after 30 ms.
func briefly(t *testing.T, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	return call(ctx)
}
