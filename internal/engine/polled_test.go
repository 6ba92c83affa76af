package engine_test

import (
	"context"
	"encoding/binary"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/tensorqueue"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
	"github.com/gohvd/gohvd/transport/mem"
)

// restful waits until no loop of c watches, and then counts how often they watch in a while.
func restful(t *testing.T, c *cluster) uint64 {
	looks := func() (n uint64) {
		for _, e := range c.engines {
			n += e.Looks()
		}
		return n
	}
	const while = 100 * time.Millisecond // less than a heartbeat
	for range 50 {
		before := looks()
		<-time.After(while) // what is measured
		if n := looks() - before; n < 100 {
			return n
		}
	}
	t.Fatal("the loops do not come to rest")
	return 0
}

// A loop watches while its rank is busy. When it is not, or waits for a rank that does not come, it sleeps.
func TestIdleRanksDoNotWatch(t *testing.T) {
	const n = 3
	c := startOn(t, mem.NewPolled(n), n, func(cfg *engine.Config) { cfg.Spin = time.Millisecond })
	c.each(func(r int) {
		for range 100 {
			if err := c.wait(c.allreduce(r, "x", make([]byte, 8))); err != nil {
				t.Error(err)
			}
		}
	})
	for r, e := range c.engines {
		if e.Looks() < 100 {
			t.Errorf("rank %d watched %d times in 100 operations", r, e.Looks())
		}
	}
	// Heartbeats may fall into the time: a turn and a look for each that comes or goes.
	if looks := restful(t, c); looks > 10*n {
		t.Errorf("idle, the loops watched %d times", looks)
	}
	waiting := c.allreduce(0, "y", make([]byte, 8))
	if looks := restful(t, c); looks > 10*n {
		t.Errorf("waiting for a rank, the loops watched %d times", looks)
	}
	c.each(func(r int) {
		if r == 0 {
			return
		}
		if err := c.wait(c.allreduce(r, "y", make([]byte, 8))); err != nil {
			t.Error(err)
		}
	})
	if err := c.wait(waiting); err != nil {
		t.Error(err)
	}
	c.shutdown()
}

// While a lane is busy what comes next is negotiated: one grant is ready to begin, and the others collect, to be granted
// together. They run in order.
func TestNegotiationOverlapsExecution(t *testing.T) {
	for name, net := range map[string]func(int) *mem.Cluster{"received": mem.New, "polled": mem.NewPolled} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const n = 3
				c := startOn(t, net(n), n, func(cfg *engine.Config) { cfg.Spin = -1 })
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
						if got := e.Queued(topo.Global); got != want {
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
		})
	}
}

// An operation in the steady state allocates next to nothing at all its ranks together: fusion's list of what runs together.
func TestSteadyStateAllocates(t *testing.T) {
	for _, n := range []int{1, 2, 4} {
		c := startOn(t, mem.NewPolled(n), n, nil)
		// Without elements nothing is allocated for the data.
		entries := make([]*tensorqueue.Entry, n)
		done := make(chan error, n)
		finish := func(err error) { done <- err }
		for r := range entries {
			entries[r] = new(tensorqueue.Entry)
		}
		once := func() {
			for r, e := range entries {
				*e = tensorqueue.Entry{Request: message.Request{
					Kind: message.Allreduce, Name: "x", DType: tensor.Int64, Shape: noElements, Op: tensor.Sum, Prescale: 1, Postscale: 1,
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
		for range 100 {
			once()
		}
		if got := testing.AllocsPerRun(500, once); got > 1 {
			t.Errorf("%d ranks: %v allocations an operation, want 1", n, got)
		}
		c.shutdown()
	}
}

var noElements = tensor.Shape{0}

// unpolled is a Poller whose Conns are not Polled.
type unpolled struct{ transport.Poller }

func (unpolled) Conn(ctx context.Context, lane transport.Lane, peer topo.Rank) (transport.Conn, error) {
	return struct{ transport.Conn }{}, nil
}

// A mesh that breaks its promise is refused.
func TestPollerWithoutPolledConns(t *testing.T) {
	net := mem.NewPolled(2)
	_, err := engine.Start(t.Context(), engine.Config{Rank: 0, Size: 2, Mesh: unpolled{net.Mesh(0).(transport.Poller)}})
	if err == nil || !strings.Contains(err.Error(), "control channel to rank 1") {
		t.Errorf("got error %v, want one about the channel to rank 1", err)
	}
	if _, err := net.Mesh(0).Conn(t.Context(), 1, 1); err == nil {
		t.Error("the mesh is not closed")
	}
}

// More frames at once than one turn takes from a peer are all heard, though nothing rings for the rest of them.
func TestManyFramesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := mem.NewPolled(2)
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
		stream = append(stream, make([]byte, 8)...) // number 0 again: the fault by which it is seen that all came
		var e *engine.Engine
		var started sync.WaitGroup
		started.Go(func() {
			var err error
			e, err = engine.Start(t.Context(), engine.Config{Rank: 0, Size: 2, Mesh: net.Mesh(0), LivenessTimeout: 10 * time.Second, Spin: -1})
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
		if took := time.Since(began); took != 0 || !strings.Contains(e.Err().Error(), "want number 500") {
			t.Errorf("ended after %v with %v", took, e.Err())
		}
		e.Close()
		if err := net.Mesh(1).Close(); err != nil {
			t.Error(err)
		}
	})
}
