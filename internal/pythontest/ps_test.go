package pythontest

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// nodes returns a command that runs a Python program as the nodes of a parameter server with 2 servers and 2
// workers.
func nodes(t testing.TB, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), pythonLimit)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, hvdrun, append([]string{"--servers", "2", "--workers", "2",
		testnet.Python}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 20 * time.Second
	cmd.Env = environment(t)
	return cmd
}

// pythonNodes is a program that pushes and pulls numpy arrays and torch tensors, and checks errors.
const pythonNodes = `
import os, signal, threading
from unittest import mock
import numpy as np
from gohvd import _library, ps
from gohvd.exceptions import HorovodInternalError

def refused(error, text, f, *args, **kw):
    try:
        f(*args, **kw).wait()
    except error as e:
        assert text in str(e), e
    else:
        raise AssertionError("no error: want " + text)

slow = os.environ["DMLC_ROLE"] == "worker" and os.environ["DMLC_RANK"] == "1"
with ps.start({"DMLC_PS_WATER_MARK": "1"} if slow else {}) as node:
    assert (node.num_workers, node.num_servers) == (2, 2), vars(node)
    if node.role == "server":
        node.serve(0, "float32")
        node.serve(1, "int64", "assign")
        node.serve(2, "bfloat16")
        try:
            node.serve(3, "int64", "sgd", 0.1)
        except ValueError as e:
            assert "handler" in str(e), e
        node.barrier(ps.SERVERS | ps.WORKERS)
        node.serve(4, "float32")
    if node.role == "worker":
        w = node.worker(0, "float32")
        keys = np.array([1, ps.MAX_KEY // 2, ps.MAX_KEY - 10], np.uint64)
        requests = [w.push(keys, np.full((3, 5), 1.5, np.float32)) for _ in range(100)]
        for r in requests:
            r.wait()
        node.barrier()
        got = w.pull(keys, width=5).wait()
        assert got.shape == (15,) and (got == 300).all(), got
        node.barrier()
        out = w.pushpull(keys, np.ones(15, np.float32)).wait()
        assert (out >= 301).all() and (out <= 302).all(), out
        node.barrier()
        if node.rank == 0:
            import torch
            t = torch.zeros(3, 5)
            assert w.pull(keys, width=5, out=t).wait() is t and (t == 302).all(), t
            w.push(keys, torch.ones(3, 5), command=ps.INIT).wait()
            assert (w.pull(keys, width=5).wait() == 1).all()
            apart = np.zeros((3, 11), np.float32)[:, 1::2]  # reshape(-1) copies it
            request = w.pull(keys, width=5, out=apart)
            assert request.wait() is apart and (apart == 1).all(), apart
            apart[:] = 7
            assert request.wait() is apart and (apart == 7).all(), apart
            large = [1, 2**63 + 1]
            w.push(large, np.ones((2, 5), np.float32), command=ps.INIT).wait()
            assert (w.pull(np.array(large, np.uint64), width=5).wait() == 1).all()
            refused(ValueError, "got keys of type float64", w.pull, np.array([1.5]))
            refused(ValueError, "got keys from -1 to 2", w.pull, [-1, 2])
            for several in np.arange(6).reshape(2, 3), torch.arange(6).reshape(2, 3):
                refused(ValueError, "shape (2, 3)", w.push, several, np.ones(6, np.float32))
                refused(ValueError, "shape (2, 3)", w.pushpull, several, np.ones(6, np.float32))
            w.push([ps.MAX_KEY], np.ones(5, np.float32)).wait()
            assert w.pull([], 3).wait().size == 0 and w.pushpull([], np.ones(0, np.float32)).wait() is None
            refused(ValueError, "want 0 to %d" % ps.MAX_KEY, w.pull, [ps.MAX_KEY + 1])
            b, values = node.worker(2, "bfloat16"), torch.tensor([[1.5, -3.0], [2.5, 7.0]], dtype=torch.bfloat16).t()
            b.push([1, 2], values).wait()
            halves = torch.zeros(2, 3, dtype=torch.bfloat16)[:, 1:]
            assert b.pull([1, 2], width=2, out=halves).wait() is halves and torch.equal(halves, values), halves
            refused(ValueError, "got values of type int16", b.push, [1, 2], values.to(torch.int16))
            n = node.worker(1, "int64")
            n.push([7], np.array([-5])).wait()
            assert n.pull([7]).wait().tolist() == [-5]
            refused(HorovodInternalError, "there is no key 8", n.pull, [8])
            request, finish, ended = n.pull([7]), _library.waiting.hvd_finish, []
            def interrupted(*args):
                ended.append(finish(*args))
                if ended[-1] == _library.SUCCESS:
                    raise KeyError("as if a signal handler raised it")
                return ended[-1]
            with mock.patch.object(_library.waiting, "hvd_finish", interrupted):
                refused(KeyError, "signal handler", lambda: request)
            assert request.done() and request.wait().tolist() == [-5]
            refused(ValueError, "sorted and unique", w.push, [2, 1], np.ones(2, np.float32))
            refused(ValueError, "sorted and unique", w.pull, [2, 2])
            refused(ValueError, "4 values do not fit 3 keys", w.push, keys, np.ones(4, np.float32))
            refused(ValueError, "15 values", w.pull, keys, width=4)
            refused(ValueError, "1 values", w.pull, keys, out=np.zeros((), np.float32))
            refused(ValueError, "read-only", w.pull, keys, out=np.broadcast_to(np.float32(0), 3))
            refused(ValueError, "device meta", w.pull, keys, out=torch.zeros(3, device="meta"))
            refused(ValueError, "float64", w.push, keys, np.ones(3))
            refused(ValueError, "this process is a worker", node.serve, 3, "float32")
            for f in node.serve, node.worker:
                for wrong in "float", "bool":
                    refused(ValueError, f"element type '{wrong}', want one of uint8,", f, 3, wrong)
            refused(ValueError, "want 0 to 2147483647", node.worker(-1, "int64").pull, [7])
        node.barrier()
        late, pushing = node.worker(4, "float32"), threading.Event()
        other = threading.Thread(target=lambda: (pushing.wait(), node.barrier(ps.SERVERS | ps.WORKERS)))
        other.start()
        requests = [late.push([1], np.ones(1, np.float32))]
        if slow:
            def interrupt(*_):
                raise TimeoutError
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                while True:  # until there is no room
                    requests.append(late.push([1], np.ones(1, np.float32)))
            except TimeoutError:
                pass
        pushing.set()
        # At worker 1, this push waits for the answers to the others, and so until the other thread has run.
        requests.append(late.push([1], np.ones(1, np.float32)))
        other.join()
        for r in requests:
            r.wait()
        node.clock()
        if node.rank == 0:
            for _ in range(20):
                w.push([1], np.ones(1, np.float32))  # is dropped, and fails at the server
            refused(HorovodInternalError, "here, got 2", w.push, [1], np.ones(2, np.float32))
        print("worker", node.rank, "is done", flush=True)
`

// TestParameterServer checks gohvd.ps, and that the example gets within 1% of the optimum. In
// bulk-synchronous mode the result does not depend on how fast the workers are.
func TestParameterServer(t *testing.T) {
	t.Parallel()
	testnet.NeedTorch(t)
	out, err := nodes(t, "-c", pythonNodes).CombinedOutput()
	const dropped = ":gohvd: 20 pushes failed and the program did not wait for them: ps: push of 1 keys: server "
	if err != nil || strings.Count(string(out), "is done") != 2 || strings.Count(string(out), dropped) != 1 ||
		!strings.Contains(string(out), "key 1 has 5 values here, got 1\n") {
		t.Errorf("%v\n%s", err, out)
	}
	cmd := nodes(t, "../../examples/sparse_logreg.py", "--batches", "5", "--epochs", "40")
	cmd.Env = append(cmd.Env, "HVD_STALENESS=0")
	out, err = cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "sparse_logreg: excess_percent=0.") {
		t.Errorf("%v\n%s", err, out)
	}
}

// pythonDeadNode is a program whose worker 1 kills itself while worker 0 waits for it.
const pythonDeadNode = `
import os, signal
from gohvd import ps

with ps.start() as node:
    if node.role == "worker":
        if node.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            node.barrier()
        except Exception as e:
            print("error", e, flush=True)
            raise
`

// TestParameterServerKilled checks that the other worker learns which worker was killed.
func TestParameterServerKilled(t *testing.T) {
	t.Parallel()
	testnet.NeedTorch(t)
	out, err := nodes(t, "-c", pythonDeadNode).CombinedOutput()
	for _, want := range []string{"worker 1 is gone: its connection has ended", "worker 1: killed by SIGKILL"} {
		if err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%v, want %q in\n%s", err, want, out)
		}
	}
}

// pythonInterruptedNode is a program whose worker 0 is interrupted while it waits for the servers, and starts
// again. The servers begin when the file of the argument exists.
const pythonInterruptedNode = `
import os, sys, time
from unittest import mock
from gohvd import _library, ps

if os.environ["DMLC_ROLE"] == "server":
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
if os.environ["DMLC_ROLE"] == "worker" and os.environ["DMLC_RANK"] == "0":
    wait = _library.waiting.hvd_wait
    def interrupted(*args):
        if wait(*args) == _library.PENDING:
            raise KeyboardInterrupt
        raise AssertionError("the node has started without the servers")
    try:
        with mock.patch.object(_library.waiting, "hvd_wait", interrupted):
            ps.start()
    except KeyboardInterrupt:
        open(sys.argv[1], "w").close()
with ps.start() as node:
    try:
        ps.start()
    except ValueError as e:
        assert "is a node already" in str(e), e
        print("node is started", flush=True)
`

// TestParameterServerInterrupted checks that a start that Ctrl-C has interrupted can be repeated, and that
// the start of a node that is in use fails.
func TestParameterServerInterrupted(t *testing.T) {
	t.Parallel()
	testnet.NeedTorch(t)
	out, err := nodes(t, "-c", pythonInterruptedNode, filepath.Join(t.TempDir(), "begin")).CombinedOutput()
	if err != nil || strings.Count(string(out), "node is started") < 4 {
		t.Errorf("%v\n%s", err, out)
	}
}

// pythonFailedNode is a program whose worker 1 fails as the argument says. It ends only when worker 0 has
// learned of it, which the file of the second argument says, or after a minute.
const pythonFailedNode = `
import atexit, os, sys, time
from gohvd import ps
from gohvd.exceptions import HorovodInternalError

how, told = sys.argv[1:]

def wait():
    deadline = time.monotonic() + 60
    while not os.path.exists(told):
        if time.monotonic() > deadline:
            print("worker 0 was not told", flush=True)
            return
        time.sleep(0.01)

def fail(node):
    if how == "exit":
        sys.exit(3)
    if how == "end":
        return
    raise ValueError("no data")

if os.environ["DMLC_ROLE"] == "worker" and os.environ["DMLC_RANK"] == "1":
    atexit.register(wait)  # runs after that of gohvd
    if how != "with":
        fail(ps.start())
    else:
        try:
            with ps.start() as node:
                fail(node)
        except ValueError:
            wait()
            raise
else:
    try:
        with ps.start() as node:
            if node.role == "worker":
                node.barrier()
    except HorovodInternalError as e:
        if node.role == "worker":
            print("told:", e, flush=True)
            open(told, "w").close()
        raise
`

// TestParameterServerFailed checks that the other nodes learn that the program of a node has failed, and why,
// before its process ends.
func TestParameterServerFailed(t *testing.T) {
	t.Parallel()
	testnet.NeedTorch(t)
	for how, reason := range map[string]string{
		"with": "its program raised ValueError: no data", "raise": "its program raised ValueError: no data",
		"exit": "its program has ended without finalize", "end": "its program has ended without finalize",
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			told := filepath.Join(t.TempDir(), "told")
			out, err := nodes(t, "-c", pythonFailedNode, how, told).CombinedOutput()
			for _, want := range []string{
				"told: ps: barrier of group 4: worker 1 is gone: " + reason, "nodes): worker 1 is gone: " + reason,
			} {
				if err == nil || !strings.Contains(string(out), want) || strings.Contains(string(out), "was not told") {
					t.Errorf("%v, want %q in\n%s", err, want, out)
				}
			}
		})
	}
}
