package hier

import "fmt"

// A buffer of slices has the slices one after another, and each slice has its pieces in the order of the
// hosts. b.ends has the offsets at which the pieces end.

// lineBytes is the unit in which buffers are cut, so that two ranks seldom write to the same cache line. It
// is a multiple of the size of every element.
const lineBytes = 64

// boundary returns the offset at which part i begins if numBytes bytes are cut into n parts of almost the
// same size. All offsets but the last one are multiples of lineBytes.
func boundary(numBytes int64, i, n int) int64 {
	lines := (numBytes + lineBytes - 1) / lineBytes
	return min(lines*int64(i)/int64(n)*lineBytes, numBytes)
}

// smallBytes is the size up to which the number of steps and messages counts more than the number of bytes.
const smallBytes = 32 << 10

// cutWhole cuts a buffer of numBytes bytes into pieces: it becomes a buffer of slices as it is. A small
// buffer is one piece, the last one, so that only one owner on each host exchanges messages with other hosts.
func (b *Backend) cutWhole(numBytes int) {
	if numBytes <= smallBytes {
		clear(b.ends)
		b.ends[len(b.ends)-1] = int64(numBytes)
		return
	}
	for i := range b.ends {
		b.ends[i] = boundary(int64(numBytes), i+1, len(b.ends))
	}
}

// selectChunk makes a chunk of an allreduce the current one. In other operations it does nothing.
func (b *Backend) selectChunk(chunk int) {
	if b.chunks == 0 {
		return
	}
	from, to := boundary(int64(len(b.all)), chunk, b.chunks), boundary(int64(len(b.all)), chunk+1, b.chunks)
	w := b.width()
	b.buf, b.work = b.all[from:to], b.allWork[w*from:w*to]
	b.cutWhole(len(b.buf))
}

// cutBlocks cuts the blocks of each host, which are consecutive in the operation's buffer, into a piece for
// each slice.
func (b *Backend) cutBlocks() error {
	var total int64
	member := 0
	for j, members := range b.place.hosts {
		b.begins[j] = total
		for _, m := range members {
			if m != member {
				return errScattered
			}
			if member++; m >= len(b.op.Counts) {
				continue // reported below
			}
			c := b.op.Counts[m]
			if rest := int64(len(b.op.Buf)) - total; c < 0 || c > rest {
				return fmt.Errorf("got %d bytes for block %d, want at least 0 and at most %d", c, m, rest)
			}
			total += c
		}
	}
	if len(b.op.Counts) != member || total != int64(len(b.op.Buf)) {
		return fmt.Errorf("got %d blocks of %d bytes in total, want %d of %d bytes", len(b.op.Counts), total,
			member, len(b.op.Buf))
	}
	b.begins[len(b.place.hosts)] = total
	var end int64
	for i := range b.ends {
		k, j := i/len(b.place.hosts), i%len(b.place.hosts)
		from, to := b.pieceOfBlocks(k, j)
		end += to - from
		b.ends[i] = end
	}
	return nil
}

// blocks returns the part of the operation's buffer that has the blocks of host j.
func (b *Backend) blocks(j int) []byte { return b.op.Buf[b.begins[j]:b.begins[j+1]] }

// pieceOfBlocks returns the range of piece k of the blocks of host j, in the operation's buffer.
func (b *Backend) pieceOfBlocks(k, j int) (from, to int64) {
	begin, size := b.begins[j], b.begins[j+1]-b.begins[j]
	return begin + boundary(size, k, b.place.slices), begin + boundary(size, k+1, b.place.slices)
}

// piece returns the range of piece j of slice k in a buffer of slices.
func (b *Backend) piece(k, j int) (from, to int64) {
	i := k*len(b.place.hosts) + j
	if i > 0 {
		from = b.ends[i-1]
	}
	return from, b.ends[i]
}

// slice returns the range of slice k in a buffer of slices.
func (b *Backend) slice(k int) (from, to int64) {
	from, _ = b.piece(k, 0)
	_, to = b.piece(k, len(b.place.hosts)-1)
	return from, to
}

// slices returns the sizes of the slices, multiplied by width, by member of this host. The size is 0 for a
// member that owns no slice. The result is valid until the next operation of the inner level.
func (b *Backend) slices(width int64) []int64 {
	counts := b.inner.counts
	clear(counts)
	for k := range b.place.slices {
		from, to := b.slice(k)
		counts[k] = (to - from) * width
	}
	return counts
}

// pieces returns the sizes of the pieces of this rank's slice, multiplied by width. The result is valid until
// the next operation of the outer level.
func (b *Backend) pieces(width int64) []int64 {
	counts := b.outer.counts
	for j := range counts {
		from, to := b.piece(b.place.local, j)
		counts[j] = (to - from) * width
	}
	return counts
}
