package session

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/secret"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
	"github.com/gohvd/gohvd/transport/shm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestPack(t *testing.T) {
	for _, part := range [][]byte{nil, []byte("x"), bytes.Repeat([]byte{0xff}, 300)} {
		host, card, info, err := unpack(pack("host", part, part))
		if err != nil || host != "host" || !bytes.Equal(card, part) || !bytes.Equal(info, part) {
			t.Errorf("got %q, %d and %d bytes, %v, want %d twice", host, len(card), len(info), err, len(part))
		}
	}
	whole := pack("host", []byte("card"), nil)
	for n := range whole {
		if _, _, _, err := unpack(whole[:n]); err == nil {
			t.Errorf("%d of %d bytes: got no error", n, len(whole))
		}
	}
}

func TestAddressTowards(t *testing.T) {
	if got, err := addressTowards("127.0.0.1:9"); got != "127.0.0.1" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := addressTowards("nonsense"); err == nil || !strings.Contains(err.Error(), "nonsense") {
		t.Errorf("got error %v, want one with the address", err)
	}
}

// open opens the sessions of a job whose ranks are in this process, and closes those there are at the end of the test.
func open(t *testing.T, hosts []string, set map[int]map[string]string) ([]*Session, []error) {
	t.Setenv("TMPDIR", t.TempDir()) // where the sockets are
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	kv := store.NewHashStore(store.Limits{})
	sessions, errs := make([]*Session, len(hosts)), make([]error, len(hosts))
	var wg sync.WaitGroup
	for r, host := range hosts {
		settings := map[string]string{
			"HVD_JOB_ID": "job", "HOROVOD_RANK": string(rune('0' + r)), "HOROVOD_SIZE": string(rune('0' + len(hosts))),
			"HOROVOD_HOSTNAME": host, "HVD_HOSTID": host,
		}
		for name, value := range set[r] {
			settings[name] = value
		}
		cfg, err := config.FromEnvironment(settings, true)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			sessions[r], errs[r] = Open(ctx, Config{Settings: cfg, Store: kv, Info: []byte{byte(r)}})
		})
	}
	wg.Wait()
	t.Cleanup(func() {
		var wg sync.WaitGroup
		for _, s := range sessions {
			if s != nil {
				wg.Go(func() {
					if err := errors.Join(s.Mesh.Close(), s.Close()); err != nil {
						t.Error(err)
					}
				})
			}
		}
		wg.Wait()
	})
	return sessions, errs
}

// The secret is the launcher's, or that of a file; on several hosts there must be one.
func TestSecretOf(t *testing.T) {
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, []byte("  sixteen bytes it is\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	const same = "sixteen bytes it is"
	for _, test := range []struct {
		set  config.Config
		none bool
		want string // of the error
	}{
		{config.Config{}, true, ""},
		{config.Config{Secret: same}, false, ""},
		{config.Config{SecretFile: file}, false, ""},
		{config.Config{Secret: same, SecretFile: "/not/looked/at"}, false, ""},
		{config.Config{Secret: "short"}, false, "HVD_SECRET: a secret of 5 bytes"},
		{config.Config{SecretFile: empty}, false, "is empty"},
		{config.Config{SecretFile: file + ".not"}, false, "HVD_SECRET_FILE: open"},
	} {
		s, err := secretOf(&test.set)
		if test.want != "" {
			if err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "short") {
				t.Errorf("%+v: got %v, want %q", test.set, err, test.want)
			}
			continue
		}
		if err != nil || s.IsZero() != test.none {
			t.Errorf("%+v: got %v, %v", test.set, s, err)
		}
	}
	a, errA := secretOf(&config.Config{Secret: same})
	b, errB := secretOf(&config.Config{SecretFile: file})
	if err := errors.Join(errA, errB); err != nil || proves(a, b) != nil {
		t.Errorf("the file's secret is another than the same text's: %v", err)
	}
	// An address that is not this host's own: nobody is asked there before there is a secret.
	set, err := config.FromEnvironment(map[string]string{
		"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": outside(t), "HOROVOD_GLOO_RENDEZVOUS_PORT": "9",
	}, false)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := Open(ctx, Config{Settings: set}); err == nil || !strings.Contains(err.Error(), "have no secret: set HVD_SECRET_FILE") {
		t.Errorf("got %v, want that there is no secret", err)
	}
	set.Insecure = true
	if _, err := Open(ctx, Config{Settings: set}); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("got %v, want that nobody is there", err)
	}
}

// proves has two secrets meet.
func proves(a, b secret.Secret) error {
	x, y := net.Pipe()
	defer x.Close()
	defer y.Close()
	done := make(chan error, 1)
	go func() {
		_, err := b.Accept(y, "test")
		done <- err
	}()
	if _, err := a.Dial(x, "test"); err != nil {
		return err
	}
	return <-done
}

// outside is an address of this machine that is not loopback, at a port where nobody listens.
func outside(t *testing.T) string {
	t.Helper()
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if ip, ok := a.(*net.IPNet); ok && !ip.IP.IsLoopback() && ip.IP.To4() != nil {
			return ip.IP.String()
		}
	}
	t.Skip("this machine has no address but loopback")
	return ""
}

// Every rank learns where all are and what they say, and those of one host share memory.
func TestOpen(t *testing.T) {
	for name, hosts := range map[string][]string{"one host": {"a", "a", "a"}, "two hosts": {"a", "b", "a"}} {
		t.Run(name, func(t *testing.T) {
			sessions, errs := open(t, hosts, nil)
			for r, s := range sessions {
				if errs[r] != nil {
					t.Errorf("rank %d: %v", r, errs[r])
					continue
				}
				local := 0
				for i, host := range hosts {
					if host == hosts[r] {
						local++
					}
					if s.Hosts[i] != host || !bytes.Equal(s.Infos[i], []byte{byte(i)}) {
						t.Errorf("rank %d: rank %d is on %q and says %v", r, i, s.Hosts[i], s.Infos[i])
					}
				}
				if s.LocalSize != local || s.Epoch != sessions[0].Epoch || (s.Memory != nil) != (local == len(hosts)) {
					t.Errorf("rank %d: local size %d, epoch %d, memory %v", r, s.LocalSize, s.Epoch, s.Memory)
				}
			}
		})
	}
}

// What the ranks may use is what the settings say: a rank that was told not to share is a reason for all.
func TestOpenWithoutMemory(t *testing.T) {
	tcp := map[string]string{"HOROVOD_CPU_OPERATIONS": "tcp"}
	either := map[string]string{"HOROVOD_CPU_OPERATIONS": "shm,tcp"}
	only := map[string]string{"HOROVOD_CPU_OPERATIONS": "shm"}
	for name, test := range map[string]struct {
		hosts []string
		set   map[int]map[string]string
		says  string // in the errors; empty if there are none
	}{
		"told not to":             {[]string{"a", "a"}, map[int]map[string]string{0: tcp, 1: tcp}, ""},
		"several hosts, told to":  {[]string{"a", "b"}, map[int]map[string]string{0: only, 1: only}, "several hosts: a, b"},
		"one no, one if possible": {[]string{"a", "a"}, map[int]map[string]string{0: either, 1: tcp}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			sessions, errs := open(t, test.hosts, test.set)
			for r, err := range errs {
				switch {
				case test.says != "" && (err == nil || !strings.Contains(err.Error(), test.says)):
					t.Errorf("rank %d: got %v, want %q", r, err, test.says)
				case test.says == "" && err != nil:
					t.Errorf("rank %d: %v", r, err)
				case err == nil && sessions[r].Memory != nil:
					t.Errorf("rank %d shares memory", r)
				}
			}
		})
	}
}

// sharer is a mesh with a group, or a reason why there is none.
type sharer struct {
	shm.Sharer
	group []topo.Rank
	why   string
}

func (s *sharer) Group() []topo.Rank { return s.group }
func (s *sharer) Why() string        { return s.why }

func TestShare(t *testing.T) {
	modes := []config.SharedMemory{config.SharedByHost, config.SharedIfPossible, config.SharedAlways}
	for _, test := range []struct {
		name string
		mesh *sharer
		// fails are the modes in which there is an error.
		fails []config.SharedMemory
	}{
		{"all", &sharer{group: []topo.Rank{0, 1}}, nil},
		{"some on another host", &sharer{group: []topo.Rank{0}}, []config.SharedMemory{config.SharedAlways}},
		{"impossible", &sharer{group: []topo.Rank{0}, why: "rank 1: no memory"}, []config.SharedMemory{config.SharedByHost, config.SharedAlways}},
	} {
		for _, mode := range modes {
			s := &Session{Hosts: []string{"a", "b"}}
			err := s.share(test.mesh, &config.Config{Size: 2, SharedMemory: mode}, zap.NewNop())
			if (err != nil) != slices.Contains(test.fails, mode) {
				t.Errorf("%s, %v: got %v", test.name, mode, err)
			}
			if err != nil && !strings.Contains(err.Error(), test.mesh.why) {
				t.Errorf("%s, %v: got %v, want %q in it", test.name, mode, err, test.mesh.why)
			}
			if (s.Memory != nil) != (len(test.mesh.group) == 2) {
				t.Errorf("%s, %v: memory is %v", test.name, mode, s.Memory)
			}
		}
	}
}

var _ transport.Mesh = (*sharer)(nil)
