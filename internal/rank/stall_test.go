package rank

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/store"
)

// StallsExplained returns true only if a launcher listens on the store, because the reports about stalls come
// from a launcher.
func TestStallsAreExplainedByAWatcher(t *testing.T) {
	for _, watched := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			kv := store.NewHashStore(store.Limits{})
			defer kv.Close()
			if watched {
				launcher, err := joblink.Listen(kv, 1, func(int, string, []byte) {})
				if err != nil {
					t.Fatal(err)
				}
				defer launcher.Close()
			}
			r := NewWatch(WatchConfig{Settings: &config.Config{}, Launcher: joblink.New(kv, 0),
				Log: zap.NewNop()})
			var e engine.Config
			r.Configure(&e)
			r.running.Go(r.forwardStalls)
			synctest.Wait()
			if got := e.StallsExplained(); got != watched {
				t.Errorf("a launcher listens: %v: StallsExplained returned %v", watched, got)
			}
			r.cancel()
			r.running.Wait()
		})
	}
}

// unreachable is the link to a launcher on a host that this rank cannot reach.
type unreachable struct{ joblink.Link }

func (unreachable) ReportVerdict(ctx context.Context, _ joblink.Verdict) error {
	<-ctx.Done()
	return ctx.Err()
}

func (unreachable) Report(ctx context.Context, _ string, _ []byte) error {
	<-ctx.Done()
	return ctx.Err()
}

// A verdict is delayed once, not twice, if the launcher can receive neither the verdict nor the dump. Without
// a launcher it is not delayed. In both cases the rank's own log says what the rank did.
func TestVerdictWithoutLauncher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		verdictWith(t, unreachable{}, verdictTimeout, 1)
		verdictWith(t, nil, 0, 1)
	})
}

// slow is the link to a launcher that takes most of the time limits to receive a verdict and a report.
type slow struct {
	joblink.Link
	verdicts, reports *atomic.Int32
}

func (l slow) ReportVerdict(ctx context.Context, _ joblink.Verdict) error {
	return receive(ctx, verdictTimeout, l.verdicts)
}

func (l slow) Report(ctx context.Context, _ string, _ []byte) error {
	return receive(ctx, reportTimeout, l.reports)
}

func receive(ctx context.Context, limit time.Duration, received *atomic.Int32) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(limit * 9 / 10):
		received.Add(1)
		return nil
	}
}

// A slow launcher receives both the verdict and the dump, so the rank's log does not repeat what is in them.
func TestVerdictWithSlowLauncher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := slow{verdicts: new(atomic.Int32), reports: new(atomic.Int32)}
		verdictWith(t, l, verdictTimeout*9/10, 0)
		if v, r := l.verdicts.Load(), l.reports.Load(); v != 1 || r != 1 {
			t.Errorf("the launcher received %d verdicts and %d dumps, want one of each", v, r)
		}
	})
}

// verdictWith gives a verdict at a rank whose link to the launcher is l. It checks for how long this delays
// the end of the operations, and how often the rank logs what it did.
func verdictWith(t *testing.T, l joblink.Link, delay time.Duration, logged int) {
	t.Helper()
	log, entries := testnet.Logs()
	r := NewWatch(WatchConfig{
		Settings: &config.Config{FlightRecorder: true}, Size: 2, Launcher: l,
		Sets: func() map[topo.ProcessSetID][]topo.Rank { return nil }, Log: log,
	})
	var e engine.Config
	r.Configure(&e)
	began := time.Now()
	e.OnVerdict(&engine.PeerError{Ranks: []int{0}, Reason: "silent"})
	if took := time.Since(began); took != delay {
		t.Errorf("the verdict was delayed by %v, want %v", took, delay)
	}
	if n := entries.FilterMessage("what this rank did when the job failed").Len(); n != logged {
		t.Errorf("the rank logged what it did %d times, want %d", n, logged)
	}
	r.cancel()
	r.running.Wait()
}
