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

	"github.com/gohvd/gohvd/ops"
)

const (
	// serverPoll is how long a server polls for a message after the last one, and workerPoll how long a
	// worker polls for a response after a call of Van.Poll.
	serverPoll = 100 * time.Microsecond
	workerPoll = time.Millisecond
	// pollsPerCheck is the number of polls between two checks whether to go on, and pollsPerGosched that
	// between two yields to other goroutines.
	pollsPerCheck   = 8
	pollsPerGosched = 256
)

// descriptor is a Unix socket that the goroutine which reads it can poll. The socket is not in the runtime's
// poller, in which data that arrives wakes a thread even if a goroutine polls for it. Instead, the runtime's
// poller has an epoll instance, which has the socket and reports what arrives only while the goroutine waits.
// descriptor implements syscall.RawConn.
type descriptor struct {
	link *link
	file *os.File // the epoll instance
	raw  syscall.RawConn
	// waits says that the goroutine that reads waits or is about to. until is the time until which it polls
	// at a worker, since the van's start.
	waits atomic.Bool
	until atomic.Int64

	mu        sync.RWMutex // held for reading while fd or epoll is used
	fd, epoll int
	closed    bool

	deadlines sync.Mutex // guards deadline and woken
	deadline  time.Time
	woken     bool // the deadline of file has passed only to wake the goroutine that reads

	// The following are used only by the goroutine that reads. f is the argument of Read, and failed the
	// error of the last call of attempt.
	reports bool // the epoll instance reports what arrives
	event   unix.EpollEvent
	f       func(fd uintptr) bool
	failed  error
	attempt func(uintptr) bool
}

// newDescriptor returns a duplicate of the descriptor of the connection of l.
func newDescriptor(l *link, conn syscall.RawConn) (*descriptor, error) {
	d := &descriptor{link: l, fd: -1, epoll: -1}
	d.attempt = func(uintptr) (done bool) {
		done, d.failed = d.do(d.f)
		return done
	}
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

// Read implements syscall.RawConn. It polls as long as the link says so, before it waits.
func (d *descriptor) Read(f func(fd uintptr) bool) error {
	for first := true; ; first = false {
		if d.late() {
			return os.ErrDeadlineExceeded
		}
		if done, err := d.do(f); done {
			return err
		}
		if first && !d.reports && d.link.van.cfg.Role == Worker {
			runtime.Gosched() // the goroutine that has waited for the response goes on first
		}
		d.waits.Store(true) // before the link is asked, so that no call of pollFor is lost
		if d.link.polls() && d.link.van.polling.CompareAndSwap(false, true) {
			d.waits.Store(false)
			done, err := d.poll(f)
			if d.link.van.polling.Store(false); done {
				return err
			}
			continue
		}
		d.report(true)
		d.f, d.failed = f, nil
		err := d.raw.Read(d.attempt)
		d.waits.Store(false)
		if err == nil {
			err = d.failed
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || !d.awake() {
			return err
		}
	}
}

// poll calls f until it returns true, or until the link says that there has been enough polling, or the
// deadline has passed.
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

// report sets whether what arrives from now on wakes the goroutine that reads.
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

// pollFor makes the goroutine that reads poll for a time. It does not wake it if it would not poll, because
// no request waits for an answer or another goroutine polls.
func (d *descriptor) pollFor(t time.Duration) {
	d.until.Store(int64(d.link.van.now() + t))
	if d.link.polls() && !d.link.van.polling.Load() && d.waits.CompareAndSwap(true, false) {
		d.deadlines.Lock()
		defer d.deadlines.Unlock()
		d.woken = true
		_ = d.file.SetReadDeadline(time.Unix(1, 0)) // if file is closed, the goroutine is awake
	}
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
// time after the last one, at a worker if Poll was called and a request has no answer.
func (l *link) polls() bool {
	if !l.van.polls.Load() {
		return false
	}
	if l.van.cfg.Role == Server {
		return l.van.now()-time.Duration(l.heard.Load()) < serverPoll
	}
	if int64(l.van.now()) >= l.polled.until.Load() {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.requests > 0
}

// Poll makes a worker poll for responses for a short time, so that the caller can soon go on. The caller is
// about to wait for one.
func (v *Van) Poll() {
	if v.cfg.Role != Worker || !v.polls.Load() {
		return
	}
	for id, l := range *v.links.Load() {
		if id == l.peer && l.polled != nil {
			l.polled.pollFor(workerPoll)
		}
	}
}

// HasCore reports whether every server and worker on this host, and so this node, has a core.
func (v *Van) HasCore() bool { return v.polls.Load() }

// mayPoll reports whether every server and worker on this host has a core, so that one that polls does not
// delay another one. The caller holds mu.
func (v *Van) mayPoll() bool {
	n := 0
	for _, id := range v.first {
		if id != SchedulerID && v.nodes[id].HostId == v.cfg.HostID {
			n++
		}
	}
	return !ops.Oversubscribed(n, runtime.NumCPU())
}
