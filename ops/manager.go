package ops

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// Registry is the backends of a job in the order of preference: for each response the first that can run it does. It is the
// same at all ranks.
type Registry []Registration

// Registration is one of them.
type Registration struct {
	ID message.Backend
	// Lists says that the backend takes any number of tensors for an allreduce from where they lie, and scales them, so that
	// they pass through no fusion buffer.
	Lists bool
	// New makes the backend of a process set on its lane, for the rank that has position me.
	New func(set topo.ProcessSetID, ranks []topo.Rank, me int) (Backend, error)
}

// Manager has the backends of one process set.
type Manager struct {
	registry Registry
	backends []Backend // as registry
}

// NewManager makes the backends of a process set. Those that were made are closed if one fails.
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

// Plan returns the first backend that can run r, which has numBytes of output, and the algorithm it would use. If
// there is none, the error names each that was tried and wraps its reason. Kinds that move no data need none: they get
// NoBackend. It may be called while operations run.
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

// Get returns the backend that a granted response names, and whether it takes lists.
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
