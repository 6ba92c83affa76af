package place

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

const (
	// maxPrivateBytes bounds what is read of a private file.
	maxPrivateBytes = 4 << 10
	// privatePeriod is how often a file that is not there yet is looked for.
	privatePeriod = 10 * time.Millisecond
)

// writePrivate writes a file that only this user can read and that is complete as soon as it exists. Its
// directory must exist.
func writePrivate(path, text string) error {
	// CreateTemp makes a new file, of mode 0600.
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

// readPrivate reads such a file. It must belong to this user, and nobody else may read or write it: another
// user who could have written it knows its contents.
func readPrivate(path string) (text string, err error) {
	// O_NONBLOCK keeps open from waiting for the other end of a named pipe.
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

// waitPrivate waits until the file exists, or ctx ends, and then reads it as readPrivate does.
func waitPrivate(ctx context.Context, path string) (text string, err error) {
	for {
		text, err = readPrivate(path)
		if !errors.Is(err, fs.ErrNotExist) {
			return text, err
		}
		if ctx.Err() != nil {
			return "", fmt.Errorf("waiting for rank 0 to write %s: %w", path, ctx.Err())
		}
		dial.Pause(ctx, privatePeriod, nil)
	}
}

// remove removes a file, which the launcher may have removed before.
func remove(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// fileName converts s to a part of a file name.
func fileName(s string) string {
	return strings.Map(func(r rune) rune {
		if notInNames(r) {
			return '_'
		}
		return r
	}, s[:min(len(s), maxNameBytes/2)])
}
