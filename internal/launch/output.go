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

// close returns when all that was put is written or writing was abandoned.
func (c *console) close() {
	close(c.queue)
	<-c.done
}

// note prints a line of the launcher's own. It does not wait: supervision goes on if nobody reads the terminal, and
// the line is dropped.
func (c *console) note(format string, args ...any) {
	select {
	case c.queue <- chunk{err: true, text: fmt.Appendf(nil, "hvdrun: "+format+"\n", args...)}:
	default:
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
		if isClosed(c.quit) {
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

// pipeSource is the end to read of a pipe, non-blocking. Read gives io.EOF when all who may write to it have closed it, or after
// finish.
type pipeSource struct {
	file *os.File
	last bool // it is being emptied
	left int  // bytes to take then at most, for who goes on writing could fill it again and again
}

func (p *pipeSource) Read(b []byte) (n int, err error) {
	if !p.last {
		n, err = p.file.Read(b)
		if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		// The descriptor cannot be had while the deadline holds.
		if err := p.file.SetReadDeadline(time.Time{}); err != nil {
			return 0, err
		}
	}
	raw, err := p.file.SyscallConn()
	if err != nil {
		return 0, err
	}
	n = 0
	_ = raw.Read(func(fd uintptr) bool {
		if !p.last {
			p.last = true
			p.left, _ = unix.FcntlInt(fd, unix.F_GETPIPE_SZ, 0)
		}
		n, _ = unix.Read(int(fd), b[:min(len(b), p.left)])
		return true
	})
	if n <= 0 {
		return 0, io.EOF
	}
	p.left -= n
	return n, nil
}

// finish has Read give what is there now and then io.EOF. Nobody of the job is left to write, but somebody else may have been
// given the other end and keep it open.
func (p *pipeSource) finish() { _ = p.file.SetReadDeadline(time.Unix(1, 0)) }

func (p *pipeSource) Close() error { return p.file.Close() }

// stream carries what one rank writes to its standard output or error to the console, and to a file and a tail
// if it has them.
type stream struct {
	in        io.ReadCloser
	console   *console
	err       bool
	prefix    string
	timestamp bool
	file      *os.File // --output-filename; nil for none
	tail      *tail    // nil for none

	out     []byte // lines for the next chunk
	fileErr error  // why file is incomplete
}

// run reads until the end of the source.
func (s *stream) run() {
	split := splitter{line: s.line, ended: s.ended, max: maxLineBytes}
	buf := make([]byte, readBytes)
	for {
		n, err := s.in.Read(buf)
		if s.file != nil && s.fileErr == nil {
			_, s.fileErr = s.file.Write(buf[:n])
		}
		split.write(buf[:n])
		s.flush()
		if err != nil {
			break
		}
	}
	split.flush()
	s.flush()
	if s.file != nil {
		if err := s.file.Close(); s.fileErr == nil {
			s.fileErr = err
		}
	}
	s.in.Close()
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
