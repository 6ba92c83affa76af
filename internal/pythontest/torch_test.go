package pythontest

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// besideTorch is a program that initializes gohvd (h) and PyTorch's process group (t). Its argument gives the
// order. The program uses both, leaves gohvd's job and joins it again.
const besideTorch = `
import sys, time
import torch, torch.distributed as dist
import gohvd.torch as hvd

def torch_init():
    dist.init_process_group("gloo")

def hvd_init():
    begin = time.monotonic()
    hvd.init()
    times.append("%.2f s" % (time.monotonic() - begin))

times = []
order = sys.argv[1]
for which in order:
    {"h": hvd_init, "t": torch_init}[which]()
ones = lambda: torch.ones(4)
got = ["rank", hvd.rank(), "of", hvd.size(), "sum", hvd.allreduce(ones(), op=hvd.Sum, name="x").sum().item()]
if "t" in order:
    x = ones()
    dist.all_reduce(x)
    got += ["torch", x.sum().item()]
hvd.shutdown()
hvd_init()
got += ["again", hvd.allreduce(ones(), op=hvd.Sum, name="x").sum().item()]
hvd.shutdown()
if "t" in order:
    dist.destroy_process_group()
# One write, so that the ranks' lines stay whole.
sys.stdout.write("%s\ninit took %s\n" % (" ".join(map(str, got)), times))
`

// Ranks are started by torchrun, or by hand with PyTorch's four variables. They form one job of gohvd, even
// if they also use PyTorch's process group at the same port. The two can be initialized in either order.
func TestBesideTorch(t *testing.T) {
	t.Parallel()
	testnet.NeedTorch(t)
	script := filepath.Join(t.TempDir(), "script.py")
	testnet.WriteFile(t, script, besideTorch)
	for _, test := range []struct {
		launcher, order string
		run             func(*testing.T, func(...string) *exec.Cmd) string
	}{
		{"torchrun", "ht", torchrun}, {"by hand", "th", byHand}, {"by hand", "ht", byHand},
	} {
		t.Run(test.launcher+" "+test.order, func(t *testing.T) {
			t.Parallel()
			out := test.run(t, func(args ...string) *exec.Cmd {
				cmd := torchCommand(t, append(args, script, test.order)...)
				cmd.Env = append(cmd.Env, "GLOO_SOCKET_IFNAME=lo")
				return cmd
			})
			t.Log(out)
			for r := range 2 {
				want := "rank " + strconv.Itoa(r) + " of 2 sum 8.0 "
				if strings.Contains(test.order, "t") {
					want += "torch 8.0 "
				}
				if !strings.Contains(out, want+"again 8.0\n") {
					t.Errorf("no rank says %q:\n%s", want+"again 8.0", out)
				}
			}
		})
	}
}

// torchrun starts two ranks with torchrun and returns their output. This also works with older versions of
// torchrun, whose agent serves no store.
func torchrun(t *testing.T, command func(...string) *exec.Cmd) string {
	// The flag --redirects is set because its default in PyTorch 1.13 fails with current versions of Python.
	// Its value redirects no output, because there is no rank 9.
	args := append([]string{testnet.Python, "-m", "torch.distributed.run"}, testnet.Standalone(t)...)
	cmd := command(append(args, "--nproc_per_node=2", "--redirects=9:1", "--tee=9:1")...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s%s", err, &stdout, &stderr)
	}
	return stdout.String()
}

// byHand starts two ranks with PyTorch's four variables and no others, and returns their output.
func byHand(t *testing.T, command func(...string) *exec.Cmd) string {
	port := strconv.Itoa(testnet.FreePort(t))
	var outs [2][]byte
	var errs [2]error
	var wg sync.WaitGroup
	for r := range outs {
		cmd := command(withTorch(t, testnet.Python)...)
		cmd.Env = append(cmd.Env, "RANK="+strconv.Itoa(r), "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1",
			"MASTER_PORT="+port)
		wg.Go(func() { outs[r], errs[r] = cmd.CombinedOutput() })
	}
	wg.Wait()
	for r, err := range errs {
		if err != nil {
			t.Errorf("rank %d: %v\n%s", r, err, outs[r])
		}
	}
	return string(outs[0]) + string(outs[1])
}
