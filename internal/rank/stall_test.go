package rank

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/joblink"
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

// A verdict is delayed once, not twice, if the launcher can receive neither the verdict nor the dump.
func TestVerdictWithoutLauncher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewWatch(WatchConfig{
			Settings: &config.Config{FlightRecorder: true}, Size: 2, Launcher: unreachable{},
			Sets: func() map[topo.ProcessSetID][]topo.Rank { return nil }, Log: zap.NewNop(),
		})
		var e engine.Config
		r.Configure(&e)
		began := time.Now()
		e.OnVerdict(&engine.PeerError{Ranks: []int{0}, Reason: "silent"})
		if took := time.Since(began); took != reportTimeout {
			t.Errorf("the verdict was delayed by %v, want %v", took, reportTimeout)
		}
		r.cancel()
		r.running.Wait()
	})
}
