package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"
)

// keepAlive finds a vanished peer in about 15 s on a connection on which nothing is said.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 5}

func listen(addr string) (net.Listener, error) {
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
	return lc.Listen(context.Background(), "tcp", addr)
}

// backoff gives the waits between attempts to dial: 10 ms, doubling up to 1 s.
type backoff time.Duration

func (b *backoff) next() time.Duration {
	*b = min(max(2**b, backoff(10*time.Millisecond)), backoff(time.Second))
	return time.Duration(*b)
}

// mayRecover reports whether dialing or greeting a peer failed in a way that may pass: it is not up yet, or going
// down, or the network or its names are not there yet.
func mayRecover(err error) bool {
	if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
		return true
	}
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return true
	}
	for _, passing := range []error{
		syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EPIPE, syscall.EHOSTUNREACH, syscall.ENETUNREACH,
		syscall.ETIMEDOUT, io.EOF, io.ErrUnexpectedEOF,
	} {
		if errors.Is(err, passing) {
			return true
		}
	}
	return false
}

// pause waits for d, or until ctx ends or done is closed.
func pause(ctx context.Context, d time.Duration, done <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	case <-done:
	}
}

// dialTimeout bounds one attempt to dial a peer and to get its greeting.
const dialTimeout = 5 * time.Second

// versionError says that a peer speaks the right protocol in a version that this process does not.
type versionError struct{ got, want uint32 }

func (e *versionError) Error() string {
	return fmt.Sprintf("peer speaks version %d of the protocol, want %d", e.got, e.want)
}

// dialGreet connects to addr and exchanges greetings. The connection has no deadline afterwards.
func dialGreet(ctx context.Context, addr, magic string, version uint32) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	d := net.Dialer{KeepAliveConfig: keepAlive}
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	if err := greet(ctx, conn, magic, version); err != nil {
		conn.Close()
		return nil, fmt.Errorf("greeting %s: %w", addr, err)
	}
	return conn, nil
}

func greet(ctx context.Context, conn net.Conn, magic string, version uint32) error {
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := conn.Write(greeting(magic, version)); err != nil {
		return err
	}
	got, err := readGreeting(conn, magic)
	if err != nil {
		return err
	}
	if got != version {
		return &versionError{got, version}
	}
	if !stop() {
		return ctx.Err()
	}
	return nil
}
