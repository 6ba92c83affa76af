package sidecar

import (
	"errors"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// maxUnsentBytes bounds the queued bytes with which Room returns at once.
const maxUnsentBytes = 1 << 20

// doorbell is a frame of length 0.
var doorbell = []byte{0}

// outbox sends over a connection. Its methods do not block, except Room and Run. If the socket has no room
// for a frame, the frame is queued, and Run sends it. The user of the outbox has to bound the queue, by
// bounding the number of unanswered requests or by calling Room. The methods are safe for concurrent use.
type outbox struct {
	fd int
	// wake tells Run that something is in the queue.
	wake chan struct{}

	mu     sync.Mutex
	less   sync.Cond // notified when the queue has become shorter or the outbox was closed
	queue  []packet
	bytes  int // number of bytes in queue
	closed bool
}

// packet has one or more frames, or the rest of them that has not been sent. If fd is not -1, it is a
// descriptor that is sent with the first byte.
type packet struct {
	data []byte
	fd   int
}

// newOutbox returns an outbox that sends over the socket fd. The caller stays responsible for closing fd.
func newOutbox(fd int) *outbox {
	o := &outbox{fd: fd, wake: make(chan struct{}, 1)}
	o.less.L = &o.mu
	return o
}

// Send sends a message. It also sends the descriptor fd, unless that is -1, and closes fd.
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

// Put sends encoded frames. It also sends the descriptor fd, unless that is -1, and closes fd. It takes
// ownership of data.
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

// SendDoorbell sends a doorbell, unless the client has other bytes to read.
func (o *outbox) SendDoorbell() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed || len(o.queue) > 0 {
		return
	}
	// The client still has to read earlier bytes. When it reads them, it also sees what was written to the
	// ring before this call.
	if unread, err := unix.IoctlGetInt(o.fd, unix.TIOCOUTQ); err == nil && unread > 0 {
		return
	}
	// If the socket is full, the client has other bytes to read. If the socket is broken, the reader of the
	// connection gets the error.
	_, _ = unix.SendmsgN(o.fd, doorbell, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
}

// write sends as many bytes of p as the socket has room for. It returns true if nothing of p is left to send,
// or if the socket is broken. The caller holds mu.
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
		// The reader of the connection gets the reason.
		case err != nil:
			discard(p.fd)
			p.fd = -1 // p may be in the queue, and shut closes the descriptors there
			o.shut()
			return true
		}
		discard(p.fd)
		p.data, p.fd = p.data[n:], -1
	}
	return true
}

// Run sends the frames in the queue, until Close.
func (o *outbox) Run() {
	for range o.wake {
		for o.flush() {
			// The poll also returns if the socket is shut down.
			fds := []unix.PollFd{{Fd: int32(o.fd), Events: unix.POLLOUT}}
			if _, err := unix.Poll(fds, -1); err != nil && !errors.Is(err, unix.EINTR) {
				o.Close()
			}
		}
	}
}

// flush sends frames from the queue until the socket is full. It reports whether something is left in the
// queue.
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

// Unsent returns the number of bytes in the queue.
func (o *outbox) Unsent() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.bytes
}

// Room blocks until the queue has at most maxUnsentBytes bytes or the outbox is closed.
func (o *outbox) Room() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for o.bytes > maxUnsentBytes && !o.closed {
		o.less.Wait()
	}
}

// shut closes the outbox and drops the queue. The caller holds mu.
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
	close(o.wake) // Put sends to wake only while closed is false
}

// Close drops the queue and makes Run return. Later sends do nothing. It may be called more than once.
func (o *outbox) Close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.shut()
}

// discard closes a descriptor, unless it is -1.
func discard(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd) // the descriptor has been sent or is not needed any more
	}
}
