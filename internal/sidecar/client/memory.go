package client

import (
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"sync"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/memfd"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

const (
	// maxIdleBytes bounds the copies that are kept for tensors to come. Those in flight are bounded by the program alone.
	maxIdleBytes = 1 << 30
	// minCopyBytes is the least that a copy takes.
	minCopyBytes = 64
	// maxTries is how often an arena is given, each time under another number.
	maxTries = 3
)

// chunk names a chunk of this process: one of the process's allocator, or of the Engine's own.
type chunk struct {
	own bool
	id  uint32
}

// share is a chunk of this process that the sidecar is given. What is not constant is guarded by the Engine's mu.
type share struct {
	engine  *Engine
	chunk   chunk
	segment *memfd.Segment
	number  uint32
	tries   int
	// unheard says that the sidecar has not answered; refused is why it has not taken it; withdrawn says that the chunk is no
	// more.
	unheard   bool
	refused   error
	withdrawn bool
}

// spot is a place in a chunk, or nowhere if it has no bytes.
type spot struct {
	share  *share
	offset int64
	bytes  []byte
	staged bool // bytes is a copy of the Engine's
}

// memory is s for the sidecar. The caller holds mu.
func (s *spot) memory() *sidecarpb.Memory {
	if s.share == nil {
		return new(sidecarpb.Memory)
	}
	return &sidecarpb.Memory{Arena: s.share.number, Offset: uint64(s.offset), Bytes: uint64(len(s.bytes))}
}

// spot is where the sidecar finds b: where it is, or, if it is not in an arena or apart is asked for, in a copy that is still to be
// filled.
func (e *Engine) spot(b []byte, apart bool) (spot, error) {
	if len(b) == 0 {
		return spot{}, nil
	}
	if ref, ok := arena.Find(b); ok && !apart {
		e.mu.Lock()
		s := e.shares[chunk{false, ref.Chunk}]
		ok = s != nil && s.refused == nil
		e.mu.Unlock()
		if ok {
			return spot{share: s, offset: ref.Offset, bytes: b}, nil
		}
	}
	c, err := e.stage.get(len(b))
	if err != nil {
		return spot{}, fmt.Errorf("a copy for the sidecar: %w", err)
	}
	ref, _ := e.stage.memory.Find(c)
	e.mu.Lock()
	s := e.shares[chunk{true, ref.Chunk}]
	switch {
	case s == nil:
		err = e.lost
	case s.refused != nil:
		err = s.refused
	}
	e.mu.Unlock()
	if err != nil {
		e.stage.put(c)
		return spot{}, err
	}
	return spot{share: s, offset: ref.Offset, bytes: c, staged: true}, nil
}

// offer gives the sidecar a chunk. It is called under the allocator's lock.
func (e *Engine) offer(own bool, c arena.Chunk) {
	if c.Adopted {
		return // not this process's to give
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lost != nil {
		return
	}
	s := &share{engine: e, chunk: chunk{own, c.ID}, segment: c.Segment}
	e.shares[s.chunk] = s
	e.give(s)
}

// give gives the sidecar s under a new number. The caller holds mu.
func (e *Engine) give(s *share) {
	delete(e.numbers, s.number)
	// Clients of one sidecar do not know each other: they draw, and the sidecar says if a number is taken.
	for s.number = 0; s.number == 0 || e.numbers[s.number]; {
		s.number = rand.Uint32N(wire.OwnArenas)
	}
	e.numbers[s.number] = true
	s.tries++
	fd, err := unix.FcntlInt(uintptr(s.segment.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		err = e.request(&sidecarpb.Request{What: &sidecarpb.Request_Arena{Arena: &sidecarpb.Arena{
			Arena: s.number, Bytes: uint64(len(s.segment.Bytes())),
		}}}, fd, s)
	}
	if err != nil {
		s.refused = fmt.Errorf("the sidecar cannot be given memory: %w", err)
		return
	}
	s.unheard = true
	e.unheard++
}

// answer implements call.
func (s *share) answer(r *sidecarpb.Reply) error {
	e := s.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	s.unheard = false
	e.unheard--
	switch {
	case r.Error == nil && s.withdrawn:
		e.drop(s)
	case r.Error == nil || s.withdrawn:
	case s.tries < maxTries:
		e.give(s)
	default:
		s.refused = fmt.Errorf("the sidecar does not take memory: %s", r.Error.GetText())
		e.cfg.Log.Warn("tensors of an arena are copied, for the sidecar cannot use it", zap.String("error", r.Error.GetText()))
	}
	e.send()
	return nil
}

// fail implements call.
func (s *share) fail(error) {
	s.engine.mu.Lock()
	defer s.engine.mu.Unlock()
	s.unheard = false
	s.engine.unheard--
}

// withdraw takes a chunk back. It is called under the allocator's lock.
func (e *Engine) withdraw(c chunk) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.shares[c]
	if s == nil {
		return
	}
	delete(e.shares, c)
	if s.withdrawn = true; !s.unheard && s.refused == nil {
		e.drop(s)
	}
}

// drop tells the sidecar that an arena is no more. The caller holds mu.
func (e *Engine) drop(s *share) {
	delete(e.numbers, s.number)
	// It fails if the connection has ended, and the sidecar has let go of all.
	_ = e.request(&sidecarpb.Request{What: &sidecarpb.Request_DropArena{
		DropArena: &sidecarpb.DropArena{Arena: s.number},
	}}, -1, dropped{e, s.number})
}

// dropped is a call that nobody waits for.
type dropped struct {
	engine *Engine
	number uint32
}

func (d dropped) answer(r *sidecarpb.Reply) error {
	if r.Error != nil {
		d.engine.cfg.Log.Warn("the sidecar keeps memory", zap.Uint32("arena", d.number), zap.String("error", r.Error.GetText()))
	}
	return nil
}

func (d dropped) fail(error) {}

// shown takes an arena of the sidecar's.
func (e *Engine) shown(a *sidecarpb.Arena) error {
	fd, err := e.in.Descriptor()
	if err != nil {
		return fmt.Errorf("%w: arena %d: %w", wire.ErrFrame, a.GetArena(), err)
	}
	s, err := memfd.Map(fd)
	if err = errors.Join(err, unix.Close(fd)); err != nil {
		return fmt.Errorf("arena %d of the sidecar: %w", a.GetArena(), err)
	}
	if old := e.theirs[a.GetArena()]; old != nil || uint64(len(s.Bytes())) != a.GetBytes() {
		return errors.Join(fmt.Errorf("%w: arena %d of the sidecar comes twice, or has %d bytes instead of %d", wire.ErrFrame,
			a.GetArena(), len(s.Bytes()), a.GetBytes()), s.Close())
	}
	e.theirs[a.GetArena()] = s
	return nil
}

// hidden lets go of an arena of the sidecar's that has gone. One that was not shown is left alone. Results were copied out of it before
// they were given back, by who held reading.
func (e *Engine) hidden(number uint32) error {
	s := e.theirs[number]
	if s == nil {
		return nil
	}
	delete(e.theirs, number)
	if err := s.Close(); err != nil {
		return fmt.Errorf("arena %d of the sidecar: %w", number, err)
	}
	return nil
}

// seen is memory of the sidecar's. It is valid until more is read.
func (e *Engine) seen(at *sidecarpb.Memory) ([]byte, error) {
	if at.GetBytes() == 0 {
		return nil, nil
	}
	s := e.theirs[at.GetArena()]
	if s == nil {
		return nil, fmt.Errorf("%w: a result in arena %d, which the sidecar has not shown", wire.ErrFrame, at.GetArena())
	}
	b := s.Bytes()
	if n := uint64(len(b)); at.Offset > n || at.Bytes > n-at.Offset {
		return nil, fmt.Errorf("%w: a result of %d bytes at byte %d of arena %d, which has %d", wire.ErrFrame, at.Bytes, at.Offset, at.Arena, n)
	}
	return b[at.Offset : at.Offset+at.Bytes], nil
}

// giveBack gives memory of the sidecar's back.
func (e *Engine) giveBack(at *sidecarpb.Memory) {
	e.mu.Lock()
	defer e.mu.Unlock()
	// It fails if the connection has ended, and the sidecar has taken all.
	_ = e.request(&sidecarpb.Request{What: &sidecarpb.Request_Free{
		Free: &sidecarpb.Free{Arena: at.Arena, Offset: at.Offset},
	}}, -1, nil)
}

// stage has the copies of tensors that do not lie in an arena.
type stage struct {
	memory arena.Private
	limit  int

	mu        sync.Mutex
	idle      map[int][][]byte // by what they take
	idleBytes int
}

// get is memory for a copy of numBytes, with anything in it.
func (s *stage) get(numBytes int) ([]byte, error) {
	size := roundUp(numBytes)
	s.mu.Lock()
	if free := s.idle[size]; len(free) > 0 {
		b := free[len(free)-1]
		s.idle[size] = free[:len(free)-1]
		s.idleBytes -= size
		s.mu.Unlock()
		return b[:numBytes], nil
	}
	s.mu.Unlock()
	b, err := s.memory.Alloc(size)
	if err != nil {
		return nil, err
	}
	return b[:numBytes], nil
}

// put takes back what get gave.
func (s *stage) put(b []byte) {
	size := cap(b)
	s.mu.Lock()
	keeps := s.idleBytes+size <= s.limit
	if keeps {
		if s.idle == nil {
			s.idle = make(map[int][][]byte)
		}
		s.idle[size] = append(s.idle[size], b)
		s.idleBytes += size
	}
	s.mu.Unlock()
	if !keeps {
		// It fails if it was given back before, and then it is kept.
		_ = s.memory.Free(b)
	}
}

// close gives all memory up.
func (s *stage) close() error {
	s.mu.Lock()
	s.idle, s.idleBytes = nil, 0
	s.mu.Unlock()
	return s.memory.Close()
}

// roundUp is the next of four sizes for each power of two, so that copies fit many tensors and at most a fifth of them is lost.
func roundUp(numBytes int) int {
	if numBytes <= minCopyBytes {
		return minCopyBytes
	}
	step := 1 << max(bits.Len(uint(numBytes-1))-3, 4)
	return (numBytes + step - 1) / step * step
}
