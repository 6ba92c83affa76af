package main

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math"
	"math/rand/v2"

	"github.com/gohvd/gohvd/examples/optdigits"
)

const (
	pixels  = optdigits.Pixels
	classes = optdigits.Classes
	hidden  = 48
)

// model is a perceptron with one hidden layer: 64 pixels, tanh, 10 classes, softmax. The gradient of a model
// has the same type.
type model struct {
	w1 []float32 // hidden x pixels
	b1 []float32
	w2 []float32 // classes x hidden
	b2 []float32
}

// parameter is a part of a model, with its name.
type parameter struct {
	name   string
	values []float32
}

func newModel() *model {
	return &model{
		w1: make([]float32, hidden*pixels), b1: make([]float32, hidden),
		w2: make([]float32, classes*hidden), b2: make([]float32, classes),
	}
}

// parameters returns the parts of m, beginning with the last layer. That is the order in which
// backpropagation finishes their gradients.
func (m *model) parameters() []parameter {
	return []parameter{{"fc2.bias", m.b2}, {"fc2.weight", m.w2}, {"fc1.bias", m.b1}, {"fc1.weight", m.w1}}
}

// initialize sets the weights to random values (Glorot and Bengio, 2010) and the biases to 0.
func (m *model) initialize(seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 1))
	draw := func(w []float32, in, out int) {
		limit := math.Sqrt(6 / float64(in+out))
		for i := range w {
			w[i] = float32((2*rng.Float64() - 1) * limit)
		}
	}
	draw(m.w1, pixels, hidden)
	draw(m.w2, hidden, classes)
	clear(m.b1)
	clear(m.b2)
}

// forward computes the values of the hidden layer and the probabilities of the classes from the pixels x. It
// stores them in *h and *p.
func (m *model) forward(x *[pixels]float32, h *[hidden]float32, p *[classes]float32) {
	for i := range h {
		sum := m.b1[i]
		row := m.w1[i*pixels:][:pixels]
		for j, v := range x {
			sum += row[j] * v
		}
		h[i] = float32(math.Tanh(float64(sum)))
	}
	highest := float32(math.Inf(-1))
	for i := range p {
		sum := m.b2[i]
		row := m.w2[i*hidden:][:hidden]
		for j, v := range h {
			sum += row[j] * v
		}
		p[i] = sum
		highest = max(highest, sum)
	}
	var total float32
	for i, v := range p {
		p[i] = float32(math.Exp(float64(v - highest)))
		total += p[i]
	}
	for i := range p {
		p[i] /= total
	}
}

// gradient returns the cross entropy of m on img. It also adds the gradient of the cross entropy, multiplied
// by weight, to g.
func (m *model) gradient(img *optdigits.Image, weight float32, g *model) float64 {
	var h, dh [hidden]float32
	var p [classes]float32
	m.forward(&img.Pixels, &h, &p)
	loss := -math.Log(math.Max(float64(p[img.Digit]), 1e-12))
	p[img.Digit]--
	for i, d := range p {
		d *= weight
		g.b2[i] += d
		row, grad := m.w2[i*hidden:][:hidden], g.w2[i*hidden:][:hidden]
		for j, v := range h {
			grad[j] += d * v
			dh[j] += d * row[j]
		}
	}
	for i, d := range dh {
		d *= 1 - h[i]*h[i]
		g.b1[i] += d
		grad := g.w1[i*pixels:][:pixels]
		for j, v := range img.Pixels {
			grad[j] += d * v
		}
	}
	return loss
}

// guess returns the digit that is most probable for img.
func (m *model) guess(img *optdigits.Image) int {
	var h [hidden]float32
	var p [classes]float32
	m.forward(&img.Pixels, &h, &p)
	best := 0
	for i := range p {
		if p[i] > p[best] {
			best = i
		}
	}
	return best
}

// hash returns the SHA-256 of the bits of all weights, as hexadecimal digits.
func (m *model) hash() string {
	s := sha256.New()
	var b [4]byte
	for _, p := range m.parameters() {
		for _, v := range p.values {
			binary.LittleEndian.PutUint32(b[:], math.Float32bits(v))
			s.Write(b[:])
		}
	}
	return hex.EncodeToString(s.Sum(nil))
}
