package launch

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/logs"
)

const (
	// chunkBytes is the approximate size of the chunks that are passed to the console. queuedChunks is how
	// many chunks the console queues, so the queue holds at most about 4 MiB. When the queue is full, the
	// pipes from the ranks fill up, and then ranks that write output block.
	chunkBytes   = 64 << 10
	queuedChunks = 64
	readBytes    = 32 << 10
)

// chunk is a part of one stream: lines with their prefixes. It may begin or end in the middle of a line.
type chunk struct {
	from *stream // nil for a message from the launcher
	err  bool    // the chunk is written to standard error
	text []byte  // if it is empty, the console only ends an incomplete line of the file
	// within is set if the stream had passed on the beginning of the line, or its \r, before this chunk.
	within bool
	last   bool // the console ends after this chunk
}

// console writes to the launcher's standard output and standard error. One goroutine writes to both, so that
// lines are not mixed. It adds nothing to the bytes of a stream, except that output of another stream which
// follows in the same file begins in a line of its own. If this divides a line of a stream, the rest of that
// line gets the prefix of the stream too.
type console struct {
	files   [2]*sink // for standard output and standard error; equal if both are the same file
	queue   chan chunk
	verbose bool          // verbosef prints
	quit    chan struct{} // closed by abandon
	done    chan struct{} // closed when all chunks are written, or after abandon; then chunks are dropped
	abandon func()        // drops the queue and all later chunks

	lost error // error of the first failed write, or nil; valid once done is closed
	// unread delivers the errors of writes to a pipe that nobody reads any more, except while one is in it.
	unread chan error
}

// sink is a file that the console writes to.
type sink struct {
	io.Writer
	open *stream // the stream whose last line, at the end of the file, has not ended with \n; or nil
}

func newConsole(out, err io.Writer) *console {
	c := &console{
		queue: make(chan chunk, queuedChunks),
		quit:  make(chan struct{}),
		done:  make(chan struct{}),

		unread: make(chan error, 1),
	}
	c.files[0] = &sink{Writer: out}
	c.files[1] = c.files[0]
	if !isSameFile(out, err) {
		c.files[1] = &sink{Writer: err}
	}
	c.abandon = sync.OnceFunc(func() { close(c.quit) })
	go c.run()
	return c
}

// isSameFile reports whether both writers write to the same file, for example to the same terminal.
func isSameFile(a, b io.Writer) bool {
	f, isFile := a.(*os.File)
	g, alsoFile := b.(*os.File)
	if !isFile || !alsoFile {
		return a == b
	}
	s, err := f.Stat()
	if err != nil {
		return false
	}
	t, err := g.Stat()
	return err == nil && os.SameFile(s, t)
}

// put queues k. While the queue is full, put blocks. After abandon or close, put drops k.
func (c *console) put(k chunk) {
	select {
	case c.queue <- k:
	case <-c.quit:
	case <-c.done:
	}
}

// close ends the console. It returns when all chunks in the queue are written, or after abandon. The stream
// of a command that cannot be killed may live longer.
func (c *console) close() {
	c.put(chunk{last: true})
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

// verbosef is like note, but prints only with Options.Verbose.
func (c *console) verbosef(format string, args ...any) {
	if c.verbose {
		c.note(format, args...)
	}
}

func (c *console) run() {
	defer close(c.done)
	for {
		var k chunk
		select {
		case <-c.quit:
		case k = <-c.queue:
		}
		switch {
		case isClosed(c.quit):
			return
		case !k.last:
			c.write(k)
			continue
		}
		for i, f := range c.files {
			if logs.IsTerminal(f.Writer) { // the prompt of a shell will follow
				c.write(chunk{err: i == 1})
			}
		}
		return
	}
}

// write writes k to its file.
func (c *console) write(k chunk) {
	f, text := c.files[0], k.text
	if k.err {
		f = c.files[1]
	}
	if f.open != k.from && k.within {
		// The rest of the line begins in a line of its own. If only the line end is left, it is dropped.
		if rest := trimLineEnd(text); len(rest) < len(text) {
			text = rest
		} else {
			text = append(k.from.begin(nil), text...)
		}
	}
	if f.open != nil && f.open != k.from && (len(text) > 0 || k.from == nil) {
		text = append([]byte{'\n'}, text...)
	}
	if len(text) == 0 {
		return
	}
	if _, err := f.Write(text); err != nil {
		err = fmt.Errorf("launch: output was lost: %w", err)
		if c.lost == nil {
			c.lost = err
		}
		if errors.Is(err, unix.EPIPE) {
			select {
			case c.unread <- err:
			default:
			}
		}
	}
	f.open = k.from
	if text[len(text)-1] == '\n' {
		f.open = nil
	}
}

// trimLineEnd returns text without the line end with which it begins, if any.
func trimLineEnd(text []byte) []byte {
	return bytes.TrimPrefix(bytes.TrimPrefix(text, []byte{'\r'}), []byte{'\n'})
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

	// unused is closed when no stream of the agent is opened any more. It is nil if the job is not elastic.
	unused <-chan struct{}
	opened atomic.Bool // s was opened

	before  *stream       // stream of the process that the rank had before, or nil
	done    chan struct{} // closed when run has returned
	out     []byte        // the next chunk
	within  bool          // field of the next chunk
	end     byte          // the last byte of the last piece
	fileErr error         // why file is incomplete
}

// run copies until s.in ends. Then it closes the file and s.in. It begins when the stream before s has ended.
func (s *stream) run() {
	defer close(s.done)
	s.end = '\n'
	s.follow()
	split := splitter{piece: s.piece, max: maxLineBytes}
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

// piece adds a piece of a splitter to the next chunk.
func (s *stream) piece(text []byte) {
	if s.tail != nil {
		s.tail.add(text)
	}
	within := s.end != '\n' && (s.end != '\r' || text[0] == '\n')
	if len(s.out) == 0 {
		s.within = within
	}
	if !within {
		s.out = s.begin(s.out)
	}
	s.out = append(s.out, text...)
	s.end = text[len(text)-1]
	if len(s.out) >= chunkBytes {
		s.flush()
	}
}

// begin appends to b what precedes each line.
func (s *stream) begin(b []byte) []byte {
	if s.timestamp {
		b = time.Now().AppendFormat(b, time.ANSIC)
	}
	return append(b, s.prefix...)
}

func (s *stream) flush() {
	if len(s.out) > 0 {
		s.console.put(chunk{from: s, err: s.err, text: s.out, within: s.within})
		s.out = nil // the console owns the bytes now
	}
}
