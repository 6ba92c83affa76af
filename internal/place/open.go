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
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/store"
)

// Config says how a rank finds the place where its job meets. At most one of Store, Method and ID may be
// given. If none is given, Open uses the setting HVD_INIT_METHOD or HVD_UNIQUE_ID. If neither is set, and no
// other settings (such as HVD_SIZE) place this process in a job, Open uses the launcher that Detect finds. If
// there is no launcher, the process is a job of one rank.
type Config struct {
	Settings config.Config
	// Store is a store that the program has opened. The program must close it. The rank and the size come
	// from the settings or else from the launcher, and Open fails if neither has them.
	Store store.Store
	// Method is the URL of an init method. If the settings contain rank and size, Open uses these, else the
	// rank and size in the URL.
	Method string
	// Methods are init methods that the program adds to the built-in ones.
	Methods Methods
	// ID holds the unique ids by which the ranks meet.
	ID  *ByID
	Log *zap.Logger // may be nil
}

// ByID holds the unique ids by which the ranks meet, and the rank and size of this process.
type ByID struct {
	IDs        []ID
	Rank, Size int
}

// Meeting is the result of Open. It contains the place where the ranks meet, and the rank, size and address
// of this process.
type Meeting struct {
	// Place contains the store and the secret. The store is nil in a job of one rank. The secret is there
	// even if it comes from the settings.
	*Place
	// Settings are the settings of Config with the rank, size and job of this process added. Size is never 0.
	Settings config.Config
	// Listen is the address of this host on which the rank must listen. All other ranks can dial it.
	Listen string
	// Once is true if the launcher allows the ranks to meet only once. If the process may have to call Init
	// again, it must keep the Meeting and call Again. The store exists until rank 0 closes it.
	Once bool

	launcher store.Store // store of hvdrun, which may be Store; nil without hvdrun
	again    bool        // Again has made this Meeting; the original Meeting closes the Place
}

// Open finds the place where the ranks meet and connects to it. It waits until the store is reachable. It
// fails if ctx ends or if the inputs contradict each other. If Open fails, it closes everything that it has
// opened.
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

// Again returns a Meeting at the same place, for an Init after a Shutdown. set holds the settings of that
// Init. They must not place this process in a job themselves. Close of the new Meeting does nothing.
func (m *Meeting) Again(set config.Config) *Meeting {
	a := &Meeting{Place: m.Place, Settings: set, Listen: m.Listen, Once: true, again: true}
	from := &m.Settings
	a.Settings.Rank, a.Settings.Size, a.Settings.JobID = from.Rank, from.Size, from.JobID
	a.Settings.LocalRank, a.Settings.LocalSize = from.LocalRank, from.LocalSize
	a.Settings.CrossRank, a.Settings.CrossSize = from.CrossRank, from.CrossSize
	return a
}

// Close closes the store, unless the program has opened the store. If this rank serves the store, Close ends
// the store for all ranks.
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
		return fmt.Errorf("got %d of a store, an init method and a unique id, want only one of them",
			ways)
	}
	if ways == 0 {
		if err := m.bySettings(cfg); err != nil {
			return err
		}
	}
	var env *Env
	if cfg.Store == nil && cfg.Method == "" && cfg.ID == nil {
		var err error
		if env, err = m.launched(cfg.Log); err != nil {
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
	launcherSecret := m.Secret
	switch {
	case cfg.ID != nil:
		err = m.byID(ctx, cfg, choice)
	case cfg.Method != "":
		err = m.byMethod(ctx, cfg, choice)
	case cfg.Store != nil:
		err = m.byStore(choice)
	case m.Settings.Size > 1, m.Settings.Size == 1 && m.launcherAddr() != "":
		err = m.byLauncher(ctx, cfg, choice)
	case m.Settings.Size == config.Unset && env != nil:
		err = m.byEnvironment(ctx, cfg, env, choice)
	}
	if err != nil {
		return err
	}
	if m.Settings.Size == config.Unset {
		m.Settings.Rank, m.Settings.Size = 0, 1
	}
	if m.launcher == nil {
		m.link(ctx, launcherSecret, cfg.Log)
	}
	if m.Settings.Size > 1 && m.Secret.IsZero() && !m.Settings.Insecure {
		cfg.Log.Warn("the job has no secret, so every user of this host can take part in it: give all ranks the same file in HVD_SECRET_FILE")
	}
	return m.checkSecret()
}

// bySettings sets cfg.Method or cfg.ID if the settings contain an init method or a unique id.
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

// placeByLauncher sets the rank and size of this process to the values from its launcher, if there is one.
func (m *Meeting) placeByLauncher() error {
	env, _, err := Detect(m.Settings.Variable)
	if err == nil && env != nil {
		m.take(env)
	}
	return err
}

// take copies ranks and sizes from env to the settings. It does not change a local rank, local size, cross
// rank or cross size that the settings already contain.
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

// place sets the rank and size of this process. If the settings contain other values, place returns an error.
func (m *Meeting) place(rank, size int) error {
	if s := &m.Settings; s.Size != config.Unset && (s.Rank != rank || s.Size != size) {
		return fmt.Errorf("HOROVOD_RANK and HOROVOD_SIZE say rank %d of %d, but the init method or unique id says rank %d of %d: "+
			"give the same rank and size in both", s.Rank, s.Size, rank, size)
	}
	m.Settings.Rank, m.Settings.Size = rank, size
	return nil
}

// checkSecret returns an error if the job has no secret and one is needed. One is needed if TLS is on, or if
// the job would accept connections from the network and the user has not permitted that without a secret.
func (m *Meeting) checkSecret() error {
	ip, err := netip.ParseAddr(m.Listen)
	if err != nil {
		return fmt.Errorf("parsing the address to listen on: %w", err)
	}
	if m.Settings.Size > 1 && m.Secret.IsZero() && m.Settings.TLS {
		return errors.New("HVD_TLS is set, but the job has no secret: set HVD_SECRET_FILE at all ranks to a file with the same contents, at least 16 bytes")
	}
	if m.Settings.Size > 1 && m.Secret.IsZero() && !m.Settings.Insecure && !ip.IsLoopback() {
		return fmt.Errorf("the ranks would listen on the network address %s without a secret: set HVD_SECRET_FILE on all hosts to a file with "+
			"the same contents, at least 16 bytes, or HVD_INSECURE=1 to accept any process that can connect to the ports", m.Listen)
	}
	return nil
}

// choose makes the rank listen on the interface that the user has chosen, or on loopback if the user has
// chosen none.
func (m *Meeting) choose(choice netif.Choice) error {
	if choice.IsZero() {
		return nil
	}
	addr, err := choice.Any()
	m.Listen = addr.String()
	return err
}

// byLauncher meets at the store of hvdrun, or of another program that sets hvdrun's variables.
func (m *Meeting) byLauncher(ctx context.Context, _ *Config, choice netif.Choice) error {
	address := m.launcherAddr()
	var listen netip.Addr
	// Retry the connection, because DNS may not have the name yet.
	err := dial.Retry(ctx, func() (err error) {
		listen, err = choice.Towards(ctx, address)
		return err
	})
	if err != nil {
		return fmt.Errorf("finding the route to the rendezvous store: %w", err)
	}
	m.Listen = listen.String()
	if m.Secret.IsZero() && !m.Settings.Insecure && netif.IsLoopback(address) {
		if err := m.askSecret(ctx, address); err != nil {
			return err
		}
	}
	if err := m.checkSecret(); err != nil {
		// checkSecret is called before the connection, so that a job that is refused makes no connection.
		return err
	}
	p, err := Dial(ctx, address, m.Secret)
	if err != nil {
		return err
	}
	m.meetAt(p)
	m.launcher = p.Store
	return nil
}

// launcherAddr returns the address of the launcher's store, or "" if the settings do not contain it.
func (m *Meeting) launcherAddr() string {
	if m.Settings.RendezvousAddr == "" || m.Settings.RendezvousPort == 0 {
		return ""
	}
	return net.JoinHostPort(m.Settings.RendezvousAddr, strconv.Itoa(m.Settings.RendezvousPort))
}

// linkTimeout is the time limit for connecting to a launcher whose store the ranks do not need to meet.
const linkTimeout = 5 * time.Second

// link connects to the store of hvdrun in a job that meets elsewhere, so that hvdrun hears of its failures.
// It does so only if the ranks have the same numbers in the job as hvdrun has given them, because otherwise
// the job has only some of hvdrun's processes, and hvdrun would take its ranks for others. s is the secret
// that hvdrun has given to the ranks. If there is no connection, link logs a warning, because the job works
// without it.
func (m *Meeting) link(ctx context.Context, s secret.Secret, log *zap.Logger) {
	set := &m.Settings
	addr := m.launcherAddr()
	if addr == "" || set.Environment("HOROVOD_RANK") != strconv.Itoa(set.Rank) ||
		set.Environment("HOROVOD_SIZE") != strconv.Itoa(set.Size) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, linkTimeout)
	defer cancel()
	client, err := store.Dial(ctx, addr, store.Config{Secret: s})
	if err != nil {
		log.Warn("no connection to hvdrun, which will not learn why the job fails", zap.Error(err))
		return
	}
	m.onClose(client.Close)
	m.launcher = client
}

// askSecret sets the secret to that of the store at addr, which is on loopback.
func (m *Meeting) askSecret(ctx context.Context, addr string) error {
	s, err := AskSecret(ctx, addr)
	if errors.Is(err, ErrNotOffered) {
		// The server may have a secret from the user, or may be of another program. Then Dial knows a better
		// error.
		p, dialErr := Dial(ctx, addr, m.Secret)
		if dialErr != nil {
			return dialErr
		}
		return errors.Join(err, p.Close())
	}
	if m.Secret = s; m.Settings.TLS {
		m.Secret = s.Encrypted()
	}
	return err
}

// meetAt sets the place of m to p. If p has no secret, meetAt sets it to the secret from the settings.
func (m *Meeting) meetAt(p *Place) {
	if p.Secret.IsZero() {
		p.Secret = m.Secret
	}
	m.Place = p
}

// Launcher returns the store of hvdrun if hvdrun has started this process as the rank that it is in the job,
// else nil. Package joblink uses this store for the link to the launcher. The ranks may meet at another
// store.
func (m *Meeting) Launcher() store.Store { return m.launcher }

// launched finds the launcher that has started this process. It logs a warning if this process may be meant
// to belong to a job of more ranks. It returns nil if there is no launcher, or if the program has set the
// rank.
func (m *Meeting) launched(log *zap.Logger) (*Env, error) {
	set := &m.Settings
	if set.Origin("HOROVOD_SIZE").Source == config.FromAPI {
		return nil, nil
	}
	env, lines, err := Detect(set.Variable)
	if err != nil {
		return nil, err
	}
	for _, l := range lines {
		if l.Suspect {
			log.Warn("this process runs in a job with fewer ranks than a launcher seems to have started; "+
				"set HVD_SIZE to the number of ranks if that is intended", zap.Stringer("launcher", l))
		}
	}
	return env, nil
}

// byEnvironment meets the other ranks of the launcher with Env.Meet.
func (m *Meeting) byEnvironment(ctx context.Context, cfg *Config, env *Env, choice netif.Choice) error {
	set := &m.Settings
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

// byStore meets at the store of the program. The rank and the size come from the settings or else from the
// launcher.
func (m *Meeting) byStore(choice netif.Choice) error {
	if m.Settings.Size == config.Unset {
		if err := m.placeByLauncher(); err != nil {
			return err
		}
	}
	switch m.Settings.Size {
	case config.Unset:
		return errors.New("the program passes a store, but there is no launcher that gives this process a rank: " +
			"set HOROVOD_RANK and HOROVOD_SIZE")
	case 1:
		return nil
	}
	m.Store = sealed(m.Store, m.Secret)
	return m.choose(choice)
}

// byMethod meets at the store that the init method in cfg opens.
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
		Rank: set.Rank, Size: set.Size, Getenv: set.Variable, Secret: m.Secret, Insecure: set.Insecure,
		Encrypt: set.TLS, Log: cfg.Log,
	})
	if err != nil {
		return err
	}
	m.meetAt(p)
	p.Store = store.NewPrefixStore("gohvd", sealed(p.Store, p.Secret))
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

// byID meets at the store of the process that has made the unique id.
func (m *Meeting) byID(ctx context.Context, cfg *Config, choice netif.Choice) error {
	id := cfg.ID
	if err := m.place(id.Rank, id.Size); err != nil {
		return err
	}
	// Check the ids before the first connection.
	for _, id := range id.IDs {
		if s, err := id.open(); err == nil && m.Settings.TLS && !s.encrypt {
			return errors.New("HVD_TLS is set, but the unique id was made without HVD_TLS: set HVD_TLS also in the process that makes the id")
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

// counted is the value of the key nearKey/RANK once this rank is included in the count in nearKey.
const counted = "counted"

// With these keys the ranks agree on the addresses on which they listen.
const (
	agreePrefix = "gohvd/listen"
	nearKey     = "near"  // number of ranks on the host of the store
	hostKey     = "host"  // address at which ranks on other hosts reach the host of the store
	missingKey  = "lack"  // list of missing ranks, which rank 0 writes before it closes the store
	readKey     = "heard" // readKey/RANK is set when the rank has read missingKey
)

// agree finds the address on which this rank listens in a job whose ranks may be on several hosts. addr is
// the address at which this rank reaches the store, or empty if this rank serves the store.
//
// If the store is on another host, the rank listens on the interface that leads to the store. If the store is
// on the rank's own host, the rank sees only a loopback address, which other hosts cannot dial. The rank then
// waits until a rank on another host publishes the address at which it has reached the store, and listens on
// that address. If all ranks are on one host, they listen on loopback.
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
	// If an attempt to meet fails, the store may still exist at the next attempt. With the compare-and-set,
	// each rank is counted only once even then.
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
		return fmt.Errorf("parsing the address of the store's host, which another rank has reported: %w", err)
	}
	own, err := netif.IsOwn(host)
	if err != nil {
		return err
	}
	// If this host does not have that address, the other ranks reach it by network address translation. Then
	// listen on the interface that leads to the address.
	if !own {
		if host, _, err = netif.Route(ctx, net.JoinHostPort(host.String(), "9")); err != nil {
			return err
		}
	}
	m.Listen = host.String()
	return nil
}

// awaitHost waits for the address of the store's host, which another rank sets. If the address does not
// arrive before ctx ends, the error names the missing ranks. If serves is true, this rank serves the store
// and will close it soon, so awaitHost first tells the other ranks which ranks are missing.
func (m *Meeting) awaitHost(ctx context.Context, s store.Store, serves bool) ([]byte, error) {
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	// The calls below exchange the list of missing ranks after ctx has ended. So they use a context that does
	// not end with ctx.
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
			// With these keys, rank 0 learns that the ranks have read the list. It waits for them for at most
			// 1 s.
			_ = s.Set(last, fmt.Sprintf("%s/%d", readKey, m.Settings.Rank), nil)
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
		// This compare-and-set only reads, because the value is never "nobody".
		if value, _, err := s.CompareAndSet(ctx, fmt.Sprintf("%s/%d", nearKey, r), nobody,
			nobody); err == nil && string(value) != counted {
			missing = append(missing, r)
		}
	}
	if missing == nil {
		return nil, err
	}
	text := topo.FormatRanks(missing)
	if serves && s.Set(ctx, missingKey, []byte(text)) == nil {
		for r := range m.Settings.Size {
			if r != m.Settings.Rank && !slices.Contains(missing, r) {
				_, _ = s.Get(ctx, fmt.Sprintf("%s/%d", readKey, r)) // the ranks are told as far as possible
			}
		}
	}
	return nil, fmt.Errorf("%s did not connect: %w", text, err)
}

// maxJob is the maximum length in bytes of the name of a job (HVD_JOB_ID).
const maxJob = 64

// short returns the last maxJob bytes of the name of a job. It keeps the end of the name, because launchers
// put the part that differs between jobs there.
func short(job string) string { return strings.ToValidUTF8(job[max(0, len(job)-maxJob):], "") }

// HostID returns a text that identifies the host of this rank. Ranks with the same text can share memory.
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
