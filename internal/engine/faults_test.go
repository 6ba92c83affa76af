package engine_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/faulty"
)

// livenessLimit is the time of silence after which a rank has failed.
const livenessLimit = 5 * time.Second

// withFaults calls f in a synctest bubble with a job of four ranks whose connections obey rule. The engines
// are closed afterwards.
func withFaults(t *testing.T, rule *faulty.Rule, lockstep bool, f func(c *cluster)) {
	synctest.Test(t, func(t *testing.T) {
		net := faulty.New(1, rule)
		c := start(t, 4, func(cfg *engine.Config) {
			cfg.Lockstep, cfg.LivenessTimeout = lockstep, livenessLimit
			cfg.Mesh = net.Wrap(cfg.Rank, cfg.Mesh)
		})
		f(c)
		for _, e := range c.engines {
			e.Close()
		}
	})
}

// failedRanks returns the ranks that err names. If err is not an engine.PeerError, the test fails.
func (c *cluster) failedRanks(r int, err error) []int {
	var peer *engine.PeerError
	if !errors.As(err, &peer) {
		c.t.Errorf("rank %d: got error %v, want a *PeerError", r, err)
		return nil
	}
	return peer.Ranks
}

// If the connection between two ranks is reset in the middle of an allreduce, all ranks get the same verdict,
// which names one of the two ranks or both.
func TestDataConnectionReset(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		cable := &faulty.Rule{Name: "cable", Pairs: faulty.Pair(1, 3), CutAfterBytes: 300_000,
			Lanes: faulty.Lane(transport.DataLane(topo.Global))}
		withFaults(t, cable, lockstep, func(c *cluster) {
			began := time.Now()
			named := make([][]int, len(c.engines))
			c.each(func(r int) {
				named[r] = c.failedRanks(r, c.wait(c.allreduce(r, "x", make([]byte, 1<<20))))
				if took := time.Since(began); took > 3*time.Second {
					t.Errorf("rank %d: the operation failed after %v, want at most 3 s", r, took)
				}
			})
			for r, ranks := range named {
				other := slices.ContainsFunc(ranks, func(r int) bool { return r != 1 && r != 3 })
				if len(ranks) == 0 || other || !slices.Equal(ranks, named[0]) {
					t.Errorf("rank %d: the verdict names %v, rank 0 got %v, want rank 1 or 3", r, ranks, named[0])
				}
			}
			if got := cable.Counts().Bytes; got != cable.CutAfterBytes {
				t.Errorf("%d bytes passed before the cut, want %d", got, cable.CutAfterBytes)
			}
		})
	})
}

// lacking is a mesh of a rank that lacks memory to read from its control connections, or to send on them,
// while reads or sends is set.
type lacking struct {
	transport.Mesh
	reads, sends atomic.Bool
}

func (m *lacking) Conn(ctx context.Context, lane transport.Lane, peer topo.Rank) (transport.Conn, error) {
	c, err := m.Mesh.Conn(ctx, lane, peer)
	if err != nil || lane != transport.Control {
		return c, err
	}
	return &lackingConn{c, m, &transport.PeerError{Peer: peer, Lane: lane, Err: syscall.ENOMEM}}, nil
}

// Park parks although bytes have arrived, because nobody reads a connection that has failed.
func (m *lacking) Park() bool { return m.Mesh.Park() || m.reads.Load() }

type lackingConn struct {
	transport.Conn
	mesh *lacking
	err  error
}

func (c *lackingConn) TryRead(p []byte) (int, error) {
	if c.mesh.reads.Load() {
		return 0, c.err
	}
	return c.Conn.TryRead(p)
}

func (c *lackingConn) Send(p []byte) error {
	if c.mesh.sends.Load() {
		return c.err
	}
	return c.Conn.Send(p)
}

// If a rank lacks memory for its control connections, all ranks get a verdict that names this rank, although
// it may receive none or send no report.
func TestControlConnectionLacksMemory(t *testing.T) {
	for r := range 2 {
		for _, sends := range []bool{false, true} {
			t.Run(fmt.Sprintf("rank %d sends %v", r, sends), func(t *testing.T) {
				inBubbles(t, func(t *testing.T, lockstep bool) {
					meshes := make([]lacking, 3)
					c := start(t, 3, func(cfg *engine.Config) {
						cfg.Lockstep, cfg.LivenessTimeout = lockstep, livenessLimit
						meshes[cfg.Rank].Mesh = cfg.Mesh
						cfg.Mesh = &meshes[cfg.Rank]
					})
					c.each(func(of int) { c.succeeds(c.allreduce(of, "before", make([]byte, 8))) })
					meshes[r].reads.Store(!sends)
					meshes[r].sends.Store(sends)
					c.each(func(of int) {
						got := c.failedRanks(of, c.wait(c.allreduce(of, "after", make([]byte, 8))))
						if !slices.Equal(got, []int{r}) {
							t.Errorf("rank %d: the verdict names %v, want rank %d", of, got, r)
						}
					})
					for _, e := range c.engines {
						e.Close()
					}
				})
			})
		}
	}
}

// If nothing arrives any more on the control connection of a rank, the other ranks get a verdict that names
// this rank when the liveness timeout has passed.
func TestControlConnectionSilent(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		cable := &faulty.Rule{Name: "cable", Pairs: faulty.Pair(0, 2), Lanes: faulty.Lane(transport.Control),
			Silent: true}
		withFaults(t, cable, lockstep, func(c *cluster) {
			c.each(func(r int) {
				c.succeeds(c.allreduce(r, "before", make([]byte, 8)))
			})
			cable.Cut()
			began := time.Now()
			c.each(func(r int) {
				ranks := c.failedRanks(r, c.wait(c.allreduce(r, "after", make([]byte, 8))))
				want := 2
				if r == 2 {
					want = 0 // to rank 2 rank 0 is silent
				}
				took := time.Since(began)
				if !slices.Equal(ranks, []int{want}) {
					t.Errorf("rank %d: the verdict names %v, want rank %d", r, ranks, want)
				}
				if took > livenessLimit || took < livenessLimit/2 {
					t.Errorf("rank %d: the verdict came after %v, want about %v", r, took, livenessLimit)
				}
			})
		})
	})
}
