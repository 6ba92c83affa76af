package observe

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/inquiry"
	"github.com/gohvd/gohvd/store"
)

// The log leaves stalls to the launcher's report only if the launcher listens: a store alone reports nothing.
func TestStallsAreExplainedByAWatcher(t *testing.T) {
	for _, watched := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			kv := store.NewHashStore(store.Limits{})
			defer kv.Close()
			var watching sync.WaitGroup
			defer watching.Wait()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if watched {
				watching.Go(func() {
					if err := inquiry.Watch(ctx, kv, func(int, string, []byte) {}); err != nil {
						t.Error(err)
					}
				})
				synctest.Wait()
			}
			r := New(Config{Settings: &config.Config{}, Launcher: kv, Log: zap.NewNop()})
			var e engine.Config
			r.Configure(&e)
			r.running.Go(r.passStallsOn)
			synctest.Wait()
			if got := e.StallsExplained(); got != watched {
				t.Errorf("watched %v: the stalls are explained: %v", watched, got)
			}
			r.cancel()
			r.running.Wait()
		})
	}
}
