package tcp_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/faulty"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

// Plan chooses the first rule that applies to kind, ranks and bytes and whose algorithm can serve the
// operation.
func TestTable(t *testing.T) {
	table := tcp.Table{
		{Kind: message.Allreduce, MaxRanks: 3, MaxBytes: 1000, Algorithm: message.RecursiveDoubling},
		{Kind: message.Allreduce, MaxBytes: 1000, Algorithm: message.Exchange},
		{Kind: message.Allreduce, MaxRanks: 4, Algorithm: message.HalvingDoubling},
		{Kind: message.Allgather, Algorithm: message.Bruck},
	}
	b := tcp.Register(memMeshes(2)[0], tcp.Config{Table: table})
	for _, c := range []struct {
		kind     message.Kind
		dt       tensor.DType
		ranks    int
		numBytes int64
		want     message.Algorithm
	}{
		{message.Allreduce, tensor.Float32, 2, 1000, message.RecursiveDoubling},
		{message.Allreduce, tensor.Float16, 2, 1000, message.RecursiveDoubling},
		{message.Allreduce, tensor.Float32, 3, 1000, message.RecursiveDoubling},
		{message.Allreduce, tensor.Float16, 3, 1000, message.Exchange},
		{message.Allreduce, tensor.Float32, 4, 1000, message.Exchange},
		{message.Allreduce, tensor.Float32, 2, 1001, message.HalvingDoubling},
		{message.Allreduce, tensor.Float16, 3, 1001, message.Direct},
		{message.Allreduce, tensor.Float32, 5, 1001, message.Ring},
		{message.Allgather, tensor.Float32, 5, 1 << 40, message.Bruck},
		{message.Broadcast, tensor.Float32, 5, 1 << 40, message.Tree},
	} {
		r := &message.Response{Kind: c.kind, DType: c.dt, Op: tensor.Sum}
		if got, err := b.Plan(topo.UpTo(c.ranks), r, c.numBytes, nil); got != c.want || err != nil {
			t.Errorf("%v of %d bytes of %v among %d ranks: got %v, %v, want %v", c.kind, c.numBytes, c.dt,
				c.ranks,
				got, err, c.want)
		}
	}
}

// By default an alltoall among more than 32 ranks uses Bruck's algorithm. Its size is not known.
func TestAlltoallByDefault(t *testing.T) {
	b := tcp.Register(memMeshes(2)[0], tcp.Config{})
	for n, want := range map[int]message.Algorithm{2: message.Direct, 32: message.Direct,
		33: message.Bruck} {
		if got, err := b.Plan(topo.UpTo(n), &message.Response{Kind: message.Alltoall}, 0, nil); got != want {
			t.Errorf("%d ranks: got %v, %v, want %v", n, got, err, want)
		}
	}
}

// A backend that another backend uses chooses by the same table, and ignores forced algorithms.
func TestTableWithin(t *testing.T) {
	cfg := tcp.Config{Table: tcp.Table{{Kind: message.Allgather, Algorithm: message.Ring}},
		Forced: tcp.Forced{message.Allgather: message.Bruck}}
	b := tcp.Within(memMeshes(2)[0], transport.OuterLane, cfg)
	got, err := b.Plan(topo.UpTo(2), &message.Response{Kind: message.Allgather}, 4, nil)
	if got != message.Ring {
		t.Errorf("got %v, %v, want ring", got, err)
	}
}

// A forced algorithm replaces the table for its kind. If it cannot serve an operation, the error names the
// algorithms that can.
func TestForced(t *testing.T) {
	forced, err := tcp.ParseForced(" allreduce=ring, broadcast=chain ,")
	if err != nil {
		t.Fatal(err)
	}
	b := tcp.Register(memMeshes(3)[0], tcp.Config{Forced: forced})
	plan := func(kind message.Kind, dt tensor.DType, op tensor.ReduceOp) (message.Algorithm, error) {
		return b.Plan(topo.UpTo(3), &message.Response{Kind: kind, DType: dt, Op: op}, 4, nil)
	}
	for _, c := range []struct {
		kind message.Kind
		dt   tensor.DType
		op   tensor.ReduceOp
		want message.Algorithm
	}{
		{message.Allreduce, tensor.Float32, tensor.Sum, message.Ring},
		{message.Allreduce, tensor.Float16, tensor.Max, message.Ring},
		{message.Allreduce, tensor.Float16, tensor.Adasum, message.HalvingDoubling},
		{message.Broadcast, tensor.Float32, tensor.NoReduce, message.Chain},
		{message.Allgather, tensor.Float32, tensor.NoReduce, message.Bruck},
	} {
		if got, err := plan(c.kind, c.dt, c.op); got != c.want || err != nil {
			t.Errorf("%v of %v: got %v, %v, want %v", c.kind, c.dt, got, err, c.want)
		}
	}
	_, err = plan(message.Allreduce, tensor.Float16, tensor.Average)
	if err == nil || !strings.HasSuffix(err.Error(), "direct or exchange can") {
		t.Errorf("got %v, want an error that names direct and exchange", err)
	}
}

// A tuned algorithm comes after a forced one and before the table. If it cannot serve an operation, the table
// applies.
func TestTunedAlgorithm(t *testing.T) {
	free := tcp.Register(memMeshes(3)[0], tcp.Config{})
	forced := tcp.Register(memMeshes(3)[0], tcp.Config{Forced: tcp.Forced{message.Allreduce: message.Ring}})
	tuned := &message.Tuning{Allreduce: message.HalvingDoubling}
	for _, c := range []struct {
		b    ops.Registration
		kind message.Kind
		dt   tensor.DType
		t    *message.Tuning
		want message.Algorithm
	}{
		{free, message.Allreduce, tensor.Float32, tuned, message.HalvingDoubling},
		{free, message.Allreduce, tensor.Float32, &message.Tuning{}, message.RecursiveDoubling},
		{free, message.Allreduce, tensor.Float16, tuned, message.Exchange},
		{free, message.Reducescatter, tensor.Float32, tuned, message.Ring},
		{forced, message.Allreduce, tensor.Float32, tuned, message.Ring},
	} {
		r := &message.Response{Kind: c.kind, DType: c.dt, Op: tensor.Sum}
		if got, err := c.b.Plan(topo.UpTo(3), r, 4, c.t); got != c.want || err != nil {
			t.Errorf("%v of %v with %+v: got %v, %v, want %v", c.kind, c.dt, c.t, got, err, c.want)
		}
	}
}

func TestParseForced(t *testing.T) {
	for text, want := range map[string]string{
		"ring":            "OPERATION=ALGORITHM",
		"allreduce=bruck": "ring or direct or exchange or recursive-doubling or halving-doubling",
		"barrier=ring":    "allreduce or allgather",
	} {
		if _, err := tcp.ParseForced(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want an error with %q", text, err, want)
		}
	}
}

// Each of 8 ranks sends at most 10 MB/s. A broadcast of B bytes through the binomial tree takes about three
// times as long as it takes to send B bytes, because the root sends them to three ranks. Through the chain no
// rank sends more than B bytes, so it takes less than half of that time.
func TestChainOnSlowLinks(t *testing.T) {
	const n, numBytes = 8, 16 << 20
	took := make(map[message.Algorithm]time.Duration)
	for _, alg := range tcp.Algorithms(message.Broadcast) {
		synctest.Test(t, func(t *testing.T) {
			var rules []*faulty.Rule
			for r := range n {
				rules = append(rules, &faulty.Rule{Name: fmt.Sprint(r), BytesPerSecond: 1e7,
					Pairs: func(from, _ topo.Rank) bool { return int(from) == r }})
			}
			network, meshes := faulty.New(1, rules...), memMeshes(n)
			for r, m := range meshes {
				meshes[r] = network.Wrap(topo.Rank(r), m)
			}
			c := newCluster(meshes, topo.UpTo(n), tcp.Config{})
			began := time.Now()
			c.must(t, func(r int, b *opstest.Blocking) error {
				return b.Broadcast(t.Context(), alg, 0, make([]byte, numBytes))
			})
			took[alg] = time.Since(began)
			for _, m := range meshes {
				if err := m.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	if tree, chain := took[message.Tree], took[message.Chain]; chain > tree/2 {
		t.Errorf("the chain took %v, want at most half of the tree's %v", chain, tree)
	}
}
