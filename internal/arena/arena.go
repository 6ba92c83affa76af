// Package arena allocates tensors in memory that other processes can map.
//
// There is one allocator per process, as with the heap: tensors outlive engines, and several engines of a
// process may use one tensor. Memory comes in chunks, each a shmem.Segment, so that peers map few large
// pieces. Tensors are freed explicitly; a tensor that is not freed keeps its chunk for as long as the process
// lives.
//
// Invariants:
//
//  1. A chunk is unmapped only when no tensor in it is live. There is no finalizer: using a freed tensor is
//     the same bug as with free(3). Chunks that were adopted are unmapped by Abandon.
//  2. The IDs of chunks count from 1 and are not reused in the process.
//  3. Watchers learn of a chunk before the Alloc that made it returns, and of its removal after its last
//     tensor was freed and before it is unmapped.
package arena

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gohvd/gohvd/internal/shmem"
)

const (
	// align is the alignment of tensors in bytes: a cache line, and a vector of AVX-512.
	align = 64
	// chunkBytes is the size of a chunk, except for tensors that are larger.
	chunkBytes = 64 << 20
)

// Ref is the place of a tensor.
type Ref struct {
	// Chunk is the ID of the chunk.
	Chunk uint32
	// Offset is the offset of the first byte in the chunk.
	Offset int64
}

// Chunk is a piece of shared memory that holds tensors.
type Chunk struct {
	ID uint32
	// Segment can be written by any process that has its descriptor until it is sealed. Seal it before giving
	// the descriptor to peers.
	Segment *shmem.Segment
	// Adopted says that the chunk belongs to another process, and Alloc does not use it.
	Adopted bool
}

// chunk is a Chunk with its allocation.
type chunk struct {
	Chunk
	bytes []byte
	live  map[int64]int64 // maps the offset of a tensor to its bytes, a multiple of align
	free  []span          // in ascending order; two spans never touch
	// fresh is the offset of the bytes that were never handed out and are still zero.
	fresh int64
}

// span is a range of a chunk.
type span struct{ offset, size int64 }

// heap is the allocator behind the package-level functions.
type heap struct {
	// growing is held while a chunk is made, which takes long, so that waiting allocations share it. It is
	// locked before mu.
	growing sync.Mutex

	mu       sync.Mutex
	chunks   []*chunk // in ascending order of IDs
	lastID   uint32
	live     int64 // number of bytes of live tensors, each rounded up to align
	watchers []*watcher

	// index is for Find: the chunks in ascending order of address. It is replaced and never changed in place.
	index atomic.Pointer[[]chunkRange]
}

// chunkRange is the address range of a chunk.
type chunkRange struct {
	from, to uintptr
	id       uint32
}

type watcher struct {
	added   func(Chunk)
	removed func(id uint32)
}

var process heap

// Alloc allocates numBytes of zeroed shared memory, aligned to 64 bytes, until Free. The error is a
// *shmem.NoMemoryError if there is none.
//
// It costs a few hundred ns and the clearing of reused memory; if a chunk has to be made, about 20 ms per 64
// MiB.
func Alloc(numBytes int) ([]byte, error) { return process.alloc(numBytes) }

// Free frees the tensor that begins at the first byte of b. It is an error if none is allocated there.
func Free(b []byte) error { return process.release(b) }

// Adopt makes a segment in which another process allocates tensors a chunk: Find finds it and watchers learn
// of it. The arena owns the Segment until Abandon.
func Adopt(s *shmem.Segment) Chunk { return process.adopt(s) }

// Abandon removes an adopted chunk and unmaps it. The caller ensures that it is not used any more.
func Abandon(id uint32) error { return process.abandon(id) }

// Find returns the place of b if all of it is in one live chunk. It takes no lock, allocates nothing and
// takes tens of ns. An empty b is found by the first byte of its capacity, if it has any.
func Find(b []byte) (Ref, bool) { return process.find(b) }

// Watch calls added for every chunk, first for those that exist, and removed when one goes. The calls come
// one at a time and under the lock of the allocator: they must return soon and call nothing of this package.
// The Segment of a Chunk may be used until removed returns. After stop has returned neither is running or
// called again.
func Watch(added func(Chunk), removed func(id uint32)) (stop func()) {
	return process.watch(added, removed)
}

// Stats returns the number of chunks, their size, and the size of live tensors, each rounded up to 64 bytes.
func Stats() (chunks int, mappedBytes, liveBytes int64) { return process.stats() }

func (h *heap) alloc(numBytes int) ([]byte, error) {
	if numBytes < 0 {
		return nil, fmt.Errorf("arena: allocate: got %d bytes, want at least 0", numBytes)
	}
	size := max(align, (int64(numBytes)+align-1)/align*align) // an empty tensor has an address of its own too
	if size < int64(numBytes) {
		return nil, &shmem.NoMemoryError{What: "tensor", NeedBytes: int64(numBytes),
			Err: errors.New("the size exceeds the address space")}
	}
	b, dirty := h.take(size)
	if b == nil {
		var err error
		if b, dirty, err = h.grow(size); err != nil {
			return nil, err
		}
	}
	clear(b[:dirty])
	return b[:numBytes:max(numBytes, 1)], nil
}

// take finds size bytes in the existing chunks, in the smallest free range that has them; b is nil if there
// are none. The first dirty bytes have been used before.
func (h *heap) take(size int64) (b []byte, dirty int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var best *chunk
	at := 0
	for _, c := range h.chunks {
		for i, s := range c.free {
			if s.size >= size && (best == nil || s.size < best.free[at].size) {
				best, at = c, i
			}
		}
	}
	if best == nil {
		return nil, 0
	}
	return h.cut(best, at, size)
}

// cut allocates the first size bytes of free range i of a chunk. The caller holds mu.
func (h *heap) cut(c *chunk, i int, size int64) (b []byte, dirty int64) {
	s := &c.free[i]
	offset := s.offset
	s.offset += size
	if s.size -= size; s.size == 0 {
		c.free = slices.Delete(c.free, i, i+1)
	}
	c.live[offset] = size
	h.live += size
	dirty = min(max(0, c.fresh-offset), size)
	c.fresh = max(c.fresh, offset+size)
	return c.bytes[offset : offset+size], dirty
}

// grow makes a chunk and takes size bytes of it, unless another allocation has made room meanwhile.
func (h *heap) grow(size int64) (b []byte, dirty int64, err error) {
	h.growing.Lock()
	defer h.growing.Unlock()
	if b, dirty = h.take(size); b != nil {
		return b, dirty, nil
	}
	seg, err := shmem.CreateOpen("gohvd-arena", max(size, chunkBytes))
	if err != nil {
		return nil, 0, fmt.Errorf("arena: allocate: %w", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lastID++
	c := &chunk{Chunk: Chunk{ID: h.lastID, Segment: seg}, bytes: seg.Bytes(), live: make(map[int64]int64)}
	// The rest of the last page after a large tensor stays unused: a small tensor there would keep the whole
	// chunk.
	c.free = []span{{0, max(size, chunkBytes)}}
	h.add(c)
	b, dirty = h.cut(c, 0, size)
	return b, dirty, nil
}

// add adds a chunk. The caller holds mu.
func (h *heap) add(c *chunk) {
	h.chunks = append(h.chunks, c)
	h.reindex()
	for _, w := range h.watchers {
		w.added(c.Chunk)
	}
}

// remove takes chunk i, which add has added, out of the heap. The caller holds mu.
func (h *heap) remove(i int) {
	id := h.chunks[i].ID
	h.chunks = slices.Delete(h.chunks, i, i+1)
	h.reindex()
	for _, w := range h.watchers {
		w.removed(id)
	}
}

func (h *heap) adopt(s *shmem.Segment) Chunk {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lastID++
	c := &chunk{Chunk: Chunk{ID: h.lastID, Segment: s, Adopted: true}, bytes: s.Bytes()}
	h.add(c)
	return c.Chunk
}

func (h *heap) abandon(id uint32) error {
	h.mu.Lock()
	i := slices.IndexFunc(h.chunks, func(c *chunk) bool { return c.ID == id && c.Adopted })
	if i < 0 {
		h.mu.Unlock()
		return fmt.Errorf("arena: abandon: got chunk %d, which was not adopted", id)
	}
	segment := h.chunks[i].Segment
	h.remove(i)
	h.mu.Unlock()
	return segment.Close() // the lock is not held, because this takes long
}

func (h *heap) release(b []byte) error {
	unused, err := h.free(b)
	if unused != nil {
		// The lock is not held, because this takes long: 0.1 s per GiB.
		err = unused.Segment.Close()
	}
	if err != nil {
		return fmt.Errorf("arena: free: %w", err)
	}
	return nil
}

// free frees the tensor at the start of b. It returns the chunk if this was its last tensor and the chunk is
// not kept for further tensors.
func (h *heap) free(b []byte) (unused *chunk, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	ref, ok := h.find(b[:0])
	if !ok {
		return nil, fmt.Errorf(
			"got %d bytes at %p, which are in no arena: they were not allocated by Alloc, or were freed before", len(b), unsafe.SliceData(b))
	}
	i := slices.IndexFunc(h.chunks, func(c *chunk) bool { return c.ID == ref.Chunk })
	c := h.chunks[i]
	size, ok := c.live[ref.Offset]
	if !ok {
		return nil, fmt.Errorf(
			"got byte %d of chunk %d, where no tensor begins: it is inside a tensor, or the tensor was freed before", ref.Offset, ref.Chunk)
	}
	delete(c.live, ref.Offset)
	h.live -= size
	c.addFree(span{ref.Offset, size})
	if len(c.live) > 0 || h.keeps(c) {
		return nil, nil
	}
	h.remove(i)
	return c, nil
}

// addFree frees s and merges it with the free ranges around it.
func (c *chunk) addFree(s span) {
	i, _ := slices.BinarySearchFunc(c.free, s.offset, func(f span, offset int64) int {
		return cmp.Compare(f.offset, offset)
	})
	from, to := i, i // free[from:to] are merged into the new range
	if i > 0 && c.free[i-1].offset+c.free[i-1].size == s.offset {
		from--
		s = span{c.free[from].offset, c.free[from].size + s.size}
	}
	if i < len(c.free) && s.offset+s.size == c.free[i].offset {
		s.size += c.free[i].size
		to++
	}
	c.free = slices.Replace(c.free, from, to, s)
}

// keeps reports whether an empty chunk stays for further tensors: one of the standard size does. The caller
// holds mu.
func (h *heap) keeps(c *chunk) bool {
	if len(c.bytes) != chunkBytes {
		return false
	}
	for _, o := range h.chunks {
		if o != c && len(o.live) == 0 && len(o.bytes) == chunkBytes && !o.Adopted {
			return false
		}
	}
	return true
}

// reindex updates the index for Find. The caller holds mu.
func (h *heap) reindex() {
	index := make([]chunkRange, 0, len(h.chunks))
	for _, c := range h.chunks {
		from := address(c.bytes)
		index = append(index, chunkRange{from, from + uintptr(len(c.bytes)), c.ID})
	}
	slices.SortFunc(index, func(a, b chunkRange) int { return cmp.Compare(a.from, b.from) })
	h.index.Store(&index)
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

func (h *heap) find(b []byte) (Ref, bool) {
	index := h.index.Load()
	if index == nil || cap(b) == 0 {
		return Ref{}, false
	}
	at := address(b)
	// Find the last chunk that begins at or before b. A search with a closure would take twice as long.
	lo, hi := 0, len(*index)
	for lo < hi {
		if mid := int(uint(lo+hi) / 2); (*index)[mid].from <= at {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo == 0 {
		return Ref{}, false
	}
	p := &(*index)[lo-1]
	if at >= p.to || uintptr(len(b)) > p.to-at {
		return Ref{}, false
	}
	return Ref{p.id, int64(at - p.from)}, true
}

func (h *heap) watch(added func(Chunk), removed func(id uint32)) (stop func()) {
	w := &watcher{added, removed}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.chunks {
		added(c.Chunk)
	}
	h.watchers = append(h.watchers, w)
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.watchers = slices.DeleteFunc(h.watchers, func(o *watcher) bool { return o == w })
	}
}

func (h *heap) stats() (chunks int, mappedBytes, liveBytes int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.chunks {
		mappedBytes += int64(len(c.bytes))
	}
	return len(h.chunks), mappedBytes, h.live
}
