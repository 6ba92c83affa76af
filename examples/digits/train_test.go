package main

import (
	"context"
	"io"
	"math"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/examples/optdigits"
	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/store"
)

// trainOn trains on n ranks, all in this process. It returns the model and the accuracy of each rank.
func trainOn(t *testing.T, n int, o options) ([]*model, []float64) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	models, accuracies := make([]*model, n), make([]float64, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() {
			e, err := hvd.New(ctx, hvd.WithStore(kv),
				hvd.WithSetting("HOROVOD_RANK", strconv.Itoa(r)),
				hvd.WithSetting("HOROVOD_SIZE", strconv.Itoa(n)))
			if err != nil {
				t.Errorf("rank %d: %v", r, err)
				return
			}
			if models[r], accuracies[r], err = train(ctx, e, o, io.Discard); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
			if err := e.Shutdown(ctx); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return models, accuracies
}

// TestSameWeightsOnAnyNumberOfRanks trains with the same global batch on 1, 2 and 4 ranks. The weights must
// agree to 1e-4 of their norm. The weights of the ranks of one job must be equal bit by bit.
func TestSameWeightsOnAnyNumberOfRanks(t *testing.T) {
	o := defaults()
	alone, accuracy := trainOn(t, 1, o)
	if accuracy[0] < 0.95 {
		t.Errorf("accuracy is %v, want at least 0.95", accuracy[0])
	}
	for _, n := range []int{2, 4} {
		models, accuracies := trainOn(t, n, o)
		for r, m := range models {
			if m.hash() != models[0].hash() {
				t.Errorf("%d ranks: rank %d has other weights than rank 0", n, r)
			}
			if accuracies[r] != accuracies[0] || accuracies[r] < 0.95 {
				t.Errorf("%d ranks: rank %d has accuracy %v, rank 0 %v, want at least 0.95", n, r,
					accuracies[r], accuracies[0])
			}
		}
		var difference, norm float64
		for i, p := range alone[0].parameters() {
			for j, v := range p.values {
				d := float64(v - models[0].parameters()[i].values[j])
				difference += d * d
				norm += float64(v) * float64(v)
			}
		}
		relative := math.Sqrt(difference / norm)
		t.Logf("%d ranks: relative difference to one rank is %.2g", n, relative)
		if !(relative < 1e-4) {
			t.Errorf("%d ranks: relative difference to one rank is %v, want less than 1e-4", n, relative)
		}
	}
}

// TestGradient checks that the gradient agrees with finite differences of the loss.
func TestGradient(t *testing.T) {
	images, _, err := optdigits.Load(1)
	if err != nil {
		t.Fatal(err)
	}
	m, g := newModel(), newModel()
	m.initialize(3)
	img := &images[0]
	m.gradient(img, 1, g)
	for i, p := range m.parameters() {
		for _, j := range []int{0, len(p.values) / 2, len(p.values) - 1} {
			const h = 1e-2
			kept := p.values[j]
			p.values[j] = kept + h
			up := m.gradient(img, 0, newModel())
			p.values[j] = kept - h
			down := m.gradient(img, 0, newModel())
			p.values[j] = kept
			want, got := (up-down)/(2*h), float64(g.parameters()[i].values[j])
			if math.Abs(got-want) > 1e-3+0.02*math.Abs(want) {
				t.Errorf("%s[%d]: gradient %v, finite difference %v", p.name, j, got, want)
			}
		}
	}
}

// TestProgressIsALinePerEpoch checks that rank 0 writes one line of progress for each epoch.
func TestProgressIsALinePerEpoch(t *testing.T) {
	ctx := t.Context()
	e, err := hvd.New(ctx)
	if err != nil {
		t.Fatal(err)
	}
	o := defaults()
	o.epochs = 2
	var out strings.Builder
	if _, _, err := train(ctx, e, o, &out); err != nil {
		t.Fatal(err)
	}
	if err := e.Shutdown(ctx); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 2 || !strings.HasPrefix(lines[0], "epoch 1/2: loss=") ||
		!strings.HasPrefix(lines[1], "epoch 2/2: loss=") {
		t.Errorf("got %q", lines)
	}
}
