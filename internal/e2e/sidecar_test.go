package e2e

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/sidecar/sidecartest"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/store"
)

// buildSidecar builds hvdd in the directory of hvdrun.
var buildSidecar = sync.OnceValues(func() (path string, err error) {
	path = filepath.Join(filepath.Dir(hvdrunPath), "hvdd")
	if out, err := exec.Command("go", "build", "-o", path,
		"github.com/gohvd/gohvd/cmd/hvdd").CombinedOutput(); err != nil {
		return "", fmt.Errorf("building hvdd: %w\n%s", err, out)
	}
	return path, nil
})

func hvdd(t testing.TB) string {
	t.Helper()
	path, err := buildSidecar()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// ownSidecar starts a sidecar for one client, and returns the process and the client.
func ownSidecar(t sidecartest.TB, path string, env ...string) (*exec.Cmd, *sidecartest.Client) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[0]), "sidecar")
	cmd := exec.Command(path, "--fd", "3")
	cmd.Env = append(os.Environ(), env...)
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := theirs.Close(); err != nil {
		t.Fatal(err)
	}
	c := sidecartest.New(t, pair[1])
	c.Hello()
	return cmd, c
}

// sidecarJob starts n sidecars, which are the ranks of one job. It returns their clients.
func sidecarJob(b testing.TB, n int, env ...string) []*sidecartest.Client {
	b.Helper()
	server, err := store.Serve("127.0.0.1:0", store.NewHashStore(store.Limits{}), store.Config{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { server.Close() })
	host, port, err := net.SplitHostPort(server.Addr())
	if err != nil {
		b.Fatal(err)
	}
	path := hvdd(b)
	clients := make([]*sidecartest.Client, n)
	for r := range clients {
		cmd, c := ownSidecar(b, path, append([]string{
			fmt.Sprint("HOROVOD_RANK=", r), fmt.Sprint("HOROVOD_SIZE=", n),
			"HOROVOD_GLOO_RENDEZVOUS_ADDR=" + host, "HOROVOD_GLOO_RENDEZVOUS_PORT=" + port, "HVD_INSECURE=1",
		}, env...)...)
		b.Cleanup(func() {
			c.Close()
			if err := cmd.Wait(); err != nil {
				b.Errorf("hvdd of rank %d: %v", r, err)
			}
		})
		clients[r] = c
	}
	var wg sync.WaitGroup
	for _, c := range clients {
		wg.Go(func() { c.Init() })
	}
	wg.Wait()
	return clients
}

// sidecarRank is the program of a rank that uses a sidecar, like a program in another language. It prints its
// own process ID and that of the sidecar, and returns the exit status.
func sidecarRank(name string) int {
	r := new(reporter)
	defer r.end()
	cmd, c := ownSidecar(r, os.Getenv(hvddVariable))
	fmt.Println("pid", os.Getpid())
	fmt.Println("sidecar", cmd.Process.Pid)
	ready := c.Init()
	x := tensor.View[float32](c.Arena(1, 4<<20))
	c.Ring(16)
	c.Send(sidecartest.Prepare(0, sidecartest.Sum("x", 1, 0, int64(len(x)))))
	if name == "sidecar-fork" { // the child holds the client's socket even after the client was killed
		child := exec.Command("sleep", "60")
		child.ExtraFiles = []*os.File{os.NewFile(uintptr(c.FD), "socket")}
		if err := child.Start(); err != nil {
			r.Fatal(err)
		}
		fmt.Println("child", child.Process.Pid)
	}
	sum := func() error {
		for i := range x {
			x[i] = float32(ready.Rank)
		}
		id := c.Push(0)
		if err := c.TryWrite([]byte{0}); err != nil {
			return err
		}
		if got, status, err := c.TryPop(); err != nil {
			return err
		} else if got != id || status != 0 {
			a, err := c.TryReply(id)
			return fmt.Errorf("status %d: class %d: %s, %w", status, a.GetError().GetClass(),
				a.GetError().GetText(), err)
		}
		if want := float32(ready.Size * (ready.Size - 1) / 2); x[0] != want || x[len(x)-1] != want {
			return fmt.Errorf("sum %v and %v, want %v", x[0], x[len(x)-1], want)
		}
		return nil
	}
	if name == "sidecar-sums" {
		for range 100 {
			if err := sum(); err != nil {
				r.Fatal(err)
			}
		}
		// The memory maps show whether the sidecars of the other ranks read this rank's tensors in place.
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", cmd.Process.Pid))
		if err != nil {
			r.Fatal(err)
		}
		mapped := len(regexp.MustCompile(`(?m) r--s .*/memfd:client`).FindAll(maps, -1))
		// After this allreduce all ranks have read the maps. Only then may the first rank shut down, which
		// ends the job.
		if err := sum(); err != nil {
			r.Fatal(err)
		}
		fmt.Println("mapped", mapped)
		c.Shutdown()
		c.Bye()
		if err := cmd.Wait(); err != nil {
			r.Fatal(err)
		}
		fmt.Println("done")
		return r.status
	}
	if err := sum(); err != nil {
		r.Fatal(err)
	}
	fmt.Println("ready")
	for {
		if err := sum(); err != nil {
			fmt.Println("error", err)
			c.Close() // the sidecar ends because its client has closed the connection
			cmd.Wait()
			fmt.Println("ended", cmd.ProcessState.ExitCode())
			return 1
		}
	}
}

// reporter implements sidecartest.TB for a program that is not a test.
type reporter struct {
	cleanups []func()
	status   int
}

func (*reporter) Helper()                             {}
func (r *reporter) Cleanup(f func())                  { r.cleanups = append(r.cleanups, f) }
func (r *reporter) Fatalf(format string, args ...any) { r.Fatal(fmt.Sprintf(format, args...)) }
func (r *reporter) Fatal(args ...any) {
	fmt.Println(append([]any{"fatal:"}, args...)...)
	os.Exit(1)
}
func (r *reporter) end() {
	for _, f := range r.cleanups {
		f()
	}
}

// hvddVariable names the variable with the path of hvdd.
const hvddVariable = "GOHVD_E2E_HVDD"

// Each rank has a sidecar. The ranks get correct sums, and the sidecars read each other's arenas.
func TestSidecars(t *testing.T) {
	const n = 3
	j := start(t, n, "sidecar-sums", hvddVariable+"="+hvdd(t))
	if status := j.wait(); status != 0 || strings.Count(j.out(), ">:done") != n ||
		strings.Count(j.out(), fmt.Sprint(">:mapped ", n-1)) != n {
		t.Errorf("status %d:\n%s\n%s", status, j.out(), j.err())
	}
}

// The sidecar of a rank or the client of the sidecar is killed, in one case while another process holds the
// client's socket. The operations of the other ranks end with an error that names this rank. No process of
// the job is left.
func TestSidecarDeaths(t *testing.T) {
	path := hvdd(t)
	for _, c := range []struct{ name, program, victim string }{
		{"sidecar", "sidecar-loop", "sidecar"}, {"client", "sidecar-loop", "pid"},
		{"client with a fork", "sidecar-fork", "pid"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			const n, dies = 3, 1
			j := start(t, n, c.program, hvddVariable+"="+path)
			pids := map[string][]int{"pid": make([]int, n), "sidecar": make([]int, n),
				"child": make([]int, n)}
			ready := 0
			j.until("all ranks were ready", func(l line) bool {
				if what, pid, ok := strings.Cut(l.text, " "); ok && pids[what] != nil {
					pids[what][l.rank], _ = strconv.Atoi(pid)
				}
				if l.text == "ready" {
					ready++
				}
				return ready == n
			})
			if err := syscall.Kill(pids[c.victim][dies], syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			killed := time.Now()
			failed := 0
			j.until("the others failed", func(l line) bool {
				if l.rank != dies && strings.HasPrefix(l.text, "error ") {
					failed++
					if d := l.at.Sub(killed); d > survivorsDeadline {
						t.Errorf("rank %d failed after %v, want %v", l.rank, d, survivorsDeadline)
					}
					if !strings.Contains(l.text, "class 4") || !strings.Contains(l.text, "rank 1") {
						t.Errorf("rank %d: %s", l.rank, l.text)
					}
				}
				return failed == n-1
			})
			j.wait()
			for _, pid := range append(pids["sidecar"], pids["child"]...) {
				if pid == 0 {
					continue
				}
				if err := syscall.Kill(pid, 0); err == nil {
					if state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil &&
						!strings.Contains(string(state), ") Z ") {
						t.Errorf("process %d is left: %s", pid, state)
					}
				}
			}
			if t.Failed() {
				t.Logf("output:\n%s\n%s", j.out(), j.err())
			}
		})
	}
}

// BenchmarkSidecarAllreduce measures the latency of an allreduce between two ranks, one allreduce at a time.
// Each rank has a sidecar and submits its requests through a ring in shared memory. A training program waits
// for this time if it needs the result before it can go on.
func BenchmarkSidecarAllreduce(b *testing.B) {
	for _, bytes := range []int64{4, 64 << 10, 64 << 20} {
		b.Run(strconv.FormatInt(bytes, 10), func(b *testing.B) {
			clients := sidecarJob(b, 2)
			size := max(bytes, int64(os.Getpagesize()))
			for r, c := range clients {
				c.Arena(uint32(r+1), size)
				c.Ring(64)
				c.Send(sidecartest.Prepare(0, sidecartest.Sum("x", uint32(r+1), 0, bytes/4)))
			}
			b.SetBytes(bytes)
			took := make([]time.Duration, b.N)
			b.ResetTimer()
			var wg sync.WaitGroup
			for r, c := range clients {
				wg.Go(func() {
					runtime.LockOSThread()
					for i := range b.N {
						from := time.Now()
						c.Push(0)
						c.Doorbell()
						if _, status := c.Pop(); status != 0 {
							b.Errorf("status %d", status)
							return
						}
						if r == 0 {
							took[i] = time.Since(from)
						}
					}
				})
			}
			wg.Wait()
			b.StopTimer()
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-us")
			b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-us")
			wg = sync.WaitGroup{}
			for _, c := range clients {
				wg.Go(func() { c.Shutdown(); c.Bye() })
			}
			wg.Wait()
		})
	}
}

// An executable hvdd is in hvdrun's own directory. hvdrun tells its ranks the path of this hvdd, unless the
// user has set another path.
func TestSidecarBesideHvdrun(t *testing.T) {
	dir := t.TempDir()
	hvdrun, hvdd := filepath.Join(dir, "hvdrun"), filepath.Join(dir, "hvdd")
	if err := os.Link(hvdrunPath, hvdrun); err != nil {
		t.Fatal(err)
	}
	told := func(env ...string) string {
		t.Helper()
		cmd := exec.Command(hvdrun, "-np", "1", "--tag-output=false", "sh", "-c",
			`echo "$HVD_SIDECAR_BINARY"`)
		cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool {
			return strings.HasPrefix(v, "HVD_SIDECAR_BINARY=")
		}), env...)
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(out))
	}
	if got := told(); got != "" {
		t.Errorf("without hvdd: got %q", got)
	}
	if err := os.WriteFile(hvdd, []byte("#!/bin/sh\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if got := told(); got != hvdd {
		t.Errorf("got %q, want %s", got, hvdd)
	}
	if got := told("HVD_SIDECAR_BINARY=/mine"); got != "/mine" {
		t.Errorf("got %q, want the user's", got)
	}
	if err := os.Chmod(hvdd, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := told(); got == hvdd {
		t.Errorf("got %q, which is no program", got)
	}
}
