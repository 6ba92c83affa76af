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
	"time"

	"github.com/gohvd/gohvd/internal/outfile"
)

// sink is the destination of the encoded bytes: regular files or a stream.
type sink interface {
	// begin starts a new file with the content in first. The parameter tail is the number of bytes at the end
	// of first that complete the file. The next write overwrites these bytes. The previous file becomes the
	// segment with the given number, or with the next one that no file has.
	begin(number int, first []byte, tail int) error
	// write replaces the tail of the file by the bytes in p and a new tail, so that the file is complete
	// again. It returns how many bytes of p were written, even if it fails.
	write(p, tail []byte) (int, error)
	// end completes the file. tail has the bytes that complete the file after all earlier writes.
	end(tail []byte) error
	close() error
}

// errLost reports that the path of a disk no longer names the file that the disk writes.
var errLost = errors.New("the file was removed or replaced")

// stream is a sink for a FIFO, a terminal or another device, where written bytes cannot be overwritten.
type stream struct {
	f     *os.File
	begun bool
}

// openStream opens the FIFO or device at path, which has the given mode, for writing. It does not wait for a
// reader. A FIFO or device of another user is an error.
func openStream(path string, mode os.FileMode) (*stream, error) {
	flags := os.O_WRONLY
	if mode&os.ModeNamedPipe != 0 {
		// On Linux, opening a FIFO with O_RDWR does not wait for a reader. Later writes do not fail when the
		// last reader closes its end, because this process has a reading end itself (fifo(7)).
		flags = os.O_RDWR
	}
	if !outfile.Device(path) {
		flags |= syscall.O_NOFOLLOW
	}
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return nil, err
	}
	if err := outfile.CheckStream(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &stream{f: f}, nil
}

// limit sets the deadline for the write in progress and all later writes. The error of SetWriteDeadline is
// ignored, because a device that does not support deadlines does not block either.
func (s *stream) limit(until time.Time) { _ = s.f.SetWriteDeadline(until) }

func (s *stream) begin(_ int, first []byte, tail int) error {
	if s.begun {
		return nil
	}
	n, err := s.f.Write(first[:len(first)-tail])
	if n > 0 && err != nil {
		return fmt.Errorf("%s: wrote %d of %d bytes of the header: %w", s.f.Name(), n, len(first)-tail, err)
	}
	s.begun = err == nil
	return err
}

func (s *stream) write(p, _ []byte) (int, error) { return s.f.Write(p) }
func (s *stream) close() error                   { return s.f.Close() }

func (s *stream) end(tail []byte) error {
	_, err := s.f.Write(tail)
	return err
}

// disk is a sink for regular files. Each write overwrites the tail of the file and puts a new tail after the
// new bytes, so that the file is complete before and after the write.
type disk struct {
	path   string
	max    int64    // the limit for the bytes of all segments together; 0 means no limit
	limit  int64    // the limit for the bytes of one segment
	fresh  bool     // whether the first file must not replace an existing one
	f      *os.File // the open segment; nil if there is none
	body   int64    // the size of f in bytes, without the tail
	tail   []byte
	closed []segment
}

// segment is a closed segment: its file name and its size in bytes.
type segment struct {
	name string
	size int64
}

// hidden returns the name that the file for path has before it gets its final name.
func hidden(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".new")
}

// newDisk returns a disk for path. It removes the segments of an earlier timeline or, if fresh is set, fails
// because of them. It removes a hidden file if a killed process left one. It fails if no file can be created
// in the folder.
func newDisk(path string, most int64, fresh bool) (*disk, error) {
	d := &disk{path: path, max: most, limit: segmentLimit(most), fresh: fresh}
	old, err := segments(path)
	if err != nil {
		return nil, err
	}
	if fresh && len(old) > 0 {
		return nil, exists(old[0])
	}
	for _, name := range old {
		if err := remove(name); err != nil {
			return nil, err
		}
	}
	f, err := d.create()
	if err != nil {
		return nil, err
	}
	return d, errors.Join(f.Close(), remove(f.Name()))
}

// exists reports that a new timeline would replace an existing file.
func exists(name string) error { return fmt.Errorf("%s exists: choose another name", name) }

// create makes an empty file with the hidden name of the path. Only this user can read the file, because
// tensor names may reveal the structure of a model.
func (d *disk) create() (*os.File, error) {
	name := hidden(d.path)
	if err := remove(name); err != nil {
		return nil, err
	}
	return os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
}

// segmentLimit returns the limit for the size of a segment. It is an eighth of the limit for all segments,
// but at most 64 MiB, because viewers are slow with larger files and copying a growing file takes longer.
func segmentLimit(most int64) int64 { return min(most/8, 64<<20) }

// segments returns the names of the closed segments of path. These are the files that have the name of a
// numbered segment and were written as a part of the timeline path.
func segments(path string) (names []string, err error) {
	dir, base := filepath.Split(path)
	stem, ext := outfile.Split(base)
	entries, err := os.ReadDir(filepath.Clean(dir + "."))
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), stem+".")
		if !ok || !e.Type().IsRegular() {
			continue
		}
		number, ok = strings.CutSuffix(number, ext)
		if n, err := strconv.ParseUint(number, 10, 31); !ok || err != nil ||
			strconv.FormatUint(n, 10) != number {
			continue
		}
		if name := dir + e.Name(); isSegment(name, base) {
			names = append(names, name)
		}
	}
	return names, err
}

// isSegment reports whether a file begins as a segment of the timeline with the given name does. A file that
// has the name of a segment but is another one must not be removed, such as the timeline t.2.json, of which
// t.json has a segment 2 too.
func isSegment(name, of string) bool {
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
	head := make([]byte, 4<<10)
	n, _ := io.ReadFull(r, head) // the file may be shorter than head
	return bytes.Contains(head[:n], []byte(`"hvd_rank"`)) && bytes.Contains(head[:n],
		appendString([]byte(`"file":`), of))
}

// remove removes a file. If the file does not exist it returns nil.
func remove(name string) error {
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (d *disk) begin(number int, first []byte, tail int) error {
	if d.f != nil {
		if err := d.keep(number); err != nil {
			return err
		}
	}
	f, err := d.create()
	if err != nil {
		return err
	}
	if _, err := f.Write(first); err != nil {
		return errors.Join(err, f.Close(), remove(f.Name()))
	}
	if d.fresh {
		if err := d.claim(); err != nil {
			return errors.Join(err, f.Close(), remove(f.Name()))
		}
	}
	if err := os.Rename(f.Name(), d.path); err != nil {
		return errors.Join(lost(err), f.Close(), remove(f.Name()))
	}
	d.f, d.body, d.tail = f, int64(len(first)-tail), slices.Clone(first[len(first)-tail:])
	return nil
}

// claim makes an empty file with the name path, which the first file then replaces. It fails if there is one
// already. A hard link would do this in one step, but not all file systems have them.
func (d *disk) claim() error {
	f, err := os.OpenFile(d.path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return exists(d.path)
	}
	if err != nil {
		return err
	}
	d.fresh = false
	return f.Close()
}

// keep closes the file and renames it to the segment with the given number, or with the next one that no file
// has. Then it removes the oldest segments until one more segment fits within the limit.
func (d *disk) keep(number int) error {
	if err := d.checkPath(); err != nil {
		return err
	}
	var name string
	for ; ; number++ {
		name = beside(d.path, strconv.Itoa(number))
		if _, err := os.Lstat(name); errors.Is(err, fs.ErrNotExist) {
			break
		} else if err != nil {
			return err
		}
	}
	// If the file system has hard links, the path keeps naming the old file until the next file replaces it.
	// Otherwise no file has the name path for a moment.
	if os.Link(d.path, name) != nil {
		if err := os.Rename(d.path, name); err != nil {
			return err
		}
	}
	d.closed = append(d.closed, segment{name, d.body + int64(len(d.tail))})
	_ = d.f.Close() // the error is ignored, because no written bytes are buffered
	d.f = nil
	more := d.limit
	for _, s := range d.closed {
		more += s.size
	}
	for d.max > 0 && len(d.closed) > 0 && more > d.max {
		if err := remove(d.closed[0].name); err != nil {
			return err
		}
		more -= d.closed[0].size
		d.closed = slices.Delete(d.closed, 0, 1)
	}
	return nil
}

// checkPath returns an error if path no longer names the file that this process writes.
func (d *disk) checkPath() error {
	at, err := os.Lstat(d.path)
	if err != nil {
		return lost(err)
	}
	ours, err := d.f.Stat()
	if err != nil {
		return err
	}
	if !os.SameFile(at, ours) {
		return fmt.Errorf("%s: %w", d.path, errLost)
	}
	return nil
}

// lost returns err wrapped in errLost if err means that the file is gone. Otherwise it returns err.
func lost(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ESTALE) {
		return fmt.Errorf("%w: %w", errLost, err)
	}
	return err
}

func (d *disk) write(p, tail []byte) (int, error) {
	if err := d.checkPath(); err != nil {
		return 0, err
	}
	if _, err := d.f.WriteAt(append(p, tail...), d.body); err != nil {
		// Restore the old tail. This works on a full disk too, because the file does not become longer than
		// it was.
		_, again := d.f.WriteAt(d.tail, d.body)
		return 0, errors.Join(err, again, d.f.Truncate(d.body+int64(len(d.tail))))
	}
	d.body += int64(len(p))
	d.tail = append(d.tail[:0], tail...)
	return len(p), nil
}

func (d *disk) end([]byte) error { return nil }

func (d *disk) close() error {
	if d.f == nil {
		return nil
	}
	_ = d.f.Close() // the error is ignored, because no written bytes are buffered
	d.f = nil
	return nil
}
