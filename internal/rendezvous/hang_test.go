package rendezvous

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/store"
)

// limited is a context whose deadline passes when the channel passed is closed.
type limited struct {
	context.Context
	passed chan struct{}
}

func (l limited) Done() <-chan struct{} { return l.passed }

func (l limited) Err() error {
	select {
	case <-l.passed:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// withLimit returns a context whose deadline passes when the function pass is called.
func withLimit(t *testing.T) (ctx context.Context, pass func()) {
	l := limited{t.Context(), make(chan struct{})}
	pass = sync.OnceFunc(func() { close(l.passed) })
	t.Cleanup(pass)
	return l, pass
}

// wantAwaited checks for which ranks a rank has waited whose call of Join failed with err.
func wantAwaited(t *testing.T, err error, ranks ...topo.Rank) {
	t.Helper()
	if !slices.Equal(Awaited(err), ranks) {
		t.Errorf("got ranks %v, want %v: %v", Awaited(err), ranks, err)
	}
}

// The time limit of some ranks passes while others have not joined. The errors of these ranks name the ranks
// that are missing.
func TestAwaited(t *testing.T) {
	kv := newStore(t)
	log, entries := testnet.Logs()
	zero := config(kv, 0, 5)
	zero.Log = log
	long, passLong := withLimit(t)
	short, passShort := withLimit(t)
	r := start(t, long, zero)
	one, three := start(t, short, config(kv, 1, 5)), start(t, long, config(kv, 3, 5))
	for _, rank := range []string{"peer:1", "peer:3"} {
		testnet.Eventually(t, rank, func() bool { return testnet.Logged(entries, "rank has joined", rank) })
	}
	passShort()
	wantAwaited(t, (<-one).err, 2, 4)
	passLong()
	wantAwaited(t, (<-r).err, 2, 4)
	wantAwaited(t, (<-three).err, 2, 4)

	// A rank that stops waiting without having reached its time limit blames nobody.
	ctx, cancel := context.WithCancel(testnet.Context(t))
	r = start(t, ctx, config(newStore(t), 0, 2))
	cancel()
	wantAwaited(t, (<-r).err)
}

// Rank 0 hangs before the epoch is complete. The error of the other rank names rank 0, no matter how far rank
// 0 has come.
func TestRankZeroHangsInJoin(t *testing.T) {
	// waiting waits until rank 1 waits for a newer root.
	waiting := func(t *testing.T, kv store.Store) {
		testnet.Eventually(t, "rank 1 waits", func() bool { return kv.(*store.HashStore).Waits() == 1 })
	}
	for name, hang := range map[string]func(t *testing.T, cfg JoinConfig, reached func()){
		"before it publishes its root": func(t *testing.T, cfg JoinConfig, reached func()) {
			waiting(t, cfg.Store)
			reached()
		},
		"before it accepts": func(t *testing.T, cfg JoinConfig, reached func()) {
			ln := testnet.Listen(t)
			t.Cleanup(func() { ln.Close() })
			publishRoot(t, cfg.Store, ln.Addr().String(), 1)
			waiting(t, cfg.Store)
			reached()
		},
		"before it answers": func(t *testing.T, cfg JoinConfig, reached func()) {
			publishRoot(t, cfg.Store, testnet.FakeServer(t, func(conn net.Conn) {
				dial.ReadGreeting(conn, rootMagic)
				conn.Write(dial.Greeting(rootMagic, rootVersion))
				dial.ReadFrame(conn, maxJoinRequestBytes)
				reached()
				conn.Read(make([]byte, 1<<10)) // reads the status
				conn.Read(make([]byte, 1))     // returns when the rank has closed the connection
			}), 1)
		},
		"before it completes the epoch": func(t *testing.T, cfg JoinConfig, reached func()) {
			r, err := openRoot(&cfg)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { r.close() })
			value, err := proto.Marshal(&rendezvouspb.Root{Attempt: 1, Token: r.token,
				Addr: r.ln.Addr().String()})
			if err != nil {
				t.Fatal(err)
			}
			if err := cfg.Store.Set(t.Context(), cfg.rootKey(), value); err != nil {
				t.Fatal(err)
			}
			<-r.changed // all ranks have joined
			reached()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, pass := withLimit(t)
			cfg := config(newStore(t), 0, 2)
			cfg.Log, _ = testnet.Logs()
			one := start(t, ctx, config(cfg.Store, 1, 2))
			hang(t, cfg, pass)
			wantAwaited(t, (<-one).err, 0)
		})
	}
}

// Rank 0 hangs after all ranks have joined. If another rank then fails, it does not wait long for an answer,
// and its error names rank 0.
func TestRankZeroHangsAfterJoin(t *testing.T) {
	records := []Record{recordOf(0, 0), recordOf(1, 0)}
	kv := newStore(t)
	publishRoot(t, kv, testnet.FakeServer(t, func(conn net.Conn) {
		dial.ReadGreeting(conn, rootMagic)
		conn.Write(dial.Greeting(rootMagic, rootVersion))
		dial.ReadFrame(conn, maxJoinRequestBytes)
		table, err := appendMessage(nil, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_TABLE, Epoch: 1})
		for i := 0; i < len(records) && err == nil; i++ {
			table, err = appendMessage(table, recordToProto(&records[i]))
		}
		if err != nil {
			t.Error(err)
		}
		conn.Write(table)
		for err == nil { // read until the rank has closed the connection
			_, err = conn.Read(make([]byte, 1<<10))
		}
	}), 1)
	r := <-start(t, testnet.Context(t), config(kv, 1, 2))
	formed(t, []result{r}, records...)
	ctx, pass := withLimit(t)
	pass()
	wantFailure(t, r.Session, r.Session.Fail(r.Session.Ready(ctx)), "it did not answer when rank 1 gave up: "+
		"rendezvous: waiting for the other ranks to be ready: context deadline exceeded", 0)
}

// The process of rank 0 is stopped while the others join, and runs again after its time limit has passed. The
// others have waited for it, not it for them.
func TestRankZeroIsStoppedWhileOthersJoin(t *testing.T) {
	cfg := config(newStore(t), 0, 3)
	cfg.Log, cfg.grace = zap.NewNop(), time.Hour // no delay of this test looks like a stop
	r, err := openRoot(&cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	wantAwaited(t, r.waitError(context.DeadlineExceeded), 1, 2)
	r.mu.Lock()
	r.ranAt = r.ranAt.Add(-8 * time.Hour)
	r.mu.Unlock()
	err = r.waitError(context.DeadlineExceeded)
	wantAwaited(t, err, 0)
	testnet.WantError(t, err, "waiting for rank 0, whose process did not run for", "(ranks 1 and 2 had not joined)")
}

// Rank 1 gives up and leaves. If rank 0 was stopped at that time, and so did not answer, rank 0 is the cause,
// unless rank 1 has named itself. If rank 0 was not stopped, rank 1 has died.
func TestRankLeavesRankZero(t *testing.T) {
	const died = "the process closed its connection during Init"
	timeout := &rendezvouspb.Status{Kind: rendezvouspb.Status_TIMEOUT}
	late := &rendezvouspb.Status{Kind: rendezvouspb.Status_FAILED, Text: "late", Ranks: []int32{2}}
	own := &rendezvouspb.Status{Kind: rendezvouspb.Status_FAILED, Text: "no memory", Ranks: []int32{1}}
	ready := &rendezvouspb.Status{Kind: rendezvouspb.Status_READY}
	for _, c := range []struct {
		stopped  bool
		statuses []*rendezvouspb.Status
		cause    topo.Rank
		reason   string
	}{
		{true, []*rendezvouspb.Status{timeout}, 0, "it did not answer when the time limit of Init passed at rank 1"},
		{true, []*rendezvouspb.Status{late}, 0, "it did not answer when rank 1 gave up: late"},
		{true, []*rendezvouspb.Status{own}, 1, "no memory"},
		{true, []*rendezvouspb.Status{timeout, ready}, 1, died}, // TIMEOUT has crossed TABLE
		{false, []*rendezvouspb.Status{timeout}, 1, died},
		{false, []*rendezvouspb.Status{late}, 1, died},
	} {
		sessions := meetWith(t, 3, secret.Secret{}, time.Hour)
		root := sessions[0].root
		root.mu.Lock()
		root.cfg.grace = time.Hour // no delay of this test looks like a stop
		root.ranAt, root.resumedAt = time.Now(), time.Time{}
		if c.stopped {
			root.ranAt = root.ranAt.Add(-2 * time.Hour)
		}
		root.mu.Unlock()
		conn := sessions[1].member.conn
		for _, s := range c.statuses {
			if err := sendStatus(conn, s); err != nil {
				t.Fatal(err)
			}
		}
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
		for _, rank := range []int{0, 2} { // not all ranks are ready before the root has decided
			err := sessions[rank].Ready(testnet.Context(t))
			wantFailure(t, sessions[rank], err, c.reason, c.cause)
		}
	}
}

// A rank hangs after all ranks have joined, and so the other ranks wait for each other too. When the time
// limit of one of them passes, they all stop waiting, and their errors name the rank that hangs.
func TestRankHangsAfterJoin(t *testing.T) {
	const hung = 2
	sessions := meetWith(t, 4, secret.Secret{}, time.Hour) // the root waits until the test makes it decide
	limit, pass := withLimit(t)
	errs := make(chan []error, 1)
	go func() {
		errs <- each(sessions, hung, func(rank int, s *Session) error {
			ctx := testnet.Context(t)
			if rank == 1 {
				ctx = limit
			}
			watched, stop := s.Watch(ctx)
			defer stop()
			_, err := s.Agree(watched, func(ctx context.Context) error {
				<-ctx.Done()
				return ctx.Err()
			})
			if err == nil {
				return errors.New("the ranks have agreed")
			}
			return s.Fail(err)
		})
	}()
	pass()
	sessions[0].root.decideAfter(t, 3, 0)
	for rank, err := range <-errs {
		if rank != hung {
			wantFailure(t, sessions[rank], err, "it was not ready when rank 1 gave up: ", hung)
		}
	}
}

// A rank fails, and the others report that too, but later than the root waits for the end of connections.
// They do not hang, so none of them is the cause.
func TestNobodyHangsAfterJoin(t *testing.T) {
	sessions := meetWith(t, 4, secret.Secret{}, 1)
	root := sessions[0].root
	root.mu.Lock()
	root.cfg.grace = time.Hour
	root.mu.Unlock()
	own := errors.New("no connection")
	for rank, err := range each(sessions, -1, func(rank int, s *Session) error {
		if rank == 1 {
			return s.Fail(own)
		}
		watched, stop := s.Watch(testnet.Context(t))
		defer stop()
		<-watched.Done()
		return s.Fail(context.Cause(watched))
	}) {
		if rank == 1 && err != own {
			t.Errorf("rank 1: got %v, want its own error", err)
		} else if rank != 1 {
			wantFailure(t, sessions[rank], err, own.Error(), 1)
		}
	}
}
