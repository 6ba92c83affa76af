package shm

import (
	"context"
	"errors"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensor"
)

// Operations are done in steps, each of which waits for the other ranks' step before. Who calls one waits between them; who
// starts one tries.

// begin does the first step of an allreduce of total bytes, which b.own has. It does not wait.
func (b *Backend) begin(total int64) {
	if b.small(total) {
		b.startSmall(total)
		return
	}
	b.even(total)
	b.columns()
	b.plan.reduce, b.plan.pull = true, true
	b.own.pack()
	b.start(&b.plan)
}

// underWay reports whether there is an operation that was begun and not finished.
func (b *Backend) underWay() bool { return b.smallTotal != 0 || b.running.plan != nil }

// proceed does the next step. If that has to wait it does so, or reports so.
func (b *Backend) proceed(wait bool) (ops.Progress, error) {
	if b.smallTotal == 0 {
		p, err := b.step(wait)
		if p == ops.Finished {
			b.own.unpack()
		}
		return p, err
	}
	if wait {
		if err := b.awaitSmall(); err != nil {
			return ops.Waiting, err
		}
	} else if !b.smallArrived() {
		return ops.Waiting, nil
	}
	b.finishSmall()
	return ops.Finished, nil
}

// finish does all steps that are left.
func (b *Backend) finish() error {
	for {
		if p, err := b.proceed(true); err != nil || p == ops.Finished {
			return err
		}
	}
}

// StartAllreduce implements ops.Starter. Like the others, before the first other operation it reports false.
func (b *Backend) StartAllreduce(alg message.Algorithm, dt tensor.DType, op tensor.ReduceOp, s ops.Scaling, tensors []ops.Tensor, long bool) (bool, error) {
	return b.startOperation(message.Allreduce, alg, func() (bool, error) {
		total, err := b.own.set(tensors)
		if err != nil || total == 0 || !long && !b.small(total) {
			return false, err
		}
		if err := b.reducer.prepare(op, dt, s, len(b.ranks)); err != nil {
			return false, err
		}
		b.begin(total)
		return true, nil
	})
}

// StartAllgather implements ops.Starter.
func (b *Backend) StartAllgather(alg message.Algorithm, out []byte, counts []int64) (bool, error) {
	return b.startOperation(message.Allgather, alg, func() (bool, error) {
		if err := b.planAllgather(out, counts); err != nil {
			return false, err
		}
		b.start(&b.plan)
		return b.underWay(), nil
	})
}

// StartBroadcast implements ops.Starter.
func (b *Backend) StartBroadcast(alg message.Algorithm, root int, buf []byte) (bool, error) {
	return b.startOperation(message.Broadcast, alg, func() (bool, error) {
		if err := b.planBroadcast(root, buf); err != nil {
			return false, err
		}
		b.start(&b.plan)
		return b.underWay(), nil
	})
}

// startOperation is the frame of every start.
func (b *Backend) startOperation(kind message.Kind, alg message.Algorithm, start func() (bool, error)) (bool, error) {
	if !b.connected || b.err != nil || alg != message.Direct {
		return false, nil // the operation itself does what is to be done, or says what is wrong
	}
	if b.underWay() {
		return false, b.fail(kind, errUnderWay)
	}
	b.kind = kind
	started, err := start()
	if err != nil {
		return false, b.fail(kind, err)
	}
	if !started {
		b.own.clear()
	}
	return started, nil
}

// TryFinish implements ops.Starter.
func (b *Backend) TryFinish() (ops.Progress, error) {
	if !b.underWay() || b.err != nil {
		return ops.Waiting, b.fail(b.kind, errNotStarted)
	}
	b.ctx = noTime
	p, err := b.proceed(false)
	if err != nil {
		return ops.Waiting, b.fail(b.kind, err)
	}
	if p == ops.Finished {
		b.own.clear()
	}
	return p, nil
}

// Finish implements ops.Starter.
func (b *Backend) Finish(ctx context.Context) error {
	if !b.underWay() || b.err != nil {
		return b.fail(b.kind, errNotStarted)
	}
	b.ctx = ctx
	if err := b.finish(); err != nil {
		return b.fail(b.kind, err)
	}
	b.own.clear()
	return nil
}

// noTime is the context of who does not wait: it has ended.
var noTime = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

var (
	// errUnderWay is a call between the steps of an operation.
	errUnderWay = errors.New("the operation before it is not finished")
	// errNotStarted is a step of an operation that was not started.
	errNotStarted = errors.New("nothing was started")
)
