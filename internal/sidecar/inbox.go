package sidecar

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

const (
	// readBytes is the minimum free space in the buffer before a read from the socket. When all bytes in the
	// buffer have been used, the inbox frees the buffer if it is larger than keptBytes.
	readBytes = 16 << 10
	keptBytes = 1 << 20
)

// errEnd means that the connection has ended without a Bye from the client.
var errEnd = errors.New("the client closed the connection without Bye")

// inbox reads from a connection, and keeps bytes and descriptors until they are used. Only one goroutine may
// use it at a time.
type inbox struct {
	FD  int // the socket, which the caller owns
	buf []byte
	at  int // index of the first unused byte
	fds []int
	oob [128]byte
}

// Fill reads from the socket once. If wait is set, it blocks until something arrives. It reports whether
// something has arrived. If the connection has ended, Fill returns errEnd.
func (i *inbox) Fill(wait bool) (bool, error) {
	switch {
	case i.at == len(i.buf):
		i.buf, i.at = i.buf[:0], 0
		if cap(i.buf) > keptBytes {
			i.buf = nil
		}
	case len(i.buf) == cap(i.buf) && i.at > 0:
		i.buf, i.at = i.buf[:copy(i.buf, i.buf[i.at:])], 0
	}
	if len(i.buf) == cap(i.buf) {
		// The buffer grows when bytes arrive. It does not grow when a frame announces its length, because
		// that length may be wrong.
		i.buf = slices.Grow(i.buf, readBytes)
	}
	flags := unix.MSG_CMSG_CLOEXEC
	if !wait {
		flags |= unix.MSG_DONTWAIT
	}
	for {
		n, oobn, got, _, err := unix.Recvmsg(i.FD, i.buf[len(i.buf):cap(i.buf)], i.oob[:], flags)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return false, nil
		case err != nil:
			return false, fmt.Errorf("read from the client: %w", err)
		case n == 0:
			return false, errEnd
		}
		i.buf = i.buf[:len(i.buf)+n]
		if oobn > 0 || got&unix.MSG_CTRUNC != 0 {
			if err := i.take(i.oob[:oobn], got); err != nil {
				return false, err
			}
		}
		return true, nil
	}
}

// Wait waits for at most ms milliseconds until something can be read from the socket, and reports whether it
// can.
func (i *inbox) Wait(ms int) bool {
	fds := [1]unix.PollFd{{Fd: int32(i.FD), Events: unix.POLLIN}}
	n, err := unix.Poll(fds[:], ms)
	// If the socket is broken, Wait returns true, and Fill then returns the error.
	return n > 0 || err != nil && err != unix.EINTR
}

// take stores the descriptor that has arrived with a read, if there is one. A descriptor arrives with the
// first byte of its frame, and the read that gets the rest of the frame may get the descriptor of the next
// frame. If more than these two are not used yet, take returns an error.
func (i *inbox) take(oob []byte, flags int) error {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return fmt.Errorf("%w: cannot decode the descriptors of a frame: %w", wire.ErrFrame, err)
	}
	for _, m := range messages {
		if m.Header.Level != unix.SOL_SOCKET || m.Header.Type != unix.SCM_RIGHTS {
			continue
		}
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return fmt.Errorf("%w: cannot decode the descriptors of a frame: %w", wire.ErrFrame, err)
		}
		i.fds = append(i.fds, fds...)
	}
	if len(i.fds) > 2 || flags&unix.MSG_CTRUNC != 0 {
		return fmt.Errorf("%w: got at least %d descriptors with two frames, want at most 2", wire.ErrFrame,
			len(i.fds))
	}
	return nil
}

// Next returns the body of the next complete frame. ok is false if there is no complete frame. The body is
// valid until the next call of Fill.
func (i *inbox) Next() (body []byte, ok bool, err error) {
	body, n, err := wire.CutFrame(i.buf[i.at:])
	if n == 0 || err != nil {
		return nil, false, err
	}
	i.at += n
	return body, true, nil
}

// Descriptor returns the descriptor that has arrived with the current frame, or an error if no descriptor has
// arrived. The caller must close the descriptor.
func (i *inbox) Descriptor() (int, error) {
	if len(i.fds) == 0 {
		return -1, errors.New("the request must come with a file descriptor, but it came with none")
	}
	fd := i.fds[0]
	i.fds = slices.Delete(i.fds, 0, 1)
	return fd, nil
}

// Spare returns an error if all bytes have been used but a descriptor is left that no frame needed.
func (i *inbox) Spare() error {
	if len(i.fds) > 0 && i.at == len(i.buf) {
		return fmt.Errorf("%w: got a descriptor with a frame that needs none", wire.ErrFrame)
	}
	return nil
}

// Close closes the descriptors that no frame has used.
func (i *inbox) Close() {
	for _, fd := range i.fds {
		_ = unix.Close(fd) // the descriptor was never used
	}
	i.fds = nil
}

// readRequest decodes the body of a frame. If the body is not a valid request, the error wraps errFrame.
func readRequest(body []byte) (*sidecarpb.Request, error) {
	q := new(sidecarpb.Request)
	if err := proto.Unmarshal(body, q); err != nil {
		return nil, fmt.Errorf("%w: %w", wire.ErrFrame, err)
	}
	if q.What == nil {
		return nil, fmt.Errorf("%w: request %d has a kind that this version does not know", wire.ErrFrame, q.Id)
	}
	if q.Id == 0 {
		return nil, fmt.Errorf("%w: got a request with number 0, want 1 or more", wire.ErrFrame)
	}
	return q, nil
}
