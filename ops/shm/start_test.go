package shm_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/shm"
)

var _ ops.Backend = (*shm.Backend)(nil)

// errOr returns err. If err is nil, it returns an error with the given text.
func errOr(err error, text string) error {
	if err == nil {
		err = errors.New(text)
	}
	return err
}

// start starts an in-place allreduce that adds the float32 elements of buf.
func start(r *rank, buf []byte) error {
	return r.Start(ops.Operation{
		Kind: message.Allreduce, Algorithm: message.Direct, DType: tensor.Float32, Op: tensor.Sum,
		Tensors: []ops.Tensor{{In: buf, Out: buf}}, Scaling: one,
	})
}

// connect runs the first operation of r, which maps the memory of the other ranks. The first step must return
// Blocked, because that memory is not mapped yet.
func connect(r *rank) error {
	if err := start(r, aligned(4)); err != nil {
		return err
	}
	if p, err := r.Step(context.Background(), false); p != ops.Blocked || err != nil {
		return errOr(err, "Step did not return Blocked, though the memory of the others is not mapped")
	}
	for {
		if p, err := r.Step(context.Background(), true); p == ops.Finished || err != nil {
			return err
		}
	}
}

// If another rank has not started the operation, a step without wait returns Waiting. A step with wait waits
// until its context ends.
func TestStartDoesNotWait(t *testing.T) {
	for _, elems := range []int{1, 5000} {
		var waited atomic.Bool
		run(t, 2, shm.Config{SmallBytes: 1 << 10}, func(r *rank) error {
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
			if err := start(r, aligned(4*elems)); err != nil {
				return err
			}
			for range 100 {
				if p, err := r.Step(context.Background(), false); p != ops.Waiting || err != nil {
					return errOr(err, "Step did not wait for the other rank")
				}
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
			defer cancel()
			if _, err := r.Step(ctx, true); !errors.Is(err, context.DeadlineExceeded) {
				return errOr(err, "got no error, want context.DeadlineExceeded")
			}
			if _, err := r.Step(context.Background(), false); err == nil {
				return errors.New("got no error from a step after an error, want the same error")
			}
			return nil
		})
	}
}

// If a rank gives up an operation before another rank has finished reading its buffer, the other rank fails.
func TestReaderLearnsOfGivingUp(t *testing.T) {
	const elems = 4 << 10
	step, gaveUp := make(chan struct{}), make(chan struct{})
	run(t, 2, shm.Config{SmallBytes: 1, DirectBytes: 1}, func(r *rank) error {
		if err := connect(r); err != nil {
			return err
		}
		if err := start(r, r.mem.alloc(4*elems)); err != nil {
			return err
		}
		if r.me == 1 {
			p, err := r.Step(context.Background(), true)
			close(step)
			if <-gaveUp; p != ops.Moving || err != nil {
				return errOr(err, "the operation has only one step")
			}
			for {
				p, err := r.Step(context.Background(), true)
				switch {
				case p == ops.Finished && err == nil:
					return errors.New("got no error from an operation that the other rank has given up")
				case err != nil && !strings.Contains(err.Error(), "abandoned the operation"):
					return err
				case err != nil:
					return nil
				}
			}
		}
		defer close(gaveUp)
		<-step
		for p := ops.Moving; p == ops.Moving; { // until it waits for the other rank to read its buffer
			var err error
			if p, err = r.Step(context.Background(), false); p == ops.Finished || err != nil {
				return errOr(err, "the operation has not waited for the other rank")
			}
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if _, err := r.Step(ctx, true); !errors.Is(err, context.Canceled) {
			return errOr(err, "got no error, want context.Canceled")
		}
		return nil
	})
}

// A reduction takes fewer steps if no rank stages anything.
func TestStepsAreLargerWithoutStaging(t *testing.T) {
	const elems = 5 << 18 // a block of 2.5 MiB for each rank
	for name, c := range map[string]struct {
		arenas [2]bool
		steps  int
	}{
		"arenas":          {[2]bool{true, true}, 3 + 2},       // steps of 1 MiB of a block
		"ordinary memory": {[2]bool{false, false}, 10 + 1},    // steps of 256 KiB
		"both":            {[2]bool{true, false}, 10 + 1 + 1}, // also waits for the readers of the arena
	} {
		run(t, 2, shm.Config{}, func(r *rank) error {
			if err := connect(r); err != nil {
				return err
			}
			buf := aligned(4 * elems)
			if c.arenas[r.me] {
				buf = r.mem.alloc(4 * elems)
			}
			if err := start(r, buf); err != nil {
				return err
			}
			for steps := 1; ; steps++ {
				p, err := r.Step(context.Background(), true)
				if err != nil {
					return err
				}
				if p != ops.Finished {
					continue
				}
				if steps != c.steps {
					return fmt.Errorf("%s: got %d steps, want %d", name, steps, c.steps)
				}
				return nil
			}
		})
	}
}

// A broadcast or an allgather in arenas takes several steps, however large it is, because a turn of the loop
// executes a whole step.
func TestStepsAreBounded(t *testing.T) {
	const numBytes = 66 << 20
	run(t, 3, shm.Config{}, func(r *rank) error {
		if err := connect(r); err != nil {
			return err
		}
		buf := r.mem.alloc(numBytes)
		for _, op := range []ops.Operation{{Kind: message.Broadcast},
			{Kind: message.Allgather, Counts: []int64{numBytes / 3, numBytes / 3, numBytes / 3}}} {
			op.Algorithm, op.Buf = message.Direct, buf
			if err := r.Start(op); err != nil {
				return err
			}
			steps := 0
			for p := ops.Moving; p != ops.Finished; steps++ {
				var err error
				if p, err = r.Step(context.Background(), true); err != nil {
					return err
				}
			}
			if steps < 4 {
				return fmt.Errorf("%v: got %d steps, want one for each 32 MiB and the last", op.Kind, steps)
			}
		}
		return nil
	})
}

// Start fails while an operation is in progress. Step fails if no operation is in progress.
func TestStepsOfAStart(t *testing.T) {
	begun := func(r *rank, elems int) bool {
		return start(r, aligned(4*elems)) == nil
	}
	for name, misuse := range map[string]func(r *rank) error{
		"another operation": func(r *rank) error {
			if !begun(r, 1) {
				return nil
			}
			return r.Allreduce(context.Background(), message.Direct, tensor.Float32, tensor.Sum, aligned(4))
		},
		"another operation, after one of many steps": func(r *rank) error {
			if !begun(r, 5000) {
				return nil
			}
			return r.Broadcast(context.Background(), message.Direct, 0, aligned(4))
		},
		"another start": func(r *rank) error {
			if !begun(r, 5000) {
				return nil
			}
			return start(r, aligned(4))
		},
		"try":    func(r *rank) error { _, err := r.Step(context.Background(), false); return err },
		"finish": func(r *rank) error { _, err := r.Step(context.Background(), true); return err },
	} {
		run(t, 2, shm.Config{SmallBytes: 1 << 10}, func(r *rank) error {
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
