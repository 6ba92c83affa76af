package engine_test

import (
	"errors"
	"slices"
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
