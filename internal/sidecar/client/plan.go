package client

import (
	"errors"
	"fmt"
	"sync"

	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

// Limits for the plans that are kept to be used again: their number, the bytes of their blocks, and the
// number of their tensors. The sidecar keeps at most 64 MiB of plans of a client, with about 300 bytes for a
// tensor.
const (
	maxIdlePlans   = 32768
	maxIdleBytes   = 512 << 20
	maxIdleTensors = 65536
)

// plan is an operation that is prepared in a slot, with its blocks of the heap. It can be used any number of
// times, but only by one call at a time.
type plan struct {
	key         string
	slot        uint32
	in, out     [][]byte // the block of each tensor; nil if it needs none
	inAt, outAt []place
	numBytes    int64 // of the blocks

	older, newer *plan // among the idle plans
}

// plans are the plans of a connection.
type plans struct {
	mu             sync.Mutex
	idle           map[string][]*plan
	oldest, newest *plan // the idle plans, in the order in which they became idle
	count          int
	numBytes       int64
	numTensors     int
	slots          []uint32 // free slots
	next           uint32   // the lowest slot that was never used
	buf            []byte   // for keys
}

func (s *plans) init() { s.idle = make(map[string][]*plan) }

// take returns a plan for t. It uses an idle one if there is one, and otherwise prepares a new one.
func (s *plans) take(c *Client, t *task) (*plan, error) {
	s.mu.Lock()
	s.buf = t.key(s.buf[:0])
	if idle := s.idle[string(s.buf)]; len(idle) > 0 {
		p := idle[len(idle)-1]
		s.idle[p.key] = idle[:len(idle)-1]
		s.unlink(p)
		s.mu.Unlock()
		return p, nil
	}
	p := &plan{key: string(s.buf)}
	n := len(s.slots)
	switch {
	case n > 0:
		p.slot, s.slots = s.slots[n-1], s.slots[:n-1]
	case s.next < wire.MaxSlots:
		p.slot = s.next
		s.next++
	default:
		s.mu.Unlock()
		return nil, fmt.Errorf("%d operations are prepared, want at most that many: wait for some of them first",
			wire.MaxSlots)
	}
	s.mu.Unlock()
	if err := p.prepare(c, t); err != nil {
		s.drop(c, p)
		return nil, err
	}
	return p, nil
}

// prepare allocates the blocks of p and sends its operation.
func (p *plan) prepare(c *Client, t *task) error {
	n := len(t.tensors)
	p.in, p.out, p.inAt, p.outAt = make([][]byte, n), make([][]byte, n), make([]place, n), make([]place, n)
	for i := range t.tensors {
		at := &t.tensors[i]
		var err error
		if at.inMode == staged {
			p.in[i], p.inAt[i], err = c.memory.stage(len(at.in))
		}
		if at.outMode == staged && err == nil {
			p.out[i], p.outAt[i], err = c.memory.stage(len(at.out))
		}
		if err != nil {
			return err
		}
		p.numBytes += int64(len(p.in[i]) + len(p.out[i]))
	}
	return c.send(&sidecarpb.Request{What: &sidecarpb.Request_Prepare{
		Prepare: &sidecarpb.Prepare{Slot: p.slot, Operation: t.describe(p)}}}, -1, nil)
}

// give keeps p to be used again. If too many plans are kept, it drops the oldest ones.
func (s *plans) give(c *Client, p *plan) {
	s.mu.Lock()
	s.idle[p.key] = append(s.idle[p.key], p)
	s.count++
	s.numBytes += p.numBytes
	s.numTensors += len(p.inAt)
	p.older, p.newer = s.newest, nil
	s.newest = p
	if p.older != nil {
		p.older.newer = p
	} else {
		s.oldest = p
	}
	var dropped []*plan
	for s.count > maxIdlePlans ||
		s.count > 1 && (s.numBytes > maxIdleBytes || s.numTensors > maxIdleTensors) {
		dropped = append(dropped, s.remove(s.oldest))
	}
	s.mu.Unlock()
	for _, p := range dropped {
		s.drop(c, p)
	}
}

// remove removes p from the idle plans and returns it. The caller holds mu.
func (s *plans) remove(p *plan) *plan {
	idle := s.idle[p.key]
	for i := range idle {
		if idle[i] == p {
			idle = append(idle[:i], idle[i+1:]...)
			break
		}
	}
	s.idle[p.key] = idle
	if len(idle) == 0 {
		delete(s.idle, p.key)
	}
	s.unlink(p)
	return p
}

// unlink removes p from the list of idle plans. The caller holds mu.
func (s *plans) unlink(p *plan) {
	if p.older != nil {
		p.older.newer = p.newer
	} else {
		s.oldest = p.newer
	}
	if p.newer != nil {
		p.newer.older = p.older
	} else {
		s.newest = p.older
	}
	s.count--
	s.numBytes -= p.numBytes
	s.numTensors -= len(p.inAt)
}

// drop frees the slot and the blocks of p, which is not idle.
func (s *plans) drop(c *Client, p *plan) {
	var errs []error
	for _, blocks := range [2][][]byte{p.in, p.out} {
		for _, b := range blocks {
			if b != nil {
				errs = append(errs, c.memory.heap.Free(b))
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		c.fail(fmt.Sprintf("cannot free memory: %v", err))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slots = append(s.slots, p.slot)
}

// clear drops all idle plans.
func (s *plans) clear(c *Client) {
	s.mu.Lock()
	var dropped []*plan
	for s.oldest != nil {
		dropped = append(dropped, s.remove(s.oldest))
	}
	s.mu.Unlock()
	for _, p := range dropped {
		s.drop(c, p)
	}
}
