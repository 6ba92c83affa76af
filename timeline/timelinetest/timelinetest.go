// Package timelinetest checks timelines against the rules of their format (docs/timeline.md).
package timelinetest

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Summary is the content of one timeline file, as read by Read.
type Summary struct {
	Rank, Size, Segment int
	Epoch               uint64
	// Job is the name of the job, as stated by the clock measurements.
	Job string
	// Operations has one entry for each bar of an operation on a tensor, in the order of the file.
	Operations []Operation
	Cycles     int
	// Steps has the numbers of the marked training steps, in the order of the file.
	Steps []uint64
	// Command and Settings are those of the job. Sets has the members of process sets, and Pending the names
	// of the operations that were pending.
	Command  []string
	Settings map[string]string
	Sets     map[uint32][]int
	Pending  []string
	// Spans has what the program did, in the order of the file.
	Spans   []Span
	Clocks  []Clock
	Tunings []Tuning
	// Names has the names of the tracks, in the order of their pids, which begin at 1.
	Names []string
	// Ended is set if the file has the event hvd_end, which Close writes. Then Dropped is the number of
	// operations that were dropped in total. Otherwise Dropped is the number of operations that were dropped
	// before the segment began.
	Ended   bool
	Dropped uint64
}

// Span is a time in which the program waited for the tensor with the name Name (Category is wait), or a range
// with this name (range).
type Span struct {
	Category, Name string
	Begin, End     float64 // in microseconds since the start of the timeline
	Lane           int
}

// Tuning is a change of settings.
type Tuning struct {
	At             float64
	FusionBytes    int64   `json:"fusion_threshold_bytes"`
	CycleMicros    float64 `json:"cycle_time_us"`
	SegmentBytes   int64   `json:"segment_bytes"`
	CacheIsEnabled int     `json:"cache_enabled"`
	Allreduce      int     `json:"hierarchical_allreduce"`
	Allgather      int     `json:"hierarchical_allgather"`
	Algorithm      string
}

// Operation is one operation on one tensor.
type Operation struct {
	Track      string
	Set        uint32
	Number     uint64
	Kind       string
	Negotiated string
	// These times are in microseconds since the start of the timeline. Submitted and Sent come from the
	// arguments of events, the other times from the bars.
	Begin, Submitted, Sent, Granted, Begun, Ended float64
	Cached                                        bool
	// Arrivals maps the position of a rank in its process set to the time at which its request arrived. Last
	// is the position of the rank whose request arrived last, and Late is the time from the first arrival to
	// the last. If a request is missing, Last is -1 and Late is 0.
	Arrivals map[int]float64
	Last     int
	Late     float64
	// Activities are the names of the activities after QUEUE.
	Activities                             []string
	DType, Shape, Backend, Algorithm, Fail string
	Bytes                                  int64
	Fused                                  int
	// Peer is the other rank of a message, or the other process of a push or pull.
	Peer int
}

// Clock is a measurement of this rank's clock against rank 0's. Times are in microseconds.
type Clock struct{ At, Offset, Error float64 }

// Check reads a segment, which may be compressed. If the segment violates rules of the format, Check returns
// an error for the first violation.
func Check(r io.Reader) error {
	_, err := Read(r)
	return err
}

// event is an event of the file. A field that not all events have is a pointer. A file with a field that
// event does not have is invalid.
type event struct {
	Name  *string          `json:"name"`
	Phase string           `json:"ph"`
	Pid   *int             `json:"pid"`
	TS    *json.RawMessage `json:"ts"`
	Dur   *json.RawMessage `json:"dur"`
	Scope *string          `json:"s"`
	Cat   *string          `json:"cat"`
	TID   *int             `json:"tid"`
	Args  json.RawMessage  `json:"args"`

	inner *inner // decodes Args
}

// bar is a begin event whose end event has not been read yet.
type bar struct {
	name string
	ts   float64
}

type track struct {
	name  string
	last  float64
	open  []bar
	ticks []string
	op    Operation
	// negotiated is set from the end of the negotiation to the end of the operation. The bar of the operation
	// must begin at the time at which the negotiation ended.
	negotiated bool
}

type checker struct {
	s      Summary
	line   int
	tracks map[int]*track
	// waiting is the pid of the track whose name has been read and whose first event must come next. It is -1
	// if there is no such track. sorted is set if the sort index of the track has been read too.
	waiting int
	sorted  bool
	lanes   int // the number of lanes that have a name
}

var (
	shape    = regexp.MustCompile(`^\[([0-9]+(, [0-9]+)*)?\]$`)
	position = regexp.MustCompile(`^(0|[1-9][0-9]*)$`)
	kinds    = []string{
		"ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER", "BARRIER", "JOIN",
		"ADD_PROCESS_SET", "REMOVE_PROCESS_SET", "REDUCE", "GATHER",
		"SCATTER", "SEND", "RECV", "PUSH", "PULL", "PUSHPULL", "ERROR",
	}
)

// Read checks a segment as Check does, and returns the content of the segment.
func Read(r io.Reader) (*Summary, error) {
	in := bufio.NewReader(r)
	if magic, err := in.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		z, err := gzip.NewReader(in)
		if err != nil {
			return nil, err
		}
		// Multistream(false) stops after one gzip member, because a file must have only one: some tools read
		// only the first.
		z.Multistream(false)
		text, err := io.ReadAll(z)
		if err != nil {
			return nil, fmt.Errorf("gzip: %w", err)
		}
		if _, err := in.ReadByte(); err != io.EOF {
			return nil, fmt.Errorf("gzip: more after the first member: %v", err)
		}
		in = bufio.NewReader(bytes.NewReader(text))
	}
	d := json.NewDecoder(in)
	d.DisallowUnknownFields()
	if t, err := d.Token(); err != nil || t != json.Delim('[') {
		return nil, fmt.Errorf("got %v, %w, want an array", t, err)
	}
	c := &checker{tracks: map[int]*track{0: {}}, waiting: -1}
	inner := newInner()
	for d.More() {
		c.line++
		e := event{inner: inner}
		if err := d.Decode(&e); err != nil {
			return nil, fmt.Errorf("event %d: %w", c.line, err)
		}
		if err := c.event(&e); err != nil {
			return nil, fmt.Errorf("event %d: %w", c.line, err)
		}
	}
	if _, err := d.Token(); err != nil {
		return nil, fmt.Errorf("after event %d: %w", c.line, err)
	}
	if t, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("after the array: got %v, %v, want the end of the file", t, err)
	}
	if c.line < 3 {
		return nil, fmt.Errorf("got %d events, want 3 of the header", c.line)
	}
	for _, pid := range slices.Sorted(maps.Keys(c.tracks)) {
		if t := c.tracks[pid]; len(t.open) > 0 || t.negotiated {
			return nil, fmt.Errorf("pid %d, %q: %v has no end, or no operation after it", pid, t.name, t.open)
		}
	}
	if c.waiting >= 0 {
		return nil, fmt.Errorf("pid %d has a name and no events", c.waiting)
	}
	return &c.s, nil
}

// args decodes the arguments of an event. An unknown argument is an error.
func args(e *event, to any) error {
	if e.Args == nil {
		return fmt.Errorf("%s has no args", e.Phase)
	}
	return e.inner.decode(e.Args, to)
}

// inner decodes the arguments of all events with one decoder. If each event had a new decoder, decoding would
// take as long as all other checks together.
type inner struct {
	text    bytes.Buffer
	decoder *json.Decoder
}

func newInner() *inner {
	n := &inner{}
	n.decoder = json.NewDecoder(&n.text)
	n.decoder.DisallowUnknownFields()
	return n
}

// decode decodes value, a complete JSON value, into the variable that to points to.
func (n *inner) decode(value []byte, to any) error {
	n.text.Write(value)
	return n.decoder.Decode(to)
}

// isMicros reports whether n is a number in the form in which the writer writes microseconds: it has no
// exponent and at most 3 decimals, of which the last is not 0.
func isMicros(n []byte) bool {
	whole, decimals, split := bytes.Cut(bytes.TrimPrefix(n, []byte("-")), []byte("."))
	digits := func(b []byte) bool {
		for _, c := range b {
			if c < '0' || c > '9' {
				return false
			}
		}
		return len(b) > 0
	}
	if split && (!digits(decimals) || len(decimals) > 3 || decimals[len(decimals)-1] == '0') {
		return false
	}
	return digits(whole) && (whole[0] != '0' || len(whole) == 1)
}

func micros(n *json.RawMessage, negative bool) (float64, error) {
	if n == nil {
		return 0, errors.New("got no microseconds")
	}
	if !isMicros(*n) {
		return 0, fmt.Errorf("got %s, want microseconds with at most 3 decimals", *n)
	}
	f, err := strconv.ParseFloat(string(*n), 64)
	if err == nil && f < 0 && !negative {
		err = fmt.Errorf("got %v, want a time since the start", n)
	}
	return f, err
}

func (c *checker) event(e *event) error {
	switch {
	case e.Pid == nil:
		return fmt.Errorf("%s has no pid", e.Phase)
	case c.s.Ended:
		return fmt.Errorf("%s after hvd_end", e.Phase)
	case (e.Phase == "E") != (e.Name == nil):
		return fmt.Errorf("%s: ends (phase E) must have no name, and other events must have one", e.Phase)
	case (e.Phase == "X") != (e.Dur != nil):
		return fmt.Errorf("%s: complete events (phase X) must have a duration, and other events must have none", e.Phase)
	case (e.Phase == "i") != (e.Scope != nil):
		return fmt.Errorf("%s: instants (phase i) must have a scope, and other events must have none", e.Phase)
	case e.Phase == "M" && e.TS != nil:
		return fmt.Errorf("metadata has a time")
	case c.line <= 3 && e.Phase != "M":
		return fmt.Errorf("%s in the header", e.Phase)
	case e.Phase == "M" && c.line <= 3:
		return c.header(e)
	case e.Phase == "M" && *e.Pid == 0 && e.TID == nil && *e.Name == "hvd_job":
		return c.job(e)
	case e.Phase == "M" && *e.Pid == 0 && e.TID == nil && *e.Name == "hvd_set":
		var a struct {
			Set   *uint32
			Ranks []int
		}
		if err := args(e, &a); err != nil || a.Set == nil || *a.Set == 0 || len(a.Ranks) == 0 {
			return fmt.Errorf("hvd_set %s: %w", e.Args, err)
		}
		if c.s.Sets == nil {
			c.s.Sets = make(map[uint32][]int)
		}
		c.s.Sets[*a.Set] = a.Ranks
		return nil
	case *e.Pid == 0 && e.TID != nil:
		return c.span(e)
	case e.TID != nil || e.Cat != nil:
		return fmt.Errorf("%s has a tid or a category", e.Phase)
	case e.Phase == "M":
		return c.name(e)
	}
	t := c.tracks[*e.Pid]
	if t == nil {
		return fmt.Errorf("%s of pid %d before its name", e.Phase, *e.Pid)
	}
	if c.waiting >= 0 && (*e.Pid != c.waiting || !c.sorted) {
		return fmt.Errorf("%s of pid %d, want the sort index and then the first event of pid %d, which was named last", e.Phase, *e.Pid,
			c.waiting)
	}
	c.waiting = -1
	ts, err := micros(e.TS, false)
	if err != nil {
		return err
	}
	if ts < t.last {
		return fmt.Errorf("pid %d, %q: %v after %v", *e.Pid, t.name, ts, t.last)
	}
	t.last = ts
	if (*e.Pid == 0) != (e.Phase == "i") {
		return fmt.Errorf("%s of pid %d: instants, and nothing else, are of pid 0", e.Phase, *e.Pid)
	}
	switch e.Phase {
	case "i":
		return c.instant(e, ts)
	case "B":
		return t.begin(e, ts)
	case "X":
		return t.tick(e, ts)
	case "E":
		ended, err := t.end(e, ts)
		if ended {
			c.s.Operations = append(c.s.Operations, t.op)
		}
		return err
	}
	return fmt.Errorf("phase %q", e.Phase)
}

// job checks the description of the job.
func (c *checker) job(e *event) error {
	var a struct {
		Gohvd    *string
		Command  []string
		Settings map[string]string
	}
	if err := args(e, &a); err != nil || c.line != 4 || a.Gohvd == nil || a.Command == nil ||
		a.Settings == nil {
		return fmt.Errorf("hvd_job in event %d: %s: %w", c.line, e.Args, err)
	}
	c.s.Command, c.s.Settings = a.Command, a.Settings
	return nil
}

func (c *checker) header(e *event) error {
	want := []string{"process_name", "process_sort_index", "hvd_rank"}[c.line-1]
	if *e.Name != want || *e.Pid != 0 {
		return fmt.Errorf("got %s of pid %d, want %s of pid 0", *e.Name, *e.Pid, want)
	}
	switch c.line {
	case 1:
		var a struct {
			Start *int64 `json:"start_time_since_epoch_in_micros"`
		}
		if err := args(e, &a); err != nil || a.Start == nil {
			return fmt.Errorf("process_name of pid 0: start %v, %w", a.Start, err)
		}
	case 2:
		return index(e, 0)
	case 3:
		var a struct {
			Rank, Size, Segment, Version *int
			Host, File                   *string // files of gohvd 0.7.0 have no File
			Epoch, Dropped               *uint64
			Domain                       *string          `json:"clock_domain"`
			Monotonic                    *json.RawMessage `json:"monotonic_us"`
		}
		if err := args(e, &a); err != nil {
			return fmt.Errorf("hvd_rank: %w", err)
		}
		if a.Rank == nil || a.Size == nil || a.Segment == nil || a.Version == nil || a.Host == nil ||
			a.Epoch == nil || a.Dropped == nil || a.Domain == nil {
			return fmt.Errorf("hvd_rank: %s lacks something", e.Args)
		}
		if _, err := micros(a.Monotonic, false); err != nil {
			return fmt.Errorf("hvd_rank: monotonic_us: %w", err)
		}
		if *a.Rank < 0 || *a.Rank >= *a.Size || *a.Segment < 1 || *a.Version != 1 {
			return fmt.Errorf("hvd_rank: %s", e.Args)
		}
		c.s.Rank, c.s.Size, c.s.Segment, c.s.Epoch, c.s.Dropped = *a.Rank, *a.Size, *a.Segment, *a.Epoch,
			*a.Dropped
	}
	return nil
}

// span checks the name of a lane of the program, or a span in it.
func (c *checker) span(e *event) error {
	var a struct{ Name, Tensor *string }
	if e.Cat != nil && *e.Cat == "range" && e.Args == nil {
		a.Tensor = e.Name
	} else if err := args(e, &a); err != nil {
		return err
	}
	if e.Phase == "M" {
		want := "program"
		if c.lanes++; c.lanes > 1 {
			want = fmt.Sprintf("program %d", c.lanes)
		}
		if *e.Name != "thread_name" || *e.TID != c.lanes || a.Name == nil || *a.Name != want || a.Tensor != nil {
			return fmt.Errorf("%s %s of lane %d, want the name of lane %d", *e.Name, e.Args, *e.TID, c.lanes)
		}
		return nil
	}
	if e.Phase != "X" || *e.TID < 1 || *e.TID > c.lanes || a.Name != nil || a.Tensor == nil || e.Cat == nil ||
		*e.Cat != "range" && (*e.Cat != "wait" || *e.Name != "WAIT") {
		return fmt.Errorf("%s %q %s of lane %d, want a span of one of %d lanes", e.Phase, *e.Name, e.Args,
			*e.TID, c.lanes)
	}
	begin, err := micros(e.TS, false)
	if err != nil {
		return err
	}
	dur, err := micros(e.Dur, false)
	if err != nil {
		return err
	}
	s := Span{*e.Cat, *a.Tensor, begin, begin + dur, *e.TID}
	for _, o := range c.s.Spans {
		if o.Lane == s.Lane && (o.Begin < s.Begin && s.Begin < o.End && o.End < s.End ||
			s.Begin < o.Begin && o.Begin < s.End && s.End < o.End) {
			return fmt.Errorf("the spans %v and %v of a lane overlap, but are not nested", o, s)
		}
	}
	c.s.Spans = append(c.s.Spans, s)
	return nil
}

func index(e *event, want int) error {
	var a struct {
		Index *int `json:"sort_index"`
	}
	if err := args(e, &a); err != nil || a.Index == nil || *a.Index != want {
		return fmt.Errorf("process_sort_index %s, %w, want %d", e.Args, err, want)
	}
	return nil
}

func (c *checker) name(e *event) error {
	if c.waiting >= 0 {
		if *e.Name != "process_sort_index" || *e.Pid != c.waiting || c.sorted {
			return fmt.Errorf("%s of pid %d after the name of pid %d", *e.Name, *e.Pid, c.waiting)
		}
		c.sorted = true
		return index(e, *e.Pid)
	}
	if *e.Name != "process_name" || *e.Pid != len(c.tracks) {
		return fmt.Errorf("%s of pid %d, want process_name of pid %d", *e.Name, *e.Pid, len(c.tracks))
	}
	var a struct{ Name *string }
	if err := args(e, &a); err != nil || a.Name == nil {
		return fmt.Errorf("process_name %s: %w", e.Args, err)
	}
	c.tracks[*e.Pid] = &track{name: *a.Name}
	c.s.Names = append(c.s.Names, *a.Name)
	c.waiting, c.sorted = *e.Pid, false
	return nil
}

func (c *checker) instant(e *event, ts float64) error {
	scope := "p"
	switch *e.Name {
	case "CYCLE_START":
		c.s.Cycles++
		scope = "g"
	case "hvd_tuning":
		v := Tuning{At: ts}
		if err := args(e, &v); err != nil {
			return err
		}
		c.s.Tunings = append(c.s.Tunings, v)
	case "hvd_clock":
		var a struct {
			Offset *json.RawMessage `json:"offset_us"`
			Error  *json.RawMessage `json:"error_us"`
			Job    *string
		}
		if err := args(e, &a); err != nil {
			return err
		}
		offset, err := micros(a.Offset, true)
		if err != nil {
			return err
		}
		bound, err := micros(a.Error, false)
		if err != nil {
			return err
		}
		c.s.Clocks = append(c.s.Clocks, Clock{ts, offset, bound})
		if a.Job == nil {
			break
		}
		if *a.Job == "" || c.s.Job != "" && *a.Job != c.s.Job {
			return fmt.Errorf("hvd_clock is of job %q, and before of %q", *a.Job, c.s.Job)
		}
		c.s.Job = *a.Job
	case "hvd_pending":
		var a struct {
			Tensor, Kind              *string
			Set                       *uint32
			Op                        uint64
			Submitted, Granted, Begun *json.RawMessage
		}
		if err := args(e, &a); err != nil || a.Tensor == nil || a.Kind == nil || a.Set == nil ||
			a.Submitted == nil {
			return fmt.Errorf("hvd_pending %s: %w", e.Args, err)
		}
		c.s.Pending = append(c.s.Pending, *a.Tensor)
	case "hvd_step":
		var a struct{ Step *uint64 }
		if err := args(e, &a); err != nil || a.Step == nil {
			return fmt.Errorf("hvd_step %s: %w", e.Args, err)
		}
		c.s.Steps = append(c.s.Steps, *a.Step)
	case "hvd_end":
		var a struct{ Dropped *uint64 }
		if err := args(e, &a); err != nil || a.Dropped == nil {
			return fmt.Errorf("hvd_end %s: %w", e.Args, err)
		}
		c.s.Ended, c.s.Dropped = true, *a.Dropped
	default:
		return fmt.Errorf("instant %q", *e.Name)
	}
	if *e.Scope != scope {
		return fmt.Errorf("%s has scope %q, want %q", *e.Name, *e.Scope, scope)
	}
	return nil
}

func (t *track) begin(e *event, ts float64) error {
	depth := len(t.open)
	switch {
	case depth == 0 && !t.negotiated:
		kind, ok := strings.CutPrefix(*e.Name, "NEGOTIATE_")
		if !ok || !slices.Contains(kinds, kind) {
			return fmt.Errorf("%q: bar %q, want a negotiation", t.name, *e.Name)
		}
		var a struct {
			Set       *uint32
			Op        *uint64
			Submitted *json.RawMessage
		}
		if err := args(e, &a); err != nil || a.Set == nil || a.Op == nil {
			return fmt.Errorf("%s %s: %w", *e.Name, e.Args, err)
		}
		t.op = Operation{Track: t.name, Set: *a.Set, Number: *a.Op, Negotiated: kind, Begin: ts,
			Submitted: ts, Arrivals: map[int]float64{}}
		if a.Submitted != nil {
			var err error
			if t.op.Submitted, err = micros(a.Submitted, false); err != nil {
				return err
			}
		}
		if *a.Set != 0 && !strings.HasSuffix(t.name, fmt.Sprintf(" [set %d]", *a.Set)) {
			return fmt.Errorf("%q has an operation of set %d", t.name, *a.Set)
		}
		t.ticks = nil
	case depth == 0:
		if *e.Name != t.op.Negotiated && *e.Name != "ERROR" || ts != t.op.Granted {
			return fmt.Errorf("%q: bar %s at %v after NEGOTIATE_%s that ended at %v", t.name, *e.Name, ts,
				t.op.Negotiated, t.op.Granted)
		}
		t.op.Kind = *e.Name
	case depth == 1 && t.negotiated:
		if (t.op.Begun < 0) != (*e.Name == "QUEUE") {
			return fmt.Errorf("%q: bar %q: QUEUE comes first, and once", t.name, *e.Name)
		}
		if *e.Name == "QUEUE" && ts != t.op.Granted {
			return fmt.Errorf("%q: QUEUE at %v, want it at %v", t.name, ts, t.op.Granted)
		}
		if *e.Name != "QUEUE" {
			t.op.Activities = append(t.op.Activities, *e.Name)
		}
	default:
		return fmt.Errorf("%q: bar %q inside %v", t.name, *e.Name, t.open)
	}
	if (depth > 0 || t.negotiated) && e.Args != nil {
		return fmt.Errorf("%q: bar %q has args", t.name, *e.Name)
	}
	t.open = append(t.open, bar{*e.Name, ts})
	return nil
}

func (t *track) tick(e *event, ts float64) error {
	if len(t.open) != 1 || t.negotiated {
		return fmt.Errorf("%q: tick %q outside of a negotiation", t.name, *e.Name)
	}
	if !position.MatchString(*e.Name) || slices.Contains(t.ticks, *e.Name) {
		return fmt.Errorf("%q: tick %q, want a position in the set, and each once", t.name, *e.Name)
	}
	if string(*e.Dur) != "0" {
		return fmt.Errorf("%q: tick %q of %s", t.name, *e.Name, *e.Dur)
	}
	t.ticks = append(t.ticks, *e.Name)
	at := ts
	if e.Args != nil {
		var a struct{ At *json.RawMessage }
		err := args(e, &a)
		if err == nil {
			at, err = micros(a.At, false)
		}
		if err != nil || at >= ts {
			return fmt.Errorf("%q: tick %q at %v says %s: %w", t.name, *e.Name, ts, e.Args, err)
		}
	}
	i, err := strconv.Atoi(*e.Name)
	t.op.Arrivals[i] = at
	return err
}

func (t *track) end(e *event, ts float64) (ended bool, err error) {
	depth := len(t.open)
	if depth == 0 {
		return false, fmt.Errorf("%q: an end without a beginning", t.name)
	}
	of := t.open[depth-1]
	t.open = t.open[:depth-1]
	switch {
	case depth == 2:
		if of.name == "QUEUE" && t.op.Begun < 0 {
			t.op.Begun = ts
		}
		if e.Args != nil {
			return false, fmt.Errorf("%q: the end of %s has args", t.name, of.name)
		}
		return false, nil
	case !t.negotiated:
		t.negotiated = true
		return false, t.grant(e, ts)
	}
	t.negotiated = false
	if t.op.Begun < 0 {
		return false, fmt.Errorf("%q: %s without QUEUE", t.name, of.name)
	}
	var a struct {
		DType, Shape, Backend, Algorithm, Error *string
		Bytes                                   *int64
		Fused, Peer                             *int
	}
	if err := args(e, &a); err != nil {
		return false, err
	}
	if a.Bytes == nil || a.Fused == nil || a.Backend == nil || a.Algorithm == nil {
		return false, fmt.Errorf("%q: the end of %s lacks something: %s", t.name, of.name, e.Args)
	}
	if *a.Bytes < 0 || *a.Fused < 1 || (a.DType == nil) != (a.Shape == nil) {
		return false, fmt.Errorf("%q: the end of operation %d of set %d: %s", t.name, t.op.Number, t.op.Set,
			e.Args)
	}
	if a.Shape != nil {
		if !shape.MatchString(*a.Shape) {
			return false, fmt.Errorf("%q: shape %q", t.name, *a.Shape)
		}
		t.op.DType, t.op.Shape = *a.DType, *a.Shape
	}
	message := t.op.Negotiated == "SEND" || t.op.Negotiated == "RECV"
	if a.Peer != nil {
		t.op.Peer = *a.Peer
	}
	request := strings.HasPrefix(t.op.Negotiated, "PU") // PUSH, PULL, PUSHPULL
	if a.Peer != nil && (!message && !request || *a.Peer < 0) ||
		message && a.Peer == nil && t.op.Number > 0 {
		return false, fmt.Errorf("%q: the end of %s has peer %d", t.name, of.name, t.op.Peer)
	}
	if a.Error != nil {
		t.op.Fail = *a.Error
	}
	if of.name == "ERROR" && t.op.Fail == "" {
		return false, fmt.Errorf("%q: ERROR without a text", t.name)
	}
	t.op.Ended, t.op.Backend, t.op.Algorithm, t.op.Bytes, t.op.Fused = ts, *a.Backend, *a.Algorithm, *a.Bytes,
		*a.Fused
	return true, nil
}

func (t *track) grant(e *event, ts float64) error {
	var a struct {
		Cached *bool
		Sent   *json.RawMessage
		Last   *int
		Late   *json.RawMessage `json:"late_us"`
	}
	if err := args(e, &a); err != nil {
		return fmt.Errorf("%q: the end of a negotiation: %s: %w", t.name, e.Args, err)
	}
	if a.Cached == nil {
		return fmt.Errorf("%q: the end of a negotiation has no cached: %s", t.name, e.Args)
	}
	t.op.Granted, t.op.Begun, t.op.Cached = ts, -1, *a.Cached
	if a.Sent != nil {
		var err error
		if t.op.Sent, err = micros(a.Sent, false); err != nil {
			return err
		}
	}
	if len(t.op.Arrivals) == 0 {
		if a.Last != nil || a.Late != nil {
			return fmt.Errorf("%q: last and late_us without arrivals of ranks: %s", t.name, e.Args)
		}
		return nil
	}
	if a.Last == nil && a.Late == nil {
		t.op.Last = -1
		return nil
	}
	late, err := micros(a.Late, false)
	if err != nil {
		return fmt.Errorf("%q: late_us: %s: %w", t.name, e.Args, err)
	}
	if a.Last == nil {
		return fmt.Errorf("%q: late_us without last: %s", t.name, e.Args)
	}
	times := slices.Sorted(maps.Values(t.op.Arrivals))
	if d := times[len(times)-1] - times[0] - late; d > 0.001 || d < -0.001 ||
		t.op.Arrivals[*a.Last] != times[len(times)-1] {
		return fmt.Errorf("%q: arrivals %v, and %s", t.name, t.op.Arrivals, e.Args)
	}
	t.op.Last, t.op.Late = *a.Last, late
	return nil
}
