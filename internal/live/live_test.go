package live_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/recorder"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/trace"
)

// job returns a job of ranks in which rank 2 has not called the allreduce of tensor w, for which the others
// have waited for 12 s. Rank 3 does not answer. The last warning about a stall of the tensor called stalled
// was ago.
func job(t *testing.T, stalled string, ago time.Duration) *live.Job {
	t.Helper()
	ranks := make(map[int]*live.Rank)
	for r := range 3 {
		about := recorder.About{Rank: r, Size: 4, Host: "h", PID: 100 + r, Epoch: 1, At: 20 * time.Second}
		if r != 2 {
			about.Pending = []trace.Record{{Kind: message.Allreduce, Name: "w", Submitted: 8 * time.Second}}
		}
		st := &trace.Stats{InFlight: len(about.Pending), Refused: 1, Failed: 1, Steps: 9,
			Phases:     [trace.NumPhases]time.Duration{10, 20, 30, 40},
			Moved:      []trace.Moved{{Bytes: 3}, {Bytes: 4}},
			Operations: []trace.Operations{{Tensors: 5}, {Tensors: 6}}}
		st.Operations[0].Durations.Add(time.Second)
		if r == 0 {
			st.Coordinator = &trace.Coordinator{Late: []trace.HeldUp{{Rank: 0}, {Rank: 1, Held: time.Second},
				{Rank: 2, Held: 4 * time.Second}, {Rank: 3}}}
		}
		k := live.NewRank(recorder.New(8).Dump(about), st)
		if r == 0 {
			k.Steps = []trace.Step{{Sequence: 8}}
			k.Stalls = []live.Stall{{Stall: recorder.Stall{Name: stalled}, Ago: ago}}
		}
		text, err := k.Encode()
		if err == nil {
			ranks[r], err = live.DecodeRank(text)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	hosts, known := []string{"h", "h", "h", "i"}, []string{"", "", "", "process 103 is stopped by a signal"}
	return live.OfRanks(live.About{What: live.Ranks, Size: 4}, time.Unix(100, 0), ranks, hosts, known)
}

func TestJobOfRanks(t *testing.T) {
	j := job(t, "w", time.Second)
	counters := live.Counters{Operations: 1, Tensors: 11, Bytes: 7, Failed: 2, Marked: 9, Pending: 1,
		Computing: 10, Waiting: 20, Queued: 30, Communicating: 40}
	want := live.Process{Name: "rank 1", Rank: 1, Host: "h", Answered: true, PID: 101, Epoch: 1,
		Up: 20 * time.Second, Counters: counters, Held: time.Second, HeldUp: 4 * time.Second}
	if got := j.Processes[1]; got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	want = live.Process{Name: "rank 3", Rank: 3, Host: "i", Known: "process 103 is stopped by a signal",
		HeldUp: 5 * time.Second}
	if got := j.Processes[3]; got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// A wait is a stall if the warning came while it lasted. An old warning about the same name is of another
// wait.
func TestProblems(t *testing.T) {
	for _, c := range []struct {
		name    string
		ago     time.Duration
		stalled bool
	}{{"w", time.Second, true}, {"w", 13 * time.Second, false}, {"x", time.Second, false}} {
		got := job(t, c.name, c.ago).Problems
		if len(got) != 2 || got[0].Stalled != c.stalled || !slices.Equal(got[0].Missing, []int{3, 2}) ||
			!strings.HasPrefix(got[0].Text, `Rank 2 has not called allreduce "w", for which ranks 0 and 1 have waited for 12.0 s`) {
			t.Errorf("with a warning about %s %v ago: got %+v", c.name, c.ago, got)
		}
		if want := "Rank 3 did not answer: process 103 is stopped by a signal."; got[1].Text != want {
			t.Errorf("got %q, want %q", got[1].Text, want)
		}
	}
}

// The rates are those of the time between two states. A process that did not answer, or was started again,
// has none.
func TestSince(t *testing.T) {
	before, now := job(t, "", 0), job(t, "", 0)
	for i := range 3 {
		p := &now.Processes[i]
		p.Up, p.Operations, p.Bytes = p.Up+2*time.Second, p.Operations+100, p.Bytes+1000
		p.Computing, p.Waiting = p.Computing+time.Second, p.Waiting+time.Second/2
		p.Queued, p.Communicating = p.Queued+time.Second/4, p.Communicating+time.Second/4
	}
	now.Processes[2].Held += time.Second
	now.Processes[1].HeldUp += time.Second
	now.Processes[1].PID++
	got := now.Since(before)
	first := live.Rates{Operations: 50, Bytes: 500, Computing: 0.5, Waiting: 0.25, Queued: 0.125,
		Communicating: 0.125}
	third := first
	third.Held = 0.5
	want := []live.Rates{first, {HeldUp: 0.5}, third, {}}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if suspects := now.Suspects(got, 2*time.Second); !slices.Equal(suspects, []int{2}) {
		t.Errorf("got the suspects %v, want 2", suspects)
	}
	now.Processes[0].Operations = before.Processes[0].Operations - 1
	if got := now.Since(before)[0]; got != (live.Rates{}) {
		t.Errorf("with fewer operations than before: got %+v", got)
	}
	if got := now.Since(nil); len(got) != 4 || got[0] != (live.Rates{}) {
		t.Errorf("without an earlier state: got %+v", got)
	}
}

func TestJobOfNodes(t *testing.T) {
	nodes := map[int]*trace.Node{
		0: {Name: "scheduler", Role: "scheduler", Up: time.Minute,
			Peers: []trace.Peer{{Name: "worker 1", HeldUp: 9 * time.Second}, {Name: "server 0", HeldUp: time.Second}},
			Waits: []trace.NodeWait{{What: "barrier of group 4", Time: 3 * time.Second,
				Waiting: []string{"worker 0"}, Missing: []string{"worker 1"}}, {What: "barrier of group 7",
				Time: time.Hour, Waiting: []string{"server 0"}, Missing: []string{"worker 0", "worker 1"}}}},
		2: {Name: "worker 0", Role: "worker", Up: time.Minute,
			Peers: []trace.Peer{{Name: "server 0", Waiting: 2, SentBytes: 5, ReceivedBytes: 6, Resent: 1}}},
		3: {Name: "worker 1", Role: "worker", Up: time.Minute},
	}
	j := live.OfNodes(live.About{What: live.Nodes, Size: 4}, time.Unix(100, 0), nodes,
		[]string{"scheduler", "server 0", "worker 0", "worker 1"}, []string{"a", "b", "c", "d"},
		[]string{"", "process 7 has just ended"})
	want := live.Process{Name: "worker 0", Rank: 2, Host: "c", Answered: true, Up: time.Minute,
		Counters: live.Counters{Bytes: 11, Failed: 1, Pending: 2}, HeldUp: 10 * time.Second}
	if got := j.Processes[2]; got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	// The scheduler measures how long a node has held up the others, even if the node does not answer.
	want = live.Process{Name: "server 0", Rank: 1, Host: "b", Known: "process 7 has just ended",
		Held: time.Second, HeldUp: 9 * time.Second}
	if got := j.Processes[1]; got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	problems := []live.Problem{
		{Text: "The server 0 did not answer: process 7 has just ended.", Missing: []int{1}},
		{Text: "Barrier of group 4: worker 0 has waited 3s for worker 1.", Missing: []int{3}}}
	if !reflect.DeepEqual(j.Problems, problems) {
		t.Errorf("got %+v, want %+v", j.Problems, problems)
	}
}

// The state of a rank has only pending operations that may be a problem, and the oldest one. Their number is
// limited by the number of ranks.
func TestLimit(t *testing.T) {
	all := []trace.Record{{Submitted: time.Second}, {Submitted: 3 * time.Second},
		{Submitted: 5 * time.Second}}
	for at, want := range map[time.Duration]int{time.Second: 1, 2 * time.Second: 1, 4 * time.Second: 2,
		5500 * time.Millisecond: 2, 6 * time.Second: 3} {
		about := recorder.About{Pending: all, At: at}
		if live.Limit(&about); about.MaxPending != want {
			t.Errorf("at %v: got %d, want %d", at, about.MaxPending, want)
		}
	}
	for size, want := range map[int]int{0: 1024, 1: 1024, 64: 1024, 256: 256, 4096: 64} {
		about := recorder.About{Pending: make([]trace.Record, 2000), At: time.Hour, Size: size}
		if live.Limit(&about); about.MaxPending != want {
			t.Errorf("%d ranks: got %d, want %d", size, about.MaxPending, want)
		}
	}
}

// Rank 1 has called w later than rank 0, less than a second ago, or has ended it since rank 0 was asked. Rank
// 2 has not called it, and is the only one that is missing. A wait for rank 1 is a problem if the coordinator
// has warned about it, or if rank 1 has called as many operations as its state can have.
func TestLaterRankIsNotMissing(t *testing.T) {
	record := func(name string, submitted time.Duration) trace.Record {
		return trace.Record{Kind: message.Allreduce, Name: name, Submitted: submitted}
	}
	pending := [][]trace.Record{{record("w", 18*time.Second)}, {record("u", 19200*time.Millisecond),
		record("v", 19300*time.Millisecond), record("w", 19500*time.Millisecond)}, {}}
	ended := record("w", 18100*time.Millisecond)
	ended.Number, ended.Ended = 1, 19*time.Second
	var many []trace.Record
	for i := range 65 {
		many = append(many, record(fmt.Sprint("u", i), time.Duration(i)))
	}
	for _, c := range []struct {
		of      int            // the number of ranks that have a snapshot
		ended   []trace.Record // at rank 1
		pending []trace.Record // at rank 1
		stalls  []live.Stall
		missing string
	}{
		{3, nil, pending[1], nil, "[[2]]"},
		{3, []trace.Record{ended}, pending[1][:2], nil, "[]"},
		{2, nil, pending[1], nil, "[]"},
		{2, nil, pending[1], []live.Stall{{Stall: recorder.Stall{Name: "w"}}}, "[[]]"},
		{2, nil, many, nil, "[[0] []]"},
	} {
		ranks := make(map[int]*live.Rank)
		for r := range c.of {
			of := recorder.New(8)
			about := recorder.About{Rank: r, Size: 1024, At: 20 * time.Second, Pending: pending[r]}
			if r == 1 {
				of.Record(&trace.Operation{Records: c.ended})
				about.Pending = c.pending
			}
			live.Limit(&about)
			ranks[r] = live.NewRank(of.Dump(about), &trace.Stats{})
		}
		ranks[0].Stalls = c.stalls
		j := live.OfRanks(live.About{What: live.Ranks, Size: c.of}, time.Unix(100, 0), ranks, nil, nil)
		var missing [][]int
		for _, p := range j.Problems {
			missing = append(missing, p.Missing)
			if len(p.Missing) == 0 && (!strings.Contains(p.Text, "rank 1 may not have called it") ||
				p.Stalled != (c.stalls != nil)) {
				t.Errorf("got %+v", p)
			}
		}
		if fmt.Sprint(missing) != c.missing {
			t.Errorf("got %+v, want the missing ranks %s", j.Problems, c.missing)
		}
	}
}

func operation(name string) *trace.Operation {
	return &trace.Operation{Records: []trace.Record{{Name: name, Submitted: 1, Ended: 2}},
		Activities: []trace.Activity{{Name: "a", Begun: 1, End: 2}}, Arrivals: []time.Duration{1, 2}}
}

// A recorder returns each entry once, and keeps what has room. A later one has greater numbers.
func TestRecorder(t *testing.T) {
	r := live.NewRecorder()
	r.Record(operation("x"))
	r.Step(5, 7)
	all := r.Since(0)
	if len(all.Entries) != 2 || all.Entries[0].Operation.Records[0].Name != "x" ||
		!slices.Equal(all.Entries[0].Arrivals, []time.Duration{1, 2}) ||
		*all.Entries[1].Step != (live.Mark{At: 5, Number: 7}) {
		t.Errorf("got %+v", all)
	}
	if none := r.Since(all.Next()); len(none.Entries) != 0 || none.First != all.Next() {
		t.Errorf("got %+v, want no entry", none)
	}
	o := operation("y")
	o.Records[0].Partial = true
	r.Record(o)
	if next := r.Since(all.Next()); len(next.Entries) != 1 || next.First != all.Next() ||
		len(next.Entries[0].Arrivals) != 0 {
		t.Errorf("got %+v, want one entry, without arrivals, because some are missing", next)
	}
	r = live.NewRecorder()
	o = operation("x")
	o.Records, o.Arrivals = append(o.Records, o.Records[0]), []time.Duration{1, 5, 3, 4}
	r.Record(o)
	if got := r.Since(0).Entries[0]; !slices.Equal(got.Arrivals, []time.Duration{3, 5}) ||
		len(got.Operation.Arrivals) != 0 {
		t.Errorf("got %+v, want one arrival of each member, 3 and 5", got)
	}
	r = live.NewRecorder()
	r.Record(operation("x"))
	all = r.Since(0)
	long := operation(strings.Repeat("z", 1<<18))
	for range 6 {
		r.Record(long)
	}
	if few := r.Since(all.First); len(few.Entries) != 3 || few.First != all.First+4 {
		t.Errorf("got %d entries from number %d on, want the last 3, from %d on", len(few.Entries), few.First,
			all.First+4)
	}
	if later := live.NewRecorder().Since(r.Since(0).Next()); later.First <= r.Since(0).Next() {
		t.Errorf("a later recorder begins with number %d, the earlier one has %d", later.First, r.Since(0).Next())
	}
}

// allFields returns records of rank 3 in which each field has a value of its own, except those that are not
// sent.
func allFields() *live.Records {
	n := uint64(0)
	var set func(v reflect.Value)
	set = func(v reflect.Value) {
		n += 0x9e3779b97f4a7c15 // so that successive numbers differ in all bits
		switch v.Kind() {
		case reflect.Struct:
			if v.Type() == reflect.TypeFor[time.Time]() {
				v.Set(reflect.ValueOf(time.UnixMicro(int64(n) >> 4)))
				return
			}
			for i := range v.NumField() {
				set(v.Field(i))
			}
		case reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), 3, 3))
			for i := range v.Len() {
				set(v.Index(i))
			}
		case reflect.String:
			v.SetString(fmt.Sprint("text ", n))
		case reflect.Bool:
			v.SetBool(n>>63 == 0)
		case reflect.Uint8:
			v.SetUint(1 + n%2) // a kind or a backend that there is
		case reflect.Uint32:
			v.SetUint(n >> 32)
		case reflect.Uint64:
			v.SetUint(n)
		case reflect.Int32:
			v.SetInt(int64(int32(n)))
		default:
			v.SetInt(int64(n))
		}
	}
	r := new(live.Records)
	for _, v := range []any{&r.Host, &r.Size, &r.Epoch, &r.Clock, &r.Offsets, &r.Sets, &r.First} {
		set(reflect.ValueOf(v).Elem())
	}
	r.Rank = 3
	for range 2 {
		e := live.Entry{Operation: new(trace.Operation)}
		set(reflect.ValueOf(&e.Arrivals).Elem())
		set(reflect.ValueOf(e.Operation).Elem())
		e.Operation.Arrivals = nil
		for i := range e.Operation.Records {
			e.Operation.Records[i].Partial = false
		}
		step, span := live.Entry{Step: new(live.Mark)}, live.Entry{Span: new(trace.Span)}
		set(reflect.ValueOf(step.Step).Elem())
		set(reflect.ValueOf(span.Span).Elem())
		r.Entries = append(r.Entries, e, step, span)
	}
	return r
}

// Records are the same after they were encoded and decoded. An error says what is wrong with an encoding, and
// memory is only taken for what it has.
func TestRecordsEncoding(t *testing.T) {
	want := allFields()
	answers := map[int][]byte{3: want.Encode(), 0: new(live.Records).Encode()}
	got, err := live.DecodeRecords(live.EncodeAnswers(answers))
	if err != nil || len(got) != 2 || !reflect.DeepEqual(got[3], want) {
		t.Errorf("got %+v, %v, want %+v", got[3], err, want)
	}
	if again := allFields(); !reflect.DeepEqual(want, again) {
		t.Errorf("the encoder has made %+v of %+v", want, again)
	}
	if got, err := live.DecodeRecords(live.EncodeAnswers(nil)); err != nil || len(got) != 0 {
		t.Errorf("got %v, %v, want none", got, err)
	}
	for i := range reflect.TypeFor[trace.Record]().NumField() {
		same := want.Entries[0].Operation.Records[0]
		other := same
		reflect.ValueOf(&other).Elem().Field(i).SetZero() // the records before and after have the same name
		r := &live.Records{Clock: want.Clock, Entries: []live.Entry{
			{Operation: &trace.Operation{Records: []trace.Record{same, other, same, same}}}}}
		got, err := live.DecodeRecords(live.EncodeAnswers(map[int][]byte{0: r.Encode()}))
		if err != nil || !reflect.DeepEqual(got[0], r) {
			t.Errorf("field %d: got %+v, %v, want %+v", i, got[0], err, r)
		}
	}
	whole := live.EncodeAnswers(map[int][]byte{3: answers[3]})
	for n := 1; n < len(whole); n++ {
		if got, err := live.DecodeRecords(whole[:n]); err == nil {
			t.Fatalf("got %+v of %d of %d bytes", got, n, len(whole))
		}
	}
	empty := answers[0]
	front := empty[:len(empty)-1] // without the number of entries
	wrong := &live.Records{Entries: []live.Entry{{Operation: &trace.Operation{
		Records: []trace.Record{{Kind: 99}}}}}}
	for want, text := range map[string][]byte{
		"got version 3 of the encoding, want 2":    append([]byte{6}, empty[1:]...),
		"got 1 bytes after the last element":       slices.Concat(empty, []byte{0}),
		"got an operation without tensors":         slices.Concat(front, []byte{2, 0, 0, 0}),
		"got an entry of kind 3":                   slices.Concat(front, []byte{2, 6, 0, 0}),
		"got string 2 after 1 others":              slices.Concat(front, []byte{2, 2, 0, 4, 0, 0}),
		"got an operation of Kind(99)":             wrong.Encode(),
		"got 1099511627776 elements in 0 bytes":    binary.AppendVarint(slices.Clone(front), 1<<40),
		"got 2 elements in 7 bytes, want 4 bytes ": slices.Concat(front, []byte{2, 0, 4}, make([]byte, 7)),
	} {
		got, err := live.DecodeRecords(live.EncodeAnswers(map[int][]byte{0: text, 3: answers[3]}))
		if err == nil || !strings.Contains(err.Error(), "rank 0: "+want) || len(got) != 1 || got[3] == nil {
			t.Errorf("got %+v, %v, want the operations of rank 3 and the error %q", got, err, want)
		}
	}
	if got, err := live.DecodeRank([]byte(`{"snapshot":{}}`)); err == nil ||
		!strings.Contains(err.Error(), "use one version of gohvd") {
		t.Errorf("got %+v, %v, want an error about the version, because earlier states were only JSON", got, err)
	}
	other := live.EncodeAnswers(map[int][]byte{1: empty})
	if got, err := live.DecodeRecords(other); err == nil {
		t.Errorf("got %+v, want an error, because the answer of rank 1 says that it is of rank 0", got)
	}
	if got, err := live.DecodeRecords(slices.Repeat(whole, 2)); err == nil {
		t.Errorf("got %+v, want an error, because rank 3 is there twice", got)
	}
}

// ofRecords returns Records with an operation of the given records.
func ofRecords(all ...trace.Record) *live.Records {
	return &live.Records{Entries: []live.Entry{{Operation: &trace.Operation{Records: all}}}}
}

// The lengths of lists are compared with the size of their smallest elements.
func TestLeastSizes(t *testing.T) {
	for what, c := range map[string]struct {
		after int // the number of bytes after the list
		of    func(n int) *live.Records
	}{
		"offsets": {2, func(n int) *live.Records { return &live.Records{Offsets: make([]trace.Offset, n)} }},
		"sets":    {1, func(n int) *live.Records { return &live.Records{Sets: make([]live.Set, n)} }},
		"entries": {0, func(n int) *live.Records {
			return &live.Records{Entries: slices.Repeat([]live.Entry{{Step: new(live.Mark)}}, n)}
		}},
		"records": {2, func(n int) *live.Records { return ofRecords(make([]trace.Record, n)...) }},
		"activities": {1, func(n int) *live.Records {
			r := ofRecords(trace.Record{})
			r.Entries[0].Operation.Activities = make([]trace.Activity, n)
			return r
		}},
	} {
		text := c.of(100).Encode()
		want := fmt.Sprintf("want %d bytes for each", len(text)-len(c.of(99).Encode()))
		decode := func(text []byte) error {
			_, err := live.DecodeRecords(live.EncodeAnswers(map[int][]byte{0: text}))
			return err
		}
		if err := decode(text); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if err := decode(text[:len(text)-c.after-1]); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got the error %v, want %q", what, err, want)
		}
	}
}

// The encoding has the shape and type of a tensor once, also if its first record adds a string after the
// name.
func TestTensorIsEncodedOnce(t *testing.T) {
	x := trace.Record{Name: "x", Error: "e", Shape: slices.Repeat(tensor.Shape{1 << 50, 0}, 50)}
	for others := range 9 { // the list of the strings grows at some of these numbers
		var all []trace.Record
		for i := range others {
			all = append(all, trace.Record{Name: fmt.Sprint(i)})
		}
		r := ofRecords(append(all, x, x)...)
		if once := len(ofRecords(append(all, x)...).Encode()); len(r.Encode()) > once+100 {
			t.Errorf("after %d others: got %d bytes for two records, %d for one", others, len(r.Encode()), once)
		}
	}
}

// FuzzDecode checks that what can be decoded is the same after it was encoded and decoded again.
func FuzzDecode(f *testing.F) {
	k := &live.Rank{Snapshot: &analysis.Snapshot{Host: "h", Operations: operation("x").Records},
		HeldUp: []trace.HeldUp{{Rank: 1, Held: 2}},
		Stalls: []live.Stall{{Stall: recorder.Stall{Name: "x"}, Ago: 3}}}
	j := &live.Job{About: live.About{Command: []string{"a"}}, Processes: []live.Process{{Name: "rank 0"}},
		Problems: []live.Problem{{Text: "x", Missing: []int{1}}}, End: &live.End{Status: 1}}
	f.Add(live.EncodeAnswers(map[int][]byte{0: new(live.Records).Encode(), 3: allFields().Encode()}))
	state, err := k.Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(state)
	for _, v := range []any{j, &j.About} {
		text, err := json.Marshal(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if k, err := live.DecodeRank(text); err == nil {
			state, err := k.Encode()
			if err != nil {
				t.Skip(err) // for example a time with a year that JSON cannot have
			}
			again, err := live.DecodeRank(state)
			if err != nil {
				t.Fatal(err)
			}
			if text, err := again.Encode(); !bytes.Equal(text, state) {
				t.Errorf("got %q, %v, want %q", text, err, state)
			}
		}
		if j, err := live.DecodeJob(text); err == nil {
			stable(t, j, live.DecodeJob)
		}
		if all, err := live.DecodeRecords(text); err == nil {
			answers := make(map[int][]byte)
			for rank, r := range all {
				answers[rank] = r.Encode()
			}
			again, err := live.DecodeRecords(live.EncodeAnswers(answers))
			if err != nil || !reflect.DeepEqual(again, all) {
				t.Errorf("got %+v, %v, want %+v", again, err, all)
			}
		}
		if a, err := live.DecodeAbout(text); err == nil {
			stable(t, a, live.DecodeAbout)
		}
	})
}

func stable[T any](t *testing.T, v *T, decode func([]byte) (*T, error)) {
	first, err := json.Marshal(v)
	if err != nil {
		t.Skip(err) // for example a time with a year that JSON cannot have
	}
	again, err := decode(first)
	if err != nil {
		t.Fatalf("%s: %v", first, err)
	}
	second, err := json.Marshal(again)
	if err != nil || !bytes.Equal(first, second) {
		t.Errorf("got %s, %v, want %s", second, err, first)
	}
}

// BenchmarkRecords measures for each tensor the processor time that it takes a rank to record and to encode
// it, that it takes to decode it, and the size of the encoding. The operations are those of 12 steps over 161
// tensors on 4 ranks, in operations of 40 tensors.
func BenchmarkRecords(b *testing.B) {
	const steps, tensors, perOperation, ranks = 12, 161, 40, 4
	var all []*trace.Operation
	at, granted := time.Second, time.Duration(0)
	for range steps {
		for i := range tensors {
			if i%perOperation == 0 {
				granted = at + 4e6
				all = append(all, &trace.Operation{Activities: []trace.Activity{
					{Name: "MEMCPY_IN_FUSION_BUFFER", Begun: granted + 1e6, End: granted + 2e6},
					{Name: "SHM_ALLREDUCE", Begun: granted + 2e6, End: granted + 4e6},
					{Name: "MEMCPY_OUT_FUSION_BUFFER", Begun: granted + 4e6, End: granted + 5e6}}})
			}
			o := all[len(all)-1]
			o.Records = append(o.Records, trace.Record{Number: uint64(len(all)),
				Kind: message.Allreduce, Backend: message.SHM,
				DType: tensor.Float32, Cached: true, Name: fmt.Sprintf("layer%d.%d.conv.weight", i/10, i%10),
				Shape: tensor.Shape{512, 512, 3, 3}, Bytes: 4 * 512 * 512 * 9, Submitted: at, Sent: at + 3e6,
				Granted: granted, Begun: granted + 1e6, Ended: granted + 5e6})
			for range ranks {
				o.Arrivals = append(o.Arrivals, at+3e6)
			}
			at += 1e5 // for the next tensor
		}
	}
	used := func() time.Duration {
		var t unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t); err != nil {
			b.Fatal(err)
		}
		return time.Duration(t.Nano())
	}
	var atRank, atHvdrun time.Duration
	size, n := 0, 0
	for b.Loop() {
		r := live.NewRecorder()
		begun := used()
		for _, o := range all {
			r.Record(o)
		}
		text := r.Since(0).Encode()
		encoded := used()
		if _, err := live.DecodeRecords(live.EncodeAnswers(map[int][]byte{0: text})); err != nil {
			b.Fatal(err)
		}
		atRank, atHvdrun = atRank+encoded-begun, atHvdrun+used()-encoded
		size, n = size+len(text), n+steps*tensors
	}
	b.ReportMetric(float64(atRank.Nanoseconds())/float64(n), "ns-at-rank/tensor")
	b.ReportMetric(float64(atHvdrun.Nanoseconds())/float64(n), "ns-at-hvdrun/tensor")
	b.ReportMetric(float64(size)/float64(n), "B/tensor")
	b.ReportMetric(0, "ns/op")
}
