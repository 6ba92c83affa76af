package e2e

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/store"
)

// sidecarPatience is how long anything of a test over sidecars may take.
const sidecarPatience = 2 * time.Minute

// pathSidecar is a sidecar that listens at a path.
type pathSidecar struct {
	cmd    *exec.Cmd
	path   string
	ended  chan struct{}
	status int
}

// listeningSidecars starts n sidecars that are to be the ranks of a job, with env in their environment. Their clients know their
// paths alone.
func listeningSidecars(t *testing.T, n int, env ...string) []*pathSidecar {
	t.Helper()
	kv := store.NewHashStore(store.Limits{})
	server, err := store.Serve("127.0.0.1:0", kv, store.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close(); kv.Close() })
	host, port, err := net.SplitHostPort(server.Addr())
	if err != nil {
		t.Fatal(err)
	}
	binary, dir := hvdd(t), t.TempDir()
	all := make([]*pathSidecar, n)
	for r := range all {
		s := &pathSidecar{path: filepath.Join(dir, fmt.Sprint(r)), ended: make(chan struct{})}
		s.cmd = exec.Command(binary, "--socket", s.path)
		s.cmd.Env = slices.Concat(os.Environ(), []string{
			fmt.Sprint("HOROVOD_RANK=", r), fmt.Sprint("HOROVOD_SIZE=", n),
			"HOROVOD_GLOO_RENDEZVOUS_ADDR=" + host, "HOROVOD_GLOO_RENDEZVOUS_PORT=" + port,
		}, env)
		s.cmd.Stderr = os.Stderr
		if err := s.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		go func() {
			_ = s.cmd.Wait() // the status says it
			s.status = s.cmd.ProcessState.ExitCode()
			close(s.ended)
		}()
		t.Cleanup(func() {
			_ = s.cmd.Process.Kill() // it may have ended
			<-s.ended
		})
		all[r] = s
	}
	return all
}

// clientOf is a command that runs over s.
func clientOf(ctx context.Context, s *pathSidecar, command string, env ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, command)
	cmd.Env = slices.Concat(os.Environ(), []string{"HVD_SIDECAR=unix://" + s.path}, env)
	return cmd
}

// outputs runs a command over each sidecar, and gives what they print if they succeed.
func outputs(t *testing.T, all []*pathSidecar, command string, env ...string) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), sidecarPatience)
	defer cancel()
	texts := make([]string, len(all))
	var wg sync.WaitGroup
	for r, s := range all {
		wg.Go(func() {
			out, err := clientOf(ctx, s, command, env...).CombinedOutput()
			if texts[r] = string(out); err != nil {
				t.Errorf("rank %d: %v\n%s", r, err, out)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return texts
}

// The example gives over sidecars what it gives in process, bit by bit, though its ranks know nothing but a path each. The sidecars
// are good for more than one job.
func TestDigitsOverSidecars(t *testing.T) {
	digits := buildDigits(t)
	result := regexp.MustCompile(`(?m)digits: ranks=(\d+) epochs=\d+ (test_accuracy=[0-9.]+) seconds=[0-9.]+ (weights_sha256=[0-9a-f]{64})$`)
	results := func(text string, size int) []string {
		var found []string
		for _, m := range result.FindAllStringSubmatch(text, -1) {
			if m[1] != fmt.Sprint(size) {
				t.Errorf("got a result of %s ranks, want %d:\n%s", m[1], size, text)
			}
			found = append(found, m[2]+" "+m[3])
		}
		return found
	}
	for _, n := range []int{2, 4} {
		t.Run(fmt.Sprint("ranks=", n), func(t *testing.T) {
			cmd := exec.Command(hvdrunPath, "-np", fmt.Sprint(n), digits)
			cmd.Env = append(os.Environ(), "HVD_DETERMINISTIC=1")
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("in process: %v\n%s", err, out)
			}
			want := results(string(out), n)
			if len(want) != n {
				t.Fatalf("in process: got %d results, want %d:\n%s", len(want), n, out)
			}
			all := listeningSidecars(t, n, "HVD_DETERMINISTIC=1")
			for job := range 2 {
				for r, text := range outputs(t, all, digits) {
					if got := results(text, n); len(got) != 1 || got[0] != want[0] {
						t.Errorf("job %d: rank %d over its sidecar: got %q, want %q; output:\n%s", job, r, got, want[0], text)
					}
				}
			}
		})
	}
}

// Every operation gives what it should over sidecars, with many in flight.
func TestCheckedOverSidecars(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{2, 4} {
		for r, text := range outputs(t, listeningSidecars(t, n), self, programVariable+"=checked", secondsVariable+"=1") {
			if !strings.Contains(text, fmt.Sprintf("place %d %d", r, n)) || !strings.Contains(text, "rounds ") {
				t.Errorf("rank %d of %d: got\n%s", r, n, text)
			}
		}
	}
}

// running is a program over a sidecar that goes on until it is disturbed.
type running struct {
	cmd   *exec.Cmd
	lines chan string
}

// runOver starts a program of this binary over each sidecar, and waits until all are ready.
func runOver(t *testing.T, all []*pathSidecar, program string) []*running {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), sidecarPatience)
	t.Cleanup(cancel)
	programs := make([]*running, len(all))
	for r, s := range all {
		p := &running{cmd: clientOf(ctx, s, self, programVariable+"="+program), lines: make(chan string, 100)}
		p.cmd.Stderr = os.Stderr
		out, err := p.cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := p.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var reading sync.WaitGroup
		reading.Go(func() {
			defer close(p.lines)
			for s := bufio.NewScanner(out); s.Scan(); {
				p.lines <- s.Text()
			}
		})
		t.Cleanup(func() {
			_ = p.cmd.Process.Kill() // it may have ended
			reading.Wait()
			_ = p.cmd.Wait() // of no interest by now
		})
		programs[r] = p
	}
	for r, p := range programs {
		if text := p.until("ready"); text != "ready" {
			t.Fatalf("rank %d ended before it was ready: %q", r, text)
		}
	}
	return programs
}

// until gives the first line that begins so, or nothing if the program ends before.
func (p *running) until(prefix string) string {
	for text := range p.lines {
		if strings.HasPrefix(text, prefix) {
			return text
		}
	}
	return ""
}

// Tensors of hvd.Alloc are not copied: the program has no shared memory but its own arena, which the sidecar maps. Others are, into
// a second one.
func TestArenaOverSidecarsIsNotCopied(t *testing.T) {
	arenas := func(pid int) (mappings []string) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
		if err != nil {
			t.Fatal(err)
		}
		inodes := make(map[string]bool)
		for line := range strings.Lines(string(text)) {
			if f := strings.Fields(line); strings.Contains(line, "memfd:gohvd-arena") && strings.HasPrefix(f[1], "rw") && !inodes[f[4]] {
				inodes[f[4]] = true
				mappings = append(mappings, f[4])
			}
		}
		return mappings
	}
	all := listeningSidecars(t, 2)
	for r, p := range runOver(t, all, "arena") {
		mine, theirs := arenas(p.cmd.Process.Pid), arenas(all[r].cmd.Process.Pid)
		if len(mine) != 1 || !slices.Contains(theirs, mine[0]) {
			t.Errorf("rank %d has the arenas %v that it can write, and its sidecar %v, want one that both have", r, mine, theirs)
		}
	}
}

// The end of a sidecar is an error at its client and, as the death of a rank, at the others, at once; nobody hangs.
func TestSidecarKilled(t *testing.T) {
	for _, program := range []string{"large", "arena"} {
		t.Run(program, func(t *testing.T) {
			all := listeningSidecars(t, 2)
			programs := runOver(t, all, program)
			if err := all[1].cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			killed := time.Now()
			for r, want := range []string{"rank 1", "rank 1 failed: the sidecar at " + all[1].path + " is gone"} {
				text := programs[r].until("error")
				if !strings.Contains(text, want) {
					t.Errorf("rank %d: got %q, want an error with %q", r, text, want)
				}
				if took := time.Since(killed); took > survivorsDeadline {
					t.Errorf("rank %d heard of it after %v", r, took)
				}
			}
		})
	}
}

// A program that ends without Shutdown is the death of its rank.
func TestClientKilled(t *testing.T) {
	all := listeningSidecars(t, 2)
	programs := runOver(t, all, "large")
	if err := programs[1].cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if text := programs[0].until("error"); !strings.Contains(text, "rank 1") {
		t.Errorf("rank 0: got %q, want an error of rank 1", text)
	}
	select {
	case <-all[1].ended:
		if all[1].status != 1 {
			t.Errorf("the sidecar of the client that was killed: status %d, want 1", all[1].status)
		}
	case <-time.After(sidecarPatience):
		t.Error("the sidecar of the client that was killed goes on")
	}
}
