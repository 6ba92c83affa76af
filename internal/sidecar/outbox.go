package sidecar

import (
	"errors"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
)

// maxUnsentBytes is how much may wait for a client to read before its requests wait too.
const maxUnsentBytes = 1 << 20

// doorbell is a frame of length 0.
var doorbell = []byte{0}

// outbox sends to a client. Nobody waits for it but the reader of the connection, in room: what the socket has no room for is
// queued, and sent by run. Its size is bounded because the number of requests that are not answered is.
type outbox struct {
	fd int
	// wake tells run of a queue.
	wake chan struct{}

	mu     sync.Mutex
	less   sync.Cond // the queue has become shorter, or the outbox closed
	queue  []packet
	bytes  int // in queue
	closed bool
}

// packet is a frame, or the rest of one. With its first byte travels fd, if that is not -1.
type packet struct {
	data []byte
	fd   int
}

func newOutbox(fd int) *outbox {
	o := &outbox{fd: fd, wake: make(chan struct{}, 1)}
	o.less.L = &o.mu
	return o
}

// send sends a reply, with a descriptor unless that is -1, which is closed.
func (o *outbox) send(r *sidecarpb.Reply, fd int) error {
	data, err := appendFrame(nil, r)
	o.mu.Lock()
	defer o.mu.Unlock()
	if err != nil || o.closed {
		closeAll(fd)
		return err
	}
	o.put(packet{data, fd})
	return nil
}

// greet sends the greeting, for which a new socket has room.
func (o *outbox) greet() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.put(packet{dial.Greeting(magic, version), -1})
}

// put sends p, or queues what is left of it. The caller holds mu.
func (o *outbox) put(p packet) {
	if len(o.queue) == 0 && o.write(&p) {
		return
	}
	o.queue = append(o.queue, p)
	o.bytes += len(p.data)
	o.rouse()
}

func (o *outbox) rouse() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// bell sends a doorbell, unless the client has something to read anyhow.
func (o *outbox) bell() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed || len(o.queue) > 0 {
		return
	}
	// What was written before this call is seen by who reads what is unread now.
	if unread, err := unix.IoctlGetInt(o.fd, unix.TIOCOUTQ); err == nil && unread > 0 {
		return
	}
	// A full socket is something to read; of one that is broken its reader will hear.
	_, _ = unix.SendmsgN(o.fd, doorbell, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
}

// write sends as much of p as there is room for, and reports whether p is done with. The caller holds mu.
func (o *outbox) write(p *packet) bool {
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
			closeAll(p.fd)
			p.fd = -1 // p may be in the queue, whose descriptors shut closes
			o.shut()
			return true
		}
		closeAll(p.fd)
		p.data, p.fd = p.data[n:], -1
	}
	return true
}

// run sends what is queued, until close.
func (o *outbox) run() {
	for range o.wake {
		for o.flush() {
			// Ends also when the socket is shut down.
			fds := []unix.PollFd{{Fd: int32(o.fd), Events: unix.POLLOUT}}
			if _, err := unix.Poll(fds, -1); err != nil && !errors.Is(err, unix.EINTR) {
				o.close()
			}
		}
	}
}

// flush reports whether something is left.
func (o *outbox) flush() (left bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(o.queue) > 0 {
		p := &o.queue[0]
		before := len(p.data)
		done := o.write(p)
		if o.closed {
			return false // shut has emptied the queue
		}
		o.bytes -= before - len(p.data)
		o.less.Broadcast()
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

// full reports whether so much waits for the client that its requests have to wait too.
func (o *outbox) full() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.bytes > maxUnsentBytes
}

// room waits until the client has read so much that there is room for more, or will read no more.
func (o *outbox) room() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for o.bytes > maxUnsentBytes && !o.closed {
		o.less.Wait()
	}
}

// shut drops what is queued. The caller holds mu.
func (o *outbox) shut() {
	if o.closed {
		return
	}
	o.closed = true
	for i := range o.queue {
		closeAll(o.queue[i].fd)
	}
	o.queue, o.bytes = nil, 0
	o.less.Broadcast()
	close(o.wake) // rouse is called while it is open
}

// close ends everything that is sent. It may be called more than once.
func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.shut()
}

func closeAll(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd) // of a descriptor that was sent, or cannot be
	}
}
