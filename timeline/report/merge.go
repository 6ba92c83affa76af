package report

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// Merged says what a merged trace has.
type Merged struct {
	Ranks  int
	Events int64
	// LeftOut are events that had no beginning, or belong to more tensors than are kept.
	LeftOut int64
}

// mergedTrack is a tensor's in the merged trace.
type mergedTrack struct {
	last  int64
	depth int
}

// mergedRank has the tracks of a rank. Track 0 is for what belongs to no tensor.
type mergedRank struct {
	files  *rankFiles
	ids    map[string]int
	names  []string
	tracks []mergedTrack
}

// merger writes a merged trace.
type merger struct {
	w     *bufio.Writer
	line  []byte
	first bool
	shift int64
	sum   Merged
	err   error // of the last write; bufio keeps it
}

// Merge writes one Chrome trace of all ranks to a file, packed if its name ends in .gz: rank r is process r, each of its tensors a thread,
// and all times are on rank 0's clock, or later by a constant if a rank was there before rank 0. Each thread's events are in order of time,
// and every beginning has its end. The file is there when it is complete.
func (j *Job) Merge(path string) (sum Merged, err error) {
	for _, r := range j.ranks {
		for _, s := range r.segments {
			if same(s.path, path) {
				return sum, fmt.Errorf("%s is one of the files to be merged, want another name", path)
			}
		}
	}
	ranks, earliest, err := j.tracks()
	if err != nil {
		return sum, err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".hvdrun-timeline-")
	if err != nil {
		return sum, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}()
	var packed *gzip.Writer
	var to io.Writer = f
	if strings.HasSuffix(path, ".gz") {
		packed = gzip.NewWriter(f)
		to = packed
	}
	m := &merger{w: bufio.NewWriterSize(to, scanBuffer), first: true, shift: max(0, -earliest)}
	m.sum.Ranks = len(ranks)
	if err := m.write(ranks); err != nil {
		return sum, err
	}
	if err := m.w.Flush(); err != nil {
		return sum, err
	}
	if packed != nil {
		if err := packed.Close(); err != nil {
			return sum, err
		}
	}
	if err := f.Chmod(0o644); err != nil {
		return sum, err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return sum, err
	}
	return m.sum, f.Close()
}

func same(a, b string) bool {
	i, errA := os.Stat(a)
	k, errB := os.Stat(b)
	return errA == nil && errB == nil && os.SameFile(i, k)
}

// tracks reads what tensors each rank has, and the earliest time on rank 0's clock; for metadata comes first.
func (j *Job) tracks() (ranks []*mergedRank, earliest int64, err error) {
	total := 0
	for _, f := range j.ranks {
		r := &mergedRank{files: f, ids: make(map[string]int), names: []string{"rank"}}
		for _, s := range f.segments {
			_, err := s.events(func(e *event, _ jsontext.Value) bool {
				switch {
				case e.Phase == "M" && e.PID != 0 && e.Name == "process_name":
					name := clip(e.Args.Name)
					if _, known := r.ids[name]; !known && total < maxTracks {
						r.ids[name] = len(r.names)
						r.names = append(r.names, name)
						total++
					}
				case e.timed:
					earliest = min(earliest, f.clock.reference(e.at+s.monotonic-f.clock.base))
				}
				return true
			})
			if err != nil {
				return nil, 0, err
			}
		}
		r.tracks = make([]mergedTrack, len(r.names))
		ranks = append(ranks, r)
	}
	return ranks, earliest, nil
}

func (m *merger) write(ranks []*mergedRank) error {
	m.line = append(m.line[:0], '[')
	if _, err := m.w.Write(m.line); err != nil {
		return err
	}
	clockError := int64(0)
	for _, r := range ranks {
		clockError = max(clockError, r.files.clock.err)
	}
	m.meta(0, 0, "hvd_merged", map[string]any{"shift_us": micros(m.shift), "error_us": micros(clockError), "version": 1})
	for _, r := range ranks {
		name := fmt.Sprintf("rank %d", r.files.rank)
		if h := r.files.host(); h != "" {
			name += " on host " + h
		}
		m.meta(r.files.rank, 0, "process_name", map[string]any{"name": name})
		m.meta(r.files.rank, 0, "process_sort_index", map[string]any{"sort_index": r.files.rank})
		for id, name := range r.names {
			m.meta(r.files.rank, id, "thread_name", map[string]any{"name": name})
			m.meta(r.files.rank, id, "thread_sort_index", map[string]any{"sort_index": id})
		}
	}
	for _, r := range ranks {
		for _, s := range r.files.segments {
			pids, shift := make(map[int64]int), s.monotonic-r.files.clock.base // each segment has tracks of its own
			_, err := s.events(func(e *event, text jsontext.Value) bool {
				m.event(r, pids, e, text, shift)
				return m.err == nil
			})
			if err = errors.Join(err, m.err); err != nil {
				return err
			}
			m.closeAll(r)
		}
	}
	_, err := m.w.WriteString("\n]\n")
	return err
}

// begin starts a record.
func (m *merger) begin(name, phase string, pid, tid int) {
	m.line = m.line[:0]
	if !m.first {
		m.line = append(m.line, ',')
	}
	m.first = false
	m.line = append(m.line, "\n{"...)
	if name != "" {
		quoted, _ := json.Marshal(name) // a string always can be
		m.line = append(m.line, `"name":`...)
		m.line = append(append(m.line, quoted...), ',')
	}
	m.line = fmt.Appendf(m.line, `"ph":"%s","pid":%d,"tid":%d`, phase, pid, tid)
}

// end writes it.
func (m *merger) end() {
	m.line = append(m.line, '}')
	_, m.err = m.w.Write(m.line)
	m.sum.Events++
}

func (m *merger) meta(pid, tid int, name string, args map[string]any) {
	m.begin(name, "M", pid, tid)
	text, _ := json.Marshal(args) // numbers and strings always can be
	m.line = append(append(m.line, `,"args":`...), text...)
	m.end()
}

func (m *merger) time(t *mergedTrack, at int64) {
	t.last = max(t.last, at)
	m.line = fmt.Appendf(m.line, `,"ts":%d.%03d`, t.last/nanosPerMicro, t.last%nanosPerMicro)
}

// event writes one of a rank. shift is what is to be added to its times to make them those of the rank's first file.
func (m *merger) event(r *mergedRank, pids map[int64]int, e *event, text jsontext.Value, shift int64) {
	if e.Phase == "M" {
		if id, known := r.ids[clip(e.Args.Name)]; known && e.PID != 0 && e.Name == "process_name" && len(pids) < maxTracks {
			pids[e.PID] = id
		}
		return
	}
	phase := e.Phase
	if phase == "I" { // the old way to write it
		phase = "i"
	}
	id, known := pids[e.PID]
	if !e.timed || !known && e.PID != 0 || e.PID == 0 && phase != "i" {
		m.sum.LeftOut++
		return
	}
	t := &r.tracks[id]
	switch phase {
	case "B":
		t.depth++
	case "E":
		if t.depth == 0 {
			m.sum.LeftOut++ // Horovod's, of a barrier or a join
			return
		}
		t.depth--
	case "X", "i":
	default:
		m.sum.LeftOut++
		return
	}
	m.begin(e.Name, phase, r.files.rank, id)
	now := func(at int64) int64 { return r.files.clock.reference(at) + m.shift }
	m.time(t, now(e.at+shift))
	switch phase {
	case "X":
		m.line = append(m.line, `,"dur":0`...)
	case "i":
		m.line = append(m.line, `,"s":"p"`...)
	}
	var raw struct {
		Args jsontext.Value `json:"args"`
	}
	if err := jsonv2.Unmarshal(text, &raw, lenient); err == nil && raw.Args.Kind() == '{' {
		m.line = append(m.line, `,"args":`...)
		m.args(raw.Args, func(at int64) int64 { return now(at + shift) })
	}
	m.end()
}

// args writes those of an event, with their times as now has them; it is given those of the file.
func (m *merger) args(raw jsontext.Value, now func(at int64) int64) {
	// It was read before, so that there are no errors.
	d := jsontext.NewDecoder(bytes.NewReader(raw), lenient)
	_, _ = d.ReadToken()
	m.line = append(m.line, '{')
	for sep := ""; d.PeekKind() == '"'; sep = "," {
		key, _ := d.ReadValue()
		name := string(key)
		m.line = append(append(append(m.line, sep...), name...), ':')
		value, _ := d.ReadValue()
		switch name {
		case `"submitted"`, `"sent"`, `"at"`:
			if us, err := strconv.ParseFloat(string(value), 64); err == nil && math.Abs(us) <= maxMicros {
				m.line = strconv.AppendFloat(m.line, float64(now(nanos(us)))/nanosPerMicro, 'f', -1, 64)
				continue
			}
		}
		m.line = append(m.line, value...)
	}
	m.line = append(m.line, '}')
}

// closeAll ends what a rank has begun and not ended.
func (m *merger) closeAll(r *mergedRank) {
	for id := range r.tracks {
		for t := &r.tracks[id]; t.depth > 0; t.depth-- {
			m.begin("", "E", r.files.rank, id)
			m.time(t, t.last)
			m.end()
		}
	}
}
