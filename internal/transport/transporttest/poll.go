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

// polling is a rank that polls its Control lane and parks when nothing comes.
type polling struct {
	mesh     transport.Mesh
	conns    []transport.Conn
	notified chan struct{}
}

// polls connects two ranks on the Control lane, both of which poll.
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

// send sends and notifies, as a loop does before it parks.
func (p *polling) send(b []byte) error {
	err := p.conns[0].Send(b)
	p.mesh.NotifyPeers()
	return err
}

// next polls the first Conn, and parks whenever that has nothing, until it gives something.
func (p *polling) next(b []byte) (int, error) {
	hung := time.NewTimer(patience)
	defer hung.Stop()
	for {
		p.mesh.Unpark()
		for range 3 { // the last may find what the others did not
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
			return 0, errors.New("parked, and nobody notifies")
		}
	}
}

// rest parks. It must be possible when nothing is left to read.
func (p *polling) rest() error {
	for end := time.Now().Add(patience); !p.mesh.Park(); runtime.Gosched() {
		for _, c := range p.conns {
			if n, err := c.TryRead(make([]byte, 1)); n > 0 {
				return fmt.Errorf("park: %d bytes have come, and error %v, want nothing", n, err)
			}
		}
		if time.Now().After(end) {
			return errors.New("park: it stays impossible though there is nothing to read")
		}
	}
	return nil
}

// awaken waits for the notification of a parked rank.
func (p *polling) awaken() error {
	select {
	case <-p.notified:
		return nil
	case <-time.After(patience):
		return errors.New("parked, and nobody notifies")
	}
}

// testTryRead reads a stream without waiting, on a lane of either kind, from a sender that is often late.
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
						return fmt.Errorf("at byte %d: got %d bytes, wrong ones or with error %v", pos, n, err)
					}
					if pos += n; n == 0 {
						runtime.Gosched()
					}
				}
				return nil
			},
		)
		s.exchange(zero, one) // Read goes on where TryRead has stopped
		if n, err := one.TryRead(make([]byte, 1)); n != 0 || err != nil {
			s.Fatalf("after all was read: got %d, %v, want 0, nil", n, err)
		}
		// And TryRead where Read has.
		s.together(
			func() error { return errors.Join(zero.Send([]byte("somemore")), zero.Flush()) },
			func() error {
				b := make([]byte, 4)
				if _, err := io.ReadFull(one, b); err != nil {
					return err
				}
				for got, end := 0, time.Now().Add(patience); got < len(b); runtime.Gosched() {
					n, err := one.TryRead(b[got:])
					if err != nil {
						return err
					}
					if got += n; time.Now().After(end) {
						return fmt.Errorf("lane %d: after Read, TryRead gives %d bytes of what has come, want %d", lane, got, len(b))
					}
				}
				return nil
			},
		)
		b := make([]byte, 10)
		if n := testing.AllocsPerRun(100, func() { _, _ = one.TryRead(b) }); n != 0 {
			s.Errorf("lane %d: TryRead makes %v allocations where nothing has arrived", lane, n)
		}
	}
}

// testPollPingPong has two ranks wait for each other, now polling, now parked. A notification that is lost ends it.
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

// testPollParks has a rank notified each time that it is parked and something comes, on the Control lane only, from peers that
// poll and from one that does not.
func testPollParks(s *suite) {
	meshes := s.open(3)
	var toZero, toTwo, zero, two transport.Conn
	s.together(s.connect(&toZero, meshes[1], 0, 0), s.connect(&toTwo, meshes[1], 0, 2), s.connect(&zero, meshes[0], 0, 1), s.connect(&two, meshes[2], 0, 1))
	p := newPolling(meshes[1], toZero, toTwo)
	other, _ := s.pair(meshes, 1)
	meshes[0].OnNotify(func() {})
	for i, c := range []transport.Conn{zero, two, zero, zero, two} {
		from := p.conns[0]
		if c == two {
			from = p.conns[1]
		}
		s.together(p.rest)
		s.together(func() error { return other.Send([]byte("on another lane")) })
		s.together(func() error {
			if err := c.Send([]byte("word")); err != nil {
				return err
			}
			meshes[0].NotifyPeers()
			return p.awaken()
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

// testPollPeerCloses has the end of a peer come after its bytes, notify, and once it was told keep nobody from parking.
func testPollPeerCloses(s *suite) {
	meshes, zero, one := s.polls()
	s.together(one.rest)
	s.together(func() error {
		return errors.Join(zero.send([]byte("last")), zero.conns[0].Flush(), meshes[0].Close())
	}, func() error {
		if err := one.awaken(); err != nil {
			return err
		}
		b := make([]byte, 10)
		if n, err := one.next(b); err != nil || string(b[:n]) != "last" {
			return fmt.Errorf("got %q, %v, want the last bytes", b[:n], err)
		}
		if n, err := one.next(b); n != 0 || err == nil {
			return fmt.Errorf("got %d, %v, want 0 and that the peer is gone", n, err)
		} else if err := wantPeer(err, transport.Control, 0); err != nil {
			return err
		}
		_, err := one.conns[0].TryRead(b)
		return wantPeer(err, transport.Control, 0)
	})
	s.together(one.rest)
}

// testPollOwnEnd has what a rank does to itself notify: it may be parked in one goroutine and be closed by another.
func testPollOwnEnd(s *suite) {
	for want, end := range map[error]func(transport.Mesh) error{
		transport.ErrClosed: func(m transport.Mesh) error { return m.Close() },
		errBoom: func(m transport.Mesh) error {
			m.Abort(transport.Control, errBoom)
			return nil
		},
	} {
		meshes, _, one := s.polls()
		s.together(one.rest)
		s.together(func() error { return end(meshes[1]) })
		s.together(one.awaken)
		s.together(func() error {
			n, err := one.conns[0].TryRead(make([]byte, 1))
			if n != 0 {
				return fmt.Errorf("got %d bytes", n)
			}
			return wantErr("try", err, want)
		})
	}
}
