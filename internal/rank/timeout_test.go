package rank

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// The cause of the end of Init by its time limit names the setting.
func TestStartTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := withStartTimeout(t.Context(), 30*time.Second)
		defer cancel()
		<-ctx.Done()
		err := context.Cause(ctx)
		if want := "Init must end within 30s: raise HOROVOD_GLOO_TIMEOUT_SECONDS"; !errors.Is(err,
			context.DeadlineExceeded) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	})
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
