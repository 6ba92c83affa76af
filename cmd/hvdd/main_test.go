package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/sidecar"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/sidecartest"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/testnet"
)

// asDaemon is an environment variable that makes this test binary run as hvdd.
const asDaemon = "GOHVD_HVDD_DAEMON"

func TestMain(m *testing.M) {
	switch os.Getenv(asDaemon) {
	case "":
		os.Exit(testcuda.Main(m))
	case "activated": // as systemd does for the process that it starts
		os.Setenv("LISTEN_PID", fmt.Sprint(os.Getpid()))
		os.Setenv("WATCHDOG_PID", fmt.Sprint(os.Getpid()))
	}
	main()
}

// process is a running hvdd.
type process struct {
	*exec.Cmd
	t      *testing.T
	stderr bytes.Buffer
	ended  chan struct{}
}

// start starts this test binary as hvdd, with further file descriptors and environment variables. The process
// is killed at the end of the test.
func start(t *testing.T, how string, files []*os.File, env []string, args ...string) *process {
	t.Helper()
	self := testnet.Self(t)
	p := &process{Cmd: exec.CommandContext(t.Context(), self, args...), t: t, ended: make(chan struct{})}
	p.Env = append(append(os.Environ(), asDaemon+"="+how), env...)
	p.ExtraFiles, p.Cmd.Stderr = files, &p.stderr
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		f.Close()
	}
	go func() {
		defer close(p.ended)
		p.Wait() // the error is ignored, because status checks the exit status
	}()
	t.Cleanup(func() { p.Process.Kill(); <-p.ended })
	return p
}

// status waits until p has ended. It returns the exit status of p.
func (p *process) status() int {
	p.t.Helper()
	select {
	case <-p.ended:
		return p.ProcessState.ExitCode()
	case <-time.After(sidecartest.HangTimeout):
		p.t.Fatal("hvdd does not end")
		return -1
	}
}

// wants checks that p ends with the given exit status and that its output contains the text in the parameter
// says.
func (p *process) wants(status int, says string) {
	p.t.Helper()
	if got := p.status(); got != status || !strings.Contains(p.stderr.String(), says) {
		p.t.Errorf("hvdd ended with status %d and said %q, want %d and %q", got, p.stderr.String(), status,
			says)
	}
}

// pair starts a sidecar with only one client and returns both.
func pair(t *testing.T, args ...string) (*process, *sidecartest.Client) {
	t.Helper()
	fds := testnet.SocketPair(t)
	p := start(t, "1", []*os.File{os.NewFile(uintptr(fds[0]), "sidecar")}, nil,
		append([]string{"--fd", "3"}, args...)...)
	return p, sidecartest.New(t, fds[1])
}

// at connects a client to the socket at path. If no sidecar listens there yet, it tries again.
func at(t *testing.T, path string) *sidecartest.Client {
	t.Helper()
	for deadline := time.Now().Add(sidecartest.HangTimeout); ; {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			if err = unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err == nil {
				return sidecartest.New(t, fd)
			}
			unix.Close(fd)
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		<-time.After(time.Millisecond)
	}
}

// TestCommandLine checks the exit status and the output of hvdd for different command lines.
func TestCommandLine(t *testing.T) {
	for _, c := range []struct {
		args   []string
		status int
		says   string
	}{
		{[]string{"--help"}, 0, "--socket"},
		{[]string{"--version"}, 0, "hvdd version " + config.VersionText()},
		{[]string{"completion", "bash"}, 0, "hvdd"},
		{nil, 2, "LISTEN_FDS"},
		{[]string{"--fd", "3", "--socket", "x"}, 2, "one of them"},
		{[]string{"--fd", "999"}, 2, "--fd 999"},
		{[]string{"--fd", "1"}, 2, "--fd 1"},
		{[]string{"--no-such"}, 2, "no-such"},
		{[]string{"serve"}, 2, "serve"},
		{[]string{"--socket", "/no/such/directory/s"}, 1, "/no/such/directory"},
		{[]string{"--socket", "/dev/null"}, 1, "a file that is not a socket"},
		{[]string{"--socket", filepath.Join(t.TempDir(), "s"), "--health", "here"}, 2,
			`--health: metrics: address "here"`},
	} {
		self := testnet.Self(t)
		cmd := exec.CommandContext(t.Context(), self, c.args...)
		cmd.Env = append(os.Environ(), asDaemon+"=1")
		out, _ := cmd.CombinedOutput() // the error is ignored, because the exit status is checked below
		if got := cmd.ProcessState.ExitCode(); got != c.status || !strings.Contains(string(out), c.says) {
			t.Errorf("hvdd %q: status %d, want %d and %q:\n%s", c.args, got, c.status, c.says, out)
		}
	}
}

// TestOnlyClient checks that a sidecar with only one client ends when the connection of the client ends. The
// exit status must be 0 if the client has sent Bye, or if there was no job. It must be 1 if the client left a
// job without Bye, or sent garbage.
func TestOnlyClient(t *testing.T) {
	p, c := pair(t)
	c.Hello()
	c.Init()
	c.Shutdown()
	c.Bye()
	p.wants(0, "")

	p, c = pair(t)
	c.Hello()
	c.Close()
	p.wants(0, "")

	p, c = pair(t)
	c.Hello()
	c.Init()
	c.Close()
	p.wants(1, "without Bye")

	p, c = pair(t)
	c.Write([]byte("GET / HTTP/1.1\r\n"))
	p.wants(1, "greeting")
	c.Close()
}

// TestSignals checks that SIGTERM shuts down a job and ends the sidecar, even during Init, and that a sidecar
// with only one client ignores SIGINT.
func TestSignals(t *testing.T) {
	p, c := pair(t)
	c.Hello()
	c.Init()
	signal := func(p *process, s os.Signal) {
		t.Helper()
		if err := p.Process.Signal(s); err != nil {
			t.Error(err)
		}
	}
	signal(p, syscall.SIGINT)
	c.Must(sidecartest.StopTimeline()) // succeeds only if the sidecar still runs
	signal(p, syscall.SIGTERM)
	if err := readToEnd(c); err != nil {
		t.Error(err)
	}
	p.wants(0, "")

	// Init of this job does not return, because no store listens at its address.
	port := strconv.Itoa(testnet.FreePort(t))
	p, c = pair(t, "--health", port)
	c.Hello()
	c.Send(sidecartest.Init(map[string]string{"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1",
		"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}))
	testnet.Eventually(t, "the Init has begun", func() bool {
		_, r := health(t, port)
		return r.State == "starting"
	})
	signal(p, syscall.SIGTERM)
	p.wants(0, "") // the sidecar has given up Init
}

// readToEnd reads until the sidecar closes the connection and then returns nil. If reading fails in another
// way, it returns the error.
func readToEnd(c *sidecartest.Client) error {
	for {
		if err := c.Read(); err != nil {
			if errors.Is(err, sidecartest.ErrEnd) || errors.Is(err, unix.ECONNRESET) {
				return nil
			}
			return err
		}
	}
}

// TestSocket checks that a sidecar at a path serves one client after the other. It must replace a stale
// socket at the path, must not replace the socket of a live sidecar, and must remove its socket when it ends.
func TestSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	if err := stale.Close(); err != nil {
		t.Fatal(err)
	}
	p := start(t, "1", nil, nil, "--socket", path)
	first := at(t, path)
	first.Hello()
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	start(t, "1", nil, nil, "--socket", path).wants(1, "is already listening at this path")
	second := at(t, path)
	second.Hello()
	refused := second.Until(func(r *sidecarpb.Reply) bool { return r.Error != nil }).Error.Text
	if want := fmt.Sprintf("process %d is connected", os.Getpid()); !strings.Contains(refused, want) {
		t.Errorf("a second client got %q, want %q", refused, want)
	}
	first.Init()
	first.Shutdown()
	first.Bye()
	first.Close()
	third := at(t, path)
	third.Hello()
	if ready := third.Init(); ready.Size != 1 || ready.Epoch != 2 {
		t.Errorf("ready: %v", ready)
	}
	if err := p.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	p.wants(0, "")
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the socket is left: %v", err)
	}
}

// TestListenTogether lets several processes listen at a path with a stale socket. Exactly one may succeed,
// and must stay reachable. Meanwhile another process has locked the folder, as any user can lock /tmp.
func TestListenTogether(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	folder, err := os.Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	if err := unix.Flock(int(folder.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		stale, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
		if err != nil {
			t.Fatal(err)
		}
		stale.SetUnlinkOnClose(false)
		if err := stale.Close(); err != nil {
			t.Fatal(err)
		}
		type result struct {
			c   clients
			err error
		}
		results := make(chan result)
		const n = 8
		for range n {
			go func() {
				c, err := listen(path)
				results <- result{c, err}
			}()
		}
		var listening []clients
		for range n {
			if r := <-results; r.err == nil {
				listening = append(listening, r.c)
			} else {
				testnet.WantError(t, r.err, path, "is already listening at this path")
			}
		}
		if len(listening) != 1 {
			t.Fatalf("%d processes listen, want 1", len(listening))
		}
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		listening[0].stop()
		if left, err := os.ReadDir(filepath.Dir(path)); len(left) > 0 || err != nil {
			t.Fatalf("left: %v, %v", left, err)
		}
	}
}

// TestSystemd checks that under systemd hvdd uses the socket that it gets from systemd, and that it reports
// readiness, state and watchdog messages.
func TestSystemd(t *testing.T) {
	dir := t.TempDir()
	path, notify := filepath.Join(dir, "s"), filepath.Join(dir, "notify")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: notify})
	if err != nil {
		t.Fatal(err)
	}
	defer manager.Close()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, "activated", []*os.File{f}, []string{"LISTEN_FDS=1", "NOTIFY_SOCKET=" + notify,
		"WATCHDOG_USEC=100000"})
	expect := func(want string) {
		t.Helper()
		var b [1000]byte
		for {
			if err := manager.SetReadDeadline(time.Now().Add(sidecartest.HangTimeout)); err != nil {
				t.Fatal(err)
			}
			n, err := manager.Read(b[:])
			if err != nil {
				t.Fatalf("no %q: %v", want, err)
			}
			if strings.Contains(string(b[:n]), want) {
				return
			}
		}
	}
	expect("READY=1\nSTATUS=idle, no client")
	c := at(t, path)
	c.Hello()
	c.Init()
	expect("WATCHDOG=1\nSTATUS=running, a client")
	if err := p.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	expect("STOPPING=1")
	p.wants(0, "")
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("systemd's socket has gone: %v", err)
	}
}

// health returns the answer of /healthz at a port.
func health(t *testing.T, port string) (status int, r sidecar.Report) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), sidecartest.HangTimeout)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:"+port+"/healthz", nil)
	if err != nil {
		t.Fatal(err)
	}
	a, err := http.DefaultClient.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	b, err := io.ReadAll(a.Body)
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	return a.StatusCode, r
}

// TestHealth checks that /healthz returns status 200 and the state of the sidecar while the sidecar is idle
// or runs a job.
func TestHealth(t *testing.T) {
	port := strconv.Itoa(testnet.FreePort(t))
	p, c := pair(t, "--health", port)
	c.Hello()
	want := sidecar.Report{Version: config.VersionText(), PID: p.Process.Pid, State: "idle", Connected: true}
	if status, r := health(t, port); status != 200 || r != want {
		t.Errorf("status %d: %+v, want %+v", status, r, want)
	}
	c.Init()
	if status, r := health(t, port); status != 200 || r.State != "running" {
		t.Errorf("status %d: %+v", status, r)
	}
	c.Shutdown()
	c.Bye()
}

// TestHealthOfTheDead checks that /healthz returns status 503 after the job has failed.
func TestHealthOfTheDead(t *testing.T) {
	s := sidecar.New(sidecar.Config{})
	server, err := serveHealth("0", s, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	fds := testnet.SocketPair(t)
	conn, err := unixConn(fds[0])
	if err != nil {
		t.Fatal(err)
	}
	go s.ServeConn(conn) // the result is ignored, because s.Dead reports the failure
	c := sidecartest.New(t, fds[1])
	c.Hello()
	c.Init()
	c.Close()
	<-s.Dead()
	r, err := http.Get("http://" + server.Addr() + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Body.Close(); err != nil || r.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("status %s, want 503: %v", r.Status, err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestIdle checks that a sidecar without requests uses at most 0.2 % of a core.
func TestIdle(t *testing.T) {
	p, c := pair(t)
	c.Hello()
	c.Init()
	used := func() time.Duration {
		t.Helper()
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", p.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		var ns int64
		for _, task := range tasks {
			b, err := os.ReadFile(task)
			if err != nil {
				continue // the thread has ended
			}
			var of int64
			if _, err := fmt.Sscan(string(b), &of); err != nil {
				t.Fatal(err)
			}
			ns += of
		}
		return time.Duration(ns)
	}
	<-time.After(500 * time.Millisecond) // the start of the sidecar uses processor time too
	const watched = time.Second
	for tries := 1; ; tries++ { // several tries, because on a busy machine one interval may show more
		before := used()
		<-time.After(watched)
		took := used() - before
		t.Logf("%.3f %% of a core", 100*took.Seconds()/watched.Seconds())
		if took <= watched/500 {
			break
		}
		if tries == 10 {
			t.Fatalf("the sidecar used %v of processor time in %v, want at most 0.2 %%", took, watched)
		}
	}
	c.Shutdown()
	c.Bye()
}
