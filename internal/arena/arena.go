// Package arena allocates tensors in memory that other processes can map.
//
// There is one allocator per process, like the heap, because tensors outlive engines, and several engines of
// a process may use the same tensor. Memory comes in large chunks, so that peers map only a few pieces. Each
// chunk is a shmem.Segment. Tensors are freed explicitly. A tensor that is not freed keeps its chunk until
// the process ends.
//
// Invariants:
//
//  1. A chunk is unmapped only when no tensor in it is live. There is no finalizer: using a freed tensor is
//     the same bug as with free(3). Chunks that were adopted are unmapped by Abandon.
//  2. The IDs of chunks count from 1 and are not reused in the process.
//  3. Watchers learn of a new chunk before the Alloc that made it returns. They learn of the removal of a
//     chunk after its last tensor was freed and before the chunk is unmapped.
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
	// align is the alignment of tensors in bytes: the size of a cache line and of an AVX-512 vector.
	align = 64
	// chunkBytes is the size of a chunk, unless a tensor needs a larger one.
	chunkBytes = 64 << 20
)

// Ref is the position of a tensor: a chunk and an offset in it.
type Ref struct {
	// Chunk is the ID of the chunk that contains the tensor.
	Chunk uint32
	// Offset is the offset of the tensor's first byte in the chunk.
	Offset int64
}

// Chunk is a piece of shared memory for tensors.
type Chunk struct {
	ID uint32
	// Segment is the memory. Until it is sealed, any process that has its descriptor can map it for writing.
	// So call Segment.Seal before you send the descriptor to peers.
	Segment *shmem.Segment
	// Adopted is true if another process allocates the tensors in the chunk. Alloc does not use such a chunk.
	Adopted bool
}

// chunk is a Chunk together with the state of its allocation.
type chunk struct {
	Chunk
	bytes []byte
	live  map[int64]int64 // maps the offset of each tensor to its size, a multiple of align
	free  []span          // free ranges, in ascending order; between two of them there are live tensors
	// fresh is the offset of the first byte that has never been allocated. All bytes from there on are still
	// zero.
	fresh int64
}

// span is a range of bytes in a chunk.
type span struct{ offset, size int64 }

// heap is the allocator behind the functions of this package.
type heap struct {
	// growing is held while a chunk is made, which takes a long time. An allocation that has waited for
	// growing first checks whether the new chunk has room. growing is locked before mu.
	growing sync.Mutex

	mu     sync.Mutex
	chunks []*chunk // in ascending order of ID
	lastID uint32
	// live is the total size of live tensors in bytes. The size of each tensor is rounded up to a multiple of
	// align.
	live     int64
	watchers []*watcher

	// index contains the chunks in ascending order of address, for Find. Nothing changes the slice in place:
	// a new one replaces it.
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

// Alloc allocates numBytes of zeroed shared memory, aligned to 64 bytes. The memory is valid until Free. If
// there is not enough memory, the error is a *shmem.NoMemoryError.
//
// Alloc takes a few hundred ns plus the time to clear memory that was used before. If it has to make a chunk,
// it takes about 20 ms per 64 MiB.
func Alloc(numBytes int) ([]byte, error) { return process.alloc(numBytes) }

// Free frees the tensor that begins at the first byte of b. If no tensor begins there, Free returns an error.
func Free(b []byte) error { return process.release(b) }

// Adopt makes a chunk from a segment in which another process allocates tensors. From then on Find finds
// tensors in the chunk, and watchers know the chunk. The arena owns the Segment until Abandon.
func Adopt(s *shmem.Segment) Chunk { return process.adopt(s) }

// Abandon removes an adopted chunk and unmaps it. The caller must ensure that nothing uses the chunk any
// more.
func Abandon(id uint32) error { return process.abandon(id) }

// Find returns the position of b and true if all of b is in one live chunk. Otherwise it returns false. It
// locks nothing, allocates nothing, and takes some tens of ns. If b is empty but its capacity is not 0, Find
// returns the position of the first byte of the capacity.
func Find(b []byte) (Ref, bool) { return process.find(b) }

// Watch calls the function added for every chunk: first for the chunks that exist, and then for each new
// chunk. It calls the function removed when a chunk is removed. The allocator makes one call at a time and
// holds its lock. So both functions must return soon and must not call this package. The Segment of a Chunk
// may be used until removed returns. When stop has returned, neither of the two functions is running, and
// neither is called again.
func Watch(added func(Chunk), removed func(id uint32)) (stop func()) {
	return process.watch(added, removed)
}

// Stats returns the number of chunks, the sum of their sizes, and the sum of the sizes of live tensors. The
// size of each tensor is rounded up to 64 bytes.
func Stats() (chunks int, mappedBytes, liveBytes int64) { return process.stats() }

func (h *heap) alloc(numBytes int) ([]byte, error) {
	if numBytes < 0 {
		return nil, fmt.Errorf("arena: allocate: got %d bytes, want at least 0", numBytes)
	}
	// An empty tensor takes up align bytes too, so that it has an address of its own.
	size := max(align, (int64(numBytes)+align-1)/align*align)
	if size < int64(numBytes) {
		return nil, &shmem.NoMemoryError{What: "tensor", NeedBytes: int64(numBytes),
			Err: errors.New("the size in bytes exceeds the address space")}
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

// take allocates size bytes in the smallest free range that is large enough. If no chunk has such a range, b
// is nil. dirty is the number of bytes at the beginning of b that were used before and may not be zero.
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

// cut allocates the first size bytes of the free range c.free[i]. dirty is the number of bytes at the
// beginning of b that were used before and may not be zero. The caller holds mu.
func (h *heap) cut(c *chunk, i int, size int64) (b []byte, dirty int64) {
	s := &c.free[i]
	offset := s.offset
	s.offset += size
	s.size -= size
	if s.size == 0 {
		c.free = slices.Delete(c.free, i, i+1)
	}
	c.live[offset] = size
	h.live += size
	dirty = min(max(0, c.fresh-offset), size)
	c.fresh = max(c.fresh, offset+size)
	return c.bytes[offset : offset+size], dirty
}

// grow makes a chunk and allocates size bytes in it. If another goroutine has in the meantime made enough
// room in the existing chunks, grow allocates the bytes there and makes no chunk.
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
	// The rest of the last page after a large tensor stays unused, because a small tensor there would keep
	// the whole chunk alive.
	c.free = []span{{0, max(size, chunkBytes)}}
	h.add(c)
	b, dirty = h.cut(c, 0, size)
	return b, dirty, nil
}

// add adds a chunk to the heap and notifies the watchers. The caller holds mu.
func (h *heap) add(c *chunk) {
	h.chunks = append(h.chunks, c)
	h.reindex()
	for _, w := range h.watchers {
		w.added(c.Chunk)
	}
}

// remove removes h.chunks[i] from the heap and notifies the watchers. The caller holds mu.
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
	return segment.Close() // without holding mu, because this takes a long time
}

func (h *heap) release(b []byte) error {
	unused, err := h.free(b)
	if unused != nil {
		// Close is called without holding mu, because it takes a long time: 0.1 s per GiB.
		err = unused.Segment.Close()
	}
	if err != nil {
		return fmt.Errorf("arena: free: %w", err)
	}
	return nil
}

// free frees the tensor at the start of b. If this was the last tensor in its chunk, and the heap does not
// keep the chunk for further tensors, free removes the chunk from the heap and returns it.
func (h *heap) free(b []byte) (unused *chunk, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	ref, ok := h.find(b[:0])
	if !ok {
		return nil, fmt.Errorf(
			"got a slice of %d bytes at %p, which is not in an arena: it was not allocated by Alloc, or its memory was already freed", len(b), unsafe.SliceData(b))
	}
	i := slices.IndexFunc(h.chunks, func(c *chunk) bool { return c.ID == ref.Chunk })
	c := h.chunks[i]
	size, ok := c.live[ref.Offset]
	if !ok {
		return nil, fmt.Errorf(
			"the slice does not begin at an allocated tensor (byte %d of chunk %d): it begins inside a tensor, "+
				"or its tensor was already freed", ref.Offset, ref.Chunk)
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

// addFree adds s to the free ranges and merges it with the free ranges that touch it.
func (c *chunk) addFree(s span) {
	i, _ := slices.BinarySearchFunc(c.free, s.offset, func(f span, offset int64) int {
		return cmp.Compare(f.offset, offset)
	})
	from, to := i, i // s replaces free[from:to], which it includes
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

// keeps reports whether the heap keeps an empty chunk for further tensors. It keeps one empty chunk of the
// standard size. The caller holds mu.
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

// reindex makes a new index for Find. The caller holds mu.
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
	// Find the last chunk that begins at or before b. A search that calls a closure would take twice as long.
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
