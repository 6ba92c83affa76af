package fusion_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"unsafe"

	"github.com/gohvd/gohvd/fusion"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

func allreduce(dt tensor.DType, numElems int64) *message.Response {
	return &message.Response{
		Kind: message.Allreduce, Name: "t", DType: dt, Shape: tensor.Shape{numElems},
		Op: tensor.Sum, Prescale: 1, Postscale: 1,
	}
}

// tensors returns a tensor for each response. The tensors have no absent members.
func tensors(responses ...*message.Response) []fusion.Tensor {
	var all []fusion.Tensor
	for _, r := range responses {
		all = append(all, fusion.Tensor{Response: r})
	}
	return all
}

func TestPlan(t *testing.T) {
	f32 := func(n int64) *message.Response { return allreduce(tensor.Float32, n) }
	f64 := func(n int64) *message.Response { return allreduce(tensor.Float64, n) }
	with := func(r *message.Response, change func(*message.Response)) *message.Response {
		change(r)
		return r
	}
	of := func(k message.Kind, dt tensor.DType, n int64) *message.Response {
		return &message.Response{Kind: k, Name: "t", DType: dt, Shape: tensor.Shape{n}}
	}
	rows := func(dt tensor.DType, first ...int64) *message.Response {
		r := of(message.Allgather, dt, 0)
		r.FirstDims = first
		return r
	}
	scatter := func(op tensor.ReduceOp) *message.Response {
		return with(f32(2), func(r *message.Response) { r.Kind, r.Op = message.Reducescatter, op })
	}
	wire := func(n int64, to tensor.DType) *message.Response {
		return with(f32(n), func(r *message.Response) { r.Wire = to })
	}
	on := func(r *message.Response, devices ...tensor.Device) *message.Response {
		r.Devices = devices
		return r
	}
	// The function group returns a response for a group with one element of each of the given types.
	group := func(types ...tensor.DType) *message.Response {
		return with(allreduce(types[0], int64(len(types))), func(r *message.Response) {
			for _, dt := range types {
				r.Parts = r.Parts.Append(dt, nil)
			}
			r.DType = r.Parts.DType()
		})
	}
	for _, c := range []struct {
		name      string
		threshold int64
		responses []*message.Response
		want      [][]int
	}{
		{"nothing", 64, nil, nil},
		{"exactly the threshold", 16, []*message.Response{f32(2), f32(2), f32(1)}, [][]int{{0, 1}, {2}}},
		{"one byte less", 15, []*message.Response{f32(2), f32(2)}, [][]int{{0}, {1}}},
		{"larger than the threshold alone", 8, []*message.Response{f32(100), f32(1)}, [][]int{{0}, {1}}},
		{"zero threshold", 0, []*message.Response{f32(0), f32(0)}, [][]int{{0}, {1}}},
		{"empty tensors fuse", 1, []*message.Response{f32(0), f32(0)}, [][]int{{0, 1}}},
		{"look ahead over another type", 64, []*message.Response{f32(2), f64(2), f32(2), f64(2)},
			[][]int{{0, 2}, {1, 3}}},
		// The group has 8 bytes, and the skipped tensor has 56 bytes. The total of 64 bytes does not exceed
		// the threshold, so Plan looks at the third tensor and adds it to the group.
		{"look ahead up to the threshold", 64, []*message.Response{f32(2), f64(7), f32(2)},
			[][]int{{0, 2}, {1}}},
		{"and not beyond", 64, []*message.Response{f32(2), f64(8), f32(2)}, [][]int{{0}, {1}, {2}}},
		{"too large, then smaller", 16, []*message.Response{f32(2), f32(3), f32(2)}, [][]int{{0}, {1}, {2}}},
		{"too large but passed over", 32, []*message.Response{f32(5), f32(4), f32(1), f32(2)},
			[][]int{{0}, {1, 2, 3}}},
		{"other reduction", 64, []*message.Response{f32(1), with(f32(1), func(r *message.Response) {
			r.Op = tensor.Max
		}), f32(1)}, [][]int{{0, 2}, {1}}},
		{"other factors", 64, []*message.Response{f32(1), with(f32(1), func(r *message.Response) {
			r.Prescale = 2
		}), with(f32(1), func(r *message.Response) { r.Postscale = 2 }), f32(1)}, [][]int{{0, 3}, {1}, {2}}},
		{"other devices", 64, []*message.Response{f32(1), on(f32(1), 1, 2), on(f32(1), 1, 1), f32(1),
			on(f32(1), 1, 2)}, [][]int{{0, 3}, {1, 4}, {2}}},
		{"only allreduces on devices", 64, []*message.Response{on(f32(1), 1), on(f32(1), 1),
			on(of(message.Broadcast, tensor.Float32, 1), 1), on(of(message.Broadcast, tensor.Float32, 1), 1),
			on(rows(tensor.Float32, 1), 1), on(rows(tensor.Float32, 1), 1), on(scatter(tensor.Sum), 1),
			on(scatter(tensor.Sum), 1)}, [][]int{{0, 1}, {2}, {3}, {4}, {5}, {6}, {7}}},
		{"broadcasts of one root, of any type", 64, []*message.Response{
			of(message.Broadcast, tensor.Float32, 1), of(message.Broadcast, tensor.Int64, 1),
			with(of(message.Broadcast, tensor.Float32, 1), func(r *message.Response) { r.Root = 1 }), f32(1),
		}, [][]int{{0, 1}, {2}, {3}}},
		{"allgathers of any type, by their whole output", 32, []*message.Response{
			rows(tensor.Float32, 1, 2), rows(tensor.Int64, 0, 2), rows(tensor.Uint8, 2, 3),
			rows(tensor.Uint8, 4, 0),
		}, [][]int{{0, 1}, {2, 3}}},
		{"reducescatters of one reduction", 64, []*message.Response{scatter(tensor.Sum), scatter(tensor.Max),
			scatter(tensor.Sum), f32(2)}, [][]int{{0, 2}, {1}, {3}}},
		{"what travels counts", 32, []*message.Response{wire(8, tensor.Float16), wire(8, tensor.Float16),
			wire(1, tensor.BFloat16), f32(1)}, [][]int{{0, 1}, {2}, {3}}},
		{"a group that is one of them", 64, []*message.Response{f32(2), group(tensor.Float32, tensor.Float32),
			f32(2)}, [][]int{{0, 1, 2}}},
		{"groups of several types", 64, []*message.Response{f32(2), group(tensor.Float32, tensor.Float64),
			group(tensor.Float32, tensor.Float64), f32(2)}, [][]int{{0, 3}, {1}, {2}}},
		{"what runs alone", 64, []*message.Response{
			of(message.Alltoall, tensor.Float32, 1), of(message.Alltoall, tensor.Float32, 1),
			{Kind: message.Barrier}, {Kind: message.Barrier},
			{Kind: message.Error}, {Kind: message.Error}, {Kind: message.Join}, {Kind: message.AddProcessSet},
			{Kind: message.AddProcessSet},
		}, [][]int{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}}},
		{"sums that overflow", 1 << 62, []*message.Response{f64(1 << 59), f64(1 << 58), f64(1 << 58),
			f64(1 << 58), f64(1 << 58)}, [][]int{{0}, {1, 2}, {3, 4}}},
	} {
		got := fusion.Plan(nil, tensors(c.responses...), fusion.Options{ThresholdBytes: c.threshold})
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

func TestPlanOptions(t *testing.T) {
	adasum, grouped := allreduce(tensor.Float32, 1), allreduce(tensor.Float32, 1)
	adasum.Op = tensor.Adasum
	grouped.Group, grouped.GroupSize = "G", 2
	plain := allreduce(tensor.Float32, 1)
	whole := allreduce(tensor.Float32, 1)
	whole.Parts = whole.Parts.Append(tensor.Float32, nil)
	wholes := []fusion.Tensor{{Response: plain}, {Response: whole}, {Response: whole}, {Response: plain}}
	both := []fusion.Tensor{{Response: adasum}, {Response: adasum}, {Response: plain}, {Response: grouped},
		{Response: grouped}, {Response: plain}}
	absent := []fusion.Tensor{{Response: plain}, {Response: plain, Absent: []topo.Rank{1}},
		{Response: plain, Absent: []topo.Rank{1}}, {Response: plain, Absent: []topo.Rank{1, 2}},
		{Response: plain}}
	for _, c := range []struct {
		name    string
		tensors []fusion.Tensor
		options fusion.Options
		want    [][]int
	}{
		{"none", both, fusion.Options{}, [][]int{{0, 1}, {2, 3, 4, 5}}},
		{"groups apart", both, fusion.Options{DisableGroupFusion: true}, [][]int{{0, 1}, {2, 5}, {3, 4}}},
		{"groups that are one apart", wholes, fusion.Options{DisableGroupFusion: true},
			[][]int{{0, 3}, {1}, {2}}},
		{"deterministic", both, fusion.Options{Deterministic: true}, [][]int{{0}, {1}, {2, 3, 4, 5}}},
		{"other ranks absent", absent, fusion.Options{}, [][]int{{0, 4}, {1, 2}, {3}}},
	} {
		c.options.ThresholdBytes = 64
		if got := fusion.Plan(nil, c.tensors, c.options); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

// For random responses, every index is in exactly one group. All responses of a group have the same type. The
// group is within the threshold unless it has only one tensor. The groups are in the order of their first
// tensors.
func TestPlanProperties(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 2000 {
		responses := make([]*message.Response, rng.IntN(12))
		for i := range responses {
			responses[i] = allreduce(tensor.DTypes()[rng.IntN(2)], rng.Int64N(20))
		}
		threshold := rng.Int64N(100)
		seen := make(map[int]bool)
		last := -1
		for _, g := range fusion.Plan(nil, tensors(responses...), fusion.Options{ThresholdBytes: threshold}) {
			if g[0] < last {
				t.Fatalf("a group that starts at %d follows a group that starts at %d", g[0], last)
			}
			last = g[0]
			var total int64
			for j, i := range g {
				if seen[i] || j > 0 && i <= g[j-1] {
					t.Fatalf("index %d twice or out of order in %v", i, g)
				}
				seen[i] = true
				total += responses[i].NumBytes()
				if responses[i].DType != responses[g[0]].DType {
					t.Fatalf("group %v mixes types", g)
				}
			}
			if len(g) > 1 && total > threshold {
				t.Fatalf("group %v has %d bytes, threshold %d", g, total, threshold)
			}
		}
		if len(seen) != len(responses) {
			t.Fatalf("%d of %d responses are in a group", len(seen), len(responses))
		}
	}
}

func TestBufferPersists(t *testing.T) {
	var b fusion.Buffer
	first := b.Bytes(100_000)
	if uintptr(unsafe.Pointer(&first[0]))%8 != 0 {
		t.Error("not aligned to 8 bytes")
	}
	if n := testing.AllocsPerRun(10, func() { b.Bytes(1); b.Bytes(100_000) }); n != 0 {
		t.Errorf("%v allocations for buffers that fit", n)
	}
	if len(b.Bytes(0)) != 0 || len(b.Bytes(200_000)) != 200_000 {
		t.Error("wrong lengths")
	}
}

func BenchmarkPlan(b *testing.B) {
	for _, n := range []int{1, 161} {
		responses := make([]*message.Response, n)
		for i := range responses {
			responses[i] = allreduce(tensor.Float32, 1000)
		}
		all := tensors(responses...)
		b.Run(fmt.Sprintf("responses=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			var dst [][]int
			for b.Loop() {
				dst = fusion.Plan(dst[:0], all, fusion.Options{ThresholdBytes: 128 << 20})
			}
		})
	}
}
