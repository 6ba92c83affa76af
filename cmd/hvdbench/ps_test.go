package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// TestParameterServer runs a scheduler, a server and two workers as processes. The table has a line for each
// case and operation.
func TestParameterServer(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*deadline)
	defer cancel()
	port := testnet.FreePort(t)
	var out [4]bytes.Buffer
	var cmds []*exec.Cmd
	for i, role := range []string{"scheduler", "server", "worker", "worker"} {
		cmd := exec.CommandContext(ctx, os.Args[0], "hvdbench", "--ps", "--seconds", "0.001")
		cmd.Env = append(os.Environ(), "DMLC_ROLE="+role, "DMLC_NUM_SERVER=1", "DMLC_NUM_WORKER=2",
			"DMLC_PS_ROOT_URI=127.0.0.1", fmt.Sprint("DMLC_PS_ROOT_PORT=", port),
			"PS_HEARTBEAT_TIMEOUT=60")
		cmd.Stdout, cmd.Stderr = &out[i], &out[i]
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		cmds = append(cmds, cmd)
	}
	text := ""
	for i, cmd := range cmds {
		if err := cmd.Wait(); err != nil {
			t.Errorf("process %d: %v\n%s", i, err, &out[i])
		}
		text += out[i].String()
	}
	lines := strings.Split(strings.TrimSpace(text), "\n")
	if want := 1 + 4*len(psShapes); len(lines) != want || lines[0] != psHead ||
		!strings.HasPrefix(lines[1], "gohvd,push,2,1,1,4,") {
		t.Errorf("got %d lines, want %d:\n%s", len(lines), want, text)
	}
	for _, line := range lines {
		if n := strings.Count(line, ","); n != strings.Count(psHead, ",") {
			t.Errorf("%q has %d commas", line, n)
		}
	}
}

func TestTimesOfAnEvenNumber(t *testing.T) {
	if got := psTimes([]float64{8, 1, 2, 3}); got != "4,2.50,1.00" {
		t.Errorf("got %s, want 4 times, the median 2.5 and the minimum 1", got)
	}
}

// Neither two workers nor two cases have a key in common, also in the largest job that hvdrun starts.
func TestKeysOfWorkers(t *testing.T) {
	const workers, keys = 4096, 3
	owners := make(map[uint64][2]int)
	for rank := range workers {
		for index := range psShapes {
			for _, key := range psKeys(rank, index, keys) {
				if other, used := owners[key]; used {
					t.Fatalf("worker %d has in case %d the key %d, which worker %d has in case %d", rank, index, key,
						other[0], other[1])
				}
				owners[key] = [2]int{rank, index}
			}
		}
	}
}

func TestParameterServerUsage(t *testing.T) {
	for want, args := range map[string][]string{
		"--ps measures no collective":   {"--ps", "allreduce"},
		"--iters has no effect with":    {"--ps", "--iters", "3"},
		"DMLC_ROLE is not set: set the": {"--ps"},
	} {
		var stderr bytes.Buffer
		if run(args, &stderr, &stderr) == 0 || !strings.Contains(stderr.String(), want) {
			t.Errorf("hvdbench %v printed %q, want %q", args, stderr.String(), want)
		}
	}
}
