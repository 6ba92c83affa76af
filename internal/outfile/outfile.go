// Package outfile opens files for output at paths that the user has given. In a folder such as /tmp, another
// user may have put something else there: a link to a file of this user, which the output would overwrite, or
// a FIFO, which receives the output or blocks the process. Such a path is an error.
package outfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxLinks is the maximum number of links that Resolve follows, as in the kernel.
const maxLinks = 40

// Device reports whether path is under /dev or /proc, where no files can be created. /dev/shm does not count,
// because it is an ordinary folder.
func Device(path string) bool {
	path = filepath.Clean(path)
	return strings.HasPrefix(path, "/dev/") && !strings.HasPrefix(path, "/dev/shm/") ||
		strings.HasPrefix(path, "/proc/")
}

// Split splits a path before its extension. The extension of a compressed file has two parts, such as
// .json.gz.
func Split(path string) (stem, ext string) {
	base := filepath.Base(path)
	ext = filepath.Ext(base)
	if ext == ".gz" {
		ext = filepath.Ext(strings.TrimSuffix(base, ext)) + ext
	}
	if ext == base {
		ext = "" // here the dot is the first character of a hidden file's name
	}
	return strings.TrimSuffix(path, ext), ext
}

// Resolve follows the links of this user and of root at path, and returns the path of the file, which need
// not exist. The caller must open that path with O_NOFOLLOW, unless it is a Device. A link of another user is
// an error.
func Resolve(path string) (string, error) {
	for range maxLinks {
		var st unix.Stat_t
		if Device(path) || unix.Lstat(path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFLNK {
			return path, nil
		}
		if !trusted(st.Uid) {
			return "", fmt.Errorf("%s is a link of user %d, want a file or a link of this user", path,
				st.Uid)
		}
		to, err := os.Readlink(path)
		if err != nil {
			return "", err
		}
		if !filepath.IsAbs(to) {
			// Join would remove "name/.." even if name is a link, which the kernel follows first.
			to = path[:strings.LastIndexByte(path, '/')+1] + to
		}
		path = to
	}
	return "", &fs.PathError{Op: "open", Path: path, Err: unix.ELOOP}
}

// trusted reports whether the user uid may choose where the output of this process goes.
func trusted(uid uint32) bool { return uid == 0 || uid == uint32(os.Geteuid()) }

// Folder makes the folder path, and those above it, if they do not exist. It returns the path with which to
// open it. A link of another user is an error.
func Folder(path string, perm fs.FileMode) (string, error) {
	path, err := Resolve(path)
	if err != nil {
		return "", err
	}
	return path, os.MkdirAll(path, perm)
}

// Create opens the file path for writing. If it does not exist, Create makes it with the mode perm and the
// umask, else Create empties it.
func Create(path string, perm fs.FileMode) (*os.File, error) {
	return open(path, os.O_CREATE|os.O_TRUNC, perm)
}

// Append opens the existing file path for writing at its end.
func Append(path string) (*os.File, error) { return open(path, os.O_APPEND, 0) }

func open(path string, flags int, perm fs.FileMode) (*os.File, error) {
	path, err := Resolve(path)
	if err != nil {
		return nil, err
	}
	if Device(path) {
		return os.OpenFile(path, flags|os.O_WRONLY, perm)
	}
	// With O_NONBLOCK, the call does not wait for a reader of a FIFO.
	f, err := os.OpenFile(path, flags|os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, perm)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s has the mode %v, want a regular file", path, info.Mode())
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// CheckStream returns an error if f, a FIFO or a device that was opened for output, belongs to another user.
func CheckStream(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && !trusted(st.Uid) {
		return fmt.Errorf("%s has the mode %v and belongs to user %d, want one of this user", f.Name(),
			info.Mode(), st.Uid)
	}
	return nil
}
