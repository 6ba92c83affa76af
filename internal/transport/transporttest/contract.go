package transporttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// unread is a number of bytes that does not fit in the kernel's buffers. If so many bytes are sent and the
// peer does not read, Flush waits.
const unread = 64 << 20

// sendPieces sends data in pieces of random size. Some pieces are empty. TrySend sends the first bytes of
// some pieces, and Send sends the rest.
func sendPieces(c transport.Conn, data []byte, seed uint64) error {
	r := rand.New(rand.NewPCG(seed, 0))
	for len(data) > 0 {
		n := min(r.IntN(200_000), len(data))
		if r.IntN(8) == 0 {
			n = 0
		}
		tried := 0
		if r.IntN(2) == 0 {
			var err error
			if tried, err = c.TrySend(data[:n]); err != nil {
				return err
			}
		}
		if err := c.Send(data[tried:n]); err != nil {
			return err
		}
		data = data[n:]
	}
	return c.Flush()
}

// readPieces reads len(want) bytes into buffers of random sizes, and returns an error if the bytes differ
// from want.
func readPieces(c transport.Conn, want []byte, seed uint64) error {
	r := rand.New(rand.NewPCG(seed, 1))
	buf := make([]byte, 70_001)
	for pos := 0; pos < len(want); {
		n, err := c.Read(buf[:min(1+r.IntN(len(buf)), len(want)-pos)])
		if err != nil {
			return fmt.Errorf("at byte %d: %w", pos, err)
		}
		if n == 0 {
			return fmt.Errorf("at byte %d: read nothing without an error", pos)
		}
		if !bytes.Equal(buf[:n], want[pos:pos+n]) {
			return fmt.Errorf("wrong bytes from %d to %d", pos, pos+n)
		}
		pos += n
	}
	return nil
}

func testStream(s *suite) {
	zero, one := s.pair(s.open(2), 1)
	data := random(1, 16<<20)
	s.together(
		func() error { return sendPieces(zero, data, 2) },
		func() error { return readPieces(one, data, 3) },
	)
	if got := zero.Sent(); got != uint64(len(data)) {
		s.Errorf("sent: got %d, want %d", got, len(data))
	}
	if got := one.Sent(); got != 0 {
		s.Errorf("sent of the receiver: got %d, want 0", got)
	}
}

func testBothDirections(s *suite) {
	zero, one := s.pair(s.open(2), transport.Control)
	up, down := random(4, 8<<20), random(5, 8<<20)
	s.together(
		func() error { return sendPieces(zero, up, 6) },
		func() error { return sendPieces(one, down, 7) },
		func() error { return readPieces(zero, down, 8) },
		func() error { return readPieces(one, up, 9) },
	)
}

func testAllSendFirst(s *suite) {
	const size, bytesEach = 4, 8 << 20
	meshes := s.open(size)
	data := make([][]byte, size)
	conns := make([][]transport.Conn, size)
	var connect, send, receive []func() error
	for r := range size {
		data[r] = random(byte(r), bytesEach)
		conns[r] = make([]transport.Conn, size)
		connect = append(connect, func() error {
			for p := range size {
				if p == r {
					continue
				}
				if err := s.connect(&conns[r][p], meshes[r], 3, topo.Rank(p))(); err != nil {
					return err
				}
			}
			return nil
		})
		send = append(send, func() error {
			for p := range size {
				if p == r {
					continue
				}
				// Each peer gets the bytes of data[r] from a different offset on, so that the test detects
				// swapped streams.
				if err := errors.Join(conns[r][p].Send(data[r][p+1:]),
					conns[r][p].Send(data[r][:p+1])); err != nil {
					return err
				}
			}
			return nil
		})
		receive = append(receive, func() error {
			got := make([]byte, bytesEach)
			for p := range size {
				if p == r {
					continue
				}
				if _, err := io.ReadFull(conns[r][p], got); err != nil {
					return err
				}
				if cut := bytesEach - r - 1; !bytes.Equal(got[:cut], data[p][r+1:]) ||
					!bytes.Equal(got[cut:], data[p][:r+1]) {
					return fmt.Errorf("rank %d got wrong bytes from rank %d", r, p)
				}
			}
			return nil
		})
	}
	s.together(connect...)
	s.together(send...)
	s.together(receive...)
	for r := range size {
		for p := range size {
			if p == r {
				continue
			}
			if err := conns[r][p].Flush(); err != nil {
				s.Error(err)
			}
		}
	}
}

func testManySmallSends(s *suite) {
	zero, one := s.pair(s.open(2), 1)
	data := random(10, 15<<20)
	s.together(func() error {
		for piece := range slices.Chunk(data, 100) {
			if err := zero.Send(piece); err != nil {
				return err
			}
		}
		return nil
	})
	s.together(zero.Flush, func() error { return readPieces(one, data, 11) })
	if got := zero.Sent(); got != uint64(len(data)) {
		s.Errorf("sent: got %d, want %d", got, len(data))
	}
}

// testSteadyBacklog keeps more bytes in flight than the kernel's buffers hold, while the receiver reads. All
// bytes must arrive in order.
func testSteadyBacklog(s *suite) {
	const pieceBytes, backlog, rounds = 1000, 16_000, 40_000
	zero, one := s.pair(s.open(2), 1)
	data := random(17, 1<<20)
	piece := func(i int) []byte {
		at := i * 997 % (len(data) - pieceBytes)
		return data[at : at+pieceBytes]
	}
	s.together(func() error {
		got := make([]byte, pieceBytes)
		for i := range backlog + rounds {
			if i < rounds {
				if err := zero.Send(piece(i)); err != nil {
					return err
				}
			}
			if i < backlog {
				continue
			}
			if _, err := io.ReadFull(one, got); err != nil {
				return err
			}
			if !bytes.Equal(got, piece(i-backlog)) {
				return fmt.Errorf("wrong bytes in piece %d", i-backlog)
			}
		}
		return zero.Flush()
	})
}

func testLanes(s *suite) {
	meshes := s.open(2)
	zero, one := s.pair(meshes, 1)
	data := random(12, 32<<20)
	s.together(func() error { return zero.Send(data) })
	for _, lane := range []transport.Lane{2, transport.Control} {
		s.exchange(s.pair(meshes, lane))
	}
	s.together(zero.Flush, func() error { return readPieces(one, data, 13) })
}

func testEitherSideFirst(s *suite) {
	meshes := s.open(2)
	var zero, one transport.Conn
	higher := s.begin(s.connect(&one, meshes[1], 1, 0))
	s.together(s.connect(&zero, meshes[0], 1, 1))
	s.await(higher)
	s.exchange(zero, one)

	s.together(s.connect(&zero, meshes[0], 2, 1))
	s.together(func() error { return zero.Send([]byte("early")) })
	s.together(s.connect(&one, meshes[1], 2, 0))
	s.together(zero.Flush, func() error { return readPieces(one, []byte("early"), 14) })
	s.exchange(zero, one)
}

func testSameConn(s *suite) {
	meshes := s.open(2)
	var conns [6]transport.Conn
	var fns []func() error
	for i := range conns {
		fns = append(fns, s.connect(&conns[i], meshes[i%2], 1, topo.Rank(1-i%2)))
	}
	s.together(fns...)
	var again [2]transport.Conn
	s.together(s.connect(&again[0], meshes[0], 1, 1), s.connect(&again[1], meshes[1], 1, 0))
	for i, c := range conns {
		if c != again[i%2] {
			s.Errorf("call %d of rank %d got another Conn", i/2, i%2)
		}
	}
	s.exchange(conns[0], conns[1])
}

func testNoSuchPeer(s *suite) {
	for _, size := range []int{1, 3} {
		meshes := s.open(size)
		for r, m := range meshes {
			for _, peer := range []int{-1, r, size} {
				if c, err := m.Conn(s.Context(), 1, topo.Rank(peer)); err == nil || c != nil {
					s.Errorf("size %d: rank %d has a Conn to rank %d", size, r, peer)
				}
			}
		}
	}
}

func testZeroLength(s *suite) {
	zero, one := s.pair(s.open(2), 1)
	s.together(func() error {
		err := errors.Join(zero.Send(nil), zero.Send([]byte{}), zero.Flush())
		if got := zero.Sent(); got != 0 {
			err = errors.Join(err, fmt.Errorf("sent: got %d, want 0", got))
		}
		if n, err := one.Read(nil); n != 0 || err != nil {
			return fmt.Errorf("empty read: got %d, %v, want 0, nil", n, err)
		}
		return err
	})
	s.exchange(zero, one)
}

func testFlush(s *suite) {
	const rounds, n = 8, 3 << 20
	zero, one := s.pair(s.open(2), 1)
	s.together(
		func() error {
			buf := make([]byte, n)
			for i := range rounds {
				fill(buf, byte(i))
				if err := errors.Join(zero.Send(buf), zero.Flush()); err != nil {
					return err
				}
				fill(buf, 0xff)
				if got, want := zero.Sent(), uint64(i+1)*n; got != want {
					return fmt.Errorf("sent after flush %d: got %d, want %d", i, got, want)
				}
			}
			return nil
		},
		func() error { return readRounds(one, rounds, n) },
	)
}

func testSent(s *suite) {
	const rounds, n = 16, 1 << 20
	zero, one := s.pair(s.open(2), 1)
	s.together(
		func() error {
			bufs := [2][]byte{make([]byte, n), make([]byte, n)}
			for i := range rounds {
				if err := waitSent(zero, max(0, i-1)*n); err != nil {
					return err
				}
				fill(bufs[i%2], byte(i))
				if err := zero.Send(bufs[i%2]); err != nil {
					return err
				}
				if got := zero.Sent(); got > uint64(i+1)*n {
					return fmt.Errorf("sent: got %d of %d", got, (i+1)*n)
				}
			}
			return zero.Flush()
		},
		func() error { return readRounds(one, rounds, n) },
	)
}

// waitSent polls c.Sent until it has reached want. It has to poll, because a Conn does not notify of a change
// of Sent. It pauses between the polls, because if there is one processor, the runtime looks for network
// events only every 10 ms while a goroutine polls.
func waitSent(c transport.Conn, want int) error {
	for end := time.Now().Add(hangTimeout); c.Sent() < uint64(want); <-time.After(100 * time.Microsecond) {
		if time.Now().After(end) {
			return fmt.Errorf("sent: got %d, want %d", c.Sent(), want)
		}
	}
	return nil
}

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

// readRounds reads n bytes in each round. In round i, all of them must have the value i.
func readRounds(c transport.Conn, rounds, n int) error {
	got, want := make([]byte, n), make([]byte, n)
	for i := range rounds {
		if _, err := io.ReadFull(c, got); err != nil {
			return err
		}
		fill(want, byte(i))
		if !bytes.Equal(got, want) {
			return fmt.Errorf("round %d: the buffer was reused before it was sent", i)
		}
	}
	return nil
}

func testContext(s *suite) {
	meshes := s.open(2)
	s.together(func() error {
		ctx, cancel := context.WithTimeout(s.Context(), 20*time.Millisecond)
		defer cancel()
		_, err := meshes[1].Conn(ctx, 1, 0)
		return wantErr("conn", err, context.DeadlineExceeded)
	})
	ctx, cancel := context.WithCancel(s.Context())
	waiting := s.begin(func() error {
		_, err := meshes[1].Conn(ctx, 1, 0)
		return wantErr("conn", err, context.Canceled)
	})
	cancel()
	s.await(waiting)
	s.exchange(s.pair(meshes, 1))
}

// testUnblocks makes rank 1 wait in Read, Flush and Conn on lane 1, and then calls the function end. The
// pending calls and all later calls must fail with the error want.
func testUnblocks(s *suite, end func(m transport.Mesh), want error) {
	meshes := s.open(3)
	m := meshes[1]
	var c, other transport.Conn
	s.together(s.connect(&c, m, 1, 2), s.connect(&other, meshes[2], 1, 1))

	waiting := s.begin(
		func() error {
			_, err := c.Read(make([]byte, 1))
			return wantErr("pending read", err, want)
		},
		func() error {
			_, err := m.Conn(s.Context(), 1, 0)
			return wantErr("pending conn", err, want)
		},
	)
	buf := make([]byte, unread)
	s.together(func() error { return c.Send(buf) })
	flushing := s.begin(func() error {
		err := c.Flush()
		fill(buf[unread-1000:], 1) // if the Conn still read buf, the race detector would report this write
		return wantErr("pending flush", err, want)
	})
	if got := c.Sent(); got >= unread {
		s.Fatalf("all %d bytes were sent though the peer has not read", got)
	}
	end(m)
	s.await(waiting)
	s.await(flushing)

	s.together(func() error {
		_, read := c.Read(make([]byte, 1))
		_, tried := c.TrySend([]byte{1})
		_, again := m.Conn(s.Context(), 1, 2)
		_, fresh := m.Conn(s.Context(), 1, 0)
		return errors.Join(
			wantErr("read", read, want),
			wantErr("send", c.Send([]byte{1}), want),
			wantErr("send without waiting", tried, want),
			wantErr("flush", c.Flush(), want),
			wantErr("conn", again, want),
			wantErr("conn", fresh, want),
		)
	})
}

var errBoom = errors.New("boom")

func testAbortUnblocks(s *suite) {
	testUnblocks(s, func(m transport.Mesh) { m.Abort(1, fmt.Errorf("rank 0 is dead: %w", errBoom)) }, errBoom)
}

func testCloseUnblocks(s *suite) {
	testUnblocks(s, func(m transport.Mesh) {
		s.together(m.Close)
		s.together(m.Close)
	}, transport.ErrClosed)
}

func testAbortIsSilent(s *suite) {
	meshes := s.open(2)
	zero, one := s.pair(meshes, 1)
	zero2, one2 := s.pair(meshes, 2)
	errMine := errors.New("mine")
	read := s.begin(func() error {
		_, err := one.Read(make([]byte, 1))
		return wantErr("read", err, errMine)
	})
	meshes[0].Abort(1, errBoom)
	s.exchange(zero2, one2) // after this exchange, Abort has certainly taken effect on lane 1
	s.silent(one, read)
	meshes[1].Abort(1, errMine)
	s.await(read)
	s.together(func() error { return wantErr("send", zero.Send([]byte{1}), errBoom) })
}

// silent checks that c gets neither bytes nor an error from its peer. The channel read receives the result of
// a pending c.Read.
func (s *suite) silent(c transport.Conn, read <-chan error) {
	s.Helper()
	select {
	case err := <-read:
		s.Fatalf("the peer noticed the abort: %v", err)
	default:
	}
	s.together(func() error { return c.Send([]byte("anyone?")) })
}

func testAbortBeforeConn(s *suite) {
	meshes := s.open(2)
	meshes[1].Abort(1, errBoom)
	var zero transport.Conn
	s.together(s.connect(&zero, meshes[0], 1, 1))
	errMine := errors.New("mine")
	read := s.begin(func() error {
		_, err := zero.Read(make([]byte, 1))
		return wantErr("read", err, errMine)
	})
	s.exchange(s.pair(meshes, 2))
	s.silent(zero, read)
	s.together(func() error {
		_, err := meshes[1].Conn(s.Context(), 1, 0)
		return wantErr("conn", err, errBoom)
	})
	meshes[0].Abort(1, errMine)
	s.await(read)
}

func testAbortOneLane(s *suite) {
	meshes := s.open(2)
	zero, one := s.pair(meshes, 2)
	s.pair(meshes, 1)
	for _, m := range meshes {
		m.Abort(1, errBoom)
	}
	s.exchange(zero, one)
	s.exchange(s.pair(meshes, 3))
}

func testFirstAbort(s *suite) {
	meshes := s.open(2)
	zero, _ := s.pair(meshes, 1)
	meshes[0].Abort(1, errBoom)
	meshes[0].Abort(1, errors.New("later"))
	s.together(func() error { return wantErr("send", zero.Send([]byte{1}), errBoom) })
	s.together(func() error {
		_, err := meshes[0].Conn(s.Context(), 1, 1)
		return wantErr("conn", err, errBoom)
	})
}

func testPeerCloses(s *suite) {
	meshes := s.open(3)
	zero, one := s.pair(meshes, 1)
	_, idle := s.pair(meshes, 2)
	_, full := s.pair(meshes, 3)
	var one2, two transport.Conn
	s.together(s.connect(&one2, meshes[1], 1, 2), s.connect(&two, meshes[2], 1, 1))

	s.together(func() error { return full.Send(make([]byte, unread)) })
	waiting := s.begin(
		func() error {
			_, err := idle.Read(make([]byte, 1))
			return wantPeer(err, 2, 0)
		},
		func() error { return wantPeer(full.Flush(), 3, 0) },
	)
	data := random(15, 300_000)
	s.together(
		func() error {
			err := errors.Join(zero.Send(data), zero.Flush())
			return errors.Join(err, meshes[0].Close())
		},
		func() error {
			if err := readPieces(one, data, 16); err != nil {
				return err
			}
			for range 2 {
				n, err := one.Read(make([]byte, 1))
				if err == io.EOF || n != 0 {
					return fmt.Errorf("read: got %d, %v, want 0 and no bare EOF", n, err)
				}
				if err := wantPeer(err, 1, 0); err != nil {
					return err
				}
			}
			return nil
		},
	)
	s.await(waiting)
	s.together(func() error {
		var err error
		for end := time.Now().Add(hangTimeout); err == nil && time.Now().Before(end); runtime.Gosched() {
			err = one.Send([]byte{1})
		}
		return errors.Join(wantPeer(err, 1, 0), wantPeer(one.Send([]byte{1}), 1, 0),
			wantPeer(one.Flush(), 1, 0))
	})
	s.exchange(one2, two)
}

func testCloseAfterAbort(s *suite) {
	meshes := s.open(2)
	zero, _ := s.pair(meshes, 1)
	meshes[0].Abort(1, errBoom)
	s.together(meshes[0].Close)
	s.together(func() error {
		_, read := zero.Read(make([]byte, 1))
		_, conn := meshes[0].Conn(s.Context(), 1, 1)
		return errors.Join(
			wantErr("read", read, transport.ErrClosed),
			wantErr("send", zero.Send([]byte{1}), transport.ErrClosed),
			wantErr("flush", zero.Flush(), transport.ErrClosed),
			wantErr("conn", conn, transport.ErrClosed),
		)
	})
}
