package ops_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensor"
)

// planner is a backend that can only plan.
type planner struct {
	ops.Backend
	id  message.Backend
	alg message.Algorithm
	err error
}

func (p *planner) ID() message.Backend { return p.id }

func (p *planner) Plan(*message.Response, int64) (message.Algorithm, error) { return p.alg, p.err }

// Backends of numbers that no version of message knows yet stand for those that it will.
const (
	first  = message.Backend(101)
	second = message.Backend(102)
)

func TestManagerPlan(t *testing.T) {
	refusal := errors.New("no such processor")
	var m ops.Manager
	add(t, &m, &planner{id: first, err: refusal}, message.Allreduce)
	add(t, &m, &planner{id: second, alg: message.Tree}, message.Broadcast, message.Allreduce)
	add(t, &m, &planner{id: message.TCP, alg: message.Ring}, message.Allreduce, message.Broadcast)

	for kind, want := range map[message.Kind]struct {
		id  message.Backend
		alg message.Algorithm
	}{
		message.Allreduce: {second, message.Tree}, // the first refuses, the third comes too late
		message.Broadcast: {second, message.Tree},
		message.Barrier:   {message.NoBackend, message.NoAlgorithm},
		message.Join:      {message.NoBackend, message.NoAlgorithm},
		message.Error:     {message.NoBackend, message.NoAlgorithm},
	} {
		id, alg, err := m.Plan(&message.Response{Kind: kind, DType: tensor.Float32}, 4)
		if err != nil || id != want.id || alg != want.alg {
			t.Errorf("%v: got %v, %v, %v, want %v, %v", kind, id, alg, err, want.id, want.alg)
		}
	}
}

func TestManagerPlanNone(t *testing.T) {
	one, two := errors.New("no such processor"), errors.New("too long")
	var m ops.Manager
	r := &message.Response{Kind: message.Allreduce, Name: "g0", DType: tensor.Float32}
	_, _, err := m.Plan(r, 4)
	if want := `ops: no backend for allreduce "g0" of float32: none is configured`; err == nil || err.Error() != want {
		t.Errorf("got %v, want %v", err, want)
	}
	add(t, &m, &planner{id: message.TCP, err: one}, message.Allreduce)
	add(t, &m, &planner{id: first, err: two}, message.Allreduce)
	_, _, err = m.Plan(r, 4)
	if want := `ops: no backend for allreduce "g0" of float32: tcp: no such processor; Backend(101): too long`; err == nil || err.Error() != want {
		t.Errorf("got %v, want %v", err, want)
	}
	if !errors.Is(err, one) || !errors.Is(err, two) {
		t.Errorf("%v does not wrap the reasons", err)
	}
}

func TestManagerGet(t *testing.T) {
	var m ops.Manager
	b := &planner{id: first}
	add(t, &m, b, message.Allreduce)
	add(t, &m, b, message.Broadcast)
	if got, err := m.Get(first); err != nil || got != b {
		t.Errorf("got %v, %v, want the backend", got, err)
	}
	if err := m.Add(&planner{id: first}, message.Allgather); err == nil {
		t.Error("a second backend of the same name was taken")
	}
	for _, id := range []message.Backend{message.NoBackend, message.TCP, second} {
		if _, err := m.Get(id); err == nil || !strings.Contains(err.Error(), id.String()) {
			t.Errorf("got %v, want an error that names %v", err, id)
		}
	}
}

func add(t *testing.T, m *ops.Manager, b ops.Backend, kinds ...message.Kind) {
	t.Helper()
	if err := m.Add(b, kinds...); err != nil {
		t.Fatal(err)
	}
}
