package sidecar

import (
	"errors"
	"fmt"
	"math"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

const (
	// maxArenaBytes is the maximum size of a client's arena.
	maxArenaBytes = 1 << 40
	// maxArenas is the maximum number of arenas of the client. There is a limit because each arena needs a
	// descriptor and a mapping in this process and in every peer.
	maxArenas = 4096
)

// memory is a map from the numbers of the arenas of a client to the arenas.
type memory struct {
	mu  sync.Mutex
	all map[uint32]*clientArena
}

// clientArena is an arena of a client.
type clientArena struct {
	number uint32
	id     uint32 // ID of the chunk that package arena has assigned to the arena
	bytes  []byte
	users  int  // number of inputs and outputs in this arena that belong to operations in flight
	left   bool // the client has left, so the arena is removed when its last use ends
}

// location is the position of an input or an output in an arena of the client.
type location struct {
	arena            uint32
	offset, numBytes uint64
	none             bool // this is an output that the sidecar allocates, so it has no location
	// The field to is the memory at this location. It is set again for each execution.
	to []byte
}

// end returns the offset in the arena at which p ends. If that offset does not fit in 64 bits, end returns
// 2^64-1, which is outside every arena.
func (p *location) end() uint64 {
	if p.offset > math.MaxUint64-p.numBytes {
		return math.MaxUint64
	}
	return p.offset + p.numBytes
}

// same reports whether p and q are the same location.
func (p *location) same(q *location) bool {
	return p.arena == q.arena && p.offset == q.offset && p.numBytes == q.numBytes && p.none == q.none
}

// add maps the file fd and records it as the arena with the given number. It takes ownership of fd, even if
// it returns an error.
func (m *memory) add(number uint32, numBytes uint64, fd int) error {
	if number == 0 || number >= wire.OwnArenas || numBytes == 0 || numBytes > maxArenaBytes {
		discard(fd)
		return fmt.Errorf("got arena %d of %d bytes, want a number from 1 to 2^31-1, and 1 to 2^40 bytes", number,
			numBytes)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.all[number] != nil:
		discard(fd)
		return fmt.Errorf("arena %d already exists", number)
	case len(m.all) >= maxArenas:
		discard(fd)
		return fmt.Errorf("arena %d: the client already has %d arenas, which is the limit", number, len(m.all))
	}
	s, err := shmem.Adopt(fd)
	if err != nil {
		return fmt.Errorf("arena %d: %w", number, err)
	}
	if got := uint64(len(s.Bytes())); got != numBytes {
		return errors.Join(fmt.Errorf("arena %d: the file has %d bytes, want %d as in the request", number,
			got, numBytes), s.Close())
	}
	m.all[number] = &clientArena{number: number, id: arena.Adopt(s).ID, bytes: s.Bytes()}
	return nil
}

// of returns the arena with the given number. The caller holds mu.
func (m *memory) of(number uint32) (*clientArena, error) {
	g := m.all[number]
	if g == nil {
		return nil, fmt.Errorf("arena %d does not exist", number)
	}
	return g, nil
}

// drop removes an arena. It returns an error if an operation in flight uses the arena.
func (m *memory) drop(number uint32) error {
	m.mu.Lock()
	g, err := m.of(number)
	if err == nil && g.users > 0 {
		err = fmt.Errorf("arena %d cannot be removed: operations in flight use it %d times", number, g.users)
	}
	if err == nil {
		delete(m.all, number)
	}
	m.mu.Unlock()
	if err != nil {
		return err
	}
	return arena.Abandon(g.id)
}

// leave removes all arenas, because the client has left. If operations in flight use an arena, the arena is
// removed when the last of these operations ends.
func (m *memory) leave() error {
	m.mu.Lock()
	var unused []*clientArena
	for _, g := range m.all {
		g.left = true
		if g.users == 0 {
			delete(m.all, g.number)
			unused = append(unused, g)
		}
	}
	m.mu.Unlock()
	return closeAll(unused)
}

func closeAll(arenas []*clientArena) error {
	var errs []error
	for _, g := range arenas {
		errs = append(errs, arena.Abandon(g.id))
	}
	return errors.Join(errs...)
}

// use finds the memory of each location in places and stores it in the field "to" of the location. The arenas
// of the locations stay mapped until unuse is called. use appends them to the slice uses and returns the
// result. If it returns an error, it keeps no arena in use.
func (m *memory) use(places []location, uses []*clientArena) ([]*clientArena, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range places {
		p := &places[i]
		p.to = nil
		if p.numBytes == 0 {
			p.to = []byte{}
			if p.none {
				p.to = nil
			}
			continue
		}
		g, err := m.of(p.arena)
		if err == nil && (p.offset > uint64(len(g.bytes)) || p.numBytes > uint64(len(g.bytes))-p.offset) {
			err = fmt.Errorf("got a range of %d bytes at byte %d of arena %d, which has only %d bytes", p.numBytes,
				p.offset, p.arena, len(g.bytes))
		}
		if err != nil {
			for _, used := range uses {
				used.users--
			}
			return nil, err
		}
		p.to = g.bytes[p.offset : p.offset+p.numBytes : p.offset+p.numBytes]
		g.users++
		uses = append(uses, g)
	}
	return uses, nil
}

// unuse reverses use. If the client has left, it removes each arena that has no other uses.
func (m *memory) unuse(uses []*clientArena) error {
	if len(uses) == 0 {
		return nil
	}
	m.mu.Lock()
	var unused []*clientArena
	for _, g := range uses {
		if g.users--; g.users == 0 && g.left {
			delete(m.all, g.number)
			unused = append(unused, g)
		}
	}
	m.mu.Unlock()
	return closeAll(unused)
}

// chunks holds the chunks of the sidecar's own allocator by their IDs. A client gets the descriptor of a
// chunk when the chunk contains a result for the client.
type chunks struct {
	mu  sync.Mutex
	all map[uint32]*shmem.Segment
}

func (c *chunks) added(a arena.Chunk) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all[a.ID] = a.Segment
}

func (c *chunks) removed(id uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.all, id)
}

// announcement returns the notice that tells a client about chunk id, and a descriptor to send with the
// notice. The caller must ensure that the chunk is not removed meanwhile. A chunk that contains a tensor is
// never removed.
func (c *chunks) announcement(id uint32) (*sidecarpb.Reply, int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.all[id]
	if s == nil {
		return nil, -1, fmt.Errorf("chunk %d was removed", id)
	}
	// The seals let the client only read the chunk. In a job of one rank, no other code has set them before.
	if err := s.Seal(); err != nil {
		return nil, -1, fmt.Errorf("chunk %d: %w", id, err)
	}
	fd, err := unix.FcntlInt(uintptr(s.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("descriptor of chunk %d: %w", id, err)
	}
	return &sidecarpb.Reply{What: &sidecarpb.Reply_Arena{Arena: &sidecarpb.Arena{
		Arena: wire.OwnArenas + id, Bytes: uint64(len(s.Bytes())),
	}}}, fd, nil
}
