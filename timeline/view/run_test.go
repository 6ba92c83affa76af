package view

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/timeline/report"
)

var straggler = testJob{ranks: 4, hosts: 2, tensors: 6, steps: 20, compute: 8000, late: 2, lateBy: 6580}

// decoded is a tile as the page reads it.
type decoded struct {
	exact                bool
	rows                 int
	from, to             []float64
	periodFrom, periodTo []float64
	periodRank, op, name []uint32
	row                  []uint16
	phases               []byte
	buckets              []byte
}

func decode(t *testing.T, b []byte) (d decoded) {
	t.Helper()
	le := binary.LittleEndian
	take := func(n int) []byte {
		if n > len(b) {
			t.Fatalf("the tile ends %d bytes too early", n-len(b))
		}
		part := b[:n]
		b = b[n:]
		return part
	}
	word := func() uint32 { return le.Uint32(take(4)) }
	floats := func(n int) (all []float64) {
		for range n {
			all = append(all, math.Float64frombits(le.Uint64(take(8))))
		}
		return all
	}
	words := func(n int) (all []uint32) {
		for range n {
			all = append(all, word())
		}
		return all
	}
	d.exact, d.rows = word() == 1, int(word())
	segments, periods := int(word()), int(word())
	d.periodFrom, d.periodTo = floats(periods), floats(periods)
	d.from, d.to = floats(segments), floats(segments)
	d.periodRank, d.op, d.name = words(periods), words(segments), words(segments)
	for range segments {
		d.row = append(d.row, le.Uint16(take(2)))
	}
	d.phases, d.buckets = take(segments), b
	if want := d.rows * 2 * tileBuckets; !d.exact && len(b) != want || d.exact && len(b) != 0 {
		t.Fatalf("got %d bytes of buckets, want %d or none", len(b), want)
	}
	return d
}

// covered returns how long each row of a picture is in each phase, in us, by the tiles of one level.
func covered(t *testing.T, v *Run, rows, align string, level int) map[[2]int]float64 {
	t.Helper()
	sums := make(map[[2]int]float64)
	w, err := v.Window(align)
	if err != nil {
		t.Fatal(err)
	}
	width := (w.ToUS - w.FromUS) / float64(int(1)<<level)
	for index := range 1 << level {
		b, err := v.Tile(Request{Rows: rows, Align: align, Level: level, Index: index})
		if err != nil {
			t.Fatal(err)
		}
		d := decode(t, b)
		begin := w.FromUS + float64(index)*width
		for i := range d.from {
			sums[[2]int{int(d.row[i]), int(d.phases[i])}] += min(d.to[i], begin+width) - max(d.from[i], begin)
		}
		if len(d.from) > maxSegments || len(d.periodFrom) > maxPeriods {
			t.Errorf("got a tile of %d segments and %d periods", len(d.from), len(d.periodFrom))
		}
	}
	return sums
}

// The tiles of every level together show the same, for clocks and for ranks that are shifted.
func TestTilesOfAllLevelsAgree(t *testing.T) {
	v := straggler.read(t)
	for _, align := range []string{"", "step:5", "op:1.30"} {
		for _, rows := range []string{"ranks", "rank:2", "tensor:3"} {
			deep := covered(t, v, rows, align, 8)
			if len(deep) < 8 {
				t.Fatalf("%s: got only %d phases in all rows", rows, len(deep))
			}
			deeper := covered(t, v, rows, align, 10)
			for key, us := range deep {
				if math.Abs(us-deeper[key]) > 0.5 {
					t.Errorf("%s %s: row %d is in phase %s for %g us on level 8, and for %g us on level 10",
						rows, align, key[0], phaseNames[key[1]], us, deeper[key])
				}
			}
		}
	}
	// The whole time is in one tile of buckets. They show that rank 2 was late, and that the others waited.
	b, err := v.Tile(Request{Rows: "ranks"})
	if err != nil {
		t.Fatal(err)
	}
	d := decode(t, b)
	if d.exact || d.rows != 4 {
		t.Fatalf("got a tile of %d rows, exact: %v, want 4 rows of buckets", d.rows, d.exact)
	}
	count := func(row int, p phase) (n int) {
		for _, x := range d.buckets[row*2*tileBuckets : (row*2+1)*tileBuckets] {
			if x&15 == byte(p) {
				n++
			}
		}
		return n
	}
	for row := range 4 {
		rank, isLate, waits := v.order[row], count(row, late) > 100, count(row, waiting) > 100
		if isLate != (rank == 2) || waits == (rank == 2) {
			t.Errorf("rank %d is late in %d buckets and waits in %d", rank, count(row, late), count(row, waiting))
		}
	}
}

// The memory of the operations is limited, also if they have many tensors and activities.
func TestOperationsAreLimited(t *testing.T) {
	many := trace.Operation{Records: make([]trace.Record, 1000), Activities: make([]trace.Activity, 1000)}
	few := trace.Operation{Records: make([]trace.Record, 1)}
	v, l := &Run{ids: make(map[string]int32), room: 100_000}, &lane{}
	for range 10 {
		v.add(l, &many)
		v.add(l, &few)
	}
	if len(l.ops) != 4 || len(l.records) != 2002 || len(l.acts) != 2000 || v.leftOut != 16 {
		t.Errorf("got %d operations with %d tensors and %d activities, and %d left out", len(l.ops), len(l.records),
			len(l.acts), v.leftOut)
	}
}

// Segments of a rank are the phases of the report.
func TestSegmentsAreThePhasesOfTheReport(t *testing.T) {
	v := straggler.read(t)
	steady := micros(v.Steps[0] - v.Begin)
	sums := make(map[string]float64)
	t2 := tile{Run: v, rows: []row{{0, -1}}, shift: make([]time.Duration, 4), to: v.End - v.Begin}
	t2.each(0, func(d drawn) bool {
		if micros(d.from) >= steady {
			sums[phaseNames[d.phase]] += micros(d.to - d.from)
		}
		return true
	})
	for _, name := range []string{"copies", "exchange"} { // these do not overlap in one rank
		if want := v.report.Phases[0].US[name]; math.Abs(sums[name]-want) > 1 || want == 0 {
			t.Errorf("got %g us of %s, want %g us", sums[name], name, want)
		}
	}
	if want := v.report.Phases[0].US["waiting"]; sums["waiting"] < want || want == 0 { // these overlap
		t.Errorf("got %g us of waiting, want at least %g us", sums["waiting"], want)
	}
}

func TestAlignment(t *testing.T) {
	v := straggler.read(t)
	o, err := v.Operation(1, 30)
	if err != nil {
		t.Fatal(err)
	}
	w, err := v.Window("op:1.30")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range o.Ranks {
		if at := r.GrantedUS - w.Shift[r.Rank]; math.Abs(at-(o.Ranks[0].GrantedUS-w.Shift[0])) > 1e-6 {
			t.Errorf("the grant of rank %d is at %g us, that of rank 0 at %g us", r.Rank, at,
				o.Ranks[0].GrantedUS)
		}
	}
	if len(o.Ranks) != 4 || o.Ranks[2].WaitedUS != 0 || o.Ranks[1].WaitedUS < 6000 {
		t.Errorf("got %+v, want that the others waited 6.5 ms for rank 2", o.Ranks)
	}
	found, err := v.Find("ranks", 1, "", o.Ranks[1].SubmittedUS+1)
	if err != nil || found.Index != 30 {
		t.Errorf("got %+v, %v, want operation 30 of rank 1", found, err)
	}
}

func TestGridsHaveTheSumsOfTheReport(t *testing.T) {
	v := straggler.read(t)
	for _, name := range []string{"caused", "held"} {
		b, err := v.Grid(name)
		if err != nil {
			t.Fatal(err)
		}
		le := binary.LittleEndian
		rows, columns := int(le.Uint32(b)), int(le.Uint32(b[4:]))
		if rows != 4 || columns != int(v.report.Steps) {
			t.Fatalf("got %d rows and %d columns, want 4 and %d", rows, columns, v.report.Steps)
		}
		for row, rank := range v.order {
			sum := 0.0
			for k := range columns {
				sum += float64(math.Float32frombits(le.Uint32(b[8+4*(row*columns+k):])))
			}
			l := v.report.Lateness.Ranks[rank]
			want := map[string]float64{"caused": l.CausedUS, "held": l.HeldUS}[name]
			if math.Abs(sum-want) > 1e-4*want+1 {
				t.Errorf("%s: got %g us for rank %d, want %g us", name, sum, rank, want)
			}
		}
	}
}

// Each request, also a wrong one, gets an answer or an error, of a limited size.
func TestAnyRequest(t *testing.T) {
	v := straggler.read(t)
	rng := rand.New(rand.NewPCG(1, 1))
	numbers := []int{-1, 0, 1, 3, 4, 7, 40, 41, 1 << 20, math.MaxInt}
	pick := func() int { return numbers[rng.IntN(len(numbers))] }
	texts := []string{"ranks", "", "rank:", "rank:2", "rank:9", "tensor:-1", "tensor:2", "step:1", "step:0",
		"step:999", "op:0.0", "op:9.9", "op:1", "../../etc/passwd", "rank:99999999999999999999", "\x00"}
	text := func() string { return texts[rng.IntN(len(texts))] }
	worked := 0
	for range 5000 {
		b, err := v.Tile(Request{Rows: text(), Align: text(), Level: pick(), Index: pick(), Group: pick()})
		if err == nil {
			worked++
			decode(t, b)
		}
		us := []float64{0, -1e300, math.NaN(), math.Inf(1), 1e5}[rng.IntN(5)]
		if _, err := v.Find(text(), pick(), text(), us); err == nil {
			worked++
		}
		if _, err := v.Operation(pick(), pick()); err == nil {
			worked++
		}
		_, _ = v.Labels(text())
		_, _ = v.Grid(text())
	}
	if worked < 10 {
		t.Errorf("only %d requests worked", worked)
	}
}

// Timelines of one rank, without steps, or with ranks that have no file can be shown too.
func TestUnusualJobs(t *testing.T) {
	for name, j := range map[string]testJob{
		"one rank":      {ranks: 1, tensors: 2, steps: 3, compute: 1000, late: -1},
		"one step":      {ranks: 3, tensors: 1, steps: 1, compute: 1000, late: -1},
		"no operations": {ranks: 2},
		"many ranks":    {ranks: 300, hosts: 40, tensors: 1, steps: 3, compute: 1000, late: 299, lateBy: 500},
	} {
		t.Run(name, func(t *testing.T) {
			v := j.read(t)
			info := v.Info()
			if len(info.Ranks) != j.ranks || info.Matrix != (j.ranks <= report.MaxMatrix) {
				t.Errorf("got %d ranks, matrix %v", len(info.Ranks), info.Matrix)
			}
			for group := 0; group*tileRows < j.ranks; group++ {
				b, err := v.Tile(Request{Rows: "ranks", Group: group})
				if err != nil {
					t.Fatal(err)
				}
				decode(t, b)
			}
			if j.ranks <= report.MaxMatrix { // more take longer, and show nothing else
				if err := Export(io.Discard, v); err != nil {
					t.Error(err)
				}
			}
			if _, err := v.Window("step:1"); (err == nil) != (len(v.Steps) > 0) {
				t.Error(fmt.Sprint(err, " for ", len(v.Steps), " steps"))
			}
		})
	}
}

// The report names the tensor with which a rank is late first. The others wait as long for the later ones,
// which may be in the same operation.
func TestWhereARankIsLate(t *testing.T) {
	later, fused := straggler, straggler
	later.lateFrom = 3
	fused.fused = true
	for name, j := range map[string]testJob{"layer3.weight": later, "layer0.weight": fused} {
		want := "rank 2 is late with " + name + ": "
		if got := j.read(t).report.Lateness.Where; !strings.HasPrefix(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
