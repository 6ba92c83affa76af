package shm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/shm"
	"github.com/gohvd/gohvd/tensor"
)

var _ ops.Starter = (*shm.Backend)(nil)

// because is err, or else an error that says text.
func because(err error, text string) error {
	if err == nil {
		err = errors.New(text)
	}
	return err
}

// start starts a sum of float32.
func start(r *rank, buf []byte) (bool, error) {
	return r.StartAllreduce(message.Direct, tensor.Float32, tensor.Sum, one, []ops.Tensor{{In: buf, Out: buf}})
}

// connect has an operation behind it, before which nothing is started.
func connect(r *rank) error {
	buf := input(tensor.Float32, r.me, 0, 1)
	if started, err := start(r, buf); started || err != nil {
		return because(err, "started, though the others' memory is not known")
	}
	return r.Allreduce(context.Background(), message.Direct, tensor.Float32, tensor.Sum, buf)
}

// What was started is finished by trying, or by waiting, and between other operations.
func TestStart(t *testing.T) {
	const n, elems = 3, 100
	run(t, n, shm.Config{}, func(r *rank) error {
		if err := connect(r); err != nil {
			return err
		}
		for i := range 50 {
			buf := input(tensor.Float32, r.me, i, elems)
			started, err := start(r, buf)
			if err != nil || !started {
				return because(err, "not started")
			}
			if (i+r.me)%2 == 0 {
				err = r.Finish(context.Background())
			} else {
				for done := false; !done && err == nil; runtime.Gosched() {
					done, err = r.TryFinish()
				}
			}
			if err != nil {
				return err
			}
			if !bytes.Equal(buf, reduced(tensor.Float32, tensor.Sum, n, i, elems)) {
				return errors.New("wrong result")
			}
			large := input(tensor.Float32, r.me, i, 5000)
			if started, err := start(r, large); started || err != nil {
				return because(err, "20 kB were started")
			}
			if err := r.Allreduce(context.Background(), message.Direct, tensor.Float32, tensor.Sum, large); err != nil {
				return err
			}
		}
		return nil
	})
}

// A rank that has started does not wait for another that has not, unless told to, and then no longer than it is told to.
func TestStartDoesNotWait(t *testing.T) {
	var waited atomic.Bool
	run(t, 2, shm.Config{}, func(r *rank) error {
		if err := connect(r); err != nil {
			return err
		}
		if r.me == 1 {
			for !waited.Load() {
				runtime.Gosched()
			}
			return nil
		}
		defer waited.Store(true)
		if started, err := start(r, input(tensor.Float32, 0, 0, 1)); err != nil || !started {
			return because(err, "not started")
		}
		for range 100 {
			if done, err := r.TryFinish(); done || err != nil {
				return because(err, "finished without the other")
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		defer cancel()
		if err := r.Finish(ctx); !errors.Is(err, context.DeadlineExceeded) {
			return because(err, "want that the time is over")
		}
		if _, err := r.TryFinish(); err == nil {
			return errors.New("the backend goes on after an error")
		}
		return nil
	})
}

// Nothing comes between the halves, and there is no second without a first.
func TestHalvesOfAStart(t *testing.T) {
	for name, misuse := range map[string]func(r *rank) error{
		"another operation": func(r *rank) error {
			if _, err := start(r, input(tensor.Float32, r.me, 0, 1)); err != nil {
				return nil
			}
			return r.Allreduce(context.Background(), message.Direct, tensor.Float32, tensor.Sum, aligned(4))
		},
		"try":    func(r *rank) error { _, err := r.TryFinish(); return err },
		"finish": func(r *rank) error { return r.Finish(context.Background()) },
	} {
		run(t, 2, shm.Config{}, func(r *rank) error {
			if err := connect(r); err != nil {
				return err
			}
			if misuse(r) == nil {
				t.Errorf("%s: got no error", name)
			}
			return nil
		})
	}
}

// Contributions lie one behind the other in a ring, which comes round several times here.
func TestSmallRoundTheRing(t *testing.T) {
	for _, n := range []int{2, 3} {
		run(t, n, shm.Config{SmallBytes: 64 << 10}, func(r *rank) error {
			for i := range 500 {
				elems := (i*i*37)%(16<<10/(n-1)) + 1
				first := elems / (1 + i%3) // one tensor or two
				buf := input(tensor.Float32, r.me, i, elems)
				tensors := []ops.Tensor{{In: buf[:4*first], Out: buf[:4*first]}, {In: buf[4*first:], Out: buf[4*first:]}}
				if err := r.AllreduceFused(context.Background(), message.Direct, tensor.Float32, tensor.Sum, one, tensors); err != nil {
					return err
				}
				if want := reduced(tensor.Float32, tensor.Sum, n, i, elems); !bytes.Equal(buf, want) {
					return fmt.Errorf("operation %d of %d elements: %s", i, elems, difference(buf, want))
				}
			}
			return nil
		})
	}
}
