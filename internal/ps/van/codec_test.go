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
	if n := len(want); isPlain(h) && n > maxPlainBytes {
		t.Errorf("a plain header has %d bytes, want at most %d", n, maxPlainBytes)
	}
	var s storage
	if m := s.empty(); s.decode(want) != nil || !proto.Equal(m.Header, h) {
		t.Fatalf("%v became %v", h, m.Header)
	}
}

// TestPlainHeaders checks each field of a header and of a frame, also those that appendHeader does not know,
// alone and with all others.
func TestPlainHeaders(t *testing.T) {
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
				f := fields.Get(i)
				if f.Kind() != protoreflect.StringKind && f.Kind() != protoreflect.BytesKind {
					m.ProtoReflect().Set(f, v)
					if !isPlain(h) {
						t.Errorf("the field %s is not plain", f.Name())
					}
				}
			}
		}
	}
	for range maxFrames + 1 {
		checkCodec(t, all)
		all.Frames = append(all.Frames, frame)
	}
	checkCodec(t, all) // with a frame too many
	checkCodec(t, &pspb.Header{Control: &pspb.Control{Clock: 1}, Timestamp: 1})
	checkCodec(t, &pspb.Header{Replica: &pspb.Replica{Number: 1}, Timestamp: 1})
}

// FuzzPlainHeader checks that a header that decodePlain accepts is the one of package proto.
func FuzzPlainHeader(f *testing.F) {
	b, err := proto.Marshal(&pspb.Header{Push: true, KeyList: 300, Frames: []*pspb.Frame{{Bytes: 8}, {}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(append(bytes.Clone(b), b...))
	f.Fuzz(func(t *testing.T, b []byte) {
		var s storage
		m, want := s.empty(), new(pspb.Header)
		if !s.decodePlain(b) {
			return
		}
		if err := proto.Unmarshal(b, want); err != nil || !proto.Equal(m.Header, want) {
			t.Errorf("%x became %v, want %v, %v", b, m.Header, want, err)
		}
	})
}
