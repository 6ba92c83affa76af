package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

func TestParseSize(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "8": 8, "1K": 1 << 10, "64M": 64 << 20, "2G": 2 << 30, "1T": 1 << 40, "4k": 4 << 10,
		"16KiB": 16 << 10, "16mb": 16 << 20, "512B": 512,
	} {
		if got, err := parseSize(text); err != nil || got != want {
			t.Errorf("%q is %d and error %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "K", "-1", "1.5M", "1X", "1KK", "9999999999999999999", "9000000T",
		"1 K"} {
		if got, err := parseSize(text); err == nil {
			t.Errorf("%q is %d, want an error", text, got)
		}
	}
	for _, n := range []int64{0, 1, 1023, 1024, 1536, 3 << 20, 1 << 30, 1<<30 + 1} {
		if back, err := parseSize(formatSize(n)); err != nil || back != n {
			t.Errorf("%d is written %q, which is read as %d and error %v", n, formatSize(n), back, err)
		}
	}
}

func TestParseNames(t *testing.T) {
	types, err := parseTypes("half,float,double,bfloat16,int8,float32,bool")
	want := []tensor.DType{tensor.Float16, tensor.Float32, tensor.Float64, tensor.BFloat16, tensor.Int8,
		tensor.Float32, tensor.Bool}
	if err != nil || !slices.Equal(types, want) {
		t.Errorf("types are %v and error %v, want %v", types, err, want)
	}
	if types, err = parseTypes("all"); err != nil || !slices.Equal(types, tensor.DTypes()) {
		t.Errorf("all types are %v and error %v", types, err)
	}
	ops, err := parseOps("sum,prod,product,min,max,avg,average")
	wantOps := []tensor.ReduceOp{tensor.Sum, tensor.Product, tensor.Product, tensor.Min, tensor.Max,
		tensor.Average, tensor.Average}
	if err != nil || !slices.Equal(ops, wantOps) {
		t.Errorf("reductions are %v and error %v, want %v", ops, err, wantOps)
	}
	if ops, err = parseOps("all"); err != nil || len(ops) != 5 {
		t.Errorf("all reductions are %v and error %v, want 5", ops, err)
	}
	if modes, err := parseModes("async,bucket25"); err != nil ||
		!slices.Equal(modes, []stepMode{asynchronous, bucketed}) {
		t.Errorf("modes are %v and error %v", modes, err)
	}
	for text, want := range map[string]message.Kind{
		"allreduce": message.Allreduce, "all_reduce": message.Allreduce,
		"reduce-scatter": message.Reducescatter, "bcast": message.Broadcast, "barrier": message.Barrier,
	} {
		if got, err := parseCollective(text); err != nil || got != want {
			t.Errorf("collective %q is %v and error %v, want %v", text, got, err, want)
		}
	}
	if m, err := parseMany("1000:256"); err != nil || m != (many{1000, 256}) {
		t.Errorf("1000:256 is %v and error %v", m, err)
	}
	if roots, err := parseRoots("3"); err != nil || !slices.Equal(roots, []int{3}) {
		t.Errorf("root 3 is %v and error %v", roots, err)
	}
	if roots, err := parseRoots("all"); err != nil || roots != nil {
		t.Errorf("all roots are %v and error %v, want nil", roots, err)
	}
	for name, err := range map[string]error{
		"type uint32":    second(parseTypes("float,uint32")),
		"no type":        second(parseTypes("")),
		"reduction xor":  second(parseOps("sum,xor")),
		"collective p2p": second(parseCollective("p2p")),
		"no collective":  second(parseCollective("")),
		"mode fast":      second(parseModes("async,fast")),
		"root -1":        second(parseRoots("-1")),
		"many 0:4":       second(parseMany("0:4")),
		"many 4":         second(parseMany("4")),
	} {
		if err == nil {
			t.Errorf("%s: got no error", name)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestSizes(t *testing.T) {
	for _, c := range []struct {
		o    options
		want []int64
	}{
		{options{minBytes: 8, maxBytes: 64, stepFactor: 2}, []int64{8, 16, 32, 64}},
		{options{minBytes: 8, maxBytes: 100, stepFactor: 4}, []int64{8, 32}},
		{options{minBytes: 8, maxBytes: 24, stepBytes: 8}, []int64{8, 16, 24}},
		{options{minBytes: 8, maxBytes: 8}, []int64{8}},
		// The next size after 1<<62 would overflow.
		{options{minBytes: 1 << 62, maxBytes: 1<<63 - 1, stepFactor: 4}, []int64{1 << 62}},
		{options{minBytes: 0, maxBytes: 4, stepBytes: 4}, []int64{0, 4}},
	} {
		if got := c.o.sizes(); !slices.Equal(got, c.want) {
			t.Errorf("%d to %d by factor %d, step %d: got %v, want %v", c.o.minBytes, c.o.maxBytes,
				c.o.stepFactor, c.o.stepBytes, got, c.want)
		}
	}
}

// TestSizesAreCountedBeforeTheyFillMemory checks that the method check refuses options with too many sizes
// without making the whole list. In this test the list would take 8 TiB.
func TestSizesAreCountedBeforeTheyFillMemory(t *testing.T) {
	o := sample()
	o.minBytes, o.maxBytes, o.stepFactor, o.stepBytes = 1, 1<<40, 0, 1
	if n := len(o.sizes()); n != maxLines+1 {
		t.Errorf("%d sizes, want %d", n, maxLines+1)
	}
	if err := o.check(); err == nil || !strings.Contains(err.Error(), "more than 100000 sizes") {
		t.Errorf("got error %v", err)
	}
}

func TestContradictions(t *testing.T) {
	ok := sample()
	if err := ok.check(); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(o *options){
		"the value of --minbytes":    func(o *options) { o.maxBytes = 10 },
		"--stepfactor is 1":          func(o *options) { o.stepFactor = 1 },
		"--stepfactor multiplies it": func(o *options) { o.minBytes = 0 },
		"--stepbytes is 0": func(o *options) {
			o.stepFactor, o.maxBytes = 0, 2000
		},
		"--iters is 0":                                 func(o *options) { o.iters = 0 },
		"--warmup-iters is -1":                         func(o *options) { o.warmup = -1 },
		"--average is 4":                               func(o *options) { o.average = 4 },
		`--format is "xml"`:                            func(o *options) { o.format = "xml" },
		"cannot be used together":                      func(o *options) { o.workload, o.many = "gpt2", many{1, 4} },
		"measure only allreduce, got barrier":          func(o *options) { o.kind, o.workload = message.Barrier, "gpt2" },
		"--in-place and --out-of-place are both false": func(o *options) { o.placements = nil },
		"--gpu measures only allreduce":                func(o *options) { o.gpu, o.arena = true, true },
		"--offset is 4096":                             func(o *options) { o.offset = 4096 },
		"--offset is -8":                               func(o *options) { o.offset = -8 },
		"--offset is 12":                               func(o *options) { o.offset = 12 },
		"--offset cannot be used with":                 func(o *options) { o.offset, o.arena = 8, true },
		"--seconds is -1":                              func(o *options) { o.seconds = -1 },
		"--max-seconds is 0":                           func(o *options) { o.maxSeconds = 0 },
		"raise --stepbytes or --": func(o *options) {
			o.minBytes, o.maxBytes, o.stepFactor, o.stepBytes = 0,
				1<<20, 0, 1
		},
	} {
		o := sample()
		change(&o)
		if err := o.check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want one with %q", err, want)
		}
	}
}
