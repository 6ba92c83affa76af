// Package shm lets the ranks of one host share memory, and carries the negotiation between them in shared
// memory.
//
// A rank opens an Endpoint and publishes its Offer with its check-in record. When it knows all offers and has
// a mesh that reaches all ranks (package tcp), it calls Connect. The lowest rank of a host, the leader, then
// connects to each other rank of the host over a Unix socket, and both ends authenticate each other. After
// that, ranks send file descriptors to the leader, which passes them on, and the leader tells the others
// which rank has gone. They agree on whether all of this has succeeded: either all ranks of a host share
// memory or none does. In the mesh that Connect returns, the Control lane between the leader and another rank
// of the host is in shared memory, and all other channels use the mesh underneath. The backends get memory
// for their lanes through Sharer. docs/execution.md describes the formats, and what happens when a rank dies.
//
// Invariants:
//
//  1. No rank writes to another rank's memory. A rank checks values that a peer wrote before it uses them.
//  2. The socket is in the file system only until Connect returns. If the owner of the socket is killed
//     before that, the next process that makes a folder with package rundir removes the socket.
//  3. A Unix connection ends exactly when one of its two processes ends or closes its mesh. No rank closes a
//     connection before it gives up the mesh.
//  4. A leader that closes its mesh passes on no more memory. So the others must not need it any more, or must
//     have been told that the epoch has failed.
//  5. Connections and memory belong to one epoch. The next epoch makes new ones.
package shm

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/rundir"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

const (
	// defaultRingBytes is enough for about a hundred frames of the negotiation.
	defaultRingBytes        = 64 << 10
	minRingBytes            = 64
	maxRingBytes            = 1 << 30
	defaultHandshakeTimeout = 10 * time.Second
	network                 = "unixpacket"
	maxJobBytes             = 64
)

// Config configures an Endpoint. If a field is zero, its default applies.
type Config struct {
	// RuntimeDir is the value of XDG_RUNTIME_DIR, or "". The socket is in a folder that package rundir makes.
	RuntimeDir string
	// RingBytes is the size of the ring to each peer: the number of bytes that can be sent on the Control
	// channel before the sender waits for the peer to read. It must be a power of two from 64 bytes to 1 GiB.
	// The leader allocates one ring for each peer on its host, any other rank one for the leader. The default
	// is 64 KiB.
	RingBytes int
	// HandshakeTimeout is the time limit for the handshake, counted from the time when the peer connects. The
	// default is 10 s.
	HandshakeTimeout time.Duration
	// Log receives a warning for each refused connection. If it is nil, warnings are discarded.
	Log *zap.Logger
}

// Endpoint is a socket at which the peers of a host connect. Connect makes a mesh from it. An Endpoint serves
// one epoch.
type Endpoint struct {
	cfg   Config
	log   *zap.Logger
	offer Offer
	dir   *rundir.Dir       // the folder of the socket; nil if this rank cannot share memory
	ln    *net.UnixListener // nil if this rank cannot share memory

	mu        sync.Mutex
	connected bool
	closed    bool
}

// Listen makes the socket. If the caller does not call Connect, the caller must call Close.
func Listen(cfg Config) (*Endpoint, error) {
	e, err := newEndpoint(cfg)
	if err != nil {
		return nil, err
	}
	if err := e.listen(); err != nil {
		return nil, fmt.Errorf("shm: listen: %w", errors.Join(err, e.Close()))
	}
	return e, nil
}

// Unavailable returns the Endpoint of a rank that cannot share memory, for example because Listen failed. Its
// Offer contains the reason. So the other ranks do not wait for this rank, and their UnsharedReason names it.
func Unavailable(reason error) *Endpoint {
	e := &Endpoint{log: zap.NewNop()}
	text := reason.Error()
	e.offer = Offer{UID: uint32(os.Geteuid()),
		Reason: strings.ToValidUTF8(text[:min(len(text), maxReasonBytes)], "?")}
	return e
}

func newEndpoint(cfg Config) (*Endpoint, error) {
	if cfg.RingBytes == 0 {
		cfg.RingBytes = defaultRingBytes
	}
	if n := cfg.RingBytes; n < minRingBytes || n > maxRingBytes || n&(n-1) != 0 {
		return nil, fmt.Errorf("shm: listen: got ring size %d, want a power of two from %d to %d", n,
			minRingBytes, maxRingBytes)
	}
	if cfg.HandshakeTimeout == 0 {
		cfg.HandshakeTimeout = defaultHandshakeTimeout
	}
	e := &Endpoint{cfg: cfg, log: cfg.Log}
	if e.log == nil {
		e.log = zap.NewNop()
	}
	e.offer = Offer{UID: uint32(os.Geteuid()), Token: make([]byte, tokenBytes)}
	if _, err := rand.Read(e.offer.Token); err != nil {
		return nil, fmt.Errorf("shm: listen: %w", err)
	}
	return e, nil
}

// listen makes the socket in a folder of its own and listens on it.
func (e *Endpoint) listen() (err error) {
	if e.dir, err = rundir.New(e.cfg.RuntimeDir); err != nil {
		return err
	}
	path := filepath.Join(e.dir.Path(), "s")
	if len(path) > maxPathBytes {
		return fmt.Errorf("set TMPDIR to a folder with a shorter path: a socket in %s has a path of %d bytes, want at most %d",
			filepath.Dir(e.dir.Path()), len(path), maxPathBytes)
	}
	if e.ln, err = net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network}); err != nil {
		return err
	}
	e.ln.SetUnlinkOnClose(false) // Close removes the folder
	e.offer.Socket = path
	return nil
}

// Offer returns what the other ranks must know to share memory with this rank. It contains a secret: a
// process that knows it and runs as the same user can impersonate this rank until its peers have connected.
func (e *Endpoint) Offer() Offer { return e.offer }

// Close removes the socket. After a call of Connect it does nothing.
func (e *Endpoint) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed || e.dir == nil {
		return nil
	}
	e.closed = true
	err := e.dir.Close()
	if e.ln != nil {
		err = errors.Join(err, e.ln.Close())
	}
	if err != nil {
		err = fmt.Errorf("shm: close: %w", err)
	}
	return err
}

// Epoch describes the epoch to connect, as the ranks agreed on it in the rendezvous. All ranks have the same
// values of the fields Job, Epoch, Hosts and Offers.
type Epoch struct {
	// Job identifies the job. It has 1 to 64 arbitrary bytes.
	Job string
	// Epoch is the number of the epoch. It is greater than the numbers of all earlier epochs of the job.
	Epoch uint64
	// Rank is the number of this rank.
	Rank topo.Rank
	// Hosts[r] identifies the host of rank r.
	Hosts []string
	// Offers[r] is the offer of rank r.
	Offers []Offer
	// Reserve holds, for each lane, the number of bytes that this rank will pass to Share. Connect allocates
	// them before the ranks agree. So if a rank lacks the memory, the ranks agree to share no memory.
	Reserve map[transport.Lane]int64
	// Agree calls the function try, which connects this rank to the other ranks of the host, and tells the
	// others the result (rendezvous.Session.Agree). It returns the ranks of this host at which try failed,
	// with the reasons, and a rank of each other host on which try failed. When try fails at a rank, Agree
	// cancels the context of try at the other ranks of the host. Connect calls Agree once at every rank of
	// the job.
	Agree func(ctx context.Context, try func(context.Context) error) (failed map[topo.Rank]string, err error)
	// Under is a mesh that reaches all ranks. Connect takes ownership of Under. If Connect fails, it closes
	// Under. If Connect succeeds, Close of the new mesh also closes Under.
	Under transport.Mesh
}

func (ep *Epoch) validate() error {
	if len(ep.Job) < 1 || len(ep.Job) > maxJobBytes {
		return fmt.Errorf("shm: connect: the job identity has %d bytes, want 1 to %d", len(ep.Job), maxJobBytes)
	}
	if ep.Rank < 0 || int(ep.Rank) >= len(ep.Hosts) || len(ep.Offers) != len(ep.Hosts) {
		return fmt.Errorf("shm: connect: got %[2]d host identities and %[3]d socket offers at rank %[1]d, want one of each for every rank", ep.Rank, len(ep.Hosts), len(ep.Offers))
	}
	return nil
}

// Connect makes the mesh of the epoch. It returns when the ranks of this host have agreed on whether they
// share memory. If ctx ends first, it returns an error. If the ranks cannot share memory, this is not an
// error: Connect returns a mesh whose Group is only this rank, and whose UnsharedReason says why.
func (e *Endpoint) Connect(ctx context.Context, ep Epoch) (Sharer, error) {
	m, err := e.connect(ctx, &ep)
	if err != nil {
		return nil, errors.Join(err, e.Close(), ep.Under.Close())
	}
	if err := errors.Join(e.Close(), m.begin()); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

func (e *Endpoint) connect(ctx context.Context, ep *Epoch) (*Mesh, error) {
	if err := ep.validate(); err != nil {
		return nil, err
	}
	e.mu.Lock()
	again := e.connected || e.closed
	e.connected = true
	e.mu.Unlock()
	if again {
		return nil, errors.New(
			"shm: connect: the endpoint is closed or was connected before: an endpoint serves only one epoch")
	}
	excluded := checkOffers(ep)
	m := newMesh(e, ep)
	if x, bad := excluded[ep.Hosts[ep.Rank]]; bad {
		m.unshared = *x
	}
	failed, err := m.form(ctx, e, ep)
	m.groups = groups(ep.Hosts, func(host string, r topo.Rank) bool {
		_, bad := excluded[host]
		_, fails := failed[r]
		return bad || fails
	})
	return m, err
}

// groups returns, for each rank, the lowest rank with which the rank shares memory, which may be the rank
// itself. hosts are the hosts of the ranks. If the function unshared returns true for any rank of a host, the
// ranks of the host share no memory.
func groups(hosts []string, unshared func(host string, r topo.Rank) bool) []topo.Rank {
	lowest, apart := make(map[string]topo.Rank), make(map[string]bool)
	for r, host := range hosts {
		if _, seen := lowest[host]; !seen {
			lowest[host] = topo.Rank(r)
		}
		apart[host] = apart[host] || unshared(host, topo.Rank(r))
	}
	all := make([]topo.Rank, len(hosts))
	for r, host := range hosts {
		all[r] = lowest[host]
		if apart[host] {
			all[r] = topo.Rank(r)
		}
	}
	return all
}

// exclusion holds the ranks of a host that cannot share memory, and the reason of each of them.
type exclusion struct {
	ranks   []topo.Rank
	reasons []string
}

func (x *exclusion) add(r topo.Rank, reason string) {
	x.ranks, x.reasons = append(x.ranks, r), append(x.reasons, reason)
}

// String returns the different reasons, each with the ranks that have it. It is empty if there are no ranks.
func (x *exclusion) String() string { return topo.FormatReasons(x.ranks, ": ", x.reasons) }

// checkOffers checks the offers. For each host whose ranks cannot share memory, the map that it returns
// contains the reasons. All ranks compute the same result.
func checkOffers(ep *Epoch) (excluded map[string]*exclusion) {
	excluded = make(map[string]*exclusion)
	first := make(map[string]topo.Rank)
	for r := range ep.Offers {
		host, reason := ep.Hosts[r], ""
		lowest, seen := first[host]
		if !seen {
			first[host], lowest = topo.Rank(r), topo.Rank(r)
		}
		if err := ep.Offers[r].check(); err != nil {
			reason = err.Error()
		} else if uid, other := ep.Offers[r].UID, &ep.Offers[lowest]; uid != other.UID &&
			other.check() == nil {
			reason = fmt.Sprintf("it runs as user %d, but rank %d runs as user %d", uid, lowest, other.UID)
		}
		if reason != "" {
			if excluded[host] == nil {
				excluded[host] = new(exclusion)
			}
			excluded[host].add(topo.Rank(r), reason)
		}
	}
	for host := range excluded {
		if n := len(slices.DeleteFunc(slices.Clone(ep.Hosts), func(h string) bool {
			return h != host
		})); n == 1 {
			delete(excluded, host) // the rank is alone on its host
		}
	}
	return excluded
}
