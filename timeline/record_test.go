package timeline

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/timeline/timelinetest"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "child" {
		child(os.Args[2], os.Args[3:])
		return
	}
	goleak.VerifyTestMain(m)
}

// quick has short times, so that many batches are written during a test.
var quick = knobs{tensors: 1 << 10, interval: time.Millisecond, retry: 5 * time.Millisecond,
	timeout: 20 * time.Second}

func testConfig(path string) Config {
	return Config{Path: path, Rank: 0, Size: 4, Host: "h", Epoch: 7, Clock: trace.Clock{Domain: "boot/1",
		Monotonic: 5*time.Second + 1}}
}

// noError ends the test if a call has failed.
func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func mustStart(t testing.TB, cfg Config, k knobs) *Timeline {
	t.Helper()
	tl, err := start(cfg, k)
	noError(t, err)
	t.Cleanup(func() { _ = tl.Close() })
	return tl
}

func mustClose(t testing.TB, tl *Timeline) {
	t.Helper()
	noError(t, tl.Close())
}

func mustRead(t testing.TB, path string) *timelinetest.Summary {
	t.Helper()
	b, err := os.ReadFile(path)
	noError(t, err)
	s, err := timelinetest.Read(bytes.NewReader(b))
	if err != nil {
		t.Fatalf("%s: %v\n%q", path, err, b[:min(len(b), 500)])
	}
	return s
}

// operationsIn returns the number of operations in a file. It returns -1 if the file cannot be read, for
// example because a write is in progress.
func operationsIn(path string) int {
	s, err := readFile(path)
	if err != nil {
		return -1
	}
	return len(s.Operations)
}

// folder returns the names of the files in dir.
func folder(t testing.TB, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	noError(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func simple(number uint64, names ...string) *trace.Operation {
	at := time.Duration(number) * time.Millisecond
	op := &trace.Operation{
		Activities: []trace.Activity{
			{Name: "MEMCPY_IN_FUSION_BUFFER", Begun: at + 310*time.Microsecond,
				End: at + 350*time.Microsecond},
			{Name: "SHM_ALLREDUCE", Begun: at + 350*time.Microsecond, End: at + 800*time.Microsecond},
			{Name: "MEMCPY_OUT_FUSION_BUFFER", Begun: at + 800*time.Microsecond,
				End: at + 890*time.Microsecond},
		},
	}
	for _, n := range names {
		op.Records = append(op.Records, trace.Record{
			Number: number, Kind: message.Allreduce, Backend: message.SHM, Algorithm: message.Ring,
			Name: n, DType: tensor.Float32, Shape: tensor.Shape{2, 3}, Bytes: 24, Cached: true,
			Submitted: at, Sent: at + 10*time.Microsecond, Granted: at + 200*time.Microsecond,
			Begun: at + 300*time.Microsecond, Ended: at + 900*time.Microsecond,
		})
	}
	return op
}

// Spans of threads that ran at the same time are in different lanes, and a span inside of another one of the
// same thread is in the lane of that one. Each segment has the names of its lanes, and all spans.
func TestLanes(t *testing.T) {
	dir := t.TempDir()
	cfg := testConfig(filepath.Join(dir, "t.json"))
	cfg.MaxBytes = 8 * 4000
	tl := mustStart(t, cfg, quick)
	const rounds = 20
	for i := range time.Duration(rounds) {
		for _, s := range [][2]time.Duration{{10, 20}, {15, 25}, {30, 40}, {5, 45}, {50, 51}, {50, 51},
			{49, 60}} {
			tl.Span(trace.Span{Name: "x", Begun: (100*i + s[0]) * time.Microsecond,
				End: (100*i + s[1]) * time.Microsecond})
		}
	}
	mustClose(t, tl)
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) < 3 {
		t.Fatalf("got the files %v, %v, want several segments", files, err)
	}
	spans := 0
	for _, file := range files {
		s := mustRead(t, file)
		for _, span := range s.Spans {
			spans++
			if in := math.Mod(span.Begin, 100); span.Lane > 2 || (in == 15) != (span.Lane == 2) {
				t.Errorf("got %+v, want lane 2 only for the span that overlaps another one", span)
			}
		}
	}
	if spans != 7*rounds {
		t.Errorf("got %d spans, want %d", spans, 7*rounds)
	}
}

// Three operations and a message are recorded, and the file has exactly the expected text. The text must not
// change by accident, because Horovod's tools and our own parse it.
func TestText(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.json")
	cfg := testConfig(path)
	cfg.MarkCycles = true
	cfg.Clock.Start = time.UnixMicro(1_700_000_000_123_456)
	cfg.About = About{Version: "0.7.0", Command: []string{"python", "train \"x\".py"},
		Settings: map[string]string{"HVD_B": "2", "HVD_A": "1"},
		Sets:     map[topo.ProcessSetID][]topo.Rank{3: {0, 2}, 1: {1}}}
	tl := mustStart(t, cfg, quick)
	tl.Cycle(50 * time.Microsecond)
	tl.Step(60*time.Microsecond, 17)
	tl.Span(trace.Span{Kind: trace.Wait, Name: "g", Begun: 70 * time.Microsecond,
		End: 90*time.Microsecond + 1})
	tl.Span(trace.Span{Kind: trace.Range, Name: `say "x"`, Begun: 65 * time.Microsecond,
		End: 95 * time.Microsecond})
	op := simple(1, "g", "h")
	op.Records[0].Set, op.Records[1].Set = 3, 3
	op.Arrivals = []time.Duration{1010 * time.Microsecond, 0, 900 * time.Microsecond,
		1100*time.Microsecond + 1, 0, 0, 0, 0}
	op.Records[1].Refused, op.Records[1].Error = true, `rank 1 sent "x"`
	op.Records[1].Shape = nil
	tl.Record(op)
	tl.Record(&trace.Operation{Records: []trace.Record{{Number: 2, Kind: message.Barrier, Name: "b",
		Submitted: 2 * time.Millisecond, Granted: 3 * time.Millisecond, Begun: 3 * time.Millisecond,
		Ended: 3 * time.Millisecond}}})
	tl.Set(4, []topo.Rank{1, 2})
	tl.Pending(7*time.Millisecond, []trace.Record{{Kind: message.Allreduce, Name: "p", Submitted: 6000},
		{Kind: message.Allgather, Set: 4, Number: 9, Name: "q", Submitted: 6000, Granted: 7000, Begun: 8000}})
	tl.Record(&trace.Operation{
		Activities: []trace.Activity{{Name: "TCP_RECV", Begun: 5 * time.Millisecond, End: 6 * time.Millisecond}},
		Records: []trace.Record{{Number: 2, Peer: 2, Kind: message.Recv, Backend: message.TCP,
			Name: "rank 2 to rank 0, tag 7", DType: tensor.Float32, Shape: tensor.Shape{6}, Bytes: 24,
			Submitted: 4 * time.Millisecond, Granted: 5 * time.Millisecond, Begun: 5 * time.Millisecond,
			Ended: 6 * time.Millisecond}}})
	noError(t, tl.Write())
	got, err := os.ReadFile(path)
	noError(t, err)
	want := `[
{"name":"process_name","ph":"M","pid":0,"args":{"start_time_since_epoch_in_micros":1700000000123456}},
{"name":"process_sort_index","ph":"M","pid":0,"args":{"sort_index":0}},
{"name":"hvd_rank","ph":"M","pid":0,"args":{"rank":0,"size":4,"file":"t.json","host":"h","epoch":7,"segment":1,"clock_domain":"boot/1","monotonic_us":5000000.001,"dropped":0,"version":1}},
{"name":"hvd_job","ph":"M","pid":0,"args":{"gohvd":"0.7.0","command":["python","train \"x\".py"],"settings":{"HVD_A":"1","HVD_B":"2"}}},
{"name":"hvd_set","ph":"M","pid":0,"args":{"set":1,"ranks":[1]}},
{"name":"hvd_set","ph":"M","pid":0,"args":{"set":3,"ranks":[0,2]}},
{"name":"hvd_clock","ph":"i","s":"p","ts":0,"pid":0,"args":{"offset_us":0,"error_us":0,"job":"75b3c9f4de582633"}},
{"name":"CYCLE_START","ph":"i","s":"g","ts":50,"pid":0},
{"name":"hvd_step","ph":"i","s":"p","ts":60,"pid":0,"args":{"step":17}},
{"name":"thread_name","ph":"M","pid":0,"tid":1,"args":{"name":"program"}},
{"name":"WAIT","cat":"wait","ph":"X","ts":70,"dur":20.001,"pid":0,"tid":1,"args":{"tensor":"g"}},
{"name":"say \"x\"","cat":"range","ph":"X","ts":65,"dur":30,"pid":0,"tid":1},
{"name":"process_name","ph":"M","pid":1,"args":{"name":"g [set 3]"}},
{"name":"process_sort_index","ph":"M","pid":1,"args":{"sort_index":1}},
{"name":"NEGOTIATE_ALLREDUCE","ph":"B","ts":900,"pid":1,"args":{"set":3,"op":1,"submitted":1000}},
{"name":"2","ph":"X","ts":900,"dur":0,"pid":1},
{"name":"0","ph":"X","ts":1010,"dur":0,"pid":1},
{"name":"3","ph":"X","ts":1100.001,"dur":0,"pid":1},
{"ph":"E","ts":1200,"pid":1,"args":{"cached":true,"sent":1010,"last":3,"late_us":200.001}},
{"name":"ALLREDUCE","ph":"B","ts":1200,"pid":1},
{"name":"QUEUE","ph":"B","ts":1200,"pid":1},
{"ph":"E","ts":1300,"pid":1},
{"name":"MEMCPY_IN_FUSION_BUFFER","ph":"B","ts":1310,"pid":1},
{"ph":"E","ts":1350,"pid":1},
{"name":"SHM_ALLREDUCE","ph":"B","ts":1350,"pid":1},
{"ph":"E","ts":1800,"pid":1},
{"name":"MEMCPY_OUT_FUSION_BUFFER","ph":"B","ts":1800,"pid":1},
{"ph":"E","ts":1890,"pid":1},
{"ph":"E","ts":1900,"pid":1,"args":{"dtype":"float32","shape":"[2, 3]","bytes":24,"fused":2,"backend":"shm","algorithm":"ring"}},
{"name":"process_name","ph":"M","pid":2,"args":{"name":"h [set 3]"}},
{"name":"process_sort_index","ph":"M","pid":2,"args":{"sort_index":2}},
{"name":"NEGOTIATE_ALLREDUCE","ph":"B","ts":1000,"pid":2,"args":{"set":3,"op":1}},
{"ph":"E","ts":1200,"pid":2,"args":{"cached":true,"sent":1010}},
{"name":"ERROR","ph":"B","ts":1200,"pid":2},
{"name":"QUEUE","ph":"B","ts":1200,"pid":2},
{"ph":"E","ts":1300,"pid":2},
{"name":"MEMCPY_IN_FUSION_BUFFER","ph":"B","ts":1310,"pid":2},
{"ph":"E","ts":1350,"pid":2},
{"name":"SHM_ALLREDUCE","ph":"B","ts":1350,"pid":2},
{"ph":"E","ts":1800,"pid":2},
{"name":"MEMCPY_OUT_FUSION_BUFFER","ph":"B","ts":1800,"pid":2},
{"ph":"E","ts":1890,"pid":2},
{"ph":"E","ts":1900,"pid":2,"args":{"dtype":"float32","shape":"[]","bytes":24,"fused":2,"backend":"shm","algorithm":"ring","error":"rank 1 sent \"x\""}},
{"name":"process_name","ph":"M","pid":3,"args":{"name":"b"}},
{"name":"process_sort_index","ph":"M","pid":3,"args":{"sort_index":3}},
{"name":"NEGOTIATE_BARRIER","ph":"B","ts":2000,"pid":3,"args":{"set":0,"op":2}},
{"ph":"E","ts":3000,"pid":3,"args":{"cached":false}},
{"name":"BARRIER","ph":"B","ts":3000,"pid":3},
{"name":"QUEUE","ph":"B","ts":3000,"pid":3},
{"ph":"E","ts":3000,"pid":3},
{"ph":"E","ts":3000,"pid":3,"args":{"bytes":0,"fused":1,"backend":"none","algorithm":"none"}},
{"name":"hvd_set","ph":"M","pid":0,"args":{"set":4,"ranks":[1,2]}},
{"name":"hvd_pending","ph":"i","s":"p","ts":7000,"pid":0,"args":{"tensor":"p","kind":"ALLREDUCE","set":0,"submitted":6}},
{"name":"hvd_pending","ph":"i","s":"p","ts":7000,"pid":0,"args":{"tensor":"q","kind":"ALLGATHER","set":4,"submitted":6,"op":9,"granted":7,"begun":8}},
{"name":"process_name","ph":"M","pid":4,"args":{"name":"rank 2 to rank 0, tag 7"}},
{"name":"process_sort_index","ph":"M","pid":4,"args":{"sort_index":4}},
{"name":"NEGOTIATE_RECV","ph":"B","ts":4000,"pid":4,"args":{"set":0,"op":2}},
{"ph":"E","ts":5000,"pid":4,"args":{"cached":false}},
{"name":"RECV","ph":"B","ts":5000,"pid":4},
{"name":"QUEUE","ph":"B","ts":5000,"pid":4},
{"ph":"E","ts":5000,"pid":4},
{"name":"TCP_RECV","ph":"B","ts":5000,"pid":4},
{"ph":"E","ts":6000,"pid":4},
{"ph":"E","ts":6000,"pid":4,"args":{"dtype":"float32","shape":"[6]","bytes":24,"fused":1,"backend":"tcp","algorithm":"none","peer":2}}
]
`
	if string(got) != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	mustRead(t, path)
	mustClose(t, tl)
	// By the timeline's clock the last operation ended long ago. So hvd_end must have the time of Close,
	// which is later.
	s := mustRead(t, path)
	if !s.Ended || s.Dropped != 0 || len(s.Operations) != 4 {
		t.Errorf("got %+v, want an end", s)
	}
	b, _ := os.ReadFile(path)
	if i := bytes.Index(b, []byte(`"hvd_end"`)); i < 0 || bytes.Contains(b[i:], []byte(`"ts":3000,`)) {
		t.Errorf("hvd_end is not at the time of the end: %s", b[max(i, 0):])
	}
}

// wantOperation returns the Operation that Read of timelinetest must return for record i of op.
func wantOperation(op *trace.Operation, i int, track string) timelinetest.Operation {
	n := &op.Records[i]
	us := func(d time.Duration) float64 { return float64(d) / 1000 }
	_, kind := nameOf(n.Kind)
	w := timelinetest.Operation{
		Track: track, Set: uint32(n.Set), Number: n.Number, Kind: kind, Negotiated: kind,
		Submitted: us(n.Submitted), Granted: us(n.Granted), Begun: us(n.Begun), Ended: us(n.Ended),
		Cached: n.Cached, Arrivals: map[int]float64{}, Backend: n.Backend.String(),
		Algorithm: n.Algorithm.String(),
		Bytes:     n.Bytes,
	}
	for i := range op.Records {
		w.Fused += int(max(op.Records[i].Parts, 1))
	}
	if n.Sent-n.Submitted >= time.Microsecond {
		w.Sent = us(n.Sent)
	}
	w.Begin = w.Submitted
	var first, last time.Duration
	for i, a := range op.ArrivalsOf(i) {
		if a == 0 {
			continue
		}
		w.Arrivals[i] = us(a)
		w.Begin = min(w.Begin, us(a))
		if first == 0 || a < first {
			first = a
		}
		if a > last {
			last = a
		}
	}
	if last > 0 {
		w.Late = us(last - first)
	}
	for _, a := range op.Activities {
		w.Activities = append(w.Activities, a.Name)
	}
	if n.DType.Valid() {
		w.DType, w.Shape = n.DType.String(), strings.ReplaceAll(n.Shape.String(), " ", ", ")
	}
	switch w.Fail = n.Error; {
	case n.Refused:
		w.Kind = "ERROR"
	case n.Error == "" && n.Kind == message.Error:
		w.Fail = "ranks submitted different requests"
	}
	return w
}

// random generates random operations. Their times only increase, so that the timeline does not have to move
// any of them.
type random struct {
	*rand.Rand
	now    time.Duration
	number uint64
}

func (r *random) operation() *trace.Operation {
	step := func() time.Duration {
		r.now += time.Duration(1 + r.IntN(3_000_000))
		return r.now
	}
	r.number++
	op, arrived := new(trace.Operation), r.IntN(2) == 0
	whole := trace.Record{
		Number: r.number, Set: topo.ProcessSetID(r.IntN(3)),
		Kind:    message.Kind(1 + r.IntN(int(message.Error))),
		Backend: message.Backend(r.IntN(3)), Algorithm: message.Algorithm(r.IntN(4)),
	}
	if r.IntN(10) == 0 {
		whole.Error = "peer lost"
	}
	for i := range 1 + r.IntN(5) {
		n := whole
		n.Name, n.Bytes = fmt.Sprintf("t%d/%d\"\\\n\xff", i, r.IntN(20)), r.Int64N(1<<40)
		n.Cached, n.DType = r.IntN(2) == 0, tensor.DType(r.IntN(len(tensor.DTypes())+1))
		for range r.IntN(4) {
			n.Shape = append(n.Shape, r.Int64N(1000))
		}
		arrivals := []time.Duration{step(), step(), 0, step()}
		r.Shuffle(len(arrivals), func(i, j int) { arrivals[i], arrivals[j] = arrivals[j], arrivals[i] })
		n.Submitted = arrivals[r.IntN(4)]
		if n.Submitted == 0 {
			n.Submitted = step()
		}
		if arrived {
			op.Arrivals = append(op.Arrivals, arrivals...)
		}
		n.Sent = step()
		if r.IntN(3) == 0 {
			// Sent is written only if it is at least 1 µs after Submitted, so the test uses values around
			// this limit.
			n.Sent = n.Submitted + time.Duration(r.IntN(3)*500)
		}
		if r.IntN(4) == 0 {
			n.Parts = 1 + r.Int32N(5)
		}
		if r.IntN(10) == 0 {
			n.Refused, n.Error = true, "refused\t<&>\u2028"
		}
		op.Records = append(op.Records, n)
	}
	granted, begun := step(), step()
	for range r.IntN(4) {
		op.Activities = append(op.Activities, trace.Activity{Name: "A\"" + fmt.Sprint(r.IntN(3)),
			Begun: step(), End: step()})
	}
	ended := step()
	for i := range op.Records {
		n := &op.Records[i]
		n.Granted, n.Begun, n.Ended = granted, begun, ended
	}
	return op
}

// Random operations are recorded. The file contains exactly these operations, in each file format, with and
// without segments.
func TestRandomOperations(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	for _, name := range []string{"t.json", "t.json.gz", "t"} {
		for _, c := range []struct {
			name string
			cfg  func(*Config)
		}{
			{"whole", func(*Config) {}},
			{"segments", func(c *Config) { c.MaxBytes = 1 << 20 }},
			{"small segments", func(c *Config) { c.MaxBytes = 8 * 24 << 10 }},
		} {
			t.Run(name+"/"+c.name, func(t *testing.T) {
				dir := t.TempDir()
				cfg := testConfig(filepath.Join(dir, name))
				c.cfg(&cfg)
				tl := mustStart(t, cfg, quick)
				r := &random{Rand: rand.New(rand.NewPCG(seed, 1)), now: 1}
				var want []timelinetest.Operation
				for i := range 200 {
					op := r.operation()
					tl.Record(op)
					for j := range op.Records {
						track := op.Records[j].Name
						track = strings.ToValidUTF8(track, "\ufffd")
						if set := op.Records[j].Set; set != 0 {
							track += fmt.Sprintf(" [set %d]", set)
						}
						want = append(want, wantOperation(op, j, track))
					}
					if i%20 == 0 {
						noError(t, tl.Write())
					}
				}
				mustClose(t, tl)
				if tl.Dropped() != 0 {
					t.Errorf("%d operations were dropped", tl.Dropped())
				}
				names, err := segments(cfg.Path)
				noError(t, err)
				var files []*timelinetest.Summary
				for _, name := range append(names, cfg.Path) {
					files = append(files, mustRead(t, name))
				}
				slices.SortFunc(files, func(a, b *timelinetest.Summary) int { return a.Segment - b.Segment })
				var got []timelinetest.Operation
				for i, s := range files {
					if first := files[0].Segment; s.Segment != first+i || s.Epoch != 7 || s.Size != 4 {
						t.Errorf("got segment %d of %d ranks in epoch %d, want segment %d", s.Segment, s.Size,
							s.Epoch, first+i)
					}
					if s.Ended != (i == len(names)) {
						t.Errorf("segment %d: ended %v", s.Segment, s.Ended)
					}
					got = append(got, s.Operations...)
				}
				if (c.name == "small segments" || c.name == "segments" && !strings.HasSuffix(name, ".gz")) &&
					len(names) < 2 {
					t.Errorf("got segments %v, want several", names)
				}
				if c.name != "small segments" && len(got) != len(want) {
					t.Errorf("got %d operations, want %d", len(got), len(want))
				}
				want = want[len(want)-len(got):]
				for i := range got {
					if w := want[i]; len(w.Arrivals) > 0 {
						// If several requests arrived last at the same time, the file may name any of them as
						// the last. Read has checked that it names one of them.
						got[i].Last = w.Last
					}
					if got[i].Late-want[i].Late < 0.001 && want[i].Late-got[i].Late < 0.001 {
						got[i].Late = want[i].Late
					}
					if !reflect.DeepEqual(got[i], want[i]) {
						t.Fatalf("operation %d: got\n%+v, want\n%+v", i, got[i], want[i])
					}
				}
				if left := folder(t, dir); len(left) != len(names)+1 {
					t.Errorf("got files %v, want %d segments and nothing else", left, len(names)+1)
				}
			})
		}
	}
}

// TestClamping writes operations whose times are missing or are before the last time on their track. Their
// bars must be moved so that the times on a track never decrease, and their arguments must hold the exact
// times.
func TestClamping(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.json")
	cfg := testConfig(path)
	cfg.MarkCycles = true
	tl := mustStart(t, cfg, quick)
	first, second := simple(5, "g"), simple(3, "g")
	second.Records[0].Begun, second.Activities[1].End = 0, 0
	second.Arrivals = []time.Duration{time.Millisecond, time.Second}
	tl.Record(first)
	tl.Record(second)
	tl.Cycle(9 * time.Millisecond)
	tl.Cycle(8 * time.Millisecond)
	absent := simple(6, "g", "mine")
	absent.Records[0].Absent, absent.Records[1].Absent, absent.Records[0].Submitted = true, true, 0
	tl.Record(absent)
	absent = simple(7, "other")
	absent.Records[0].Absent, absent.Records[0].Submitted = true, 0
	tl.Record(absent)
	unknown := simple(8, "u")
	unknown.Records[0].Submitted, unknown.Arrivals = 0, []time.Duration{8*time.Millisecond + 1000}
	tl.Record(unknown)
	tl.Record(&trace.Operation{Records: []trace.Record{{Number: 9, Kind: message.Error, Name: "e",
		Submitted: time.Second, Granted: time.Second, Begun: time.Second, Ended: time.Second}}})
	partial := simple(10, "u")
	partial.Arrivals = []time.Duration{0, 10 * time.Millisecond, 11 * time.Millisecond}
	partial.Records[0].Partial = true
	tl.Record(partial)
	mustClose(t, tl)
	s := mustRead(t, path)
	if len(s.Operations) != 6 || s.Cycles != 2 || !slices.Equal(s.Names, []string{"g", "mine", "u", "e"}) {
		t.Fatalf("got %+v, want 6 operations of g, g, mine, u, e and u", s)
	}
	o := s.Operations[1]
	if o.Submitted != 3000 || o.Begin != 5900 || o.Late != 999_000 || o.Arrivals[0] != 1000 ||
		o.Arrivals[1] != 1_000_000 || o.Last != 1 {
		t.Errorf("got %+v, want the recorded times beside the clamped ones", o)
	}
	if o := s.Operations[2]; o.Track != "mine" || o.Fused != 2 {
		t.Errorf("got %+v, want what the absent rank had submitted, of 2 tensors", o)
	}
	if o := s.Operations[5]; len(o.Arrivals) != 2 || o.Last != -1 {
		t.Errorf("got %+v, want no rank called the last", o)
	}
	if o := s.Operations[3]; o.Begin != 8001 {
		t.Errorf("got %+v, want the bar to begin with the first arrival", o)
	}
	if o := s.Operations[4]; o.Kind != "ERROR" || o.Negotiated != "ERROR" || o.Fail != "ranks submitted different requests" {
		t.Errorf("got %+v, want an error without a text", o)
	}
}

func TestMarks(t *testing.T) {
	for _, rank := range []int{0, 2} {
		path := filepath.Join(t.TempDir(), "t.json")
		cfg := testConfig(path)
		cfg.Rank = rank
		cfg.MaxBytes = 8 * 4096
		tl := mustStart(t, cfg, quick)
		tl.Cycle(time.Millisecond)
		tl.Tuned(time.Millisecond, &message.Tuning{FusionThresholdBytes: 1 << 20, SegmentBytes: 64,
			CycleTime: 2500 * time.Microsecond, CacheOff: true, OneLevelAllgather: true,
			Allreduce: message.Ring})
		job := cfg.Clock.Job()
		tl.Offset(trace.Offset{At: 2 * time.Millisecond, Offset: -1500, Error: 250, Job: job})
		for i := range 10 {
			tl.Record(simple(uint64(i+3), "g"))
			noError(t, tl.Write())
		}
		mustClose(t, tl)
		clock := timelinetest.Clock{At: 2000, Offset: -1.5, Error: 0.25}
		for i, name := range []string{beside(path, "1"), path} {
			s := mustRead(t, name)
			want := []timelinetest.Clock{clock}
			if i == 0 && rank == 0 {
				want = []timelinetest.Clock{{}, clock}
			}
			changed := []timelinetest.Tuning{{At: 1000, FusionBytes: 1 << 20, CycleMicros: 2500,
				SegmentBytes: 64, Allreduce: 1, Algorithm: "ring"}}
			if i == 0 && !slices.Equal(s.Tunings, changed) {
				t.Errorf("%s: got changes of settings %+v, want %+v", name, s.Tunings, changed)
			}
			if s.Cycles != 0 || !slices.Equal(s.Clocks, want) || s.Rank != rank || s.Job != job {
				t.Errorf("%s: got %+v, want no cycles, the clock %v and job %s", name, s, want, job)
			}
		}
	}
}

func TestPathOf(t *testing.T) {
	for _, c := range []struct {
		path string
		rank int
		want string
	}{
		{"t.json", 0, "t.json"}, {"t.json", 3, "t.rank3.json"}, {"t.json.gz", 3, "t.rank3.json.gz"},
		{"t", 3, "t.rank3"},
		{"t.gz", 1, "t.rank1.gz"}, {"a.b/t", 12, "a.b/t.rank12"}, {"/x/.hidden", 1, "/x/.hidden.rank1"},
		{"a.b.c", 1, "a.b.rank1.c"},
		{"/dev/stdout", 3, "/dev/stdout"}, {"/dev/shm/t.json", 3, "/dev/shm/t.rank3.json"},
		{"/proc/self/fd/1", 1, "/proc/self/fd/1"},
	} {
		if got := PathOf(c.path, c.rank); got != c.want {
			t.Errorf("PathOf(%q, %d) = %q, want %q", c.path, c.rank, got, c.want)
		}
	}
}

// appendString writes random names. encoding/json decodes each to the same name, except that bytes that are
// not UTF-8 become U+FFFD.
func FuzzString(f *testing.F) {
	for _, s := range []string{"", "grad/1", "\"\\\b\f\n\r\t\x00\x1f\x7f", "\xff\xc3(",
		"é\u2028\u2029\ufffd<&>", "😀\xf0\x9f"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := appendString(nil, s)
		var back string
		if err := json.Unmarshal(got, &back); err != nil || back != strings.ToValidUTF8(s, "\ufffd") &&
			back != string([]rune(s)) {
			t.Errorf("%q: got %s, which is %q, %v", s, got, back, err)
		}
	})
}

func TestMicros(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0", 1: "0.001", 10: "0.01", 100: "0.1", 999: "0.999", 1000: "1", -1: "-0.001", -1500: "-1.5",
		1<<63 - 1: "9223372036854775.807",
		-1 << 63:  "-9223372036854775.808",
	} {
		if got := string(appendMicros(nil, d)); got != want {
			t.Errorf("%d ns: got %s, want %s", d, got, want)
		}
	}
}

// An operation is in the file at most 50 ms after it was recorded, both after a long silence and right after
// a write. The test runs in a synctest bubble, in which writing takes no time.
func TestVisibleSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const visible = 50 * time.Millisecond
		path := filepath.Join(t.TempDir(), "t.json")
		tl := mustStart(t, testConfig(path), defaultKnobs)
		for number := range uint64(4) {
			if number%2 == 0 {
				time.Sleep(time.Hour)
			}
			name := fmt.Sprintf("gradient/%d", number)
			tl.Record(simple(number+1, name))
			time.Sleep(visible)
			synctest.Wait()
			if text, err := os.ReadFile(path); err != nil || !bytes.Contains(text, []byte(name)) {
				t.Errorf("operation %d is not in the file after %v (error %v)", number+1, visible, err)
			}
		}
		if err := tl.Close(); err != nil {
			t.Error(err)
		}
	})
}

// Record must not allocate memory, because the engine's lanes call it for every operation.
func TestRecordAllocatesNothing(t *testing.T) {
	k := quick
	k.interval = time.Hour
	k.tensors = 1 << 15
	tl := mustStart(t, testConfig(filepath.Join(t.TempDir(), "t.json")), k)
	op := simple(1, "a", "b", "c")
	op.Arrivals = []time.Duration{1, 2, 3, 4, 5, 6}
	if n := testing.AllocsPerRun(1000, func() { tl.Record(op) }); n != 0 {
		t.Errorf("Record allocates %v times", n)
	}
	if tl.Dropped() != 0 {
		t.Errorf("%d dropped", tl.Dropped())
	}
}

// resnet returns the operations of one training step of ResNet-50: 161 gradients in 4 operations.
func resnet() (ops []*trace.Operation) {
	for i := range 4 {
		op := simple(uint64(i+1), make([]string, 41-i/3*2)...)
		for j := range op.Records {
			op.Records[j].Name = fmt.Sprintf("DistributedOptimizer.gradient.layer%d.%d.conv1.weight", i, j)
		}
		ops = append(ops, op)
	}
	return ops
}

func BenchmarkRecord(b *testing.B) {
	tl := mustStart(b, testConfig("/dev/null"), defaultKnobs)
	ops := resnet()
	tensors := 0
	for _, op := range ops {
		tensors += len(op.Records)
	}
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		if tl.filling.fill() > 0.9 {
			b.StopTimer()
			tl.mu.Lock()
			tl.filling.reset()
			tl.mu.Unlock()
			b.StartTimer()
		}
		for _, op := range ops {
			tl.Record(op)
		}
		n += tensors
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/tensor")
}

func BenchmarkFormat(b *testing.B) {
	ops := resnet()
	for _, path := range []string{"t.json", "t.json.gz"} {
		for _, arrivals := range []int{0, 4} {
			b.Run(fmt.Sprintf("%s/arrivals=%d", path, arrivals), func(b *testing.B) {
				b.ReportAllocs()
				all := newBatch(1 << 10)
				for _, op := range ops {
					op.Arrivals = nil
					for i := range op.Records {
						for j := range arrivals {
							op.Arrivals = append(op.Arrivals,
								op.Records[i].Submitted+time.Duration(7919*j%5000))
						}
					}
					if !all.operation(op) {
						b.Fatal("no room")
					}
				}
				cfg := testConfig(filepath.Join(b.TempDir(), path))
				w := newWriter(cfg, defaultKnobs, new(atomic.Uint64))
				if err := w.open(); err != nil {
					b.Fatal(err)
				}
				sink := w.sink
				w.sink = nowhere{}
				n, bytes := 0, 0
				for b.Loop() {
					if err := w.write(all.entries); err != nil {
						b.Fatal(err)
					}
					w.at = 0
					n += len(all.records)
				}
				bytes = int(w.body)
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/tensor")
				b.ReportMetric(float64(bytes)/float64(n), "B/tensor")
				if err := sink.close(); err != nil {
					b.Fatal(err)
				}
			})
		}
	}
}

// nowhere is a sink that discards all bytes.
type nowhere struct{}

func (nowhere) begin(int, []byte, int) error   { return nil }
func (nowhere) write(p, _ []byte) (int, error) { return len(p), nil }
func (nowhere) end([]byte) error               { return nil }
func (nowhere) close() error                   { return nil }

func TestLogsAreSeldom(t *testing.T) {
	log, entries := testnet.Logs()
	w := newWriter(Config{Log: log, Path: "t.json"}, quick, new(atomic.Uint64))
	for range 100 {
		w.report(errors.New("disk full"))
		w.dropped.Add(3)
	}
	w.report(nil)
	w.report(nil)
	if entries.Len() != 2 || !testnet.Logged(entries, "disk full", "t.json") ||
		!testnet.Logged(entries, "works again", "300") {
		t.Errorf("got %v, want a warning and that it is over", entries.All())
	}
	// The disk fails and recovers again and again, and one warning per minute is logged. Drops because of a
	// slow disk are also logged once per minute.
	for range 100 {
		w.report(errors.New("again"))
		w.report(nil)
		w.dropped.Add(1)
		w.report(nil)
	}
	if got := entries.TakeAll(); len(got) != 3 ||
		got[2].Message != "operations are dropped from the timeline: the disk is too slow for the rate of operations" {
		t.Errorf("got %v, want one line more", got)
	}
	w.warnedBroken = w.warnedBroken.Add(-warnEvery)
	w.report(errors.New("later"))
	w.report(nil)
	w.warnedSlow = w.warnedSlow.Add(-warnEvery)
	w.dropped.Add(1)
	w.report(nil)
	w.report(nil)
	if got := entries.TakeAll(); len(got) != 3 {
		t.Errorf("got %v, want each warning again after a minute", got)
	}
}
