package hier_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/hier"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// These are the lanes of the two levels.
const (
	innerLane = transport.Lane(3)
	outerLane = transport.Lane(4)
)

// layouts are jobs: each letter is the host of a rank.
var layouts = []string{"aabb", "aaab", "abbb", "aabbcc", "aabbb", "abbcc", "abab", "aabcc", "aaaabbbb"}

// groups returns for each rank the lowest rank on the same host.
func groups(hosts string) (all []topo.Rank) {
	for _, h := range hosts {
		all = append(all, topo.Rank(strings.IndexRune(hosts, h)))
	}
	return all
}

func allKinds() (all [message.NumKinds]bool) {
	for k := range all {
		all[k] = true
	}
	return all
}

// cluster has the backends of all ranks of a job in one process. Both levels are backends of ops/tcp.
type cluster struct {
	hosts    string
	plan     ops.Planner
	meshes   []*counting
	backends []*opstest.Blocking
}

// counting is a mesh that counts the bytes that its rank sends to ranks on other hosts.
type counting struct {
	transport.Mesh
	rank  int
	hosts string
	sent  atomic.Int64
}

// Conn implements transport.Mesh.
func (m *counting) Conn(ctx context.Context, lane transport.Lane, peer topo.Rank) (transport.Conn, error) {
	c, err := m.Mesh.Conn(ctx, lane, peer)
	if err != nil || m.hosts[m.rank] == m.hosts[peer] {
		return c, err
	}
	return &countingConn{c, m}, nil
}

type countingConn struct {
	transport.Conn
	mesh *counting
}

// TrySend implements transport.Conn.
func (c *countingConn) TrySend(p []byte) (int, error) {
	n, err := c.Conn.TrySend(p)
	c.mesh.sent.Add(int64(n))
	return n, err
}

// Send implements transport.Conn.
func (c *countingConn) Send(p []byte) error {
	c.mesh.sent.Add(int64(len(p)))
	return c.Conn.Send(p)
}

// newCluster makes the backends of the process set of all ranks.
func newCluster(tb testing.TB, hosts string, change func(*hier.Config)) *cluster {
	tb.Helper()
	c := &cluster{hosts: hosts}
	world := mem.New(len(hosts))
	for r := range hosts {
		mesh := &counting{Mesh: world.Mesh(topo.Rank(r)), rank: r, hosts: hosts}
		level := func(lane transport.Lane) ops.Registration {
			return tcp.Within(mesh, func(topo.ProcessSetID) transport.Lane { return lane },
				tcp.Config{SegmentBytes: 256})
		}
		cfg := hier.Config{Groups: groups(hosts), Inner: level(innerLane), Outer: level(outerLane),
			Kinds: allKinds(), ChunkBytes: 48 << 10}
		if change != nil {
			change(&cfg)
		}
		c.plan = hier.Register(cfg).Plan
		b, err := hier.Register(cfg).New(topo.Global, topo.UpTo(len(hosts)), r)
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(b.Close)
		c.meshes = append(c.meshes, mesh)
		c.backends = append(c.backends, &opstest.Blocking{Backend: b, Steps: r%3 == 1})
	}
	return c
}

// each calls f for all ranks at the same time and returns their errors.
func (c *cluster) each(f func(i int, b *opstest.Blocking) error) []error {
	return opstest.Each(c.backends, func(err error) {
		for _, m := range c.meshes {
			m.Abort(innerLane, err)
			m.Abort(outerLane, err)
		}
	}, f)
}

func (c *cluster) must(tb testing.TB, f func(i int, b *opstest.Blocking) error) {
	tb.Helper()
	if err := errors.Join(c.each(f)...); err != nil {
		tb.Fatal(err)
	}
}

// sentBy returns how many bytes the ranks of a host have sent to other hosts since the last call.
func (c *cluster) sentBy(host byte) (sent int64) {
	for r, m := range c.meshes {
		if c.hosts[r] == host {
			sent += m.sent.Swap(0)
		}
	}
	return sent
}

// Random operations have the results of a sequential reference, in one chunk and in many. A sum of 16-bit
// floats is rounded once.
func TestAtRandom(t *testing.T) {
	for _, hosts := range layouts {
		t.Run(hosts, func(t *testing.T) {
			x := opstest.Random{
				Seed: opstest.PickSeed(t), Rounds: 60,
				Kinds:      []message.Kind{message.Allreduce, message.Broadcast},
				Reductions: opstest.Reductions(), WideHalves: true, Sizes: []int{1, 7, 1000, 10_000, 60_000},
				Algorithms: func(message.Kind, tensor.ReduceOp) []message.Algorithm {
					return []message.Algorithm{message.TwoLevel}
				},
			}
			if hosts != "abab" { // its blocks are not consecutive
				x.Kinds = append(x.Kinds, message.Reducescatter, message.Allgather)
			}
			newCluster(t, hosts, nil).must(t, x.RunAll(t.Context(), len(hosts)))
		})
	}
}

// The bytes that a host sends to other hosts are those that the package comment states.
func TestBytesBetweenHosts(t *testing.T) {
	const n = 6 * 7680 // divisible, so that all pieces have the same size
	for _, hosts := range []string{"aabb", "aaab", "abbb", "aabbcc", "aabbb", "abab", "aaaabbbb"} {
		c := newCluster(t, hosts, nil)
		h, size := int64(len(slices.Compact(slices.Sorted(slices.Values([]byte(hosts)))))), int64(4*n)
		run := func(what string, each func(b *opstest.Blocking) error, want func(host byte) int64) {
			t.Helper()
			c.must(t, func(_ int, b *opstest.Blocking) error { return each(b) })
			for host := byte('a'); host < 'a'+byte(h); host++ {
				if got := c.sentBy(host); got != want(host) {
					t.Errorf("%s: %s: host %c sent %d bytes, want %d", hosts, what, host, got, want(host))
				}
			}
		}
		run("allreduce", func(b *opstest.Blocking) error {
			return b.Allreduce(t.Context(), message.TwoLevel, tensor.Int32, tensor.Sum, make([]byte, size))
		}, func(byte) int64 { return 2 * (h - 1) * size / h })
		run("allreduce of float16", func(b *opstest.Blocking) error {
			return b.Allreduce(t.Context(), message.TwoLevel, tensor.Float16, tensor.Sum, make([]byte, size))
		}, func(byte) int64 { return 3 * (h - 1) * size / h })
		c.must(t, func(_ int, b *opstest.Blocking) error {
			return b.Broadcast(t.Context(), message.TwoLevel, 0, make([]byte, size))
		})
		var sent int64 // by any host, because a host may pass on what it has received
		for host := byte('a'); host < 'a'+byte(h); host++ {
			sent += c.sentBy(host)
		}
		if want := (h - 1) * size; sent != want {
			t.Errorf("%s: broadcast: the hosts sent %d bytes, want %d", hosts, sent, want)
		}
		if hosts == "abab" {
			continue
		}
		sizes := make([]int64, len(hosts))
		for r := range sizes {
			sizes[r] = size / int64(len(hosts)) / 4 * 4
		}
		sizes[0] += size - sizes[0]*int64(len(hosts))
		own := func(host byte) (own int64) {
			for r := range hosts {
				if hosts[r] == host {
					own += sizes[r]
				}
			}
			return own
		}
		run("reducescatter", func(b *opstest.Blocking) error {
			return b.Reducescatter(t.Context(), message.TwoLevel, tensor.Int32, tensor.Sum,
				make([]byte, size), sizes)
		}, func(host byte) int64 { return size - own(host) })
		run("allgather", func(b *opstest.Blocking) error {
			return b.Allgather(t.Context(), message.TwoLevel, make([]byte, size), sizes)
		}, func(host byte) int64 { return size - own('a'+(host-'a'+1)%byte(h)) })
	}
}

// A small tensor is one slice, which only the last owner on each host exchanges, as a whole. A slice of a
// larger tensor is exchanged as a whole only if that does not send more bytes.
func TestSmallAllreduce(t *testing.T) {
	const small = 32 << 10
	for _, test := range []struct {
		hosts string
		dt    tensor.DType
		size  int64
		want  []int64 // the bytes that each rank sends to other hosts
	}{
		{"aabb", tensor.Int32, 4, []int64{0, 4, 0, 4}},
		{"aabb", tensor.Int32, small, []int64{0, small, 0, small}},
		{"aabb", tensor.Float16, small, []int64{0, 2 * small, 0, 2 * small}},
		{"aabb", tensor.Float16, small + 256, []int64{24768, 24768, 24768, 24768}},
		{"aabbcc", tensor.Int32, small, []int64{0, 2 * small, 0, small, 0, small}},
	} {
		c := newCluster(t, test.hosts, nil)
		c.must(t, func(_ int, b *opstest.Blocking) error {
			return b.Allreduce(t.Context(), message.TwoLevel, test.dt, tensor.Sum, make([]byte, test.size))
		})
		var got []int64
		for _, m := range c.meshes {
			got = append(got, m.sent.Load())
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: %d bytes of %v: the ranks sent %d bytes, want %d", test.hosts, test.size, test.dt, got,
				test.want)
		}
	}
}

// Plan refuses what the backend cannot run, with a reason, and allocates nothing.
func TestPlan(t *testing.T) {
	sum := func(dt tensor.DType) *message.Response {
		return &message.Response{Kind: message.Allreduce, DType: dt, Op: tensor.Sum}
	}
	gather := &message.Response{Kind: message.Allgather, DType: tensor.Int8}
	scatter := &message.Response{Kind: message.Reducescatter, DType: tensor.Int8, Op: tensor.Sum}
	for _, test := range []struct {
		hosts  string
		ranks  []topo.Rank // default all
		r      *message.Response
		change func(*hier.Config)
		want   string // empty if the response is accepted
	}{
		{"aabb", nil, sum(tensor.Float32), nil, ""},
		{"abab", nil, sum(tensor.Float32), nil, ""},
		{"aabb", nil, gather, nil, ""},
		{"aabb", []topo.Rank{0, 2, 3}, gather, nil, ""},
		{"aabb", nil, &message.Response{Kind: message.Broadcast, DType: tensor.Int8}, nil, ""},
		{"abab", nil, gather, nil, "not consecutive"},
		{"abab", nil, scatter, nil, "not consecutive"},
		{"aabb", nil, scatter, nil, ""},
		{"aabb", []topo.Rank{0, 1}, sum(tensor.Float32), nil, "several hosts"},
		{"aabb", []topo.Rank{1, 2}, sum(tensor.Float32), nil, "several members"},
		{"aabb", []topo.Rank{3}, sum(tensor.Float32), nil, "several hosts"},
		{"aabb", nil, sum(tensor.Bool), nil, "bool"},
		{"aabb", nil, &message.Response{Kind: message.Alltoall}, nil, "alltoall"},
		{"aabb", nil, &message.Response{Kind: message.Allreduce, DType: tensor.Float32,
			Op: tensor.Adasum}, nil, "adasum"},
		{"aabb", nil, &message.Response{Kind: message.Reduce, DType: tensor.Float32, Op: tensor.Sum}, nil,
			"not supported"},
		{"aabb", nil, &message.Response{Kind: message.Barrier}, nil, "no data"},
		{"aabb", nil, sum(tensor.Int32), func(c *hier.Config) { c.Deterministic = true }, "deterministic"},
		{"aabb", nil, gather, func(c *hier.Config) { c.Deterministic = true }, ""},
		{"aabb", nil, sum(tensor.Int32), func(c *hier.Config) { c.Kinds[message.Allreduce] = false }, "settings"},
		{"aabb", nil, gather, func(c *hier.Config) { c.Kinds[message.Allreduce] = false }, ""},
		{"aabb", nil, gather, func(c *hier.Config) { c.Kinds[message.Allgather] = false }, "settings"},
	} {
		c := newCluster(t, test.hosts, test.change)
		ranks := test.ranks
		if ranks == nil {
			ranks = topo.UpTo(len(test.hosts))
		}
		_, err := c.plan(ranks, test.r, 4, nil)
		if test.want == "" && err != nil || test.want != "" &&
			(err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%s: %v of ranks %v: got %v, want %q", test.hosts, test.r.Kind, ranks, err, test.want)
		}
		if test.want == "bool" {
			continue // tensor.CheckReduce makes this error
		}
		if n := testing.AllocsPerRun(10, func() { _, _ = c.plan(ranks, test.r, 4, nil) }); n > 0 {
			t.Errorf("%s: Plan of ranks %v made %v allocations", test.hosts, ranks, n)
		}
	}
}

// A tuner can turn off the operations on two levels.
func TestPlanTuned(t *testing.T) {
	plan := newCluster(t, "aabb", nil).plan
	for _, c := range []struct {
		kind                     message.Kind
		noAllreduce, noAllgather bool // whether Plan refuses the kind with the allreduce or the allgather off
	}{
		{message.Allreduce, true, false}, {message.Reducescatter, true, false},
		{message.Broadcast, true, false}, {message.Allgather, false, true},
	} {
		r := &message.Response{Kind: c.kind, DType: tensor.Float32, Op: tensor.Sum}
		for tuned, want := range map[message.Tuning]bool{{}: false, {OneLevelAllreduce: true}: c.noAllreduce,
			{OneLevelAllgather: true}: c.noAllgather} {
			if _, err := plan(topo.UpTo(4), r, 4, &tuned); (err != nil) != want {
				t.Errorf("%v with %+v: got error %v, want one: %v", c.kind, tuned, err, want)
			}
		}
	}
}

// An operation that Plan refuses fails at Start. It is an error and not a wrong result.
func TestStartOfRefused(t *testing.T) {
	sizes := []int64{4, 4, 4, 4}
	for name, test := range map[string]struct {
		hosts string
		op    ops.Operation
	}{
		"scattered":        {"abab", ops.Operation{Kind: message.Allgather, Buf: make([]byte, 16), Counts: sizes}},
		"one host":         {"aaaa", ops.Operation{Kind: message.Allgather, Buf: make([]byte, 16), Counts: sizes}},
		"alltoall":         {"aabb", ops.Operation{Kind: message.Alltoall, Buf: make([]byte, 16), Counts: sizes}},
		"too few blocks":   {"aabb", ops.Operation{Kind: message.Allgather, Buf: make([]byte, 12), Counts: sizes[:3]}},
		"too many blocks":  {"aabb", ops.Operation{Kind: message.Allgather, Buf: make([]byte, 20), Counts: append(sizes, 4)}},
		"too large blocks": {"aabb", ops.Operation{Kind: message.Allgather, Buf: make([]byte, 12), Counts: sizes}},
		"too few bytes":    {"aabb", ops.Operation{Kind: message.Allgather, Buf: make([]byte, 17), Counts: sizes}},
		"no tensor":        {"aabb", ops.Operation{Kind: message.Allreduce}},
		"algorithm":        {"aabb", ops.Operation{Kind: message.Broadcast}},
		"bad root":         {"aabb", ops.Operation{Kind: message.Broadcast, Root: 4}},
	} {
		b := newCluster(t, test.hosts, nil).backends[0]
		if name != "algorithm" {
			test.op.Algorithm = message.TwoLevel
		}
		err := b.Start(test.op)
		if err == nil || !strings.HasPrefix(err.Error(), "ops/hier: "+test.op.Kind.String()+": ") {
			t.Errorf("%s: got %v, want an error", name, err)
			continue
		}
		if _, again := b.Step(t.Context(), true); !errors.Is(again, err) {
			t.Errorf("%s: the step after a failure: got %v, want %v", name, again, err)
		}
	}
}

// If the process of a rank is gone, the ranks that exchange data with it get a PeerError that names it, on
// both levels.
func TestPeerGone(t *testing.T) {
	for _, test := range []struct {
		hosts      string
		gone, asks int
	}{{"aabb", 1, 0}, {"aabb", 3, 1}, {"abb", 0, 1}} {
		c := newCluster(t, test.hosts, nil)
		const n = 1 << 16
		// Another operation before makes the connections.
		c.must(t, func(_ int, b *opstest.Blocking) error {
			return b.Allreduce(t.Context(), message.TwoLevel, tensor.Int32, tensor.Sum, make([]byte, n))
		})
		ctx, cancel := context.WithCancelCause(t.Context())
		over := errors.New("the job is over")
		c.each(func(i int, b *opstest.Blocking) error {
			if i == test.gone {
				return c.meshes[i].Close()
			}
			err := b.Allreduce(ctx, message.TwoLevel, tensor.Int32, tensor.Sum, make([]byte, n))
			if i != test.asks {
				return nil
			}
			peer, ok := errors.AsType[*transport.PeerError](err)
			if !ok || int(peer.Peer) != test.gone {
				t.Errorf("%s: rank %d: got %v, want that rank %d failed", test.hosts, i, err, test.gone)
			}
			cancel(over) // as the engine does when it has the verdict
			return nil
		})
		cancel(over)
	}
}

// In steady state an operation allocates nothing.
func TestAllocations(t *testing.T) {
	c := newCluster(t, "aabb", nil)
	sizes := []int64{32 << 10, 32 << 10, 32 << 10, 32 << 10}
	bufs := make([][]byte, 4)
	for i := range bufs {
		bufs[i] = make([]byte, 128<<10) // the allreduce has three chunks
	}
	ctx := context.Background()
	rounds := func(n int) {
		c.must(t, func(i int, b *opstest.Blocking) error {
			for range n {
				if err := errors.Join(
					b.Allreduce(ctx, message.TwoLevel, tensor.Float16, tensor.Sum, bufs[i]),
					b.Allreduce(ctx, message.TwoLevel, tensor.Float16, tensor.Sum, bufs[i][:4]),
					b.Reducescatter(ctx, message.TwoLevel, tensor.Float32, tensor.Sum, bufs[i], sizes),
					b.Allgather(ctx, message.TwoLevel, bufs[i], sizes),
					b.Broadcast(ctx, message.TwoLevel, 1, bufs[i])); err != nil {
					return err
				}
			}
			return nil
		})
	}
	rounds(10)
	const n = 50
	once := testing.AllocsPerRun(3, func() { rounds(1) })
	if many := testing.AllocsPerRun(3, func() { rounds(n) }); many > once+n/5 {
		t.Errorf("%d rounds made %.0f allocations, one round %.0f", n, many, once)
	}
}

// recorded is a level that records in log when operations begin and end. An operation of the outer level ends
// only in a step that may wait.
type recorded struct {
	name  string
	outer bool
	log   *[]string
	kind  message.Kind
}

// levelOf returns the Registration of a level whose backend is b and whose operations use alg.
func levelOf(b ops.Backend, alg message.Algorithm) ops.Registration {
	return ops.Registration{
		Plan: func([]topo.Rank, *message.Response, int64, *message.Tuning) (message.Algorithm, error) {
			return alg, nil
		},
		New: func(topo.ProcessSetID, []topo.Rank, int) (ops.Backend, error) { return b, nil },
	}
}

func (l *recorded) Start(op ops.Operation) error {
	l.kind = op.Kind
	*l.log = append(*l.log, fmt.Sprintf("%s %v begins", l.name, op.Kind))
	return nil
}

func (l *recorded) Step(_ context.Context, wait bool) (ops.Progress, error) {
	if l.outer && !wait {
		return ops.Waiting, nil
	}
	*l.log = append(*l.log, fmt.Sprintf("%s %v ends", l.name, l.kind))
	return ops.Finished, nil
}

func (l *recorded) Close() {}

// While a chunk of an allreduce is exchanged between the hosts, the next one is reduced and the previous one
// is gathered on the host.
func TestLevelsOverlap(t *testing.T) {
	const want = `
inner reducescatter begins
inner reducescatter ends
outer reducescatter begins
inner reducescatter begins
inner reducescatter ends
outer reducescatter ends
outer allgather begins
outer allgather ends
outer reducescatter begins
inner reducescatter begins
inner reducescatter ends
outer reducescatter ends
outer allgather begins
inner allgather begins
inner allgather ends
outer allgather ends
outer reducescatter begins
outer reducescatter ends
outer allgather begins
inner allgather begins
inner allgather ends
outer allgather ends
inner allgather begins
inner allgather ends
`
	if got := stagesOf(t, message.Direct, 3); got != want {
		t.Errorf("got%s", got)
	}
}

// If the outer level would use recursive doubling, an allreduce in one chunk is one operation between hosts.
func TestDoublingBetweenHosts(t *testing.T) {
	const want = `
inner reducescatter begins
inner reducescatter ends
outer allreduce begins
outer allreduce ends
inner allgather begins
inner allgather ends
`
	if got := stagesOf(t, message.RecursiveDoubling, 1); got != want {
		t.Errorf("got%s", got)
	}
	if got, want := stagesOf(t, message.RecursiveDoubling, 2), stagesOf(t, message.Direct, 2); got != want {
		t.Errorf("two chunks: got%swant%s", got, want)
	}
}

// stagesOf returns the log of an allreduce in the given number of chunks, if the levels choose alg.
func stagesOf(t *testing.T, alg message.Algorithm, chunks int) string {
	t.Helper()
	var log []string
	level := func(name string, outer bool) ops.Registration {
		return levelOf(&recorded{name: name, outer: outer, log: &log}, alg)
	}
	b, err := hier.Register(hier.Config{Groups: groups("aabb"), Inner: level("inner", false),
		Outer: level("outer", true), Kinds: allKinds(), ChunkBytes: 1 << 10}).New(topo.Global, topo.UpTo(4), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	buf := make([]byte, chunks<<10)
	if err := ops.Run(t.Context(), b, ops.Operation{Kind: message.Allreduce, Algorithm: message.TwoLevel,
		DType: tensor.Float32, Op: tensor.Sum, Tensors: []ops.Tensor{{In: buf, Out: buf}}}); err != nil {
		t.Fatal(err)
	}
	return "\n" + strings.Join(log, "\n") + "\n"
}

// busy is a level whose operations end only when the context of a step has ended. If failure is set, the
// first step fails with it.
type busy struct {
	recorded
	failure error
	ended   error // the cause of the context that has ended
}

func (l *busy) Step(ctx context.Context, wait bool) (ops.Progress, error) {
	switch {
	case l.failure != nil:
		return ops.Waiting, l.failure
	case wait && ctx.Err() != nil:
		l.ended = context.Cause(ctx)
		return ops.Waiting, l.ended
	case l.kind == message.Reducescatter && l.ended == nil && len(*l.log) == 1:
		return ops.Finished, nil // the first chunk, so that the outer level begins
	}
	return ops.Waiting, nil
}

// If one level fails, the other level abandons its operation before the operation on two levels ends.
func TestFailureEndsBothLevels(t *testing.T) {
	var log []string
	failure := errors.New("the link is gone")
	inner := &busy{recorded: recorded{name: "inner", log: &log}}
	outer := &busy{recorded: recorded{name: "outer", log: &log}, failure: failure}
	b, err := hier.Register(hier.Config{Groups: groups("aabb"), Inner: levelOf(inner, message.NoAlgorithm),
		Outer: levelOf(outer, message.NoAlgorithm), Kinds: allKinds(),
		ChunkBytes: 1 << 10}).New(topo.Global, topo.UpTo(4), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	buf := make([]byte, 2<<10)
	err = ops.Run(t.Context(), b, ops.Operation{Kind: message.Allreduce, Algorithm: message.TwoLevel,
		DType: tensor.Float32, Op: tensor.Sum, Tensors: []ops.Tensor{{In: buf, Out: buf}}})
	if !errors.Is(err, failure) || !errors.Is(inner.ended, failure) {
		t.Errorf("got %v, and the inner level ended with %v, want %v", err, inner.ended, failure)
	}
}
