package van

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/transport/faulty"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// ignore is a Handler that does nothing.
type ignore struct{}

func (ignore) Receive(_ Process, m *Message) { m.Release() }
func (ignore) Blame([]Process, error)        {}
func (ignore) Lost(int, error)               {}
func (ignore) Restored(Process)              {}
func (ignore) News()                         {}
func (ignore) Tick(time.Time)                {}

// node is a node of a test. Its Handler answers requests, and records what arrives.
type node struct {
	*Van

	// The following are guarded by mu and may be nil. request handles requests instead, response is called
	// for responses, and blaming when a node is blamed.
	request  func(from Process, m *Message)
	response func(m *Message)
	blaming  func()

	mu     sync.Mutex
	got    []string // bodies of requests
	acked  int      // responses
	blamed []int
	lost   map[int]error
	// restored has the ids of processes with which the connection works again.
	restored []int
	woken    chan struct{}
}

func (n *node) Receive(from Process, m *Message) {
	n.mu.Lock()
	request := n.request
	n.mu.Unlock()
	if m.Header.Request && request != nil {
		request(from, m)
		return
	}
	defer m.Release()
	n.mu.Lock()
	defer n.mu.Unlock()
	if m.Header.Request {
		n.got = append(n.got, string(m.Header.Body))
		_ = n.Reply(from, &Message{Header: &pspb.Header{Timestamp: m.Header.Timestamp}})
		return
	}
	if n.response != nil {
		n.response(m)
	}
	n.acked++
	n.Answered(from)
	n.wake()
}

func (n *node) Blame(failed []Process, err error) {
	n.mu.Lock()
	blaming := n.blaming
	for _, p := range failed {
		n.blamed = append(n.blamed, p.ID)
	}
	n.mu.Unlock()
	if blaming != nil {
		blaming()
	}
}

func (n *node) Lost(id int, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lost[id] = err
	n.wake()
}

// lossOf returns why the node has lost another one, or nil.
func (n *node) lossOf(id int) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lost[id]
}

func (n *node) Restored(p Process) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.restored = append(n.restored, p.ID)
	n.wake()
}

func (n *node) News() {}

func (n *node) Tick(time.Time) {}

func (n *node) wake() {
	close(n.woken)
	n.woken = make(chan struct{})
}

// until waits until cond, which is called with mu locked, returns true.
func (n *node) until(t *testing.T, what string, cond func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		n.mu.Lock()
		ok, woken := cond(), n.woken
		n.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-woken:
		case <-deadline:
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

// linkWith returns the connection of the node with another one.
func (n *node) linkWith(t *testing.T, id int) *link {
	t.Helper()
	l, err := n.link(id)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// send sends an empty request, and returns the process to which it goes.
func (n *node) send(t *testing.T, to int) Process {
	t.Helper()
	p, err := n.Request(t.Context(), to, &Message{Header: &pspb.Header{Request: true}})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// handle makes the function f handle the requests.
func (n *node) handle(f func(from Process, m *Message)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.request = f
}

// config returns the configuration of a node of a test.
func config(role Role, servers, workers int, root string) Config {
	c := Config{Role: role, NumServers: servers, NumWorkers: workers, Customers: 1, Rank: -1, Root: root,
		Host: "127.0.0.1", HostID: "here", StartTimeout: time.Minute,
		HeartbeatInterval: 100 * time.Millisecond, HeartbeatTimeout: 30 * time.Second,
		ResendTimeout: time.Second, WaterMark: 100, Staleness: -1}
	if role == Server {
		c.Listen = "127.0.0.1:0"
	}
	return c
}

// startNode starts a node in the background.
func startNode(t *testing.T, cfg Config) (n *node, result chan error) {
	n = &node{lost: make(map[int]error), woken: make(chan struct{})}
	n.Van = New(cfg, n)
	result = make(chan error, 1)
	go func() { result <- n.Start(t.Context()) }()
	return n, result
}

// startJob starts a job and returns its nodes by id. change may change the configurations. The job is stopped
// when the test ends.
func startJob(t *testing.T, servers, workers int, change func(*Config)) map[int]*node {
	t.Helper()
	root := fmt.Sprintf("127.0.0.1:%d", testnet.FreePort(t))
	nodes := make(map[int]*node)
	var all []*node
	var results []chan error
	for i := range 1 + servers + workers {
		role := Worker
		if i == 0 {
			role = Scheduler
		} else if i <= servers {
			role = Server
		}
		cfg := config(role, servers, workers, root)
		if change != nil {
			change(&cfg)
		}
		n, result := startNode(t, cfg)
		all, results = append(all, n), append(results, result)
	}
	wantStart(t, results...)
	for _, n := range all {
		nodes[n.ID()] = n
	}
	t.Cleanup(func() { stopAll(nodes) })
	return nodes
}

func stopAll(nodes map[int]*node) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for _, n := range nodes {
		wg.Go(func() { n.Stop(ctx) })
	}
	wg.Wait()
}

// barrier makes all nodes of a group enter a barrier, and returns their errors.
func barrier(ctx context.Context, nodes map[int]*node, group, servers, workers int) map[int]error {
	errs := make(map[int]error)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, id := range Members(group, servers, workers) {
		if n := nodes[id]; n != nil {
			wg.Go(func() {
				err := n.Barrier(ctx, 0, group)
				mu.Lock()
				errs[id] = err
				mu.Unlock()
			})
		}
	}
	wg.Wait()
	return errs
}

// meet makes all nodes of a group pass a barrier.
func meet(t *testing.T, nodes map[int]*node, group, servers, workers int) {
	t.Helper()
	for id, err := range barrier(testnet.Context(t), nodes, group, servers, workers) {
		if err != nil {
			t.Errorf("group %d: %s: %v", group, Name(id), err)
		}
	}
}

// waitIn waits until so many nodes are in the barrier of a group.
func waitIn(t *testing.T, scheduler *node, group, entered int) {
	t.Helper()
	testnet.Eventually(t, fmt.Sprintf("%d nodes wait", entered), func() bool {
		scheduler.sched.mu.Lock()
		defer scheduler.sched.mu.Unlock()
		return len(scheduler.sched.barriers[group]) == entered
	})
}

// TestJob starts a job and checks ids, barriers of every group, and that messages arrive between all nodes
// that are connected.
func TestJob(t *testing.T) {
	const servers, workers = 2, 3
	for _, encrypted := range []bool{false, true} {
		s, _ := secret.New()
		if encrypted {
			s = s.Encrypted()
		}
		nodes := startJob(t, servers, workers, func(c *Config) { c.Secret = s })
		for _, id := range Members(GroupAll, servers, workers) {
			if nodes[id] == nil {
				t.Fatalf("no node has the id %d", id)
			}
		}
		for group := 1; group <= 7; group++ {
			meet(t, nodes, group, servers, workers)
		}
		testnet.WantError(t, nodes[9].Barrier(t.Context(), 0, GroupServers), "group 2 does not have worker 0")
		testnet.WantError(t, nodes[9].Barrier(t.Context(), 0, 99), "group 99 does not have worker 0")
		for from, n := range nodes {
			for to := range nodes {
				_, err := n.Request(t.Context(), to, &Message{Header: &pspb.Header{Request: true,
					Body: []byte{byte(from)}}})
				if from != 1 && to != 1 && RoleOf(from) == RoleOf(to) {
					testnet.WantError(t, err, "has no connection with "+Name(to))
				} else if from == to || err != nil {
					if from != to || from != 1 || err != nil {
						t.Errorf("from %d to %d: %v", from, to, err)
					}
				}
			}
			_, err := n.Request(t.Context(), 77, &Message{Header: &pspb.Header{}})
			testnet.WantError(t, err, "no node with the id 77")
		}
		for id, n := range nodes {
			want := len(nodes)
			switch RoleOf(id) {
			case Server:
				want = 1 + workers
			case Worker:
				want = 1 + servers
			}
			n.until(t, Name(id), func() bool { return n.acked == want })
		}
		stopAll(nodes)
		for id, n := range nodes {
			testnet.WantError(t, n.Barrier(t.Context(), 0, GroupAll), "finalized")
			if len(n.lost) > 0 && id != SchedulerID {
				for other, err := range n.lost {
					if !errors.Is(err, ErrLeft) {
						t.Errorf("%s: %s: %v", Name(id), Name(other), err)
					}
				}
			}
		}
	}
}

// TestDeath checks that everybody who is connected with a node that dies learns it, that a barrier fails with
// its name, and that the others go on. Without heartbeats, because an unread one would reset the connection.
func TestDeath(t *testing.T) {
	nodes := startJob(t, 2, 2, func(c *Config) { c.HeartbeatInterval = 0 })
	done := make(chan map[int]error)
	go func() {
		done <- barrier(t.Context(), map[int]*node{1: nodes[1], 9: nodes[9], 11: nodes[11]}, GroupAll, 2, 2)
	}()
	waitIn(t, nodes[1], GroupAll, 3)
	dead := nodes[10]
	dead.mu.Lock()
	dead.lost = nil // it is not of interest
	dead.mu.Unlock()
	kill(dead)
	for _, err := range <-done {
		testnet.WantError(t, err, "server 1 is gone: its connection has ended")
	}
	for _, id := range []int{1, 9, 11} {
		n := nodes[id]
		n.until(t, Name(id)+" learns the death", func() bool { return n.lost[10] != nil })
		_, err := n.Request(t.Context(), 10, &Message{Header: &pspb.Header{}})
		testnet.WantError(t, err, "server 1 is gone")
		if got := n.Dead(time.Hour); !slices.Equal(got, []int{10}) {
			t.Errorf("%s: dead are %v, want 10", Name(id), got)
		}
		testnet.WantError(t, n.Barrier(t.Context(), 0, GroupAll), "server 1 is gone")
	}
	testnet.Eventually(t, "server 0 learns the death",
		func() bool { return len(nodes[8].Dead(time.Hour)) == 1 })
	meet(t, nodes, GroupScheduler+GroupWorkers, 2, 2)
	// The end of the scheduler ends everything.
	kill(nodes[1])
	for _, id := range []int{8, 9, 11} {
		n := nodes[id]
		n.until(t, Name(id)+" learns the death", func() bool { return n.lost[1] != nil })
		testnet.WantError(t, n.Barrier(t.Context(), 0, GroupAll), "scheduler is gone")
	}
	nodes[9].until(t, "its links end", func() bool { return nodes[9].lost[8] != nil })
	// Server 0 has no connection with server 1. It blames the scheduler, or a worker that ends with it.
	for _, id := range []int{1, 9, 11} {
		wantBlamed(t, nodes[id], 10)
	}
}

// TestLeaving checks that a node that leaves is blamed only if another node waits for it in a barrier.
func TestLeaving(t *testing.T) {
	for _, waits := range []bool{false, true} {
		nodes := startJob(t, 1, 2, nil)
		done := make(chan map[int]error, 1)
		if waits {
			go func() {
				done <- barrier(t.Context(), map[int]*node{9: nodes[9]}, GroupWorkers, 1, 2)
			}()
			waitIn(t, nodes[1], GroupWorkers, 1)
		}
		nodes[11].Stop(t.Context())
		nodes[1].until(t, "the scheduler learns it", func() bool { return nodes[1].lost[11] != nil })
		if waits {
			testnet.WantError(t, (<-done)[9], "worker 1 is gone: it has left the job")
		}
		nodes[1].mu.Lock()
		if blamed := slices.Contains(nodes[1].blamed, 11); blamed != waits || len(nodes[1].blamed) > 1 {
			t.Errorf("worker 0 waits: %v; the scheduler blames %v", waits, nodes[1].blamed)
		}
		nodes[1].mu.Unlock()
	}
}

// TestLeavingWithRequests checks that a node that leaves is blamed by a node with a request to it, whether
// the request comes before the end of the link or after it.
func TestLeavingWithRequests(t *testing.T) {
	for _, before := range []bool{false, true} {
		nodes := startJob(t, 1, 1, nil)
		s, w := nodes[8], nodes[9]
		arrived := make(chan struct{})
		s.handle(func(_ Process, m *Message) {
			close(arrived)
			m.Release()
		})
		request := func() error {
			_, err := w.Request(t.Context(), 8, &Message{Header: &pspb.Header{Request: true}})
			return err
		}
		if before {
			if err := request(); err != nil {
				t.Fatal(err)
			}
			<-arrived
		}
		s.Stop(t.Context())
		w.until(t, "the worker learns it", func() bool { return w.lost[8] != nil })
		if !before {
			testnet.WantError(t, request(), "server 0 is gone: it has left the job")
		}
		wantBlamed(t, w, 8)
	}
}

// TestBarrierDuringBlame checks that barriers of other groups go on while the scheduler tells its handler
// which node has failed.
func TestBarrierDuringBlame(t *testing.T) {
	nodes := startJob(t, 1, 2, nil)
	entered, leave := make(chan struct{}), make(chan struct{})
	nodes[1].mu.Lock()
	nodes[1].blaming = func() {
		close(entered)
		<-leave
	}
	nodes[1].mu.Unlock()
	nodes[11].Stop(t.Context())
	nodes[1].until(t, "the scheduler learns it", func() bool { return nodes[1].lost[11] != nil })
	failed := make(chan error, 1)
	go func() { failed <- nodes[9].Barrier(t.Context(), 0, GroupWorkers) }()
	<-entered
	meet(t, nodes, GroupScheduler+GroupServers, 1, 2)
	close(leave)
	testnet.WantError(t, <-failed, "worker 1 is gone: it has left the job")
}

// TestBarrierWhileTheSchedulerLeaves checks that a barrier names the node that has died, if it begins while
// the end of the connection with a scheduler that has left is being handled.
func TestBarrierWhileTheSchedulerLeaves(t *testing.T) {
	nodes := startJob(t, 1, 2, nil)
	kill(nodes[11])
	testnet.Eventually(t, "the worker learns it", func() bool { return nodes[9].members.goneNode(11) != nil })
	l := nodes[9].linkWith(t, SchedulerID)
	ends := func(err error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.end = err
	}
	ends(ErrLeft)
	testnet.WantError(t, nodes[9].Barrier(t.Context(), 0, GroupWorkers), "barrier of group 4: worker 1 is gone: ")
	ends(nil)
}

// TestSchedulerFails checks that a scheduler that has failed answers no node which asks whether it still
// takes part in the job, and so whether a peer that has ended is to blame. The news of the failure may not
// have reached that node yet.
func TestSchedulerFails(t *testing.T) {
	nodes := startJob(t, 1, 1, nil)
	scheduler := nodes[SchedulerID]
	l := scheduler.linkWith(t, 8)
	replies := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.replies
	}
	l.writing.Lock()
	failed := make(chan struct{})
	go func() {
		defer close(failed)
		scheduler.Fail(t.Context(), "a test says so")
	}()
	testnet.Eventually(t, "the scheduler leaves", func() bool { return replies() > 0 })
	question := controlMessage(&pspb.Control{Command: pspb.Command_HEARTBEAT, Barrier: 1})
	question.Header.Request = true
	if err := scheduler.arrive(l, question); err != nil {
		t.Error(err)
	}
	if n := replies(); n != 1 {
		t.Errorf("%d messages wait, want only that of the failure", n)
	}
	l.writing.Unlock()
	<-failed
}

// kill closes the connections of a node without a goodbye.
func kill(n *node) {
	n.close(errors.New("killed"))
}

// TestSilence checks that a node that sends nothing is dead after the time limit, and that Dead counts
// silence.
func TestSilence(t *testing.T) {
	nodes := startJob(t, 1, 1, func(c *Config) {
		c.HeartbeatTimeout = time.Hour
		if c.Role == Worker {
			c.HeartbeatInterval = 0
		}
	})
	testnet.Eventually(t, "the worker is silent for a millisecond", func() bool {
		return slices.Contains(nodes[1].Dead(time.Millisecond), 9)
	})
	if got := nodes[1].Dead(time.Hour); got != nil {
		t.Errorf("dead are %v, want none", got)
	}
	l := nodes[1].linkWith(t, 9)
	l.heard.Store(-int64(2 * time.Hour)) // the worker sends nothing that would change this
	nodes[1].until(t, "the scheduler misses worker 0", func() bool { return nodes[1].lost[9] != nil })
	testnet.WantError(t, nodes[1].lossOf(9), "no message came from it for 2h0m", "PS_HEARTBEAT_TIMEOUT is 1h0m0s")
	testnet.Eventually(t, "server 0 learns it", func() bool {
		return slices.Equal(nodes[8].Dead(time.Hour),
			[]int{9})
	})
	if nodes[8].Dead(0) != nil {
		t.Error("with a time limit of 0 a node is dead")
	}
}

// TestExcused checks that the time in which a process was stopped counts for no node, and that a node from
// which a message was read since then gets no additional time.
func TestExcused(t *testing.T) {
	nodes := startJob(t, 1, 1, func(c *Config) { c.HeartbeatInterval = 0 })
	l := nodes[1].linkWith(t, 9)
	for _, heard := range []time.Duration{-2 * time.Hour, 0} {
		l.heard.Store(int64(heard))
		l.excused.Store(0)
		nodes[1].excuse(time.Hour)
		if silent := l.silent(); silent < 0 || silent > nodes[1].timing.now()-heard-min(time.Hour, -heard) {
			t.Errorf("after a message at %v, the node is silent for %v", heard, silent)
		}
	}
}

// TestDeadSinceItConnected checks that a node that has sent nothing counts as silent since it has connected,
// and not since the start of the job.
func TestDeadSinceItConnected(t *testing.T) {
	nodes := startJob(t, 1, 1, func(c *Config) { c.HeartbeatInterval = 0 })
	l := nodes[1].linkWith(t, 9)
	if heard := time.Duration(l.heard.Load()); heard <= 0 || heard > nodes[1].timing.now() {
		t.Errorf("worker 0 was heard %v after the start", heard)
	}
	l.heard.Store(-int64(time.Hour))
	if got := nodes[1].Dead(30 * time.Minute); !slices.Equal(got, []int{9}) {
		t.Errorf("after an hour of silence, dead are %v, want worker 0", got)
	}
	if got := nodes[1].Dead(2 * time.Hour); got != nil {
		t.Errorf("after an hour of silence, dead for two hours are %v", got)
	}
}

// TestUnknownCommand checks that a node drops a message with a command of a later version, and says so.
func TestUnknownCommand(t *testing.T) {
	log, entries := testnet.Logs()
	nodes := startJob(t, 1, 1, func(c *Config) {
		if c.Role == Server {
			c.Log = log
		}
	})
	if err := nodes[9].linkWith(t, 8).reply(controlMessage(&pspb.Control{Command: 99})); err != nil {
		t.Fatal(err)
	}
	ask(t, nodes[9], 8)
	if !testnet.Logged(entries, "dropped an unknown message", Name(9), "99") {
		t.Error("server 0 has not logged it")
	}
}

// TestVerbose checks what a node logs at each level: nothing, its connections, or also its messages.
func TestVerbose(t *testing.T) {
	for level := range 3 {
		log, entries := testnet.Logs()
		nodes := startJob(t, 1, 1, func(c *Config) {
			if c.Role == Worker {
				c.Log, c.Verbose = log, level
			}
		})
		request := NewMessage(&pspb.Header{Request: true}, 7)
		if _, err := nodes[9].Request(t.Context(), 8, request); err != nil {
			t.Fatal(err)
		}
		nodes[9].until(t, "an answer", func() bool { return nodes[9].acked == 1 })
		stopAll(nodes)
		for _, c := range []struct {
			parts []string
			from  int // the lowest level that logs it
		}{
			{[]string{"ps: connected", Name(8)}, 1},
			{[]string{"ps: connected", Name(1)}, 1},
			{[]string{"ps: sent", Name(8), "bytes:7"}, 2},
			{[]string{"ps: received", Name(8), "bytes:0"}, 2},
		} {
			if got, want := testnet.Logged(entries, c.parts...), level >= c.from; got != want {
				t.Errorf("level %d: logged %q: %v, want %v", level, c.parts, got, want)
			}
		}
	}
}

// TestSlowHandler checks that a node is not silent while a handler handles its request, however long this
// takes.
func TestSlowHandler(t *testing.T) {
	nodes := startJob(t, 1, 1, nil)
	entered, leave := make(chan struct{}), make(chan struct{})
	defer close(leave)
	nodes[8].handle(func(_ Process, m *Message) {
		close(entered)
		<-leave
		m.Release()
	})
	nodes[1].send(t, 8)
	<-entered
	l := nodes[8].linkWith(t, SchedulerID)
	l.heard.Store(-int64(time.Hour)) // as if the call had begun an hour ago
	nodes[8].heartbeat(true)
	if l.mu.Lock(); l.end != nil {
		t.Errorf("the link has ended: %v", l.end)
	}
	l.mu.Unlock()
}

// TestSlowHandlerOfTheScheduler checks that a worker hears from the scheduler for longer than the heartbeat
// timeout while a handler there handles a request of the worker, or waits to do so.
func TestSlowHandlerOfTheScheduler(t *testing.T) {
	const timeout = time.Second
	nodes := startJob(t, 0, 2, func(c *Config) {
		c.HeartbeatInterval, c.HeartbeatTimeout = 50*time.Millisecond, timeout
	})
	leave, entered := make(chan struct{}), make(chan struct{}, 2)
	defer close(leave)
	nodes[1].handle(func(_ Process, m *Message) {
		entered <- struct{}{}
		<-leave
		m.Release()
	})
	for _, id := range []int{9, 11} {
		m := &Message{Header: &pspb.Header{Request: true}}
		if _, err := nodes[id].Request(t.Context(), SchedulerID, m); err != nil {
			t.Fatal(err)
		}
		<-entered
	}
	for _, id := range []int{9, 11} {
		w := nodes[id]
		l := w.linkWith(t, SchedulerID)
		testnet.Eventually(t, "the worker hears from the scheduler", func() bool {
			return time.Duration(l.heard.Load()) > 3*timeout || w.lossOf(SchedulerID) != nil
		})
		if err := w.lossOf(SchedulerID); err != nil {
			t.Errorf("worker %d: %v", Rank(id), err)
		}
	}
}

// TestNothingAfterTheEnd checks that no message is handled after its link has ended, although it has been
// read.
func TestNothingAfterTheEnd(t *testing.T) {
	nodes := startJob(t, 1, 1, nil)
	s, w := nodes[8], nodes[9]
	entered, leave := make(chan struct{}), make(chan struct{})
	calls := 0
	s.handle(func(_ Process, m *Message) {
		if calls++; calls == 1 {
			close(entered)
			<-leave
		}
		m.Release()
	})
	l := w.linkWith(t, 8)
	var b []byte // one write, so that the server reads all at once
	for range 10 {
		b = append(b, wire(t, &Message{Header: &pspb.Header{Request: true}})...)
	}
	if _, err := l.conn.Write(b); err != nil {
		t.Fatal(err)
	}
	<-entered
	other := s.linkWith(t, 9)
	other.fail(errors.New("a test"))
	close(leave)
	stopAll(nodes)
	if calls != 1 {
		t.Errorf("%d messages were handled, want 1", calls)
	}
}

// TestLeavingDuringARequest checks that a peer that has left is not blamed if a write to it fails before its
// goodbye is read, because a handler runs.
func TestLeavingDuringARequest(t *testing.T) {
	nodes := startJob(t, 1, 1, nil)
	s, w := nodes[8], nodes[9]
	entered, leave := make(chan struct{}), make(chan struct{})
	s.handle(func(_ Process, m *Message) {
		close(entered)
		<-leave
		m.Release()
	})
	w.send(t, 8)
	<-entered
	l := w.linkWith(t, 8)
	bye := controlMessage(&pspb.Control{Command: pspb.Command_TERMINATE})
	if err := l.reply(bye); err != nil {
		t.Fatal(err)
	}
	l.flush(t.Context())
	w.members.mu.Lock()
	w.members.over[8] = true // so that the worker, which pretends to leave, does not connect again
	w.members.mu.Unlock()
	l.conn.Close()
	other := s.linkWith(t, 9)
	testnet.Eventually(t, "a write fails", func() bool {
		other.heartbeat()
		return other.isBroken()
	})
	close(leave)
	s.until(t, "the link ends", func() bool { return s.lost[9] != nil })
	testnet.WantError(t, s.lossOf(9), "it has left the job")
	wantBlamed(t, s)
}

// TestStartFails checks the errors of nodes that do not fit the job, and that they disturb nobody.
func TestStartFails(t *testing.T) {
	key, _ := secret.New()
	root := fmt.Sprintf("127.0.0.1:%d", testnet.FreePort(t))
	config := func(role Role, servers, workers int, root string) Config {
		c := config(role, servers, workers, root)
		c.Secret = key
		return c
	}
	sched, scheduled := startNode(t, config(Scheduler, 1, 1, root))
	_, result := startNode(t, config(Server, 2, 1, root))
	testnet.WantError(t, <-result, "DMLC_NUM_SERVER=2 and DMLC_NUM_WORKER=1, the scheduler 1 and 1")
	cfg := config(Server, 1, 1, root)
	cfg.Staleness = 3
	_, result = startNode(t, cfg)
	testnet.WantError(t, <-result, "the node has HVD_STALENESS=3, the scheduler (asynchronous)")
	cfg = config(Server, 1, 1, root)
	cfg.Replicas = 1
	_, result = startNode(t, cfg)
	testnet.WantError(t, <-result, "the node has HVD_PS_REPLICAS=1, the scheduler 0")
	cfg = config(Worker, 1, 1, root)
	cfg.Customers = 2
	_, result = startNode(t, cfg)
	testnet.WantError(t, <-result, "the job has 0 of 1 workers already, and 2 more want to join",
		"DMLC_NUM_WORKER")
	_, result = startNode(t, config(Scheduler, 1, 1, root))
	testnet.WantError(t, <-result, "is there another scheduler?")
	cfg = config(Worker, 1, 1, root)
	cfg.Secret = secret.Secret{}
	_, result = startNode(t, cfg)
	testnet.WantError(t, <-result, "register with the scheduler", "this process has none")
	cfg.Secret, _ = secret.New()
	_, result = startNode(t, cfg)
	testnet.WantError(t, <-result, "register with the scheduler", "another secret")
	for _, garbage := range [][]byte{{}, []byte("GET / HTTP/1.0\r\n\r\n"), dial.Greeting(magic, version),
		append(dial.Greeting(magic, version), 255, 255, 255, 255), append(dial.Greeting(magic, version),
			wire(t,
				controlMessage(&pspb.Control{Command: pspb.Command_BARRIER}))...)} {
		testnet.RawDial(t, root, garbage).Close()
	}
	server, served := startNode(t, config(Server, 1, 1, root))
	worker, worked := startNode(t, config(Worker, 1, 1, root))
	wantStart(t, scheduled, served, worked)
	nodes := map[int]*node{1: sched, 8: server, 9: worker}
	defer stopAll(nodes)
	_, result = startNode(t, config(Worker, 1, 1, root))
	testnet.WantError(t, <-result, "the job has 1 of 1 workers already, and 1 more want to join")
	// A stranger connects to the server.
	addr := net.JoinHostPort("127.0.0.1", fmt.Sprint(server.members.self[0].Port))
	var strangers sync.WaitGroup // the server waits for news of each
	for _, n := range []*pspb.Node{{Id: 9, Incarnation: 1}, {Id: 8,
		Incarnation: server.members.self[0].Incarnation}, {}} {
		conn, err := dial.Greet(t.Context(), addr, key, magic, version)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		hello := controlMessage(&pspb.Control{Command: pspb.Command_ADD_NODE, Nodes: []*pspb.Node{n}})
		if err := writeMessage(conn, hello); err != nil {
			t.Fatal(err)
		}
		strangers.Go(func() {
			m, err := newReader(conn).next()
			if err != nil || !strings.Contains(m.Header.Error, "is not a worker of this job") {
				t.Errorf("the answer to a stranger is %v, %v", m, err)
			}
		})
	}
	strangers.Wait()
	meet(t, nodes, GroupAll, 1, 1)
}

// TestStartWaits checks the error if a node is missing.
func TestStartWaits(t *testing.T) {
	root := fmt.Sprintf("127.0.0.1:%d", testnet.FreePort(t))
	short := func(role Role) Config {
		c := config(role, 1, 2, root)
		c.StartTimeout = 300 * time.Millisecond
		return c
	}
	alone := short(Worker)
	alone.Root = "127.0.0.1:1"
	_, result := startNode(t, alone)
	testnet.WantError(t, <-result, "register with the scheduler at 127.0.0.1:1")
	late := config(Worker, 1, 2, root)
	_, worked := startNode(t, late)
	_, scheduled := startNode(t, short(Scheduler))
	testnet.WantError(t, <-scheduled, "0 of 1 servers and", "of 2 workers have registered",
		"300ms has passed")
	if err := <-worked; err == nil {
		t.Error("the worker has started")
	}
}

// TestRanks checks the order of ranks.
func TestRanks(t *testing.T) {
	nodes := []*pspb.Node{
		{Role: pspb.Role_WORKER, Hostname: "a", Port: 2, Incarnation: 1},
		{Role: pspb.Role_WORKER, Hostname: "b", Port: 9, Incarnation: 2},
		{Role: pspb.Role_WORKER, Hostname: "a", Port: 1, Incarnation: 3},
		{Role: pspb.Role_SERVER, Hostname: "z", Incarnation: 4},
		{Role: pspb.Role_WORKER, Hostname: "c", Rank: 2, Incarnation: 5},
		{Role: pspb.Role_WORKER, Hostname: "d", Rank: 2, Incarnation: 6},
		{Role: pspb.Role_WORKER, Hostname: "0", Rank: 99, Incarnation: 7},
	}
	var got []uint64
	for i, n := range assign(nodes) {
		got = append(got, n.Incarnation)
		if want := WorkerID(i - 1); i > 0 && int(n.Id) != want {
			t.Errorf("node %d has id %d, want %d", i, n.Id, want)
		}
	}
	if want := []uint64{4, 6, 5, 2, 3, 1, 7}; !slices.Equal(got, want) {
		t.Errorf("the order is %v, want %v", got, want)
	}
}

// TestWaterMark checks that requests wait for room, and that a call that waits ends with its context and with
// the peer.
func TestWaterMark(t *testing.T) {
	hold := make(chan struct{})
	nodes := startJob(t, 1, 1, func(c *Config) {
		c.WaterMark = 3
		if c.Role == Server {
			c.Faults = func(from, to Process, m *Message, deliver func(*Message) error) error {
				if from.ID == 9 {
					<-hold
				}
				return deliver(m)
			}
		}
	})
	w := nodes[9]
	send := func(ctx context.Context) error {
		_, err := w.Request(ctx, 8, &Message{Header: &pspb.Header{Request: true}})
		return err
	}
	for range 3 {
		if err := send(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	testnet.WantError(t, send(ctx), "the queue to server 0 has no room, 3 requests are not answered")
	l := w.linkWith(t, 8)
	waiting := make(chan error)
	go func() { waiting <- send(t.Context()) }()
	testnet.Eventually(t, "a call waits", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.room != nil
	})
	close(hold)
	if err := <-waiting; err != nil {
		t.Error(err)
	}
	w.until(t, "four answers", func() bool { return w.acked == 4 })
}

// TestQueuedBytes checks that a request whose body has no room in the queue waits.
func TestQueuedBytes(t *testing.T) {
	l := newLink(New(Config{Role: Worker, WaterMark: 1000}, ignore{}), Process{ID: 8}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	m := &Message{Header: &pspb.Header{Request: true, Body: make([]byte, 4<<20)}}
	queued := 0
	for queued < 1000 && l.request(ctx, m) == nil {
		queued++
	}
	if want := maxQueuedBytes / m.Size(); queued != want {
		t.Errorf("%d requests are in the queue, want %d", queued, want)
	}
	for l.queue.len() > 0 {
		l.next(false)
	}
	if l.queuedBytes != 0 {
		t.Errorf("the empty queue has %d bytes", l.queuedBytes)
	}
}

// TestExactlyOnce sends messages through faults in both directions. Each must arrive once.
func TestExactlyOnce(t *testing.T) {
	const each = 5000
	nodes := startJob(t, 2, 2, func(c *Config) {
		c.Resend, c.ResendTimeout = true, 20*time.Millisecond
		c.Faults = Lossy(7)
	})
	var wg sync.WaitGroup
	for _, id := range []int{9, 11} {
		for _, to := range []int{8, 10} {
			wg.Go(func() {
				for i := range each {
					m := NewMessage(&pspb.Header{Request: true, Body: fmt.Appendf(nil, "%d %d", id, i)}, 8)
					binary.LittleEndian.PutUint64(m.Data[0], uint64(i))
					if _, err := nodes[id].Request(t.Context(), to, m); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
	for _, id := range []int{9, 11} {
		n := nodes[id]
		n.until(t, "all answers", func() bool { return n.acked >= 2*each })
	}
	for group := range 8 {
		meet(t, nodes, group, 2, 2)
	}
	stopAll(nodes)
	var resent, duplicates uint64
	for id, n := range nodes {
		for _, p := range n.Stats().Peers {
			resent, duplicates = resent+p.Resent, duplicates+p.Duplicates
		}
		if RoleOf(id) == Worker && n.acked != 2*each {
			t.Errorf("%s got %d answers, want %d", Name(id), n.acked, 2*each)
		}
		if RoleOf(id) != Server {
			continue
		}
		seen := make(map[string]int)
		for _, body := range n.got {
			seen[body]++
		}
		if len(seen) != 2*each || len(n.got) != 2*each {
			t.Errorf("%s got %d different messages, %d in all, want %d", Name(id), len(seen), len(n.got),
				2*each)
		}
	}
	if resent == 0 || duplicates == 0 {
		t.Errorf("%d messages were sent again and %d dropped: the faults had no effect", resent, duplicates)
	}
}

// Lossy returns faults that drop 10% of the messages, duplicate 5% and reorder 20%.
func Lossy(seed uint64) func(from, to Process, m *Message, deliver func(*Message) error) error {
	var mu sync.Mutex
	streams := make(map[[2]Process]*faulty.Messages[*Message])
	return func(from, to Process, m *Message, deliver func(*Message) error) error {
		mu.Lock()
		f := streams[[2]Process{from, to}]
		if f == nil {
			f = &faulty.Messages[*Message]{Drop: 0.1, Duplicate: 0.05, Reorder: 0.2, Depth: 8,
				Clone: func(m *Message) *Message {
					c := m.Clone()
					c.Header = proto.CloneOf(m.Header)
					return c
				}}
			f.Seed(seed + uint64(from.ID)<<32 + uint64(to.ID))
			streams[[2]Process{from, to}] = f
		}
		mu.Unlock()
		return f.Pass(m, deliver)
	}
}

// TestReplyBytes checks that a reply that has no room in the queue is an error, that a short reply has room,
// and that sending makes room.
func TestReplyBytes(t *testing.T) {
	l := newLink(New(Config{Role: Server}, ignore{}), Process{ID: 9}, nil)
	long := &Message{Header: &pspb.Header{}, Data: [][]byte{make([]byte, maxReplyBytes/8)}}
	replied := 0
	var err error
	for ; replied < 100 && err == nil; replied++ {
		err = l.reply(long)
	}
	testnet.WantError(t, err, "the queue to worker 0 has", "wait for earlier requests first")
	if limit := (*LimitError)(nil); !errors.As(err, &limit) || replied != 9 {
		t.Errorf("reply %d failed with %v, want reply 9 and a LimitError", replied, err)
	}
	if err := l.reply(&Message{Header: &pspb.Header{Error: "too long"}}); err != nil {
		t.Error(err)
	}
	for l.queue.len() > 0 {
		l.next(false)
	}
	if err := l.reply(long); err != nil || l.replyBytes < maxReplyBytes/8 || l.replyBytes > maxReplyBytes/4 {
		t.Errorf("got %v, and %d bytes in the queue", err, l.replyBytes)
	}
}

// TestBatchedReplies checks that replies with Batch leave before the server waits for further requests, and
// that one that is made later leaves too.
func TestBatchedReplies(t *testing.T) {
	later := make(chan func(), 1)
	w := batchJob(t, "", func(number int64, _ *Message, reply func()) {
		if number == 3 {
			later <- reply
			return
		}
		reply()
	})
	w.ask(t, 0, 0, 0, 0)
	w.want(t, 0, 1, 2)
	(<-later)()
	w.want(t, 3)
}

// TestBatchEndsBeforeALongRequest checks that replies with Batch do not wait for the handling of a long
// request.
func TestBatchEndsBeforeALongRequest(t *testing.T) {
	first := make(chan struct{})
	w := batchJob(t, "here", func(number int64, m *Message, reply func()) {
		if number == 2 {
			<-first
		}
		reply()
	})
	w.ask(t, 0, 0, SharedBytes)
	w.want(t, 0, 1)
	close(first)
	w.want(t, 2)
}

// TestBatchEndsInASlowHandler checks that replies with Batch do not wait until the handling of another short
// request is over.
func TestBatchEndsInASlowHandler(t *testing.T) {
	answered := make(chan struct{})
	w := batchJob(t, "", func(number int64, _ *Message, reply func()) {
		if number == 2 {
			<-answered
		}
		reply()
	})
	defer close(answered)
	w.ask(t, 0, 0, 0)
	w.want(t, 0, 1)
}

// batchWorker is a worker whose server answers with Batch. Its requests are numbered, from 0.
type batchWorker struct {
	*node
	sent chan struct{} // closed when all requests were sent
	got  chan int64    // numbers of the requests that were answered
}

// batchJob starts a job with a worker and a server, which calls handle for each request. The requests after
// the first one arrive at the server together.
func batchJob(t *testing.T, host string, handle func(number int64, m *Message, reply func())) *batchWorker {
	nodes := startJob(t, 1, 1, func(c *Config) { c.HostID = host })
	s, w := nodes[8], &batchWorker{nodes[9], make(chan struct{}), make(chan int64, 10)}
	w.response = func(m *Message) { w.got <- m.Header.Timestamp }
	s.handle(func(from Process, m *Message) {
		if m.Header.Timestamp == 0 {
			<-w.sent
		}
		handle(m.Header.Timestamp, m, func() {
			r := &Message{Header: &pspb.Header{Timestamp: m.Header.Timestamp}, Batch: true}
			if err := s.Reply(from, r); err != nil {
				t.Error(err)
			}
			m.Release()
		})
	})
	return w
}

// ask sends requests with frames of the given sizes.
func (w *batchWorker) ask(t *testing.T, sizes ...int) {
	t.Helper()
	for number, size := range sizes {
		m := NewMessage(&pspb.Header{Request: true, Timestamp: int64(number)}, size)
		if _, err := w.Request(t.Context(), 8, m); err != nil {
			t.Fatal(err)
		}
	}
	close(w.sent)
}

// want waits for the replies to requests, in this order.
func (w *batchWorker) want(t *testing.T, numbers ...int64) {
	t.Helper()
	for _, want := range numbers {
		select {
		case number := <-w.got:
			if number != want {
				t.Errorf("got the reply to request %d, want that to %d", number, want)
			}
		case <-time.After(time.Minute):
			t.Fatalf("no reply to request %d", want)
		}
	}
}

// TestReplyLimit checks that a peer that does not read replies is dead, also if the reply that is one too
// many is the answer of a barrier.
func TestReplyLimit(t *testing.T) {
	nodes := startJob(t, 1, 1, nil)
	l := nodes[1].linkWith(t, 9)
	l.mu.Lock()
	l.replies = maxReplies
	l.mu.Unlock()
	own := nodes[1].linkWith(t, SchedulerID)
	own.mu.Lock()
	own.replies = maxReplies // this link has no limit, so the scheduler can still enter a barrier
	own.mu.Unlock()
	// The answer is one reply too many.
	testnet.WantError(t, nodes[9].Barrier(t.Context(), 0, GroupServers), "scheduler is gone")
	nodes[1].until(t, "worker 0 is dead", func() bool { return nodes[1].lost[9] != nil })
	testnet.WantError(t, nodes[1].lossOf(9), "its replies are not read: 65536 wait")
	meet(t, nodes, GroupScheduler+GroupServers, 1, 1)
}

// TestConnectAgain cuts the connection between a server and a worker in one direction or both, so that
// packets are lost without an error. Both nodes must notice, whichever of them waits. The scheduler, which
// hears both, must not. Then the two must connect again, and what belongs to the old connection must not
// reach the new one.
func TestConnectAgain(t *testing.T) {
	key, _ := secret.New()
	for _, key := range []secret.Secret{{}, key.Encrypted()} {
		for _, cut := range [][]int{{8}, {9}, {8, 9}} {
			t.Run(fmt.Sprintf("encrypted=%t,ends=%v", key.IsEncrypted(), cut), func(t *testing.T) {
				t.Parallel()
				connectAgain(t, key, cut)
			})
		}
	}
}

// connectAgain cuts the connection so that the nodes with the ids cut get no more packets.
func connectAgain(t *testing.T, key secret.Secret, cut []int) {
	nodes := startJob(t, 1, 1, func(c *Config) {
		c.HostID, c.Secret, c.HeartbeatTimeout = "", key, 5*time.Second
	})
	s, w := nodes[8], nodes[9]
	asked := make(chan Process, 1)
	s.handle(func(from Process, m *Message) { // does not answer
		m.Release()
		asked <- from
	})
	request := func() (to, from Process) {
		to = w.send(t, 8)
		return to, <-asked
	}
	to, from := request()
	first := w.linkWith(t, 8)
	ends := make(map[int]netip.AddrPort)
	for _, id := range cut {
		l := nodes[id].linkWith(t, 17-id)
		ends[id] = netip.MustParseAddrPort(l.conn.LocalAddr().String())
		other := netip.MustParseAddrPort(l.conn.RemoteAddr().String())
		if n, err := testnet.Cut(func(c testnet.Connection) bool {
			return c.Local == ends[id] && c.Remote == other
		}); n != 1 || err != nil {
			t.Fatalf("cut %d ends: %v", n, err)
		}
	}
	w.send(t, 8)
	for _, n := range []*node{s, w} {
		n.until(t, "a node notices", func() bool { return n.lost[17-n.ID()] != nil })
		n.until(t, "the nodes connect again", func() bool { return slices.Equal(n.restored, []int{17 - n.ID()}) })
		if err := n.AwaitReturn(t.Context(), 17-n.ID()); err != nil {
			t.Error(err)
		}
	}
	testnet.WantError(t, w.lossOf(8), "server 0 is gone: no acknowledgement for 5s")
	loss := s.lossOf(9)
	if _, again := errors.AsType[*NodeError](loss); !again ||
		!regexp.MustCompile("no acknowledgement for 5s|it has connected again").MatchString(loss.Error()) {
		t.Errorf("the server has lost the worker because of %v", loss)
	}
	if dead := nodes[SchedulerID].Dead(time.Minute); len(dead) > 0 {
		t.Errorf("the scheduler takes %v for dead", dead)
	}
	select {
	case <-asked: // the request that was sent into the cut
	default:
	}
	testnet.WantError(t, s.Reply(from, &Message{Header: &pspb.Header{}}),
		"worker 0 is gone: its connection has ended, and it has connected again")
	// A goroutine may have got the link before its end, and go on only now.
	testnet.WantError(t, first.request(t.Context(), &Message{Header: &pspb.Header{Request: true}}),
		"server 0 is gone: no acknowledgement for 5s")
	wantBlamed(t, w, 8)
	if s.Connected(from) || w.Connected(to) || !s.Connected(from.Whole()) || !w.Connected(to.Whole()) {
		t.Error("the old connection counts, or the new one does not")
	}
	now, from := request()
	w.Answered(to)
	l, err := w.linkTo(now)
	if err != nil {
		t.Fatal(err)
	}
	if n := l.stats().Waiting; n != 1 {
		t.Errorf("%d requests are not answered, want 1", n)
	}
	if err := s.Reply(from, &Message{Header: &pspb.Header{}}); err != nil {
		t.Error(err)
	}
	w.until(t, "an answer", func() bool { return w.acked == 1 })
}

// TestHeldRequests checks that a request waits while an earlier one is not answered, so as to be sent
// together with others, and what makes the van send it besides a response: a call of Flush, the timer, many
// requests, and the failure of all that are in flight.
func TestHeldRequests(t *testing.T) {
	for _, c := range []struct {
		what string
		send func(t *testing.T, h *heldRequests)
	}{
		{"Flush", func(_ *testing.T, h *heldRequests) { h.worker.Flush() }},
		{"the time of the timer", func(_ *testing.T, h *heldRequests) {
			if l := h.link(); l.timer.Stop() { // it was running
				l.writeHeld()
			}
		}},
		{"many requests", func(t *testing.T, h *heldRequests) {
			for h.queued() > 0 && h.queued() < maxHeld {
				h.request(t, 8)
			}
			h.request(t, 8)
		}},
		{"the failure of all requests in flight", func(_ *testing.T, h *heldRequests) {
			for range h.inFlight() {
				h.worker.Answered(h.server.Process())
			}
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			for range 20 { // the timer may send what waits before this test or the van does
				if sentBy(t, c.send) {
					return
				}
			}
			t.Errorf("requests wait after %s", c.what)
		})
	}
}

// sentBy makes a request wait and calls send. It reports whether no request waits then.
func sentBy(t *testing.T, send func(t *testing.T, h *heldRequests)) bool {
	nodes := startJob(t, 1, 1, func(c *Config) { c.WaterMark = 1000 })
	h := &heldRequests{server: nodes[8], worker: nodes[9]}
	h.server.handle(func(_ Process, m *Message) { m.Release() })
	h.request(t, 8)
	testnet.Eventually(t, "a request is sent while none is in flight", func() bool { return h.queued() == 0 })
	for requests := 0; h.queued() == 0; requests++ {
		if requests > 100 {
			t.Fatal("no request waits")
		}
		h.request(t, 8)
	}
	send(t, h)
	return h.queued() == 0
}

// TestHeldFirstRequest checks that a request waits while none is in flight if several were in flight the time
// before, unless it is prompt, and that one that is sent alone does not make the next one wait.
func TestHeldFirstRequest(t *testing.T) {
	for _, c := range []struct {
		what   string
		before int // number of requests the time before
		prompt bool
		want   bool // the request waits
	}{{"after one", 1, false, false}, {"after two", 2, false, true}, {"prompt", 2, true, false}} {
		t.Run(c.what, func(t *testing.T) {
			waits := false
			for range 20 { // the timer may send what waits
				waits = waits || heldAfter(t, c.before, c.prompt)
			}
			if waits != c.want {
				t.Errorf("a request waits: %t, want %t", waits, c.want)
			}
		})
	}
}

// heldAfter sends requests, which are answered, and a further one. It reports whether that one waits.
func heldAfter(t *testing.T, before int, prompt bool) bool {
	nodes := startJob(t, 1, 1, func(c *Config) { c.WaterMark = 1000 })
	defer stopAll(nodes)
	h := &heldRequests{server: nodes[8], worker: nodes[9], prompt: prompt}
	h.server.handle(func(_ Process, m *Message) { m.Release() })
	for range before {
		h.request(t, 8)
	}
	h.worker.Flush()
	testnet.Eventually(t, "no request waits", func() bool { return h.queued() == 0 })
	for range before {
		h.worker.Answered(h.server.Process())
	}
	h.request(t, 8)
	return h.link().held.Load()
}

// heldRequests is a worker whose requests are not answered.
type heldRequests struct {
	server, worker *node
	prompt         bool
}

// request sends a request with a frame of n bytes.
func (h *heldRequests) request(t *testing.T, n int) {
	m := NewMessage(&pspb.Header{Request: true}, n)
	m.Prompt = h.prompt
	if _, err := h.worker.Request(t.Context(), 8, m); err != nil {
		t.Fatal(err)
	}
}

func (h *heldRequests) link() *link { return (*h.worker.links.Load())[8] }

// counts returns the number of requests that wait, and of those that were sent and not answered.
func (h *heldRequests) counts() (queued, inFlight int) {
	l := h.link()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.queued, l.requests - l.queued
}

func (h *heldRequests) queued() int {
	n, _ := h.counts()
	return n
}

func (h *heldRequests) inFlight() int {
	_, n := h.counts()
	return n
}
