package library

import (
	"sync"

	"github.com/gohvd/gohvd/internal/rank"
)

// operations has the operations that the program has submitted, by name, so that a repeated operation needs
// no checks and no memory. If a name was used for several operations, operations has the last one.
type operations struct {
	mu     sync.Mutex
	all    map[string]*operation
	weight int // of all
}

// operation is an operation and its description. Neither is changed.
type operation struct {
	spec rank.Spec
	rank.Operation
}

// maxWeight bounds the memory of operations, to some 8 MB.
const maxWeight = 1 << 14

// find returns the operation that s describes. It keeps no reference to the memory of s.
func (all *operations) find(s *rank.Spec) (*rank.Operation, error) {
	all.mu.Lock()
	o := all.all[s.Name]
	all.mu.Unlock()
	if o != nil && o.spec.Equal(s) {
		return &o.Operation, nil
	}
	o = &operation{spec: s.Clone()}
	if err := o.Describe(&o.spec); err != nil {
		return nil, err
	}
	o.Hold = s.Name != ""
	all.keep(o)
	return &o.Operation, nil
}

// clear drops all operations, because they refer to names in the queues of the last job.
func (all *operations) clear() {
	all.mu.Lock()
	defer all.mu.Unlock()
	all.all, all.weight = nil, 0
}

// keep keeps o in place of the operation with the same name.
func (all *operations) keep(o *operation) {
	all.mu.Lock()
	defer all.mu.Unlock()
	if before := all.all[o.spec.Name]; before != nil {
		all.weight -= before.Weight()
		delete(all.all, o.spec.Name)
	}
	all.weight += o.Weight()
	if all.all == nil || all.weight > maxWeight {
		all.all, all.weight = make(map[string]*operation), o.Weight()
	}
	all.all[o.spec.Name] = o
}
