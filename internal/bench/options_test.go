package bench

import (
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/tensor"
)

func TestParseSize(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "8": 8, "1K": 1 << 10, "64M": 64 << 20, "2G": 2 << 30, "1T": 1 << 40, "4k": 4 << 10, "16KiB": 16 << 10, "16mb": 16 << 20, "512B": 512,
	} {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Errorf("%q is %d and error %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "K", "-1", "1.5M", "1X", "1KK", "9999999999999999999", "9000000T", "1 K"} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("%q is %d, want an error", text, got)
		}
	}
	for _, n := range []int64{0, 1, 1023, 1024, 1536, 3 << 20, 1 << 30, 1<<30 + 1} {
		if back, err := ParseSize(FormatSize(n)); err != nil || back != n {
			t.Errorf("%d is written %q, which is read as %d and error %v", n, FormatSize(n), back, err)
		}
	}
}

func TestParseNames(t *testing.T) {
	types, err := ParseTypes("half,float,double,bfloat16,int8,float32,bool")
	want := []tensor.DType{tensor.Float16, tensor.Float32, tensor.Float64, tensor.BFloat16, tensor.Int8, tensor.Float32, tensor.Bool}
	if err != nil || !slices.Equal(types, want) {
		t.Errorf("types are %v and error %v, want %v", types, err, want)
	}
	if types, err = ParseTypes("all"); err != nil || !slices.Equal(types, tensor.DTypes()) {
		t.Errorf("all types are %v and error %v", types, err)
	}
	ops, err := ParseOps("sum,prod,product,min,max,avg,average")
	wantOps := []tensor.ReduceOp{tensor.Sum, tensor.Product, tensor.Product, tensor.Min, tensor.Max, tensor.Average, tensor.Average}
	if err != nil || !slices.Equal(ops, wantOps) {
		t.Errorf("reductions are %v and error %v, want %v", ops, err, wantOps)
	}
	if ops, err = ParseOps("all"); err != nil || len(ops) != 5 {
		t.Errorf("all reductions are %v and error %v, want 5", ops, err)
	}
	for text, want := range map[string]string{"allreduce": "allreduce", "all_reduce": "allreduce", "reduce-scatter": "reducescatter", "bcast": "broadcast", "barrier": "barrier"} {
		if got, err := ParseCollective(text); err != nil || got != want {
			t.Errorf("collective %q is %q and error %v, want %q", text, got, err, want)
		}
	}
	if m, err := ParseMany("1000:256"); err != nil || m != (Many{1000, 256}) {
		t.Errorf("1000:256 is %v and error %v", m, err)
	}
	if roots, err := ParseRoots("3"); err != nil || !slices.Equal(roots, []int{3}) {
		t.Errorf("root 3 is %v and error %v", roots, err)
	}
	if roots, err := ParseRoots("all"); err != nil || roots != nil {
		t.Errorf("all roots are %v and error %v, want nil", roots, err)
	}
	for name, err := range map[string]error{
		"type uint32":    second(ParseTypes("float,uint32")),
		"no type":        second(ParseTypes("")),
		"reduction xor":  second(ParseOps("sum,xor")),
		"collective p2p": second(ParseCollective("p2p")),
		"root -1":        second(ParseRoots("-1")),
		"many 0:4":       second(ParseMany("0:4")),
		"many 4":         second(ParseMany("4")),
	} {
		if err == nil {
			t.Errorf("%s is no error", name)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestSizes(t *testing.T) {
	for _, c := range []struct {
		o    Options
		want []int64
	}{
		{Options{MinBytes: 8, MaxBytes: 64, StepFactor: 2}, []int64{8, 16, 32, 64}},
		{Options{MinBytes: 8, MaxBytes: 100, StepFactor: 4}, []int64{8, 32}},
		{Options{MinBytes: 8, MaxBytes: 24, StepBytes: 8}, []int64{8, 16, 24}},
		{Options{MinBytes: 8, MaxBytes: 8}, []int64{8}},
		{Options{MinBytes: 1 << 62, MaxBytes: 1<<63 - 1, StepFactor: 4}, []int64{1 << 62}}, // the next is not a number
		{Options{MinBytes: 0, MaxBytes: 4, StepBytes: 4}, []int64{0, 4}},
	} {
		if got := c.o.sizes(); !slices.Equal(got, c.want) {
			t.Errorf("%d to %d by factor %d, step %d: got %v, want %v", c.o.MinBytes, c.o.MaxBytes, c.o.StepFactor, c.o.StepBytes, got, c.want)
		}
	}
}

// Check must refuse a list before it is made: this one would take 8 TiB.
func TestSizesAreCountedBeforeTheyFillMemory(t *testing.T) {
	o := sample()
	o.MinBytes, o.MaxBytes, o.StepFactor, o.StepBytes = 1, 1<<40, 0, 1
	if n := len(o.sizes()); n != maxLines+1 {
		t.Errorf("%d sizes, want %d", n, maxLines+1)
	}
	if err := o.Check(); err == nil || !strings.Contains(err.Error(), "more than 100000 sizes") {
		t.Errorf("got error %v", err)
	}
}

func TestContradictions(t *testing.T) {
	ok := sample()
	if err := ok.Check(); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(o *Options){
		"less than --minbytes":    func(o *Options) { o.MaxBytes = 10 },
		"--stepfactor is 1":       func(o *Options) { o.StepFactor = 1 },
		"no factor makes larger":  func(o *Options) { o.MinBytes = 0 },
		"--stepbytes is 0":        func(o *Options) { o.StepFactor, o.MaxBytes = 0, 2000 },
		"--iters is 0":            func(o *Options) { o.Iters = 0 },
		"--warmup-iters is -1":    func(o *Options) { o.Warmup = -1 },
		"--average is 4":          func(o *Options) { o.Average = 4 },
		`--format is "xml"`:       func(o *Options) { o.Format = "xml" },
		"exclude each other":      func(o *Options) { o.Workload, o.Many = "gpt2", Many{1, 4} },
		"--negotiation needs":     func(o *Options) { o.Negotiation = 30 },
		"--negotiation is 1":      func(o *Options) { o.Workload, o.Negotiation = "gpt2", 1 },
		"--negotiation and --raw": func(o *Options) { o.Workload, o.Negotiation, o.Raw = "gpt2", 30, true },
		"steps of one type":       func(o *Options) { o.Workload, o.Negotiation, o.Types = "gpt2", 30, tensor.DTypes() },
		"--negotiation and --plo": func(o *Options) { o.Workload, o.Negotiation, o.Plot = "gpt2", 30, "x.svg" },
		"a barrier has no size":   func(o *Options) { o.Collective, o.Plot = "barrier", "x.svg" },
		`--mode: got "bucket25"`:  func(o *Options) { o.Modes = []string{"bucket25"} },
		"raise --stepbytes or --": func(o *Options) { o.MinBytes, o.MaxBytes, o.StepFactor, o.StepBytes = 0, 1<<20, 0, 1 },
	} {
		o := sample()
		change(&o)
		if err := o.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want one with %q", err, want)
		}
	}
}
