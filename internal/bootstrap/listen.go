package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/netif"
)

// allAddresses is the address of a listener on all addresses of this host, of both IP versions.
const allAddresses = "0.0.0.0"

// Addresses are the addresses of a rank on its host. The ranks find the rest out when they join: if Listen is
// on loopback and other hosts take part in the job, the root knows at which address they reach this host, and
// this rank listens there (rendezvous.JoinConfig.Move).
type Addresses struct {
	// Listen is the address on which the rank listens when it joins.
	Listen string
	// Chosen is true if the user has chosen Listen, so that the rank must not listen elsewhere.
	Chosen bool
	// Root is the address on which this rank opens the root, if it is rank 0. It is 0.0.0.0 for all addresses
	// of this host.
	Root string
	// StoreHost is the address at which this rank has reached the store. It is the zero Addr if the rank
	// serves the store, or if the store has no address.
	StoreHost netip.Addr
}

// loopbackOnly returns the addresses of a rank whose job is on one host.
func loopbackOnly() Addresses { return Addresses{Listen: loopback, Root: loopback} }

// choose makes the rank listen on the interface that the user has chosen, or on loopback if the user has
// chosen none.
func (m *Meeting) choose(choice netif.Choice) error {
	if choice.IsZero() {
		return nil
	}
	addr, err := choice.Any()
	m.Addresses = Addresses{Listen: addr.String(), Chosen: true, Root: addr.String()}
	return err
}

// listenTowards makes the rank listen on the interface that leads to the store at target, host:port, or on
// one that the user has chosen.
func (m *Meeting) listenTowards(ctx context.Context, target string, choice netif.Choice) error {
	addr, err := choice.Towards(ctx, target)
	m.Addresses = Addresses{Listen: addr.String(), Chosen: !choice.IsZero(), Root: addr.String()}
	return err
}

// findAddresses finds the addresses of this rank in a job that may have ranks on several hosts. The store of
// m is on the host of one of them.
func (m *Meeting) findAddresses(ctx context.Context, choice netif.Choice) error {
	switch {
	case !choice.IsZero():
		return m.choose(choice)
	case m.Served.IsUnspecified():
		m.Root = allAddresses
		return nil
	case m.Served.IsValid():
		m.Listen, m.Root = m.Served.String(), m.Served.String()
		return nil
	}
	local, remote, err := netif.Route(ctx, m.Addr)
	if err != nil {
		return err
	}
	m.Listen, m.Root, m.StoreHost = local.String(), local.String(), remote
	// The name of the store's host may stand for a loopback address only on that host.
	if local.IsLoopback() && !netif.IsLoopback(m.Addr) && (!m.Secret.IsZero() || m.Settings.Insecure) {
		m.Root = allAddresses
	}
	return nil
}

// checkSecret returns an error if the job has no secret and one is needed. One is needed if TLS is on, or if
// the job would accept connections from the network and the user has not permitted that without a secret.
func (m *Meeting) checkSecret() error {
	if err := m.CheckListen(m.Listen); err != nil {
		return err
	}
	return m.CheckListen(m.Root)
}

// CheckListen returns an error if this rank must not listen on an address, because the job has no secret and
// needs one for that.
func (m *Meeting) CheckListen(addr string) error {
	ip, err := netip.ParseAddr(addr)
	if err != nil {
		return fmt.Errorf("parsing the address to listen on: %w", err)
	}
	if m.Settings.Size > 1 && m.Secret.IsZero() && m.Settings.TLS {
		return errors.New("HVD_TLS is set, but the job has no secret: set HVD_SECRET_FILE at all ranks to a file with the same contents, at least 16 bytes")
	}
	if m.Settings.Size > 1 && m.Secret.IsZero() && !m.Settings.Insecure && !ip.IsLoopback() {
		return fmt.Errorf("the ranks would listen on the network address %s without a secret: set HVD_SECRET_FILE on all hosts to a file with "+
			"the same contents, at least 16 bytes, or HVD_INSECURE=1 to accept any process that can connect to the ports", ip)
	}
	return nil
}

// lookupTime is how long rank 0 retries to look up its own name. The retries are needed because the DNS name
// of a pod may appear only shortly after the pod has started. The other ranks retry until they succeed or ctx
// ends.
const lookupTime = 2 * time.Second

// listenHost returns the address on which rank 0 must listen if the other ranks dial host. An empty address
// means all interfaces.
func (e *Env) listenHost(ctx context.Context, o MeetOptions, host string) (string, error) {
	if e.OneHost() {
		return loopback, nil
	}
	if o.Interfaces.IsZero() {
		return "", nil
	}
	chosen, err := o.Interfaces.Addresses()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	var addrs []netip.Addr
	err = dial.Retry(ctx, func() (err error) {
		addrs, err = o.addresses(ctx, host)
		return err
	})
	for _, a := range addrs {
		if slices.Contains(chosen, a) {
			return a.String(), nil
		}
	}
	if o.Log != nil {
		o.Log.Warn("the store listens on all interfaces, because the name that the other ranks dial does not resolve to an address of the chosen interfaces",
			zap.String("name", host), zap.Stringers("addresses", addrs), zap.Stringer("chosen", o.Interfaces),
			zap.Error(err))
	}
	return "", nil
}

// addresses returns the addresses to which the name of a host resolves on this host.
func (o *MeetOptions) addresses(ctx context.Context, host string) ([]netip.Addr, error) {
	if o.resolver != nil {
		text, err := o.resolver(ctx, host)
		if err != nil {
			return nil, err
		}
		a, err := netip.ParseAddr(text)
		return []netip.Addr{a}, err
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	for i := range addrs {
		addrs[i] = addrs[i].Unmap()
	}
	return addrs, err
}
