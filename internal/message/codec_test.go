package message_test

import (
	"bytes"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

func bitsOf(bs ...uint32) message.Bits {
	var v message.Bits
	for _, b := range bs {
		v.Set(b)
	}
	return v
}

// floats and mixed are groups that are one request. floats has 10 elements of one type, and mixed has 7
// elements of two types.
var (
	floats = message.Parts{}.Append(tensor.Float32, tensor.Shape{2, 3}).Append(tensor.Float32,
		nil).Append(tensor.Float32, tensor.Shape{3})
	mixed = message.Parts{}.Append(tensor.Float32, tensor.Shape{2, 2}).Append(tensor.Int64,
		tensor.Shape{0}).Append(tensor.Float32, nil).Append(tensor.Int64, tensor.Shape{2})
)

func upSamples() []*message.Up {
	return []*message.Up{
		{Type: message.UpHeartbeat, Seen: 7},
		{Type: message.UpHeartbeat, Seen: 8, Tensor: "g0", Set: 3, Millis: 1500},
		{Type: message.UpTimeout, Seen: 9, Tensor: "w\x00ü", Set: 3, Millis: math.MaxUint32},
		{Type: message.UpTimeout, Seen: 9, Tensor: "g0", Granted: true},
		{Type: message.UpTimeout, Seen: 9, Set: 2, Tensor: "recv from rank 3, tag 1", Message: true, Suspect: 3},
		{Type: message.UpBye, Seen: math.MaxUint64},
		{Type: message.UpSuspect, Suspects: []topo.Rank{3}, Reason: "connection reset"},
		{Type: message.UpSuspect, Set: 7, Suspects: []topo.Rank{0, 3}, Reason: "connection reset"},
		{Type: message.UpLost, Suspect: 4, Reason: "the process exited"},
		{Type: message.UpFault, Suspect: 5, Reason: "malformed frame"},
		{Type: message.UpNews, Seen: 1, Shutdown: true},
		{Type: message.UpNews, Seen: 1, Shutdown: true, Channels: []message.Channel{{Set: 0, Rank: 1},
			{Set: math.MaxUint32, Rank: message.MaxRanks - 1}}},
		{Type: message.UpNews, Seen: 2, Sets: []message.UpSet{
			{Set: 0, Hits: bitsOf(0, 63, 64, 1000), Done: 3},
			{Set: 9, Hits: message.Bits{}, Invalid: bitsOf(5), Requests: []message.Request{
				{Kind: message.Allreduce, Name: "g0", DType: tensor.Float32, Shape: tensor.Shape{4, 0, 3},
					Op: tensor.Average, Prescale: 0.5, Postscale: 1},
				{Kind: message.Broadcast, Name: "w\x00ü", DType: tensor.Int64, Root: 2},
				{Kind: message.Allgather, Name: "d", DType: tensor.Float32, Shape: tensor.Shape{4},
					Device: tensor.CUDA(7)},
				{Kind: message.Barrier, Name: "b"},
				{Kind: message.Allreduce, Name: "g1", DType: tensor.Float32, Shape: tensor.Shape{4},
					Op: tensor.AverageActive, Prescale: 1, Postscale: 1, Wire: tensor.BFloat16, Group: "G",
					GroupSize: 3},
				{Kind: message.Allreduce, Name: "G", DType: tensor.Float32, Shape: tensor.Shape{10},
					Op: tensor.Sum, Prescale: 1, Postscale: 1, Parts: floats},
				{Kind: message.Allreduce, Name: "M", Shape: tensor.Shape{7}, Op: tensor.Sum, Prescale: 1,
					Postscale: 1, Parts: mixed},
				{Kind: message.Reducescatter, Name: "r", DType: tensor.Bool, Shape: tensor.Shape{4},
					Op: tensor.Max, Prescale: 1, Postscale: 1},
				{Kind: message.Alltoall, Name: "x", DType: tensor.Uint16, Shape: tensor.Shape{5, 2}},
				{Kind: message.Join, Name: "j", Empty: true},
				{Kind: message.AddProcessSet, Name: "s", Ranks: []topo.Rank{0, 2, message.MaxRanks - 1}},
				{Kind: message.AddProcessSet, Name: "m", Ranks: []topo.Rank{1}, MembersOnly: true},
				{Kind: message.RemoveProcessSet, Name: "s", Set: math.MaxUint32},
			}},
		}},
	}
}

func downSamples() []*message.Down {
	return []*message.Down{
		{Type: message.DownHeartbeat},
		{Type: message.DownHeartbeat, Ranks: []topo.Rank{2, 3},
			Channels: []message.Channel{{Set: 1, Rank: 3}}},
		{Type: message.DownLeft, Ranks: []topo.Rank{2}, Channels: []message.Channel{{Set: 0, Rank: 2}}},
		{Type: message.DownClose},
		{Type: message.DownFail, Ranks: []topo.Rank{2, 3}, Reason: "silent for 10s"},
		{Type: message.DownCycle, Cycle: 5, Stop: true, Brief: true},
		{Type: message.DownCycle, Cycle: 7, Tuning: &message.Tuning{FusionThresholdBytes: 1 << 40,
			CycleTime: time.Hour, SegmentBytes: message.MaxSegmentBytes, CacheOff: true,
			OneLevelAllgather: true}},
		{Type: message.DownCycle, Cycle: 9, Tuning: &message.Tuning{OneLevelAllreduce: true,
			Allreduce: message.TwoLevel}},
		{Type: message.DownCycle, Cycle: 8, Tuning: &message.Tuning{CycleTime: 100 * time.Microsecond}},
		{Type: message.DownCycle, Cycle: 5, Stop: true, Reason: "stalled"},
		{Type: message.DownCycle, Cycle: 6, Sets: []message.DownSet{
			{Set: 0, Grants: []message.Grant{
				{Backend: message.TCP, Algorithm: message.Ring, Bits: []uint32{4, 1, 70}},
				{Backend: message.TCP, Algorithm: message.Ring, Bits: []uint32{2}, Full: []*message.Response{
					{Kind: message.Allreduce, Name: "g1", DType: tensor.Float64, Shape: tensor.Shape{10},
						Op: tensor.Sum, Prescale: 1, Postscale: 1},
					{Kind: message.Allgather, Name: "rows", DType: tensor.Uint8, Shape: tensor.Shape{0, 3},
						FirstDims: []int64{1, 0, 7}},
					{Kind: message.Broadcast, Name: "d", DType: tensor.Int8, Shape: tensor.Shape{3},
						Devices: []tensor.Device{tensor.CUDA(0), tensor.Host, tensor.CUDA(1)}},
				}},
				{Full: []*message.Response{{Kind: message.Error, Name: "bad", Text: "no agreement"}}},
				{Absent: []topo.Rank{1, 3}, Full: []*message.Response{
					{Kind: message.Allreduce, Name: "g2", DType: tensor.Float32, Op: tensor.Adasum,
						Prescale: 1, Postscale: 1, Wire: tensor.Float16, Group: "G", GroupSize: 1},
					{Kind: message.Alltoall, Name: "x", DType: tensor.Uint16, Shape: tensor.Shape{0, 2}},
				}},
				{Full: []*message.Response{{Kind: message.Allreduce, Name: "M", Shape: tensor.Shape{7},
					Op: tensor.Sum, Prescale: 1, Postscale: 1, Parts: mixed}}},
				{Full: []*message.Response{{Kind: message.Join, Name: "j", Root: 2}}},
				{Full: []*message.Response{{Kind: message.AddProcessSet, Name: "s", Ranks: []topo.Rank{1},
					Set: 7}}},
				{Full: []*message.Response{{Kind: message.RemoveProcessSet, Name: "s", Set: 7}}},
			}, Erase: []uint32{8, 9}, Puts: []message.Put{{Grant: 1, Tensor: 1, Bit: 8}}},
			{Set: 4},
		}},
	}
}

// normalUp returns a copy of u for comparisons. In the copy, each empty bit vector is nil, because an empty
// vector and a nil vector have the same meaning.
func normalUp(u *message.Up) message.Up {
	n := *u
	n.Sets, n.Channels = nil, append([]message.Channel(nil), u.Channels...)
	for _, s := range u.Sets {
		if !s.Hits.Any() {
			s.Hits = nil
		}
		if !s.Invalid.Any() {
			s.Invalid = nil
		}
		s.Requests = append([]message.Request(nil), s.Requests...)
		n.Sets = append(n.Sets, s)
	}
	return n
}

func normalDown(d *message.Down) message.Down {
	n := *d
	n.Ranks = append([]topo.Rank(nil), d.Ranks...)
	n.Channels = append([]message.Channel(nil), d.Channels...)
	n.Sets = nil
	for _, s := range d.Sets {
		c := message.DownSet{Set: s.Set, Erase: append([]uint32(nil), s.Erase...),
			Puts: append([]message.Put(nil), s.Puts...)}
		for _, g := range s.Grants {
			g.Bits = append([]uint32(nil), g.Bits...)
			g.Absent = append([]topo.Rank(nil), g.Absent...)
			g.Full = append([]*message.Response(nil), g.Full...)
			c.Grants = append(c.Grants, g)
		}
		n.Sets = append(n.Sets, c)
	}
	return n
}

func TestUpRoundTrip(t *testing.T) {
	var got message.Up // reused for all frames, to detect values that remain from the previous frame
	for range 2 {
		for _, want := range upSamples() {
			b, err := message.AppendUp(nil, want)
			if err != nil {
				t.Fatal(err)
			}
			if err := message.DecodeUp(b, &got); err != nil {
				t.Fatalf("%+v: %v", want, err)
			}
			if g, w := normalUp(&got), normalUp(want); !reflect.DeepEqual(g, w) {
				t.Errorf("got  %+v\nwant %+v", g, w)
			}
		}
	}
}

func TestDownRoundTrip(t *testing.T) {
	var got message.Down
	for range 2 {
		for _, want := range downSamples() {
			b, err := message.AppendDown(nil, want)
			if err != nil {
				t.Fatal(err)
			}
			if err := message.DecodeDown(b, &got); err != nil {
				t.Fatalf("%+v: %v", want, err)
			}
			if g, w := normalDown(&got), normalDown(want); !reflect.DeepEqual(g, w) {
				t.Errorf("got  %+v\nwant %+v", g, w)
			}
		}
	}
}

// For every proper prefix of a frame, and for every frame with an additional byte, the decoders return an
// error.
func TestTruncatedAndTrailing(t *testing.T) {
	var up message.Up
	for _, u := range upSamples() {
		b, _ := message.AppendUp(nil, u)
		for n := range len(b) {
			if message.DecodeUp(b[:n], &up) == nil {
				t.Errorf("%d of %d bytes of %+v were accepted", n, len(b), u)
			}
		}
		if message.DecodeUp(append(b, 0), &up) == nil {
			t.Errorf("a trailing byte after %+v was accepted", u)
		}
	}
	var down message.Down
	for _, d := range downSamples() {
		b, _ := message.AppendDown(nil, d)
		for n := range len(b) {
			if message.DecodeDown(b[:n], &down) == nil {
				t.Errorf("%d of %d bytes of %+v were accepted", n, len(b), d)
			}
		}
		if message.DecodeDown(append(b, 0), &down) == nil {
			t.Errorf("a trailing byte after %+v was accepted", d)
		}
	}
}

// A value that no rank can use is an error and not a negative number or a large allocation.
func TestTuningLimits(t *testing.T) {
	valid, err := message.AppendDown(nil, &message.Down{Type: message.DownCycle, Tuning: &message.Tuning{}})
	if err != nil {
		t.Fatal(err)
	}
	tuning := len(valid) - (8 + 8 + 4 + 1 + 1)
	for _, c := range []struct {
		at   int
		want string
	}{{7, "fusion threshold"}, {15, "cycle time"}, {19, "segment size"}, {20, "switches"}, {21, "algorithm"}} {
		frame := slices.Clone(valid)
		frame[tuning+c.at] = 0x80
		var down message.Down
		if err := message.DecodeDown(frame, &down); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("byte %d is 0x80: got error %v, want one that names the %s", c.at, err, c.want)
		}
	}
}

func TestRequestCheck(t *testing.T) {
	ok := message.Request{Kind: message.Allreduce, Name: "x", DType: tensor.Float32, Shape: tensor.Shape{2},
		Op: tensor.Sum, Prescale: 1, Postscale: 1}
	if err := ok.Check(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		change func(*message.Request)
		want   string
	}{
		{func(r *message.Request) { r.Kind = message.Error }, "unknown kind"},
		{func(r *message.Request) { r.Name = "" }, "0 bytes"},
		{func(r *message.Request) { r.Name = strings.Repeat("n", message.MaxNameBytes+1) }, "4097 bytes"},
		{func(r *message.Request) { r.Name = "bad\xff" }, "not UTF-8"},
		{func(r *message.Request) { r.DType = 77 }, "unknown element type 77"},
		{func(r *message.Request) { r.Op = 77 }, "got the unknown reduction ReduceOp(77)"},
		{func(r *message.Request) { r.DType = tensor.Bool }, "reduce bool: got operation sum"},
		{func(r *message.Request) { r.DType, r.Op = tensor.Int32, tensor.Adasum },
			"reduce with adasum: got element type int32"},
		{func(r *message.Request) { r.DType, r.Op, r.Prescale = tensor.Bool, tensor.Max, 2 },
			"factor: got element type bool"},
		{func(r *message.Request) { r.DType, r.Op, r.Postscale = tensor.Bool, tensor.Max, 2 },
			"factor: got element type bool"},
		{func(r *message.Request) { r.Kind, r.Op = message.Reducescatter, tensor.Adasum },
			"got reduction adasum, which only allreduce supports"},
		{func(r *message.Request) { r.Kind, r.Wire = message.Reducescatter, tensor.Float16 },
			"got compression to float16, which only allreduce supports"},
		{func(r *message.Request) { r.Wire = tensor.Float64 }, "compression of float32 to float64, want"},
		{func(r *message.Request) { r.DType, r.Wire = tensor.Int32, tensor.Float16 },
			"compression of int32 to float16, want"},
		{func(r *message.Request) { r.Group = "G" }, `group "G" with a size of 0`},
		{func(r *message.Request) { r.GroupSize = 2 }, `group "" with a size of 2`},
		{func(r *message.Request) { r.Group, r.GroupSize = "G", -1 }, `group "G" with a size of -1`},
		{func(r *message.Request) { r.Kind, r.Group, r.GroupSize = message.Barrier, "G", 1 },
			`group "G" with a size of 1`},
		{func(r *message.Request) { r.Group, r.GroupSize = "bad\xff", 1 }, "not UTF-8"},
		{func(r *message.Request) { r.Kind = message.AddProcessSet }, "without ranks"},
		{func(r *message.Request) { r.Kind, r.Ranks = message.AddProcessSet, []topo.Rank{1, 1} },
			"want ascending ranks"},
		{func(r *message.Request) { r.Kind, r.Ranks = message.AddProcessSet, []topo.Rank{-1} }, "from 0 to"},
		{func(r *message.Request) { r.Kind, r.Ranks = message.AddProcessSet, []topo.Rank{message.MaxRanks} },
			"from 0 to"},
		{func(r *message.Request) { r.Kind = message.RemoveProcessSet },
			"the global process set cannot be removed"},
		{func(r *message.Request) { r.Shape = tensor.Shape{-1} }, "negative dimension"},
		{func(r *message.Request) { r.Shape = tensor.Shape{1 << 40, 1 << 40} }, "2^63-1"},
		{func(r *message.Request) { r.Shape = tensor.Shape{1 << 62} }, "2^63-1 bytes"},
		{func(r *message.Request) { r.Shape = make(tensor.Shape, message.MaxDims+1) }, "65 dimensions"},
		{func(r *message.Request) { r.Prescale = math.NaN() }, "NaN"},
		{func(r *message.Request) { r.Kind, r.Root = message.Broadcast, -1 }, "got root rank -1"},
		{func(r *message.Request) {
			r.Parts, r.Shape, r.Kind = floats, tensor.Shape{10},
				message.Reducescatter
		}, "got a request for a whole group, but only allreduce supports such requests"},
		{func(r *message.Request) { r.Parts, r.Shape, r.Kind = floats, tensor.Shape{10}, message.Barrier },
			"got a request for a whole group, but only allreduce supports such requests"},
		{func(r *message.Request) {
			r.Parts, r.Shape, r.Group, r.GroupSize = floats, tensor.Shape{10}, "G",
				1
		}, `got a request for a whole group that itself belongs to group "G"`},
		{func(r *message.Request) { r.Parts, r.Shape = floats, tensor.Shape{5, 2} },
			"got shape [5 2] for a request that stands for a whole group"},
		{func(r *message.Request) { r.Parts = floats }, "the group has 10 elements, want 2"},
		{func(r *message.Request) { r.Parts, r.Shape, r.DType = floats, tensor.Shape{10}, tensor.Int32 },
			"the group has element type float32, want int32"},
		{func(r *message.Request) { r.Parts, r.Shape = mixed, tensor.Shape{7} },
			"the group has element type DType(0), want float32"},
		{func(r *message.Request) { r.Parts, r.Shape, r.DType = floats, tensor.Shape{10}, tensor.Invalid },
			"the group has element type float32, want DType(0)"},
		{func(r *message.Request) { r.Parts = message.Parts{1} }, "tensor 1 of the group is truncated"},
		{func(r *message.Request) { r.Parts = append(floats[:len(floats):len(floats)], 1, 2, 3) },
			"tensor 4 of the group is truncated"},
		{func(r *message.Request) { r.Parts = message.Parts{1, -1} }, "tensor 1 of the group is truncated"},
		{func(r *message.Request) { r.Parts = message.Parts{1, math.MaxInt64, 1} },
			"tensor 1 of the group is truncated"},
		{func(r *message.Request) {
			r.Parts = message.Parts{}.Append(tensor.Float32, make(tensor.Shape, message.MaxDims+1))
		}, "tensor 1 of the group: got 65 dimensions"},
		{func(r *message.Request) { r.Parts = message.Parts{-1, 0} },
			"tensor 1 of the group: got unknown element type"},
		{func(r *message.Request) { r.Parts = message.Parts{256 + int64(tensor.Float32), 0} },
			"tensor 1 of the group: got unknown element type"},
		{func(r *message.Request) {
			r.Parts = append(floats[:len(floats):len(floats)], int64(tensor.Float32), 1, -2)
		}, "tensor 4 of the group: tensor: shape [-2] has a negative"},
		{func(r *message.Request) {
			r.Parts = message.Parts{}.Append(tensor.Float64, tensor.Shape{1 << 59}).Append(tensor.Float64,
				tensor.Shape{1 << 59})
			r.DType, r.Shape = tensor.Float64, tensor.Shape{1 << 60}
		}, "more than 2^63-1 bytes"},
		// The reduction and the compression must be valid for every element type of the group.
		{func(r *message.Request) {
			r.Parts, r.Shape, r.DType, r.Op = mixed, tensor.Shape{7}, tensor.Invalid, tensor.Adasum
		}, "reduce with adasum: got element type int64"},
		{func(r *message.Request) {
			r.Parts, r.Shape, r.DType, r.Wire = mixed, tensor.Shape{7}, tensor.Invalid, tensor.Float16
		}, "compression of int64 to float16, want"},
	} {
		r := ok
		c.change(&r)
		err := r.Check()
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: got error %v, want %q", r, err, c.want)
		}
		// The decoder makes the same checks, so it must refuse the request too.
		b, _ := message.AppendUp(nil, &message.Up{Type: message.UpNews,
			Sets: []message.UpSet{{Requests: []message.Request{r}}}})
		var up message.Up
		if message.DecodeUp(b, &up) == nil {
			t.Errorf("%+v was decoded", r)
		}
	}
}

// Matches returns true for the request that Response.Request returns. If a field that the kind uses is
// changed, Matches returns false. If another field is changed, Matches still returns true, because ranks need
// not set unused fields.
func TestMatchesIsTheInverseOfRequest(t *testing.T) {
	changes := map[string]func(*message.Request){
		"kind":  func(q *message.Request) { q.Kind = message.Error },
		"dtype": func(q *message.Request) { q.DType = tensor.Int64 },
		"dims":  func(q *message.Request) { q.Shape = append(q.Shape[:len(q.Shape):len(q.Shape)], 1) },
		"first": func(q *message.Request) {
			q.Shape = append(tensor.Shape{q.Shape[0] + 1}, q.Shape[1:]...)
		},
		"second":    func(q *message.Request) { q.Shape = append(tensor.Shape{q.Shape[0]}, q.Shape[1]+1) },
		"op":        func(q *message.Request) { q.Op = tensor.Max },
		"prescale":  func(q *message.Request) { q.Prescale = 3 },
		"postscale": func(q *message.Request) { q.Postscale = 3 },
		"wire":      func(q *message.Request) { q.Wire = tensor.BFloat16 },
		"root":      func(q *message.Request) { q.Root = 7 },
		"device":    func(q *message.Request) { q.Device++ },
		"group":     func(q *message.Request) { q.Group = "H" },
		"size":      func(q *message.Request) { q.GroupSize++ },
		"parts":     func(q *message.Request) { q.Parts = append(q.Parts[:len(q.Parts):len(q.Parts)], 1, 0) },
		"ranks":     func(q *message.Request) { q.Ranks = []topo.Rank{1} },
		"set":       func(q *message.Request) { q.Set++ },
	}
	shape, always := tensor.Shape{2, 3}, " kind group size parts"
	for _, c := range []struct {
		r       *message.Response
		matters string
	}{
		{&message.Response{Kind: message.Allreduce, DType: tensor.Float32, Shape: shape, Op: tensor.Sum,
			Prescale: 1, Postscale: 2, Wire: tensor.Float16, Group: "G", GroupSize: 2},
			"dtype dims first second device op prescale postscale wire"},
		{&message.Response{Kind: message.Allreduce, Shape: tensor.Shape{7}, Op: tensor.Sum, Prescale: 1,
			Postscale: 2, Parts: mixed},
			"dtype dims first device op prescale postscale wire"},
		{&message.Response{Kind: message.Reducescatter, DType: tensor.Float32, Shape: shape, Op: tensor.Sum,
			Prescale: 1, Postscale: 2},
			"dtype dims first second device op prescale postscale"},
		{&message.Response{Kind: message.Allgather, DType: tensor.Int32, Shape: tensor.Shape{0, 3},
			FirstDims: []int64{4, 0, 9}}, "dtype dims first second device"},
		{&message.Response{Kind: message.Alltoall, DType: tensor.Int32, Shape: tensor.Shape{0, 3}},
			"dtype dims second device"},
		{&message.Response{Kind: message.Broadcast, DType: tensor.Uint8, Shape: shape, Root: 1},
			"dtype dims first second device root"},
		{&message.Response{Kind: message.Broadcast, DType: tensor.Uint8, Shape: shape, Root: 1,
			Devices: []tensor.Device{tensor.CUDA(0), tensor.CUDA(3), tensor.CUDA(2)}},
			"dtype dims first second device root"},
		{&message.Response{Kind: message.Barrier}, ""},
		{&message.Response{Kind: message.Join, Root: 2}, ""},
		{&message.Response{Kind: message.AddProcessSet, Ranks: []topo.Rank{0, 1}, Set: 3}, "ranks"},
		{&message.Response{Kind: message.RemoveProcessSet, Set: 3}, "set"},
	} {
		c.r.Name = "x"
		for i := range 3 {
			q := c.r.Request(i)
			if !c.r.Matches(&q, i) {
				t.Errorf("%v: member %d's request %+v does not match", c.r.Kind, i, q)
			}
			for what, change := range changes {
				if len(q.Shape) == 0 && what == "first" || len(q.Shape) < 2 && what == "second" {
					continue
				}
				other := q
				change(&other)
				matters := slices.Contains(strings.Fields(c.matters+always), what)
				if c.r.Matches(&other, i) == matters {
					t.Errorf("%v: with another %s, which matters: %v, member %d's request %+v matches: %v",
						c.r.Kind, what, matters, i, other, !matters)
				}
			}
		}
	}
	ag := &message.Response{Kind: message.Allgather, Name: "b", DType: tensor.Int32,
		Shape: tensor.Shape{0, 3}, FirstDims: []int64{4, 5}}
	if q := ag.Request(0); ag.Matches(&q, 1) {
		t.Error("member 0's rows match member 1")
	}
}

// DecodeDown returns an error for a response that no correct coordinator makes.
func TestResponseCheck(t *testing.T) {
	for _, c := range []struct {
		r    message.Response
		want string
	}{
		{message.Response{Kind: message.Allgather, DType: tensor.Int32}, "got a response with shape []"},
		{message.Response{Kind: message.Allgather, DType: tensor.Int32, Shape: tensor.Shape{1},
			FirstDims: []int64{1}}, "got a response with shape [1]"},
		{message.Response{Kind: message.Alltoall, DType: tensor.Int32, Shape: tensor.Shape{1, 2}},
			"got a response with shape [1 2]"},
		{message.Response{Kind: message.Reducescatter, DType: tensor.Int32, Op: tensor.Sum, Prescale: 1,
			Postscale: 1}, "got a response with shape []"},
		{message.Response{Kind: message.AddProcessSet, Ranks: []topo.Rank{0}},
			"got process set 0, want the number"},
		{message.Response{Kind: message.AddProcessSet, Set: 1}, "without ranks"},
		{message.Response{Kind: message.RemoveProcessSet}, "cannot be removed"},
	} {
		c.r.Name = "x"
		frame, err := message.AppendDown(nil, &message.Down{Type: message.DownCycle,
			Sets: []message.DownSet{{Grants: []message.Grant{{Full: []*message.Response{&c.r}}}}}})
		if err != nil {
			t.Fatal(err)
		}
		var d message.Down
		if err := message.DecodeDown(frame, &d); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: got error %v, want %q", c.r, err, c.want)
		}
	}
}

// AddGrant reuses the memory of an earlier grant but returns an empty grant.
func TestGrantsAreReusedEmpty(t *testing.T) {
	var s message.DownSet
	g := s.AddGrant()
	g.Absent, g.Bits, g.Full = append(g.Absent, 1), append(g.Bits, 2), append(g.Full, &message.Response{})
	s.Grants = s.Grants[:0]
	if g = s.AddGrant(); len(g.Absent)+len(g.Bits)+len(g.Full) > 0 {
		t.Errorf("a new grant has %+v", g)
	}
}

func TestResponseSizes(t *testing.T) {
	ag := &message.Response{Kind: message.Allgather, Name: "b", DType: tensor.Int32,
		Shape: tensor.Shape{0, 3, 2}, FirstDims: []int64{4, 0, 1}}
	if n := ag.NumBytes(); n != 5*3*2*4 {
		t.Errorf("allgather result has %d bytes, want 120", n)
	}
	half := &message.Response{Kind: message.Allreduce, Name: "h", DType: tensor.Float64,
		Shape: tensor.Shape{3}, Wire: tensor.Float16}
	if n := half.WireBytes(); n != 3*2 {
		t.Errorf("3 float64 sent as float16 have %d bytes, want 6", n)
	}
	several := &message.Response{Kind: message.Allreduce, Name: "m", Shape: tensor.Shape{7}, Parts: mixed}
	if n := several.NumBytes(); n != 5*4+2*8 {
		t.Errorf("a group of 5 float32 and 2 int64 has %d bytes, want 36", n)
	}
	if n := several.WireBytes(); n != 5*4+2*8 {
		t.Errorf("a group of 36 bytes without compression has %d bytes to send", n)
	}
	several.Wire = tensor.BFloat16
	if n := several.WireBytes(); n != 7*2 {
		t.Errorf("7 elements sent as bfloat16 have %d bytes, want 14", n)
	}
	if n := ag.WireBytes(); n != ag.NumBytes() {
		t.Errorf("without compression, %d bytes are sent, want %d", n, ag.NumBytes())
	}
	for _, dims := range [][]int64{{math.MaxInt64, 1}, {-1}, {math.MaxInt64 / 4}} {
		r := &message.Response{Kind: message.Allgather, Name: "b", DType: tensor.Int32,
			Shape: tensor.Shape{0, 3}, FirstDims: dims}
		if n, err := r.NumElems(); err == nil {
			t.Errorf("first dimensions %v give %d elements, want an error", dims, n)
		}
		b, _ := message.AppendDown(nil, &message.Down{Type: message.DownCycle,
			Sets: []message.DownSet{{Grants: []message.Grant{{Full: []*message.Response{r}}}}}})
		var d message.Down
		if message.DecodeDown(b, &d) == nil {
			t.Errorf("first dimensions %v were decoded", dims)
		}
	}
}

func TestParts(t *testing.T) {
	if n, dt := mixed.Len(), mixed.DType(); n != 4 || dt != tensor.Invalid {
		t.Errorf("%d tensors of type %v, want 4 of several types", n, dt)
	}
	if n, dt := floats.Len(), floats.DType(); n != 3 || dt != tensor.Float32 {
		t.Errorf("%d tensors of type %v, want 3 of float32", n, dt)
	}
	if n, dt := message.Parts(nil).Len(), message.Parts(nil).DType(); n != 0 || dt != tensor.Invalid {
		t.Errorf("%d tensors of type %v in empty Parts", n, dt)
	}
	if got, want := slices.Collect(mixed.Types()), []tensor.DType{tensor.Float32,
		tensor.Int64}; !slices.Equal(got, want) {
		t.Errorf("the types are %v, want %v", got, want)
	}
	for i, want := range []struct {
		dt    tensor.DType
		shape tensor.Shape
	}{{tensor.Float32, tensor.Shape{2, 2}}, {tensor.Int64, tensor.Shape{0}}, {tensor.Float32, tensor.Shape{}},
		{tensor.Int64, tensor.Shape{2}}, {tensor.Invalid, nil}} {
		if dt, shape := mixed.At(i); dt != want.dt || !slices.Equal(shape, want.shape) {
			t.Errorf("tensor %d is %v%v, want %v%v", i, dt, shape, want.dt, want.shape)
		}
	}
	changed := func(i int, to int64) message.Parts {
		p := slices.Clone(floats)
		p[i] = to
		return p
	}
	for _, c := range []struct {
		p, q message.Parts
		want int
	}{
		{floats, slices.Clone(floats), -1},
		{nil, nil, -1},
		{nil, floats, 0},
		{floats, changed(0, int64(tensor.Int32)), 0},
		{floats, changed(3, 4), 0},
		{floats, changed(4, int64(tensor.Int32)), 1},
		{floats, changed(8, 4), 2},
		{floats, floats[:6], 2},
		// The first difference is the number of dimensions.
		{floats, message.Parts{}.Append(tensor.Float32, tensor.Shape{2}), 0},
	} {
		if got := c.p.Difference(c.q); got != c.want {
			t.Errorf("%v and %v differ at %d, want %d", c.p, c.q, got, c.want)
		}
		if got := c.q.Difference(c.p); got != c.want {
			t.Errorf("%v and %v differ at %d, want %d", c.q, c.p, got, c.want)
		}
		if c.p.Equal(c.q) != (c.want < 0) {
			t.Errorf("%v and %v are equal: %v", c.p, c.q, c.p.Equal(c.q))
		}
	}
}

func TestVectors(t *testing.T) {
	and, or := []uint64{1, 0, 0}, []uint64{1 << 63, 0}
	b := message.AppendVectors(nil, and, or)
	gotAnd, gotOr, err := message.DecodeVectors(b, []uint64{9, 9, 9, 9}, nil)
	// Trailing zeros are encoded too, because the vectors of all ranks must have the same length.
	if err != nil || !reflect.DeepEqual(gotAnd, and) || !reflect.DeepEqual(gotOr, or) {
		t.Errorf("got %v, %v and error %v", gotAnd, gotOr, err)
	}
	for n := range len(b) {
		if _, _, err := message.DecodeVectors(b[:n], nil, nil); err == nil {
			t.Errorf("%d of %d bytes were accepted", n, len(b))
		}
	}
	b[0]++
	if _, _, err := message.DecodeVectors(b, nil, nil); err == nil {
		t.Error("another type was accepted")
	}
}

// If a text is too long, it is truncated between two characters. This is not an error, because the text is
// only information for users.
func TestLongReasonIsCut(t *testing.T) {
	long := &message.Response{Kind: message.Error, Name: "x", Text: "x" +
		strings.Repeat("世", message.MaxReasonBytes)}
	frame, err := message.AppendDown(nil, &message.Down{Type: message.DownCycle,
		Sets: []message.DownSet{{Grants: []message.Grant{{Full: []*message.Response{long}}}}}})
	if err != nil {
		t.Fatal(err)
	}
	var d message.Down
	if err := message.DecodeDown(frame, &d); err != nil ||
		!strings.HasPrefix(long.Text, d.Sets[0].Grants[0].Full[0].Text) {
		t.Errorf("got error %v", err)
	}
	b, err := message.AppendUp(nil, &message.Up{Type: message.UpSuspect,
		Reason: strings.Repeat("x", 3*message.MaxReasonBytes)})
	if err != nil {
		t.Fatal(err)
	}
	var u message.Up
	if err := message.DecodeUp(b, &u); err != nil || len(u.Reason) != message.MaxReasonBytes {
		t.Errorf("got %d bytes and error %v, want %d", len(u.Reason), err, message.MaxReasonBytes)
	}
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	up := &message.Up{Type: message.UpNews, Seen: 9, Sets: []message.UpSet{{Hits: bitsOf(1, 5, 200)}}}
	down := &message.Down{Type: message.DownCycle, Cycle: 10, Sets: []message.DownSet{{
		Grants: []message.Grant{{Backend: message.TCP, Algorithm: message.Ring, Bits: []uint32{1, 5, 200}}},
	}}}
	var b []byte
	var gotUp message.Up
	var gotDown message.Down
	n := testing.AllocsPerRun(100, func() {
		b, _ = message.AppendUp(b[:0], up)
		if err := message.DecodeUp(b, &gotUp); err != nil {
			t.Fatal(err)
		}
		b, _ = message.AppendDown(b[:0], down)
		if err := message.DecodeDown(b, &gotDown); err != nil {
			t.Fatal(err)
		}
	})
	if n != 0 {
		t.Errorf("%v allocations for a round trip of votes and cached grants, want 0", n)
	}
}

func TestBits(t *testing.T) {
	var v message.Bits
	for _, b := range []uint32{3, 64, 130} {
		v.Set(b)
	}
	var all []uint32
	for b, ok := v.Next(0); ok; b, ok = v.Next(b + 1) {
		all = append(all, b)
	}
	if !reflect.DeepEqual(all, []uint32{3, 64, 130}) {
		t.Errorf("bits are %v", all)
	}
	v.Clear(64)
	v.Clear(100000)
	if v.Has(64) || !v.Has(130) || v.Has(100000) {
		t.Errorf("after clearing 64: %v", v)
	}
	w := bitsOf(3, 5)
	if !v.Intersects(w) || v.Intersects(bitsOf(5, 64)) || w.Intersects(bitsOf(130)) {
		t.Errorf("%v intersects %v: %v", v, w, v.Intersects(w))
	}
	v.And(w)
	if v.Has(130) || !v.Has(3) || v.Has(5) {
		t.Errorf("AND: %v", v)
	}
	v.Or(bitsOf(200))
	if !v.Has(200) || !v.Has(3) {
		t.Errorf("OR: %v", v)
	}
	v.Reset()
	if v.Any() {
		t.Errorf("reset: %v", v)
	}
}

// FuzzDecodeUp checks that encoding is stable. If a decoded frame is encoded, decoded and encoded again, both
// encodings are equal.
func FuzzDecodeUp(f *testing.F) {
	for _, u := range upSamples() {
		b, _ := message.AppendUp(nil, u)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var u message.Up
		if message.DecodeUp(b, &u) != nil {
			return
		}
		once, err := message.AppendUp(nil, &u)
		if err != nil {
			t.Fatal(err)
		}
		var v message.Up
		if err := message.DecodeUp(once, &v); err != nil {
			t.Fatalf("re-encoded frame: %v", err)
		}
		if twice, _ := message.AppendUp(nil, &v); !bytes.Equal(once, twice) {
			t.Fatalf("encoding is not stable:\n%x\n%x", once, twice)
		}
	})
}

func FuzzDecodeDown(f *testing.F) {
	for _, d := range downSamples() {
		b, _ := message.AppendDown(nil, d)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var d message.Down
		if message.DecodeDown(b, &d) != nil {
			return
		}
		once, err := message.AppendDown(nil, &d)
		if err != nil {
			t.Fatal(err)
		}
		var e message.Down
		if err := message.DecodeDown(once, &e); err != nil {
			t.Fatalf("re-encoded frame: %v", err)
		}
		if twice, _ := message.AppendDown(nil, &e); !bytes.Equal(once, twice) {
			t.Fatalf("encoding is not stable:\n%x\n%x", once, twice)
		}
	})
}

func TestProbe(t *testing.T) {
	for _, p := range []message.Probe{
		{Sent: 1},
		{Sent: math.MaxUint64, Received: 2, Replied: 3, Monotonic: 4, Domain: "boot/4026531834"},
	} {
		b := message.AppendProbe([]byte("x"), &p)[1:]
		if !message.IsProbe(b) {
			t.Errorf("IsProbe is false for % x", b)
		}
		if got, err := message.DecodeProbe(b); err != nil || got != p {
			t.Errorf("got %+v, %v, want %+v", got, err, p)
		}
		for n := range b {
			if _, err := message.DecodeProbe(b[:n]); err == nil {
				t.Errorf("the first %d of %d bytes were accepted", n, len(b))
			}
		}
		if _, err := message.DecodeProbe(append(b, 0)); err == nil {
			t.Error("a trailing byte was accepted")
		}
	}
	for _, up := range upSamples() {
		if b, err := message.AppendUp(nil, up); err != nil || message.IsProbe(b) {
			t.Errorf("%v is taken for a probe (%v)", up.Type, err)
		}
	}
}

func FuzzDecodeProbe(f *testing.F) {
	f.Add(message.AppendProbe(nil, &message.Probe{Sent: 1, Domain: "d"}))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := message.DecodeProbe(b)
		if err != nil {
			return
		}
		if again, err := message.DecodeProbe(message.AppendProbe(nil, &p)); err != nil || again != p {
			t.Errorf("% x was decoded as %+v, which was encoded and decoded as %+v, %v", b, p, again, err)
		}
	})
}

func FuzzDecodeVectors(f *testing.F) {
	f.Add(message.AppendVectors(nil, []uint64{1, 2}, []uint64{3}))
	f.Add(message.AppendVectors(nil, nil, nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		and, or, err := message.DecodeVectors(b, nil, nil)
		if err == nil && !bytes.Equal(message.AppendVectors(nil, and, or), b) {
			t.Errorf("%x was decoded as %x and %x, whose encoding differs", b, and, or)
		}
	})
}
