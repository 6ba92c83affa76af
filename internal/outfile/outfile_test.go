package outfile_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/outfile"
	"github.com/gohvd/gohvd/internal/testnet"
)

// other is a user that is neither this one nor root.
const other = 1234

// give gives a file to another user, as if that user had made it.
func give(t *testing.T, path string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can give a file to another user")
	}
	if err := os.Lchown(path, other, other); err != nil {
		t.Fatal(err)
	}
}

func TestCreate(t *testing.T) {
	second := func(path string) string { return filepath.Join(filepath.Dir(path), "second") }
	for name, c := range map[string]struct {
		prepare func(t *testing.T, path, precious string) error
		says    string // the error, or "" if the file is opened
		at      string // the name of the file that is written
	}{
		"nothing": {func(*testing.T, string, string) error { return nil }, "", "out"},
		"a file": {func(_ *testing.T, path, _ string) error {
			return os.WriteFile(path, []byte("old text"), 0o600)
		}, "", "out"},
		"our link": {func(_ *testing.T, path, precious string) error {
			return os.Symlink(precious, path)
		}, "", "precious"},
		"our two links": {func(_ *testing.T, path, _ string) error {
			return errors.Join(os.Symlink("second", path), os.Symlink("third", second(path)))
		}, "", "third"},
		"a link of another user": {func(t *testing.T, path, precious string) error {
			err := os.Symlink(precious, path)
			give(t, path)
			return err
		}, "is a link of user 1234", ""},
		"our link to a link of another user": {func(t *testing.T, path, precious string) error {
			err := errors.Join(os.Symlink("second", path), os.Symlink(precious, second(path)))
			give(t, second(path))
			return err
		}, "is a link of user 1234", ""},
		"our relative link in a linked folder": {func(_ *testing.T, path, precious string) error {
			dir := filepath.Dir(path)
			deep := filepath.Join(dir, "a", "b")
			return errors.Join(os.MkdirAll(deep, 0o700), os.Symlink(deep, filepath.Join(dir, "linked")),
				os.Symlink("../found", filepath.Join(deep, "out")), os.Symlink("linked/out", path))
		}, "", "a/found"},
		"a loop": {func(_ *testing.T, path, _ string) error {
			return os.Symlink("out", path)
		}, "too many levels", ""},
		"a FIFO without reader": {func(_ *testing.T, path, _ string) error {
			return unix.Mkfifo(path, 0o600)
		}, "no such device", ""},
		"a FIFO with a reader": {func(t *testing.T, path, _ string) error {
			if err := unix.Mkfifo(path, 0o600); err != nil {
				return err
			}
			reader, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
			t.Cleanup(func() { _ = reader.Close() })
			return err
		}, "want a regular file", ""},
		"a folder": {func(_ *testing.T, path, _ string) error {
			return os.Mkdir(path, 0o700)
		}, "is a directory", ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path, precious := filepath.Join(dir, "out"), filepath.Join(dir, "precious")
			testnet.WriteFile(t, precious, "precious")
			if err := c.prepare(t, path, precious); err != nil {
				t.Fatal(err)
			}
			f, err := outfile.Create(path, 0o600)
			if c.says != "" {
				testnet.WantError(t, err, c.says)
			} else {
				if err != nil {
					t.Fatal(err)
				}
				_, err := f.WriteString("new")
				if err := errors.Join(err, f.Close()); err != nil {
					t.Fatal(err)
				}
				if f, err = outfile.Append(path); err != nil {
					t.Fatal(err)
				}
				_, err = f.WriteString("er")
				if err := errors.Join(err, f.Close()); err != nil {
					t.Fatal(err)
				}
				if got, err := os.ReadFile(filepath.Join(dir, c.at)); string(got) != "newer" || err != nil {
					t.Errorf("%s has %q, %v, want \"newer\"", c.at, got, err)
				}
			}
			got, err := os.ReadFile(precious)
			if c.at != "precious" && string(got) != "precious" || err != nil {
				t.Errorf("the other file has %q, %v", got, err)
			}
		})
	}
}

func TestDevices(t *testing.T) {
	for path, want := range map[string]bool{
		"/dev/stdout": true, "/dev/fd/1": true, "/proc/self/fd/1": true, "/dev/shm/x": false,
		"/dev/shm/../x": true, "dev/x": false, "/tmp/dev/x": false,
	} {
		if got := outfile.Device(path); got != want {
			t.Errorf("%s: got %v, want %v", path, got, want)
		}
	}
	f, err := outfile.Create("/dev/null", 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}
