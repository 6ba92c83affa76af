package van

import (
	"errors"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/ps/pspb"
)

const (
	// serverPoll is how long a server polls for a message after the last one, and workerPoll the longest time
	// for which a call of Van.Poll polls.
	serverPoll = 100 * time.Microsecond
	workerPoll = time.Millisecond
	// pollsPerCheck is the number of polls between two checks whether to go on, and pollsPerGosched that
	// between two yields to other goroutines.
	pollsPerCheck   = 8
	pollsPerGosched = 256
)

// errNothing is the error of a read that must not wait if nothing has arrived.
var errNothing = errors.New("nothing has arrived")

// descriptor is a Unix socket that can be polled: at a server by the goroutine that reads it, at a worker by
// the goroutines that wait for responses. The socket is not in the runtime's poller, in which data that
// arrives wakes a thread even if a goroutine polls for it. Instead, the runtime's poller has an epoll
// instance, which has the socket and reports what arrives only while no goroutine polls. descriptor
// implements syscall.RawConn.
type descriptor struct {
	link *link
	file *os.File // the epoll instance
	raw  syscall.RawConn

	mu        sync.RWMutex // held for reading while fd or epoll is used
	fd, epoll int
	closed    bool

	deadlines sync.Mutex // guards deadline and woken
	deadline  time.Time
	woken     bool // the deadline of file has passed only to wake the goroutine that reads

	// reading is held by the goroutine that reads a message. At a worker, the goroutine that reads the link
	// does not have it while it waits for the first byte of a message, so another one may read the message.
	// It guards what follows.
	reading sync.Mutex
	reports bool // the epoll instance reports what arrives
	event   unix.EpollEvent
	f       func(fd uintptr) bool // the argument of Read
	failed  error                 // the error of the last call of attempt
	attempt func(uintptr) bool
	ready   func(uintptr) bool
	nowait  bool // Read fails with errNothing instead of waiting
	left    bool // the goroutine that reads the link was woken to read what has arrived
}

// newDescriptor returns a duplicate of the descriptor of the connection of l.
func newDescriptor(l *link, conn syscall.RawConn) (*descriptor, error) {
	d := &descriptor{link: l, fd: -1, epoll: -1}
	d.attempt = func(uintptr) (done bool) {
		done, d.failed = d.do(d.f)
		return done
	}
	d.ready = func(uintptr) bool { return d.readable() }
	var err error
	if ctl := conn.Control(func(fd uintptr) {
		d.fd, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
	}); ctl != nil {
		err = ctl
	}
	if err == nil {
		d.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	}
	if err == nil {
		err = unix.EpollCtl(d.epoll, unix.EPOLL_CTL_ADD, d.fd, &d.event)
	}
	if err == nil {
		err = unix.SetNonblock(d.epoll, true) // package os puts only such files into the runtime's poller
	}
	if err == nil {
		d.file = os.NewFile(uintptr(d.epoll), "epoll")
		if d.raw, err = d.file.SyscallConn(); err == nil {
			// The runtime's poller refuses a file if it has no memory. Such a file has no deadlines.
			err = d.file.SetReadDeadline(time.Time{})
		}
		if err == nil {
			return d, nil
		}
		d.file.Close()
		d.epoll = -1
	}
	for _, fd := range []int{d.fd, d.epoll} {
		if fd >= 0 {
			_ = unix.Close(fd) // nothing was written through it
		}
	}
	return nil, err
}

// Control implements syscall.RawConn.
func (d *descriptor) Control(f func(fd uintptr)) error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.closed {
		return net.ErrClosed
	}
	f(uintptr(d.fd))
	return nil
}

// do calls f with the descriptor and returns its result, or true and an error if the descriptor is closed.
func (d *descriptor) do(f func(fd uintptr) bool) (done bool, err error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.closed {
		return true, net.ErrClosed
	}
	return f(uintptr(d.fd)), nil
}

// Read implements syscall.RawConn. At a server, it polls as long as the link says so, before it waits.
func (d *descriptor) Read(f func(fd uintptr) bool) error {
	for {
		if d.late() {
			return os.ErrDeadlineExceeded
		}
		if done, err := d.do(f); done {
			return err
		}
		if d.nowait {
			return errNothing
		}
		if d.link.polls() && d.link.van.polling.CompareAndSwap(false, true) {
			done, err := d.poll(f)
			if d.link.van.polling.Store(false); done {
				return err
			}
			continue
		}
		d.report(true)
		d.f, d.failed = f, nil
		err := d.raw.Read(d.attempt)
		if err == nil {
			err = d.failed
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || !d.awake() {
			return err
		}
	}
}

// await waits until the goroutine that reads the link must read: bytes have arrived that no call of Van.Poll
// has read, or reading fails. Meanwhile others may read. The caller holds reading.
func (d *descriptor) await(r *reader) {
	for !d.left && r.in.Buffered() == 0 && !d.readable() {
		d.report(true)
		d.reading.Unlock()
		err := d.raw.Read(d.ready)
		d.reading.Lock()
		if err != nil && !(errors.Is(err, os.ErrDeadlineExceeded) && d.awake()) {
			break
		}
	}
	d.left = false
}

// readable reports whether a read would not wait.
func (d *descriptor) readable() (yes bool) {
	err := d.Control(func(fd uintptr) { yes = hasEvent(fd, unix.POLLIN) })
	return yes || err != nil
}

// poll calls f until it returns true, or until the link says that there has been enough polling, or the
// deadline has passed. Only the goroutine that reads the link calls it, at a server.
func (d *descriptor) poll(f func(fd uintptr) bool) (done bool, err error) {
	d.report(false)
	for n := 1; ; n++ {
		if n%pollsPerGosched == 0 {
			runtime.Gosched()
		}
		d.link.van.yielder.Yield() // a poll enters the kernel anyway
		if done, err := d.do(f); done {
			return true, err
		}
		if n%pollsPerCheck == 0 && (!d.link.polls() || d.late()) {
			return false, nil
		}
	}
}

// Write implements syscall.RawConn. While it waits, it occupies a thread.
func (d *descriptor) Write(f func(fd uintptr) bool) error {
	for {
		if done, err := d.do(f); done {
			return err
		}
		if err := d.room(); err != nil {
			return err
		}
	}
}

// room waits until the socket has room or is shut down, which close does. It may return earlier.
func (d *descriptor) room() error {
	return d.Control(func(fd uintptr) {
		// The next write reports errors.
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, -1)
	})
}

// report sets whether what arrives from now on wakes the goroutine that reads. The caller holds reading.
func (d *descriptor) report(yes bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.closed || d.reports == yes {
		return
	}
	d.reports = yes
	d.event.Events = 0
	if yes {
		d.event.Events = unix.EPOLLIN
	}
	// The instance has the socket, so the system call cannot fail.
	_ = unix.EpollCtl(d.epoll, unix.EPOLL_CTL_MOD, d.fd, &d.event)
}

// wake makes the goroutine that reads the link read what has arrived. The caller holds reading.
func (d *descriptor) wake() {
	d.left = true
	d.deadlines.Lock()
	defer d.deadlines.Unlock()
	d.woken = true
	_ = d.file.SetReadDeadline(time.Unix(1, 0)) // if file is closed, the goroutine is awake
}

// awake reports whether a deadline has passed only to wake the goroutine that reads. It restores the
// deadline.
func (d *descriptor) awake() bool {
	d.deadlines.Lock()
	defer d.deadlines.Unlock()
	woken := d.woken
	d.woken = false
	return d.file.SetReadDeadline(d.deadline) == nil && woken
}

// late reports whether the deadline has passed.
func (d *descriptor) late() bool {
	d.deadlines.Lock()
	defer d.deadlines.Unlock()
	return !d.deadline.IsZero() && !time.Now().Before(d.deadline)
}

// setReadDeadline sets the time at which Read fails.
func (d *descriptor) setReadDeadline(t time.Time) error {
	d.deadlines.Lock()
	defer d.deadlines.Unlock()
	d.deadline = t
	if d.woken {
		return nil // awake sets it
	}
	return d.file.SetReadDeadline(t)
}

// close closes the connection. It wakes the goroutines that read and write.
func (d *descriptor) close() error {
	_ = d.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	d.mu.Lock()
	closed := d.closed
	d.closed = true
	if !closed {
		_ = unix.Close(d.fd) // closes the connection even if it reports an error
	}
	d.mu.Unlock() // before Close, which waits until the goroutine that reads does not use file
	if closed {
		return net.ErrClosed
	}
	return d.file.Close()
}

// polledConn is a Unix connection whose socket is a descriptor.
type polledConn struct {
	net.Conn // the connection whose descriptor was duplicated, which is closed; it still has the addresses
	sock     *socket
	d        *descriptor
}

// poll takes the connection of l out of the runtime's poller. If there is no free file descriptor for that,
// the connection stays there.
func (l *link) poll() {
	d, err := newDescriptor(l, l.sock.raw)
	if err != nil {
		return
	}
	l.sock.raw, l.polled = d, d
	conn := l.conn
	l.conn = &polledConn{conn, l.sock, d}
	conn.Close()
}

func (c *polledConn) Read(p []byte) (int, error) { return c.sock.Read(p) }

func (c *polledConn) Write(p []byte) (total int, err error) {
	for len(p) > 0 && err == nil {
		var n int
		if n, err = c.sock.TryWrite(p); n == 0 && err == nil {
			err = c.d.room()
		}
		total += n
		p = p[n:]
	}
	return total, err
}

func (c *polledConn) CloseWrite() (err error) {
	if closed := c.d.Control(func(fd uintptr) { err = unix.Shutdown(int(fd), unix.SHUT_WR) }); closed != nil {
		return closed
	}
	return err
}

func (c *polledConn) Close() error { return c.d.close() }

func (c *polledConn) SetReadDeadline(t time.Time) error { return c.d.setReadDeadline(t) }

// polls reports whether the goroutine that reads the link polls for the next message: at a server for some
// time after the last one.
func (l *link) polls() bool {
	return l.van.cfg.Role == Server && l.van.members.cores.Load() &&
		l.van.timing.now()-time.Duration(l.heard.Load()) < serverPoll
}

// waits reports whether a request has no answer.
func (l *link) waits() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.requests > 0
}

// Poll polls for responses at a worker until over is set, but only for a short time, and not if another
// goroutine polls. It handles the responses in the goroutine of the caller, because waking another one takes
// longer than a short request. The caller is about to wait until over is set.
func (v *Van) Poll(over *atomic.Bool) {
	if v.cfg.Role != Worker || !v.members.cores.Load() || !v.polling.CompareAndSwap(false, true) {
		return
	}
	defer v.polling.Store(false)
	links := *v.links.Load()
	polled, some := false, false
	until := v.timing.now() + workerPoll
	for n := 1; !over.Load(); n++ {
		if (some || n%pollsPerCheck == 0) && v.timing.now() >= until {
			break
		}
		if n%pollsPerGosched == 0 {
			runtime.Gosched()
		}
		some = false
		for id, l := range links {
			if id == l.peer && l.polled != nil && l.waits() {
				some = l.takeResponse() || some
				polled = true
			}
		}
		if !polled {
			return
		}
		if !some {
			v.yielder.Yield() // a poll enters the kernel anyway
		}
	}
	for id, l := range links {
		if id == l.peer && l.polled != nil {
			l.endPoll()
		}
	}
}

// takeResponse handles a response that has arrived, and reports whether there was one. It handles only what
// has arrived as a whole and isPlain accepts, so that the caller does not wait and runs no function of the
// program. The goroutine that reads the link does the rest.
func (l *link) takeResponse() bool {
	d := l.polled
	if !d.reading.TryLock() {
		return false
	}
	defer d.reading.Unlock()
	r := l.reader
	if r == nil || d.left {
		return false
	}
	d.report(false)
	d.nowait = true
	plain, err := r.hasWhole(isPlain)
	d.nowait = false
	if plain {
		var m *Message
		if m, err = r.next(); err == nil {
			err = l.handle(m)
		}
	}
	switch {
	case err == errNothing:
		return false
	case err != nil:
		r.failed = err
		fallthrough
	case !plain:
		d.wake()
		return false
	}
	return true
}

// isPlain reports whether the handling of a message takes a short time and calls no function of the program:
// it is the response to a push or pull with little data, or says that messages have arrived or are no longer
// read.
func isPlain(m *Message) bool {
	h := m.Header
	if c := h.Control; c != nil {
		return c.Command == pspb.Command_ACK || c.Command == pspb.Command_RELEASE
	}
	data := uint64(0)
	for _, f := range h.Frames {
		data += min(f.Bytes, wholeBytes) // a frame in shared memory counts too: the handler copies it
	}
	return !h.Request && (h.Push || h.Pull) && h.Replica == nil && data < wholeBytes
}

// endPoll makes the goroutine that reads the link read what arrives from now on, and what has arrived.
func (l *link) endPoll() {
	d := l.polled
	if !d.reading.TryLock() {
		return // the goroutine that reads the link has it
	}
	defer d.reading.Unlock()
	if l.reader == nil || d.left {
		return
	}
	// The instance may not report again what had arrived before it was asked to.
	if d.report(true); l.reader.in.Buffered() > 0 || d.readable() {
		d.wake()
	}
}

// HasCore reports whether every server and worker on this host, and so this node, has a core.
func (v *Van) HasCore() bool { return v.members.cores.Load() }
