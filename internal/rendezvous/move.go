package rendezvous

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/topo"
)

// A rank on the host of the store reaches the store over loopback, and then does not know at which of its
// addresses other hosts reach it, or whether there are other hosts at all. So it listens on loopback when it
// joins. The root sees at which address the ranks of other hosts have connected to it, and makes the ranks on
// loopback listen there before the epoch is complete. If nobody has connected over a network, all ranks are
// on one host and stay on loopback.

// rootHosts returns the addresses at which other hosts may reach a root on ln: the one to publish for ranks
// that do not know a better one and, if the root listens on all addresses of its host, all of them.
func rootHosts(ln net.Listener) (addr string, hosts []string, err error) {
	at, err := netip.ParseAddrPort(ln.Addr().String())
	if err != nil || !at.Addr().IsUnspecified() {
		return ln.Addr().String(), nil, err
	}
	var all netif.Choice
	addrs, err := all.Addresses()
	if err != nil {
		return "", nil, err
	}
	for _, a := range addrs {
		hosts = append(hosts, a.String())
	}
	first, err := all.Any()
	return netip.AddrPortFrom(first, at.Port()).String(), hosts, err
}

// dialAddr returns the address at which this rank dials a root. A root that listens on all addresses of its
// host is on the host of the store, so this rank reaches the root as it has reached the store. If the root
// does not have that address, there is network address translation, which may not forward the port of the
// root.
func (cfg *JoinConfig) dialAddr(root *rendezvouspb.Root) string {
	at, hosts := cfg.StoreHost, root.GetHosts()
	_, port, err := net.SplitHostPort(root.GetAddr())
	if err == nil && hosts != nil && (at.IsLoopback() || slices.Contains(hosts, at.String())) {
		return net.JoinHostPort(at.String(), port)
	}
	return root.GetAddr()
}

// localIP returns the address of this host over which conn runs.
func localIP(conn net.Conn) netip.Addr {
	if a, ok := conn.LocalAddr().(*net.TCPAddr); ok {
		return a.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

// move makes this rank listen on host. It returns the new address of the rank.
func (cfg *JoinConfig) move(host string) (string, error) {
	if cfg.Move == nil {
		return cfg.Self.Addr, nil
	}
	addr, err := cfg.Move(host)
	if err != nil {
		return "", fmt.Errorf("cannot listen on %s, at which ranks of other hosts reach it: %w", host, err)
	}
	return addr, nil
}

// move does what the root asks for with the answer MOVE, and returns the status for the root. host is the
// address in the answer.
func (c *client) move(conn net.Conn, host string) *rendezvouspb.Status {
	if own := localIP(conn); !own.IsLoopback() {
		host = own.String()
	}
	addr, err := c.cfg.move(host)
	if err != nil {
		return &rendezvouspb.Status{Kind: rendezvouspb.Status_FAILED, Text: cut(err.Error(), maxTextBytes)}
	}
	c.cfg.Self.Addr = addr
	return &rendezvouspb.Status{Kind: rendezvouspb.Status_MOVED, Text: addr}
}

// reachedAt returns the address at which a rank of another host has reached the root. It is not valid if all
// ranks have reached the root over loopback. The caller holds r.mu, and all ranks have joined.
func (r *root) reachedAt() netip.Addr {
	for _, m := range r.members[1:] {
		if at := localIP(m.conn); at.IsValid() && !at.IsLoopback() {
			return at
		}
	}
	return netip.Addr{}
}

// moveSelf makes rank 0 listen on the address at which ranks of other hosts have reached the root, if rank 0
// listens on loopback.
func (r *root) moveSelf() error {
	r.mu.Lock()
	var host netip.Addr
	if r.state == forming && r.missing == 0 && netif.IsLoopback(r.cfg.Self.Addr) {
		host = r.reachedAt()
	}
	r.mu.Unlock()
	if !host.IsValid() {
		return nil
	}
	addr, err := r.cfg.move(host.String())
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cfg.Self.Addr = addr
	return nil
}

// moveMembers makes all other ranks that listen on loopback listen on addresses that ranks of other hosts can
// dial. It reports whether all of them do. The caller holds r.mu, and all ranks have joined.
func (r *root) moveMembers() (done bool) {
	host := r.reachedAt()
	if !host.IsValid() {
		return true
	}
	done = true
	for rank, m := range r.members {
		if rank == 0 || m.moved || !netif.IsLoopback(m.q.record.Addr) {
			continue
		}
		if done = false; !m.moving {
			m.moving = true
			r.send(rank, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_MOVE, Text: host.String()})
		}
	}
	return done
}

// mayBeforeTable reports whether a member may send s before all ranks have joined. The caller holds root.mu.
func (g *caller) mayBeforeTable(s *rendezvouspb.Status) bool {
	switch s.GetKind() {
	case rendezvouspb.Status_TIMEOUT:
		return true
	case rendezvouspb.Status_MOVED:
		return g.moving && checkName("data address", s.GetText()) == nil
	case rendezvouspb.Status_FAILED:
		return g.moving
	}
	return false
}

// noteMoved processes what a member has answered to MOVE. The caller holds r.mu, and r is forming.
func (r *root) noteMoved(g *caller, s *rendezvouspb.Status) {
	rank := g.q.GetRank()
	if s.GetKind() == rendezvouspb.Status_FAILED {
		r.fail(refuse(NoAddress, "rank %d, %v: %s", rank, g.q.record, s.GetText()))
		return
	}
	g.q.record.Addr = s.GetText()
	g.moving, g.moved = false, true
	r.signal()
}

// moving returns the ranks that do not yet listen where the root has asked them to, and a text that lists
// them. The caller holds r.mu.
func (r *root) moving() (ranks []topo.Rank, text string) {
	for rank, m := range r.members {
		if m != nil && m.moving {
			ranks = append(ranks, topo.Rank(rank))
		}
	}
	return ranks, strings.TrimSpace(topo.FormatRanks(ranks) + " to listen on another address")
}
