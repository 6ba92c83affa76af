package shm_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/rendezvous"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/shm"
	"github.com/gohvd/gohvd/internal/transport/transporttest"
	"github.com/gohvd/gohvd/store"
)

// job holds the arguments of Connect for all ranks of a test.
type job struct {
	cfg       shm.Config
	hosts     []string
	endpoints []*shm.Endpoint
	offers    []shm.Offer
	under     []transport.Mesh
	sessions  []*rendezvous.Session         // the method Agree of a session is passed to Connect
	epoch     func(rank int, ep *shm.Epoch) // if not nil, changes the Epoch that a rank passes to Connect
}

// noOffer closes the endpoint of the given rank and replaces it with an endpoint that cannot share memory.
func (j *job) noOffer(tb testing.TB, rank int) {
	tb.Helper()
	if err := j.endpoints[rank].Close(); err != nil {
		tb.Fatal(err)
	}
	j.endpoints[rank] = shm.Unavailable(errors.New("not published"))
}

// newJob opens an endpoint for one rank on each of the given hosts, and checks in the ranks.
func newJob(tb testing.TB, cfg shm.Config, under []transport.Mesh, hosts ...string) *job {
	tb.Helper()
	// The name of TempDir has that of the test, and the path of a socket may have only 107 bytes.
	dir, err := os.MkdirTemp("", "shm")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			tb.Error(err)
		}
	})
	cfg.RuntimeDir = dir
	j := &job{cfg: cfg, hosts: hosts, under: under}
	for range hosts {
		e, err := shm.Listen(cfg)
		if err != nil {
			tb.Fatal(err)
		}
		j.endpoints = append(j.endpoints, e)
		j.offers = append(j.offers, e.Offer())
	}
	j.sessions = meet(tb, hosts)
	return j
}

// meet checks in one rank on each of the given hosts. The sessions end when the test ends or when the test
// calls leave.
func meet(tb testing.TB, hosts []string) []*rendezvous.Session {
	tb.Helper()
	kv := store.NewHashStore(store.Limits{})
	sessions, errs := make([]*rendezvous.Session, len(hosts)), make([]error, len(hosts))
	var wg sync.WaitGroup
	for r, host := range hosts {
		wg.Go(func() {
			sessions[r], errs[r] = rendezvous.Join(tb.Context(), rendezvous.JoinConfig{
				Store: kv, Job: "job", Rank: topo.Rank(r), Size: len(hosts),
				Self: rendezvous.Record{HostID: host},
			})
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		tb.Fatal(err)
	}
	if err := kv.Close(); err != nil {
		tb.Error(err)
	}
	tb.Cleanup(func() { leave(sessions) })
	return sessions
}

// leave closes the sessions. It may be called several times. It ignores errors, because closing a session
// returns an error if the session of another rank was closed before.
func leave(sessions []*rendezvous.Session) {
	for _, s := range sessions {
		_ = s.Close()
	}
}

// connect calls Connect at all ranks at the same time. It returns the mesh and the error of each rank.
func (j *job) connect(ctx context.Context) ([]shm.Sharer, []error) {
	meshes, errs := make([]shm.Sharer, len(j.hosts)), make([]error, len(j.hosts))
	var wg sync.WaitGroup
	for r, e := range j.endpoints {
		if e == nil {
			continue
		}
		wg.Go(func() {
			ep := shm.Epoch{Job: "job", Epoch: 1, Rank: topo.Rank(r), Hosts: j.hosts, Offers: j.offers,
				Under: j.under[r], Agree: j.sessions[r].Agree}
			if j.epoch != nil {
				j.epoch(r, &ep)
			}
			meshes[r], errs[r] = e.Connect(ctx, ep)
		})
	}
	wg.Wait()
	leave(j.sessions)
	return meshes, errs
}

// mustConnect is like connect, but fails the test if a rank gets an error. It closes the meshes when the test
// ends.
func (j *job) mustConnect(tb testing.TB) []shm.Sharer {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), hangTimeout)
	defer cancel()
	meshes, errs := j.connect(ctx)
	if err := errors.Join(errs...); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		for r, m := range meshes {
			if err := m.Close(); err != nil {
				tb.Errorf("rank %d: close: %v", r, err)
			}
		}
	})
	empty(tb, "after connect", j.cfg.RuntimeDir)
	return meshes
}

const hangTimeout = time.Minute

// onOneHost returns the connected meshes of size ranks on one host. The meshes underneath use TCP on
// loopback.
func onOneHost(tb testing.TB, cfg shm.Config, size int) []shm.Sharer {
	tb.Helper()
	hosts := slices.Repeat([]string{"host"}, size)
	meshes := newJob(tb, cfg, testcluster.TCPMeshes(tb, size), hosts...).mustConnect(tb)
	for r, m := range meshes {
		if got := m.Group(); len(got) != size || m.UnsharedReason() != "" {
			tb.Fatalf("rank %d: got group %v, %q, want all %d ranks", r, got, m.UnsharedReason(), size)
		}
	}
	return meshes
}

// swapped is a Mesh that exchanges the Control lane with the lane in its field lane. The tests of
// the contract use that other lane, so with swapped they test the Control channels in shared memory.
type swapped struct {
	transport.Mesh
	lane transport.Lane
}

func (s swapped) other(lane transport.Lane) transport.Lane {
	switch lane {
	case s.lane:
		return transport.Control
	case transport.Control:
		return s.lane
	}
	return lane
}

func (s swapped) Conn(ctx context.Context, lane transport.Lane, peer topo.Rank) (transport.Conn, error) {
	c, err := s.Mesh.Conn(ctx, s.other(lane), peer)
	if err != nil {
		return nil, s.blame(err)
	}
	return swappedConn{c, s}, nil
}

func (s swapped) Abort(lane transport.Lane, err error) { s.Mesh.Abort(s.other(lane), err) }

// blame replaces the lane in a *PeerError with the lane that the test has used.
func (s swapped) blame(err error) error {
	var p *transport.PeerError
	if errors.As(err, &p) {
		return &transport.PeerError{Peer: p.Peer, Lane: s.other(p.Lane), Err: p.Err}
	}
	return err
}

type swappedConn struct {
	transport.Conn
	s swapped
}

func (c swappedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	return n, c.s.blame(err)
}
func (c swappedConn) Send(p []byte) error { return c.s.blame(c.Conn.Send(p)) }
func (c swappedConn) Flush() error        { return c.s.blame(c.Conn.Flush()) }

func contractMeshes(ringBytes, ranksPerHost int,
	wrap func(transport.Mesh) transport.Mesh) transporttest.Factory {
	return func(tb testing.TB, size int) []transport.Mesh {
		hosts := make([]string, size)
		for r := range hosts {
			hosts[r] = fmt.Sprint("host", r/ranksPerHost)
		}
		j := newJob(tb, shm.Config{RingBytes: ringBytes}, testcluster.TCPMeshes(tb, size), hosts...)
		meshes, errs := j.connect(tb.Context())
		if err := errors.Join(errs...); err != nil {
			tb.Fatal(err)
		}
		var all []transport.Mesh
		for _, m := range meshes {
			all = append(all, wrap(m))
		}
		return all
	}
}

// TestContract checks that the mesh obeys the contract of package transport on every lane, even if only some
// of its Control channels are in shared memory.
func TestContract(t *testing.T) {
	for name, ranksPerHost := range map[string]int{"one host": 8, "two ranks a host": 2} {
		t.Run(name, func(t *testing.T) {
			transporttest.Run(t, contractMeshes(0, ranksPerHost, func(m transport.Mesh) transport.Mesh {
				return m
			}))
		})
	}
}

// TestContractInMemory checks that the channels in shared memory obey the contract of package transport, even
// if the rings are so small that all sends wait for room. One test of the contract uses only lane 3, so there
// is a case for that lane.
func TestContractInMemory(t *testing.T) {
	for _, c := range []struct {
		ringBytes int
		lane      transport.Lane
	}{{0, 1}, {1024, 1}, {4096, 3}} {
		t.Run(fmt.Sprintf("ring=%d/lane=%d", c.ringBytes, c.lane), func(t *testing.T) {
			f := contractMeshes(c.ringBytes, 8, func(m transport.Mesh) transport.Mesh {
				return swapped{m, c.lane}
			})
			transporttest.RunUnreleased(t, f)
		})
	}
}

// TestMain runs the tests. In a child process that a test has started, it runs one rank instead (see child).
func TestMain(m *testing.M) {
	if len(os.Args) > 3 && os.Args[1] == "rank" {
		if err := child(os.Args[2], os.Args[3]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}
