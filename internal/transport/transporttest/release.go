package transporttest

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

func testReleaseUnblocks(s *suite) {
	testUnblocks(s, func(m transport.Mesh) { m.Release(1) }, transport.ErrReleased)
}

// testReleaseDeliversAll releases a lane while the peer is still reading and has sent bytes that this rank
// has not read. The peer must get all bytes.
func testReleaseDeliversAll(s *suite) {
	meshes := s.open(2)
	zero, one := s.pair(meshes, 1)
	s.together(func() error { return one.Send(random(20, 100_000)) })
	data := random(21, 4<<20)
	s.together(
		func() error {
			if err := sendPieces(zero, data, 22); err != nil {
				return err
			}
			meshes[0].Release(1)
			return nil
		},
		func() error { return readPieces(one, data, 23) },
	)
	s.together(func() error {
		_, err := one.Read(make([]byte, 1))
		return errors.Join(wantPeer(err, 1, 0), one.Send([]byte("lost")), one.Flush())
	})
	s.together(func() error {
		return errors.Join(
			wantErr("send", zero.Send([]byte{1}), transport.ErrReleased),
			wantErr("flush", zero.Flush(), transport.ErrReleased),
		)
	})
	s.exchange(s.pair(meshes, 2))
}

func testReleaseOneLane(s *suite) {
	meshes := s.open(3)
	zero, one := s.pair(meshes, 2)
	s.pair(meshes, 1)
	var two transport.Conn
	s.together(s.connect(new(transport.Conn), meshes[0], 1, 2), s.connect(&two, meshes[2], 1, 0))
	var one2, two1 transport.Conn
	s.together(s.connect(&one2, meshes[1], 1, 2), s.connect(&two1, meshes[2], 1, 1))
	meshes[0].Release(1)
	s.exchange(zero, one)
	s.exchange(one2, two1)
	s.exchange(s.pair(meshes, 3))
	s.exchange(s.pair(meshes, transport.Control))
	s.together(func() error {
		_, err := two.Read(make([]byte, 1))
		return wantPeer(err, 1, 0)
	})
}

// testReleaseIsFinal releases lanes in every state, each of them twice. All later calls must fail with
// ErrReleased, even after Close. If a lane is released after Close, its calls must still fail with ErrClosed.
func testReleaseIsFinal(s *suite) {
	meshes := s.open(2)
	used, _ := s.pair(meshes, 1)
	aborted, _ := s.pair(meshes, 2)
	meshes[0].Abort(2, errBoom)
	const never = 3
	for range 2 {
		for _, lane := range []transport.Lane{1, 2, never} {
			meshes[0].Release(lane)
			meshes[0].Abort(lane, errBoom) // must have no effect after Release
		}
	}
	released := func() error {
		var errs []error
		for _, lane := range []transport.Lane{1, 2, never} {
			_, err := meshes[0].Conn(s.Context(), lane, 1)
			errs = append(errs, wantErr(fmt.Sprintf("conn of lane %d", lane), err, transport.ErrReleased))
		}
		for _, c := range []transport.Conn{used, aborted} {
			_, err := c.Read(make([]byte, 1))
			errs = append(errs, wantErr("read", err, transport.ErrReleased),
				wantErr("send", c.Send([]byte{1}), transport.ErrReleased))
		}
		return errors.Join(errs...)
	}
	s.together(released)
	s.exchange(s.pair(meshes, 4))
	s.together(meshes[0].Close)
	s.together(released)
	meshes[0].Release(4)
	s.together(func() error {
		_, err := meshes[0].Conn(s.Context(), 4, 1)
		return wantErr("conn of a lane released after close", err, transport.ErrClosed)
	})
}

// testReleaseEndsLateChannels opens channels for which the peer has never called Conn, before and after the
// peer releases the lane. The channels must end with a *PeerError.
func testReleaseEndsLateChannels(s *suite) {
	meshes := s.open(2)
	for lane, open := range map[transport.Lane]bool{1: true, 2: false} {
		var zero transport.Conn
		if open {
			s.together(s.connect(&zero, meshes[0], lane, 1))
			s.together(func() error { return zero.Send([]byte("unread")) })
		}
		meshes[1].Release(lane)
		s.together(s.connect(&zero, meshes[0], lane, 1))
		s.together(func() error {
			sent := errors.Join(zero.Send([]byte("lost")), zero.Flush())
			_, err := zero.Read(make([]byte, 1))
			return errors.Join(sent, wantPeer(err, lane, 1))
		})
		meshes[0].Release(lane)
	}
	s.exchange(s.pair(meshes, 3))
}

func testReleaseOfControl(s *suite) {
	meshes := s.open(2)
	zero, one := s.pair(meshes, transport.Control)
	errMine := errors.New("mine")
	read := s.begin(func() error {
		_, err := one.Read(make([]byte, 1))
		return wantErr("read", err, errMine)
	})
	meshes[0].Release(transport.Control)
	s.exchange(s.pair(meshes, 1))
	s.silent(one, read)
	s.together(func() error {
		_, err := meshes[0].Conn(s.Context(), transport.Control, 1)
		return errors.Join(wantErr("conn", err, transport.ErrControl), wantErr("send", zero.Send([]byte{1}),
			transport.ErrControl))
	})
	meshes[1].Abort(transport.Control, errMine)
	s.await(read)
}

// testReleaseWhileInUse releases lanes that are in use, which is a misuse. All pending calls must return
// nevertheless.
func testReleaseWhileInUse(s *suite) {
	meshes := s.open(2)
	for lane := range transport.Lane(20) {
		zero, one := s.pair(meshes, lane+1)
		// The rank that releases second may first get a *PeerError, because the other rank has released the
		// lane.
		until := func(peer topo.Rank, op func() error) func() error {
			return func() error {
				err := op()
				for err == nil {
					err = op()
				}
				if errors.Is(err, transport.ErrReleased) {
					return nil
				}
				return wantPeer(err, lane+1, peer)
			}
		}
		var ops []func() error
		var begun sync.WaitGroup
		for r, c := range []transport.Conn{zero, one} {
			out, in := make([]byte, 100_000), make([]byte, 70_000)
			peer := topo.Rank(1 - r)
			var once sync.Once
			begun.Add(1)
			ops = append(ops,
				until(peer, func() error { return errors.Join(c.Send(out), c.Flush()) }),
				until(peer, func() error {
					_, err := c.Read(in)
					once.Do(begun.Done)
					return err
				}),
				func() error {
					begun.Wait()
					meshes[r].Release(lane + 1)
					return nil
				})
		}
		s.together(ops...)
	}
}

// testReleaseFreesAll creates, uses and releases many lanes. Afterwards the process must have no more
// goroutines and open files than before.
func testReleaseFreesAll(s *suite) {
	meshes := s.open(2)
	s.exchange(s.pair(meshes, transport.Control))
	goroutines, files := runtime.NumGoroutine(), openFiles(s)
	for i := range 200 {
		lane := transport.Lane(1 + i)
		zero, one := s.pair(meshes, lane)
		s.exchange(zero, one)
		if i%20 == 0 { // send enough bytes to start a writer
			big := random(byte(i), 8<<20)
			s.together(
				func() error { return errors.Join(zero.Send(big), zero.Flush()) },
				func() error { return readPieces(one, big, uint64(i)) },
			)
		}
		meshes[i%2].Release(lane)
		meshes[1-i%2].Release(lane)
	}
	for end := time.Now().Add(hangTimeout); runtime.NumGoroutine() > goroutines ||
		openFiles(s) > files; runtime.Gosched() {
		if time.Now().After(end) {
			s.Fatalf("got %d goroutines and %d open files, want at most %d and %d", runtime.NumGoroutine(),
				openFiles(s), goroutines, files)
		}
	}
}

// openFiles returns the number of file descriptors of this process, or 0 if the system does not provide it.
func openFiles(s *suite) int {
	s.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		s.Fatal(err)
	}
	return len(fds)
}
