package report

import (
	"errors"
	"io"
	"math"
	"slices"
	"strings"
)

// phase is a way to spend time.
type phase uint8

const (
	waiting phase = iota
	negotiation
	queue
	copies
	exchange
	reduce
	other
	numPhases
)

// phaseNames are those of the report.
var phaseNames = [numPhases]string{"waiting", "negotiation", "queue", "copies", "exchange", "reduce", "other"}

// exchanges are the ends of the names of activities that move data, after the name of a backend.
var exchanges = []string{"_ALLREDUCE", "_ALLGATHER", "_BCAST", "_BROADCAST", "_ALLTOALL", "_REDUCESCATTER", "_REDUCE", "_ADASUM"}

// phaseOf sorts an activity by its name.
func phaseOf(activity string) phase {
	switch {
	case activity == "QUEUE":
		return queue
	case strings.HasPrefix(activity, "MEMCPY"), strings.HasPrefix(activity, "COPY_"):
		return copies
	case strings.HasPrefix(activity, "REDUCE"):
		return reduce
	case slices.ContainsFunc(exchanges, func(end string) bool { return strings.HasSuffix(activity, end) }):
		return exchange
	}
	return other
}

const (
	// outside is what the report calls time without an operation in flight.
	outside   = "outside"
	negotiate = "NEGOTIATE_"
	// Bounds on what is kept while files are read, for all ranks together but for maxParts, which is of an operation.
	maxNames  = 1 << 14 // of tensors; what is beyond is counted as one
	maxTracks = 1 << 18 // numbers of tracks with a name
	maxOpen   = 1 << 14 // operations that have begun and not ended
	maxParts  = 64
	maxTrack  = 16 // open events of a track
)

// nameID is the number of a tensor's name. noName is what has none, or one too many.
type nameID uint32

const noName nameID = 0

// nameTable gives names numbers.
type nameTable struct {
	ids    map[string]nameID
	names  []string
	tracks int
	open   int
}

func newNameTable() *nameTable {
	return &nameTable{ids: make(map[string]nameID), names: []string{""}}
}

func (t *nameTable) id(name string) nameID {
	s := clip(name)
	id, known := t.ids[s]
	if !known && len(t.names) <= maxNames {
		id = nameID(len(t.names))
		t.names = append(t.names, s)
		t.ids[s] = id
	}
	return id
}

// full says that there were more names than are told apart.
func (t *nameTable) full() bool { return len(t.names) > maxNames }

// part is a stretch of an operation's execution.
type part struct {
	phase      phase
	begin, end int64
}

// arrival is when the request of a rank, by its position in the set, came to rank 0.
type arrival struct {
	position int
	at       int64
}

// instance is one operation on one tensor at one rank. Times are the rank's own.
type instance struct {
	name nameID
	kind string
	set  int64
	op   int64 // 0 if the file does not say
	// What has not been seen is said not to be there by the flags.
	submitted, granted, begun, ended       int64
	hasSubmitted, hasGranted, hasExecution bool
	cached, cachedKnown, failed            bool
	bytes, fused                           int64
	backend, shape, dtype                  string
	arrivals                               []arrival
	parts                                  []part
}

// track is a tensor of which something has begun.
type track struct {
	instance
	// depth counts open events; phases are those of the first.
	depth  int
	opened [maxTrack]openEvent
	cursor int64 // end of what parts has
}

type openEvent struct {
	phase    phase
	at       int64
	top, neg bool
}

// rankReader gives the instances of a rank's files, in the order in which they ended.
type rankReader struct {
	files *rankFiles
	names *nameTable

	segment int // of files, being read
	in      *opened
	shift   int64 // from ts of the segment to those of the first
	tracks  map[int64]nameID
	open    map[int64]*track
	free    []*track
	e       event

	malformed, unfinished, tooMany int64
	// done is the track whose instance was returned last, to be used again.
	done *track
	// ranks bounds the positions of arrivals.
	ranks int
}

func newRankReader(f *rankFiles, names *nameTable) *rankReader {
	ranks := maxRanks
	if size := f.segments[0].size; size > 0 {
		ranks = size
	}
	return &rankReader{files: f, names: names, ranks: ranks, tracks: make(map[int64]nameID), open: make(map[int64]*track)}
}

// next returns the next instance, which is valid until the next call, or io.EOF. What survey has said of the files is not said again.
func (r *rankReader) next() (*instance, error) {
	if r.done != nil {
		r.release(r.done)
		r.done = nil
	}
	for {
		if r.in == nil {
			if err := r.begin(); err != nil {
				return nil, err
			}
		}
		record, err := r.in.next()
		if err != nil {
			var f *FormatError
			if !errors.Is(err, io.EOF) && !errors.As(err, &f) {
				return nil, errors.Join(err, r.close())
			}
			if err := r.finish(); err != nil {
				return nil, err
			}
			continue
		}
		if parse(record, &r.e) != nil {
			r.malformed++
			continue
		}
		if t := r.apply(&r.e); t != nil {
			r.done = t
			return &t.instance, nil
		}
	}
}

// begin opens the next segment.
func (r *rankReader) begin() (err error) {
	if r.segment == len(r.files.segments) {
		return io.EOF
	}
	s := r.files.segments[r.segment]
	r.segment++
	r.shift = s.monotonic - r.files.clock.base
	r.in, err = s.open()
	return err
}

// finish ends a segment: the next one has tracks of its own.
func (r *rankReader) finish() error {
	for pid, t := range r.open {
		if t.hasExecution || t.depth > 0 {
			r.unfinished++
		}
		delete(r.open, pid)
		r.release(t)
	}
	r.names.tracks -= len(r.tracks)
	clear(r.tracks)
	return r.close()
}

func (r *rankReader) close() error {
	if r.in == nil {
		return nil
	}
	err := r.in.close()
	r.in = nil
	return err
}

func (r *rankReader) release(t *track) {
	arrivals, parts := t.arrivals[:0], t.parts[:0]
	*t = track{}
	t.arrivals, t.parts = arrivals, parts
	r.names.open--
	if len(r.free) < 64 {
		r.free = append(r.free, t)
	}
}

// trackOf is the track of the event, made if it is the first of an operation.
func (r *rankReader) trackOf(e *event) *track {
	if t := r.open[e.PID]; t != nil {
		return t
	}
	if r.names.open >= maxOpen {
		r.tooMany++
		return nil
	}
	r.names.open++
	t := &track{}
	if n := len(r.free); n > 0 {
		t = r.free[n-1]
		r.free = r.free[:n-1]
	}
	t.name = r.tracks[e.PID]
	r.open[e.PID] = t
	return t
}

// apply takes an event. It returns the track whose instance ends with it, taken from the open ones.
func (r *rankReader) apply(e *event) *track {
	e.at += r.shift
	switch e.Phase {
	case "M":
		if e.PID != 0 && e.Name == "process_name" {
			_, known := r.tracks[e.PID]
			if !known && r.names.tracks >= maxTracks {
				return nil
			}
			if !known {
				r.names.tracks++
			}
			r.tracks[e.PID] = r.names.id(e.Args.Name)
		}
	case "B":
		if e.PID != 0 && e.timed {
			return r.push(e)
		}
	case "E":
		// One without a beginning is Horovod's, for a barrier or a join.
		if t := r.open[e.PID]; t != nil && t.depth > 0 && e.timed {
			return r.pop(t, e)
		}
	case "X", "i", "I":
		t := r.open[e.PID]
		position, is := e.position()
		if t != nil && is && position < r.ranks && e.timed && t.depth == 1 && t.opened[0].neg && len(t.arrivals) < r.ranks {
			at := e.at
			if !math.IsNaN(e.Args.At) {
				at = nanos(e.Args.At) + r.shift
			}
			t.arrivals = append(t.arrivals, arrival{position, at})
		}
	}
	return nil
}

func (r *rankReader) push(e *event) *track {
	name, neg := strings.CutPrefix(e.Name, negotiate)
	var before *track
	if t := r.open[e.PID]; t != nil && t.depth == 0 && neg {
		// What was negotiated last was never executed, as Horovod's barriers.
		delete(r.open, e.PID)
		if t.hasGranted {
			t.ended = t.granted
			before = t
		} else {
			r.release(t)
		}
	}
	t := r.trackOf(e)
	if t == nil {
		return before
	}
	if t.depth++; t.depth > maxTrack {
		return before
	}
	o := &t.opened[t.depth-1]
	*o = openEvent{at: e.at}
	switch {
	case t.depth == 1 && neg:
		o.neg = true
		t.kind = kindName(name)
		t.set, t.op = e.Args.Set, e.Args.Op
		t.submitted, t.hasSubmitted = e.at, true
		if !math.IsNaN(e.Args.Submitted) {
			t.submitted = nanos(e.Args.Submitted) + r.shift
		}
	case t.depth == 1:
		o.top = true
		t.kind = kindName(e.Name)
		t.begun, t.cursor, t.hasExecution = e.at, e.at, true
		if !t.hasGranted {
			t.granted, t.hasGranted = e.at, true
		}
	case t.opened[0].top:
		if t.depth == 2 {
			t.addPart(other, e.at)
		}
		o.phase = phaseOf(e.Name)
	}
	return before
}

// addPart says what the time until now went into.
func (t *track) addPart(p phase, now int64) {
	if now > t.cursor && len(t.parts) < maxParts {
		t.parts = append(t.parts, part{p, t.cursor, now})
	}
	t.cursor = max(t.cursor, now)
}

func (r *rankReader) pop(t *track, e *event) *track {
	t.depth--
	if t.depth >= maxTrack {
		return nil
	}
	switch o := t.opened[t.depth]; {
	case o.neg:
		t.granted, t.hasGranted = e.at, true
		t.cachedKnown = e.Args.Cached != nil
		t.cached = t.cachedKnown && *e.Args.Cached
	case o.top:
		t.addPart(other, e.at)
		t.ended = e.at
		a := &e.Args
		t.bytes, t.fused = max(a.Bytes, 0), a.Fused
		t.backend, t.shape, t.dtype = clip(a.Backend), clip(a.Shape), clip(a.DType)
		t.failed = t.kind == "ERROR" || a.Error != nil
		delete(r.open, e.PID)
		return t
	case t.depth == 1:
		t.addPart(o.phase, e.at)
		if o.phase == queue {
			t.begun = e.at
		}
	}
	return nil
}

// kindName is that of an operation, in lower case but for ERROR.
func kindName(name string) string {
	if name == "ERROR" {
		return name
	}
	return strings.ToLower(clip(name))
}

const join = "join"
