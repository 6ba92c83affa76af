package doctor

import (
	"context"
	"fmt"
	"io/fs"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// maxIdle caps how many interfaces without an address are listed, because a Kubernetes node has hundreds of
// them.
const maxIdle = 8

// interfaces lists the network interfaces. It reports a failure if there is no usable loopback, because ranks
// on one host meet over loopback.
func interfaces(_ context.Context, s *System) []Line {
	all, err := s.Interfaces()
	if err != nil {
		return []Line{warn("", "run in a sandbox that permits netlink sockets", "%v", err)}
	}
	var (
		lines    []Line
		idle     []string
		loopback bool
	)
	for _, i := range all {
		name := "interface " + i.Name
		found := fmt.Sprintf("mtu %d, %s", i.MTU, strings.Join(i.Addrs, " "))
		loopback = loopback || i.Loopback && i.Up && hasLoopback(i.Addrs)
		switch {
		case len(i.Addrs) == 0:
			idle = append(idle, i.Name)
		case !i.Up:
			lines = append(lines, warn(name, "ip link set "+i.Name+" up, or remove its address", "down, %s",
				found))
		// A bridge without members, such as docker0 if no container runs, is normally not running.
		case !i.Running && s.isBridge(i.Name):
			lines = append(lines, ok(name, "a bridge that has no member that is up, %s", found))
		case !i.Running:
			lines = append(lines,
				warn(name, "check the cable and the device at its other end, or remove the address of the interface",
					"up without a carrier, %s", found))
		default:
			lines = append(lines, ok(name, "up, %s", found))
		}
	}
	if len(idle) > 0 {
		names := strings.Join(idle[:min(maxIdle, len(idle))], " ")
		if more := len(idle) - maxIdle; more > 0 {
			names += fmt.Sprintf(" and %d other interfaces", more)
		}
		lines = append(lines, ok("no address", "%s", names))
	}
	if !loopback {
		lines = append(lines, fail("loopback", "ip link set lo up; ip address add 127.0.0.1/8 dev lo",
			"no loopback interface is up and has an address, but the ranks of one host connect over it"))
	}
	return lines
}

func (s *System) isBridge(name string) bool {
	_, err := fs.Stat(s.Root, "sys/class/net/"+name+"/bridge")
	return err == nil
}

func hasLoopback(prefixes []string) bool {
	for _, p := range prefixes {
		if prefix, err := netip.ParsePrefix(p); err == nil && prefix.Addr().IsLoopback() {
			return true
		}
	}
	return false
}

// hostName looks up the addresses of this host's name. gohvd does not need them, but other libraries expect
// that peers can reach this host at these addresses.
func hostName(ctx context.Context, s *System) []Line {
	const fix = "add the name to /etc/hosts, with an address that the other hosts can reach, or to the DNS"
	name, err := s.Hostname()
	if err != nil {
		return []Line{fail("",
			"give the host a name (hostnamectl hostname NAME), by which ranks identify their host", "%v",
			err)}
	}
	addrs, err := s.LookupHost(ctx, name)
	if err != nil {
		return []Line{warn("", fix, "%s: %v; PyTorch's gloo and MPI look up this name", name, err)}
	}
	onlyLoopback := true
	for _, a := range addrs {
		ip, err := netip.ParseAddr(a)
		onlyLoopback = onlyLoopback && err == nil && ip.IsLoopback()
	}
	found := fmt.Sprintf("%s is %s", name, strings.Join(addrs, " "))
	switch {
	case onlyLoopback && len(s.Hosts) > 0:
		return []Line{warn("", fix, "%s, which other hosts cannot reach; PyTorch's gloo uses this address",
			found)}
	case onlyLoopback:
		return []Line{ok("", "%s, which only this host can reach", found)}
	default:
		return []Line{ok("", "%s", found)}
	}
}

// maxClockError is the largest acceptable clock error. With a larger error it is hard to put the logs of
// several hosts in order.
const maxClockError = time.Second

// clock reports whether the clock is synchronized. Comparing logs and checking certificates need a
// synchronized clock. Deadlines do not need one.
func clock(_ context.Context, s *System) []Line {
	const fix = "run chrony or systemd-timesyncd; if this is a container or a virtual machine, run it on the host"
	state, t, err := s.Clock()
	if err != nil {
		return []Line{warn("", "run in a sandbox that permits adjtimex", "%v", err)}
	}
	most := time.Duration(t.Maxerror) * time.Microsecond
	switch {
	case state == unix.TIME_ERROR || t.Status&unix.STA_UNSYNC != 0:
		return []Line{warn("", fix,
			"not synchronised: times in the logs of several hosts cannot be compared, and certificates may seem invalid")}
	case most > maxClockError:
		return []Line{warn("", fix, "synchronised, but may be wrong by %v", most.Round(time.Millisecond))}
	default:
		return []Line{ok("", "synchronised, wrong by at most %v", most.Round(10*time.Microsecond))}
	}
}
