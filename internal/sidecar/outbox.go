package sidecar

import (
	"errors"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// maxUnsentBytes is how much may wait for the other end to read before Room waits.
const maxUnsentBytes = 1 << 20

// doorbell is a frame of length 0.
var doorbell = []byte{0}

// outbox sends over a connection. Nobody waits for it but who calls Room: what the socket has no room for is queued, and sent by
// Run. The queue is bounded if its user bounds what is unanswered, or calls Room. Its methods are safe for concurrent use.
type outbox struct {
	fd int
	// wake tells Run of a queue.
	wake chan struct{}

	mu     sync.Mutex
	less   sync.Cond // the queue has become shorter, or the outbox closed
	queue  []packet
	bytes  int // in queue
	closed bool
}

// packet is some frames, or the rest of them. With its first byte travels fd, if that is not -1.
type packet struct {
	data []byte
	fd   int
}

// newOutbox sends over a socket, which stays the caller's.
func newOutbox(fd int) *outbox {
	o := &outbox{fd: fd, wake: make(chan struct{}, 1)}
	o.less.L = &o.mu
	return o
}

// Send sends a message, with a descriptor unless that is -1, which is closed.
func (o *outbox) Send(m proto.Message, fd int) error {
	data := protowire.AppendVarint(nil, uint64(proto.Size(m)))
	data, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(data, m)
	if err != nil {
		discard(fd)
		return err
	}
	o.Put(data, fd)
	return nil
}

// Put sends frames, and with their first byte a descriptor, as Send does. data is the outbox's.
func (o *outbox) Put(data []byte, fd int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		discard(fd)
		return
	}
	p := packet{data, fd}
	if len(o.queue) == 0 && o.write(&p) {
		return
	}
	o.queue = append(o.queue, p)
	o.bytes += len(p.data)
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// Bell sends a doorbell, unless the other end has something to read anyhow.
func (o *outbox) Bell() {
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
			discard(p.fd)
			p.fd = -1 // p may be in the queue, whose descriptors shut closes
			o.shut()
			return true
		}
		discard(p.fd)
		p.data, p.fd = p.data[n:], -1
	}
	return true
}

// Run sends what is queued, until Close.
func (o *outbox) Run() {
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

// Unsent is how many bytes wait for the other end to read.
func (o *outbox) Unsent() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.bytes
}

// Room waits until the other end has read so much that no more than maxUnsentBytes wait, or nothing more is sent.
func (o *outbox) Room() {
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
		discard(o.queue[i].fd)
	}
	o.queue, o.bytes = nil, 0
	o.less.Broadcast()
	close(o.wake) // Put wakes while it is open
}

// Close ends everything that is sent. It may be called more than once.
func (o *outbox) Close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.shut()
}

// discard closes a descriptor, unless it is -1.
func discard(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd) // of a descriptor that was sent, or cannot be
	}
}
