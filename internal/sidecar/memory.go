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
	// maxArenaBytes is the largest size of a client's arena.
	maxArenaBytes = 1 << 40
	// maxArenas is the most arenas of all clients together. Each takes a descriptor and a mapping here and at
	// every peer.
	maxArenas = 4096
)

// memory is the set of the clients' arenas, by number.
type memory struct {
	mu  sync.Mutex
	all map[uint32]*clientArena
}

// clientArena is an arena of a client.
type clientArena struct {
	number uint32
	id     uint32 // ID of the chunk
	bytes  []byte
	owner  *conn
	users  int  // uses by operations in flight, one for each place of each tensor
	left   bool // the owner has gone; the end of the last use removes the arena
}

// add maps the arena behind fd and records it under its number for owner. It takes over fd, also if it
// returns an error.
func (m *memory) add(number uint32, numBytes uint64, fd int, owner *conn) error {
	if number == 0 || number >= ownArenas || numBytes == 0 || numBytes > maxArenaBytes {
		discard(fd)
		return fmt.Errorf("arena %d of %d bytes, want a number from 1 to 2^31-1, and 1 to 2^40 bytes", number,
			numBytes)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.all[number] != nil || len(m.all) >= maxArenas {
		discard(fd)
		if m.all[number] != nil {
			return fmt.Errorf("arena %d exists already", number)
		}
		return fmt.Errorf("arena %d: %d arenas exist, want at most %d", number, len(m.all), maxArenas)
	}
	s, err := shmem.Adopt(fd)
	if err != nil {
		return fmt.Errorf("arena %d: %w", number, err)
	}
	if got := uint64(len(s.Bytes())); got != numBytes {
		return errors.Join(fmt.Errorf("arena %d: the file has %d bytes, want the %d of the request", number,
			got, numBytes), s.Close())
	}
	m.all[number] = &clientArena{number: number, id: arena.Adopt(s).ID, bytes: s.Bytes(), owner: owner}
	return nil
}

// of returns the arena with a number, or an error if owner has none with that number. The caller holds mu.
func (m *memory) of(owner *conn, number uint32) (*clientArena, error) {
	g := m.all[number]
	switch {
	case g == nil:
		return nil, fmt.Errorf("no arena %d exists", number)
	case g.owner != owner:
		return nil, fmt.Errorf("arena %d belongs to another client", number)
	}
	return g, nil
}

// drop removes an arena of owner. It returns an error if operations in flight use it.
func (m *memory) drop(owner *conn, number uint32) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	g, err := m.of(owner, number)
	switch {
	case err != nil:
		return err
	case g.users > 0:
		return fmt.Errorf("arena %d is in use by operations in flight, in %d places", number, g.users)
	}
	return m.remove(g)
}

// remove removes an arena that no operation uses. The caller holds mu.
func (m *memory) remove(g *clientArena) error {
	delete(m.all, g.number)
	return arena.Abandon(g.id)
}

// leave removes the arenas of owner, each as soon as no operation uses it.
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

// use sets the memory of each place of an operation of owner, and keeps its arenas mapped until unuse. It
// returns uses with those arenas appended, once for each place. With an error nothing is in use.
func (m *memory) use(owner *conn, places []location, uses []*clientArena) ([]*clientArena, error) {
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
			err = fmt.Errorf("%d bytes from byte %d are not in arena %d, which has %d bytes", p.numBytes,
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

// unuse reverses use, and removes arenas whose owner has left and that no operation uses any more.
func (m *memory) unuse(uses []*clientArena) error {
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

// chunks holds the chunks of the sidecar's own allocator. A client receives a chunk's descriptor when results
// of the client are in it.
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

// announcement returns the notice of chunk id for a client and a descriptor to send with it. The caller makes
// sure that the chunk stays, because there is a tensor in it.
func (c *chunks) announcement(id uint32) (*sidecarpb.Reply, int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.all[id]
	if s == nil {
		return nil, -1, fmt.Errorf("chunk %d was removed", id)
	}
	// The seals make sure that the client can only read the chunk. In a job of one rank no other part of the
	// program has sealed it.
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
