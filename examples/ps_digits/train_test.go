package main

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/examples/optdigits"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/ps"
)

// TestTraining trains with 1 worker and with 3, all in this process. The result must recognise 94% of the
// test images. With 3 workers, the order of their steps is different in each run, so 90% is enough.
func TestTraining(t *testing.T) {
	for workers, least := range map[int]float64{1: 0.94, 3: 0.90} {
		const servers = 2
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		port := strconv.Itoa(testnet.FreePort(t))
		var out strings.Builder // only one worker writes
		var wg sync.WaitGroup
		for _, role := range slices.Concat([]string{"scheduler"}, slices.Repeat([]string{"server"}, servers),
			slices.Repeat([]string{"worker"}, workers)) {
			wg.Go(func() {
				job := ps.Config{Logger: slog.New(slog.DiscardHandler), Settings: map[string]string{"DMLC_ROLE": role,
					"DMLC_NUM_SERVER": strconv.Itoa(servers), "DMLC_NUM_WORKER": strconv.Itoa(workers),
					"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": port,
					"PS_HEARTBEAT_TIMEOUT": "60", "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}}
				if err := run(ctx, job, defaults(), &out); err != nil {
					t.Errorf("%s: %v", role, err)
				}
			})
		}
		wg.Wait()
		var accuracy, seconds float64
		format := fmt.Sprintf("ps_digits: servers=%d workers=%d epochs=%d test_accuracy=%%g seconds=%%g\n",
			servers, workers, defaults().epochs)
		if _, err := fmt.Sscanf(out.String(), format, &accuracy, &seconds); err != nil || accuracy < least {
			t.Errorf("%d workers: got %q (%v), want an accuracy of at least %g", workers, &out, err, least)
		}
		t.Log(out.String())
	}
}

// TestGradient checks that the gradient agrees with finite differences of the loss, and that the features of
// a batch leave out some pixels.
func TestGradient(t *testing.T) {
	images, _, err := optdigits.Load(1)
	if err != nil {
		t.Fatal(err)
	}
	batch := images[:5]
	used := featuresOf(batch)
	if len(used) < 30 || len(used) == features || used[len(used)-1] != optdigits.Pixels {
		t.Errorf("the batch has the features %v", used)
	}
	weights := make([]float32, len(used)*classes)
	for i := range weights {
		weights[i] = float32(math.Sin(float64(i)))
	}
	loss := func() (sum float64) {
		for i := range batch {
			p := probabilities(&batch[i], used, weights)
			sum -= math.Log(p[batch[i].Digit])
		}
		return sum / float64(len(batch))
	}
	g := gradient(batch, used, weights)
	for _, i := range []int{0, len(weights) / 2, len(weights) - 1} {
		const h = 1e-2
		kept := weights[i]
		weights[i] = kept + h
		up := loss()
		weights[i] = kept - h
		down := loss()
		weights[i] = kept
		if want, got := (up-down)/(2*h), float64(g[i]); math.Abs(got-want) > 1e-3+0.02*math.Abs(want) {
			t.Errorf("weight %d: gradient %v, finite difference %v", i, got, want)
		}
	}
}
