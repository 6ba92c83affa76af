package hvd_test

import (
	"context"
	"fmt"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/rendezvous"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// deadline against hanging, of one test's collective part.
const deadline = 60 * time.Second

// run starts n ranks that meet in a store of their own, over TCP on loopback, and calls f once for each. It shuts
// down at every rank when f has returned everywhere. settings come as name, value, name, value, ...
func run(t *testing.T, n int, f func(ctx context.Context, e *hvd.Engine), settings ...string) {
	t.Helper()
	store := rendezvous.NewHashStore(rendezvous.Limits{})
	defer store.Close()
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		if t.Context().Err() == nil {
			stacks := make([]byte, 1<<20)
			t.Logf("no end after %v:\n%s", deadline, stacks[:runtime.Stack(stacks, true)])
		}
	})
	defer stop()
	ranks(n, func(r int) {
		e, err := hvd.New(ctx, place(store, r, n, settings...)...)
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
			return
		}
		f(ctx, e)
		if err := e.Shutdown(ctx); err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	})
}

// ranks calls f for each of n ranks at once and waits for all.
func ranks(n int, f func(r int)) {
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() { f(r) })
	}
	wg.Wait()
}

// place are the options of rank r of n.
func place(store rendezvous.Store, r, n int, settings ...string) []hvd.InitOption {
	opts := []hvd.InitOption{
		hvd.WithStore(store),
		hvd.WithSetting("HOROVOD_RANK", strconv.Itoa(r)), hvd.WithSetting("HOROVOD_SIZE", strconv.Itoa(n)),
		hvd.WithSetting("HOROVOD_HOSTNAME", "test"),
	}
	for i := 0; i < len(settings); i += 2 {
		opts = append(opts, hvd.WithSetting(settings[i], settings[i+1]))
	}
	return opts
}

// modes runs a test under both negotiations.
func modes(t *testing.T, f func(t *testing.T, mode []string)) {
	for _, m := range []string{"event", "lockstep"} {
		t.Run(m, func(t *testing.T) { f(t, []string{"HVD_NEGOTIATION", m}) })
	}
}

// sizes are the numbers of ranks that belong in every table.
var sizes = []int{1, 2, 3, 4, 8}

func name(format string, args ...any) hvd.Option { return hvd.Name(fmt.Sprintf(format, args...)) }
