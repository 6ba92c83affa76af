package testnet_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// programVariable is the name of an environment variable. If it is set, this test binary does not run tests,
// but the program that the variable names. Tests use this to run programs on hosts.
const programVariable = "GOHVD_TESTHOSTS_PROGRAM"

func TestMain(m *testing.M) {
	var err error
	switch program := os.Getenv(programVariable); program {
	case "":
		os.Exit(m.Run())
	case "echo":
		err = echo(os.Args[1])
	case "talk":
		err = talk(os.Args[1])
	case "where":
		err = where()
	default:
		err = fmt.Errorf("unknown program %q", program)
	}
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
}

// echo accepts connections at addr and sends back the bytes that it receives, until a call fails. It first
// prints its address.
func echo(addr string) error {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr())
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go io.Copy(c, c)
	}
}

// talk connects to addr, sends each line of its input and prints the answer.
func talk(addr string) error {
	c, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return err
	}
	fmt.Println("connected")
	go io.Copy(os.Stdout, c)
	_, err = io.Copy(c, os.Stdin)
	return err
}

// where prints the host's name, and the name and addresses of each interface.
func where() error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	text, err := interfaces()
	fmt.Println(name, text)
	return err
}

// interfaces returns the network interfaces that this process sees, with their addresses. It leaves out IPv6
// addresses, because they are assigned at an unknown time.
func interfaces() (string, error) {
	all, err := net.Interfaces()
	if err != nil {
		return "", err
	}
	var text []string
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil {
			return "", err
		}
		for _, a := range addrs {
			if !strings.Contains(a.String(), ":") {
				text = append(text, i.Name+" "+a.String())
			}
		}
	}
	// The result includes /sys, because some programs look for network interfaces there.
	seen, err := filepath.Glob("/sys/class/net/*")
	return fmt.Sprint(text, seen), err
}

// process is a child process of the test.
type process struct {
	t     *testing.T
	what  string
	pid   int
	in    io.WriteCloser
	lines chan string
}

// program starts the program with this name on h. The program is killed when the test ends.
func program(t *testing.T, h *testnet.Host, name string, args ...string) *process {
	t.Helper()
	return begin(t, h.Command(t.Context(), testnet.Self(t), args...), programVariable+"="+name)
}

func begin(t *testing.T, cmd *exec.Cmd, env ...string) *process {
	t.Helper()
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, what: strings.Join(append(env, cmd.Args...), " "), pid: cmd.Process.Pid, in: in,
		lines: make(chan string, 1000)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
		_ = cmd.Wait() // tests that need the exit status check it themselves
		close(p.lines)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-done
	})
	return p
}

// line returns the next line that the process prints. If the process ends or prints nothing for a minute, it
// fails the test.
func (p *process) line() string {
	p.t.Helper()
	select {
	case l, ok := <-p.lines:
		if !ok {
			p.t.Fatalf("%s has ended", p.what)
		}
		return l
	case <-time.After(time.Minute):
		p.t.Fatalf("%s says nothing", p.what)
		return ""
	}
}

// end waits until the process has ended. After a minute it fails the test.
func (p *process) end() {
	p.t.Helper()
	late := time.After(time.Minute)
	for {
		select {
		case _, ok := <-p.lines:
			if !ok {
				return
			}
		case <-late:
			p.t.Fatalf("%s does not end", p.what)
		}
	}
}

func (p *process) say(text string) {
	p.t.Helper()
	if _, err := fmt.Fprintln(p.in, text); err != nil {
		p.t.Fatal(err)
	}
}

// TCP works between any two hosts. If the link of a host is down, the host cannot reach the others, and they
// cannot reach it. When the link is up again, its connections continue. The other hosts are not affected.
func TestLinks(t *testing.T) {
	hosts := testnet.NewHosts(t, 3)
	addrs := make([]string, len(hosts))
	for i, h := range hosts {
		addrs[i] = program(t, h, "echo", net.JoinHostPort(h.Addr.String(), "0")).line()
	}
	// connects checks each pair of hosts in both directions: the first host must be able to connect to the
	// second exactly if the function should returns true.
	connects := func(should func(from, to int) bool) {
		t.Helper()
		for i, h := range hosts {
			for k := range hosts {
				got := program(t, h, "talk", addrs[k]).line()
				if want := should(i, k); (got == "connected") != want ||
					!want && !strings.Contains(got, "timeout") {
					t.Errorf("host %d to host %d: got %q, want connected: %v", i, k, got, want)
				}
			}
		}
	}
	connects(func(int, int) bool { return true })

	talk := program(t, hosts[0], "talk", addrs[1])
	for i, text := range []string{"connected", "one"} {
		if i > 0 {
			talk.say(text)
		}
		if got := talk.line(); got != text {
			t.Fatalf("got %q, want %q", got, text)
		}
	}
	hosts[1].SetLink(false)
	talk.say("two")
	connects(func(from, to int) bool { return from == to || from != 1 && to != 1 })
	if len(talk.lines) > 0 {
		t.Errorf("got %q over a link that is down", talk.line())
	}
	hosts[1].SetLink(true)
	if got := talk.line(); got != "two" {
		t.Errorf("got %q after the link was up again, want %q", got, "two")
	}

	aside := program(t, hosts[0], "talk", addrs[2])
	if got := aside.line(); got != "connected" {
		t.Fatal(got)
	}
	hosts[1].Drop(hosts[0], true)
	talk.say("three")
	aside.say("one")
	if got := aside.line(); got != "one" || len(talk.lines) > 0 {
		t.Errorf("got %q from a host whose packets arrive, and %d lines from the other one", got, len(talk.lines))
	}
	hosts[1].Drop(hosts[0], false)
	if got := talk.line(); got != "three" {
		t.Errorf("got %q when packets arrived again, want %q", got, "three")
	}
	connects(func(int, int) bool { return true })
}

// A host has a name, the interface lo and one other interface. It can reach only the hosts of its own
// network. The network of the machine does not change.
func TestHostsAreApart(t *testing.T) {
	machine := func() string {
		text, err := interfaces()
		if err != nil {
			t.Fatal(err)
		}
		name, err := os.Hostname()
		if err != nil {
			t.Fatal(err)
		}
		routes, err := os.ReadFile("/proc/net/route")
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("%s %s\n%s", name, text, routes)
	}
	local := testnet.FakeServer(t, func(net.Conn) {})
	before := machine()
	hosts := testnet.NewHosts(t, 2)
	for i, h := range hosts {
		want := fmt.Sprintf("%s [lo 127.0.0.1/8 %s %s/24] [/sys/class/net/%[2]s /sys/class/net/lo]", h.Name,
			testnet.HostInterface, h.Addr)
		if got := program(t, h, "where").line(); got != want {
			t.Errorf("host %d: got  %s\nwant %s", i, got, want)
		}
		if got := program(t, h, "talk", local).line(); !strings.Contains(got, "connection refused") {
			t.Errorf("host %d to a port of the machine's loopback: %s", i, got)
		}
		if got := program(t, h, "talk", "192.0.2.1:9").line(); !strings.Contains(got,
			"network is unreachable") {
			t.Errorf("host %d to the world: %s", i, got)
		}
	}
	if hosts[0].Name == hosts[1].Name || hosts[0].Addr == hosts[1].Addr || !hosts[0].Addr.IsPrivate() {
		t.Errorf("two hosts are %v at %v and %v at %v", hosts[0].Name, hosts[0].Addr, hosts[1].Name,
			hosts[1].Addr)
	}
	if now := machine(); now != before {
		t.Errorf("before there was %s, now %s", before, now)
	}
	// The hosts of another NewHosts have the same addresses but no connection to the first hosts.
	others := testnet.NewHosts(t, 2)
	addr := program(t, hosts[1], "echo", net.JoinHostPort(hosts[1].Addr.String(), "0")).line()
	got := "timeout"
	// A new bridge may lose the first packet.
	for tries := 0; tries < 20 && strings.Contains(got, "timeout"); tries++ {
		got = program(t, others[0], "talk", addr).line()
	}
	if others[1].Addr != hosts[1].Addr || !strings.Contains(got, "connection refused") {
		t.Errorf("from a host of another bridge: %s", got)
	}
}

// A command behaves as os/exec promises: its process is the command itself, with the command's arguments and
// exit status.
func TestCommand(t *testing.T) {
	h := testnet.NewHosts(t, 1)[0]
	cmd := h.Command(t.Context(), "sh", "-c", `echo $$ "$0" "$1"; exit 7`, "a b", "$c")
	out, err := cmd.Output()
	if want := fmt.Sprintf("%d a b $c\n", cmd.Process.Pid); string(out) != want ||
		cmd.ProcessState.ExitCode() != 7 {
		t.Errorf("got %q and error %v, want %q and status 7", out, err, want)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cmd = h.Command(ctx, "sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := cmd.Wait(); cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("got error %v, want that its context ended it", err)
	}
}

// namespaces returns the namespaces whose names start with beginning.
func namespaces(t *testing.T, beginning string) []string {
	t.Helper()
	names, err := filepath.Glob("/run/netns/" + beginning + "*")
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// group returns the common prefix of the names of all namespaces that were made together with h.
func group(h *testnet.Host) string { return h.Name[:strings.LastIndexByte(h.Name, '-')+1] }

// runs reports whether the process with the ID pid is running. A zombie counts as not running.
func runs(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(text), ") Z ")
}

// stray starts an orphan on a host, which only SIGKILL can end before the test ends. Its parent has ended, so
// it can be found only through its namespace.
func stray(t testing.TB, h *testnet.Host) (pid int) {
	t.Helper()
	cmd := h.Command(t.Context(), "sh", "-c",
		`trap "" TERM HUP INT; setsid sleep 1000 >/dev/null 2>&1 & echo $!`)
	out, err := cmd.Output()
	if err == nil {
		pid, err = strconv.Atoi(strings.TrimSpace(string(out)))
	}
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// storm starts a process on a host that starts 2000 other processes, faster than they can be found and
// killed. It returns a word that all of them have as an argument.
func storm(t testing.TB, h *testnet.Host) (word string) {
	t.Helper()
	word = fmt.Sprintf("20.%d", os.Getpid()) // the argument of sleep, in seconds
	cmd := h.Command(t.Context(), "sh", "-c",
		`setsid sh -c 'for i in $(seq 2000); do sleep $0 & done' "$0" >/dev/null 2>&1 &`, word)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return word
}

// running returns how many processes have word as an argument.
func running(t *testing.T, word string) (n int) {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range paths {
		text, err := os.ReadFile(p)
		if err == nil && slices.Contains(strings.Split(string(text), "\x00"), word) {
			n++
		}
	}
	return n
}

// When a test has ended, its hosts, their namespaces and all processes on them are gone.
func TestNothingStays(t *testing.T) {
	var names, word string
	var pids []int
	t.Run("hosts", func(t *testing.T) {
		hosts := testnet.NewHosts(t, 2)
		names = group(hosts[0])
		for _, h := range hosts {
			for range 3 {
				pids = append(pids, stray(t, h))
			}
		}
		if n := len(namespaces(t, names)); n != 3 {
			t.Errorf("there are %d namespaces, want 3", n)
		}
		word = storm(t, hosts[0])
		testnet.Eventually(t, "the storm has begun", func() bool { return running(t, word) > 10 })
	})
	wantNothing(t, names, pids...)
	if n := running(t, word); n > 0 {
		t.Errorf("%d processes of a storm are left", n)
	}
}

func wantNothing(t *testing.T, names string, pids ...int) {
	t.Helper()
	if left := namespaces(t, names); len(left) > 0 {
		t.Errorf("%s are left", left)
	}
	for _, pid := range pids {
		if runs(pid) {
			t.Errorf("process %d is left", pid)
		}
	}
}

// childVariable is the name of an environment variable. TestChild runs only if it is set, and its value says
// how TestChild ends.
const childVariable = "GOHVD_TESTHOSTS_CHILD"

// TestChild makes hosts and a stray process. Other tests run it in a child process.
func TestChild(t *testing.T) {
	end := os.Getenv(childVariable)
	if end == "" {
		t.Skip("other tests run this one")
	}
	h := testnet.NewHosts(t, 2)[0]
	fmt.Println(group(h), stray(t, h))
	if end == "panic" {
		panic("on purpose")
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// child runs TestChild in a child process. It returns the process, the prefix of its namespaces, and the ID
// of a process on one of its hosts.
func child(t *testing.T, end string) (p *process, names string, pid int) {
	t.Helper()
	p = begin(t, exec.CommandContext(t.Context(), testnet.Self(t), "-test.run=^TestChild$"), childVariable+"="+end)
	if l := p.line(); !strings.HasPrefix(l, "gohvd-") {
		t.Fatalf("%s says %q", p.what, l)
	} else if _, err := fmt.Sscan(l, &names, &pid); err != nil {
		t.Fatal(err)
	}
	return p, names, pid
}

// If a test panics, its hosts are removed. If a process was killed, the next NewHosts removes its hosts. It
// does not remove the hosts of processes that still run.
func TestLeftovers(t *testing.T) {
	testnet.NeedHosts(t)
	panicking, names, pid := child(t, "panic")
	panicking.end()
	wantNothing(t, names, pid)

	alive, living, livingPID := child(t, "wait")
	killed, left, leftPID := child(t, "wait")
	if err := syscall.Kill(killed.pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	killed.end()
	if n := len(namespaces(t, left)); n != 3 || !runs(leftPID) {
		t.Fatalf("of the killed process %d namespaces are left, want 3, and its process %d", n, leftPID)
	}
	testnet.NewHosts(t, 1)
	wantNothing(t, left, leftPID)
	if n := len(namespaces(t, living)); n != 3 || !runs(livingPID) {
		t.Errorf("of the living process %d namespaces are left, want 3, and its process %d", n, livingPID)
	}
	if err := alive.in.Close(); err != nil {
		t.Fatal(err)
	}
	alive.end()
	wantNothing(t, living, livingPID)
}

// NewHosts removes a namespace if the process with the process ID and start time in its name has ended. It
// does not remove namespaces with other names.
func TestSweep(t *testing.T) {
	testnet.NeedHosts(t)
	ended := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := ended.Start(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", ended.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	start := strings.Fields(string(text))[21]
	if err := ended.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, "the process has ended", func() bool { return !runs(ended.Process.Pid) })
	for name, goes := range map[string]bool{
		fmt.Sprintf("gohvd-%d-1-later-0", os.Getpid()):                   true, // a later process has this ID
		fmt.Sprintf("gohvd-%d-%s-zombie-0", ended.Process.Pid, start):    true, // a zombie
		fmt.Sprintf("gohvd-%d-%s-gone-bridge", os.Getpid()+1<<23, start): true, // no process has this ID
		"gohvd-apple-1-x-0":                        false,
		fmt.Sprintf("gohvd-%d", os.Getpid()+1<<23): false,
	} {
		if out, err := exec.CommandContext(t.Context(), "ip", "netns", "add",
			name).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		testnet.NewHosts(t, 1)
		if left := namespaces(t, name); (len(left) == 0) != goes {
			t.Errorf("namespace %s is left: %v; want it removed: %v", name, left, goes)
		}
		if !goes {
			if out, err := exec.CommandContext(t.Context(), "ip", "netns", "delete",
				name).CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		}
	}
	if err := ended.Wait(); err == nil {
		t.Error("the killed process has ended well")
	}
}

// If hosts cannot be made, a test is skipped with the reason. In CI it fails instead.
func TestNeed(t *testing.T) {
	testnet.NeedHosts(t)
	const unprivileged = "setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin "
	for _, c := range []struct{ name, command, path, says string }{
		{"no privilege", unprivileged, os.Getenv("PATH"), "Operation not permitted"},
		{"no ip", "", "/nonexistent", `"ip": executable file not found`},
	} {
		for _, ci := range []string{"", "true"} {
			args := append(strings.Fields(c.command), testnet.Self(t), "-test.v", "-test.run=^TestChild$")
			cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
			cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
				return strings.HasPrefix(v, "CI=")
			})
			cmd.Env = append(cmd.Env, "PATH="+c.path, "CI="+ci, childVariable+"=wait")
			out, err := cmd.CombinedOutput()
			want, status := "--- SKIP: TestChild", 0
			if ci != "" {
				want, status = "--- FAIL: TestChild", 1
			}
			if cmd.ProcessState.ExitCode() != status {
				t.Errorf("%s, CI=%q: got error %v, want status %d", c.name, ci, err, status)
			}
			for _, text := range []string{want, c.says, "need root", "iproute2"} {
				if !strings.Contains(string(out), text) {
					t.Errorf("%s, CI=%q: got %q, want %q in it", c.name, ci, out, text)
				}
			}
		}
	}
}
