package ps

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// startSmall starts a node of a job with one server and one worker. recovery is HVD_RECOVERY_SECONDS.
func startSmall(t *testing.T, role, port, recovery string) (*Node, error) {
	return Join(t.Context(), smallConfig(role, port, recovery))
}

func smallConfig(role, port, recovery string) Config {
	return Config{Logger: discard,
		Settings: nodeSettings(role, 1, 1, port, map[string]string{"HVD_RECOVERY_SECONDS": recovery})}
}

// startAll starts the nodes of a job with one server and one worker, and returns them by id.
func startAll(t *testing.T, start func(role string) (*Node, error)) map[int]*Node {
	nodes := make(map[int]*Node)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, role := range []string{"scheduler", "server", "worker"} {
		wg.Go(func() {
			po, err := start(role)
			if err != nil {
				t.Errorf("%s: %v", role, err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			nodes[po.van.ID()] = po
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return nodes
}

// TestReturn makes the server and the worker end and start again, twice. A request in flight fails. A server
// that was started again refuses pushes until its values are set, and a worker that was started again finds
// the values that its predecessor has pushed.
func TestReturn(t *testing.T) {
	port := strconv.Itoa(testnet.FreePort(t))
	start := func(role string) (*Node, error) { return startSmall(t, role, port, "0") }
	nodes := startAll(t, start)
	serve := func() {
		must(NewKVServer(nodes[8], Sum[float64]()))
		never := OnRequest(func(SimpleData, *SimpleApp) {}) // it does not answer
		must(NewSimpleApp(nodes[8], App(1), never))
	}
	var w *KVWorker[float64]
	var silent *SimpleApp
	work := func() {
		w, silent = must(NewKVWorker[float64](nodes[9])), must(NewSimpleApp(nodes[9], App(1)))
	}
	push := func(v float64, opts ...PushOption) error {
		r, err := w.PushAsync(t.Context(), []uint64{1, 5}, []float64{v, 10 * v}, opts...)
		if err == nil {
			err = r.Wait(t.Context())
		}
		return err
	}
	check := func(want float64) {
		t.Helper()
		var got []float64
		r, err := w.PullAsync(t.Context(), []uint64{1, 5}, &got)
		if wait(t, r, err); len(got) != 2 || got[0] != want || got[1] != 10*want {
			t.Errorf("got %v, want %v and %v", got, want, 10*want)
		}
	}
	again := func(id int, role string) {
		nodes[id].stop()
		po, err := start(role)
		if err != nil {
			t.Fatal(err)
		}
		if po.van.ID() != id || !po.IsRecovery() {
			t.Fatalf("the node has the id %d, want %d", po.ID(), id)
		}
		nodes[id] = po
	}
	serve()
	work()
	if err := push(1); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		inFlight := must(silent.Request(t.Context(), 8, 1, nil))
		again(8, "server")
		testnet.WantError(t, inFlight.Wait(t.Context()), "server 0 is gone")
		serve()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if err := nodes[9].AwaitReturn(ctx, 8); err != nil {
			t.Fatal(err)
		}
		cancel()
		testnet.Eventually(t, "the worker reaches the server", func() bool {
			return !errors.As(push(1), new(*NodeError))
		})
		testnet.WantError(t, push(1), "server 0: this server was started again and has lost the values of key 1",
			"InitCmd")
		if err := errors.Join(push(3, Cmd(InitCmd)), push(4)); err != nil {
			t.Fatal(err)
		}
		check(7)
		again(9, "worker")
		work()
		check(7)
		noError(t, push(1))
		check(8)
	}
	var wg sync.WaitGroup
	for _, po := range nodes {
		wg.Go(func() {
			noError(t, po.Finalize(t.Context()))
		})
	}
	wg.Wait()
}

// TestStartWaitsForReturn makes the server end before all have entered the barrier of Start. If they are told
// to, the others wait for its return, and its new process takes part from the beginning. Otherwise their
// barrier fails, and the error names the server.
func TestStartWaitsForReturn(t *testing.T) {
	for _, recovery := range []string{"60", "0"} {
		port := strconv.Itoa(testnet.FreePort(t))
		nodes := startAll(t, func(role string) (*Node, error) {
			p, err := start(t.Context(), smallConfig(role, port, recovery))
			if err != nil {
				return nil, err
			}
			return p.nodes[0], nil
		})
		met := make(chan error, 2)
		go func() { met <- nodes[1].meetAll(t.Context(), 0) }()
		nodes[8].stop()
		go func() { met <- nodes[9].meetAll(t.Context(), 0) }()
		if recovery == "0" {
			for range 2 {
				testnet.WantError(t, <-met, "barrier of group 7: server 0 is gone")
			}
			nodes[9].stop()
			nodes[1].stop()
			continue
		}
		var err error
		if nodes[8], err = startSmall(t, "server", port, recovery); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(<-met, <-met); err != nil {
			t.Fatal(err)
		}
		if nodes[8].IsRecovery() {
			t.Error("the server has taken the place of one that had started")
		}
		var wg sync.WaitGroup
		for _, po := range nodes {
			wg.Go(func() {
				noError(t, po.Finalize(t.Context()))
			})
		}
		wg.Wait()
	}
}

// TestFinalizeWaits makes the worker end and return while the other nodes are in the barrier of Finalize, and
// end for good. The others wait for its return, if they are told to, and otherwise fail with its name.
func TestFinalizeWaits(t *testing.T) {
	for _, c := range []struct {
		recovery string
		returns  bool
	}{{"60", true}, {"0.2", false}, {"0", false}} {
		port := strconv.Itoa(testnet.FreePort(t))
		start := func(role string) (*Node, error) { return startSmall(t, role, port, c.recovery) }
		nodes := startAll(t, start)
		ended := make(chan error, 2)
		for _, id := range []int{1, 8} {
			go func() { ended <- nodes[id].Finalize(t.Context()) }()
		}
		nodes[9].stop()
		if c.returns {
			for range 2 {
				po, err := start("worker")
				if err != nil {
					t.Fatal(err)
				}
				nodes[9] = po
				select {
				case err := <-ended:
					t.Fatalf("Finalize of a node has returned %v", err)
				default:
				}
				if po.ID() != 9 {
					t.Fatalf("the node has the id %d", po.ID())
				}
				po.stop()
			}
			po, err := start("worker")
			if err != nil {
				t.Fatal(err)
			}
			noError(t, errors.Join(po.Finalize(t.Context()), <-ended, <-ended))
			continue
		}
		// The scheduler and the server may leave in any order, and the later one may miss the other one.
		testnet.WantError(t, errors.Join(<-ended, <-ended), "ps: finalize: barrier of group 7: worker 0 is gone")
	}
}
