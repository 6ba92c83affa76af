package report

import (
	"math"
	"slices"
	"strings"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/gohvd/gohvd/internal/analysis"
)

// phase is a kind of work or of waiting.
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

// phaseNames has the names of the phases as the report prints them.
var phaseNames = [numPhases]string{"waiting", "negotiation", "queue", "copies", "exchange", "reduce", "other"}

// exchanges has the suffixes of the names of activities that move data between ranks. The prefix of such a
// name is the name of the backend.
var exchanges = []string{"_ALLREDUCE", "_ALLGATHER", "_BCAST", "_BROADCAST", "_ALLTOALL", "_REDUCESCATTER",
	"_REDUCE", "_GATHER", "_SCATTER", "_ADASUM", "_SEND", "_RECV"}

// phaseOf returns the phase to which an activity belongs.
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
	// outside is the key in the report for the time without an operation in flight.
	outside   = "outside"
	negotiate = "NEGOTIATE_"
	// The following constants limit what is kept in memory while files are read. maxNames, maxTracks and
	// maxOpen apply to all ranks together.
	maxNames  = 1 << 14 // tensor names; further names are counted together as one name
	maxTracks = 1 << 18 // tracks whose names are known
	maxOpen   = 1 << 14 // operations that have begun and not ended
	maxParts  = 64      // parts of one operation
	maxTrack  = 16      // open events of one track
)

// nameID is a number for a tensor name. noName is the number of a missing name and of all names beyond the
// limit.
type nameID uint32

const noName nameID = 0

// nameTable assigns numbers to the tensor names of all ranks. It also counts the tracks and the open
// operations of all ranks, to apply their limits.
type nameTable struct {
	ids          map[string]nameID
	names        []string
	tracks, open int
}

func newNameTable() *nameTable {
	return &nameTable{ids: make(map[string]nameID), names: []string{""}}
}

// id returns the number of a name. If the name is new and the limit is not reached, id assigns a number to
// it.
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

// full reports whether the number of names has reached its limit.
func (t *nameTable) full() bool { return len(t.names) > maxNames }

// part is a period that an operation spends in one phase while it is executed.
type part struct {
	phase      phase
	begin, end time.Duration
}

// arrival is the time at which the request of a rank arrived at rank 0. The rank is identified by its
// position in the process set.
type arrival struct {
	position int
	at       time.Duration
}

// instance is one operation on one tensor at one rank. Times are on rank 0's clock.
type instance struct {
	analysis.Record
	name        nameID
	fused       int64
	shape       string
	cachedKnown bool
	arrivals    []arrival
	parts       []part
}

// track is the state of a track in the file while an operation on it has begun and not ended.
type track struct {
	instance
	// depth is the number of open events. opened has the first of them, at most maxTrack.
	depth  int
	opened [maxTrack]openEvent
	cursor time.Duration // the time at which the last part ended
}

// openEvent is a begin event whose end event has not been read. top is set if the event begins the bar of the
// operation, and neg if it begins the bar of the negotiation.
type openEvent struct {
	phase    phase
	top, neg bool
}

// rankReader reads the instances from a rank's files, in the order in which they ended.
type rankReader struct {
	files *rankFiles
	names *nameTable

	shift  int64 // added to times of the current segment to get times of the first segment
	tracks map[int64]nameID
	open   map[int64]*track

	malformed, unfinished, tooMany int64
	// ranks is the number of ranks in the job. The positions of arrivals must be less than ranks.
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

// instances passes the instances of all segments to yield until yield returns false.
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
		// A track does not continue in the next segment.
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

// reference converts a time of the current segment to rank 0's clock. It never returns 0, because 0 means
// that a time is not known.
func (r *rankReader) reference(at int64) time.Duration {
	if at = r.files.clock.reference(at + r.shift); at == 0 {
		at = 1
	}
	return time.Duration(at)
}

// trackOf returns the open track of an event. If the event is the first of an operation, trackOf opens a
// track. It returns nil if the track is not open and too many tracks are open.
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

// closed removes a track from the open tracks.
func (r *rankReader) closed(pid int64) {
	delete(r.open, pid)
	r.names.open--
}

// apply processes an event. If the event ends an instance, apply closes the track and returns it. Otherwise
// it returns nil.
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
		if t != nil && t.depth > 0 && e.timed {
			return r.pop(e, t, now)
		}
	case "X", "i":
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

// push processes a begin event. If the event shows that the previous instance on its track ended without
// having been executed, push returns the track of this instance.
func (r *rankReader) push(e *event, t *track, now time.Duration) (ended *track) {
	name, neg := strings.CutPrefix(e.Name, negotiate)
	if t != nil && t.depth == 0 && neg {
		// The previous operation was negotiated but not executed.
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

// addPart adds a part in phase p that lasts from the end of the previous part until now.
func (t *track) addPart(p phase, now time.Duration) {
	if now > t.cursor && len(t.parts) < maxParts {
		t.parts = append(t.parts, part{p, t.cursor, now})
	}
	t.cursor = max(t.cursor, now)
}

// pop processes an end event. If the event ends the operation, pop returns the track.
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

// kindName converts the name of an operation in the file to the name of its kind. It returns the name in
// lower case, but leaves ERROR as it is.
func kindName(name string) string {
	if name == "ERROR" {
		return name
	}
	return strings.ToLower(clip(name))
}
