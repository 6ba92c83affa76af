package wire

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/ps"
	"github.com/gohvd/gohvd/tensorqueue"
)

// An error has the same text and the same types after it was described and made again, so a program does not
// notice that the engine is in another process.
func TestErrorOf(t *testing.T) {
	op := func(err error) error { return &engine.OpError{Op: "allreduce", Tensor: "x", Err: err} }
	usage := func(tensor string, err error) error {
		return &engine.UsageError{Op: "allreduce", Tensor: tensor, Err: err}
	}
	peer := &engine.PeerError{Ranks: []int{1, 4}, Reason: "the connection to it has ended: allreduce: EOF"}
	for _, want := range []error{
		usage("", errors.New("got 3 tensors, want one")), usage("x", errors.New("a: b")),
		usage("x", engine.ErrNoProcessSet), usage("", rank.ErrNotInitialized),
		usage("x", &tensorqueue.DuplicateNameError{Op: "allreduce", Name: "x"}),
		op(&engine.MismatchError{Tensor: "x", Text: `allreduce "x": mismatched shapes: rank 0 sent a`}),
		&engine.MismatchError{Tensor: "x", Text: `hvd: send "x": got 3 bytes`},
		peer, op(peer), op(&engine.PeerError{Ranks: []int{2}, Reason: "shut down", ShutDown: true}),
		op(&engine.StallError{Reason: "rank 1 has not submitted x"}), &engine.StallError{Reason: "r"},
		op(engine.ErrShutDown), op(engine.ErrClosed), engine.ErrClosed, rank.ErrNotInitialized,
		&ps.UsageError{Err: errors.New("the keys are not sorted")}, op(errors.New("no memory")),
		errors.New("hvd: init: no such setting"),
	} {
		got := ErrorOf(Describe(want))
		if got.Error() != want.Error() || !reflect.DeepEqual(got, want) {
			t.Errorf("got %v %#v, want %v %#v", got, got, want, want)
		}
	}
}

// Any error can be sent, also one with a path that is not UTF-8. A client that gets no answer waits for ever.
func TestDescribeInvalidUTF8(t *testing.T) {
	d := Describe(&engine.OpError{Op: "\xff", Tensor: "\xff", Err: errors.New("open /srv/cl\xe9: no such file")})
	if _, err := proto.Marshal(d); err != nil || !strings.Contains(d.Text, "/srv/cl\uFFFD: no such file") {
		t.Errorf("got %q, %v", d.Text, err)
	}
}

// An error that has another form keeps its text, and matches what it matched.
func TestErrorOfOtherForms(t *testing.T) {
	init := fmt.Errorf("hvd: init: %w", &engine.PeerError{Ranks: []int{3}, Reason: "died"})
	got := ErrorOf(Describe(init))
	p, is := errors.AsType[*engine.PeerError](got)
	if got.Error() != init.Error() || !is || !reflect.DeepEqual(p, &engine.PeerError{Ranks: []int{3},
		Reason: "died"}) {
		t.Errorf("got %v, %#v", got, p)
	}
	for _, err := range []error{engine.ErrCutShort, engine.ErrClosed, engine.ErrShutDown,
		rank.ErrNotInitialized,
		&engine.StallError{Reason: "r"}} {
		of := fmt.Errorf("while this rank waited: %w", err)
		if got := ErrorOf(Describe(of)); got.Error() != of.Error() ||
			errors.Is(got, engine.ErrShutDown) != errors.Is(err, engine.ErrShutDown) ||
			errors.Is(got, engine.ErrClosed) != errors.Is(err, engine.ErrClosed) ||
			errors.Is(got, rank.ErrNotInitialized) != errors.Is(err, rank.ErrNotInitialized) {
			t.Errorf("got %v, want %v", got, of)
		}
	}
}
