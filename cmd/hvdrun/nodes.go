package main

import (
	"fmt"
	"net/netip"
	"os"
	"strconv"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/launch"
)

// recoverySeconds is how long Finalize waits for a node that hvdrun starts again.
const recoverySeconds = "60"

// nodes returns the nodes of the parameter server that the flags ask for, or nil if the job has ranks. given
// holds the flags on the command line.
func (r *runner) nodes(given *pflag.FlagSet) (*launch.Nodes, error) {
	if !given.Changed("servers") && !given.Changed("workers") {
		if given.Changed("restarts") {
			return nil, usagef("--restarts requires --servers and --workers: for ranks, give --min-np (docs/elastic.md)")
		}
		return nil, nil
	}
	if given.Changed("host-discovery-script") {
		return nil, usagef("--host-discovery-script cannot be used with --servers and --workers: a job with a " +
			"parameter server cannot be elastic")
	}
	for _, name := range []string{"num-proc", "min-num-proc", "max-num-proc", "torch-store"} {
		if given.Changed(name) {
			return nil, usagef("--%s cannot be used with --servers and --workers: such a job has no ranks, but "+
				"a scheduler, servers and workers", name)
		}
	}
	n := new(launch.Nodes)
	for _, f := range []struct {
		name, text string
		to         *int
		least      int
	}{{"servers", r.servers, &n.Servers, 1}, {"workers", r.workers, &n.Workers, 1},
		{"restarts", r.restarts, &n.Restarts, 0}} {
		if f.text == "" && !given.Changed(f.name) {
			return nil, usagef("--%s is missing: a job with a parameter server needs --servers and --workers", f.name)
		}
		var err error
		if *f.to, err = strconv.Atoi(f.text); err != nil || *f.to < f.least || *f.to > launch.MaxRanks {
			return nil, usagef("--%s: got %q, want a number from %d to %d", f.name, f.text, f.least, launch.MaxRanks)
		}
	}
	if n.Count() > launch.MaxRanks {
		return nil, usagef("--servers and --workers: got %d nodes with the scheduler, want at most %d", n.Count(),
			launch.MaxRanks)
	}
	return n, nil
}

// hostsOfNodes returns the hosts on which nodes run. hosts is the list that the user has given, or nil. If
// the job has no nodes, hostsOfNodes returns the list itself.
func hostsOfNodes(hosts []launch.Host, nodes *launch.Nodes) ([]launch.Host, error) {
	if hosts == nil || nodes == nil {
		return hosts, nil
	}
	self, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	used, _, err := launch.AssignNodes(hosts, nodes, self)
	if err != nil {
		return nil, usageError{err}
	}
	return used, nil
}

// recovery returns the variable that makes nodes wait for the return of a node that hvdrun starts again,
// unless the user has set it. It returns an error if no node of the job can return. nodes may be nil.
func recovery(nodes *launch.Nodes, settings *config.Config) ([]string, error) {
	const name = "HVD_RECOVERY_SECONDS"
	switch {
	case nodes == nil || nodes.Restarts == 0:
		return nil, nil
	case settings.PS.Staleness != config.Unset:
		return nil, usagef("--restarts cannot be used with HVD_STALENESS: a node cannot return to a job with a " +
			"clock (docs/ps.md)")
	case settings.Given(name):
		return nil, nil
	}
	return []string{name + "=" + recoverySeconds}, nil
}

// reservePort returns a free port of the loopback interface or, if several is set, of all interfaces. Until
// release is called, the kernel gives it to no process that asks for any port, but a process can listen on
// it.
func reservePort(several bool) (root netip.AddrPort, release func(), err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("reserve a port for the scheduler: %w", err)
		}
	}()
	// A socket that is bound and does not listen keeps a port. SO_REUSEADDR, which Go sets too, lets another
	// socket listen there.
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return root, nil, os.NewSyscallError("socket", err)
	}
	addr := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	if several {
		addr = netip.IPv4Unspecified()
	}
	var bound unix.Sockaddr
	if err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Addr: addr.As4()})
	}
	if err == nil {
		bound, err = unix.Getsockname(fd)
	}
	at, ok := bound.(*unix.SockaddrInet4)
	if err == nil && !ok {
		err = unix.EAFNOSUPPORT
	}
	if err != nil {
		unix.Close(fd)
		return root, nil, err
	}
	return netip.AddrPortFrom(addr, uint16(at.Port)), func() { unix.Close(fd) }, nil
}
