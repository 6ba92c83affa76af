package main

import (
	"encoding/csv"
	"errors"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/tensor"
)

// lines returns lines of results with made-up times.
func lines() []line {
	out := &result{
		collective: "allreduce", path: "negotiated", memory: "slices", ranks: 2, bytes: 1 << 20,
		count: 1 << 18, dt: tensor.Float32, op: tensor.Sum, root: -1,
		placement: "out-of-place", iters: 20, mean: 1234.5678, p50: 1200, p99: 99999.5, min: 9.876,
		max: 123456, leastMean: 1230, greatestMean: 1240,
		algBW: 0.84934, busBW: 0.84934, ran: ways{"hier two-level"},
	}
	in := *out
	in.placement, in.mean, in.p50, in.p99, in.algBW, in.busBW, in.wrong = "in-place", 104.86, 100.5, 120.25,
		10, 10, 3
	step := in
	step.ran = ways{"tcp ring", "tcp recursive-doubling"}
	step.collective, step.wrong, step.touch, step.dt = `resnet50,"x"_async`, unchecked, true, tensor.BFloat16
	return []line{{out, &in}, {in: &step}}
}

func show(format string) string {
	var b strings.Builder
	p := &printer{w: &b, csv: format == "csv"}
	p.begin("hvdbench: a title")
	for _, l := range lines() {
		p.line(l)
	}
	p.note("a note")
	p.end(3)
	return b.String()
}

func TestFormats(t *testing.T) {
	for _, f := range formats {
		golden(t, "format."+f, show(f))
	}
	r := csv.NewReader(strings.NewReader(show("csv")))
	r.Comment = '#'
	records, err := r.ReadAll()
	if err != nil || len(records) != 4 || records[3][0] != `resnet50,"x"_async` {
		t.Errorf("records %q and error %v", records, err)
	}
}

// TestColumnsOfNCCL checks that the nccl format has the same columns as the table of nccl-tests. So scripts
// that read the columns of that table can also read the output of hvdbench.
func TestColumnsOfNCCL(t *testing.T) {
	for l := range strings.Lines(show("nccl")) {
		if strings.HasPrefix(l, "#") {
			continue
		}
		if f := strings.Fields(l); f[0] != "1048576" || f[1] != "262144" || f[3] != "sum" || f[4] != "-1" ||
			f[9] != "104.9" || f[11] != "10.00" || len(f) != 17 {
			t.Errorf("columns %q", f)
		}
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space") }

func TestPrinterKeepsTheError(t *testing.T) {
	p := &printer{w: full{}, csv: true}
	p.begin("x")
	if p.err == nil {
		t.Error("the error is lost")
	}
}
