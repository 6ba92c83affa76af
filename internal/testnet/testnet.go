// Package testnet provides what tests need outside of their process: sockets, hosts made of network
// namespaces, PyTorch and Prometheus. If one of the programs is missing, the test is skipped. In CI it fails
// instead.
package testnet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/cookiejar"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"
)

// Context returns a context that ends with the test, or after five minutes, so that a test that hangs
// fails. A busy machine may need more than one for what takes a second.
func Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// Self returns the path of this program, which tests start in other roles.
func Self(t testing.TB) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return self
}

// Link links programs of this module, such as cmd/hvdrun, in an existing folder. go run keeps in the build
// cache what it has linked, which go build does not, so several tests need one link.
func Link(folder string, programs ...string) error {
	for _, program := range programs {
		cmd := exec.Command("go", "run", "-ldflags=-s -w", "-exec", "cp", "github.com/gohvd/gohvd/"+program,
			filepath.Join(folder, filepath.Base(program)))
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("linking %s: %w\n%s", program, err, out)
		}
	}
	return nil
}

// Listen listens at a free port on loopback.
func Listen(t testing.TB) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// WriteFile writes a file that only this user can read.
func WriteFile(t testing.TB, path, text string) { writeFile(t, path, text, 0o600) }

// WriteScript writes a program that only this user can run.
func WriteScript(t testing.TB, path, text string) { writeFile(t, path, text, 0o700) }

func writeFile(t testing.TB, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

// ReadFile returns what is in a file.
func ReadFile(t testing.TB, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// SocketPair returns the descriptors of two Unix sockets that are connected to each other. The caller closes
// them.
func SocketPair(t testing.TB) [2]int {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fds
}

// Browser returns a client that keeps cookies, as a browser does.
func Browser(t testing.TB) *http.Client {
	t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Jar: jar}
	t.Cleanup(client.CloseIdleConnections)
	return client
}

// Get returns what a server answers to a request, over a connection of its own. A status other than 200 is an
// error.
func Get(ctx context.Context, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, text)
	}
	return string(text), err
}

// ProcessorTime returns the user and system time that this process has used so far.
func ProcessorTime(t testing.TB) time.Duration {
	t.Helper()
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		t.Fatal(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// Eventually polls cond until it returns true. It is for changes that other goroutines make without notifying
// the test. If cond has not returned true after five minutes, Eventually fails the test.
func Eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	ctx := Context(t)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s: this has not happened within five minutes", what)
		}
	}
}

// NoNameServer makes each lookup of a name that is not in the hosts file fail at once. Tests use names of
// hosts that do not exist. If the name server did not answer, goroutines of such a lookup would look like a
// leak.
func NoNameServer() {
	none := errors.New("tests have no name server")
	net.DefaultResolver = &net.Resolver{
		PreferGo: true,
		Dial:     func(context.Context, string, string) (net.Conn, error) { return nil, none },
	}
}

// OpenFiles returns the number of open file descriptors of this process.
func OpenFiles(t testing.TB) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(files)
}

// Logs returns a logger and the entries that were logged with it.
func Logs() (*zap.Logger, *observer.ObservedLogs) {
	core, entries := observer.New(zapcore.DebugLevel)
	return zap.New(core), entries
}

// Logged reports whether there is an entry that contains all parts in its message and fields.
func Logged(entries *observer.ObservedLogs, parts ...string) bool {
	for _, e := range entries.All() {
		text := fmt.Sprint(e.Message, e.ContextMap())
		found := true
		for _, part := range parts {
			found = found && strings.Contains(text, part)
		}
		if found {
			return true
		}
	}
	return false
}

// WantError fails the test if err is nil or if its text does not contain all the given parts.
func WantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("got no error, want one with %q", parts)
		return
	}
	WantText(t, err.Error(), parts...)
}

// WantText checks that a text contains all parts.
func WantText(t testing.TB, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("got %s\nwant %q in it", text, part)
		}
	}
}

// EventuallyError calls f with a context that ends after 500 ms, and checks that f returns an error whose
// text contains all parts. On a busy machine, f may need more time until it has met the obstacle that the
// error must name. So EventuallyError tries again with twice the time, up to 32 s, before it fails the test.
// It returns the last error.
func EventuallyError(t *testing.T, f func(context.Context) error, parts ...string) error {
	t.Helper()
	for limit := 500 * time.Millisecond; ; limit *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		err := f(ctx)
		cancel()
		if limit >= 32*time.Second || containsAll(err, parts) {
			WantError(t, err, parts...)
			return err
		}
	}
}

// containsAll reports whether the text of err contains all parts.
func containsAll(err error, parts []string) bool {
	return err != nil && !slices.ContainsFunc(parts, func(part string) bool {
		return !strings.Contains(err.Error(), part)
	})
}

// FakeServer starts a server and returns its address. For each connection, the server calls serve in a new
// goroutine. Reads and writes of the connection fail after a minute. The server is closed when the test ends.
func FakeServer(t *testing.T, serve func(net.Conn)) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(time.Minute))
				serve(conn)
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		wg.Wait()
	})
	return ln.Addr().String()
}

// RawDial connects to addr and sends the given parts. Reads and writes of the connection fail after a minute.
// The connection is closed when the test ends.
func RawDial(t *testing.T, addr string, parts ...[]byte) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(time.Minute))
	if _, err := conn.Write(bytes.Join(parts, nil)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// Standalone returns flags for torchrun that have the effect of its flag --standalone. The flag itself makes
// torchrun of PyTorch 1.13 listen on port 29400, which only one test can use at a time.
func Standalone(t testing.TB) []string {
	t.Helper()
	return []string{"--rdzv_backend=c10d", "--rdzv_endpoint=localhost:" + strconv.Itoa(FreePort(t))}
}

// FreePort returns a loopback port on which no process listened a moment ago. The kernel does not assign the
// port to other sockets by itself, because it is below the range of ephemeral ports.
func FreePort(t testing.TB) int {
	t.Helper()
	const first, last = 10000, 30000
	for range 100 {
		port := first + rand.IntN(last-first)
		ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue
		}
		if err := ln.Close(); err != nil {
			t.Fatal(err)
		}
		return port
	}
	t.Fatal("no port is free")
	return 0
}

// AskAs makes a process of the user uid connect to addr, a port of 127.0.0.1, and send the request. It
// returns the first byte of the answer, or nothing if the connection ends without an answer. Only root can
// start a process of another user, so otherwise AskAs skips the test.
func AskAs(t testing.TB, uid uint32, addr string, request []byte) (answer []byte) {
	t.Helper()
	if os.Geteuid() != 0 && int(uid) != os.Geteuid() {
		t.Skip("only root can start a process of another user")
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	var escaped strings.Builder
	for _, b := range request {
		fmt.Fprintf(&escaped, "\\x%02x", b)
	}
	cmd := exec.CommandContext(Context(t), "bash", "-c",
		`exec 3<>"/dev/tcp/127.0.0.1/$0"; printf "$1" >&3; head -c 1 <&3`, port, escaped.String())
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	if uid == uint32(os.Geteuid()) {
		cmd.SysProcAttr = nil
	}
	// The status tells nothing: it is not 0 if the server has reset the connection.
	answer, err = cmd.Output()
	if _, exited := errors.AsType[*exec.ExitError](err); err != nil && !exited {
		t.Fatal(err)
	}
	return answer
}

// Flood starts a process that opens n connections to addr, a port of 127.0.0.1, and sends nothing. The
// process closes them when the test ends. Flood returns when all are open.
func Flood(t testing.TB, addr string, n int) {
	t.Helper()
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(Context(t), "bash", "-c", `ulimit -n "$(ulimit -H -n)"
for ((i = 0; i < $1; i++)); do exec {fd}<>"/dev/tcp/127.0.0.1/$0" || exit; done; echo; read`,
		port, strconv.Itoa(n))
	in, inErr := cmd.StdinPipe()
	out, outErr := cmd.StdoutPipe()
	if err := errors.Join(inErr, outErr, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Wait() // it may have been killed at the end of the test
	})
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatalf("a process cannot open %d connections: %v", n, err)
	}
}

// LimitDescriptors limits the number of descriptors that this process may have open, until restore is called
// or the test ends.
func LimitDescriptors(t testing.TB, n uint64) (restore func()) {
	t.Helper()
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: n, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	restore = func() {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(restore)
	return restore
}
