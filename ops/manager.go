package ops

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// Registry lists the backends of a job in order of preference: a response runs on the first backend of the
// list that can run it. All ranks have the same Registry.
type Registry []Registration

// Registration describes one backend of a Registry.
type Registration struct {
	ID message.Backend
	// Lists reports whether, for the given kind and algorithm, the backend accepts the tensors as a list of
	// any length, reads and writes them in place, and scales them itself. If it does not, or if Lists is nil,
	// the engine packs the tensors into a fusion buffer and scales them.
	Lists func(message.Kind, message.Algorithm) bool
	// Devices is set if the backend accepts tensors in the memory of CUDA devices. Then it accepts no tensors
	// in host memory.
	Devices bool
	// New makes the backend of one process set for the set's lane. The slice ranks lists the members of the
	// set, and ranks[me] is this rank. New does not wait for other ranks.
	New func(set topo.ProcessSetID, ranks []topo.Rank, me int) (Backend, error)
}

// Manager holds the backends of one process set.
type Manager struct {
	registry Registry
	backends []Backend // in the same order as in registry
}

// NewManager makes the backends of a process set. If one backend cannot be made, NewManager closes the
// backends that it has already made.
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

// Plan chooses the first backend of the registry that can run r, and returns its ID and the algorithm. The
// output of r has numBytes bytes, and the process set of r has the given members. t has the settings that
// rank 0 has changed last, or is nil. If no backend can run r, Plan returns an error that names each backend
// with its reason and wraps the reasons. Kinds that move no data need no backend: for them Plan returns
// NoBackend. Plan may be called while operations run.
func (m *Manager) Plan(members []topo.Rank, r *message.Response, numBytes int64,
	t *message.Tuning) (message.Backend, message.Algorithm, error) {
	if !r.Kind.MovesData() {
		return message.NoBackend, message.NoAlgorithm, nil
	}
	for i := range m.backends {
		if alg, err := m.plan(i, members, r, numBytes, t); err == nil {
			return m.registry[i].ID, alg, nil
		}
	}
	return message.NoBackend, message.NoAlgorithm, fmt.Errorf("ops: no backend can run %v %q of type %v: %w",
		r.Kind, r.Name, r.DType, m.refusals(members, r, numBytes, t))
}

// errNoDeviceBackend is the reason of WhyInHost if there is no backend for devices.
var errNoDeviceBackend = errors.New("HOROVOD_GPU_OPERATIONS is not nccl")

// WhyInHost returns the reason why the tensors of r, which are on CUDA devices, are copied to host memory.
func (m *Manager) WhyInHost(members []topo.Rank, r *message.Response) error {
	i := slices.IndexFunc(m.registry, func(r Registration) bool { return r.Devices })
	if i < 0 {
		return errNoDeviceBackend
	}
	_, err := m.plan(i, members, r, r.NumBytes(), nil)
	return err
}

// These are the reasons for which a backend does not run a response on tensors in the other kind of memory.
var (
	errDeviceMemory = errors.New("the tensor is on a CUDA device, and this backend reads only host memory")
	errHostMemory   = errors.New("the tensor is in host memory, and this backend reads only memory of CUDA devices")
)

// plan returns the algorithm with which backend i runs r, or the reason why it cannot.
func (m *Manager) plan(i int, members []topo.Rank, r *message.Response, numBytes int64,
	t *message.Tuning) (message.Algorithm, error) {
	switch onDevices := r.Devices != nil; {
	case onDevices && !m.registry[i].Devices:
		return message.NoAlgorithm, errDeviceMemory
	case !onDevices && m.registry[i].Devices:
		return message.NoAlgorithm, errHostMemory
	}
	return m.backends[i].Plan(members, r, numBytes, t)
}

// refusals returns the reasons for which the backends refuse r. Plan does not collect them itself, so that a
// response that the first backend refuses and the second one runs costs no memory.
func (m *Manager) refusals(members []topo.Rank, r *message.Response, numBytes int64,
	t *message.Tuning) (refusals error) {
	for i := range m.backends {
		_, err := m.plan(i, members, r, numBytes, t)
		if err = fmt.Errorf("%v: %w", m.registry[i].ID, err); refusals != nil {
			err = fmt.Errorf("%w; %w", refusals, err)
		}
		refusals = err
	}
	if refusals == nil {
		refusals = errors.New("no backend is configured")
	}
	return refusals
}

// Always returns true. It is the Registration.Lists of a backend that always accepts lists.
func Always(message.Kind, message.Algorithm) bool { return true }

// Get returns the backend with the given ID and whether it accepts lists of tensors for the given kind and
// algorithm (Registration.Lists). ID, kind and algorithm come from a granted response.
func (m *Manager) Get(id message.Backend, k message.Kind, alg message.Algorithm) (b Backend, lists bool,
	err error) {
	i := slices.IndexFunc(m.registry, func(r Registration) bool { return r.ID == id })
	if i < 0 {
		return nil, false, fmt.Errorf("ops: got a response for backend %v, which this rank does not have", id)
	}
	f := m.registry[i].Lists
	return m.backends[i], f != nil && f(k, alg), nil
}

// Close closes all backends.
func (m *Manager) Close() {
	for _, b := range m.backends {
		b.Close()
	}
}
