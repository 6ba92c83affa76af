// Package transporttest checks that implementations of transport.Mesh obey its contract, and measures them.
package transporttest

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// Factory creates the meshes of ranks 0 to size-1 for a new epoch. The caller closes the meshes.
type Factory func(tb testing.TB, size int) []transport.Mesh

// hangTimeout is the time after which a test concludes that a call hangs, and fails. A test that passes never
// waits so long.
const hangTimeout = time.Minute

// Run checks that the meshes that f creates obey the contract. Each clause of the contract is a subtest.
func Run(t *testing.T, f Factory) {
	for _, c := range contract {
		t.Run(c.name, func(t *testing.T) { c.run(&suite{T: t, factory: f}) })
	}
}

// RunUnreleased runs the tests of Run except the tests of Release and of polling. It is for meshes that
// exchange the Control lane with another lane, so that the tests use the Control lane. The Control lane
// cannot be released, and goroutines can poll and park only for that lane.
func RunUnreleased(t *testing.T, f Factory) {
	for _, c := range contract {
		if strings.HasPrefix(c.name, "Release") || strings.HasPrefix(c.name, "Poll") {
			continue
		}
		t.Run(c.name, func(t *testing.T) { c.run(&suite{T: t, factory: f}) })
	}
}

// RunInBubble runs each test of Run in a testing/synctest bubble. It is for meshes that do no I/O. In a
// bubble, a call that hangs fails the test at once.
func RunInBubble(t *testing.T, f Factory) {
	for _, c := range contract {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { c.run(&suite{T: t, factory: f}) })
		})
	}
}

var contract = []struct {
	name string
	run  func(*suite)
}{
	{"Stream", testStream},
	{"BothDirections", testBothDirections},
	{"AllSendBeforeAnyReceives", testAllSendFirst},
	{"ManySmallSends", testManySmallSends},
	{"SteadyBacklog", testSteadyBacklog},
	{"LanesAreIndependent", testLanes},
	{"EitherSideAsksFirst", testEitherSideFirst},
	{"SameConn", testSameConn},
	{"NoSuchPeer", testNoSuchPeer},
	{"ZeroLength", testZeroLength},
	{"FlushReleasesBuffers", testFlush},
	{"SentReleasesBuffers", testSent},
	{"ContextEndsConn", testContext},
	{"AbortUnblocks", testAbortUnblocks},
	{"AbortIsSilent", testAbortIsSilent},
	{"AbortBeforeConn", testAbortBeforeConn},
	{"AbortOfOneLane", testAbortOneLane},
	{"FirstAbortCounts", testFirstAbort},
	{"PeerCloses", testPeerCloses},
	{"CloseUnblocks", testCloseUnblocks},
	{"CloseAfterAbort", testCloseAfterAbort},
	{"TryRead", testTryRead},
	{"PollPingPong", testPollPingPong},
	{"PollParks", testPollParks},
	{"PollPeerCloses", testPollPeerCloses},
	{"PollOwnEnd", testPollOwnEnd},
	{"ReleaseUnblocks", testReleaseUnblocks},
	{"ReleaseDeliversAll", testReleaseDeliversAll},
	{"ReleaseOfOneLane", testReleaseOneLane},
	{"ReleaseIsFinal", testReleaseIsFinal},
	{"ReleaseEndsLateChannels", testReleaseEndsLateChannels},
	{"ReleaseOfControl", testReleaseOfControl},
	{"ReleaseWhileInUse", testReleaseWhileInUse},
	{"ReleaseFreesAll", testReleaseFreesAll},
}

// suite is the testing.T of one clause together with the factory of the meshes.
type suite struct {
	*testing.T
	factory Factory
}

// open creates meshes for size ranks. When the clause ends, open closes the meshes and checks that no
// goroutine is left.
func (s *suite) open(size int) []transport.Mesh {
	s.Helper()
	before := goleak.IgnoreCurrent()
	meshes := s.factory(s.T, size)
	s.Cleanup(func() {
		for r, m := range meshes {
			if err := m.Close(); err != nil {
				s.Errorf("rank %d: close: %v", r, err)
			}
		}
		goleak.VerifyNone(s.T, before)
	})
	return meshes
}

// together calls fns concurrently and waits for all of them. If one of them fails or hangs, the clause ends.
func (s *suite) together(fns ...func() error) {
	s.Helper()
	s.await(s.begin(fns...))
}

// begin starts fns. When all of them have returned, the channel receives their joined errors, or nil.
func (s *suite) begin(fns ...func() error) <-chan error {
	var wg sync.WaitGroup
	errs := make([]error, len(fns))
	for i, fn := range fns {
		wg.Go(func() { errs[i] = fn() })
	}
	done := make(chan error, 1)
	go func() {
		wg.Wait()
		done <- errors.Join(errs...)
	}()
	return done
}

func (s *suite) await(done <-chan error) {
	s.Helper()
	if err := s.result(done); err != nil {
		s.Fatal(err)
	}
}

// result returns the error that arrives on done. If nothing arrives within hangTimeout, the clause ends.
func (s *suite) result(done <-chan error) error {
	s.Helper()
	hung := time.NewTimer(hangTimeout)
	defer hung.Stop()
	select {
	case err := <-done:
		return err
	case <-hung.C:
		s.Fatalf("a call has not returned within %v", hangTimeout)
		return nil
	}
}

// pair connects ranks 0 and 1 on the given lane and returns their Conns.
func (s *suite) pair(meshes []transport.Mesh, lane transport.Lane) (zero, one transport.Conn) {
	s.Helper()
	s.together(s.connect(&zero, meshes[0], lane, 1), s.connect(&one, meshes[1], lane, 0))
	return zero, one
}

// connect returns a function that calls Conn of m for the given lane and peer, and stores the result in *c.
func (s *suite) connect(c *transport.Conn, m transport.Mesh, lane transport.Lane,
	peer topo.Rank) func() error {
	return func() (err error) {
		*c, err = m.Conn(s.Context(), lane, peer)
		return err
	}
}

// exchange sends a text from each end to the other end and checks that it arrives.
func (s *suite) exchange(a, b transport.Conn) {
	s.Helper()
	half := func(c transport.Conn, send, want string) func() error {
		return func() error {
			if err := c.Send([]byte(send)); err != nil {
				return err
			}
			got := make([]byte, len(want))
			if _, err := io.ReadFull(c, got); err != nil {
				return err
			}
			if string(got) != want {
				return fmt.Errorf("got %q, want %q", got, want)
			}
			return c.Flush()
		}
	}
	s.together(half(a, "ping from a", "pong from b"), half(b, "pong from b", "ping from a"))
}

// random returns n bytes that depend only on seed.
func random(seed byte, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b) // never fails
	return b
}

// wantPeer returns nil if err is a *PeerError with the given peer and lane. Otherwise it returns an error.
func wantPeer(err error, lane transport.Lane, peer topo.Rank) error {
	var pe *transport.PeerError
	if !errors.As(err, &pe) || pe.Peer != peer || pe.Lane != lane {
		return fmt.Errorf("got error %v, want a *PeerError for lane %d to rank %d", err, lane, peer)
	}
	return nil
}

// wantErr returns nil if err wraps want. Otherwise it returns an error. The parameter call is the name of the
// call that has returned err.
func wantErr(call string, err, want error) error {
	if !errors.Is(err, want) {
		return fmt.Errorf("%s: got error %v, want %v", call, err, want)
	}
	return nil
}
