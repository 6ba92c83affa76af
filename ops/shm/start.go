package shm

import (
	"context"
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

// An operation runs in steps. A rank can do a step when all other ranks have done the previous one.

// Start implements ops.Backend. If the peers' segments are mapped, Start also does the first round, so that
// the peers need not wait for the first Step of this rank.
func (b *Backend) Start(op ops.Operation) error {
	if b.err != nil || b.state != idle {
		return b.fail(op.Kind, errNotFinished)
	}
	b.op, b.kind, b.state = op, op.Kind, started
	b.makeLists()
	if !b.connected && len(b.ranks) > 1 {
		return nil // the first step with wait set maps the segments
	}
	if err := b.begin(); err != nil {
		return b.fail(op.Kind, err)
	}
	return nil
}

// Step implements ops.Backend. Each call runs at most one round.
func (b *Backend) Step(ctx context.Context, wait bool) (ops.Progress, error) {
	if b.err != nil || b.state == idle {
		return ops.Waiting, b.fail(b.kind, errNotStarted)
	}
	b.ctx = endedContext
	if wait {
		b.ctx = ctx
	}
	p, err := b.step(wait)
	if err == nil && p == ops.Finished && b.adasum.buf != nil {
		p, err = b.nextPart()
	}
	if err != nil {
		return ops.Waiting, b.fail(b.kind, err)
	}
	if p == ops.Finished {
		b.forget()
		b.op, b.kind, b.state = ops.Operation{}, message.NoKind, idle
		b.discards, b.running.out = false, nil
	}
	return p, nil
}

// Close implements ops.Backend. It does nothing, because the mesh frees the memory when the lane is released.
func (b *Backend) Close() {}

// state is the state of the backend: idle, or the kind of the next step.
type state uint8

const (
	idle    state = iota
	started       // Start has been called, but not begin
	exchanging
	small
	alltoall
	done
)

// begin begins the operation: it does the part that does not wait for other ranks.
func (b *Backend) begin() error {
	op := &b.op
	if op.Algorithm != message.Direct {
		return fmt.Errorf("got algorithm %v, want %v", op.Algorithm, message.Direct)
	}
	var err error
	switch op.Kind {
	case message.Allreduce, message.Reduce:
		return b.beginAllreduce()
	case message.Reducescatter:
		err = b.planReducescatter()
	case message.Allgather:
		err = b.planAllgather()
	case message.Broadcast:
		err = b.planBroadcast()
	case message.Alltoall, message.Gather, message.Scatter:
		return b.startAlltoall()
	default:
		return fmt.Errorf("%v is not supported", op.Kind)
	}
	if err == nil {
		b.exchange()
	}
	return err
}

// beginAllreduce begins an allreduce or a reduce. In a reduce only the root copies the results.
func (b *Backend) beginAllreduce() error {
	op := &b.op
	if op.Op == tensor.Adasum {
		if op.Kind != message.Allreduce {
			return fmt.Errorf("%v with adasum is not supported", op.Kind)
		}
		return b.beginAdasum()
	}
	if err := b.op.CheckRoot(len(b.ranks)); err != nil {
		return err
	}
	b.discards = op.Kind == message.Reduce && op.Root != b.me
	if b.discards {
		for i := range op.Tensors {
			op.Tensors[i].Out = op.Tensors[i].In
		}
	}
	total, err := b.own.set(op.Tensors)
	if err != nil {
		return err
	}
	if total == 0 {
		b.state = done
		return nil
	}
	if err := b.reducer.Prepare(op.Op, op.DType, op.Scaling, len(b.ranks)); err != nil {
		return err
	}
	switch {
	case len(b.ranks) == 1:
		b.reduceSingle()
		b.state = done
	case b.isSmall(total):
		b.startSmall(total)
		b.state = small
	default:
		b.plan.even(total)
		b.plan.columns()
		b.plan.reduce, b.plan.pull = true, true
		b.own.pack()
		b.exchange()
	}
	return nil
}

// exchange begins the exchange that b.plan describes. If the set has only one rank, or if there is no data,
// the operation is done when exchange returns.
func (b *Backend) exchange() {
	b.state = done
	if len(b.ranks) == 1 {
		return
	}
	b.start(&b.plan)
	if b.running.plan != nil {
		b.state = exchanging
	}
}

// step runs the next step. If other ranks are not ready for the step, the method waits for them if the
// parameter wait is set, and returns Waiting or Blocked if it is not.
func (b *Backend) step(wait bool) (ops.Progress, error) {
	if wait {
		if err := contextError(b.ctx); err != nil {
			return ops.Waiting, err
		}
	}
	switch b.state {
	case started:
		if !wait {
			return ops.Blocked, nil
		}
		if err := b.connect(); err != nil {
			return ops.Waiting, err
		}
		return ops.Moving, b.begin()
	case exchanging:
		p, err := b.round(wait)
		if p == ops.Finished && !b.discards {
			b.own.unpack()
		}
		return p, err
	case small:
		if wait {
			if err := b.awaitSmall(); err != nil {
				return ops.Waiting, err
			}
		} else if !b.smallArrived() {
			return ops.Waiting, nil
		}
		b.finishSmall()
	case alltoall:
		return b.alltoallStep(wait)
	}
	return ops.Finished, nil
}

// endedContext is the context of steps that do not wait. It has ended, so that nothing waits by mistake.
var endedContext = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

var (
	// errNotFinished is returned by Start if an operation is in progress.
	errNotFinished = errors.New("Start was called before the previous operation had finished")
	// errNotStarted is returned by Step if no operation is in progress.
	errNotStarted = errors.New("Step was called without an operation in progress")
)
