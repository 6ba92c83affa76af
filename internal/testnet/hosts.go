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

// HostInterface is the name of the one network interface that each host has besides lo.
const HostInterface = "eth0"

// MaxHosts bounds NewHosts: the hosts' addresses are of one subnet of 24 bits.
const MaxHosts = 200

const (
	dir = "/run/netns" // where iproute2 keeps the names of namespaces
	// prefix begins the names of all namespaces of this package.
	prefix = "gohvd-"
	bridge = "br0" // in a namespace of its own
	// patience bounds every command, every call of a server, and every wait of this package.
	patience = time.Minute
)

// Host is a host for tests of what runs on several: a network namespace with one interface, joined with others by a bridge that
// stands in a namespace of its own. So nothing of the machine's own network is touched, and no route leads out of it. It
// needs Linux, root, and Debian's packages iproute2 and util-linux. Hosts share the machine's files, processes and clock.
//
// The namespaces are named gohvd-PID-START-RANDOM-WHAT, after the process that made them and when that began, so that those
// of a process that was killed are known as such: the next NewHosts removes them.
//
// Methods without an error fail the test instead, and must be called by the test's goroutine.
type Host struct {
	// Name is the host's name, and that of the namespace: "ip netns exec NAME" enters it.
	Name string
	// Addr is its address, which the other hosts of the same NewHosts reach, and nobody else.
	Addr netip.Addr

	t      testing.TB
	bridge string // the namespace of the bridge
	port   string // the bridge's end of the cable
}

// haveHosts makes a namespace with all that NewHosts needs, and removes it.
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
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return run(h.Command(ctx, "true"))
})

// NeedHosts skips the test where hosts cannot be made, but not in CI, which can.
func NeedHosts(t testing.TB) {
	t.Helper()
	err := haveHosts()
	if err == nil {
		return
	}
	const needs = "no hosts can be made here, which takes root and Debian's packages iproute2 and util-linux"
	if os.Getenv("CI") != "" {
		t.Fatalf("%s: %v", needs, err)
	}
	t.Skipf("%s: %v", needs, err)
}

// NewHosts makes n hosts, 1 to MaxHosts, each of which reaches all others. When the test ends, however it does, what runs in them is
// killed and they are removed. It costs some 10 ms for each host.
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

// addPort lays a cable from the port of a namespace to an interface of another, without touching the caller's.
func addPort(from, port, to, iface string) error {
	return ip("-n", from, "link", "add", port, "type", "veth", "peer", "name", iface, "netns", to)
}

// Command returns a command that runs on the host. The process that Start makes is the command itself. It sees the host's network, in
// /sys too, and the host's name. It ends with the test, if not before.
func (h *Host) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	const named = `echo "$0" >/proc/sys/kernel/hostname && exec "$@"`
	in := []string{"netns", "exec", h.Name, "unshare", "--uts", "sh", "-c", named, h.Name, name}
	return exec.CommandContext(ctx, "ip", append(in, args...)...)
}

// SetLink pulls the host's cable out of the bridge, or puts it back. A host without its cable keeps its addresses and routes;
// what it sends, and what is sent to it, is lost without an error. When SetLink returns, it is so.
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

// newNames returns how the names of a set of namespaces of this process begin that nobody else has.
func newNames() string {
	pid := os.Getpid()
	return fmt.Sprintf("%s%d-%s-%s-", prefix, pid, startOf(pid), strings.ToLower(rand.Text()[:8]))
}

// ownerLives reports whether the process that made the namespace still runs. What has another name than newNames gives is
// not ours to judge.
func ownerLives(name string) bool {
	pid, rest, _ := strings.Cut(strings.TrimPrefix(name, prefix), "-")
	start, _, ok := strings.Cut(rest, "-")
	n, err := strconv.Atoi(pid)
	return !ok || err != nil || startOf(n) == start
}

// startOf returns when a process began, in ticks since the boot: with it a process id is not taken for a later one's. It is empty if
// there is no such process or it has ended.
func startOf(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	// The third field, the state, comes after the name, which may have spaces and parentheses in it; see proc_pid_stat(5).
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	const state, start = 0, 22 - 3
	if len(fields) <= start || fields[state] == "Z" || fields[state] == "X" {
		return ""
	}
	return fields[start]
}

// sweep removes what processes have left that were killed.
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

// named lists the namespaces whose names begin so.
func named(beginning string) (names []string, err error) {
	paths, err := filepath.Glob(filepath.Join(dir, beginning+"*"))
	for _, p := range paths {
		names = append(names, filepath.Base(p))
	}
	return names, err
}

// remove removes the namespaces whose names begin so, and kills what runs there. Several processes may do it at once.
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

// empty kills what runs in a namespace, until nothing does.
func empty(name string) error {
	namespace, err := os.Stat(filepath.Join(dir, name))
	if err != nil {
		return nil // removed meanwhile
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	late := time.After(patience)
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
			return fmt.Errorf("testnet: processes on %s live on %v after they were killed", name, patience)
		}
	}
}

// kill kills the process at a path in /proc if it is in the namespace, and reports whether it was. It is held first and looked at
// then, so that no other is hit that got its id meanwhile.
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
		return false // an ended one has no namespace
	}
	_ = p.Kill() // has it ended already, so much the better
	return true
}

// ip runs the command of iproute2.
func ip(args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return run(exec.CommandContext(ctx, "ip", args...))
}

// run runs a command; its error has the command and what that said.
func run(cmd *exec.Cmd) error {
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("testnet: %s: %w: %s", strings.Join(cmd.Args, " "), err, bytes.TrimSpace(said.Bytes()))
	}
	return nil
}
