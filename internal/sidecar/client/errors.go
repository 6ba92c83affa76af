package client

import (
	"errors"
	"fmt"
	"strings"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensorqueue"
)

func opError(q *message.Request, err error) error {
	return &engine.OpError{Op: q.Kind.String(), Tensor: q.Name, Err: err}
}

// stateError is a state with more words than it has by itself.
type stateError struct {
	text  string
	state error
}

func (e *stateError) Error() string { return e.text }

func (e *stateError) Unwrap() error { return e.state }

// state is a state, with the words of the sidecar if they are more.
func state(text string, s error) error {
	if text == s.Error() {
		return s
	}
	return &stateError{text, s}
}

// after is what text says behind mark, or all of it.
func after(text, mark string) string {
	if _, rest, ok := strings.Cut(text, mark); ok {
		return rest
	}
	return text
}

// cause is what the sidecar says has gone wrong, as the engine would have said it, without the operation and its tensor. q is the
// request that it answers, or nil.
func cause(r *sidecarpb.Error, q *message.Request) error {
	text := strings.TrimPrefix(r.GetText(), "hvd: ")
	if r.GetClass() == wire.ClassMismatch {
		return &engine.MismatchError{Tensor: r.GetTensor(), Text: text}
	}
	for _, head := range []string{"shutdown: ", fmt.Sprintf("%s %q: ", r.GetOperation(), r.GetTensor()), r.GetOperation() + ": "} {
		text = strings.TrimPrefix(text, head)
	}
	switch r.GetClass() {
	case wire.ClassDuplicate:
		if q == nil {
			break
		}
		return &tensorqueue.DuplicateNameError{Kind: q.Kind, Name: r.GetTensor()}
	case wire.ClassPeer:
		p := &engine.PeerError{ShutDown: r.GetShutDown()}
		for _, rank := range r.GetRanks() {
			p.Ranks = append(p.Ranks, int(rank))
		}
		p.Reason = after(text, p.Error()) // which has no reason yet
		return p
	case wire.ClassStall:
		return &engine.StallError{Reason: after(text, "the job was shut down: ")}
	case wire.ClassShutDown:
		return state(text, engine.ErrShutDown)
	case wire.ClassNotInitialized: // the job was ended for another client of the sidecar
		return engine.ErrShutDown
	case wire.ClassClosed:
		return state(text, engine.ErrClosed)
	case wire.ClassUsage:
		if strings.HasSuffix(text, engine.ErrNoProcessSet.Error()) {
			return state(text, engine.ErrNoProcessSet)
		}
	}
	return errors.New(text)
}

// errorOf is the error of an operation, of which q is the request, or the first.
func errorOf(r *sidecarpb.Error, q *message.Request) error {
	op, tensor := r.GetOperation(), r.GetTensor()
	if op == "" {
		op, tensor = q.Kind.String(), q.Name
	}
	why := cause(r, q)
	misuse := r.GetClass() == wire.ClassUsage || r.GetClass() == wire.ClassDuplicate
	// What a removed set leaves unanswered is no misuse by who had asked before.
	if misuse && !errors.Is(why, engine.ErrNoProcessSet) {
		return &engine.UsageError{Op: op, Tensor: tensor, Err: why}
	}
	return &engine.OpError{Op: op, Tensor: tensor, Err: why}
}

// initError is why Init has failed.
func initError(r *sidecarpb.Error) error {
	return errors.New(strings.TrimPrefix(strings.TrimPrefix(r.GetText(), "hvd: "), "init: "))
}
