package testcluster_test

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport/faulty"
)

// In an allreduce of B bytes by a ring of n ranks, 2(n-1)/n × B bytes pass each link of the ring. If two
// hosts have consecutive ranks, one link of the ring goes from each host to the other, and its bandwidth
// decides the time.
func TestBytesBetweenHosts(t *testing.T) {
	const numBytes, bandwidth = 12e6, 1e6
	for _, hosts := range [][]string{{"a", "b"}, {"a", "a", "b"}, {"a", "a", "b", "b"}} {
		t.Run(fmt.Sprint(hosts), func(t *testing.T) {
			n := len(hosts)
			want := int64(2 * (n - 1) * numBytes / n)
			synctest.Test(t, func(t *testing.T) {
				there := &faulty.Rule{Name: "a to b", Pairs: faulty.Hosts(hosts, "a", "b"), Lanes: faulty.Data,
					BytesPerSecond: bandwidth}
				back := &faulty.Rule{Name: "b to a", Pairs: faulty.Hosts(hosts, "b", "a"), Lanes: faulty.Data}
				all := &faulty.Rule{Name: "all", Lanes: faulty.Data}
				net := faulty.New(1, there, back, all)
				testcluster.Run(t, testcluster.Options{Ranks: n, Config: func(cfg *engine.Config) {
					cfg.Mesh = net.Wrap(cfg.Rank, cfg.Mesh)
				}}, func(r *testcluster.Rank) {
					began := time.Now()
					r.Do(testcluster.Allreduce("x", tensor.Int64, tensor.Shape{numBytes / 8}, tensor.Sum,
						make([]byte, numBytes)))
					took, least := time.Since(began), time.Duration(want)*time.Second/bandwidth
					receives := int(r.Rank) == slices.Index(hosts, "b") // the last bytes of the link
					if took > least*11/10 || receives && took < least {
						r.Errorf("the allreduce took %v, want %v for %d bytes at %d bytes/s", took, least, want,
							int(bandwidth))
					}
				})
				for _, rule := range []*faulty.Rule{there, back} {
					if got := rule.Counts().Bytes; got != want {
						t.Errorf("%d bytes from host %s, want %d", got, rule.Name, want)
					}
				}
				if got := all.Counts().Bytes; got != want*int64(n) {
					t.Errorf("%d bytes on all links, want %d", got, want*int64(n))
				}
			})
		})
	}
}

// All operations give the right results over slow connections, with all transports and both kinds of
// negotiation. With shared memory only the negotiation is slow.
func TestEveryOperationOverSlowConnections(t *testing.T) {
	for _, over := range []testcluster.Transport{testcluster.Mem, testcluster.TCP, testcluster.SHM} {
		for _, lockstep := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/lockstep=%v", over, lockstep), func(t *testing.T) {
				net := faulty.New(1,
					&faulty.Rule{Name: "distance", Delay: 100 * time.Microsecond, Jitter: time.Millisecond},
					&faulty.Rule{Name: "link", BytesPerSecond: 1e6})
				testcluster.Run(t, testcluster.Options{
					Ranks: 3, Transport: over, Sets: [][]topo.Rank{{0, 2}},
					Config: func(cfg *engine.Config) {
						cfg.Lockstep, cfg.Mesh = lockstep, net.Wrap(cfg.Rank, cfg.Mesh)
					},
				}, everyOperation)
			})
		}
	}
}
