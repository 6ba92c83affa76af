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

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
)

var whole = flag.Int("whole", 1, "how often the tests of replicas kill the servers with each seed")

// sumMain is the program of a node of a job with replicas. The workers add numbers to values, with several
// requests in flight, until their input ends. No request may fail. Then all workers print the number of their
// rounds and the values. A server prints "complete" when it has all values of its ranges.
func sumMain() error {
	ctx := context.Background()
	log := zap.NewNop()
	if os.Getenv("VERBOSE") != "" {
		log, _ = zap.NewDevelopment()
	}
	po, err := Join(ctx, Config{Logger: logs.ToSlog(log)})
	if err != nil {
		return err
	}
	switch {
	case po.Role() == Server:
		s, err := NewKVServer(po, Adagrad[float64](1, 1))
		if err != nil {
			return err
		}
		c, err := NewKVServer(po, Sum[float64](), App(1))
		if err != nil {
			return err
		}
		for !complete(s) || !complete(c) {
			<-time.After(time.Millisecond)
		}
		fmt.Println("complete")
	case po.Role() == Worker:
		if err := sums(ctx, po); err != nil {
			fmt.Println("failed:", err)
			os.Exit(3)
		}
	}
	return po.Finalize(ctx)
}

// complete reports whether a server has all values of its ranges.
func complete[T Value](s *KVServer[T]) bool {
	for _, r := range s.replicas {
		r.mu.Lock()
		role := r.role
		r.mu.Unlock()
		if role == joining {
			return false
		}
	}
	return true
}

// sumKeys are the keys of a request: some of each server, with several values each.
func sumKeys(n int) []uint64 {
	keys := make([]uint64, n)
	for i := range keys {
		keys[i] = MaxKey / uint64(n+1) * uint64(i+1)
	}
	return keys
}

func sums(ctx context.Context, po *Node) error {
	w, err := NewKVWorker[float64](po, App(1))
	if err != nil {
		return err
	}
	ada, err := NewKVWorker[float64](po)
	if err != nil {
		return err
	}
	end := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(end)
	}()
	small, large := sumKeys(12), sumKeys(6)
	for i := range large {
		large[i]++
	}
	ones, many := slices.Repeat([]float64{1}, len(small)), slices.Repeat([]float64{1}, len(large)*8192)
	own := uint64(po.Rank())
	rounds := 0
	for over := false; !over; rounds++ {
		select {
		case <-end:
			over = true
		default:
		}
		var all []*Request
		var got []float64
		add := func(r *Request, err error) error {
			all = append(all, r)
			return err
		}
		if err := errors.Join(
			add(w.PushAsync(ctx, small, ones)),
			add(w.PushAsync(ctx, large, many, ZeroCopy())),
			add(w.PushAsync(ctx, small, ones)),
			add(ada.PushAsync(ctx, []uint64{own, MaxKey/2 + 10 + own}, []float64{1, 1})),
			add(w.PushPullAsync(ctx, []uint64{own, MaxKey/2 + 10 + own, MaxKey - 10 + own},
				[]float64{1, 1, 1},
				&got)),
		); err != nil {
			return err
		}
		for _, r := range all {
			if err := r.Wait(ctx); err != nil {
				return err
			}
		}
		for _, v := range got {
			if v != float64(rounds+1) {
				return fmt.Errorf("round %d: got %v", rounds, got)
			}
		}
		fmt.Println("round", rounds)
	}
	if err := po.Barrier(ctx, WorkerGroup); err != nil {
		return err
	}
	var a, b, c []float64
	for _, p := range []struct {
		w    *KVWorker[float64]
		keys []uint64
		out  *[]float64
	}{{w, small, &a}, {w, large, &b}, {ada, []uint64{own, MaxKey/2 + 10 + own}, &c}} {
		r, err := p.w.PullAsync(ctx, p.keys, p.out)
		if err == nil {
			err = r.Wait(ctx)
		}
		if err != nil {
			return err
		}
	}
	reference := Adagrad[float64](1, 1).(*builtIn[float64]).store
	list := &serverList{keys: []uint64{0}}
	places, err := reference.resolve(list, true, nil, 1)
	if err != nil {
		return err
	}
	for range rounds {
		one := slices.Clone(ones[:1])
		reference.push(places, tensor.Bytes(one), false)
	}
	want := make([]float64, 1)
	reference.pull(places, tensor.Bytes(want), nil)
	if c[0] != want[0] || c[1] != want[0] {
		return fmt.Errorf("got %v after %d steps of Adagrad, want %v", c, rounds, want)
	}
	for i, v := range b {
		if v != a[0]/2 {
			return fmt.Errorf("the large value %d is %v, want %v", i, v, a[0]/2)
		}
	}
	fmt.Println("sums", rounds, slices.Min(a), slices.Max(a))
	return nil
}

// next returns the next line of the process that is not one of a round.
func (p *process) next(t *testing.T, prefix string) string {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		select {
		case line, open := <-p.lines:
			switch {
			case strings.HasPrefix(line, prefix):
				return line
			case !open || !strings.HasPrefix(line, "round "):
				p.unexpected(t, line)
			}
		case <-deadline:
			t.Fatalf("a process has not said %q for a minute", prefix)
		}
	}
}

// TestKillServersWithReplicas kills each server twice with SIGKILL, in a random order, and starts it again,
// while workers push. Sometimes the new process is killed too, before it has all values. The next server is
// killed when the new process has them. No request fails, and at the end the sums are exact.
func TestKillServersWithReplicas(t *testing.T) {
	for _, servers := range []int{2, 3} {
		for _, env := range [][]string{nil, {"HVD_HOSTID=none", "HOROVOD_CPU_OPERATIONS=tcp"}, {"PS_RESEND=1",
			"PS_RESEND_TIMEOUT=100"}} {
			seed := rand.Uint64()
			t.Run(fmt.Sprint(servers, env, seed), func(t *testing.T) { killServers(t, seed, servers, env) })
		}
	}
}

func killServers(t *testing.T, seed uint64, servers int, env []string) {
	random := rand.New(rand.NewPCG(seed, 0))
	nodes, start := startSums(t, servers, env...)
	all := van.Members(van.GroupServers, servers, 2)
	victims := slices.Repeat(all, 2**whole)
	random.Shuffle(len(victims), func(i, j int) { victims[i], victims[j] = victims[j], victims[i] })
	for _, id := range victims {
		for _, worker := range []int{9, 11} {
			nodes[worker].rounds(t, random.IntN(8))
		}
		t.Logf("killing %s", van.Name(id))
		nodes[id].kill(t)
		for start(id); random.IntN(3) == 0; start(id) {
			nodes[9].rounds(t, random.IntN(8))
			t.Logf("killing %s again", van.Name(id))
			nodes[id].kill(t)
		}
		nodes[id].next(t, "complete")
	}
	endSums(t, nodes)
}

// TestSuspendedServer stops a server with SIGSTOP. The scheduler must declare it dead, and the workers must
// go on. When the process continues, it must fail, and another one must be able to take its place.
func TestSuspendedServer(t *testing.T) {
	for _, id := range []int{8, 10} {
		t.Run(van.Name(id), func(t *testing.T) {
			t.Parallel()
			suspendServer(t, id)
		})
	}
}

func suspendServer(t *testing.T, id int) {
	// A process that gets no processor for so long is declared dead too.
	nodes, start := startSums(t, 2, "PS_HEARTBEAT_TIMEOUT=12")
	suspended := nodes[id]
	nodes[9].rounds(t, 3)
	if err := suspended.cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	// The first round may be in the channel already, or need only answers that are under way.
	for _, worker := range []int{9, 11} {
		nodes[worker].rounds(t, 50)
	}
	if err := suspended.cmd.Process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for range suspended.lines {
	}
	if err := suspended.cmd.Wait(); err == nil {
		t.Errorf("%s has ended without an error after it was declared dead", van.Name(id))
	}
	start(id)
	nodes[id].next(t, "complete")
	endSums(t, nodes)
}

// startSums starts a job with replicas, whose servers have their ranges when it returns. The function start
// starts a node again.
func startSums(t *testing.T, servers int, env ...string) (nodes map[int]*process, start func(id int)) {
	port := strconv.Itoa(testnet.FreePort(t))
	env = append(slices.Clone(env), "HVD_PS_REPLICAS=1")
	nodes = make(map[int]*process)
	start = func(id int) {
		nodes[id] = startProcess(t, "sums", port, van.RoleOf(id).String(), van.Rank(id), servers, env...)
	}
	for _, id := range van.Members(van.GroupAll, servers, 2) {
		start(id)
	}
	for _, id := range van.Members(van.GroupServers, servers, 2) {
		nodes[id].next(t, "complete")
	}
	return nodes, start
}

// endSums ends the workers, and checks the sums and that no process fails.
func endSums(t *testing.T, nodes map[int]*process) {
	t.Helper()
	total := 0
	var lines []string
	for _, worker := range []int{9, 11} {
		nodes[worker].rounds(t, 1)
		nodes[worker].stdin.Close()
	}
	for _, worker := range []int{9, 11} {
		line := nodes[worker].next(t, "sums")
		var rounds int
		if _, err := fmt.Sscanf(line, "sums %d", &rounds); err != nil {
			t.Fatal(err)
		}
		total += rounds
		lines = append(lines, line)
	}
	for _, line := range lines {
		if want := fmt.Sprint(" ", 2*total, " ", 2*total); !strings.HasSuffix(line, want) {
			t.Errorf("a worker says %q, want %q at the end", line, want)
		}
	}
	for id, p := range nodes {
		p.ends(t, id)
	}
}

// ends waits until the process of a node has ended without an error.
func (p *process) ends(t *testing.T, id int) {
	t.Helper()
	says := ""
	for line := range p.lines {
		if !strings.HasPrefix(line, "round ") {
			says += line
		}
	}
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("%s: %v: %s", van.Name(id), err, says)
	}
}
