package wire

import (
	"errors"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// Outbox sends over a connection. Nobody waits for it: what the socket has no room for is queued, and sent by Run.
type Outbox struct {
	fd int
	// wake tells Run of a queue.
	wake chan struct{}

	mu     sync.Mutex
	queue  []packet
	closed bool
}

// packet is some frames, or the rest of them. With its first byte travels fd, if that is not -1.
type packet struct {
	data []byte
	fd   int
}

// NewOutbox sends over a socket, which stays the caller's.
func NewOutbox(fd int) *Outbox { return &Outbox{fd: fd, wake: make(chan struct{}, 1)} }

// Send sends a message, with a descriptor unless that is -1, which is closed.
func (o *Outbox) Send(m proto.Message, fd int) error {
	data, err := AppendFrame(nil, m)
	if err != nil {
		closeAll(fd)
		return err
	}
	o.Put(data, fd)
	return nil
}

// Put sends frames, and with their first byte a descriptor, as Send does. data is the Outbox's.
func (o *Outbox) Put(data []byte, fd int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		closeAll(fd)
		return
	}
	p := packet{data, fd}
	if len(o.queue) == 0 && o.write(&p) {
		return
	}
	o.queue = append(o.queue, p)
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// write sends as much of p as there is room for, and reports whether p is done with. The caller holds mu.
func (o *Outbox) write(p *packet) bool {
	for len(p.data) > 0 {
		var oob []byte
		if p.fd >= 0 {
			oob = unix.UnixRights(p.fd)
		}
		n, err := unix.SendmsgN(o.fd, p.data, oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return false
		case err != nil: // the reader of the connection hears why
			o.shut()
			closeAll(p.fd)
			p.fd = -1
			return true
		}
		closeAll(p.fd)
		p.data, p.fd = p.data[n:], -1
	}
	return true
}

// Run sends what is queued, until Close.
func (o *Outbox) Run() {
	for range o.wake {
		for o.flush() {
			// Ends also when the socket is shut down.
			fds := []unix.PollFd{{Fd: int32(o.fd), Events: unix.POLLOUT}}
			if _, err := unix.Poll(fds, -1); err != nil && !errors.Is(err, unix.EINTR) {
				o.Close()
			}
		}
	}
}

// flush reports whether something is left.
func (o *Outbox) flush() (left bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(o.queue) > 0 {
		p := &o.queue[0]
		done := o.write(p)
		if o.closed {
			return false // shut has emptied the queue
		}
		if !done {
			return true
		}
		*p = packet{}
		if o.queue = o.queue[1:]; len(o.queue) == 0 {
			o.queue = nil
		}
	}
	return false
}

// shut drops what is queued. The caller holds mu.
func (o *Outbox) shut() {
	if o.closed {
		return
	}
	o.closed = true
	for i := range o.queue {
		closeAll(o.queue[i].fd)
		o.queue[i].fd = -1 // write may have this one in its hands
	}
	o.queue = nil
	close(o.wake) // Put wakes while it is open
}

// Close ends everything that is sent. It may be called more than once.
func (o *Outbox) Close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.shut()
}

func closeAll(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd) // of a descriptor that was sent, or cannot be
	}
}
