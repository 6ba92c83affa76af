package van

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/testnet"
)

// hung listens like a node that hangs: it accepts connections, and then does what handle does.
func hung(t *testing.T, handle func(net.Conn)) net.Listener {
	t.Helper()
	ln := testnet.Listen(t)
	var conns []net.Conn
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			conns = append(conns, conn)
			handle(conn)
		}
	}()
	t.Cleanup(func() {
		ln.Close()
		<-done
		for _, conn := range conns {
			conn.Close()
		}
	})
	return ln
}

func silent(net.Conn) {}

func greets(conn net.Conn) { _, _ = conn.Write(dial.Greeting(magic, version)) }

// dies greets, and closes the connection when it has read a registration.
func dies(conn net.Conn) {
	defer conn.Close()
	greets(conn)
	if _, err := dial.ReadGreeting(conn, magic); err == nil {
		_, _ = newReader(conn).next()
	}
}

// registerHung registers a server that hangs from then on. It listens at the address of ln.
func registerHung(t *testing.T, root string, ln net.Listener) (net.Conn, *reader) {
	t.Helper()
	var conn net.Conn
	err := dial.Retry(t.Context(), func() (err error) {
		conn, err = dial.Greet(t.Context(), root, config(Server, 1, 1, root).Secret, magic, version)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	n := &pspb.Node{Role: pspb.Role_SERVER, Hostname: "127.0.0.1", Incarnation: 4711, Rank: 1,
		Port: int32(ln.Addr().(*net.TCPAddr).Port)}
	if err := writeMessage(conn, controlMessage(&pspb.Control{Command: pspb.Command_ADD_NODE,
		Nodes: []*pspb.Node{n}, NumWorkers: 1, NumServers: 1})); err != nil {
		t.Fatal(err)
	}
	r := newReader(conn)
	r.limit = maxHeaderBytes
	return conn, r
}

// answerOf returns the answer to a registration.
func answerOf(t *testing.T, r *reader) *Message {
	t.Helper()
	w := &registration{pulse: pulse{timing: New(config(Server, 1, 1, ""), ignore{}).timing}}
	m, err := w.readAnswer(r)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// wantStart fails the test unless a node starts.
func wantStart(t *testing.T, results ...chan error) {
	t.Helper()
	for _, result := range results {
		if err := <-result; err != nil {
			t.Fatal(err)
		}
	}
}

// wantBlamed fails the test unless a node blames the nodes with the given ids.
func wantBlamed(t *testing.T, n *node, ids ...int) {
	t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	if !slices.Equal(n.blamed, ids) {
		t.Errorf("a node blames %v, want %v", n.blamed, ids)
	}
}

// quick returns the configuration of a node with the given rank in a job with one server and one worker, in
// which silence is noticed soon.
func quick(role Role, root string) Config {
	c := config(role, 1, 1, root)
	c.HeartbeatInterval, c.HeartbeatTimeout = 50*time.Millisecond, time.Second
	if role != Scheduler {
		c.Rank = 0
	}
	return c
}

// TestSchedulerHangs makes the scheduler hang before and after the greetings, and die after the registration.
// The node blames it: at the time limit of Start, or when it notices the silence or the end.
func TestSchedulerHangs(t *testing.T) {
	for _, c := range []struct {
		handle         func(net.Conn)
		limit, silence time.Duration
		want           string
	}{
		{silent, 300 * time.Millisecond, time.Minute, "deadline exceeded"},
		{greets, time.Minute, 500 * time.Millisecond, "no answer to the registration: no message came from it for"},
		{greets, 300 * time.Millisecond, time.Minute,
			"no answer to the registration: the time limit of 300ms has passed"},
		{dies, time.Minute, time.Minute, "no answer to the registration: its connection has ended"},
	} {
		cfg := quick(Worker, hung(t, c.handle).Addr().String())
		cfg.StartTimeout, cfg.HeartbeatTimeout = c.limit, c.silence
		n, result := startNode(t, cfg)
		testnet.WantError(t, <-result, "register with the scheduler at", c.want)
		wantBlamed(t, n, SchedulerID)
	}
}

// TestDeathDuringRegistration makes a server hang, and one die, after it has registered and before the worker
// has. The scheduler blames it and forgets its registration, so another one can start in its place.
func TestDeathDuringRegistration(t *testing.T) {
	for _, dies := range []bool{false, true} {
		root := fmt.Sprintf("127.0.0.1:%d", testnet.FreePort(t))
		sched, scheduled := startNode(t, quick(Scheduler, root))
		conn, r := registerHung(t, root, hung(t, silent))
		if dies {
			conn.Close()
		} else {
			testnet.WantError(t, errors.New(answerOf(t, r).Header.Error),
				"the scheduler has declared this process dead: no message came from it for")
		}
		testnet.Eventually(t, "the scheduler blames the server", func() bool {
			sched.mu.Lock()
			defer sched.mu.Unlock()
			return slices.Equal(sched.blamed, []int{8})
		})
		server, served := startNode(t, quick(Server, root))
		worker, worked := startNode(t, quick(Worker, root))
		wantStart(t, scheduled, served, worked)
		stopAll(map[int]*node{1: sched, 8: server, 9: worker})
	}
}

// TestMissing lets the time limit of a worker pass that waits for a server, and then that of the scheduler.
// Their errors name the server. Another worker may take the place of the first one meanwhile.
func TestMissing(t *testing.T) {
	for _, replaced := range []bool{false, true} {
		root := fmt.Sprintf("127.0.0.1:%d", testnet.FreePort(t))
		cfg := quick(Scheduler, root)
		cfg.StartTimeout = time.Second
		sched, scheduled := startNode(t, cfg)
		cfg = quick(Worker, root)
		cfg.StartTimeout = 300 * time.Millisecond
		first, result := startNode(t, cfg)
		testnet.WantError(t, <-result, "0 of 1 servers and 1 of 1 workers have registered, not server 0",
			"the time limit of the node has passed")
		wantBlamed(t, first, 8)
		if replaced {
			second, result := startNode(t, quick(Worker, root))
			testnet.WantError(t, <-result, "the job does not start: 0 of 1 servers", "the time limit of 1s has passed")
			wantBlamed(t, second, 8)
		}
		testnet.WantError(t, <-scheduled, "0 of 1 servers", "have registered, not server 0: the time limit")
		wantBlamed(t, sched, 8)
	}
}

// TestUnclaimed checks which nodes are missing, where the registered ones want the given ranks or none.
func TestUnclaimed(t *testing.T) {
	for _, c := range []struct{ wants, missing []int }{
		{nil, []int{0, 1, 2}},
		{[]int{1}, []int{0, 2}},
		{[]int{2, 0}, []int{1}},
		{[]int{0, 0}, nil},
		{[]int{0, -1}, nil},
		{[]int{0, 3}, nil},
	} {
		var registered []*pspb.Node
		for _, r := range c.wants {
			registered = append(registered, &pspb.Node{Role: pspb.Role_SERVER, Rank: int32(r + 1)},
				&pspb.Node{Role: pspb.Role_WORKER})
		}
		var got []int
		for _, n := range unclaimed(registered, pspb.Role_SERVER, 3, ServerID) {
			got = append(got, Rank(int(n.Id)))
		}
		if !slices.Equal(got, c.missing) {
			t.Errorf("of servers that want the ranks %v, %v are missing, want %v", c.wants, got, c.missing)
		}
	}
}

// startWithHung starts a job whose server hangs from its registration on.
func startWithHung(t *testing.T, change func(*Config)) (sched, worker *node, worked chan error) {
	root := fmt.Sprintf("127.0.0.1:%d", testnet.FreePort(t))
	start := func(role Role) (*node, chan error) {
		cfg := quick(role, root)
		change(&cfg)
		return startNode(t, cfg)
	}
	sched, scheduled := start(Scheduler)
	registerHung(t, root, hung(t, silent))
	worker, worked = start(Worker)
	wantStart(t, scheduled)
	t.Cleanup(func() {
		kill(sched)
		kill(worker)
	})
	testnet.Eventually(t, "the worker is connected with the scheduler", func() bool {
		return (*worker.links.Load())[SchedulerID] != nil
	})
	return sched, worker, worked
}

// TestServerHangsDuringStart makes a server hang after it has registered. The worker that connects with it
// sends heartbeats meanwhile, and goes on when the scheduler declares the server dead.
func TestServerHangsDuringStart(t *testing.T) {
	sched, worker, worked := startWithHung(t, func(*Config) {})
	wantStart(t, worked)
	testnet.WantError(t, worker.Gone(8), "no message came from it for")
	if err := sched.Gone(9); err != nil {
		t.Errorf("the scheduler says that the worker is gone: %v", err)
	}
}

// TestSchedulerDiesDuringStart makes the scheduler die while a worker connects with a server that hangs.
func TestSchedulerDiesDuringStart(t *testing.T) {
	sched, _, worked := startWithHung(t, func(c *Config) { c.HeartbeatTimeout = time.Minute })
	kill(sched)
	testnet.WantError(t, <-worked, "scheduler is gone: its connection has ended")
}

// TestServerIsLate lets the time limit of a worker pass while it connects with a server that hangs.
func TestServerIsLate(t *testing.T) {
	_, worker, worked := startWithHung(t, func(c *Config) {
		c.HeartbeatTimeout = time.Minute
		if c.Role == Worker {
			c.StartTimeout = time.Second
		}
	})
	testnet.WantError(t, <-worked, "connect to server 0")
	wantBlamed(t, worker, 8)
}

// TestReturnBeforeAllHaveMet makes a server end before and after all nodes have met. The process that takes
// its place takes part from the beginning, or not.
func TestReturnBeforeAllHaveMet(t *testing.T) {
	nodes := startJob(t, 1, 1, func(c *Config) { c.Meets = true })
	for _, recovers := range []bool{false, true} {
		kill(nodes[8])
		cfg := nodes[8].cfg
		n, result := startNode(t, cfg)
		wantStart(t, result)
		nodes[8] = n
		if n.IsRecovery() != recovers {
			t.Errorf("IsRecovery is %v, want %v", n.IsRecovery(), recovers)
		}
		meet(t, nodes, GroupAll, 1, 1)
	}
}
