package hvd_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"testing"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// onLoopback makes NewUniqueID listen only on loopback.
var onLoopback = hvd.WithSetting("HOROVOD_GLOO_IFACE", "127.0.0.1")

func newID(t testing.TB) hvd.UniqueID {
	t.Helper()
	// Ending the context stops the server of the id, so that its goroutine does not outlive the test.
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	id, err := hvd.NewUniqueID(ctx, onLoopback)
	if err != nil {
		t.Fatal(err)
	}
	text := id.String()
	again, err := hvd.ParseUniqueID(" " + text + "\n")
	if err != nil || again != id {
		t.Fatalf("parsing the text of an id: got another id or an error: %v", err)
	}
	return id
}

// startByID starts n ranks that know only a unique ID and their rank.
func startByID(ctx context.Context, t testing.TB, id hvd.UniqueID, n int,
	more ...hvd.InitOption) ([]*hvd.Engine, []error) {
	engines, errs := make([]*hvd.Engine, n), make([]error, n)
	ranks(t, n, func(r int) {
		engines[r], errs[r] = hvd.New(ctx,
			append([]hvd.InitOption{hvd.WithID(r, n, id), hvd.WithSetting("HVD_HOSTID", "one")}, more...)...)
	})
	return engines, errs
}

// stop shuts down the engines that are not nil.
func stop(ctx context.Context, t testing.TB, engines []*hvd.Engine) error {
	errs := make([]error, len(engines))
	ranks(t, len(engines), func(r int) {
		if engines[r] != nil {
			errs[r] = engines[r].Shutdown(ctx)
		}
	})
	return errors.Join(errs...)
}

// TestInitWithID checks that InitWithID makes this process rank 0 of 1, that ParseUniqueID refuses a text
// that is not an id, and that NewUniqueID refuses an interface that does not exist.
func TestInitWithID(t *testing.T) {
	ctx := testnet.Context(t)
	id := newID(t)
	if err := hvd.InitWithID(ctx, id, 0, 1); err != nil {
		t.Fatal(err)
	}
	if hvd.Rank() != 0 || hvd.Size() != 1 {
		t.Errorf("got rank %d of %d", hvd.Rank(), hvd.Size())
	}
	noError(t, hvd.Shutdown(ctx))
	if _, err := hvd.ParseUniqueID("no id"); err == nil {
		t.Error("nonsense was taken for an id")
	}
	_, err := hvd.NewUniqueID(ctx, hvd.WithSetting("HOROVOD_GLOO_IFACE", "no-such-if"))
	testnet.WantError(t, err, "no-such-if")
}

// TestDeviceOfTwo checks that Init fails at all ranks of a host if they name the same device. If all of them
// pass true for share, Init must succeed.
func TestDeviceOfTwo(t *testing.T) {
	ctx := testnet.Context(t)
	_, errs := startByID(ctx, t, newID(t), 3, hvd.WithDevice("GPU-1234", false))
	for _, err := range errs {
		testnet.WantError(t, err, "GPU-1234")
	}
	engines, errs := startByID(ctx, t, newID(t), 3, hvd.WithDevice("GPU-1234", true))
	if err := errors.Join(append(errs, stop(ctx, t, engines))...); err != nil {
		t.Errorf("shared: %v", err)
	}
}

// TestInitMethod checks that two ranks can meet by a file URL, and that a URL with an unknown scheme is
// refused.
func TestInitMethod(t *testing.T) {
	ctx := testnet.Context(t)
	path := t.TempDir() + "/meet"
	meetTwo(ctx, t, func(r int) []hvd.InitOption {
		return []hvd.InitOption{hvd.WithInitMethod(fmt.Sprintf("file://%s?rank=%d&world_size=2", path, r))}
	})
	_, err := hvd.New(ctx, hvd.WithInitMethod("zk://here"))
	testnet.WantError(t, err, "no handler")
}

// meetTwo starts two ranks with the given options. They reduce a tensor and shut down.
func meetTwo(ctx context.Context, t *testing.T, opts func(r int) []hvd.InitOption) {
	t.Helper()
	ranks(t, 2, func(r int) {
		e := must(hvd.New(ctx, opts(r)...))
		sum, err := hvd.Allreduce(ctx, []int64{1}, hvd.Op(hvd.Sum), hvd.On(e))
		if err != nil || sum[0] != 2 {
			t.Errorf("rank %d: got %v, %v", r, sum, err)
		}
		noError(t, e.Shutdown(ctx))
	})
}

// TestInitScheme checks that ranks can meet by an init method that the program has registered, and that an
// error of that method is reported.
func TestInitScheme(t *testing.T) {
	ctx := testnet.Context(t)
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	meetTwo(ctx, t, func(r int) []hvd.InitOption {
		own := hvd.WithInitScheme("own", func(_ context.Context, u *url.URL) (store.Store, int, int, error) {
			if u.Host != "here" || u.Query().Get("rank") != strconv.Itoa(r) ||
				u.Query().Get("world_size") != "2" {
				return nil, 0, 0, fmt.Errorf("got %v", u)
			}
			return store.NewPrefixStore("job", kv), r, 2, nil
		})
		return []hvd.InitOption{own, hvd.WithSetting("HVD_INIT_METHOD", "own://here"),
			hvd.WithSetting("HOROVOD_RANK", strconv.Itoa(r)), hvd.WithSetting("HOROVOD_SIZE", "2")}
	})
	broken := hvd.WithInitScheme("own", func(context.Context, *url.URL) (store.Store, int, int, error) {
		return nil, 0, 0, errors.New("no store")
	})
	_, err := hvd.New(ctx, broken, hvd.WithInitMethod("own://here"))
	testnet.WantError(t, err, "init method own://: no store")
}

// BenchmarkInitWithID measures how long it takes until all ranks, in one process, have met by a unique ID and
// are ready for operations.
func BenchmarkInitWithID(b *testing.B) {
	for _, n := range []int{8, 64} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			for b.Loop() {
				id := newID(b)
				engines, errs := startByID(b.Context(), b, id, n,
					hvd.WithSetting("HOROVOD_CPU_OPERATIONS", "tcp"))
				if err := errors.Join(errs...); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				if err := stop(context.Background(), b, engines); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}
