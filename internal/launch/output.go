package launch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// chunkBytes is the approximate size of the chunks that are passed to the console. queuedChunks is how
	// many chunks the console queues, so the queue holds at most about 4 MiB. When the queue is full, the
	// pipes from the ranks fill up, and then ranks that write output block.
	chunkBytes   = 64 << 10
	queuedChunks = 64
	readBytes    = 32 << 10
)

// chunk is a sequence of whole lines from one stream. A chunk without text makes the console write \n if the
// last line of the stream ended with \r.
type chunk struct {
	from *stream // nil for a message from the launcher
	err  bool    // the chunk is written to standard error
	text []byte
}

// console writes to the launcher's standard output and standard error. One goroutine writes to both, so that
// lines are not mixed.
type console struct {
	out, err io.Writer
	queue    chan chunk
	quit     chan struct{} // closed by abandon
	done     chan struct{} // closed when all chunks are written, or after abandon
	abandon  func()        // drops the queue and all later chunks

	lost error // error of the first failed write, or nil; valid once done is closed
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

// put queues k. While the queue is full, put blocks. After abandon, put drops k.
func (c *console) put(k chunk) {
	select {
	case c.queue <- k:
	case <-c.quit:
	}
}

// close closes the queue. It returns when all chunks in the queue are written, or after abandon.
func (c *console) close() {
	close(c.queue)
	<-c.done
}

// note prints a line from the launcher itself. If the queue is full because nothing reads the output, note
// drops the line instead of blocking, so that the supervision can go on.
func (c *console) note(format string, args ...any) {
	select {
	case c.queue <- chunk{err: true, text: fmt.Appendf(nil, "hvdrun: "+format+"\n", args...)}:
	default:
	}
}

func (c *console) run() {
	defer close(c.done)
	var open *chunk // the last chunk, if its last line ended with \r; else nil
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

// pipeSource is the non-blocking read end of a pipe. Read returns io.EOF when all write ends are closed.
// After finish, it also returns io.EOF when the pipe is empty.
type pipeSource struct {
	file *os.File
	last bool // finish was called, so Read must not wait for more bytes
	// left is how many bytes Read may still return after finish. Without a limit, a process could refill the
	// pipe for ever.
	left int
}

func (p *pipeSource) Read(b []byte) (n int, err error) {
	if !p.last {
		n, err = p.file.Read(b)
		if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		// RawConn.Read would not call its function after a deadline has passed. So remove the deadline first.
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

// finish makes Read return the bytes that are in the pipe now, and then io.EOF. It is called when no process
// of the job is left that could write to the pipe. Without finish the pipe might never end, because a process
// outside the job may have inherited the other end.
func (p *pipeSource) finish() { _ = p.file.SetReadDeadline(time.Unix(1, 0)) }

func (p *pipeSource) Close() error { return p.file.Close() }

// stream copies the standard output or standard error of one rank to the console. It also copies to file and
// to tail if they are not nil.
type stream struct {
	in        io.ReadCloser
	console   *console
	err       bool
	prefix    string
	timestamp bool
	path      string   // of the copy for --output-filename, or empty
	file      *os.File // the copy; may be nil
	tail      *tail    // may be nil

	before  *stream       // stream of the process that the rank had before, or nil
	done    chan struct{} // closed when run has returned
	out     []byte        // lines for the next chunk
	fileErr error         // why file is incomplete
}

// run copies until s.in ends. Then it closes the file and s.in. It begins when the stream before s has ended.
func (s *stream) run() {
	defer close(s.done)
	s.follow()
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
		s.out = nil // the console owns the bytes now
	}
}
