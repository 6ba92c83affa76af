package client

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

// read handles what the sidecar sends, until the connection ends.
func (c *Client) read() {
	var r receiver
	err := r.receive(c)
	r.close()
	c.end(err)
}

// receiver has the bytes and the descriptors that have arrived and were not used yet.
type receiver struct {
	buf []byte
	fds []int
	oob [128]byte
}

const (
	readBytes = 16 << 10 // the least room in the buffer before a read
	keptBytes = 1 << 20  // a larger buffer is freed when it is empty
)

var errClosed = errors.New("it has closed the connection")

func (r *receiver) receive(c *Client) error {
	for {
		if len(r.buf) == 0 && cap(r.buf) > keptBytes {
			r.buf = nil
		}
		if cap(r.buf)-len(r.buf) < readBytes {
			r.buf = append(make([]byte, 0, 2*len(r.buf)+readBytes), r.buf...)
		}
		fds := []unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, -1); err != nil && err != unix.EINTR {
			return fmt.Errorf("receiving failed: %w", err)
		}
		n, oobn, _, _, err := unix.Recvmsg(c.fd, r.buf[len(r.buf):cap(r.buf)], r.oob[:],
			unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		switch {
		case err == unix.EAGAIN || err == unix.EINTR:
			continue
		case err == unix.ECONNRESET:
			return errClosed
		case err != nil:
			return fmt.Errorf("receiving failed: %w", err)
		case n == 0:
			return errClosed
		}
		r.buf = r.buf[:len(r.buf)+n]
		if err := r.take(r.oob[:oobn]); err != nil {
			return err
		}
		if err := r.frames(c); err != nil {
			return err
		}
	}
}

// take keeps the descriptors of a read.
func (r *receiver) take(oob []byte) error {
	if len(oob) == 0 {
		return nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return err
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return err
		}
		r.fds = append(r.fds, fds...)
	}
	return nil
}

// frames handles the complete frames.
func (r *receiver) frames(c *Client) error {
	used := 0
	for {
		body, n, err := wire.CutFrame(r.buf[used:])
		if err != nil {
			return err
		}
		if n == 0 {
			r.buf = r.buf[:copy(r.buf, r.buf[used:])]
			return nil
		}
		used += n
		if len(body) == 0 {
			continue
		}
		reply := new(sidecarpb.Reply)
		if err := proto.Unmarshal(body, reply); err != nil {
			return fmt.Errorf("%w: %w", wire.ErrFrame, err)
		}
		if err := r.handle(c, reply); err != nil {
			return err
		}
	}
}

// handle handles a reply.
func (r *receiver) handle(c *Client, reply *sidecarpb.Reply) error {
	switch id := reply.GetId(); {
	case id == 0:
		return r.news(c, reply)
	case id < firstRequest:
		return c.answered(reply)
	}
	c.mu.Lock()
	answer := c.requests[reply.GetId()]
	delete(c.requests, reply.GetId())
	c.mu.Unlock()
	if answer == nil {
		return fmt.Errorf("%w: got an answer to request %d, which is not pending", wire.ErrFrame, reply.GetId())
	}
	var err error
	if e := reply.GetError(); e != nil {
		err = wire.ErrorOf(e)
	}
	answer(reply, err)
	return nil
}

// news handles a reply without a request.
func (r *receiver) news(c *Client, reply *sidecarpb.Reply) error {
	if e := reply.GetError(); e != nil {
		return wire.ErrorOf(e) // the sidecar refuses this client
	}
	switch what := reply.GetWhat().(type) {
	case *sidecarpb.Reply_Arena:
		number := what.Arena.GetArena()
		if len(r.fds) == 0 {
			return fmt.Errorf("%w: got arena %d without a descriptor", wire.ErrFrame, number)
		}
		fd := r.fds[0]
		r.fds = r.fds[1:]
		s, err := shmem.Map(fd)
		if err = errors.Join(err, unix.Close(fd)); err != nil {
			return fmt.Errorf("arena %d of the sidecar: %w", number, err)
		}
		if c.maps[number] != nil {
			return errors.Join(fmt.Errorf("%w: got arena %d twice", wire.ErrFrame, number), s.Close())
		}
		c.maps[number] = s
	case *sidecarpb.Reply_DropArena:
		if s := c.maps[what.DropArena.GetArena()]; s != nil {
			delete(c.maps, what.DropArena.GetArena())
			return s.Close()
		}
	case *sidecarpb.Reply_Ended:
		var why error
		if e := what.Ended.GetError(); e != nil {
			why = wire.ErrorOf(e)
		}
		c.jobEnded(why)
	}
	return nil
}

// close closes the descriptors that were not used.
func (r *receiver) close() {
	for _, fd := range r.fds {
		_ = unix.Close(fd) // it was never used
	}
}
