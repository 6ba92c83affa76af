package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
)

// byLauncher meets at the store of hvdrun, or of another program that sets hvdrun's variables.
func (m *Meeting) byLauncher(ctx context.Context, _ *Config, choice netif.Choice) error {
	address := m.launcherAddr()
	// Retry the connection, because DNS may not have the name yet.
	err := dial.Retry(ctx, func() error { return m.listenTowards(ctx, address, choice) })
	if err != nil {
		return fmt.Errorf("finding the route to the rendezvous store: %w", err)
	}
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
	m.usePlace(p)
	m.launcher, m.Settings.LauncherRanks = p.Store, nil // the launcher's ranks are those of the job
	return nil
}

// launcherAddr returns the address of the launcher's store, or "" if the settings do not contain it.
func (m *Meeting) launcherAddr() string {
	if m.Settings.RendezvousAddr == "" || m.Settings.RendezvousPort == 0 {
		return ""
	}
	return net.JoinHostPort(m.Settings.RendezvousAddr, strconv.Itoa(m.Settings.RendezvousPort))
}

// LinkTimeout is the time limit for connecting to a launcher whose store the ranks do not need to meet.
const LinkTimeout = 5 * time.Second

// link connects to the store of hvdrun in a job that meets elsewhere, so that hvdrun hears of its failures.
// It does so only if the number that hvdrun has given to each rank is known: it is the same in the job, or in
// Config.LauncherRanks. Otherwise hvdrun would take a rank for another one. s is the secret that hvdrun has
// given to the ranks. If there is no connection, link logs a warning, because the job works without it.
func (m *Meeting) link(ctx context.Context, s secret.Secret, log *zap.Logger) error {
	set := &m.Settings
	own := set.Rank
	if list := set.LauncherRanks; list != nil {
		if len(list) != set.Size {
			return fmt.Errorf("HVD_LAUNCHER_RANKS has %d ranks, but the job has %d", len(list), set.Size)
		}
		own = list[set.Rank]
	}
	addr := m.launcherAddr()
	if addr == "" || set.Environment("HOROVOD_RANK") != strconv.Itoa(own) ||
		set.LauncherRanks == nil && set.Environment("HOROVOD_SIZE") != strconv.Itoa(set.Size) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, LinkTimeout)
	defer cancel()
	client, err := store.Dial(ctx, addr, store.Config{Secret: s})
	if err != nil {
		log.Warn("no connection to hvdrun, which will not learn why the job fails", zap.Error(err))
		return nil
	}
	m.onClose(client.Close)
	m.launcher = client
	return nil
}

// DialLauncher connects to the store of hvdrun, within LinkTimeout. If hvdrun has not started this process,
// it returns nil.
func DialLauncher(ctx context.Context, set *config.Config) (*store.Client, error) {
	m := Meeting{Settings: *set}
	addr := m.launcherAddr()
	if addr == "" {
		return nil, nil
	}
	s, err := jobSecret(set)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, LinkTimeout)
	defer cancel()
	return store.Dial(ctx, addr, store.Config{Secret: s})
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
	m.Secret = s
	if m.Settings.TLS {
		m.Secret = s.Encrypted()
	}
	return err
}

// Launcher returns the store of hvdrun if hvdrun has started this process and the meeting knows the number
// that hvdrun has given to each rank, else nil. Package joblink uses this store for the link to the launcher.
// The ranks may meet at another store.
func (m *Meeting) Launcher() store.Store { return m.launcher }

// Dial connects to the store of a launcher. Rank and Size of the Place are -1, because the store does not
// contain them.
func Dial(ctx context.Context, addr string, s secret.Secret) (*Place, error) {
	client, err := store.Dial(ctx, addr, store.Config{Secret: s})
	if err != nil {
		return nil, err
	}
	p := placeAt(client, -1, -1, addr)
	p.Secret = s
	return p, nil
}
