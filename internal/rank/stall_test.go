package rank

import (
	"testing"
	"testing/synctest"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/joblink"
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
