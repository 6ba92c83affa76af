package store_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// If PyTorch's FileStore and ours use the same file, each reads the values that the other has written.
func TestTorchFileStore(t *testing.T) {
	testnet.NeedTorch(t)
	ctx := testnet.Context(t)
	path := filepath.Join(t.TempDir(), "store")
	s, err := store.NewFileStore(ctx, path, 2)
	if err != nil {
		t.Fatal(err)
	}
	wait := testnet.StartTorch(t, `
import sys, datetime
import torch.distributed as dist
s = dist.FileStore(sys.argv[1], 2)
s.set_timeout(datetime.timedelta(seconds=60))
s.set("from python", "hello")
s.set("-dash", "python")
assert s.get("from go") == b"here"
assert s.get("-go") == b"dash"
for _ in range(200):
    s.add("count", 1)
assert s.compare_set("c", "", "python") in (b"python", b"go")
s.wait(["go is done"], datetime.timedelta(seconds=60))
assert s.get("count") == b"400", s.get("count")
assert s.delete_key("gone")
s.set("python is done", "")
s.wait(["bye"], datetime.timedelta(seconds=60))
try:
    s.wait(["gone"], datetime.timedelta(seconds=1))
    raise AssertionError("a deleted key is there")
except RuntimeError:
    pass
`, path)
	for key, want := range map[string]string{"from python": "hello", "-dash": "python"} {
		if v, err := s.Get(ctx, key); err != nil || string(v) != want {
			t.Errorf("%s: got %q, %v", key, v, err)
		}
	}
	for key, value := range map[string]string{"from go": "here", "-go": "dash", "gone": "x"} {
		if err := s.Set(ctx, key, []byte(value)); err != nil {
			t.Fatal(err)
		}
	}
	for range 200 {
		if _, err := s.Add(ctx, "count", 1); err != nil {
			t.Fatal(err)
		}
	}
	if v, _, err := s.CompareAndSet(ctx, "c", nil, []byte("go")); err != nil || string(v) != "go" &&
		string(v) != "python" {
		t.Errorf("got %q, %v", v, err)
	}
	if err := s.Set(ctx, "go is done", nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Wait(ctx, "python is done"); err != nil {
		t.Fatal(err)
	}
	if ok, err := s.Check(ctx, "gone"); ok || err != nil {
		t.Errorf("what python deleted is there: %v, %v", ok, err)
	}
	if err := s.Set(ctx, "bye", nil); err != nil {
		t.Fatal(err)
	}
	wait()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file stays after both stores: %v", err)
	}
}
