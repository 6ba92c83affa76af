package message_test

import (
	"bytes"
	"reflect"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

var partSamples = []message.Part{
	{Ranks: []topo.Rank{8, 9, message.MaxRanks - 1}, Held: []uint32{0, 1, 1<<32 - 1}, Frame: []byte("frame")},
	{Ranks: []topo.Rank{9}, Held: []uint32{3}, Frame: []byte{}},
	{All: true, First: 7, Ranks: []topo.Rank{9, 8}, Held: []uint32{0, 5}, Frame: []byte("frame")},
}

// A combined frame has the same parts after encoding and decoding. No truncated frame, and no frame with
// further bytes, can be decoded.
func TestCombined(t *testing.T) {
	frame := message.AppendCombined(nil, partSamples)
	got, err := message.DecodeCombined(frame, nil)
	if err != nil || !reflect.DeepEqual(got, partSamples) {
		t.Fatalf("got %+v, %v, want %+v", got, err, partSamples)
	}
	size := 5
	for i := range got {
		size += got[i].NumBytes()
	}
	if size != len(frame) || !message.IsCombined(frame) {
		t.Errorf("got %d bytes, want %d", size, len(frame))
	}
	for n := range frame {
		if _, err := message.DecodeCombined(frame[:n], nil); err == nil {
			t.Errorf("the first %d of %d bytes were accepted", n, len(frame))
		}
	}
	if _, err := message.DecodeCombined(append(slices.Clone(frame), 0), nil); err == nil {
		t.Error("a trailing byte was accepted")
	}
	if _, err := message.DecodeCombined(message.AppendCombined(nil, make([]message.Part, 1)),
		nil); err == nil {
		t.Error("a part without ranks and without times was accepted")
	}
}

func TestAddressed(t *testing.T) {
	want := []topo.Rank{3, 5}
	b := message.AppendAddressed(nil, want, []byte("frame"))
	to, frame, err := message.DecodeAddressed(b, nil)
	if err != nil || !slices.Equal(to, want) || string(frame) != "frame" {
		t.Errorf("got %v, %q, %v", to, frame, err)
	}
	b = message.AppendAddressed(nil, nil, []byte("frame"))
	if to, frame, err := message.DecodeAddressed(b, to); err != nil || len(to) > 0 || string(frame) != "frame" {
		t.Errorf("for all ranks: got %v, %q, %v", to, frame, err)
	}
	b = message.AppendAddressed(nil, want, []byte("frame"))
	for n := range len(b) - len("frame") {
		if _, _, err := message.DecodeAddressed(b[:n], nil); err == nil {
			t.Errorf("the first %d bytes were accepted", n)
		}
	}
}

func FuzzDecodeAddressed(f *testing.F) {
	f.Add(message.AppendAddressed(nil, []topo.Rank{3, 5}, []byte("frame")))
	f.Fuzz(func(t *testing.T, b []byte) {
		to, frame, err := message.DecodeAddressed(b, nil)
		if err == nil && !bytes.Equal(message.AppendAddressed(nil, to, frame), b) {
			t.Errorf("decoding and encoding gives another frame: %v, %q", to, frame)
		}
	})
}

func FuzzDecodeCombined(f *testing.F) {
	f.Add(message.AppendCombined(nil, partSamples))
	f.Fuzz(func(t *testing.T, b []byte) {
		parts, err := message.DecodeCombined(b, nil)
		if err == nil && !bytes.Equal(message.AppendCombined(nil, parts), b) {
			t.Errorf("decoding and encoding gives another frame: %+v", parts)
		}
	})
}

// Requests are equal if and only if all fields that are sent are equal.
func TestRequestEqual(t *testing.T) {
	full := message.Request{
		Kind: message.Allreduce, Name: "a", DType: 1, Shape: []int64{1}, Device: 1, Op: 1, Prescale: 1,
		Postscale: 1, Wire: 1, Root: 1, Group: "g", GroupSize: 1, Parts: message.Parts{1}, Empty: true,
		Ranks: []topo.Rank{1}, MembersOnly: true, Set: 1,
	}
	same := full
	same.Bit, same.Hit = 1, new(message.Response)
	if !full.Equal(&same) {
		t.Error("requests that differ only in fields that are not sent are not equal")
	}
	for i := range reflect.TypeFor[message.Request]().NumField() {
		other := full
		f := reflect.ValueOf(&other).Elem().Field(i)
		name := reflect.TypeFor[message.Request]().Field(i).Name
		if name == "Bit" || name == "Hit" {
			continue
		}
		if f.IsZero() {
			t.Errorf("the test does not set %s", name)
		}
		f.SetZero()
		if full.Equal(&other) {
			t.Errorf("requests with different %s are equal", name)
		}
	}
}
