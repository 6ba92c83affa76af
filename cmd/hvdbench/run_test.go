package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
)

func TestEveryCollectiveOnEveryPath(t *testing.T) {
	for _, kind := range kinds {
		for _, path := range []string{"negotiated", "raw", "negotiated arena", "raw arena", "raw tcp",
			"negotiated touch"} {
			for _, n := range []int{1, 3} {
				t.Run(fmt.Sprintf("%v/%s/ranks=%d", kind, path, n), func(t *testing.T) {
					settings := map[string]string{}
					if strings.Contains(path, "tcp") {
						settings["HOROVOD_CPU_OPERATIONS"] = "tcp"
					}
					out, log, err := runs(t, n, settings, func(o *options, _ int) {
						o.kind = kind
						o.raw, o.arena, o.touch = strings.Contains(path, "raw"),
							strings.Contains(path, "arena"), strings.Contains(path, "touch")
						o.types, o.ops, o.roots = []tensor.DType{tensor.Float32, tensor.Bool,
							tensor.BFloat16}, []tensor.ReduceOp{tensor.Sum, tensor.Max}, nil
						o.minBytes, o.maxBytes, o.stepFactor = 100, 10000, 100
					})
					if err != nil {
						t.Fatalf("%v\n%s", err, log)
					}
					rows := table(t, out)
					want := map[message.Kind]int{
						message.Allreduce: 2 * 5, message.Reducescatter: 2 * 5, // bools have no sum
						message.Allgather: 2 * 3, message.Alltoall: 2 * 3, message.Broadcast: 2 * 3 * n,
						message.Barrier: 1,
					}[kind]
					if kind != message.Barrier && !strings.Contains(path, "raw") {
						want *= 2
					}
					// A raw backend supports one placement or both, which may depend on the algorithm.
					if len(rows) != want && !(strings.Contains(path, "raw") && want < len(rows) &&
						len(rows) <= 2*want) {
						t.Errorf("%d rows, want %d:\n%s", len(rows), want, out)
					}
					for _, row := range rows {
						expect := "0"
						if kind == message.Barrier {
							expect = "-1"
						}
						if row["wrong"] != expect || row["collective"] != kind.String() ||
							row["ranks"] != fmt.Sprint(n) || row["iters"] != "3" {
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
		message.Allgather: {"996", "83"}, message.Reducescatter: {"996", "83"},
		message.Alltoall: {"996", "83"},
	} {
		out, _, err := runs(t, 3, nil, func(o *options, _ int) { o.kind = kind })
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
	testnet.WriteFile(t, file, "a 1000 10x100\nb 1 1\nc 77\n")
	for _, raw := range []bool{false, true} {
		wantSteps := []string{"tiny_pertensor", "tiny_async", "tiny_grouped", "tiny_bucket25"}
		if raw {
			wantSteps = wantSteps[:3] // buckets need negotiation
		}
		for _, arena := range []bool{false, true} {
			out, log, err := runs(t, 2, nil, func(o *options, _ int) {
				o.workload, o.modes, o.raw, o.arena, o.touch = file, []stepMode{perTensor, asynchronous,
					grouped, bucketed}, raw, arena, arena
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
			if want := wantSteps; !slices.Equal(names, want) {
				t.Errorf("raw %v: rows %v, want %v", raw, names, wantSteps)
			}
		}
	}
	out, _, err := runs(t, 2, nil, func(o *options, _ int) { o.many = many{50, 256} })
	if rows := table(t, out); err != nil || len(rows) != 1 || rows[0]["bytes"] != "12800" ||
		rows[0]["collective"] != "many50x256_async" {
		t.Errorf("many: error %v and\n%s", err, out)
	}
}

func TestSecondsChooseTheNumberOfCalls(t *testing.T) {
	out, log, err := runs(t, 2, nil, func(o *options, _ int) { o.seconds, o.placements = 1e-9, []bool{true} })
	if rows := table(t, out); err != nil || len(rows) != 1 || rows[0]["iters"] != "20" ||
		!strings.Contains(out, ", 3 to 20000 timed calls, for about 1e-09 s if that many suffice\n") {
		t.Errorf("--seconds 1e-9, want 20 calls: error %v and\n%s%s", err, out, log)
	}
}

// TestMoreThanTheMemory measures tensors that do not fit in the memory of the host. The benchmark must return
// an error, and the process must not be killed.
func TestMoreThanTheMemory(t *testing.T) {
	for _, arena := range []bool{false, true} {
		_, _, err := runs(t, 1, nil, func(o *options, _ int) {
			o.minBytes, o.maxBytes, o.arena = 1000<<40,
				1000<<40, arena
		})
		if err == nil || !strings.Contains(err.Error(), "the tensors need 1024000G of memory, but ") {
			t.Errorf("arena %v: got error %v", arena, err)
		}
	}
	_, _, err := runs(t, 1, nil, func(o *options, _ int) { o.many = many{100, 1 << 60} })
	if err == nil || !strings.Contains(err.Error(), "of memory, but this host has only ") {
		t.Errorf("many: got error %v", err)
	}
}

// TestRanksMustMeasureTheSame checks that ranks with different options get an error instead of waiting for
// each other.
func TestRanksMustMeasureTheSame(t *testing.T) {
	_, _, err := runs(t, 2, nil, func(o *options, rank int) { o.maxBytes += int64(rank) })
	if err == nil || !strings.Contains(err.Error(), "the options of rank 1 differ") {
		t.Errorf("got error %v", err)
	}
}

// TestWhatABackendHasNot checks --raw with a reduction that backends do not support. If no other reduction is
// given, the benchmark must fail. Otherwise it must leave out this reduction.
func TestWhatABackendHasNot(t *testing.T) {
	_, _, err := runs(t, 2, nil, func(o *options, _ int) {
		o.raw, o.ops, o.placements = true, []tensor.ReduceOp{tensor.Average}, []bool{true}
	})
	var absent errUnsupported
	if !errors.As(err, &absent) || !strings.Contains(err.Error(), "no averages") {
		t.Errorf("got error %v", err)
	}
	// The backend supports averages in neither placement, so the benchmark must fail.
	_, _, err = runs(t, 2, nil, func(o *options, _ int) {
		o.raw, o.ops = true, []tensor.ReduceOp{tensor.Average}
	})
	if !errors.As(err, &absent) || !strings.Contains(err.Error(), "no averages") {
		t.Errorf("both placements: got error %v", err)
	}
	for _, placements := range [][]bool{{true}, {false, true}} {
		out, log, err := runs(t, 2, nil, func(o *options, _ int) {
			o.raw, o.ops, o.placements = true, []tensor.ReduceOp{tensor.Average, tensor.Max}, placements
		})
		rows := table(t, out)
		if err != nil || len(rows) == 0 || rows[0]["redop"] != "max" {
			t.Errorf("an average and a maximum: error %v and\n%s", err, out)
		}
		if want := "hvdbench: skipped allreduce of float avg: a backend has no averages"; strings.Count(log,
			want) != 1 {
			t.Errorf("got %q, want %q once", log, want)
		}
	}
	_, _, err = runs(t, 2, nil, func(o *options, _ int) {
		o.types, o.ops = []tensor.DType{tensor.Bool}, []tensor.ReduceOp{tensor.Sum, tensor.Average}
	})
	if err == nil || !strings.Contains(err.Error(), "reduce bool") {
		t.Errorf("sum and average of bools: got error %v", err)
	}
	_, _, err = runs(t, 2, nil, func(o *options, _ int) { o.types = []tensor.DType{tensor.Bool} })
	if err == nil || !strings.Contains(err.Error(), "reduce bool") {
		t.Errorf("sum of bools: got error %v", err)
	}
}

// placed is a path that stores the offset in a page of the last tensor of an allreduce.
type placed struct {
	path
	offset *int64
}

func (p placed) prepare(s opSpec, name string, buf []byte) (*action, error) {
	if s.kind == message.Allreduce {
		*p.offset = addressOf(buf) % pageBytes
	}
	return p.path.prepare(s, name, buf)
}

// With --offset, the tensors of the operations begin there, and the results say so.
func TestOffset(t *testing.T) {
	var out strings.Builder
	err := cluster(t, 1, nil, func(ctx context.Context, at jobPlace, _ int) error {
		o := sample()
		o.offset = 1032
		j, err := join(ctx, at, false, false)
		if err != nil {
			return err
		}
		b := &benchmark{options: o, job: j, team: j.team, log: io.Discard, out: &printer{w: &out}}
		var offset int64
		b.team.path = placed{b.team.path, &offset}
		if err := b.all(ctx); err != nil || offset != o.offset {
			t.Errorf("got tensors at offset %d and error %v, want offset %d", offset, err, o.offset)
		}
		return j.leave(ctx)
	})
	if err != nil || !strings.Contains(out.String(), "slices+1032") {
		t.Errorf("got error %v and the output\n%s", err, out.String())
	}
}

// corrupted is a path that changes one byte of the results at one rank to a wrong value.
type corrupted struct {
	path
	after *int // number of correct operations before the first wrong one
}

func (p corrupted) prepare(s opSpec, name string, buf []byte) (*action, error) {
	a, err := p.path.prepare(s, name, buf)
	if err != nil || s.dt != tensor.Float32 {
		return a, err
	}
	return &action{result: a.result, ran: a.ran, run: func(ctx context.Context) error {
		err := a.run(ctx)
		p.spoil(a.result())
		return err
	}}, nil
}

func (p corrupted) step(mode stepMode, dt tensor.DType, tensors,
	flats []named) (*action, error) {
	a, err := p.path.step(mode, dt, tensors, flats)
	return &action{ran: a.ran, run: func(ctx context.Context) error {
		err := a.run(ctx)
		p.spoil(tensors[len(tensors)-1].buf)
		return err
	}}, err
}

func (p corrupted) spoil(b []byte) {
	if *p.after--; *p.after < 0 && len(b) > 0 {
		b[len(b)-2] ^= 0x40
	}
}

// TestAWrongByteIsSeen checks that the verification notices one wrong element, even at a rank that does not
// print the result. The element is wrong either from the first call on or only in later calls.
func TestAWrongByteIsSeen(t *testing.T) {
	for _, kind := range []message.Kind{message.Allreduce, message.Allgather, message.Broadcast,
		message.Reducescatter, message.Alltoall, message.Join} {
		for _, after := range []int{0, 4} { // with 4, the verification before the timed calls passes
			var out strings.Builder
			err := cluster(t, 2, nil, func(ctx context.Context, at jobPlace, rank int) error {
				o := sample()
				o.placements = []bool{true}
				if kind == message.Join {
					o.many = many{3, 400}
				} else {
					o.kind = kind
				}
				j, err := join(ctx, at, false, false)
				if err != nil {
					return err
				}
				b := &benchmark{options: o, job: j, team: j.team, log: io.Discard,
					out: &printer{w: io.Discard}}
				if rank == 0 {
					b.out.w = &out
				} else {
					b.team.path = corrupted{b.team.path, &after}
				}
				err = b.all(ctx)
				var wrong *wrongError
				if !errors.As(err, &wrong) || wrong.count < 1 || wrong.count > 2 {
					t.Errorf("%v, rank %d, after %d: got error %v, want a *wrongError", kind, rank, after,
						err)
				}
				return j.leave(ctx)
			})
			if err != nil {
				t.Error(err)
			}
			if !strings.Contains(out.String(), "FAILED") {
				t.Errorf("%v: rank 0 does not print FAILED:\n%s", kind, out.String())
			}
		}
	}
}

// TestTheLoopAllocatesNothing checks that loop allocates nothing and measures a positive time for each call.
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

// TestTheLoopDoesNotTimeWhatComesBefore checks that the times that loop measures do not include the time of
// the function before.
func TestTheLoopDoesNotTimeWhatComesBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		times := make([]float64, 5)
		sleep := func(d time.Duration) error { time.Sleep(d); return nil }
		err := loop(t.Context(), times, func() error { return sleep(time.Hour) },
			func(context.Context) error { return sleep(time.Millisecond) })
		if err != nil || slices.Min(times) != 1000 || slices.Max(times) != 1000 {
			t.Errorf("error %v, and a millisecond took %v µs", err, times)
		}
	})
}

// TestInterrupted checks that a benchmark that is interrupted prints the rows that it has and leaves the job.
func TestInterrupted(t *testing.T) {
	var out strings.Builder
	err := cluster(t, 2, nil, func(ctx context.Context, at jobPlace, rank int) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		o := sample()
		o.maxBytes, o.placements = 2000, []bool{true}
		s := streams{io.Discard, io.Discard}
		if rank == 0 {
			s.out = writerFunc(func(p []byte) (int, error) {
				// When this row is printed, the row of 2000 bytes has not been printed yet.
				if strings.Contains(string(p), ",1000,250,") {
					cancel()
				}
				return out.Write(p)
			})
		}
		err := measure(ctx, o, at, s, nil)
		if rank == 0 && !errors.Is(err, context.Canceled) {
			t.Errorf("rank 0: got error %v, want the context's", err)
		}
		if rank == 1 && err == nil {
			t.Error("rank 1 went on without the other rank")
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

// A backend that cannot be opened is an error.
func TestBackendFails(t *testing.T) {
	settings := map[string]string{"HVD_INIT_METHOD": "tcp://nowhere", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
	j, err := join(t.Context(), jobPlace{settings: settings}, true, false)
	if j != nil || err == nil || !strings.Contains(err.Error(), "open the backend: ") {
		t.Errorf("got job %v and error %v", j, err)
	}
}

// TestStateOfTheCores checks that rank 0 prints the state of the cores before and after the results, and a
// warning if the state has changed. A benchmark whose cores are busy goes on.
func TestStateOfTheCores(t *testing.T) {
	at := func(roundTrip float64) distance { return distance{[]int{0, 1}, roundTrip, 2.5} }
	near, far := at(0.06), at(0.33)
	const changed = "the cores were near before and are far after: compare times only of one state"
	for name, c := range map[string]struct {
		states []distance
		want   []string
	}{
		"near": {[]distance{near, near}, []string{"# before: cores 0 and 1: near: ",
			"# after: cores 0 and 1: near: "}},
		"changed": {[]distance{near, far}, []string{"# before: cores 0 and 1: near: ",
			"# after: cores 0 and 1: far: ", changed}},
		"border": {[]distance{at(0.19), at(0.21)}, []string{"# before: cores 0 and 1: near: ",
			"# after: cores 0 and 1: far: "}},
		"busy": {nil, []string{"# before: the state of the cores is unknown: busy",
			"# after: the state of the cores is unknown: busy"}},
	} {
		outs := make([]strings.Builder, 2)
		var calls int
		err := cluster(t, 2, nil, func(ctx context.Context, at jobPlace, rank int) error {
			cores := func(context.Context) (distance, error) {
				if c.states == nil {
					return distance{}, errors.New("busy")
				}
				calls++ // only rank 0 calls this
				return c.states[calls-1], nil
			}
			return measure(ctx, sample(), at, streams{&outs[rank], io.Discard}, cores)
		})
		out := outs[0].String()
		for _, w := range c.want {
			if err != nil || !strings.Contains(out, w) {
				t.Errorf("%s: error %v and %q, want %q in it", name, err, out, w)
			}
		}
		if warned := strings.Contains(out, changed); warned != (name == "changed") || outs[1].Len() > 0 {
			t.Errorf("%s: rank 0 printed %q, and rank 1 %q", name, out, &outs[1])
		}
	}
}
