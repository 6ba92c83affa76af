package transporttest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/transport"
)

// polling is a rank that polls its Control lane. It parks when nothing arrives.
type polling struct {
	mesh     transport.Mesh
	conns    []transport.Conn
	notified chan struct{}
}

// polls connects ranks 0 and 1 on the Control lane. Both ranks poll that lane.
func (s *suite) polls() (meshes []transport.Mesh, zero, one *polling) {
	s.Helper()
	meshes = s.open(2)
	a, b := s.pair(meshes, transport.Control)
	return meshes, newPolling(meshes[0], a), newPolling(meshes[1], b)
}

func newPolling(m transport.Mesh, conns ...transport.Conn) *polling {
	p := &polling{mesh: m, conns: conns, notified: make(chan struct{}, 1)}
	m.OnNotify(func() {
		select {
		case p.notified <- struct{}{}:
		default:
		}
	})
	return p
}

// send sends b on the first Conn and then calls NotifyPeers, as a loop does before it parks.
func (p *polling) send(b []byte) error {
	err := p.conns[0].Send(b)
	p.mesh.NotifyPeers()
	return err
}

// next polls the first Conn until it returns bytes or an error. If several polls return nothing, next parks.
func (p *polling) next(b []byte) (int, error) {
	hung := time.NewTimer(hangTimeout)
	defer hung.Stop()
	for {
		p.mesh.Unpark()
		// Poll several times, because bytes may arrive between two polls.
		for range 3 {
			if n, err := p.conns[0].TryRead(b); n > 0 || err != nil {
				return n, err
			}
		}
		if !p.mesh.Park() {
			continue
		}
		select {
		case <-p.notified:
		case <-hung.C:
			return 0, errors.New("parked, and no notification has come")
		}
	}
}

// park parks the rank. If there is nothing to read, parking must succeed, but it may take several attempts.
func (p *polling) park() error {
	for end := time.Now().Add(hangTimeout); !p.mesh.Park(); runtime.Gosched() {
		for _, c := range p.conns {
			if n, err := c.TryRead(make([]byte, 1)); n > 0 {
				return fmt.Errorf("park: read %d bytes and error %v, want nothing", n, err)
			}
		}
		if time.Now().After(end) {
			return errors.New("park: returned false each time though there is nothing to read")
		}
	}
	return nil
}

// awaitNotify waits until the parked rank is notified.
func (p *polling) awaitNotify() error {
	select {
	case <-p.notified:
		return nil
	case <-time.After(hangTimeout):
		return errors.New("parked, and no notification has come")
	}
}

// testTryRead reads a stream with TryRead, on the Control lane and on another lane. The sender often pauses,
// so that TryRead often finds no bytes.
func testTryRead(s *suite) {
	meshes := s.open(2)
	for _, lane := range []transport.Lane{transport.Control, 1} {
		zero, one := s.pair(meshes, lane)
		if n, err := one.TryRead(make([]byte, 10)); n != 0 || err != nil {
			s.Fatalf("before anything was sent: got %d, %v, want 0, nil", n, err)
		}
		if n, err := one.TryRead(nil); n != 0 || err != nil {
			s.Fatalf("empty: got %d, %v, want 0, nil", n, err)
		}
		data := random(30, 4<<20)
		s.together(
			func() error { return sendPieces(zero, data, 31) },
			func() error {
				r := rand.New(rand.NewPCG(32, 0))
				buf := make([]byte, 70_001)
				for pos := 0; pos < len(data); {
					n, err := one.TryRead(buf[:min(1+r.IntN(len(buf)), len(data)-pos)])
					if err != nil || !bytes.Equal(buf[:n], data[pos:pos+n]) {
						return fmt.Errorf("at byte %d: got %d bytes and error %v, want the bytes that were sent", pos, n, err)
					}
					if pos += n; n == 0 {
						runtime.Gosched()
					}
				}
				return nil
			},
		)
		s.exchange(zero, one) // Read must continue at the byte at which TryRead has stopped
		if n, err := one.TryRead(make([]byte, 1)); n != 0 || err != nil {
			s.Fatalf("after all was read: got %d, %v, want 0, nil", n, err)
		}
		// TryRead must continue at the byte at which Read has stopped.
		s.together(
			func() error { return errors.Join(zero.Send([]byte("somemore")), zero.Flush()) },
			func() error {
				b := make([]byte, 4)
				if _, err := io.ReadFull(one, b); err != nil {
					return err
				}
				for got, end := 0, time.Now().Add(hangTimeout); got < len(b); runtime.Gosched() {
					n, err := one.TryRead(b[got:])
					if err != nil {
						return err
					}
					if got += n; time.Now().After(end) {
						return fmt.Errorf("lane %d: after Read, TryRead got %d bytes, want %d", lane, got,
							len(b))
					}
				}
				return nil
			},
		)
		b := make([]byte, 10)
		if n := testing.AllocsPerRun(100, func() { _, _ = one.TryRead(b) }); n != 0 {
			s.Errorf("lane %d: TryRead makes %v allocations if nothing has arrived, want none", lane, n)
		}
	}
}

// testPollPingPong lets two ranks wait for each other 2000 times. A rank that waits polls or is parked. If a
// notification is lost, the test hangs.
func testPollPingPong(s *suite) {
	_, zero, one := s.polls()
	const rounds = 2000
	play := func(p *polling, serves bool) func() error {
		return func() error {
			ball := make([]byte, 8)
			for range rounds {
				if serves {
					if err := p.send(ball); err != nil {
						return err
					}
				}
				for got := 0; got < len(ball); {
					n, err := p.next(ball[got:])
					if err != nil {
						return err
					}
					got += n
				}
				if !serves {
					if err := p.send(ball); err != nil {
						return err
					}
				}
			}
			return nil
		}
	}
	s.together(play(zero, true), play(one, false))
}

// testPollParks checks that a parked rank is notified of bytes on the Control lane, both from a peer that
// polls and from a peer that does not poll. It must not be notified of bytes on another lane.
func testPollParks(s *suite) {
	meshes := s.open(3)
	var toZero, toTwo, zero, two transport.Conn
	s.together(s.connect(&toZero, meshes[1], 0, 0), s.connect(&toTwo, meshes[1], 0, 2),
		s.connect(&zero, meshes[0], 0, 1), s.connect(&two, meshes[2], 0, 1))
	p := newPolling(meshes[1], toZero, toTwo)
	other, _ := s.pair(meshes, 1)
	meshes[0].OnNotify(func() {})
	for i, c := range []transport.Conn{zero, two, zero, zero, two} {
		from := p.conns[0]
		if c == two {
			from = p.conns[1]
		}
		s.together(p.park)
		s.together(func() error { return other.Send([]byte("on another lane")) })
		s.together(func() error {
			if err := c.Send([]byte("word")); err != nil {
				return err
			}
			meshes[0].NotifyPeers()
			return p.awaitNotify()
		})
		s.together(func() error {
			b := make([]byte, 10)
			for got := 0; got < 4; {
				n, err := from.TryRead(b)
				if err != nil {
					return fmt.Errorf("round %d: %w", i, err)
				}
				if got += n; n == 0 {
					runtime.Gosched()
				}
			}
			return nil
		})
	}
}

// testPollPeerCloses closes the mesh of a peer. A parked rank must be notified. It must read the last bytes
// of the peer and then get an error. After that it must be able to park.
func testPollPeerCloses(s *suite) {
	meshes, zero, one := s.polls()
	s.together(one.park)
	s.together(func() error {
		return errors.Join(zero.send([]byte("last")), zero.conns[0].Flush(), meshes[0].Close())
	}, func() error {
		if err := one.awaitNotify(); err != nil {
			return err
		}
		b := make([]byte, 10)
		if n, err := one.next(b); err != nil || string(b[:n]) != "last" {
			return fmt.Errorf("got %q, %v, want the last bytes", b[:n], err)
		}
		if n, err := one.next(b); n != 0 || err == nil {
			return fmt.Errorf("got %d, %v, want 0 and an error", n, err)
		} else if err := wantPeer(err, transport.Control, 0); err != nil {
			return err
		}
		_, err := one.conns[0].TryRead(b)
		return wantPeer(err, transport.Control, 0)
	})
	s.together(one.park)
}

// testPollOwnEnd checks that Close and Abort of a mesh notify the parked goroutine of the same rank.
func testPollOwnEnd(s *suite) {
	for want, end := range map[error]func(transport.Mesh) error{
		transport.ErrClosed: func(m transport.Mesh) error { return m.Close() },
		errBoom: func(m transport.Mesh) error {
			m.Abort(transport.Control, errBoom)
			return nil
		},
	} {
		meshes, _, one := s.polls()
		s.together(one.park)
		s.together(func() error { return end(meshes[1]) })
		s.together(one.awaitNotify)
		s.together(func() error {
			n, err := one.conns[0].TryRead(make([]byte, 1))
			if n != 0 {
				return fmt.Errorf("got %d bytes, want 0", n)
			}
			return wantErr("try", err, want)
		})
	}
}
