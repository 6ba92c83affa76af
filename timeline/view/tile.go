package view

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/gohvd/gohvd/timeline/report"
)

const (
	// tileBuckets is the number of columns of a tile, and tileRows the largest number of rows.
	tileBuckets = 1024
	tileRows    = 256
	// maxSegments is the largest number of segments that are drawn one by one in a tile. If there are more,
	// the tile has buckets.
	maxSegments = 360
	// maxPeriods limits the number of hatched periods of a tile. The longest are kept.
	maxPeriods = 60
	maxLevel   = 40
)

// A Request names a tile. Rows is "ranks", "rank:R" for the program and the tensors of a rank, or "tensor:N"
// for one tensor on all ranks, where N is the number of its name. Align is empty, "step:N" or "op:R.I", for
// operation I of rank R. On each level there are 2^Level tiles, of which Index is one. Group counts the tiles
// from top to bottom.
type Request struct {
	Rows, Align         string
	Level, Index, Group int
}

// row is a row of a picture: the operations of a lane, or only those of one tensor.
type row struct {
	rank   int
	tensor int32 // allTensors, or program for what the program did
}

const allTensors, program = -1, -2

// rows returns the rows for a Request.Rows.
func (v *Run) rows(text string) ([]row, error) {
	kind, number, _ := strings.Cut(text, ":")
	n, err := strconv.Atoi(number)
	var all []row
	switch {
	case text == "ranks":
		for _, rank := range v.order {
			all = append(all, row{rank, allTensors})
		}
	case kind == "rank" && err == nil && n >= 0 && n < len(v.lanes):
		if len(v.lanes[n].spans) > 0 {
			all = append(all, row{n, program})
		}
		for _, t := range v.lanes[n].tensors {
			all = append(all, row{n, t})
		}
	case kind == "tensor" && err == nil && n >= 0 && n < len(v.names):
		for _, rank := range v.order {
			all = append(all, row{rank, int32(n)})
		}
	default:
		return nil, fmt.Errorf("got the rows %.64q, want ranks, rank:R or tensor:N", text)
	}
	return all, nil
}

// Window is the time that tiles cover, in microseconds. Shift is subtracted from the times of each rank, by
// which a step or an operation begins at the same place in all rows.
type Window struct {
	FromUS float64   `json:"from_us"`
	ToUS   float64   `json:"to_us"`
	Shift  []float64 `json:"shift_us"`
}

// window returns the window for a Request.Align, with times in ns.
func (v *Run) window(align string) (from, to time.Duration, shift []time.Duration, err error) {
	shift = make([]time.Duration, len(v.lanes))
	to = v.End - v.Begin
	if align == "" {
		return 0, max(to, 1), shift, nil
	}
	anchors, err := v.anchors(align)
	if err != nil {
		return 0, 0, nil, err
	}
	first, low, high := time.Duration(math.MinInt64), time.Duration(0), time.Duration(0)
	for rank, at := range anchors {
		if at == 0 {
			continue
		}
		if first == math.MinInt64 {
			first = at
		}
		shift[rank] = at - first
		low, high = min(low, shift[rank]), max(high, shift[rank])
	}
	return -high, max(to-low, 1), shift, nil
}

// anchors returns for each rank the time that is to be at the same place in all rows, or 0. For an operation
// this is its grant. For a step it is the end of the last operation before the step, so that the picture
// shows how long each rank took from there to its first submission, even if its clock is not known.
func (v *Run) anchors(align string) ([]time.Duration, error) {
	all := make([]time.Duration, len(v.lanes))
	kind, number, _ := strings.Cut(align, ":")
	n, err := strconv.Atoi(number)
	if kind == "step" && err == nil && n >= 1 && n <= len(v.Steps) {
		// The steps are those of the first rank that has a file.
		rank := slices.IndexFunc(v.Ranks, func(r report.RankInfo) bool { return r.HasFile })
		last, ops := -1, v.lanes[rank].ops
		for i := range ops {
			before := ops[i].number > 0 && ops[i].ended <= v.Steps[n-1]
			if before && (last < 0 || ops[i].ended > ops[last].ended) {
				last = i
			}
		}
		if last < 0 {
			return all, nil
		}
		v.same(rank, last, func(other, i int) { all[other] = v.lanes[other].ops[i].ended })
		return all, nil
	}
	r, i, _ := strings.Cut(number, ".")
	rank, errRank := strconv.Atoi(r)
	index, errIndex := strconv.Atoi(i)
	if kind != "op" || errRank != nil || errIndex != nil || rank < 0 || rank >= len(v.lanes) || index < 0 ||
		index >= len(v.lanes[rank].ops) {
		return nil, fmt.Errorf("got the alignment %.64q, want step:N, from 1 to %d, or op:RANK.INDEX", align,
			len(v.Steps))
	}
	v.same(rank, index, func(other, i int) { all[other] = v.lanes[other].ops[i].granted })
	return all, nil
}

// Window returns the window for a Request.Align.
func (v *Run) Window(align string) (*Window, error) {
	from, to, shift, err := v.window(align)
	if err != nil {
		return nil, err
	}
	w := &Window{FromUS: micros(from), ToUS: micros(to)}
	for _, s := range shift {
		w.Shift = append(w.Shift, micros(s))
	}
	return w, nil
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// drawn is a segment of a tile, in its row. op is the index of the operation in its lane.
type drawn struct {
	segment
	row, op, name int32
}

// Tile returns a tile in binary form, which page/data.js decodes. All numbers are little-endian:
//
//	uint32  1 if the tile has segments, 0 if it has buckets
//	uint32  the number of rows
//	uint32  the number of segments
//	uint32  the number of periods
//	float64 for each period: its begin in us; then for each its end
//	float64 for each segment: its begin in us; then for each its end
//	uint32  for each period: its rank; for each segment: its operation; for each segment: its name
//	uint16  for each segment: its row within the tile
//	uint8   for each segment: its phase; or for each row, its buckets before the execution, and those in it
//
// The lower four bits of a bucket are the phase in which the row was longest, and the upper four bits are the
// part of the bucket in which something happened, from 0 to 15.
func (v *Run) Tile(q Request) ([]byte, error) {
	rows, err := v.rows(q.Rows)
	if err != nil {
		return nil, err
	}
	from, to, shift, err := v.window(q.Align)
	if err != nil {
		return nil, err
	}
	if q.Level < 0 || q.Level > maxLevel || q.Index < 0 || q.Index >= 1<<q.Level || q.Group < 0 ||
		q.Group > len(rows)/tileRows {
		return nil, fmt.Errorf("got tile %d of level %d in group %d, want one of 2^level, and a level of at most %d",
			q.Index, q.Level, q.Group, maxLevel)
	}
	first := q.Group * tileRows
	rows = rows[first:min(first+tileRows, len(rows))]
	width := float64(to-from) / float64(uint64(1)<<q.Level)
	t := tile{Run: v, rows: rows, shift: shift, width: width,
		from: from + time.Duration(float64(q.Index)*width),
		to:   from + time.Duration(float64(q.Index+1)*width)}
	if !strings.HasPrefix(q.Rows, "rank:") {
		t.findPeriods()
	}
	if all := t.segments(); len(all) <= maxSegments {
		return t.encode(all, nil), nil
	}
	return t.encode(nil, t.buckets()), nil
}

// tile is a tile that is being made.
type tile struct {
	*Run
	rows     []row
	shift    []time.Duration
	from, to time.Duration
	width    float64 // in ns
	periods  []report.Period
	late     []report.Period // those of all lengths
}

// findPeriods finds the periods in which one rank held up all others.
func (t *tile) findPeriods() {
	for _, p := range t.Periods {
		move := t.Begin + t.shift[p.Rank]
		p.From, p.To = p.From-move, p.To-move
		if p.To <= t.from || p.From >= t.to {
			continue
		}
		t.late = append(t.late, p)
	}
	t.periods = slices.Clone(t.late)
	slices.SortFunc(t.periods, func(a, b report.Period) int { return cmp.Compare(b.To-b.From, a.To-a.From) })
	t.periods = t.periods[:min(len(t.periods), maxPeriods)]
}

// each passes the segments of a row that are in the tile to yield, until yield returns false.
func (t *tile) each(i int, yield func(drawn) bool) bool {
	r := t.rows[i]
	l := t.lanes[r.rank]
	move := t.Begin + t.shift[r.rank]
	more := true
	if r.tensor == program {
		k := sort.Search(len(l.spanEnds), func(i int) bool { return l.spanEnds[i] > t.from+move })
		for ; more && k < len(l.spans) && l.spans[k].begun < t.to+move; k++ {
			if p := &l.spans[k]; p.end-move > t.from {
				more = yield(drawn{segment{p.begun - move, p.end - move, p.phase}, int32(i), 0, p.name})
			}
		}
		return more
	}
	first, end := l.between(t.from+move, t.to+move)
	for k := first; k < end && more; k++ {
		o := &l.ops[k]
		for n, x := range l.records[o.record : o.record+o.records] {
			submitted, whole := x.submitted, r.tensor < 0
			if whole {
				submitted = o.last
			} else if x.name != r.tensor {
				continue
			}
			l.segments(o, submitted, func(s segment) {
				s.from, s.to = s.from-move, s.to-move
				if more && s.to > t.from && s.from < t.to {
					more = yield(drawn{s, int32(i), int32(k), x.name})
				}
			})
			if n == 0 && whole || !more {
				break
			}
		}
	}
	return more
}

// segments returns the segments of the tile. If there are too many, it returns only one more than
// maxSegments.
func (t *tile) segments() (all []drawn) {
	for i := range t.rows {
		if !t.each(i, func(d drawn) bool { all = append(all, d); return len(all) <= maxSegments }) {
			break
		}
	}
	return all
}

// buckets returns two lines of buckets for each row: one for the phases before the execution of an operation
// and one for those of the execution.
func (t *tile) buckets() []byte {
	out := make([]byte, len(t.rows)*2*tileBuckets)
	bucket := t.width / tileBuckets
	sums := make([][numPhases]float32, 2*tileBuckets)
	for i := range t.rows {
		clear(sums)
		add := func(half int, s segment) {
			a, b := float64(s.from-t.from)/bucket, float64(s.to-t.from)/bucket
			a, b = max(a, 0), min(b, tileBuckets)
			for k := int(a); k < tileBuckets && float64(k) < b; k++ {
				sums[half*tileBuckets+k][s.phase] += float32(min(b, float64(k+1)) - max(a, float64(k)))
			}
		}
		t.each(i, func(d drawn) bool {
			half := 1
			if d.phase.waits() {
				half = 0
			}
			add(half, d.segment)
			return true
		})
		for _, p := range t.late {
			if p.Rank == t.rows[i].rank {
				add(0, segment{p.From, p.To, late})
				add(1, segment{p.From, p.To, late})
			}
		}
		for k := range sums {
			best, sum := nothing, float32(0)
			for p, share := range sums[k] {
				if sum += share; share > sums[k][best] {
					best = phase(p)
				}
			}
			out[i*2*tileBuckets+k] = byte(best) | byte(math.Ceil(float64(min(sum, 1)*15)))<<4
		}
	}
	return out
}

// encode returns the tile in binary form.
func (t *tile) encode(all []drawn, buckets []byte) []byte {
	le := binary.LittleEndian
	var b []byte
	exact := uint32(1)
	if buckets != nil {
		exact = 0
	}
	for _, n := range []int{int(exact), len(t.rows), len(all), len(t.periods)} {
		b = le.AppendUint32(b, uint32(n))
	}
	float := func(d time.Duration) { b = le.AppendUint64(b, math.Float64bits(micros(d))) }
	for _, p := range t.periods {
		float(p.From)
	}
	for _, p := range t.periods {
		float(p.To)
	}
	for _, d := range all {
		float(d.from)
	}
	for _, d := range all {
		float(d.to)
	}
	for _, p := range t.periods {
		b = le.AppendUint32(b, uint32(p.Rank))
	}
	for _, d := range all {
		b = le.AppendUint32(b, uint32(d.op))
	}
	for _, d := range all {
		b = le.AppendUint32(b, uint32(d.name))
	}
	for _, d := range all {
		b = le.AppendUint16(b, uint16(d.row))
	}
	for _, d := range all {
		b = append(b, byte(d.phase))
	}
	return append(b, buckets...)
}
