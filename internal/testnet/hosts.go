package testnet

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// HostInterface is the name of the network interface of each host. The only other interface is lo.
const HostInterface = "eth0"

// MaxHosts is the largest number of hosts that one NewHosts can make, because their addresses are in one /24
// subnet.
const MaxHosts = 200

const (
	dir = "/run/netns" // the directory in which iproute2 keeps named namespaces
	// prefix is the beginning of the names of all namespaces that this package makes.
	prefix = "gohvd-"
	bridge = "br0" // the name of the bridge in its namespace
	// timeout limits every command, every call of a server, and every wait of this package.
	timeout = time.Minute
)

// Host is a simulated host: a network namespace with one interface. It is for tests that need several hosts.
// A bridge in another namespace connects the hosts. So the network of the machine does not change, and no
// route leads out of the hosts' network. Hosts need Linux, root privileges, and Debian's packages iproute2
// and util-linux. They share the files, processes and clock of the machine.
//
// The namespaces are named gohvd-PID-START-RANDOM-WHAT. PID is the process that made the namespace, and START
// is the time when that process started. With these names, the next NewHosts finds and removes the namespaces
// of a process that was killed.
//
// A method that returns no error fails the test if something goes wrong. Only the test's goroutine may call
// such a method.
type Host struct {
	// Name is the name of the host and of its namespace. "ip netns exec NAME" runs a command there.
	Name string
	// Addr is the host's address. Only hosts from the same NewHosts can reach it.
	Addr netip.Addr

	t      testing.TB
	bridge string // the namespace of the bridge
	port   string // the name of the interface at the bridge's end of the host's cable
}

// haveHosts checks whether NewHosts can work. It makes and removes a namespace with everything that a host
// needs, and returns an error if that fails.
var haveHosts = sync.OnceValue(func() (err error) {
	name := newNames() + "probe"
	defer func() { err = errors.Join(err, remove(name)) }()
	if err := ip("netns", "add", name); err != nil {
		return err
	}
	if err := addPort(name, "port", name, "peer"); err != nil {
		return err
	}
	h := Host{Name: name}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return run(h.Command(ctx, "true"))
})

// NeedHosts skips the test if hosts cannot be made. In CI, where they can be made, it fails the test instead.
func NeedHosts(t testing.TB) {
	t.Helper()
	err := haveHosts()
	if err == nil {
		return
	}
	const needs = "hosts cannot be made: they need root and Debian's packages iproute2 and util-linux"
	if os.Getenv("CI") != "" {
		t.Fatalf("%s: %v", needs, err)
	}
	t.Skipf("%s: %v", needs, err)
}

// NewHosts makes n hosts, 1 to MaxHosts, which can all reach each other. When the test ends for any reason,
// the processes on the hosts are killed and the hosts are removed. NewHosts takes about 10 ms for each host.
func NewHosts(t testing.TB, n int) []*Host {
	t.Helper()
	NeedHosts(t)
	if n < 1 || n > MaxHosts {
		t.Fatalf("testnet: got %d hosts, want 1 to %d", n, MaxHosts)
	}
	if err := sweep(); err != nil {
		t.Fatal(err)
	}
	names := newNames()
	t.Cleanup(func() {
		if err := remove(names); err != nil {
			t.Error(err)
		}
	})
	hosts := make([]*Host, n)
	for i := range hosts {
		hosts[i] = &Host{
			Name: fmt.Sprintf("%s%d", names, i), Addr: netip.AddrFrom4([4]byte{10, 77, 0, byte(1 + i)}),
			t: t, bridge: names + "bridge", port: fmt.Sprintf("port%d", i),
		}
	}
	if err := build(names+"bridge", hosts); err != nil {
		t.Fatal(err)
	}
	return hosts
}

// build makes a bridge in a new namespace, makes the hosts, and connects them to the bridge. middle is the
// name of the new namespace.
func build(middle string, hosts []*Host) error {
	if err := ip("netns", "add", middle); err != nil {
		return err
	}
	if err := ip("-n", middle, "link", "add", bridge, "up", "type", "bridge"); err != nil {
		return err
	}
	for _, h := range hosts {
		if err := h.build(); err != nil {
			return err
		}
	}
	return nil
}

// build makes the host's namespace and interface, and connects it to the bridge.
func (h *Host) build() error {
	if err := ip("netns", "add", h.Name); err != nil {
		return err
	}
	if err := addPort(h.bridge, h.port, h.Name, HostInterface); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"-n", h.Name, "address", "add", h.Addr.String() + "/24", "dev", HostInterface},
		{"-n", h.Name, "link", "set", "lo", "up"},
		{"-n", h.Name, "link", "set", HostInterface, "up"},
		{"-n", h.bridge, "link", "set", h.port, "master", bridge, "up"},
	} {
		if err := ip(args...); err != nil {
			return err
		}
	}
	return nil
}

// addPort makes a virtual cable between two namespaces. Its ends are the interface port in the first
// namespace (from) and the interface iface in the second namespace (to). addPort does not change the caller's
// namespace.
func addPort(from, port, to, iface string) error {
	return ip("-n", from, "link", "add", port, "type", "veth", "peer", "name", iface, "netns", to)
}

// Command returns a command that runs a program on the host. The process that Start starts is the program
// itself and not a wrapper. The program sees the host's network, also in /sys, and the host's name. It is
// killed when the test ends.
func (h *Host) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	const named = `echo "$0" >/proc/sys/kernel/hostname && exec "$@"`
	in := []string{"netns", "exec", h.Name, "unshare", "--uts", "sh", "-c", named, h.Name, name}
	return exec.CommandContext(ctx, "ip", append(in, args...)...)
}

// SetLink connects the host's cable to the bridge or disconnects it. A disconnected host keeps its addresses
// and routes, and packets to and from it are lost without an error. When SetLink returns, the change has
// taken effect.
func (h *Host) SetLink(up bool) {
	h.t.Helper()
	state := "down"
	if up {
		state = "up"
	}
	if err := ip("-n", h.bridge, "link", "set", h.port, state); err != nil {
		h.t.Fatal(err)
	}
}

// Drop makes all packets that h sends to another host be lost without an error, or ends that. Packets in the
// other direction are not lost. When Drop returns, the change has taken effect.
func (h *Host) Drop(to *Host, drop bool) {
	h.t.Helper()
	// The bridge passes a packet for a MAC address that no host has to all hosts, which drop it.
	args := []string{"-n", h.Name, "neighbour", "replace", to.Addr.String(), "lladdr", "02:00:00:00:00:fe",
		"dev", HostInterface, "nud", "permanent"}
	if !drop {
		args = []string{"-n", h.Name, "neighbour", "delete", to.Addr.String(), "dev", HostInterface}
	}
	if err := ip(args...); err != nil {
		h.t.Fatal(err)
	}
}

// newNames returns a prefix for the names of a set of namespaces of this process. Each call returns another
// prefix.
func newNames() string {
	pid := os.Getpid()
	return fmt.Sprintf("%s%d-%s-%s-", prefix, pid, startOf(pid), strings.ToLower(rand.Text()[:8]))
}

// ownerLives reports whether the process that made the namespace still runs. It also returns true for a name
// that newNames did not make, so that such a namespace is not removed.
func ownerLives(name string) bool {
	pid, rest, _ := strings.Cut(strings.TrimPrefix(name, prefix), "-")
	start, _, ok := strings.Cut(rest, "-")
	n, err := strconv.Atoi(pid)
	return !ok || err != nil || startOf(n) == start
}

// startOf returns when a process started, in ticks since the boot. This distinguishes the process from a
// later process with the same ID. If there is no such process or it has ended, startOf returns "".
func startOf(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	// The name of the process may contain spaces and parentheses, so search for the last parenthesis. The
	// next field is the third one, the state (proc_pid_stat(5)).
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	const state, start = 0, 22 - 3
	if len(fields) <= start || fields[state] == "Z" || fields[state] == "X" {
		return ""
	}
	return fields[start]
}

// sweep removes the namespaces whose owners have ended.
func sweep() error {
	names, err := named(prefix)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		if !ownerLives(name) {
			errs = append(errs, remove(name))
		}
	}
	return errors.Join(errs...)
}

// named returns the names of the namespaces whose names start with beginning.
func named(beginning string) (names []string, err error) {
	paths, err := filepath.Glob(filepath.Join(dir, beginning+"*"))
	for _, p := range paths {
		names = append(names, filepath.Base(p))
	}
	return names, err
}

// remove removes the namespaces whose names start with beginning, and kills the processes in them. Several
// processes may call it at the same time.
func remove(beginning string) error {
	names, err := named(beginning)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		errs = append(errs, empty(name))
		if err := ip("netns", "delete", name); err != nil {
			if _, gone := os.Stat(filepath.Join(dir, name)); !errors.Is(gone, os.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// empty kills the processes in a namespace until none are left.
func empty(name string) error {
	namespace, err := os.Stat(filepath.Join(dir, name))
	if err != nil {
		return nil // the namespace has been removed in the meantime
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	late := time.After(timeout)
	for {
		paths, err := filepath.Glob("/proc/[0-9]*")
		if err != nil {
			return err
		}
		found := false
		for _, p := range paths {
			found = kill(p, namespace) || found
		}
		if !found {
			return nil
		}
		select {
		case <-tick.C:
		case <-late:
			return fmt.Errorf("testnet: processes on %s have not ended within %v after they were killed",
				name, timeout)
		}
	}
}

// kill kills the process whose directory in /proc is path if that process is in the namespace. It reports
// whether the process was in the namespace. It opens a handle to the process before it checks the namespace.
// So it does not kill another process that has got the same ID in the meantime.
func kill(path string, namespace os.FileInfo) bool {
	pid, err := strconv.Atoi(filepath.Base(path))
	if err != nil {
		return false
	}
	p, err := os.FindProcess(pid)
	if err != nil {
		return false
	}
	defer p.Release()
	its, err := os.Stat(filepath.Join(path, "ns", "net"))
	if err != nil || !os.SameFile(its, namespace) {
		return false // a process that has ended has no namespace
	}
	_ = p.Kill() // fails only if the process has ended already
	return true
}

// ip runs the ip command of iproute2.
func ip(args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return run(exec.CommandContext(ctx, "ip", args...))
}

// run runs a command. Its error includes the command line and the command's standard error.
func run(cmd *exec.Cmd) error {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("testnet: %s: %w: %s", strings.Join(cmd.Args, " "), err,
			bytes.TrimSpace(stderr.Bytes()))
	}
	return nil
}
