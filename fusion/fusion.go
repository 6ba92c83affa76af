// Package fusion joins responses that can run as one, and keeps the buffers in which they do.
//
// Fusing saves a trip of latency per tensor; it costs a copy in and a copy out. Only responses that one
// reduction can serve are joined: same kind, element type, reduction and scale factors.
package fusion

import (
	"github.com/gohvd/gohvd/message"
)

// Plan appends to dst the groups in which responses are to run, each a list of indexes into responses,
// ascending. Every index is in exactly one group.
//
// The rule is Horovod's: a group grows from the first response that is left, by each later one that fits its
// kind and keeps the sum of their bytes within thresholdBytes. A response that does not fit is passed over, as
// long as the group's bytes and those passed over stay within the threshold together: beyond that the tensors
// were submitted too far apart to wait for each other. A threshold of 0 fuses nothing.
func Plan(dst [][]int, responses []*message.Response, thresholdBytes int64) [][]int {
	taken := make([]bool, len(responses))
	for first, r := range responses {
		if taken[first] {
			continue
		}
		group := []int{first}
		if thresholdBytes > 0 && fusible(r.Kind) {
			total, skipped := r.NumBytes(), int64(0)
			for i := first + 1; i < len(responses); i++ {
				if taken[i] {
					continue
				}
				n := responses[i].NumBytes()
				if together(r, responses[i]) && fits(total, n, thresholdBytes) {
					total += n
					taken[i] = true
					group = append(group, i)
					continue
				}
				if !fits(skipped, n, thresholdBytes) {
					break
				}
				skipped += n
				if !fits(total, skipped, thresholdBytes) {
					break
				}
			}
		}
		dst = append(dst, group)
	}
	return dst
}

// fits reports whether a+b is at most limit, without overflow. All are at least 0.
func fits(a, b, limit int64) bool { return a <= limit && b <= limit-a }

func fusible(k message.Kind) bool { return k == message.Allreduce }

func together(a, b *message.Response) bool {
	return a.Kind == b.Kind && a.DType == b.DType && a.Op == b.Op &&
		a.Prescale == b.Prescale && a.Postscale == b.Postscale
}

// Buffer is memory for fused responses. It persists, so that a steady state allocates nothing. The zero
// value is ready; one goroutine uses it.
type Buffer struct {
	mem []byte
}

// Bytes gives n bytes, valid until the next call. Their content is undefined. They are aligned for every
// element type.
func (b *Buffer) Bytes(n int) []byte {
	if cap(b.mem) < n {
		// Go aligns allocations of 8 bytes and more to 8.
		b.mem = make([]byte, max(n, 4096))
	}
	return b.mem[:n]
}
