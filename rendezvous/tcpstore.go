package rendezvous

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

const (
	pingInterval = 5 * time.Second
	// serverSilence is how long a client trusts a server that answers no ping.
	serverSilence = 20 * time.Second
	// clientSilence is how long a server keeps a client that sends none. It is longer because a client may be
	// stopped for a while, by a debugger for instance.
	clientSilence = time.Minute
)

// TCPStore is a Store served by a TCPServer. All calls share one connection: requests are numbered, and a waiting call
// holds up no other.
//
// When the connection breaks, or the server is silent for 20 s, the TCPStore is dead: pending and later calls fail with
// the reason, and whether a pending change was made is unknown. It does not connect again by itself, because a server
// that was started again has forgotten everything.
type TCPStore struct {
	addr string
	conn net.Conn
	wg   sync.WaitGroup

	requests chan []byte   // frames for the writer
	cancels  chan struct{} // capacity 1: cancelled is not empty
	done     chan struct{} // closed when err is set

	mu        sync.Mutex
	lastID    uint64
	pending   map[uint64]chan<- reply
	cancelled []uint64 // ids for the writer to cancel
	err       error    // why the connection ended
}

var _ Store = (*TCPStore)(nil)

// DialTCP connects to the server at addr, host:port. A server that is not there yet, or cannot be reached, is tried
// again until ctx ends; the error then wraps ctx.Err() and the last reason. ctx is for dialing only.
func DialTCP(ctx context.Context, addr string) (*TCPStore, error) {
	return dialTCP(ctx, addr, pingInterval, serverSilence)
}

func dialTCP(ctx context.Context, addr string, ping, silence time.Duration) (*TCPStore, error) {
	var (
		wait backoff
		last error // why the attempt before failed
	)
	for {
		conn, err := dialGreet(ctx, addr, storeMagic, storeVersion)
		switch {
		case err == nil:
			s := &TCPStore{
				addr: addr, conn: conn,
				requests: make(chan []byte), cancels: make(chan struct{}, 1), done: make(chan struct{}),
				pending: make(map[uint64]chan<- reply),
			}
			s.wg.Go(func() { s.read(silence) })
			s.wg.Go(func() { s.write(ping) })
			return s, nil
		case ctx.Err() != nil && last == nil:
			return nil, fmt.Errorf("rendezvous: dial store %s: %w", addr, ctx.Err())
		case ctx.Err() != nil:
			return nil, fmt.Errorf("rendezvous: dial store %s: %w (last attempt: %w)", addr, ctx.Err(), last)
		case !mayRecover(err):
			return nil, fmt.Errorf("rendezvous: dial store %s: %w", addr, err)
		}
		last = err
		pause(ctx, wait.next(), nil)
	}
}

// Set implements Store.
func (s *TCPStore) Set(ctx context.Context, key string, value []byte) error {
	_, err := s.call(ctx, request{op: opSet, key: key, first: value})
	return err
}

// Get implements Store.
func (s *TCPStore) Get(ctx context.Context, key string) ([]byte, error) {
	r, err := s.call(ctx, request{op: opGet, key: key})
	return r.value, err
}

// Add implements Store.
func (s *TCPStore) Add(ctx context.Context, key string, delta int64) (int64, error) {
	r, err := s.call(ctx, request{op: opAdd, key: key, delta: delta})
	return r.number, err
}

// CompareAndSet implements Store.
func (s *TCPStore) CompareAndSet(ctx context.Context, key string, expected, desired []byte) ([]byte, bool, error) {
	r, err := s.call(ctx, request{op: opCompareAndSet, key: key, first: expected, second: desired})
	return r.value, r.ok, err
}

// Watch implements Store.
func (s *TCPStore) Watch(ctx context.Context, key string, prev []byte) ([]byte, error) {
	r, err := s.call(ctx, request{op: opWatch, key: key, first: prev})
	return r.value, err
}

// Delete implements Store.
func (s *TCPStore) Delete(ctx context.Context, key string) (bool, error) {
	r, err := s.call(ctx, request{op: opDelete, key: key})
	return r.ok, err
}

// Close implements Store. The contents stay with the server, and other clients do not notice.
func (s *TCPStore) Close() error {
	s.fail(ErrClosed)
	s.wg.Wait()
	return nil
}

func (s *TCPStore) call(ctx context.Context, q request) (reply, error) {
	r, err := s.roundTrip(ctx, q)
	if err != nil {
		return reply{}, storeError(q.op.String(), q.key, s.addr, err)
	}
	return r, nil
}

func (s *TCPStore) roundTrip(ctx context.Context, q request) (reply, error) {
	// The server checks these too, but by closing the connection if a frame is too long.
	for _, err := range []error{checkKey(q.key), checkValue(q.first), checkValue(q.second), ctx.Err()} {
		if err != nil {
			return reply{}, err
		}
	}
	answer := make(chan reply, 1)
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return reply{}, s.err
	}
	s.lastID++
	q.id = s.lastID
	s.pending[q.id] = answer
	s.mu.Unlock()

	select {
	case s.requests <- q.frame():
	case <-ctx.Done():
		s.forget(q.id, false)
		return reply{}, ctx.Err()
	case <-s.done:
		return reply{}, s.err
	}
	select {
	case r := <-answer:
		return r, r.err()
	case <-ctx.Done():
		s.forget(q.id, true)
		return reply{}, ctx.Err()
	case <-s.done:
		select {
		case r := <-answer: // it came before the end
			return r, r.err()
		default:
			return reply{}, s.err
		}
	}
}

// forget ends a call. If cancel is set the server is told, without waiting for it.
func (s *TCPStore) forget(id uint64, cancel bool) {
	s.mu.Lock()
	delete(s.pending, id)
	if cancel {
		s.cancelled = append(s.cancelled, id)
	}
	s.mu.Unlock()
	if cancel {
		select {
		case s.cancels <- struct{}{}:
		default:
		}
	}
}

// fail ends the connection for the reason err. The first reason counts.
func (s *TCPStore) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
		close(s.done)
		s.conn.Close()
	}
}

func (s *TCPStore) read(silence time.Duration) {
	in := bufio.NewReader(s.conn)
	for {
		s.conn.SetReadDeadline(time.Now().Add(silence))
		body, err := readFrame(in, maxReplyBytes)
		if err != nil {
			s.fail(lostServer(err, silence))
			return
		}
		r, err := decodeReply(body)
		if err != nil {
			s.fail(fmt.Errorf("from the server: %w", err))
			return
		}
		s.mu.Lock()
		answer := s.pending[r.id]
		delete(s.pending, r.id)
		s.mu.Unlock()
		if answer != nil {
			answer <- r // has room: one reply per id
		}
	}
}

func lostServer(err error, silence time.Duration) error {
	if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
		return fmt.Errorf("the server was silent for %v: %w", silence, err)
	}
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("the server closed the connection: %w", err)
	}
	return fmt.Errorf("connection to the server lost: %w", err)
}

func (s *TCPStore) write(ping time.Duration) {
	tick := time.NewTicker(ping)
	defer tick.Stop()
	for {
		var frames []byte
		select {
		case frames = <-s.requests:
		case <-s.cancels:
			s.mu.Lock()
			ids := s.cancelled
			s.cancelled = nil
			s.mu.Unlock()
			for _, id := range ids {
				frames = append(frames, (&request{op: opCancel, id: id}).frame()...)
			}
		case <-tick.C:
			frames = (&request{op: opPing}).frame()
		case <-s.done:
			return
		}
		s.conn.SetWriteDeadline(time.Now().Add(serverIOTimeout))
		if _, err := s.conn.Write(frames); err != nil {
			s.fail(fmt.Errorf("connection to the server lost: %w", err))
			return
		}
	}
}
