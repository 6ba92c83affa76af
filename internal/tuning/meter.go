package tuning

import "time"

// maxNames bounds the memory of a meter. If a step has more tensors, or if a program gives each tensor a new
// name, the step is measured from its beginning again.
const maxNames = 1 << 16

// meter finds the steps of a program in its stream of granted tensors. A step ends when a tensor of the step
// is granted again, because a program submits the same tensors in each step.
type meter struct {
	names map[string]struct{} // the tensors of the step
	bytes int64               // the sum of their sizes
	begun time.Duration       // the time at which the first of them was granted
}

// add adds a tensor that was granted at the given time. If the tensor begins another step, add returns the
// bytes and the duration of the step that has ended, and true.
func (m *meter) add(name string, bytes int64, at time.Duration) (total int64, took time.Duration,
	ended bool) {
	_, again := m.names[name]
	if again {
		total, took, ended = m.bytes, at-m.begun, true
	}
	if again || len(m.names) == 0 || len(m.names) >= maxNames {
		if m.names == nil {
			m.names = make(map[string]struct{})
		}
		clear(m.names)
		m.bytes, m.begun = 0, at
	}
	m.names[name] = struct{}{}
	m.bytes += bytes
	return total, took, ended
}
