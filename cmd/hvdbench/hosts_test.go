package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// Three ranks on two hosts measure backends without negotiation, on two levels and on one. All results are
// right.
func TestRawOnSeveralHosts(t *testing.T) {
	workload := filepath.Join(t.TempDir(), "tensors")
	if err := os.WriteFile(workload, []byte("a 100\nb 1000\nc 100000\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	sizes := []string{"-b", "3000", "-e", "300000", "-f", "100"}
	for _, c := range []struct {
		name string
		env  []string
		args []string
	}{
		{"two levels", nil, append(sizes, "allreduce")},
		{"one level", []string{"HOROVOD_HIERARCHICAL_ALLREDUCE=0"}, append(sizes, "allreduce")},
		{"alltoall", nil, append(sizes, "alltoall")},
		{"step", nil, []string{"--workload", workload}},
	} {
		t.Run(c.name, func(t *testing.T) {
			out := rawOn(t, testnet.NewHosts(t, 2), []int{0, 0, 1}, c.env,
				append(c.args, "--raw", "--format", "csv", "-n", "2", "-w", "1"))
			rows := table(t, out)
			if len(rows) == 0 {
				t.Fatalf("rank 0 printed no rows:\n%s", out)
			}
			for _, row := range rows {
				if row["wrong"] != "0" {
					t.Errorf("got row %v, want no wrong elements", row)
				}
			}
		})
	}
}

// rawOn runs hvdbench with one rank on each of the hosts at the positions places, and returns what rank
// 0 prints. It fails the test if a rank fails.
func rawOn(t *testing.T, hosts []*testnet.Host, places []int, env, args []string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte(strings.Repeat("5e", 32)), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
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
