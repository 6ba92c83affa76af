package hvd

import (
	"errors"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Errors that operations return, to be compared with errors.Is.
var (
	// ErrNotInitialized is returned before Init and after Shutdown by calls that use the engine that Init
	// starts. Calls that name another engine with On or Over get ErrShutDown after the Shutdown of that
	// engine.
	ErrNotInitialized = errors.New("not initialized: call hvd.Init first")
	// ErrShutDown reports that an operation cannot run because this rank has shut down, or because every rank
	// that could have submitted it has shut down. Two other errors match ErrShutDown in errors.Is: a
	// *PeerError that names ranks that have shut down, and every *StallError.
	ErrShutDown = errors.New("this rank or the job was shut down before every rank had submitted the operation")
	// ErrClosed replaces ErrShutDown if the context of this rank's Shutdown ended before the other ranks were
	// ready to end the job, unless a verdict names other ranks: then the error is a *PeerError.
	ErrClosed = errors.New("the engine was closed")
	// ErrNoProcessSet reports that the process set of an operation has been removed. If the operation was
	// submitted before the removal, the error is an *OpError, and otherwise a *UsageError.
	ErrNoProcessSet = errors.New("the process set was removed, or this rank is not a member of it")
)

// UsageError reports that a call was wrong at this rank. Nothing was submitted, and the other ranks do not
// know of the call.
type UsageError struct {
	// Op is the operation, such as "allreduce". Tensor is its name, or "" if the call did not specify one.
	Op, Tensor string
	// Err is the cause.
	Err error
}

func (e *UsageError) Error() string {
	return (&engine.UsageError{Op: e.Op, Tensor: e.Tensor, Err: e.Err}).Error()
}

func (e *UsageError) Unwrap() error { return e.Err }

// DuplicateNameError says that the name of a new operation is in use: an earlier operation of this name is in
// flight, or the program has not observed that it is done. A DuplicateNameError is the cause of a UsageError.
type DuplicateNameError struct {
	// Op is the new operation, such as "allreduce". Name is its name.
	Op, Name string
}

func (e *DuplicateNameError) Error() string {
	return (&tensorqueue.DuplicateNameError{Op: e.Op, Name: e.Name}).Error()
}

// OpError wraps the error of an operation that was submitted.
type OpError struct {
	// Op is the operation, such as "allreduce". Tensor is its name.
	Op, Tensor string
	// Err is the cause.
	Err error
}

func (e *OpError) Error() string {
	return (&engine.OpError{Op: e.Op, Tensor: e.Tensor, Err: e.Err}).Error()
}

func (e *OpError) Unwrap() error { return e.Err }

// MismatchError says that the requests of the ranks for a tensor contradict each other, or that they cannot
// be executed. The job goes on.
type MismatchError struct {
	// Tensor is the name of the tensor.
	Tensor string
	// Text names the operation and the tensor, and says which rank sent what.
	Text string
}

func (e *MismatchError) Error() string { return e.Text }

// PeerError says that ranks have failed and that the epoch is over. Every pending operation and every later
// operation fails with it.
type PeerError struct {
	// Ranks holds the numbers of the ranks that have failed. If it is not known which of several ranks has
	// failed, it holds all of them.
	Ranks []int
	// Reason is a clause that says what was observed.
	Reason string
	// ShutDown is set if the ranks did not crash, but have shut down while other ranks waited for them. Then
	// the error is an ErrShutDown too.
	ShutDown bool
}

func (e *PeerError) Error() string {
	return (&engine.PeerError{Ranks: e.Ranks, Reason: e.Reason}).Error()
}

// Is reports whether target is ErrShutDown and the ranks have shut down.
func (e *PeerError) Is(target error) bool { return e.ShutDown && target == ErrShutDown }

// StallError says that the job was shut down because a tensor waited too long. A StallError is an
// ErrShutDown.
type StallError struct {
	// Reason names the operation, the tensor, the missing ranks and how long the tensor waited.
	Reason string
}

func (e *StallError) Error() string { return (&engine.StallError{Reason: e.Reason}).Error() }

// Is reports whether target is ErrShutDown.
func (e *StallError) Is(target error) bool { return target == ErrShutDown }

// NoMemoryError says that shared memory cannot be allocated. Alloc returns it.
type NoMemoryError struct {
	// What says what the memory is for, such as "tensor".
	What string
	// NeedBytes is the number of bytes that were needed.
	NeedBytes int64
	// Err is the cause, which names the limit that was reached if that limit is known.
	Err error
}

func (e *NoMemoryError) Error() string {
	return (&shmem.NoMemoryError{What: e.What, NeedBytes: e.NeedBytes, Err: e.Err}).Error()
}

func (e *NoMemoryError) Unwrap() error { return e.Err }

// InUseError says that an operation on device buffers has failed, and that the device may still read or write
// them. The program must not use or free these buffers until the process ends. The error of the operation
// matches both an InUseError and the reason for the failure.
type InUseError struct {
	// Err is the cause.
	Err error
}

func (e *InUseError) Error() string { return e.Err.Error() }

func (e *InUseError) Unwrap() error { return e.Err }

// convertedError stands for an error of an internal package that wraps errors. It has its text, and wraps
// the errors of this package instead.
type convertedError struct {
	text   string
	causes []error
}

func (e *convertedError) Error() string { return e.text }

func (e *convertedError) Unwrap() []error { return e.causes }

// sentinels holds the errors without fields of the engine, and what they are in this package.
var sentinels = [...]struct{ from, to error }{
	{engine.ErrShutDown, ErrShutDown}, {engine.ErrClosed, ErrClosed},
	{engine.ErrNoProcessSet, ErrNoProcessSet},
}

// public returns err with the errors that this package declares in place of those of the internal packages.
// Every error that a program gets passes through public. The text of err remains.
func public(err error) error {
	err, _ = convert(err)
	return err
}

// convert implements public. It also reports whether the result is another error than err.
func convert(err error) (result error, changed bool) {
	switch e := err.(type) {
	case nil:
		return nil, false
	case *engine.UsageError:
		return &UsageError{Op: e.Op, Tensor: e.Tensor, Err: public(e.Err)}, true
	case *engine.OpError:
		return &OpError{Op: e.Op, Tensor: e.Tensor, Err: public(e.Err)}, true
	case *engine.MismatchError:
		return &MismatchError{Tensor: e.Tensor, Text: e.Text}, true
	case *engine.PeerError:
		return &PeerError{Ranks: e.Ranks, Reason: e.Reason, ShutDown: e.ShutDown}, true
	case *engine.StallError:
		return &StallError{Reason: e.Reason}, true
	case *tensorqueue.DuplicateNameError:
		return &DuplicateNameError{Op: e.Op, Name: e.Name}, true
	case *shmem.NoMemoryError:
		return &NoMemoryError{What: e.What, NeedBytes: e.NeedBytes, Err: public(e.Err)}, true
	case *ops.InUseError:
		return &InUseError{Err: public(e.Err)}, true
	}
	var wrapped []error
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		wrapped = []error{e.Unwrap()}
	case interface{ Unwrap() []error }:
		wrapped = e.Unwrap()
	default:
		for _, s := range sentinels {
			if err == s.from {
				return s.to, true
			}
			if errors.Is(err, s.from) { // by a method Is of err
				return &convertedError{err.Error(), []error{s.to}}, true
			}
		}
		return err, false
	}
	causes := make([]error, len(wrapped))
	for i, w := range wrapped {
		cause, differs := convert(w)
		causes[i], changed = cause, changed || differs
	}
	if !changed {
		return err, false
	}
	return &convertedError{err.Error(), causes}, true
}
