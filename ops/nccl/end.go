//go:build nccl && cgo

package nccl

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
)

// fail ends the backend because the operation has failed with err before its flight. It returns err with the
// kind of the operation.
func (b *backend) fail(err error) error {
	b.err = b.library.failed(b.op.Kind, b.ranks, err)
	launched := b.launched
	b.launched = false
	if launched {
		if err := b.library.settle(b.device, nil); err != nil {
			return fmt.Errorf("%w; %w", b.err, err)
		}
	}
	return b.err
}

// failed calls Fail with err, the error of an operation of the ranks, after it has added the kind of the
// operation and, if NCCL does not say which rank has failed, these ranks. It returns the result.
func (l *Library) failed(k message.Kind, ranks []topo.Rank, err error) error {
	if e, ok := errors.AsType[*Error](err); ok && !e.isLocal() {
		err = &ops.UnknownRankError{Ranks: ranks, Err: err}
	}
	err = fmt.Errorf("ops/nccl: %v: %w", k, err)
	l.Fail(err)
	return err
}

// Fail records err as the reason why an operation or the job has failed, unless one is recorded already. Then
// it aborts the communicators of all process sets at once, each in a goroutine of its own. A lane could not
// do that for its own ones: it may be in a call of CUDA that waits for the work of another communicator. From
// then on, no operation is launched.
func (l *Library) Fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return
	}
	l.err, l.failedAt = err, time.Now()
	l.turn.Broadcast()
	for _, c := range l.comms {
		close(c.aborted)
		go c.abort() // Close waits for it
	}
	l.comms = nil
}

// afterFailure returns the error of an operation after one that has failed, or nil if none has. The caller
// holds mu.
func (l *Library) afterFailure() error {
	if l.err == nil {
		return nil
	}
	return fmt.Errorf("after an earlier failure: %w", l.err)
}

// failure returns the same as afterFailure, for callers that do not hold mu.
func (l *Library) failure() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.afterFailure()
}

// settle waits until the device no longer reads or writes the tensors of an operation that has failed,
// because they belong to the caller then. They are used until end, or until the end of all work if end is
// nil. If the device may still use them, settle returns an *ops.InUseError.
func (l *Library) settle(d *device, end *cuda.Event) error {
	l.mu.Lock()
	deadline := l.failedAt.Add(l.EndTimeout)
	l.mu.Unlock()
	ctx, cancel := context.WithDeadlineCause(context.Background(), deadline,
		fmt.Errorf("NCCL has not ended its work %v after its communicator was aborted", l.EndTimeout))
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- l.await(ctx, d, end) }() // a call of CUDA may wait for the device
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err == nil {
		return nil
	}
	return &ops.InUseError{Err: fmt.Errorf(
		"device %d may still use the buffers of the operation, which must not be used again: %w", d.Index(), err)}
}

// await waits until the device has done the work before end, or, if end is nil, all work. It releases end.
func (l *Library) await(ctx context.Context, d *device, end *cuda.Event) (err error) {
	if end == nil {
		if end, err = l.Devices.Mark(d.Index(), d.stream.Handle()); err != nil {
			return err
		}
	}
	if err = cuda.Poll(ctx, end.Query); err == nil {
		l.Devices.Release(end)
	}
	return err
}

// Close implements ops.Backend.
func (b *backend) Close() {
	if b.started { // peers may be gone
		b.library.Fail(errors.New("a backend was closed in an operation"))
	}
	b.library.end(b.comms)
	b.comms = nil
	for _, a := range b.activities {
		b.library.Devices.Release(a.after)
	}
	b.host.Close()
	if b.err == nil {
		b.err = errors.New("the backend was closed")
	}
}

// end ends communicators, together with the other ranks if no operation has failed. It does not wait for long
// for a rank that does not take part.
func (l *Library) end(comms []*communicator) {
	for _, c := range comms {
		if l.forget(c) {
			go c.destroy()
		}
	}
	awaitEnds(comms, l.EndTimeout)
}

// awaitEnds waits until NCCL has ended communicators, for at most the given time.
func awaitEnds(comms []*communicator, timeout time.Duration) {
	late := time.After(timeout)
	for _, c := range comms {
		select {
		case <-c.ended:
		case <-late:
			return
		}
	}
}

// Close releases the devices. All backends must have been closed. First it waits, but not for long, until
// NCCL has ended the communicators that were made after a failure. If a device does not end its work in time,
// Close returns an error and does not release the memory of the device that gohvd has allocated.
func (l *Library) Close() error {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	awaitEnds(l.late, l.EndTimeout)
	ctx, cancel := context.WithTimeoutCause(context.Background(), l.EndTimeout,
		fmt.Errorf("its work has not ended in %v", l.EndTimeout))
	defer cancel()
	var errs []error
	add := func(d *device, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("nccl: device %d: %w", d.Index(), err))
		}
	}
	// A device with several streams is released only if all have ended: freeing memory waits for them.
	inUse := make(map[int]bool)
	for _, d := range l.devices {
		d.close()
		if err := l.await(ctx, d, nil); err != nil && !inUse[d.Index()] {
			inUse[d.Index()] = true
			add(d, err)
		}
	}
	for _, d := range l.devices {
		if !inUse[d.Index()] {
			add(d, d.release())
		}
	}
	clear(l.devices)
	if len(errs) == 0 { // else the devices may still read the pinned memory
		for _, p := range l.pinned {
			errs = append(errs, p.device.FreeHost(p.memory))
		}
		clear(l.pinned)
		errs = append(errs, l.Devices.Close())
	}
	return errors.Join(errs...)
}

// release frees the memory of the device and its stream, which has no work.
func (d *device) release() error {
	errs := []error{d.Free(d.fused)}
	for _, memory := range d.retired {
		errs = append(errs, d.Free(memory))
	}
	return errors.Join(append(errs, d.stream.Close())...)
}
