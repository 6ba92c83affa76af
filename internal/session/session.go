// Package session brings a rank into its job: it meets the other ranks, connects to them, and shares memory with those of
// its host.
package session

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	opsshm "github.com/gohvd/gohvd/ops/shm"
	"github.com/gohvd/gohvd/rendezvous"
	"github.com/gohvd/gohvd/secret"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
	"github.com/gohvd/gohvd/transport/shm"
	"github.com/gohvd/gohvd/transport/tcp"
)

// Config says who joins what.
type Config struct {
	// Settings name the job, the rank, its store and its host. Size is at least 2.
	Settings config.Config
	// Store is where the ranks meet. It stays the caller's. Nil means the launcher's.
	Store store.Store
	// LastEpoch is the greatest epoch that this process has been in.
	LastEpoch uint64
	// Info is what this rank tells all others.
	Info []byte
	Log  *zap.Logger
}

// Session is a rank's part in an epoch.
type Session struct {
	Epoch uint64
	// Mesh connects the ranks. Who runs the rank owns and closes it.
	Mesh transport.Mesh
	// Memory is shared by all ranks of the job; nil if they share none. It lives as long as the mesh.
	Memory opsshm.Memory
	// Hosts are the names of the ranks' hosts, and Infos what they told, both by rank.
	Hosts []string
	Infos [][]byte
	// LocalSize is the number of ranks that have this one's host.
	LocalSize int
	// Store is where the ranks met.
	Store store.Store

	dialed bool // the store is the session's
	met    *rendezvous.Session
}

// Open waits until all ranks of the job are there, ctx ends, or something contradicts. On error nothing is left open.
func Open(ctx context.Context, cfg Config) (*Session, error) {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	s := &Session{Store: cfg.Store}
	if err := s.open(ctx, &cfg); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Close lets go of all but the mesh.
func (s *Session) Close() error {
	var errs []error
	if s.met != nil {
		errs = append(errs, s.met.Close())
	}
	if s.dialed {
		errs = append(errs, s.Store.Close())
	}
	return errors.Join(errs...)
}

func (s *Session) open(ctx context.Context, cfg *Config) (err error) {
	set := &cfg.Settings
	key, err := secretOf(set)
	if err != nil {
		return err
	}
	listen := "127.0.0.1"
	if s.Store == nil {
		address := net.JoinHostPort(set.RendezvousAddr, strconv.Itoa(set.RendezvousPort))
		if listen, err = addressTowards(address); err != nil {
			return err
		}
		if ip := net.ParseIP(listen); key.IsZero() && !set.Insecure && !ip.IsLoopback() {
			return fmt.Errorf("the ranks meet at %s over the network and have no secret: set HVD_SECRET_FILE to a file with the same "+
				"16 bytes or more on all hosts, or HVD_INSECURE=1 to let anybody take part who reaches the ports", address)
		}
		if s.Store, err = store.Dial(ctx, address, store.Config{Secret: key}); err != nil {
			return err
		}
		s.dialed = true
	}
	endpoint, err := tcp.Listen(tcp.Config{ListenAddr: net.JoinHostPort(listen, "0"), DialTimeout: set.StartTimeout, Secret: key, Log: cfg.Log})
	if err != nil {
		return err
	}
	local, card := shareOut(cfg)
	abandon := func(err error) error {
		if local != nil {
			err = errors.Join(err, local.Close())
		}
		return errors.Join(err, endpoint.Close())
	}
	host, err := hostID(set)
	if err != nil {
		return abandon(err)
	}
	s.met, err = rendezvous.Join(ctx, rendezvous.JoinConfig{
		Store: s.Store, Job: set.JobID, Rank: topo.Rank(set.Rank), Size: set.Size,
		LastEpoch: cfg.LastEpoch, ListenHost: listen, Secret: key,
		Self: rendezvous.Record{Addr: endpoint.Addr(), Host: set.Hostname, PID: os.Getpid(), Info: pack(host, card, cfg.Info)},
		Log:  cfg.Log,
	})
	if err != nil {
		return abandon(err)
	}
	s.Epoch = s.met.Epoch
	var addrs, ids []string
	var cards [][]byte
	for r, rec := range s.met.Records {
		id, card, info, err := unpack(rec.Info)
		if err != nil {
			return abandon(fmt.Errorf("what rank %d says about itself: %w", r, err))
		}
		addrs, s.Hosts = append(addrs, rec.Addr), append(s.Hosts, rec.Host)
		ids, cards, s.Infos = append(ids, id), append(cards, card), append(s.Infos, info)
		if id == host {
			s.LocalSize++
		}
	}
	s.Mesh, err = endpoint.Connect(tcp.Epoch{Job: set.JobID, Epoch: s.Epoch, Rank: topo.Rank(set.Rank), Addrs: addrs})
	if err != nil {
		return abandon(err)
	}
	if local == nil {
		return nil
	}
	epoch := shm.Epoch{Job: set.JobID, Epoch: s.Epoch, Rank: topo.Rank(set.Rank), Hosts: ids, Cards: cards, Under: s.Mesh}
	if s.LocalSize == set.Size {
		// The set of all ranks will need it, and if it cannot be had the ranks are still free to use TCP.
		epoch.Reserve = map[transport.Lane]int64{transport.DataLane(topo.Global): opsshm.SegmentBytes(set.Size, opsshm.Config{})}
	}
	mesh, err := local.Connect(ctx, epoch)
	if err != nil {
		return err
	}
	s.Mesh = mesh
	if err := s.share(mesh, set, cfg.Log); err != nil {
		return errors.Join(err, mesh.Close())
	}
	return nil
}

// secretOf is the secret of the job: that of the launcher, or that of a file.
func secretOf(set *config.Config) (secret.Secret, error) {
	name, text := "HVD_SECRET", set.Secret
	if text == "" && set.SecretFile != "" {
		b, err := os.ReadFile(set.SecretFile)
		if err != nil {
			return secret.Secret{}, fmt.Errorf("HVD_SECRET_FILE: %w", err)
		}
		name, text = "HVD_SECRET_FILE "+set.SecretFile, string(b)
	}
	if text == "" {
		if name != "HVD_SECRET" {
			return secret.Secret{}, fmt.Errorf("%s is empty", name)
		}
		return secret.Secret{}, nil
	}
	s, err := secret.Parse(text)
	if err != nil {
		return s, fmt.Errorf("%s: %w", name, err)
	}
	return s, nil
}

// share uses the shared memory of mesh as the settings say.
func (s *Session) share(mesh shm.Sharer, set *config.Config, log *zap.Logger) error {
	if len(mesh.Group()) == set.Size {
		s.Memory = mesh
		return nil
	}
	why := mesh.Why()
	switch {
	case why == "" && set.SharedMemory == config.SharedAlways:
		return fmt.Errorf("HOROVOD_CPU_OPERATIONS is shm, but the ranks are on several hosts: %s", strings.Join(s.Hosts, ", "))
	case why == "":
		return nil
	case set.SharedMemory == config.SharedIfPossible:
		log.Warn("the ranks share no memory and use TCP", zap.String("why", why))
		return nil
	}
	return fmt.Errorf("the ranks of this host cannot share memory: %s (HOROVOD_CPU_OPERATIONS=shm,tcp uses TCP then)", why)
}

// shareOut opens this rank's door for file descriptors, if memory is to be shared, and makes the card that says where. That
// it cannot be opened is told to the others like any other reason.
func shareOut(cfg *Config) (*shm.Endpoint, []byte) {
	if cfg.Settings.SharedMemory == config.SharedNever {
		return nil, nil
	}
	e, err := shm.Listen(shm.Config{Log: cfg.Log})
	if err != nil {
		e = shm.Unavailable(err)
	}
	return e, e.Card()
}

// hostID is the identity of this host's memory.
func hostID(set *config.Config) (string, error) {
	if set.HostID != "" {
		return topo.HostID(set.HostID, "", "", ""), nil
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("HVD_HOSTID is not set and the host does not say when it was booted: %w", err)
	}
	netns, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return "", fmt.Errorf("HVD_HOSTID is not set and the host does not name the network namespace: %w", err)
	}
	return topo.HostID("", set.Hostname, strings.TrimSpace(string(boot)), netns), nil
}

// pack puts a rank's host, its card and its info into one record: the first two behind their lengths, u16 each.
func pack(host string, card, info []byte) []byte {
	var b []byte
	for _, part := range [][]byte{[]byte(host), card} {
		b = binary.LittleEndian.AppendUint16(b, uint16(len(part)))
		b = append(b, part...)
	}
	return append(b, info...)
}

func unpack(b []byte) (host string, card, info []byte, err error) {
	var parts [2][]byte
	for i := range parts {
		if len(b) < 2 {
			return "", nil, nil, fmt.Errorf("%d bytes where a length should be", len(b))
		}
		n := int(binary.LittleEndian.Uint16(b))
		if b = b[2:]; len(b) < n {
			return "", nil, nil, fmt.Errorf("%d bytes, want %d", len(b), n)
		}
		parts[i], b = b[:n], b[n:]
	}
	return string(parts[0]), parts[1], b, nil
}

// addressTowards is the address of this host from which the store is reached: the one to listen on. Connecting a
// datagram socket sends nothing; it only asks for the route.
func addressTowards(store string) (string, error) {
	c, err := net.Dial("udp", store)
	if err != nil {
		return "", fmt.Errorf("no route to the rendezvous store at %s: %w", store, err)
	}
	defer c.Close()
	host, _, err := net.SplitHostPort(c.LocalAddr().String())
	return host, err
}
