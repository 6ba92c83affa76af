package message

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/message/messagepb"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

func requestToPB(r *Request) *messagepb.Request {
	return &messagepb.Request{
		Kind: uint32(r.Kind), Name: r.Name, Dtype: uint32(r.DType), Shape: r.Shape,
		ReduceOp: uint32(r.Op), Prescale: r.Prescale, Postscale: r.Postscale, WireDtype: uint32(r.Wire),
		RootRank: int32(r.Root),
		Group:    r.Group, GroupSize: r.GroupSize, Empty: r.Empty, Ranks: convert[int32](r.Ranks),
		MembersOnly: r.MembersOnly, ProcessSet: uint32(r.Set), Parts: r.Parts, Device: int32(r.Device),
	}
}

func requestFromPB(pb *messagepb.Request) *Request {
	return &Request{
		Kind: Kind(narrow(pb.Kind)), Name: pb.Name, DType: tensor.DType(narrow(pb.Dtype)), Shape: pb.Shape,
		Op: tensor.ReduceOp(narrow(pb.ReduceOp)), Prescale: pb.Prescale, Postscale: pb.Postscale,
		Wire: tensor.DType(narrow(pb.WireDtype)), Root: topo.Rank(pb.RootRank),
		Group: pb.Group, GroupSize: pb.GroupSize, Empty: pb.Empty, Ranks: convert[topo.Rank](pb.Ranks),
		MembersOnly: pb.MembersOnly, Set: topo.ProcessSetID(pb.ProcessSet), Parts: pb.Parts,
		Device: tensor.Device(pb.Device),
	}
}

func responseToPB(r *Response) *messagepb.Response {
	return &messagepb.Response{
		Kind: uint32(r.Kind), Name: r.Name, Dtype: uint32(r.DType), Shape: r.Shape, FirstDims: r.FirstDims,
		ReduceOp: uint32(r.Op), Prescale: r.Prescale, Postscale: r.Postscale, WireDtype: uint32(r.Wire),
		RootRank: int32(r.Root),
		Group:    r.Group, GroupSize: r.GroupSize, Ranks: convert[int32](r.Ranks), ProcessSet: uint32(r.Set),
		Parts: r.Parts, Devices: convert[int32](r.Devices), Text: r.Text,
	}
}

func responseFromPB(pb *messagepb.Response) *Response {
	return &Response{
		Kind: Kind(narrow(pb.Kind)), Name: pb.Name, DType: tensor.DType(narrow(pb.Dtype)), Shape: pb.Shape,
		FirstDims: pb.FirstDims,
		Op:        tensor.ReduceOp(narrow(pb.ReduceOp)), Prescale: pb.Prescale, Postscale: pb.Postscale,
		Wire: tensor.DType(narrow(pb.WireDtype)), Root: topo.Rank(pb.RootRank),
		Group: pb.Group, GroupSize: pb.GroupSize, Ranks: convert[topo.Rank](pb.Ranks),
		Set: topo.ProcessSetID(pb.ProcessSet), Parts: pb.Parts,
		Devices: convert[tensor.Device](pb.Devices), Text: pb.Text,
	}
}

func narrow(v uint32) uint8 { return uint8(min(v, math.MaxUint8)) }

func convert[T, F ~int32](s []F) (to []T) {
	for _, v := range s {
		to = append(to, T(v))
	}
	return to
}

// equal reports whether a and b are equal, where a NaN equals a NaN.
func equal(a, b any) bool { return fmt.Sprintf("%#v", a) == fmt.Sprintf("%#v", b) }

// Requests and responses are encoded as package proto encodes them, and what it accepts is decoded to the
// same values.
func TestProtobuf(t *testing.T) {
	requests := []*Request{{}, {
		Kind: Allreduce, Name: "grad/\u00e9", DType: tensor.Float32, Shape: tensor.Shape{3, 0, 1 << 40}, Op: 1,
		Prescale: 0.5, Postscale: math.Copysign(0, -1), Root: -1, Wire: 2, Group: "g", GroupSize: 300,
		Empty: true, Ranks: []topo.Rank{0, 200, 1 << 19}, Set: 1 << 31, Parts: Parts{1, -1},
		MembersOnly: true, Device: -1,
	}}
	responses := []*Response{{}, {
		Kind: Error, Name: "h", DType: tensor.Float64, Shape: tensor.Shape{7}, FirstDims: []int64{1, 2, 300},
		Devices: []tensor.Device{-1, 3}, Op: 2, Prescale: 2, Postscale: math.Inf(1), Wire: 3, Root: 5,
		Group: "group", GroupSize: -7, Parts: Parts{9}, Ranks: []topo.Rank{1}, Set: 8, Text: "why",
	}}
	marshal := proto.MarshalOptions{Deterministic: true}
	rng := rand.New(rand.NewPCG(1, 2))
	// variants calls check with the bytes of a message, with a field whose number is too large, and with
	// bytes that were changed or cut.
	variants := func(p []byte, check func(p []byte)) {
		check(p)
		greater := protowire.AppendTag(nil, protowire.MaxValidNumber+2, protowire.VarintType)
		check(append(append(p[:len(p):len(p)], greater...), 1))
		for range 20000 {
			q := append([]byte(nil), p...)
			for range 1 + rng.IntN(3) {
				switch at := rng.IntN(len(q) + 1); {
				case at == len(q):
					q = append(q, byte(rng.Uint32()))
				case rng.IntN(4) == 0:
					q = q[:at]
				default:
					q[at] = byte(rng.Uint32())
				}
			}
			check(q)
		}
	}
	framed := func(p []byte) *decoder {
		b := append([]byte{byte(len(p)), byte(len(p) >> 8), 0, 0}, p...)
		return &decoder{b: b}
	}
	for _, r := range requests {
		got, err := appendRequest(nil, r)
		want, err2 := marshal.Marshal(requestToPB(r))
		if err != nil || err2 != nil || string(got[4:]) != string(want) {
			t.Errorf("got % x, %v, want % x, %v", got, err, want, err2)
		}
		variants(want, func(p []byte) {
			var pb messagepb.Request
			refused := proto.Unmarshal(p, &pb) != nil
			want := requestFromPB(&pb)
			var got Request
			d := framed(p)
			d.requestFields(&got)
			if (d.err != nil) != refused || !refused && !equal(&got, want) {
				t.Fatalf("% x: got %+v, %v, want %+v, refused: %v", p, got, d.err, want, refused)
			}
		})
	}
	for _, r := range responses {
		got, err := appendResponse(nil, r)
		want, err2 := marshal.Marshal(responseToPB(r))
		if err != nil || err2 != nil || string(got[4:]) != string(want) {
			t.Errorf("got % x, %v, want % x, %v", got, err, want, err2)
		}
		variants(want, func(p []byte) {
			var pb messagepb.Response
			refused := proto.Unmarshal(p, &pb) != nil
			want := responseFromPB(&pb)
			var got Response
			d := framed(p)
			d.responseFields(&got)
			if (d.err != nil) != refused || !refused && !equal(&got, want) {
				t.Fatalf("% x: got %+v, %v, want %+v, refused: %v", p, got, d.err, want, refused)
			}
		})
	}
	for _, r := range []*Request{{Name: "\xff"}, {Group: "\xff"}} {
		if _, err := appendRequest(nil, r); err == nil {
			t.Errorf("%q %q: a text that is not valid UTF-8 was encoded", r.Name, r.Group)
		}
	}
	for _, r := range []*Response{{Name: "\xff"}, {Group: "\xff"}} {
		if _, err := appendResponse(nil, r); err == nil {
			t.Errorf("%q %q: a text that is not valid UTF-8 was encoded", r.Name, r.Group)
		}
	}
}
