package rundir_test

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/rundir"
)

// childVariable makes the test program a process that has made a folder and does not remove it.
const childVariable = "RUNDIR_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) == "" {
		os.Exit(m.Run())
	}
	d, err := rundir.New("")
	if err == nil {
		err = os.WriteFile(filepath.Join(d.Path(), "secret"), nil, 0o600)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(d.Path())
	_, _ = os.Stdin.Read(make([]byte, 1))
	os.Exit(0) // without Close, as if it had been killed
}

// start starts a process that has made a folder. It returns the path of the folder, and a function that ends
// the process without removing the folder.
func start(t *testing.T) (path string, kill func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env, cmd.Stderr = append(os.Environ(), childVariable+"=1"), os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill = sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // fails, because the process was killed
		_ = in.Close()
	})
	t.Cleanup(kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(line), kill
}

func newDir(t *testing.T, xdg string) *rundir.Dir {
	t.Helper()
	d, err := rundir.New(xdg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() }) // tests that need the error call Close themselves
	return d
}

func wantPrivate(t *testing.T, path string) {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil || info.Mode() != fs.ModeDir|0o700 ||
		info.Sys().(*syscall.Stat_t).Uid != uint32(os.Geteuid()) {
		t.Errorf("%s: got %v, %v, want a folder of this user with mode 0700", path, info, err)
	}
}

// TestPlaces checks in which folder New makes the folder: whatever another user has put in the place of the
// runtime folder, New makes a private folder elsewhere.
func TestPlaces(t *testing.T) {
	own := "gohvd-" + strconv.Itoa(os.Geteuid())
	for _, c := range []struct {
		name    string
		prepare func(t *testing.T, xdg, temp string) error
		want    string // xdg, temp or single
	}{
		{"nothing there", func(*testing.T, string, string) error { return nil }, "xdg"},
		{"XDG_RUNTIME_DIR does not exist", func(_ *testing.T, xdg, _ string) error {
			return os.Remove(xdg)
		}, "temp"},
		{"TMPDIR does not exist", func(_ *testing.T, xdg, temp string) error {
			return errors.Join(os.Remove(xdg), os.Remove(temp))
		}, "temp"},
		{"XDG_RUNTIME_DIR has a file", func(_ *testing.T, xdg, _ string) error {
			return os.WriteFile(filepath.Join(xdg, "gohvd"), nil, 0o600)
		}, "temp"},
		{"open to others", func(_ *testing.T, xdg, temp string) error {
			return errors.Join(os.Remove(xdg), os.Mkdir(filepath.Join(temp, own), 0o711))
		}, "single"},
		{"a file", func(_ *testing.T, xdg, temp string) error {
			return errors.Join(os.Remove(xdg), os.WriteFile(filepath.Join(temp, own), nil, 0o700))
		}, "single"},
		{"a FIFO", func(_ *testing.T, xdg, temp string) error {
			return errors.Join(os.Remove(xdg), unix.Mkfifo(filepath.Join(temp, own), 0o700))
		}, "single"},
		{"a link to a private folder", func(t *testing.T, xdg, temp string) error {
			private := t.TempDir()
			return errors.Join(os.Remove(xdg), os.Chmod(private, 0o700),
				os.Symlink(private, filepath.Join(temp, own)))
		}, "single"},
		{"of another user", func(t *testing.T, xdg, temp string) error {
			if os.Geteuid() != 0 {
				t.Skip("only root can make a folder of another user")
			}
			return errors.Join(os.Remove(xdg), os.Mkdir(filepath.Join(temp, own), 0o700),
				os.Chown(filepath.Join(temp, own), 1234, 1234))
		}, "single"},
	} {
		t.Run(c.name, func(t *testing.T) {
			xdg, temp := filepath.Join(t.TempDir(), "xdg"), filepath.Join(t.TempDir(), "tmp")
			err := errors.Join(os.Mkdir(xdg, 0o700), os.Mkdir(temp, 0o777), c.prepare(t, xdg, temp))
			if err != nil {
				t.Fatal(err)
			}
			t.Setenv("TMPDIR", temp)
			d := newDir(t, xdg)
			wantPrivate(t, d.Path())
			within := map[string]string{"xdg": filepath.Join(xdg, "gohvd"), "temp": filepath.Join(temp, own),
				"single": temp}[c.want]
			if got := filepath.Dir(d.Path()); got != within {
				t.Errorf("the folder is in %s, want %s", got, within)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
			if _, err := os.Lstat(d.Path()); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("after Close: got %v, want no folder", err)
			}
		})
	}
}

// TestSweep checks that New removes the folder of a process that was killed, and that of an earlier boot, and
// nothing else, such as the folder of a process on another host.
func TestSweep(t *testing.T) {
	temp, err := os.MkdirTemp("/dev/shm", "rundir") // other hosts do not use it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(temp) })
	t.Setenv("TMPDIR", temp)
	living, _ := start(t)
	dead, kill := start(t)
	shared := filepath.Dir(dead)
	_, id, _ := strings.Cut(filepath.Base(dead), "-")
	other, elsewhere := filepath.Join(shared, "other"), filepath.Join(shared, "p00000001-0123456789abcdef")
	earlier, later := filepath.Join(shared, "p00000001-"+id), filepath.Join(shared, "p00000002-"+id)
	for _, path := range []string{other, elsewhere, earlier, later} {
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{other, elsewhere, earlier} {
		if err := os.Chtimes(path, time.Time{}, time.Unix(1, 0)); err != nil {
			t.Fatal(err)
		}
	}
	newDir(t, "")
	if _, err := os.Lstat(filepath.Join(dead, "secret")); err != nil {
		t.Errorf("before the end of the process: %v", err)
	}
	kill()
	newDir(t, "")
	gone, kept := []string{dead}, []string{filepath.Join(living, "secret"), other, elsewhere, later}
	if text, err := os.ReadFile("/etc/machine-id"); err == nil && len(text) > 1 {
		gone = append(gone, earlier)
	} else {
		kept = append(kept, earlier) // nobody knows whether it is of this host
	}
	for _, path := range gone {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s after the end of its process: got %v, want no folder", path, err)
		}
	}
	for _, path := range kept {
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
	}
}

// TestRace makes folders and removes abandoned ones at the same time. No folder may be removed while it is in
// use.
func TestRace(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	shared := filepath.Dir(newDir(t, "").Path())
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 50 {
				d, err := rundir.New("")
				if err != nil {
					t.Error(err)
					return
				}
				err = os.WriteFile(filepath.Join(d.Path(), "file"), nil, 0o600)
				if err := errors.Join(err, d.Close()); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if left, err := os.ReadDir(shared); err != nil || len(left) != 1 {
		t.Errorf("got %v, %v in the runtime folder, want only the folder that is in use", left, err)
	}
}

// Folders returns the folders of processes that live, from each place where they can be, and removes those of
// processes that were killed.
func TestFolders(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	xdg := t.TempDir()
	other, kill := start(t) // it has no XDG_RUNTIME_DIR
	for i := range 2000 {   // more names than are read at once
		if err := os.Mkdir(filepath.Join(filepath.Dir(other), strconv.Itoa(i)), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	own, err := rundir.New(xdg)
	if err != nil {
		t.Fatal(err)
	}
	got, err := rundir.Folders(xdg)
	if want := []string{own.Path(), other}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	kill()
	if err := own.Close(); err != nil {
		t.Error(err)
	}
	if got, err := rundir.Folders(xdg); err != nil || len(got) > 0 {
		t.Errorf("got %q, %v, want none", got, err)
	}
	if _, err := os.Lstat(other); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s of a process that was killed: got %v, want that it does not exist", other, err)
	}
	if err := os.Chmod(filepath.Dir(own.Path()), 0o755); err != nil {
		t.Fatal(err)
	}
	if own, err = rundir.New(""); err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	if got, err := rundir.Folders(xdg); err != nil || !slices.Equal(got, []string{own.Path()}) {
		t.Errorf("got %q, %v, want only %s, because other users can create files in the first folder", got, err,
			own.Path())
	}
}
