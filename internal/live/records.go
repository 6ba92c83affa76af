package live

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// maxRecordBytes limits what a Recorder keeps, by Entry.Size, and so what the encoding of an answer costs the
// rank. The constants below say what a part of an entry takes in memory, roughly.
const (
	maxRecordBytes                         = 1 << 20
	entryBytes, recordBytes, activityBytes = 64, 400, 96
	arrivalBytes                           = 20
	maxOffsets                             = 64
)

// Recorder is a timeline in memory of limited size: what a rank has done since a reader began to ask for it.
// Its methods are those of watch.Timeline.
type Recorder struct {
	mu      sync.Mutex
	entries []Entry
	bytes   int
	next    uint64 // the number of the next entry
	offsets []trace.Offset
}

// NewRecorder returns an empty Recorder. Its entries have greater numbers than those of earlier ones of the
// process, so that a reader notices that entries are missing in between.
func NewRecorder() *Recorder { return &Recorder{next: uint64(time.Now().UnixNano())} }

// Entry is what a rank has recorded at one moment: the end of an operation, the end of a span, or the
// beginning of a step.
type Entry struct {
	// Operation has no Arrivals. Entry.Arrivals has, for each member of the process set, when the last of its
	// requests for a tensor of the operation arrived (analysis.LastArrivals).
	Operation *trace.Operation
	Arrivals  []time.Duration
	Span      *trace.Span
	Step      *Mark
}

// Mark says that the training step with a number begins.
type Mark struct {
	At     time.Duration
	Number uint64
}

// Size returns about how many bytes an entry takes.
func (e *Entry) Size() int {
	n := entryBytes + arrivalBytes*len(e.Arrivals)
	if o := e.Operation; o != nil {
		n += recordBytes*len(o.Records) + activityBytes*len(o.Activities)
		for i := range o.Records {
			n += len(o.Records[i].Name) + len(o.Records[i].Error)
		}
	}
	if e.Span != nil {
		n += len(e.Span.Name)
	}
	return n
}

// add adds an entry. If there is no room, it drops the oldest ones.
func (r *Recorder) add(e Entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.entries, r.next, r.bytes = append(r.entries, e), r.next+1, r.bytes+e.Size()
	for r.bytes > maxRecordBytes && len(r.entries) > 1 {
		r.bytes -= r.entries[0].Size()
		r.entries = r.entries[1:]
	}
}

// Record records an operation that has ended.
func (r *Recorder) Record(op *trace.Operation) {
	e := Entry{Operation: &trace.Operation{Records: slices.Clone(op.Records),
		Activities: slices.Clone(op.Activities)}}
	if !slices.ContainsFunc(op.Records, func(n trace.Record) bool { return n.Partial }) {
		e.Arrivals = analysis.LastArrivals(op)
	}
	r.add(e)
}

// Span records what the program did.
func (r *Recorder) Span(s trace.Span) { r.add(Entry{Span: &s}) }

// Step records that the step with the given number begins.
func (r *Recorder) Step(at time.Duration, number uint64) { r.add(Entry{Step: &Mark{at, number}}) }

// Offset records a measurement of the clock.
func (r *Recorder) Offset(o trace.Offset) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.offsets = append(r.offsets, o)
	r.offsets = r.offsets[max(len(r.offsets)-maxOffsets, 0):]
}

// Cycle does nothing.
func (r *Recorder) Cycle(time.Duration) {}

// Tuned does nothing.
func (r *Recorder) Tuned(time.Duration, *message.Tuning) {}

// Since returns the entries since the one with the number from, as far as there is room for them.
func (r *Recorder) Since(from uint64) *Records {
	r.mu.Lock()
	defer r.mu.Unlock()
	first := r.next - uint64(len(r.entries))
	at := min(max(from, first), r.next)
	return &Records{First: at, Entries: slices.Clone(r.entries[at-first:]), Offsets: slices.Clone(r.offsets)}
}

// Records is a part of what a rank has done.
type Records struct {
	Rank  int
	Size  int
	Host  string
	Epoch uint64
	Clock trace.Clock
	// Offsets are measurements of the rank's clock, and Sets the process sets.
	Offsets []trace.Offset
	Sets    []Set
	// First is the number of the first of Entries. Those before it were asked for earlier, or had no room.
	First   uint64
	Entries []Entry
}

// Set is a process set and its members.
type Set struct {
	ID    topo.ProcessSetID
	Ranks []topo.Rank
}

// Next returns the number of the entry after the last one.
func (r *Records) Next() uint64 { return r.First + uint64(len(r.Entries)) }

// Encode returns the records as a rank sends them to the launcher.
func (r *Records) Encode() []byte {
	c := newEncoder()
	c.records(r)
	return c.b
}

// EncodeAnswers encodes the results of Encode of ranks, by their numbers.
func EncodeAnswers(answers map[int][]byte) (b []byte) {
	for _, rank := range slices.Sorted(maps.Keys(answers)) {
		b = binary.AppendUvarint(b, uint64(rank))
		b = binary.AppendUvarint(b, uint64(len(answers[rank])))
		b = append(b, answers[rank]...)
	}
	return b
}

// DecodeRecords decodes the result of EncodeAnswers. Each operation has a record, and no arrivals of its own.
// If the answers of some ranks cannot be decoded, it returns those of the others, and an error that says why.
func DecodeRecords(b []byte) (map[int]*Records, error) {
	all := make(map[int]*Records)
	var bad error
	for len(b) > 0 {
		rank, n := binary.Uvarint(b)
		size, m := binary.Uvarint(b[max(n, 0):])
		if n <= 0 || m <= 0 || size > uint64(len(b)-n-m) {
			return all, errors.Join(bad,
				fmt.Errorf("malformed operations of ranks: got %d bytes that are no answer of a rank", len(b)))
		}
		end := n + m + int(size)
		r, c := new(Records), newDecoder(b[n+m:end])
		c.records(r)
		err := c.end()
		if err == nil && (r.Rank < 0 || uint64(r.Rank) != rank || all[r.Rank] != nil) {
			err = fmt.Errorf("they are of rank %d, or there twice", r.Rank)
		}
		if err != nil {
			bad = errors.Join(bad, fmt.Errorf("malformed operations of rank %d: %w", rank, err))
		} else {
			all[r.Rank] = r
		}
		b = b[end:]
	}
	return all, bad
}
