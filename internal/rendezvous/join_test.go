package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

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

// overBoth runs a test twice: without a secret, and with a secret and encryption.
func overBoth(t *testing.T, test func(*testing.T, secret.Secret)) {
	t.Run("plain", func(t *testing.T) { test(t, secret.Secret{}) })
	t.Run("TLS", func(t *testing.T) {
		key, _ := secret.New()
		test(t, key.Encrypted())
	})
}

// say connects to the root at addr, proves that it knows the secret in key, and sends the parts in order.
func say(t *testing.T, key secret.Secret, addr string, parts ...[]byte) net.Conn {
	t.Helper()
	over, err := key.Dial(testnet.RawDial(t, addr), rootMagic)
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
			Algorithms: strings.Repeat("t", MaxAlgorithmsBytes), Processors: make([]uint64, MaxProcessors/64),
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
		"listen host is 0.0.0.0, want an address": func(c *JoinConfig) { c.ListenHost = "0.0.0.0" },
		"listen host is ::, want an address":      func(c *JoinConfig) { c.ListenHost = "::" },
		"opening the root":                        func(c *JoinConfig) { c.ListenHost = "192.0.2.1" },
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
		"the table of algorithms has 16385 bytes, want at most 16384": func(c *JoinConfig) {
			c.Self.Algorithms = strings.Repeat("x", MaxAlgorithmsBytes+1)
		},
		"the set of processors has 16448 bits, want at most 16384": func(c *JoinConfig) {
			c.Self.Processors = make([]uint64, MaxProcessors/64+1)
		},
		"the table of algorithms is not valid UTF-8": func(c *JoinConfig) { c.Self.Algorithms = "\xff" },
		"rank 1 is out of range, want 0 to 0":        func(c *JoinConfig) { c.Rank, c.Size = 1, 1 },
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
	r.fail(&RefusedError{SizeMismatch, "sizes"})
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

func TestLatecomer(t *testing.T) {
	for _, rank := range []int{0, 1} {
		t.Run(fmt.Sprint("rank ", rank), func(t *testing.T) {
			kv := newStore(t)
			log, entries := testnet.Logs()
			zero := config(kv, 0, 2)
			zero.Log = log
			formed(t, joinAll(t, testnet.Context(t), zero, config(kv, 1, 2)), recordOf(0, 0), recordOf(1, 0))

			ctx, cancel := context.WithCancel(testnet.Context(t))
			late := config(kv, rank, 2)
			late.Self = recordOf(rank, 9)
			lateLog, lateEntries := testnet.Logs()
			late.Log = lateLog
			r := start(t, ctx, late)
			testnet.Eventually(t, "rank 0's log", func() bool {
				return testnet.Logged(entries, "joined too late: the epoch is complete",
					fmt.Sprintf("pid %d ", late.Self.PID))
			})
			testnet.Eventually(t, "the latecomer's log", func() bool {
				return testnet.Logged(lateEntries, "waiting for a")
			})
			cancel()
			err := (<-r).err
			if refused, ok := errors.AsType[*RefusedError](err); !ok || refused.Reason != Late {
				t.Errorf("got %v, want that it was late", err)
			}
			if !errors.Is(err, context.Canceled) {
				t.Errorf("%v does not wrap the cause of its end", err)
			}
			testnet.WantError(t, err, "epoch 1 is complete", rootOf(t, kv).GetAddr())
		})
	}
}

// If a new rank 0 asks the root of a running epoch twice, and its ctx ends before the second answer arrives,
// the error contains the first answer.
func TestLateWhileAsking(t *testing.T) {
	kv := newStore(t)
	ctx, cancel := context.WithCancel(testnet.Context(t))
	defer cancel()
	var asked atomic.Int32
	addr := testnet.FakeServer(t, func(conn net.Conn) {
		if asked.Add(1) > 1 {
			cancel()
			io.Copy(io.Discard, conn) // keeps the connection open, but sends no further answer
			return
		}
		dial.ReadGreeting(conn, rootMagic)
		conn.Write(dial.Greeting(rootMagic, rootVersion))
		if _, err := dial.ReadFrame(conn, maxJoinRequestBytes); err != nil {
			t.Error(err)
		}
		answer, err := appendMessage(nil, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_COMPLETE, Epoch: 7})
		if err != nil {
			t.Error(err)
		}
		conn.Write(answer)
	})
	publishRoot(t, kv, addr, 1)
	_, err := Join(ctx, config(kv, 0, 2))
	if refused, ok := errors.AsType[*RefusedError](err); !ok || refused.Reason != Late ||
		!errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want that it was late, and stopped", err)
	}
	testnet.WantError(t, err, "epoch 7 is complete", addr)
}

// If the replacement of a dead rank starts while the other ranks are still in the old epoch, the replacement
// waits and then takes part in the new epoch.
func TestReplacementMeetsOldRoot(t *testing.T) {
	for _, dead := range []int{0, 1, 2} {
		t.Run(fmt.Sprint("rank ", dead), func(t *testing.T) {
			ctx := testnet.Context(t)
			kv := newStore(t)
			log, entries := testnet.Logs()
			cfgs := []JoinConfig{config(kv, 0, 3), config(kv, 1, 3), config(kv, 2, 3)}
			cfgs[0].Log = log
			records := []Record{recordOf(0, 0), recordOf(1, 0), recordOf(2, 0)}
			old := joinAll(t, ctx, cfgs...)
			first := formed(t, old, records...)

			fresh := config(kv, dead, 3)
			fresh.Self = recordOf(dead, 1)
			records[dead] = fresh.Self
			r := start(t, ctx, fresh)
			testnet.Eventually(t, "rank 0 sees the replacement", func() bool {
				return testnet.Logged(entries, "joined too late", "pid")
			})

			old[0].Close()
			again := make([]result, 3)
			var rejoined []JoinConfig
			for rank, cfg := range cfgs {
				if rank != dead {
					cfg.LastEpoch = first
					rejoined = append(rejoined, cfg)
				}
			}
			for i, r := range joinAll(t, ctx, rejoined...) {
				again[rejoined[i].Rank] = r
			}
			again[dead] = <-r
			if second := formed(t, again, records...); second <= first {
				t.Errorf("epoch %d follows %d", second, first)
			}
		})
	}
}

// A process that was in the old epoch becomes rank 0 and replaces the old root, without waiting until the old
// root is closed. So processes can change their ranks even if the old rank 0 is the last to notice the end of
// the epoch.
func TestNewRankZeroFromOldEpoch(t *testing.T) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	first := formed(t, joinAll(t, ctx, config(kv, 0, 2), config(kv, 1, 2)), recordOf(0, 0), recordOf(1, 0))
	zero, one := config(kv, 0, 2), config(kv, 1, 2)
	zero.LastEpoch, one.LastEpoch = first, first
	zero.Self, one.Self = one.Self, zero.Self
	// The sessions of the first epoch are still open.
	formed(t, joinAll(t, ctx, zero, one), recordOf(1, 0), recordOf(0, 0))
}

// The number of a new epoch is greater than the LastEpoch of each rank, even if the store was restarted and
// counts from 1 again. Afterwards the counter in the store is at least the number of the new epoch.
func TestEpochExceedsAll(t *testing.T) {
	for _, last := range [][]uint64{{0, 0, 0}, {7, 0, 0}, {0, 41, 7}, {3, 3, 3}, {5, 0, 6}} {
		ctx := testnet.Context(t)
		kv := newStore(t)
		var cfgs []JoinConfig
		for rank := range last {
			cfg := config(kv, rank, 3)
			cfg.LastEpoch = last[rank]
			cfgs = append(cfgs, cfg)
		}
		epoch := formed(t, joinAll(t, ctx, cfgs...), recordOf(0, 0), recordOf(1, 0), recordOf(2, 0))
		if want := slices.Max(last) + 1; epoch < want {
			t.Errorf("last epochs %d: got epoch %d, want at least %d", last, epoch, want)
		}
		if n, err := kv.Add(ctx, "gohvd/job/epoch", 0); err != nil || n < int64(epoch) {
			t.Errorf("last epochs %d: the counter is %d at epoch %d, %v", last, n, epoch, err)
		}
	}
}

// heldStore is a store whose second call of Add closes the channel held and then waits until the channel
// release is closed.
type heldStore struct {
	store.Store
	adds          int
	held, release chan struct{}
}

func (s *heldStore) Add(ctx context.Context, key string, delta int64) (int64, error) {
	if s.adds++; s.adds == 2 {
		close(s.held)
		<-s.release
	}
	return s.Store.Add(ctx, key, delta)
}

// While rank 0 draws a number for a new epoch, a rank is replaced by a process that has seen a greater epoch.
// The number of the new epoch must be greater than the epoch of that process too.
func TestEpochExceedsReplacement(t *testing.T) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	log, entries := testnet.Logs()
	held := &heldStore{Store: kv, held: make(chan struct{}), release: make(chan struct{})}
	zero := config(held, 0, 2)
	zero.Log = log
	r := start(t, ctx, zero)

	short, cancel := context.WithCancel(ctx)
	one := config(kv, 1, 2)
	one.LastEpoch = 5
	gone := start(t, short, one)
	<-held.held
	cancel()
	<-gone
	testnet.Eventually(t, "rank 1 is forgotten", func() bool {
		return testnet.Logged(entries, "left before all ranks had joined")
	})
	one.LastEpoch = 50
	again := start(t, ctx, one)
	testnet.Eventually(t, "rank 1 is back", func() bool {
		return len(entries.FilterMessage("rendezvous: rank has joined").All()) == 2
	})
	close(held.release)
	if epoch := formed(t, []result{<-r, <-again}, recordOf(0, 0), recordOf(1, 0)); epoch != 51 {
		t.Errorf("got epoch %d, want 51", epoch)
	}
}

// All ranks leave and join again 20 times, in varying order. If rank 0 leaves last, the others find the root
// of the epoch that they have left. If rank 0 leaves first, they find no root. In both cases all ranks take
// part in each new epoch.
func TestManyEpochs(t *testing.T) {
	const size, epochs = 4, 20
	ctx := testnet.Context(t)
	kv := newStore(t)
	log, entries := testnet.Logs()
	var seen [size][]uint64
	// Each rank that leaves epoch i before the slowest rank sends an element to left[i].
	var left [epochs]chan struct{}
	for i := range left {
		left[i] = make(chan struct{}, size)
	}
	var wg sync.WaitGroup
	for rank := range size {
		wg.Go(func() {
			cfg := config(kv, rank, size)
			cfg.Log = log
			for i := range epochs {
				s, err := Join(ctx, cfg)
				if err != nil {
					t.Errorf("rank %d, epoch %d: %v", rank, i, err)
					return
				}
				cfg.LastEpoch = s.Epoch
				seen[rank] = append(seen[rank], s.Epoch)
				if slowest := i % size; rank != slowest {
					left[i] <- struct{}{}
				} else {
					for range size - 1 {
						select {
						case <-left[i]:
						case <-ctx.Done():
						}
					}
				}
				if err := s.Close(); err != nil {
					t.Errorf("rank %d, epoch %d: close: %v", rank, i, err)
				}
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	for rank := range size {
		if !slices.Equal(seen[rank], seen[0]) || !slices.IsSorted(seen[rank]) {
			t.Errorf("rank %d was in epochs %d, rank 0 in %d", rank, seen[rank], seen[0])
		}
	}
	if testnet.Logged(entries, "joined too late") {
		t.Error("a rank that came back was taken for a latecomer")
	}
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
	testnet.WantError(t, err, `watch "gohvd/job/root"`)
	testnet.WantError(t, (<-r1).err, "rank 0 gave up", "store is closed")

	kv = store.NewHashStore(store.Limits{})
	r1 = start(t, ctx, config(kv, 1, 3))
	testnet.Eventually(t, "rank 1 waits", func() bool { return kv.Waits() == 1 })
	kv.Close()
	err = (<-r1).err
	if !errors.Is(err, store.ErrClosed) {
		t.Errorf("rank 1: got %v, want ErrClosed", err)
	}

	kv = store.NewHashStore(store.Limits{})
	publishRoot(t, kv, closedPort(t), 1)
	r1 = start(t, ctx, config(kv, 1, 3))
	testnet.Eventually(t, "rank 1 tries", func() bool { return kv.Waits() == 1 })
	kv.Close()
	testnet.WantError(t, (<-r1).err, "store is closed", "connection refused")
}

// closedPort returns an address at which no process listens.
func closedPort(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
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

// rootRequest returns the encoded JoinRequest that a rank sends to root.
func rootRequest(t *testing.T, root *rendezvouspb.Root, nonce []byte, rank, size int) []byte {
	t.Helper()
	record := recordOf(rank, 0)
	frame, err := appendMessage(nil, &rendezvouspb.JoinRequest{
		Job: "job", Token: root.GetToken(), Nonce: nonce, Rank: int32(rank), Size: int64(size),
		Record: recordToProto(&record),
	})
	if err != nil {
		t.Fatal(err)
	}
	return frame
}

// If the connection of a rank breaks, the rank asks again with the same nonce. The root does not treat the
// rank as a duplicate, and sends it the table, even if the epoch has become complete meanwhile.
func TestRankAsksAgain(t *testing.T) { overBoth(t, testRankAsksAgain) }

func testRankAsksAgain(t *testing.T, key secret.Secret) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	log, entries := testnet.Logs()
	zero := keyed(kv, 0, 3, key)
	zero.Log = log
	r := start(t, ctx, zero)
	root := rootOf(t, kv)
	ask := func(nonce []byte) net.Conn {
		conn := say(t, key, root.GetAddr(), dial.Greeting(rootMagic, rootVersion),
			rootRequest(t, root, nonce, 1, 3))
		if _, err := dial.ReadGreeting(conn, rootMagic); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	wantKind := func(conn net.Conn, kind rendezvouspb.Answer_Kind) {
		t.Helper()
		var a rendezvouspb.Answer
		body, err := dial.ReadFrame(conn, maxAnswerBytes)
		if err == nil {
			err = proto.Unmarshal(body, &a)
		}
		if err != nil || a.GetKind() != kind {
			t.Fatalf("got answer %v, %v, want %v", &a, err, kind)
		}
		for rank := 0; kind == rendezvouspb.Answer_TABLE && rank < 3; rank++ {
			body, err := dial.ReadFrame(conn, maxRecordBytes)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := decodeRecord(body); err != nil || !same(got, recordOf(rank, 0)) {
				t.Errorf("record %d: got %v, %v", rank, got, err)
			}
		}
		if kind == rendezvouspb.Answer_TABLE {
			return // the records come after this frame
		}
		if n, err := conn.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("after the answer: got %d bytes, %v", n, err)
		}
	}
	nonce := newToken()
	broken := ask(nonce)
	testnet.Eventually(t, "rank 1", func() bool {
		return testnet.Logged(entries, "rank has joined", "peer:1")
	})
	again := ask(nonce)
	if _, err := broken.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the first connection: got %v, want EOF", err)
	}
	two := start(t, ctx, keyed(kv, 2, 3, key))
	wantKind(again, rendezvouspb.Answer_TABLE)
	formed(t, []result{<-r}, recordOf(0, 0), recordOf(1, 0), recordOf(2, 0))
	<-two
	wantKind(ask(nonce), rendezvouspb.Answer_TABLE)
	wantKind(ask(newToken()), rendezvouspb.Answer_COMPLETE)
	root.Token = newToken()
	wantKind(ask(nonce), rendezvouspb.Answer_STALE)
}

// If a root closes the connection without an answer, the rank asks the same root again, with the same nonce.
func TestJoinerTriesAgain(t *testing.T) {
	records := []Record{recordOf(0, 0), recordOf(1, 0)}
	var mu sync.Mutex
	var nonces [][]byte
	addr := testnet.FakeServer(t, func(conn net.Conn) {
		dial.ReadGreeting(conn, rootMagic)
		conn.Write(dial.Greeting(rootMagic, rootVersion))
		body, err := dial.ReadFrame(conn, maxJoinRequestBytes)
		if err != nil {
			t.Errorf("reading the request: %v", err)
			return
		}
		q, err := decodeJoinRequest(body)
		if err != nil {
			t.Error(err)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		nonces = append(nonces, q.GetNonce())
		if len(nonces) < 3 {
			return
		}
		table, err := appendMessage(nil, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_TABLE, Epoch: 1})
		for i := 0; i < len(records) && err == nil; i++ {
			table, err = appendMessage(table, recordToProto(&records[i]))
		}
		if err != nil {
			t.Error(err)
		}
		conn.Write(table)
	})
	kv := newStore(t)
	publishRoot(t, kv, addr, 1)
	formed(t, []result{<-start(t, testnet.Context(t), config(kv, 1, 2))}, records...)
	for _, nonce := range nonces {
		if !bytes.Equal(nonce, nonces[0]) {
			t.Errorf("one call of Join used the nonces %x", nonces)
		}
	}
}

// If the table arrives after the store has a newer root, the rank still uses the table. The old root was
// closed because its epoch is complete, and all other ranks belong to that epoch.
func TestTableIsLateButValid(t *testing.T) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	records := []Record{recordOf(0, 0), recordOf(1, 0)}
	addr := testnet.FakeServer(t, func(conn net.Conn) {
		dial.ReadGreeting(conn, rootMagic)
		conn.Write(dial.Greeting(rootMagic, rootVersion))
		if _, err := dial.ReadFrame(conn, maxJoinRequestBytes); err != nil {
			t.Errorf("reading the request: %v", err)
		}
		testnet.Eventually(t, "rank 1 watches", func() bool { return kv.Waits() == 1 })
		publishRoot(t, kv, closedPort(t), 2)
		testnet.Eventually(t, "rank 1 knows the newer root", func() bool { return kv.Waits() == 0 })
		table, err := appendMessage(nil, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_TABLE, Epoch: 1})
		for i := 0; i < len(records) && err == nil; i++ {
			conn.Write(table) // sent in pieces, so that time passes between them
			table, err = appendMessage(nil, recordToProto(&records[i]))
		}
		if err != nil {
			t.Error(err)
		}
		conn.Write(table)
	})
	publishRoot(t, kv, addr, 1)
	cfg := config(kv, 1, 2)
	formed(t, []result{<-start(t, ctx, cfg)}, records...)
}

func TestGarbageToRoot(t *testing.T) { overBoth(t, testGarbageToRoot) }

func testGarbageToRoot(t *testing.T, key secret.Secret) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	log, entries := testnet.Logs()
	zero := keyed(kv, 0, 4, key)
	zero.Log = log
	r := start(t, ctx, zero)
	one := start(t, ctx, keyed(kv, 1, 4, key))
	root := rootOf(t, kv)
	testnet.Eventually(t, "rank 1", func() bool {
		return testnet.Logged(entries, "rank has joined", "peer:1")
	})

	hello := dial.Greeting(rootMagic, rootVersion)
	request := rootRequest(t, root, newToken(), 2, 4)
	shortNonce := rootRequest(t, root, []byte("short"), 2, 4)
	early, err := appendMessage(nil, &rendezvouspb.Status{Kind: rendezvouspb.Status_FAILED,
		Text: "too early"})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name   string
		parts  [][]byte
		reason string
	}{
		{"web browser", [][]byte{[]byte("GET / HTTP/1.1\r\n\r\n")}, `greeting is "GET "`},
		{"the other protocol", [][]byte{dial.Greeting("GHVS", 2)}, `greeting is "GHVS"`},
		{"another version", [][]byte{dial.Greeting(rootMagic, 1)},
			fmt.Sprintf("version 1 of the protocol, want %d", rootVersion)},
		{"oversized", [][]byte{hello, {0xff, 0, 0, 0}}, "frame of 4278190080 bytes"},
		{"not protobuf", [][]byte{hello, dial.SealFrame(append(dial.NewFrame(2), 0xff, 0xff))}, "proto"},
		{"empty", [][]byte{hello, dial.SealFrame(dial.NewFrame(0))}, "token has 0 bytes"},
		{"nonce", [][]byte{hello, shortNonce}, "the nonce has 5 bytes"},
		{"two requests", [][]byte{hello, request, request}, "reading a status"},
		{"a failure before the table", [][]byte{hello, request, early},
			"reading a status: got FAILED before all ranks have joined"},
	} {
		conn := say(t, key, root.GetAddr(), test.parts...)
		io.Copy(io.Discard, conn)
		testnet.Eventually(t, test.name, func() bool {
			return testnet.Logged(entries, "closed a connection", test.reason)
		})
	}
	// This client sends half a request and nothing after that.
	say(t, key, root.GetAddr(), hello, request[:10])

	rest := joinAll(t, ctx, keyed(kv, 2, 4, key), keyed(kv, 3, 4, key))
	formed(t, append([]result{<-r, <-one}, rest...), recordOf(0, 0), recordOf(1, 0), recordOf(2, 0),
		recordOf(3, 0))
}

// The root limits the number of connections whose handshake is not complete. If there are more, it closes the
// oldest of them, so that a rank can still join.
func TestRootBoundsHandshakes(t *testing.T) { overBoth(t, testRootBoundsHandshakes) }

func testRootBoundsHandshakes(t *testing.T, key secret.Secret) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	r := start(t, ctx, keyed(kv, 0, 2, key))
	root := rootOf(t, kv)
	var clients []net.Conn
	for i := range maxHandshakes {
		// Only every 32nd client and the last one run the handshake, because a thousand TLS handshakes take
		// too long.
		if i%32 > 0 && i < maxHandshakes-1 {
			clients = append(clients, testnet.RawDial(t, root.GetAddr()))
			continue
		}
		conn := say(t, key, root.GetAddr(), dial.Greeting(rootMagic, rootVersion))
		// When the greeting of the root arrives, the root has accepted the connection.
		if _, err := dial.ReadGreeting(conn, rootMagic); err != nil {
			t.Fatal(err)
		}
		clients = append(clients, conn)
	}
	one := start(t, ctx, keyed(kv, 1, 2, key))
	formed(t, []result{<-r, <-one}, recordOf(0, 0), recordOf(1, 0))
	// This deadline is earlier than the root's handshake timeout. So if the connection is closed, the reason
	// is the limit on handshakes and not the timeout.
	clients[0].SetReadDeadline(time.Now().Add(handshakeTimeout / 2))
	if _, err := io.Copy(io.Discard, clients[0]); err != nil && !errors.Is(err, syscall.ECONNRESET) &&
		!errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the oldest client: got %v, want a closed connection", err)
	}
	clients[maxHandshakes-1].SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if _, err := clients[maxHandshakes-1].Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the newest client: got %v, want an open connection", err)
	}
}

// If a rank has another secret, or is the only rank that encrypts, it is refused and its error says why. The
// other ranks are not affected.
func TestSecret(t *testing.T) {
	ctx := testnet.Context(t)
	key, _ := secret.New()
	other, _ := secret.New()
	for name, own := range map[string]secret.Secret{"plain": key, "TLS": key.Encrypted()} {
		t.Run(name, func(t *testing.T) {
			kv := newStore(t)
			log, entries := testnet.Logs()
			zero := keyed(kv, 0, 2, own)
			zero.Log = log
			r := start(t, ctx, zero)
			root := rootOf(t, kv)
			mixed := key.Encrypted()
			if name == "TLS" {
				mixed = key
			}
			for _, wrong := range []struct {
				key  secret.Secret
				want error
			}{{other, nil}, {other.Encrypted(), nil}, {secret.Secret{}, secret.ErrNeeded}, {mixed,
				secret.ErrMixed}} {
				conn, err := dial.Greet(ctx, root.GetAddr(), wrong.key, rootMagic, rootVersion)
				if err == nil {
					conn.Close()
				}
				if err == nil || wrong.want != nil && !errors.Is(err, wrong.want) {
					t.Errorf("%v: got %v, want %v", wrong, err, wrong.want)
				}
			}
			testnet.Eventually(t, "the log", func() bool {
				return testnet.Logged(entries, "closed a connection", "HVD_TLS")
			})
			one := start(t, ctx, keyed(kv, 1, 2, own))
			formed(t, []result{<-r, <-one}, recordOf(0, 0), recordOf(1, 0))
		})
	}
}

// If rank 0 calls Close as soon as it has the table, the other ranks still get the table.
func TestCloseDeliversTables(t *testing.T) { overBoth(t, testCloseDeliversTables) }

func testCloseDeliversTables(t *testing.T, key secret.Secret) {
	for range 20 {
		ctx := testnet.Context(t)
		kv := newStore(t)
		r := start(t, ctx, keyed(kv, 0, 3, key))
		one, two := start(t, ctx, keyed(kv, 1, 3, key)), start(t, ctx, keyed(kv, 2, 3, key))
		zero := <-r
		if zero.err == nil {
			zero.Close()
		}
		formed(t, []result{zero, <-one, <-two}, recordOf(0, 0), recordOf(1, 0), recordOf(2, 0))
	}
}

func FuzzDecodeRoot(f *testing.F) {
	for _, root := range []*rendezvouspb.Root{{}, {Attempt: 1, Token: make([]byte, tokenBytes),
		Addr: "127.0.0.1:1", Host: "h", Pid: -1}} {
		value, err := proto.Marshal(root)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(value)
	}
	f.Fuzz(func(t *testing.T, value []byte) {
		root, err := decodeRoot(value)
		if err != nil {
			return
		}
		again, err := proto.Marshal(root)
		if err != nil {
			t.Fatal(err)
		}
		if same, err := decodeRoot(again); err != nil || !proto.Equal(root, same) {
			t.Fatalf("%v is decoded again as %v, %v", root, same, err)
		}
	})
}

func FuzzDecodeJoinRequest(f *testing.F) {
	record := recordOf(2, 0)
	for _, q := range []*rendezvouspb.JoinRequest{
		{},
		{Job: "j", Token: newToken(), Nonce: newToken(), Rank: -1, Size: 1 << 40, LastEpoch: maxEpoch,
			Record: recordToProto(&record)},
	} {
		body, err := proto.Marshal(q)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		q, err := decodeJoinRequest(body)
		if err != nil {
			return
		}
		if err := q.record.check(); err != nil || q.GetLastEpoch() > maxEpoch ||
			len(q.GetNonce()) != tokenBytes {
			t.Fatalf("%v was accepted: %v", q.JoinRequest, err)
		}
		again, err := proto.Marshal(q.JoinRequest)
		if err != nil {
			t.Fatal(err)
		}
		if same, err := decodeJoinRequest(again); err != nil ||
			!proto.Equal(q.JoinRequest, same.JoinRequest) {
			t.Fatalf("%v is decoded again as %v, %v", q, same, err)
		}
	})
}

// BenchmarkJoin measures the time from the start of all ranks until all have the table. The ranks are
// goroutines of one process.
func BenchmarkJoin(b *testing.B) {
	for _, size := range []int{4, 16, 64} {
		b.Run(fmt.Sprint("ranks=", size), func(b *testing.B) {
			kv := store.NewHashStore(store.Limits{})
			defer kv.Close()
			b.ReportAllocs()
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
		})
	}
}
