package store_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// What a writer that died has left of a record is not read, and gone with the next write.
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
		if all, err := os.ReadFile(path); err != nil || !strings.HasSuffix(string(all), "/n"+string(rune(len(fmt.Sprint(cut))))+"\x00\x00\x00"+fmt.Sprint(cut)) {
			t.Errorf("cut at %d: the file ends in %q, %v", cut, all, err)
		}
		other, err := store.NewFileStore(ctx, path, 0) // which reads all
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

// A file that is no store, which somebody named by mistake, stays as it is.
func TestFileStoreLeavesOthers(t *testing.T) {
	for _, content := range []string{"precious\n", "\x03\x00\x00\x00abc\x01\x00\x00\x00x", "\x02\x00\x00\x00/a\x00\x00\x00\x00\x01\x00\x00\x00b\x00\x00\x00\x00"} {
		path := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := store.NewFileStore(testnet.Context(t), path, 1)
		testnet.WantError(t, err, path, "is no record of a store")
		if got, err := os.ReadFile(path); err != nil || string(got) != content {
			t.Errorf("%q became %q, %v", content, got, err)
		}
	}
}

// Who holds the lock holds nobody up for longer than they want.
func TestFileStoreLocked(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store")
	s, err := store.NewFileStore(t.Context(), path, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	err = s.Set(ctx, "k", nil)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want that the time is over", err)
	}
	testnet.WantError(t, err, "another process holds its lock", path)
	if err := unix.Flock(int(f.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	if err := s.Set(testnet.Context(t), "k", nil); err != nil {
		t.Error(err)
	}
}
