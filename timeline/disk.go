package timeline

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// disk is a sink of regular files. The file that has the name is never written to: a twin gets what is new, and then takes the
// name, while what had it becomes the twin.
type disk struct {
	path    string
	max     int64
	limit   int64 // of a segment
	change  change
	late    bool   // nothing takes the name before the first commit
	visible *file  // nil if there is none
	hidden  *file  // nil if there is none; visible, but for what is newer in either
	tail    []byte // of visible, if it is written to in place
	closed  []piece
}

// change is how the twins change places, the best first.
type change uint8

const (
	// exchange is a single call (RENAME_EXCHANGE of renameat2(2)). Besides, where a rename replaces a file, ext4 begins to write what
	// is in the new one to the disk at once (auto_da_alloc), and that is work of the thread that renames.
	exchange change = iota
	// replace renames the one over the other, of which a hard link is left: on NFS, for one.
	replace
	// inPlace is for where there are no hard links, which keep segments too: the file that has the name is written to.
	inPlace
)

// piece is a segment that was closed.
type piece struct {
	name string
	size int64
}

// twin is the hidden name i of two: while the files change places, both are taken.
func twin(path string, i int) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".twin"+strconv.Itoa(i))
}

// newDisk removes what an earlier timeline has left: twins, if it was killed, and segments.
func newDisk(path string, most int64, late bool, best change) (*disk, error) {
	d := &disk{path: path, max: most, limit: segmentLimit(most), late: late, change: best}
	for i := range 2 {
		if err := remove(twin(path, i)); err != nil {
			return nil, err
		}
	}
	old, err := segments(path)
	if err != nil {
		return nil, err
	}
	for _, name := range old {
		if err := remove(name); err != nil {
			return nil, err
		}
	}
	return d, d.try()
}

// try finds out which change is possible here, with the names of the twins. It fails if no file can be made.
func (d *disk) try() error {
	f, err := d.create(nil)
	if err != nil {
		return err
	}
	f.close()
	other := twin(d.path, 1)
	if d.change < inPlace && os.Link(f.name, other) != nil {
		d.change = inPlace
	}
	if err := remove(other); err != nil {
		return err
	}
	if d.change == exchange {
		g, err := os.OpenFile(other, os.O_CREATE|os.O_EXCL, 0o600)
		if err == nil {
			err = errors.Join(g.Close(), swap(f.name, other))
		}
		if err != nil {
			d.change = replace
		}
	}
	return errors.Join(remove(other), remove(f.name))
}

// swap exchanges the names of two files.
func swap(a, b string) error {
	if err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE); err != nil {
		return &os.LinkError{Op: "exchange", Old: a, New: b, Err: err}
	}
	return nil
}

// segmentLimit makes eight of the cap. Larger ones than 64 MiB are no help to viewers, nor to who copies one that grows.
func segmentLimit(most int64) int64 { return min(most/8, 64<<20) }

// segments are the closed segments of a path that are there, and are timelines.
func segments(path string) (names []string, err error) {
	dir, base := filepath.Split(path)
	stem, ext := split(base)
	entries, err := os.ReadDir(filepath.Clean(dir + "."))
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), stem+".")
		if !ok || !e.Type().IsRegular() {
			continue
		}
		number, ok = strings.CutSuffix(number, ext)
		if n, err := strconv.ParseUint(number, 10, 31); !ok || err != nil || strconv.FormatUint(n, 10) != number {
			continue
		}
		if name := dir + e.Name(); isTimeline(name) {
			names = append(names, name)
		}
	}
	return names, err
}

// isTimeline reports whether a file begins as ours do, so that nothing else is removed.
func isTimeline(name string) bool {
	f, err := os.Open(name)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	var r io.Reader = f
	if strings.HasSuffix(name, ".gz") {
		if r, err = gzip.NewReader(f); err != nil {
			return false
		}
	}
	head := make([]byte, 1<<10)
	n, _ := io.ReadFull(r, head) // a short file is as good
	return bytes.Contains(head[:n], []byte(`"hvd_rank"`))
}

func remove(name string) error {
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// create makes a file with the first hidden name that is free.
func (d *disk) create(content []byte) (*file, error) {
	name := d.free()
	if err := remove(name); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o644)
	if err != nil {
		return nil, err
	}
	if _, err := f.Write(content); err != nil {
		_ = f.Close()
		return nil, errors.Join(err, remove(name))
	}
	return &file{f: f, name: name}, nil
}

// free is the hidden name that the twin does not have.
func (d *disk) free() string {
	if d.hidden != nil && d.hidden.name == twin(d.path, 0) {
		return twin(d.path, 1)
	}
	return twin(d.path, 0)
}

func (d *disk) next(number int, first []byte, tail int) error {
	d.drop()
	if d.visible != nil {
		if err := d.mine(); err != nil {
			return err
		}
		if err := d.evict(d.visible.body + int64(tail) + d.limit); err != nil {
			return err
		}
	}
	f, err := d.create(first)
	if err != nil {
		return err
	}
	f.body = int64(len(first) - tail)
	if d.visible == nil && d.late {
		d.hidden = f
		return nil
	}
	if d.visible != nil {
		keep := beside(d.path, strconv.Itoa(number))
		if err = remove(keep); err == nil {
			if d.change == inPlace {
				err = os.Rename(d.path, keep)
			} else {
				err = os.Link(d.path, keep)
			}
		}
		if err != nil {
			f.close()
			return errors.Join(err, remove(f.name))
		}
		d.closed = append(d.closed, piece{keep, d.visible.body + int64(tail)})
		d.visible.close()
		d.visible = nil
	}
	if err := os.Rename(f.name, d.path); err != nil {
		f.close()
		return errors.Join(err, remove(f.name))
	}
	f.name, d.visible = d.path, f
	d.tail = append(d.tail[:0], first[len(first)-tail:]...)
	return nil
}

// evict removes the oldest segments until so many bytes more are within the cap.
func (d *disk) evict(more int64) error {
	if d.max <= 0 {
		return nil
	}
	for _, p := range d.closed {
		more += p.size
	}
	for len(d.closed) > 0 && more > d.max {
		if err := remove(d.closed[0].name); err != nil {
			return err
		}
		more -= d.closed[0].size
		d.closed = slices.Delete(d.closed, 0, 1)
	}
	return nil
}

// mine fails if the path is no longer the file that we put there.
func (d *disk) mine() error {
	at, err := os.Lstat(d.path)
	if err != nil {
		return lost(err)
	}
	ours, err := d.visible.f.Stat()
	if err != nil {
		return err
	}
	if !os.SameFile(at, ours) {
		return fmt.Errorf("%s: %w", d.path, errLost)
	}
	return nil
}

// lost marks the errors that say that the file has gone.
func lost(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ESTALE) {
		return fmt.Errorf("%w: %w", errLost, err)
	}
	return err
}

func (d *disk) write(p, tail []byte) (int, error) {
	if d.change == inPlace && d.visible != nil {
		if _, err := d.visible.f.WriteAt(slices.Concat(p, tail), d.visible.body); err != nil {
			return 0, errors.Join(err, d.restore())
		}
		d.visible.body += int64(len(p))
		d.tail = append(d.tail[:0], tail...)
		return len(p), nil
	}
	if d.hidden == nil {
		f, err := d.create(nil)
		if err != nil {
			return 0, err
		}
		d.hidden = f
	}
	if d.visible != nil {
		if err := d.hidden.extend(d.visible); err != nil {
			return 0, err
		}
	}
	return d.hidden.append(p)
}

// restore ends the file that has the name where it did before a write to it failed. It needs no room that was not taken before.
func (d *disk) restore() error {
	if _, err := d.visible.f.WriteAt(d.tail, d.visible.body); err != nil {
		return err
	}
	return d.visible.f.Truncate(d.visible.body + int64(len(d.tail)))
}

func (d *disk) commit(tail []byte) error {
	if d.change == inPlace && d.visible != nil {
		return d.mine()
	}
	h := d.hidden
	if h == nil || d.visible != nil && h.body <= d.visible.body {
		return nil
	}
	if _, err := h.f.WriteAt(tail, h.body); err != nil {
		return err
	}
	if d.visible == nil {
		if err := os.Rename(h.name, d.path); err != nil {
			return lost(err)
		}
		h.name, d.visible, d.hidden = d.path, h, nil
		d.tail = append(d.tail[:0], tail...)
		return nil
	}
	if err := d.mine(); err != nil {
		return err
	}
	if d.change == exchange {
		if err := swap(h.name, d.path); err != nil {
			return lost(err)
		}
		d.visible.name, h.name = h.name, d.path
		d.visible, d.hidden = h, d.visible
		return nil
	}
	other := d.free()
	if err := remove(other); err != nil {
		return err
	}
	if err := os.Link(d.path, other); err != nil {
		return lost(err)
	}
	if err := os.Rename(h.name, d.path); err != nil {
		return lost(err)
	}
	d.visible.name, h.name = other, d.path
	d.visible, d.hidden = h, d.visible
	return nil
}

// drop removes the twin.
func (d *disk) drop() {
	if d.hidden != nil {
		_ = remove(d.hidden.name) // if it stays, the next timeline removes it
		d.hidden.close()
		d.hidden = nil
	}
}

func (d *disk) forget() {
	d.drop()
	if d.visible != nil {
		d.visible.close()
		d.visible = nil
	}
}

func (d *disk) close() error {
	d.forget()
	return nil
}
