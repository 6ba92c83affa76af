package main

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/gohvd/gohvd/ps"
)

const (
	weightsApp = 0 // the app that has the weights
	totalsApp  = 1 // the app that has the sums over all workers
	// scatter is a prime. Features with neighbouring numbers get keys that are far apart, so that each server
	// has about as many of the frequent features.
	scatter = 2654435761
)

// batch has examples of the training set. An example has the value 1 for some features and 0 for all others.
// A feature that it has twice has the value 2.
type batch struct {
	keys   []uint64  // keys of the features of all examples, sorted
	used   []int32   // features of the examples, nonzeros for each, as indices of keys
	labels []float64 // probability that an example belongs to the class
}

// trainer is a worker.
type trainer struct {
	options
	node    *ps.Node
	weights *ps.KVWorker[float32]
	sums    *ps.KVWorker[float64]
	batches []batch
}

func newTrainer(node *ps.Node, o options) (t *trainer, err error) {
	t = &trainer{options: o, node: node}
	if t.weights, err = ps.NewKVWorker[float32](node, ps.App(weightsApp)); err != nil {
		return nil, err
	}
	if t.sums, err = ps.NewKVWorker[float64](node, ps.App(totalsApp)); err != nil {
		return nil, err
	}
	random := rand.New(rand.NewPCG(o.seed, uint64(node.Rank())))
	for left := o.examples; left > 0; left -= o.batch {
		t.batches = append(t.batches, o.generate(random, min(left, o.batch)))
	}
	return t, nil
}

// key returns the key of the weight of a feature.
func (o *options) key(feature int) uint64 {
	return ps.MaxKey / uint64(o.features) * (uint64(feature) * scatter % uint64(o.features))
}

// truth returns the weight of a feature with which the labels are made, a number with the deviation that
// gives the sum over an example the deviation 2.
func (o *options) truth(key uint64) float64 {
	return rand.New(rand.NewPCG(o.seed, key)).NormFloat64() * 2 / math.Sqrt(float64(o.nonzeros))
}

// generate makes n examples. A few features are in many examples, and most are in few.
func (o *options) generate(random *rand.Rand, n int) (b batch) {
	keys := make([]uint64, n*o.nonzeros)
	for i := range keys {
		keys[i] = o.key(int(float64(o.features) * math.Pow(random.Float64(), 3)))
	}
	b.keys = slices.Clone(keys)
	slices.Sort(b.keys)
	b.keys = slices.Compact(b.keys)
	truth := make([]float32, len(b.keys))
	for i, key := range b.keys {
		truth[i] = float32(o.truth(key))
	}
	for _, key := range keys {
		at, _ := slices.BinarySearch(b.keys, key)
		b.used = append(b.used, int32(at))
	}
	for example := range slices.Chunk(b.used, o.nonzeros) {
		b.labels = append(b.labels, probability(example, truth))
	}
	return b
}

// probability returns what the model with the given weights says about an example.
func probability(example []int32, weights []float32) float64 {
	sum := 0.0
	for _, f := range example {
		sum += float64(weights[f])
	}
	return 1 / (1 + math.Exp(-sum))
}

// entropy returns the cross-entropy of the prediction p if the probability is y. It is least if p is y.
func entropy(y, p float64) float64 {
	p = min(max(p, 1e-15), 1-1e-15)
	return -y*math.Log(p) - (1-y)*math.Log(1-p)
}

// initialize sets a part of the weights to 0. The other workers set the others.
func (t *trainer) initialize(ctx context.Context) error {
	const chunk = 1 << 18
	n, rank := t.node.NumWorkers(), t.node.Rank()
	step := ps.MaxKey / uint64(t.features)
	from, to := t.features/n*rank, t.features/n*(rank+1)
	if rank == n-1 {
		to = t.features
	}
	for ; from < to; from += chunk {
		keys := make([]uint64, min(chunk, to-from))
		for i := range keys {
			keys[i] = step * uint64(from+i)
		}
		if err := t.weights.Push(ctx, keys, make([]float32, len(keys)), ps.Cmd(ps.InitCmd)); err != nil {
			return err
		}
	}
	return nil
}

// meet waits until all workers have called it. Each then sees what the others have pushed before.
func (t *trainer) meet(ctx context.Context) error {
	if err := t.node.Clock(ctx); err != nil {
		return err
	}
	return t.node.Barrier(ctx, ps.WorkerGroup)
}

// pull returns the weights of a batch.
func (t *trainer) pull(ctx context.Context, b *batch) (weights []float32, err error) {
	err = t.weights.Pull(ctx, b.keys, &weights)
	return weights, err
}

// train makes the passes over the examples of this worker. With each batch, it pulls the weights of the
// features in the batch and pushes their gradient. The servers make the steps. Clock waits for other workers
// if the mode of the job says so.
func (t *trainer) train(ctx context.Context) error {
	var last *ps.Request
	for range t.epochs {
		for i := range t.batches {
			b := &t.batches[i]
			weights, err := t.pull(ctx, b)
			if err != nil {
				return err
			}
			if last, err = t.weights.PushAsync(ctx, b.keys, t.gradient(b, weights)); err != nil {
				return err
			}
			if err := t.node.Clock(ctx); err != nil {
				return err
			}
		}
	}
	return last.Wait(ctx)
}

// gradient returns the gradient of the mean cross-entropy of a batch.
func (t *trainer) gradient(b *batch, weights []float32) []float32 {
	g := make([]float32, len(b.keys))
	for i, y := range b.labels {
		example := b.used[i*t.nonzeros:][:t.nonzeros]
		slope := float32((probability(example, weights) - y) / float64(len(b.labels)))
		for _, f := range example {
			g[f] += slope
		}
	}
	return g
}

// totals returns sums over all workers: of the cross-entropies with the trained weights and with the true
// ones, of the examples, and of the keys that were pulled and pushed in the training.
func (t *trainer) totals(ctx context.Context) (sums []float64, err error) {
	own := make([]float64, 4)
	for i := range t.batches {
		b := &t.batches[i]
		weights, err := t.pull(ctx, b)
		if err != nil {
			return nil, err
		}
		for j, y := range b.labels {
			own[0] += entropy(y, probability(b.used[j*t.nonzeros:][:t.nonzeros], weights))
			own[1] += entropy(y, y)
		}
		own[2] += float64(len(b.labels))
		own[3] += float64(2 * t.epochs * len(b.keys))
	}
	keys := []uint64{0, 1, 2, 3}
	if err := t.sums.Push(ctx, keys, own); err != nil {
		return nil, err
	}
	if err := t.meet(ctx); err != nil {
		return nil, err
	}
	err = t.sums.Pull(ctx, keys, &sums)
	return sums, err
}
