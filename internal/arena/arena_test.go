package arena

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/testnet"
)

func mustAlloc(t testing.TB, h *heap, n int) []byte {
	t.Helper()
	b, err := h.alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func mustFree(t testing.TB, h *heap, b []byte) {
	t.Helper()
	if err := h.release(b); err != nil {
		t.Fatal(err)
	}
}

// drain fails the test if a tensor is still live, or if h has more chunks than the one empty chunk that it
// may keep. Then it frees all chunks.
func drain(t testing.TB, h *heap) {
	t.Helper()
	chunks, mapped, live := h.stats()
	if live != 0 || chunks > 1 || mapped > chunkBytes {
		t.Errorf("at the end: got %d chunks of %d bytes, %d in use", chunks, mapped, live)
	}
	for _, c := range h.chunks {
		if err := c.Segment.Close(); err != nil {
			t.Error(err)
		}
	}
}

func newHeap(t testing.TB) *heap {
	h := &heap{}
	t.Cleanup(func() { drain(t, h) })
	return h
}

func TestAlloc(t *testing.T) {
	h := newHeap(t)
	for _, n := range []int{0, 1, 63, 64, 65, 1000, chunkBytes - 1, chunkBytes, chunkBytes + 1} {
		b := mustAlloc(t, h, n)
		if len(b) != n || cap(b) != max(n, 1) || address(b)%align != 0 {
			t.Errorf("%d bytes: got %d of %d at %#x", n, len(b), cap(b), address(b))
		}
		if !bytes.Equal(b, make([]byte, n)) {
			t.Errorf("%d bytes: got memory that is not zeroed", n)
		}
		if _, ok := h.find(b); !ok {
			t.Errorf("%d bytes: Find has not found the tensor", n)
		}
		mustFree(t, h, b)
		if err := h.release(b); err == nil {
			t.Errorf("%d bytes: a second Free returned no error, want one", n)
		}
	}
	if _, err := h.alloc(-1); err == nil {
		t.Error("a negative size: got no error, want one")
	}
	for _, n := range []int{1 << 50, 1<<63 - 1} {
		_, err := h.alloc(n)
		var none *shmem.NoMemoryError
		if !errors.As(err, &none) || none.NeedBytes < int64(n) {
			t.Errorf("%d bytes: got %v, want a *NoMemoryError", n, err)
		}
	}
}

// TestModel makes random allocations and compares the heap with a list of the live tensors. The tensors must
// not overlap, must be zeroed when allocated and must keep their bytes. Find must return their positions.
func TestModel(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	h := newHeap(t)
	type tensor struct {
		b    []byte
		mark byte
	}
	var live []tensor
	spans := make(map[Ref]int64)
	for step := range 1500 {
		if r.IntN(2) == 0 && len(live) < 60 {
			n := r.IntN(5000)
			switch r.IntN(100) {
			case 0:
				n = r.IntN(80 << 20)
			case 1, 2, 3:
				n = r.IntN(20 << 20)
			}
			b := mustAlloc(t, h, n)
			for i := 0; i < n; i += max(1, n/5000) {
				if b[i] != 0 {
					t.Fatalf("step %d: byte %d of %d is %d, want 0", step, i, n, b[i])
				}
			}
			at, ok := h.find(b)
			if !ok {
				t.Fatalf("step %d: %d bytes not found", step, n)
			}
			for o, size := range spans {
				if o.Chunk == at.Chunk && at.Offset < o.Offset+max(size, 1) &&
					o.Offset < at.Offset+max(int64(n), 1) {
					t.Fatalf("step %d: %d bytes at %v overlap %d at %v", step, n, at, size, o)
				}
			}
			spans[at] = int64(n)
			mark := byte(1 + r.IntN(255))
			for i := range b {
				b[i] = mark
			}
			live = append(live, tensor{b, mark})
		} else if len(live) > 0 {
			i := r.IntN(len(live))
			x := live[i]
			live = slices.Delete(live, i, i+1)
			if n := len(x.b); n > 0 && (x.b[0] != x.mark || x.b[n-1] != x.mark || x.b[n/2] != x.mark) {
				t.Fatalf("step %d: a tensor of %d bytes has changed", step, n)
			}
			at, _ := h.find(x.b)
			delete(spans, at)
			mustFree(t, h, x.b)
		}
		var want int64
		for _, x := range live {
			want += max(align, (int64(len(x.b))+align-1)/align*align)
		}
		chunks, _, got := h.stats()
		if got != want {
			t.Fatalf("step %d: %d bytes are live, want %d", step, got, want)
		}
		used := make(map[uint32]bool)
		for at := range spans {
			used[at.Chunk] = true
		}
		if chunks > len(used)+1 {
			t.Fatalf("step %d: %d chunks for tensors in %d", step, chunks, len(used))
		}
	}
	for _, x := range live {
		mustFree(t, h, x.b)
	}
}

// TestCoalesce frees ranges in different orders. They must always be merged, so that the whole chunk can be
// allocated again.
func TestCoalesce(t *testing.T) {
	h := newHeap(t)
	for _, order := range [][]int{{0, 1, 2, 3}, {3, 2, 1, 0}, {0, 2, 1, 3}, {1, 3, 0, 2}} {
		var parts [][]byte
		for range order {
			parts = append(parts, mustAlloc(t, h, chunkBytes/4))
		}
		for _, i := range order {
			mustFree(t, h, parts[i])
		}
		whole := mustAlloc(t, h, chunkBytes)
		if chunks, _, _ := h.stats(); chunks != 1 {
			t.Errorf("order %v: got %d chunks, want 1", order, chunks)
		}
		mustFree(t, h, whole)
	}
}

// TestBestFit checks that an allocation uses the smallest free range that is large enough, so that large
// ranges stay whole.
func TestBestFit(t *testing.T) {
	h := newHeap(t)
	small, wall := mustAlloc(t, h, 4096), mustAlloc(t, h, 64)
	mustFree(t, h, small)
	again := mustAlloc(t, h, 4096)
	if address(again) != address(small) {
		t.Error("a range that fits was not used")
	}
	mustFree(t, h, again)
	mustFree(t, h, wall)
}

func TestFreeChecks(t *testing.T) {
	h := newHeap(t)
	b := mustAlloc(t, h, 1000)
	for name, wrong := range map[string][]byte{
		"inside": b[64:], "off by one": b[1:], "elsewhere": make([]byte, 64), "nil": nil,
		"behind": b[:1000:1000][1000:],
	} {
		if err := h.release(wrong); err == nil {
			t.Errorf("%s: got no error from Free, want one", name)
		}
	}
	mustFree(t, h, b[:10]) // Free only needs a slice that begins where the tensor begins
}

func TestFind(t *testing.T) {
	h := newHeap(t)
	if _, ok := h.find(make([]byte, 10)); ok {
		t.Error("Find found a slice in an empty heap")
	}
	a, b := mustAlloc(t, h, 1000), mustAlloc(t, h, chunkBytes)
	atA, _ := h.find(a)
	atB, _ := h.find(b)
	if atA.Chunk == atB.Chunk || atA.Chunk == 0 || atB.Chunk == 0 {
		t.Errorf("got chunks %d and %d, want two", atA.Chunk, atB.Chunk)
	}
	for off := range 1000 {
		want := Ref{atA.Chunk, atA.Offset + int64(off)}
		if at, ok := h.find(a[off:]); !ok || at != want {
			t.Fatalf("from byte %d: got %v, %v, want %v", off, at, ok, want)
		}
	}
	chunk := h.chunks[1].bytes
	for name, c := range map[string]struct {
		b  []byte
		ok bool
	}{
		"whole": {chunk, true}, "last": {chunk[len(chunk)-1:], true}, "empty": {chunk[:0], true},
		"heap": {make([]byte, 1), false}, "nil": {nil, false},
	} {
		if at, ok := h.find(c.b); ok != c.ok || ok && at.Chunk != atB.Chunk {
			t.Errorf("%s: got %v, %v, want %v", name, at, ok, c.ok)
		}
	}
	// This slice ends one byte after the chunk. Nothing reads that byte.
	if _, ok := h.find(beyond(chunk)); ok {
		t.Error("Find found a slice that ends after the chunk")
	}
	mustFree(t, h, a)
	mustFree(t, h, b)
	if n := testing.AllocsPerRun(100, func() { h.find(chunk) }); n != 0 {
		t.Errorf("find: got %v allocations, want none", n)
	}
}

// TestChunks checks that a heap keeps at most one empty chunk and does not reuse the IDs of chunks. When it
// removes a chunk, it must free the chunk's memory and file.
func TestChunks(t *testing.T) {
	h := newHeap(t)
	before := testnet.OpenFiles(t)
	var got []uint32
	for range 3 {
		a, b, large := mustAlloc(t, h, chunkBytes), mustAlloc(t, h, chunkBytes), mustAlloc(t, h, chunkBytes+1)
		if n := testnet.OpenFiles(t); n != before+3 {
			t.Errorf("got %d open files, want %d", n, before+3)
		}
		for _, x := range [][]byte{a, b, large} {
			at, _ := h.find(x)
			got = append(got, at.Chunk)
		}
		mustFree(t, h, large)
		if chunks, mapped, _ := h.stats(); chunks != 2 || mapped != 2*chunkBytes {
			t.Errorf("after freeing the large one: got %d chunks of %d bytes, want 2", chunks, mapped)
		}
		mustFree(t, h, a)
		mustFree(t, h, b)
		if chunks, mapped, live := h.stats(); chunks != 1 || mapped != chunkBytes || live != 0 {
			t.Errorf("after freeing all: got %d chunks of %d bytes with %d live, want one", chunks, mapped,
				live)
		}
		if n := testnet.OpenFiles(t); n != before+1 {
			t.Errorf("got %d open files, want %d", n, before+1)
		}
	}
	// The test frees a before b, so the heap keeps the chunk of a.
	if want := []uint32{1, 2, 3, 1, 4, 5, 1, 6, 7}; !slices.Equal(got, want) {
		t.Errorf("got chunks %v, want %v", got, want)
	}
}

func TestWatch(t *testing.T) {
	h := newHeap(t)
	first := mustAlloc(t, h, chunkBytes)
	var log []string
	stop := h.watch(
		func(c Chunk) {
			if len(c.Segment.Bytes()) < chunkBytes {
				t.Errorf("chunk %d has %d bytes", c.ID, len(c.Segment.Bytes()))
			}
			log = append(log, fmt.Sprintf("+%d", c.ID))
		},
		func(id uint32) { log = append(log, fmt.Sprintf("-%d", id)) },
	)
	expect := func(what, want string) {
		t.Helper()
		if got := strings.Join(log, " "); got != want {
			t.Errorf("%s: the watcher got %q, want %q", what, got, want)
		}
		log = nil
	}
	expect("watch", "+1")
	second := mustAlloc(t, h, chunkBytes)
	expect("alloc", "+2")
	small := mustAlloc(t, h, 1)
	expect("alloc of another", "+3")
	mustFree(t, h, first)
	expect("free", "")
	mustFree(t, h, second)
	expect("free of the second", "-2")
	stop()
	third := mustAlloc(t, h, chunkBytes+1)
	mustFree(t, h, third)
	mustFree(t, h, small)
	expect("after stop", "")
}

// TestAdopt adopts a chunk. Find must find tensors in it, watchers must be notified of it, and Alloc must not
// use it. Only Abandon may remove it.
func TestAdopt(t *testing.T) {
	h := newHeap(t)
	adopted, err := shmem.Create("adopted", chunkBytes) // as large as the chunks that the heap itself makes
	if err != nil {
		t.Fatal(err)
	}
	var heard []string
	stop := h.watch(
		func(c Chunk) { heard = append(heard, fmt.Sprintf("added %d of %d", c.ID, len(c.Segment.Bytes()))) },
		func(id uint32) { heard = append(heard, fmt.Sprint("removed ", id)) })
	defer stop()
	own := mustAlloc(t, h, 100)
	c := h.adopt(adopted)
	b := adopted.Bytes()
	if ref, ok := h.find(b[4096:8192]); !ok || ref != (Ref{c.ID, 4096}) || c.ID != 2 {
		t.Errorf("Find: got %v, %v, want a place in chunk %d", ref, ok, c.ID)
	}
	if next := mustAlloc(t, h, 100); address(next) >= address(b) && address(next) < address(b)+chunkBytes {
		t.Error("a tensor was allocated in memory of another process")
	} else {
		mustFree(t, h, next)
	}
	if err := h.release(b[:64]); err == nil {
		t.Error("memory of another process was freed")
	}
	mustFree(t, h, own) // the heap must keep the chunk of own, although the adopted chunk is empty too
	if chunks, mapped, live := h.stats(); chunks != 2 || mapped != 2*chunkBytes || live != 0 {
		t.Errorf("got %d chunks of %d bytes, %d in use", chunks, mapped, live)
	}
	if err := h.abandon(1); err == nil {
		t.Error("Abandon of a chunk of this process: got no error, want one")
	}
	if err := h.abandon(c.ID); err != nil {
		t.Error(err)
	}
	if _, ok := h.find(b[:1]); ok {
		t.Error("Find found an abandoned chunk")
	}
	if err := h.abandon(c.ID); err == nil {
		t.Error("a second Abandon: got no error, want one")
	}
	want := []string{fmt.Sprintf("added 1 of %d", chunkBytes), fmt.Sprintf("added 2 of %d", chunkBytes),
		"removed 2"}
	if !slices.Equal(heard, want) {
		t.Errorf("watchers got %q, want %q", heard, want)
	}
}

// TestConcurrent calls Alloc, Free, Find and Watch at the same time. No memory may be allocated twice, and
// watchers must know all chunks in use.
func TestConcurrent(t *testing.T) {
	h := newHeap(t)
	known := make(map[uint32]bool)
	var mu sync.Mutex
	stop := h.watch(
		func(c Chunk) { mu.Lock(); known[c.ID] = true; mu.Unlock() },
		func(id uint32) { mu.Lock(); delete(known, id); mu.Unlock() },
	)
	defer stop()
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 0))
			for range 300 {
				n := 1 + r.IntN(100_000)
				if r.IntN(30) == 0 {
					n = 30 << 20
				}
				b, err := h.alloc(n)
				if err != nil {
					t.Error(err)
					return
				}
				at, ok := h.find(b)
				mu.Lock()
				if !ok || !known[at.Chunk] {
					t.Errorf("chunk %d was not announced", at.Chunk)
				}
				mu.Unlock()
				for i := range min(n, 1000) {
					if b[i] != 0 {
						t.Error("got memory that is not zeroed")
						return
					}
					b[i] = byte(g + 1)
				}
				for i := range min(n, 1000) {
					if b[i] != byte(g+1) {
						t.Error("a tensor was allocated twice")
						return
					}
				}
				if err := h.release(b); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// TestProcess checks that all exported functions work on the heap of the process.
func TestProcess(t *testing.T) {
	b, err := Alloc(100)
	if err != nil {
		t.Fatal(err)
	}
	heard := 0
	stop := Watch(func(Chunk) { heard++ }, func(uint32) {})
	defer stop()
	at, ok := Find(b)
	chunks, mapped, live := Stats()
	if !ok || at.Chunk == 0 || chunks != 1 || heard != 1 || mapped != chunkBytes || live != 128 {
		t.Errorf("got %v, %v, %d chunks of %d bytes with %d live, watchers know %d", at, ok, chunks, mapped,
			live, heard)
	}
	if err := Free(b); err != nil {
		t.Error(err)
	}
}

func BenchmarkFind(b *testing.B) {
	h := &heap{}
	var all [][]byte
	for range 4 {
		all = append(all, mustAlloc(b, h, chunkBytes))
	}
	for b.Loop() {
		if _, ok := h.find(all[2]); !ok {
			b.Fatal("Find has not found the tensor")
		}
	}
	b.StopTimer()
	for _, x := range all {
		mustFree(b, h, x)
	}
	drain(b, h)
}

func BenchmarkAllocFree(b *testing.B) {
	h := &heap{}
	b.ReportAllocs()
	for b.Loop() {
		mustFree(b, h, mustAlloc(b, h, 4096))
	}
	b.StopTimer()
	drain(b, h)
}

func beyond(b []byte) []byte { return unsafe.Slice(unsafe.SliceData(b), len(b)+1) }

// TestChunksAreOpen checks that another process can write to a chunk until the chunk is sealed. Adopted must
// be true for an adopted chunk, and false for other chunks.
func TestChunksAreOpen(t *testing.T) {
	h := newHeap(t)
	var chunks []Chunk
	stop := h.watch(func(c Chunk) { chunks = append(chunks, c) }, func(uint32) {})
	defer stop()
	b := mustAlloc(t, h, 1)
	defer mustFree(t, h, b)
	s, err := shmem.Adopt(duplicate(t, chunks[0].Segment.FD()))
	if err != nil {
		t.Fatalf("the other process cannot write the chunk before it is sealed: %v", err)
	}
	other := &heap{}
	var adopted []Chunk
	defer other.watch(func(c Chunk) { adopted = append(adopted, c) }, func(uint32) {})()
	c := other.adopt(s)
	if len(adopted) != 1 || !adopted[0].Adopted || !c.Adopted || chunks[0].Adopted {
		t.Errorf("own chunk: adopted %v; adopted chunks: %v", chunks[0].Adopted, adopted)
	}
	b[0] = 7
	if got := s.Bytes()[0]; got != 7 {
		t.Errorf("got %d, want 7", got)
	}
	if err := other.abandon(c.ID); err != nil {
		t.Error(err)
	}
}

func duplicate(t *testing.T, fd int) int {
	d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return d
}
