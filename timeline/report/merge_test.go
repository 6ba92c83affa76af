package report

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/testnet"
)

// traceEvent is an event in the Chrome trace format.
type traceEvent struct {
	Name *string         `json:"name"`
	Ph   string          `json:"ph"`
	Ts   *float64        `json:"ts"`
	Dur  *float64        `json:"dur"`
	Pid  *int            `json:"pid"`
	Tid  *int            `json:"tid"`
	S    string          `json:"s"`
	Args json.RawMessage `json:"args"`
}

type lane struct{ pid, tid int }

// merged merges the timelines of j and returns the text of the merged trace.
func merged(t *testing.T, j *Job) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "out.json")
	if _, err := j.Merge(t.Context(), out); err != nil {
		t.Fatal(err)
	}
	text := testnet.ReadFile(t, out)
	return text
}

// checkTrace checks that a merged trace follows the rules of the format: the name of a thread precedes its
// events, every B event has an E event, and the times on a thread never decrease. It returns the events and
// the names of the threads.
func checkTrace(t *testing.T, text []byte) (threads map[lane][]traceEvent, named map[lane]string) {
	t.Helper()
	var all []traceEvent
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatalf("%v in %.300s", err, text)
	}
	threads, named = make(map[lane][]traceEvent), make(map[lane]string)
	depth, last := make(map[lane]int), make(map[lane]float64)
	for i, e := range all {
		if e.Pid == nil || e.Tid == nil {
			t.Fatalf("event %d: got %+v, want a process and a thread", i, e)
		}
		l := lane{*e.Pid, *e.Tid}
		if e.Ph == "M" {
			var name struct{ Name string }
			if json.Unmarshal(e.Args, &name) == nil && *e.Name == "thread_name" {
				named[l] = name.Name
			}
			continue
		}
		if e.Ts == nil || *e.Ts < 0 || *e.Ts < last[l] {
			t.Fatalf("event %d: got %+v after %g", i, e, last[l])
		}
		if _, known := named[l]; !known {
			t.Fatalf("event %d: thread %v has no name", i, l)
		}
		last[l] = *e.Ts
		switch e.Ph {
		case "B":
			depth[l]++
		case "E":
			if depth[l]--; depth[l] < 0 {
				t.Fatalf("event %d: E without B on %v", i, l)
			}
		case "X":
			if e.Dur == nil {
				t.Fatalf("event %d: X without dur", i)
			}
		case "i":
		default:
			t.Fatalf("event %d: got phase %q", i, e.Ph)
		}
		threads[l] = append(threads[l], e)
	}
	for l, d := range depth {
		if d != 0 {
			t.Fatalf("thread %v: %d events are open at the end", l, d)
		}
	}
	return threads, named
}

func TestMerge(t *testing.T) {
	s := straggler{
		late: 2, domains: []string{"a", "a", "b", "b"}, cached: true, arrivals: true,
		started: []int{0, -500, 3_000_000, 3_000_700}, monotonic: []int{1000, 500, 77, 777}, clockError: 150,
	}
	for _, name := range []string{"out.json", "out.json.gz"} {
		dir := t.TempDir()
		in := s.write(t, dir, ".json")
		j := openJob(t, in)
		out := filepath.Join(t.TempDir(), name)
		sum, err := j.Merge(t.Context(), out)
		if err != nil {
			t.Fatal(err)
		}
		text := testnet.ReadFile(t, out)
		if strings.HasSuffix(name, ".gz") {
			z, err := gzip.NewReader(bytes.NewReader(text))
			if err != nil {
				t.Fatal(err)
			}
			if text, err = io.ReadAll(z); err != nil {
				t.Fatal(err)
			}
		}
		threads, named := checkTrace(t, text)
		if sum.Ranks != 4 || sum.LeftOut != 0 || sum.Events != int64(bytes.Count(text, []byte("\n{"))) {
			t.Errorf("got %+v", sum)
		}
		tid := 0
		for l, n := range named {
			if l.pid == 2 && n == "loss" {
				tid = l.tid
			}
		}
		// On rank 0's clock, rank 2 submits its first loss at 5 s + 1 ms + 20 us + 5 ms. Rank 1 started 500
		// us before rank 0 and the trace begins at rank 1's start, so all times are 500 us later.
		if first := threads[lane{2, tid}][0]; *first.Name != "NEGOTIATE_ALLREDUCE" ||
			*first.Ts != 5_006_520 || !strings.Contains(string(first.Args), `"op":2`) {
			t.Errorf("got %+v (%s at %g), want NEGOTIATE_ALLREDUCE at 5006520", first, *first.Name, *first.Ts)
		}
		if !bytes.Contains(text, []byte(`"args":{"name":"rank 3 on host h-b"}`)) {
			t.Error("rank 3 has no name")
		}
		if _, err := j.Merge(t.Context(), in); err == nil ||
			!strings.Contains(err.Error(), "is one of the files to merge") {
			t.Errorf("got %v, want the input not written over", err)
		}
		if _, err := j.Merge(t.Context(), filepath.Join(dir, "none", "x.json")); err == nil {
			t.Error("merged to a folder that does not exist")
		}
		ended, end := context.WithCancel(t.Context())
		end()
		if _, err := j.Merge(ended, out+"2"); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want that of the context, which has ended", err)
		}
		left, err := filepath.Glob(filepath.Join(filepath.Dir(out), "[.]*"))
		all, err2 := filepath.Glob(out + "*")
		if errors.Join(err, err2) != nil || len(left) > 0 || len(all) != 1 {
			t.Errorf("got %q and %q left, %v, %v, want only %s", left, all, err, err2, out)
		}
		// Open must refuse a merged trace, because it is not the timeline of a rank.
		if _, _, err := Open([]string{out}); err == nil ||
			!strings.Contains(err.Error(), "merged trace") {
			t.Errorf("got %v, want the merged trace refused", err)
		}
	}
}

// Merge writes through a link and to a device, and refuses a FIFO. It replaces none of them.
func TestMergeReplacesOnlyFiles(t *testing.T) {
	dir := t.TempDir()
	f := newFile(rankID{size: 1, host: "h", domain: "a", epoch: 1})
	put(t, dir, "t.json", f.end(900, 0))
	j := openJob(t, dir)
	out := t.TempDir()
	file, link, fifo, device := filepath.Join(out, "file"), filepath.Join(out, "link"), filepath.Join(out, "fifo"),
		filepath.Join(out, "device")
	for _, err := range []error{os.WriteFile(file, nil, 0o600), os.Symlink("file", link),
		unix.Mkfifo(fifo, 0o600), os.Symlink(os.DevNull, device)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]struct {
		mode fs.FileMode
		says string
	}{link: {fs.ModeSymlink, ""}, device: {fs.ModeSymlink, ""}, fifo: {fs.ModeNamedPipe, "want a regular file|no such device"}} {
		_, err := j.Merge(t.Context(), path)
		if (err == nil) != (want.says == "") || err != nil &&
			!regexp.MustCompile(want.says).MatchString(err.Error()) {
			t.Errorf("%s: got %v, want %q", filepath.Base(path), err, want.says)
		}
		if info, err := os.Lstat(path); err != nil || info.Mode().Type() != want.mode {
			t.Errorf("%s: got %v, %v, want it as it was", filepath.Base(path), info, err)
		}
	}
	text := testnet.ReadFile(t, file)
	checkTrace(t, text)
	if info, err := os.Stat(os.DevNull); err != nil || info.Mode().IsRegular() {
		t.Errorf("got %v, %v", info, err)
	}
}

// Merge converts all times to rank 0's clock and adds the same constant to each. It converts the times in
// args in the same way as ts, and changes no other number.
func TestMergeMovesAllTimes(t *testing.T) {
	dir := t.TempDir()
	f := newFile(rankID{rank: 0, size: 2, domain: "a", epoch: 1})
	f.op(testOp{number: 1, granted: 700, begun: 700, ended: 800,
		tensors: []testTensor{{name: "x", submitted: 300}}})
	put(t, dir, "t.json", f.end(900, 0))
	f = newFile(rankID{rank: 1, size: 2, domain: "b", epoch: 1, monotonic: 40})
	f.clock(100, -1000, 10)
	f.event(`{"name":"process_name","ph":"M","pid":1,"args":{"name":"x"}}`)
	f.event(`{"name":"NEGOTIATE_ALLREDUCE","ph":"B","ts":1200.5,"pid":1,"args":{"set":0,"op":1,"submitted": 1100.25 , "other":{"at":7},"text":"\"sent\":5"}}`)
	f.event(`{"name":"0","ph":"X","ts":1300,"dur":0,"pid":1,"args":{"at":200}}`)
	f.event(`{"ph":"E","ts":1700,"pid":1,"args":{"cached":true,"sent":1e3,"last":0,"late_us":55}}`)
	f.event(`{"name":"ALLREDUCE","ph":"B","ts":1700,"pid":1,"args":{"text":"yes","at":1701}}`)
	f.event(`{"ph":"E","ts":1800,"pid":1,"args":{}}`)
	f.end(1900, 0)
	// In the second segment, ts 0 is 60 us later than in the first segment.
	put(t, dir, "t.rank1.1.json", f.b.String()+"\n]\n")
	f = newFile(rankID{rank: 1, size: 2, domain: "b", epoch: 1, segment: 2, monotonic: 100})
	f.event(`{"name":"process_name","ph":"M","pid":1,"args":{"name":"x"}}`)
	f.event(`{"name":"NEGOTIATE_ALLREDUCE","ph":"B","ts":1940,"pid":1,"args":{"set":0,"op":2,"submitted":1930}}`)
	put(t, dir, "t.rank1.json", f.end(2000, 0))
	j := openJob(t, dir)
	threads, _ := checkTrace(t, merged(t, j))
	// All times increase by two amounts: 1000 us because rank 0's clock is 1000 us behind rank 1's, and 1000
	// us because rank 1 started 1000 us before rank 0.
	for i, want := range []struct {
		ts   float64
		args string
	}{
		{1200.5, `{"op":1,"other":{"at":7},"set":0,"submitted":1100.25,"text":"\"sent\":5"}`},
		{1300, `{"at":200}`},
		{1700, `{"cached":true,"last":0,"late_us":55,"sent":1000}`},
		{1700, `{"at":1701,"text":"yes"}`},
		{1800, `{}`},
		{2000, `{"op":2,"set":0,"submitted":1990}`},
	} {
		if got := threads[lane{1, 1}][i]; *got.Ts != want.ts || string(got.Args) != want.args {
			t.Errorf("event %d: got %s at %g, want %s at %g", i, got.Args, *got.Ts, want.args, want.ts)
		}
	}
	if got := threads[lane{0, 1}][0]; *got.Ts != 1300 {
		t.Errorf("rank 0's first is at %g, want 1300", *got.Ts)
	}
}

// A rank has times before rank 0's start, and Merge adds a constant to all times. It closes events that have
// no end event, and leaves out end events that have no begin event.
func TestMergeRepairs(t *testing.T) {
	dir := t.TempDir()
	f := newFile(rankID{rank: 0, size: 2, host: "h", domain: "a", epoch: 1, monotonic: 1000})
	f.event(`{"name":"CYCLE_START","ph":"i","s":"g","ts":50,"pid":0}`)
	f.event(`{"name":"process_name","ph":"M","pid":1,"args":{"name":"x"}}`)
	f.event(`{"ph":"E","ts":10,"pid":1}`)
	f.event(`{"name":"NEGOTIATE_ALLREDUCE","ph":"B","ts":20,"pid":1,"args":{"set":0,"op":1}}`)
	f.event(`{"name":"a","ph":"B","ts":5,"pid":1}`)
	put(t, dir, "t.json", f.b.String())
	f = newFile(rankID{rank: 1, size: 2, host: "h", domain: "a", epoch: 1, monotonic: 400})
	f.op(testOp{number: 1, granted: 700, begun: 700, ended: 800,
		tensors: []testTensor{{name: "x", submitted: 100}}})
	put(t, dir, "t.rank1.json", f.end(900, 0))
	j := openJob(t, dir)
	out := filepath.Join(t.TempDir(), "out.json")
	sum, err := j.Merge(t.Context(), out)
	if err != nil {
		t.Fatal(err)
	}
	text := testnet.ReadFile(t, out)
	threads, _ := checkTrace(t, text)
	x := threads[lane{0, 1}]
	if len(x) != 4 || *x[0].Ts != 620 || *x[3].Ts != 620 || sum.LeftOut != 1 ||
		*threads[lane{1, 1}][0].Ts != 100 || *threads[lane{0, 0}][0].Ts != 650 {
		t.Errorf("got %+v and %+v", x, sum)
	}
	if !bytes.Contains(text, []byte(`"shift_us":600`)) {
		t.Error("the trace does not say by how much times were moved")
	}
}
