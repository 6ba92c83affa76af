package ps

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/testnet"
)

var (
	cutTimeout = flag.Float64("cut-timeout", 5,
		"PS_HEARTBEAT_TIMEOUT of the tests that cut the network, in seconds")
	cutRounds = flag.Int("cut-rounds", 1, "number of rounds of each test that cuts the network")
)

// countMain is the program of a node. A worker pushes 1 to a key of each server, to other keys each time, and
// prints the number of each round. If a server is gone, it prints the error and waits until it is back. At
// the end of its input it checks all values: 1 if the push has succeeded, and 0 or 1 if it has failed.
func countMain() error {
	ctx := context.Background()
	po, err := Join(ctx, Config{Logger: discard})
	if err != nil {
		return err
	}
	if po.Role() == Server {
		_, err = NewKVServer(po, Sum[float64]())
	}
	if err == nil && po.Role() == Worker {
		err = count(ctx, po)
	}
	return leave(ctx, po, err)
}

func count(ctx context.Context, po *Node) error {
	w, err := NewKVWorker[float64](po)
	if err != nil {
		return err
	}
	end := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(end)
	}()
	keys := func(first, n int) (keys []uint64) { // of n rounds
		for _, r := range po.ServerKeyRanges() {
			for round := range n {
				keys = append(keys, r.Begin+uint64(2*(first+round)+po.Rank()))
			}
		}
		return keys
	}
	push := func(round int, v float64) error {
		r, err := w.PushAsync(ctx, keys(round, 1), slices.Repeat([]float64{v}, po.NumServers()))
		if err == nil {
			err = r.Wait(ctx)
		}
		return err
	}
	var failed []bool // by round
	for over := false; !over; {
		select {
		case <-end:
			over = true
		default:
		}
		err := push(len(failed), 1)
		failed = append(failed, err != nil)
		gone, ok := errors.AsType[*NodeError](err)
		switch {
		case err == nil:
			fmt.Println("round", len(failed))
			<-time.After(time.Millisecond) // the test needs no more rounds
		case !ok || gone.Node == SchedulerGroup || gone.Node == po.ID():
			return err
		default:
			fmt.Println("error", err)
			if err := po.AwaitReturn(ctx, gone.Node); err != nil {
				return err
			}
			fmt.Println("back", gone.Node)
		}
	}
	for round, uncertain := range failed {
		if uncertain {
			if err := push(round, 0); err != nil { // so that there are values in any case
				return err
			}
		}
	}
	var got []float64
	r, err := w.PullAsync(ctx, keys(0, len(failed)), &got)
	if err == nil {
		err = r.Wait(ctx)
	}
	if err != nil {
		return err
	}
	for i, v := range got {
		if round := i % len(failed); v != 1 && !(failed[round] && v == 0) {
			return fmt.Errorf("round %d, which has failed: %t: got %v", round, failed[round], v)
		}
	}
	fmt.Println("checked", len(failed))
	return nil
}

// network is a job whose nodes are on hosts of their own.
type network struct {
	t       *testing.T
	program string
	servers int
	env     []string
	hosts   map[int]*testnet.Host // by id of the node
	nodes   map[int]*process
}

// newNetwork starts a job with the given number of servers and 2 workers, which run a program of
// nodePrograms.
func newNetwork(t *testing.T, program string, servers int, env ...string) *network {
	n := &network{t: t, program: program, servers: servers, hosts: make(map[int]*testnet.Host),
		nodes: make(map[int]*process)}
	ids := van.Members(van.GroupAll, servers, 2)
	hosts := testnet.NewHosts(t, len(ids))
	n.env = append(slices.Clone(env), "DMLC_PS_ROOT_URI="+hosts[0].Addr.String(), "HVD_INSECURE=1",
		"DMLC_LOCAL=0", fmt.Sprint("PS_HEARTBEAT_TIMEOUT=", *cutTimeout), "HVD_HOSTID=none",
		"HOROVOD_CPU_OPERATIONS=tcp")
	for i, id := range ids {
		n.hosts[id] = hosts[i]
		n.start(id)
	}
	return n
}

// start starts a node, or starts it again.
func (n *network) start(id int) {
	n.t.Helper()
	n.nodes[id] = startCommand(n.t, n.hosts[id].Command(n.t.Context(), os.Args[0]), n.program, "9000",
		van.RoleOf(id).String(), van.Rank(id), n.servers,
		append(slices.Clone(n.env), "DMLC_NODE_HOST="+n.hosts[id].Addr.String())...)
}

// until waits for a line of a node with the given prefix, and ignores other lines.
func (n *network) until(id int, prefix string) string {
	n.t.Helper()
	deadline := time.After(time.Minute)
	var seen []string
	for {
		select {
		case line, open := <-n.nodes[id].lines:
			if strings.HasPrefix(line, prefix) && open {
				return line
			}
			if seen = append(seen, line); !open {
				n.t.Fatalf("%s has ended and has not said %q, but\n%s", van.Name(id), prefix, strings.Join(seen, "\n"))
			}
		case <-deadline:
			n.t.Fatalf("%s has not said %q for a minute, but\n%s", van.Name(id), prefix, strings.Join(seen, "\n"))
		}
	}
}

// dies waits until a node has failed, and returns what it says.
func (n *network) dies(id int) (says string) {
	n.t.Helper()
	deadline := time.After(time.Minute)
	for open := true; open; {
		var line string
		select {
		case line, open = <-n.nodes[id].lines:
			if !strings.HasPrefix(line, "round ") {
				says += line
			}
		case <-deadline:
			n.t.Fatalf("%s has not ended within a minute, and says\n%s", van.Name(id), says)
		}
	}
	if err := n.nodes[id].cmd.Wait(); err == nil {
		n.t.Errorf("%s has ended without an error", van.Name(id))
	}
	return says
}

// cut is what a test of a cut does, chosen by a seed.
type cut struct {
	*rand.Rand
	timeout time.Duration // PS_HEARTBEAT_TIMEOUT
}

// cuts runs a test with seeds that it prints.
func cuts(t *testing.T, test func(t *testing.T, c cut)) {
	for range *cutRounds {
		seed := rand.Uint64()
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			t.Parallel()
			test(t, cut{rand.New(rand.NewPCG(seed, 0)), time.Duration(*cutTimeout * float64(time.Second))})
		})
	}
}

// between makes the packets between two nodes be lost, in one direction or both, and returns a function that
// ends that. lost says that the packets from a to b are lost, and those from b to a.
func (c cut) between(n *network, a, b int) (heal func(), lost [2]bool) {
	lost = [][2]bool{{true, true}, {true, false}, {false, true}}[c.IntN(3)]
	n.t.Logf("cut between %s and %s: %v", van.Name(a), van.Name(b), lost)
	set := func(to bool) {
		if lost[0] {
			n.hosts[a].Drop(n.hosts[b], to)
		}
		if lost[1] {
			n.hosts[b].Drop(n.hosts[a], to)
		}
	}
	set(true)
	return func() { set(false) }, lost
}

// TestCutBetweenWorkerAndServer cuts a worker off a server, although both reach the scheduler. The worker
// gets an error that names the server. When the network works again, the two must connect again, even if the
// cut has lasted for longer than all timeouts, and no push may be lost or applied twice.
func TestCutBetweenWorkerAndServer(t *testing.T) {
	testnet.NeedHosts(t)
	cuts(t, func(t *testing.T, c cut) {
		n := newNetwork(t, "counts", 2)
		w, s := van.WorkerID(c.IntN(2)), van.ServerID(c.IntN(2))
		for _, long := range []bool{false, true} {
			for _, id := range []int{9, 11} {
				// After a handshake that needed retransmissions, the kernel takes the network for slow until
				// it has seen that it is not. Until then it retransmits rarely, so it finds a cut late.
				n.nodes[id].rounds(t, 60)
			}
			began := time.Now()
			heal, _ := c.between(n, w, s)
			if line := n.until(w, "error"); !strings.Contains(line, van.Name(s)+" is gone: ") {
				t.Errorf("%s says %s", van.Name(w), line)
			}
			t.Logf("error after %v", time.Since(began).Round(time.Millisecond))
			if long {
				<-time.After(2 * c.timeout)
			}
			healed := time.Now()
			heal()
			n.until(w, fmt.Sprint("back ", NodeID(s)))
			t.Logf("connected again after %v", time.Since(healed).Round(time.Millisecond))
		}
		for _, id := range []int{9, 11} {
			n.nodes[id].rounds(t, 3)
			n.nodes[id].stdin.Close()
			n.until(id, "checked")
		}
		for id, p := range n.nodes {
			p.ends(t, id)
		}
	})
}

// TestCutBetweenWorkerAndReplica is like TestCutBetweenWorkerAndServer in a job with replicas. The requests
// of the worker must wait for the end of the cut, and not fail.
func TestCutBetweenWorkerAndReplica(t *testing.T) {
	testnet.NeedHosts(t)
	cuts(t, func(t *testing.T, c cut) {
		n := newNetwork(t, "sums", 2, "HVD_PS_REPLICAS=1")
		for _, id := range []int{8, 10} {
			n.nodes[id].next(t, "complete")
		}
		n.nodes[9].rounds(t, 3)
		n.nodes[11].rounds(t, 3)
		heal, _ := c.between(n, van.WorkerID(c.IntN(2)), van.ServerID(c.IntN(2)))
		<-time.After(c.timeout + time.Duration(c.Int64N(int64(5*time.Second))))
		heal()
		endSums(t, n.nodes)
	})
}

// TestCutBetweenServers cuts two servers with replicas off each other. The scheduler declares one of them
// dead, which learns that, and which must be able to return.
func TestCutBetweenServers(t *testing.T) {
	testnet.NeedHosts(t)
	cuts(t, func(t *testing.T, c cut) {
		n := newNetwork(t, "sums", 2, "HVD_PS_REPLICAS=1")
		for _, id := range []int{8, 10} {
			n.nodes[id].next(t, "complete")
		}
		n.nodes[9].rounds(t, 3)
		n.nodes[11].rounds(t, 3)
		heal, _ := c.between(n, 8, 10)
		says := make(map[int]string)
		dead := 0
		for deadline := time.After(time.Minute); dead == 0; {
			line, open, id := "", false, 8
			select {
			case line, open = <-n.nodes[8].lines:
			case line, open = <-n.nodes[10].lines:
				id = 10
			case <-deadline:
				t.Fatal("no server has failed within a minute")
			}
			says[id] += line
			if !open {
				dead = id
			}
		}
		want := fmt.Sprintf("%s is gone: the scheduler has declared it dead: %s says: ",
			van.Name(dead), van.Name(18-dead))
		// The scheduler cannot tell it while an earlier message to it is not completely written.
		if untold := "scheduler is gone: its connection has ended"; !strings.Contains(says[dead], want) &&
			!strings.Contains(says[dead], untold) {
			t.Errorf("%s says %q, want %q in it", van.Name(dead), says[dead], want)
		}
		n.nodes[9].rounds(t, 3)
		heal()
		n.start(dead)
		n.nodes[dead].next(t, "complete")
		endSums(t, n.nodes)
	})
}

// TestCutBetweenNodeAndScheduler cuts a node off the scheduler, although it reaches the others. The node
// must end: it learns that it was declared dead, or misses the scheduler if that cannot tell it. The others
// must go on when it has returned.
func TestCutBetweenNodeAndScheduler(t *testing.T) {
	testnet.NeedHosts(t)
	cuts(t, func(t *testing.T, c cut) {
		n := newNetwork(t, "rounds", 2)
		id := []int{8, 9, 10, 11}[c.IntN(4)]
		n.nodes[9].rounds(t, 3)
		n.nodes[11].rounds(t, 3)
		began := time.Now()
		heal, lost := c.between(n, id, van.SchedulerID)
		says := n.dies(id)
		want := "scheduler is gone: no message came from it for "
		// Packets of the scheduler may arrive. But TCP sends the verdict only after what it has sent before,
		// for which it may have no acknowledgement.
		told := van.Name(id) + " is gone: the scheduler has declared it dead: no message came from it for "
		if !lost[1] && strings.Contains(says, told) {
			want = told
		} else if both := "it has failed, or the network between it and " + van.Name(id) + " has"; !strings.Contains(
			says, both) {
			t.Errorf("%s says %q, want %q in it", van.Name(id), says, both)
		}
		t.Logf("%s has failed after %v", van.Name(id), time.Since(began).Round(time.Millisecond))
		if !strings.Contains(says, want) {
			t.Errorf("%s says %q, want %q in it", van.Name(id), says, want)
		}
		heal()
		n.start(id)
		n.nodes[9].rounds(t, 3)
		n.nodes[11].rounds(t, 3)
	})
}

// TestStoppedBeyondTimeout stops a node until another process has taken its place. When the node goes on, it
// must say that it was declared dead, and blame no other node.
func TestStoppedBeyondTimeout(t *testing.T) {
	cuts(t, func(t *testing.T, c cut) {
		port := strconv.Itoa(testnet.FreePort(t))
		nodes := make(map[int]*process)
		start := func(id int) {
			nodes[id] = startProcess(t, "rounds", port, van.RoleOf(id).String(), van.Rank(id), 2,
				fmt.Sprint("PS_HEARTBEAT_TIMEOUT=", *cutTimeout))
		}
		for _, id := range van.Members(van.GroupAll, 2, 2) {
			start(id)
		}
		n := &network{t: t, nodes: nodes}
		id := []int{8, 9, 10, 11}[c.IntN(4)]
		nodes[9].rounds(t, 3)
		nodes[11].rounds(t, 3)
		stopped := nodes[id]
		if err := stopped.cmd.Process.Signal(unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		start(id)
		for _, worker := range []int{9, 11} {
			nodes[worker].rounds(t, 50) // the first ones may be in the channel already
		}
		if err := stopped.cmd.Process.Signal(unix.SIGCONT); err != nil {
			t.Fatal(err)
		}
		nodes[id] = stopped
		says := n.dies(id)
		want := van.Name(id) + " is gone: the scheduler has declared it dead: no message came from it for "
		if !strings.Contains(says, want) {
			t.Errorf("%s says %q, want %q in it", van.Name(id), says, want)
		}
		for _, other := range van.Members(van.GroupAll, 2, 2) {
			if strings.Contains(says, van.Name(other)+" is gone") && other != id {
				t.Errorf("%s blames %s: %s", van.Name(id), van.Name(other), says)
			}
		}
	})
}
