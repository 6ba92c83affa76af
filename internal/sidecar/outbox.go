package sidecar

import (
	"errors"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// maxUnsentBytes is the number of queued bytes above which Room blocks.
const maxUnsentBytes = 1 << 20

// outbox sends frames over a connection. Only its methods Room and Run block. If the socket has no room for a
// frame, the outbox queues the frame, and Run sends it later. The outbox does not limit the length of the
// queue. Its user must do that, by a limit on unanswered requests or by calling Room. The methods are safe
// for concurrent use.
type outbox struct {
	fd int
	// wake gets an element when a frame is added to the queue. This makes Run send the frame.
	wake chan struct{}

	mu     sync.Mutex
	less   sync.Cond // notified when the queue has become shorter or the outbox was closed
	queue  []packet
	bytes  int // number of bytes in queue
	closed bool
}

// packet holds the bytes of one or more frames that have not been sent yet. A part of the first frame may
// have been sent. If fd is not -1, it is a descriptor that is sent together with the first byte.
type packet struct {
	data []byte
	fd   int
}

// newOutbox returns an outbox that sends over the socket fd. The outbox never closes fd.
func newOutbox(fd int) *outbox {
	o := &outbox{fd: fd, wake: make(chan struct{}, 1)}
	o.less.L = &o.mu
	return o
}

// Send sends a message. If fd is not -1, Send also sends the descriptor fd, and then closes it.
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

// Put sends data, which consists of encoded frames, and takes ownership of data. If fd is not -1, Put also
// sends the descriptor fd, and then closes it.
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

// write sends as many bytes of p as the socket has room for. It reports whether p is finished: all bytes of p
// have been sent, or the socket is broken. The caller holds mu.
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
		// The reader of the connection will get the same error, so it is not reported here.
		case err != nil:
			discard(p.fd)
			p.fd = -1 // p may be in the queue, and shut would close its descriptor again
			o.shut()
			return true
		}
		discard(p.fd)
		p.data, p.fd = p.data[n:], -1
	}
	return true
}

// Run sends the frames in the queue until Close is called.
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

// flush sends frames from the queue until the queue is empty or the socket is full. It reports whether the
// queue still contains frames.
func (o *outbox) flush() (left bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(o.queue) > 0 {
		p := &o.queue[0]
		before := len(p.data)
		done := o.write(p)
		if o.closed {
			return false // shut has emptied the queue meanwhile
		}
		o.bytes -= before - len(p.data)
		o.less.Broadcast()
		if !done {
			return true
		}
		*p = packet{}
		o.queue = o.queue[1:]
		if len(o.queue) == 0 {
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
	close(o.wake) // safe, because Put sends to wake only while closed is false
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
