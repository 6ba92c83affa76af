package timeline

import (
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/topo"
)

// version is that of the format, in hvd_rank.
const version = 1

// maxTracks bounds what a segment remembers of tensors. Who makes up a name for each operation gets new tracks after that.
const maxTracks = 1 << 17

// names are Horovod's words for the kinds (common.h, RequestTypeName), and our own in its way.
var names = [...]string{
	message.Allreduce: "ALLREDUCE", message.Allgather: "ALLGATHER", message.Broadcast: "BROADCAST", message.Alltoall: "ALLTOALL",
	message.Reducescatter: "REDUCESCATTER", message.Barrier: "BARRIER", message.Join: "JOIN",
	message.AddProcessSet: "ADD_PROCESS_SET", message.RemoveProcessSet: "REMOVE_PROCESS_SET",
}

func nameOf(k message.Kind) string {
	if k.Valid() {
		return names[k]
	}
	return "ERROR" // what was asked for is not known
}

type trackKey struct {
	name string
	set  topo.ProcessSetID
}

// track is a line of the picture, a "process" of the trace format.
type track struct {
	pid int
	// last is the latest time on it: none may go back.
	last time.Duration
}

// formatter makes the text of a segment. Each piece of text begins with the comma after the one before, but the header, and
// ends without one.
type formatter struct {
	cfg    *Config
	tracks map[trackKey]*track
	pids   int
	zero   track // of pid 0: the rank itself
	offset trace.Offset
	known  bool
	latest time.Duration

	// What undo takes back.
	undoKey   trackKey
	undoTrack *track
	undoLast  time.Duration
	undoNew   bool

	pid    []byte // part of the lines of a tensor
	order  []int32
	stamps [32]stamp // found by a hash of their time
}

// stamp is a time as text. The tensors of an operation share most of theirs.
type stamp struct {
	at   time.Duration
	n    uint8
	text [23]byte
}

// micros is appendMicros for a time that is likely to come again soon.
func (f *formatter) micros(dst []byte, d time.Duration) []byte {
	s := &f.stamps[uint64(d)*0x9e3779b97f4a7c15>>59]
	if s.at != d || s.n == 0 {
		s.at, s.n = d, uint8(len(appendMicros(s.text[:0], d)))
	}
	return append(dst, s.text[:s.n]...)
}

// header begins a segment.
func (f *formatter) header(dst []byte, segment int, dropped uint64) []byte {
	f.tracks, f.pids, f.zero = make(map[trackKey]*track), 0, track{}
	dst = append(dst, `[`+"\n"+`{"name":"process_name","ph":"M","pid":0,"args":{"start_time_since_epoch_in_micros":`...)
	var start int64
	if !f.cfg.Clock.Start.IsZero() {
		start = f.cfg.Clock.Start.UnixMicro()
	}
	dst = strconv.AppendInt(dst, start, 10)
	dst = append(dst, `}}`+",\n"+`{"name":"process_sort_index","ph":"M","pid":0,"args":{"sort_index":0}}`...)
	dst = append(dst, ",\n"+`{"name":"hvd_rank","ph":"M","pid":0,"args":{"rank":`...)
	dst = strconv.AppendInt(dst, int64(f.cfg.Rank), 10)
	dst = append(dst, `,"size":`...)
	dst = strconv.AppendInt(dst, int64(f.cfg.Size), 10)
	dst = append(dst, `,"host":`...)
	dst = appendString(dst, f.cfg.Host)
	dst = append(dst, `,"epoch":`...)
	dst = strconv.AppendUint(dst, f.cfg.Epoch, 10)
	dst = append(dst, `,"segment":`...)
	dst = strconv.AppendInt(dst, int64(segment), 10)
	dst = append(dst, `,"clock_domain":`...)
	dst = appendString(dst, f.cfg.Clock.Domain)
	dst = append(dst, `,"monotonic_us":`...)
	dst = appendMicros(dst, f.cfg.Clock.Monotonic)
	dst = append(dst, `,"dropped":`...)
	dst = strconv.AppendUint(dst, dropped, 10)
	dst = append(dst, `,"version":`...)
	dst = strconv.AppendInt(dst, version, 10)
	dst = append(dst, `}}`...)
	if f.known {
		// Each segment can be read by itself.
		dst = f.clock(dst, f.offset)
	}
	return dst
}

func (f *formatter) clock(dst []byte, o trace.Offset) []byte {
	f.offset, f.known = o, true
	dst = append(dst, ",\n"+`{"name":"hvd_clock","ph":"i","s":"p","ts":`...)
	dst = appendMicros(dst, f.at(&f.zero, o.At))
	dst = append(dst, `,"pid":0,"args":{"offset_us":`...)
	dst = appendMicros(dst, o.Offset)
	dst = append(dst, `,"error_us":`...)
	dst = appendMicros(dst, o.Error)
	if o.Job != "" {
		dst = append(dst, `,"job":`...)
		dst = appendString(dst, o.Job)
	}
	return append(dst, `}}`...)
}

func (f *formatter) cycle(dst []byte, at time.Duration) []byte {
	dst = append(dst, ",\n"+`{"name":"CYCLE_START","ph":"i","s":"g","ts":`...)
	dst = appendMicros(dst, f.at(&f.zero, at))
	return append(dst, `,"pid":0}`...)
}

// end is the last event of a timeline that was closed in order.
func (f *formatter) end(dst []byte, dropped uint64) []byte {
	at := f.latest
	if !f.cfg.Clock.Start.IsZero() {
		at = max(at, time.Since(f.cfg.Clock.Start))
	}
	dst = append(dst, ",\n"+`{"name":"hvd_end","ph":"i","s":"p","ts":`...)
	dst = appendMicros(dst, f.at(&f.zero, at))
	dst = append(dst, `,"pid":0,"args":{"dropped":`...)
	dst = strconv.AppendUint(dst, dropped, 10)
	return append(dst, `}}`...)
}

// at is d, or the latest time of the track if d is before that.
func (f *formatter) at(t *track, d time.Duration) time.Duration {
	t.last = max(t.last, d)
	f.latest = max(f.latest, d)
	return t.last
}

// tensor has all events of a tensor of an operation. arrivals are its own, activities those of the operation.
func (f *formatter) tensor(dst []byte, e *entry, n *tensorEntry, activities []trace.Activity, arrivals []time.Duration) []byte {
	dst, t := f.track(dst, trackKey{n.name, e.set})
	f.pid = strconv.AppendInt(append(f.pid[:0], `,"pid":`...), int64(t.pid), 10)

	op := nameOf(e.kind)
	f.order = byTime(f.order[:0], arrivals)
	begin := n.submitted
	if len(f.order) > 0 {
		// As Horovod's, the bar at the coordinator's rank begins when the first rank has asked.
		if first := arrivals[f.order[0]]; begin == 0 || first < begin {
			begin = first
		}
	}
	dst = append(dst, ",\n"+`{"name":"NEGOTIATE_`...)
	dst = append(dst, op...)
	dst = append(dst, `","ph":"B","ts":`...)
	begin = f.at(t, begin)
	dst = appendMicros(dst, begin)
	dst = append(dst, f.pid...)
	dst = append(dst, `,"args":{"set":`...)
	dst = strconv.AppendUint(dst, uint64(e.set), 10)
	dst = append(dst, `,"op":`...)
	dst = strconv.AppendUint(dst, e.number, 10)
	if n.submitted > 0 && begin != n.submitted {
		dst = append(dst, `,"submitted":`...)
		dst = appendMicros(dst, n.submitted)
	}
	dst = append(dst, `}}`...)
	for _, i := range f.order {
		dst = append(dst, ",\n"+`{"name":"`...)
		dst = strconv.AppendInt(dst, int64(i), 10)
		dst = append(dst, `","ph":"X","ts":`...)
		at := f.at(t, arrivals[i])
		dst = appendMicros(dst, at)
		dst = append(dst, `,"dur":0`...)
		dst = append(dst, f.pid...)
		if at != arrivals[i] {
			dst = append(dst, `,"args":{"at":`...)
			dst = appendMicros(dst, arrivals[i])
			dst = append(dst, '}')
		}
		dst = append(dst, '}')
	}
	granted := f.at(t, e.at)
	dst = f.endOf(dst, granted)
	dst = append(dst, `,"args":{"cached":`...)
	dst = strconv.AppendBool(dst, n.cached)
	if n.sent-n.submitted >= time.Microsecond {
		dst = append(dst, `,"sent":`...)
		dst = appendMicros(dst, n.sent)
	}
	if k := len(f.order); k > 0 && !n.partial {
		first, last := f.order[0], f.order[k-1]
		dst = append(dst, `,"last":`...)
		dst = strconv.AppendInt(dst, int64(last), 10)
		dst = append(dst, `,"late_us":`...)
		dst = appendMicros(dst, arrivals[last]-arrivals[first])
	}
	dst = append(dst, `}}`...)

	failed := e.failed
	if n.refused != "" {
		op, failed = "ERROR", n.refused
	} else if failed == "" && e.kind == message.Error {
		failed = "the ranks did not agree"
	}
	dst = f.beginning(dst, op, granted)
	dst = f.beginning(dst, "QUEUE", granted)
	dst = append(f.endOf(dst, f.at(t, e.begun)), '}')
	for i := range activities {
		a := &activities[i]
		dst = append(dst, ",\n"+`{"name":`...)
		dst = appendString(dst, a.Name)
		dst = append(dst, `,"ph":"B","ts":`...)
		dst = f.micros(dst, f.at(t, a.Begun))
		dst = append(dst, f.pid...)
		dst = append(dst, '}')
		dst = append(f.endOf(dst, f.at(t, a.End)), '}')
	}
	dst = f.endOf(dst, f.at(t, e.ended))
	dst = append(dst, `,"args":{`...)
	if n.dtype.Valid() {
		dst = append(dst, `"dtype":"`...)
		dst = append(dst, n.dtype.String()...)
		dst = append(dst, `","shape":"`...)
		dst = appendShape(dst, n.shape)
		dst = append(dst, `",`...)
	}
	dst = append(dst, `"bytes":`...)
	dst = strconv.AppendInt(dst, n.bytes, 10)
	dst = append(dst, `,"fused":`...)
	dst = strconv.AppendInt(dst, int64(e.fused), 10)
	dst = append(dst, `,"backend":"`...)
	dst = append(dst, e.backend.String()...)
	dst = append(dst, `","algorithm":"`...)
	dst = append(dst, e.algorithm.String()...)
	dst = append(dst, '"')
	if failed != "" {
		dst = append(dst, `,"error":`...)
		dst = appendString(dst, failed)
	}
	return append(dst, `}}`...)
}

func (f *formatter) beginning(dst []byte, name string, at time.Duration) []byte {
	dst = append(dst, ",\n"+`{"name":"`...)
	dst = append(dst, name...)
	dst = append(dst, `","ph":"B","ts":`...)
	dst = f.micros(dst, at)
	dst = append(dst, f.pid...)
	return append(dst, '}')
}

// endOf is an end without its closing brace.
func (f *formatter) endOf(dst []byte, at time.Duration) []byte {
	dst = append(dst, ",\n"+`{"ph":"E","ts":`...)
	dst = f.micros(dst, at)
	return append(dst, f.pid...)
}

// track finds the track of a tensor, or makes it and says so in dst.
func (f *formatter) track(dst []byte, k trackKey) ([]byte, *track) {
	t, ok := f.tracks[k]
	if !ok {
		if len(f.tracks) >= maxTracks {
			clear(f.tracks)
		}
		f.pids++
		t = &track{pid: f.pids}
		f.tracks[k] = t
		dst = append(dst, ",\n"+`{"name":"process_name","ph":"M","pid":`...)
		dst = strconv.AppendInt(dst, int64(t.pid), 10)
		dst = append(dst, `,"args":{"name":`...)
		dst = appendString(dst, k.name)
		if k.set != topo.Global {
			dst = append(dst[:len(dst)-1], ` [set `...)
			dst = strconv.AppendUint(dst, uint64(k.set), 10)
			dst = append(dst, `]"`...)
		}
		dst = append(dst, `}}`+",\n"+`{"name":"process_sort_index","ph":"M","pid":`...)
		dst = strconv.AppendInt(dst, int64(t.pid), 10)
		dst = append(dst, `,"args":{"sort_index":`...)
		dst = strconv.AppendInt(dst, int64(t.pid), 10)
		dst = append(dst, `}}`...)
	}
	f.undoKey, f.undoTrack, f.undoLast, f.undoNew = k, t, t.last, !ok
	return dst, t
}

// undo forgets the last tensor, whose text was not used.
func (f *formatter) undo() {
	f.undoTrack.last = f.undoLast
	if f.undoNew {
		delete(f.tracks, f.undoKey)
		f.pids--
	}
}

// byTime appends the positions that have an arrival, the earliest first, and of equals the lower.
func byTime(order []int32, arrivals []time.Duration) []int32 {
	for i, a := range arrivals {
		if a > 0 {
			order = append(order, int32(i))
		}
	}
	slices.SortStableFunc(order, func(a, b int32) int { return int(min(max(arrivals[a]-arrivals[b], -1), 1)) })
	return order
}

// appendMicros writes d in microseconds, with as many of three decimals as are needed.
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

// appendShape writes a shape as Horovod does: [2, 3].
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

// appendString writes s as a JSON string, as encoding/json does without its care for HTML: what is not UTF-8 becomes U+FFFD.
func appendString(dst []byte, s string) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	start := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' && c < utf8.RuneSelf {
			i++
			continue
		}
		if c < utf8.RuneSelf {
			dst = append(dst, s[start:i]...)
			switch c {
			case '"', '\\':
				dst = append(dst, '\\', c)
			case '\b':
				dst = append(dst, `\b`...)
			case '\f':
				dst = append(dst, `\f`...)
			case '\n':
				dst = append(dst, `\n`...)
			case '\r':
				dst = append(dst, `\r`...)
			case '\t':
				dst = append(dst, `\t`...)
			default:
				dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&0xf])
			}
			i++
			start = i
			continue
		}
		r, size := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			dst = append(append(dst, s[start:i]...), `\ufffd`...)
			start = i + size
		case r == '\u2028' || r == '\u2029':
			// Valid in JSON, but ends a line of JavaScript.
			dst = append(append(dst, s[start:i]...), '\\', 'u', '2', '0', '2', hex[r&0xf])
			start = i + size
		}
		i += size
	}
	dst = append(dst, s[start:]...)
	return append(dst, '"')
}
