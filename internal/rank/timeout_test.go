package rank

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/config"
)

// An error after the time limit of Init names the setting, once, and says if the host has more ranks than
// cores.
func TestStartTimeout(t *testing.T) {
	cores := onlineCores()
	if cores < runtime.NumCPU() {
		t.Fatalf("the host has %d cores, and this process may run on %d", cores, runtime.NumCPU())
	}
	for _, ranks := range []int{config.Unset, cores, cores + 1} {
		synctest.Test(t, func(t *testing.T) {
			cfg := &config.Config{StartTimeout: 30 * time.Second, LocalSize: ranks}
			ctx, cancel := withStartTimeout(t.Context(), cfg)
			defer cancel()
			<-ctx.Done()
			err := explainTimeout(ctx, fmt.Errorf("waiting for rank 1: %w", ctx.Err()))
			want := "waiting for rank 1: context deadline exceeded: Init must end within 30s: raise HOROVOD_GLOO_TIMEOUT_SECONDS (hvdrun --start-timeout) if ranks start late"
			if ranks > cores {
				want += fmt.Sprintf(", as they may with %d ranks on the %d cores of this host", ranks, cores)
			}
			if !errors.Is(err, context.DeadlineExceeded) || err.Error() != want {
				t.Errorf("%d ranks: got %v, want %q", ranks, err, want)
			}
			for _, other := range []error{errors.New("another error"), context.Cause(ctx)} {
				if got := explainTimeout(ctx, other); got != other {
					t.Errorf("got %v, want %v", got, other)
				}
			}
		})
	}
}

func TestTimeoutOf(t *testing.T) {
	for _, d := range []time.Duration{0, 1, time.Second, 9e18} {
		if got, err := TimeoutOf(d.Seconds()); got != d || err != nil {
			t.Errorf("%v: got %v and error %v", d, got, err)
		}
	}
	for _, s := range []float64{-1, 1e-10, 1e10, math.Inf(1), math.NaN()} {
		if got, err := TimeoutOf(s); err == nil {
			t.Errorf("%v s: got %v, want an error", s, got)
		}
	}
}
