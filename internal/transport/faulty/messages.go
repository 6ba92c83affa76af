package faulty

import "math/rand/v2"

// Messages injects faults into a stream of messages: it drops, duplicates and reorders them. It is for
// protocols that must survive this, unlike the byte streams of a Network. The same seed and the same messages
// give the same faults. A Messages is not safe for concurrent use.
type Messages[M any] struct {
	// Drop, Duplicate and Reorder are the probabilities of each fault, 0 to 1. A reordered message is
	// delivered after up to Depth further messages.
	Drop, Duplicate, Reorder float64
	Depth                    int
	// Clone returns a copy of a message, for a duplicate.
	Clone func(M) M

	random *rand.Rand
	held   []held[M]
}

// held is a message that is delivered after some further messages.
type held[M any] struct {
	message M
	after   int
}

// Seed makes the faults depend on seed. It must be called before the first Pass.
func (f *Messages[M]) Seed(seed uint64) { f.random = rand.New(rand.NewPCG(seed, 0)) }

// Pass calls deliver for m any number of times, and for earlier messages that were held back until now. It
// returns the first error of deliver.
func (f *Messages[M]) Pass(m M, deliver func(M) error) (err error) {
	pass := func(m M) {
		if err == nil {
			err = deliver(m)
		}
	}
	due := f.held
	f.held = nil
	if f.random.Float64() >= f.Drop {
		if f.random.Float64() < f.Duplicate {
			f.held = append(f.held, held[M]{f.Clone(m), 1 + f.random.IntN(f.Depth)})
		}
		if f.random.Float64() < f.Reorder {
			f.held = append(f.held, held[M]{m, 1 + f.random.IntN(f.Depth)})
		} else {
			pass(m)
		}
	}
	for _, h := range due {
		if h.after--; h.after > 0 {
			f.held = append(f.held, h)
		} else {
			pass(h.message)
		}
	}
	return err
}
