package arena

import "errors"

// Heap is an allocator of its own, for memory that ends before the process. Its methods are as the functions
// of this package. The zero value is ready for use.
type Heap struct{ heap heap }

// Alloc allocates memory, as the function Alloc.
func (h *Heap) Alloc(numBytes int) ([]byte, error) { return h.heap.alloc(numBytes) }

// Free frees memory of Alloc.
func (h *Heap) Free(b []byte) error { return h.heap.release(b) }

// Find returns the position of b, if b is in a chunk of h.
func (h *Heap) Find(b []byte) (Ref, bool) { return h.heap.find(b) }

// Watch reports the chunks of h, as the function Watch.
func (h *Heap) Watch(added func(Chunk), removed func(id uint32)) (stop func()) {
	return h.heap.watch(added, removed)
}

// Close unmaps all chunks of h, with the tensors in them. h must not be used afterwards.
func (h *Heap) Close() error {
	h.heap.mu.Lock()
	chunks := h.heap.chunks
	h.heap.chunks = nil
	h.heap.reindex()
	h.heap.mu.Unlock()
	var errs []error
	for _, c := range chunks {
		errs = append(errs, c.Segment.Close())
	}
	return errors.Join(errs...)
}
