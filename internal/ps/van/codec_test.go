package van

import (
	"bytes"
	"math"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gohvd/gohvd/internal/ps/pspb"
)

// extremes has values of a field.
func extremes(f protoreflect.FieldDescriptor) []protoreflect.Value {
	switch f.Kind() {
	case protoreflect.BoolKind:
		return []protoreflect.Value{protoreflect.ValueOfBool(true)}
	case protoreflect.Int32Kind:
		return []protoreflect.Value{protoreflect.ValueOfInt32(math.MaxInt32),
			protoreflect.ValueOfInt32(math.MinInt32)}
	case protoreflect.Int64Kind:
		return []protoreflect.Value{protoreflect.ValueOfInt64(math.MaxInt64),
			protoreflect.ValueOfInt64(math.MinInt64)}
	case protoreflect.Uint32Kind:
		return []protoreflect.Value{protoreflect.ValueOfUint32(math.MaxUint32)}
	case protoreflect.Uint64Kind:
		return []protoreflect.Value{protoreflect.ValueOfUint64(math.MaxUint64)}
	case protoreflect.EnumKind:
		return []protoreflect.Value{protoreflect.ValueOfEnum(13), protoreflect.ValueOfEnum(math.MinInt32)}
	case protoreflect.StringKind:
		return []protoreflect.Value{protoreflect.ValueOfString("x")}
	case protoreflect.BytesKind:
		return []protoreflect.Value{protoreflect.ValueOfBytes([]byte("x"))}
	}
	return nil
}

// checkCodec checks that a header has the encoding of package proto, and can be decoded.
func checkCodec(t *testing.T, h *pspb.Header) {
	t.Helper()
	want, err := proto.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	got, err := appendHeader([]byte("before"), h)
	if err != nil || string(got) != "before"+string(want) {
		t.Fatalf("the encoding of %v is %x, %v, want %x", h, got, err, want)
	}
	if n := headerBytes(h); n != len(want) {
		t.Errorf("%v has %d bytes, got %d", h, len(want), n)
	}
	var s storage
	m, err := s.empty(), s.decode(want)
	clear(want) // the reader uses its memory again
	if err != nil || !proto.Equal(m.Header, h) {
		t.Fatalf("%v became %v", h, m.Header)
	}
}

// TestHeaders checks each field of a header and of a frame, alone and with all others.
func TestHeaders(t *testing.T) {
	all, frame := new(pspb.Header), new(pspb.Frame)
	for _, m := range []proto.Message{frame, all} {
		fields := m.ProtoReflect().Descriptor().Fields()
		for i := range fields.Len() {
			for _, v := range extremes(fields.Get(i)) {
				one := m.ProtoReflect().New()
				one.Set(fields.Get(i), v)
				h, isHeader := one.Interface().(*pspb.Header)
				if !isHeader {
					h = &pspb.Header{Frames: []*pspb.Frame{{}, one.Interface().(*pspb.Frame)}}
				}
				checkCodec(t, h)
				m.ProtoReflect().Set(fields.Get(i), v)
			}
		}
	}
	usual := proto.Clone(all).(*pspb.Header)
	usual.Body, usual.Error = nil, ""
	for range maxFrames {
		all.Frames, usual.Frames = append(all.Frames, frame), append(usual.Frames, frame)
		checkCodec(t, all)
	}
	if n := headerBytes(usual); n > usualBytes {
		t.Errorf("a header with numbers and frames has %d bytes, want at most %d", n, usualBytes)
	}
	all.Control = &pspb.Control{Clock: 1, Nodes: []*pspb.Node{{Id: 1}, {Hostname: "h"}}}
	all.Replica = &pspb.Replica{Number: 1}
	checkCodec(t, all)
	checkCodec(t, &pspb.Header{Control: &pspb.Control{}, Replica: &pspb.Replica{}})
}

// FuzzHeader checks that decode accepts what package proto does, and sees the same header, except that it
// bounds the number of frames.
func FuzzHeader(f *testing.F) {
	for _, h := range []*pspb.Header{
		{Push: true, KeyList: 300, Frames: []*pspb.Frame{{Bytes: 8}, {}}},
		{Body: []byte("b"), Error: "e", Control: &pspb.Control{Acks: []uint64{1}},
			Replica: &pspb.Replica{Worker: 1}},
	} {
		b, err := proto.Marshal(h)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(append(bytes.Clone(b), b...))
	}
	f.Add([]byte("\xfd\x01\x00\x00\x00\x00")) // a field of a later version
	f.Add([]byte("\x0a\x00"))                 // a field of another type
	f.Add([]byte("\x72\x01\xff"))             // a text that is not UTF-8
	f.Add([]byte("\x3a\x02\x0d\x00"))         // a frame that is cut
	f.Fuzz(func(t *testing.T, b []byte) {
		var s storage
		m, want := s.empty(), new(pspb.Header)
		got := s.decode(b)
		err := proto.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(b, want)
		switch {
		case len(want.Frames) > maxFrames && got == nil:
			t.Errorf("%x has %d frames", b, len(want.Frames))
		case len(want.Frames) > maxFrames:
		case (err == nil) != (got == nil):
			t.Errorf("%x: got %v, want %v", b, got, err)
		case err == nil && !proto.Equal(m.Header, want):
			t.Errorf("%x became %v, want %v", b, m.Header, want)
		}
	})
}
