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
	"strings"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/meeting"
	opsshm "github.com/gohvd/gohvd/ops/shm"
	"github.com/gohvd/gohvd/rendezvous"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
	"github.com/gohvd/gohvd/transport/shm"
	"github.com/gohvd/gohvd/transport/tcp"
)

// Config says who joins what.
type Config struct {
	// At is where the ranks meet. It stays the caller's. Their number is at least 2.
	At *meeting.Meeting
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

	met *rendezvous.Session
}

// Open waits until all ranks of the job are there, ctx ends, or something contradicts. On error nothing is left open.
func Open(ctx context.Context, cfg Config) (*Session, error) {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	s := new(Session)
	if err := s.open(ctx, &cfg); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Close lets go of all but the mesh.
func (s *Session) Close() error {
	if s.met == nil {
		return nil
	}
	return s.met.Close()
}

func (s *Session) open(ctx context.Context, cfg *Config) (err error) {
	at := cfg.At
	set := &at.Settings
	endpoint, err := tcp.Listen(tcp.Config{ListenAddr: net.JoinHostPort(at.Listen, "0"), DialTimeout: set.StartTimeout, Secret: at.Secret, Log: cfg.Log})
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
	host, err := meeting.HostID(set)
	if err != nil {
		return abandon(err)
	}
	s.met, err = rendezvous.Join(ctx, rendezvous.JoinConfig{
		Store: at.Store, Job: set.JobID, Rank: topo.Rank(set.Rank), Size: set.Size,
		LastEpoch: cfg.LastEpoch, ListenHost: at.Listen, Secret: at.Secret,
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
	if cfg.At.Settings.SharedMemory == config.SharedNever {
		return nil, nil
	}
	e, err := shm.Listen(shm.Config{Log: cfg.Log})
	if err != nil {
		e = shm.Unavailable(err)
	}
	return e, e.Card()
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
