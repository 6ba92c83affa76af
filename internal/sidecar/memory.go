package sidecar

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
)

const (
	// maxArenaBytes bounds an arena of a client.
	maxArenaBytes = 1 << 40
	// maxArenas bounds those of all clients, each of which takes a descriptor and a mapping here and at every peer.
	maxArenas = 4096
)

// memory is the arenas of the clients.
type memory struct {
	mu  sync.Mutex
	all map[uint32]*given
}

// given is an arena of a client.
type given struct {
	number uint32
	id     uint32 // of the chunk
	bytes  []byte
	owner  *conn
	users  int  // operations in flight, once for each of their tensors' places
	left   bool // the owner has gone: the last user takes it out
}

// add takes the arena that fd is, and fd.
func (m *memory) add(number uint32, numBytes uint64, fd int, owner *conn) error {
	if number == 0 || number >= ownArenas || numBytes == 0 || numBytes > maxArenaBytes {
		discard(fd)
		return fmt.Errorf("arena %d of %d bytes, want a number from 1 to 2^31-1 and at most 2^40 bytes", number, numBytes)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.all[number] != nil || len(m.all) >= maxArenas {
		discard(fd)
		if m.all[number] != nil {
			return fmt.Errorf("there is an arena %d already", number)
		}
		return fmt.Errorf("arena %d is one more than the %d that there can be", number, maxArenas)
	}
	s, err := shmem.Adopt(fd)
	if err != nil {
		return fmt.Errorf("arena %d: %w", number, err)
	}
	if got := uint64(len(s.Bytes())); got != numBytes {
		return errors.Join(fmt.Errorf("arena %d is a file of %d bytes, want the %d that the request says", number, got, numBytes), s.Close())
	}
	m.all[number] = &given{number: number, id: arena.Adopt(s).ID, bytes: s.Bytes(), owner: owner}
	return nil
}

// of is an arena of owner's. The caller holds mu.
func (m *memory) of(owner *conn, number uint32) (*given, error) {
	g := m.all[number]
	switch {
	case g == nil:
		return nil, fmt.Errorf("there is no arena %d", number)
	case g.owner != owner:
		return nil, fmt.Errorf("arena %d is another client's", number)
	}
	return g, nil
}

// drop gives owner an arena back.
func (m *memory) drop(owner *conn, number uint32) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	g, err := m.of(owner, number)
	switch {
	case err != nil:
		return err
	case g.users > 0:
		return fmt.Errorf("arena %d is in use: operations on %d places in it are in flight", number, g.users)
	}
	return m.remove(g)
}

// remove takes out what nobody uses. The caller holds mu.
func (m *memory) remove(g *given) error {
	delete(m.all, g.number)
	return arena.Abandon(g.id)
}

// leave takes out what was owner's, as soon as nobody uses it.
func (m *memory) leave(owner *conn) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var errs []error
	for _, g := range m.all {
		if g.owner != owner {
			continue
		}
		if g.left = true; g.users == 0 {
			errs = append(errs, m.remove(g))
		}
	}
	return errors.Join(errs...)
}

// use finds the memory of tensors of owner's, and has it stay until unuse. In uses it appends the arenas.
func (m *memory) use(owner *conn, places []location, uses []*given) ([]*given, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range places {
		p := &places[i]
		if p.to = nil; p.numBytes == 0 {
			if p.to = []byte{}; p.none {
				p.to = nil
			}
			continue
		}
		g, err := m.of(owner, p.arena)
		if err == nil && (p.offset > uint64(len(g.bytes)) || p.numBytes > uint64(len(g.bytes))-p.offset) {
			err = fmt.Errorf("%d bytes from byte %d of arena %d, which has %d", p.numBytes, p.offset, p.arena, len(g.bytes))
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

// unuse is the opposite of use.
func (m *memory) unuse(uses []*given) error {
	if len(uses) == 0 {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var errs []error
	for _, g := range uses {
		if g.users--; g.users == 0 && g.left {
			errs = append(errs, m.remove(g))
		}
	}
	return errors.Join(errs...)
}

// chunks are those of the sidecar's own allocator, of which clients are told when results are in them.
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

// news tells of chunk id, with a descriptor. There is a tensor in the chunk.
func (c *chunks) news(id uint32) (*sidecarpb.Reply, int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.all[id]
	if s == nil {
		return nil, -1, fmt.Errorf("chunk %d has gone", id)
	}
	// The client may read it, and nobody else has sealed it in a job of one.
	if err := s.Seal(); err != nil {
		return nil, -1, fmt.Errorf("chunk %d: %w", id, err)
	}
	fd, err := unix.FcntlInt(uintptr(s.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("descriptor of chunk %d: %w", id, err)
	}
	return &sidecarpb.Reply{What: &sidecarpb.Reply_Arena{Arena: &sidecarpb.Arena{
		Arena: ownArenas + id, Bytes: uint64(len(s.Bytes())),
	}}}, fd, nil
}
