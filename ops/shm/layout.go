package shm

import (
	"context"
	"encoding/binary"
	"fmt"
	"sort"
	"unsafe"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/ops"
)

// extent is a part of the operation's buffer, which is the concatenation of the tensors. The first extent
// begins at byte 0. Every other extent begins where the extent before it ends.
type extent struct {
	end     int64 // the offset in the operation's buffer at which the extent ends (exclusive)
	in, out place
}

// place says where peers find the bytes of an extent. If chunk is not 0, the bytes are in the arena chunk
// with this ID, and offset says where. If chunk is 0, the bytes are in the staging area.
type place struct {
	chunk  uint32
	offset int64
	mem    []byte // the mapping of the chunk in this process; nil at the chunk's owner
}

func (p *place) staged() bool { return p.chunk == 0 }

// A table has the layout of one rank. It begins with the number of extents (u32) and a zero (u32). After
// that, it has five values for each extent: end (u64), the chunk of the input (u32), the chunk of the output
// (u32), the offset of the input (u64) and the offset of the output (u64). In an alltoall the table has one
// extent, and after the extent the number of bytes for each member of the set (u64 each).
const (
	tableHeader = 8
	extentBytes = 32
	maxExtents  = (tableBytes - tableHeader) / extentBytes
)

// layout says where the tensors of one rank are in memory.
type layout struct {
	extents []extent
	direct  bool // at least one input or output is not staged
}

// find returns the index of the extent that contains byte v, and the offset at which that extent begins.
func (l *layout) find(v int64) (i int, begin int64) {
	if n := len(l.extents); n > 1 {
		i = sort.Search(n, func(i int) bool { return l.extents[i].end > v })
	}
	if i > 0 {
		begin = l.extents[i-1].end
	}
	return i, begin
}

// describe sets l to the layout of this rank's tensors. A tensor in an arena is read in place if the table
// has room for its extent. All other tensors are staged.
func (l *layout) describe(tensors []ops.Tensor, find func([]byte) (arena.Ref, bool)) {
	l.extents, l.direct = l.extents[:0], false
	var end int64
	for _, t := range tensors {
		if len(t.In) == 0 {
			continue
		}
		end += int64(len(t.In))
		e := extent{end: end}
		if len(l.extents) < maxExtents-1 {
			if ref, ok := find(t.In); ok {
				e.in = place{chunk: ref.Chunk, offset: ref.Offset}
			}
			if &t.Out[0] == &t.In[0] {
				e.out = e.in
			} else if ref, ok := find(t.Out); ok {
				e.out = place{chunk: ref.Chunk, offset: ref.Offset}
			}
		}
		l.direct = l.direct || !e.in.staged() || !e.out.staged()
		if k := len(l.extents); k > 0 && e.in.staged() && e.out.staged() && l.extents[k-1].in.staged() &&
			l.extents[k-1].out.staged() {
			l.extents[k-1].end = end
			continue
		}
		l.extents = append(l.extents, e)
	}
}

// stageOutputs changes the layout of a rank that gets no results: it stages the results that it computes.
func (l *layout) stageOutputs() {
	for i := range l.extents {
		l.extents[i].out = place{}
	}
}

// write encodes l into a table.
func (l *layout) write(table []byte) {
	binary.LittleEndian.PutUint32(table, uint32(len(l.extents)))
	at := table[tableHeader:]
	for i := range l.extents {
		e := &l.extents[i]
		binary.LittleEndian.PutUint64(at, uint64(e.end))
		binary.LittleEndian.PutUint32(at[8:], e.in.chunk)
		binary.LittleEndian.PutUint32(at[12:], e.out.chunk)
		binary.LittleEndian.PutUint64(at[16:], uint64(e.in.offset))
		binary.LittleEndian.PutUint64(at[24:], uint64(e.out.offset))
		at = at[extentBytes:]
	}
}

// read decodes the layout of a peer from its table, and maps the chunks that the layout names. total is the
// size that the buffer must have. elem is a power of two, and all extents must be aligned to it. It is the
// size of an element if kernels read the data, or 1 if the data is only copied.
func (l *layout) read(table []byte, total, elem int64, chunk func(id uint32) ([]byte, error)) error {
	l.extents, l.direct = l.extents[:0], false
	n := binary.LittleEndian.Uint32(table)
	if n > maxExtents {
		return fmt.Errorf("the peer violated the protocol: it described its buffer as %d memory ranges, want at most %d", n, maxExtents)
	}
	at := table[tableHeader:]
	var begin int64
	for range n {
		e := extent{end: int64(binary.LittleEndian.Uint64(at))}
		e.in.chunk = binary.LittleEndian.Uint32(at[8:])
		e.out.chunk = binary.LittleEndian.Uint32(at[12:])
		e.in.offset = int64(binary.LittleEndian.Uint64(at[16:]))
		e.out.offset = int64(binary.LittleEndian.Uint64(at[24:]))
		at = at[extentBytes:]
		if e.end <= begin || e.end > total {
			return fmt.Errorf("got a memory range from byte %d to byte %d of the buffer, want an end after the begin and at most %d", begin,
				e.end, total)
		}
		if (e.end|e.in.offset|e.out.offset)&(elem-1) != 0 {
			return fmt.Errorf("got a memory range with end %d and offsets %d and %d, want multiples of %d", e.end,
				e.in.offset, e.out.offset, elem)
		}
		for _, p := range []*place{&e.in, &e.out} {
			if p.staged() {
				continue
			}
			l.direct = true
			var err error
			if p.mem, err = chunk(p.chunk); err != nil {
				return err
			}
			if p.offset < 0 || p.offset > int64(len(p.mem)) || e.end-begin > int64(len(p.mem))-p.offset {
				return fmt.Errorf("got a memory range of %d bytes at offset %d of arena chunk %d, which has only %d bytes", e.end-begin, p.offset, p.chunk, len(p.mem))
			}
		}
		begin = e.end
		l.extents = append(l.extents, e)
	}
	if begin != total {
		return fmt.Errorf("got memory ranges for a buffer of %d bytes, want a buffer of %d bytes", begin, total)
	}
	return nil
}

// own has this rank's tensors and finds the tensor at an offset in the operation's buffer.
type own struct {
	tensors []ops.Tensor
	ends    []int64
	last    int // the index of the tensor that the last call of at returned

	room   []byte // the memory into which small tensors are packed
	packed []ops.Tensor
}

const (
	// packedBytes is the largest size of a tensor that is packed. Copying such a tensor costs less than
	// handling it separately in every step.
	packedBytes = 2 << 10
	// roomBytes limits the total size of the packed tensors, so that they stay in the cache.
	roomBytes = 512 << 10
)

// pack copies each run of small neighbouring tensors into one tensor. After the operation, unpack copies the
// results back.
func (o *own) pack() {
	if len(o.tensors) < 2 {
		return
	}
	if o.room == nil {
		o.room = make([]byte, roomBytes)
	}
	// begin is the offset in o.room of the tensor that is being packed. It is -1 if the previous tensor was
	// not packed.
	n, used, begin := 0, 0, -1
	for i, t := range o.tensors {
		if end := used + len(t.In); len(t.In) <= packedBytes && end <= len(o.room) {
			at := o.room[used:end]
			copy(at, t.In)
			o.packed = append(o.packed, ops.Tensor{In: at, Out: t.Out})
			if begin < 0 {
				begin = used
			} else {
				n--
			}
			t.In, t.Out = o.room[begin:end], o.room[begin:end]
			used = end
		} else {
			begin = -1
		}
		o.tensors[n], o.ends[n] = t, o.ends[i]
		n++
	}
	clear(o.tensors[n:])
	o.tensors, o.ends = o.tensors[:n], o.ends[:n]
}

func (o *own) unpack() {
	for _, t := range o.packed {
		copy(t.Out, t.In)
	}
}

func (o *own) set(tensors []ops.Tensor) (total int64, err error) {
	o.tensors, o.ends, o.last = o.tensors[:0], o.ends[:0], 0
	for _, t := range tensors {
		if len(t.In) != len(t.Out) {
			return 0, fmt.Errorf("got a tensor of %d bytes with a result of %d bytes, want the same length",
				len(t.In), len(t.Out))
		}
		if len(t.In) == 0 {
			continue
		}
		total += int64(len(t.In))
		o.tensors = append(o.tensors, t)
		o.ends = append(o.ends, total)
	}
	return total, nil
}

// clear drops the references to the tensors.
func (o *own) clear() {
	clear(o.tensors)
	clear(o.packed)
	o.tensors, o.packed = o.tensors[:0], o.packed[:0]
}

// at returns at most n bytes of this rank's contribution, beginning at offset v in the operation's buffer,
// and the memory for their result.
func (o *own) at(v, n int64) (in, out []byte) {
	i := o.last
	t := &o.tensors[i]
	if begin := o.ends[i] - int64(len(t.In)); v < begin || v >= o.ends[i] {
		if i++; v != o.ends[i-1] { // most calls ask for the tensor after the previous call's tensor
			i = sort.Search(len(o.ends), func(i int) bool { return o.ends[i] > v })
		}
		o.last, t = i, &o.tensors[i]
	}
	from := v - (o.ends[i] - int64(len(t.In)))
	n = min(n, int64(len(t.In))-from)
	return t.In[from : from+n], t.Out[from : from+n]
}

// word returns a pointer to the u64 at the given offset of a segment. The offset must be a multiple of 8.
func word(segment []byte, at int) *uint64 { return (*uint64)(unsafe.Pointer(&segment[at])) }

// flag returns a pointer to the u32 at the given offset of a segment. The offset must be a multiple of 4.
func flag(segment []byte, at int) *uint32 { return (*uint32)(unsafe.Pointer(&segment[at])) }

func contextError(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}
