package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/gohvd/gohvd/examples/optdigits"
	"github.com/gohvd/gohvd/hvd"
)

// options holds the settings of a training.
type options struct {
	epochs int
	batch  int // number of images in a step, over all ranks
	rate   float64
	seed   uint64
	// slowRank is the rank that is slowed down for demonstration, or -1 if no rank is. This rank waits in
	// each step for the duration in the field slow.
	slowRank int
	slow     time.Duration
}

func defaults() options {
	return options{epochs: 20, batch: 64, rate: 0.1, seed: 1, slowRank: -1, slow: 5 * time.Millisecond}
}

// momentum is the momentum in the stochastic gradient descent.
const momentum = 0.9

// train trains a model together with the other ranks of the job. It returns the model and its accuracy on the
// test images. Rank 0 writes one line for each epoch to the writer progress.
func train(ctx context.Context, on *hvd.Engine, o options, progress io.Writer) (*model, float64, error) {
	trainSet, testSet, err := optdigits.Load(o.seed)
	if err != nil {
		return nil, 0, err
	}
	rank, size := on.Rank(), on.Size()
	m, g, velocity := newModel(), newModel(), newModel()
	// Each rank draws different weights. Then all ranks replace their weights by the weights of rank 0. A
	// program does the same if it starts from a checkpoint that only one rank can read.
	m.initialize(o.seed + uint64(rank))
	for _, p := range m.parameters() {
		if _, err := hvd.Broadcast(ctx, p.values, 0, hvd.InPlace(), hvd.Name("weight/"+p.name),
			hvd.On(on)); err != nil {
			return nil, 0, err
		}
	}
	order := make([]int, len(trainSet))
	for i := range order {
		order[i] = i
	}
	rng := rand.New(rand.NewPCG(o.seed, 2))
	for epoch := range o.epochs {
		began := time.Now()
		rng.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		var loss float64
		for batch := range slices.Chunk(order, o.batch) {
			for _, p := range g.parameters() {
				clear(p.values)
			}
			for i := rank; i < len(batch); i += size {
				loss += m.gradient(&trainSet[batch[i]], 1/float32(len(batch)), g)
			}
			if rank == o.slowRank {
				if err := delay(ctx, o.slow); err != nil {
					return nil, 0, err
				}
			}
			if err := sum(ctx, on, g); err != nil {
				return nil, 0, err
			}
			step(m, g, velocity, float32(o.rate))
		}
		total, err := hvd.Allreduce(ctx, []float64{loss}, hvd.Op(hvd.Sum), hvd.Name("loss"), hvd.On(on))
		if err != nil {
			return nil, 0, err
		}
		if rank == 0 {
			fmt.Fprintf(progress, "epoch %d/%d: loss=%.4f seconds=%.2f\n",
				epoch+1, o.epochs, total[0]/float64(len(trainSet)), time.Since(began).Seconds())
		}
	}
	accuracy, err := test(ctx, on, m, testSet)
	return m, accuracy, err
}

// delay waits for d. It simulates a rank with a slow disk or a shared processor.
func delay(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// sum replaces g by the sum of the gradients of all ranks. All parts of the gradient are in flight at the
// same time, so that gohvd can fuse them.
func sum(ctx context.Context, on *hvd.Engine, g *model) error {
	parts := g.parameters()
	handles := make([]*hvd.Handle[[]float32], len(parts))
	for i, p := range parts {
		var err error
		handles[i], err = hvd.AllreduceAsync(p.values, hvd.Op(hvd.Sum), hvd.InPlace(),
			hvd.Name("gradient/"+p.name), hvd.On(on))
		if err != nil {
			return err
		}
	}
	for _, h := range handles {
		if _, err := h.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// step updates the weights of m with the gradient g, by gradient descent with momentum.
func step(m, g, velocity *model, rate float32) {
	weights, grads, velocities := m.parameters(), g.parameters(), velocity.parameters()
	for i := range weights {
		w, d, v := weights[i].values, grads[i].values, velocities[i].values
		for j := range w {
			v[j] = momentum*v[j] - rate*d[j]
			w[j] += v[j]
		}
	}
}

// test returns the fraction of the images that m recognises. Each rank evaluates only a part of the images.
func test(ctx context.Context, on *hvd.Engine, m *model, images []optdigits.Image) (float64, error) {
	var right int64
	for i := on.Rank(); i < len(images); i += on.Size() {
		if m.guess(&images[i]) == images[i].Digit {
			right++
		}
	}
	total, err := hvd.Allreduce(ctx, []int64{right}, hvd.Op(hvd.Sum), hvd.Name("right"), hvd.On(on))
	if err != nil {
		return 0, err
	}
	return float64(total[0]) / float64(len(images)), nil
}
