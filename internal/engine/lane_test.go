package engine

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// unfinished is a backend whose operation, which was started, waits for a rank that does not come.
type unfinished struct {
	ops.Starter
	ended bool
}

func (b *unfinished) ID() message.Backend { return message.SHM }

func (b *unfinished) Finish(ctx context.Context) error {
	<-ctx.Done()
	b.ended = true
	return context.Cause(ctx)
}

// An operation that was started is ended at the backend before its tensors are answered, though the epoch is over before the
// lane comes to it: others may still read them.
func TestStartedWorkIsEndedBeforeItsAnswer(t *testing.T) {
	b := new(unfinished)
	m := new(ops.Manager)
	if err := m.Add(b, message.Allreduce); err != nil {
		t.Fatal(err)
	}
	l := &lane{
		set: controller.Global(2), queue: tensorqueue.New(), manager: m, observer: &observer{start: time.Now()}, bell: make(chan struct{}, 1),
		claimed: true,
	}
	var answer error
	e := &tensorqueue.Entry{Done: func(err error) {
		if answer = err; !b.ended {
			t.Error("answered before the backend has ended it")
		}
	}}
	e.Request = message.Request{Kind: message.Allreduce, Name: "x"}
	if err := l.queue.Add(e); err != nil {
		t.Fatal(err)
	}
	g := &controller.Grant{Backend: message.SHM, Responses: []*message.Response{{Kind: message.Allreduce, Name: "x"}}}
	ctx, cancel := context.WithCancelCause(t.Context())
	verdict := errors.New("rank 1 failed")
	// As at the end of an epoch.
	l.unclaim(&work{grant: g, entries: []*tensorqueue.Entry{e}, started: true})
	l.end(verdict)
	cancel(verdict)
	l.run(ctx, func(*work, error) {})
	if !errors.Is(answer, verdict) {
		t.Errorf("answered with %v, want %v", answer, verdict)
	}
}

// A barrier that is answered in a turn of the loop does not overtake the answers of operations that the lane has executed.
func TestClaimInOrder(t *testing.T) {
	l := &lane{bell: make(chan struct{}, 1)}
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
	l.rest()
	if claim(true) || !claim(false) {
		t.Error("while it answers, the lane was taken for what must wait for the answers, or for nothing")
	}
	l.end(nil)
	l.next()
	l.ended = false
	if !claim(true) {
		t.Error("the lane was not taken after the answers")
	}
}
