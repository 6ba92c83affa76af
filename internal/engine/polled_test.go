package engine_test

import (
	"encoding/binary"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/tensorqueue"
)

// comesToRest waits until the loops of c poll at most a few times in 100 ms. It fails the test if they keep
// polling.
func comesToRest(t *testing.T, c *cluster) {
	t.Helper()
	looks := func() (n uint64) {
		for _, e := range c.engines {
			n += e.Polls()
		}
		return n
	}
	const while = 100 * time.Millisecond // less than the time between two heartbeats
	most := 10 * uint64(len(c.engines))
	for range 50 {
		before := looks()
		<-time.After(while) // the loops poll in this time
		if looks()-before <= most {
			return
		}
	}
	t.Error("the loops keep polling")
}

// A loop polls while its rank is busy. It parks if the rank is idle. It also parks if the rank waits for
// another rank that has not submitted the operation.
func TestIdleRanksDoNotPoll(t *testing.T) {
	const n = 3
	c := startOn(t, mem.New(n), n, func(cfg *engine.Config) { cfg.Spin = time.Millisecond })
	c.each(func(r int) {
		for range 100 {
			c.succeeds(c.allreduce(r, "x", make([]byte, 8)))
		}
	})
	for r, e := range c.engines {
		if e.Polls() < 100 {
			t.Errorf("rank %d polled %d times in 100 operations", r, e.Polls())
		}
	}
	comesToRest(t, c)
	waiting := c.allreduce(0, "y", make([]byte, 8))
	comesToRest(t, c)
	c.each(func(r int) {
		if r == 0 {
			return
		}
		c.succeeds(c.allreduce(r, "y", make([]byte, 8)))
	})
	c.succeeds(waiting)
	c.shutdown()
}

// After an operation that took longer than the poll budget, the loop polls for another budget, because the
// program is likely to submit the next operation soon.
func TestPollsAfterALongOperation(t *testing.T) {
	// With polling disabled, every operation takes longer than the budget.
	c := startOn(t, mem.New(2), 2, func(cfg *engine.Config) { cfg.Spin = -1 })
	release := make(chan struct{})
	var done [2]chan error
	c.each(func(r int) {
		executing := make(chan struct{})
		done[r] = c.gather(r, func(n int) []byte {
			close(executing)
			<-release
			return make([]byte, n)
		})
		<-executing
	})
	// Rank 1 is not the coordinator, so from here on only the end of the operation can make it busy.
	e := c.engines[1]
	e.SetSpin(time.Hour)
	before := e.Polls()
	close(release)
	c.each(func(r int) {
		c.succeeds(done[r])
	})
	const want = 200 // with polling disabled, the loop still polls about twice a second, for heartbeats
	for e.Polls() < before+want {
		if c.ctx.Err() != nil {
			t.Fatalf("polled %d times, want %d", e.Polls()-before, want)
		}
		runtime.Gosched()
	}
	c.shutdown()
}

// counted is a Mesh that counts the calls of Park and Unpark.
type counted struct {
	transport.Mesh
	rests, wakes atomic.Int32
}

func (c *counted) Park() bool {
	c.rests.Add(1)
	return c.Mesh.Park()
}

func (c *counted) Unpark() {
	c.wakes.Add(1)
	c.Mesh.Unpark()
}

// When a parked loop wakes, it calls Unpark before it polls again, so that peers do not notify it of frames
// that it finds by polling anyway.
func TestLoopsWakeTheMesh(t *testing.T) {
	net := mem.New(2)
	var meshes [2]counted
	c := startOn(t, net, 2, func(cfg *engine.Config) {
		m := &meshes[cfg.Rank]
		m.Mesh = net.Mesh(cfg.Rank)
		cfg.Mesh, cfg.Spin = m, -1
	})
	c.each(func(r int) {
		for range 20 {
			c.succeeds(c.allreduce(r, "x", make([]byte, 8)))
		}
	})
	c.shutdown()
	for r := range meshes {
		if rests, wakes := meshes[r].rests.Load(), meshes[r].wakes.Load(); rests == 0 || wakes < rests {
			t.Errorf("rank %d rested %d times and woke %d times", r, rests, wakes)
		}
	}
}

// After the epoch has failed, a rank keeps reading its connections until its engine is closed, so that
// surviving peers can send their backlog.
func TestReadsOnAfterAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 3
		c := start(t, n, nil)
		c.net.Kill(2)
		for _, e := range c.engines {
			<-e.Ended()
		}
		conn, err := c.net.Mesh(1).Conn(t.Context(), transport.Control, 0)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if err := conn.Send([]byte("too late to matter")); err != nil {
			t.Error(err)
		}
		flushed := make(chan error, 1)
		go func() { flushed <- conn.Flush() }()
		select {
		case err := <-flushed:
			if took := time.Since(began); err != nil || took != 0 {
				t.Errorf("flushed after %v with %v", took, err)
			}
		case <-time.After(time.Minute): // this takes no real time in the bubble
			t.Error("the loop does not read the connection")
		}
		for _, e := range c.engines {
			e.Close()
		}
	})
}

// If the timeout of an operation ends before the next heartbeat, the operation times out on time and not only
// at the heartbeat.
func TestDeadlineBeforeTheNextHeartbeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := start(t, 2, nil)
		time.Sleep(100 * time.Millisecond) // by then all loops sleep until the next heartbeat
		began := time.Now()
		late := sum("x", make([]byte, 8))
		late.Timeout = 300 * time.Millisecond
		err := <-c.submit(0, late)
		if took := time.Since(began); err == nil || took != late.Timeout {
			t.Errorf("after %v: got error %v, want that it timed out after %v", took, err, late.Timeout)
		}
		for _, e := range c.engines {
			_ = e.Shutdown(c.ctx, engine.Departure{}) // this returns an error, because the job has failed
		}
	})
}

// While a lane is busy, the ranks negotiate later operations. The first of these is granted and waits for the
// lane. The rest become ready, and are granted together when the lane is free. All operations run in the
// order of submission.
func TestNegotiationOverlapsExecution(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 3
		c := start(t, n, nil)
		release := make(chan struct{})
		var mu sync.Mutex
		order := make([][]string, n)
		all := make([][]chan error, n)
		submit := func(entry func(r int) *tensorqueue.Entry) {
			c.each(func(r int) {
				e := entry(r)
				done := make(chan error, 1)
				e.Done = func(err error) {
					mu.Lock()
					order[r] = append(order[r], e.Request.Name)
					mu.Unlock()
					done <- err
				}
				all[r] = append(all[r], done)
				if err := c.engines[r].Submit(e); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		queued := func(when string, want int) {
			for r, e := range c.engines {
				if got := e.QueuedGrants(topo.Global); got != want {
					t.Errorf("%s: rank %d has %d grants waiting for its lane, want %d", when, r, got, want)
				}
			}
		}
		submit(func(int) *tensorqueue.Entry {
			return gather("a", func(n int) []byte {
				<-release
				return make([]byte, n)
			})
		})
		queued("while a runs", 0)
		submit(func(int) *tensorqueue.Entry { return sum("b", make([]byte, 8)) })
		queued("with b submitted", 1)
		submit(func(int) *tensorqueue.Entry { return sum("c", make([]byte, 8)) })
		submit(func(int) *tensorqueue.Entry { return sum("d", make([]byte, 8)) })
		queued("with c and d submitted, which wait for a", 1)
		close(release)
		for r := range all {
			for _, done := range all[r] {
				if err := <-done; err != nil {
					t.Errorf("rank %d: %v", r, err)
				}
			}
			if want := []string{"a", "b", "c", "d"}; !slices.Equal(order[r], want) {
				t.Errorf("rank %d: done in the order %v, want %v", r, order[r], want)
			}
		}
		c.shutdown()
	})
}

// In steady state, an operation makes at most one allocation at all ranks together, for the list of the fused
// tensors.
func TestSteadyStateAllocates(t *testing.T) {
	for _, n := range []int{1, 2, 4} {
		// In the bubble no time passes while the loops poll. So nothing that is due from time to time
		// allocates.
		synctest.Test(t, func(t *testing.T) { steadyStateAllocates(t, n) })
	}
}

func steadyStateAllocates(t *testing.T, n int) {
	c := startOn(t, mem.New(n), n, nil)
	// The tensors have no elements, so that the test allocates no memory for data.
	entries := make([]*tensorqueue.Entry, n)
	done := make(chan error, n)
	finish := func(err error) { done <- err }
	for r := range entries {
		entries[r] = new(tensorqueue.Entry)
	}
	once := func() {
		for r, e := range entries {
			*e = tensorqueue.Entry{Request: message.Request{
				Kind: message.Allreduce, Name: "x", DType: tensor.Int64, Shape: noElements,
				Op: tensor.Sum, Prescale: 1, Postscale: 1,
			}, Done: finish}
			if err := c.engines[r].Submit(e); err != nil {
				t.Error(err)
			}
		}
		for range n {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	for range 50 {
		once()
	}
	if got := testing.AllocsPerRun(100, once); got > 1 {
		t.Errorf("%d ranks: %v allocations an operation, want 1", n, got)
	}
	c.shutdown()
}

var noElements = tensor.Shape{0}

// If a peer sends more frames at once than one turn handles, further turns handle the remaining frames
// without another notification.
func TestManyFramesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := mem.New(2)
		var stream []byte
		for seq := range uint32(500) {
			body, err := message.AppendUp(nil, &message.Up{Type: message.UpHeartbeat})
			if err != nil {
				t.Fatal(err)
			}
			stream = binary.LittleEndian.AppendUint32(stream, uint32(len(body)))
			stream = binary.LittleEndian.AppendUint32(stream, seq)
			stream = append(stream, body...)
		}
		// The last frame has number 0 again, which is an error. The error shows that all earlier frames were
		// handled.
		stream = append(stream, make([]byte, 8)...)
		var e *engine.Engine
		var started sync.WaitGroup
		started.Go(func() {
			var err error
			e, err = engine.Start(t.Context(), engine.Config{Rank: 0, Size: 2, Mesh: net.Mesh(0),
				LivenessTimeout: 10 * time.Second, Spin: -1})
			if err != nil {
				t.Error(err)
			}
		})
		conn, err := net.Mesh(1).Conn(t.Context(), transport.Control, 0)
		if err != nil {
			t.Fatal(err)
		}
		started.Wait()
		synctest.Wait()
		began := time.Now()
		if err := conn.Send(stream); err != nil {
			t.Error(err)
		}
		<-e.Ended()
		if took := time.Since(began); took != 0 ||
			!strings.Contains(e.Err().Error(), "want frame number 500") {
			t.Errorf("ended after %v with %v", took, e.Err())
		}
		e.Close()
		if err := net.Mesh(1).Close(); err != nil {
			t.Error(err)
		}
	})
}
