package hvd_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// closed is an error that matches engine.ErrShutDown by its method Is.
type closed struct{}

func (closed) Error() string { return "closed" }

func (closed) Is(target error) bool { return target == engine.ErrShutDown }

// TestErrorsAreOfThisPackage checks that errors of internal packages become errors of package hvd with the
// same text and the same causes.
func TestErrorsAreOfThisPackage(t *testing.T) {
	peer := &engine.PeerError{Ranks: []int{1, 2}, Reason: "silent", ShutDown: true}
	for _, c := range []struct {
		err  error
		want []error // the causes that the result has, and the types
	}{
		{&engine.UsageError{Op: "free", Err: io.EOF}, []error{&hvd.UsageError{Op: "free", Err: io.EOF}, io.EOF}},
		{&engine.UsageError{Op: "allreduce", Tensor: "x", Err: &tensorqueue.DuplicateNameError{Op: "allreduce", Name: "x"}},
			[]error{&hvd.DuplicateNameError{Op: "allreduce", Name: "x"}}},
		{&engine.UsageError{Op: "allreduce", Tensor: "x", Err: fmt.Errorf("set 3: %w", engine.ErrNoProcessSet)},
			[]error{hvd.ErrNoProcessSet}},
		{&engine.OpError{Op: "allreduce", Tensor: "x", Err: &engine.MismatchError{Tensor: "x", Text: `allreduce "x": no`}},
			[]error{&hvd.MismatchError{Tensor: "x", Text: `allreduce "x": no`}}},
		{&engine.OpError{Op: "allreduce", Tensor: "x", Err: peer},
			[]error{&hvd.PeerError{Ranks: []int{1, 2}, Reason: "silent", ShutDown: true}, hvd.ErrShutDown}},
		{&engine.OpError{Op: "allreduce", Tensor: "x", Err: &ops.InUseError{Err: peer}},
			[]error{&hvd.PeerError{Ranks: []int{1, 2}, Reason: "silent", ShutDown: true}, hvd.ErrShutDown}},
		{&engine.StallError{Reason: "stalled"}, []error{&hvd.StallError{Reason: "stalled"}, hvd.ErrShutDown}},
		{&shmem.NoMemoryError{What: "tensor", NeedBytes: 8, Err: io.EOF},
			[]error{&hvd.NoMemoryError{What: "tensor", NeedBytes: 8, Err: io.EOF}, io.EOF}},
		{fmt.Errorf("init: %w, %w", context.Canceled, peer), []error{context.Canceled,
			&hvd.PeerError{Ranks: []int{1, 2}, Reason: "silent", ShutDown: true}}},
		{engine.ErrShutDown, []error{hvd.ErrShutDown}}, {engine.ErrCutShort, []error{hvd.ErrShutDown}},
		{engine.ErrClosed, []error{hvd.ErrClosed}}, {engine.ErrNoProcessSet, []error{hvd.ErrNoProcessSet}},
		{closed{}, []error{hvd.ErrShutDown}}, {io.EOF, []error{io.EOF}},
	} {
		got := hvd.Public(c.err)
		if got.Error() != c.err.Error() {
			t.Errorf("got text %q, want %q", got, c.err)
		}
		for _, want := range c.want {
			found := reflect.New(reflect.TypeOf(want))
			if !errors.Is(got, want) && !(errors.As(got, found.Interface()) &&
				reflect.DeepEqual(found.Elem().Interface(), want)) {
				t.Errorf("%q: got no %T %q in it", got, want, want)
			}
		}
		checkTypes(t, got)
	}
}

// checkTypes checks that err wraps no error of an internal package.
func checkTypes(t *testing.T, err error) {
	t.Helper()
	if path := reflect.Indirect(reflect.ValueOf(err)).Type().PkgPath(); strings.Contains(path, "gohvd/internal/") ||
		strings.HasSuffix(path, "gohvd/tensorqueue") || strings.HasSuffix(path, "gohvd/ops") {
		t.Errorf("got a %T in the error %q", err, err)
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		if cause := e.Unwrap(); cause != nil {
			checkTypes(t, cause)
		}
	case interface{ Unwrap() []error }:
		for _, cause := range e.Unwrap() {
			checkTypes(t, cause)
		}
	}
}
