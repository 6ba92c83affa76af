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
)

// sink is where encoded bytes go.
type sink interface {
	// begin starts a file with first, of which the last bytes are a tail and make it complete. The file before is kept as a segment
	// of the given number.
	begin(number int, first []byte, tail int) error
	// write takes bytes, and returns how many it has taken even if it fails. tail makes the file complete after them.
	write(p, tail []byte) (int, error)
	// show gives the file its name, if it did not have it from the beginning.
	show() error
	// end is given the tail of all that was written.
	end(tail []byte) error
	close() error
}

// errLost says that the file is no longer where it was.
var errLost = errors.New("the file was removed or replaced")

// stream is a sink that only goes on: a FIFO, a terminal, a device.
type stream struct {
	f     *os.File
	begun bool
}

func openStream(path string, mode os.FileMode) (*stream, error) {
	flags := os.O_WRONLY
	if mode&os.ModeNamedPipe != 0 {
		// Linux opens a FIFO so without a reader, and with one end of our own no reader who leaves ends us (fifo(7)).
		flags = os.O_RDWR
	}
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return nil, err
	}
	return &stream{f: f}, nil
}

// limit bounds the write under way and all that follow. Devices that cannot be waited for do not need it.
func (s *stream) limit(until time.Time) { _ = s.f.SetWriteDeadline(until) }

func (s *stream) begin(_ int, first []byte, tail int) error {
	if s.begun {
		return nil
	}
	n, err := s.f.Write(first[:len(first)-tail])
	if n > 0 && err != nil {
		return fmt.Errorf("%s: %d of %d bytes of the header: %w", s.f.Name(), n, len(first)-tail, err)
	}
	s.begun = err == nil
	return err
}

func (s *stream) write(p, _ []byte) (int, error) { return s.f.Write(p) }
func (s *stream) show() error                    { return nil }
func (s *stream) close() error                   { return s.f.Close() }

func (s *stream) end(tail []byte) error {
	_, err := s.f.Write(tail)
	return err
}

// disk is a sink of regular files. Each write goes over the tail of the file and has a new one behind it, so that the file is
// complete before and after it.
type disk struct {
	path   string
	max    int64    // of all segments together; 0 is no cap
	limit  int64    // of a segment
	late   bool     // the file has its name when show is called
	f      *os.File // nil if there is none
	shown  bool     // f has the name
	body   int64    // of f, without the tail
	tail   []byte
	closed []segment
}

// segment is one that was closed.
type segment struct {
	name string
	size int64
}

// hidden returns the name of a file that has not got its own yet.
func hidden(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".new")
}

// newDisk removes the segments of an earlier timeline and what it left if it was killed. It fails if no file can be made.
func newDisk(path string, most int64, late bool) (*disk, error) {
	d := &disk{path: path, max: most, limit: segmentLimit(most), late: late}
	if late {
		d.limit = most / 2 // what a ring holds is meant to be one file
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
	f, err := d.create()
	if err != nil {
		return nil, err
	}
	return d, errors.Join(f.Close(), remove(f.Name()))
}

// create makes an empty file with the hidden name.
func (d *disk) create() (*os.File, error) {
	name := hidden(d.path)
	if err := remove(name); err != nil {
		return nil, err
	}
	return os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o644)
}

// segmentLimit makes eight of the cap. Larger ones than 64 MiB are no help to viewers, nor to who copies one that grows.
func segmentLimit(most int64) int64 { return min(most/8, 64<<20) }

// segments returns the closed segments of a path that are there, and are timelines.
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
	d.f, d.shown, d.body, d.tail = f, false, int64(len(first)-tail), slices.Clone(first[len(first)-tail:])
	if d.late {
		return nil
	}
	if err := d.show(); err != nil {
		return errors.Join(err, d.close())
	}
	return nil
}

// keep closes the file and makes it a segment, and removes the oldest ones so that another is within the cap.
func (d *disk) keep(number int) error {
	if err := errors.Join(d.show(), d.mine()); err != nil {
		return err
	}
	name := beside(d.path, strconv.Itoa(number))
	if err := remove(name); err != nil {
		return err
	}
	// A link keeps the name there until the next file takes it. Where there are no hard links there is a moment without it.
	if os.Link(d.path, name) != nil {
		if err := os.Rename(d.path, name); err != nil {
			return err
		}
	}
	d.closed = append(d.closed, segment{name, d.body + int64(len(d.tail))})
	_ = d.f.Close() // nothing is buffered: what could fail has been written
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

// show renames the file to what it is to be called.
func (d *disk) show() error {
	if d.f == nil || d.shown {
		return nil
	}
	if err := os.Rename(hidden(d.path), d.path); err != nil {
		return lost(err)
	}
	d.shown = true
	return nil
}

// mine fails if the path is no longer the file that we put there.
func (d *disk) mine() error {
	if !d.shown {
		return nil
	}
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

// lost marks the errors that say that the file has gone.
func lost(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ESTALE) {
		return fmt.Errorf("%w: %w", errLost, err)
	}
	return err
}

func (d *disk) write(p, tail []byte) (int, error) {
	if err := d.mine(); err != nil {
		return 0, err
	}
	if _, err := d.f.WriteAt(append(p, tail...), d.body); err != nil {
		// The old tail needs no room that was not taken before.
		_, again := d.f.WriteAt(d.tail, d.body)
		return 0, errors.Join(err, again, d.f.Truncate(d.body+int64(len(d.tail))))
	}
	d.body += int64(len(p))
	d.tail = append(d.tail[:0], tail...)
	return len(p), nil
}

func (d *disk) end([]byte) error { return nil }

// close gives up the file, and removes it if it has no name.
func (d *disk) close() error {
	if d.f == nil {
		return nil
	}
	var err error
	if !d.shown {
		err = remove(d.f.Name())
	}
	_ = d.f.Close() // nothing is buffered
	d.f = nil
	return err
}
