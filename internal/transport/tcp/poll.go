package tcp

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// poller notifies the goroutine that polls the Control lane if data arrives while that goroutine is parked.
// An inner epoll instance contains the sockets, and an outer epoll instance contains the inner one. Another
// goroutine waits for the outer instance in the runtime's poller. While the polling goroutine is not parked,
// the outer instance ignores the inner one, so that arriving data wakes no thread.
type poller struct {
	inner  int      // descriptor of the epoll instance that contains the sockets
	outer  int      // descriptor of the epoll instance that contains inner
	file   *os.File // owns outer
	raw    syscall.RawConn
	notify atomic.Pointer[func()]
	parked atomic.Bool

	mu     sync.Mutex // held while inner is used
	closed bool
	conns  []*conn
	byFD   map[int32]*conn   // conns by their descriptors
	round  uint64            // number of calls of find
	found  []unix.EpollEvent // memory for find
	event  unix.EpollEvent   // a field, so that report does not allocate
	events [1]unix.EpollEvent
}

func newPoller() (*poller, error) {
	p := &poller{inner: -1, outer: -1, byFD: make(map[int32]*conn)}
	err := func() (err error) {
		if p.inner, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
			return os.NewSyscallError("epoll_create1", err)
		}
		if p.outer, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
			return os.NewSyscallError("epoll_create1", err)
		}
		if err := unix.EpollCtl(p.outer, unix.EPOLL_CTL_ADD, p.inner, &unix.EpollEvent{}); err != nil {
			return os.NewSyscallError("epoll_ctl", err)
		}
		// The descriptor must be non-blocking, because package os puts only such files into the runtime's
		// poller.
		return unix.SetNonblock(p.outer, true)
	}()
	if err != nil {
		for _, fd := range []int{p.inner, p.outer} {
			if fd >= 0 {
				err = errors.Join(err, unix.Close(fd))
			}
		}
		return nil, fmt.Errorf("tcp: poll: %w", err)
	}
	p.file = os.NewFile(uintptr(p.outer), "epoll")
	if p.raw, err = p.file.SyscallConn(); err != nil {
		return nil, errors.Join(fmt.Errorf("tcp: poll: %w", err), p.close())
	}
	return p, nil
}

// add adds the socket of c to the inner instance, so that data on it causes a notification.
func (p *poller) add(c *conn) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	fd, err := p.change(unix.EPOLL_CTL_ADD, c)
	if err != nil {
		return fmt.Errorf("tcp: poll: %w", err)
	}
	p.conns = append(p.conns, c)
	p.byFD[fd], c.fd, c.round = c, fd, p.round
	return nil
}

const (
	// findAbove is the number of channels above which one system call that finds those with data costs less
	// than a read from each.
	findAbove = 4
	// maxFound is the maximum number of channels that one call finds.
	maxFound = 256
)

// maybe reports whether data or an error may have arrived on c. It is called before each read from c, by the
// goroutine that polls. If there are many channels, a call for each of them in turn makes only one system
// call: the first one finds the channels with data, and it is repeated when c is asked for a second time.
func (p *poller) maybe(c *conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.conns) <= findAbove {
		return true
	}
	if c.round == p.round {
		p.find()
	}
	c.round = p.round
	ready := c.ready
	c.ready = false
	return ready
}

// find finds the channels with data. The caller holds mu.
func (p *poller) find() {
	p.round++
	if n := min(1+len(p.conns), maxFound); len(p.found) < n {
		p.found = make([]unix.EpollEvent, n)
	}
	n, err := unix.EpollWait(p.inner, p.found, 0)
	if err != nil || n == len(p.found) { // there may be more
		for _, c := range p.conns {
			c.ready = true
		}
		return
	}
	for _, e := range p.found[:n] {
		if c := p.byFD[e.Fd]; c != nil {
			c.ready = true
		}
	}
}

// remove removes the socket of c from the inner instance. There are two reasons to call it: the descriptor
// changes, or c has failed. A failed socket stays readable and would cause notifications forever.
func (p *poller) remove(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	// This fails only on a closed socket. The kernel has already removed it, unless a child process still has
	// the descriptor; then find ignores its events.
	_, _ = p.change(unix.EPOLL_CTL_DEL, c)
	if p.byFD[c.fd] == c {
		delete(p.byFD, c.fd)
	}
	p.conns = slices.DeleteFunc(p.conns, func(other *conn) bool { return other == c })
}

// change calls epoll_ctl with the operation op for the socket of c, and returns its descriptor. The caller
// holds mu.
func (p *poller) change(op int, c *conn) (fd int32, err error) {
	if p.closed {
		return 0, net.ErrClosed
	}
	_, err = c.sock.now(func(of int, _ []byte) (int, error) {
		fd = int32(of)
		event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP, Fd: fd}
		return 0, os.NewSyscallError("epoll_ctl", unix.EpollCtl(p.inner, op, of, &event))
	}, nil)
	return fd, err
}

// notifyParked notifies the polling goroutine if it is parked.
func (p *poller) notifyParked() {
	if notify := p.notify.Load(); notify != nil && p.parked.CompareAndSwap(true, false) {
		(*notify)()
	}
}

// watch notifies the polling goroutine when data arrives while it is parked. It runs until the poller is
// closed.
func (p *poller) watch() {
	var events [1]unix.EpollEvent
	for p.raw.Read(func(outer uintptr) bool { return arrived(int(outer), events[:]) }) == nil {
		p.notifyParked()
	}
}

// arrived reports whether the epoll instance has an event. If the instance is broken, arrived returns true
// too.
func arrived(epoll int, events []unix.EpollEvent) bool {
	n, err := unix.EpollWait(epoll, events, 0)
	return n > 0 || err != nil && err != unix.EINTR
}

// report sets which events of the inner instance the outer instance reports. The caller holds mu, and
// the poller is not closed, so the system call cannot fail.
func (p *poller) report(events uint32) {
	p.event.Events = events
	_ = unix.EpollCtl(p.outer, unix.EPOLL_CTL_MOD, p.inner, &p.event)
}

// park implements Mesh.Park.
func (p *poller) park() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || arrived(p.inner, p.events[:]) || slices.ContainsFunc(p.conns, (*conn).hasUnread) {
		return false
	}
	p.parked.Store(true)
	p.report(unix.EPOLLIN | unix.EPOLLONESHOT) // also notifies of data that arrived after the check
	if slices.ContainsFunc(p.conns, (*conn).hasUnread) {
		p.parked.Store(false) // abort may have set cause, without a notification, before parked was set
		return false
	}
	return true
}

// unpark implements Mesh.Unpark.
func (p *poller) unpark() {
	p.parked.Store(false)
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.report(0)
	}
}

func (p *poller) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	return errors.Join(p.file.Close(), unix.Close(p.inner))
}
