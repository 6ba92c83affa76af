package tcp

import (
	"fmt"

	"github.com/gohvd/gohvd/internal/tensor"
)

// cut is a list of the offsets at which a buffer is cut into parts: part i has the bytes from cut[i] to
// cut[i+1]. The list has one entry more than there are parts, and its first entry is 0.
type cut []int64

// part returns part i of buf.
func (c cut) part(buf []byte, i int) []byte { return buf[c[i]:c[i+1]] }

// segment returns segment s of part i. A segment has seg bytes, or fewer at the end of the part. After the
// end, segments are empty.
func (c cut) segment(i, s, seg int) byteRange {
	from, end := int(c[i]), int(c[i+1])
	return byteRange{min(from+s*seg, end), min(from+(s+1)*seg, end)}
}

// longest returns the number of bytes of the longest part.
func (c cut) longest() (numBytes int) {
	for i := range len(c) - 1 {
		numBytes = max(numBytes, int(c[i+1]-c[i]))
	}
	return numBytes
}

// even cuts a buffer of numBytes bytes into parts whose lengths differ by at most one element. An element has
// size bytes.
func (c cut) even(numBytes, size int) error {
	if numBytes%size != 0 {
		return fmt.Errorf("got %d bytes, want a multiple of the element size, %d bytes", numBytes, size)
	}
	n := len(c) - 1
	each, more := numBytes/size/n, numBytes/size%n
	for i := range n {
		c[i+1] = int64(((i+1)*each + min(i+1, more)) * size)
	}
	return nil
}

// by cuts a buffer of numBytes bytes into parts: part i has counts[i] bytes, which must be whole elements of
// size bytes.
func (c cut) by(counts []int64, numBytes, size int) error {
	if len(counts) != len(c)-1 {
		return fmt.Errorf("got %d part sizes, want %d", len(counts), len(c)-1)
	}
	for i, k := range counts {
		if rest := int64(numBytes) - c[i]; k < 0 || k > rest || k%int64(size) != 0 {
			return fmt.Errorf("got %d bytes for part %d, want a multiple of the element size, %d, and at most %d, the rest of %d bytes",
				k, i, size, rest, numBytes)
		}
		c[i+1] = c[i] + k
	}
	if last := c[len(counts)]; last != int64(numBytes) {
		return fmt.Errorf("got parts of %d bytes in total, want %d", last, numBytes)
	}
	return nil
}

// scratch is memory that is kept from one operation to the next. The zero value is ready to use.
type scratch struct{ words []int64 }

// room returns size bytes with undefined contents, aligned for every element type. It allocates only if size
// is larger than in all calls before. All calls may return the same memory. So the actions that use the
// result of a call must precede those that use the result of a later call.
func (s *scratch) room(size int) []byte {
	if need := (size + 7) / 8; len(s.words) < need {
		s.words = make([]int64, need)
	}
	return tensor.Bytes(s.words)[:size]
}
