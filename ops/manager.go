package ops

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// Registry lists the backends of a job in order of preference: the first that can run a response runs it. It
// is the same on all ranks.
type Registry []Registration

// Registration describes one backend of a Registry.
type Registration struct {
	ID message.Backend
	// Lists says that the backend reads and writes the tensors of an allreduce in place, in any number, and
	// scales them itself. The tensors are then not packed into a fusion buffer.
	Lists bool
	// New makes the backend for a process set on its lane. ranks are the members of the set, and me is the
	// position of this rank among them.
	New func(set topo.ProcessSetID, ranks []topo.Rank, me int) (Backend, error)
}

// Manager holds the backends of one process set.
type Manager struct {
	registry Registry
	backends []Backend // in the order of registry
}

// NewManager makes the backends of a process set. If one of them fails, NewManager closes those that it has
// already made.
func NewManager(registry Registry, set topo.ProcessSetID, ranks []topo.Rank, me int) (*Manager, error) {
	m := &Manager{registry: registry}
	for _, r := range registry {
		b, err := r.New(set, ranks, me)
		if err != nil {
			m.Close()
			return nil, err
		}
		m.backends = append(m.backends, b)
	}
	return m, nil
}

// Plan returns the first backend that can run r, which has numBytes of output, and the algorithm that the
// backend would use. If no backend can run r, the error names each backend that was tried and wraps its
// reason. Kinds that move no data need no backend: for them Plan returns NoBackend. Plan may be called while
// operations run.
func (m *Manager) Plan(r *message.Response, numBytes int64) (message.Backend, message.Algorithm, error) {
	if !r.Kind.MovesData() {
		return message.NoBackend, message.NoAlgorithm, nil
	}
	var refusals error
	for i, b := range m.backends {
		id := m.registry[i].ID
		alg, err := b.Plan(r, numBytes)
		if err == nil {
			return id, alg, nil
		}
		if err = fmt.Errorf("%v: %w", id, err); refusals != nil {
			err = fmt.Errorf("%w; %w", refusals, err)
		}
		refusals = err
	}
	if refusals == nil {
		refusals = errors.New("none is configured")
	}
	return message.NoBackend, message.NoAlgorithm,
		fmt.Errorf("ops: no backend for %v %q of %v: %w", r.Kind, r.Name, r.DType, refusals)
}

// Get returns the backend with the given ID, which a granted response names, and whether the backend takes
// lists of tensors (Registration.Lists).
func (m *Manager) Get(id message.Backend) (b Backend, lists bool, err error) {
	i := slices.IndexFunc(m.registry, func(r Registration) bool { return r.ID == id })
	if i < 0 {
		return nil, false, fmt.Errorf("ops: got backend %v, which this rank does not have", id)
	}
	return m.backends[i], m.registry[i].Lists, nil
}

// Close closes the backends.
func (m *Manager) Close() {
	for _, b := range m.backends {
		b.Close()
	}
}
