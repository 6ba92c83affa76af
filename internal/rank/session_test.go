package rank

import (
	"context"
	"errors"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rendezvous"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/shm"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/mpi"
	"github.com/gohvd/gohvd/ops/tcp"
	"github.com/gohvd/gohvd/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open opens the sessions of a job whose ranks are all in this process. hosts has the host name of each rank,
// and set has further settings for some ranks. The sessions are closed when the test ends.
func open(t *testing.T, hosts []string, set map[int]map[string]string) ([]*Session, []error) {
	return openLacking(t, hosts, set, nil)
}

// openLacking does the same as open, except that some ranks cannot share memory. The map lacks has the reason
// for each of these ranks.
func openLacking(t *testing.T, hosts []string, set map[int]map[string]string,
	lacks map[int]string) ([]*Session, []error) {
	t.Setenv("TMPDIR", t.TempDir()) // use a new folder for the sockets of the ranks
	ctx := testnet.Context(t)
	kv := store.NewHashStore(store.Limits{})
	sessions, errs := make([]*Session, len(hosts)), make([]error, len(hosts))
	var wg sync.WaitGroup
	for r, host := range hosts {
		settings := map[string]string{
			"HVD_JOB_ID": "job", "HOROVOD_RANK": string(rune('0' + r)),
			"HOROVOD_SIZE":     string(rune('0' + len(hosts))),
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
			at, err := bootstrap.Open(ctx, bootstrap.Config{Settings: cfg, Store: kv})
			if err != nil {
				errs[r] = err
				return
			}
			capabilities := map[string]string{"device": "not at " + host}
			if why := lacks[r]; why != "" {
				capabilities["shm"] = why
			}
			// The last processor is also the first one of rank r+1.
			processors := append(make([]uint64, r), math.MaxUint64, 1)
			sessions[r], errs[r] = OpenSession(ctx, SessionConfig{At: at, ringAbove: 2,
				Capabilities: capabilities, processors: processors})
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

// Every rank learns the host names and capabilities of all ranks, and which ranks share memory. The ranks of
// a host share memory even if the job has other hosts.
func TestOpen(t *testing.T) {
	for name, hosts := range map[string][]string{
		"one host": {"a", "a", "a"}, "two hosts": {"a", "b", "a"}, "no ring": {"a", "a"},
		"four": {"a", "b", "b", "c"}, "all apart": {"a", "b", "c"},
	} {
		t.Run(name, func(t *testing.T) {
			sessions, errs := open(t, hosts, nil)
			for r, s := range sessions {
				if errs[r] != nil {
					t.Errorf("rank %d: %v", r, errs[r])
					continue
				}
				local, groups, shared := 0, []topo.Rank(nil), false
				usable := map[int]bool{}
				for i, host := range hosts {
					if host == hosts[r] {
						local++
						for p := range 64 + 1 {
							usable[64*i+p] = true
						}
					}
					lowest := slices.Index(hosts, host)
					groups, shared = append(groups, topo.Rank(lowest)), shared || lowest != i
					if s.Hosts[i] != host {
						t.Errorf("rank %d: rank %d is on %q", r, i, s.Hosts[i])
					}
					if why := s.Capabilities[i]["device"]; why != "not at "+host {
						t.Errorf("rank %d: rank %d has capability %q for the device", r, i, why)
					}
				}
				if !shared {
					groups = nil
				}
				if n := max(len(usable), runtime.NumCPU()); s.Processors != n {
					t.Errorf("rank %d: got %d processors, want %d", r, s.Processors, n)
				}
				if s.LocalSize != local || s.Epoch != sessions[0].Epoch || (s.Memory != nil) != shared ||
					!slices.Equal(s.Groups, groups) {
					t.Errorf("rank %d: local size %d, epoch %d, memory %v, groups %v", r, s.LocalSize,
						s.Epoch,
						s.Memory, s.Groups)
				}
			}
		})
	}
}

// A job can start if its hosts use network interfaces with different names and addresses.
func TestOpenOnInterfacesOfTheirOwn(t *testing.T) {
	_, errs := open(t, []string{"a", "b"}, map[int]map[string]string{
		0: {"HOROVOD_GLOO_IFACE": "127.0.0.1"}, 1: {"HOROVOD_GLOO_IFACE": "127.0.0.0/8"},
	})
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}

// No rank shares memory if the settings exclude it. If the settings require it and the ranks are on several
// hosts, or if the settings differ between ranks, every rank gets an error.
func TestOpenWithoutMemory(t *testing.T) {
	tcp := map[string]string{"HOROVOD_CPU_OPERATIONS": "tcp"}
	either := map[string]string{"HOROVOD_CPU_OPERATIONS": "shm,tcp"}
	only := map[string]string{"HOROVOD_CPU_OPERATIONS": "shm"}
	for name, test := range map[string]struct {
		hosts []string
		set   map[int]map[string]string
		says  string // text that every rank's error must contain; empty if no error is expected
	}{
		"disabled": {[]string{"a", "a"}, map[int]map[string]string{0: tcp, 1: tcp},
			""},
		"several hosts, required": {[]string{"a", "b"}, map[int]map[string]string{0: only, 1: only},
			"several hosts (a, b"},
		"several hosts in a ring, required": {[]string{"a", "b", "a", "b", "a"},
			map[int]map[string]string{0: only, 1: only, 2: only, 3: only, 4: only}, "several hosts (a, b"},
		"one no, one if possible": {[]string{"a", "a"}, map[int]map[string]string{0: either, 1: tcp},
			"HOROVOD_CPU_OPERATIONS is shm,tcp at rank 0, tcp at rank 1"},
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

// If one rank cannot use a backend, no rank uses it. If the settings require this backend, every rank gets an
// error that names the rank and the reason.
func TestOneRankLacksABackend(t *testing.T) {
	hosts, lacks := []string{"a", "a", "a"}, map[int]string{1: "no memory today"}
	all := func(value string) map[int]map[string]string {
		set := map[string]string{"HOROVOD_CPU_OPERATIONS": value}
		return map[int]map[string]string{0: set, 1: set, 2: set}
	}
	_, errs := openLacking(t, hosts, all("shm"), lacks)
	for r, err := range errs {
		if want := "HOROVOD_CPU_OPERATIONS is shm, but rank 1 cannot use the backend shm: no memory today"; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("rank %d: got error %v, want %q in it", r, err, want)
		}
	}
	sessions, errs := openLacking(t, hosts, all("shm,tcp"), lacks)
	for r, s := range sessions {
		if errs[r] != nil {
			t.Errorf("rank %d: %v", r, errs[r])
			continue
		}
		if ranks, why := s.Lacking(message.SHM); s.Memory != nil || !slices.Equal(ranks, []topo.Rank{1}) ||
			why != "rank 1 cannot use the backend shm: no memory today" {
			t.Errorf("rank %d: memory %v, ranks %v lack shm: %q", r, s.Memory, ranks, why)
		}
		if ranks, why := s.Lacking(message.TCP); len(ranks) > 0 || why != "" {
			t.Errorf("rank %d: ranks %v lack tcp: %q", r, ranks, why)
		}
		if ranks, _ := s.Lacking(message.NoBackend); len(ranks) != len(hosts) {
			t.Errorf("rank %d: ranks %v lack a backend that none has", r, ranks)
		}
	}
}

// sharer is a mesh that shares memory with the ranks in group. If it cannot share memory with other ranks of
// the host, the field why has the reason.
type sharer struct {
	shm.Sharer
	group []topo.Rank
	why   string
}

func (s *sharer) Group() []topo.Rank         { return s.group }
func (s *sharer) UnsharedReason() string     { return s.why }
func (s *sharer) UnsharedRanks() []topo.Rank { return nil }
func (s *sharer) Groups() []topo.Rank {
	if len(s.group) == 2 {
		return []topo.Rank{0, 0}
	}
	return []topo.Rank{0, 1}
}

func TestShare(t *testing.T) {
	modes := []config.SharedMemory{config.SharedByHost, config.SharedIfPossible, config.SharedAlways}
	for _, test := range []struct {
		name string
		mesh *sharer
		// fails are the modes in which useMemory must return an error.
		fails []config.SharedMemory
	}{
		{"all", &sharer{group: []topo.Rank{0, 1}}, nil},
		{"some on another host", &sharer{group: []topo.Rank{0}}, nil},
		{"impossible", &sharer{group: []topo.Rank{0}, why: "rank 1: no memory"},
			[]config.SharedMemory{config.SharedByHost, config.SharedAlways}},
	} {
		for _, mode := range modes {
			s := &Session{Hosts: []string{"a", "b"}}
			err := s.useMemory(test.mesh, &config.Config{Size: 2, SharedMemory: mode}, zap.NewNop())
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

// A rank whose connection fails because it lacks memory blames only itself.
func TestFail(t *testing.T) {
	sessions, errs := open(t, []string{"a", "b"}, nil)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	_ = sessions[1].Fail(&transport.PeerError{Peer: 0, Err: syscall.ENOBUFS})
	err := sessions[0].Ready(testnet.Context(t))
	failed, ok := errors.AsType[*rendezvous.FailedError](err)
	if !ok || !slices.Equal(failed.Ranks, []topo.Rank{1}) {
		t.Errorf("got %v, want that rank 1 failed", err)
	}
}

// If the launcher changes the ranks of an elastic job while one of them waits until all are ready, either
// both ranks begin the epoch or none does.
func TestSupersededAtReady(t *testing.T) {
	gone, cancel := context.WithCancel(testnet.Context(t))
	cancel()
	for range 20 {
		sessions, errs := open(t, []string{"a", "b"}, nil)
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		sessions[1].superseded = func() bool { return true }
		other := make(chan error, 1)
		go func() { other <- sessions[0].Ready(testnet.Context(t)) }()
		own := sessions[1].Ready(gone)
		if own != nil {
			sessions[1].Close() // as Init does
		}
		if err := <-other; (err == nil) != (own == nil) {
			t.Fatalf("got %v at rank 0 and %v at rank 1, want that both begin or none", err, own)
		}
	}
}

// If a rank on one host cannot share memory, the ranks on another host still share memory.
func TestOneHostLacksMemory(t *testing.T) {
	hosts, set := []string{"a", "a", "b"}, map[int]map[string]string{}
	for r := range hosts {
		set[r] = map[string]string{"HOROVOD_CPU_OPERATIONS": "shm,tcp"}
	}
	sessions, errs := openLacking(t, hosts, set, map[int]string{2: "no memory today"})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for r, s := range sessions[:2] {
		if mesh, shares := s.Mesh.(shm.Sharer); !shares || !slices.Equal(mesh.Group(), []topo.Rank{0, 1}) {
			t.Errorf("rank %d: it does not share memory with the other rank of its host", r)
		}
	}
}

// Operations whose algorithm the user has forced run on one level.
func TestForcedAlgorithmsOnOneLevel(t *testing.T) {
	on := &config.Config{HierarchicalAllreduce: true, HierarchicalAllgather: true}
	for _, test := range []struct {
		set    *config.Config
		forced tcp.Forced
		want   []message.Kind
	}{
		{on, nil, []message.Kind{message.Allreduce, message.Allgather, message.Broadcast,
			message.Reducescatter}},
		{on, tcp.Forced{message.Allreduce: message.Ring},
			[]message.Kind{message.Allgather, message.Broadcast, message.Reducescatter}},
		{&config.Config{HierarchicalAllgather: true}, nil, []message.Kind{message.Allgather}},
	} {
		var got []message.Kind
		for k, allowed := range onTwoLevels(test.set, test.forced) {
			if allowed {
				got = append(got, message.Kind(k))
			}
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("forced %v: got %v, want %v", test.forced, got, test.want)
		}
	}
}

// onMPI is an MPI job.
type onMPI struct{ mpi.World }

func (onMPI) Register(bool, bool) ops.Registration { return ops.Registration{ID: message.MPI} }

// The backends of a job depend on which ranks share memory and on the settings. MPI comes first.
func TestBackends(t *testing.T) {
	shared := &Session{Memory: &sharer{}, Groups: []topo.Rank{0, 0, 2, 2}}
	for _, test := range []struct {
		session                      *Session
		allreduce, allgather, useMPI bool
		want                         []message.Backend
	}{
		{nil, true, true, false, []message.Backend{message.TCP}},
		{&Session{}, true, true, false, []message.Backend{message.TCP}},
		{&Session{}, true, true, true, []message.Backend{message.MPI, message.TCP}},
		{shared, true, true, false, []message.Backend{message.SHM, message.Hier, message.TCP}},
		{shared, true, true, true, []message.Backend{message.MPI, message.SHM, message.Hier, message.TCP}},
		{shared, false, true, false, []message.Backend{message.SHM, message.Hier, message.TCP}},
		{shared, true, false, false, []message.Backend{message.SHM, message.Hier, message.TCP}},
		{shared, false, false, false, []message.Backend{message.SHM, message.TCP}},
	} {
		var got []message.Backend
		for _, b := range Backends(&MPI{World: onMPI{}}, test.session, transport.Alone{}, &config.Config{
			HierarchicalAllreduce: test.allreduce, HierarchicalAllgather: test.allgather,
			MPIOperations: test.useMPI,
		}, tcp.Config{}, false) {
			got = append(got, b.ID)
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("got %v, want %v", got, test.want)
		}
	}
}

func TestThreadCores(t *testing.T) {
	for _, c := range []struct {
		list        []int
		local, size int
		allowed     []uint64
		core        []int
		err         string
	}{
		{nil, 0, 2, []uint64{3}, nil, ""},
		{[]int{1, 0}, 0, 2, []uint64{3}, []int{1}, ""},
		{[]int{1, 0, 99}, 1, 2, []uint64{3}, []int{0}, ""},
		{[]int{1, 64}, 1, 2, []uint64{0, 1}, []int{64}, ""},
		{[]int{99}, 0, 1, nil, []int{99}, ""},
		{[]int{1}, 0, 2, []uint64{3}, nil,
			"HOROVOD_THREAD_AFFINITY: got core 1 for 2 ranks on this host, want a core for each of them"},
		{[]int{0, 2}, 2, 3, []uint64{7}, nil, "got cores 0 and 2 for 3 ranks on this host"},
		{[]int{0, 99}, 1, 2, []uint64{3}, nil, "HOROVOD_THREAD_AFFINITY: got core 99 for local rank 1, " +
			"but this process may run only on cores 0 and 1"},
		{[]int{0}, 0, 1, []uint64{2}, nil, "got core 0 for local rank 0, but this process may run only on core 1"},
		{[]int{0}, 0, 1, []uint64{14, 1}, nil, "may run only on cores 1-3 and 64"},
	} {
		core, err := threadCores(c.list, topo.Topology{LocalRank: c.local, LocalSize: c.size}, c.allowed)
		if !slices.Equal(core, c.core) || (err == nil) != (c.err == "") ||
			err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%v for local rank %d of %d on %b: got %v and error %v, want %v and %q", c.list, c.local, c.size,
				c.allowed, core, err, c.core, c.err)
		}
	}
}

// The affinity of this process has as many processors as Go has found when it started.
func TestAffinity(t *testing.T) {
	if n := processorsOf([]rendezvous.Record{{Processors: affinity()}}, ""); n != runtime.NumCPU() {
		t.Errorf("got %d processors, want %d", n, runtime.NumCPU())
	}
}
