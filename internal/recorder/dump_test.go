package recorder

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// full returns a dump in which every field has a value.
func full() *analysis.Snapshot {
	r := New(10)
	r.Record(operation(1, 5*ms, "a", "b\"\n\x1b[2J", "\xff"))
	start := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	return r.Dump(About{
		Rank: 1, Size: 4, Host: "h1", PID: 77, Epoch: 3, Version: "v1", Why: "SIGQUIT",
		Now: start.Add(time.Minute), At: time.Minute,
		Clock:  trace.Clock{Start: start, Domain: "boot", Monotonic: time.Hour},
		Offset: trace.Offset{At: time.Second, Offset: -5 * ms, Error: 7},
		Pending: []trace.Record{{
			Set: 2, Kind: message.Broadcast, Name: "p", DType: tensor.Int64, Shape: tensor.Shape{4},
			Submitted: 1, Sent: 2, Granted: 3, Begun: 4, Number: 9,
			Backend: message.TCP,
		}},
		Sets:   map[topo.ProcessSetID][]topo.Rank{2: {1, 3}, 1: {0}},
		Stalls: []string{"allreduce \"x\" has waited"},
	})
}

func TestDumpTravels(t *testing.T) {
	d := full()
	text, err := Encode(d, DefaultOperations)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Decode(text)
	if err != nil || !reflect.DeepEqual(got, d) {
		t.Errorf("got %+v, error %v, want %+v", got, err, d)
	}
	want := trace.Record{
		Set: 2, Number: 9, Kind: message.Broadcast, Name: "p", DType: tensor.Int64, Shape: tensor.Shape{4},
		Backend:   message.TCP,
		Submitted: 1, Sent: 2, Granted: 3, Begun: 4,
	}
	if !reflect.DeepEqual(got.Pending, []trace.Record{want}) ||
		!reflect.DeepEqual(got.Sets, []analysis.Set{{ID: 1, Ranks: []topo.Rank{0}},
			{ID: 2, Ranks: []topo.Rank{1, 3}}}) {
		t.Errorf("got %+v and %+v", got.Pending, got.Sets)
	}
	if got.Domain != "boot" || got.Monotonic != time.Hour || got.Measured != time.Second ||
		got.Offset != -5*ms || got.OffsetError != 7 ||
		!got.Start.Equal(time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)) || got.At != time.Minute ||
		!got.Time.Equal(got.Start.Add(time.Minute)) {
		t.Errorf("got the clock %+v", got)
	}
	if got.Operations[2].Name != "\uFFFD" {
		t.Errorf("got %q of what is no UTF-8", got.Operations[2].Name)
	}
}

// Encode keeps only the most recent operations, at most the given number. If these exceed the size limit, it
// keeps fewer.
func TestEncodeBounds(t *testing.T) {
	const recorded, most = 500, 20 << 10
	r := New(400)
	for n := range uint64(recorded) {
		// The names are pseudo-random numbers from a multiplicative generator, so that they do not compress
		// and the size limit is reached.
		name := ""
		for i := range uint64(30) {
			name += fmt.Sprintf("%016x", (n*31+i+1)*0x9e3779b97f4a7c15)
		}
		r.Record(operation(n, 5*ms, name))
	}
	d := r.Dump(About{Size: 1})
	for _, c := range []struct{ wanted, least, most int }{{0, 0, 0}, {1, 1, 1}, {10, 10, 10},
		{500, 20, 100}} {
		text, err := encodeWithin(d, c.wanted, most)
		if err != nil || len(text) > most {
			t.Fatalf("%d bytes, error %v", len(text), err)
		}
		got, err := Decode(text)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(got.Operations); n < c.least || n > c.most ||
			n > 0 && got.Operations[n-1].Number != recorded-1 {
			t.Errorf("%d wanted: got %d operations", c.wanted, n)
		}
		if got.Recorded != recorded {
			t.Errorf("got %d recorded", got.Recorded)
		}
	}
	// These operations compress well, so that the limit on the size before compression is reached first.
	d.Operations[399].Error = strings.Repeat("x", maxPlainBytes/8)
	d.Operations = slices.Repeat(d.Operations[399:], 9)
	text, err := encodeWithin(d, 500, MaxBytes)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := Decode(text); err != nil || len(got.Operations) < 3 {
		t.Errorf("got error %v, want some operations", err)
	}
	_, err = encodeWithin(d, 500, 100)
	testnet.WantError(t, err, "dump of rank 0", "want at most 100")
	if OperationsOf(1) != DefaultOperations || OperationsOf(0) != DefaultOperations ||
		OperationsOf(4) != 5000 || OperationsOf(4096) != 16 {
		t.Errorf("got %d, %d and %d", OperationsOf(1), OperationsOf(4), OperationsOf(4096))
	}
}

// Every text and list is longer than its limit. Dump cuts them, so that the dump can be decoded.
func TestDumpBounds(t *testing.T) {
	long := strings.Repeat("x", 1<<16)
	r := New(10)
	op := operation(1, 5*ms, long)
	op.Records[0].Error = long
	r.Record(op)
	about := About{
		Size: 1 << 17, Version: long, Host: long, Why: long, Clock: trace.Clock{Domain: long},
		Sets:    make(map[topo.ProcessSetID][]topo.Rank),
		Pending: make([]trace.Record, maxPending+3), Stalls: make([]string, 3),
	}
	for i := range about.Pending {
		about.Pending[i] = trace.Record{Name: long[:min(len(long), 1<<16>>i)]}
	}
	for i := range about.Stalls {
		about.Stalls[i] = long
	}
	for i := range topo.ProcessSetID(257) {
		about.Sets[i] = make([]topo.Rank, maxMembers/256)
	}
	d := r.Dump(about)
	if d.NotShown != 3 ||
		len(d.Version)+len(d.Host)+len(d.Domain)+len(d.Operations[0].Name) != 4*(maxNameBytes-1) ||
		len(d.Why)+len(d.Operations[0].Error) != 2*maxTextBytes {
		t.Errorf("got %d not shown, and lengths %d, %d", d.NotShown, len(d.Version), len(d.Why))
	}
	// Names that differ only after the limit stay different, and are not shortened again.
	if a, b := d.Pending[0].Name, clip(long+"y"); a == b || clip(a) != a ||
		!strings.HasPrefix(b, long[:maxNameBytes-12]) {
		t.Errorf("got the names %q and %q", a, b)
	}
	text, err := Encode(d, DefaultOperations)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Decode(text); err != nil {
		t.Error(err)
	}
	// Set 2 has too many members, so Dump leaves it out.
	about.Sets = map[topo.ProcessSetID][]topo.Rank{1: make([]topo.Rank, 10), 2: make([]topo.Rank, maxMembers),
		3: {1}}
	if text, err = Encode(r.Dump(about), 0); err != nil {
		t.Fatal(err)
	}
	if got, err := Decode(text); err != nil || len(got.Sets) != 1 {
		t.Errorf("got %d sets, error %v, want those that there is room for", len(got.Sets), err)
	}
}

func packed(t testing.TB, text []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write(text); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestDecodeRefuses(t *testing.T) {
	with := func(change func(*analysis.Snapshot)) []byte {
		d := full()
		change(d)
		text, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		return packed(t, text)
	}
	for want, text := range map[string][]byte{
		"EOF":                                   nil,
		"invalid header":                        []byte("not packed at all"),
		"invalid character":                     packed(t, []byte("x")),
		"unexpected end":                        packed(t, nil),
		"format 0":                              packed(t, []byte("{}")),
		"format 2":                              with(func(d *analysis.Snapshot) { d.Format = 2 }),
		"cannot unmarshal":                      packed(t, []byte(`{"format":"x"}`)),
		"more than 16777216 uncompressed bytes": packed(t, make([]byte, maxPlainBytes+1)),
		"7340033 bytes, want at most":           make([]byte, MaxBytes+1),
	} {
		if _, err := Decode(text); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: got %v, want ErrMalformed", want, err)
		} else {
			testnet.WantError(t, err, want)
		}
	}
	cutOff := with(func(*analysis.Snapshot) {})
	if _, err := Decode(cutOff[:len(cutOff)-9]); !errors.Is(err, ErrMalformed) {
		t.Errorf("got %v of what is cut off, want ErrMalformed", err)
	}
}

func TestStallTravels(t *testing.T) {
	long := strings.Repeat("\x01", 1<<16)
	for _, c := range []struct{ given, want Stall }{
		{Stall{3, "grad/7", "it has waited"}, Stall{3, "grad/7", "it has waited"}},
		{Stall{1<<32 - 1, long, long}, Stall{1<<32 - 1, clip(long), long[:maxTextBytes]}},
	} {
		text, err := EncodeStall(c.given)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := DecodeStall(text); err != nil || got != c.want {
			t.Errorf("got %.100v, error %v, want %.100v", got, err, c.want)
		}
	}
	for _, text := range []string{"", "x", `{"set":-1}`} {
		if _, err := DecodeStall([]byte(text)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%.20s: got error %v, want ErrMalformed", text, err)
		}
	}
}

func TestWriteFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "folder")
	d := full()
	for range 2 {
		path, err := WriteFile(dir, d)
		if err != nil || path != filepath.Join(dir, "rank1.json") {
			t.Fatalf("got %q, error %v", path, err)
		}
		d.Why = "again"
	}
	text := testnet.ReadFile(t, filepath.Join(dir, "rank1.json"))
	var got analysis.Snapshot
	if err := json.Unmarshal(text, &got); err != nil || !reflect.DeepEqual(&got, d) {
		t.Errorf("got %+v, error %v, want the second dump", got, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("got %v, error %v, want one file", entries, err)
	}
	for path, want := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, "rank1.json"): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s has mode %v, error %v, want %v", path, info.Mode(), err, want)
		}
	}
	// The folder cannot be created, or the file cannot be replaced. WriteFile fails and leaves no temporary
	// file.
	if _, err := WriteFile(filepath.Join(dir, "rank1.json"), d); err == nil {
		t.Error("got no error where the folder is a file")
	}
	if err := os.Mkdir(filepath.Join(dir, "taken"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := WriteText(dir, "taken", nil); err == nil {
		t.Error("got no error where the file is a folder")
	}
	if entries, err = os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("got %v, error %v, want nothing left behind", entries, err)
	}
}

func FuzzDecode(f *testing.F) {
	text, err := json.Marshal(full())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"format":1,"size":2,"pending":[{"name":"x"}],"operations":[{"name":"x","number":3}]}`))
	f.Add([]byte(`{"format":1,"size":2,"pending_not_shown":-9,"process_sets":[{"id":1,"ranks":[1,1,0]}],"pending":[{"set":1,"begun_ns":-1}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		d, err := Decode(packed(t, text))
		if err != nil {
			return
		}
		again, err := Encode(d, DefaultOperations)
		if err != nil {
			return // JSON cannot represent one of the times
		}
		decoded, err := Decode(again)
		if err != nil || !reflect.DeepEqual(decoded.Pending, d.Pending) ||
			!reflect.DeepEqual(decoded.Operations, d.Operations) {
			t.Fatalf("got %+v, error %v, want %+v", decoded, err, d)
		}
		other := full()
		other.Size = d.Size
		report := analysis.Analyse([]*analysis.Snapshot{d, other}, min(max(d.Size, 0), 8), nil).Text()
		if lines := strings.Split(report, "\n"); len(lines) > 400 ||
			strings.ContainsAny(report, "\x00\x1b\r\x7f") {
			t.Errorf("got %d lines: %q", len(lines), report)
		}
	})
}

func FuzzDecodeStall(f *testing.F) {
	f.Add([]byte(`{"set":1,"name":"x","text":"y"}`))
	f.Add([]byte(`{"set":-1}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := DecodeStall(text)
		if err != nil {
			return
		}
		again, err := EncodeStall(s)
		if err != nil {
			t.Fatal(err)
		}
		if decoded, err := DecodeStall(again); err != nil || decoded.Set != s.Set ||
			decoded.Name != clip(s.Name) {
			t.Errorf("%+v was read again as %+v, %v", s, decoded, err)
		}
	})
}
