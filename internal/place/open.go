package place

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/store"
)

// Config says how a rank finds where its job meets. At most one of Store, Method and ID is given. If none is,
// the settings decide (HVD_INIT_METHOD, HVD_UNIQUE_ID), and if they do not place this process in a job, the
// launcher in the environment. Without a launcher the process is a job of one.
type Config struct {
	Settings config.Config
	// Store belongs to the program, which closes it.
	Store store.Store
	// Method is the URL of an init method. Rank and size come from the settings if they have them, else from
	// the URL.
	Method string
	// Methods are init methods of the program, by the scheme of their URLs.
	Methods Methods
	// ID makes the ranks meet by unique ids.
	ID  *ByID
	Log *zap.Logger // may be nil
}

// ByID says which ranks meet by which ids.
type ByID struct {
	IDs        []ID
	Rank, Size int
}

// Meeting is the result of Open: where the ranks have met, and what follows for this rank.
type Meeting struct {
	// Place has the store, nil if there is one rank, and the secret, also if the settings give it.
	*Place
	// Settings are the given settings with the place of this process in the job. Size is at least 1.
	Settings config.Config
	// Listen is the address of this host on which the rank must listen. All other ranks can dial it.
	Listen string
	// Once says that the means of the launcher are used up. A process that may have to meet again keeps the
	// Meeting. The store lives until rank 0 closes it.
	Once bool

	launcher store.Store // equal to Store if that is hvdrun's
	again    bool        // whether another Meeting has the same Place
}

// Open finds the place where the ranks meet. It waits until the store is reachable, ctx ends, or something
// contradicts itself. After an error nothing is left open.
func Open(ctx context.Context, cfg Config) (*Meeting, error) {
	m := &Meeting{Place: &Place{Store: cfg.Store}, Settings: cfg.Settings, Listen: loopback}
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	if err := m.open(ctx, &cfg); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// Again returns the same Meeting for settings that do not place this process, as in an Init after a Shutdown.
// Its Close does nothing.
func (m *Meeting) Again(set config.Config) *Meeting {
	a := &Meeting{Place: m.Place, Settings: set, Listen: m.Listen, Once: true, again: true}
	from := &m.Settings
	a.Settings.Rank, a.Settings.Size, a.Settings.JobID = from.Rank, from.Size, from.JobID
	a.Settings.LocalRank, a.Settings.LocalSize = from.LocalRank, from.LocalSize
	a.Settings.CrossRank, a.Settings.CrossSize = from.CrossRank, from.CrossSize
	return a
}

// Close closes the store, unless it belongs to the program. If this rank serves the store, that ends it for
// all ranks.
func (m *Meeting) Close() error {
	if m.again {
		return nil
	}
	return m.Place.Close()
}

func (m *Meeting) open(ctx context.Context, cfg *Config) error {
	ways := 0
	for _, given := range []bool{cfg.Store != nil, cfg.Method != "", cfg.ID != nil} {
		if given {
			ways++
		}
	}
	if ways > 1 {
		return fmt.Errorf("got %d ways to meet, want only one of a store, an init method and a unique id",
			ways)
	}
	if ways == 0 {
		if err := m.bySettings(cfg); err != nil {
			return err
		}
	}
	choice, err := netif.Parse(m.Settings.NetworkInterfaces)
	if err != nil {
		return err
	}
	if m.Secret, err = jobSecret(&m.Settings); err != nil {
		return err
	}
	switch {
	case cfg.ID != nil:
		err = m.byID(ctx, cfg, choice)
	case cfg.Method != "":
		err = m.byMethod(ctx, cfg, choice)
	case m.Settings.Size > 1 && cfg.Store != nil:
		err = m.choose(choice)
	case m.Settings.Size > 1, m.Settings.Size == 1 && cfg.Store == nil && m.Settings.RendezvousAddr != "" &&
		m.Settings.RendezvousPort != 0:
		err = m.byLauncher(ctx, cfg, choice)
	case m.Settings.Size == config.Unset && cfg.Store == nil:
		err = m.byEnvironment(ctx, cfg, choice)
	}
	if err != nil {
		return err
	}
	if m.Settings.Size == config.Unset {
		m.Settings.Rank, m.Settings.Size = 0, 1
	}
	return m.checkSecret()
}

// bySettings sets the way to meet from the settings, if they have one.
func (m *Meeting) bySettings(cfg *Config) error {
	set := &m.Settings
	switch {
	case set.InitMethod != "" && set.UniqueID != "":
		return errors.New("both HVD_INIT_METHOD and HVD_UNIQUE_ID are set, want only one of them")
	case set.InitMethod != "":
		cfg.Method = set.InitMethod
	case set.UniqueID != "":
		cfg.ID = new(ByID)
		for text := range strings.SplitSeq(set.UniqueID, ",") {
			id, err := ParseID(text)
			if err != nil {
				return fmt.Errorf("HVD_UNIQUE_ID: %w", err)
			}
			cfg.ID.IDs = append(cfg.ID.IDs, id)
		}
		if set.Size == config.Unset {
			if err := m.placeByLauncher(); err != nil {
				return err
			}
		}
		if set.Size == config.Unset {
			return errors.New("HVD_UNIQUE_ID is set, but nothing says which rank this is: set HOROVOD_RANK and HOROVOD_SIZE, or RANK and WORLD_SIZE")
		}
		cfg.ID.Rank, cfg.ID.Size = set.Rank, set.Size
	}
	return nil
}

// placeByLauncher sets the place of this process from the launcher, if there is one.
func (m *Meeting) placeByLauncher() error {
	env, _, err := Detect(m.Settings.Variable)
	if err == nil && env != nil {
		m.take(env)
	}
	return err
}

// take sets the place of this process from what a launcher says. Settings for a part of it take precedence.
func (m *Meeting) take(env *Env) {
	set := &m.Settings
	set.Rank, set.Size = env.Rank, env.Size
	for _, f := range []struct {
		field *int
		told  int
	}{
		{&set.LocalRank, env.LocalRank}, {&set.LocalSize, env.LocalSize},
		{&set.CrossRank, env.CrossRank}, {&set.CrossSize, env.CrossSize},
	} {
		if *f.field == config.Unset && f.told >= 0 {
			*f.field = f.told
		}
	}
}

// place sets the place of this process. It is an error if the settings say something else.
func (m *Meeting) place(rank, size int) error {
	if s := &m.Settings; s.Size != config.Unset && (s.Rank != rank || s.Size != size) {
		return fmt.Errorf("HOROVOD_RANK and HOROVOD_SIZE say rank %d of %d, but the init method or unique id says rank %d of %d: "+
			"give both the same", s.Rank, s.Size, rank, size)
	}
	m.Settings.Rank, m.Settings.Size = rank, size
	return nil
}

// checkSecret refuses a job that would be open to the network.
func (m *Meeting) checkSecret() error {
	ip, err := netip.ParseAddr(m.Listen)
	if err != nil {
		return fmt.Errorf("address to listen on: %w", err)
	}
	if m.Settings.Size > 1 && m.Secret.IsZero() && m.Settings.TLS {
		return errors.New("HVD_TLS is set, but the job has no secret: set HVD_SECRET_FILE to a file with the same 16 bytes or more at all ranks")
	}
	if m.Settings.Size > 1 && m.Secret.IsZero() && !m.Settings.Insecure && !ip.IsLoopback() {
		return fmt.Errorf("the ranks would listen on the network address %s without a secret: set HVD_SECRET_FILE to a file with the same "+
			"16 bytes or more on all hosts, or HVD_INSECURE=1 to accept any process that can connect to the ports", m.Listen)
	}
	return nil
}

// choose listens on the interface that the user has chosen, or else on loopback.
func (m *Meeting) choose(choice netif.Choice) error {
	if choice.IsZero() {
		return nil
	}
	addr, err := choice.Any()
	m.Listen = addr.String()
	return err
}

// byLauncher meets at the store of hvdrun, or of another program that sets its variables.
func (m *Meeting) byLauncher(ctx context.Context, _ *Config, choice netif.Choice) error {
	address := net.JoinHostPort(m.Settings.RendezvousAddr, strconv.Itoa(m.Settings.RendezvousPort))
	var listen netip.Addr
	err := dial.Retry(ctx, func() (err error) { // DNS may not know the name yet
		listen, err = choice.Towards(ctx, address)
		return err
	})
	if err != nil {
		return fmt.Errorf("rendezvous store: %w", err)
	}
	m.Listen = listen.String()
	if err := m.checkSecret(); err != nil {
		return err // checked before the first connection
	}
	p, err := Dial(ctx, address, m.Secret)
	if err != nil {
		return err
	}
	m.meetAt(p)
	m.launcher = p.Store
	return nil
}

// meetAt makes p the Place, with the secret of the settings if p has none.
func (m *Meeting) meetAt(p *Place) {
	if p.Secret.IsZero() {
		p.Secret = m.Secret
	}
	m.Place = p
}

// Launcher returns the store if it is hvdrun's, and nil otherwise. joblink uses it.
func (m *Meeting) Launcher() store.Store { return m.launcher }

// byEnvironment meets in the way of the launcher that has started this process.
func (m *Meeting) byEnvironment(ctx context.Context, cfg *Config, choice netif.Choice) error {
	set := &m.Settings
	env, lines, err := Detect(set.Variable)
	if err != nil {
		return err
	}
	if env == nil {
		for _, l := range lines {
			if l.Suspect {
				cfg.Log.Warn("this process is a job of its own, rank 0 of 1; set HVD_SIZE=1 if that is intended", zap.Stringer("launcher", l))
			}
		}
		return nil
	}
	if env.Size == 1 {
		set.Rank, set.Size = 0, 1
		return nil
	}
	cfg.Log.Debug("found the launcher", zap.String("launcher", string(env.Kind)), zap.Int("rank", env.Rank),
		zap.Int("size", env.Size),
		zap.String("meeting", env.Where()))
	p, err := env.Meet(ctx, MeetOptions{
		Secret: m.Secret, Insecure: set.Insecure, Encrypt: set.TLS, Host: set.MeetHost, Port: set.MeetPort,
		Interfaces: choice,
		Log:        cfg.Log,
	})
	if err != nil {
		return err
	}
	m.Place, m.Once = p, true
	m.take(env)
	if set.Variable("HVD_JOB_ID") == "" && p.JobID != "" {
		set.JobID = short(p.JobID)
	}
	if env.OneHost() {
		return nil
	}
	return m.agree(ctx, p.Addr, choice)
}

// byMethod meets by an init method.
func (m *Meeting) byMethod(ctx context.Context, cfg *Config, choice netif.Choice) error {
	set := &m.Settings
	if u, err := url.Parse(cfg.Method); err == nil && set.Size == config.Unset && u.Scheme != "env" &&
		!u.Query().Has("rank") && !u.Query().Has("world_size") {
		if err := m.placeByLauncher(); err != nil {
			return err
		}
	}
	methods := NewMethods()
	maps.Copy(methods, cfg.Methods)
	p, err := methods.Open(ctx, cfg.Method, MethodOptions{
		Rank: set.Rank, Size: set.Size, Getenv: set.Variable, Secret: m.Secret, Log: cfg.Log,
	})
	if err != nil {
		return err
	}
	p.Store = store.NewPrefixStore("gohvd", p.Store)
	m.meetAt(p)
	if err := m.place(p.Rank, p.Size); err != nil || p.Size == 1 {
		return err
	}
	if p.NoAddr {
		return m.choose(choice)
	}
	err = m.agree(ctx, p.Addr, choice)
	if err != nil && ctx.Err() == nil && p.Addr != "" && strings.HasPrefix(cfg.Method, "tcp:") {
		err = fmt.Errorf("the store of rank 0: %w", err)
	}
	return err
}

// byID meets at the store of the process that made the id.
func (m *Meeting) byID(ctx context.Context, cfg *Config, choice netif.Choice) error {
	id := cfg.ID
	if err := m.place(id.Rank, id.Size); err != nil {
		return err
	}
	for _, id := range id.IDs { // checked before the first connection
		if s, err := id.open(); err == nil && m.Settings.TLS && !s.encrypt {
			return errors.New("HVD_TLS is set, but the unique id was made without HVD_TLS")
		}
	}
	p, err := OpenIDs(ctx, id.IDs, id.Rank, id.Size)
	if err != nil {
		return err
	}
	m.Place = p
	m.Settings.JobID = p.JobID
	listen, err := choice.Towards(ctx, p.Addr)
	m.Listen = listen.String()
	return err
}

// counted is the value of nearKey/RANK after that rank has been counted.
const counted = "counted"

// Keys by which the ranks agree on addresses.
const (
	agreePrefix = "gohvd/listen"
	nearKey     = "near"  // number of ranks on the host of the store
	hostKey     = "host"  // address by which others reach that host
	missingKey  = "lack"  // ranks that are missing; rank 0 sets it before it closes the store
	readKey     = "heard" // number of ranks that have read missingKey
)

// agree finds the address to listen on in a job whose ranks may be on several hosts. addr is where this rank
// reaches the store, or empty if it serves the store.
//
// A rank on another host than the store listens on the interface that leads to the store. A rank on the host
// of the store sees only loopback, at which others cannot dial it. It listens on the address by which a rank
// of another host has reached the store. If there is no other host it listens on loopback.
func (m *Meeting) agree(ctx context.Context, addr string, choice netif.Choice) error {
	if !choice.IsZero() {
		return m.choose(choice)
	}
	s := store.NewPrefixStore(agreePrefix, m.Store)
	if addr != "" {
		local, remote, err := netif.Route(ctx, addr)
		if err != nil {
			return err
		}
		if !local.IsLoopback() {
			m.Listen = local.String()
			return s.Set(ctx, hostKey, []byte(remote.String()))
		}
	}
	// The store may outlive a failed attempt, so each rank is counted only once.
	var near int64
	placeKey := fmt.Sprintf("%s/%d", nearKey, m.Settings.Rank)
	_, first, err := s.CompareAndSet(ctx, placeKey, nil, []byte("1"))
	if err == nil && first {
		near, err = s.Add(ctx, nearKey, 1)
	}
	if err != nil {
		return err
	}
	if near == int64(m.Settings.Size) {
		if err := s.Set(ctx, hostKey, []byte(loopback)); err != nil {
			return err
		}
	}
	if err := s.Set(ctx, placeKey, []byte(counted)); err != nil {
		return err
	}
	reported, err := m.awaitHost(ctx, s, addr == "")
	if err != nil {
		return fmt.Errorf("waiting for a rank on another host to connect to the store, or for all %d ranks to connect on this host: %w", m.Settings.Size, err)
	}
	host, err := netip.ParseAddr(string(reported))
	if err != nil {
		return fmt.Errorf("address of the store's host, as reported by another rank: %w", err)
	}
	own, err := netif.IsOwn(host)
	if err != nil {
		return err
	}
	if !own { // the other ranks reach this host through network address translation
		if host, _, err = netif.Route(ctx, net.JoinHostPort(host.String(), "9")); err != nil {
			return err
		}
	}
	m.Listen = host.String()
	return nil
}

// awaitHost waits for the address of the host. If it does not come, the error names the ranks that are
// missing. If rank 0 serves the store, which ends with it, it first tells the others which ranks are missing.
func (m *Meeting) awaitHost(ctx context.Context, s store.Store, serves bool) ([]byte, error) {
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	// The messages about missing ranks follow the end of the caller's context.
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var watcher sync.WaitGroup
	var missingAtRoot []byte
	watcher.Go(func() {
		if missing, err := s.Get(waiting, missingKey); err == nil {
			missingAtRoot = missing
			cancel()
			last, done := context.WithTimeout(ctx, time.Second)
			defer done()
			_, _ = s.Add(last, readKey, 1) // rank 0 waits at most 1 s for this count
		}
	})
	host, err := s.Get(waiting, hostKey)
	cancel()
	watcher.Wait()
	switch {
	case err == nil:
		return host, nil
	case missingAtRoot != nil:
		return nil, fmt.Errorf("%s did not connect before the deadline of rank 0", missingAtRoot)
	}
	ctx, stop = context.WithTimeout(ctx, time.Second)
	defer stop()
	var missing []int
	nobody := []byte("nobody")
	for r := range m.Settings.Size {
		// This compare-and-set only reads, because no rank has the value nobody.
		if value, _, err := s.CompareAndSet(ctx, fmt.Sprintf("%s/%d", nearKey, r), nobody,
			nobody); err == nil && string(value) != counted {
			missing = append(missing, r)
		}
	}
	if missing == nil {
		return nil, err
	}
	text := topo.FormatRanks(missing)
	if others := m.Settings.Size - len(missing) - 1; serves && others > 0 &&
		s.Set(ctx, missingKey, []byte(text)) == nil {
		for read, err := s.Watch(ctx, readKey, nil); err == nil && string(read) != strconv.Itoa(others); {
			read, err = s.Watch(ctx, readKey, read)
		}
	}
	return nil, fmt.Errorf("%s did not connect: %w", text, err)
}

// maxJob bounds the length of a job's name (HVD_JOB_ID).
const maxJob = 64

// short shortens the name of a job to its end, which is where launchers put the part that differs between
// jobs.
func short(job string) string { return strings.ToValidUTF8(job[max(0, len(job)-maxJob):], "") }

// HostID returns the identity of the memory of this host.
func HostID(set *config.Config) (string, error) {
	if set.HostID != "" {
		return topo.HostID(set.HostID, "", "", ""), nil
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("HVD_HOSTID is not set, and the boot id of this host is not readable: %w", err)
	}
	netns, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return "", fmt.Errorf(
			"HVD_HOSTID is not set, and the network namespace of this host is not readable: %w", err)
	}
	return topo.HostID("", set.Hostname, strings.TrimSpace(string(boot)), netns), nil
}
