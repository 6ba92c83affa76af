// Package rundir makes the folders for files that a process needs only while it runs, such as sockets. Only
// this user can open them.
//
// The folders are in the user's runtime folder, which all processes of a user with the same environment
// share. This is the first of these folders that can be used:
//
//  1. gohvd in XDG_RUNTIME_DIR;
//  2. gohvd-UID in os.TempDir().
//
// A folder can be used if it belongs to this user and has the mode 0700. Folders finds the folders of other
// processes of this user. In a folder such as /tmp any user can take the name of the second one. If neither
// can be used, New makes a folder with a random name in os.TempDir(). Other processes cannot compute its
// path. A process that tells them the path must do so over an authenticated connection, or they must check
// that the files in the folder are what they look for.
//
// Invariants of a Dir:
//
//  1. A process holds a lock on its folder, which the kernel releases when the process ends. So a folder in
//     the runtime folder that nobody has locked has been abandoned, and the next call of New on this host
//     removes it. On a local file system it also removes folders that a host with the same /etc/machine-id
//     has made before this host was booted.
//  2. No other process removes a folder that is locked, unless this host exports the file system to a host
//     that has the same /etc/machine-id.
package rundir

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	permDir = 0o700
	// sweptAtOnce is the number of names in the runtime folder that sweep checks at once. New checks only as
	// many.
	sweptAtOnce = 1000
	// maxTries is how often New makes a folder again because another process took the last one for abandoned.
	maxTries = 1000
	// idBytes is the number of bytes after the boot in the name of a folder. The first machineBytes of them
	// say which host has made it, if /etc/machine-id does. The others are random.
	idBytes, machineBytes = 8, 4
)

// Dir is a folder of one process. Its methods are safe for concurrent use.
type Dir struct {
	path string
	fd   int // the locked folder, or -1 if the folder is not in the runtime folder

	closing sync.Once
	err     error
}

// runtimeFolder returns the path of the user's runtime folder, and makes the folder if it does not exist. The
// parameter xdg is the value of XDG_RUNTIME_DIR, or "". If no runtime folder can be used, the error says why.
func runtimeFolder(xdg string) (string, error) {
	paths, err := runtimeFolders(xdg)
	if err != nil {
		return "", err
	}
	var unusable []error
	for _, path := range paths {
		err := private(path)
		if err == nil {
			return path, nil
		}
		unusable = append(unusable, err)
	}
	return "", fmt.Errorf("no runtime folder can be used: %w; set TMPDIR or XDG_RUNTIME_DIR to a folder in which "+
		"only this user can create files", errors.Join(unusable...))
}

// runtimeFolders returns the paths that the user's runtime folder can have, the preferred one first.
func runtimeFolders(xdg string) (paths []string, err error) {
	if filepath.IsAbs(xdg) {
		paths = append(paths, filepath.Join(xdg, "gohvd"))
	}
	temp, err := temporary()
	return append(paths, filepath.Join(temp, "gohvd-"+strconv.Itoa(os.Geteuid()))), err
}

// Folders returns the folders that processes of this user have made with New and not closed, on this host. It
// looks in each place where the runtime folder can be, because processes may have different environments. It
// removes the folders of processes that have been killed. The parameter xdg is the value of XDG_RUNTIME_DIR,
// or "".
func Folders(xdg string) (folders []string, err error) {
	paths, err := runtimeFolders(xdg)
	if err != nil {
		return nil, err
	}
	prefix, err := prefix()
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		if private(path) != nil {
			continue // other users can create files there
		}
		locked, err := sweep(path, prefix, true)
		if err != nil {
			return nil, err
		}
		folders = append(folders, locked...)
	}
	return folders, nil
}

// temporary returns the absolute path of the folder for temporary files. It makes the folder if it does not
// exist, because a container image that is made from scratch has none.
func temporary() (string, error) {
	path, err := filepath.Abs(os.TempDir())
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(path, permDir); err != nil {
		return "", fmt.Errorf("%w (set TMPDIR to choose another folder)", err)
	}
	return path, nil
}

// private makes the folder path if it does not exist. If other users can create files in the folder, or can
// replace it, private returns an error.
func private(path string) error {
	if err := os.Mkdir(path, permDir); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Uid != uint32(os.Geteuid()) || st.Mode&0o077 != 0 {
		return fmt.Errorf("%s has mode %#o and owner %d, want a folder with mode 0700 and owner %d", path,
			st.Mode, st.Uid, os.Geteuid())
	}
	return nil
}

// prefix returns the beginning of the names of the folders that processes make in this boot of this host.
// Processes of other hosts may use the same file system, and some file systems have locks that only the host
// itself sees. So New removes only folders with this prefix, and those for which isOfMachine returns true.
func prefix() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	id, _, _ := strings.Cut(string(boot), "-")
	return "p" + id + "-", nil
}

// machine returns the beginning of what follows the boot in the names of the folders that processes make on
// this host, or "" if no file identifies the host.
func machine() string {
	id, err := os.ReadFile("/etc/machine-id")
	if err != nil || len(bytes.TrimSpace(id)) != 32 {
		return ""
	}
	sum := sha256.Sum256(append([]byte("gohvd "), id...))
	return hex.EncodeToString(sum[:machineBytes])
}

// New makes a folder for this process. Before that, it removes the folders of processes of this user that
// have been killed. The parameter xdg is the value of XDG_RUNTIME_DIR, or "". The caller must call Close.
func New(xdg string) (*Dir, error) {
	shared, unusable := runtimeFolder(xdg)
	if unusable != nil {
		temp, err := temporary()
		if err != nil {
			return nil, err
		}
		path, err := os.MkdirTemp(temp, "gohvd-")
		if err != nil {
			return nil, errors.Join(err, unusable)
		}
		return &Dir{path: path, fd: -1}, nil
	}
	prefix, err := prefix()
	if err != nil {
		return nil, err
	}
	if _, err := sweep(shared, prefix, false); err != nil {
		return nil, err
	}
	for range maxTries {
		d, err := create(shared, prefix)
		if d != nil || err != nil {
			return d, err
		}
	}
	return nil, fmt.Errorf("other processes have removed %d new folders in %s", maxTries, shared)
}

// create makes a folder with the prefix and a random name in the folder shared, and locks it. If another
// process has taken the folder for abandoned before it was locked, or has the same name, create returns nil.
func create(shared, prefix string) (*Dir, error) {
	var random [idBytes]byte
	if _, err := rand.Read(random[:]); err != nil {
		return nil, err
	}
	of := machine()
	path := filepath.Join(shared, prefix+of+hex.EncodeToString(random[len(of)/2:]))
	if err := os.Mkdir(path, permDir); errors.Is(err, fs.ErrExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	fd, err := open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, errors.Join(err, os.Remove(path))
	}
	// If the file system has no locks, the folder stays unlocked. Then no process can lock and remove it.
	if lock(fd) == unix.EWOULDBLOCK {
		return nil, unix.Close(fd)
	}
	if _, err := os.Lstat(path); err != nil {
		return nil, unix.Close(fd) // removed before it was locked
	}
	return &Dir{path: path, fd: fd}, nil
}

// sweep removes the folders with the prefix whose processes have ended from the folder shared, and those of
// earlier boots. It returns the folders with the prefix that it cannot lock, because their processes have not
// ended. It checks the first sweptAtOnce names there, or all of them. A folder that cannot be removed stays,
// because it does not disturb this process.
func sweep(shared, prefix string, all bool) (locked []string, err error) {
	d, err := os.Open(shared)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	of, booted := machine(), bootTime(d)
	for {
		entries, err := d.ReadDir(sweptAtOnce)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		locked = append(locked, sweepEntries(shared, prefix, of, booted, entries)...)
		if err != nil || !all {
			return locked, nil
		}
	}
}

// sweepEntries does the work of sweep for some of the names. of and booted are the results of machine and
// bootTime.
func sweepEntries(shared, prefix, of string, booted time.Time, entries []fs.DirEntry) (locked []string) {
	for _, entry := range entries {
		path := filepath.Join(shared, entry.Name())
		if !entry.IsDir() {
			continue
		}
		if !strings.HasPrefix(entry.Name(), prefix) {
			info, err := entry.Info()
			if err == nil && isOfMachine(entry.Name(), of) && info.ModTime().Before(booted) {
				_ = os.RemoveAll(path)
			}
			continue
		}
		fd, err := open(path)
		if err != nil {
			continue
		}
		if lock(fd) == nil {
			_ = os.RemoveAll(path)
		} else {
			locked = append(locked, path)
		}
		_ = unix.Close(fd) // the error is ignored, because nothing was written
	}
	return locked
}

// isOfMachine reports whether name is one that create makes on the host for which machine returns of, in any
// boot. Hosts may have the same /etc/machine-id, if it is part of an image, so this does not suffice to
// remove a folder.
func isOfMachine(name, of string) bool {
	const digits = "0123456789abcdef"
	boot, id, ok := strings.Cut(name, "-")
	return ok && of != "" && len(boot) == 1+8 && boot[0] == 'p' && len(id) == 2*idBytes &&
		strings.HasPrefix(id, of) && strings.Trim(boot[1:]+id, digits) == ""
}

// bootTime returns when this host was booted if the file system of the folder d is one that other hosts do
// not use themselves, or the zero Time if they may. This host may still export it to them. A container may
// use it too, and have another boot id, but what it makes is newer.
func bootTime(d *os.File) time.Time {
	var f unix.Statfs_t
	var up unix.Sysinfo_t
	if unix.Fstatfs(int(d.Fd()), &f) != nil || unix.Sysinfo(&up) != nil {
		return time.Time{}
	}
	switch uint32(f.Type) {
	case unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.F2FS_SUPER_MAGIC,
		unix.TMPFS_MAGIC, unix.OVERLAYFS_SUPER_MAGIC:
		return time.Now().Add(-time.Duration(up.Uptime) * time.Second)
	}
	return time.Time{}
}

func open(path string) (fd int, err error) {
	fd, err = unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		err = &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, err
}

// lock locks an open folder. If another process holds the lock, it returns EWOULDBLOCK.
func lock(fd int) (err error) {
	for {
		if err = unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != unix.EINTR {
			return err
		}
	}
}

// Path returns the absolute path of the folder.
func (d *Dir) Path() string { return d.path }

// Close removes the folder with everything in it. Later calls do nothing.
func (d *Dir) Close() error {
	d.closing.Do(func() {
		d.err = os.RemoveAll(d.path)
		if d.fd >= 0 {
			d.err = errors.Join(d.err, unix.Close(d.fd))
		}
	})
	return d.err
}
