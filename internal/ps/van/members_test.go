package van

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/testnet"
)

// again starts a node in the place of one that has ended, and returns it.
func again(t *testing.T, nodes map[int]*node, id int, change func(*Config)) *node {
	t.Helper()
	cfg := nodes[1].cfg
	cfg = config(RoleOf(id), cfg.NumServers, cfg.NumWorkers, cfg.Root)
	cfg.Rank = Rank(id)
	if change != nil {
		change(&cfg)
	}
	n, result := startNode(t, cfg)
	wantStart(t, result)
	if n.ID() != id || !n.IsRecovery() {
		t.Fatalf("the node has the id %d, want %d", n.ID(), id)
	}
	nodes[id] = n
	return n
}

// ask sends a request and waits for its answer.
func ask(t *testing.T, n *node, to int) {
	t.Helper()
	n.mu.Lock()
	want := n.acked + 1
	n.mu.Unlock()
	m := &Message{Header: &pspb.Header{Request: true, Body: fmt.Append(nil, n.ID())}}
	if _, err := n.Request(t.Context(), to, m); err != nil {
		t.Errorf("%s to %s: %v", Name(n.ID()), Name(to), err)
		return
	}
	n.until(t, "an answer of "+Name(to), func() bool { return n.acked == want })
}

// TestReturn kills each node several times and starts it again. It gets its id back, everybody reaches it,
// and barriers of all nodes succeed.
func TestReturn(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"": nil,
		"resend": func(c *Config) {
			c.Resend, c.ResendTimeout, c.Faults = true, 20*time.Millisecond, Lossy(3)
		},
	} {
		t.Run(name, func(t *testing.T) {
			nodes := startJob(t, 2, 2, change)
			for range 3 {
				for _, id := range []int{9, 8, 10, 11} {
					kill(nodes[id])
					for _, other := range nodes {
						if id != other.ID() {
							testnet.Eventually(t, Name(other.ID())+" learns the death of "+Name(id), func() bool {
								return len(other.Dead(time.Hour)) == 1
							})
						}
					}
					again(t, nodes, id, change)
					for _, other := range nodes {
						if err := other.AwaitReturn(t.Context(), id); err != nil {
							t.Fatal(err)
						}
					}
				}
				for _, w := range []int{9, 11} {
					for _, s := range []int{8, 10} {
						testnet.Eventually(t, "a connection", func() bool {
							l, err := nodes[w].link(s)
							return err == nil && !isClosed(l.done)
						})
						ask(t, nodes[w], s)
						ask(t, nodes[s], w)
					}
					ask(t, nodes[w], SchedulerID)
				}
				for group := 1; group <= 7; group++ {
					meet(t, nodes, group, 2, 2)
				}
			}
		})
	}
}

// TestReturnOfCustomers checks that a process with several workers gets all their ids back, and that a
// process with another number of workers does not get them.
func TestReturnOfCustomers(t *testing.T) {
	two := func(c *Config) {
		if c.Role == Worker {
			c.Customers = 2
		}
	}
	root := fmt.Sprintf("127.0.0.1:%d", testnet.FreePort(t))
	nodes := make(map[int]*node)
	start := func(role Role) (*node, chan error) {
		cfg := config(role, 1, 2, root)
		cfg.HeartbeatTimeout = 5 * time.Second
		two(&cfg)
		return startNode(t, cfg)
	}
	var results []chan error
	for id, role := range map[int]Role{1: Scheduler, 8: Server, 9: Worker} {
		n, result := start(role)
		nodes[id], results = n, append(results, result)
	}
	wantStart(t, results...)
	defer func() { stopAll(nodes) }()
	kill(nodes[9])
	cfg := config(Worker, 1, 2, root)
	_, result := startNode(t, cfg)
	testnet.WantError(t, <-result, "the job has 2 of 2 workers already, and 1 more want to join")
	w := again(t, nodes, 9, two)
	if got := w.IDs(); len(got) != 2 || got[1] != 11 {
		t.Errorf("the process has the ids %v, want 9 and 11", got)
	}
	ask(t, w, 8)
}

// TestReturnBeforeTheDeathIsKnown checks that a process waits for its place if the scheduler does not know
// yet that its predecessor has ended.
func TestReturnBeforeTheDeathIsKnown(t *testing.T) {
	nodes := startJob(t, 1, 1, func(c *Config) { c.HeartbeatInterval = 2 * time.Second })
	cfg := config(Worker, 1, 1, nodes[1].cfg.Root)
	n, result := startNode(t, cfg)
	select {
	case err := <-result:
		t.Fatalf("the registration ended, although worker 0 is alive: %v", err)
	case <-time.After(300 * time.Millisecond): // usually it has registered by now
	}
	kill(nodes[9])
	wantStart(t, result)
	nodes[9] = n
	ask(t, n, 8)
}

// TestOldIncarnation checks that an answer to a process that has ended does not reach the one that has taken
// its place, and that messages of the new one do not count as those of the old one.
func TestOldIncarnation(t *testing.T) {
	nodes := startJob(t, 1, 1, nil)
	arrived := make(chan Process, 1)
	nodes[8].handle(func(from Process, m *Message) {
		m.Release()
		arrived <- from
	})
	request := func() Process {
		to := nodes[9].send(t, 8)
		if to.ID != 8 {
			t.Errorf("the request goes to %v", to)
		}
		return <-arrived
	}
	old := request()
	kill(nodes[9])
	again(t, nodes, 9, nil)
	now := request()
	if old.ID != 9 || now.ID != 9 || old.Incarnation == now.Incarnation {
		t.Errorf("the requests came from %v and %v", old, now)
	}
	testnet.WantError(t, nodes[8].Reply(old, &Message{Header: &pspb.Header{Body: []byte("old")}}),
		"worker 0 is gone: its process has ended, and another one has taken its place")
	if nodes[8].Connected(old) || !nodes[8].Connected(now) {
		t.Error("the server is connected with the wrong process")
	}
	if err := nodes[8].Reply(now, &Message{Header: &pspb.Header{}}); err != nil {
		t.Error(err)
	}
	nodes[9].until(t, "one answer", func() bool { return nodes[9].acked == 1 })
}

// TestReturnToBarrier checks that a process that has taken a place can enter a barrier from which its
// predecessor had withdrawn, and that those who waited got an error.
func TestReturnToBarrier(t *testing.T) {
	nodes := startJob(t, 1, 2, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	for range 3 {
		testnet.WantError(t, nodes[9].Barrier(ctx, 0, GroupWorkers), "deadline exceeded")
	}
	testnet.Eventually(t, "worker 0 has withdrawn", func() bool {
		nodes[1].sched.mu.Lock()
		defer nodes[1].sched.mu.Unlock()
		return nodes[1].sched.withdrawn[[2]int{GroupWorkers, 9}] == 3
	})
	failed := make(chan error, 1)
	go func() { failed <- nodes[11].Barrier(t.Context(), 0, GroupWorkers) }()
	waitIn(t, nodes[1], GroupWorkers, 1)
	kill(nodes[9])
	testnet.WantError(t, <-failed, "barrier of group 4: worker 0 is gone: its connection has ended")
	again(t, nodes, 9, nil)
	if err := nodes[11].AwaitReturn(t.Context(), 9); err != nil {
		t.Fatal(err)
	}
	meet(t, nodes, GroupWorkers, 1, 2)
}

// TestNewsInAnyOrder checks that old news of a place changes nothing.
func TestNewsInAnyOrder(t *testing.T) {
	v := New(Config{Role: Server, NumWorkers: 1, NumServers: 1, Customers: 1, Rank: -1}, ignore{})
	v.members.nodes[9] = &pspb.Node{Id: 9, Role: pspb.Role_WORKER, Incarnation: 1}
	for _, c := range []struct {
		generation uint64
		gone       string
		want       uint64
		alive      bool
	}{
		{0, "", 0, true}, {1, "", 1, true}, {0, "dead", 1, true}, {1, "dead", 1, false}, {1, "", 1, false},
		{3, "dead", 3, false}, {2, "", 3, false}, {3, "", 3, false}, {4, "", 4, true}, {2, "dead", 4, true},
	} {
		v.learn([]*pspb.Node{{Id: 9, Role: pspb.Role_WORKER, Incarnation: c.generation + 1,
			Generation: c.generation, Gone: c.gone}})
		if n := v.members.nodes[9]; n.Generation != c.want || (v.members.gone[9] == nil) != c.alive {
			t.Errorf("after generation %d, %q: the node is %v, %v", c.generation, c.gone, n, v.members.gone[9])
		}
	}
	v.learn([]*pspb.Node{{Id: 77, Generation: 9}})
	if v.members.nodes[77] != nil {
		t.Error("the job has a node more")
	}
	v.cancel(nil)
}

// TestNoReturnWithClock checks that nobody can return to a job in which the scheduler has a clock.
func TestNoReturnWithClock(t *testing.T) {
	clocked := func(c *Config) { c.Staleness = 1 }
	nodes := startJob(t, 1, 1, clocked)
	kill(nodes[9])
	cfg := config(Worker, 1, 1, nodes[1].cfg.Root)
	clocked(&cfg)
	_, result := startNode(t, cfg)
	testnet.WantError(t, <-result, "in a job with a clock none can return")
}

// TestRegistrationAfterTheEnd checks that no process gets a place in a job whose nodes have met for the last
// time, while the scheduler has not left yet.
func TestRegistrationAfterTheEnd(t *testing.T) {
	for _, staleness := range []int{-1, 1} {
		change := func(c *Config) { c.Staleness = staleness }
		nodes := startJob(t, 1, 1, change)
		nodes[1].Finish()
		meet(t, nodes, GroupAll, 1, 1)
		nodes[9].Stop(t.Context())
		cfg := config(Worker, 1, 1, nodes[1].cfg.Root)
		change(&cfg)
		late, result := startNode(t, cfg)
		if err := <-result; !errors.Is(err, ErrOver) {
			t.Errorf("staleness %d: got %v, want ErrOver", staleness, err)
			late.Stop(t.Context())
		}
	}
}

// TestDeclaredDead checks that a worker that the scheduler has declared dead blames itself, also if it sees
// the end of its connection with a server before it reads that.
func TestDeclaredDead(t *testing.T) {
	var w atomic.Pointer[node]
	nodes := startJob(t, 1, 1, func(c *Config) {
		if c.Role != Worker {
			return
		}
		c.Faults = func(_, _ Process, m *Message, deliver func(*Message) error) error {
			if n := w.Load(); n != nil && m.Header.Control.GetCommand() == pspb.Command_LOST {
				deadline := time.Now().Add(time.Minute)
				for ; time.Now().Before(deadline); <-time.After(time.Millisecond) {
					n.calls.mu.Lock()
					asks := len(n.calls.pending) > 0
					n.calls.mu.Unlock()
					n.mu.Lock()
					blames := len(n.blamed) > 0
					n.mu.Unlock()
					if asks || blames {
						break // it has seen the end of the connection with the server
					}
				}
			}
			return deliver(m)
		}
	})
	w.Store(nodes[9])
	l := nodes[SchedulerID].linkWith(t, 9)
	nodes[SchedulerID].sched.declareDead(l, errors.New("a test says so"))
	<-nodes[9].Done()
	testnet.WantError(t, nodes[9].Err(), "worker 0 is gone: the scheduler has declared it dead: a test says so")
	wantBlamed(t, nodes[9], 9)
}

// TestReasonOfADeclaredDeath checks that a server knows why the scheduler has declared a worker dead when the
// worker ends its connection, however long the scheduler takes to tell its handler.
func TestReasonOfADeclaredDeath(t *testing.T) {
	nodes := startJob(t, 1, 1, nil)
	scheduler, server := nodes[SchedulerID], nodes[8]
	lost := make(chan struct{})
	defer close(lost)
	scheduler.mu.Lock()
	scheduler.blaming = func() { <-lost }
	scheduler.mu.Unlock()
	l := scheduler.linkWith(t, 9)
	scheduler.sched.declareDead(l, errors.New("a test says so"))
	server.until(t, "the server has lost the worker", func() bool { return server.lost[9] != nil })
	testnet.WantError(t, server.lossOf(9), "worker 0 is gone: a test says so")
}

// TestDeclaredDeadAfterReturn checks that the scheduler goes on if the process that it declares dead has
// ended meanwhile, and another one has taken its place.
func TestDeclaredDeadAfterReturn(t *testing.T) {
	nodes := startJob(t, 1, 1, nil)
	scheduler := nodes[SchedulerID]
	l := scheduler.linkWith(t, 8)
	scheduler.sched.telling.Lock()
	scheduler.sched.declareDead(l, errors.New("a test says so"))
	kill(nodes[8])
	server := again(t, nodes, 8, nil)
	scheduler.sched.telling.Unlock()
	testnet.Eventually(t, "the worker knows the new process", func() bool {
		return nodes[9].Current(8) == server.Process()
	})
}

// TestBlameAfterReturn checks that a request to a server whose place another process has taken does not keep
// a node from blaming the next one.
func TestBlameAfterReturn(t *testing.T) {
	nodes := startJob(t, 1, 1, nil)
	w, old := nodes[9], nodes[8].Process()
	kill(nodes[8])
	testnet.Eventually(t, "the worker blames the server", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return slices.Equal(w.blamed, []int{8})
	})
	server := again(t, nodes, 8, nil)
	testnet.Eventually(t, "the worker knows the new process", func() bool {
		return w.Current(8) == server.Process()
	})
	w.blames.blame(old, errors.New("a late request"))
	w.blames.blame(Process{ID: SchedulerID}, errors.New("a test says so"))
	wantBlamed(t, w, 8, 1)
}

// TestRequestsWithoutServer checks the errors of requests of a worker that has started while the server was
// gone, and that AwaitReturn fails when the scheduler has died, although the server has returned.
func TestRequestsWithoutServer(t *testing.T) {
	nodes := startJob(t, 1, 1, nil)
	kill(nodes[8])
	testnet.Eventually(t, "the scheduler knows it", func() bool { return nodes[1].Gone(8) != nil })
	kill(nodes[9])
	w := again(t, nodes, 9, nil)
	_, err := w.Request(t.Context(), 8, &Message{Header: &pspb.Header{}})
	if gone, ok := errors.AsType[*NodeError](err); !ok || gone.ID != 8 {
		t.Errorf("a request to a server that was gone before has the error %v", err)
	}
	testnet.WantError(t, err, "its connection has ended")
	again(t, nodes, 8, nil)
	if err := w.AwaitReturn(t.Context(), 8); err != nil {
		t.Error(err)
	}
	kill(nodes[1])
	w.until(t, "the worker knows that the scheduler is gone", func() bool { return w.lost[1] != nil })
	testnet.WantError(t, w.AwaitReturn(t.Context(), 8), "scheduler is gone")
}
