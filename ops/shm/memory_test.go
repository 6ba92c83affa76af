package shm_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/shm"
)

// host implements Memory for ranks that are goroutines of one process. It uses neither files nor mappings, so
// the race detector sees every access.
type host struct {
	mu       sync.Mutex
	changed  *sync.Cond
	segments map[key][]byte
	chunks   map[chunk][]byte
	dead     map[topo.Rank]error
}

type key struct {
	lane transport.Lane
	rank topo.Rank
}

type chunk struct {
	rank topo.Rank
	id   uint32
}

func newHost() *host {
	h := &host{segments: make(map[key][]byte), chunks: make(map[chunk][]byte),
		dead: make(map[topo.Rank]error)}
	h.changed = sync.NewCond(&h.mu)
	return h
}

// rankMemory is the Memory of one rank of a host.
type rankMemory struct {
	*host
	rank topo.Rank
}

func (m *rankMemory) Share(lane transport.Lane, numBytes int64, _ []topo.Rank) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	mem := aligned(int(numBytes))
	m.segments[key{lane, m.rank}] = mem
	m.changed.Broadcast()
	return mem, nil
}

func (m *rankMemory) Peer(ctx context.Context, lane transport.Lane, rank topo.Rank) ([]byte, error) {
	defer context.AfterFunc(ctx, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.changed.Broadcast()
	})()
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		if mem := m.segments[key{lane, rank}]; mem != nil {
			return mem, nil
		}
		if err := errors.Join(m.dead[rank], ctx.Err()); err != nil {
			return nil, err
		}
		m.changed.Wait()
	}
}

func (m *rankMemory) Arena(_ context.Context, rank topo.Rank, id uint32) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if mem := m.chunks[chunk{rank, id}]; mem != nil {
		return mem, nil
	}
	return nil, fmt.Errorf("rank %d has no arena %d", rank, id)
}

func (m *rankMemory) Err(lane transport.Lane, rank topo.Rank) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.dead[rank]
}

// kill makes Memory.Err of every rank return err for the given rank.
func (h *host) kill(rank topo.Rank, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.dead[rank] = err
	h.changed.Broadcast()
}

// alloc allocates a new arena chunk of this rank and returns its memory.
func (m *rankMemory) alloc(numBytes int) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	mem := aligned(numBytes)
	m.chunks[chunk{m.rank, uint32(len(m.chunks) + 1)}] = mem
	return mem
}

// Find finds buffers from alloc.
func (m *rankMemory) Find(b []byte) (arena.Ref, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for c, mem := range m.chunks {
		if offset := uintptr(unsafe.Pointer(&b[0])) - uintptr(unsafe.Pointer(&mem[0])); c.rank == m.rank &&
			offset < uintptr(len(mem)) {
			return arena.Ref{Chunk: c.id, Offset: int64(offset)}, true
		}
	}
	return arena.Ref{}, false
}

// aligned returns n bytes that begin at a cache line, as memory pages do.
func aligned(n int) []byte {
	mem := make([]byte, n+63)
	skip := -uintptr(unsafe.Pointer(&mem[0])) & 63
	return mem[skip:][:n:n]
}

// rank is one rank of a test: its backend, its memory, its number and the number of ranks.
type rank struct {
	opstest.Blocking
	mem  *rankMemory
	me   int
	n    int
	room []byte // of an arena, for place
}

// run calls f for n ranks at the same time. If any rank returns an error, run fails the test with the errors
// of all ranks.
func run(t testing.TB, n int, cfg shm.Config, f func(r *rank) error) {
	t.Helper()
	if err := try(newHost(), n, cfg, f); err != nil {
		t.Fatal(err)
	}
}

func try(h *host, n int, cfg shm.Config, f func(r *rank) error) error {
	ranks := topo.UpTo(n)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			mem := &rankMemory{h, topo.Rank(i)}
			own := cfg
			// Set small limits, because with the default limits the tests would need large tensors.
			if own.SmallBytes == 0 && own.DirectBytes == 0 {
				own.SmallBytes, own.DirectBytes = 4<<10, 1
			}
			own.Oversubscribed = own.Oversubscribed || ops.Oversubscribed(n, runtime.NumCPU())
			if err := f(&rank{opstest.Blocking{Backend: shm.New(mem, 1, ranks, i, own)}, mem, i,
				n, nil}); err != nil {
				errs[i] = fmt.Errorf("rank %d: %w", i, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// both returns the ranks of a job with two ranks.
func (m *rankMemory) both() []topo.Rank { return []topo.Rank{0, 1} }

// chunkOf returns the number of the arena chunk that contains b.
func (r *rank) chunkOf(b []byte) uint32 {
	ref, _ := r.mem.Find(b)
	return ref.Chunk
}

var one = ops.Scaling{Pre: 1, Post: 1}
