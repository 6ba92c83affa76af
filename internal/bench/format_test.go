package bench

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

// results are made up.
func results() []line {
	out := &Row{
		Collective: "allreduce", Path: "negotiated", Memory: "slices", Ranks: 2, Bytes: 1 << 20, Count: 1 << 18, Type: "float32", Op: "sum", Root: -1,
		Placement: "out-of-place", Iters: 20, Mean: 1234.5678, P50: 1200, P99: 99999.5, Min: 9.876, Max: 123456, LeastMean: 1230, GreatestMean: 1240,
		AlgBW: 0.84934, BusBW: 0.84934,
	}
	in := *out
	in.Placement, in.Mean, in.P50, in.P99, in.AlgBW, in.BusBW, in.Wrong = "in-place", 104.86, 100.5, 120.25, 10, 10, 3
	in.CPU = []RankCPU{{2, 1.5, 0.25}, {2, 0.5, 0}}
	step := in
	step.Collective, step.Wrong, step.CPU, step.Touch, step.Type = `resnet50,"x"_async`, unchecked, nil, true, "bfloat16"
	return []line{{out, &in}, {in: &step}, {}}
}

func show(format string) string {
	var b strings.Builder
	o := newOutput(format, &sink{w: &b})
	o.begin("hvdbench: a title")
	for _, l := range results() {
		o.line(l)
	}
	o.note("a note")
	o.end(verdict{3, []RankMemory{{64 << 20, 1 << 20, 32 << 20}}, &Negotiation{"resnet50", "float32", 30, 21, 20, 5, 4.5, 5.5}})
	return b.String()
}

func TestFormats(t *testing.T) {
	for _, f := range Formats {
		golden(t, "format."+f, show(f))
	}
	if !json.Valid([]byte(show("json"))) {
		t.Error("the JSON is not valid")
	}
}

// One table for each placement, though rows come in pairs.
func TestTablesOfOSU(t *testing.T) {
	row := func(op string, numBytes int64, inPlace bool) *Row {
		return &Row{Collective: "allreduce", Type: "float32", Op: op, Root: -1, Bytes: numBytes, Placement: placement(inPlace)}
	}
	var b strings.Builder
	o := newOutput("osu", &sink{w: &b})
	for _, op := range []string{"sum", "max"} {
		for _, numBytes := range []int64{8, 16, 32} {
			l := line{row(op, numBytes, false), row(op, numBytes, true)}
			if op == "max" && numBytes == 16 {
				l.out = nil
			}
			o.line(l)
		}
	}
	o.line(line{in: row("min", 8, true)})
	o.line(line{in: row("min", 16, true)})
	o.end(verdict{})
	var got []string
	for l := range strings.Lines(b.String()) {
		if f := strings.Fields(l); f[0] == "#" && f[1] != "Size" {
			got = append(got, f[3]+" "+f[len(f)-1])
		} else if f[0] != "#" {
			got = append(got, f[0])
		}
	}
	want := "sum, out-of-place 8 16 32 sum, in-place 8 16 32 max, out-of-place 8 32 max, in-place 8 16 32 min, in-place 8 16"
	if s := strings.Join(got, " "); s != want {
		t.Errorf("got\n%s\nwant\n%s", s, want)
	}
}

// Who reads nccl-tests' table by columns must find them where they are there.
func TestColumnsOfNCCL(t *testing.T) {
	for l := range strings.Lines(show("nccl")) {
		if strings.HasPrefix(l, "#") {
			continue
		}
		if f := strings.Fields(l); f[0] != "1048576" || f[1] != "262144" || f[3] != "sum" || f[4] != "-1" || f[9] != "104.9" || f[11] != "10.00" || len(f) != 17 {
			t.Errorf("columns %q", f)
		}
	}
}

func TestOutputOfOurCSVIsRead(t *testing.T) {
	points, err := readPoints("dir/x.csv", strings.NewReader(show("csv")))
	if err != nil || len(points) != 3 {
		t.Fatalf("%d points and error %v", len(points), err)
	}
	p := points[1]
	if p.file != "x" || p.op != "allreduce" || p.ranks != 2 || p.bytes != 1<<20 || p.us != 100.5 || p.busbw != 10 || p.attrs[attrPlacement] != "in-place" {
		t.Errorf("got %+v", p)
	}
	if points[2].op != `resnet50,"x"_async` || points[2].attrs[attrTouch] != "touched" {
		t.Errorf("got %+v", points[2])
	}
}

func TestEmptyJSON(t *testing.T) {
	var b strings.Builder
	newOutput("json", &sink{w: &b}).end(verdict{})
	if !strings.Contains(b.String(), `"rows": []`) {
		t.Errorf("got %s", b.String())
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space") }

func TestSinkKeepsTheError(t *testing.T) {
	s := &sink{w: full{}}
	newOutput("csv", s).begin("x")
	if s.err == nil {
		t.Error("the error is lost")
	}
}

func TestProgress(t *testing.T) {
	var b strings.Builder
	p := progress{&b, true}
	p.show("a %d", 1)
	p.clear()
	if got := b.String(); got != "\r\033[Ka 1\r\033[K" {
		t.Errorf("on a terminal: %q", got)
	}
	b.Reset()
	p.terminal = false
	p.show("a")
	p.clear()
	if got := b.String(); got != "hvdbench: a\n" {
		t.Errorf("elsewhere: %q", got)
	}
	(&progress{}).show("nobody") // must not fail
}
