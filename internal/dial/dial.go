// Package dial opens connections. It dials with retries, accepts connections, and exchanges greetings. It
// also splits a stream of bytes into frames.
//
// If the job has a secret, the two ends first prove to each other that they know it (package secret, which
// may also encrypt the connection). Then the dialing end sends a greeting, and the accepting end answers with
// a greeting. A greeting consists of four magic bytes, which name the protocol, and the version of the
// protocol as four bytes, big-endian.
package dial

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/gohvd/gohvd/internal/secret"
)

// keepAlive makes the kernel detect within about 15 s that the peer of an idle connection is gone.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 5}

// UnixPrefix is the beginning of an address that is not host:port but the path of a Unix socket. A path that
// begins with @ is in the abstract namespace.
const UnixPrefix = "unix:"

// network returns the network of addr, and the address there.
func network(addr string) (network, address string) {
	if path, ok := strings.CutPrefix(addr, UnixPrefix); ok {
		return "unix", path
	}
	return "tcp", addr
}

// Listen listens on addr, which has the form host:port, or begins with UnixPrefix. Port 0 means any free
// port.
func Listen(addr string) (net.Listener, error) {
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
	network, address := network(addr)
	return lc.Listen(context.Background(), network, address)
}

// Backoff computes the pauses between attempts. The first pause is 10 ms. Each further pause is twice as long
// as the previous one, up to 1 s. The zero Backoff is ready to use.
type Backoff time.Duration

// Next returns the next pause.
func (b *Backoff) Next() time.Duration {
	*b = min(max(2**b, Backoff(10*time.Millisecond)), Backoff(time.Second))
	return time.Duration(*b)
}

// MayRecover reports whether another attempt to dial or greet a peer may succeed after the error err. This is
// so if the peer is perhaps starting or stopping, or if the network or name resolution is perhaps not
// available yet.
func MayRecover(err error) bool {
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

// IsExhausted reports whether err says that this process or its host has no free file descriptor. In this
// case it does not help to wait for a peer.
func IsExhausted(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

// LacksResource reports whether err says that this process or its host has no free file descriptor or memory,
// or that its user has too many descriptors in flight.
func LacksResource(err error) bool {
	return IsExhausted(err) || errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.ENOBUFS) ||
		errors.Is(err, syscall.ETOOMANYREFS)
}

// limitError is an error caused by the limit of file descriptors, together with that limit.
type limitError struct {
	err   error
	limit uint64
}

func (e *limitError) Error() string {
	return fmt.Sprintf("%v (this process may open at most %d file descriptors: raise RLIMIT_NOFILE, as with ulimit -n)", e.err, e.limit)
}

func (e *limitError) Unwrap() error { return e.err }

// ExplainLimit adds the limit of file descriptors to err if err says that this process has reached that
// limit. Otherwise it returns err unchanged.
func ExplainLimit(err error) error {
	var limit syscall.Rlimit
	if _, explained := errors.AsType[*limitError](err); explained || !errors.Is(err, syscall.EMFILE) ||
		syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil {
		return err
	}
	return &limitError{err, limit.Cur}
}

// Retry calls the function try until it succeeds, until it returns an error for which MayRecover is false, or
// until ctx ends. If ctx ends, the error wraps ctx.Err() and the error of the last attempt.
func Retry(ctx context.Context, try func() error) error {
	var (
		wait Backoff
		last error // error of the previous attempt
	)
	for {
		err := try()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil && last == nil:
			return ctx.Err()
		case ctx.Err() != nil:
			return fmt.Errorf("%w (last attempt: %w)", ctx.Err(), last)
		case !MayRecover(err):
			return err
		}
		// At the deadline of ctx, try may return a timeout before ctx.Err returns an error. Such a timeout
		// does not replace last, because last says more about the cause.
		ne, ok := errors.AsType[net.Error](err)
		deadline, bounded := ctx.Deadline()
		if last == nil || !ok || !ne.Timeout() || !bounded || time.Now().Before(deadline) {
			last = err
		}
		Pause(ctx, wait.Next(), nil)
	}
}

// Pause waits until the time d has passed, ctx ends, or the channel done is closed, whichever comes first.
func Pause(ctx context.Context, d time.Duration, done <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	case <-done:
	}
}

const greetingBytes = 8

// Greeting returns the bytes of a greeting with the given magic and version. magic must be four bytes long.
func Greeting(magic string, version uint32) []byte {
	return binary.BigEndian.AppendUint32([]byte(magic), version)
}

// ReadGreeting reads the peer's greeting and returns the version in it. If the peer uses another protocol,
// ReadGreeting returns an error.
func ReadGreeting(r io.Reader, magic string) (version uint32, err error) {
	var g [greetingBytes]byte
	if _, err := io.ReadFull(r, g[:]); err != nil {
		return 0, fmt.Errorf("reading the greeting: %w", err)
	}
	if err := secret.Foreign(g[:]); err != nil {
		return 0, err
	}
	if string(g[:4]) != magic {
		return 0, fmt.Errorf("the peer's greeting is %q, want %q", g[:4], magic)
	}
	return binary.BigEndian.Uint32(g[4:]), nil
}

// dialTimeout is the time limit for one attempt to connect to a peer and read its greeting.
const dialTimeout = 5 * time.Second

// VersionError reports that the peer and this process use different versions of the protocol.
type VersionError struct{ Got, Want uint32 }

func (e *VersionError) Error() string {
	return fmt.Sprintf("the peer speaks version %d of the protocol, want %d", e.Got, e.Want)
}

// Connect connects to addr, which has the form host:port, or begins with UnixPrefix. A TCP connection sends
// keep-alives.
func Connect(ctx context.Context, addr string) (net.Conn, error) {
	d := net.Dialer{KeepAliveConfig: keepAlive}
	network, address := network(addr)
	return d.DialContext(ctx, network, address)
}

// Greet connects to addr, proves the secret of the job and exchanges greetings. The connection that it
// returns has no deadline. It is encrypted if s.IsEncrypted().
func Greet(ctx context.Context, addr string, s secret.Secret, magic string,
	version uint32) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := Connect(ctx, addr)
	if err != nil {
		return nil, err
	}
	over, err := greet(ctx, conn, s, magic, version)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("handshake with %s: %w", addr, err)
	}
	return over, nil
}

func greet(ctx context.Context, conn net.Conn, s secret.Secret, magic string,
	version uint32) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	over, err := s.Dial(conn, magic)
	if err != nil {
		return nil, err
	}
	if _, err := over.Write(Greeting(magic, version)); err != nil {
		return nil, err
	}
	got, err := ReadGreeting(over, magic)
	if err != nil {
		return nil, err
	}
	if got != version {
		return nil, &VersionError{got, version}
	}
	if !stop() {
		return nil, ctx.Err()
	}
	return over, nil
}
