package bootstrap

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/gohvd/gohvd/internal/frame"
	"github.com/gohvd/gohvd/internal/testnet"
)

// body is a frame without its length.
func body(t testing.TB, f []byte) []byte {
	t.Helper()
	b, err := frame.Read(bytes.NewReader(f), maxPieceBytes)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func someReport() report {
	return report{peer: peer{3, 77, "host", "10.0.0.1:5"}, size: 9, root: 1, roots: 2, ids: [32]byte{1, 2, 3}}
}

func TestReport(t *testing.T) {
	want := someReport()
	b := body(t, encodeReport(want))
	if got, err := decodeReport(b); err != nil || got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	for i := range b {
		if _, err := decodeReport(b[:i]); err == nil {
			t.Errorf("a report cut at %d was read", i)
		}
	}
	_, err := decodeReport(append(b, 0))
	testnet.WantError(t, err, "1 bytes too many")
	for _, c := range []struct {
		change func(*report)
		want   string
	}{
		{func(q *report) { q.size = 0 }, "size is 0, want 1 to 65536"},
		{func(q *report) { q.size = MaxSize + 1 }, "size is 65537"},
		{func(q *report) { q.roots = 10 }, "number of roots is 10, want 2 to 9"},
		{func(q *report) { q.roots = 1 }, "number of roots is 1, want 2 to 9"},
		{func(q *report) { q.root = MaxSize }, "root is 65536"},
		{func(q *report) { q.pid = -1 }, "pid is 18446744073709551615"},
		{func(q *report) { q.host = strings.Repeat("x", MaxNameBytes+1) }, "field of 257 bytes, want at most 256"},
		{func(q *report) { q.addr = "\xff" }, "want UTF-8"},
	} {
		q := someReport()
		c.change(&q)
		_, err := decodeReport(body(t, encodeReport(q)))
		testnet.WantError(t, err, c.want)
	}
}

func TestFailureTexts(t *testing.T) {
	for _, text := range []string{"", "short", strings.Repeat("x", 3*maxTextBytes), strings.Repeat("é", maxTextBytes), "a\xffb"} {
		b := body(t, encodeFailure(&RefusedError{Late, text}))
		_, d, err := decode(b, kindFailure)
		if err != nil {
			t.Fatal(err)
		}
		got, err := d.failure()
		if err != nil || got.Reason != Late || !utf8.ValidString(got.Text) || len(b) > maxControlBytes {
			t.Errorf("text of %d bytes: got %v, %v", len(text), got, err)
		}
		if valid := strings.ToValidUTF8(text, "?"); !strings.HasPrefix(valid, got.Text) || len(got.Text) < min(len(valid), maxTextBytes-1) {
			t.Errorf("text of %d bytes became %d", len(text), len(got.Text))
		}
	}
	for _, reason := range []Reason{NoReason, numReasons} {
		_, d, err := decode(body(t, encodeFailure(&RefusedError{reason, ""})), kindFailure)
		if err != nil {
			t.Fatal(err)
		}
		_, err = d.failure()
		testnet.WantError(t, err, "reason is")
	}
}

func TestRecord(t *testing.T) {
	long := strings.Repeat("x", MaxNameBytes)
	for _, want := range []Record{
		{}, {"a", "b", "c", []byte("d"), "e", 6}, {long, long, long, make([]byte, MaxInfoBytes), long, maxPID},
	} {
		for _, share := range []bool{false, true} {
			b := encodeRecord(&want, share)
			got, gotShare, err := decodeRecord(b)
			if err != nil || !sameRecord(got, want) || gotShare != share {
				t.Errorf("got %+v, %v, %v, want %+v", got, gotShare, err, want)
			}
			if n := len(appendPiece(nil, 0, b)) - frame.HeaderBytes; n > maxPieceBytes {
				t.Errorf("piece of %d bytes, want at most %d", n, maxPieceBytes)
			}
		}
	}
	b := encodeRecord(&Record{}, false)
	b[0] = 2
	_, _, err := decodeRecord(b)
	testnet.WantError(t, err, "flags are 0x2")
	_, _, err = decodeRecord(append(encodeRecord(&Record{}, false), 0))
	testnet.WantError(t, err, "too many")
}

func TestWrongKinds(t *testing.T) {
	_, _, err := decode(nil, kindDone)
	testnet.WantError(t, err, "empty frame")
	_, _, err = decode([]byte{99}, kindDone, kindFailure)
	testnet.WantError(t, err, "frame is of kind 99, want one of [6 8]")
	_, err = decodeHello(body(t, encodeReport(someReport())))
	testnet.WantError(t, err, "kind 1")
	_, err = decodeReport(body(t, encodeHello(hello{1, 2, 3})))
	testnet.WantError(t, err, "kind 3")
	for _, f := range [][]byte{{0, 0, 0, 0}, {0, 0, 0, 4, byte(kindPiece), 0, 0, 0}, {0, 0, 0, 5, byte(kindDone), 0, 0, 0, 0}} {
		_, _, err := readPiece(bytes.NewReader(f))
		testnet.WantError(t, err, "is no piece")
	}
}

// FuzzControl reads every frame but pieces and holds what was read against its encoding.
func FuzzControl(f *testing.F) {
	for _, seed := range [][]byte{
		encodeReport(someReport()), encodeNext(peer{1, 2, "h", "a"}), encodeHello(hello{1, 2, 3}), encodePlain(kindDone),
		encodeFailure(&RefusedError{Late, "why"}),
	} {
		f.Add(body(f, seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > maxControlBytes {
			return
		}
		var out []byte
		if q, err := decodeReport(in); err == nil {
			out = encodeReport(q)
		} else if h, err := decodeHello(in); err == nil {
			out = encodeHello(h)
		} else if k, d, err := decode(in, kindNext, kindFailure, kindDone); err == nil {
			switch k {
			case kindNext:
				p := d.peer()
				if d.end() == nil {
					out = encodeNext(p)
				}
			case kindFailure:
				if why, err := d.failure(); err == nil {
					out = encodeFailure(why)
				}
			default:
				if d.end() == nil {
					out = encodePlain(k)
				}
			}
		}
		if out != nil && !bytes.Equal(body(t, out), in) {
			t.Errorf("%x was read as %x", in, out)
		}
	})
}

func FuzzRecord(f *testing.F) {
	f.Add(encodeRecord(&Record{"a", "b", "c", []byte("d"), "e", 6}, true))
	f.Add(encodeRecord(&Record{}, false))
	f.Fuzz(func(t *testing.T, in []byte) {
		r, share, err := decodeRecord(slices.Clone(in))
		if err != nil {
			return
		}
		if err := r.check(); err != nil {
			t.Errorf("%x was read as %+v: %v", in, r, err)
		}
		if out := encodeRecord(&r, share); !bytes.Equal(out, in) {
			t.Errorf("%x was read as %x", in, out)
		}
	})
}

func FuzzPiece(f *testing.F) {
	f.Add(appendPiece(nil, 3, []byte("data")))
	f.Fuzz(func(t *testing.T, in []byte) {
		rank, data, err := readPiece(bytes.NewReader(in))
		if err == nil && !bytes.HasPrefix(in, appendPiece(nil, rank, data)) {
			t.Errorf("%x was read as rank %d, %x", in, rank, data)
		}
	})
}
