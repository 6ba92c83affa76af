package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
)

func TestEveryCollectiveOnEveryPath(t *testing.T) {
	for _, kind := range kinds {
		for _, path := range []string{"negotiated", "raw", "negotiated arena", "raw arena", "raw tcp", "negotiated touch"} {
			for _, n := range []int{1, 2, 3} {
				if testing.Short() && n == 2 {
					continue
				}
				t.Run(fmt.Sprintf("%v/%s/ranks=%d", kind, path, n), func(t *testing.T) {
					settings := map[string]string{}
					if strings.Contains(path, "tcp") {
						settings["HOROVOD_CPU_OPERATIONS"] = "tcp"
					}
					out, log, err := runs(t, n, settings, func(o *Options, _ int) {
						o.Collective = kind.String()
						o.Raw, o.Arena, o.Touch = strings.Contains(path, "raw"), strings.Contains(path, "arena"), strings.Contains(path, "touch")
						o.Types, o.Ops, o.Roots = []tensor.DType{tensor.Float32, tensor.Bool, tensor.BFloat16}, []tensor.ReduceOp{tensor.Sum, tensor.Max}, nil
						o.MinBytes, o.MaxBytes, o.StepFactor = 100, 10000, 100
					})
					if err != nil {
						t.Fatalf("%v\n%s", err, log)
					}
					rows := table(t, out)
					want := map[message.Kind]int{
						message.Allreduce: 2 * 5, message.Reducescatter: 2 * 5, // a bool has no sum
						message.Allgather: 2 * 3, message.Alltoall: 2 * 3, message.Broadcast: 2 * 3 * n, message.Barrier: 1,
					}[kind]
					if kind != message.Barrier && !strings.Contains(path, "raw") {
						want *= 2 // the backend has one placement, or both
					}
					if len(rows) != want && !(strings.Contains(path, "raw") && len(rows) == 2*want) {
						t.Errorf("%d rows, want %d:\n%s", len(rows), want, out)
					}
					for _, row := range rows {
						expect := "0"
						if kind == message.Barrier {
							expect = "-1"
						}
						if row["wrong"] != expect || row["collective"] != kind.String() || row["ranks"] != fmt.Sprint(n) || row["iters"] != "3" {
							t.Errorf("got %v", row)
						}
					}
				})
			}
		}
	}
}

func TestSizesAreThoseOfTheTensor(t *testing.T) {
	for kind, want := range map[message.Kind][2]string{
		message.Allreduce: {"1000", "250"}, message.Broadcast: {"1000", "250"},
		message.Allgather: {"996", "83"}, message.Reducescatter: {"996", "83"}, message.Alltoall: {"996", "83"},
	} {
		out, _, err := runs(t, 3, nil, func(o *Options, _ int) { o.Collective = kind.String() })
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range table(t, out) {
			if got := [2]string{row["bytes"], row["count"]}; got != want {
				t.Errorf("%v of 1000 bytes at 3 ranks: bytes and count %v, want %v", kind, got, want)
			}
		}
	}
}

func TestWorkloadsOnEveryPath(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tiny.txt")
	if err := os.WriteFile(file, []byte("a 1000 10x100\nb 1 1\nc 77\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, raw := range []bool{false, true} {
		for _, arena := range []bool{false, true} {
			out, log, err := runs(t, 2, nil, func(o *Options, _ int) {
				o.Workload, o.Modes, o.Raw, o.Arena, o.Touch, o.CPU = file, ModeNames(), raw, arena, arena, true
			})
			if err != nil {
				t.Fatalf("%v\n%s", err, log)
			}
			rows := table(t, out)
			var names []string
			for _, row := range rows {
				names = append(names, row["collective"])
				if row["bytes"] != "4312" || row["count"] != "1078" || row["wrong"] != "0" {
					t.Errorf("got %v", row)
				}
			}
			if want := []string{"tiny_pertensor", "tiny_async", "tiny_grouped"}; !slices.Equal(names, want) {
				t.Errorf("raw %v: rows %v, want %v", raw, names, want)
			}
			if n := strings.Count(out, "# cpu of rank "); n != 6 {
				t.Errorf("%d lines on CPU time, want one for each of 3 rows and 2 ranks:\n%s", n, out)
			}
		}
	}
	out, _, err := runs(t, 2, nil, func(o *Options, _ int) { o.Many = Many{50, 256} })
	if rows := table(t, out); err != nil || len(rows) != 1 || rows[0]["bytes"] != "12800" || rows[0]["collective"] != "many50x256_async" {
		t.Errorf("many: error %v and\n%s", err, out)
	}
}

func TestNegotiationIsCompared(t *testing.T) {
	out, log, err := runs(t, 2, nil, func(o *Options, _ int) {
		o.Many, o.Negotiation, o.Format, o.Touch, o.Memory = Many{20, 64}, 5, "json", true, true
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, log)
	}
	var document struct {
		Negotiation Negotiation
		Memory      []RankMemory
	}
	if err := json.Unmarshal([]byte(out), &document); err != nil {
		t.Fatal(err)
	}
	n := document.Negotiation
	if n.Workload != "many20x64" || n.Type != "float32" || n.Pairs != 5 || n.NegotiatedMs <= 0 || n.RawMs <= 0 || n.Low > n.Percent || n.High < n.Percent {
		t.Errorf("got %+v", n)
	}
	if diff := 100 * (n.NegotiatedMs/n.RawMs - 1); diff-n.Percent > 1e-6 || n.Percent-diff > 1e-6 {
		t.Errorf("%v%% of %v ms against %v ms", n.Percent, n.NegotiatedMs, n.RawMs)
	}
	if len(document.Memory) != 2 || document.Memory[1].PeakRSS < 1<<20 || document.Memory[0].Tensors != 20*64 {
		t.Errorf("memory %+v, want that of 2 ranks with tensors of 1280 bytes", document.Memory)
	}
}

// No memory is an error, not the end of the process.
func TestMoreThanTheMemory(t *testing.T) {
	for _, arena := range []bool{false, true} {
		_, _, err := runs(t, 1, nil, func(o *Options, _ int) { o.MinBytes, o.MaxBytes, o.Arena = 1000<<40, 1000<<40, arena })
		if err == nil || !strings.Contains(err.Error(), "tensors of 1024000G do not fit the ") {
			t.Errorf("arena %v: got error %v", arena, err)
		}
	}
	_, _, err := runs(t, 1, nil, func(o *Options, _ int) { o.Many = Many{100, 1 << 60} })
	if err == nil || !strings.Contains(err.Error(), "do not fit the ") {
		t.Errorf("many: got error %v", err)
	}
}

// One rank has no bus, so what is drawn is algbw.
func TestOneRankIsDrawn(t *testing.T) {
	file := filepath.Join(t.TempDir(), "x.svg")
	if _, log, err := runs(t, 1, nil, func(o *Options, _ int) { o.Plot = file }); err != nil {
		t.Fatalf("%v\n%s", err, log)
	}
	svg, err := os.ReadFile(file)
	if err != nil || !strings.Contains(string(svg), ">algorithm bandwidth (algbw) in GB/s<") {
		t.Errorf("error %v and\n%s", err, svg)
	}
}

// A drawing that cannot be written is known before anything is measured, at all ranks.
func TestPlotIsOpenedFirst(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "none", "x.svg")
	out, _, err := runs(t, 2, nil, func(o *Options, _ int) { o.Plot = bad })
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "rank 0 cannot write its --plot") || out != "" {
		t.Errorf("got error %v and\n%s", err, out)
	}
	// A run that fails neither leaves an empty file, nor loses what was there.
	for name, before := range map[string]string{"new.svg": "", "old.svg": "old"} {
		file := filepath.Join(dir, name)
		if before != "" {
			if err := os.WriteFile(file, []byte(before), 0o666); err != nil {
				t.Fatal(err)
			}
		}
		fails := func(o *Options, _ int) { o.Plot, o.Types = file, []tensor.DType{tensor.Bool} }
		if _, _, err := runs(t, 2, nil, fails); err == nil {
			t.Fatal("a sum of bools")
		}
		if after, err := os.ReadFile(file); string(after) != before || before == "" && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %q and error %v, want %q", name, after, err, before)
		}
	}
	// A longer drawing than the new one leaves nothing of it.
	file := filepath.Join(dir, "long.svg")
	if err := os.WriteFile(file, bytes.Repeat([]byte("x"), 1<<20), 0o666); err != nil {
		t.Fatal(err)
	}
	if _, _, err := runs(t, 2, nil, func(o *Options, _ int) { o.Plot = file }); err != nil {
		t.Fatal(err)
	}
	if svg, err := os.ReadFile(file); err != nil || !bytes.HasSuffix(svg, []byte("</svg>\n")) {
		t.Errorf("error %v, and the end is not the drawing's", err)
	}
	// What has no size fails at rank 0 alone.
	errs := make([]error, 2)
	err = cluster(t, 2, nil, func(ctx context.Context, at Place, rank int) error {
		o := sample()
		o.Plot, o.MinBytes, o.MaxBytes, o.StepFactor = file, 0, 0, 0
		errs[rank] = Run(ctx, o, at, Streams{io.Discard, io.Discard})
		return nil
	})
	if err != nil || errs[0] == nil || !strings.Contains(errs[0].Error(), "no result with a size") || errs[1] != nil {
		t.Errorf("got errors %v", errs)
	}
}

func TestRanksMustMeasureTheSame(t *testing.T) {
	_, _, err := runs(t, 2, nil, func(o *Options, rank int) { o.MaxBytes += int64(rank) })
	if err == nil || !strings.Contains(err.Error(), "rank 1 was given other options") {
		t.Errorf("got error %v", err)
	}
}

func TestWhatABackendHasNot(t *testing.T) {
	_, _, err := runs(t, 2, nil, func(o *Options, _ int) {
		o.Raw, o.Ops, o.Placements = true, []tensor.ReduceOp{tensor.Average}, []bool{true}
	})
	var absent errNotHere
	if !errors.As(err, &absent) || !strings.Contains(err.Error(), "no averages") {
		t.Errorf("got error %v", err)
	}
	// Neither placement is there.
	_, _, err = runs(t, 2, nil, func(o *Options, _ int) { o.Raw, o.Ops = true, []tensor.ReduceOp{tensor.Average} })
	if !errors.As(err, &absent) || !strings.Contains(err.Error(), "no averages") {
		t.Errorf("both placements: got error %v", err)
	}
	for _, placements := range [][]bool{{true}, {false, true}} {
		out, log, err := runs(t, 2, nil, func(o *Options, _ int) {
			o.Raw, o.Ops, o.Placements = true, []tensor.ReduceOp{tensor.Average, tensor.Max}, placements
		})
		rows := table(t, out)
		if err != nil || len(rows) == 0 || rows[0]["redop"] != "max" {
			t.Errorf("an average and a maximum: error %v and\n%s", err, out)
		}
		if want := "hvdbench: no allreduce of float avg: a backend has no averages"; strings.Count(log, want) != 1 {
			t.Errorf("got %q, want %q once", log, want)
		}
	}
	_, _, err = runs(t, 2, nil, func(o *Options, _ int) {
		o.Types, o.Ops = []tensor.DType{tensor.Bool}, []tensor.ReduceOp{tensor.Sum, tensor.Average}
	})
	if err == nil || !strings.Contains(err.Error(), "reduce bool") {
		t.Errorf("sum and average of bools: got error %v", err)
	}
	_, _, err = runs(t, 2, nil, func(o *Options, _ int) { o.Types = []tensor.DType{tensor.Bool} })
	if err == nil || !strings.Contains(err.Error(), "reduce bool") {
		t.Errorf("sum of bools: got error %v", err)
	}
}

// corrupted is a path whose results have one wrong byte at one rank.
type corrupted struct {
	path
	after *int // so many right operations on tensors come first
}

func (p corrupted) prepare(s shot, name string, buf []byte) (*action, error) {
	a, err := p.path.prepare(s, name, buf)
	if err != nil || s.dt != tensor.Float32 {
		return a, err
	}
	return &action{result: a.result, run: func(ctx context.Context) error {
		err := a.run(ctx)
		p.spoil(a.result())
		return err
	}}, nil
}

func (p corrupted) step(mode stepMode, dt tensor.DType, tensors, flats []named) (func(ctx context.Context) error, error) {
	run, err := p.path.step(mode, dt, tensors, flats)
	return func(ctx context.Context) error {
		err := run(ctx)
		p.spoil(tensors[len(tensors)-1].buf)
		return err
	}, err
}

func (p corrupted) spoil(b []byte) {
	if *p.after--; *p.after < 0 && len(b) > 0 {
		b[len(b)-2] ^= 0x40
	}
}

// One wrong element at a rank other than that which reports must be seen, be it from the first call on or later.
func TestAWrongByteIsSeen(t *testing.T) {
	for _, kind := range []message.Kind{message.Allreduce, message.Allgather, message.Broadcast, message.Reducescatter, message.Alltoall, message.Join} {
		for _, after := range []int{0, 4} { // 4: the check before the loop passes
			var out strings.Builder
			err := cluster(t, 2, nil, func(ctx context.Context, at Place, rank int) error {
				o := sample()
				o.Placements = []bool{true}
				if kind == message.Join {
					o.Many = Many{3, 400}
				} else {
					o.Collective = kind.String()
				}
				j, err := join(ctx, at, true, false)
				if err != nil {
					return err
				}
				r := &run{Options: o, job: j, team: j.any(), log: &strings.Builder{}, sink: &sink{w: &strings.Builder{}}}
				if rank == 0 {
					r.sink.w = &out
				} else {
					r.team.path = corrupted{r.team.path, &after}
				}
				r.out = newOutput("nccl", r.sink)
				err = r.all(ctx)
				var wrong *WrongError
				if !errors.As(err, &wrong) || wrong.Count < 1 || wrong.Count > 2 {
					t.Errorf("%v, rank %d, after %d: got error %v, want a *WrongError", kind, rank, after, err)
				}
				return j.leave(ctx)
			})
			if err != nil {
				t.Error(err)
			}
			if !strings.Contains(out.String(), "FAILED") {
				t.Errorf("%v: rank 0 does not say so:\n%s", kind, out.String())
			}
		}
	}
}

// The matrix ends at the first wrong element, at all ranks.
func TestTheMatrixSeesAWrongByte(t *testing.T) {
	for _, op := range []string{"allreduce", "allgather", "broadcast"} {
		err := cluster(t, 2, nil, func(ctx context.Context, at Place, rank int) error {
			j, err := join(ctx, at, false, true)
			if err != nil {
				return err
			}
			c := &column{Matrix: tinyMatrix(op), team: j.raw, memory: &j.memory, out: &sink{w: &strings.Builder{}}, log: &strings.Builder{}}
			c.MaxBytes = 4
			if rank == 1 {
				after := 1000000
				if op != "broadcast" {
					after = 0
				}
				c.team.path = corrupted{c.team.path, &after}
				if op == "broadcast" { // late: the check after the loop must see it
					after = 52
				}
			}
			err = c.all(ctx)
			var wrong *WrongError
			if !errors.As(err, &wrong) || !strings.Contains(err.Error(), op) {
				t.Errorf("%s, rank %d: got error %v, want a *WrongError", op, rank, err)
			}
			return j.leave(ctx)
		})
		if err != nil {
			t.Error(err)
		}
	}
}

func TestTheLoopAllocatesNothing(t *testing.T) {
	times := make([]float64, 100)
	nothing := func(context.Context) error { return nil }
	before := func() error { return nil }
	if n := testing.AllocsPerRun(10, func() { _ = loop(t.Context(), times, before, nothing) }); n != 0 {
		t.Errorf("%v allocations in 100 turns, want none", n)
	}
	if slices.Min(times) <= 0 {
		t.Errorf("a call took %v µs", slices.Min(times))
	}
}

func TestTheLoopDoesNotTimeWhatComesBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		times := make([]float64, 5)
		sleep := func(d time.Duration) error { time.Sleep(d); return nil }
		err := loop(t.Context(), times, func() error { return sleep(time.Hour) }, func(context.Context) error { return sleep(time.Millisecond) })
		if err != nil || slices.Min(times) != 1000 || slices.Max(times) != 1000 {
			t.Errorf("error %v, and a millisecond took %v µs", err, times)
		}
	})
}

// Interrupted, a benchmark shows what it has and leaves the job.
func TestInterrupted(t *testing.T) {
	var out strings.Builder
	err := cluster(t, 2, nil, func(ctx context.Context, at Place, rank int) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		o := sample()
		o.MaxBytes, o.Placements, o.Progress = 2000, []bool{true}, true
		s := Streams{&strings.Builder{}, &strings.Builder{}}
		if rank == 0 {
			s = Streams{&out, writerFunc(func(p []byte) {
				if strings.Contains(string(p), "2000") {
					cancel()
				}
			})}
		}
		err := Run(ctx, o, at, s)
		if rank == 0 && !errors.Is(err, context.Canceled) {
			t.Errorf("rank 0: got error %v, want the context's", err)
		}
		if rank == 1 && err == nil {
			t.Error("rank 1 went on alone")
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if rows := table(t, out.String()); len(rows) != 1 || rows[0]["bytes"] != "1000" {
		t.Errorf("want the row of 1000 bytes, got\n%s", out.String())
	}
}

type writerFunc func(p []byte)

func (f writerFunc) Write(p []byte) (int, error) { f(p); return len(p), nil }
