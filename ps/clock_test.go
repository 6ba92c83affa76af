package ps

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestStaleSynchronous checks in 20 runs that no worker reads values that are older than the bound. In each
// iteration, a worker adds 1 to its own key. One worker, which the seed chooses, is slow: it goes on only
// when the others have done all that the bound permits.
func TestStaleSynchronous(t *testing.T) {
	const workers, iterations = 3, 12
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 0))
		bound, slow := 1+random.IntN(3), random.IntN(workers)
		var mu sync.Mutex
		changed := sync.NewCond(&mu)
		calls := make([]int, workers) // calls of Clock
		behind := 0                   // iterations of the slow worker that another one did not see
		calling := func(rank, n int) {
			mu.Lock()
			defer mu.Unlock()
			calls[rank] = n
			changed.Broadcast()
		}
		least := func() int { // calls of the workers but the slow one
			calls[slow] = iterations
			return slices.Min(calls)
		}
		j := job{t: t, servers: 2, workers: workers,
			settings: map[string]string{"HVD_STALENESS": strconv.Itoa(bound)}}
		kv(j, Sum[float64], func(po *Node, rank int, w *KVWorker[float64]) {
			defer calling(rank, iterations)             // if it gives up, the slow one does not wait for it
			keys := []uint64{0, MaxKey / 2, MaxKey - 2} // at both servers
			noError(t, w.Push(t.Context(), keys, make([]float64, workers)))
			for now := range iterations {
				var got []float64
				r, err := w.PullAsync(t.Context(), keys, &got)
				if wait(t, r, err); len(got) != workers {
					return
				}
				for other, v := range got {
					if v < float64(now-bound) || other == rank && v != float64(now) {
						t.Errorf("seed %d: worker %d has the value %v of worker %d in iteration %d, the bound is %d",
							seed, rank, v, other, now, bound)
					}
				}
				mu.Lock()
				for rank == slow && least() < min(now+bound+1, iterations) {
					changed.Wait()
				}
				behind = max(behind, now-int(got[slow]))
				mu.Unlock()
				must(w.PushAsync(t.Context(), keys[rank:rank+1], []float64{1}))
				calling(rank, now+1)
				if err := po.Clock(t.Context()); err != nil {
					t.Error(err)
					return
				}
			}
		})
		if behind != bound {
			t.Errorf("seed %d: the oldest values were %d iterations old, want %d", seed, behind, bound)
		}
	}
}

// gradient returns numbers that depend on all its arguments, and whose sum depends on the order.
func gradient(vals []float32, rank, now int) []float32 {
	g := make([]float32, len(vals))
	for i, v := range vals {
		angle := float64(v)*100 + float64(rank*7+now*3+i)
		g[i] = float32(math.Sin(angle) * math.Pow(10, float64(rank)))
	}
	return g
}

// TestBulkSynchronous checks that several workers get the same bits as one worker that does their work in the
// order of their ranks, in asynchronous mode.
func TestBulkSynchronous(t *testing.T) {
	const workers, iterations = 3, 20
	keys := []uint64{1, MaxKey / 3, MaxKey / 2, MaxKey - 2}
	for name, handler := range map[string]func() Handler[float32]{"sum": Sum[float32],
		"adam": func() Handler[float32] { return Adam[float32](0.01, 0.9, 0.999, 1e-8) }} {
		result := func(n int) (vals []float32) {
			j := job{t: t, servers: 2, workers: n}
			if n > 1 {
				j.settings = map[string]string{"HVD_STALENESS": "0"}
			}
			kv(j, handler, func(po *Node, rank int, w *KVWorker[float32]) {
				pull := func() (got []float32) {
					noError(t, w.Pull(t.Context(), keys, &got))
					return got
				}
				push := func(vals []float32, opts ...PushOption) {
					must(w.PushAsync(t.Context(), keys, vals, opts...))
				}
				clock := func() { noError(t, po.Clock(t.Context())) }
				if rank == 0 {
					push([]float32{1, 2, 3, 4}, Cmd(InitCmd))
				}
				clock()
				for now := range iterations {
					got := pull()
					for part := rank; part < workers; part += n {
						push(gradient(got, part, now))
					}
					if again := pull(); n > 1 && !slices.Equal(again, got) {
						t.Errorf("the values changed during an iteration from %v to %v", got, again)
					}
					clock()
				}
				if got := pull(); rank == 0 {
					vals = got
				}
			})
			return vals
		}
		serial := result(1)
		for range 3 {
			if got := result(workers); !slices.Equal(got, serial) {
				t.Errorf("%s: %d workers got %v, one worker %v", name, workers, got, serial)
			}
		}
	}
}

// TestPushBeforeFinalize checks that a push in flight at the end of a worker belongs to its last iteration.
func TestPushBeforeFinalize(t *testing.T) {
	pulled := make(chan struct{})
	late := func(from, _ van.Process, m *van.Message, deliver func(*van.Message) error) error {
		if from.ID == van.WorkerID(0) && m.Header.Push {
			select {
			case <-pulled:
			case <-time.After(500 * time.Millisecond):
			}
		}
		return deliver(m)
	}
	j := job{t: t, servers: 1, workers: 2, faults: late, settings: map[string]string{"HVD_STALENESS": "0"}}
	kv(j, Sum[int32], func(po *Node, rank int, w *KVWorker[int32]) {
		key := []uint64{1}
		if rank == 0 {
			must(w.PushAsync(t.Context(), key, []int32{5}))
			return // Finalize follows
		}
		defer close(pulled)
		noError(t, w.Push(t.Context(), key, []int32{1}))
		noError(t, po.Clock(t.Context()))
		var got []int32
		if noError(t, w.Pull(t.Context(), key, &got)); !slices.Equal(got, []int32{6}) {
			t.Errorf("got %v, want [6]", got)
		}
	})
}

// TestFailedPushIsReported checks that a node that leaves logs a push that has failed only if the program has
// not waited for it, and pushes that were not answered in one line.
func TestFailedPushIsReported(t *testing.T) {
	for _, waits := range []bool{false, true} {
		log, entries := testnet.Logs()
		left := make(chan struct{})
		j := job{t: t, servers: 1, workers: 1, logger: logs.ToSlog(log), leave: true}
		j.faults = func(from, _ van.Process, m *van.Message, deliver func(*van.Message) error) error {
			if from.ID == van.WorkerID(0) && m.Header.Push && m.Header.Head == 7 {
				m.Release()
				return nil // never answered
			}
			return deliver(m)
		}
		j.run(func(n *Node) {
			if n.Role() == Server {
				_, err := NewKVServer(n, Sum[int32]())
				noError(t, err)
			}
			if n.Role() != Worker {
				<-left
				return
			}
			defer close(left)
			w, err := NewKVWorker[int32](n)
			if noError(t, err); err != nil {
				return
			}
			noError(t, w.Push(t.Context(), []uint64{1}, []int32{1}))
			r, err := w.PushAsync(t.Context(), []uint64{1}, []int32{1, 2})
			if noError(t, err); err != nil {
				return
			}
			testnet.Eventually(t, "the push fails", r.over.Load)
			if waits {
				testnet.WantError(t, r.Wait(t.Context()), "key 1 has 1 values here, got 2")
			}
			for range 3 {
				_, err := w.PushAsync(t.Context(), []uint64{1}, []int32{1}, Cmd(7))
				noError(t, err)
			}
			n.Close()
		})
		if got := testnet.Logged(entries, "a push failed and", "key 1 has 1 values here, got 2"); got == waits {
			t.Errorf("the program waits: %v, the failure is logged: %v", waits, got)
		}
		if !testnet.Logged(entries, "left before pushes were answered", "pushes:3") {
			t.Errorf("the log has only %v", entries.All())
		}
	}
}

// TestClockErrors checks what Clock and requests report if a push has failed, if the context of Clock ends,
// and that nobody waits for a worker in Finalize.
func TestClockErrors(t *testing.T) {
	leave := make(chan struct{})
	j := job{t: t, servers: 1, workers: 2, settings: map[string]string{"HVD_STALENESS": "0"}}
	kv(j, Sum[int32], func(po *Node, rank int, w *KVWorker[int32]) {
		keys := []uint64{1, 2}
		if rank == 1 {
			<-leave
			return
		}
		goOn := sync.OnceFunc(func() { close(leave) })
		defer goOn()
		noError(t, w.Push(t.Context(), keys, []int32{1, 2}))
		must(w.PushAsync(t.Context(), keys, []int32{1, 2, 3, 4}))
		testnet.WantError(t, po.Clock(t.Context()), "ps: clock: ps: push of 2 keys: server 0",
			"key 1 has 1 values here, got 2")
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := po.Clock(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want that the deadline has passed", err)
		}
		testnet.WantError(t, w.Push(t.Context(), keys, []int32{1, 2}), "ps: push of 2 keys: the worker has ended its iteration")
		goOn()
		noError(t, po.Clock(t.Context()))
		var got []int32
		if noError(t, w.Pull(t.Context(), keys, &got)); !slices.Equal(got, []int32{1, 2}) {
			t.Errorf("got %v, want [1 2]", got)
		}
	})
}
