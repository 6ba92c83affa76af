package report

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/gohvd/gohvd/internal/outfile"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/timeline"
)

// records returns the records that a scanner reads from r until the end or an error, and the error.
func records(r io.Reader) (all []string, err error) {
	s := newScanner(r, "f")
	var e event
	for {
		record, err := s.next(&e)
		if record == nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return all, err
		}
		all = append(all, string(record))
	}
}

func TestScanner(t *testing.T) {
	for text, want := range map[string][]string{
		`[]`:                               {},
		" \n[ \n]\n ":                      {},
		`[{"a":1},{"b":"}]\"{"}]`:          {`{"a":1}`, `{"b":"}]\"{"}`},
		"[{\"a\":\n1},\n{\"b\":[{}]}\n\n]": {"{\"a\":\n1}", `{"b":[{}]}`},
	} {
		for name, r := range map[string]io.Reader{"whole": strings.NewReader(text),
			"byte by byte": iotest.OneByteReader(strings.NewReader(text))} {
			got, err := records(r)
			if err != nil || fmt.Sprint(got) != fmt.Sprint(want) || len(got) != len(want) {
				t.Errorf("%q, %s: got %q, %v, want %q", text, name, got, err, want)
			}
		}
	}
	for text, want := range map[string]string{
		"":                     "f: byte 0: the file ends before the closing ]",
		"  \n x":               "f: byte 4: invalid character 'x' at start of value: want the JSON array",
		"{\"traceEvents\":[]}": "f: byte 1: want the JSON array",
		"\x7fELF":              `f: byte 0: invalid character '\x7f' at start of value: want the JSON array`,
		"[":                    "f: byte 1: the file ends before the closing ]",
		"[{\"a\":1},\n":        "f: byte 10: the file ends before the closing ]",
		"[{\"a\":1},\n{\"b":    "f: byte 13: the file ends before the closing ]",
		"[{},7]":               "f: byte 5: want an event {...} or the closing ]",
		"[{}{}]":               "f: byte 3: invalid character '{' after array element",
		"[{}]\n\n[{}]":         "f: byte 7: want the end of the file after the closing ]",
	} {
		_, err := records(strings.NewReader(text))
		var f *FormatError
		if !errors.As(err, &f) || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", text, err, want)
		} else if f.Truncated != strings.Contains(want, "the file ends") {
			t.Errorf("%q: got truncated %v", text, f.Truncated)
		}
	}
	broken := errors.New("no such luck")
	if _, err := records(io.MultiReader(strings.NewReader("[{}"), iotest.ErrReader(broken))); err == nil ||
		!strings.Contains(err.Error(), "no such luck") {
		t.Errorf("got %v, want what reading gave", err)
	}
}

// A record is too long. The scanner fails before it has read the whole record into memory.
func TestLongRecords(t *testing.T) {
	text := `[{"a":1},{"b":"` + strings.Repeat("x", maxRecord) + `"},{"c":"`
	long := strings.NewReader(strings.Repeat("x", 64*maxRecord))
	got, err := records(io.MultiReader(strings.NewReader(text), long))
	if len(got) != 2 || !strings.Contains(fmt.Sprint(err), "an event of more than 262144 bytes") {
		t.Errorf("got %d events and %v, want 2 and that the third is too long", len(got), err)
	}
	if read := 64*maxRecord - long.Len(); read > 4*maxRecord {
		t.Errorf("%d bytes were read of the one that is too long", read)
	}
}

func TestParse(t *testing.T) {
	for text, want := range map[string]stamp{
		`{"ph":"B","ts":1}`:          1000,
		`{"ph":"B","ts":1.5}`:        1500,
		`{"ph":"B","ts":0.0015}`:     2,
		`{"ph":"B","ts":-12.345}`:    -12345,
		`{"ph":"B","ts":200000.001}`: 200_000_001,
		`{"ph":"B","ts":1.5e3}`:      1_500_000,
		` {"x":[1,{"y":[null,true,"\u00e9"]},[]] , "ph" : "B" , "ts" : 7 } `: 7000,
		`{"ph":"B","ts":999999999999}`:                                       999_999_999_999_000,
	} {
		var e event
		if err := parse([]byte(strings.TrimSpace(text)), &e); err != nil || e.Time != want ||
			e.Phase != "B" {
			t.Errorf("%s: got %d, %v, want %d", text, e.Time, err, want)
		}
	}
	for _, text := range []string{
		`[]`, `{"ph":"B","ts":"1"}`, `{"ph":"B","ts":1e300}`, `{"ph":"B","ts":10000000000000000}`,
		`{"ph":"B","ts":-99999999999999999999999}`,
		`{"ph":"B","pid":99999999999999999999}`, `{"ph":"B","pid":"x"}`, `{"ph":"B","args":{"op":1.5}}`,
		`{"ph":"B","args":{"at":1e99}}`,
	} {
		var e event
		if err := parse([]byte(text), &e); err == nil {
			t.Errorf("%s: got %+v, want an error", text, e)
		}
	}
	var e event
	text := `{"name":"a\n\"b\"","ph":"E","pid":3,"args":{"cached":true,"error":null,"fused":null,"name":"n"}}`
	if err := parse([]byte(text), &e); err != nil || e.Name != "a\n\"b\"" || !e.Args.Cached ||
		e.Args.Error != "" || e.Args.Name != "n" || e.PID != 3 {
		t.Errorf("got %+v, %v", e, err)
	}
}

func TestFilesThatAreNone(t *testing.T) {
	dir := t.TempDir()
	whole := newFile(rankID{rank: 0, size: 1, domain: "a", epoch: 1})
	whole.op(testOp{number: 1, granted: 20, begun: 20, ended: 30,
		tensors: []testTensor{{name: "x", submitted: 10}}})
	good := whole.end(100, 0)
	packed := testnet.ReadFile(t, put(t, dir, "good.json.gz", good))
	for name, c := range map[string]struct{ text, want string }{
		"empty":     {"", "byte 0: the file ends before the closing ]"},
		"text":      {"hello", "byte 0: invalid character 'h' at start of value: want the JSON array"},
		"object":    {`{"traceEvents":[]}`, "want the JSON array"},
		"binary":    {"\x00\x01\x02", `invalid character '\x00' at start of value: want the JSON array`},
		"gzip head": {"\x1f\x8b", "bad.json: unexpected EOF"},
		"gzip rest": {"\x1f\x8bxxxxxxxxxxxxxxxx", "bad.json: gzip: invalid header"},
		"only a [":  {"[", "byte 1: the file ends before the closing ]"},
		"merged": {`[{"name":"hvd_merged","ph":"M","pid":0,"tid":0,"args":{}}]`,
			"got a merged trace, want the timeline files of the ranks"},
		"Horovod's": {`[{"name":"process_name","ph":"M","pid":1,"args":{"name":"grad/0"}}]`,
			"got a trace without the event hvd_rank"},
		"null": {`[{"name":"process_name","ph":"M","pid":0,"args":null}]`,
			"got a trace without the event hvd_rank"},
		"a pipe":     {"|", "want a regular file, because a report reads it twice"},
		"half a gz":  {string(packed[:12]), "the file ends before the closing ]"},
		"no file":    {"-", "no such file"},
		"empty path": {"/", "the folder contains no timeline files"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "bad.json")
			switch c.text {
			case "-":
			case "/":
				path = filepath.Dir(path)
			case "|":
				if err := syscall.Mkfifo(path, 0o600); err != nil {
					t.Fatal(err)
				}
			default:
				put(t, filepath.Dir(path), "bad.json", c.text)
			}
			j, _, err := Open([]string{path})
			if err == nil || j != nil || !strings.Contains(err.Error(), c.want) ||
				!strings.Contains(err.Error(), filepath.Dir(path)) {
				t.Errorf("got %v, want %q of %s", err, c.want, path)
			}
			// A good and a bad file are opened together. Open returns the error of the bad file as its second
			// result, and the report uses the good file.
			j, bad, err := Open([]string{put(t, t.TempDir(), "good.json", good), path})
			if err != nil || bad == nil || !strings.Contains(bad.Error(), c.want) {
				t.Fatalf("got %v and %v, want %q", bad, err, c.want)
			}
			r, err := j.Report(Options{})
			if err != nil || r.Operations != 1 {
				t.Errorf("got %+v, %v, want the one of the good file", r, err)
			}
		})
	}
}

// A file is cut off at each byte in turn. The report uses all operations that are complete before the cut,
// and says that the file is truncated.
func TestTruncatedAnywhere(t *testing.T) {
	f := newFile(rankID{rank: 0, size: 1, domain: "a", epoch: 1})
	for n := 1; n <= 3; n++ {
		f.op(testOp{number: n, granted: n*100 + 20, begun: n*100 + 20, ended: n*100 + 30,
			tensors: []testTensor{{name: "x", submitted: n * 100}}})
	}
	whole := f.end(1000, 0)
	last := int64(0)
	own := strings.Index(whole, "hvd_rank")
	head := own + strings.Index(whole[own:], "}},") + 3
	dir := t.TempDir()
	for cut := head; cut < len(strings.TrimSpace(whole)); cut++ {
		j, bad, err := Open([]string{put(t, dir, "t.json", whole[:cut])})
		if bad != nil || err != nil {
			t.Fatalf("cut at %d: %v, %v", cut, bad, err)
		}
		r, err := j.Report(Options{})
		if err != nil {
			t.Fatal(err)
		}
		if r.Operations < last || len(r.Problems) == 0 ||
			!strings.Contains(r.Problems[0], "truncated file is used only up to the error: "+
				filepath.Join(dir, "t.json")+": byte "+fmt.Sprint(cut)) {
			t.Fatalf("cut at %d: got %d operations after %d, and %q", cut, r.Operations, last, r.Problems)
		}
		last = r.Operations
	}
	if last != 3 {
		t.Errorf("got %d operations at the end, want 3", last)
	}
}

// A file is damaged in the middle, in JSON or in the order of the events. The report says where and uses the
// part before the damage.
func TestDamaged(t *testing.T) {
	const begin = `{"name":"NEGOTIATE_ALLREDUCE","ph":"B","ts":40,"pid":1,"args":{"set":0,"op":2}}`
	for text, want := range map[string]string{
		"\x00":                                         `invalid character '\x00'`,
		`,{"ph":"B","ts":"x","pid":1}`:                 "unmarshal",
		`,{"ph":"B","ts":1e16,"pid":1}`:                "got a time of more than 1e+15 us",
		`,{"ph":"E","ts":7,"pid":1}`:                   `got E "", want the beginning of a negotiation`,
		"," + begin + "," + begin:                      `got B "NEGOTIATE_ALLREDUCE" at a wrong place within an operation`,
		"," + begin + `,{"ph":"E","pid":2}`:            "got an event of track 2 within an operation of track 1",
		"," + begin + `,{"ph":"X","name":"1"}`:         "",
		"," + begin + `,{"ph":"X","name":"1","pid":1}`: `got the position "1" of a rank, want 0 to 0`,
	} {
		f := newFile(rankID{rank: 0, size: 1, domain: "a", epoch: 1})
		op := testOp{number: 1, granted: 20, begun: 20, ended: 30,
			tensors: []testTensor{{name: "x", submitted: 10}}}
		f.op(op)
		f.b.WriteString(text)
		if want != "" {
			f.op(op)
		}
		r := reportOf(t, put(t, t.TempDir(), "t.json", f.end(100, 0)))
		problems := strings.Join(r.Problems, "\n")
		if r.Operations != 1 || want != "" && (!strings.Contains(problems, want) ||
			!strings.HasPrefix(problems, "a damaged file is used only up to the error: ")) ||
			want == "" && problems != "" {
			t.Errorf("%s: got %d operations and %q, want 1 and %q", text, r.Operations, problems, want)
		}
	}
}

func TestFind(t *testing.T) {
	dir := t.TempDir()
	names := []string{"t.json", "t.1.json", "t.rank1.json", "t.rank12.3.json", "t.json.gz",
		"tt.json", "t.rankx.json", "t.x.json", "z.json.gz", "z.rank3.json.gz", "z.rank3.2.json.gz", ".hidden"}
	for _, path := range []string{"u", "v.gz", "w.12345"} {
		for _, n := range []string{path, timeline.PathOf(path, 1)} {
			stem, extension := outfile.Split(n)
			names = append(names, n, stem+".2"+extension) // as a segment is named
		}
	}
	for _, n := range names {
		put(t, dir, n, "")
	}
	if err := os.Mkdir(filepath.Join(dir, "t.rank7.json"), 0o700); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"t.json":          "t.1.json t.json t.rank1.json t.rank12.3.json",
		"t.rank12.3.json": "t.rank12.3.json",
		"t.rank1.json":    "t.rank1.json",
		"u":               "u u.2 u.2.rank1 u.rank1",
		"u.rank1":         "u.2.rank1 u.rank1",
		"v.gz":            "v.2.gz v.2.rank1.gz v.gz v.rank1.gz",
		"v.rank1.gz":      "v.2.rank1.gz v.rank1.gz",
		"w.12345":         "w.12345 w.2.12345 w.rank1.12345 w.rank1.2.12345",
		"w.rank1.12345":   "w.rank1.12345 w.rank1.2.12345",
		"z.json.gz":       "z.json.gz z.rank3.2.json.gz z.rank3.json.gz",
		"z.rank3.json.gz": "z.rank3.2.json.gz z.rank3.json.gz",
	} {
		got, err := find(filepath.Join(dir, path))
		for i := range got {
			got[i] = filepath.Base(got[i])
		}
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%s: got %q, %v, want %q", path, got, err, want)
		}
	}
	if got, err := find(dir); err != nil || len(got) != 23 {
		t.Errorf("got %q, %v, want all but what is hidden and the folder", got, err)
	}
}

// quick decodes events to the same as parse, and no text that parse does not decode.
func FuzzParse(f *testing.F) {
	for _, text := range []string{
		`{"name":"hvd_rank","ph":"M","pid":0,"args":{"rank":1,"size":2,"host":"h","epoch":1,"segment":1,"clock_domain":"a","monotonic_us":1.5}}`,
		`{"ph":"E","ts":1e3,"pid":1,"args":{"cached":true,"submitted":-1.5,"x":[{"y":"\u0000"}]}}`,
		`{"name":"NEGOTIATE_SEND","ph":"B","ts":900.25,"pid":1,"args":{"set":3,"op":1,"submitted":-0.001}},{}`,
		`{"ph":"E","ts":999999999999999.999,"pid":-1,"args":{"cached":false,"sent":0,"last":0,"late_us":200.001}}`,
		`{"name":"7","ph":"X","ts":00,"dur":0,"pid":1,"args":{"at":5}}`,
		`{"ph":"E","ts":1,"pid":1,"args":{"dtype":"float32","shape":"[2, 3]","bytes":24,"fused":2,"backend":"shm","algorithm":"ring","peer":4,"error":"e"}}`,
		`{"name":"WAIT","cat":"wait","ph":"X","ts":1,"dur":2,"pid":0,"tid":1,"args":{"tensor":"t"},"args":{"op":1}}`,
		`{"name":"hvd_step","ph":"i","s":"p","ts":-0,"pid":0,"args":{"step":18446744073709551615}}`,
		`{"name":"process_name","ph":"M","pid":0,"args":null}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, record []byte) {
		var e, fast event
		valid := parse(record, &e) == nil
		if valid && (max(e.Time, -e.Time) > maxMicros*nanosPerMicro || e.Args.Rare == nil) {
			t.Errorf("got %+v", e)
		}
		var q quick
		n := q.event(append(bytes.Clone(record), 0), &fast)
		if n == 0 {
			return
		}
		if err := parse(record[:n], &e); err != nil {
			t.Fatalf("%s is decoded by quick only: %v", record[:n], err)
		}
		// The numbers of package json are less exact for great times.
		for _, times := range [][2]*stamp{{&e.Time, &fast.Time}, {&e.Duration, &fast.Duration},
			{&e.Args.At, &fast.Args.At}, {&e.Args.Submitted, &fast.Args.Submitted},
			{&e.Args.Sent, &fast.Args.Sent}} {
			if a, b := *times[0], *times[1]; max(a, -a) > 1e15 && max(a-b, b-a) < 100 {
				*times[0] = b
			}
		}
		if !reflect.DeepEqual(e, fast) {
			t.Errorf("%s: got %+v, want %+v", record[:n], fast, e)
		}
	})
}

// The scanner returns the same records whether it reads the text at once or byte by byte. Neither the report
// nor the merge fails on any input that Open accepts, and the merged trace is always valid.
func FuzzFile(f *testing.F) {
	ours := newFile(rankID{rank: 1, size: 3, host: "h", domain: "a", epoch: 1, segment: 1, monotonic: 5})
	ours.clock(1, 2, 3)
	ours.op(testOp{number: 1, granted: 20, begun: 20, ended: 30,
		tensors: []testTensor{{name: "x", submitted: 10, arrivals: []int{5, 6, 0}},
			{name: "y", submitted: 11}},
		activities: []testActivity{{"MEMCPY_IN_FUSION_BUFFER", 3}}})
	f.Add([]byte(ours.end(50, 1)))
	f.Fuzz(func(t *testing.T, text []byte) {
		a, errA := records(bytes.NewReader(text))
		b, errB := records(iotest.OneByteReader(bytes.NewReader(text)))
		if fmt.Sprint(errA) != fmt.Sprint(errB) || fmt.Sprint(a) != fmt.Sprint(b) {
			t.Fatalf("got %q, %v at once and %q, %v byte by byte", a, errA, b, errB)
		}
		j, _, err := Open([]string{put(t, t.TempDir(), "t.json", string(text))})
		if err != nil {
			return
		}
		r, err := j.Report(Options{FusionThresholdBytes: 1, CacheCapacity: 1})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(r.WriteText(io.Discard), r.WriteJSON(io.Discard)); err != nil {
			t.Fatal(err)
		}
		checkTrace(t, merged(t, j))
	})
}
