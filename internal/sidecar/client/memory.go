package client

import (
	"errors"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
)

// memory has the chunks that the sidecar can map. The program allocates tensors in the chunks of this
// process. Operations on other memory are staged in the chunks of the heap, which belong to the connection.
type memory struct {
	client *Client
	heap   arena.Heap
	stops  [2]func()
	of     [2]func(b []byte) (arena.Ref, bool)

	mu     sync.Mutex
	chunks [2]map[uint32]*chunk // the chunks of the process, and those of the heap, by ID
	last   uint32               // the number of the last arena
}

// chunk is a chunk that the sidecar can map.
type chunk struct {
	arena.Chunk
	number uint32 // of the arena that the chunk is for the sidecar

	mapping sync.Mutex  // held while the chunk is sent to the sidecar
	sent    atomic.Bool // set when the sidecar has answered
	mapped  bool        // whether the sidecar has mapped the chunk; valid if sent is set
}

// place is where the sidecar finds the memory of a tensor.
type place struct {
	arena  uint32
	offset int64
}

func (m *memory) watch(c *Client) {
	m.client = c
	m.of = [2]func([]byte) (arena.Ref, bool){arena.Find, m.heap.Find}
	for i, watch := range [2]func(func(arena.Chunk), func(uint32)) func(){arena.Watch, m.heap.Watch} {
		m.chunks[i] = make(map[uint32]*chunk)
		m.stops[i] = watch(func(a arena.Chunk) { m.added(i, a) }, func(id uint32) { m.removed(i, id) })
	}
}

// added records a chunk.
func (m *memory) added(i int, a arena.Chunk) {
	if a.Adopted {
		return // another process allocates in the chunk
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last++
	m.chunks[i][a.ID] = &chunk{Chunk: a, number: m.last}
}

func (m *memory) removed(i int, id uint32) {
	m.mu.Lock()
	k := m.chunks[i][id]
	delete(m.chunks[i], id)
	m.mu.Unlock()
	if k != nil && k.sent.Load() {
		m.client.sendLater(&sidecarpb.Request{What: &sidecarpb.Request_DropArena{
			DropArena: &sidecarpb.DropArena{Arena: k.number}}})
	}
}

// find returns where the sidecar finds b. If ok is false, the sidecar cannot map the memory.
func (m *memory) find(b []byte) (p place, ok bool, err error) {
	for i, find := range m.of {
		ref, found := find(b)
		if !found {
			continue
		}
		m.mu.Lock()
		k := m.chunks[i][ref.Chunk]
		m.mu.Unlock()
		if k == nil {
			return p, false, nil
		}
		if ok, err = m.ensureMapped(k); err != nil {
			return p, false, err
		}
		return place{k.number, ref.Offset}, ok, nil
	}
	return p, false, nil
}

// ensureMapped sends the chunk to the sidecar unless that was done before. It reports whether the sidecar has
// mapped it. The sidecar refuses a chunk that another process has sealed.
func (m *memory) ensureMapped(k *chunk) (bool, error) {
	if k.sent.Load() {
		return k.mapped, nil
	}
	k.mapping.Lock()
	defer k.mapping.Unlock()
	if k.sent.Load() {
		return k.mapped, nil
	}
	fd, err := unix.FcntlInt(uintptr(k.Segment.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return false, err
	}
	_, err = m.client.ask(&sidecarpb.Request{What: &sidecarpb.Request_Arena{
		Arena: &sidecarpb.Arena{Arena: k.number, Bytes: uint64(len(k.Segment.Bytes()))}}}, fd)
	if _, over := errors.AsType[*DeadError](err); over {
		return false, err
	}
	k.mapped = err == nil
	k.sent.Store(true)
	return k.mapped, nil
}

// stage allocates memory that the sidecar has mapped.
func (m *memory) stage(numBytes int) (b []byte, p place, err error) {
	if b, err = m.heap.Alloc(numBytes); err != nil {
		return nil, p, err
	}
	p, ok, err := m.find(b)
	if err == nil && !ok {
		err = errors.New("the sidecar cannot map memory of this process")
	}
	if err != nil {
		return nil, p, errors.Join(err, m.heap.Free(b))
	}
	return b, p, nil
}

func (m *memory) close() error {
	for _, stop := range m.stops {
		stop()
	}
	return m.heap.Close()
}
