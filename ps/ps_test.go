package ps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/testnet"
)

// discard is a logger that writes nothing.
var discard = slog.New(slog.DiscardHandler)

func TestMain(m *testing.M) {
	if program := nodePrograms[os.Getenv(nodeVariable)]; program != nil {
		if err := program(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// job is a job in this process.
type job struct {
	t                testing.TB
	servers, workers int
	settings         map[string]string
	customers        int           // of each worker process
	logless          bool          // the program gives the nodes no log
	logger           *slog.Logger  // of all nodes; the default writes nothing
	leave            bool          // the nodes leave the job without a barrier
	apart            int           // with replicas, the server that shares no memory with others, or 0
	restart          bool          // in a job with replicas, all servers end while the job starts, and return
	limit            time.Duration // how long the job may take; the default is 10 minutes
	faults           func(from, to van.Process, m *van.Message, deliver func(*van.Message) error) error
}

// run starts a node for each role and rank, and calls node for each of them in a goroutine. When node
// returns, the node leaves the job with a barrier.
func (j job) run(node func(po *Node)) {
	j.t.Helper()
	customers := max(j.customers, 1)
	port := strconv.Itoa(testnet.FreePort(j.t.(*testing.T)))
	roles := slices.Concat([]string{"scheduler"}, slices.Repeat([]string{"server"}, j.servers),
		slices.Repeat([]string{"worker"}, j.workers/customers))
	var wg sync.WaitGroup
	for _, role := range roles {
		wg.Go(func() {
			opts := Config{Logger: cmp.Or(j.logger, discard), faults: j.faults,
				Settings: nodeSettings(role, j.servers, j.workers, port, j.settings)}
			if j.logless {
				opts.Logger = nil
			}
			if role == "worker" {
				opts.Customers = customers
			}
			ctx, cancel := context.WithTimeout(j.t.Context(), cmp.Or(j.limit, 10*time.Minute))
			defer cancel()
			po, err := Join(ctx, opts)
			if err != nil {
				j.t.Errorf("%s: %v", role, err)
				return
			}
			defer po.Close() // a node that gives up leaves, so that the others do not wait for it
			if node(po); j.leave {
				return
			}
			if err := po.Finalize(ctx); err != nil {
				j.t.Errorf("%s %d: %v", role, po.Rank(), err)
			}
		})
	}
	wg.Wait()
}

// nodeSettings returns the settings of a node of a job on this host, which more may change. Its limits are
// longer than usual, because on a busy machine a node may be silent for longer than 10 s.
func nodeSettings(role string, servers, workers int, port string, more map[string]string) map[string]string {
	all := map[string]string{"DMLC_ROLE": role, "DMLC_NUM_SERVER": strconv.Itoa(servers),
		"DMLC_NUM_WORKER": strconv.Itoa(workers), "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": port,
		"HOROVOD_GLOO_TIMEOUT_SECONDS": "600", "PS_HEARTBEAT_TIMEOUT": "60"}
	maps.Copy(all, more)
	return all
}

// must returns the result of a call without which a test cannot go on. It panics if the call has failed.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// noError reports an error of a call.
func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// wait waits for a request.
func wait(t testing.TB, r *Request, err error) {
	t.Helper()
	if err == nil {
		err = r.Wait(t.Context())
	}
	if err != nil {
		t.Error(err)
	}
}

// TestConnection is ps-lite's test_connection: start and finalize.
func TestConnection(t *testing.T) {
	var ran atomic.Int32
	job{t: t, servers: 2, workers: 2}.run(func(po *Node) {
		po.RegisterExitCallback(func() { ran.Add(1) })
		if (po.Role() == Scheduler) != (po.ID() == 1) || (po.Role() == Server) != (po.ID()%2 == 0) ||
			po.NumServers() != 2 || po.NumWorkers() != 2 || !slices.Contains(po.NodeIDs(AllGroup), po.ID()) ||
			po.DeadNodes(time.Minute) != nil {
			t.Errorf("node %d has the wrong place", po.ID())
		}
	})
	if n := ran.Load(); n != 5 {
		t.Errorf("%d exit callbacks ran, want 5", n)
	}
}

// TestNoLauncher checks that a node connects with hvdrun only if hvdrun has started it as a node and the
// program has not joined it to another job. Nothing listens at the address of the store.
func TestNoLauncher(t *testing.T) {
	for name, text := range nodeSettings("scheduler", 0, 0, strconv.Itoa(testnet.FreePort(t)), map[string]string{
		"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "20",
		"HOROVOD_GLOO_RENDEZVOUS_PORT": strconv.Itoa(testnet.FreePort(t))}) {
		t.Setenv(name, text)
	}
	start := func(settings map[string]string) error {
		po, err := Join(t.Context(), Config{Settings: settings, Logger: discard})
		if err == nil {
			err = po.Finalize(t.Context())
		}
		return err
	}
	if err := start(nil); err != nil {
		t.Errorf("hvdrun has not started the node: %v", err)
	}
	t.Setenv("HVD_NODE_PROCESS", "0")
	if err := start(map[string]string{"DMLC_ROLE": "scheduler"}); err != nil {
		t.Errorf("the node is of another job: %v", err)
	}
	t.Setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "0.1")
	testnet.WantError(t, start(nil), "connect with hvdrun")
}

// TestSimpleApp is ps-lite's test_simple_app: the scheduler sends 100 requests to all nodes, itself included.
func TestSimpleApp(t *testing.T) {
	const n = 100
	job{t: t, servers: 2, workers: 2}.run(func(po *Node) {
		var requests, responses atomic.Int32
		app := must(NewSimpleApp(po, OnRequest(func(req SimpleData, app *SimpleApp) {
			if req.Head != 1 || string(req.Body) != "test" || req.Sender != SchedulerGroup {
				t.Errorf("node %d got %+v", po.ID(), req)
			}
			requests.Add(1)
			noError(t, app.Respond(req, []byte("re")))
			if err := app.Respond(req, nil); err == nil {
				t.Error("a second answer is no error")
			}
		}), OnResponse(func(resp SimpleData, app *SimpleApp) {
			if string(resp.Body) != "re" {
				t.Errorf("got the response %q", resp.Body)
			}
			responses.Add(1)
		})))
		if po.Role() == Scheduler {
			var all []*Request
			for range n {
				all = append(all, must(app.Request(t.Context(), AllGroup, 1, []byte("test"))))
			}
			for _, r := range all {
				wait(t, r, nil)
				if r.NumResponses() != 5 {
					t.Errorf("got %d responses, want 5", r.NumResponses())
				}
			}
			if responses.Load() != 5*n {
				t.Errorf("got %d responses, want %d", responses.Load(), 5*n)
			}
			_, err := app.Request(t.Context(), 99, 1, nil)
			testnet.WantError(t, err, "ps: request 1 of app 0 to worker 45: there is no such node or group")
			_, err = NewSimpleApp(po)
			testnet.WantError(t, err, "app 0 has a customer 0 already")
		} else { // nothing is sent, also not to the scheduler
			_, err := app.Request(t.Context(), AllGroup, 1, []byte("test"))
			testnet.WantError(t, err, "only the scheduler is connected with all nodes")
			if _, ok := errors.AsType[*UsageError](err); !ok {
				t.Errorf("got %v, want a UsageError", err)
			}
		}
		noError(t, po.Barrier(t.Context(), AllGroup))
		if requests.Load() != n {
			t.Errorf("node %d got %d requests, want %d", po.ID(), requests.Load(), n)
		}
	})
}

// TestRestart starts jobs one after the other in one process.
func TestRestart(t *testing.T) {
	for range 3 {
		TestConnection(t)
	}
}

// TestJoinAgain starts two jobs one after the other at the same address. The scheduler and a worker join the
// second one while the scheduler of the first one still waits for a server to leave.
func TestJoinAgain(t *testing.T) {
	for _, text := range []string{"", strings.Repeat("secret", 6)} {
		ctx, cancel := context.WithCancel(testnet.Context(t)) // ends if a node fails
		log, entries := testnet.Logs()
		barriers := 0 // the second one is that of Finalize
		hold := func(_, _ van.Process, m *van.Message, deliver func(*van.Message) error) error {
			barrier := m.Header.Control.GetCommand() == pspb.Command_BARRIER
			if barrier {
				barriers++
			}
			for barrier && barriers == 2 && ctx.Err() == nil && !testnet.Logged(entries, "registered, waiting") {
				dial.Pause(ctx, time.Millisecond, nil)
			}
			return deliver(m)
		}
		port := strconv.Itoa(testnet.FreePort(t))
		settings := map[string]string{"HVD_SECRET": text, "HOROVOD_GLOO_TIMEOUT_SECONDS": "60", "PS_VERBOSE": "1"}
		part := func(role string, job int, c Config) {
			c.Logger = cmp.Or(c.Logger, discard)
			c.Settings = nodeSettings(role, 1, 2, port, settings)
			po, err := Join(ctx, c)
			for role == "scheduler" && err != nil && ctx.Err() == nil && strings.Contains(err.Error(), "in use") {
				dial.Pause(ctx, 10*time.Millisecond, nil)
				po, err = Join(ctx, c)
			}
			if err == nil {
				err = po.Finalize(ctx)
			}
			if err != nil {
				t.Errorf("secret %q: %s of job %d: %v", text, role, job, err)
				cancel()
			}
		}
		left := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() { part("scheduler", 0, Config{}) })
		wg.Go(func() {
			<-left
			part("scheduler", 1, Config{})
		})
		for role, c := range map[string]Config{"server": {faults: hold}, "worker": {}} {
			wg.Go(func() {
				part(role, 0, c)
				part(role, 1, Config{})
			})
		}
		wg.Go(func() {
			part("worker", 0, Config{})
			close(left)
			part("worker", 1, Config{Logger: logs.ToSlog(log)})
		})
		wg.Wait()
		cancel()
	}
}

// TestErrors checks the types of the errors of a node that has gone and of a node that has left itself.
func TestErrors(t *testing.T) {
	job{t: t, servers: 1, workers: 1, leave: true}.run(func(n *Node) {
		if n.Role() != Worker {
			return
		}
		app := must(NewSimpleApp(n))
		for _, call := range []func() error{
			func() error { return await(t.Context())(app.Request(t.Context(), 8, 1, nil)) },
			func() error { return n.Barrier(t.Context(), AllGroup) },
		} {
			testnet.Eventually(t, "the error of a node that has left", func() bool {
				gone, ok := errors.AsType[*NodeError](call())
				return ok && (gone.Node == 8 || gone.Node == SchedulerGroup)
			})
		}
		n.Close()
		for what, err := range map[string]error{
			"request": await(t.Context())(app.Request(t.Context(), 8, 1, nil)),
			"barrier": n.Barrier(t.Context(), AllGroup),
		} {
			if !errors.Is(err, ErrFinalized) {
				t.Errorf("%s: got %v, want ErrFinalized", what, err)
			}
		}
	})
}

// TestMissingNodes checks calls that need nodes that the job does not have.
func TestMissingNodes(t *testing.T) {
	job{t: t, workers: 1}.run(func(n *Node) {
		if n.Role() != Worker {
			return
		}
		if ranges := n.ServerKeyRanges(); ranges != nil {
			t.Errorf("got the ranges %v without servers", ranges)
		}
		_, err := NewKVWorker[float32](n)
		want := map[string]error{"the job has no servers": err}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // it must not wait
		defer cancel()
		for _, id := range []NodeID{8, 11, ServerGroup} {
			want[fmt.Sprintf("the job has no node with the id %d", id)] = n.AwaitReturn(ctx, id)
		}
		for text, err := range want {
			testnet.WantError(t, err, text)
			if _, ok := errors.AsType[*UsageError](err); !ok {
				t.Errorf("got %v, want a UsageError", err)
			}
		}
	})
}

func TestNodeID(t *testing.T) {
	for id, want := range map[NodeID]string{SchedulerGroup: "scheduler", ServerGroup: "group 2",
		AllGroup: "group 7", 8: "server 0", 11: "worker 1"} {
		if got := id.String(); got != want {
			t.Errorf("NodeID %d is %q, want %q", int(id), got, want)
		}
	}
}

// TestSettings checks the errors of settings that do not describe a node.
func TestSettings(t *testing.T) {
	good := nodeSettings("server", 1, 1, "1", map[string]string{"HOROVOD_GLOO_TIMEOUT_SECONDS": "1"})
	for _, c := range []struct {
		name, text string
		customers  int
		want       string
	}{
		{"DMLC_ROLE", "", 1, "DMLC_ROLE is not set"},
		{"DMLC_ROLE", "boss", 1, "want scheduler, server or worker"},
		{"DMLC_NUM_SERVER", "", 1, "DMLC_NUM_SERVER is not set"},
		{"DMLC_PS_ROOT_URI", "", 1, "DMLC_PS_ROOT_URI is not set"},
		{"PORT", "99999", 1, `PORT is "99999", want a port`},
		{"DMLC_NODE_HOST", "192.0.2.1", 1, "listen on 192.0.2.1:0 without a secret: set HVD_SECRET_FILE"},
		{"DMLC_INTERFACE", "nosuch0", 1, "nosuch0"},
		{"HVD_TLS", "", 2, "a server has 2 customers, want 1"},
		{"HVD_TLS", "", 1, "register with the scheduler at 127.0.0.1:1"},
	} {
		settings := map[string]string{c.name: c.text}
		for name, text := range good {
			if name != c.name {
				settings[name] = text
			}
		}
		_, err := Join(t.Context(), Config{Settings: settings, Customers: c.customers, Logger: discard})
		testnet.WantError(t, err, "ps: ", c.want)
	}
	bare := maps.Clone(good)
	bare["HVD_TLS"], bare["HVD_INSECURE"] = "1", "1"
	_, err := Join(t.Context(), Config{Settings: bare, Logger: discard})
	testnet.WantError(t, err, "ps: ", "HVD_TLS needs a secret")
}

// TestLoopbackNeedsSecret starts a scheduler on loopback without a secret from the user. It must refuse a
// process that does not know the secret that it has made.
func TestLoopbackNeedsSecret(t *testing.T) {
	port := strconv.Itoa(testnet.FreePort(t))
	log, entries := testnet.Logs()
	ctx, cancel := context.WithCancel(t.Context())
	started := make(chan error, 1)
	go func() {
		_, err := Join(ctx, Config{Logger: logs.ToSlog(log), Settings: nodeSettings("scheduler", 1, 1, port, nil)})
		started <- err
	}()
	_, err := Join(testnet.Context(t), Config{Logger: discard,
		Settings: nodeSettings("worker", 1, 1, port, map[string]string{"HVD_INSECURE": "1"})})
	testnet.WantError(t, err, "requires the secret")
	testnet.Eventually(t, "the reason", func() bool {
		return testnet.Logged(entries, "closed a connection", "no secret")
	})
	cancel()
	if err := <-started; err == nil {
		t.Error("the scheduler has started without nodes")
	}
}

// TestUnreadSetting checks that a node warns about a setting that only ranks use.
func TestUnreadSetting(t *testing.T) {
	log, entries := testnet.Logs()
	po, err := Join(t.Context(), Config{Logger: logs.ToSlog(log),
		Settings: nodeSettings("scheduler", 0, 0, strconv.Itoa(testnet.FreePort(t)),
			map[string]string{"HOROVOD_CYCLE_TIME": "3", "HVD_LIVENESS_SECONDS": "10"})})
	if err != nil {
		t.Fatal(err)
	}
	noError(t, po.Finalize(t.Context()))
	if !testnet.Logged(entries, "HOROVOD_CYCLE_TIME has no effect: nodes of a parameter server do not use it") ||
		testnet.Logged(entries, "HVD_LIVENESS_SECONDS") {
		t.Errorf("got %v, want one warning about HOROVOD_CYCLE_TIME", entries.All())
	}
}

// TestInterface checks that a server listens on the interface that DMLC_INTERFACE names, and not on that of
// the route to the scheduler.
func TestInterface(t *testing.T) {
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(own, func(a net.Addr) bool {
		ip, ok := a.(*net.IPNet)
		return ok && ip.IP.To4() != nil && ip.IP.IsGlobalUnicast()
	})
	if i < 0 {
		t.Skip("this host has no IPv4 address other than loopback")
	}
	ip := own[i].(*net.IPNet).IP.String()
	// Without a secret, a server refuses to listen on an address that other hosts can reach.
	_, err = Join(t.Context(), Config{Logger: discard,
		Settings: nodeSettings("server", 1, 1, "1", map[string]string{"DMLC_INTERFACE": ip})})
	testnet.WantError(t, err, "this node would listen on "+ip+":0 without a secret")
}

// TestAsync checks that Join with Config.Async returns when the process is connected, without a barrier.
func TestAsync(t *testing.T) {
	port := strconv.Itoa(testnet.FreePort(t))
	var barriers atomic.Int32
	faults := func(_, _ van.Process, m *van.Message, deliver func(*van.Message) error) error {
		if m.Header.Control.GetCommand() == pspb.Command_BARRIER {
			barriers.Add(1)
		}
		return deliver(m)
	}
	nodes := startAll(t, func(role string) (*Node, error) {
		return Join(testnet.Context(t), Config{Async: true, Logger: discard, faults: faults,
			Settings: nodeSettings(role, 1, 1, port, nil)})
	})
	if n := barriers.Load(); n > 0 {
		t.Errorf("Join has sent %d messages about barriers", n)
	}
	var leaving sync.WaitGroup
	for _, po := range nodes {
		leaving.Go(func() { noError(t, po.Finalize(testnet.Context(t))) })
	}
	leaving.Wait()
	if barriers.Load() == 0 {
		t.Error("the test does not see the messages about barriers")
	}
}

// TestVerboseWithoutLog checks that PS_VERBOSE makes a node that the program has given no log write about its
// connections to standard error, although it writes only warnings otherwise.
func TestVerboseWithoutLog(t *testing.T) {
	old := os.Stderr
	defer func() { os.Stderr = old }()
	for level, want := range map[string]bool{"0": false, "1": true} {
		file, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		os.Stderr = file
		job{t: t, servers: 1, workers: 1, logless: true, settings: map[string]string{"PS_VERBOSE": level}}.run(
			func(*Node) {})
		text := testnet.ReadFile(t, file.Name())
		if got := strings.Contains(string(text), "ps: connected"); got != want {
			t.Errorf("PS_VERBOSE=%s: a line about a connection: %v, want %v:\n%s", level, got, want, text)
		}
		file.Close()
	}
}

// TestMissingApp checks that requests wait for an app that is made later, and fail if it is never made.
func TestMissingApp(t *testing.T) {
	job{t: t, servers: 1, workers: 1}.run(func(po *Node) {
		if po.Role() == Server {
			testnet.Eventually(t, "requests to app 3 and one to app 4 wait", func() bool {
				po.mu.Lock()
				defer po.mu.Unlock()
				return len(po.held) >= 6
			})
			var got []int32
			app := must(NewSimpleApp(po, App(3), OnRequest(func(req SimpleData, app *SimpleApp) {
				got = append(got, req.Head)
				noError(t, app.Respond(req, nil))
			})))
			noError(t, po.Barrier(t.Context(), ServerGroup+WorkerGroup))
			router{po.postoffice}.Tick(time.Now().Add(2 * customerWait))
			app.c.handling.Lock()
			defer app.c.handling.Unlock()
			if !slices.Equal(got, []int32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}) {
				t.Errorf("the requests came as %v", got)
			}
		}
		if po.Role() == Worker {
			app := must(NewSimpleApp(po, App(3)))
			missing := must(NewSimpleApp(po, App(4)))
			never := must(missing.Request(t.Context(), 8, 1, nil))
			var all []*Request
			for i := range 10 {
				all = append(all, must(app.Request(t.Context(), 8, int32(i), nil)))
			}
			for _, r := range all {
				wait(t, r, nil)
			}
			noError(t, po.Barrier(t.Context(), ServerGroup+WorkerGroup))
			testnet.WantError(t, never.Wait(t.Context()), "server 0: it has had no app 4 for 10s")
		}
	})
}

// TestHeldBytes checks that the bodies of requests that wait for an app are bounded, and that those that have
// waited too long do not count.
func TestHeldBytes(t *testing.T) {
	po := &postoffice{log: zap.NewNop(), customers: make(map[customerKey]*customer)}
	po.van = van.New(van.Config{Role: van.Server, Customers: 1, Rank: -1}, router{po})
	body := make([]byte, 4<<20)
	for range 100 {
		router{po}.Receive(van.Process{ID: 9}, &van.Message{Header: &pspb.Header{Request: true, Body: body}})
	}
	if want := maxHeldBytes/len(body) - 1; len(po.held) != want {
		t.Errorf("%d requests wait, want %d", len(po.held), want)
	}
	router{po}.Tick(time.Now().Add(2 * customerWait))
	if len(po.held) != 0 || po.heldBytes != 0 {
		t.Errorf("%d requests with %d bytes wait, want none", len(po.held), po.heldBytes)
	}
}

// TestDeathFailsRequests checks that requests to a server that leaves fail, and so do later ones.
func TestDeathFailsRequests(t *testing.T) {
	var waited, workers sync.WaitGroup // the workers have waited once, they are done
	waited.Add(2)
	workers.Add(2)
	job{t: t, servers: 1, workers: 2, leave: true}.run(func(po *Node) {
		// The server never answers.
		app := must(NewSimpleApp(po, OnRequest(func(SimpleData, *SimpleApp) {})))
		if po.Role() == Scheduler {
			workers.Wait()
		}
		if po.Role() == Server {
			waited.Wait()
		}
		if po.Role() != Worker {
			return
		}
		defer workers.Done()
		r, err := app.Request(t.Context(), 8, 1, nil)
		if err != nil {
			t.Error(err)
			waited.Done()
			return
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		testnet.WantError(t, r.Wait(ctx), "ps: wait for request 1 of app 0 to server 0: context canceled")
		waited.Done()
		testnet.WantError(t, r.Wait(t.Context()), "server 0 is gone", "left the job")
		_, err = app.Request(t.Context(), 8, 1, nil)
		testnet.WantError(t, err, "server 0 is gone")
		testnet.Eventually(t, "the scheduler knows too", func() bool {
			err := po.Barrier(t.Context(), AllGroup)
			return err != nil && strings.Contains(err.Error(), "server 0 is gone: it has left the job")
		})
	})
}

// TestFail checks that all other nodes learn why the program of a node has failed, and that Fail ends a
// Finalize that waits for them.
func TestFail(t *testing.T) {
	job{t: t, servers: 1, workers: 2, leave: true}.run(func(po *Node) {
		if po.Role() == Worker && po.Rank() == 1 {
			finalized := make(chan error, 1)
			go func() { finalized <- po.Finalize(t.Context()) }()
			testnet.Eventually(t, "Finalize has begun", func() bool {
				po.mu.Lock()
				defer po.mu.Unlock()
				return po.finalized != nil
			})
			po.Fail("its file is damaged\xff")
			testnet.WantError(t, <-finalized, "this node has been finalized")
			po.Fail("another reason")
		} else {
			testnet.Eventually(t, "the node learns the reason", func() bool {
				err := po.van.Gone(van.WorkerID(1))
				return err != nil && err.Error() == "its file is damaged\uFFFD"
			})
		}
	})
}

// TestFailInHandler checks that handlers and callbacks can call Fail: the other nodes learn the reason, and
// Close returns.
func TestFailInHandler(t *testing.T) {
	var all sync.WaitGroup
	for place, failing := range map[string]NodeID{"KVHandler": 8, "OnResponse": 9, "Callback": 9} {
		all.Go(func() { failInHandler(t, place, failing) })
	}
	all.Wait()
}

// failInHandler lets a node fail at a place.
func failInHandler(t *testing.T, place string, failing NodeID) {
	failed := make(chan struct{})
	job{t: t, servers: 1, workers: 1, leave: true}.run(func(po *Node) {
		fail := func(at string) {
			if at == place {
				po.Fail("it gave up")
				close(failed)
			}
		}
		switch po.Role() {
		case Server:
			_, err := NewKVServer(po, KVHandler[float32](func(m KVMeta, _ KVPairs[float32],
				s *KVServer[float32]) {
				fail("KVHandler")
				_ = s.Respond(m, KVPairs[float32]{}) // an error means that the node has failed
			}))
			noError(t, err)
		case Worker:
			w, err := NewKVWorker[float32](po, OnResponse(func(SimpleData, *SimpleApp) { fail("OnResponse") }))
			noError(t, err)
			_, err = w.Request(t.Context(), ServerGroup, 1, nil)
			noError(t, err)
			_, err = w.PushAsync(t.Context(), []uint64{1}, []float32{1}, Callback(func(error) { fail("Callback") }))
			if place == "Callback" || place == "KVHandler" {
				noError(t, err)
			}
		}
		if po.ID() != failing {
			testnet.Eventually(t, "the reason", func() bool {
				err := po.van.Gone(int(failing))
				return err != nil && err.Error() == "it gave up"
			})
		}
		select {
		case <-failed:
		case <-time.After(time.Minute):
			t.Errorf("%s: Fail has not returned", place)
		}
	})
}

// TestOperationTimeout checks that requests without an answer fail, and then leave their room in the queue to
// others.
func TestOperationTimeout(t *testing.T) {
	const requests = 2
	held, failed := make(chan SimpleData, requests), make(chan struct{})
	limit := map[string]string{"HVD_OPERATION_TIMEOUT_SECONDS": "0.3", "DMLC_PS_WATER_MARK": "1"}
	job{t: t, servers: 1, workers: 1, settings: limit}.run(func(po *Node) {
		app := must(NewSimpleApp(po, OnRequest(func(req SimpleData, app *SimpleApp) { held <- req })))
		if po.Role() == Worker {
			for range requests {
				testnet.WantError(t, await(t.Context())(app.Request(t.Context(), 8, 1, nil)),
					"no answer within HVD_OPERATION_TIMEOUT_SECONDS: server 0 has not answered")
			}
			close(failed)
		}
		if po.Role() == Server {
			<-failed
			for len(held) > 0 { // a request may have failed before it was sent
				noError(t, app.Respond(<-held, nil)) // too late, and without effect
			}
		}
	})
}

// TestTimeoutInQueue checks that a request that waits for room in the queue fails when its time limit passes.
func TestTimeoutInQueue(t *testing.T) {
	failed := make(chan struct{})
	one := map[string]string{"DMLC_PS_WATER_MARK": "1"}
	job{t: t, servers: 1, workers: 1, settings: one}.run(func(po *Node) {
		app := must(NewSimpleApp(po, OnRequest(func(req SimpleData, app *SimpleApp) {
			<-failed
			noError(t, app.Respond(req, nil))
		})))
		if po.Role() != Worker {
			return
		}
		first := must(app.Request(t.Context(), 8, 1, nil))
		app.c.po.set.OperationTimeout = 300 * time.Millisecond
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		testnet.WantError(t, await(ctx)(app.Request(ctx, 8, 1, nil)), errTimeout.Error())
		close(failed)
		wait(t, first, nil)
	})
}

// TestEarlyResponse checks the sender of a response that arrives before the call that sends the request has
// returned.
func TestEarlyResponse(t *testing.T) {
	job{t: t, workers: 1}.run(func(po *Node) {
		if po.Role() != Worker {
			return
		}
		var got []NodeID
		app := must(NewSimpleApp(po, App(5), OnResponse(func(d SimpleData, _ *SimpleApp) {
			got = append(got, d.Sender)
		})))
		s := &simpleRequest{app: app}
		s.Request = Request{c: app.c, of: s, done: make(chan struct{}), parts: []part{{to: 8, sent: true}}}
		po.wg.Add(1)
		app.c.pending[0] = &s.Request
		app.c.response(van.Process{ID: 8}, &van.Message{Header: &pspb.Header{}})
		if wait(t, &s.Request, nil); !slices.Equal(got, []NodeID{8}) {
			t.Errorf("the responses are from %v, want 8", got)
		}
	})
}

// finishing is the subject of a request that calls a function when all responses have arrived.
type finishing struct {
	simpleRequest
	call func()
}

func (f *finishing) finish([]part) error { f.call(); return nil }

// TestFinalizeWaitsForCallbacks checks that Finalize waits for the callback of a request that is completing.
func TestFinalizeWaitsForCallbacks(t *testing.T) {
	var sender sync.WaitGroup
	job{t: t, leave: true}.run(func(po *Node) {
		app := must(NewSimpleApp(po))
		completing := make(chan struct{})
		var left atomic.Bool
		r := &Request{callback: func(error) {
			if left.Load() {
				t.Error("a callback ran after Finalize")
			}
		}}
		r.of = &finishing{simpleRequest{app: app}, func() {
			close(completing)
			testnet.Eventually(t, "Finalize ends the requests", func() bool {
				app.c.mu.Lock()
				defer app.c.mu.Unlock()
				return app.c.ended != nil
			})
			time.Sleep(50 * time.Millisecond) // if Finalize does not wait, it returns in this time
		}}
		sender.Go(func() {
			wait(t, r, app.c.start(t.Context(), r))
		})
		<-completing
		po.RegisterExitCallback(func() { left.Store(true) })
	})
	sender.Wait()
}

// TestBodyIsCopied checks that the caller of Request and Response can use the body again at once.
func TestBodyIsCopied(t *testing.T) {
	first, free := make(chan struct{}), make(chan struct{})
	job{t: t}.run(func(po *Node) {
		app := must(NewSimpleApp(po, OnRequest(func(req SimpleData, app *SimpleApp) {
			if req.Head == 0 {
				close(first)
				<-free
			}
			answer := []byte("answer")
			if req.Head == 1 && string(req.Body) != "body" {
				t.Errorf("got the body %q", req.Body)
			}
			noError(t, app.Respond(req, answer))
			clear(answer)
		}), OnResponse(func(resp SimpleData, _ *SimpleApp) {
			if string(resp.Body) != "answer" {
				t.Errorf("got the answer %q", resp.Body)
			}
		})))
		r0 := must(app.Request(t.Context(), SchedulerGroup, 0, nil))
		<-first
		body := []byte("body")
		r1, err := app.Request(t.Context(), SchedulerGroup, 1, body)
		clear(body)
		close(free)
		wait(t, r0, nil)
		wait(t, r1, err)
	})
}

// TestResponseTooLong checks that a request fails whose response is too long to be sent.
func TestResponseTooLong(t *testing.T) {
	long := strings.Repeat("x", 5<<20)
	limit := map[string]string{"HVD_OPERATION_TIMEOUT_SECONDS": "20"}
	job{t: t, servers: 1, workers: 1, settings: limit}.run(func(po *Node) {
		app := must(NewSimpleApp(po, OnRequest(func(req SimpleData, app *SimpleApp) {
			testnet.WantError(t, app.Respond(req, []byte(long)), "the header of a message has")
		})))
		if po.Role() == Worker {
			testnet.WantError(t, await(t.Context())(app.Request(t.Context(), 8, 1, nil)), "server 0: the header of a message has")
		}
	})
}

// TestBarrierErrors checks that a node cannot be in a barrier twice, and that a barrier whose time limit
// passes names the nodes that are missing.
func TestBarrierErrors(t *testing.T) {
	refused := make(chan struct{})
	job{t: t, workers: 2}.run(func(po *Node) {
		if po.Role() != Worker {
			return
		}
		if po.Rank() == 1 {
			<-refused
			noError(t, po.Barrier(t.Context(), WorkerGroup))
			return
		}
		first := make(chan error, 1)
		go func() { first <- po.Barrier(t.Context(), WorkerGroup) }()
		testnet.Eventually(t, "the first call waits", func() bool {
			po.mu.Lock()
			defer po.mu.Unlock()
			return len(po.waiting) > 0
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := po.Barrier(ctx, WorkerGroup)
		testnet.WantError(t, err, "barrier of group 4: another call of this node waits in it")
		if _, ok := errors.AsType[*UsageError](err); !ok {
			t.Errorf("got %v, want a UsageError", err)
		}
		close(refused)
		noError(t, <-first)
		po.set.OperationTimeout = 300 * time.Millisecond
		testnet.WantError(t, po.Barrier(ctx, WorkerGroup), "barrier of group 4: no answer within "+
			"HVD_OPERATION_TIMEOUT_SECONDS: it has waited for worker 1")
	})
}

// TestWithdrawOvertakes checks that a node does not count in a barrier if its withdrawal arrives before its
// entry.
func TestWithdrawOvertakes(t *testing.T) {
	var late *van.Message
	withdrawn := make(chan struct{})
	faults := func(from, _ van.Process, m *van.Message, deliver func(*van.Message) error) error {
		c := m.Header.Control
		if from.ID != van.WorkerID(0) || c.GetBarrierGroup() != van.GroupWorkers {
			return deliver(m)
		}
		if !c.Withdraw {
			late = m
			return nil
		}
		defer close(withdrawn)
		return errors.Join(deliver(m), deliver(late))
	}
	job{t: t, workers: 2, faults: faults}.run(func(po *Node) {
		if po.Role() != Worker {
			return
		}
		if po.Rank() == 1 {
			<-withdrawn
		}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		if err := po.Barrier(ctx, WorkerGroup); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("worker %d: the barrier returned %v", po.Rank(), err)
		}
	})
}
