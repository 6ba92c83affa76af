package bench

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// tinyMatrix takes as little time as may be.
func tinyMatrix(ops ...string) Matrix {
	return Matrix{Peer: "ours", Ops: ops, MaxBytes: 1 << 10, Small: time.Microsecond, Large: time.Microsecond, Hard: time.Microsecond}
}

func TestReadMatrix(t *testing.T) {
	m, err := ReadMatrix([]string{
		"BENCH_NP=4", "BENCH_PEER=ours-x", "BENCH_SHAPES=/s", "BENCH_OPS=gpt2,barrier", "BENCH_MAX_BYTES=1e6", "BENCH_SMALL_S=0.5",
		"BENCH_LARGE_S=2", "BENCH_HARD_S=", "BENCH_VARIANTS=arena-raw,slices", "OTHER=1",
	}, "")
	want := Matrix{4, "ours-x", "/s", []string{"gpt2", "barrier"}, 1000000, 500 * time.Millisecond, 2 * time.Second, 3 * time.Second, []Variant{{}, {Raw: true, Arena: true}}}
	if err != nil || fmt.Sprint(m) != fmt.Sprint(want) {
		t.Errorf("got %v and error %v, want %v", m, err, want)
	}
	m, err = ReadMatrix([]string{"BENCH_VARIANTS=raw"}, "arena")
	if err != nil || !slices.Equal(m.Variants, []Variant{{Arena: true}}) || len(m.Ops) != 6 || m.MaxBytes != 256<<20 || m.NP != 0 {
		t.Errorf("the flag does not win: %+v and error %v", m, err)
	}
	if m, err = ReadMatrix(nil, ""); err != nil || len(m.Variants) != 4 {
		t.Errorf("nothing chosen: %+v and error %v, want all variants", m.Variants, err)
	}
	for _, e := range []string{
		"BENCH_NP=two", "BENCH_OPS=barrier,alltoall", "BENCH_MAX_BYTES=big", "BENCH_SMALL_S=-1", "BENCH_HARD_S=x", "BENCH_LARGE_S=1e30", "BENCH_VARIANTS=fast",
		"BENCH_VARIANTS=raw,fast",
	} {
		if m, err := ReadMatrix([]string{e}, ""); err == nil {
			t.Errorf("%s gives %+v, want an error", e, m)
		}
	}
}

// The numbers that bench/peers/bench.h comes to.
func TestIterations(t *testing.T) {
	m := Matrix{Small: 400 * time.Millisecond, Large: 800 * time.Millisecond, Hard: 3 * time.Second}
	for _, c := range []struct {
		numBytes int64
		estimate float64
		want     int
	}{
		{4, 1, 20000}, {4, 100, 4000}, {1 << 20, 1000, 400}, {1<<20 + 4, 1000, 800}, {16 << 20, 80000, 20},
		{64 << 20, 200000, 15}, {64 << 20, 1000000, 5}, {256 << 20, 900000, 3}, {256 << 20, 5000000, 3},
	} {
		if got := m.iterations(c.numBytes, c.estimate); got != c.want {
			t.Errorf("%d bytes of %v µs: %d calls, want %d", c.numBytes, c.estimate, got, c.want)
		}
	}
	for numBytes, want := range map[int64]int{64 << 10: 50, 64<<10 + 1: 6, 4 << 20: 6, 4<<20 + 1: 2, 64<<20 + 1: 1} {
		if got := warmups(numBytes); got != want {
			t.Errorf("%d bytes: %d warm-ups, want %d", numBytes, got, want)
		}
	}
}

func TestRowsOfTheHarness(t *testing.T) {
	for _, c := range []struct {
		op       string
		numBytes int64
		v        Variant
		want     string
	}{
		{"allreduce", 1 << 20, Variant{}, "ours,allreduce,4,1048576,3,200.000,100.000,5.2429,7.8643\n# extra,ours,allreduce,4,1048576,mean_us=200.000,p95_us=200.000,max_us=300.000\n"},
		{"broadcast", 1 << 20, Variant{Raw: true}, "ours-raw,broadcast,4,1048576,3,200.000,100.000,5.2429,5.2429\n"},
		{"allgather", 1 << 20, Variant{Arena: true}, "ours-arena,allgather,4,1048576,3,200.000,100.000,5.2429,3.9322\n"},
		{"gpt2_async", 1 << 20, Variant{Raw: true, Arena: true}, "ours-arena-raw,gpt2_async,4,1048576,3,200.000,100.000,5.2429,7.8643\n"},
		{"barrier", 0, Variant{}, "ours,barrier,4,0,3,200.000,100.000,0.0000,0.0000\n"},
	} {
		var out strings.Builder
		col := &column{Matrix: Matrix{Peer: "ours"}, Variant: c.v, team: &team{path: &alone{size: 4}}, out: &sink{w: &out}}
		col.emit(c.op, c.numBytes, []float64{300, 100, 200})
		if !strings.HasPrefix(out.String(), c.want) {
			t.Errorf("got\n%swant\n%s", out.String(), c.want)
		}
	}
}

func TestMatrixIsWhole(t *testing.T) {
	var out strings.Builder
	err := cluster(t, 2, nil, func(ctx context.Context, at Place, rank int) error {
		m := tinyMatrix("barrier", "allreduce", "allgather", "broadcast")
		for _, v := range variants {
			m.Variants = append(m.Variants, v.Variant)
		}
		s := Streams{&strings.Builder{}, &strings.Builder{}}
		if rank == 0 {
			s.Out = &out
		}
		return RunMatrix(ctx, m, at, s)
	})
	if err != nil {
		t.Fatal(err)
	}
	points, err := readPoints("x.csv", strings.NewReader(out.String()))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range points {
		got = append(got, fmt.Sprint(p.attrs[attrPeer], " ", p.op, " ", p.bytes))
	}
	var want []string
	for _, peer := range []string{"ours", "ours-arena", "ours-raw", "ours-arena-raw"} {
		if !strings.Contains(peer, "arena") { // a barrier has no tensor
			want = append(want, peer+" barrier 0")
		}
		for _, c := range []string{
			"allreduce 4", "allreduce 64", "allreduce 1024", "allgather 65536", "broadcast 65536", "allgather 4194304", "broadcast 4194304",
			"allgather 67108864", "broadcast 67108864",
		} {
			want = append(want, peer+" "+c)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("got rows\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestMatrixOfAnotherSize(t *testing.T) {
	err := cluster(t, 2, nil, func(ctx context.Context, at Place, _ int) error {
		m := tinyMatrix("barrier")
		m.NP, m.Variants = 3, []Variant{{Raw: true}}
		return RunMatrix(ctx, m, at, Streams{&strings.Builder{}, &strings.Builder{}})
	})
	if err == nil || !strings.Contains(err.Error(), "BENCH_NP is 3, but the job has 2 ranks") {
		t.Errorf("got error %v", err)
	}
}
