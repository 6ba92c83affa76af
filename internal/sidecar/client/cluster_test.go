package client_test

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/sidecar"
	"github.com/gohvd/gohvd/secret"
	"github.com/gohvd/gohvd/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// deadline against hanging, of one test.
const deadline = 60 * time.Second

// served is a sidecar in this process, which listens at a path.
type served struct {
	*sidecar.Server
	path string
}

// serve serves s until the test ends.
func serve(t testing.TB, cfg sidecar.Config) *served {
	s := &served{Server: sidecar.New(cfg), path: filepath.Join(t.TempDir(), "s")}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: s.path})
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				return
			}
			serving.Go(func() { _ = s.ServeConn(conn, true) }) // its client says what matters
		}
	})
	over := make(chan struct{})
	serving.Go(func() {
		select {
		case <-s.Dead(): // then hvdd ends
		case <-over:
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // what is left of a job is left in disorder
		_ = s.Close(ctx)
	})
	t.Cleanup(func() {
		close(over)
		l.Close()
		serving.Wait()
	})
	return s
}

// sidecars are n of them that are ranks of one job. settings come as name, value, name, value, ...
func sidecars(t testing.TB, n int, settings ...string) []*served {
	kv := store.NewHashStore(store.Limits{})
	t.Cleanup(func() { kv.Close() })
	all := make([]*served, n)
	for r := range all {
		all[r] = serve(t, sidecar.Config{Options: append(place(kv, r, n), with(settings...)...), Version: "test"})
	}
	return all
}

// place are the options of rank r of n.
func place(kv store.Store, r, n int) []hvd.InitOption {
	return append(with("HOROVOD_RANK", strconv.Itoa(r), "HOROVOD_SIZE", strconv.Itoa(n), "HOROVOD_HOSTNAME", "test"),
		hvd.WithStore(kv), hvd.WithLogger(zap.NewNop()))
}

// with are options that set settings.
func with(settings ...string) (opts []hvd.InitOption) {
	for i := 0; i < len(settings); i += 2 {
		opts = append(opts, hvd.WithSetting(settings[i], settings[i+1]))
	}
	return opts
}

// over joins a job over a sidecar.
func over(ctx context.Context, s *served, opts ...hvd.InitOption) (*hvd.Engine, error) {
	return hvd.New(ctx, append(append(with("HVD_SIDECAR", "unix://"+s.path), hvd.WithLogger(zap.NewNop())), opts...)...)
}

// way is how ranks run: in process, or over sidecars.
type way struct {
	name string
	over bool
}

var ways = []way{{"in process", false}, {"over sidecars", true}}

// run starts n ranks, calls f once for each, and shuts down.
func (w way) run(t *testing.T, n int, f func(ctx context.Context, t *testing.T, e *hvd.Engine), opts ...hvd.InitOption) {
	t.Helper()
	w.start(t, n, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		f(ctx, t, e)
		if err := hvd.Barrier(ctx, hvd.Name("end of the test"), hvd.On(e)); err != nil {
			t.Errorf("rank %d: barrier at the end: %v", e.Rank(), err)
		}
		if err := e.Shutdown(ctx); err != nil {
			t.Errorf("rank %d: shutdown: %v", e.Rank(), err)
		}
	}, opts...)
}

// start is run for ranks that shut down by themselves.
func (w way) start(t *testing.T, n int, f func(ctx context.Context, t *testing.T, e *hvd.Engine), opts ...hvd.InitOption) {
	t.Helper()
	ctx := patience(t)
	var all []*served
	kv := store.NewHashStore(store.Limits{})
	t.Cleanup(func() { kv.Close() })
	if w.over {
		all = sidecars(t, n)
	}
	ranks(n, func(r int) {
		var (
			e   *hvd.Engine
			err error
		)
		if w.over {
			e, err = over(ctx, all[r], opts...)
		} else {
			e, err = hvd.New(ctx, append(place(kv, r, n), opts...)...)
		}
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
			return
		}
		f(ctx, t, e)
	})
}

// patience is a context that shows where everybody is when it ends.
func patience(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	stop := context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			stacks := make([]byte, 1<<20)
			t.Logf("no end after %v:\n%s", deadline, stacks[:runtime.Stack(stacks, true)])
		}
	})
	t.Cleanup(func() { stop(); cancel() })
	return ctx
}

// ranks calls f for each of n ranks at once and waits for all.
func ranks(n int, f func(r int)) {
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() { f(r) })
	}
	wg.Wait()
}

// newSecret is one, and its text.
func newSecret(t testing.TB, text string) secret.Secret {
	s, err := secret.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
