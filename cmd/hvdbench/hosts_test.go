package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// Three ranks on two hosts measure operations on two levels and on one, with negotiation and without. All
// results are right, and the rows say how the operations have run.
func TestSeveralHosts(t *testing.T) {
	workload := filepath.Join(t.TempDir(), "tensors")
	testnet.WriteFile(t, workload, "a 100\nb 1000\nc 100000\n")
	sizes := []string{"-b", "3000", "-e", "300000", "-f", "100"}
	for _, c := range []struct {
		name string
		env  []string
		args []string
		// small and large say how operations on less than 100 KB and on more have run.
		small, large string
	}{
		{"two levels", nil, append(sizes, "allreduce"), "hier two-level", "hier two-level"},
		{"one level", []string{"HOROVOD_HIERARCHICAL_ALLREDUCE=0"}, append(sizes, "allreduce"),
			"tcp recursive-doubling", "tcp halving-doubling"},
		{"alltoall", nil, append(sizes, "alltoall"), "tcp direct", "tcp direct"},
		{"step", nil, []string{"--workload", workload}, "", "hier two-level"},
	} {
		for _, raw := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/raw=%v", c.name, raw), func(t *testing.T) {
				out := runOn(t, testnet.NewHosts(t, 2), []int{0, 0, 1}, c.env,
					append(c.args, fmt.Sprintf("--raw=%v", raw), "--format", "csv", "-n", "2", "-w", "1"))
				rows := table(t, out)
				if len(rows) == 0 {
					t.Fatalf("rank 0 printed no rows:\n%s", out)
				}
				for _, row := range rows {
					want := c.small
					if bytes, _ := strconv.Atoi(row["bytes"]); bytes >= 100e3 {
						want = c.large
					}
					if row["wrong"] != "0" || row["ran"] != want {
						t.Errorf("got row %v, want no wrong elements and ran %q", row, want)
					}
				}
			})
		}
	}
}

// runOn runs hvdbench with one rank on each of the hosts at the positions places, and returns what rank
// 0 prints. It fails the test if a rank fails.
func runOn(t *testing.T, hosts []*testnet.Host, places []int, env, args []string) string {
	t.Helper()
	self := testnet.Self(t)
	secret := filepath.Join(t.TempDir(), "secret")
	testnet.WriteFile(t, secret, strings.Repeat("5e", 32))
	ctx := testnet.Context(t)
	var cmds []*exec.Cmd
	outs, errs := make([]bytes.Buffer, len(places)), make([]bytes.Buffer, len(places))
	for r, host := range places {
		cmd := hosts[host].Command(ctx, self, append([]string{"hvdbench"}, args...)...)
		cmd.Stdout, cmd.Stderr = &outs[r], &errs[r]
		cmd.Env = append(append(os.Environ(), env...), "RANK="+strconv.Itoa(r),
			"WORLD_SIZE="+strconv.Itoa(len(places)), "MASTER_ADDR="+hosts[0].Addr.String(),
			"MASTER_PORT=29500", "HVD_SECRET_FILE="+secret)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		cmds = append(cmds, cmd)
	}
	for r, cmd := range cmds {
		if err := cmd.Wait(); err != nil {
			t.Errorf("rank %d: %v\n%s%s", r, err, outs[r].String(), errs[r].String())
		}
	}
	return outs[0].String()
}
