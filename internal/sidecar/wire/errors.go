package wire

import (
	"errors"
	"fmt"
	"strings"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/failure"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/ps"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Describe converts err to the message that is sent to a client. The texts of err need not be valid UTF-8: a
// path that is not may be in them.
func Describe(err error) *sidecarpb.Error {
	d := failure.Describe(err)
	valid := func(text string) string { return strings.ToValidUTF8(text, "\uFFFD") }
	e := &sidecarpb.Error{Class: uint32(d.Class), Text: valid(d.Text), Operation: valid(d.Operation),
		Tensor: valid(d.Tensor), ShutDown: d.ShutDown}
	for _, r := range d.Ranks {
		e.Ranks = append(e.Ranks, int32(r))
	}
	return e
}

// quoted is an error of the sidecar whose text is not the text of a known type. It matches what err matches.
type quoted struct {
	text string
	err  error
}

func (q *quoted) Error() string { return q.text }
func (q *quoted) Unwrap() error { return q.err }

// causes are the errors without fields that an error of the sidecar may wrap.
var causes = []error{rank.ErrNotInitialized, engine.ErrShutDown, engine.ErrCutShort, engine.ErrClosed,
	engine.ErrNoProcessSet}

// ErrorOf reverses Describe: it returns an error with the text of the error that the sidecar has described,
// and of the same types.
func ErrorOf(e *sidecarpb.Error) error {
	err := causeOf(e, reasonIn(e))
	op, tensor := e.GetOperation(), e.GetTensor()
	switch failure.Class(e.GetClass()) {
	case failure.Usage, failure.Duplicate, failure.NotInitialized:
		if op != "" {
			err = &engine.UsageError{Op: op, Tensor: tensor, Err: err}
		} else if failure.Class(e.GetClass()) == failure.Usage && !errors.Is(err, engine.ErrNoProcessSet) {
			err = &ps.UsageError{Err: err}
		}
	default:
		if op != "" {
			err = &engine.OpError{Op: op, Tensor: tensor, Err: err}
		}
	}
	if err.Error() != e.GetText() {
		err = &quoted{e.GetText(), err}
	}
	return err
}

// reasonIn returns the text of e without the operation and the tensor before it.
func reasonIn(e *sidecarpb.Error) string {
	op, tensor := e.GetOperation(), e.GetTensor()
	if op == "" {
		return e.GetText()
	}
	rest, named := strings.CutPrefix(e.GetText(), "hvd: ")
	if !named {
		return e.GetText()
	}
	prefix := fmt.Sprintf("%s %q: ", op, tensor)
	if tensor == "" && !strings.HasPrefix(rest, prefix) {
		prefix = op + ": "
	}
	// A cause that begins with the operation and the tensor itself is not prefixed by them (engine.OpError).
	if failure.Class(e.GetClass()) == failure.Duplicate || failure.Class(e.GetClass()) == failure.Mismatch {
		return rest
	}
	return strings.TrimPrefix(rest, prefix)
}

// causeOf returns the error with the text reason that an error of the sidecar wraps.
func causeOf(e *sidecarpb.Error, reason string) error {
	for _, c := range causes {
		if reason == c.Error() {
			return c
		}
	}
	switch failure.Class(e.GetClass()) {
	case failure.Duplicate:
		return &tensorqueue.DuplicateNameError{Op: e.GetOperation(), Name: e.GetTensor()}
	case failure.Mismatch:
		return &engine.MismatchError{Tensor: e.GetTensor(), Text: reason}
	case failure.Peer:
		p := &engine.PeerError{ShutDown: e.GetShutDown()}
		for _, r := range e.GetRanks() {
			p.Ranks = append(p.Ranks, int(r))
		}
		p.Reason = reason
		if at := strings.Index(reason, p.Error()[:len(p.Error())-len(reason)]); at >= 0 {
			p.Reason = reason[at+len(p.Error())-len(reason):]
		}
		if p.Error() != reason {
			return &quoted{reason, p}
		}
		return p
	case failure.Stall:
		s := new(engine.StallError)
		_, after, found := strings.Cut(reason, s.Error())
		s.Reason = after
		if !found {
			s.Reason = reason
		}
		if s.Error() != reason {
			return &quoted{reason, s}
		}
		return s
	case failure.NotInitialized:
		return &quoted{reason, rank.ErrNotInitialized}
	case failure.ShutDown:
		return &quoted{reason, engine.ErrShutDown}
	case failure.Closed:
		return &quoted{reason, engine.ErrClosed}
	}
	return errors.New(reason)
}
