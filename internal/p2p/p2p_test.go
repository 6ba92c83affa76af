package p2p_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/internal/transport/shm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const lane = transport.Lane(7)

var errOver = errors.New("the epoch is over")

// job has the exchanges of all ranks.
type job struct {
	tb       testing.TB
	meshes   []transport.Mesh
	ranks    []*p2p.Exchange
	failures chan error
	silent   chan struct{} // Config.Silent of all ranks
	shares   bool          // whether the ranks share memory, and messages are in arenas
	mu       sync.Mutex
	tensors  [][]byte // the memory of messages in arenas
}

// eachMesh runs f with n ranks on each mesh.
func eachMesh(t *testing.T, n int, f func(t *testing.T, j *job)) {
	t.Run("mem", func(t *testing.T) {
		f(t, newJob(t, testcluster.MemMeshes(n)))
	})
	t.Run("tcp", func(t *testing.T) { f(t, newJob(t, testcluster.TCPMeshes(t, n))) })
	t.Run("shm", func(t *testing.T) { f(t, newJob(t, sharedMeshes(t, n))) })
}

// sharedMeshes returns meshes of ranks that share memory.
func sharedMeshes(tb testing.TB, n int) []transport.Mesh {
	tb.Helper()
	meshes := testcluster.TCPMeshes(tb, n)
	memory, err := testcluster.ShareMemory(context.Background(), meshes, slices.Repeat([]string{"host"}, n))
	if err != nil {
		tb.Fatal(err)
	}
	for r, m := range memory {
		meshes[r] = m
	}
	return meshes
}

// newJob returns the exchanges of ranks with the given meshes. The functions change the settings of each.
func newJob(tb testing.TB, meshes []transport.Mesh, change ...func(*p2p.Config)) *job {
	j := &job{tb: tb, meshes: meshes, failures: make(chan error, 100), silent: make(chan struct{}, 100)}
	for r, m := range meshes {
		cfg := p2p.Config{Mesh: m, Lane: lane, Ranks: topo.UpTo(len(meshes)), Me: r,
			Failed: func(err error) { j.failures <- fmt.Errorf("rank %d: %w", r, err) },
			Silent: func() { j.silent <- struct{}{} }}
		if memory, ok := m.(shm.Sharer); ok {
			cfg.Memory, cfg.Groups, j.shares = memory, memory.Groups(), true
		}
		for _, f := range change {
			f(&cfg)
		}
		j.ranks = append(j.ranks, p2p.New(cfg))
	}
	tb.Cleanup(func() {
		for _, x := range j.ranks {
			x.Close(errOver)
		}
		for _, m := range j.meshes {
			if err := m.Close(); err != nil {
				tb.Error(err)
			}
		}
		for _, b := range j.tensors {
			if err := arena.Free(b); err != nil {
				tb.Error(err)
			}
		}
	})
	return j
}

// pending is an operation in flight.
type pending struct {
	p2p.Op
	done chan error
}

// wait returns the error of the operation.
func (p *pending) wait(tb testing.TB) error {
	tb.Helper()
	select {
	case err := <-p.done:
		return err
	case <-time.After(20 * time.Second):
		tb.Fatalf("%v did not end", &p.Op)
		return nil
	}
}

// succeeds fails the test unless the operation succeeds.
func (p *pending) succeeds(tb testing.TB) {
	tb.Helper()
	if err := p.wait(tb); err != nil {
		tb.Fatalf("%v: got error %v", &p.Op, err)
	}
}

func (j *job) op(peer topo.Rank, tag uint32, buf []byte) *pending {
	p := &pending{done: make(chan error, 1)}
	p.Op = p2p.Op{Peer: peer, Tag: tag, DType: tensor.Uint8, Buf: buf,
		Done: func(err error) { p.done <- err }}
	return p
}

// alloc returns memory for a message, in an arena if the ranks share memory.
func (j *job) alloc(numBytes int) []byte {
	j.tb.Helper()
	if !j.shares {
		return make([]byte, numBytes)
	}
	b, err := arena.Alloc(numBytes)
	if err != nil {
		j.tb.Fatal(err)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.tensors = append(j.tensors, b)
	return b
}

// send begins to send buf. If the ranks share memory, it sends a copy in an arena.
func (j *job) send(from, to topo.Rank, tag uint32, buf []byte) *pending {
	j.tb.Helper()
	if _, ok := arena.Find(buf); j.shares && !ok {
		buf = append(j.alloc(len(buf))[:0], buf...)
	}
	p := j.op(to, tag, buf)
	if err := j.ranks[from].Send(&p.Op); err != nil {
		j.tb.Fatal(err)
	}
	return p
}

func (j *job) receive(at, from topo.Rank, tag uint32, numBytes int) *pending {
	j.tb.Helper()
	return j.receiveInto(at, from, tag, make([]byte, numBytes))
}

func (j *job) receiveInto(at, from topo.Rank, tag uint32, buf []byte) *pending {
	j.tb.Helper()
	p := j.op(from, tag, buf)
	if err := j.ranks[at].Receive(&p.Op); err != nil {
		j.tb.Fatal(err)
	}
	return p
}

// payload returns numBytes bytes that depend on the seed.
func payload(seed uint64, numBytes int) []byte {
	b := make([]byte, numBytes)
	for i := range b {
		b[i] = byte(seed + uint64(i)*7)
	}
	return b
}

// want fails the test unless the receive has ended with the message.
func (p *pending) want(tb testing.TB, source topo.Rank, message []byte) {
	tb.Helper()
	if err := p.wait(tb); err != nil || p.Source != source || !bytes.Equal(p.Buf, message) {
		tb.Fatalf("%v: got %d bytes from rank %d and error %v, want %d other bytes from rank %d", &p.Op,
			len(p.Buf), p.Source, err, len(message), source)
	}
}

// Messages of all sizes arrive, whether the receive or the send comes first, in both directions.
func TestSizes(t *testing.T) {
	eachMesh(t, 2, func(t *testing.T, j *job) {
		for i, n := range []int{0, 1, 4, 4096, 64 << 10, 64<<10 + 1, 3 << 20} {
			for from := topo.Rank(0); from < 2; from++ {
				first := j.receive(1-from, from, 5, n)
				sent := j.send(from, 1-from, 5, payload(uint64(i), n))
				first.want(t, from, payload(uint64(i), n))
				sent.succeeds(t)
				sent = j.send(from, 1-from, 6, payload(uint64(i+1), n))
				j.receive(1-from, p2p.AnySource, 6, n).want(t, from, payload(uint64(i+1), n))
				sent.succeeds(t)
			}
		}
	})
}

// Messages of one tag are matched in the order of the sends, and receives of any source in the order of their
// calls. Small messages do not overtake large ones.
func TestOrder(t *testing.T) {
	eachMesh(t, 2, func(t *testing.T, j *job) {
		sizes := []int{100_000, 3, 200_000, 1}
		for i, n := range sizes {
			j.send(0, 1, 1, payload(uint64(i), n))
			j.send(0, 1, 2, payload(uint64(i+10), 2))
		}
		for i := range sizes {
			j.receive(1, 0, 2, 2).want(t, 0, payload(uint64(i+10), 2))
		}
		var got []*pending
		for i, n := range sizes {
			from := topo.Rank(0)
			if i%2 == 1 {
				from = p2p.AnySource
			}
			got = append(got, j.receive(1, from, 1, n))
		}
		for i, p := range got {
			p.want(t, 0, payload(uint64(i), sizes[i]))
		}
	})
}

// A receive from any rank takes messages of all ranks.
func TestAnySource(t *testing.T) {
	eachMesh(t, 4, func(t *testing.T, j *job) {
		for r := topo.Rank(1); r < 4; r++ {
			j.send(r, 0, 9, payload(uint64(r), 10))
		}
		seen := map[topo.Rank]bool{}
		for range 3 {
			p := j.receive(0, p2p.AnySource, 9, 10)
			err := p.wait(t)
			if err != nil || seen[p.Source] || !bytes.Equal(p.Buf, payload(uint64(p.Source), 10)) {
				t.Fatalf("got a message from rank %d, error %v, after messages from %v", p.Source, err, seen)
			}
			seen[p.Source] = true
		}
	})
}

// A message of another size or type ends the receive with an error, and is dropped. Nothing else is lost.
func TestSizeDiffers(t *testing.T) {
	eachMesh(t, 2, func(t *testing.T, j *job) {
		for _, n := range []int{8, 100_000} {
			sent := j.send(1, 0, 1, payload(1, n))
			j.send(1, 0, 1, payload(2, 8))
			var size *p2p.SizeError
			err := j.receive(0, 1, 1, n+1).wait(t)
			want := fmt.Sprintf("got %d elements of uint8 from rank 1, want %d elements of uint8", n, n+1)
			if !errors.As(err, &size) || err.Error() != want {
				t.Errorf("got error %v, want %s", err, want)
			}
			j.receive(0, 1, 1, 8).want(t, 1, payload(2, 8))
			sent.succeeds(t)
		}
		j.send(1, 0, 1, payload(1, 8))
		p := j.op(1, 1, make([]byte, 8))
		p.DType = tensor.Int64
		if err := j.ranks[0].Receive(&p.Op); err != nil {
			t.Fatal(err)
		}
		const want = "got 8 elements of uint8 from rank 1, want 1 elements of int64"
		if err := p.wait(t); err == nil || err.Error() != want {
			t.Errorf("got error %v, want %s", err, want)
		}
	})
}

// A sender sends 1 MiB of small messages that nobody receives. The next ones wait at the sender.
func TestKeptMessagesAreBounded(t *testing.T) {
	eachMesh(t, 2, func(t *testing.T, j *job) {
		const n = 32 << 10
		var sent []*pending
		for i := range 100 {
			sent = append(sent, j.send(0, 1, 1, payload(uint64(i), n)))
		}
		done := 0
		for _, p := range sent {
			done += len(p.done)
		}
		if done != (1<<20)/(n+24) {
			t.Errorf("%d sends of %d bytes are done, want %d", done, n, (1<<20)/(n+24))
		}
		for round := range 3 { // the limit is free again
			for i := range 100 {
				if round > 0 {
					sent[i] = j.send(0, 1, 1, payload(uint64(i), n))
				}
				j.receive(1, 0, 1, n).want(t, 0, payload(uint64(i), n))
				sent[i].succeeds(t)
			}
		}
	})
}

// Ranks send random messages to each other. Each rank posts its receives in a random order.
func TestRandom(t *testing.T) {
	const ranks, messages, tags = 3, 400, 3
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	eachMesh(t, ranks, func(t *testing.T, j *job) {
		type key struct {
			from, to topo.Rank
			tag      uint32
		}
		random := rand.New(rand.NewPCG(seed, 1))
		plan := map[key][]int{}
		for range messages {
			k := key{topo.Rank(random.IntN(ranks)), 0, uint32(random.IntN(tags))}
			k.to = (k.from + 1 + topo.Rank(random.IntN(ranks-1))) % ranks
			plan[k] = append(plan[k], []int{0, 7, 1000, 60_000, 70_000, 300_000}[random.IntN(6)])
		}
		var wg sync.WaitGroup
		for k, sizes := range plan {
			wg.Go(func() {
				for i, n := range sizes {
					j.send(k.from, k.to, k.tag, payload(uint64(i), n))
				}
			})
			wg.Go(func() {
				var got []*pending
				for _, n := range sizes {
					got = append(got, j.receive(k.to, k.from, k.tag, n))
				}
				for i, p := range got {
					p.want(t, k.from, payload(uint64(i), sizes[i]))
				}
			})
		}
		wg.Wait()
	})
}

// A rank that shuts down delivers what it has sent. Operations that then wait for it end with an error, and a
// receive from any rank ends when no other rank is left.
func TestLeft(t *testing.T) {
	eachMesh(t, 3, func(t *testing.T, j *job) {
		waits, any := j.receive(0, 1, 7, 1), j.receive(0, p2p.AnySource, 8, 1)
		large := j.send(0, 1, 9, payload(1, 1<<20))
		j.send(1, 0, 5, payload(1, 3))
		j.leave(1)
		var left *p2p.LeftError
		for _, p := range []*pending{waits, large} {
			if err := p.wait(t); !errors.As(err, &left) || err.Error() != "rank 1 shut down" {
				t.Errorf("%v: got error %v, want rank 1 shut down", &p.Op, err)
			}
		}
		j.receive(0, 1, 5, 3).want(t, 1, payload(1, 3))
		late := j.op(1, 5, make([]byte, 3))
		if err := j.ranks[0].Receive(&late.Op); !errors.As(err, &left) {
			t.Errorf("a later receive: got error %v", err)
		}
		if err := j.ranks[0].Send(&late.Op); !errors.As(err, &left) {
			t.Errorf("a later send: got error %v", err)
		}
		if len(any.done) != 0 {
			t.Errorf("the receive from any rank has ended, but rank 2 may send")
		}
		j.leave(2)
		if err := any.wait(t); !errors.As(err, &left) || err.Error() != "ranks 1 and 2 shut down" {
			t.Errorf("any source: got error %v", err)
		}
	})
}

// A rank offers messages and leaves before the peer has accepted them. Receives that match the offers end
// with an error, before and after the peer learns that the channel has ended.
func TestOffersOfALeaver(t *testing.T) {
	eachMesh(t, 2, func(t *testing.T, j *job) {
		for tag := range uint32(2) {
			o := j.op(0, tag, make([]byte, 1<<20)) // not in an arena
			if err := j.ranks[1].Send(&o.Op); err != nil {
				t.Fatal(err)
			}
		}
		j.send(1, 0, 2, nil)
		j.receive(0, 1, 2, 0).want(t, 1, nil) // so the offers have arrived
		j.leave(1)
		if err := j.meshes[1].Close(); err != nil {
			t.Fatal(err)
		}
		for tag := range uint32(2) {
			o := j.op(1, tag, make([]byte, 1<<20))
			err := j.ranks[0].Receive(&o.Op)
			if err == nil {
				err = o.wait(t)
			}
			var left *p2p.LeftError
			if !errors.As(err, &left) {
				t.Errorf("tag %d: got error %v", tag, err)
			}
		}
	})
}

// Close ends all operations, and their memory is free.
func TestClose(t *testing.T) {
	eachMesh(t, 2, func(t *testing.T, j *job) {
		ops := []*pending{j.receive(0, 1, 1, 5), j.receive(0, p2p.AnySource, 2, 1<<20),
			j.send(0, 1, 3, payload(1, 1<<20))}
		j.ranks[0].Close(errOver)
		for _, p := range ops {
			if err := p.wait(t); err != errOver {
				t.Errorf("%v: got error %v, want %v", &p.Op, err, errOver)
			}
		}
		if err := j.ranks[0].Send(&j.op(1, 1, nil).Op); err != errOver {
			t.Errorf("after Close: got error %v, want %v", err, errOver)
		}
	})
}

// heldMesh opens channels when open is closed.
type heldMesh struct {
	transport.Mesh
	open chan struct{}
}

// Conn implements transport.Mesh.
func (m heldMesh) Conn(ctx context.Context, l transport.Lane, peer topo.Rank) (transport.Conn, error) {
	select {
	case <-m.open:
	case <-ctx.Done():
	}
	return m.Mesh.Conn(ctx, l, peer)
}

// A rank that has opened channels only to receive from all ranks does not let them wait for a bye.
func TestQuittedAfterAnySource(t *testing.T) {
	eachMesh(t, 3, func(t *testing.T, j *job) {
		p := j.receive(0, p2p.AnySource, 1, 10)
		j.send(1, 0, 1, payload(1, 10))
		p.want(t, 1, payload(1, 10))
		j.ranks[0].Quit(errOver)
		if got := j.ranks[0].Quitted(); len(got) > 0 {
			t.Errorf("rank 0 lets ranks %v wait for its bye", got)
		}
	})
}

// A rank sends its first message and shuts down, but its end of the channel opens only ten minutes later. The
// receiver waits for the message, also if it has not begun to receive. A rank that has sent nothing is not
// awaited.
func TestLeftOpensLate(t *testing.T) {
	for _, late := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			c := mem.New(3)
			held := heldMesh{c.Mesh(1), make(chan struct{})}
			j := newJob(t, []transport.Mesh{c.Mesh(0), held, c.Mesh(2)})
			var first *pending
			if !late {
				first = j.receive(0, 1, 1, 10)
			}
			j.send(1, 0, 1, payload(1, 10))
			j.ranks[1].Quit(errOver)
			if got := j.ranks[1].Quitted(); !slices.Equal(got, []topo.Rank{0}) {
				t.Fatalf("rank 1 has said bye to ranks %v, want rank 0", got)
			}
			j.ranks[0].Left(1, true)
			j.ranks[0].Left(2, false)
			var left *p2p.LeftError
			if err := j.ranks[0].Receive(&j.op(2, 1, nil).Op); !errors.As(err, &left) {
				t.Errorf("the receive from rank 2 has ended with error %v", err)
			}
			time.AfterFunc(10*time.Minute, func() { close(held.open) })
			if late {
				for j.ranks[0].Receives(1) {
					time.Sleep(time.Minute)
				}
				first = j.receive(0, 1, 1, 10)
			}
			select {
			case err := <-first.done:
				if err != nil || !bytes.Equal(first.Buf, payload(1, 10)) {
					t.Errorf("got error %v and message %v", err, first.Buf)
				}
			case <-time.After(time.Hour):
				t.Error("the message has not arrived")
			}
			if err := j.ranks[0].Receive(&j.op(1, 1, nil).Op); !errors.As(err, &left) && late {
				t.Errorf("another receive from rank 1 has ended with error %v", err)
			}
		})
	}
}

// brokenMesh opens no channels.
type brokenMesh struct{ transport.Mesh }

// Conn implements transport.Mesh.
func (brokenMesh) Conn(context.Context, transport.Lane, topo.Rank) (transport.Conn, error) {
	return nil, errOver
}

// A channel to a rank fails, and then the rank shuts down. The receive that waits for the rank ends.
func TestBrokenThenLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := mem.New(2)
		j := newJob(t, []transport.Mesh{brokenMesh{c.Mesh(0)}, c.Mesh(1)})
		received := j.receive(0, 1, 1, 10)
		<-j.failures
		j.ranks[0].Left(1, true)
		if err := received.wait(t); err == nil || err.Error() != "rank 1 shut down" {
			t.Errorf("the receive has ended with error %v, want that rank 1 shut down", err)
		}
	})
}

// leave makes a rank leave after its messages, as the engine does.
func (j *job) leave(r topo.Rank) {
	j.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	j.ranks[r].Quit(errOver)
	for i, x := range j.ranks {
		x.Left(r, slices.Contains(j.ranks[r].Quitted(), topo.Rank(i)))
		for x.Receives(r) {
			<-j.silent
		}
	}
	j.ranks[r].Flush(ctx)
	if ctx.Err() != nil {
		j.tb.Errorf("the messages of rank %d have not left it within a minute", r)
	}
	j.ranks[r].Close(errOver)
}

// slowMesh delays each Send by the time delay.
type slowMesh struct {
	transport.Mesh
	delay atomic.Int64
}

// Conn implements transport.Mesh.
func (m *slowMesh) Conn(ctx context.Context, l transport.Lane, peer topo.Rank) (transport.Conn, error) {
	c, err := m.Mesh.Conn(ctx, l, peer)
	return &slowConn{c, m}, err
}

type slowConn struct {
	transport.Conn
	mesh *slowMesh
}

// Send implements transport.Conn.
func (c *slowConn) Send(p []byte) error {
	time.Sleep(time.Duration(c.mesh.delay.Load()))
	return c.Conn.Send(p)
}

// A rank sends messages, announces its shutdown, and then runs slowly for several seconds. All its messages
// arrive.
func TestLateMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const long = 100 << 10
		c := mem.New(2)
		slow := &slowMesh{Mesh: c.Mesh(1)}
		j := newJob(t, []transport.Mesh{c.Mesh(0), slow})
		j.send(1, 0, 9, payload(1, 1))
		j.receive(0, 1, 9, 1).want(t, 1, payload(1, 1)) // from now on the channel is open
		sends := []*pending{j.send(1, 0, 1, payload(1, long))}
		synctest.Wait()
		slow.delay.Store(int64(4 * time.Second))
		receives := []*pending{j.receive(0, 1, 1, long), j.receive(0, 1, 2, 10)}
		synctest.Wait()
		// This message waits until the long one is sent.
		sends = append(sends, j.send(1, 0, 2, payload(2, 10)))
		j.ranks[1].Quit(errOver)
		j.ranks[0].Left(1, true)
		receives[0].want(t, 1, payload(1, long))
		receives[1].want(t, 1, payload(2, 10))
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Second)
		defer cancel()
		j.ranks[1].Flush(ctx)
		if ctx.Err() != nil {
			t.Error("the messages have not left the rank")
		}
		for _, o := range sends {
			o.succeeds(t)
		}
	})
}

// Flush does not wait for a rank that does not open its end of a channel, and returns when its context ends,
// although an open channel accepts nothing.
func TestFlushEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := mem.New(3)
		slow := &slowMesh{Mesh: c.Mesh(2)}
		j := newJob(t, []transport.Mesh{c.Mesh(0), c.Mesh(1), slow})
		flush := func(r topo.Rank) time.Duration {
			ctx, cancel := context.WithTimeout(context.Background(), 9*time.Second)
			defer cancel()
			began := time.Now()
			j.ranks[r].Quit(errOver)
			j.ranks[r].Flush(ctx)
			return time.Since(began)
		}
		j.send(1, 0, 1, payload(1, 10)) // rank 0 opens no channel
		if got := flush(1); got != 0 {
			t.Errorf("without the peer: Flush has waited for %v, want 0s", got)
		}
		j.send(2, 0, 1, payload(1, 10))
		j.receive(0, 2, 1, 10).want(t, 2, payload(1, 10))
		slow.delay.Store(int64(20 * time.Second))
		if got := flush(2); got != 9*time.Second {
			t.Errorf("with a slow channel: Flush has waited for %v, want 9s", got)
		}
	})
}

// quit makes rank from quit, and returns when rank at has learned it.
func (j *job) quit(from, at topo.Rank) {
	j.tb.Helper()
	waits := j.receive(at, from, 1<<20, 1)
	j.ranks[from].Quit(errOver)
	var left *p2p.LeftError
	if err := waits.wait(j.tb); !errors.As(err, &left) {
		j.tb.Errorf("%v: got error %v, want that rank %d shut down", &waits.Op, err, from)
	}
}

// failing is memory that fails once: either Find does not find the message, or the segment cannot be made.
type failing struct {
	shm.Sharer
	find, share bool // whether the next call of Find or Share fails
}

// Find implements transport.Memory.
func (f *failing) Find(b []byte) (arena.Ref, bool) {
	if f.find {
		f.find = false
		return arena.Ref{}, false
	}
	return f.Sharer.Find(b)
}

// Share implements transport.Memory.
func (f *failing) Share(id transport.Lane, numBytes int64, peers []topo.Rank) ([]byte, error) {
	if f.share {
		f.share = false
		return nil, errors.New("too many open files")
	}
	return f.Sharer.Share(id, numBytes, peers)
}

// A message goes over the channel if it is in a chunk that this rank could not share, or if this rank cannot
// make the segment for messages in its memory.
func TestShareFails(t *testing.T) {
	for _, find := range []bool{false, true} {
		meshes := sharedMeshes(t, 2)
		meshes[0] = &failing{meshes[0].(shm.Sharer), find, !find}
		j := newJob(t, meshes)
		for i, shared := range []bool{false, true} {
			message := payload(uint64(i), 1<<20)
			sent, received := j.send(0, 1, 1, message), j.receive(1, 0, 1, len(message))
			received.want(t, 0, message)
			if err := sent.wait(t); err != nil || received.Shared() != shared {
				t.Errorf("Find fails %t: message %d: got error %v, shared %t, want %t", find, i, err,
					received.Shared(), shared)
			}
		}
	}
}

// gate is the memory of peers whose chunks arrive when open is closed.
type gate struct {
	shm.Sharer
	waits, open chan struct{}
}

// Arena implements transport.Memory.
func (g *gate) Arena(ctx context.Context, rank topo.Rank, chunk uint32) ([]byte, error) {
	close(g.waits)
	<-g.open
	return g.Sharer.Arena(ctx, rank, chunk)
}

// gated returns a job of two ranks that share memory. Rank 1 gets the chunks of rank 0 when the gate is open.
func gated(t *testing.T) (*job, *gate) {
	t.Helper()
	meshes := sharedMeshes(t, 2)
	g := &gate{meshes[1].(shm.Sharer), make(chan struct{}), make(chan struct{})}
	meshes[1] = g
	return newJob(t, meshes), g
}

// A sender ends its operations while the receiver copies a message. The receive does not succeed, because the
// message may have changed. If the sender has shut down, the error says so. Otherwise the receive waits for
// the verdict.
func TestRevoked(t *testing.T) {
	for _, leaves := range []bool{false, true} {
		j, g := gated(t)
		sent, received := j.send(0, 1, 1, payload(1, 1<<20)), j.receive(1, 0, 1, 1<<20)
		<-g.waits
		if leaves {
			j.quit(0, 1)
		}
		j.ranks[0].Close(errOver)
		if err := sent.wait(t); err != errOver {
			t.Errorf("the send has ended with error %v, want %v", err, errOver)
		}
		close(g.open)
		want := "rank 0 shut down"
		if !leaves {
			want = errOver.Error()
			j.ranks[1].Close(errOver)
		}
		if err := received.wait(t); err == nil || err.Error() != want {
			t.Errorf("the receive has ended with error %v, want %s", err, want)
		}
	}
}

// The sender shuts down and its channel ends while the receiver copies a message. The receive does not end
// before the receiver has stopped to write into its memory.
func TestChannelEndsDuringCopy(t *testing.T) {
	j, g := gated(t)
	j.send(0, 1, 1, payload(1, 1<<20))
	received := j.receive(1, 0, 1, 1<<20)
	<-g.waits
	j.quit(0, 1)
	j.ranks[0].Close(errOver)
	j.ranks = j.ranks[1:] // the cleanup must not use rank 0 any more
	if err := j.meshes[0].Close(); err != nil {
		t.Error(err)
	}
	select {
	case err := <-received.done:
		t.Errorf("the receive has ended during the copy with error %v", err)
		received.done <- err
	case <-time.After(time.Second):
	}
	close(g.open)
	if err := received.wait(t); err == nil || err.Error() != "rank 0 shut down" {
		t.Errorf("the receive has ended with error %v, want that rank 0 shut down", err)
	}
	select {
	case err := <-j.failures:
		t.Errorf("got failure %v", err)
	default:
	}
}

// An operation that does not end in time is reported, again and again. One that ends is not.
func TestTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		late := make(chan *p2p.Op, 100)
		j := newJob(t, testcluster.MemMeshes(2), func(cfg *p2p.Config) {
			cfg.OnTimeout = func(o *p2p.Op) { late <- o }
		})
		began, never, ended := time.Now(), j.op(1, 4, nil), j.op(1, 5, nil)
		never.Timeout, ended.Timeout = 2*time.Second, time.Second
		if j.ranks[0].Send(&ended.Op) != nil || j.ranks[0].Receive(&never.Op) != nil {
			t.Fatal("the operations did not begin")
		}
		for _, want := range []time.Duration{2 * time.Second, 3 * time.Second} {
			o := <-late // without a report, it panics because all goroutines wait
			if took := time.Since(began); o != &never.Op || took != want {
				t.Errorf("%v timed out after %v, want %v after %v", o, took, &never.Op, want)
			}
		}
	})
}

// If the channel to a peer breaks, the owner of the Exchange is told which peer it is.
func TestBrokenChannel(t *testing.T) {
	eachMesh(t, 2, func(t *testing.T, j *job) {
		j.send(1, 0, 1, payload(1, 3))
		j.receive(0, 1, 1, 3).want(t, 1, payload(1, 3))
		waits := j.receive(0, 1, 2, 1)
		if err := j.meshes[1].Close(); err != nil {
			t.Fatal(err)
		}
		for {
			select {
			case err := <-j.failures:
				var peer *transport.PeerError
				if errors.As(err, &peer) && peer.Peer == 1 {
					if len(waits.done) != 0 {
						t.Error("the receive has ended before the verdict")
					}
					return
				}
			case <-time.After(20 * time.Second):
				t.Fatal("no failure was reported")
			}
		}
	})
}

// Operations that wait too long are reported.
func TestStalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stalls := make(chan string, 1)
		j := newJob(t, testcluster.MemMeshes(2), func(cfg *p2p.Config) {
			cfg.StallWarning = time.Second
			cfg.OnStall = func(o *p2p.Op, _ time.Duration) {
				select {
				case stalls <- o.String():
				default:
				}
			}
		})
		began := time.Now()
		j.receive(0, 1, 4, 0)
		if got, took := <-stalls, time.Since(began); got != "recv from rank 1, tag 4" || took != time.Second {
			t.Errorf("got %s after %v", got, took)
		}
	})
}

func BenchmarkPingPong(b *testing.B) {
	b.Run("tcp", func(b *testing.B) { pingPong(b, testcluster.TCPMeshes) })
	b.Run("shm", func(b *testing.B) { pingPong(b, sharedMeshes) })
}

func pingPong(b *testing.B, meshes func(testing.TB, int) []transport.Mesh) {
	for _, n := range []int{4, 4096, 1 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			j := newJob(b, meshes(b, 2))
			x, y := j.alloc(n), j.alloc(n)
			swap := func(me topo.Rank, buf []byte, first bool) {
				if first {
					_ = j.send(me, 1-me, 1, buf).wait(b)
				}
				_ = j.receiveInto(me, 1-me, 1, buf).wait(b)
				if !first {
					_ = j.send(me, 1-me, 1, buf).wait(b)
				}
			}
			var wg sync.WaitGroup
			wg.Go(func() {
				for range b.N {
					swap(1, y, false)
				}
			})
			b.SetBytes(int64(2 * n))
			for range b.N {
				swap(0, x, true)
			}
			wg.Wait()
		})
	}
}

// BenchmarkRaw exchanges the same bytes on a bare channel, for comparison with BenchmarkPingPong.
func BenchmarkRaw(b *testing.B) {
	meshes := testcluster.TCPMeshes(b, 2)
	var conns [2]transport.Conn
	var wg sync.WaitGroup
	for r := range conns {
		wg.Go(func() {
			conn, err := meshes[r].Conn(b.Context(), lane, topo.Rank(1-r))
			if err != nil {
				b.Error(err)
			}
			conns[r] = conn
		})
	}
	wg.Wait()
	swap := func(c transport.Conn, buf []byte, first bool) {
		for _, sends := range []bool{first, !first} {
			if sends {
				_ = c.Send(buf)
				_ = c.Flush()
			} else if _, err := io.ReadFull(c, buf); err != nil {
				b.Error(err)
			}
		}
	}
	for _, n := range []int{4, 4096, 1 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			var wg sync.WaitGroup
			for r := range conns {
				wg.Go(func() {
					buf := make([]byte, n)
					for range b.N {
						swap(conns[r], buf, r == 0)
					}
				})
			}
			b.SetBytes(int64(2 * n))
			wg.Wait()
		})
	}
	for _, m := range meshes {
		_ = m.Close()
	}
}
