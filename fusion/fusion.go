// Package fusion decides which responses run together as one operation, and provides the buffer for fused
// tensors.
//
// Without fusion, each tensor would cost the latency of an operation. Fusion saves that, but each tensor has
// to be copied into the buffer and out of it. Only responses that a single operation can execute are fused.
package fusion

import (
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// Options determine which of the compatible responses are fused.
type Options struct {
	// ThresholdBytes is the maximum number of bytes that are fused into one operation. Compressed tensors
	// count with their compressed size. 0 disables fusion. A response with several tensors of a group is not
	// split.
	ThresholdBytes int64
	// If DisableGroupFusion is set, the tensors of a group are not fused with tensors outside the group.
	DisableGroupFusion bool
	// Deterministic disables fusion that could change the bits of a result. It affects only Adasum, which
	// scales tensors by sums over their elements.
	Deterministic bool
}

// Tensor is a response that is ready to run. Absent are the members that have joined without requesting the
// tensor, in ascending order. They contribute neutral elements.
type Tensor struct {
	Response *message.Response
	Absent   []topo.Rank
}

// Plan divides tensors into groups that run as one operation each, and appends the groups to dst. A group is
// an ascending list of indexes into the slice tensors. Every index is in exactly one group.
//
// The rule is Horovod's. A group begins with the first tensor that is not in a group yet. Then Plan goes
// through the later tensors. If a tensor is compatible and the group stays within the threshold with it, Plan
// adds the tensor. Otherwise Plan skips it. When the bytes of the group and of the skipped tensors together
// exceed the threshold, the group ends, because the tensors after that were submitted too long after the
// group.
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

// fits reports whether a+b is at most limit, without computing a+b, which could overflow. All arguments must
// be at least 0.
func fits(a, b, limit int64) bool { return a <= limit && b <= limit-a }

func (o *Options) fusible(r *message.Response) bool {
	return o.ThresholdBytes > 0 && Compatible(r, r) && !(o.Deterministic && r.Op == tensor.Adasum)
}

func (o *Options) together(a, b *Tensor) bool {
	return Compatible(a.Response, b.Response) && slices.Equal(a.Absent, b.Absent) &&
		(!o.DisableGroupFusion || a.Response.Group == b.Response.Group && len(a.Response.Parts) == 0 &&
			len(b.Response.Parts) == 0)
}

// Compatible reports whether one operation can execute both a and b. A response that cannot be fused is not
// compatible with any response, not even with itself. On devices, only allreduces and reduces are fused,
// because NCCL runs one tensor of the other kinds without copies.
func Compatible(a, b *message.Response) bool {
	if a.Kind != b.Kind || !slices.Equal(a.Devices, b.Devices) {
		return false
	}
	switch a.Kind {
	case message.Allreduce, message.Reduce, message.Reducescatter:
		if a.Kind == message.Reducescatter && a.Devices != nil {
			return false
		}
		// A group that is one response may have tensors of several element types. Then its DType is not
		// valid.
		return a.DType == b.DType && a.DType.Valid() && a.Op == b.Op && a.Prescale == b.Prescale &&
			a.Postscale == b.Postscale && a.Wire == b.Wire && a.Root == b.Root
	case message.Broadcast:
		return a.Root == b.Root && a.Devices == nil
	case message.Allgather:
		return a.Devices == nil
	}
	return false
}

// Buffer is memory for fused tensors. The memory is kept between operations, so that in steady state nothing
// is allocated. The zero value is ready to use. A Buffer is not safe for concurrent use.
type Buffer struct {
	mem []byte
}

// Bytes returns n bytes of memory that are valid until the next call of Bytes. Their contents are undefined.
// The memory is aligned for every element type. The result is not nil, also if n is 0.
func (b *Buffer) Bytes(n int) []byte {
	if cap(b.mem) < max(n, 1) {
		// Go aligns allocations of 8 or more bytes to 8 bytes.
		b.mem = make([]byte, max(n, 4096))
	}
	return b.mem[:n]
}
