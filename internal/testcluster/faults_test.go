package testcluster_test

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
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

var seed = flag.Uint64("seed", 0, "run TestDataConnectionCut only with this seed")

// wired is a job and its data connections on one lane.
type wired struct {
	name  string
	hosts []string // the host of each rank; nil if no ranks share memory
	ranks int
	lane  transport.Lane
	// ways has the directions of the connections in which each call of betweenAll sends much.
	ways [][2]topo.Rank
}

// If one data connection between two ranks is cut in the middle of an operation, while all control
// connections stay whole, every rank gets a verdict that names these two ranks.
func TestDataConnectionCut(t *testing.T) {
	const seeds = 2
	flat, outer := transport.DataLane(topo.Global), transport.OuterLane(topo.Global)
	for _, job := range []wired{
		{"one level", nil, 4, flat, [][2]topo.Rank{{0, 1}, {2, 0}, {0, 3}, {2, 1}, {1, 3}, {3, 2}}},
		{"2+2", []string{"a", "a", "b", "b"}, 4, outer, [][2]topo.Rank{{0, 2}, {2, 0}, {1, 3}, {3, 1}}},
		{"2+1", []string{"a", "a", "b"}, 3, outer, [][2]topo.Rank{{0, 2}, {2, 0}}},
		{"1+1+2", []string{"a", "b", "c", "c"}, 4, outer, [][2]topo.Rank{{0, 1}, {1, 2}, {2, 0}}},
	} {
		for _, lockstep := range []bool{false, true} {
			for s := uint64(1); s <= max(seeds, *seed); s++ {
				if *seed == 0 || *seed == s {
					t.Run(fmt.Sprintf("%s/lockstep=%v/seed=%d", job.name, lockstep, s), func(t *testing.T) {
						t.Parallel()
						job.cut(t, lockstep, s)
					})
				}
			}
		}
	}
}

// cut runs a job in which the seed chooses the direction and the moment of the cut. On a busy machine, a
// healthy rank can be silent for so long that the job blames it. Then cut runs the job again, twice at most.
func (w *wired) cut(t *testing.T, lockstep bool, seed uint64) {
	for attempt := 1; ; attempt++ {
		wrong := w.cutOnce(t, lockstep, seed)
		if attempt < 3 && strings.Contains(wrong, "silent for") {
			t.Log(wrong)
			continue
		}
		if wrong != "" {
			t.Error(wrong)
		}
		return
	}
}

// cutOnce runs a job once, and says what is wrong with the errors of its ranks.
func (w *wired) cutOnce(t *testing.T, lockstep bool, seed uint64) string {
	random := rand.New(rand.NewPCG(seed, 0))
	way := w.ways[random.IntN(len(w.ways))]
	from, to := way[0], way[1]
	cable := &faulty.Rule{Name: "cable", Pairs: faulty.Pair(from, to), Lanes: faulty.Lane(w.lane),
		CutAfterBytes: 1 + random.Int64N(100_000), OneWay: random.IntN(2) == 0}
	net := faulty.New(seed, cable)
	wrong := make([]string, w.ranks)
	testcluster.Run(t, testcluster.Options{Ranks: w.ranks, Transport: testcluster.TCP, Hosts: w.hosts,
		Fails: true, Config: func(cfg *engine.Config) {
			cfg.Lockstep, cfg.Mesh = lockstep, net.Wrap(cfg.Rank, cfg.Mesh)
			cfg.LivenessTimeout = 10 * time.Second // the verdict comes after two heartbeat periods
		},
	}, func(r *testcluster.Rank) {
		var err error
		for round := 0; err == nil && round < 20; round++ {
			err = r.Try(betweenAll(round)...)
		}
		peer, ok := errors.AsType[*engine.PeerError](err)
		want := []int{int(min(from, to)), int(max(from, to))}
		if !ok || !slices.Equal(peer.Ranks, want) {
			wrong[r.Rank] = fmt.Sprintf("cut from rank %d to %d after %d bytes, one way is %v: rank %d got error "+
				"%v, want failed ranks %v\n", from, to, cable.CutAfterBytes, cable.OneWay, r.Rank, err, want)
		}
	})
	return strings.Join(wrong, "")
}

// betweenAll returns operations in which every rank sends to other ranks of its job.
func betweenAll(round int) (all []*testcluster.Op) {
	for _, numElems := range []int64{12, 12_000, 120_000} {
		name, shape := fmt.Sprint(round, " ", numElems), tensor.Shape{numElems}
		x := make([]byte, 4*numElems)
		all = append(all,
			testcluster.Allreduce("sum "+name, tensor.Float32, shape, tensor.Sum, x),
			testcluster.Allgather("gather "+name, tensor.Float32, shape, slices.Clone(x)),
			testcluster.Alltoall("exchange "+name, tensor.Float32, shape, nil, slices.Clone(x)))
	}
	return all
}
