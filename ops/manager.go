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

// Planner returns the algorithm that a backend uses for a response of r's kind whose output has numBytes
// bytes, in the process set that has the given members. t has the settings that rank 0 has changed last, or
// is nil. If the backend cannot run the response, the Planner returns an error. The error states only the
// reason, because the Registry adds the backend and the operation. The coordinator plans for all ranks;
// backends that use another backend plan at each rank. So a Planner must return the same result on every rank
// with the same capabilities. It may be called at any time, from any goroutine.
type Planner func(members []topo.Rank, r *message.Response, numBytes int64,
	t *message.Tuning) (message.Algorithm, error)

// Registration describes one backend of a Registry.
type Registration struct {
	ID   message.Backend
	Plan Planner
	// Lists reports whether, for the given kind and algorithm, the backend accepts the tensors as a list of
	// any length, reads and writes them in place, and scales them itself. If it does not, or if Lists is nil,
	// the engine packs the tensors into a fusion buffer and scales them.
	Lists func(message.Kind, message.Algorithm) bool
	// Devices is set if the backend accepts tensors in the memory of CUDA devices. Then it accepts no tensors
	// in host memory.
	Devices bool
	// New makes the backend of one process set for the set's lane. The slice ranks lists the members of the
	// set, and ranks[me] is this rank. Nobody changes the slice, so the backend may keep it. New does not
	// wait for other ranks.
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

// Plan chooses the first backend that can run r, and returns its ID and the algorithm. The arguments are
// those of a Planner. If no backend can run r, Plan returns an error that names each backend with its reason
// and wraps the reasons. Kinds that move no data need no backend: for them Plan returns NoBackend.
func (all Registry) Plan(members []topo.Rank, r *message.Response, numBytes int64,
	t *message.Tuning) (message.Backend, message.Algorithm, error) {
	if !r.Kind.MovesData() {
		return message.NoBackend, message.NoAlgorithm, nil
	}
	for i := range all {
		if alg, err := all[i].plan(members, r, numBytes, t); err == nil {
			return all[i].ID, alg, nil
		}
	}
	return message.NoBackend, message.NoAlgorithm, fmt.Errorf("ops: no backend can run %v %q of type %v: %w",
		r.Kind, r.Name, r.DType, all.refusals(members, r, numBytes, t))
}

// errNoDeviceBackend is the reason of WhyInHost if there is no backend for devices.
var errNoDeviceBackend = errors.New("HOROVOD_GPU_OPERATIONS is not nccl")

// WhyInHost returns the reason why the tensors of r, which are on CUDA devices, are copied to host memory.
func (all Registry) WhyInHost(members []topo.Rank, r *message.Response) error {
	i := slices.IndexFunc(all, func(r Registration) bool { return r.Devices })
	if i < 0 {
		return errNoDeviceBackend
	}
	_, err := all[i].plan(members, r, r.NumBytes(), nil)
	return err
}

// These are the reasons for which a backend does not run a response on tensors in the other kind of memory.
var (
	errDeviceMemory = errors.New("the tensor is on a CUDA device, and this backend reads only host memory")
	errHostMemory   = errors.New("the tensor is in host memory, and this backend reads only memory of CUDA devices")
)

// plan returns the algorithm with which the backend runs r, or the reason why it cannot.
func (b *Registration) plan(members []topo.Rank, r *message.Response, numBytes int64,
	t *message.Tuning) (message.Algorithm, error) {
	switch onDevices := r.Devices != nil; {
	case onDevices && !b.Devices:
		return message.NoAlgorithm, errDeviceMemory
	case !onDevices && b.Devices:
		return message.NoAlgorithm, errHostMemory
	}
	return b.Plan(members, r, numBytes, t)
}

// refusals returns the reasons for which the backends refuse r. Plan does not collect them itself, so that a
// response that the first backend refuses and the second one runs costs no memory.
func (all Registry) refusals(members []topo.Rank, r *message.Response, numBytes int64,
	t *message.Tuning) (refusals error) {
	for i := range all {
		_, err := all[i].plan(members, r, numBytes, t)
		if err = fmt.Errorf("%v: %w", all[i].ID, err); refusals != nil {
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
