package ps

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/testnet"
)

// nodeVariable makes the test program a node, and not a test. Its value is the program of the node: one of
// nodePrograms.
const nodeVariable = "GOHVD_PS_TEST_NODE"

var nodePrograms = map[string]func() error{"rounds": nodeMain, "sums": sumMain, "counts": countMain}

// nodeMain is the program of a node. A worker sets values at all servers and reads them back, again and
// again, and prints the number of each round. If a server ends, it repeats the round. The program ends with
// an error when the scheduler ends.
func nodeMain() error {
	ctx := context.Background()
	po, err := Join(ctx, Config{Logger: discard})
	if err != nil {
		return err
	}
	if po.Role() == Server {
		_, err = NewKVServer(po, Sum[float64]())
	}
	if err == nil && po.Role() == Worker {
		err = setAndRead(ctx, po)
	}
	return leave(ctx, po, err)
}

// leave leaves the job after the program of a node has returned err.
func leave(ctx context.Context, n *Node, err error) error {
	if err != nil {
		return errors.Join(err, n.Close())
	}
	return n.Finalize(ctx)
}

func setAndRead(ctx context.Context, po *Node) error {
	w, err := NewKVWorker[float64](po)
	if err != nil {
		return err
	}
	key := uint64(po.Rank())
	for round := 0; ; round++ {
		gone, ok := errors.AsType[*NodeError](setAndReadOnce(ctx, w, []uint64{key, MaxKey/2 + key}, round))
		if !ok {
			fmt.Println("round", round)
			continue
		}
		if gone.Node == SchedulerGroup {
			return gone
		}
		if err := po.AwaitReturn(ctx, gone.Node); err != nil {
			return err
		}
	}
}

// setAndReadOnce returns only a *NodeError: any other error, and a wrong value, ends the process.
func setAndReadOnce(ctx context.Context, w *KVWorker[float64], keys []uint64, round int) error {
	var got []float64
	v := float64(round)
	r, err := w.PushAsync(ctx, keys, []float64{v, -v}, Cmd(InitCmd))
	if err == nil {
		err = r.Wait(ctx)
	}
	if err == nil {
		if r, err = w.PullAsync(ctx, keys, &got); err == nil {
			err = r.Wait(ctx)
		}
	}
	remote := (*RemoteError)(nil)
	switch {
	case errors.As(err, new(*NodeError)):
		return err
	case errors.As(err, &remote) && strings.Contains(remote.Text, "there is no key"):
		return &NodeError{Node: remote.Node, Err: remote} // the server has ended after the push, and is back
	case errors.As(err, &remote) && strings.Contains(remote.Text, "has lost the values"):
		return &NodeError{Node: remote.Node, Err: remote}
	case err != nil || got[0] != v || got[1] != -v:
		fmt.Println("wrong:", got, "in round", round, err)
		os.Exit(3)
	}
	return nil
}

// process is a node of the test that is a process of its own.
type process struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines chan string // closed at the end of its output
}

// startProcess starts a node of a job with the given number of servers and 2 workers. env has further
// variables.
func startProcess(t *testing.T, program, port, role string, rank, servers int, env ...string) *process {
	t.Helper()
	return startCommand(t, exec.Command(os.Args[0]), program, port, role, rank, servers, env...)
}

// startCommand is like startProcess, with the command that starts this test program.
func startCommand(t *testing.T, cmd *exec.Cmd, program, port, role string, rank, servers int,
	env ...string) *process {
	t.Helper()
	p := &process{cmd: cmd, lines: make(chan string, 1)}
	p.cmd.Env = append(os.Environ(), nodeVariable+"="+program, "DMLC_ROLE="+role,
		"DMLC_RANK="+strconv.Itoa(rank), "DMLC_NUM_SERVER="+strconv.Itoa(servers), "DMLC_NUM_WORKER=2",
		"DMLC_PS_ROOT_URI=127.0.0.1", "DMLC_PS_ROOT_PORT="+port, "DMLC_LOCAL=1", "HVD_RECOVERY_SECONDS=60",
		"PS_HEARTBEAT_TIMEOUT=30")
	p.cmd.Env = append(p.cmd.Env, env...)
	out, err := p.cmd.StdoutPipe()
	if err == nil {
		p.stdin, err = p.cmd.StdinPipe()
	}
	if err == nil {
		p.cmd.Stderr = p.cmd.Stdout
		err = p.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			if strings.HasPrefix(s.Text(), "round ") {
				select { // the test needs to know only that there are rounds
				case p.lines <- s.Text():
				default:
				}
				continue
			}
			p.lines <- s.Text()
		}
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		for line := range p.lines {
			if t.Failed() { // perhaps because this process has failed, and the test waits for another one
				t.Logf("%s %d: %s", role, rank, line)
			}
		}
		_ = p.cmd.Wait()
	})
	return p
}

// rounds waits until a worker has ended n more rounds.
func (p *process) rounds(t *testing.T, n int) {
	t.Helper()
	deadline := time.After(time.Minute)
	for range n {
		select {
		case line := <-p.lines:
			if !strings.HasPrefix(line, "round ") {
				p.unexpected(t, line)
			}
		case <-deadline:
			t.Fatal("a worker makes no rounds for a minute")
		}
	}
}

// unexpected fails the test with a line of the process and those that follow.
func (p *process) unexpected(t *testing.T, line string) {
	t.Helper()
	more := []string{line}
	for end := time.After(time.Second); ; {
		select {
		case line, open := <-p.lines:
			if more = append(more, line); open {
				continue
			}
		case <-end:
		}
		t.Fatalf("a process says %s", strings.Join(more, "\n"))
	}
}

// kill kills the process and waits for its end.
func (p *process) kill(t *testing.T) {
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for range p.lines {
	}
}

// TestKillAndReturn kills each worker and server twice with SIGKILL, in a random order, and starts it again.
// The workers go on. At the end the scheduler is killed, and all end with an error that names it.
func TestKillAndReturn(t *testing.T) {
	for range 2 {
		seed := rand.Uint64()
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) { killAndReturn(t, seed) })
	}
}

func killAndReturn(t *testing.T, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 0))
	port := strconv.Itoa(testnet.FreePort(t))
	nodes := make(map[int]*process)
	start := func(id int) {
		nodes[id] = startProcess(t, "rounds", port, van.RoleOf(id).String(), van.Rank(id), 2)
	}
	for _, id := range van.Members(van.GroupAll, 2, 2) {
		start(id)
	}
	victims := van.Members(van.GroupServers+van.GroupWorkers, 2, 2)
	victims = append(victims, victims...)
	random.Shuffle(len(victims), func(i, j int) { victims[i], victims[j] = victims[j], victims[i] })
	for _, id := range victims {
		for _, worker := range []int{9, 11} {
			nodes[worker].rounds(t, 3)
		}
		t.Logf("killing %s", van.Name(id))
		nodes[id].kill(t)
		start(id)
	}
	for _, worker := range []int{9, 11} {
		nodes[worker].rounds(t, 3)
	}
	nodes[1].kill(t)
	for id, p := range nodes {
		if id == 1 {
			continue
		}
		named, deadline := false, time.After(time.Minute)
		for open := true; open; {
			var line string
			select {
			case line, open = <-p.lines:
				named = named || strings.Contains(line, "scheduler is gone")
			case <-deadline:
				t.Fatalf("%s has not ended within a minute", van.Name(id))
			}
		}
		if !named {
			t.Errorf("%s does not say that the scheduler is gone", van.Name(id))
		}
	}
}
