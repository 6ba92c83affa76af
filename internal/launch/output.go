package launch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// chunkBytes is about the size of what is handed to the console at once, and queuedChunks how many of them wait: some 4 MiB
	// in all, whatever the ranks write. When they are full the ranks' pipes fill up, and then the ranks wait.
	chunkBytes   = 64 << 10
	queuedChunks = 64
	readBytes    = 32 << 10
)

// chunk is whole lines of one stream, or nil to end a line that the stream has left at \r.
type chunk struct {
	from *stream // nil for the launcher
	err  bool    // for standard error
	text []byte
}

// console writes to the launcher's standard output and error, in one goroutine so that no line is written
// into another.
type console struct {
	out, err io.Writer
	queue    chan chunk
	quit     chan struct{} // closed by abandon
	done     chan struct{} // closed when all is written or writing was abandoned
	abandon  func()        // drops what is queued and what comes

	lost error // the first failed write; valid after done
}

func newConsole(out, err io.Writer) *console {
	c := &console{
		out: out, err: err,
		queue: make(chan chunk, queuedChunks),
		quit:  make(chan struct{}),
		done:  make(chan struct{}),
	}
	c.abandon = sync.OnceFunc(func() { close(c.quit) })
	go c.run()
	return c
}

// put waits for room in the queue.
func (c *console) put(k chunk) {
	select {
	case c.queue <- k:
	case <-c.quit:
	}
}

// note prints a line of the launcher's own. It does not wait: supervision goes on if nobody reads the terminal, and
// the line is dropped.
func (c *console) note(format string, args ...any) {
	select {
	case c.queue <- chunk{err: true, text: fmt.Appendf(nil, "hvdrun: "+format+"\n", args...)}:
	default:
	}
}

func (c *console) isAbandoned() bool {
	select {
	case <-c.quit:
		return true
	default:
		return false
	}
}

func (c *console) run() {
	defer close(c.done)
	var open *chunk // left its line at \r
	write := func(toErr bool, text []byte) {
		w := c.out
		if toErr {
			w = c.err
		}
		if _, err := w.Write(text); err != nil && c.lost == nil {
			c.lost = fmt.Errorf("launch: output was lost: %w", err)
		}
	}
	for {
		var k chunk
		var more bool
		select {
		case <-c.quit:
		case k, more = <-c.queue:
		}
		if c.isAbandoned() {
			return
		}
		if open != nil && (k.from != open.from || k.text == nil) {
			write(open.err, []byte("\n"))
			open = nil
		}
		if !more {
			return
		}
		if len(k.text) == 0 {
			continue
		}
		write(k.err, k.text)
		if open = nil; k.text[len(k.text)-1] == '\r' {
			open = &k
		}
	}
}

// stream carries what one rank writes to its standard output or error to the console, and to a file and a tail
// if it has them.
type stream struct {
	pipe      *os.File // the end to read, non-blocking
	console   *console
	err       bool
	prefix    string
	timestamp bool
	file      *os.File // --output-filename; nil for none
	tail      *tail    // nil for none

	out     []byte // lines for the next chunk
	fileErr error  // why file is incomplete
}

// run reads until the pipe is closed by all who may write to it, or until finish.
func (s *stream) run() {
	split := splitter{line: s.line, ended: s.ended, max: maxLineBytes}
	take := func(p []byte) {
		if s.file != nil && s.fileErr == nil {
			_, s.fileErr = s.file.Write(p)
		}
		split.write(p)
		s.flush()
	}
	buf := make([]byte, readBytes)
	for {
		n, err := s.pipe.Read(buf)
		take(buf[:n])
		if err == nil {
			continue
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			s.drain(buf, take)
		}
		break
	}
	split.flush()
	s.flush()
	if s.file != nil {
		if err := s.file.Close(); s.fileErr == nil {
			s.fileErr = err
		}
	}
	s.pipe.Close()
}

// finish makes run return when the pipe is empty. Nobody of the job is left to write, but somebody else may
// have been given the other end and keep it open.
func (s *stream) finish() { _ = s.pipe.SetReadDeadline(time.Unix(1, 0)) }

// drain takes what is in the pipe now.
func (s *stream) drain(buf []byte, take func([]byte)) {
	if s.pipe.SetReadDeadline(time.Time{}) != nil {
		return
	}
	raw, err := s.pipe.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Read(func(fd uintptr) bool {
		left, err := unix.FcntlInt(fd, unix.F_GETPIPE_SZ, 0)
		for err == nil && left > 0 {
			var n int
			n, err = unix.Read(int(fd), buf)
			if n <= 0 {
				break
			}
			take(buf[:n])
			left -= n
		}
		return true
	})
}

func (s *stream) line(text []byte, end byte) {
	if s.tail != nil {
		s.tail.add(text, end)
	}
	if s.timestamp {
		s.out = time.Now().AppendFormat(s.out, time.ANSIC)
	}
	s.out = append(s.out, s.prefix...)
	s.out = append(s.out, text...)
	if end == 0 {
		end = '\n'
	}
	s.out = append(s.out, end)
	if len(s.out) >= chunkBytes {
		s.flush()
	}
}

func (s *stream) ended() {
	if s.tail != nil {
		s.tail.open = false
	}
	s.flush()
	s.console.put(chunk{from: s, err: s.err})
}

func (s *stream) flush() {
	if len(s.out) > 0 {
		s.console.put(chunk{from: s, err: s.err, text: s.out})
		s.out = nil // the console's now
	}
}

// printable replaces control characters, which a terminal would obey, except tabs.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' && r != '\t' || r == 0x7f {
			return '?'
		}
		return r
	}, text)
}
