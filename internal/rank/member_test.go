package rank

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/rendezvous"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// A process that was a rank does not wait for ever for the next roster.
func TestRosterThatDoesNotCome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := testnet.Context(t)
		me := elastic.Member{Slot: elastic.Slot{Host: "h"}, Number: 1}
		m := &Membership{me: me, joined: 1, news: make(chan struct{}),
			newest: &elastic.Roster{Generation: 1, Members: []elastic.Member{me}}}
		cfg := config.Config{ElasticTimeout: 2 * time.Second, StartTimeout: time.Second}
		began := time.Now()
		err := new(Rank).startMember(ctx, cfg, &Options{Member: &m, Log: zap.NewNop()})
		if waited := time.Since(began); err == nil || waited != 3*time.Second {
			t.Errorf("got error %v after %v, want one after 3 s", err, waited)
		}
	})
}

// A process that has left an elastic job that goes on as before does not wait for the next roster, but one
// whose training goes on does.
func TestStartAfterShutdown(t *testing.T) {
	ctx := testnet.Context(t)
	me := elastic.Member{Slot: elastic.Slot{Host: "h"}, Number: 1}
	for _, goesOn := range []bool{false, true} {
		m := &Membership{me: me, joined: 1, news: make(chan struct{}),
			newest: &elastic.Roster{Generation: 1, Members: []elastic.Member{me}}}
		e, err := engine.Start(ctx, engine.Config{Size: 1, Mesh: transport.Alone{},
			LivenessTimeout: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		r := &Rank{Engine: e, member: m}
		m.begin(r, m.newest)
		if goesOn {
			m.GoOn()
		}
		if err := r.Shutdown(ctx, engine.Departure{}); err != nil {
			t.Fatal(err)
		}
		cfg := config.Config{ElasticTimeout: time.Millisecond}
		err = new(Rank).startMember(ctx, cfg, &Options{Member: &m, Log: zap.NewNop()})
		if errors.Is(err, errLeft) == goesOn {
			t.Errorf("the training goes on: %t: got error %v", goesOn, err)
		}
	}
}

// A process that is in no roster any more learns it at once, however often it starts.
func TestRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := testnet.Context(t)
		me := elastic.Member{Slot: elastic.Slot{Host: "h"}, Number: 1}
		m := &Membership{me: me, joined: 1, news: make(chan struct{}),
			newest: &elastic.Roster{Generation: 2, Members: []elastic.Member{{Slot: me.Slot, Number: 2}}}}
		cfg := config.Config{ElasticTimeout: time.Second}
		for i := range 2 {
			err := new(Rank).startMember(ctx, cfg, &Options{Member: &m, Log: zap.NewNop()})
			if !errors.Is(err, ErrRemoved) {
				t.Errorf("start %d: got error %v, want %v", i+1, err, ErrRemoved)
			}
		}
	})
}

// A new rank of a job that trains waits for the others without a limit, because they may commit seldom.
func TestNewRankWaits(t *testing.T) {
	cfg := config.Config{StartTimeout: time.Second}
	for _, c := range []struct {
		ranked     bool
		generation uint64
		want       bool
	}{{false, 1, true}, {false, 2, false}, {true, 2, true}} {
		m := &Membership{ranked: c.ranked}
		ctx, stop := m.limit(t.Context(), &cfg, c.generation)
		if _, got := ctx.Deadline(); got != c.want {
			t.Errorf("%+v: got a limit: %t", c, got)
		}
		stop()
	}
}

// If the launcher has changed the ranks by the time at which Init fails because of another rank, the process
// waits for the next ranks. It does not end.
func TestInitFailsBesideANewGeneration(t *testing.T) {
	r := &Rank{member: &Membership{joined: 1, newest: &elastic.Roster{Generation: 2}}}
	if err := r.failed(&rendezvous.FailedError{Ranks: []topo.Rank{0}, Reason: "x"}); !isOfOthers(err) {
		t.Errorf("got error %v, want one after which the process joins the next ranks", err)
	}
}

// If rank 0 knows the next ranks earlier than this process, it gives up, and this process joins the next
// ranks.
func TestRankZeroGivesUpForANewGeneration(t *testing.T) {
	meeting := &bootstrap.Meeting{Settings: config.Config{Rank: 1, Size: 3}}
	r := &Rank{member: &Membership{joined: 1}, meeting: meeting}
	err := r.failed(fmt.Errorf("join: %w", &rendezvous.RefusedError{Reason: rendezvous.GaveUp,
		Text: "rank 0 gave up: waiting for rank 2: context canceled"}))
	if !isOfOthers(err) {
		t.Errorf("got error %v, want one after which the process joins the next ranks", err)
	}
}

// A member knows whether its rank has the results of operations that have completed.
func TestCompletesAsync(t *testing.T) {
	for _, async := range []bool{true, false} {
		m := new(Membership)
		m.begin(&Rank{AsyncCompletion: async}, &elastic.Roster{Generation: 1})
		if got := m.CompletesAsync(); got != async {
			t.Errorf("got %t, want %t", got, async)
		}
	}
}

// A SIGTERM that arrives just before the notices end has its usual effect. The program's handler gets it both
// times.
func TestLateSIGTERM(t *testing.T) {
	t.Setenv("HVD_MEMBER", "h:0/1")
	own := make(chan os.Signal, 2)
	signal.Notify(own, unix.SIGTERM)
	defer signal.Stop(own)
	limit := time.After(time.Minute)
	for i := range 1000 {
		stop := LeaveOnSIGTERM()
		if err := unix.Kill(os.Getpid(), unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
		<-own
		stop()
		select {
		case <-own:
		case <-limit:
			t.Fatalf("the signal is lost the time %d", i+1)
		}
	}
}
