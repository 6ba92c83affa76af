package rank

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"net"
	"os"
	"runtime"
	"strings"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rendezvous"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/shm"
	"github.com/gohvd/gohvd/internal/transport/tcp"
	opsshm "github.com/gohvd/gohvd/ops/shm"
)

// SessionConfig has the parameters of OpenSession.
type SessionConfig struct {
	// At is the place where the ranks meet. The caller owns it. The job has at least 2 ranks.
	At *bootstrap.Meeting
	// LastEpoch is the last epoch in which this process took part.
	LastEpoch uint64
	// Terms has values, by name, that must be equal at all ranks. OpenSession adds the settings that must be
	// equal.
	Terms map[string]string
	// Device is the name of this rank's accelerator (rendezvous.Record).
	Device       string
	SharesDevice bool
	// Capabilities says which further backends this rank can serve (rendezvous.Record). OpenSession adds the
	// backends that this package knows.
	Capabilities map[string]string
	Log          *zap.Logger

	ringAbove  int      // see rendezvous.JoinConfig.RingAbove; tests set a smaller number
	processors []uint64 // see rendezvous.Record; tests set others than those of this process
}

// Session has the connections of a rank to the other ranks in one epoch.
type Session struct {
	Epoch uint64
	// Mesh connects the ranks. The engine owns and closes it.
	Mesh transport.Mesh
	// Memory is the memory that this rank shares with other ranks. It is nil if no two ranks of the job share
	// memory. It is valid until the mesh is closed.
	Memory transport.Memory
	// Groups has, for each rank, the lowest rank with which it shares memory, which may be the rank itself.
	// It is nil if Memory is nil.
	Groups []topo.Rank
	// Hosts has the host name of each rank, in the order of the ranks. It is nil when the engine runs.
	Hosts []string
	// Capabilities says for each rank which backends it can serve (rendezvous.Record). It is nil when the
	// engine runs.
	Capabilities []map[string]string
	// LocalSize is the number of ranks on the host of this rank, and Processors the number of processors on
	// which they may run. A launcher may have bound each rank to processors of its own.
	LocalSize, Processors int
	first                 bool // whether this rank is the lowest one of its host

	rank   topo.Rank
	joined *rendezvous.Session
	// superseded reports whether the launcher has changed the ranks of an elastic job meanwhile.
	superseded func() bool
	// opened are the ranks that share their memory for the lane of the global set before the first operation.
	opened []topo.Rank
}

// OpenSession joins this rank to the other ranks of the job. It waits until all ranks have joined. It fails
// if ctx ends, or if the ranks' records or settings contradict each other. If it fails, it closes everything
// that it has opened.
func OpenSession(ctx context.Context, cfg SessionConfig) (*Session, error) {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	if cfg.processors == nil {
		cfg.processors = affinity()
	}
	s := &Session{superseded: func() bool { return errors.Is(context.Cause(ctx), errSuperseded) }}
	if err := s.open(ctx, &cfg); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	s.joined.Records = nil // nothing reads them any more
	return s, nil
}

// Watch returns a context that ends if a rank fails before all ranks are Ready (see
// rendezvous.Session.Watch).
func (s *Session) Watch(ctx context.Context) (context.Context, func()) { return s.joined.Watch(ctx) }

// Ready waits until every rank is connected to all other ranks. If the members of the global set use shared
// memory, it also waits until every rank has mapped the memory of its peers for the lane of that set. All
// ranks get the same error. If the launcher of an elastic job changes the ranks meanwhile, Ready returns an
// error, unless all ranks are ready: then this rank goes on, because the others would blame it if it left.
func (s *Session) Ready(ctx context.Context) error {
	for _, r := range s.opened {
		if _, err := s.Memory.Peer(ctx, transport.DataLane(topo.Global), r); err != nil {
			return err
		}
	}
	err := s.joined.Ready(ctx)
	if err != nil && s.superseded() && s.joined.Leave(errSuperseded.Error()) {
		return nil
	}
	return err
}

// Fail reports to the other ranks that this rank has failed because of err. It returns the reason why the
// epoch has failed. This is err, or a *rendezvous.FailedError that names another rank. If the launcher of an
// elastic job has changed the ranks, the others leave the epoch too, so Fail only returns err.
func (s *Session) Fail(err error) error {
	if s.superseded() {
		return err
	}
	err = dial.ExplainLimit(err)
	if memory, ok := errors.AsType[*memoryError](err); ok {
		return s.joined.Fail(err, memory.ranks...)
	}
	if peer, ok := errors.AsType[*transport.PeerError](err); ok && !dial.LacksResource(err) {
		return s.joined.Fail(err, s.rank, peer.Peer)
	}
	if dial.MayRecover(err) || errors.Is(err, context.Canceled) {
		return s.joined.Fail(err) // blame no rank, because another rank may be the cause
	}
	return s.joined.Fail(err, s.rank)
}

// forget drops what is needed only until the engine runs. In a large job, this is most of the memory of s.
func (s *Session) forget() {
	if s != nil {
		s.Hosts, s.Capabilities = nil, nil
	}
}

// Close closes everything except the mesh.
func (s *Session) Close() error {
	if s.joined == nil {
		return nil
	}
	return s.joined.Close()
}

func (s *Session) open(ctx context.Context, cfg *SessionConfig) (err error) {
	at := cfg.At
	set := &at.Settings
	listen := func(host string) (*tcp.Endpoint, error) {
		return tcp.Listen(tcp.Config{ListenAddr: net.JoinHostPort(host, "0"),
			DialTimeout: set.StartTimeout, LivenessTimeout: set.LivenessTimeout, Secret: at.Secret,
			Log: cfg.Log})
	}
	endpoint, err := listen(at.Listen)
	if err != nil {
		return err
	}
	var move func(host string) (string, error)
	if !at.Chosen {
		move = func(host string) (string, error) {
			if err := at.CheckListen(host); err != nil {
				return "", err
			}
			moved, err := listen(host)
			if err != nil {
				return "", err
			}
			err = endpoint.Close() // no rank has its address yet
			endpoint = moved
			return endpoint.Addr(), err
		}
	}
	local, offer := listenShared(cfg)
	// abandon closes everything that open has opened so far, and returns err.
	abandon := func(err error) error {
		if s.Mesh != nil {
			err = errors.Join(err, s.Mesh.Close())
		}
		if local != nil {
			err = errors.Join(err, local.Close())
		}
		return errors.Join(err, endpoint.Close())
	}
	host, err := bootstrap.HostID(set)
	if err != nil {
		return abandon(err)
	}
	cfg.Log.Debug("init: joining the other ranks")
	terms := set.Terms()
	maps.Copy(terms, cfg.Terms)
	maps.Copy(terms, at.Terms)
	s.joined, err = rendezvous.Join(ctx, rendezvous.JoinConfig{
		Store: at.Store, Job: set.JobID, Rank: topo.Rank(set.Rank), Size: set.Size,
		LastEpoch: cfg.LastEpoch, ListenHost: at.Root, StoreHost: at.StoreHost, Move: move,
		Secret: at.Secret, Terms: terms,
		Self: rendezvous.Record{
			Addr: endpoint.Addr(), Host: set.Hostname, HostID: host, PID: os.Getpid(),
			Capabilities: capabilities(cfg, offer), Memory: rendezvous.Memory(offer),
			Device: cfg.Device, SharesDevice: cfg.SharesDevice,
			Processors: cfg.processors,
		},
		RingAbove: cfg.ringAbove,
		Log:       cfg.Log,
	})
	if err != nil {
		return abandon(err)
	}
	s.rank, s.Epoch = topo.Rank(set.Rank), s.joined.Epoch
	cfg.Log.Debug("init: all ranks have joined", zap.Uint64("epoch", s.Epoch))
	watched, stop := s.Watch(ctx)
	defer stop()
	if err := s.connect(watched, set, endpoint); err != nil {
		return abandon(s.Fail(err))
	}
	for r, rec := range s.joined.Records {
		s.Hosts, s.Capabilities = append(s.Hosts, rec.Host), append(s.Capabilities, rec.Capabilities)
		if rec.HostID == host {
			if s.LocalSize++; s.LocalSize == 1 {
				s.first = s.rank == topo.Rank(r)
			}
		}
	}
	s.Processors = max(processorsOf(s.joined.Records, host), runtime.NumCPU())
	if local == nil {
		return nil
	}
	lacking, why := s.Lacking(message.SHM)
	switch {
	case set.SharedMemory == config.SharedAlways && s.LocalSize < set.Size:
		// Every rank detects this error when it has all records. Wait until the other ranks are ready too.
		// Otherwise they would report this rank as dead.
		if err := s.joined.Ready(watched); err != nil {
			return abandon(err)
		}
		return abandon(fmt.Errorf("HOROVOD_CPU_OPERATIONS is shm, but the ranks are on several hosts (%s): set it to gloo or tcp",
			strings.Join(s.Hosts, ", ")))
	case set.SharedMemory == config.SharedAlways && why != "":
		return abandon(s.Fail(&memoryError{lacking, "HOROVOD_CPU_OPERATIONS is shm, but " + why +
			": set HOROVOD_CPU_OPERATIONS=shm,tcp to use TCP instead"}))
	// This warning is only for a job on one host. In a job with several hosts, each host decides by itself
	// whether its ranks share memory.
	case set.SharedMemory == config.SharedIfPossible && why != "" && s.LocalSize == set.Size:
		s.warnOnce(cfg.Log, why)
		if err := local.Close(); err != nil {
			return abandon(s.Fail(err))
		}
		return nil
	}
	if err := s.share(watched, set, local, cfg.Log); err != nil {
		return abandon(s.Fail(err))
	}
	return nil
}

// capabilities returns an entry for each backend of this rank. The entry is the reason why the rank cannot
// use the backend, or "" if it can.
func capabilities(cfg *SessionConfig, offer shm.Offer) map[string]string {
	all := map[string]string{message.TCP.String(): ""}
	if cfg.At.Settings.SharedMemory != config.SharedNever {
		all[message.SHM.String()] = offer.Reason
	}
	maps.Copy(all, cfg.Capabilities)
	return all
}

// Lacking returns which ranks cannot serve a backend, and the reason. If all ranks can serve it, the reason
// is "". The result is the same at all ranks. It must not be called when the engine runs.
func (s *Session) Lacking(b message.Backend) (ranks []topo.Rank, why string) {
	var reasons []string
	for r, capabilities := range s.Capabilities {
		reason, known := capabilities[b.String()]
		switch {
		case !known:
			reason = fmt.Sprintf("does not have the backend %v", b)
		case reason != "":
			reason = fmt.Sprintf("cannot use the backend %v: %s", b, reason)
		default:
			continue
		}
		ranks, reasons = append(ranks, topo.Rank(r)), append(reasons, reason)
	}
	return ranks, topo.FormatReasons(ranks, " ", reasons)
}

// connect makes the mesh after the ranks have checked in, and then gathers the records of all ranks.
func (s *Session) connect(ctx context.Context, set *config.Config, endpoint *tcp.Endpoint) error {
	addrs := func() (addrs []string) {
		for _, rec := range s.joined.Records {
			addrs = append(addrs, rec.Addr)
		}
		return addrs
	}
	mesh, err := endpoint.Connect(tcp.Epoch{Job: set.JobID, Epoch: s.Epoch, Rank: s.rank, Addrs: addrs()})
	if err != nil {
		return err
	}
	s.Mesh = mesh
	if err := s.joined.Gather(ctx, mesh); err != nil {
		return err
	}
	return mesh.Learn(addrs())
}

// share makes the ranks of this host share memory if the settings allow it.
func (s *Session) share(ctx context.Context, set *config.Config, local *shm.Endpoint, log *zap.Logger) error {
	epoch := shm.Epoch{Job: set.JobID, Epoch: s.Epoch, Rank: s.rank, Under: s.Mesh, Agree: s.joined.Agree}
	for _, rec := range s.joined.Records {
		epoch.Hosts, epoch.Offers = append(epoch.Hosts, rec.HostID),
			append(epoch.Offers, shm.Offer(rec.Memory))
	}
	twoLevels := set.HierarchicalAllreduce || set.HierarchicalAllgather
	if s.LocalSize == set.Size || s.LocalSize > 1 && twoLevels {
		// Reserve the segment of the global set now. If that fails, the ranks can still choose TCP.
		epoch.Reserve = map[transport.Lane]int64{transport.DataLane(topo.Global): opsshm.SegmentBytes(
			s.LocalSize, opsshm.Config{})}
	}
	shared, err := local.Connect(ctx, epoch)
	if err != nil {
		return err
	}
	s.Mesh = shared
	if err := s.useMemory(shared, set, log); err != nil {
		return err
	}
	if group := shared.Group(); epoch.Reserve != nil && len(group) > 1 {
		s.opened = group
	}
	return nil
}

// memoryError says that the ranks of a host cannot share memory, and names the ranks that are the reason.
type memoryError struct {
	ranks []topo.Rank
	text  string
}

func (e *memoryError) Error() string { return e.text }

// warnOnce logs why the ranks of this host use TCP. Only one rank of the host logs it as a warning, because
// the reason is the same for all of them.
func (s *Session) warnOnce(log *zap.Logger, why string) {
	level := zap.DebugLevel
	if s.first {
		level = zap.WarnLevel
	}
	log.Log(level, "the ranks of this host cannot share memory and use TCP instead",
		zap.Int("ranks", s.LocalSize), zap.String("why", why))
}

// useMemory sets s.Memory to the shared memory of mesh if any ranks of the job share memory.
func (s *Session) useMemory(mesh shm.Sharer, set *config.Config, log *zap.Logger) error {
	switch why := mesh.UnsharedReason(); {
	case why == "":
	case set.SharedMemory == config.SharedIfPossible:
		s.warnOnce(log, why)
	default:
		return &memoryError{mesh.UnsharedRanks(),
			fmt.Sprintf("the ranks of this host cannot share memory: %s: set HOROVOD_CPU_OPERATIONS=shm,tcp to use TCP instead", why)}
	}
	groups := mesh.Groups()
	for r, lowest := range groups {
		if lowest != topo.Rank(r) {
			s.Memory, s.Groups = mesh, groups
		}
	}
	return nil
}

// listenShared opens the socket over which this rank passes file descriptors. If the settings exclude shared
// memory, it opens none. If it cannot open the socket, the offer tells the other ranks why.
func listenShared(cfg *SessionConfig) (*shm.Endpoint, shm.Offer) {
	if cfg.At.Settings.SharedMemory == config.SharedNever {
		return nil, shm.Offer{}
	}
	e, err := shm.Listen(shm.Config{RuntimeDir: cfg.At.Settings.Variable("XDG_RUNTIME_DIR"), Log: cfg.Log})
	if err != nil {
		e = shm.Unavailable(dial.ExplainLimit(err))
	}
	return e, e.Offer()
}

// threadCores returns the core to which a rank at place pins its background threads, or none if they are not
// pinned. list has a core for each rank of the host. allowed holds the processors on which this process may
// run, or is nil if that is unknown.
func threadCores(list []int, place topo.Topology, allowed []uint64) ([]int, error) {
	const name = "HOROVOD_THREAD_AFFINITY"
	switch {
	case len(list) == 0:
		return nil, nil
	case len(list) < place.LocalSize:
		return nil, fmt.Errorf("%s: got %s for %d ranks on this host, want a core for each of them", name,
			topo.FormatRuns("core", list), place.LocalSize)
	}
	core := list[place.LocalRank]
	if allowed == nil || core/64 < len(allowed) && allowed[core/64]>>(core%64)&1 != 0 {
		return []int{core}, nil
	}
	var may []int
	for i := range 64 * len(allowed) {
		if allowed[i/64]>>(i%64)&1 != 0 {
			may = append(may, i)
		}
	}
	return nil, fmt.Errorf("%s: got core %d for local rank %d, but this process may run only on %s", name, core,
		place.LocalRank, topo.FormatRuns("core", may))
}

// affinity returns the processors on which this process may run, as a bit set. It returns nil if the kernel
// does not say.
func affinity() (set []uint64) {
	var allowed unix.CPUSet
	if unix.SchedGetaffinity(os.Getpid(), &allowed) != nil {
		return nil
	}
	for cpu, left := 0, allowed.Count(); left > 0; cpu++ {
		if cpu%64 == 0 {
			set = append(set, 0)
		}
		if allowed.IsSet(cpu) {
			set[cpu/64] |= 1 << (cpu % 64)
			left--
		}
	}
	return set
}

// processorsOf returns the number of processors on which ranks of a host may run.
func processorsOf(records []rendezvous.Record, host string) (n int) {
	var union []uint64
	for _, rec := range records {
		if rec.HostID != host {
			continue
		}
		for i, word := range rec.Processors {
			if i == len(union) {
				union = append(union, 0)
			}
			union[i] |= word
		}
	}
	for _, word := range union {
		n += bits.OnesCount64(word)
	}
	return n
}
