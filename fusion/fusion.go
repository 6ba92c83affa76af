// Package fusion joins responses that can run as one, and keeps the buffers in which they do.
//
// Fusing saves a trip of latency per tensor; it costs a copy in and a copy out. Only responses that one
// operation can serve are joined.
package fusion

import (
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// Options are the rules beyond what one operation can serve.
type Options struct {
	// ThresholdBytes bounds what is fused, in bytes that travel; 0 fuses nothing. A group that is one response is not cut.
	ThresholdBytes int64
	// DisableGroupFusion keeps the tensors of a group apart from all others.
	DisableGroupFusion bool
	// Deterministic excludes what fusion could change the bits of: Adasum, whose tensors are scaled by sums over
	// their elements.
	Deterministic bool
}

// Tensor is a response as it is about to run: without those members, ascending, that have joined and did not ask
// for it.
type Tensor struct {
	Response *message.Response
	Absent   []topo.Rank
}

// Plan appends to dst the groups in which tensors are to run, each a list of indexes into tensors,
// ascending. Every index is in exactly one group.
//
// The rule is Horovod's: a group grows from the first tensor that is left, by each later one that fits its
// kind and keeps the sum of their bytes within the threshold. One that does not fit is passed over, as
// long as the group's bytes and those passed over stay within the threshold together: beyond that the tensors
// were submitted too far apart to wait for each other.
func Plan(dst [][]int, tensors []Tensor, o Options) [][]int {
	taken := make([]bool, len(tensors))
	for first := range tensors {
		t := &tensors[first]
		if taken[first] {
			continue
		}
		group := []int{first}
		if o.fusible(t.Response) {
			total, skipped := t.Response.WireBytes(), int64(0)
			for i := first + 1; i < len(tensors); i++ {
				if taken[i] {
					continue
				}
				n := tensors[i].Response.WireBytes()
				if o.together(t, &tensors[i]) && fits(total, n, o.ThresholdBytes) {
					total += n
					taken[i] = true
					group = append(group, i)
					continue
				}
				if !fits(skipped, n, o.ThresholdBytes) {
					break
				}
				skipped += n
				if !fits(total, skipped, o.ThresholdBytes) {
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

func (o *Options) fusible(r *message.Response) bool {
	return o.ThresholdBytes > 0 && Compatible(r, r) && !(o.Deterministic && r.Op == tensor.Adasum)
}

func (o *Options) together(a, b *Tensor) bool {
	return Compatible(a.Response, b.Response) && slices.Equal(a.Absent, b.Absent) &&
		(!o.DisableGroupFusion || a.Response.Group == b.Response.Group && len(a.Response.Parts) == 0 && len(b.Response.Parts) == 0)
}

// Compatible reports whether one operation can serve a and b together. What runs alone is not even compatible with
// itself.
func Compatible(a, b *message.Response) bool {
	if a.Kind != b.Kind {
		return false
	}
	switch a.Kind {
	case message.Allreduce, message.Reducescatter:
		// A group that is one response may have several types, and then none.
		return a.DType == b.DType && a.DType.Valid() && a.Op == b.Op && a.Prescale == b.Prescale && a.Postscale == b.Postscale && a.Wire == b.Wire
	case message.Broadcast:
		return a.Root == b.Root
	case message.Allgather:
		return true
	}
	return false
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
