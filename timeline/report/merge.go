package report

import (
	"bufio"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/gohvd/gohvd/internal/outfile"
)

// Merged describes the output of Merge.
type Merged struct {
	Ranks  int
	Events int64
	// LeftOut is the number of events that are in the files but not in the merged trace: those of tracks
	// without a name, and end events without a begin event.
	LeftOut int64
}

// record is an event of the merged trace. Times are in microseconds.
type record struct {
	Name     string   `json:"name,omitzero"`
	Category string   `json:"cat,omitzero"`
	Phase    string   `json:"ph"`
	PID      int      `json:"pid"`
	TID      int      `json:"tid"`
	Time     *float64 `json:"ts,omitzero"`
	Duration *float64 `json:"dur,omitzero"`
	Scope    string   `json:"s,omitzero"`
	Args     any      `json:"args,omitzero"`
}

// thread is a thread of the merged trace. It has the events of one tensor of a rank. last is the time of its
// last event, and depth is the number of its open events.
type thread struct {
	last  int64
	depth int
}

// mergedRank has the threads of one rank. Thread 0 has the events that do not belong to a tensor. ids has the
// numbers of the threads of tensors by name, and lanes those of the threads that show what the program did.
type mergedRank struct {
	files   *rankFiles
	ids     map[string]int
	lanes   map[int64]int
	threads []thread
}

// merger writes a merged trace.
type merger struct {
	w *bufio.Writer
	// separator is the text to write before the next record.
	separator string
	shift     int64 // added to all times, in ns
	sum       Merged
	err       error // the error of the last write; a bufio.Writer returns an error again
}

// Merge writes the events of all ranks to a file as one Chrome trace. If the name of the file ends in .gz,
// the file is compressed. Rank r becomes process r, and each of its tensors becomes a thread. All times are
// on rank 0's clock. If a rank started before rank 0, a constant is added to all times, so that none is
// negative. The name of a thread precedes its events, the events are in order of time, except for what the
// program did, and every begin event has an end event. A file gets its name only when it is complete. A
// device is written as it is; what is neither a file nor a device is an error. If ctx ends, Merge leaves no
// file and returns the cause.
func (j *Job) Merge(ctx context.Context, path string) (sum Merged, err error) {
	if j.Reads(path) {
		return sum, fmt.Errorf("the output %s is one of the files to merge: choose another name", path)
	}
	m := &merger{separator: "["}
	clockError := int64(0)
	for _, r := range j.ranks {
		m.shift, clockError = max(m.shift, -r.clock.reference(0)), max(clockError, r.clock.err)
	}
	f, name, err := openMerged(path)
	if err != nil {
		return sum, err
	}
	// Some file systems report only at the end that there was no room.
	err = errors.Join(j.merge(ctx, m, f, path, clockError), f.Close())
	if err == nil && name != "" {
		err = os.Rename(f.Name(), name)
	}
	if err != nil && name != "" {
		err = errors.Join(err, os.Remove(f.Name()))
	}
	return m.sum, err
}

// merge writes the merged trace to f, compressed if path ends in .gz.
func (j *Job) merge(ctx context.Context, m *merger, f *os.File, path string, clockError int64) error {
	var to io.WriteCloser = f
	if strings.HasSuffix(path, ".gz") {
		to = gzip.NewWriter(f)
	}
	m.w = bufio.NewWriterSize(to, scanBuffer)
	m.meta(0, 0, "hvd_merged", map[string]any{"shift_us": micros(m.shift), "error_us": micros(clockError),
		"version": 1})
	for _, r := range j.ranks {
		if err := m.rank(ctx, r); err != nil {
			return err
		}
	}
	_, _ = m.w.WriteString("\n]\n") // the error is ignored here, because Flush returns it again
	if err := m.w.Flush(); err != nil || to == f {
		return err
	}
	return to.Close()
}

// openMerged opens the output of Merge. name is the name that the file gets when it is complete, or empty if
// it has its name already, because it is a device.
func openMerged(path string) (f *os.File, name string, err error) {
	if name, err = outfile.Resolve(path); err != nil {
		return nil, "", err
	}
	if info, err := os.Lstat(name); outfile.Device(name) || err == nil && !info.Mode().IsRegular() {
		f, err := outfile.Create(name, 0o666)
		return f, "", err
	}
	f, err = os.CreateTemp(filepath.Dir(name), ".hvdrun-timeline-")
	return f, name, err
}

// Reads reports whether a path names one of the files of the job, which an output must not overwrite.
func (j *Job) Reads(path string) bool {
	return slices.ContainsFunc(j.ranks, func(r *rankFiles) bool {
		return slices.ContainsFunc(r.segments, func(s *source) bool { return same(s.path, path) })
	})
}

// same reports whether the paths a and b name the same file.
func same(a, b string) bool {
	i, errA := os.Stat(a)
	k, errB := os.Stat(b)
	return errA == nil && errB == nil && os.SameFile(i, k)
}

// rank writes all events of one rank.
func (m *merger) rank(ctx context.Context, f *rankFiles) error {
	m.sum.Ranks++
	name := fmt.Sprintf("rank %d", f.rank)
	if h := f.host(); h != "" {
		name += " on host " + h
	}
	m.meta(f.rank, 0, "process_name", map[string]any{"name": name})
	m.meta(f.rank, 0, "process_sort_index", map[string]any{"sort_index": f.rank})
	r := &mergedRank{files: f, ids: make(map[string]int), lanes: make(map[int64]int)}
	m.thread(r, "rank")
	for _, s := range f.segments {
		pids := make(map[int64]int) // declared here, because pids are valid only within a segment
		err := s.events(func(e *event, text jsontext.Value, malformed error) error {
			if malformed != nil {
				return malformed
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			m.event(r, s, pids, e, text)
			return m.err
		})
		if err != nil {
			return err
		}
		m.closeAll(r)
	}
	return nil
}

// thread adds to a rank a thread for the tensor with the given name.
func (m *merger) thread(r *mergedRank, name string) {
	id := len(r.threads)
	r.threads = append(r.threads, thread{})
	m.meta(r.files.rank, id, "thread_name", map[string]any{"name": name})
	m.meta(r.files.rank, id, "thread_sort_index", map[string]any{"sort_index": id})
}

// meta writes a metadata event.
func (m *merger) meta(pid, tid int, name string, args map[string]any) {
	m.put(&record{Name: name, Phase: "M", PID: pid, TID: tid, Args: args})
}

// put writes a record.
func (m *merger) put(r *record) {
	_, _ = m.w.WriteString(m.separator + "\n")
	m.err = json.MarshalWrite(m.w, r, lenient, json.Deterministic(true))
	m.separator = ","
	m.sum.Events++
}

// event writes one event of a rank to the thread of the event's tensor.
func (m *merger) event(r *mergedRank, s *source, pids map[int64]int, e *event, text jsontext.Value) {
	if e.Phase == "M" {
		if _, known := r.lanes[e.TID]; e.PID == 0 && e.Name == "thread_name" && !known {
			r.lanes[e.TID] = len(r.threads)
			m.thread(r, clip(e.Args.Name))
		}
		if e.PID == 0 || e.Name != "process_name" {
			return
		}
		name := clip(e.Args.Name)
		id, known := r.ids[name]
		if !known {
			id = len(r.threads)
			r.ids[name] = id
			m.thread(r, name)
		}
		pids[e.PID] = id
		return
	}
	id, known := pids[e.PID]
	span := e.PID == 0 && e.Phase == "X"
	if span {
		id, known = r.lanes[e.TID]
	}
	out := &record{Name: e.Name, Category: e.Category, Phase: e.Phase, PID: r.files.rank, TID: id}
	if !known && (e.PID != 0 || span) {
		m.sum.LeftOut++
		return
	}
	t := &r.threads[id]
	switch {
	case e.Phase == "i":
		out.Phase, out.Scope = "i", "p"
	case span:
		out.Duration = new(float64)
	case e.PID == 0:
		m.sum.LeftOut++
		return
	case e.Phase == "B":
		t.depth++
	case e.Phase == "E" && t.depth > 0:
		t.depth--
	case e.Phase == "X":
		out.Duration = new(float64)
	default:
		m.sum.LeftOut++
		return
	}
	now := func(at int64) int64 {
		return r.files.clock.reference(at+s.monotonic-r.files.clock.base) + m.shift
	}
	if args := argsOf(text); args != nil {
		for _, name := range []string{"submitted", "sent", "at", "granted", "begun"} {
			if us, err := strconv.ParseFloat(string(args[name]), 64); err == nil &&
				math.Abs(us) <= maxMicros {
				args[name] = strconv.AppendFloat(nil, micros(now(nanos(us))), 'f', -1, 64)
			}
		}
		out.Args = args
	}
	if span {
		// A span is written when it has ended, after those inside of it, so the times of its thread are not
		// in order.
		begin, end := now(int64(e.Time)), now(int64(e.Time+max(e.Duration, 0)))
		begun := micros(begin)
		out.Time, *out.Duration = &begun, micros(max(end-begin, 0))
		m.put(out)
		return
	}
	m.at(out, t, now(int64(e.Time)))
}

// at writes a record on thread t. The time of the record is the time in at or the latest time on the thread,
// whichever is later.
func (m *merger) at(r *record, t *thread, at int64) {
	t.last = max(t.last, at)
	us := micros(t.last)
	r.Time = &us
	m.put(r)
}

// closeAll writes an end event for each open event of a rank.
func (m *merger) closeAll(r *mergedRank) {
	for id := range r.threads {
		for t := &r.threads[id]; t.depth > 0; t.depth-- {
			m.at(&record{Phase: "E", PID: r.files.rank, TID: id}, t, t.last)
		}
	}
}
