package view

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/timeline/report"
)

// Source has what the page shows. Its methods may be called at the same time. Errors are for the person who
// looks at the page.
type Source interface {
	// Report returns the numbers and texts of the page.
	Report() *report.Report
	// Comparison returns the comparison with another run, or nil if there is none.
	Comparison() *report.Comparison
	// Info returns what the page needs to ask for pictures.
	Info() *Info
	// Tile returns a part of the timeline, and Window the time that all tiles of an alignment cover.
	Tile(Request) ([]byte, error)
	Window(align string) (*Window, error)
	// Labels returns what the rows of a Request.Rows show.
	Labels(rows string) ([]Label, error)
	// Grid returns a picture of cells: "held", "caused" or "waited" have a row for each rank and a column for
	// one or more steps, and "waits" a row for each rank that waited and a column for the rank it waited for.
	Grid(name string) ([]byte, error)
	// Find returns the operation in a row at a time in microseconds.
	Find(rows string, row int, align string, us float64) (*Operation, error)
	// Operation returns an operation of a rank by its index.
	Operation(rank, index int) (*Operation, error)
}

var _ Source = (*Run)(nil)

// Info describes a Source.
type Info struct {
	Title string `json:"title"`
	// Ranks has all ranks in the order of their rows.
	Ranks []RankInfo `json:"ranks"`
	// Phases has the names of the phases by their numbers in tiles.
	Phases []string `json:"phases"`
	// Names has the names of tensors by their numbers.
	Names []string `json:"names"`
	// Columns is the number of columns of the grids of steps, and StepsPerColumn how many steps a column has.
	Columns        int `json:"columns"`
	StepsPerColumn int `json:"steps_per_column"`
	TileRows       int `json:"tile_rows"`
	TileBuckets    int `json:"tile_buckets"`
	MaxLevel       int `json:"max_level"`
	// BeginUS is the first submission, since the start of rank 0. The times of tiles are counted from it.
	BeginUS float64 `json:"begin_us"`
	// Matrix is false if there are too many ranks for the grid "waits".
	Matrix bool `json:"matrix"`
	// Live is true if the job runs, so that there is a stream of its states.
	Live bool `json:"live"`
	// Compared is true if there is a Comparison.
	Compared bool `json:"compared"`
}

// RankInfo describes a rank.
type RankInfo struct {
	Rank    int    `json:"rank"`
	Host    string `json:"host"`
	HasFile bool   `json:"has_file"`
	Aligned bool   `json:"aligned"`
}

// Label describes a row. Tensor is the number of its tensor, -1 for all of them, or -2 for what the program
// did.
type Label struct {
	Text   string `json:"text"`
	Rank   int    `json:"rank"`
	Tensor int32  `json:"tensor"`
}

// Operation is an operation at all ranks.
type Operation struct {
	Rank      int      `json:"rank"`
	Index     int      `json:"index"`
	Kind      string   `json:"kind"`
	Set       int32    `json:"set"`
	Number    uint64   `json:"op"`
	Backend   string   `json:"backend"`
	Algorithm string   `json:"algorithm"`
	Bytes     int64    `json:"bytes"`
	Error     string   `json:"error"`
	Tensors   int      `json:"tensors"`
	Names     []int32  `json:"names"` // at most 16
	Ranks     []OnRank `json:"ranks"`
}

// OnRank has the times of an operation at a rank, in microseconds since the first submission of the job.
// WaitedUS is how long the rank waited for other ranks.
type OnRank struct {
	Rank        int     `json:"rank"`
	Index       int     `json:"index"`
	SubmittedUS float64 `json:"submitted_us"`
	WaitedUS    float64 `json:"waited_us"`
	GrantedUS   float64 `json:"granted_us"`
	BegunUS     float64 `json:"begun_us"`
	EndedUS     float64 `json:"ended_us"`
}

// maxColumns limits the number of columns of a grid.
const maxColumns = 2048

// Report implements Source.
func (v *Run) Report() *report.Report { return v.report }

// perColumn returns how many steps a column of a grid has.
func (v *Run) perColumn() int { return max((len(v.Steps)+maxColumns-1)/maxColumns, 1) }

// Comparison implements Source.
func (v *Run) Comparison() *report.Comparison { return v.Compared }

// Info implements Source.
func (v *Run) Info() *Info {
	i := &Info{Title: v.Title, BeginUS: micros(v.Begin),
		Phases: phaseNames, Names: v.names, StepsPerColumn: v.perColumn(),
		Live: v.live, TileRows: tileRows, TileBuckets: tileBuckets, MaxLevel: maxLevel,
		Matrix: v.WaitsFor != nil, Compared: v.Compared != nil, Ranks: []RankInfo{}}
	i.Columns = (len(v.Steps) + i.StepsPerColumn - 1) / i.StepsPerColumn
	if i.Names == nil {
		i.Names = []string{}
	}
	for _, rank := range v.order {
		i.Ranks = append(i.Ranks, RankInfo(v.Ranks[rank]))
	}
	return i
}

// Labels implements Source.
func (v *Run) Labels(rows string) ([]Label, error) {
	all, err := v.rows(rows)
	if err != nil {
		return nil, err
	}
	labels := make([]Label, 0, len(all))
	for _, r := range all {
		l := Label{Text: fmt.Sprintf("rank %d", r.rank), Rank: r.rank, Tensor: r.tensor}
		if rows != "ranks" && r.tensor >= 0 && rows[:4] == "rank" {
			l.Text = v.names[r.tensor]
		} else if r.tensor == program {
			l.Text = "program"
		}
		labels = append(labels, l)
	}
	return labels, nil
}

// Grid implements Source. The grid has the number of rows and of columns as uint32, and a float32 in
// microseconds for each cell, all little-endian. If a column has several steps, its number is the greatest.
func (v *Run) Grid(name string) ([]byte, error) {
	le, ranks := binary.LittleEndian, len(v.lanes)
	encode := func(columns int, cell func(row, column int) float64) []byte {
		b := le.AppendUint32(le.AppendUint32(nil, uint32(ranks)), uint32(columns))
		for _, row := range v.order {
			for column := range columns {
				us := float32(cell(row, column) / float64(time.Microsecond))
				b = le.AppendUint32(b, math.Float32bits(us))
			}
		}
		return b
	}
	tables := map[string][][]float32{"held": v.HeldBy, "caused": v.CausedBy, "waited": v.WaitedBy}
	table, is := tables[name]
	switch {
	case is:
		per := v.perColumn()
		return encode((len(v.Steps)+per-1)/per, func(rank, column int) (ns float64) {
			for _, row := range table[min(column*per, len(table)):min((column+1)*per, len(table))] {
				if rank < len(row) {
					ns = max(ns, float64(row[rank]))
				}
			}
			return ns
		}), nil
	case name == "waits" && v.WaitsFor != nil:
		return encode(ranks, func(waiter, late int) float64 { return v.WaitsFor[v.order[late]][waiter] }), nil
	}
	return nil, fmt.Errorf("got the grid %.64q, want held, caused, waited or waits (up to %d ranks)", name,
		report.MaxMatrix)
}

// Find implements Source.
func (v *Run) Find(rows string, index int, align string, us float64) (*Operation, error) {
	all, err := v.rows(rows)
	if err != nil {
		return nil, err
	}
	_, _, shift, err := v.window(align)
	if err != nil {
		return nil, err
	}
	if index < 0 || index >= len(all) || math.IsNaN(us) || math.Abs(us) > 1e15 {
		return nil, fmt.Errorf("got row %d, want 0 to %d", index, len(all)-1)
	}
	r := all[index]
	if r.tensor == program {
		return nil, fmt.Errorf("this row shows what the program of rank %d did, not its operations", r.rank)
	}
	l := v.lanes[r.rank]
	at := time.Duration(us*float64(time.Microsecond)) + v.Begin + shift[r.rank]
	// Of the operations in flight at this time, the one that began last is in front.
	found := -1
	first, end := l.between(at, at+1)
	for i := first; i < end; i++ {
		if o := &l.ops[i]; o.first <= at && at <= o.ended && (r.tensor < 0 || l.has(o, r.tensor)) {
			found = i
		}
	}
	if found < 0 {
		return nil, fmt.Errorf("rank %d had no operation in flight at this time", r.rank)
	}
	return v.Operation(r.rank, found)
}

// Operation implements Source.
func (v *Run) Operation(rank, index int) (*Operation, error) {
	if rank < 0 || rank >= len(v.lanes) || index < 0 || index >= len(v.lanes[rank].ops) {
		return nil, fmt.Errorf("got operation %d of rank %d, which there is not", index, rank)
	}
	l := v.lanes[rank]
	o := &l.ops[index]
	out := &Operation{Rank: rank, Index: index, Kind: strings.ToLower(o.kind.String()), Set: o.set,
		Number: o.number, Backend: o.backend.String(), Bytes: o.bytes, Error: o.failed,
		Tensors: int(o.records)}
	if o.algorithm != message.NoAlgorithm {
		out.Algorithm = o.algorithm.String()
	}
	for _, r := range l.records[o.record : o.record+min(o.records, 16)] {
		out.Names = append(out.Names, r.name)
	}
	v.same(rank, index, func(other, i int) {
		o := &v.lanes[other].ops[i]
		since := func(d time.Duration) float64 { return micros(d - v.Begin) }
		out.Ranks = append(out.Ranks, OnRank{other, i, since(o.last), micros(max(o.waited-o.last, 0)),
			since(o.granted), since(o.begun), since(o.ended)})
	})
	return out, nil
}
