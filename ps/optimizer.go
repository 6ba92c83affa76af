package ps

import (
	"math"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Float is the constraint for the types of values that optimizers support. Those of 16 bits are computed as
// float32 and rounded once for each push.
type Float interface {
	~float32 | ~float64 | half.Float16 | half.BFloat16
}

// computeType returns the type with which an optimizer computes.
func computeType[T Float]() tensor.DType {
	if dt := tensor.Of[T](); !dt.IsHalf() {
		return dt
	}
	return tensor.Float32
}

// combine returns the kernel that adds multiples of arrays.
func combine[T Float]() kernel.CombineFunc {
	f, err := kernel.Combine(computeType[T]())
	if err != nil {
		panic("ps: " + err.Error()) // every Float is a floating-point type
	}
	return f
}

// SGD returns a handler whose stored values w change with each push of gradients g: w -= rate·g. A push with
// InitCmd sets w; so it is with all optimizers.
func SGD[T Float](rate float64) Handler[T] {
	add := combine[T]()
	return newBuiltIn[T](rule{compute: computeType[T](), update: func(w, g []byte, _ [][]byte) {
		add(w, w, g, 1, -rate)
	}})
}

// Momentum returns a handler that keeps a velocity v for each value: v = momentum·v + g, w -= rate·v.
func Momentum[T Float](rate, momentum float64) Handler[T] {
	add := combine[T]()
	update := func(w, g []byte, state [][]byte) {
		add(state[0], state[0], g, momentum, 1)
		add(w, w, state[0], 1, -rate)
	}
	return newBuiltIn[T](rule{compute: computeType[T](), planes: 1, update: update})
}

// Adagrad returns a handler that keeps the sum of squares s of the gradients of each value: s += g²,
// w -= rate·g/(√s + epsilon) (Duchi et al., 2011).
func Adagrad[T Float](rate, epsilon float64) Handler[T] {
	step := func(w, g float64, state []float64) float64 {
		state[0] += g * g
		return w - rate*g/(math.Sqrt(state[0])+epsilon)
	}
	return elementwise[T](1, func() stepFunc { return step })
}

// Adam returns a handler with Adam's update (Kingma and Ba, 2015). It counts the steps of each value, because
// workers may push each key at its own pace.
func Adam[T Float](rate, beta1, beta2, epsilon float64) Handler[T] {
	return elementwise[T](3, func() stepFunc {
		// The corrections of the bias depend only on the step, and neighbours usually have the same one.
		step, correct1, correct2 := 0.0, 1.0, 1.0
		return func(w, g float64, state []float64) float64 {
			state[0] = beta1*state[0] + (1-beta1)*g
			state[1] = beta2*state[1] + (1-beta2)*g*g
			state[2]++
			if state[2] != step {
				step = state[2]
				correct1, correct2 = 1-math.Pow(beta1, step), 1-math.Pow(beta2, step)
			}
			return w - rate*(state[0]/correct1)/(math.Sqrt(state[1]/correct2)+epsilon)
		}
	})
}

// stepFunc computes a new value from the old one and the gradient, and changes the state of the value.
type stepFunc func(w, g float64, state []float64) float64

// elementwise returns a handler that calls a stepFunc for each value, whose state has the given number of
// elements. make makes one for each array of values: stores in several goroutines use the handler.
func elementwise[T Float](planes int, make func() stepFunc) Handler[T] {
	r := rule{compute: computeType[T](), planes: planes, update: func(w, g []byte, state [][]byte) {
		each(tensor.View[float32](w), tensor.View[float32](g), views[float32](state), make())
	}}
	if r.compute == tensor.Float64 {
		r.update = func(w, g []byte, state [][]byte) {
			each(tensor.View[float64](w), tensor.View[float64](g), views[float64](state), make())
		}
	}
	return newBuiltIn[T](r)
}

func views[S float32 | float64](state [][]byte) [][]S {
	all := make([][]S, len(state))
	for i, plane := range state {
		all[i] = tensor.View[S](plane)
	}
	return all
}

func each[S float32 | float64](w, g []S, state [][]S, f stepFunc) {
	values := make([]float64, len(state))
	for i := range w {
		for p := range state {
			values[p] = float64(state[p][i])
		}
		w[i] = S(f(float64(w[i]), float64(g[i]), values))
		for p := range state {
			state[p][i] = S(values[p])
		}
	}
}
