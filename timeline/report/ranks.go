package report

import (
	"math"
	"slices"
	"strings"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/gohvd/gohvd/internal/analysis"
)

// phase is what a rank spends time on.
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

// phaseNames are the names of the phases in the report.
var phaseNames = [numPhases]string{"waiting", "negotiation", "queue", "copies", "exchange", "reduce", "other"}

// exchanges are the suffixes of activities that move data; the prefix is the backend.
var exchanges = []string{"_ALLREDUCE", "_ALLGATHER", "_BCAST", "_BROADCAST", "_ALLTOALL", "_REDUCESCATTER",
	"_REDUCE", "_ADASUM"}

// phaseOf returns the phase of an activity.
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
	// outside is the report's name for time without an operation in flight.
	outside   = "outside"
	negotiate = "NEGOTIATE_"
	// Limits of what is kept while files are read. maxNames, maxTracks and maxOpen are for all ranks
	// together.
	maxNames  = 1 << 14 // tensor names; all further names are counted as one
	maxTracks = 1 << 18 // tracks with a name
	maxOpen   = 1 << 14 // operations that have begun and not ended
	maxParts  = 64      // parts of an operation
	maxTrack  = 16      // open events of a track
)

// nameID is the number of a tensor's name. noName stands for a missing name and for names above the limit.
type nameID uint32

const noName nameID = 0

// nameTable numbers the names of all ranks, and counts their tracks and open operations.
type nameTable struct {
	ids          map[string]nameID
	names        []string
	tracks, open int
}

func newNameTable() *nameTable {
	return &nameTable{ids: make(map[string]nameID), names: []string{""}}
}

// id returns the number of a name, which it assigns if it is new and below the limit.
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

// full reports whether the limit of names is reached.
func (t *nameTable) full() bool { return len(t.names) > maxNames }

// part is an interval of an operation's execution.
type part struct {
	phase      phase
	begin, end time.Duration
}

// arrival is when the request of a rank, given by its position in the set, arrived at rank 0.
type arrival struct {
	position int
	at       time.Duration
}

// instance is an operation on one tensor at one rank. Times are on rank 0's clock.
type instance struct {
	analysis.Record
	name        nameID
	fused       int64
	shape       string
	cachedKnown bool
	arrivals    []arrival
	parts       []part
}

// track is a tensor with an operation that has begun and not ended.
type track struct {
	instance
	// depth is the number of open events, of which opened has the first maxTrack.
	depth  int
	opened [maxTrack]openEvent
	cursor time.Duration // the end of the last part
}

// openEvent is an event that has begun: top says that it is the bar of the operation, neg that it is its
// negotiation.
type openEvent struct {
	phase    phase
	top, neg bool
}

// rankReader reads the instances in a rank's files, in the order in which they ended.
type rankReader struct {
	files *rankFiles
	names *nameTable

	shift  int64 // added to times of the current segment to get times of the first
	tracks map[int64]nameID
	open   map[int64]*track

	malformed, unfinished, tooMany int64
	// ranks limits the positions of arrivals.
	ranks int
}

func newRankReader(f *rankFiles, names *nameTable) *rankReader {
	ranks := maxRanks
	if size := f.segments[0].size; size > 0 {
		ranks = size
	}
	return &rankReader{files: f, names: names, ranks: ranks, tracks: make(map[int64]nameID),
		open: make(map[int64]*track)}
}

// instances passes the instances to yield until it returns false.
func (r *rankReader) instances(yield func(*instance) bool) error {
	for _, s := range r.files.segments {
		r.shift = s.monotonic - r.files.clock.base
		more := true
		malformed, err := s.events(func(e *event, _ jsontext.Value) bool {
			if t := r.apply(e); t != nil {
				more = yield(&t.instance)
			}
			return more
		})
		r.malformed += malformed
		// The next segment has tracks of its own.
		for _, t := range r.open {
			if t.Begun != 0 || t.depth > 0 {
				r.unfinished++
			}
		}
		r.names.open -= len(r.open)
		r.names.tracks -= len(r.tracks)
		clear(r.open)
		clear(r.tracks)
		if err != nil || !more {
			return err
		}
	}
	return nil
}

// reference returns a time of the current segment on rank 0's clock. It is never 0, which means that a time
// is not known.
func (r *rankReader) reference(at int64) time.Duration {
	if at = r.files.clock.reference(at + r.shift); at == 0 {
		at = 1
	}
	return time.Duration(at)
}

// trackOf returns the open track of the event, which it makes if the event is the first of an operation; nil
// if there are too many.
func (r *rankReader) trackOf(e *event) *track {
	t := r.open[e.PID]
	switch {
	case t != nil:
	case r.names.open >= maxOpen:
		r.tooMany++
	default:
		t = &track{instance: instance{name: r.tracks[e.PID]}}
		t.Name = r.names.names[t.name]
		r.names.open++
		r.open[e.PID] = t
	}
	return t
}

// closed removes a track from the open ones.
func (r *rankReader) closed(pid int64) {
	delete(r.open, pid)
	r.names.open--
}

// apply processes an event. It returns the track whose instance ends with the event, and removes it from the
// open ones; nil if none ends.
func (r *rankReader) apply(e *event) *track {
	t, now := r.open[e.PID], r.reference(e.at)
	switch e.Phase {
	case "M":
		if _, known := r.tracks[e.PID]; e.PID != 0 && e.Name == "process_name" &&
			(known || r.names.tracks < maxTracks) {
			if !known {
				r.names.tracks++
			}
			r.tracks[e.PID] = r.names.id(e.Args.Name)
		}
	case "B":
		if e.PID != 0 && e.timed {
			return r.push(e, t, now)
		}
	case "E":
		// Horovod's file has ends without beginnings, of barriers and joins.
		if t != nil && t.depth > 0 && e.timed {
			return r.pop(e, t, now)
		}
	case "X", "i", "I":
		position, is := e.position()
		if t != nil && is && position < r.ranks && e.timed && t.depth == 1 && t.opened[0].neg &&
			len(t.arrivals) < r.ranks {
			if !math.IsNaN(e.Args.At) {
				now = r.reference(nanos(e.Args.At))
			}
			t.arrivals = append(t.arrivals, arrival{position, now})
		}
	}
	return nil
}

// push begins an event.
func (r *rankReader) push(e *event, t *track, now time.Duration) (ended *track) {
	name, neg := strings.CutPrefix(e.Name, negotiate)
	if t != nil && t.depth == 0 && neg {
		// The operation before was negotiated and never executed, such as Horovod's barriers.
		r.closed(e.PID)
		if t.Granted != 0 {
			t.Ended = t.Granted
			ended = t
		}
	}
	if t = r.trackOf(e); t == nil {
		return ended
	}
	if t.depth++; t.depth > maxTrack {
		return ended
	}
	o := &t.opened[t.depth-1]
	*o = openEvent{}
	switch {
	case t.depth == 1 && neg:
		o.neg = true
		t.Kind, t.Set, t.Number, t.Submitted = kindName(name), uint32(e.Args.Set), uint64(e.Args.Op), now
		if !math.IsNaN(e.Args.Submitted) {
			t.Submitted = r.reference(nanos(e.Args.Submitted))
		}
	case t.depth == 1:
		o.top = true
		t.Kind, t.Begun, t.cursor = kindName(e.Name), now, now
		if t.Granted == 0 {
			t.Granted = now
		}
	case t.opened[0].top:
		if t.depth == 2 {
			t.addPart(other, now)
		}
		o.phase = phaseOf(e.Name)
	}
	return ended
}

// addPart assigns the time from the end of the last part until now to a phase.
func (t *track) addPart(p phase, now time.Duration) {
	if now > t.cursor && len(t.parts) < maxParts {
		t.parts = append(t.parts, part{p, t.cursor, now})
	}
	t.cursor = max(t.cursor, now)
}

// pop ends an event. It returns the track if its operation ends with it.
func (r *rankReader) pop(e *event, t *track, now time.Duration) *track {
	t.depth--
	if t.depth >= maxTrack {
		return nil
	}
	switch o, a := t.opened[t.depth], &e.Args; {
	case o.neg:
		t.Granted, t.cachedKnown = now, a.Cached != nil
		t.Cached = t.cachedKnown && *a.Cached
	case o.top:
		t.addPart(other, now)
		t.Ended, t.Bytes, t.fused = now, max(a.Bytes, 0), a.Fused
		t.Backend, t.shape, t.DType = clip(a.Backend), clip(a.Shape), clip(a.DType)
		if t.Kind == "ERROR" || a.Error != nil {
			t.Error = "failed"
		}
		r.closed(e.PID)
		return t
	case t.depth == 1:
		t.addPart(o.phase, now)
	}
	return nil
}

// kindName returns the kind of an operation by its name in the file: in lower case, except ERROR.
func kindName(name string) string {
	if name == "ERROR" {
		return name
	}
	return strings.ToLower(clip(name))
}
