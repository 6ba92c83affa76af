package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"strings"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/netif"
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
	Addresses
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
	m := &Meeting{Place: &Place{Store: cfg.Store}, Settings: cfg.Settings, Addresses: loopbackOnly()}
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
	a := &Meeting{Place: m.Place, Settings: set, Addresses: m.Addresses, Once: true, again: true}
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
		if err := m.link(ctx, launcherSecret, cfg.Log); err != nil {
			return err
		}
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

// usePlace sets the place of m to p. If p has no secret, usePlace sets it to the secret from the settings.
func (m *Meeting) usePlace(p *Place) {
	if p.Secret.IsZero() {
		p.Secret = m.Secret
	}
	m.Place = p
}

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
	where, _ := env.Where(set.MeetHost, set.MeetPort)
	cfg.Log.Debug("found the launcher", zap.String("launcher", string(env.Kind)), zap.Int("rank", env.Rank),
		zap.Int("size", env.Size), zap.String("meeting", where))
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
	return m.findAddresses(ctx, choice)
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
	m.usePlace(p)
	p.Store = store.NewPrefixStore("gohvd", sealed(p.Store, p.Secret))
	if err := m.place(p.Rank, p.Size); err != nil || p.Size == 1 {
		return err
	}
	if p.NoAddr {
		return m.choose(choice)
	}
	return m.findAddresses(ctx, choice)
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
	return m.listenTowards(ctx, p.Addr, choice)
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
