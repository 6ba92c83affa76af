package engine

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// unfinished is a backend on which an operation was started. The operation waits for a rank that does not
// take part.
type unfinished struct {
	ops.Backend
	ended bool
}

func (b *unfinished) Start(ops.Operation) error { return nil }

func (b *unfinished) Step(ctx context.Context, _ bool) (ops.Progress, error) {
	<-ctx.Done()
	b.ended = true
	return ops.Waiting, context.Cause(ctx)
}

// An operation that was started is ended at the backend before its tensors are answered, because until then
// peers may read the tensors. This holds even if the epoch ends before the lane executes the operation.
func TestStartedWorkIsEndedBeforeItsAnswer(t *testing.T) {
	b := new(unfinished)
	m, err := ops.NewManager(
		ops.Registry{{ID: message.SHM, New: func(topo.ProcessSetID, []topo.Rank, int) (ops.Backend, error) {
			return b, nil
		}}},
		topo.Global, []topo.Rank{0, 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	l := &lane{
		set: controller.Global(2), queue: tensorqueue.New(), manager: m,
		observer: &observer{start: time.Now()}, claimed: true,
	}
	l.changed.L = &l.mu
	var answer error
	buf := make([]byte, 8)
	e := &tensorqueue.Entry{Input: buf, Output: buf, Done: func(err error) {
		if answer = err; !b.ended {
			t.Error("answered before the backend has ended it")
		}
	}}
	e.Request = message.Request{Kind: message.Allreduce, Name: "x"}
	if err := l.queue.Add(e); err != nil {
		t.Fatal(err)
	}
	g := &controller.Grant{Backend: message.SHM, Responses: []*message.Response{{
		Kind: message.Allreduce, Name: "x", DType: tensor.Int64, Op: tensor.Sum, Shape: tensor.Shape{1},
		Prescale: 1, Postscale: 1,
	}}}
	ctx, cancel := context.WithCancelCause(t.Context())
	verdict := errors.New("rank 1 failed")
	// The test produces the state of a lane at the end of an epoch.
	w := &work{grant: g, entries: []*tensorqueue.Entry{e}}
	if err := l.start(w); err != nil {
		t.Fatal(err)
	}
	l.unclaim(w)
	l.end(verdict)
	cancel(verdict)
	l.run(ctx, func(*work, error) {})
	if !errors.Is(answer, verdict) {
		t.Errorf("answered with %v, want %v", answer, verdict)
	}
}

// The loop cannot claim the lane for a barrier before the operations that the lane has executed are answered.
// So the barrier does not complete before their answers.
func TestClaimInOrder(t *testing.T) {
	l := &lane{observer: &observer{start: time.Now()}}
	l.changed.L = &l.mu
	l.push(&work{})
	if w, err := l.next(); w == nil || err != nil {
		t.Fatalf("got %v and error %v, want the work", w, err)
	}
	claim := func(inOrder bool) bool {
		claimed := l.claim(inOrder)
		if claimed {
			l.unclaim(nil)
		}
		return claimed
	}
	if claim(false) || claim(true) {
		t.Error("the lane was taken while it executes")
	}
	l.executed()
	if claim(true) || !claim(false) {
		t.Error("while it answers, the lane was taken for what must wait for the answers, or for nothing")
	}
	l.claim(false)
	l.answer(&work{grant: &controller.Grant{Responses: []*message.Response{{Kind: message.Allreduce}}}})
	l.unclaim(nil)
	if claim(true) {
		t.Error("after the loop has answered an operation, the lane was taken for what must wait for the answers of others")
	}
	l.end(nil)
	l.next()
	l.ended = false
	if !claim(true) {
		t.Error("the lane was not taken after the answers")
	}
}
