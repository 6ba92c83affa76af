package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
)

// gather calls Gather at all ranks except the ranks in dead. If Gather returns an error at a rank, it calls
// Fail there. It returns the errors, indexed by rank.
func gather(ctx context.Context, sessions []result, cluster *mem.Cluster, dead ...int) []error {
	errs := make([]error, len(sessions))
	var wg sync.WaitGroup
	for rank, s := range sessions {
		if slices.Contains(dead, rank) {
			continue
		}
		wg.Go(func() {
			watched, stop := s.Watch(ctx)
			defer stop()
			errs[rank] = s.Gather(watched, cluster.Mesh(topo.Rank(rank)))
			if errs[rank] != nil {
				peer, _ := errors.AsType[*transport.PeerError](errs[rank])
				if peer == nil {
					peer = &transport.PeerError{Peer: s.rank}
				}
				errs[rank] = s.Fail(errs[rank], s.rank, peer.Peer)
			}
		})
	}
	wg.Wait()
	return errs
}

// In a job of more than RingAbove ranks, the root sends each rank only the records of its neighbours. After
// Gather each rank has all records.
func TestRing(t *testing.T) {
	for _, size := range []int{2, 3, 4, 7, 16} {
		for _, above := range []int{0, 2} {
			t.Run(fmt.Sprintf("ranks=%d/above=%d", size, above), func(t *testing.T) {
				ctx, kv := testnet.Context(t), newStore(t)
				var cfgs []JoinConfig
				var records []Record
				for rank := range size {
					cfg := config(kv, rank, size)
					cfg.RingAbove = above
					cfgs, records = append(cfgs, cfg), append(records, recordOf(rank, 0))
				}
				sessions := joinAll(t, ctx, cfgs...)
				for rank, s := range sessions {
					if s.err != nil {
						t.Fatal(s.err)
					}
					known := 0
					for _, r := range s.Records {
						if r.Addr != "" {
							known++
						}
					}
					want := size
					if rank > 0 && above == 2 && size > 2 {
						want = 3
					}
					if known != want {
						t.Errorf("rank %d got the records of %d ranks, want %d", rank, known, want)
					}
				}
				if err := errors.Join(gather(ctx, sessions, mem.New(size))...); err != nil {
					t.Fatal(err)
				}
				formed(t, sessions, records...)
			})
		}
	}
}

// If a rank dies during Gather, the errors of all other ranks name the dead rank.
func TestDeathInRing(t *testing.T) {
	ctx, kv := testnet.Context(t), newStore(t)
	const size, dead = 5, 3
	var cfgs []JoinConfig
	for rank := range size {
		cfg := config(kv, rank, size)
		cfg.RingAbove = 2
		cfgs = append(cfgs, cfg)
	}
	sessions := joinAll(t, ctx, cfgs...)
	for _, s := range sessions {
		if s.err != nil {
			t.Fatal(s.err)
		}
	}
	cluster := mem.New(size)
	cluster.Kill(dead)
	sessions[dead].member.conn.Close() // as the kernel does if the process of the rank ends
	for rank, err := range gather(ctx, sessions, cluster, dead) {
		why, ok := errors.AsType[*FailedError](err)
		if rank != dead && (!ok || !slices.Equal(why.Ranks, []topo.Rank{dead})) {
			t.Errorf("rank %d: got %v, want that rank %d failed", rank, err, dead)
		}
	}
}

func TestDeviceOfTwo(t *testing.T) {
	type gpu struct {
		host, device string
		shared       bool
	}
	for name, test := range map[string]struct {
		gpus [4]gpu
		want string // text of the error; empty if no error is expected
	}{
		"one each": {[4]gpu{{"a", "0", false}, {"a", "1", false}, {"b", "0", false}, {"b", "1", false}},
			""},
		"none": {[4]gpu{{"a", "", false}, {"a", "", false}, {"a", "", false}, {"a", "", false}},
			""},
		"same": {[4]gpu{{"a", "0", false}, {"a", "1", false}, {"b", "0", false}, {"a", "1", false}},
			`rank 1 (pid 100 on host "host0" at 10.0.0.1:7) and rank 3 (pid 300`},
		"shared": {[4]gpu{{"a", "0", true}, {"a", "0", true}, {"a", "0", true}, {"b", "0", false}},
			""},
		"first shares": {[4]gpu{{"a", "0", true}, {"a", "0", false}, {"a", "2", true}, {"b", "0", false}},
			"rank 0 (pid 0"},
		"second shares": {[4]gpu{{"a", "0", false}, {"a", "0", true}, {"a", "2", true}, {"b", "0", false}},
			"and rank 1 (pid 100"},
		"third does not": {[4]gpu{{"a", "0", true}, {"a", "0", true}, {"a", "0", false}, {"b", "0", false}},
			"and rank 2 (pid 200"},
	} {
		t.Run(name, func(t *testing.T) {
			kv := newStore(t)
			var cfgs []JoinConfig
			for rank, g := range test.gpus {
				cfg := config(kv, rank, len(test.gpus))
				cfg.Self.HostID, cfg.Self.Device, cfg.Self.SharesDevice = g.host, g.device, g.shared
				cfgs = append(cfgs, cfg)
			}
			for rank, r := range joinAll(t, testnet.Context(t), cfgs...) {
				if test.want == "" {
					if r.err != nil {
						t.Errorf("rank %d: %v", rank, r.err)
					}
					continue
				}
				if refused, ok := errors.AsType[*RefusedError](r.err); !ok ||
					refused.Reason != DuplicateDevice {
					t.Errorf("rank %d: got %v, want that a device is used twice", rank, r.err)
				}
				testnet.WantError(t, r.err, "both use device", test.want)
			}
		})
	}
}
