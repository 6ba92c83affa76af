package main

import (
	"context"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/ps"
)

// small returns the settings of a small training.
func small() options {
	o := defaults()
	o.features, o.examples, o.batch, o.epochs = 20_000, 1000, 100, 30
	return o
}

// TestTraining trains in every mode, in this process. run fails if the result is not within 1% of the
// optimum.
func TestTraining(t *testing.T) {
	const servers, workers = 2, 3
	for _, staleness := range []string{"", "0", "2"} {
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
					"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": port, "HVD_STALENESS": staleness,
					"PS_HEARTBEAT_TIMEOUT": "60", "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}}
				if err := run(ctx, job, small(), &out); err != nil {
					t.Errorf("staleness %q: %s: %v", staleness, role, err)
				}
			})
		}
		wg.Wait()
		const want = "sparse_logreg: servers=2 workers=3 features=20000 examples=3000 objective=0.4"
		if !strings.HasPrefix(out.String(), want) {
			t.Errorf("staleness %q: got %q, want %q", staleness, &out, want)
		}
		t.Log(out.String())
	}
}

// TestOptimum checks that the gradient is 0 at the true weights, and that it agrees with finite differences
// elsewhere.
func TestOptimum(t *testing.T) {
	tr := trainer{options: small()}
	b := tr.generate(rand.New(rand.NewPCG(1, 1)), 50)
	weights := make([]float32, len(b.keys))
	for i, key := range b.keys {
		weights[i] = float32(tr.truth(key))
	}
	for i, g := range tr.gradient(&b, weights) {
		if g != 0 {
			t.Fatalf("the gradient of weight %d at the optimum is %v", i, g)
		}
	}
	clear(weights)
	objective := func() (sum float64) {
		for i, y := range b.labels {
			sum += entropy(y, probability(b.used[i*tr.nonzeros:][:tr.nonzeros], weights))
		}
		return sum / float64(len(b.labels))
	}
	for i, g := range tr.gradient(&b, weights)[:100] {
		const h = 1e-2
		weights[i] = h
		up := objective()
		weights[i] = -h
		down := objective()
		weights[i] = 0
		if want := (up - down) / (2 * h); math.Abs(want-float64(g)) > 1e-4 {
			t.Errorf("weight %d: gradient %v, finite difference %v", i, g, want)
		}
	}
}
