package client

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/sidecar"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/store"
)

const hang = 60 * time.Second

// scratch is a folder for the files of all tests.
var scratch string

func TestMain(m *testing.M) {
	var err error
	if scratch, err = os.MkdirTemp("", "client"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if err := os.RemoveAll(scratch); err != nil {
			panic(err)
		}
		os.Exit(code)
	}))
}

// options returns the options of the ranks of a job.
func options(t testing.TB, n int) []rank.Options {
	kv := store.NewHashStore(store.Limits{})
	t.Cleanup(func() { kv.Close() })
	all := make([]rank.Options, n)
	for r := range all {
		all[r] = rank.Options{Store: kv, Log: zap.NewNop(), Settings: map[string]string{
			"HOROVOD_RANK": strconv.Itoa(r), "HOROVOD_SIZE": strconv.Itoa(n), "HOROVOD_HOSTNAME": "test",
		}}
	}
	return all
}

// serve runs a sidecar in this process, and returns a client of it.
func serve(t testing.TB, o rank.Options) *Client {
	t.Helper()
	s := sidecar.New(sidecar.Config{Options: o, Version: "test"})
	path := filepath.Join(t.TempDir(), "socket")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		conn, err := l.AcceptUnix()
		if err == nil {
			_ = s.ServeConn(conn) // some tests end the connection in the middle
		}
	})
	c, err := Open(t.Context(), Config{Address: "unix://" + path, Environ: os.Environ()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(c.Close(), l.Close()); err != nil {
			t.Error(err)
		}
		over, cancel := context.WithCancel(context.Background())
		cancel()
		_ = s.Close(over) // it reports that the rank has not left in an orderly way
		serving.Wait()
	})
	return c
}

// each calls f for every rank at the same time.
func each(t testing.TB, n int, f func(r int)) {
	t.Helper()
	var all sync.WaitGroup
	for r := range n {
		all.Go(func() { f(r) })
	}
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(hang):
		panic("a test hangs")
	}
}

// program is the program of a rank. It records what it sees.
type program struct {
	*rank.Rank
	b strings.Builder
}

func (p *program) note(format string, args ...any) { fmt.Fprintf(&p.b, format+"\n", args...) }

// owner is the program of an execution. It allocates outputs, and calls done at the end.
type owner struct{ done func(error) }

func (o owner) Allocate(_, numBytes int) ([]byte, error) { return make([]byte, numBytes), nil }

func (o owner) Finished(err error) { o.done(err) }

// begin begins x and returns a function that waits for it.
func begin(x *rank.Execution) func() error {
	done := make(chan error, 1)
	x.Owner = owner{func(err error) { done <- err }}
	if err := x.Begin(); err != nil {
		return func() error { return fmt.Errorf("at once: %w", err) }
	}
	x.NotifyLater()
	return func() error {
		x.Drive(time.Time{}, func() bool { return len(done) > 0 })
		err := <-done
		x.Seen()
		return err
	}
}

// execution returns an execution on tensors whose elements are bytes of the given memory.
func (p *program) execution(s rank.Spec, buffers ...rank.Buffer) *rank.Execution {
	x := &rank.Execution{Operation: new(rank.Operation), Rank: p.Rank, Buffers: buffers}
	if s.Prescale == 0 {
		s.Prescale = 1
	}
	if s.Postscale == 0 {
		s.Postscale = 1
	}
	if err := x.Describe(&s); err != nil {
		panic(err)
	}
	x.Hold = s.Name != ""
	return x
}

// run runs an operation and records its result.
func (p *program) run(what string, s rank.Spec, buffers ...rank.Buffer) {
	x := p.execution(s, buffers...)
	err := begin(x)()
	if err != nil {
		p.note("%s: %s", what, chain(err))
		return
	}
	p.note("%s: received %v", what, x.Received())
	for i, b := range x.Buffers {
		p.note("  %v %x", x.Shape(i), b.Out)
	}
	switch x.Kind {
	case message.Join:
		p.note("  last %d", x.LastJoined())
	case message.Recv:
		p.note("  source %d", x.Source())
	}
}

// chain returns the text and the types of an error.
func chain(err error) string {
	var types []string
	for e := err; e != nil; e = errors.Unwrap(e) {
		types = append(types, fmt.Sprintf("%T", e))
	}
	return fmt.Sprintf("%v %v", err, types)
}

func floats(values ...float32) []byte {
	var b []byte
	for _, v := range values {
		b = append(b, 0, 0, 0, 0)
		u := math.Float32bits(v)
		copy(b[len(b)-4:], []byte{byte(u), byte(u >> 8), byte(u >> 16), byte(u >> 24)})
	}
	return b
}

func shaped(dims ...int64) []rank.TensorSpec { return []rank.TensorSpec{{Shape: dims}} }

const f32 = uint32(tensor.Float32)

// everything runs operations of all kinds, in several kinds of memory, and operations that fail.
func (p *program) everything() {
	me := p.Place.Rank
	n := p.Place.Size
	mine := floats(float32(me+1), 2, 3, 4)
	// it gets a chunk of its own, which no engine of another test has sealed
	block, err := arena.Alloc(65 << 20)
	if err != nil {
		panic(err)
	}
	defer arena.Free(block)
	shared := block[:16]
	if c, remote := p.Remote.(*Client); remote {
		if _, ok, err := c.memory.find(shared); !ok || err != nil {
			panic(fmt.Sprintf("the sidecar has not mapped memory of the program: %v", err))
		}
	}
	for round := range 3 { // later rounds use the plans of earlier ones
		in := slices.Clone(mine)
		copy(shared, mine)
		sum := rank.Spec{Kind: uint32(message.Allreduce), DType: f32, ReduceOp: uint32(tensor.Sum), Name: "sum",
			Tensors: shaped(4)}
		p.run("sum", sum, rank.Buffer{In: in, Out: make([]byte, 16)})
		p.run("sum in place", sum, rank.Buffer{In: in, Out: in})
		p.run("sum in an arena", sum, rank.Buffer{In: shared, Out: shared})
		p.run("sum from an arena", sum, rank.Buffer{In: shared, Out: make([]byte, 16)})
		scaled := sum
		scaled.Name, scaled.Prescale, scaled.Postscale, scaled.TimeoutSeconds = "", 2, 0.5, 30
		p.run("scaled", scaled, rank.Buffer{In: mine})
		half := sum
		half.Wire, half.ErrorFeedback, half.Name = uint32(tensor.Float16), true, fmt.Sprint("half.", round)
		p.run("compressed", half, rank.Buffer{In: mine})
		group := sum
		group.Grouped, group.Name = true, ""
		group.Tensors = []rank.TensorSpec{{Shape: tensor.Shape{2}}, {DType: uint32(tensor.Int32),
			Shape: tensor.Shape{2}}}
		p.run("group", group, rank.Buffer{In: mine[:8]}, rank.Buffer{In: []byte{1, 0, 0, 0, 2, 0, 0, 0}})
		p.run("no tensor", rank.Spec{Kind: sum.Kind, DType: f32, Grouped: true})

		gather := rank.Spec{Kind: uint32(message.Allgather), DType: f32, Tensors: shaped(int64(me+1), 1)}
		p.run("allgather", gather, rank.Buffer{In: mine[:4*(me+1)]})
		p.run("allgather, known", gather, rank.Buffer{In: mine[:4*(me+1)], Out: make([]byte, 2*n*(n+1))})
		all := make([]byte, 4*n)
		copy(all[4*me:], mine)
		equal := gather
		equal.Tensors = shaped(1)
		p.run("allgather in place", equal, rank.Buffer{In: all[4*me:][:4], Out: all})
		copy(shared[4*me:], mine[:4])
		p.run("allgather in place in an arena", equal, rank.Buffer{In: shared[4*me:][:4], Out: shared[:4*n]})
		nothing := gather
		nothing.Tensors = shaped(int64(me+1), 0)
		p.run("rows of nothing", nothing, rank.Buffer{In: []byte{}, Out: []byte{}})
		members := gather
		members.Grouped, members.Tensors = true, []rank.TensorSpec{{Shape: tensor.Shape{1}},
			{Shape: tensor.Shape{2}}}
		p.run("group of allgathers", members, rank.Buffer{In: mine[:4]}, rank.Buffer{In: mine[:8]})
		members.Tensors = members.Tensors[:1]
		p.run("group of one", members, rank.Buffer{In: mine[:4]})

		cast := rank.Spec{Kind: uint32(message.Broadcast), DType: f32, Root: 1, Tensors: shaped(4)}
		copy(in, mine)
		p.run("broadcast in place", cast, rank.Buffer{In: in, Out: in})
		p.run("broadcast", cast, rank.Buffer{In: mine, Out: make([]byte, 16)})
		toall := rank.Spec{Kind: uint32(message.Alltoall), DType: f32, Tensors: shaped(4)}
		toall.Splits = make([]int64, n)
		toall.Splits[0], toall.Splits[1] = 1, 3
		p.run("alltoall", toall, rank.Buffer{In: mine})
		scatter := rank.Spec{Kind: uint32(message.Reducescatter), DType: f32, ReduceOp: uint32(tensor.Max),
			Tensors: shaped(4)}
		p.run("reducescatter", scatter, rank.Buffer{In: mine})
		rows := slices.Clone(mine)
		first, count := tensor.Rows(4, n, me)
		p.run("reducescatter in place", scatter, rank.Buffer{In: rows, Out: rows[4*first:][:4*count]})
		copy(shared, mine)
		p.run("reducescatter in place in an arena", scatter, rank.Buffer{In: shared,
			Out: shared[4*first:][:4*count]})
		reduce := rank.Spec{Kind: uint32(message.Reduce), DType: f32, Tensors: shaped(4)}
		p.run("reduce", reduce, rank.Buffer{In: mine})
		p.run("gather", rank.Spec{Kind: uint32(message.Gather), DType: f32, Root: 1, Tensors: shaped(1, 2)},
			rank.Buffer{In: mine[:8]})
		from := rank.Spec{Kind: uint32(message.Scatter), DType: f32, Root: 1, Splits: toall.Splits,
			Tensors: shaped(4)}
		p.run("scatter", from, rank.Buffer{In: mine})
		bools := sum
		bools.DType, bools.ReduceOp, bools.Name = uint32(tensor.Bool), uint32(tensor.Max), ""
		p.run("bools", bools, rank.Buffer{In: []byte{0, 1, byte(me), 0}})
		p.run("barrier", rank.Spec{Kind: uint32(message.Barrier)})
		if me == 0 {
			p.run("send", rank.Spec{Kind: uint32(message.Send), DType: f32, Peer: 1, Tag: 7, Tensors: shaped(4)},
				rank.Buffer{In: mine})
			p.run("send", rank.Spec{Kind: uint32(message.Send), DType: f32, Peer: 1, Tag: 8, Tensors: shaped(4)},
				rank.Buffer{In: mine})
		} else if me == 1 {
			to := make([]byte, 16)
			p.run("recv", rank.Spec{Kind: uint32(message.Recv), DType: f32, Peer: 0, Tag: 7, Tensors: shaped(4)},
				rank.Buffer{In: to, Out: to})
			p.run("recv", rank.Spec{Kind: uint32(message.Recv), DType: f32, Peer: -1, Tag: 8, Tensors: shaped(4)},
				rank.Buffer{In: to, Out: to})
		}
		p.wrong(mine)
		if me == 1 { // this operation runs when the other rank has joined, so this rank joins last
			p.run("with a joined rank", sum, rank.Buffer{In: mine})
		}
		p.run("join", rank.Spec{Kind: uint32(message.Join), Empty: true})
	}
	p.changeSets()
}

// wrong runs operations that fail.
func (p *program) wrong(mine []byte) {
	me := p.Place.Rank
	sum := rank.Spec{Kind: uint32(message.Allreduce), DType: f32, Name: "wrong", Tensors: shaped(4)}
	set, root, short, shape := sum, sum, sum, sum
	set.Set = 77
	p.run("no such set", set, rank.Buffer{In: mine})
	root.Kind, root.Root = uint32(message.Broadcast), 9
	p.run("no such root", root, rank.Buffer{In: mine})
	p.run("short output", short, rank.Buffer{In: mine, Out: make([]byte, 12)})
	p.run("overlap", sum, rank.Buffer{In: mine[:16], Out: append(make([]byte, 0, 32), mine...)[:16:16]})
	shape.Tensors = shaped(int64(me+1), 1)
	p.run("mismatch", shape, rank.Buffer{In: mine[:4*(me+1)]})
	rows := rank.Spec{Kind: uint32(message.Allgather), DType: f32, Tensors: shaped(2)}
	p.run("wrong size", rows, rank.Buffer{In: mine[:8], Out: make([]byte, 4)})
	uneven := rank.Spec{Kind: uint32(message.Alltoall), DType: f32, Tensors: shaped(1)}
	p.run("uneven", uneven, rank.Buffer{In: mine[:4]})
	p.run("a message to itself", rank.Spec{Kind: uint32(message.Send), DType: f32, Peer: me, Tensors: shaped(1)},
		rank.Buffer{In: mine[:4]})

	held := p.execution(sum, rank.Buffer{In: mine})
	wait := begin(held)
	p.run("a name in flight", sum, rank.Buffer{In: mine})
	if err := wait(); err != nil {
		p.note("held: %v", err)
	}
	p.run("a name that is free again", sum, rank.Buffer{In: mine})
}

// changeSets adds and removes process sets.
func (p *program) changeSets() {
	change := func(kind message.Kind, id int, ranks []int, only bool) int {
		set, err := p.FindSet(id), error(nil)
		if kind == message.AddProcessSet {
			set, err = p.AddSetNow(ranks, only, "", 0)
		} else {
			err = p.RemoveSetNow(id, 0)
		}
		if err != nil {
			p.note("%v %d: %v", kind, id, chain(err))
			return 0
		}
		p.note("%v %d: %v", kind, id, set)
		return int(set.ID)
	}
	a := change(message.AddProcessSet, 0, []int{1, 0}, false)
	p.run("in a set", rank.Spec{Kind: uint32(message.Allreduce), DType: f32, Set: a, Tensors: shaped(1)},
		rank.Buffer{In: floats(1)})
	change(message.AddProcessSet, 0, []int{1, 0}, false)
	change(message.AddProcessSet, 0, []int{5}, false)
	b := change(message.AddProcessSet, 0, []int{0, 1}, true)
	change(message.RemoveProcessSet, b, nil, true)
	change(message.RemoveProcessSet, a, nil, false)
	p.run("in a removed set", rank.Spec{Kind: uint32(message.Barrier), Set: a})
	var ids []string
	for _, s := range p.Sets() {
		ids = append(ids, s.String())
	}
	p.note("sets %v", ids)
}

// TestSame runs the same program once with engines in this process and once with sidecars. Results, and texts
// and types of errors, are the same.
func TestSame(t *testing.T) {
	const n = 2
	var transcripts [2][n]string
	inProcess := options(t, n)
	each(t, n, func(r int) {
		p := program{Rank: new(rank.Rank)}
		if err := p.Start(context.Background(), inProcess[r]); err != nil {
			panic(err)
		}
		p.everything()
		if err := p.Shutdown(context.Background(), engine.Departure{}); err != nil {
			panic(err)
		}
		transcripts[0][r] = p.b.String()
	})
	clients := spawn(t, n)
	each(t, n, func(r int) {
		joined, err := clients[r].Init(context.Background(), os.Environ(), nil, nil)
		if err != nil {
			panic(err)
		}
		p := program{Rank: joined}
		p.everything()
		if err := clients[r].Shutdown(context.Background(), engine.Departure{}); err != nil {
			panic(err)
		}
		transcripts[1][r] = p.b.String()
	})
	for r := range n {
		want, got := strings.Split(transcripts[0][r], "\n"), strings.Split(transcripts[1][r], "\n")
		for i := range max(len(want), len(got)) {
			if i >= len(want) || i >= len(got) || want[i] != got[i] {
				t.Fatalf("rank %d, line %d:\nin process: %s\nsidecar:    %s", r, i, want[min(i, len(want)-1)],
					got[min(i, len(got)-1)])
			}
		}
		if len(want) < 200 {
			t.Errorf("only %d lines", len(want))
		}
	}
}

// joined returns clients of n sidecars in this process that have joined a job, and their ranks.
func joined(t testing.TB, n int) ([]*Client, []*rank.Rank) {
	t.Helper()
	clients, ranks := make([]*Client, n), make([]*rank.Rank, n)
	for r, o := range options(t, n) {
		clients[r] = serve(t, o)
	}
	initAll(t, clients, ranks)
	return clients, ranks
}

func initAll(t testing.TB, clients []*Client, ranks []*rank.Rank) {
	t.Helper()
	errs := make([]error, len(clients))
	each(t, len(clients), func(r int) {
		ranks[r], errs[r] = clients[r].Init(context.Background(), os.Environ(), nil, nil)
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func shutdown(t testing.TB, clients []*Client) {
	t.Helper()
	errs := make([]error, len(clients))
	each(t, len(clients), func(r int) {
		errs[r] = clients[r].Shutdown(context.Background(), engine.Departure{})
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// sum describes an allreduce.
func sum(name string, elems int) rank.Spec {
	return rank.Spec{Kind: uint32(message.Allreduce), DType: f32, ReduceOp: uint32(tensor.Sum), Name: name,
		Tensors: shaped(int64(elems))}
}

// Many goroutines wait at once, each for its own operation, and some for any of several. No wake-up is lost.
func TestManyWaiters(t *testing.T) {
	const workers, rounds = 8, 150
	clients, ranks := joined(t, 2)
	each(t, 2*workers, func(i int) {
		r, w := i%2, i/2
		p := program{Rank: ranks[r]}
		for round := range rounds {
			in := floats(float32(round))
			if w%4 == 3 {
				// This one waits for any operation.
				x := p.execution(sum(fmt.Sprint("w", w), 1), rank.Buffer{In: in, Out: in})
				done := make(chan error, 1)
				x.Owner = owner{func(err error) { done <- err }}
				if err := x.Begin(); err != nil {
					panic(err)
				}
				clients[r].Drive(context.Background(), nil, func() bool { return len(done) > 0 })
				if err := <-done; err != nil {
					panic(err)
				}
				x.Seen()
			} else if err := begin(p.execution(sum(fmt.Sprint("w", w), 1), rank.Buffer{In: in,
				Out: in}))(); err != nil {
				panic(err)
			}
			if !slices.Equal(in, floats(2*float32(round))) {
				panic(fmt.Sprintf("worker %d of rank %d, round %d: got %x", w, r, round, in))
			}
		}
	})
	shutdown(t, clients)
	// The same operations use the same slots, so they are prepared once.
	if got := clients[0].plans.next; got > workers {
		t.Errorf("%d plans were prepared for %d operations", got, workers)
	}
}

// A wait ends with its context, and the operation goes on. Two goroutines may wait for one operation.
func TestWaitWithContext(t *testing.T) {
	clients, ranks := joined(t, 2)
	p := program{Rank: ranks[0]}
	out := make([]byte, 4)
	x := p.execution(sum("x", 1), rank.Buffer{In: floats(1), Out: out})
	done := make(chan error, 1)
	x.Owner = owner{func(err error) { done <- err }}
	if err := x.Begin(); err != nil {
		t.Fatal(err)
	}
	ended := func() bool { return len(done) > 0 }
	for _, of := range []func(context.Context){
		func(ctx context.Context) {
			deadline, _ := ctx.Deadline()
			x.Drive(deadline, ended)
		},
		func(ctx context.Context) { clients[0].Drive(ctx, nil, ended) },
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		of(ctx)
		if cancel(); ended() {
			t.Fatal("the operation is done, but the other rank has not submitted it")
		}
	}
	x.Flush()
	each(t, 3, func(i int) {
		if i < 2 {
			x.Drive(time.Time{}, ended)
			return
		}
		other := program{Rank: ranks[1]}
		if err := begin(other.execution(sum("x", 1), rank.Buffer{In: floats(2)}))(); err != nil {
			panic(err)
		}
	})
	if err := <-done; err != nil || !slices.Equal(out, floats(3)) {
		t.Errorf("got %x, %v", out, err)
	}
	shutdown(t, clients)
}

// Operations for which nobody waits end too: at the latest when the rank leaves the job.
func TestNobodyWaits(t *testing.T) {
	const operations = 3000
	clients, ranks := joined(t, 2)
	each(t, 2, func(r int) {
		p := program{Rank: ranks[r]}
		outs := make([][]byte, operations)
		var done sync.WaitGroup
		for i := range outs {
			outs[i] = make([]byte, 4)
			x := p.execution(sum("", 1), rank.Buffer{In: floats(float32(i)), Out: outs[i]})
			done.Add(1)
			x.Owner = owner{func(err error) {
				if err != nil {
					panic(err)
				}
				done.Done()
			}}
			if err := x.Begin(); err != nil {
				panic(err)
			}
			x.NotifyLater()
		}
		begin(p.execution(rank.Spec{Kind: uint32(message.Barrier)}))()
		// A poll ends all operations that are done.
		for clients[r].Flush(nil); !clients[r].calls.none(); clients[r].Flush(nil) {
			time.Sleep(time.Millisecond)
		}
		done.Wait()
		for i, out := range outs {
			if !slices.Equal(out, floats(2*float32(i))) {
				panic(fmt.Sprintf("operation %d: got %x", i, out))
			}
		}
		for range 3 { // the name is free when the operation is done, although nobody has waited for it
			x := p.execution(sum("again", 1), rank.Buffer{In: floats(1)})
			x.Hold = false
			done.Add(1)
			x.Owner = owner{func(error) { done.Done() }}
			if err := x.Begin(); err != nil {
				panic(err)
			}
			x.NotifyLater()
			for pending := true; pending; time.Sleep(time.Millisecond) {
				pending = false
				clients[r].calls.each(func(k *call) { pending = pending || !clients[r].done(k) })
			}
		}
		last := p.execution(sum("last", 1), rank.Buffer{In: floats(1)})
		done.Add(1)
		last.Owner = owner{func(error) { done.Done() }}
		if err := last.Begin(); err != nil {
			panic(err)
		}
		if err := clients[r].Shutdown(context.Background(), engine.Departure{}); err != nil {
			panic(err)
		}
		done.Wait()
	})
}

// When a rank fails, the others get the same error as in process, and later operations get it at once.
func TestPeerFails(t *testing.T) {
	clients, ranks := joined(t, 2)
	p := program{Rank: ranks[0]}
	wait := begin(p.execution(sum("x", 1), rank.Buffer{In: floats(1)}))
	if err := clients[1].Shutdown(context.Background(),
		engine.Departure{Reason: "it raised ValueError", Failed: true}); err == nil {
		t.Error("the shutdown of a failed rank has no error")
	}
	err := wait()
	dead, is := errors.AsType[*engine.PeerError](err)
	if !is || !slices.Equal(dead.Ranks, []int{1}) || !strings.Contains(err.Error(), "ValueError") ||
		!strings.HasPrefix(err.Error(), `hvd: allreduce "x": rank 1 failed: `) {
		t.Errorf("got %v", chain(err))
	}
	if err := begin(p.execution(sum("y", 1), rank.Buffer{In: floats(1)}))(); !strings.Contains(chain(err),
		".PeerError") {
		t.Errorf("later: got %v", chain(err))
	}
	if err := clients[0].Check(); !strings.Contains(chain(err), ".PeerError") {
		t.Errorf("check: got %v", chain(err))
	}
	if err := clients[0].Shutdown(context.Background(), engine.Departure{}); !strings.Contains(chain(err),
		".PeerError") {
		t.Errorf("shutdown: got %v", chain(err))
	}
	if err := clients[0].Check(); !errors.Is(err, rank.ErrNotInitialized) {
		t.Errorf("after the shutdown: got %v", err)
	}
}

// A rank joins one job after another over one connection.
func TestAgain(t *testing.T) {
	clients, ranks := joined(t, 2)
	for range 3 {
		each(t, 2, func(r int) {
			p := program{Rank: ranks[r]}
			p.run("x", sum("x", 1), rank.Buffer{In: floats(1)})
			if got := p.b.String(); !strings.Contains(got, "00000040") {
				panic(got)
			}
		})
		shutdown(t, clients)
		p := program{Rank: ranks[0]}
		if err := begin(p.execution(sum("x", 1), rank.Buffer{In: floats(1)}))(); err == nil {
			t.Fatal("an operation after the shutdown has no error")
		}
		initAll(t, clients, ranks)
	}
	shutdown(t, clients)
}

// Go's poller watches the socket only for its end, because each doorbell that the sidecar reads would wake a
// thread otherwise.
func TestSocketIsNotPolled(t *testing.T) {
	ends := fmt.Sprintf(" events: %8x ", unix.EPOLLERR|unix.EPOLLHUP)
	c := serve(t, options(t, 1)[0])
	var s unix.Stat_t
	if err := unix.Fstat(c.fd, &s); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("/proc/self/fdinfo/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		info, _ := os.ReadFile(file) // it may be gone
		for line := range strings.Lines(string(info)) {
			if strings.Contains(line, fmt.Sprintf(" ino:%x ", s.Ino)) && !strings.Contains(line, ends) {
				t.Errorf("socket %d is watched: %s", c.fd, line)
			}
		}
	}
}

// A program that has a new name for each group needs no more memory for plans than the sidecar has.
func TestManyGroups(t *testing.T) {
	clients, ranks := joined(t, 1)
	p := program{Rank: ranks[0]}
	const groups, tensors = 600, 1000 // 250 to 500 such plans have room
	group := sum("", 0)
	group.Grouped, group.Tensors = true, slices.Repeat(shaped(0), tensors)
	for i := range groups {
		group.Name = fmt.Sprint("metrics/", i)
		x := p.execution(group, slices.Repeat([]rank.Buffer{{In: []byte{}}}, tensors)...)
		if err := begin(x)(); err != nil {
			t.Fatal(err)
		}
	}
	shutdown(t, clients)
}
