package shm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
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
	buf := input(tensor.Float32, r.me, 0, 1)
	if err := start(r, buf); err != nil {
		return err
	}
	if p, err := r.Step(context.Background(), false); p != ops.Blocked || err != nil {
		return errOr(err, "Step did not return Blocked, though the memory of the others is not mapped")
	}
	return finish(r, 0)
}

// finish calls Step until the operation has finished. The first calls do not wait. The parameter tries is the
// maximum number of such calls. All calls after them wait.
func finish(r *rank, tries int) error {
	for i := 0; ; i++ {
		p, err := r.Step(context.Background(), i >= tries)
		if p == ops.Finished || err != nil {
			return err
		}
		if p == ops.Waiting {
			runtime.Gosched()
		}
	}
}

// A started operation can be finished by steps that wait, by steps that do not wait, or by both. This holds
// for operations of one step or many, from ordinary memory and from arenas, with blocking operations in
// between.
func TestStart(t *testing.T) {
	const n = 3
	for _, elems := range []int{100, 5000, 50_000} {
		run(t, n, shm.Config{StageBytes: 12 << 10, SmallBytes: 1 << 10, DirectBytes: 64 << 10},
			func(r *rank) error {
				if err := connect(r); err != nil {
					return err
				}
				for i := range 30 {
					buf := input(tensor.Float32, r.me, i, elems)
					if i%3 == 0 {
						shared := r.mem.alloc(len(buf))
						copy(shared, buf)
						buf = shared
					}
					if err := start(r, buf); err != nil {
						return err
					}
					if err := finish(r, 1000*((i+r.me)%3)); err != nil {
						return err
					}
					if want := reduced(tensor.Float32, tensor.Sum, n, i, elems); !bytes.Equal(buf, want) {
						return errors.New(difference(buf, want))
					}
					buf = input(tensor.Float32, r.me, i, 500)
					if err := r.Allreduce(context.Background(), message.Direct, tensor.Float32, tensor.Sum,
						buf); err != nil {
						return err
					}
				}
				return nil
			})
	}
}

// Allgathers and broadcasts produce the correct results if they are run step by step.
func TestStartGather(t *testing.T) {
	const n = 3
	for _, each := range []int{0, 96, 20_000} {
		run(t, n, shm.Config{StageBytes: 12 << 10}, func(r *rank) error {
			counts := []int64{int64(each), 0, int64(2 * each)}
			if err := connect(r); err != nil {
				return err
			}
			for i := range 20 {
				part := func(rank int) []byte {
					return bytes.Repeat([]byte{byte(rank + 3*i)}, int(counts[rank]))
				}
				want := slices.Concat(part(0), part(1), part(2))
				out := aligned(3 * each)
				if i%2 == 0 {
					out = r.mem.alloc(3 * each)
				}
				clear(out)
				copy(out[[]int{0, each, each}[r.me]:], part(r.me))
				err := r.Start(ops.Operation{Kind: message.Allgather, Algorithm: message.Direct, Buf: out,
					Counts: counts})
				if err == nil {
					err = finish(r, 1000*((i+r.me)%3))
				}
				if err != nil || !bytes.Equal(out, want) {
					return errOr(err, "wrong result of the allgather")
				}
				if each > 0 {
					want[0] = 99
					if r.me == i%n {
						out[0] = 99
					}
				}
				err = r.Start(ops.Operation{Kind: message.Broadcast, Algorithm: message.Direct, Buf: out,
					Root: i % n})
				if err == nil {
					err = finish(r, 1000*((i+r.me)%2))
				}
				if err != nil || !bytes.Equal(out, want) {
					return errOr(err, "wrong result of the broadcast")
				}
			}
			return nil
		})
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
			if err := start(r, input(tensor.Float32, 0, 0, elems)); err != nil {
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

// A reduction takes fewer steps if no rank stages anything.
func TestStepsAreLargerWithoutStaging(t *testing.T) {
	const elems = 5 << 18 // a block of 2.5 MiB for each rank
	want := reduced(tensor.Float32, tensor.Sum, 2, 0, elems)
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
			buf := input(tensor.Float32, r.me, 0, elems)
			if c.arenas[r.me] {
				buf = r.mem.alloc(len(buf))
				copy(buf, input(tensor.Float32, r.me, 0, elems))
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
				if !bytes.Equal(buf, want) {
					return fmt.Errorf("%s: wrong result", name)
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
		return start(r, input(tensor.Float32, r.me, 0, elems)) == nil
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
