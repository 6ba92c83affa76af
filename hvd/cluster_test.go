package hvd_test

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(testcuda.M{M: m}) }

// deadline is how long the ranks of a test may take. When it has passed, their context ends and the stacks of
// all goroutines are logged.
const deadline = 5 * time.Minute

// run starts n ranks and calls f once for each of them. The ranks meet in a store that only they use and are
// connected by TCP on loopback. When f has returned at all ranks, run shuts the ranks down. The list settings
// holds the name of a setting, its value, the next name, and so on.
func run(t *testing.T, n int, f func(ctx context.Context, e *hvd.Engine), settings ...string) {
	t.Helper()
	runSets(t, n, nil, f, settings...)
}

// runSets is like run, but the ranks start with the given process sets.
func runSets(t *testing.T, n int, sets [][]int, f func(ctx context.Context, e *hvd.Engine),
	settings ...string) {
	t.Helper()
	engines(t, n, func(ctx context.Context, e *hvd.Engine) {
		f(ctx, e)
		noError(t, hvd.Barrier(ctx, hvd.Name("end of the test"), hvd.On(e)))
		noError(t, e.Shutdown(ctx))
	}, []hvd.InitOption{hvd.WithProcessSets(sets...)}, settings...)
}

// engines is like run, but f must shut down the rank itself. The list opts holds further options, which apply
// to every rank.
func engines(t *testing.T, n int, f func(ctx context.Context, e *hvd.Engine), opts []hvd.InitOption,
	settings ...string) {
	t.Helper()
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		if t.Context().Err() == nil {
			stacks := make([]byte, 1<<20)
			t.Logf("no end after %v:\n%s", deadline, stacks[:runtime.Stack(stacks, true)])
		}
	})
	defer stop()
	ranks(t, n, func(r int) {
		ended := false
		defer func() {
			if !ended {
				cancel() // so that the other ranks do not wait for this one
			}
		}()
		f(ctx, must(hvd.New(ctx, append(place(kv, r, n, settings...), opts...)...)))
		ended = true
	})
}

// failure is what must panics with.
type failure struct{ error }

// must returns the result of a call without which a rank cannot go on. If the call has failed, the rank ends,
// and ranks reports the error.
func must[T any](v T, err error) T {
	if err != nil {
		_, file, line, _ := runtime.Caller(1)
		panic(failure{fmt.Errorf("%s:%d: %w", filepath.Base(file), line, err)})
	}
	return v
}

// noError reports an error of a call.
func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// runModes calls run with two ranks and with three ranks, in both modes of negotiation.
func runModes(t *testing.T, f func(ctx context.Context, t *testing.T, e *hvd.Engine), settings ...string) {
	modes(t, func(t *testing.T, mode []string) {
		for _, size := range []int{2, 3} {
			t.Run(fmt.Sprintf("ranks=%d", size), func(t *testing.T) {
				run(t, size, func(ctx context.Context, e *hvd.Engine) { f(ctx, t, e) },
					slices.Concat(settings, mode)...)
			})
		}
	})
}

// checkUsable checks that an allreduce of the named tensor gives the right result at this member of set.
func checkUsable(ctx context.Context, t *testing.T, set *hvd.ProcessSet, tensor string) {
	t.Helper()
	got, err := hvd.Allreduce(ctx, []int32{1, int32(set.Rank())}, hvd.Op(hvd.Sum), hvd.Name(tensor),
		hvd.Over(set))
	if n := int32(set.Size()); err != nil || !slices.Equal(got, []int32{n, n * (n - 1) / 2}) {
		t.Errorf("member %d of %v: afterwards: allreduce %q of ones and positions: got %v and error %v",
			set.Rank(), set, tensor, got, err)
	}
}

// ranks calls f for the ranks 0 to n-1 concurrently and waits for all calls. It reports the errors with which
// must ends ranks.
func ranks(t testing.TB, n int, f func(r int)) {
	t.Helper()
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() {
			defer func() {
				switch p := recover().(type) {
				case nil:
				case failure:
					t.Errorf("rank %d: %v", r, p.error)
				default:
					panic(p)
				}
			}()
			f(r)
		})
	}
	wg.Wait()
}

// meeting returns a store in which the ranks of a test can meet, and a context that ends at the deadline.
func meeting(t *testing.T) (context.Context, store.Store) {
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	kv := store.NewHashStore(store.Limits{})
	t.Cleanup(func() {
		cancel()
		kv.Close()
	})
	return ctx, kv
}

// place returns the options that make rank r of a job with n ranks meet the other ranks in the store kv. The
// list settings holds the name of a setting, its value, the next name, and so on. By default, the limits are
// longer than usual, because on a busy machine a rank may be silent for longer than 10 s.
func place(kv store.Store, r, n int, settings ...string) []hvd.InitOption {
	opts := []hvd.InitOption{
		hvd.WithStore(kv),
		hvd.WithSetting("HOROVOD_RANK", strconv.Itoa(r)), hvd.WithSetting("HOROVOD_SIZE", strconv.Itoa(n)),
		hvd.WithSetting("HOROVOD_HOSTNAME", "test"), hvd.WithSetting("HVD_LIVENESS_SECONDS", "60"),
		hvd.WithSetting("HOROVOD_GLOO_TIMEOUT_SECONDS", "120"),
	}
	for i := 0; i < len(settings); i += 2 {
		opts = append(opts, hvd.WithSetting(settings[i], settings[i+1]))
	}
	return opts
}

// modes runs f once in each mode of negotiation. It passes the setting that selects the mode to f, as a list
// of name and value.
func modes(t *testing.T, f func(t *testing.T, mode []string)) {
	for _, m := range []string{"event", "lockstep"} {
		t.Run(m, func(t *testing.T) { f(t, []string{"HVD_NEGOTIATION", m}) })
	}
}

// large returns n, or a fifth of it with -short, because the race detector makes it slow to fill and compare
// tensors.
func large(n int) int {
	if testing.Short() {
		return n / 5
	}
	return n
}

func name(format string, args ...any) hvd.NameOption { return hvd.Name(fmt.Sprintf(format, args...)) }

// writesTo returns a logger that writes to core.
func writesTo(core zapcore.Core) *slog.Logger { return slog.New(coreHandler{core}) }

// coreHandler is a slog.Handler over a core of zap.
type coreHandler struct{ core zapcore.Core }

func (h coreHandler) Enabled(_ context.Context, l slog.Level) bool {
	return h.core.Enabled(zapLevel(l))
}

func (h coreHandler) Handle(_ context.Context, r slog.Record) error {
	var fields []zap.Field
	r.Attrs(func(a slog.Attr) bool { fields = append(fields, zap.Any(a.Key, a.Value.Any())); return true })
	return h.core.Write(zapcore.Entry{Level: zapLevel(r.Level), Time: r.Time, Message: r.Message}, fields)
}

func (h coreHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	var fields []zap.Field
	for _, a := range attrs {
		fields = append(fields, zap.Any(a.Key, a.Value.Any()))
	}
	return coreHandler{h.core.With(fields)}
}

func (h coreHandler) WithGroup(string) slog.Handler { return h }

func zapLevel(l slog.Level) zapcore.Level { return zapcore.Level(l / slog.LevelWarn) }

// as converts options to those of an operation. It panics if one does not apply.
func as[O any](options []any) []O {
	all := make([]O, len(options))
	for i, o := range options {
		all[i] = o.(O)
	}
	return all
}
