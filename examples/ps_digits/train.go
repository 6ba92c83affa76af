package main

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/gohvd/gohvd/examples/optdigits"
	"github.com/gohvd/gohvd/ps"
)

const (
	classes = optdigits.Classes
	// features is the number of inputs of the classifier: the pixels and a constant 1.
	features = optdigits.Pixels + 1
)

// key returns the key of the weights of a feature, one weight for each class. The keys are spread, so that
// each server has about as many of them.
func key(feature int) uint64 { return ps.MaxKey / features * uint64(feature) }

// trainer is a worker. It has every n-th image of the training set, where n is the number of workers.
type trainer struct {
	options
	w       *ps.KVWorker[float32]
	images  []optdigits.Image
	testSet []optdigits.Image
	rng     *rand.Rand
}

func newTrainer(node *ps.Node, o options) (*trainer, error) {
	trainSet, testSet, err := optdigits.Load(o.seed)
	if err != nil {
		return nil, err
	}
	t := &trainer{options: o, testSet: testSet, rng: rand.New(rand.NewPCG(o.seed, uint64(node.Rank())+1))}
	for i := node.Rank(); i < len(trainSet); i += node.NumWorkers() {
		t.images = append(t.images, trainSet[i])
	}
	t.w, err = ps.NewKVWorker[float32](node)
	return t, err
}

// initialize sets all weights to 0.
func (t *trainer) initialize(ctx context.Context) error {
	return t.w.Push(ctx, keysOf(allFeatures()), make([]float32, features*classes), ps.Cmd(ps.InitCmd))
}

// train makes the passes over the images of this worker. It never waits for another worker. So the weights
// may change while a worker computes a gradient from older ones.
func (t *trainer) train(ctx context.Context) error {
	for range t.epochs {
		t.rng.Shuffle(len(t.images), func(i, j int) { t.images[i], t.images[j] = t.images[j], t.images[i] })
		for batch := range slices.Chunk(t.images, t.batch) {
			if err := t.step(ctx, batch); err != nil {
				return err
			}
		}
	}
	return nil
}

// step pulls the weights that a batch needs and pushes their gradient. The server makes the step with it.
func (t *trainer) step(ctx context.Context, batch []optdigits.Image) error {
	used := featuresOf(batch)
	keys := keysOf(used)
	var weights []float32
	if err := t.w.Pull(ctx, keys, &weights); err != nil {
		return err
	}
	return t.w.Push(ctx, keys, gradient(batch, used, weights))
}

// test returns the fraction of the test images that the weights at the servers recognise.
func (t *trainer) test(ctx context.Context) (float64, error) {
	var weights []float32
	if err := t.w.Pull(ctx, keysOf(allFeatures()), &weights); err != nil {
		return 0, err
	}
	right := 0
	for i := range t.testSet {
		p := probabilities(&t.testSet[i], allFeatures(), weights)
		if slices.Index(p[:], slices.Max(p[:])) == t.testSet[i].Digit {
			right++
		}
	}
	return float64(right) / float64(len(t.testSet)), nil
}

// allFeatures returns the numbers of all features.
func allFeatures() []int {
	all := make([]int, features)
	for i := range all {
		all[i] = i
	}
	return all
}

// featuresOf returns the features that are not 0 in at least one image of a batch. Many pixels at the margin
// are 0 in all of them.
func featuresOf(batch []optdigits.Image) []int {
	return slices.DeleteFunc(allFeatures(), func(f int) bool {
		return !slices.ContainsFunc(batch, func(img optdigits.Image) bool { return value(&img, f) != 0 })
	})
}

func keysOf(used []int) []uint64 {
	keys := make([]uint64, len(used))
	for i, f := range used {
		keys[i] = key(f)
	}
	return keys
}

// value returns a feature of an image.
func value(img *optdigits.Image, feature int) float32 {
	if feature == optdigits.Pixels {
		return 1
	}
	return img.Pixels[feature]
}

// probabilities returns the probability of each class (softmax). weights has those of the features in used.
func probabilities(img *optdigits.Image, used []int, weights []float32) (p [classes]float64) {
	for i, f := range used {
		v := float64(value(img, f))
		for c := range p {
			p[c] += v * float64(weights[i*classes+c])
		}
	}
	highest, total := slices.Max(p[:]), 0.0
	for c := range p {
		p[c] = math.Exp(p[c] - highest)
		total += p[c]
	}
	for c := range p {
		p[c] /= total
	}
	return p
}

// gradient returns the gradient of the mean cross entropy of a batch.
func gradient(batch []optdigits.Image, used []int, weights []float32) []float32 {
	g := make([]float32, len(weights))
	for i := range batch {
		p := probabilities(&batch[i], used, weights)
		p[batch[i].Digit]--
		for k, f := range used {
			v := float64(value(&batch[i], f)) / float64(len(batch))
			for c := range p {
				g[k*classes+c] += float32(v * p[c])
			}
		}
	}
	return g
}
