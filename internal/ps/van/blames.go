package van

import "sync"

// blames tells the handler of the first node that has failed. The mu of members guards first and accused.
type blames struct {
	members *members
	handler Handler
	accused Process // the process that was blamed last
	// first is for the handler's method Blame. It is replaced when a process takes a place, or when the
	// connection with the accused process works again.
	first *sync.Once
}

// blame tells the handler that a node has failed, unless another one has failed before or this node leaves
// the job. It returns when the handler knows of the first failure.
func (b *blames) blame(p Process, err error) { b.blameAll([]Process{p}, nodeError(p.ID, err)) }

// blameAll is like blame, with the error that tells of the failure of the given nodes. It does nothing if
// another process has taken the place of the first one.
func (b *blames) blameAll(failed []Process, err error) {
	m := b.members
	m.mu.Lock()
	known, incarnation := m.nodes[failed[0].ID], failed[0].Incarnation
	replaced := known != nil && incarnation != 0 && incarnation != known.Incarnation
	leaving, first := m.leaving, b.first
	m.mu.Unlock()
	if !leaving && !replaced {
		first.Do(func() {
			m.mu.Lock()
			b.accused = failed[0].Whole()
			m.mu.Unlock()
			b.handler.Blame(failed, err)
		})
	}
}

// forgive lets the handler learn of the next failure. The caller holds the mu of members.
func (b *blames) forgive() { b.first = new(sync.Once) }
