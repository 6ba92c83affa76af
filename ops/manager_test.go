package ops_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
)

// planner is a backend for tests whose methods other than Close are not called, and its Planner.
type planner struct {
	ops.Backend
	alg    message.Algorithm
	err    error
	closed bool
}

func (p *planner) Close() { p.closed = true }

func (p *planner) plan([]topo.Rank, *message.Response, int64, *message.Tuning) (message.Algorithm, error) {
	return p.alg, p.err
}

// first and second are IDs of backends that package message does not define.
const (
	first  = message.Backend(101)
	second = message.Backend(102)
)

// entry returns a registration of p with the given ID.
func entry(id message.Backend, p *planner) ops.Registration {
	made := func(topo.ProcessSetID, []topo.Rank, int) (ops.Backend, error) { return p, nil }
	return ops.Registration{ID: id, Plan: p.plan, New: made}
}

func newManager(t *testing.T, r ...ops.Registration) *ops.Manager {
	t.Helper()
	m, err := ops.NewManager(r, 3, []topo.Rank{1, 2}, 0)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestRegistryPlan(t *testing.T) {
	m := ops.Registry{
		entry(first, &planner{err: errors.New("no such processor")}),
		entry(second, &planner{alg: message.Tree}),
		entry(message.TCP, &planner{alg: message.Ring})}
	for kind, want := range map[message.Kind]struct {
		id  message.Backend
		alg message.Algorithm
	}{
		// The first backend cannot run an allreduce. The second can, and comes before TCP.
		message.Allreduce: {second, message.Tree},
		message.Barrier:   {message.NoBackend, message.NoAlgorithm},
		message.Join:      {message.NoBackend, message.NoAlgorithm},
		message.Error:     {message.NoBackend, message.NoAlgorithm},
	} {
		id, alg, err := m.Plan(nil, &message.Response{Kind: kind, DType: tensor.Float32}, 4, nil)
		if err != nil || id != want.id || alg != want.alg {
			t.Errorf("%v: got %v, %v, %v, want %v, %v", kind, id, alg, err, want.id, want.alg)
		}
	}
}

func TestRegistryPlanDevices(t *testing.T) {
	gpu := entry(first, &planner{alg: message.Tree})
	gpu.Devices = true
	m := ops.Registry{gpu, entry(message.TCP, &planner{alg: message.Ring})}
	r := &message.Response{Kind: message.Allreduce, Name: "g", DType: tensor.Float32}
	if id, _, err := m.Plan(nil, r, 4, nil); id != message.TCP || err != nil {
		t.Errorf("in host memory: got %v, %v, want %v", id, err, message.TCP)
	}
	r.Devices = []tensor.Device{tensor.CUDA(0), tensor.CUDA(1)}
	if id, _, err := m.Plan(nil, r, 4, nil); id != first || err != nil {
		t.Errorf("on devices: got %v, %v, want %v", id, err, first)
	}
	no := errors.New("no kernel for it")
	gpu = entry(first, &planner{err: no})
	gpu.Devices = true
	m = ops.Registry{gpu, entry(message.TCP, &planner{alg: message.Ring})}
	if err := m.WhyInHost(nil, r); !errors.Is(err, no) {
		t.Errorf("got %v, want %v", err, no)
	}
	_, _, err := ops.Registry{entry(message.TCP, new(planner))}.Plan(nil, r, 4, nil)
	if err == nil || !strings.Contains(err.Error(),
		"tcp: the tensor is on a CUDA device, and this backend reads only host memory") {
		t.Errorf("on devices without a backend for them: got %v", err)
	}
	r.Devices = nil
	_, _, err = ops.Registry{gpu}.Plan(nil, r, 4, nil)
	if err == nil || !strings.Contains(err.Error(), "the tensor is in host memory, and this backend reads only memory") {
		t.Errorf("in host memory with only a backend for devices: got %v", err)
	}
}

func TestRegistryPlanNone(t *testing.T) {
	one, two := errors.New("no such processor"), errors.New("too long")
	r := &message.Response{Kind: message.Allreduce, Name: "g0", DType: tensor.Float32}
	_, _, err := ops.Registry{}.Plan(nil, r, 4, nil)
	if want := `ops: no backend can run allreduce "g0" of type float32: no backend is configured`; err == nil ||
		err.Error() != want {
		t.Errorf("got %v, want %v", err, want)
	}
	_, _, err = ops.Registry{entry(message.TCP, &planner{err: one}), entry(first, &planner{err: two})}.Plan(
		nil, r, 4, nil)
	if want := `ops: no backend can run allreduce "g0" of type float32: tcp: no such processor; Backend(101): too long`; err == nil || err.Error() != want {
		t.Errorf("got %v, want %v", err, want)
	}
	if !errors.Is(err, one) || !errors.Is(err, two) {
		t.Errorf("%v does not wrap the reasons", err)
	}
}

func TestManagerGet(t *testing.T) {
	a, b := new(planner), new(planner)
	lists := entry(second, b)
	lists.Lists = ops.Always
	m := newManager(t, entry(first, a), lists)
	for id, want := range map[message.Backend]*planner{first: a, second: b} {
		got, lists, err := m.Get(id, message.Allreduce, message.Ring)
		if err != nil || got != want || lists != (id == second) {
			t.Errorf("%v: got %v, %v, %v, want its backend", id, got, lists, err)
		}
	}
	for _, id := range []message.Backend{message.NoBackend, message.TCP} {
		_, _, err := m.Get(id, message.Allreduce, message.Ring)
		if err == nil || !strings.Contains(err.Error(), id.String()) {
			t.Errorf("got %v, want an error that names %v", err, id)
		}
	}
}

// If the second backend of the registry cannot be made, NewManager returns the error and closes the first
// backend.
func TestManagerFails(t *testing.T) {
	a, boom := new(planner), errors.New("boom")
	_, err := ops.NewManager(ops.Registry{entry(first, a),
		{ID: second, New: func(set topo.ProcessSetID, ranks []topo.Rank, me int) (ops.Backend, error) {
			if set != 3 || len(ranks) != 2 || me != 1 {
				t.Errorf("made for position %d of ranks %v of set %d", me, ranks, set)
			}
			return nil, boom
		}}}, 3, []topo.Rank{1, 2}, 1)
	if !errors.Is(err, boom) || !a.closed {
		t.Errorf("got error %v, and the other backend is closed: %v", err, a.closed)
	}
}
