package sidecar

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

const (
	// maxArenaBytes is the maximum size of a client's arena.
	maxArenaBytes = 1 << 40
	// maxArenas is the maximum number of arenas of all clients together. There is a limit because each arena
	// needs a descriptor and a mapping in this process and in every peer. Events have a limit of their own,
	// because they need neither, and each operation in flight needs one.
	maxArenas = 4096
	maxEvents = wire.MaxInFlight
)

// memory is a map from arena numbers to the arenas of all clients.
type memory struct {
	mu     sync.Mutex
	all    map[uint32]*clientArena
	events int // number of events in all
}

// clientArena is an arena of a client, in memory of the host or of a CUDA device, or an event of a device.
type clientArena struct {
	number uint32
	id     uint32 // ID of the chunk that package arena has assigned to the arena
	bytes  []byte
	// device is the memory or the event of a device. It is nil if the arena is in memory of the host.
	device *cuda.Imported
	owner  *conn
	users  int  // number of inputs and outputs in this arena that belong to operations in flight
	left   bool // the owner has left, so the arena is removed when its last use ends
}

// add maps the file fd and records it as the arena of owner with the given number. It takes ownership of fd,
// even if it returns an error.
func (m *memory) add(number uint32, numBytes uint64, fd int, owner *conn) error {
	if err := checkArena(number, numBytes); err != nil {
		discard(fd)
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.room(number, false); err != nil {
		discard(fd)
		return err
	}
	s, err := shmem.Adopt(fd)
	if err != nil {
		return fmt.Errorf("arena %d: %w", number, err)
	}
	if got := uint64(len(s.Bytes())); got != numBytes {
		return errors.Join(fmt.Errorf("arena %d: the file has %d bytes, want %d as in the request", number,
			got, numBytes), s.Close())
	}
	m.all[number] = &clientArena{number: number, id: arena.Adopt(s).ID, bytes: s.Bytes(), owner: owner}
	return nil
}

// checkArena checks the number and the size of an arena that a client adds.
func checkArena(number uint32, numBytes uint64) error {
	if number == 0 || number >= wire.OwnArenas || numBytes == 0 || numBytes > maxArenaBytes {
		return fmt.Errorf("got arena %d of %d bytes, want a number from 1 to 2^31-1, and 1 to 2^40 bytes", number,
			numBytes)
	}
	return nil
}

// room returns an error if no arena, or no event, with the given number can be added. The caller holds mu.
func (m *memory) room(number uint32, event bool) error {
	switch arenas := len(m.all) - m.events; {
	case m.all[number] != nil:
		return fmt.Errorf("arena %d already exists", number)
	case event && m.events >= maxEvents:
		return fmt.Errorf("arena %d: the client already has %d events, which is the limit", number, m.events)
	case !event && arenas >= maxArenas:
		return fmt.Errorf("arena %d: the client already has %d arenas, which is the limit", number, arenas)
	}
	return nil
}

// remove removes an arena from the map. The caller holds mu, and closes the arena afterwards.
func (m *memory) remove(g *clientArena) {
	delete(m.all, g.number)
	if g.event() {
		m.events--
	}
}

// event reports whether g is an event.
func (g *clientArena) event() bool { return g.device != nil && g.device.Event != nil }

// addDevice opens the memory or the event of a device that q describes, and records it as an arena of owner.
func (m *memory) addDevice(q *sidecarpb.DeviceArena, devices *cuda.Devices, owner *conn) error {
	number, handle, numBytes := q.GetArena(), q.GetMemory(), q.GetBytes()
	size := numBytes
	if len(handle) == 0 {
		if handle, size = q.GetEvent(), 1; numBytes > 0 {
			return fmt.Errorf("arena %d: got %d bytes for an event, want 0", number, numBytes)
		}
	}
	if err := checkArena(number, size); err != nil {
		return err
	}
	var h cuda.Handle
	if len(handle) != len(h) || len(q.GetMemory()) > 0 && len(q.GetEvent()) > 0 {
		return fmt.Errorf("arena %d: got handles of %d and %d bytes for memory and for an event, want one of %d "+
			"bytes", number, len(q.GetMemory()), len(q.GetEvent()), len(h))
	}
	copy(h[:], handle)
	// The lock is not held here, because the driver may make this call wait for a device.
	opened, err := devices.Import(q.GetBusId(), h, int(numBytes))
	if err != nil {
		return fmt.Errorf("arena %d: %w", number, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	g := &clientArena{number: number, bytes: opened.Memory, device: opened, owner: owner}
	if err := m.room(number, g.event()); err != nil {
		return errors.Join(err, opened.Close())
	}
	m.all[number] = g
	if g.event() {
		m.events++
	}
	return nil
}

// of returns the arena of owner with the given number. It returns an error if owner has no such arena. The
// caller holds mu.
func (m *memory) of(owner *conn, number uint32) (*clientArena, error) {
	g := m.all[number]
	switch {
	case g == nil:
		return nil, fmt.Errorf("arena %d does not exist", number)
	case g.owner != owner:
		return nil, fmt.Errorf("arena %d belongs to another client", number)
	}
	return g, nil
}

// drop removes an arena of owner. It returns an error if an operation in flight uses the arena.
func (m *memory) drop(owner *conn, number uint32) error {
	m.mu.Lock()
	g, err := m.of(owner, number)
	if err == nil && g.users > 0 {
		err = fmt.Errorf("arena %d cannot be removed: operations in flight use it %d times", number, g.users)
	}
	if err == nil {
		m.remove(g)
	}
	m.mu.Unlock()
	if err != nil {
		return err
	}
	return g.close()
}

// close releases the memory of an arena that was removed. The caller does not hold mu, because the driver may
// make it wait for a device.
func (g *clientArena) close() error {
	if g.device != nil {
		return g.device.Close()
	}
	return arena.Abandon(g.id)
}

// leave removes all arenas of owner, because owner has left. If operations in flight use an arena, the arena
// is removed when the last of these operations ends.
func (m *memory) leave(owner *conn) error {
	m.mu.Lock()
	var unused []*clientArena
	for _, g := range m.all {
		if g.owner != owner {
			continue
		}
		if g.left = true; g.users == 0 {
			m.remove(g)
			unused = append(unused, g)
		}
	}
	m.mu.Unlock()
	return closeAll(unused)
}

func closeAll(arenas []*clientArena) error {
	var errs []error
	for _, g := range arenas {
		errs = append(errs, g.close())
	}
	return errors.Join(errs...)
}

// use finds the memory of each location in places and stores it in the field "to" of the location. The
// locations belong to an operation of owner. If event is not 0, it is the number of an event, and the
// locations are on the device of the event, which use returns. Otherwise they are in memory of the host. The
// arenas of the locations and the event stay open until unuse is called. use appends them to the slice uses
// and returns the result. If it returns an error, it keeps no arena in use.
func (m *memory) use(owner *conn, event uint32, places []location, uses []*clientArena) (*cuda.Imported,
	[]*clientArena, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	fail := func(err error) (*cuda.Imported, []*clientArena, error) {
		for _, used := range uses {
			used.users--
		}
		return nil, nil, err
	}
	var on *cuda.Imported
	if event != 0 {
		g, err := m.of(owner, event)
		switch {
		case err != nil:
			return fail(fmt.Errorf("the event: %w", err))
		case !g.event():
			return fail(fmt.Errorf("arena %d is no event", event))
		}
		on = g.device
		g.users++
		uses = append(uses, g)
	}
	for i := range places {
		p := &places[i]
		if p.to = nil; p.numBytes == 0 {
			if p.to = []byte{}; p.none {
				p.to = nil
			}
			continue
		}
		g, err := m.of(owner, p.arena)
		if err == nil {
			err = g.check(p, on)
		}
		if err != nil {
			return fail(err)
		}
		p.to = g.bytes[p.offset : p.offset+p.numBytes : p.offset+p.numBytes]
		g.users++
		uses = append(uses, g)
	}
	return on, uses, nil
}

// check returns an error if p is not in the memory of g, or if g is not on the device of the event on. If on
// is nil, g must be in memory of the host.
func (g *clientArena) check(p *location, on *cuda.Imported) error {
	switch {
	case g.event():
		return fmt.Errorf("arena %d is an event and has no memory", g.number)
	case g.device != nil && on == nil:
		return fmt.Errorf("arena %d is on CUDA device %d, but the operation has no event", g.number,
			g.device.Device)
	case g.device == nil && on != nil:
		return fmt.Errorf("arena %d is in memory of the host, but the event is of CUDA device %d", g.number,
			on.Device)
	case g.device != nil && g.device.Device != on.Device:
		return fmt.Errorf("arena %d is on CUDA device %d, but the event is of device %d", g.number,
			g.device.Device, on.Device)
	case p.offset > uint64(len(g.bytes)) || p.numBytes > uint64(len(g.bytes))-p.offset:
		return fmt.Errorf("got a range of %d bytes at byte %d of arena %d, which has only %d bytes", p.numBytes,
			p.offset, p.arena, len(g.bytes))
	}
	return nil
}

// unuse reverses use. It removes each arena that has no other uses and whose owner has left.
func (m *memory) unuse(uses []*clientArena) error {
	if len(uses) == 0 {
		return nil
	}
	m.mu.Lock()
	var unused []*clientArena
	for _, g := range uses {
		if g.users--; g.users == 0 && g.left {
			m.remove(g)
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
