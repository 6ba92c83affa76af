package timeline

import (
	"encoding/json"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// version is the version of the format. Each segment states it in the event hvd_rank.
const version = 1

// maxTracks limits the number of tracks that the formatter remembers in a segment. A program that makes up a
// new name for each operation may reach the limit. Then the formatter forgets the known tracks and makes new
// ones.
const maxTracks = 1 << 17

// negotiate is the prefix that turns the name of an operation into the name of its negotiation.
const negotiate = "NEGOTIATE_"

// names maps each kind of operation to the name of its negotiation. The names are Horovod's (RequestTypeName
// in common.h). Kinds that Horovod does not have are named in the same style.
var names = [...]string{
	0:                 negotiate + "ERROR", // an error that belongs to no known request
	message.Allreduce: negotiate + "ALLREDUCE", message.Allgather: negotiate + "ALLGATHER",
	message.Broadcast: negotiate + "BROADCAST",
	message.Alltoall:  negotiate + "ALLTOALL", message.Reducescatter: negotiate + "REDUCESCATTER",
	message.Barrier: negotiate + "BARRIER",
	message.Join:    negotiate + "JOIN", message.AddProcessSet: negotiate + "ADD_PROCESS_SET",
	message.RemoveProcessSet: negotiate + "REMOVE_PROCESS_SET", message.Reduce: negotiate + "REDUCE",
	message.Gather: negotiate + "GATHER", message.Scatter: negotiate + "SCATTER",
	message.Send: negotiate + "SEND", message.Recv: negotiate + "RECV",
	message.Push: negotiate + "PUSH", message.Pull: negotiate + "PULL",
	message.PushPull: negotiate + "PUSHPULL",
}

// nameOf returns the name of the negotiation of an operation of kind k, and the name of the operation itself.
func nameOf(k message.Kind) (negotiation, operation string) {
	if !k.Valid() && !k.IsMessage() && !k.IsRequest() {
		k = 0
	}
	return names[k], names[k][len(negotiate):]
}

// trackKey identifies a track by tensor name and process set.
type trackKey struct {
	name string
	set  topo.ProcessSetID
}

// track is a row in the viewer, called a "process" in the trace format. Each tensor has one.
type track struct {
	pid string
	// last is the latest time on the track. Times on a track must not go back.
	last time.Duration
}

// formatter makes the text of a segment. Each piece of text after the header begins with a comma, which
// separates it from the previous piece. No piece ends with a comma.
type formatter struct {
	cfg    *Config
	tracks map[trackKey]*track
	pids   int
	zero   track         // the track of the rank itself, with pid 0
	offset *trace.Offset // the last clock measurement; nil if there is none
	latest time.Duration

	// lanes has the lanes in which spans are shown, so that those of one lane nest. named is the number of
	// lanes whose names are in the segment.
	lanes []lane
	named int
	sets  []set // the process sets other than 0 that are known so far

	// before is the state that undo restores: the track of the tensor that was formatted last, and the latest
	// time on this track before that tensor. fresh is set if the track was created for that tensor. named is
	// the value of the field named before the last text.
	before struct {
		key   trackKey
		track *track
		last  time.Duration
		fresh bool
		named int
	}
	order  []int32
	stamps [32]stamp // a cache of formatted times; the index is a hash of the time
}

// stamp is a time as text. Stamps are cached because the tensors of an operation share most times.
type stamp struct {
	at   time.Duration
	n    uint8
	text [23]byte
}

// header appends the beginning of a segment.
func (f *formatter) header(dst []byte, segment int, dropped uint64) []byte {
	f.tracks, f.pids, f.zero, f.named = make(map[trackKey]*track), 0, track{pid: "0"}, 0
	var start int64
	if !f.cfg.Clock.Start.IsZero() {
		start = f.cfg.Clock.Start.UnixMicro()
	}
	dst = append(dst, '[')
	dst = number(meta(dst, "process_name", "0"), "start_time_since_epoch_in_micros", start)
	dst = number(meta(append(dst, "}}"...), "process_sort_index", "0"), "sort_index", 0)
	dst = number(meta(append(dst, "}}"...), "hvd_rank", "0"), "rank", int64(f.cfg.Rank))
	dst = number(dst, "size", int64(f.cfg.Size))
	dst = text(dst, "file", filepath.Base(f.cfg.Path))
	dst = text(dst, "host", f.cfg.Host)
	dst = number(dst, "epoch", int64(f.cfg.Epoch))
	dst = number(dst, "segment", int64(segment))
	dst = text(dst, "clock_domain", f.cfg.Clock.Domain)
	dst = micros(dst, "monotonic_us", f.cfg.Clock.Monotonic)
	dst = number(dst, "dropped", int64(dropped))
	dst = append(number(dst, "version", version), "}}"...)
	dst = f.job(dst)
	for i := range f.sets {
		dst = f.set(dst, &f.sets[i])
	}
	if f.offset != nil {
		// Each segment repeats the last clock measurement, so that a reader does not need the previous
		// segments.
		dst = f.clock(dst, f.offset)
	}
	return dst
}

// maxCommandBytes limits the command line in a segment.
const maxCommandBytes = 4 << 10

// job appends the description of the job, if there is one.
func (f *formatter) job(dst []byte) []byte {
	a := &f.cfg.About
	if a.Version == "" {
		return dst
	}
	dst = append(text(meta(dst, "hvd_job", "0"), "gohvd", a.Version), `,"command":[`...)
	left := maxCommandBytes
	for i, word := range a.Command {
		if left -= len(word); left < 0 {
			dst = append(dst, `,"..."`...)
			break
		}
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendString(dst, word)
	}
	dst = append(dst, `],"settings":{`...)
	for _, name := range slices.Sorted(maps.Keys(a.Settings)) {
		dst = text(dst, name, a.Settings[name])
	}
	return append(dst, "}}}"...)
}

// set is a process set with its members.
type set struct {
	id    topo.ProcessSetID
	ranks []topo.Rank
}

// set appends the members of a process set.
func (f *formatter) set(dst []byte, s *set) []byte {
	f.remember()
	dst = append(number(meta(dst, "hvd_set", "0"), "set", int64(s.id)), `,"ranks":[`...)
	for i, r := range s.ranks {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, int64(r), 10)
	}
	return append(dst, "]}}"...)
}

// pending appends an operation that is pending at the given time.
func (f *formatter) pending(dst []byte, at time.Duration, r *trace.Record) []byte {
	f.remember()
	_, name := nameOf(r.Kind)
	dst = append(f.event(dst, "hvd_pending", `i","s":"p`, &f.zero, at), `,"args":{`...)
	dst = text(text(dst, "tensor", r.Name), "kind", name)
	dst = micros(number(dst, "set", int64(r.Set)), "submitted", r.Submitted)
	if r.Granted > 0 {
		dst = micros(number(dst, "op", int64(r.Number)), "granted", r.Granted)
	}
	if r.Begun > 0 {
		dst = micros(dst, "begun", r.Begun)
	}
	return append(dst, "}}"...)
}

// clock appends a clock measurement.
func (f *formatter) clock(dst []byte, o *trace.Offset) []byte {
	f.remember()
	f.offset = o
	dst = append(f.event(dst, "hvd_clock", `i","s":"p`, &f.zero, o.At), `,"args":{`...)
	dst = micros(micros(dst, "offset_us", o.Offset), "error_us", o.Error)
	if o.Job != "" {
		dst = text(dst, "job", o.Job)
	}
	return append(dst, "}}"...)
}

// cycle appends an event that marks the beginning of a cycle.
func (f *formatter) cycle(dst []byte, at time.Duration) []byte {
	f.remember()
	return append(f.event(dst, "CYCLE_START", `i","s":"g`, &f.zero, at), '}')
}

// step appends an event that marks the beginning of the training step with the given number.
func (f *formatter) step(dst []byte, at time.Duration, step uint64) []byte {
	f.remember()
	dst = append(f.event(dst, "hvd_step", `i","s":"p`, &f.zero, at), `,"args":{"step":`...)
	return append(strconv.AppendUint(dst, step, 10), "}}"...)
}

// tuned appends an event that marks a change of settings.
func (f *formatter) tuned(dst []byte, at time.Duration, v *message.Tuning) []byte {
	f.remember()
	dst = append(f.event(dst, "hvd_tuning", `i","s":"p`, &f.zero, at), `,"args":{`...)
	dst = number(dst, "fusion_threshold_bytes", v.FusionThresholdBytes)
	dst = micros(dst, "cycle_time_us", v.CycleTime)
	dst = number(dst, "segment_bytes", int64(v.SegmentBytes))
	for _, s := range []struct {
		name string
		off  bool
	}{{"cache_enabled", v.CacheOff}, {"hierarchical_allreduce", v.OneLevelAllreduce},
		{"hierarchical_allgather", v.OneLevelAllgather}} {
		on := int64(1)
		if s.off {
			on = 0
		}
		dst = number(dst, s.name, on)
	}
	return append(text(dst, "algorithm", v.AllreduceText()), "}}"...)
}

// maxLanes limits the number of spans of a program that overlap without being nested.
const maxLanes = 256

// maxNested is the number of the latest spans that a lane remembers.
const maxNested = 64

// lane has the spans of a thread in the viewer, the latest last, without those that are inside of others.
type lane []trace.Span

// add adds a span, which has ended after those of the lane. It returns false and does nothing if a span of
// the lane overlaps it and is not inside of it.
func (l *lane) add(s *trace.Span) bool {
	n := len(*l)
	for n > 0 && (*l)[n-1].Begun >= s.Begun && (*l)[n-1].End <= s.End {
		n--
	}
	if n > 0 && (*l)[n-1].End > s.Begun {
		return false
	}
	if n == maxNested {
		copy(*l, (*l)[1:])
		n--
	}
	*l = append((*l)[:n], *s)
	return true
}

// span appends an event that shows what the program did, in the first lane in which it nests. If there is no
// such lane, it appends nothing.
func (f *formatter) span(dst []byte, s *trace.Span) []byte {
	f.remember()
	i := 0
	for i < len(f.lanes) && !f.lanes[i].add(s) {
		i++
	}
	if i == maxLanes {
		return dst
	}
	if i == len(f.lanes) {
		f.lanes = append(f.lanes, lane{*s})
	}
	for ; f.named <= i; f.named++ {
		name := "program"
		if f.named > 0 {
			name += " " + strconv.Itoa(f.named+1)
		}
		dst = strconv.AppendInt(append(dst, `,
{"name":"thread_name","ph":"M","pid":0,"tid":`...), int64(f.named+1), 10)
		dst = append(text(append(dst, `,"args":{`...), "name", name), "}}"...)
	}
	f.latest = max(f.latest, s.End)
	dst = append(dst, ",\n{"...)
	if s.Kind == trace.Range {
		dst = append(text(dst, "name", s.Name), `,"cat":"range"`...)
	} else {
		dst = append(dst, `"name":"WAIT","cat":"wait"`...)
	}
	dst = appendMicros(append(dst, `,"ph":"X","ts":`...), s.Begun)
	dst = appendMicros(append(dst, `,"dur":`...), s.End-s.Begun)
	dst = strconv.AppendInt(append(dst, `,"pid":0,"tid":`...), int64(i+1), 10)
	if s.Kind == trace.Range {
		return append(dst, '}')
	}
	return append(text(append(dst, `,"args":{`...), "tensor", s.Name), "}}"...)
}

// end appends hvd_end, the last event of a timeline that was closed by Close.
func (f *formatter) end(dst []byte, dropped uint64) []byte {
	f.remember()
	at := f.latest
	if !f.cfg.Clock.Start.IsZero() {
		at = max(at, time.Since(f.cfg.Clock.Start))
	}
	dst = append(f.event(dst, "hvd_end", `i","s":"p`, &f.zero, at), `,"args":{`...)
	return append(number(dst, "dropped", int64(dropped)), "}}"...)
}

// event appends the beginning of an event on track t, and the caller appends the rest. The time of the event
// is the time in at or the latest time on the track, whichever is later.
func (f *formatter) event(dst []byte, name, phase string, t *track, at time.Duration) []byte {
	t.last = max(t.last, at)
	f.latest = max(f.latest, at)
	dst = append(dst, ",\n{"...)
	if name != "" {
		dst = append(appendString(append(dst, `"name":`...), name), ',')
	}
	dst = append(append(append(dst, `"ph":"`...), phase...), `","ts":`...)
	s := &f.stamps[uint64(t.last)*0x9e3779b97f4a7c15>>59]
	if s.at != t.last || s.n == 0 {
		s.at, s.n = t.last, uint8(len(appendMicros(s.text[:0], t.last)))
	}
	dst = append(dst, s.text[:s.n]...)
	if phase == "X" {
		dst = append(dst, `,"dur":0`...)
	}
	return append(append(dst, `,"pid":`...), t.pid...)
}

// tensor appends all events of record i of an operation.
func (f *formatter) tensor(dst []byte, op *entry, i int) []byte {
	n, arrivals := &op.Records[i], op.ArrivalsOf(i)
	dst, t := f.track(dst, trackKey{n.Name, n.Set})
	negotiation, name := nameOf(n.Kind)
	f.order = byTime(f.order[:0], arrivals)
	begin := n.Submitted
	if len(f.order) > 0 {
		// As in Horovod, the bar in rank 0's file begins when the first rank's request arrived.
		if first := arrivals[f.order[0]]; begin == 0 || first < begin {
			begin = first
		}
	}
	dst = append(f.event(dst, negotiation, "B", t, begin), `,"args":{`...)
	dst = number(number(dst, "set", int64(n.Set)), "op", int64(n.Number))
	if n.Submitted > 0 && t.last != n.Submitted {
		dst = micros(dst, "submitted", n.Submitted)
	}
	dst = append(dst, "}}"...)
	for _, i := range f.order {
		var position [8]byte
		dst = f.event(dst, string(strconv.AppendInt(position[:0], int64(i), 10)), "X", t, arrivals[i])
		if t.last != arrivals[i] {
			dst = append(micros(append(dst, `,"args":{`...), "at", arrivals[i]), '}')
		}
		dst = append(dst, '}')
	}
	dst = append(f.event(dst, "", "E", t, n.Granted), `,"args":{"cached":`...)
	dst = strconv.AppendBool(dst, n.Cached)
	if n.Sent-n.Submitted >= time.Microsecond {
		dst = micros(dst, "sent", n.Sent)
	}
	if k := len(f.order); k > 0 && !n.Partial {
		first, last := f.order[0], f.order[k-1]
		dst = micros(number(dst, "last", int64(last)), "late_us", arrivals[last]-arrivals[first])
	}
	dst = append(dst, "}}"...)

	failed := n.Error
	switch {
	case n.Refused:
		name = "ERROR"
	case failed == "" && n.Kind == message.Error:
		failed = "ranks submitted different requests"
	}
	dst = append(f.event(dst, name, "B", t, n.Granted), '}')
	dst = append(f.event(dst, "QUEUE", "B", t, n.Granted), '}')
	dst = append(f.event(dst, "", "E", t, n.Begun), '}')
	for i := range op.Activities {
		a := &op.Activities[i]
		dst = append(f.event(dst, a.Name, "B", t, a.Begun), '}')
		dst = append(f.event(dst, "", "E", t, a.End), '}')
	}
	dst = append(f.event(dst, "", "E", t, n.Ended), `,"args":{`...)
	if n.DType.Valid() {
		dst = text(dst, "dtype", n.DType.String())
		dst = append(appendShape(append(dst, `,"shape":"`...), n.Shape), '"')
	}
	dst = number(number(dst, "bytes", n.Bytes), "fused", int64(op.fused))
	dst = text(text(dst, "backend", n.Backend.String()), "algorithm", n.Algorithm.String())
	if (n.Kind.IsMessage() || n.Kind.IsRequest()) && n.Peer >= 0 {
		dst = number(dst, "peer", int64(n.Peer))
	}
	if failed != "" {
		dst = text(dst, "error", failed)
	}
	return append(dst, "}}"...)
}

// track returns the track of a tensor. If the tensor has no track yet, track makes one and appends the
// metadata of the new track to dst.
func (f *formatter) track(dst []byte, k trackKey) ([]byte, *track) {
	t, ok := f.tracks[k]
	if !ok {
		if len(f.tracks) >= maxTracks {
			clear(f.tracks)
		}
		f.pids++
		t = &track{pid: strconv.Itoa(f.pids)}
		f.tracks[k] = t
		name := k.name
		if k.set != topo.Global {
			name += " [set " + strconv.FormatUint(uint64(k.set), 10) + "]"
		}
		dst = append(text(meta(dst, "process_name", t.pid), "name", name), "}}"...)
		dst = append(number(meta(dst, "process_sort_index", t.pid), "sort_index", int64(f.pids)), "}}"...)
	}
	f.remember()
	f.before.key, f.before.track, f.before.last, f.before.fresh = k, t, t.last, !ok
	return dst, t
}

// remember makes undo restore the present state, in which the text to come has no track yet.
func (f *formatter) remember() { f.before.track, f.before.named = nil, f.named }

// undo reverts what the last call of tensor or span changed in the formatter. The writer calls it if it does
// not use the text that they returned. A lane may keep the span, because it is added again. If the
// formatter's last call was another one, undo does nothing.
func (f *formatter) undo() {
	f.named = f.before.named
	if f.before.track == nil {
		return
	}
	f.before.track.last = f.before.last
	if f.before.fresh {
		delete(f.tracks, f.before.key)
		f.pids--
	}
}

// byTime appends to the slice order the positions of all ranks whose requests arrived, sorted by time of
// arrival. Positions with equal times are in ascending order.
func byTime(order []int32, arrivals []time.Duration) []int32 {
	for i, a := range arrivals {
		if a > 0 {
			order = append(order, int32(i))
		}
	}
	slices.SortStableFunc(order, func(a, b int32) int {
		return int(min(max(arrivals[a]-arrivals[b], -1), 1))
	})
	return order
}

// meta appends the beginning of a metadata event: everything before its arguments.
func meta(dst []byte, name, pid string) []byte {
	if string(dst) != "[" { // no comma precedes the first event of the file
		dst = append(dst, ',')
	}
	dst = append(append(append(dst, "\n"+`{"name":"`...), name...), `","ph":"M","pid":`...)
	return append(append(dst, pid...), `,"args":{`...)
}

// arg appends the name of an argument. If it is not the first argument of the event, arg appends a comma
// before the name.
func arg(dst []byte, name string) []byte {
	if dst[len(dst)-1] != '{' {
		dst = append(dst, ',')
	}
	return append(append(append(dst, '"'), name...), `":`...)
}

// number appends an integer argument.
func number(dst []byte, name string, v int64) []byte { return strconv.AppendInt(arg(dst, name), v, 10) }

// micros appends an argument that is a time, in microseconds.
func micros(dst []byte, name string, d time.Duration) []byte { return appendMicros(arg(dst, name), d) }

// text appends a string argument.
func text(dst []byte, name, s string) []byte { return appendString(arg(dst, name), s) }

// appendMicros appends d in microseconds, with as many decimals as needed, at most three.
func appendMicros(dst []byte, d time.Duration) []byte {
	n := uint64(d)
	if d < 0 {
		dst, n = append(dst, '-'), -n
	}
	dst = strconv.AppendUint(dst, n/1000, 10)
	r := n % 1000
	if r == 0 {
		return dst
	}
	dst = append(dst, '.', byte('0'+r/100), byte('0'+r/10%10), byte('0'+r%10))
	for dst[len(dst)-1] == '0' {
		dst = dst[:len(dst)-1]
	}
	return dst
}

// appendShape appends a shape as Horovod writes it: [2, 3].
func appendShape(dst []byte, s tensor.Shape) []byte {
	dst = append(dst, '[')
	for i, d := range s {
		if i > 0 {
			dst = append(dst, ", "...)
		}
		dst = strconv.AppendInt(dst, d, 10)
	}
	return append(dst, ']')
}

// appendString appends s as a JSON string. Bytes that are not UTF-8 become U+FFFD.
func appendString(dst []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			quoted, _ := json.Marshal(s) // cannot fail for a string
			return append(dst, quoted...)
		}
	}
	return append(append(append(dst, '"'), s...), '"')
}
