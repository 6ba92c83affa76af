package bootstrap

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/internal/testnet"
)

// settings returns the settings of a process whose environment contains only the variables in vars.
func settings(t *testing.T, vars map[string]string) config.Config {
	t.Helper()
	var environ []string
	for name, value := range vars {
		environ = append(environ, name+"="+value)
	}
	cfg, err := config.Load(config.Sources{Environ: environ, HaveStore: true})
	if err != nil {
		t.Fatal(err)
	}
	cfg.Hostname = "host"
	return cfg
}

// all calls Open concurrently with each Config in configs. It returns the meetings and errors in the order of
// configs, and closes the meetings when the test ends.
func all(t *testing.T, configs ...Config) ([]*Meeting, []error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	met, errs := make([]*Meeting, len(configs)), make([]error, len(configs))
	var wg sync.WaitGroup
	for i, cfg := range configs {
		wg.Go(func() { met[i], errs[i] = Open(ctx, cfg) })
	}
	wg.Wait()
	t.Cleanup(func() {
		for _, m := range met {
			if m == nil {
				continue
			}
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return met, errs
}

// openError returns the error of Open.
func openError(t *testing.T, cfg Config) error {
	t.Helper()
	_, errs := all(t, cfg)
	return errs[0]
}

// eachRank returns what config returns for each of n ranks.
func eachRank(n int, config func(r int) Config) (configs []Config) {
	for r := range n {
		configs = append(configs, config(r))
	}
	return configs
}

// meet calls Open concurrently with each Config in configs, and checks the meetings.
func meet(t *testing.T, configs ...Config) []*Meeting {
	t.Helper()
	met, errs := all(t, configs...)
	checkMet(t, met, errs)
	return met
}

// checkMet checks that no rank has an error, that each Meeting has the right rank, size and job, and that all
// ranks use the same store.
func checkMet(t *testing.T, met []*Meeting, errs []error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for r, m := range met {
		if m.Settings.Rank != r || m.Settings.Size != len(met) || m.Settings.JobID != met[0].Settings.JobID {
			t.Errorf("rank %d: is rank %d of %d in job %q, want of %d in %q", r, m.Settings.Rank,
				m.Settings.Size, m.Settings.JobID,
				len(met), met[0].Settings.JobID)
		}
		if m.Store == nil && len(met) == 1 {
			continue
		}
		n, err := m.Store.Add(t.Context(), "met", 1)
		if err != nil || n != int64(r+1) {
			t.Errorf("rank %d: got %d, %v, want to be number %d at the store", r, n, err, r+1)
		}
	}
}

// outside returns an address of this machine that is not a loopback address. If there is none, it skips the
// test.
func outside(t *testing.T) string {
	t.Helper()
	addrs, err := netif.Choice{}.Addresses()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if a.Is4() {
			return a.String()
		}
	}
	t.Skip("this machine has no address but loopback")
	return ""
}

const given = "a secret that the user gave"

// TestOpenAlone checks that Open returns a job of one rank if neither the settings nor a launcher place the
// process in a job, or if the job has one rank.
func TestOpenAlone(t *testing.T) {
	for name, vars := range map[string]map[string]string{
		"nothing":       nil,
		"one rank":      {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"},
		"one by mpirun": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
	} {
		t.Run(name, func(t *testing.T) {
			meet(t, Config{Settings: settings(t, vars)})
		})
	}
}

// TestOpenWithStore checks from where a rank gets its number if the program passes a store. If nothing gives
// it one, Open fails: several such processes would each be a job of one rank.
func TestOpenWithStore(t *testing.T) {
	h := newStore(t)
	for _, c := range []struct {
		name       string
		vars       map[string]string
		rank, size int // 0, 0 if Open fails
	}{
		{"nothing", nil, 0, 0},
		{"settings", map[string]string{"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, 1, 2},
		{"one rank", map[string]string{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}, 0, 1},
		{"mpirun", map[string]string{"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, 2, 3},
		{"mpirun with one rank", map[string]string{"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, 0, 1},
	} {
		m, err := Open(t.Context(), Config{Settings: settings(t, c.vars), Store: h})
		if c.size == 0 {
			testnet.WantError(t, err, "set HOROVOD_RANK and HOROVOD_SIZE")
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if m.Settings.Rank != c.rank || m.Settings.Size != c.size {
			t.Errorf("%s: got rank %d of %d, want %d of %d", c.name, m.Settings.Rank, m.Settings.Size, c.rank, c.size)
		}
		if err := m.Close(); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestOpenNeedsSecret checks that a rank without a secret neither connects to a store on the network nor
// listens on a network address, unless HVD_INSECURE is set.
func TestOpenNeedsSecret(t *testing.T) {
	out := outside(t)
	launched := map[string]string{
		"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": out,
		"HOROVOD_GLOO_RENDEZVOUS_PORT": "9",
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := Open(ctx, Config{Settings: settings(t, launched)})
	testnet.WantError(t, err, "without a secret: set HVD_SECRET_FILE")
	launched["HVD_INSECURE"] = "1"
	if _, err := Open(ctx, Config{Settings: settings(t, launched)}); err == nil ||
		strings.Contains(err.Error(), "secret") {
		t.Errorf("got %v, want that nobody is there", err)
	}
	own := map[string]string{"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_GLOO_IFACE": out}
	_, err = Open(ctx, Config{Settings: settings(t, own), Store: newStore(t)})
	testnet.WantError(t, err, "without a secret")
}

// TestOwnStore lets the program pass its own store. The store must stay open after Close of the Meeting. The
// rank must listen on the interface that the settings choose, or else on loopback.
func TestOwnStore(t *testing.T) {
	h := newStore(t)
	out := outside(t)
	met := meet(t, eachRank(2, func(r int) Config {
		vars := map[string]string{"HOROVOD_RANK": strconv.Itoa(r), "HOROVOD_SIZE": "2", "HVD_SECRET": given}
		if r == 1 {
			vars["HOROVOD_GLOO_IFACE"] = "192.0.2.1, " + out
		}
		return Config{Settings: settings(t, vars), Store: h}
	})...)
	if met[0].Listen != loopback || met[1].Listen != out {
		t.Errorf("listen on %s and %s, want %s and %s", met[0].Listen, met[1].Listen, loopback, out)
	}
	if err := met[0].Close(); err != nil {
		t.Error(err)
	}
	if _, err := h.Add(t.Context(), "met", 1); err != nil {
		t.Errorf("the program's store was closed: %v", err)
	}
}

// TestLinkToLauncher checks that a rank that hvdrun has started is connected to hvdrun's store, although the
// ranks meet at another one. A process whose number in the job is another one than hvdrun has given to it is
// connected only if HVD_LAUNCHER_RANKS has hvdrun's numbers of all ranks. A rank that cannot connect still
// meets the others.
func TestLinkToLauncher(t *testing.T) {
	kv := newStore(t)
	_, port, _ := net.SplitHostPort(serve(t, kv, parse(t, given)).Addr())
	own := newStore(t)
	for name, test := range map[string]struct {
		change  map[string]string
		meet    func(*Config, ID)
		linked  bool
		warning string
	}{
		"unique id": {nil, func(c *Config, id ID) { c.ID = &ByID{IDs: []ID{id}, Rank: 1, Size: 2} }, true, ""},
		"store":     {nil, func(c *Config, _ ID) { c.Store = own }, true, ""},
		"a part": {map[string]string{"HOROVOD_SIZE": "4", "HOROVOD_RANK": "3", "HVD_LAUNCHER_RANKS": "0,3"},
			func(c *Config, id ID) {
				c.Settings.Rank, c.Settings.Size = config.Unset, config.Unset
				c.ID = &ByID{IDs: []ID{id}, Rank: 1, Size: 2}
			}, true, ""},
		"another part": {map[string]string{"HOROVOD_SIZE": "4", "HVD_LAUNCHER_RANKS": "0,3"},
			func(c *Config, id ID) {
				c.Settings.Rank, c.Settings.Size = config.Unset, config.Unset
				c.ID = &ByID{IDs: []ID{id}, Rank: 1, Size: 2}
			}, false, ""},
		"another size": {map[string]string{"HOROVOD_SIZE": "4"}, func(c *Config, id ID) {
			c.Settings.Rank, c.Settings.Size = config.Unset, config.Unset
			c.ID = &ByID{IDs: []ID{id}, Rank: 1, Size: 2}
		}, false, ""},
		"another secret": {map[string]string{"HVD_SECRET": "what hvdrun does not know"},
			func(c *Config, id ID) { c.ID = &ByID{IDs: []ID{id}, Rank: 1, Size: 2} }, false, "no connection to hvdrun"},
	} {
		t.Run(name, func(t *testing.T) {
			id, _, err := NewID(t.Context(), loopback, false, nil)
			if err != nil {
				t.Fatal(err)
			}
			vars := map[string]string{"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HVD_SECRET": given,
				"HOROVOD_GLOO_RENDEZVOUS_ADDR": loopback, "HOROVOD_GLOO_RENDEZVOUS_PORT": port}
			maps.Copy(vars, test.change)
			log, entries := testnet.Logs()
			cfg := Config{Settings: settings(t, vars), Log: log}
			test.meet(&cfg, id)
			met, errs := all(t, cfg)
			if errs[0] != nil {
				t.Fatal(errs[0])
			}
			if test.warning != "" && !testnet.Logged(entries, test.warning) {
				t.Errorf("the log does not say %q", test.warning)
			}
			link := met[0].Launcher()
			if (link != nil) != test.linked {
				t.Fatalf("connected to hvdrun: %v, want %v", link != nil, test.linked)
			}
			if link == nil {
				return
			}
			if err := link.Set(t.Context(), name, nil); err != nil {
				t.Error(err)
			}
			if there, err := kv.Check(t.Context(), name); err != nil || !there {
				t.Errorf("the key is in hvdrun's store: %v, %v", there, err)
			}
		})
	}
}

func TestByMethod(t *testing.T) {
	free := net.JoinHostPort(loopback, strconv.Itoa(testnet.FreePort(t)))
	host, port, err := net.SplitHostPort(free)
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		url  string
		vars map[string]string
	}{
		"tcp":              {"tcp://" + free + "?rank=%d&world_size=3", nil},
		"tcp, rank beside": {"tcp://" + free, map[string]string{"HOROVOD_RANK": "%d", "HOROVOD_SIZE": "3"}},
		"env": {"env://", map[string]string{"MASTER_ADDR": host, "MASTER_PORT": port,
			"RANK": "%d", "WORLD_SIZE": "3"}},
		"env, one": {"env://", map[string]string{"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": "0",
			"WORLD_SIZE": "1"}},
		"file": {"file://" + t.TempDir() + "/f?rank=%d&world_size=3", nil},
	} {
		t.Run(name, func(t *testing.T) {
			size := 3
			if test.vars["WORLD_SIZE"] == "1" {
				size = 1
			}
			met := meet(t, eachRank(size, func(r int) Config {
				vars := make(map[string]string)
				for k, v := range test.vars {
					vars[k] = strings.ReplaceAll(v, "%d", strconv.Itoa(r))
				}
				return Config{Settings: settings(t, vars),
					Method: strings.ReplaceAll(test.url, "%d", strconv.Itoa(r))}
			})...)
			for r, m := range met {
				if m.Listen != loopback {
					t.Errorf("rank %d listens on %s, want loopback", r, m.Listen)
				}
			}
		})
	}
	testnet.WantError(t, openError(t, Config{Settings: settings(t, nil), Method: "tcp://" + free +
		"?rank=0&world_size=2", ID: &ByID{Size: 1}}), "got 2 of a store, an init method and a unique id")
}

// TestBySettings checks that Open meets at the place that the settings give, and uses the rank and size from
// the launcher's variables.
func TestBySettings(t *testing.T) {
	free := func() string { return net.JoinHostPort(loopback, strconv.Itoa(testnet.FreePort(t))) }
	placed := map[string][2]string{
		"HOROVOD_RANK": {"HOROVOD_RANK", "HOROVOD_SIZE"}, "mpirun": {"OMPI_COMM_WORLD_RANK",
			"OMPI_COMM_WORLD_SIZE"}, "plain": {"RANK", "WORLD_SIZE"},
	}
	for by, names := range placed {
		for name, value := range map[string]string{"HVD_INIT_METHOD": "tcp://" + free(),
			"HVD_UNIQUE_ID": newIDs(t, 1, false)[0].String()} {
			t.Run(name+" by "+by, func(t *testing.T) {
				meet(t, eachRank(2, func(r int) Config {
					return Config{Settings: settings(t, map[string]string{name: value,
						names[0]: strconv.Itoa(r), names[1]: "2"})}
				})...)
			})
		}
	}
	t.Run("rank in the URL", func(t *testing.T) {
		at := free()
		// The ranks must meet although WORLD_SIZE is set and MASTER_ADDR is not, because the URL contains the
		// address.
		meet(t, eachRank(2, func(r int) Config {
			return Config{Settings: settings(t, map[string]string{"WORLD_SIZE": "2",
				"HVD_INIT_METHOD": "tcp://" + at + "?world_size=2&rank=" + strconv.Itoa(r)})}
		})...)
	})
	for name, test := range map[string]struct {
		vars map[string]string
		want string
	}{
		"both": {map[string]string{"HVD_INIT_METHOD": "env://", "HVD_UNIQUE_ID": "x"},
			"HVD_INIT_METHOD and HVD_UNIQUE_ID are set"},
		"no id": {map[string]string{"HVD_UNIQUE_ID": "private"},
			"HVD_UNIQUE_ID: bootstrap: parse id: got 7 characters, want 171"},
		"no rank": {map[string]string{"HVD_UNIQUE_ID": newIDs(t, 1, false)[0].String()},
			"nothing says which rank this is"},
		"half": {map[string]string{"HVD_UNIQUE_ID": newIDs(t, 1, false)[0].String(), "RANK": "1"},
			"WORLD_SIZE is not set"},
		"no scheme": {map[string]string{"HVD_INIT_METHOD": "host:1"}, "init method"},
		"size": {map[string]string{"HVD_INIT_METHOD": "tcp://" + free()},
			"the URL has no parameter world_size"},
	} {
		err := openError(t, Config{Settings: settings(t, test.vars)})
		testnet.WantError(t, err, test.want)
		if err != nil && strings.Contains(err.Error(), "private") {
			t.Errorf("%s: the error shows the id: %v", name, err)
		}
	}
	// An id that the program passes must have precedence over the init method in the settings.
	meet(t, Config{Settings: settings(t, map[string]string{"HVD_INIT_METHOD": "tcp://" + free()}),
		ID: &ByID{IDs: newIDs(t, 1, false), Size: 1}})
}

// TestNoWayToMeet sets variables of a job, but leaves out the rank or the address at which the ranks meet.
// Open must return an error. If HVD_SIZE=1 is set too, the process must become a job of its own.
func TestNoWayToMeet(t *testing.T) {
	for _, vars := range map[string]map[string]string{
		"no address": {"RANK": "1", "WORLD_SIZE": "2"},
		"no rank":    {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
		"no size":    {"RANK": "0"},
		"address":    {"MASTER_ADDR": "localhost"},
		"pods":       {"HVD_SIZE": "3"},
	} {
		testnet.WantError(t, openError(t, Config{Settings: settings(t, vars)}),
			"to run this process as a job with one rank, set HVD_SIZE=1")
		vars["HVD_SIZE"] = "1"
		meet(t, Config{Settings: settings(t, vars)})
	}
	log, entries := testnet.Logs()
	allocation := map[string]string{"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
	meet(t, Config{Settings: settings(t, allocation), Log: log})
	if !testnet.Logged(entries, "this process runs in a job with fewer ranks", "SLURM_NTASKS=4", "start it with srun") {
		t.Errorf("a process in an allocation for four tasks trains alone without a warning: %v",
			entries.All())
	}
	allocation["HVD_SIZE"] = "1"
	log, entries = testnet.Logs()
	meet(t, Config{Settings: settings(t, allocation), Log: log})
	if entries.Len() > 0 {
		t.Errorf("a process that is to be alone warns: %v", entries.All())
	}
}

func TestByID(t *testing.T) {
	jobs := make(map[string]bool)
	for _, test := range []struct{ size, ids int }{{1, 1}, {2, 1}, {5, 2}} {
		ids := newIDs(t, test.ids, false)
		met, errs := all(t, eachRank(test.size, func(r int) Config {
			return Config{Settings: settings(t, nil), ID: &ByID{IDs: ids, Rank: r, Size: test.size}}
		})...)
		// If there are several ids, each has a store of its own. So the ranks do not all use the same store,
		// and this test cannot call checkMet.
		if test.ids == 1 {
			checkMet(t, met, errs)
		} else if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		for r, m := range met {
			if m.Secret.IsZero() || !m.Secret.Equal(met[0].Secret) {
				t.Errorf("rank %d of %d has another secret than rank 0", r, test.size)
			}
		}
		if job := met[0].Settings.JobID; jobs[job] {
			t.Errorf("jobs with different ids have the same name %q", job)
		} else {
			jobs[job] = true
		}
	}
}

// TestByIDRefused passes unique ids that contradict the settings. Open must return an error at each rank.
func TestByIDRefused(t *testing.T) {
	rank := func(t *testing.T, id ByID, vars map[string]string) Config {
		return Config{Settings: settings(t, vars), ID: &id}
	}
	ids := newIDs(t, 4, false)
	for name, test := range map[string]struct {
		configs []Config
		want    string
	}{
		"another place": {[]Config{
			rank(t, ByID{IDs: ids[2:3], Rank: 0, Size: 2}, map[string]string{"HOROVOD_RANK": "1",
				"HOROVOD_SIZE": "2"}),
		}, "HOROVOD_RANK and HOROVOD_SIZE say rank 1 of 2"},
		"no id": {[]Config{rank(t, ByID{Rank: 0, Size: 1}, nil)}, "0 ids"},
		"TLS": {[]Config{
			rank(t, ByID{IDs: ids[3:4], Rank: 0, Size: 2}, map[string]string{"HVD_TLS": "1"}),
			rank(t, ByID{IDs: ids[3:4], Rank: 1, Size: 2}, map[string]string{"HVD_TLS": "1"}),
		}, "HVD_TLS"},
	} {
		t.Run(name, func(t *testing.T) {
			_, errs := all(t, test.configs...)
			for _, err := range errs {
				testnet.WantError(t, err, test.want)
			}
		})
	}
}

// TestFindAddresses checks the addresses of a rank in a job that may have ranks on several hosts.
func TestFindAddresses(t *testing.T) {
	out := outside(t)
	for name, test := range map[string]struct {
		served, via string
		secret      bool
		want        Addresses
	}{
		"serves on all":      {"0.0.0.0", "", true, Addresses{Listen: loopback, Root: allAddresses}},
		"serves on loopback": {"127.0.1.1", "", false, Addresses{Listen: "127.0.1.1", Root: "127.0.1.1"}},
		"serves on one":      {out, "", true, Addresses{Listen: out, Root: out}},
		"on loopback":        {"", "127.0.0.1:9", true, Addresses{Listen: loopback, Root: loopback}},
		// The kernel connects 0.0.0.0 to this host, as if a name stood for loopback.
		"a name":                {"", "0.0.0.0:9", true, Addresses{Listen: loopback, Root: allAddresses}},
		"a name, but no secret": {"", "0.0.0.0:9", false, Addresses{Listen: loopback, Root: loopback}},
		"over a network":        {"", out + ":9", true, Addresses{Listen: out, Root: out}},
	} {
		t.Run(name, func(t *testing.T) {
			m := &Meeting{Place: &Place{Addr: test.via}, Addresses: loopbackOnly()}
			if test.served != "" {
				m.Served = netip.MustParseAddr(test.served)
			}
			if test.secret {
				m.Secret = parse(t, given)
			}
			if test.via != "" {
				test.want.StoreHost = netip.MustParseAddr(test.want.Listen)
			}
			err := m.findAddresses(testnet.Context(t), netif.Choice{})
			if err != nil || m.Addresses != test.want {
				t.Errorf("got %+v, %v, want %+v", m.Addresses, err, test.want)
			}
		})
	}
}

// TestOpenPlain lets two ranks meet on this host. They have only PyTorch's variables. MASTER_ADDR may be
// localhost at one rank and the address of this host at the other. Each rank must listen on the address in
// the table, and rank 0 must open the root on the last one.
func TestOpenPlain(t *testing.T) {
	out := outside(t)
	for name, test := range map[string]struct {
		masters [2]string
		secret  string
		listen  [2]string
		root    string
	}{
		"loopback":         {[2]string{loopback, loopback}, "", [2]string{loopback, loopback}, loopback},
		"loopback, secret": {[2]string{loopback, loopback}, given, [2]string{loopback, loopback}, allAddresses},
		"hosts":            {[2]string{out, out}, given, [2]string{loopback, out}, allAddresses},
		"localhost there":  {[2]string{"localhost", out}, given, [2]string{loopback, out}, allAddresses},
	} {
		t.Run(name, func(t *testing.T) {
			port := strconv.Itoa(testnet.FreePort(t))
			met := meet(t, eachRank(2, func(r int) Config {
				return Config{Settings: settings(t, map[string]string{
					"RANK": strconv.Itoa(r), "WORLD_SIZE": "2", "MASTER_ADDR": test.masters[r],
					"MASTER_PORT": port, "HVD_SECRET": test.secret,
				})}
			})...)
			for r, m := range met {
				if m.Listen != test.listen[r] || met[0].Root != test.root || m.Secret.IsZero() ||
					m.Settings.LocalRank != config.Unset {
					t.Errorf("rank %d: listens on %s (%v), local rank %d, want on %s, with a secret, and a local rank by the hosts", r, m.Listen, m.Secret,
						m.Settings.LocalRank, test.listen[r])
				}
			}
		})
	}
}

// TestByEnvironment checks that ranks under torchrun meet in torchrun's TCPStore, and can meet there again
// after a restart and in the next program.
func TestByEnvironment(t *testing.T) {
	h := newStore(t)
	port := serveTorch(t, h) // until the meetings, which delete a key when they close, are closed
	torchrun := func(r int, run, tls string) Config {
		return Config{Settings: settings(t, map[string]string{
			"TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": strconv.Itoa(r),
			"WORLD_SIZE": "2",
			"LOCAL_RANK": strconv.Itoa(r), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": loopback, "MASTER_PORT": port,
			"HVD_TLS": tls,
		})}
	}
	configs := eachRank(2, func(r int) Config { return torchrun(r, "run", "0") })
	met := meet(t, configs...)
	for r, m := range met {
		s := m.Settings
		if !m.Once || m.Secret.IsZero() || s.LocalRank != r || s.LocalSize != 2 || s.JobID != "run/0" ||
			m.Listen != loopback {
			t.Errorf("rank %d: got %+v", r, m)
		}
		if err := m.Met(t.Context()); err != nil {
			t.Error(err)
		}
		a := m.Again(settings(t, map[string]string{"HOROVOD_CACHE_CAPACITY": "7"}))
		if a.Settings.Rank != r || a.Settings.Size != 2 || a.Settings.LocalRank != r ||
			a.Settings.CacheCapacity != 7 || a.Store != m.Store {
			t.Errorf("rank %d: again: got %+v", r, a)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := met[0].Store.Add(t.Context(), "still", 1); err != nil {
		t.Errorf("the store was closed with what was made of it again: %v", err)
	}
	// The next program under the same torchrun has the same job. Its rank 1 may be there before its rank 0,
	// and a program that has died before its ranks met may have left its word in the store.
	for _, left := range []string{"", wordSocket + newHandoverName()} {
		for _, m := range met {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}
		if left != "" {
			if err := h.Set(t.Context(), "/gohvd/run/0/"+torchSecretKey, []byte(left)); err != nil {
				t.Fatal(err)
			}
		}
		errs := make([]error, 2)
		var first sync.WaitGroup
		first.Go(func() {
			later, failed := all(t, configs[1])
			met[1], errs[1] = later[0], failed[0]
		})
		testnet.Eventually(t, "rank 1 waits for the word of its own rank 0",
			func() bool { return left != "" || h.Waits() > 0 })
		now, failed := all(t, configs[0])
		first.Wait()
		met[0], errs[0] = now[0], failed[0]
		checkMet(t, met, errs)
	}
	met = meet(t, eachRank(2, func(r int) Config { return torchrun(r, "second run", "1") })...)
	if !met[0].Secret.IsEncrypted() || !met[1].Secret.IsEncrypted() {
		t.Error("with HVD_TLS the secret that rank 0 makes does not encrypt")
	}
	testnet.WantError(t, openError(t, Config{Settings: settings(t, map[string]string{
		"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "job-0"})}), "HVD_SIZE is not set")
}

// TestChosenInterface checks that under a launcher other than hvdrun, rank 0 serves the store only on the
// interface that the settings choose.
func TestChosenInterface(t *testing.T) {
	port := strconv.Itoa(testnet.FreePort(t))
	m, err := Open(testnet.Context(t), Config{Settings: settings(t, map[string]string{
		"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2",
		"SLURM_LOCALID": "0", "SLURM_NODEID": "0",
		"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
		"HVD_SECRET":          given,
		"HVD_RENDEZVOUS_HOST": loopback, "HVD_RENDEZVOUS_PORT": port, "HOROVOD_GLOO_IFACE": loopback,
	})})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for host, want := range map[string]error{loopback: nil, "127.0.0.2": syscall.ECONNREFUSED} {
		conn, err := net.Dial("tcp", net.JoinHostPort(host, port))
		if !errors.Is(err, want) {
			t.Errorf("%s: got %v, want %v", host, err, want)
		}
		if err == nil {
			conn.Close()
		}
	}
}

// TestSecretOf checks that jobSecret returns the secret from the settings, and that this secret encrypts
// connections if TLS is set. If the settings have no secret, the result must not be encrypted.
func TestSecretOf(t *testing.T) {
	for _, set := range []config.Config{
		{}, {TLS: true}, {Secret: "sixteen bytes it is"}, {Secret: "sixteen bytes it is", TLS: true},
	} {
		s, err := jobSecret(&set)
		if err != nil || s.IsZero() != (set.Secret == "") ||
			s.IsEncrypted() != (set.Secret != "" && set.TLS) {
			t.Errorf("%+v: got %v, encrypted: %v, %v", set, s, s.IsEncrypted(), err)
		}
	}
	if _, err := jobSecret(&config.Config{Secret: "short", TLS: true}); err == nil {
		t.Error("a short secret is taken")
	}
}
