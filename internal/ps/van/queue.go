package van

// queue is a priority queue of messages. Messages with a higher priority come first. Messages of equal
// priority keep their order.
type queue struct {
	items []item
	order uint64 // number of messages that were pushed
}

type item struct {
	f        *flight
	priority int32
	order    uint64
}

func (q *queue) before(i, j int) bool {
	a, b := &q.items[i], &q.items[j]
	return a.priority > b.priority || a.priority == b.priority && a.order < b.order
}

func (q *queue) push(f *flight, priority int32) {
	q.order++
	q.items = append(q.items, item{f, priority, q.order})
	for i := len(q.items) - 1; i > 0; {
		parent := (i - 1) / 2
		if !q.before(i, parent) {
			return
		}
		q.items[i], q.items[parent] = q.items[parent], q.items[i]
		i = parent
	}
}

// pop removes the first message. The queue must not be empty.
func (q *queue) pop() *flight {
	f := q.items[0].f
	last := len(q.items) - 1
	q.items[0], q.items[last] = q.items[last], item{}
	q.items = q.items[:last]
	for i := 0; ; {
		least := i
		for child := 2*i + 1; child <= 2*i+2 && child < last; child++ {
			if q.before(child, least) {
				least = child
			}
		}
		if least == i {
			return f
		}
		q.items[i], q.items[least] = q.items[least], q.items[i]
		i = least
	}
}

func (q *queue) len() int { return len(q.items) }
