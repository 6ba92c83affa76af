package engine_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/tcp"
	"github.com/gohvd/gohvd/tensorqueue"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const deadline = 60 * time.Second

// cluster is a job whose ranks are engines in this process. A test with a cluster decides when each rank
// submits, dies and shuts down. If all ranks run the same function, use package testcluster instead.
type cluster struct {
	t       testing.TB
	ctx     context.Context
	end     func() // ends ctx
	net     *mem.Cluster
	engines []*engine.Engine
}

// start starts a job of n ranks. Their loops do not poll but park as soon as they have nothing to do, because
// time in a synctest bubble does not pass while a loop polls. If change is not nil, it changes the
// configuration of each rank.
func start(t testing.TB, n int, change func(*engine.Config)) *cluster {
	return startOn(t, mem.New(n), n, func(cfg *engine.Config) {
		cfg.Spin = -1
		if change != nil {
			change(cfg)
		}
	})
}

// startOn starts a job of n ranks on the mem.Cluster net. If change is not nil, it changes the configuration
// of each rank.
func startOn(t testing.TB, net *mem.Cluster, n int, change func(*engine.Config)) *cluster {
	c := &cluster{t: t, net: net, engines: make([]*engine.Engine, n)}
	c.extend()
	c.each(func(r int) {
		cfg := engine.Config{
			Rank: topo.Rank(r), Size: n, Mesh: c.net.Mesh(topo.Rank(r)),
			CacheCapacity: 64, FusionThresholdBytes: 1 << 20, LivenessTimeout: 10 * time.Second,
		}
		if change != nil {
			change(&cfg)
		}
		cfg.Backends = append(cfg.Backends,
			tcp.Register(cfg.Mesh, tcp.Config{Deterministic: cfg.Deterministic}))
		e, err := engine.Start(c.ctx, cfg)
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
		c.engines[r] = e
	})
	if t.Failed() {
		t.FailNow()
	}
	return c
}

// extend makes ctx end after deadline from now. When it ends, the stacks of all goroutines are logged.
func (c *cluster) extend() {
	ctx, cancel := context.WithTimeout(c.t.Context(), deadline)
	stop := context.AfterFunc(ctx, func() {
		if c.t.Context().Err() == nil {
			stacks := make([]byte, 16<<20)
			c.t.Logf("no end after %v:\n%s", deadline, stacks[:runtime.Stack(stacks, true)])
		}
	})
	if c.end != nil {
		c.end()
	}
	c.ctx, c.end = ctx, func() {
		stop()
		cancel()
	}
	c.t.Cleanup(c.end)
}

// each calls f once for each rank, all at the same time, and waits until all calls have returned.
func (c *cluster) each(f func(r int)) {
	var wg sync.WaitGroup
	for r := range c.engines {
		wg.Go(func() { f(r) })
	}
	wg.Wait()
}

func (c *cluster) shutdown() {
	c.each(func(r int) {
		if err := c.engines[r].Shutdown(c.ctx, engine.Departure{}); err != nil {
			c.t.Errorf("rank %d: shutdown: %v", r, err)
		}
	})
}

// sum returns an allreduce that sums the int64 elements of buf in place.
func sum(name string, buf []byte) *tensorqueue.Entry {
	return &tensorqueue.Entry{
		Request: message.Request{
			Kind: message.Allreduce, Name: name, DType: tensor.Int64,
			Shape: tensor.Shape{int64(len(buf) / 8)},
			Op:    tensor.Sum, Prescale: 1, Postscale: 1,
		},
		Input: buf, Output: buf,
	}
}

// submit submits entries at rank r, one after another. The returned channel receives the result of each entry
// when the entry ends.
func (c *cluster) submit(r int, entries ...*tensorqueue.Entry) chan error {
	done := make(chan error, len(entries))
	for _, e := range entries {
		e.Done = func(err error) { done <- err }
		if err := c.engines[r].Submit(e); err != nil {
			done <- err
		}
	}
	return done
}

// allreduce submits a sum of the int64 elements of buf, in place, at rank r.
func (c *cluster) allreduce(r int, name string, buf []byte) chan error {
	return c.submit(r, sum(name, buf))
}

func (c *cluster) wait(done chan error) error {
	select {
	case err := <-done:
		return err
	case <-c.ctx.Done():
		return c.ctx.Err()
	}
}

// succeeds checks that operations succeed.
func (c *cluster) succeeds(all ...chan error) {
	c.t.Helper()
	for _, done := range all {
		if err := c.wait(done); err != nil {
			c.t.Error(err)
		}
	}
}

func both(t *testing.T, f func(t *testing.T, lockstep bool)) {
	t.Run("event", func(t *testing.T) { f(t, false) })
	t.Run("lockstep", func(t *testing.T) { f(t, true) })
}

// inBubbles is like both, but each call of f is in a synctest bubble.
func inBubbles(t *testing.T, f func(t *testing.T, lockstep bool)) {
	both(t, func(t *testing.T, lockstep bool) {
		synctest.Test(t, func(t *testing.T) { f(t, lockstep) })
	})
}

func TestSums(t *testing.T) {
	t.Run("without polling", func(t *testing.T) { sums(t, func(cfg *engine.Config) { cfg.Spin = -1 }) })
	t.Run("with a processor each", func(t *testing.T) {
		sums(t, func(cfg *engine.Config) { cfg.LocalProcesses = 1 })
	})
	both(t, func(t *testing.T, lockstep bool) {
		sums(t, func(cfg *engine.Config) { cfg.Lockstep = lockstep })
	})
}

// If a rank queues an operation while its join is pending, the operation ends with a UsageError.
func TestSubmitBehindAJoin(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		c := start(t, 2, func(cfg *engine.Config) { cfg.Lockstep = lockstep })
		c.each(func(r int) {
			join := &tensorqueue.Entry{Request: message.Request{Kind: message.Join, Name: "join"}}
			if r == 1 {
				c.succeeds(c.allreduce(r, "only here", make([]byte, 8)))
				c.succeeds(c.submit(r, join))
				return
			}
			joined := c.submit(r, join)
			var misuse *engine.UsageError
			const want = `hvd: allreduce "behind": this rank has joined process set 0: wait for the join to end`
			if err := c.wait(c.allreduce(r, "behind", make([]byte, 8))); !errors.As(err, &misuse) ||
				err.Error() != want {
				t.Errorf("got error %v, want a UsageError: %s", err, want)
			}
			c.succeeds(joined)
		})
		c.shutdown()
	})
}

func sums(t *testing.T, change func(*engine.Config)) {
	for _, n := range []int{1, 2, 3, 5} {
		c := startOn(t, mem.New(n), n, change)
		c.each(func(r int) {
			for i := range 50 {
				buf := binary.LittleEndian.AppendUint64(nil, uint64(i+r))
				if err := c.wait(c.allreduce(r, "x", buf)); err != nil {
					t.Errorf("n=%d rank %d: %v", n, r, err)
					return
				}
				if got, want := binary.LittleEndian.Uint64(buf), uint64(n*i+n*(n-1)/2); got != want {
					t.Errorf("n=%d rank %d: got %d, want %d", n, r, got, want)
				}
			}
		})
		c.shutdown()
	}
}

// If a rank dies, every operation at the other ranks ends with an error that names the dead rank. This holds
// while the ranks execute and while they negotiate.
func TestDeath(t *testing.T) {
	const n = 4
	for _, over := range []string{"mem", "mem without polling", "tcp"} {
		t.Run(over, func(t *testing.T) {
			both(t, func(t *testing.T, lockstep bool) {
				for _, executing := range executingOrNot() {
					for victim := range n {
						net, change := mem.New(n), func(*engine.Config) {}
						switch over {
						case "tcp":
							change = overTCP(t, n)
						case "mem without polling":
							change = func(cfg *engine.Config) { cfg.Spin = -1 }
						}
						c := startOn(t, net, n, func(cfg *engine.Config) {
							change(cfg)
							cfg.Lockstep = lockstep
						})
						dies(t, c, victim, executing)
						if t.Failed() {
							t.Fatalf("victim %d, executing %v", victim, executing)
						}
					}
				}
			})
		})
	}
}

// executingOrNot returns the values of executing with which dies is called. The time of a death while the
// ranks execute is random, so it is called twice, but once with -short.
func executingOrNot() []bool {
	if testing.Short() {
		return []bool{false, true}
	}
	return []bool{false, true, true}
}

// dies ends the engine of rank victim as if its process had died. If executing is set, the rank dies at a
// random time while all ranks execute large operations. Otherwise it dies while the other ranks wait for its
// request.
func dies(t *testing.T, c *cluster, victim int, executing bool) {
	started := make(chan struct{})
	var once sync.Once
	var killer sync.WaitGroup
	delay := time.Duration(rand.IntN(8000)) * time.Microsecond
	killer.Go(func() {
		<-started
		if executing {
			<-time.After(delay) // so that the death comes at a random time
		}
		c.net.Kill(topo.Rank(victim))
		c.engines[victim].Close()
	})
	c.each(func(r int) {
		if r == victim && !executing {
			once.Do(func() { close(started) }) // the victim submits nothing
			return
		}
		size := 8
		if executing {
			size = 1 << 20
		}
		for i := 0; ; i++ {
			name := fmt.Sprintf("x%d", i)
			err := c.wait(c.allreduce(r, name, make([]byte, size)))
			if err == nil {
				if i == 3 {
					once.Do(func() { close(started) })
				}
				continue
			}
			if r == victim {
				return
			}
			var peer *engine.PeerError
			if !errors.As(err, &peer) || !slices.Equal(peer.Ranks, []int{victim}) {
				t.Errorf("rank %d: got error %v, want one that names rank %d", r, err, victim)
			}
			if !strings.HasPrefix(err.Error(), fmt.Sprintf("hvd: allreduce %q: rank %d failed", name,
				victim)) {
				t.Errorf("rank %d: error %q does not name operation, tensor and rank", r, err)
			}
			return
		}
	})
	killer.Wait()
	for r, e := range c.engines {
		if err := e.Shutdown(c.ctx, engine.Departure{}); err == nil && r != victim {
			t.Errorf("rank %d: shutdown after the failure gave no error", r)
		}
	}
}

// If a peer sends a malformed frame, the verdict names that peer, and the peer receives the verdict. The
// engine of rank 0 ends with it too.
func TestGarbageOnAControlConnection(t *testing.T) {
	for _, frame := range [][]byte{
		{10, 0, 0, 0, 9, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0}, // the frame has the wrong number
		{0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0},                    // the frame is too long
		{3, 0, 0, 0, 0, 0, 0, 0, 0xde, 0xad, 0xbe},              // the frame cannot be decoded
		{10, 0, 0, 0, 0, 0, 0, 0, 2, 0, 9, 0, 0, 0, 0, 0, 0, 0}, // the frame names a cycle not issued yet
	} {
		net := mem.New(2)
		ctx, cancel := context.WithTimeout(t.Context(), deadline)
		defer cancel()
		sent := make(chan error, 1)
		go func() {
			conn, err := net.Mesh(1).Conn(ctx, transport.Control, 0)
			if err == nil {
				err = conn.Send(frame)
			}
			sent <- err
		}()
		e, err := engine.Start(ctx, engine.Config{
			Rank: 0, Size: 2, Mesh: net.Mesh(0), CacheCapacity: 4, LivenessTimeout: 10 * time.Second,
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
		select {
		case <-e.Ended():
		case <-ctx.Done():
			t.Fatalf("frame %x: no end", frame)
		}
		// The verdict reaches the peer. The connection stays open until the test closes the engine.
		conn, err := net.Mesh(1).Conn(ctx, transport.Control, 0)
		if err != nil {
			t.Fatal(err)
		}
		closed := make(chan error, 1)
		go func() {
			all, err := io.ReadAll(conn)
			if !bytes.Contains(all, []byte("protocol error")) {
				t.Errorf("frame %x: the peer reads %q before %v, want a verdict", frame, all, err)
			}
			closed <- err
		}()
		select {
		case err := <-closed:
			t.Errorf("frame %x: the connection ended with the verdict: %v", frame, err)
			continue
		case <-time.After(20 * time.Millisecond):
		}
		var peer *engine.PeerError
		if err := e.Err(); !errors.As(err, &peer) || !slices.Equal(peer.Ranks, []int{1}) {
			t.Errorf("frame %x: ended with %v, want rank 1 named", frame, err)
		}
		e.Close()
		if err := <-closed; err == nil {
			t.Error("the connection has a clean end")
		}
		if err := net.Mesh(1).Close(); err != nil {
			t.Error(err)
		}
	}
}

// If rank 0 grants an operation that this rank has not submitted, or grants one with other parameters, this
// rank suspects rank 0.
func TestWrongGrant(t *testing.T) {
	for _, c := range []struct{ name, want string }{
		{"other", "which rank 1 has not submitted"},
		{"x", "with parameters that differ from the request of rank 1"},
	} {
		net := mem.New(2)
		ctx, cancel := context.WithTimeout(t.Context(), deadline)
		defer cancel()
		conns := make(chan transport.Conn, 1)
		go func() {
			conn, _ := net.Mesh(0).Conn(ctx, transport.Control, 1)
			conns <- conn
		}()
		e, err := engine.Start(ctx, engine.Config{
			Rank: 1, Size: 2, Mesh: net.Mesh(1), CacheCapacity: 4, LivenessTimeout: 10 * time.Second,
		})
		if err != nil {
			t.Fatal(err)
		}
		job := &cluster{t: t, ctx: ctx, net: net, engines: []*engine.Engine{nil, e}}
		done := job.allreduce(1, "x", make([]byte, 8))
		frame, err := message.AppendDown(make([]byte, 8), &message.Down{Type: message.DownCycle, Cycle: 1,
			Sets: []message.DownSet{{Grants: []message.Grant{{Full: []*message.Response{{
				Kind: message.Allreduce, Name: c.name, DType: tensor.Float64, Shape: tensor.Shape{1},
				Op: tensor.Sum, Prescale: 1, Postscale: 1,
			}}}}}},
		})
		if err != nil {
			t.Fatal(err)
		}
		binary.LittleEndian.PutUint32(frame, uint32(len(frame)-8))
		conn := <-conns
		if err := conn.Send(frame); err != nil {
			t.Fatal(err)
		}
		up := receive(t, conn, message.UpSuspect)
		if !slices.Equal(up.Suspects, []topo.Rank{0}) || !strings.Contains(up.Reason, c.want) {
			t.Errorf("rank 1 suspects ranks %v because %q, want rank 0, %q", up.Suspects, up.Reason, c.want)
		}
		e.Close()
		if err := job.wait(done); err == nil {
			t.Error("the operation ended without an error")
		}
	}
}

// receive reads frames from the control connection of a rank until one has the type want, and returns it.
func receive(t *testing.T, conn io.Reader, want message.UpType) *message.Up {
	for {
		var header [8]byte
		if _, err := io.ReadFull(conn, header[:]); err != nil {
			t.Fatal(err)
		}
		frame := make([]byte, binary.LittleEndian.Uint32(header[:]))
		if _, err := io.ReadFull(conn, frame); err != nil {
			t.Fatal(err)
		}
		if message.UpType(frame[0]) != want {
			continue
		}
		up := new(message.Up)
		if err := message.DecodeUp(frame, up); err != nil {
			t.Fatal(err)
		}
		return up
	}
}

// gather returns an allgather of one byte. The function allocate allocates the memory for its result.
func gather(name string, allocate func(n int) []byte) *tensorqueue.Entry {
	return &tensorqueue.Entry{
		Request: message.Request{Kind: message.Allgather, Name: name, DType: tensor.Uint8,
			Shape: tensor.Shape{1}},
		Input:    []byte{1},
		Allocate: allocate,
	}
}

// gather submits an allgather of one byte at rank r. The function allocate allocates the memory for its
// result.
func (c *cluster) gather(r int, allocate func(n int) []byte) chan error {
	return c.submit(r, gather("gather", allocate))
}

func allocate(n int) []byte { return make([]byte, n) }

// If the context of Shutdown ends, Shutdown returns without waiting for peers, even if a peer blocks an
// operation.
func TestShutdownGivesUp(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		c := start(t, 2, func(cfg *engine.Config) { cfg.Lockstep = lockstep })
		release := make(chan struct{})
		executing := make(chan struct{})
		zero := c.gather(0, func(n int) []byte {
			close(executing)
			return make([]byte, n)
		})
		one := c.gather(1, func(n int) []byte {
			<-release
			return make([]byte, n)
		})
		<-executing // rank 0 executes now, and waits for rank 1, which sends nothing
		ctx, cancel := context.WithCancel(c.ctx)
		cancel()
		if err := c.engines[0].Shutdown(ctx, engine.Departure{}); !errors.Is(err, context.Canceled) {
			t.Errorf("got error %v, want the context's", err)
		}
		if err := c.wait(zero); !errors.Is(err, engine.ErrClosed) {
			t.Errorf("the operation gave %v, want that the engine was closed", err)
		}
		close(release)
		c.engines[1].Close()
		<-one
	})
}

// If the deadline of Shutdown passes while the rank waits for others, the verdict names them and not the rank
// that waits, and Shutdown returns it too.
func TestShutdownDeadline(t *testing.T) {
	for _, s := range []struct {
		name   string
		leaver int
		submit []int // the ranks that submit an operation
		want   []int
	}{
		{"an operation that rank 2 does not submit", 1, []int{0, 1}, []int{2}},
		{"an operation that rank 2 does not submit, at rank 0", 0, []int{0, 1}, []int{2}},
		{"ranks that do not shut down", 0, nil, []int{1, 2}},
	} {
		t.Run(s.name, func(t *testing.T) {
			both(t, func(t *testing.T, lockstep bool) {
				synctest.Test(t, func(t *testing.T) {
					c := start(t, 3, func(cfg *engine.Config) { cfg.Lockstep = lockstep })
					var pending []chan error
					for _, r := range s.submit {
						pending = append(pending, c.allreduce(r, "x", make([]byte, 8)))
					}
					ctx, cancel := context.WithTimeout(c.ctx, 3*time.Second)
					defer cancel()
					began := time.Now()
					err := c.engines[s.leaver].Shutdown(ctx, engine.Departure{})
					if !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("got error %v, want the context's", err)
					}
					if took := time.Since(began); took > 4*time.Second {
						t.Errorf("Shutdown returned after %v, want 3s", took)
					}
					errs := []error{err}
					for _, done := range pending {
						errs = append(errs, c.wait(done))
					}
					for _, e := range c.engines {
						<-e.Ended()
						errs = append(errs, e.Err())
					}
					for _, err := range errs {
						if ranks := c.failedRanks(s.leaver, err); !slices.Equal(ranks, s.want) {
							t.Errorf("got %v, want that ranks %v failed", err, s.want)
						}
					}
					for _, e := range c.engines {
						e.Close()
					}
				})
			})
		})
	}
}

// If a rank that has no operations shuts down while another one waits for it, only the ranks that have not
// left learn the verdict.
func TestVerdictAboutALeaver(t *testing.T) {
	inBubbles(t, func(t *testing.T, lockstep bool) {
		var told [3]bool
		c := start(t, 3, func(cfg *engine.Config) {
			cfg.Lockstep, cfg.OnVerdict = lockstep, func(*engine.PeerError) { told[cfg.Rank] = true }
		})
		waits := c.allreduce(0, "x", make([]byte, 8))
		synctest.Wait()
		if err := c.engines[1].Shutdown(c.ctx, engine.Departure{}); err != nil {
			t.Errorf("the rank that has left: got error %v", err)
		}
		if got := c.failedRanks(0, c.wait(waits)); !slices.Equal(got, []int{1}) {
			t.Errorf("got that ranks %v have failed, want rank 1", got)
		}
		<-c.engines[2].Over()
		for _, e := range c.engines {
			e.Close()
		}
		if told != [3]bool{true, false, true} {
			t.Errorf("the verdict was reported at %v, want at ranks 0 and 2", told)
		}
	})
}

// Ranks shut down right after they have submitted operations. Every operation succeeds, fails with a
// mismatch, or fails with ErrShutDown. An operation that fails with ErrShutDown at one rank does so at all
// ranks. No rank that has left is reported as dead.
func TestShutdownCrossesWork(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		for i := range 40 {
			c := startOn(t, mem.New(4), 4, func(cfg *engine.Config) {
				cfg.Lockstep, cfg.Spin = lockstep, time.Duration(-(i % 2))
			})
			var outcomes [4][10]error
			c.each(func(r int) {
				var done [10]chan error
				for i := range done {
					done[i] = c.allreduce(r, fmt.Sprint("x", i), make([]byte, 8<<rand.IntN(3)*10_000))
				}
				if err := c.engines[r].Shutdown(c.ctx, engine.Departure{}); err != nil {
					t.Errorf("rank %d: shutdown: %v", r, err)
				}
				for i := range done {
					outcomes[r][i] = c.wait(done[i])
				}
			})
			for i := range outcomes[0] {
				for r := range outcomes {
					err := outcomes[r][i]
					var mismatch *engine.MismatchError // the sizes are random, so the ranks may disagree
					if err != nil && !errors.Is(err, engine.ErrShutDown) && !errors.As(err, &mismatch) {
						t.Errorf("rank %d: x%d: %v", r, i, err)
					}
					if errors.Is(err, engine.ErrShutDown) != errors.Is(outcomes[0][i], engine.ErrShutDown) {
						t.Errorf("x%d: rank 0 got %v, rank %d got %v", i, outcomes[0][i], r, err)
					}
				}
			}
		}
	})
}

// In a synctest bubble, time passes only while all goroutines sleep. In this time, operations and a shutdown
// must take no time, and only heartbeats may wake an idle rank. The loops park at once and do not poll, so
// the test also checks that a rank is notified when a frame arrives.
func TestNobodyWaitsForTheClock(t *testing.T) {
	for _, n := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			c := start(t, n, nil)
			began := time.Now()
			c.each(func(r int) {
				for range 10 {
					c.succeeds(c.allreduce(r, "x", make([]byte, 8)))
				}
			})
			if took := time.Since(began); took != 0 {
				t.Errorf("n=%d: ten operations waited for %v", n, took)
			}
			// Sleep for three times the liveness timeout, but end the sleep between two heartbeats. The turn
			// of a heartbeat would hide a lost notification.
			time.Sleep(30*time.Second + 500*time.Millisecond)
			began = time.Now()
			c.shutdown()
			if took := time.Since(began); took != 0 {
				t.Errorf("n=%d: the shutdown waited for %v", n, took)
			}
		})
	}
}

// If a rank sends nothing but keeps its connection open, the verdict names the rank after the liveness
// timeout.
func TestSilence(t *testing.T) {
	inBubbles(t, func(t *testing.T, lockstep bool) {
		net := mem.New(2)
		ctx := t.Context()
		began := time.Now()
		var silent sync.WaitGroup
		silent.Go(func() {
			// Rank 1 connects but sends nothing.
			if _, err := net.Mesh(1).Conn(ctx, transport.Control, 0); err != nil {
				t.Error(err)
			}
		})
		e, err := engine.Start(ctx, engine.Config{
			Rank: 0, Size: 2, Mesh: net.Mesh(0), LivenessTimeout: 10 * time.Second, Lockstep: lockstep,
			Spin: -1,
		})
		if err != nil {
			t.Fatal(err)
		}
		silent.Wait()
		<-e.Ended()
		var peer *engine.PeerError
		if err := e.Err(); !errors.As(err, &peer) || !slices.Equal(peer.Ranks, []int{1}) ||
			!strings.Contains(err.Error(), "silent for 10s") {
			t.Errorf("ended with %v, want rank 1's silence", err)
		}
		if took := time.Since(began); took != 10*time.Second {
			t.Errorf("took %v, want 10s", took)
		}
		e.Close()
		if err := net.Mesh(1).Close(); err != nil {
			t.Error(err)
		}
	})
}

// If Shutdown is called with a canceled context in a job with one rank while an operation is running,
// Shutdown returns and the operation ends.
func TestAloneClosedWhileWorking(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		e, err := engine.Start(t.Context(), engine.Config{Size: 1, Mesh: transport.Alone{},
			Backends:        ops.Registry{tcp.Register(transport.Alone{}, tcp.Config{})},
			LivenessTimeout: 10 * time.Second, Lockstep: lockstep})
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		in, out := make([]byte, 64<<20), make([]byte, 64<<20)
		err = e.Submit(&tensorqueue.Entry{
			Request: message.Request{
				Kind: message.Allreduce, Name: "x", DType: tensor.Uint8, Shape: tensor.Shape{int64(len(in))},
				Op: tensor.Sum, Prescale: 1, Postscale: 1,
			},
			Input: in, Output: out, Done: func(err error) { done <- err },
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_ = e.Shutdown(ctx, engine.Departure{}) // the operation may end before the shutdown
		<-done
	})
}

// If the result of an allgather exceeds MaxResultBytes, the allgather fails at all ranks, and no rank
// allocates memory for the result.
func TestAllgatherOfMoreThanThereIs(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		c := start(t, 2, func(cfg *engine.Config) { cfg.Lockstep, cfg.MaxResultBytes = lockstep, 1000 })
		c.each(func(r int) {
			for _, rows := range []int64{100, 600} {
				err := c.wait(c.submit(r, &tensorqueue.Entry{
					Request: message.Request{Kind: message.Allgather, Name: fmt.Sprint(rows),
						DType: tensor.Uint8, Shape: tensor.Shape{rows}},
					Input: make([]byte, rows),
					Allocate: func(n int) []byte {
						if n > 1000 {
							t.Errorf("rank %d: %d bytes are allocated", r, n)
						}
						return make([]byte, n)
					},
				}))
				var refused *engine.MismatchError
				if fits := 2*rows <= 1000; fits && err != nil || !fits && (!errors.As(err, &refused) ||
					!strings.Contains(err.Error(), "1200 bytes, want at most 1000")) {
					t.Errorf("rank %d: %d rows: got error %v", r, rows, err)
				}
			}
		})
		c.shutdown()
	})
}

// If the rows that an alltoall sends to a rank exceed MaxResultBytes there, the rank cannot receive them. So
// the job fails with a PeerError that names this rank and says how large the result is.
func TestAlltoallOfMoreThanThereIs(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		c := start(t, 2, func(cfg *engine.Config) {
			cfg.Lockstep = lockstep
			if cfg.Rank == 1 {
				cfg.MaxResultBytes = 1000
			}
		})
		c.each(func(r int) {
			err := c.wait(c.submit(r, &tensorqueue.Entry{
				Request: message.Request{Kind: message.Alltoall, Name: "x", DType: tensor.Uint8,
					Shape: tensor.Shape{600}},
				Input: make([]byte, 600), Splits: []int64{0, 600},
				Allocate: func(n int) []byte {
					if r == 1 {
						t.Errorf("rank 1: %d bytes are allocated", n)
					}
					return make([]byte, n)
				},
			}))
			if got := c.failedRanks(r, err); !slices.Equal(got, []int{1}) ||
				!strings.Contains(err.Error(), "the result has 1200 bytes, want at most 1000") {
				t.Errorf("rank %d: got ranks %v and error %v", r, got, err)
			}
		})
		for _, e := range c.engines {
			e.Close()
		}
	})
}

// If the lane of one rank is stuck, the shutdown of the job fails at another rank after ten seconds without
// progress, and every operation ends. The error says why the job was shut down.
func TestShutdownWithoutProgress(t *testing.T) {
	for name, want := range map[string]func(error) bool{
		"all leave": func(err error) bool { return errors.Is(err, engine.ErrCutShort) },
		"stall": func(err error) bool {
			stall, ok := errors.AsType[*engine.StallError](err)
			return ok && strings.Contains(stall.Reason, `"gather"`)
		},
		"one leaves": func(err error) bool {
			peer, ok := errors.AsType[*engine.PeerError](err)
			return ok && peer.ShutDown && slices.Equal(peer.Ranks, []int{1})
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := start(t, 2, func(cfg *engine.Config) {
					if name == "stall" {
						cfg.StallShutdown = 5 * time.Second
					}
				})
				zero := c.gather(0, allocate)
				one := c.gather(1, func(n int) []byte {
					time.Sleep(time.Hour) // this takes no real time in the bubble
					return make([]byte, n)
				})
				synctest.Wait()
				began := time.Now()
				if name == "one leaves" {
					c.submit(0, gather("missing", allocate))
				}
				var ended sync.WaitGroup
				if name != "stall" {
					ended.Go(func() { _ = c.engines[1].Shutdown(t.Context(), engine.Departure{}) })
				}
				if name != "all leave" {
					<-c.engines[0].Over()
				}
				err := c.engines[0].Shutdown(t.Context(), engine.Departure{})
				if took := time.Since(began); took < 10*time.Second || took > 20*time.Second || !want(err) ||
					!errors.Is(err, engine.ErrShutDown) || !strings.Contains(err.Error(), "were aborted") {
					t.Errorf("the shutdown took %v and gave %v", took, err)
				}
				if err := <-zero; !want(err) || !errors.Is(err, engine.ErrShutDown) {
					t.Errorf("the stuck operation: got %v", err)
				}
				<-one
				ended.Wait()
				c.engines[1].Close()
			})
		})
	}
}
