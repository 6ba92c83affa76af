package client

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

// firstRequest is the lowest number of a request. Smaller numbers are those of operations.
const firstRequest = 1 << 63

// encode returns q as a frame.
func encode(q *sidecarpb.Request) ([]byte, error) {
	data := protowire.AppendVarint(nil, uint64(proto.Size(q)))
	data, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(data, q)
	if err == nil && len(data) > wire.MaxFrameBytes {
		err = fmt.Errorf("the request has %d bytes, want at most %d: it has too many tensors or dimensions", len(data),
			wire.MaxFrameBytes)
	}
	return data, err
}

// write writes frames. If fd is not -1, it is sent with the first byte.
func (c *Client) write(data []byte, fd int) error {
	var oob []byte
	if fd >= 0 {
		oob = unix.UnixRights(fd)
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	for len(data) > 0 {
		n, err := unix.SendmsgN(c.fd, data, oob, nil, unix.MSG_NOSIGNAL)
		if err == unix.EINTR {
			continue
		}
		switch err {
		case nil:
		case unix.EPIPE, unix.ECONNRESET: // the sidecar may have said why before it has closed the connection
			c.shut()
			return err
		default:
			c.fail(fmt.Sprintf("sending failed: %v", err))
			return err
		}
		data, oob = data[n:], nil
	}
	return nil
}

// send sends q and gives it a number. It owns fd, which is sent with it unless it is -1. If answer is not
// nil, it is called once with the answer: by read, or with an error when the connection has ended.
func (c *Client) send(q *sidecarpb.Request, fd int, answer func(*sidecarpb.Reply, error)) error {
	if fd >= 0 {
		defer unix.Close(fd)
	}
	if answer == nil {
		answer = func(*sidecarpb.Reply, error) {}
	}
	c.mu.Lock()
	if c.over != nil {
		c.mu.Unlock()
		return c.over
	}
	c.lastID++
	q.Id = c.lastID
	switch q.What.(type) {
	case *sidecarpb.Request_Prepare, *sidecarpb.Request_Free, *sidecarpb.Request_Bye: // they are not answered
	default:
		c.requests[q.Id] = answer
	}
	c.mu.Unlock()
	data, err := encode(q)
	if err != nil {
		c.mu.Lock()
		delete(c.requests, q.Id)
		c.mu.Unlock()
		return err
	}
	// If the write fails, the connection ends, and read answers the request.
	_ = c.write(data, fd)
	return nil
}

// request sends q and waits for the answer. If ctx ends before, the sidecar still executes the request.
func (c *Client) request(ctx context.Context, q *sidecarpb.Request, fd int) (*sidecarpb.Reply, error) {
	type answer struct {
		reply *sidecarpb.Reply
		err   error
	}
	answers := make(chan answer, 1)
	if err := c.send(q, fd, func(r *sidecarpb.Reply, err error) { answers <- answer{r, err} }); err != nil {
		return nil, err
	}
	select {
	case a := <-answers:
		return a.reply, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// failTime is how long a process that has failed waits for the answer of the sidecar, which needs at most 5 s
// to leave a job.
const failTime = 10 * time.Second

// last calls f for the operation op, by which a process that has failed leaves its job. The process may be at
// its end, and the sidecar may be stopped. So last ends the connection after failTime, and with it all waits.
func (c *Client) last(ctx context.Context, op string, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, failTime)
	defer cancel()
	stop := c.failAfter(ctx, fmt.Sprintf("this process has failed and waited %v for an answer", failTime))
	err := f(ctx)
	stop()
	if err != nil && ctx.Err() == context.DeadlineExceeded {
		err = &DeadError{fmt.Sprintf("%s: %s has not answered for %v", op, c.name, failTime)}
	}
	return err
}

// failAfter ends the connection if ctx ends before the caller calls the function that it returns. That also
// wakes threads that wait for room in the socket.
func (c *Client) failAfter(ctx context.Context, reason string) (stop func()) {
	stopped := context.AfterFunc(ctx, func() { c.fail(reason) })
	return func() {
		if !stopped() {
			c.fail(reason) // so that the connection is ending when the caller returns
		}
	}
}

// ask sends q and waits for the answer without a limit.
func (c *Client) ask(q *sidecarpb.Request, fd int) (*sidecarpb.Reply, error) {
	return c.request(context.Background(), q, fd)
}

// later is a queue of requests that a goroutine sends.
type later struct {
	wake   chan struct{}
	mu     sync.Mutex
	queue  []*sidecarpb.Request
	closed bool
}

func (l *later) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed, l.queue = true, nil
	close(l.wake)
}

// sendLater sends q without waiting for room in the socket. The answer is ignored.
func (c *Client) sendLater(q *sidecarpb.Request) {
	l := &c.later
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.queue = append(l.queue, q)
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// sendQueued sends the requests of sendLater.
func (c *Client) sendQueued() {
	for range c.later.wake {
		c.later.mu.Lock()
		queue := c.later.queue
		c.later.queue = nil
		c.later.mu.Unlock()
		for _, q := range queue {
			_ = c.send(q, -1, nil) // an error means that the connection has ended
		}
	}
}
