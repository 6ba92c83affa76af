package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/ps"
)

const (
	servers, workers = 2, 2
	// roundsVariable is the number of rounds of the program "node". Without it, the program ends only with an
	// error.
	roundsVariable = "GOHVD_E2E_ROUNDS"
	// leavesVariable makes worker 1 leave with an error, while the other nodes wait for nothing.
	leavesVariable = "GOHVD_E2E_LEAVES"
)

// node is a node of a parameter server. In each round a worker pushes 1 to keys of all servers, and meets the
// other workers. At the end it prints the sum of the first and the last key.
func node(ctx context.Context) error {
	node, err := ps.Join(ctx, ps.Config{})
	if err != nil {
		return err
	}
	fmt.Println("pid", os.Getpid())
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return err
	}
	fmt.Println("addresses", addrs)
	if os.Getenv(leavesVariable) != "" {
		return leave(ctx, node)
	}
	switch node.Role() {
	case ps.Server:
		_, err = ps.NewKVServer(node, ps.Sum[float64]())
	case ps.Worker:
		err = nodeRounds(ctx, node)
	}
	return finalize(ctx, node, err)
}

// finalize leaves the job after the program of a node has returned err.
func finalize(ctx context.Context, node *ps.Node, err error) error {
	if err != nil {
		return errors.Join(err, node.Close())
	}
	return node.Finalize(ctx)
}

// leave makes worker 1 leave with an error. The other nodes wait until hvdrun ends them: the scheduler by
// SIGTERM, and those that see its end later.
func leave(ctx context.Context, node *ps.Node) error {
	if node.Role() == ps.Worker && node.Rank() == 1 {
		return errors.Join(errors.New("this worker leaves"), node.Close())
	}
	if node.Role() != ps.Scheduler {
		signal.Ignore(syscall.SIGTERM)
	}
	select {}
}

func nodeRounds(ctx context.Context, node *ps.Node) error {
	w, err := ps.NewKVWorker[float64](node)
	if err != nil {
		return err
	}
	rounds, err := strconv.Atoi(os.Getenv(roundsVariable))
	if err != nil {
		rounds = -1
	}
	keys, ones := []uint64{1, ps.MaxKey / 2, ps.MaxKey - 10}, []float64{1, 1, 1}
	for round := 0; round != rounds; round++ {
		if err := w.Push(ctx, keys, ones); err != nil {
			return err
		}
		if err := node.Barrier(ctx, ps.WorkerGroup); err != nil {
			return err
		}
	}
	var sums []float64
	if err := w.Pull(ctx, keys, &sums); err != nil {
		return err
	}
	fmt.Println("sums", sums)
	return nil
}

// returning is a node of a job that goes on when nodes end and return. A worker sets values at all servers
// and reads them back, again and again. If a server ends, it repeats the round. It ends when the scheduler
// ends.
func returning(ctx context.Context) error {
	node, err := ps.Join(ctx, ps.Config{})
	if err != nil {
		return err
	}
	fmt.Println("pid", os.Getpid())
	if node.Role() == ps.Server {
		_, err = ps.NewKVServer(node, ps.Sum[float64]())
	}
	if err == nil && node.Role() == ps.Worker {
		err = returningRounds(ctx, node)
	}
	return finalize(ctx, node, err)
}

func returningRounds(ctx context.Context, node *ps.Node) error {
	w, err := ps.NewKVWorker[float64](node)
	if err != nil {
		return err
	}
	key, told := uint64(node.Rank()), time.Time{}
	for round := 0; ; round++ {
		gone, err := setAndRead(ctx, w, []uint64{key, ps.MaxKey/2 + key}, float64(round))
		switch {
		case err != nil:
			return err
		case gone == ps.SchedulerGroup:
			return errors.New("the scheduler is gone")
		case gone != 0:
			if err := node.AwaitReturn(ctx, gone); err != nil {
				return err
			}
		case time.Since(told) > 10*time.Millisecond:
			fmt.Println("round", round)
			told = time.Now()
		}
	}
}

// setAndRead sets v at the first key and -v at the second one, and reads them back. If a node has ended
// meanwhile, it returns its id.
func setAndRead(ctx context.Context, w *ps.KVWorker[float64], keys []uint64,
	v float64) (gone ps.NodeID, err error) {
	var got []float64
	err = w.Push(ctx, keys, []float64{v, -v}, ps.Cmd(ps.InitCmd))
	if err == nil {
		err = w.Pull(ctx, keys, &got)
	}
	if node, ok := errors.AsType[*ps.NodeError](err); ok {
		return node.Node, nil
	}
	// A server that has ended after the push and is back has no values.
	if remote, ok := errors.AsType[*ps.RemoteError](err); ok &&
		regexp.MustCompile("there is no key|has lost the values").MatchString(remote.Text) {
		return remote.Node, nil
	}
	if err == nil && (got[0] != v || got[1] != -v) {
		err = fmt.Errorf("wrong values: got %v, want %v and %v", got, v, -v)
	}
	return 0, err
}

// startNodes runs hvdrun with servers and workers.
func startNodes(t *testing.T, env ...string) *job {
	return startHvdrun(t, nil, []string{"--servers", strconv.Itoa(servers), "--workers",
		strconv.Itoa(workers)}, "node", env...)
}

// hvdrun starts the nodes of a parameter server, which find each other and compute the right sums. Each line
// of output names its node.
func TestNodes(t *testing.T) {
	// Two servers cannot listen at one port, so hvdrun must not pass PORT on.
	j := startNodes(t, roundsVariable+"=20", "PORT="+strconv.Itoa(testnet.FreePort(t)))
	started := make(map[string]bool)
	var sums []string
	for l := range j.lines {
		if strings.HasPrefix(l.text, "pid ") {
			started[l.node] = true
		}
		if strings.HasPrefix(l.text, "sums ") {
			sums = append(sums, l.node+": "+l.text)
		}
	}
	j.ends(0)
	for _, name := range []string{"scheduler", "server 0", "server 1", "worker 0", "worker 1"} {
		if !started[name] {
			t.Errorf("no line of the %s in:\n%s", name, j.out())
		}
	}
	slices.Sort(sums)
	const text = "sums [40 40 40]"
	if want := []string{"worker 0: " + text, "worker 1: " + text}; !slices.Equal(sums, want) {
		t.Errorf("got %q, want %q", sums, want)
	}
}

// hvdrun serves the metrics of all nodes at one address.
func TestNodeMetrics(t *testing.T) {
	j := startHvdrun(t, nil, []string{"--metrics-addr", ":0", "--servers", strconv.Itoa(servers), "--workers",
		strconv.Itoa(workers)}, "node")
	j.awaitLines(1+servers+workers, "pid ")
	url := j.metricsURL()
	testnet.Eventually(t, "all nodes show their metrics", func() bool {
		text := get(t, url)
		for rank, name := range []string{"scheduler", "server 0", "server 1", "worker 0", "worker 1"} {
			line := fmt.Sprintf(`hvd_ps_node_info{host="[^"]+",node="%s",rank="%d"} 1\n`, name, rank)
			if strings.HasPrefix(name, "worker") {
				line = fmt.Sprintf(`hvd_ps_requests_total{host="[^"]+",peer="server 1",rank="%d"} [1-9]`, rank)
			}
			if !regexp.MustCompile(line).MatchString(text) {
				return false
			}
		}
		return true
	})
	j.signal(os.Interrupt)
	j.ends(128 + int(syscall.SIGINT))
}

// A worker fails and leaves while no other node waits for it. hvdrun ends the others, and names the worker,
// not the first node that has ended because of that.
func TestNodeLeaves(t *testing.T) {
	t.Parallel()
	j := startNodes(t, leavesVariable+"=1")
	j.ends(1)
	const want = "Root cause (first observed failure):\n  worker 1: exit status 1"
	if !strings.Contains(j.err(), want) {
		t.Errorf("got the report\n%s\nwant %q in it", j.err(), want)
	}
}

// A node is killed while the workers push. Every other node gets an error that names the dead one, or one
// that has ended because of that. hvdrun names the node that was killed, ends with its status, and leaves no
// other node.
func TestKillNode(t *testing.T) {
	for _, victim := range []string{"scheduler", "server 0", "server 1", "worker 1"} {
		t.Run(victim, func(t *testing.T) {
			t.Parallel()
			j := startNodes(t)
			pids := make(map[string]int)
			j.until("all nodes had started", func(l line) bool {
				if text, ok := strings.CutPrefix(l.text, "pid "); ok {
					pids[l.node], _ = strconv.Atoi(text)
				}
				return len(pids) == 1+servers+workers
			})
			send(t, pids[victim], syscall.SIGKILL)
			began, left, named := time.Now(), servers+workers, false
			j.until("all other nodes had reported", func(l line) bool {
				got, ok := strings.CutPrefix(l.text, "error ")
				if !ok {
					return false
				}
				if !strings.Contains(got, " is gone") {
					t.Errorf("%s does not say which node is gone: %s", l.node, got)
				}
				named = named || strings.Contains(got, victim+" is gone")
				left--
				return left == 0
			})
			if !named {
				t.Errorf("no node says that %s is gone:\n%s", victim, j.out())
			}
			if took := time.Since(began); took > survivorsDeadline {
				t.Errorf("the other nodes took %v", took)
			}
			j.ends(128 + int(syscall.SIGKILL))
			testnet.WantText(t, j.err(), "Root cause (found by the surviving nodes): "+victim+" is gone",
				"\n  "+victim+": killed by SIGKILL, which hvdrun did not send")
			wantGone(t, pids)
		})
	}
}

// wantGone checks that processes have ended.
func wantGone(t *testing.T, pids map[string]int) {
	t.Helper()
	for name, pid := range pids {
		if err := syscall.Kill(pid, 0); err == nil {
			t.Errorf("process %d of %s is alive", pid, name)
		}
	}
}

// nodes follows the nodes of a job with the program "returning".
type nodes struct {
	job     *job
	pids    map[string]int // of the newest processes
	started int            // how many processes have started
}

func newNodes(j *job) *nodes { return &nodes{job: j, pids: make(map[string]int)} }

// goOn waits until the given number of processes have started and each worker has then made more than the
// given number of rounds.
func (n *nodes) goOn(started, more int) {
	n.job.t.Helper()
	rounds := make(map[string]int)
	n.job.until(fmt.Sprintf("rounds of all workers, after the start of process %d", started), func(l line) bool {
		if text, ok := strings.CutPrefix(l.text, "pid "); ok {
			n.pids[l.node], _ = strconv.Atoi(text)
			n.started++
		}
		if strings.HasPrefix(l.text, "round ") {
			rounds[l.node]++
		}
		return n.started == started && rounds["worker 0"] > more && rounds["worker 1"] > more
	})
}

// Each server and worker is killed twice, in a random order, and hvdrun starts it again. The others go on
// with right values. At the end the scheduler is killed, and hvdrun ends the job and names it.
func TestRestarts(t *testing.T) {
	random := draws(t)
	for range max(1, *whole) {
		restartNodes(t, random)
	}
}

func restartNodes(t *testing.T, random *rand.Rand) {
	began := time.Now()
	j := startHvdrun(t, nil, []string{"--servers", strconv.Itoa(servers), "--workers", strconv.Itoa(workers),
		"--restarts", "2"}, "returning")
	n := newNodes(j)
	victims := []string{"server 0", "server 1", "worker 0", "worker 1"}
	victims = append(victims, victims...)
	random.Shuffle(len(victims), func(i, k int) { victims[i], victims[k] = victims[k], victims[i] })
	for i, victim := range append(victims, "scheduler") {
		n.goOn(1+servers+workers+i, 3)
		send(t, n.pids[victim], syscall.SIGKILL)
	}
	status := j.wait()
	t.Logf("took %v", time.Since(began).Round(time.Millisecond))
	if status != 128+int(syscall.SIGKILL) {
		t.Errorf("hvdrun ended with status %d, want %d", status, 128+int(syscall.SIGKILL))
	}
	for _, victim := range victims {
		want := victim + ": killed by SIGKILL, which hvdrun did not send (perhaps the kernel's out-of-memory " +
			"killer did); starting it again"
		if n := strings.Count(j.err(), want); n != 2 {
			t.Errorf("hvdrun says %d times that %s was killed and is started again, want 2", n, victim)
		}
		if !strings.Contains(j.err(), "\n"+victim+" (restarted)") {
			t.Errorf("the report does not say that %s was restarted:\n%s", victim, j.err())
		}
	}
	cause := regexp.MustCompile(`Root cause .*\n  scheduler: killed by SIGKILL, which hvdrun did not send`)
	if !cause.MatchString(j.err()) {
		t.Errorf("the report lacks %s", cause)
	}
	if !strings.Contains(j.err(), "Scheduler did not report at its end: killed by SIGKILL") {
		t.Errorf("the report does not say why the scheduler has sent no state:\n%s", j.err())
	}
	if strings.Contains(j.out(), "wrong") {
		t.Error("a worker has got wrong values")
	}
	wantGone(t, n.pids)
	tellJob(t, j)
}

// hvdrun on one host starts nodes on three hosts. They find each other and compute the right sums. The
// servers are spread over the hosts, and the scheduler is on the host of hvdrun.
func TestNodesOverHosts(t *testing.T) {
	hosts := testnet.NewHosts(t, 3)
	m := mark(t)
	for _, secured := range []string{"0", "1"} {
		j := startHvdrun(t, on(t, hosts[0]), []string{"--servers", "2", "--workers", "3", "-H",
			list(hosts[1:], layout{2, 3}, false), "--agent", enterHost}, "node", roundsVariable+"=20", m,
			"HVD_TLS="+secured)
		at := make(map[string]string)
		sums := 0
		for l := range j.lines {
			if addrs, ok := strings.CutPrefix(l.text, "addresses "); ok {
				at[l.node] = addrs
			}
			if l.text == "sums [60 60 60]" {
				sums++
			}
		}
		if status := j.wait(); status != 0 || sums != 3 ||
			!strings.Contains(j.err(), "of which 6 of 6 have reported at their end") {
			t.Errorf("hvdrun ended with status %d, and %d workers have the right sums:\n%s", status, sums, j.err())
		}
		for node, i := range map[string]int{"scheduler": 0, "server 0": 1, "server 1": 2, "worker 0": 1,
			"worker 1": 2, "worker 2": 2} {
			if !strings.Contains(at[node], hosts[i].Addr.String()+"/") {
				t.Errorf("%s runs on a host with the addresses %s, want %s", node, at[node], hosts[i].Addr)
			}
		}
		tellJob(t, j)
	}
	awaitNone(t, m, 0)
}

// A server on another host is killed, and hvdrun starts it again there. Then the host loses its link: hvdrun
// ends the job, and names the host.
func TestNodesOnLostHost(t *testing.T) {
	t.Parallel()
	hosts, command, flags := sshHosts(t, 2)
	m := mark(t)
	j := startHvdrun(t, command, append(flags, "--servers", "2", "--workers", "2", "--restarts", "9", "-H",
		list(hosts, layout{2, 2}, true)), "returning", "HVD_LIVENESS_SECONDS=3", m)
	n := newNodes(j)
	n.goOn(5, 0)
	send(t, n.pids["server 1"], syscall.SIGKILL)
	n.goOn(6, 0)
	hosts[1].SetLink(false)
	j.ends(128 + int(syscall.SIGKILL))
	testnet.WantText(t, j.err(), "lost host "+hosts[1].Addr.String()+": received nothing from the other end for 3s",
		"hvdrun: server 1: killed by SIGKILL, which hvdrun did not send", "\nhvdrun: restarts of nodes: ")
	awaitNone(t, m, 40*time.Second)
	tellJob(t, j)
}
