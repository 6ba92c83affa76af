package ps

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/trace"
)

// replicated is a job with replicas whose nodes are in this process and can be killed.
type replicated[T Value] struct {
	t        *testing.T
	start    func(role string, rank int) (*Node, error)
	handler  func() Handler[T]
	nodes    map[int]*Node
	servers  map[int]*KVServer[T]
	workers  map[int]*KVWorker[T]
	stopping sync.WaitGroup
}

// startReplicated starts a job with replicas, and an app at its servers and workers.
func startReplicated[T Value](t *testing.T, j job, handler func() Handler[T]) *replicated[T] {
	port := strconv.Itoa(testnet.FreePort(t))
	r := &replicated[T]{t: t, handler: handler, nodes: make(map[int]*Node),
		servers: make(map[int]*KVServer[T]), workers: make(map[int]*KVWorker[T])}
	configOf := func(role string, rank int) Config {
		opts := Config{Logger: discard, faults: j.faults,
			Settings: nodeSettings(role, j.servers, j.workers, port, j.settings)}
		opts.Settings["DMLC_RANK"], opts.Settings["HVD_PS_REPLICAS"] = strconv.Itoa(rank), "1"
		if role == "server" && van.ServerID(rank) == j.apart {
			opts.Settings["HOROVOD_CPU_OPERATIONS"] = "tcp"
		}
		return opts
	}
	r.start = func(role string, rank int) (*Node, error) { return Join(t.Context(), configOf(role, rank)) }
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, id := range van.Members(van.GroupAll, j.servers, j.workers) {
		wg.Go(func() {
			if j.restart && van.RoleOf(id) == van.Server {
				if po, err := start(t.Context(), configOf("server", van.Rank(id))); err != nil {
					t.Errorf("%s: %v", van.Name(id), err)
				} else {
					po.stop()
				}
			}
			po, err := r.start(van.RoleOf(id).String(), van.Rank(id))
			if err != nil {
				t.Errorf("%s: %v", van.Name(id), err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			r.nodes[po.van.ID()] = po
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	for id, po := range r.nodes {
		var err error
		switch {
		case po.Role() == Server:
			r.servers[id], err = NewKVServer(po, handler())
		case po.Role() == Worker:
			r.workers[id], err = NewKVWorker[T](po)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for _, po := range r.nodes {
			r.stopping.Go(po.stop)
		}
		r.stopping.Wait()
	})
	return r
}

// kill makes the scheduler declare a server dead. Its connections then end without a goodbye.
func (r *replicated[T]) kill(id int) {
	r.t.Helper()
	dead := r.nodes[id]
	accuser := r.nodes[dead.otherServer(van.Rank(id), id)]
	accuser.van.Evict(dead.van.Process(), errors.New("the test says so"))
	testnet.Eventually(r.t, van.Name(id)+" fails", func() bool { return dead.van.Err() != nil })
	r.stopping.Go(dead.stop)
	delete(r.nodes, id)
}

// again starts a server in the place of one that was killed, and waits until it has all values.
func (r *replicated[T]) again(id int) {
	r.t.Helper()
	po, err := r.start("server", van.Rank(id))
	if err != nil {
		r.t.Fatal(err)
	}
	if po.van.ID() != id || !po.IsRecovery() {
		r.t.Fatalf("the new process is %s", po.ID())
	}
	r.nodes[id] = po
	if r.servers[id], err = NewKVServer(po, r.handler()); err != nil {
		r.t.Fatal(err)
	}
	testnet.Eventually(r.t, van.Name(id)+" has all values", func() bool { return complete(r.servers[id]) })
}

// sameBits checks that both servers of each range have the same bits, and one of them is the primary. No
// request is in flight.
func (r *replicated[T]) sameBits() {
	r.t.Helper()
	for home := range len(r.servers) {
		first := r.servers[van.ServerID(home)].replicas[home]
		second := r.servers[van.ServerID((home+1)%len(r.servers))].replicas[home]
		testnet.Eventually(r.t, "the server whose range it is is the primary", first.serves)
		first.mu.Lock()
		second.mu.Lock()
		if second.role != backup || len(first.store.entries) != len(second.store.entries) {
			r.t.Errorf("range %d: role %d, %d and %d keys", home, second.role, len(first.store.entries),
				len(second.store.entries))
		}
		for key := range first.store.entries {
			a, b := bitsOf(first.store, key), bitsOf(second.store, key)
			if !slices.EqualFunc(a, b, bytes.Equal) {
				r.t.Errorf("range %d: key %d has the bits %x and %x", home, key, a, b)
			}
		}
		first.mu.Unlock()
		second.mu.Unlock()
	}
}

// bitsOf returns the values of a key and their state.
func bitsOf(s *store, key uint64) [][]byte {
	e, ok := s.entries[key]
	if !ok {
		return nil
	}
	size := s.dt.Size()
	all := [][]byte{e.chunk.vals[e.at*size:][:e.n*size]}
	for _, plane := range e.chunk.state {
		size := s.rule.compute.Size()
		all = append(all, plane[e.at*size:][:e.n*size])
	}
	return all
}

// lensOf returns the number of values of each key.
func lensOf(keys []uint64) (lens []int32, total int) {
	for _, key := range keys {
		n := int32(key % 4)
		lens = append(lens, n)
		total += int(n)
	}
	return lens, total
}

// someKeys returns some of 60 keys, which are spread over all servers.
func someKeys(random *rand.Rand) (keys []uint64) {
	for i := range uint64(60) {
		if random.IntN(5) == 0 {
			keys = append(keys, MaxKey/61*(i+1)/64*64+i%7)
		}
	}
	return keys
}

// TestReplicasHaveTheSameBits makes random pushes with each handler, while servers are killed and started
// again, also if messages are lost, duplicated and reordered. No push fails, and both servers of each range
// have the same values and the same state of the optimizer.
func TestReplicasHaveTheSameBits(t *testing.T) {
	resend := map[string]string{"PS_RESEND": "1", "PS_RESEND_TIMEOUT": "20"}
	t.Run("sum", func(t *testing.T) { sameBits(t, false, nil, Sum[int64]) })
	t.Run("assign", func(t *testing.T) { sameBits(t, false, nil, Assign[uint8]) })
	t.Run("momentum", func(t *testing.T) {
		sameBits(t, false, nil, func() Handler[float32] { return Momentum[float32](0.1, 0.9) })
	})
	adam := func() Handler[half.BFloat16] { return Adam[half.BFloat16](0.1, 0.9, 0.99, 1e-3) }
	t.Run("adam", func(t *testing.T) { sameBits(t, false, nil, adam) })
	t.Run("adam with faults", func(t *testing.T) { sameBits(t, true, resend, adam) })
	t.Run("adagrad with faults", func(t *testing.T) {
		sameBits(t, true, resend, func() Handler[float64] { return Adagrad[float64](0.1, 1) })
	})
}

func sameBits[T Value](t *testing.T, faults bool, settings map[string]string, handler func() Handler[T]) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	j := job{t: t, servers: 3, workers: 2, settings: settings}
	least := 200 // pushes of each worker
	if faults {
		j.faults, least = lossy(seed), 30
	}
	r := startReplicated(t, j, handler)
	end := make(chan struct{})
	var wg sync.WaitGroup
	for id, w := range r.workers {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(id)))
			var flying []*Request
			for n := 0; ; n++ {
				over := n > least && isEnded(end)
				if len(flying) == 8 || over {
					for _, req := range flying {
						wait(t, req, nil)
					}
					flying = nil
				}
				if over || t.Failed() {
					return
				}
				keys := someKeys(random)
				lens, total := lensOf(keys)
				vals := tensor.View[T](make([]byte, total*tensor.Of[T]().Size()))
				for i := range vals {
					tensor.Bytes(vals[i : i+1])[tensor.Of[T]().Size()-1] = byte(0x3e + random.IntN(3))
				}
				opts := []PushOption{Lens(lens)}
				if random.IntN(10) == 0 {
					opts = append(opts, Cmd(InitCmd))
				}
				if random.IntN(2) == 0 {
					opts = append(opts, ZeroCopy())
				}
				flying = append(flying, must(w.PushAsync(t.Context(), keys, vals, opts...)))
			}
		})
	}
	for _, id := range []int{10, 8, 12} {
		r.kill(id)
		r.again(id)
	}
	close(end)
	wg.Wait()
	r.sameBits()
}

func isEnded(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// pushOne pushes a value to a key.
func pushOne(t *testing.T, w *KVWorker[float64], key uint64, v float64, opts ...PushOption) error {
	return w.Push(t.Context(), []uint64{key}, []float64{v}, opts...)
}

// TestBothServersDie kills both servers of a range. Requests fail and name the server, and when the servers
// are back, they do not pretend to have values.
func TestBothServersDie(t *testing.T) {
	r := startReplicated(t, job{t: t, servers: 3, workers: 1}, Sum[float64])
	w := r.workers[9]
	last := uint64(MaxKey - 1000) // in the range of server 2, which server 0 has too
	for _, key := range []uint64{1, last} {
		noError(t, pushOne(t, w, key, 5))
	}
	r.kill(8)
	noError(t, pushOne(t, w, 1, 2))
	r.kill(10)
	testnet.WantError(t, pushOne(t, w, 1, 1), "server 0 is gone", "and so is server 1, which has the same keys")
	noError(t, pushOne(t, w, last, 1))
	r.again(10)
	r.again(8)
	testnet.Eventually(t, "a server answers for the range", func() bool {
		return !errors.As(pushOne(t, w, 1, 1), new(*NodeError))
	})
	testnet.WantError(t, pushOne(t, w, 1, 1), "has lost the values of key 1", "InitCmd")
	err := errors.Join(pushOne(t, w, 1, 3, Cmd(InitCmd)), pushOne(t, w, 1, 4), pushOne(t, w, last, 1))
	if err != nil {
		t.Fatal(err)
	}
	r.sameBits()
	var got []float64
	req, err := w.PullAsync(t.Context(), []uint64{1, last}, &got)
	if wait(t, req, err); !slices.Equal(got, []float64{7, 7}) {
		t.Errorf("got %v, want 7 and 7", got)
	}
}

// TestBothServersRestartDuringStart starts both servers of a range again before all nodes have met. No value
// is lost then, so pushes need not set values first.
func TestBothServersRestartDuringStart(t *testing.T) {
	r := startReplicated(t, job{t: t, servers: 2, workers: 1, restart: true,
		settings: map[string]string{"HVD_RECOVERY_SECONDS": "60"}}, Sum[float64])
	for id, s := range r.servers {
		if s.c.po.van.Process().Generation == 0 || s.c.po.IsRecovery() {
			t.Fatalf("%s was not started again while the job started", van.Name(id))
		}
	}
	for _, key := range []uint64{1, MaxKey - 1000} {
		noError(t, pushOne(t, r.workers[9], key, 5))
	}
	r.sameBits()
}

// TestNewsOutOfOrder ends both servers of a range while messages may overtake each other. A push waits,
// because the news that one of them has returned may be late.
func TestNewsOutOfOrder(t *testing.T) {
	r := startReplicated(t, job{t: t, servers: 3, workers: 1, settings: map[string]string{"PS_RESEND": "1"}},
		Sum[float64])
	w := r.workers[9]
	noError(t, pushOne(t, w, 1, 5))
	r.kill(8)
	r.kill(10)
	testnet.Eventually(t, "the worker has the news of both", func() bool {
		v := w.c.po.van
		return v.Ended(v.Current(8)) && v.Ended(v.Current(10))
	})
	req, err := w.PushAsync(t.Context(), []uint64{1}, []float64{2}, Cmd(InitCmd))
	if err == nil {
		r.again(10)
		r.again(8)
		err = req.Wait(t.Context())
	}
	if err != nil {
		t.Error(err)
	}
}

// TestBackupThatStopsToApply drops the pushes to a backup. The worker gets no answer until the scheduler has
// declared the backup dead.
func TestBackupThatStopsToApply(t *testing.T) {
	var mu sync.Mutex
	dropped := false
	faults := func(from, to van.Process, m *van.Message, deliver func(*van.Message) error) error {
		if h := m.Header; h.GetReplica().GetKind() == pspb.Replica_PUSH && h.Range == 1 && to.ID == 10 {
			mu.Lock()
			dropped = true
			mu.Unlock()
			m.Release()
			return nil
		}
		return deliver(m)
	}
	r := startReplicated(t, job{t: t, servers: 2, workers: 1, faults: faults}, Sum[float64])
	w := r.workers[9]
	req := must(w.PushAsync(t.Context(), []uint64{1}, []float64{1}))
	testnet.Eventually(t, "the push to the backup is dropped", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return dropped
	})
	s := r.nodes[8].stats()
	i := slices.IndexFunc(s.Peers, func(p trace.Peer) bool { return p.Name == "server 1" })
	if i < 0 || s.Peers[i].LagMessages != 1 || s.Peers[i].LagBytes < 8 || s.Unreplicated != 0 ||
		isEnded(req.Done()) {
		t.Errorf("the push is answered: %v, and the statistics are %+v", isEnded(req.Done()), s)
	}
	replica := r.servers[8].replicas[0]
	replica.mu.Lock()
	replica.out.sizes[0] += 500e6 // for which the backup has 50 s besides the 60 s of PS_HEARTBEAT_TIMEOUT
	replica.mu.Unlock()
	replica.tick(time.Now().Add(90 * time.Second))
	if err := pushOne(t, w, MaxKey/2+1, 1); err != nil || isEnded(req.Done()) {
		t.Errorf("%v, or the push is answered too soon", err)
	}
	testnet.Eventually(t, "the push is answered", func() bool {
		// tick does nothing while the replica is in use.
		replica.tick(time.Now().Add(2 * time.Minute))
		return isEnded(req.Done())
	})
	wait(t, req, nil)
	if s := r.nodes[8].stats(); s.Unreplicated == 0 {
		t.Error("the range is replicated, although the backup is dead")
	}
	testnet.Eventually(t, "the backup fails", func() bool { return r.nodes[10].van.Err() != nil })
	noError(t, pushOne(t, w, MaxKey/2+1, 1))
}

// TestJoiningServerAccusesNobody breaks the connection of a server that gets the values from the other one.
// The other one goes on, because only it has the values.
func TestJoiningServerAccusesNobody(t *testing.T) {
	var broken atomic.Bool
	faults := func(from, to van.Process, m *van.Message, deliver func(*van.Message) error) error {
		if broken.Load() && m.Header.GetReplica().GetKind() == pspb.Replica_VALUES {
			m.Release()
			return errors.New("cannot allocate memory")
		}
		return deliver(m)
	}
	r := startReplicated(t, job{t: t, servers: 2, workers: 1, faults: faults}, Sum[float64])
	w := r.workers[9]
	noError(t, pushOne(t, w, 1, 5))
	r.kill(8)
	noError(t, pushOne(t, w, 1, 2))
	broken.Store(true)
	po, err := r.start("server", 0)
	if err != nil {
		t.Fatal(err)
	}
	r.nodes[8] = po
	if r.servers[8], err = NewKVServer(po, r.handler()); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, "a server fails", func() bool {
		return r.nodes[8].van.Err() != nil || r.nodes[10].van.Err() != nil
	})
	var got []float64
	req, err := w.PullAsync(t.Context(), []uint64{1}, &got)
	if err == nil {
		err = req.Wait(t.Context())
	}
	if err != nil || !slices.Equal(got, []float64{7}) {
		t.Errorf("pulled %v, error %v; want 7", got, err)
	}
}

// TestPausesGrow lets both servers of a range answer moved, until a push was sent several times. The pauses
// between must grow. Then the push is applied.
func TestPausesGrow(t *testing.T) {
	r := startReplicated(t, job{t: t, servers: 2, workers: 1}, Sum[float64])
	w, first := r.workers[9], r.servers[8].replicas[0]
	setClosed := func(closed bool) {
		first.mu.Lock()
		defer first.mu.Unlock()
		first.closed = closed
	}
	setClosed(true) // so it answers moved, as the backup does
	req := must(w.PushAsync(t.Context(), []uint64{1}, []float64{5}))
	p := &req.parts[0]
	begun := time.Now()
	testnet.Eventually(t, "the push was sent 7 times", func() bool {
		w.c.mu.Lock()
		defer w.c.mu.Unlock()
		return p.attempt >= 7
	})
	took := time.Since(begun)
	setClosed(false)
	wait(t, req, nil)
	if least := 31 * reroutePause; took < least { // 1, 2, 4, 8 and 16 pauses, and one more
		t.Errorf("the push was sent 7 times within %v, want at least %v", took, least)
	}
}

// TestTimeWithoutServer checks that the time limit of a push that has lost its server begins again when the
// next one, which has got the push, ends too.
func TestTimeWithoutServer(t *testing.T) {
	r := startReplicated(t, job{t: t, servers: 2, workers: 1}, Sum[float64])
	w := r.workers[9]
	req, err := w.PushAsync(t.Context(), []uint64{1}, []float64{5})
	wait(t, req, err)
	p := &part{to: 8, home: 1, sent: true, again: func(int) *van.Message { return nil }}
	lost := &Request{c: w.c, timestamp: req.timestamp + 1, of: req.of, parts: []part{*p}}
	p = &lost.parts[0]
	p.homeless = time.Now().Add(-time.Hour) // it was sent to this server an hour ago
	w.c.mu.Lock()
	w.c.rerouting = true // so that the part stays as it is
	w.c.pending[lost.timestamp] = lost
	w.c.mu.Unlock()
	w.c.lost(8, errors.New("it has ended"))
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	if p.sent || time.Since(p.homeless) > time.Minute {
		t.Errorf("the part has had no server for %v", time.Since(p.homeless))
	}
	delete(w.c.pending, lost.timestamp)
	w.c.rerouting = false
}

// TestPauseEndsWithTheVan checks that a part that pauses after an answer moved fails at once when its process
// has failed.
func TestPauseEndsWithTheVan(t *testing.T) {
	r := startReplicated(t, job{t: t, servers: 2, workers: 1}, Sum[float64])
	w := r.workers[9]
	lost := &Request{c: w.c, of: &simpleRequest{app: w.SimpleApp}, done: make(chan struct{}),
		parts: []part{{to: 8, home: 1, due: time.Now().Add(time.Hour), reading: new(atomic.Int32),
			again: func(int) *van.Message { return nil }}}}
	w.c.po.wg.Add(1)
	w.c.mu.Lock()
	w.c.pending[lost.timestamp] = lost
	w.c.unroute(&lost.parts[0])
	w.c.mu.Unlock()
	w.c.po.van.Stop(t.Context())
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	testnet.WantError(t, lost.Wait(ctx), van.ErrStopped.Error())
}

// TestLateNewsOfReturn lets a worker learn that a server has returned only after the other one has died. Its
// request waits for the news.
func TestLateNewsOfReturn(t *testing.T) {
	news := make(chan struct{})
	faults := func(from, to van.Process, m *van.Message, deliver func(*van.Message) error) error {
		// That the other server has ended is said later than that this one has returned.
		if c := m.Header.Control; to.ID == 9 && c != nil && c.Command == pspb.Command_ADD_NODE &&
			len(c.Nodes) == 1 && (c.Nodes[0].Generation > 0 || c.Nodes[0].Id == 10) {
			<-news
		}
		return deliver(m)
	}
	r := startReplicated(t, job{t: t, servers: 2, workers: 1, faults: faults}, Sum[float64])
	w := r.workers[9]
	noError(t, pushOne(t, w, 1, 5))
	r.kill(8)
	noError(t, pushOne(t, w, 1, 2))
	r.again(8)
	testnet.Eventually(t, "all ranges are replicated", func() bool {
		return r.nodes[8].stats().Unreplicated == 0 && r.nodes[10].stats().Unreplicated == 0
	})
	r.kill(10)
	testnet.Eventually(t, "the worker's connection has ended", func() bool { return w.c.po.van.Gone(10) != nil })
	req := must(w.PushAsync(t.Context(), []uint64{1}, []float64{1}))
	p := &req.parts[0]
	testnet.Eventually(t, "the push has lost its server", func() bool {
		w.c.mu.Lock()
		defer w.c.mu.Unlock()
		return !p.homeless.IsZero()
	})
	if err := w.c.sendAgain(req, p); err != nil {
		t.Errorf("before the news: %v", err)
	}
	close(news)
	wait(t, req, nil)
}

// TestWaitingPulls checks that the answers of pulls that wait for the backup take bounded memory: the server
// reads no further requests meanwhile.
func TestWaitingPulls(t *testing.T) {
	var held atomic.Bool
	applied := make(chan struct{})
	faults := func(from, to van.Process, m *van.Message, deliver func(*van.Message) error) error {
		if m.Header.GetReplica().GetKind() == pspb.Replica_APPLIED && held.Load() {
			<-applied
		}
		return deliver(m)
	}
	r := startReplicated(t, job{t: t, servers: 2, workers: 1, faults: faults}, Sum[float64])
	w := r.workers[9]
	vals := make([]float64, 1<<19) // 4 MiB
	noError(t, w.Push(t.Context(), []uint64{1}, vals))
	held.Store(true)
	push := must(w.PushAsync(t.Context(), []uint64{1}, vals))
	var pulls []*Request
	for range 40 {
		var got []float64
		pulls = append(pulls, must(w.PullAsync(t.Context(), []uint64{1}, &got)))
	}
	testnet.Eventually(t, "the server waits for the backup", func() bool {
		p := r.servers[8].replicas[0]
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.room != nil
	})
	close(applied)
	for _, req := range append(pulls, push) {
		wait(t, req, nil)
	}
}

// TestTickDoesNotWait checks that tick and the statistics, of which hvdrun asks, return while a push is
// applied: heartbeats wait for tick.
func TestTickDoesNotWait(t *testing.T) {
	r := startReplicated(t, job{t: t, servers: 2, workers: 1}, Sum[float64])
	p := r.servers[8].replicas[0]
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tick(time.Now())
	if s := r.nodes[8].stats(); s.Unreplicated != 0 || len(s.Peers) != 3 {
		t.Errorf("got the statistics %+v", s)
	}
}

// TestReplicaUsage checks the errors of jobs that cannot have replicas.
func TestReplicaUsage(t *testing.T) {
	for want, settings := range map[string]map[string]string{
		"HVD_PS_REPLICAS is 1, which needs at least 2 servers, but DMLC_NUM_SERVER is 1": {
			"DMLC_NUM_SERVER": "1"},
		"HVD_PS_REPLICAS is 1, which cannot be used with HVD_STALENESS=0": {"HVD_STALENESS": "0"},
	} {
		settings["HVD_PS_REPLICAS"] = "1"
		_, err := Join(t.Context(), Config{Logger: discard, Settings: nodeSettings("scheduler", 2, 1, "1", settings)})
		testnet.WantError(t, err, want)
	}
	shared := Sum[float64]()
	r := startReplicated(t, job{t: t, servers: 2, workers: 1}, Sum[float64])
	own := KVHandler[float64](func(KVMeta, KVPairs[float64], *KVServer[float64]) {})
	_, err := NewKVServer(r.nodes[8], own, App(1))
	testnet.WantError(t, err, "HVD_PS_REPLICAS is for built-in handlers")
	must(NewKVServer(r.nodes[8], shared, App(2)))
	_, err = NewKVServer(r.nodes[8], shared, App(3))
	testnet.WantError(t, err, "another server has the same handler")
	r.kill(8)
	r.again(8)
	unused := Sum[float64]()
	_, err = NewKVServer(r.nodes[8], unused)
	testnet.WantError(t, err, "app 0 has a customer 0 already")
	if n := r.nodes[8].joining[1].Load(); n != 0 {
		t.Errorf("the server still gets %d ranges", n)
	}
	must(NewKVServer(r.nodes[8], unused, App(3)))
}

// TestWindow compares a window with a set of all pushes that were applied.
func TestWindow(t *testing.T) {
	random := rand.New(rand.NewPCG(rand.Uint64(), 0))
	w := window{applied: make(map[int64]struct{})}
	applied, completed, last := make(map[int64]bool), int64(0), int64(0)
	for range 10000 {
		last = max(last, completed+1+random.Int64N(20))
		timestamp := completed + 1 + random.Int64N(last-completed)
		fresh, err := w.fresh(completed-random.Int64N(2)*min(completed, 3), timestamp)
		if err != nil || fresh == applied[timestamp] {
			t.Fatalf("request %d of %d is fresh: %v, %v", timestamp, completed, fresh, err)
		}
		w.applied[timestamp], applied[timestamp] = struct{}{}, true
		for random.IntN(4) > 0 && applied[completed+1] {
			completed++
		}
		if len(w.applied) > 64 {
			t.Fatalf("the window has %d pushes", len(w.applied))
		}
	}
	if fresh, err := w.fresh(completed, completed); fresh || err != nil {
		t.Errorf("a request that has completed is fresh: %v, %v", fresh, err)
	}
	_, err := w.fresh(completed, completed+maxOutstanding+1)
	testnet.WantError(t, err, "has not completed")
}

// pieceOf returns the message with a piece of a store for values of type float32.
func pieceOf(s *store, p *piece) *van.Message {
	if p == nil {
		return nil
	}
	m := van.NewMessage(&pspb.Header{}, s.sizes(p)...)
	s.write(p, m.Data)
	m.SetTypes(pspb.DataType_UINT64, pspb.DataType_INT32, pspb.DataType_FLOAT, pspb.DataType_FLOAT)
	return m
}

// TestMalformedValues checks that a store refuses pieces that are not what another store would send.
func TestMalformedValues(t *testing.T) {
	handler := Adagrad[float32](0.1, 1e-8).(*builtIn[float32])
	from := handler.empty()
	for _, keys := range [][]uint64{{5}, {2, 3}} {
		if _, err := from.resolve(&serverList{keys: keys}, true, nil, 2*len(keys)); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		want   string
		change func(m *van.Message)
	}{
		{"", func(*van.Message) {}},
		{"a key is there twice", func(m *van.Message) { copy(m.Data[0], m.Data[0][keyBytes:]) }},
		{"key 9 is here already", func(m *van.Message) { copy(m.Data[0], bytesOfKeys([]uint64{9})) }},
		{"want 24", func(m *van.Message) { m.Data[3] = m.Data[3][4:] }},
		{"do not fit 3 keys", func(m *van.Message) { m.Data[2], m.Data[3] = m.Data[2][4:], m.Data[3][4:] }},
		{"no lengths", func(m *van.Message) { m.Data[1] = nil }},
		{"no keys", func(m *van.Message) { m.Data[0], m.Data[1] = nil, m.Data[1][:4] }},
	} {
		to := handler.empty()
		if _, err := to.resolve(&serverList{keys: []uint64{9}}, true, nil, 1); err != nil {
			t.Fatal(err)
		}
		m := pieceOf(from, from.next(new(position), 1000))
		c.change(m)
		if err := to.put(m); c.want != "" {
			testnet.WantError(t, err, c.want)
		} else if err != nil || len(to.entries) != 4 {
			t.Errorf("got %v, and %d keys", err, len(to.entries))
		}
	}
}

// TestTransfer passes a store to another one in small pieces, with pushes in between.
func TestTransfer(t *testing.T) {
	handler := Adam[float32](0.1, 0.9, 0.99, 1e-3).(*builtIn[float32])
	for range 50 {
		seed := rand.Uint64()
		random := rand.New(rand.NewPCG(seed, 0))
		from, to := handler.empty(), handler.empty()
		push := func(known bool) {
			keys := someKeys(random)
			if len(keys) == 0 {
				return
			}
			lens, total := lensOf(keys)
			vals, init := make([]float32, total), random.IntN(5) == 0
			for i := range vals {
				vals[i] = random.Float32()
			}
			places, err := from.resolve(&serverList{keys: keys}, true, lens, total)
			if err == nil {
				from.push(places, tensor.Bytes(vals), init)
				if known {
					err = to.pushKnown(keys, lens, tensor.Bytes(vals), init)
				}
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		for range random.IntN(6) {
			push(false)
		}
		var at position
		for !from.done(at) {
			before, most := at, 1+random.IntN(400)
			m := pieceOf(from, from.next(&at, most))
			if n := len(m.Data[0]) / keyBytes; n > 1 && m.Bytes() > most {
				t.Fatalf("seed %d: a piece with %d keys has %d bytes, want at most %d", seed, n, m.Bytes(), most)
			}
			next := from.next(new(at), 1)
			if !from.done(at) && m.Bytes()+pieceOf(from, next).Bytes() <= most {
				t.Fatalf("seed %d: the piece %v to %v has room for another key", seed, before, at)
			}
			if err := to.put(m); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if random.IntN(2) == 0 {
				push(true)
			}
		}
		if len(from.entries) != len(to.entries) {
			t.Errorf("seed %d: %d keys, want %d", seed, len(to.entries), len(from.entries))
		}
		for key := range from.entries {
			if a, b := bitsOf(from, key), bitsOf(to, key); !slices.EqualFunc(a, b, bytes.Equal) {
				t.Errorf("seed %d: key %d has the bits %x, want %x", seed, key, b, a)
			}
		}
	}
}

// TestReplicatedPushOfAWorkerThatHasLeft checks that the backup applies the values that the primary has
// applied, although the worker has left and has changed its memory before the primary could send them to a
// backup on another host.
func TestReplicatedPushOfAWorkerThatHasLeft(t *testing.T) {
	vals := arenaBytes(t, 4*van.SharedBytes)
	for i := range vals {
		vals[i] = 1
	}
	goOn := make(chan struct{})
	faults := func(_, to van.Process, m *van.Message, deliver func(*van.Message) error) error {
		if to.ID == van.ServerID(1) && m.Header.GetReplica().GetKind() == pspb.Replica_PUSH {
			<-goOn
		}
		return deliver(m)
	}
	r := startReplicated(t, job{t: t, servers: 2, workers: 1, faults: faults, apart: van.ServerID(1)},
		Sum[uint8])
	open := sync.OnceFunc(func() { close(goOn) })
	defer open()
	w := r.workers[van.WorkerID(0)]
	// The first push fills the connection between the servers.
	must(w.PushAsync(t.Context(), []uint64{1}, make([]uint8, 32<<20)))
	must(w.PushAsync(t.Context(), []uint64{2}, vals, ZeroCopy())).Done() // sends it now
	value := func(rank int) (v uint8, ok bool) {
		own := r.servers[van.ServerID(rank)].replicas[0]
		own.mu.Lock()
		defer own.mu.Unlock()
		e, ok := own.store.entries[2]
		if ok {
			v = e.chunk.vals[e.at]
		}
		return v, ok
	}
	applied := func(rank int) func() bool {
		return func() bool { _, ok := value(rank); return ok }
	}
	testnet.Eventually(t, "the primary has applied the pushes", applied(0))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	w.c.po.van.Stop(ctx)
	cancel()
	for i := range vals {
		vals[i] = 77
	}
	open()
	testnet.Eventually(t, "the backup has applied the pushes", applied(1))
	first, _ := value(0)
	if second, _ := value(1); first != 1 || second != 1 {
		t.Errorf("the primary has %d and the backup %d, want 1", first, second)
	}
}
