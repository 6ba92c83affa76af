//go:build nccl && cgo

package nccl

import (
	"context"
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/ops"
)

// fail ends the backend because the operation has failed with err. It returns err with the kind of the
// operation.
func (b *backend) fail(err error) error {
	if e, ok := errors.AsType[*Error](err); ok && !e.isLocal() {
		err = &ops.UnknownRankError{Ranks: b.ranks, Err: err}
	}
	b.err = fmt.Errorf("ops/nccl: %v: %w", b.op.Kind, err)
	b.library.Fail(b.err)
	if err := b.abort(); err != nil {
		return fmt.Errorf("%w; %w", b.err, err)
	}
	return b.err
}

// Fail records err as the reason why an operation or the job has failed, unless one is recorded already. From
// then on, no operation is launched, and closing a backend aborts its communicators instead of waiting for
// the other ranks.
func (l *Library) Fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = err
	}
	l.turn.Broadcast()
}

// abort aborts the communicators and waits until the device no longer reads or writes the tensors of the
// operation, because they belong to the caller again when the operation has failed. If the device may still
// do so, abort returns an *ops.InUseError.
func (b *backend) abort() error {
	comms, launched, end, d := b.comms, b.launched, b.done, b.device
	b.comms, b.launched, b.done = nil, false, nil
	if len(comms) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), b.library.EndTimeout,
		fmt.Errorf("NCCL has not ended its work %v after its communicator was aborted", b.library.EndTimeout))
	defer cancel()
	ended := make(chan error, 1)
	go func() { // NCCL may wait for the device in ncclCommAbort
		var errs []error
		for _, c := range comms {
			errs = append(errs, c.abort())
		}
		err := errors.Join(errs...)
		if launched {
			err = b.library.await(ctx, d, end)
		}
		ended <- err
	}()
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil && launched {
		return &ops.InUseError{Err: fmt.Errorf(
			"device %d may still use the buffers of the operation, which must not be used again: %w", d.Index(),
			err)}
	}
	return err
}

// await waits until the device has done the work before end, or, if end is nil, all work. It releases end.
func (l *Library) await(ctx context.Context, d *device, end *cuda.Event) (err error) {
	if end == nil {
		if end, err = l.Devices.Mark(d.Index(), d.stream.Handle()); err != nil {
			return err
		}
	}
	return cuda.Poll(ctx, func() (done bool, err error) {
		if done, err = end.Query(); done {
			l.Devices.Release(end)
		}
		return done, err
	})
}

// finalize ends the communicators together with the other ranks. If another rank does not take part in time,
// or any error occurs, it aborts the communicators that have not ended.
func (b *backend) finalize() {
	ctx, cancel := context.WithTimeoutCause(context.Background(), b.library.EndTimeout,
		errors.New("another rank has not finalized its communicator"))
	defer cancel()
	for _, c := range b.comms {
		if c.finalize() != nil {
			b.abort()
			return
		}
	}
	for len(b.comms) > 0 {
		if cuda.Poll(ctx, b.comms[0].progress) != nil {
			b.abort()
			return
		}
		b.comms[0].destroy()
		b.comms = b.comms[1:]
	}
}

// Close implements ops.Backend.
func (b *backend) Close() {
	b.library.mu.Lock()
	failed := b.library.err != nil
	b.library.mu.Unlock()
	if failed || b.started { // peers may be gone
		b.abort()
	} else {
		b.finalize()
	}
	b.release()
	b.host.Close()
	if b.err == nil {
		b.err = errors.New("the backend was closed")
	}
}

// Close releases the devices. All backends must have been closed. If a device does not end its work in time,
// Close returns an error and does not release the memory of the device that gohvd has allocated.
func (l *Library) Close() error {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	ctx, cancel := context.WithTimeoutCause(context.Background(), l.EndTimeout,
		fmt.Errorf("its work has not ended in %v", l.EndTimeout))
	defer cancel()
	var errs []error
	for _, d := range l.devices {
		err := l.await(ctx, d, nil)
		if err == nil {
			err = d.release()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("nccl: device %d: %w", d.Index(), err))
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
