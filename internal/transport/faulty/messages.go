package faulty

import "math/rand/v2"

// Messages injects faults into a stream of messages: it drops, duplicates, reorders and delays them, and cuts
// the stream. It is for protocols that must survive this, unlike the byte streams of a Network. The same seed
// and the same messages give the same faults. A Messages is not safe for concurrent use.
type Messages[M any] struct {
	// Drop, Duplicate and Reorder are the probabilities of each fault, 0 to 1. A reordered message is
	// delivered after up to Depth further messages, and so is a duplicate.
	Drop, Duplicate, Reorder float64
	Depth                    int
	// Delay is the probability that a message delays the stream: it is delivered together with up to Depth
	// further messages, in their order.
	Delay float64
	// Cut is the probability that a message cuts the stream: it and CutLength further messages are dropped.
	Cut       float64
	CutLength int
	// Clone returns a copy of a message, for a duplicate.
	Clone func(M) M

	random  *rand.Rand
	held    []held[M]
	delayed []M
	// delay and cut are the numbers of further messages for which the stream is delayed or cut.
	delay, cut int
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
	if len(f.delayed) == 0 && f.random.Float64() < f.Delay {
		f.delay = 1 + f.random.IntN(f.Depth)
	}
	if f.cut == 0 && f.random.Float64() < f.Cut {
		f.cut = 1 + f.CutLength
	}
	due := f.held
	f.held = nil
	switch {
	case f.cut > 0:
		f.cut--
	case f.random.Float64() >= f.Drop:
		if f.random.Float64() < f.Duplicate {
			f.held = append(f.held, held[M]{f.Clone(m), 1 + f.random.IntN(f.Depth)})
		}
		if f.random.Float64() < f.Reorder {
			f.held = append(f.held, held[M]{m, 1 + f.random.IntN(f.Depth)})
		} else {
			f.delayed = append(f.delayed, m)
		}
	}
	for _, h := range due {
		if h.after--; h.after > 0 {
			f.held = append(f.held, h)
		} else {
			f.delayed = append(f.delayed, h.message)
		}
	}
	if f.delay > 0 {
		f.delay--
		return nil
	}
	ready := f.delayed
	f.delayed = nil
	for _, m := range ready {
		if err == nil {
			err = deliver(m)
		}
	}
	return err
}
