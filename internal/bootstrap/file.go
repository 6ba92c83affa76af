package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/dial"
)

// meetByFile meets through a file. All ranks must be on one host, and the launcher must provide a directory
// for the job.
func (e *Env) meetByFile(ctx context.Context, o MeetOptions, m *Place) error {
	if !filepath.IsAbs(e.dir) {
		return fmt.Errorf("%s is %q, want the absolute path of the job's directory", e.dirName, e.dir)
	}
	// Jobs that this job spawns use the same directory. So the name of the file contains the name of the job.
	path := filepath.Join(e.dir, "gohvd-"+fileName(e.JobID))
	m.Reused = true
	if e.Rank != 0 {
		return e.dialInFile(ctx, o, m, path)
	}
	text, err := e.announce(ctx, o, m)
	if err != nil {
		return err
	}
	if err := writePrivate(path, text); err != nil {
		return err
	}
	m.removeWhenMet(func() error { return remove(path) })
	return nil
}

// dialInFile connects to the store whose address is in the file. An earlier program that has ended before its
// ranks met may have left the file. So dialInFile begins again when rank 0 has replaced the file.
func (e *Env) dialInFile(ctx context.Context, o MeetOptions, m *Place, path string) error {
	for text := ""; ; {
		var err error
		if text, err = waitPrivate(ctx, path, text); err != nil {
			return err
		}
		dialing, stop := context.WithCancel(ctx)
		replaced := make(chan bool, 1)
		go func() {
			_, err := waitPrivate(dialing, path, text)
			replaced <- err == nil || dialing.Err() == nil
			stop()
		}()
		err = e.dialAnnounced(dialing, o, m, text)
		stop()
		if !<-replaced || err == nil {
			return err
		}
	}
}

const (
	// maxPrivateBytes is the maximum size of a file that readPrivate reads.
	maxPrivateBytes = 4 << 10
	// privatePeriod is the interval at which waitPrivate reads the file.
	privatePeriod = 10 * time.Millisecond
)

// writePrivate writes a file that only this user can read. Its directory must exist. The file appears with
// its complete contents, so that no process reads only a part of them.
func writePrivate(path, text string) error {
	// CreateTemp creates the file with mode 0600.
	f, err := os.CreateTemp(filepath.Dir(path), ".gohvd-*")
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, remove(f.Name()))
	}
	return nil
}

// readPrivate reads a file that writePrivate has written. The file must belong to this user, and other users
// must not have permission to read or write it. Otherwise another user could know the secret in the file.
func readPrivate(path string) (text string, err error) {
	// O_NONBLOCK makes open return at once if the path is a named pipe without a writer.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return "", fmt.Errorf("stat %s: %w", path, err)
	}
	mode := st.Mode & unix.S_IFMT
	if mode != unix.S_IFREG || st.Mode&0o077 != 0 || int(st.Uid) != os.Geteuid() {
		return "", fmt.Errorf(
			"%s has mode %#o and belongs to user %d, want a file of mode 0600 that belongs to user %d", path,
			st.Mode, st.Uid,
			os.Geteuid())
	}
	b, err := io.ReadAll(io.LimitReader(f, maxPrivateBytes+1))
	if err != nil {
		return "", err
	}
	if len(b) > maxPrivateBytes {
		return "", fmt.Errorf("%s has more than %d bytes", path, maxPrivateBytes)
	}
	return string(b), nil
}

// waitPrivate waits until the file exists and does not contain prev, or until ctx ends. It reads the file as
// readPrivate does.
func waitPrivate(ctx context.Context, path, prev string) (text string, err error) {
	for {
		text, err = readPrivate(path)
		if !errors.Is(err, fs.ErrNotExist) && (err != nil || text != prev) {
			return text, err
		}
		if ctx.Err() != nil {
			return "", fmt.Errorf("waiting for rank 0 to write %s: %w", path, ctx.Err())
		}
		dial.Pause(ctx, privatePeriod, nil)
	}
}

// remove removes a file. If the launcher has already removed the file, this is not an error.
func remove(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// fileName replaces characters in s, so that the result can be part of a file name.
func fileName(s string) string {
	return strings.Map(func(r rune) rune {
		if notInNames(r) {
			return '_'
		}
		return r
	}, s[:min(len(s), maxNameBytes/2)])
}
