package ops

import (
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/message"
)

// Manager chooses who runs a response: for each kind the first of an ordered list of backends that can. The zero value
// has no backends. Once all are added it is safe for concurrent use.
type Manager struct {
	byKind map[message.Kind][]Backend
	byID   map[message.Backend]Backend
}

// Add puts b at the end of the lists of kinds. It may be called again for other kinds, so each has its own order. It
// fails if another backend has b's ID already.
func (m *Manager) Add(b Backend, kinds ...message.Kind) error {
	id := b.ID()
	if other, ok := m.byID[id]; ok && other != b {
		return fmt.Errorf("ops: add backend %v: there is another one of that name", id)
	}
	if m.byID == nil {
		m.byID = make(map[message.Backend]Backend)
		m.byKind = make(map[message.Kind][]Backend)
	}
	m.byID[id] = b
	for _, k := range kinds {
		m.byKind[k] = append(m.byKind[k], b)
	}
	return nil
}

// Plan returns the first backend that can run r, which has numBytes of output, and the algorithm it would use. If
// there is none, the error names each that was tried and wraps its reason. Kinds that move no data need none: they get
// NoBackend.
func (m *Manager) Plan(r *message.Response, numBytes int64) (message.Backend, message.Algorithm, error) {
	if !r.Kind.MovesData() {
		return message.NoBackend, message.NoAlgorithm, nil
	}
	var refusals error
	for _, b := range m.byKind[r.Kind] {
		alg, err := b.Plan(r, numBytes)
		if err == nil {
			return b.ID(), alg, nil
		}
		if err = fmt.Errorf("%v: %w", b.ID(), err); refusals != nil {
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

// Get returns the backend that a granted response names.
func (m *Manager) Get(id message.Backend) (Backend, error) {
	if b, ok := m.byID[id]; ok {
		return b, nil
	}
	return nil, fmt.Errorf("ops: got backend %v, which this rank does not have", id)
}
