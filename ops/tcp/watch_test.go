package tcp

import (
	"context"
	"errors"
	"testing"
)

// A context ends so late that the operation itself does not notice it. The watch still aborts the lane, and
// end returns the cause of the context.
func TestWatchTells(t *testing.T) {
	reason, other := errors.New("no time left"), errors.New("peer died")
	ctx, cancel := context.WithCancelCause(t.Context())
	aborted := make(chan error, 1)
	w := watch{abort: func(err error) { aborted <- err }}
	if err := w.begin(ctx); err != nil {
		t.Fatal(err)
	}
	cancel(reason)
	if err := <-aborted; err != reason {
		t.Errorf("aborted with %v, want %v", err, reason)
	}
	for _, err := range []error{nil, other} {
		if got := w.end(err); got != reason {
			t.Errorf("operation ended with %v: got %v, want %v", err, got, reason)
		}
	}
}
