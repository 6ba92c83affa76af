package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// torchScript is a program that uses torch.distributed and not gohvd, written as users of torch.distributed
// do.
const torchScript = `
import os, sys
import torch
import torch.distributed as dist

if sys.argv[1] == "tcp":
    url = "tcp://%s:%s" % (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    dist.init_process_group("gloo", init_method=url, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
else:
    dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert int(os.environ["LOCAL_RANK"]) == rank
x = torch.arange(1000.0) * (rank + 1)
dist.all_reduce(x)
assert torch.equal(x, torch.arange(1000.0) * (size * (size + 1) // 2)), x
group = dist.new_group([0, size - 1])
if rank in (0, size - 1):
    y = torch.tensor([float(rank)])
    dist.all_reduce(y, group=group)
    assert y.item() == size - 1, y
dist.barrier()
print("rank", rank, "of", size, "is right")
dist.destroy_process_group()
`

// hvdrun starts a script that uses torch.distributed and not gohvd. The script finds its store with both init
// methods.
func TestTorchScript(t *testing.T) {
	testnet.NeedTorch(t)
	script := filepath.Join(t.TempDir(), "script.py")
	testnet.WriteFile(t, script, torchScript)
	for method, n := range map[string]int{"env": 3, "tcp": 2} {
		t.Run(method, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
			defer cancel()
			cmd := exec.CommandContext(ctx, hvdrunPath, "-np", fmt.Sprint(n), testnet.Python, script, method)
			cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
			cmd.WaitDelay = 20 * time.Second
			cmd.Env = append(os.Environ(), "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo",
				"MASTER_ADDR=not.here", "RANK=9")
			out, err := cmd.CombinedOutput()
			if err != nil || strings.Count(string(out), "is right") != n {
				t.Fatalf("%v\n%s", err, out)
			}
		})
	}
}
