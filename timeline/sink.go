package timeline

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// sink is where encoded bytes go.
type sink interface {
	// next begins a file with first, of which the last bytes are a tail of it and make it complete. What was there before is kept
	// as a segment of the given number.
	next(number int, first []byte, tail int) error
	// write takes bytes, and says how many it has taken even if it fails. tail completes the file after them.
	write(p, tail []byte) (int, error)
	// commit shows what was written.
	commit(tail []byte) error
	// forget gives up the file, which is lost, so that another can begin.
	forget()
	close() error
}

// errLost says that the file is no longer where it was: what was not shown cannot be.
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

// hurry bounds what is under way and all that follows. Devices that cannot be waited for do not need it.
func (s *stream) hurry(until time.Time) { _ = s.f.SetWriteDeadline(until) }

func (s *stream) next(_ int, first []byte, tail int) error {
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
func (s *stream) commit([]byte) error            { return nil }
func (s *stream) forget()                        {}
func (s *stream) close() error                   { return s.f.Close() }

// finish writes the end, which a file has at all times.
func (s *stream) finish(tail []byte) error {
	_, err := s.f.Write(tail)
	return err
}

// file is a name of ours. body is how much of it is written, without a tail. Bodies only grow, and what fails says how far it came: so
// nothing is ever left behind a new tail, and the size is never set. (That would cost ext4 the blocks that it has taken in advance.)
type file struct {
	f    *os.File
	name string
	body int64
}

// append writes p after the body.
func (f *file) append(p []byte) (int, error) {
	n, err := f.f.WriteAt(p, f.body)
	f.body += int64(n)
	return n, err
}

// extend copies what other has after the end of f, within the kernel where it can (os.File.ReadFrom).
func (f *file) extend(other *file) error {
	if f.body >= other.body {
		return nil
	}
	if _, err := f.f.Seek(f.body, io.SeekStart); err != nil {
		return err
	}
	if _, err := other.f.Seek(f.body, io.SeekStart); err != nil {
		return err
	}
	n, err := io.CopyN(f.f, other.f, other.body-f.body)
	f.body += n
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("%s: %w", other.name, io.ErrUnexpectedEOF)
	}
	return err
}

func (f *file) close() { _ = f.f.Close() } // nothing is buffered: what could fail has been written
