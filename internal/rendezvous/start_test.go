package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
)

// meet makes size ranks join and returns their sessions.
func meet(t *testing.T, size int, key secret.Secret) []*Session {
	t.Helper()
	return meetWith(t, size, key, 0)
}

// meetWith is like meet, but also sets how long the root waits after the first report of a failure before it
// decides about the cause. If suspicion is 0, the root waits for 300 ms.
func meetWith(t *testing.T, size int, key secret.Secret, suspicion time.Duration) []*Session {
	t.Helper()
	kv := newStore(t)
	var cfgs []JoinConfig
	var records []Record
	for rank := range size {
		cfg := keyed(kv, rank, size, key)
		cfg.suspicion = suspicion
		cfgs, records = append(cfgs, cfg), append(records, recordOf(rank, 0))
	}
	results := joinAll(t, testnet.Context(t), cfgs...)
	formed(t, results, records...)
	var sessions []*Session
	for _, r := range results {
		sessions = append(sessions, r.Session)
	}
	return sessions
}

// each calls f concurrently for all ranks except the rank in the parameter without. It returns the errors,
// indexed by rank.
func each(sessions []*Session, without int, f func(rank int, s *Session) error) []error {
	errs := make([]error, len(sessions))
	var wg sync.WaitGroup
	for rank, s := range sessions {
		if rank != without {
			wg.Go(func() { errs[rank] = f(rank, s) })
		}
	}
	wg.Wait()
	return errs
}

// wantFailure checks that err is a FailedError that names ranks and whose text contains reason.
func wantFailure(t *testing.T, s *Session, err error, reason string, ranks ...topo.Rank) {
	t.Helper()
	why, ok := errors.AsType[*FailedError](err)
	if !ok || !slices.Equal(why.Ranks, ranks) || why.Epoch != s.Epoch {
		t.Errorf("got %v, want a failure of ranks %v in epoch %d", err, ranks, s.Epoch)
		return
	}
	testnet.WantError(t, err, reason)
}

// Ready returns only when all ranks have called it. If a rank dies later, Watch and Ready report no failure.
func TestReady(t *testing.T) { overBoth(t, testReady) }

func testReady(t *testing.T, key secret.Secret) {
	ctx := testnet.Context(t)
	for last := range 3 {
		sessions := meet(t, 3, key)
		watched, stop := sessions[1].Watch(ctx)
		defer stop()
		early, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		for rank, err := range each(sessions, last, func(_ int, s *Session) error { return s.Ready(early) }) {
			if rank != last && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("without rank %d, rank %d: got %v, want that the context ended", last, rank, err)
			}
		}
		if err := errors.Join(each(sessions, -1, func(_ int, s *Session) error {
			return s.Ready(ctx)
		})...); err != nil {
			t.Error(err)
		}
		sessions[last].Close()
		if err := errors.Join(each(sessions, last, func(_ int, s *Session) error {
			return s.Ready(ctx)
		})...); err != nil || watched.Err() != nil {
			t.Errorf("after rank %d was closed: got %v, %v", last, err, watched.Err())
		}
		failure := errors.New("later")
		if err := sessions[1].Fail(failure, 1); err != failure {
			t.Errorf("got %v, want what was given", err)
		}
	}
}

// If a rank leaves before all ranks are ready, the epoch fails at all ranks. Afterwards no rank leaves.
func TestLeave(t *testing.T) {
	for rank := range 3 {
		ctx := testnet.Context(t)
		sessions := meet(t, 3, secret.Secret{})
		if sessions[rank].Leave("other ranks") {
			t.Errorf("rank %d left, but got that all ranks are ready", rank)
		}
		for _, err := range each(sessions, rank, func(_ int, s *Session) error { return s.Ready(ctx) })[1:] {
			if err != nil {
				wantFailure(t, sessions[1], err, "other ranks", topo.Rank(rank))
			}
		}

		sessions = meet(t, 3, secret.Secret{})
		left := each(sessions, -1, func(r int, s *Session) error {
			err := s.Ready(ctx)
			if r == rank && !s.Leave("other ranks") {
				err = errors.Join(err, errors.New("it has left"))
			}
			return err
		})
		if err := errors.Join(left...); err != nil {
			t.Errorf("rank %d leaves when all are ready: %v", rank, err)
		}
	}
}

// If a rank dies before all ranks are ready, the errors of all other ranks name the dead rank, even if a rank
// has reported other suspects.
func TestDeathBeforeReady(t *testing.T) { overBoth(t, testDeathBeforeReady) }

func testDeathBeforeReady(t *testing.T, key secret.Secret) {
	ctx := testnet.Context(t)
	for dead := range 3 {
		sessions := meet(t, 3, key)
		if m := sessions[dead].member; m != nil {
			m.conn.Close()
		} else {
			sessions[0].root.kill()
		}
		for rank, err := range each(sessions, dead, func(rank int, s *Session) error {
			watched, stop := s.Watch(ctx)
			defer stop()
			if rank == 1 {
				return s.Fail(io.EOF, topo.Rank(rank), topo.Rank((dead+1)%3))
			}
			<-watched.Done()
			return s.Fail(context.Cause(watched))
		}) {
			if rank == dead {
				continue
			}
			wantFailure(t, sessions[rank], err, "the process closed its connection during Init", topo.Rank(dead))
		}
	}
}

// kill closes the root's connections, as the kernel does if the process of rank 0 ends.
func (r *root) kill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for g := range r.callers {
		g.conn.Close()
	}
}

// If a rank reports a failure and suspects itself, the errors of the other ranks name this rank. If it
// suspects other ranks, the errors name the suspects, but only those that hang if any of them does. If it
// suspects none, the errors name the ranks that hang: they are not ready and report nothing.
func TestFailure(t *testing.T) {
	own := fmt.Errorf("accept: %w", syscall.EMFILE)
	peer := errors.New("no connection")
	for _, test := range []struct {
		name   string
		fails  map[int][]topo.Rank // maps each rank that reports a failure to the ranks that it suspects
		ready  []int
		ranks  []topo.Rank
		reason string
	}{
		{"itself", map[int][]topo.Rank{2: {2}}, []int{1}, []topo.Rank{2}, "accept: too many open files"},
		{"itself, rank 0", map[int][]topo.Rank{0: {0}}, nil, []topo.Rank{0}, "accept: too many open files"},
		{"itself, and another complains", map[int][]topo.Rank{1: {1, 2}, 2: {2}}, nil, []topo.Rank{2},
			"accept: too many open files"},
		{"one of two", map[int][]topo.Rank{1: {1, 2}, 2: {1, 2}}, nil, []topo.Rank{1, 2}, "no connection"},
		{"one of two hangs", map[int][]topo.Rank{1: {1, 2}}, []int{0}, []topo.Rank{2},
			"not ready when rank 1 gave up: no connection"},
		{"one rank reports nothing", map[int][]topo.Rank{0: nil, 1: nil, 3: nil}, nil, []topo.Rank{2},
			"not ready when rank"},
		{"another one is ready", map[int][]topo.Rank{0: nil}, []int{1, 3}, []topo.Rank{2},
			"not ready when rank 0 gave up: no connection"},
		{"nobody else", map[int][]topo.Rank{3: nil}, []int{0, 1, 2}, []topo.Rank{3}, "no connection"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			ctx := testnet.Context(t)
			// The root waits until the test makes it decide.
			sessions := meetWith(t, 4, secret.Secret{}, time.Hour)
			errs := make(chan []error, 1)
			go func() {
				errs <- each(sessions, -1, func(rank int, s *Session) error {
					suspects, fails := test.fails[rank]
					switch {
					case fails && len(suspects) == 1:
						return s.Fail(own, suspects...)
					case fails:
						return s.Fail(peer, suspects...)
					case slices.Contains(test.ready, rank):
						return s.Ready(ctx)
					}
					<-s.member.start.done // this rank hangs until the end of the test
					return s.Fail(context.Canceled)
				})
			}()
			sessions[0].root.decideAfter(t, len(test.fails), len(test.ready))
			for rank, err := range <-errs {
				if len(test.ranks) == 1 && int(test.ranks[0]) == rank && (err == own || err == peer) {
					// This rank is the only cause, so it gets its own error.
					continue
				}
				wantFailure(t, sessions[rank], err, test.reason, test.ranks...)
			}
		})
	}
}

// decideAfter makes the root decide about the cause of the failure when the given numbers of ranks have
// reported a failure and are ready.
func (r *root) decideAfter(t *testing.T, reports, ready int) {
	testnet.Eventually(t, "all ranks have reported", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.reports) < reports || len(r.ready) < ready {
			return false
		}
		r.conclude(r.judge())
		return true
	})
}

// If the context of a rank ends in Join while other ranks are missing, the error of this rank names the
// missing ranks, but not the rank itself.
func TestMissingRanksAreNamed(t *testing.T) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	log, entries := testnet.Logs()
	zero := config(kv, 0, 5)
	zero.Log = log
	long, end := context.WithCancel(ctx)
	r := start(t, long, zero)
	short, cancel := context.WithCancel(ctx)
	one, three := start(t, short, config(kv, 1, 5)), start(t, short, config(kv, 3, 5))
	for _, rank := range []string{"peer:1", "peer:3"} {
		testnet.Eventually(t, rank, func() bool { return testnet.Logged(entries, "rank has joined", rank) })
	}
	cancel()
	for _, early := range []<-chan result{one, three} {
		err := (<-early).err
		testnet.WantError(t, err, "waiting for ranks 2 and 4: context canceled")
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v does not wrap its cause", err)
		}
	}
	end()
	testnet.WantError(t, (<-r).err, "waiting for ranks 2 and 4: context canceled")

	// If rank 1 leaves and all other ranks join later, the error of rank 0 names rank 1 as missing.
	long, end = context.WithCancel(ctx)
	kv = newStore(t)
	zero.Store = kv
	zero.Log, entries = testnet.Logs()
	r = start(t, long, zero)
	short, cancel = context.WithCancel(ctx)
	one = start(t, short, config(kv, 1, 5))
	testnet.Eventually(t, "rank 1", func() bool {
		return testnet.Logged(entries, "rank has joined", "peer:1", "missing:3")
	})
	cancel()
	<-one
	for rank := 2; rank < 5; rank++ {
		start(t, ctx, config(kv, rank, 5))
	}
	testnet.Eventually(t, "the others", func() bool {
		return testnet.Logged(entries, "rank has joined", "missing:1")
	})
	end()
	testnet.WantError(t, (<-r).err, "waiting for rank 1 to come back: context canceled")
}
