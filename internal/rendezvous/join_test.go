package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/store"
)

// recordOf returns the record of a process with the given rank. Processes with the same rank must have
// different incarnations.
func recordOf(rank, incarnation int) Record {
	return Record{
		Addr: fmt.Sprintf("10.0.0.%d:7", rank), Host: fmt.Sprintf("host%d", rank/2),
		PID:    100*rank + incarnation,
		HostID: fmt.Sprintf("id%d", rank/2), Capabilities: map[string]string{"tcp": "",
			"shm": fmt.Sprintf("not at rank %d", rank)},
		Memory: Memory{UID: uint32(rank), Token: []byte{byte(rank)}, Socket: fmt.Sprint("/tmp/", rank)},
	}
}

func config(kv store.Store, rank, size int) JoinConfig {
	return JoinConfig{Store: kv, Job: "job", Rank: topo.Rank(rank), Size: size, Self: recordOf(rank, 0)}
}

// keyed returns the JoinConfig that the function config returns, with key as its Secret.
func keyed(kv store.Store, rank, size int, key secret.Secret) JoinConfig {
	cfg := config(kv, rank, size)
	cfg.Secret = key
	return cfg
}

// overBoth runs a test twice: without a secret, and with a secret and so over TLS.
func overBoth(t *testing.T, test func(*testing.T, secret.Secret)) {
	t.Run("plain", func(t *testing.T) { test(t, secret.Secret{}) })
	t.Run("TLS", func(t *testing.T) {
		key, _ := secret.New()
		test(t, key)
	})
}

// say connects to the root at addr, proves that it knows the secret in key, and sends the parts in order.
func say(t *testing.T, key secret.Secret, addr string, parts ...[]byte) net.Conn {
	t.Helper()
	over, err := key.Encrypted().Dial(testnet.RawDial(t, addr), rootMagic)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := over.Write(bytes.Join(parts, nil)); err != nil {
		t.Fatal(err)
	}
	return over
}

func same(a, b Record) bool {
	return a.Addr == b.Addr && a.Host == b.Host && a.HostID == b.HostID && a.PID == b.PID &&
		maps.Equal(a.Capabilities, b.Capabilities) && a.Memory.UID == b.Memory.UID &&
		bytes.Equal(a.Memory.Token, b.Memory.Token) && a.Memory.Socket == b.Memory.Socket &&
		a.Memory.Reason == b.Memory.Reason
}

type result struct {
	*Session
	err error
}

// start calls Join in a goroutine and returns a channel with its result. It closes the session when the test
// ends.
func start(t testing.TB, ctx context.Context, cfg JoinConfig) <-chan result {
	t.Helper()
	got := make(chan result, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		s, err := Join(ctx, cfg)
		if (s == nil) == (err == nil) {
			t.Errorf("join gave %v and %v", s, err)
		}
		if err == nil {
			t.Cleanup(func() {
				if err := s.Close(); err != nil {
					t.Errorf("rank %d: close: %v", cfg.Rank, err)
				}
			})
		}
		got <- result{s, err}
	})
	t.Cleanup(wg.Wait)
	return got
}

// joinAll calls Join with each of cfgs concurrently. It returns the results in the same order.
func joinAll(t testing.TB, ctx context.Context, cfgs ...JoinConfig) []result {
	t.Helper()
	var running []<-chan result
	for _, cfg := range cfgs {
		running = append(running, start(t, ctx, cfg))
	}
	results := make([]result, len(cfgs))
	for i, r := range running {
		results[i] = <-r
	}
	return results
}

// formed checks that all ranks have joined the same epoch and have the given records. results has one result
// for each rank, in order. formed returns the number of the epoch.
func formed(t *testing.T, results []result, records ...Record) (epoch uint64) {
	t.Helper()
	for rank, r := range results {
		switch {
		case r.err != nil:
			t.Fatalf("rank %d: %v", rank, r.err)
		case r.Epoch == 0 || r.Epoch != results[0].Epoch:
			t.Fatalf("rank %d is in epoch %d, rank 0 in %d", rank, r.Epoch, results[0].Epoch)
		case !slices.EqualFunc(r.Records, records, same):
			t.Fatalf("rank %d has records %+v, want %+v", rank, r.Records, records)
		}
	}
	return results[0].Epoch
}

func newStore(t testing.TB) *store.HashStore {
	s := store.NewHashStore(store.Limits{})
	t.Cleanup(func() { s.Close() })
	return s
}

func TestJoin(t *testing.T) { overBoth(t, testJoin) }

func testJoin(t *testing.T, key secret.Secret) {
	stores := map[string]func(t *testing.T) func() store.Store{
		"hash": func(t *testing.T) func() store.Store {
			s := newStore(t)
			return func() store.Store { return s }
		},
		"tcp": func(t *testing.T) func() store.Store {
			server, err := store.Serve("127.0.0.1:0", newStore(t), store.Config{Secret: key})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { server.Close() })
			return func() store.Store {
				s, err := store.Dial(testnet.Context(t), server.Addr(), store.Config{Secret: key})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { s.Close() })
				return s
			}
		},
	}
	for name, open := range stores {
		for _, size := range []int{1, 2, 3, 8, 64} {
			t.Run(fmt.Sprintf("%s/%d", name, size), func(t *testing.T) {
				client := open(t)
				var (
					cfgs    []JoinConfig
					records []Record
				)
				for rank := range size {
					cfg := keyed(client(), rank, size, key)
					cfgs, records = append(cfgs, cfg), append(records, cfg.Self)
				}
				ctx := testnet.Context(t)
				results := joinAll(t, ctx, cfgs...)
				if epoch := formed(t, results, records...); epoch != 1 {
					t.Errorf("first epoch is %d, want 1", epoch)
				}
			})
		}
	}
}

func TestJoinAlone(t *testing.T) {
	s, err := Join(t.Context(), JoinConfig{Job: "job", Size: 1, LastEpoch: 6, Self: recordOf(0, 0)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if s.Epoch != 7 || !slices.EqualFunc(s.Records, []Record{recordOf(0, 0)}, same) {
		t.Errorf("got %+v", s)
	}
}

func TestJoinTakesLargestRecords(t *testing.T) {
	kv := newStore(t)
	var cfgs []JoinConfig
	var records []Record
	for rank := range 2 {
		cfg := config(kv, rank, 2)
		cfg.Job = strings.Repeat("j", MaxNameBytes)
		cfg.LastEpoch = maxEpoch - 1
		cfg.Self = Record{
			Addr: strings.Repeat("a", MaxNameBytes), Host: strings.Repeat("ü", MaxNameBytes/2), PID: -1,
			HostID:       strings.Repeat("i", MaxNameBytes),
			Capabilities: map[string]string{"tcp": strings.Repeat("x", MaxCapabilitiesBytes-3)},
			Memory: Memory{Token: make([]byte, MaxNameBytes), Socket: strings.Repeat("s", MaxNameBytes),
				Reason: strings.Repeat("r", MaxNameBytes)},
			Processors: make([]uint64, MaxProcessors/64),
		}
		cfgs, records = append(cfgs, cfg), append(records, cfg.Self)
	}
	formed(t, joinAll(t, testnet.Context(t), cfgs...), records...)
}

func TestJoinChecksConfig(t *testing.T) {
	kv := newStore(t)
	for want, spoil := range map[string]func(*JoinConfig){
		"the job has no name":                     func(c *JoinConfig) { c.Job = "" },
		"job has 257 bytes":                       func(c *JoinConfig) { c.Job = strings.Repeat("j", 257) },
		`job is "\xff", want valid UTF-8`:         func(c *JoinConfig) { c.Job = "\xff" },
		"size of the job is 0, want 1 to 65536":   func(c *JoinConfig) { c.Size = 0 },
		"size of the job is 65537":                func(c *JoinConfig) { c.Size = 65537 },
		"a job of more than 1 rank needs a store": func(c *JoinConfig) { c.Store = nil },
		"last epoch is 4611686018427387905": func(c *JoinConfig) {
			c.LastEpoch = 1<<62 + 1
		},
		"opening the root": func(c *JoinConfig) { c.ListenHost = "192.0.2.1" },
		"data address has 257 bytes": func(c *JoinConfig) {
			c.Self.Addr = strings.Repeat("a", 257)
		},
		"host has 257 bytes": func(c *JoinConfig) {
			c.Self.Host = strings.Repeat("h", 257)
		},
		"token has 257 bytes, want at most 256": func(c *JoinConfig) {
			c.Self.Memory.Token = make([]byte, MaxNameBytes+1)
		},
		"reason not to share memory has 257 bytes": func(c *JoinConfig) {
			c.Self.Memory.Reason = strings.Repeat("x", MaxNameBytes+1)
		},
		"capabilities: got 4099 bytes in total, want at most 4096": func(c *JoinConfig) {
			c.Self.Capabilities = map[string]string{"tcp": strings.Repeat("x", MaxCapabilitiesBytes)}
		},
		"the set of processors has 16448 bits, want at most 16384": func(c *JoinConfig) {
			c.Self.Processors = make([]uint64, MaxProcessors/64+1)
		},
		"rank 1 is out of range, want 0 to 0": func(c *JoinConfig) { c.Rank, c.Size = 1, 1 },
	} {
		cfg := config(kv, 0, 2)
		spoil(&cfg)
		_, err := Join(testnet.Context(t), cfg)
		testnet.WantError(t, err, "rendezvous: join", want)
	}
}

// aliasStore is a store that replaces the name of one job (the field from) by the name of another (the field
// to) in the keys that are watched. So a rank of the first job finds the root of the second job by mistake.
type aliasStore struct {
	store.Store
	from, to string
}

func (s aliasStore) Watch(ctx context.Context, key string, prev []byte) ([]byte, error) {
	return s.Store.Watch(ctx, strings.Replace(key, s.from, s.to, 1), prev)
}

// If the ranks of a job contradict each other, for example in the size of the job, all of them get an error
// with the same text.
func TestContradictions(t *testing.T) {
	is := func(rank, size, incarnation int) func(*JoinConfig) {
		return func(c *JoinConfig) {
			c.Rank, c.Size, c.Self = topo.Rank(rank), size, recordOf(rank, incarnation)
		}
	}
	otherJob := func(c *JoinConfig) { c.Job, c.Store = "other", aliasStore{c.Store, "other", "job"} }
	for _, test := range []struct {
		name string
		size int
		// change[i] changes the config of process i. If there is no change[i], process i joins as rank i,
		// without a contradiction.
		change map[int]func(*JoinConfig)
		// If last is not 0, process number last joins only after the root has failed. If it joined earlier,
		// the epoch might be complete before the changed process joins.
		last   int
		reason Reason
		text   []string
	}{
		{"size, 2 ranks", 2, map[int]func(*JoinConfig){1: is(1, 3, 0)}, 0,
			SizeMismatch, []string{"the job size is 3 at rank 1, but 2 at rank 0"}},
		{"size, 4 ranks", 4, map[int]func(*JoinConfig){2: is(2, 3, 0)}, 3,
			SizeMismatch, []string{"the job size is 3 at rank 2, but 4 at rank 0"}},
		{"size 1 too small, 5 ranks", 5, map[int]func(*JoinConfig){4: is(4, 6, 0)}, 1,
			SizeMismatch, []string{"the job size is 6 at rank 4, but 5 at rank 0"}},
		{"duplicate", 3, map[int]func(*JoinConfig){3: is(1, 3, 9)}, 2,
			DuplicateRank, []string{"rank 1 joined twice", `pid 100 on host "host0" at 10.0.0.1:7`,
				`pid 109 on host "host0" at 10.0.0.1:7`}},
		{"duplicate in one process", 5, map[int]func(*JoinConfig){5: is(3, 5, 0)}, 4,
			DuplicateRank, []string{"rank 3 joined twice"}},
		{"out of range", 4, map[int]func(*JoinConfig){3: is(7, 4, 0)}, 2,
			RankOutOfRange, []string{`pid 700 on host "host3" at 10.0.0.7:7`,
				"rank 7 is out of range, want 0 to 3"}},
		{"negative", 2, map[int]func(*JoinConfig){1: is(-1, 2, 0)}, 0,
			RankOutOfRange, []string{"rank -1 is out of range, want 0 to 1"}},
		{"two rank 0, 2 ranks", 2, map[int]func(*JoinConfig){2: is(0, 2, 9)}, 1,
			DuplicateRank, []string{"rank 0 joined twice", "pid 0 ", "pid 9 "}},
		{"two rank 0, 4 ranks", 4, map[int]func(*JoinConfig){4: is(0, 4, 9)}, 3,
			DuplicateRank, []string{"rank 0 joined twice", "pid 0 ", "pid 9 "}},
		{"two rank 0, two sizes", 3, map[int]func(*JoinConfig){3: is(0, 2, 9)}, 2,
			DuplicateRank, []string{"rank 0 joined twice", "pid 0 ", "pid 9 "}},
		{"job", 3, map[int]func(*JoinConfig){2: otherJob}, 1,
			WrongJob, []string{`the job is "other" at rank 2, but "job" at rank 0`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			ctx := testnet.Context(t)
			kv := newStore(t)
			log, entries := testnet.Logs()
			var running []<-chan result
			begin := func(i int) {
				cfg := config(kv, i, test.size)
				if change := test.change[i]; change != nil {
					change(&cfg)
				}
				cfg.Log = log
				running = append(running, start(t, ctx, cfg))
			}
			begin(0)
			testnet.Eventually(t, "root", func() bool { return testnet.Logged(entries, "root is open") })
			for i := 1; i < test.size || test.change[i] != nil; i++ {
				if i != test.last {
					begin(i)
				}
			}
			if test.last != 0 {
				testnet.Eventually(t, "failure", func() bool {
					return testnet.Logged(entries, "root failed")
				})
				begin(test.last)
			}
			var text string
			for i, r := range running {
				r := <-r
				refused, ok := errors.AsType[*RefusedError](r.err)
				if !ok || refused.Reason != test.reason {
					t.Errorf("process %d: got %v, want reason %d", i, r.err, test.reason)
					continue
				}
				testnet.WantError(t, r.err, test.text...)
				if text == "" {
					text = refused.Text
				}
				if refused.Text != text {
					t.Errorf("process %d got %q, another process %q", i, refused.Text, text)
				}
			}
			// Without the contradiction, the same processes can join again.
			var cfgs []JoinConfig
			var records []Record
			for rank := range test.size {
				cfgs, records = append(cfgs, config(kv, rank, test.size)), append(records, recordOf(rank, 0))
			}
			formed(t, joinAll(t, ctx, cfgs...), records...)
		})
	}
}

// If terms differ between ranks, the errors of all ranks list these terms, each with its values and ranks.
// They do not list other terms.
func TestTermsDiffer(t *testing.T) {
	kv := newStore(t)
	var cfgs []JoinConfig
	for rank := range 4 {
		cfg := config(kv, rank, 4)
		cfg.Terms = map[string]string{"equal": "1", "one": "a", "each": fmt.Sprint(rank), "empty": "",
			"late": "x"}
		switch rank {
		case 2:
			cfg.Terms["one"] = "b"
			delete(cfg.Terms, "late")
		case 3:
			cfg.Terms["empty"] = "no more"
		}
		cfgs = append(cfgs, cfg)
	}
	for rank, r := range joinAll(t, testnet.Context(t), cfgs...) {
		if refused, ok := errors.AsType[*RefusedError](r.err); !ok || refused.Reason != TermsDiffer {
			t.Errorf("rank %d: got %v, want that terms differ", rank, r.err)
		}
		testnet.WantError(t, r.err, "settings that must be the same at all ranks differ: "+
			"each is 0 at rank 0, 1 at rank 1, 2 at rank 2, 3 at rank 3; "+
			"empty is not set at ranks 0-2, no more at rank 3; "+
			"late is x at ranks 0, 1 and 3, unknown at rank 2; "+
			"one is a at ranks 0, 1 and 3, b at rank 2")
	}
}

// A rank gets the error of a failed root, and joins again while that root still answers other ranks. The rank
// then takes part in the next epoch.
func TestRankComesBackToFailedRoot(t *testing.T) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	r := start(t, ctx, config(kv, 0, 3))
	one := config(kv, 1, 4)
	testnet.WantError(t, (<-start(t, ctx, one)).err, "the job size is 4 at rank 1, but 3 at rank 0")
	one.Size = 3
	log, entries := testnet.Logs()
	one.Log = log
	again := start(t, ctx, one)
	var failed *result // result of rank 0, if rank 0 has ended before rank 1 joined again
	testnet.Eventually(t, "rank 1 waits for the next root", func() bool {
		select {
		case r := <-r:
			failed = &r
			return true
		default:
			return testnet.Logged(entries, "waiting for a newer root")
		}
	})
	if failed == nil {
		r := <-r
		failed = &r
	}
	testnet.WantError(t, failed.err, "the job size is 4 at rank 1, but 3 at rank 0")
	rest := joinAll(t, ctx, config(kv, 0, 3), config(kv, 2, 3))
	formed(t, []result{rest[0], <-again, rest[1]}, recordOf(0, 0), recordOf(1, 0), recordOf(2, 0))
}

// If the same call of Join asks a failed root again, it gets the failure again, because the first answer may
// have been lost. If another call of the same process asks, the answer is STALE, so that the call waits for
// the next root.
func TestFailedRootTellsEachCallOnce(t *testing.T) {
	cfg := config(newStore(t), 0, 3)
	cfg.Log, _ = testnet.Logs()
	r, err := openRoot(&cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail(refuse(SizeMismatch, "sizes"))
	first, second := newToken(), newToken()
	for i, ask := range []struct {
		nonce []byte
		want  rendezvouspb.Answer_Kind
	}{
		{first, rendezvouspb.Answer_REFUSED},
		{first, rendezvouspb.Answer_REFUSED},
		{second, rendezvouspb.Answer_STALE},
		{second, rendezvouspb.Answer_STALE},
		{first, rendezvouspb.Answer_REFUSED},
	} {
		q := &rendezvouspb.JoinRequest{Nonce: ask.nonce, Rank: 1, Size: 3}
		g := &caller{q: &joinRequest{JoinRequest: q, record: recordOf(1, 0)}, out: make(chan []byte, 1)}
		r.verdict(g)
		body, err := dial.ReadFrame(bytes.NewReader(<-g.out), maxAnswerBytes)
		var a rendezvouspb.Answer
		if err == nil {
			err = proto.Unmarshal(body, &a)
		}
		if err != nil || a.GetKind() != ask.want {
			t.Errorf("request %d: got %v, %v, want %v", i, &a, err, ask.want)
		}
	}
}

// If two processes join as rank 0 at the same time, both get an error that names the two processes.
func TestTwoRootsAtOnce(t *testing.T) {
	ctx := testnet.Context(t)
	var cfgs []JoinConfig
	for range 20 { // 20 jobs, because the timing of the two processes varies
		kv := newStore(t)
		second := config(kv, 0, 2)
		second.Self = recordOf(0, 9)
		cfgs = append(cfgs, config(kv, 0, 2), second)
	}
	for i, r := range joinAll(t, ctx, cfgs...) {
		refused, ok := errors.AsType[*RefusedError](r.err)
		if !ok || refused.Reason != DuplicateRank {
			t.Errorf("process %d of job %d: got %v, want a duplicate", i%2, i/2, r.err)
			continue
		}
		testnet.WantError(t, r.err, "pid 0 ", "pid 9 ")
	}
}

// If another process overwrites the root key in the store, the root fails, even if that process never
// connects to the root.
func TestRootIsReplaced(t *testing.T) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	cfg := config(kv, 0, 2)
	log, entries := testnet.Logs()
	cfg.Log = log
	r := start(t, ctx, cfg)
	testnet.Eventually(t, "root", func() bool { return testnet.Logged(entries, "root is open") })
	publishRoot(t, kv, "127.0.0.1:9", 9)
	err := (<-r).err
	if refused, ok := errors.AsType[*RefusedError](err); !ok || refused.Reason != DuplicateRank {
		t.Errorf("got %v, want a duplicate", err)
	}
	testnet.WantError(t, err, "pid 0 ", "was replaced by pid 9", "127.0.0.1:9")
}

// publishRoot writes a root to the store. No process runs this root.
func publishRoot(t *testing.T, kv store.Store, addr string, pid int64) {
	t.Helper()
	value, err := proto.Marshal(&rendezvouspb.Root{Attempt: 1, Token: newToken(), Addr: addr, Pid: pid})
	if err != nil {
		t.Fatal(err)
	}
	if err := kv.Set(t.Context(), "gohvd/job/root", value); err != nil {
		t.Fatal(err)
	}
}

// rootOf waits until the store has a root, and returns it.
func rootOf(t *testing.T, kv store.Store) *rendezvouspb.Root {
	t.Helper()
	value, err := kv.Get(testnet.Context(t), "gohvd/job/root")
	if err != nil {
		t.Fatal(err)
	}
	root, err := decodeRoot(value)
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// If a rank gives up before all ranks have joined, the root counts it as missing again, and another process
// can join with the same rank.
func TestRankBreaksOff(t *testing.T) { overBoth(t, testRankBreaksOff) }

func testRankBreaksOff(t *testing.T, key secret.Secret) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	log, entries := testnet.Logs()
	zero := keyed(kv, 0, 3, key)
	zero.Log = log
	first := start(t, ctx, zero)

	short, cancel := context.WithCancel(ctx)
	gone := start(t, short, keyed(kv, 1, 3, key))
	testnet.Eventually(t, "rank 1", func() bool {
		return testnet.Logged(entries, "rank has joined", "pid 100 ")
	})
	cancel()
	err := (<-gone).err
	testnet.WantError(t, err, "waiting for rank 2: context canceled", rootOf(t, kv).GetAddr())
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want that the context ended", err)
	}
	testnet.Eventually(t, "rank 1 is forgotten", func() bool {
		return testnet.Logged(entries, "left before all ranks had joined", "pid 100 ")
	})

	one := keyed(kv, 1, 3, key)
	one.Self = recordOf(1, 1)
	rest := joinAll(t, ctx, one, keyed(kv, 2, 3, key))
	formed(t, append([]result{<-first}, rest...), recordOf(0, 0), recordOf(1, 1), recordOf(2, 0))
}

func TestDeadlines(t *testing.T) {
	log, entries := testnet.Logs()
	kv := newStore(t)
	ctx := testnet.Context(t)
	short, cancel := context.WithCancel(ctx)
	zero := config(kv, 0, 5)
	zero.Log = log
	r := start(t, short, zero)
	one := start(t, ctx, config(kv, 1, 5))
	three := start(t, ctx, config(kv, 3, 5))
	for _, rank := range []string{"peer:1", "peer:3"} {
		testnet.Eventually(t, rank, func() bool { return testnet.Logged(entries, "rank has joined", rank) })
	}
	cancel()
	err := (<-r).err
	testnet.WantError(t, err, "rank 0 of 5", "waiting for ranks 2 and 4: context canceled")
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v does not wrap its cause", err)
	}
	for _, r := range []<-chan result{one, three} {
		err := (<-r).err
		if refused, ok := errors.AsType[*RefusedError](err); !ok || refused.Reason != GaveUp {
			t.Errorf("got %v, want that rank 0 gave up", err)
		}
		testnet.WantError(t, err, "rank 0 gave up: waiting for ranks 2 and 4: context canceled")
	}

	times := func(cfg JoinConfig, parts ...string) {
		t.Helper()
		testnet.EventuallyError(t, func(ctx context.Context) error {
			_, err := Join(ctx, cfg)
			return err
		}, parts...)
	}
	// The previous root is closed, so the attempt of the rank to connect to it fails.
	times(config(kv, 2, 5), "rank 2 of 5", "joining at the root of rank 0", "deadline exceeded",
		"connection refused")
	times(config(newStore(t), 2, 5), "rank 2 of 5", "waiting until rank 0 serves its root",
		`watch "gohvd/job/root"`, "deadline exceeded")
	times(config(newStore(t), 9, 5), "rank 9 is out of range, want 0 to 4", "reporting this to rank 0 failed")
	times(config(newStore(t), 0, 100), "waiting for ranks 1-99: context deadline exceeded")
	times(config(newStore(t), 0, 2), "waiting for rank 1: context deadline exceeded")
}

func TestStoreIsLost(t *testing.T) {
	ctx := testnet.Context(t)
	log, entries := testnet.Logs()
	kv := store.NewHashStore(store.Limits{})
	zero := config(kv, 0, 3)
	zero.Log = log
	r0 := start(t, ctx, zero)
	r1 := start(t, ctx, config(kv, 1, 3))
	testnet.Eventually(t, "rank 1", func() bool { return testnet.Logged(entries, "rank has joined") })
	kv.Close()
	err := (<-r0).err
	if !errors.Is(err, store.ErrClosed) {
		t.Errorf("rank 0: got %v, want ErrClosed", err)
	}
	testnet.WantError(t, err, "waiting for rank 2: ", `watch "gohvd/job/root"`)
	testnet.WantError(t, (<-r1).err, "rank 0 gave up: waiting for rank 2: ", "store is closed")

	kv = store.NewHashStore(store.Limits{})
	r1 = start(t, ctx, config(kv, 1, 3))
	testnet.Eventually(t, "rank 1 waits", func() bool { return kv.Waits() == 1 })
	kv.Close()
	err = (<-r1).err
	if !errors.Is(err, store.ErrClosed) || !errors.Is(err, ErrStoreEnded) {
		t.Errorf("rank 1: got %v, want ErrClosed and ErrStoreEnded", err)
	}

	kv = store.NewHashStore(store.Limits{})
	publishRoot(t, kv, closedPort(t), 1)
	r1 = start(t, ctx, config(kv, 1, 3))
	testnet.Eventually(t, "rank 1 tries", func() bool { return kv.Waits() == 1 })
	kv.Close()
	testnet.WantError(t, (<-r1).err, "store is closed", "connection refused")

	// A root ends the connection before its answer, and says then that its epoch is complete.
	kv = store.NewHashStore(store.Limits{})
	var asked atomic.Int32
	answered := make(chan struct{})
	publishRoot(t, kv, testnet.FakeServer(t, func(conn net.Conn) {
		dial.ReadGreeting(conn, rootMagic)
		conn.Write(dial.Greeting(rootMagic, rootVersion))
		dial.ReadFrame(conn, maxJoinRequestBytes)
		if asked.Add(1) == 2 {
			answer, _ := appendMessage(nil,
				&rendezvouspb.Answer{Kind: rendezvouspb.Answer_COMPLETE, Epoch: 7})
			conn.Write(answer)
			close(answered)
		}
	}), 1)
	r1 = start(t, ctx, config(kv, 1, 3))
	<-answered
	kv.Close()
	if err = (<-r1).err; !errors.Is(err, ErrStoreEnded) {
		t.Errorf("rank 1 of another epoch: got %v, want ErrStoreEnded", err)
	}
}

// closedPort returns an address at which no process listens.
func closedPort(t *testing.T) string {
	t.Helper()
	ln := testnet.Listen(t)
	defer ln.Close()
	return ln.Addr().String()
}

// If the store has the root of an earlier job, whose port is closed or used by another server, ranks of this
// job can still join.
func TestLeftovers(t *testing.T) {
	hangUp := func(net.Conn) {}
	web := func(conn net.Conn) { io.WriteString(conn, "HTTP/1.1 400 Bad Request\r\n\r\n") }
	for name, leave := range map[string]func(t *testing.T, kv store.Store){
		"closed port": func(t *testing.T, kv store.Store) { publishRoot(t, kv, closedPort(t), 1) },
		"hangs up": func(t *testing.T, kv store.Store) {
			publishRoot(t, kv, testnet.FakeServer(t, hangUp), 1)
		},
		"web server": func(t *testing.T, kv store.Store) {
			publishRoot(t, kv, testnet.FakeServer(t, web), 1)
		},
		"not a root": func(t *testing.T, kv store.Store) {
			kv.Set(t.Context(), "gohvd/job/root", []byte("garbage"))
		},
		"another job's root": func(t *testing.T, kv store.Store) {
			other := config(newStore(t), 0, 2)
			ctx, cancel := context.WithCancel(t.Context())
			t.Cleanup(cancel)
			start(t, ctx, other)
			publishRoot(t, kv, rootOf(t, other.Store).GetAddr(), 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := testnet.Context(t)
			kv := newStore(t)
			leave(t, kv)
			log, entries := testnet.Logs()
			one := config(kv, 1, 2)
			one.Log = log
			r := start(t, ctx, one)
			testnet.Eventually(t, "rank 1 has looked", func() bool {
				return kv.Waits() == 1 ||
					testnet.Logged(entries, "waiting for a newer root")
			})
			zero := start(t, ctx, config(kv, 0, 2))
			formed(t, []result{<-zero, <-r}, recordOf(0, 0), recordOf(1, 0))
		})
	}
}

// BenchmarkJoin measures the time from the start of all ranks until all have the table, and the processor
// time of all ranks. The ranks are goroutines of one process.
func BenchmarkJoin(b *testing.B) {
	for _, size := range []int{4, 16, 64, 256, 1024} {
		b.Run(fmt.Sprint("ranks=", size), func(b *testing.B) {
			kv := store.NewHashStore(store.Limits{})
			defer kv.Close()
			b.ReportAllocs()
			began := testnet.ProcessorTime(b)
			var last uint64
			for b.Loop() {
				var wg sync.WaitGroup
				sessions := make([]*Session, size)
				for rank := range size {
					wg.Go(func() {
						cfg := config(kv, rank, size)
						cfg.LastEpoch = last
						var err error
						if sessions[rank], err = Join(b.Context(), cfg); err != nil {
							b.Error(err)
						}
					})
				}
				wg.Wait()
				if b.Failed() {
					b.FailNow()
				}
				for _, s := range sessions {
					s.Close()
				}
				last = sessions[0].Epoch
			}
			b.ReportMetric(float64((testnet.ProcessorTime(b)-began).Milliseconds())/float64(b.N), "cpu-ms/op")
		})
	}
}
