// Package netif finds the address at which the other hosts of a job reach this host.
//
// Users choose interfaces by name or by address, because the interfaces of one network may have different
// names on different hosts. A [Choice] says which interfaces may be used. If the user has chosen none, the
// rank uses the interface of the route to the rendezvous.
package netif

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// Choice is a choice of interfaces. The zero Choice permits all interfaces. The rank then uses the interface
// of the route to the rendezvous.
type Choice struct {
	items  []item
	except bool // permits all interfaces except those that items select
}

// item selects interfaces, either by name or by a network that contains one of their addresses.
type item struct {
	name    string
	exact   bool         // name does not stand for longer names
	network netip.Prefix // valid only if name is empty
}

// has reports whether i selects o. names holds the names of all interfaces of this host.
func (i item) has(o own, names []string) bool {
	if i.name == "" {
		return i.network.Contains(o.addr)
	}
	return o.name == i.name ||
		strings.HasPrefix(o.name, i.name) && !i.exact && !slices.Contains(names, i.name)
}

func (i item) String() string {
	switch {
	case i.name == "":
		return i.network.String()
	case i.exact:
		return "=" + i.name
	}
	return i.name
}

// maxName is the maximum length of an interface name (IFNAMSIZ without the zero byte at the end).
const maxName = 15

// Parse parses a list whose items are interface names, networks such as 10.0.0.0/8, or addresses. It ignores
// empty items, and white space around items. The forms of NCCL_SOCKET_IFNAME are valid: if this host has no
// interface with a name of the list, the name stands for all names that begin with it; = before a name
// excludes that; ^ before the list permits all interfaces except those in the list. A = or ^ before the first
// item also applies to the other items, which may repeat it.
func Parse(list []string) (Choice, error) {
	var c Choice
	for _, text := range list {
		text = strings.TrimSpace(text)
		if text == "" {
			continue
		}
		rest, except := strings.CutPrefix(text, "^")
		rest, exact := strings.CutPrefix(rest, "=")
		if len(c.items) == 0 {
			c.except = except
		} else {
			exact = exact || c.items[0].exact
		}
		i, err := parse(rest, exact)
		if err == nil && except && !c.except {
			err = errors.New("want ^ before the first item of the list, which then says what to exclude")
		}
		if err != nil {
			return Choice{}, fmt.Errorf("network interface %.64q: %w", text, err)
		}
		c.items = append(c.items, i)
	}
	return c, nil
}

func parse(text string, exact bool) (item, error) {
	if strings.Contains(text, "/") {
		p, err := netip.ParsePrefix(text)
		return item{network: p.Masked()}, err
	}
	if a, err := netip.ParseAddr(text); err == nil {
		return item{network: netip.PrefixFrom(a, a.BitLen())}, nil
	}
	if text == "" || len(text) > maxName || strings.ContainsAny(text, " \t:,^=") {
		return item{}, fmt.Errorf(
			"want a name of at most %d characters, an address, or a network as in 10.0.0.0/8", maxName)
	}
	return item{name: text, exact: exact}, nil
}

// IsZero reports whether c is the zero Choice.
func (c Choice) IsZero() bool { return len(c.items) == 0 }

func (c Choice) String() string {
	var words []string
	for _, i := range c.items {
		words = append(words, i.String())
	}
	text := strings.Join(words, ",")
	if c.except {
		text = "^" + text
	}
	return text
}

// own is an address of this host and the name of the interface that has it. The interface is up.
type own struct {
	name string
	addr netip.Addr
}

// list returns the addresses of this host, grouped by interface, and the names of all interfaces. The
// addresses include loopback addresses. They exclude link-local addresses, which other hosts cannot dial, and
// those of interfaces that are down.
func list() (all []own, names []string, err error) {
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, nil, fmt.Errorf("reading the network interfaces of this host: %w", err)
	}
	for _, i := range interfaces {
		names = append(names, i.Name)
		if i.Flags&net.FlagUp == 0 {
			continue
		}
		addrs, err := i.Addrs()
		if err != nil {
			return nil, nil, fmt.Errorf("reading the addresses of network interface %s: %w", i.Name, err)
		}
		for _, a := range addrs {
			p, err := netip.ParsePrefix(a.String())
			// Link-local addresses are excluded, because a peer could dial one only if it knew which of its
			// own interfaces to use.
			if err != nil || p.Addr().IsLinkLocalUnicast() {
				continue
			}
			all = append(all, own{i.Name, p.Addr().Unmap()})
		}
	}
	return all, names, nil
}

// Addresses returns the addresses of this host that c permits, in the order of c's items. If c is zero, it
// returns all addresses except loopback, in the order in which the system lists them. If c excludes
// interfaces, it does the same for the other ones, and loopback addresses come last. If c is not zero and
// permits no address of this host, Addresses returns an error.
func (c Choice) Addresses() ([]netip.Addr, error) {
	all, names, err := list()
	if err != nil {
		return nil, err
	}
	addrs := c.of(all, names)
	if len(addrs) == 0 && !c.IsZero() {
		var have []string
		for _, o := range all {
			have = append(have, o.name+" "+o.addr.String())
		}
		return nil, fmt.Errorf("network interfaces %s: none is up on this host, whose addresses are %s", c,
			strings.Join(have, ", "))
	}
	return addrs, nil
}

func (c Choice) of(all []own, names []string) (addrs []netip.Addr) {
	add := func(is func(own) bool) {
		for _, o := range all {
			if is(o) && !slices.Contains(addrs, o.addr) {
				addrs = append(addrs, o.addr)
			}
		}
	}
	excluded := func(o own) bool {
		return slices.ContainsFunc(c.items, func(i item) bool { return i.has(o, names) })
	}
	switch {
	case c.IsZero():
		add(func(o own) bool { return !o.addr.IsLoopback() })
	case c.except:
		add(func(o own) bool { return !excluded(o) && !o.addr.IsLoopback() })
		add(func(o own) bool { return !excluded(o) && o.addr.IsLoopback() })
	default:
		for _, i := range c.items {
			add(func(o own) bool { return i.has(o, names) })
		}
	}
	return addrs
}

// Towards returns the address of this host on which a rank should listen if the ranks meet at target, which
// has the form host:port. This is the source address of the route to target if c permits that address.
// Otherwise it is the first address that c permits, preferably one of the same IP version as the address of
// target. Towards sends no packets except to resolve names.
func (c Choice) Towards(ctx context.Context, target string) (netip.Addr, error) {
	local, remote, err := Route(ctx, target)
	if err != nil || c.IsZero() {
		return local, err
	}
	addrs, err := c.Addresses()
	if err != nil || slices.Contains(addrs, local) {
		return local, err
	}
	for _, a := range addrs {
		if a.Is4() == remote.Is4() {
			return a, nil
		}
	}
	return addrs[0], nil
}

// Any returns the address of this host on which a rank should listen if it does not know the rendezvous yet.
// This is the first address that c permits. If c is zero or excludes interfaces, it is the source address of
// the default route. If there is none that c permits, it is the first address that is not loopback, or else
// 127.0.0.1.
func (c Choice) Any() (netip.Addr, error) {
	addrs, err := c.Addresses()
	if err != nil {
		return netip.Addr{}, err
	}
	if c.IsZero() || c.except {
		// These addresses are reserved for documentation (RFC 5737 and 3849), so no route except the default
		// route leads to them. Route sends no packets to them.
		for _, far := range []string{"192.0.2.1:9", "[2001:db8::1]:9"} {
			if local, _, err := Route(context.Background(), far); err == nil &&
				slices.Contains(addrs, local) {
				return local, nil
			}
		}
	}
	if len(addrs) == 0 {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1}), nil
	}
	return addrs[0], nil
}

// Route returns the source address of the route from this host to target, and the address of target. target
// has the form host:port. Route resolves the host name, which may block until ctx ends. Then it connects a
// datagram socket, which makes the kernel look up the route without sending a packet.
func Route(ctx context.Context, target string) (local, remote netip.Addr, err error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "udp", target)
	if err != nil {
		return local, remote, fmt.Errorf("no route to %s: %w", target, err)
	}
	defer conn.Close()
	from, ok := conn.LocalAddr().(*net.UDPAddr)
	to, ok2 := conn.RemoteAddr().(*net.UDPAddr)
	if !ok || !ok2 {
		return local, remote, fmt.Errorf("route to %s: got a %T and a %T, want UDP addresses", target,
			conn.LocalAddr(), conn.RemoteAddr())
	}
	return from.AddrPort().Addr().Unmap(), to.AddrPort().Addr().Unmap(), nil
}

// IsLoopback reports whether only this host can reach addr, which has the form host:port.
func IsLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	ip := net.ParseIP(host)
	return err == nil && (strings.EqualFold(host, "localhost") || ip != nil && ip.IsLoopback())
}

// IsOwn reports whether a is an address of this host, so that a process here can listen on it.
func IsOwn(a netip.Addr) (bool, error) {
	all, _, err := list()
	if err != nil {
		return false, err
	}
	return a.IsLoopback() || slices.ContainsFunc(all, func(o own) bool { return o.addr == a }), nil
}
