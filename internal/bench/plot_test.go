package bench

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// elements checks that an SVG is well formed, and counts its elements and collects their attributes.
func elements(t *testing.T, svg []byte) (count map[string]int, attrs []xml.Attr, texts []string) {
	t.Helper()
	count = make(map[string]int)
	d := xml.NewDecoder(bytes.NewReader(svg))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return count, attrs, texts
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, svg)
		}
		switch e := token.(type) {
		case xml.StartElement:
			count[e.Name.Local]++
			attrs = append(attrs, e.Attr...)
		case xml.CharData:
			if s := strings.TrimSpace(string(e)); s != "" {
				texts = append(texts, s)
			}
		}
	}
}

func TestSVG(t *testing.T) {
	many := Chart{Title: `a < b & "c"`, YLabel: "y"}
	for i := range 40 { // more than there are colors, and lines of legend beside the plot
		many.Series = append(many.Series, Series{Name: "s<" + strconv.Itoa(i), X: []float64{4, 1 << 10, 256 << 20}, Y: []float64{0.001, 3, float64(i + 1)}})
	}
	for name, c := range map[string]Chart{
		"many":      many,
		"one point": {Series: []Series{{Name: "x", X: []float64{1024}, Y: []float64{7}}}},
		"times":     {LogY: true, Series: []Series{{Name: "x", X: []float64{8, 64 << 20}, Y: []float64{0.3, 44000}}}},
		"one time":  {LogY: true, Series: []Series{{Name: "x", X: []float64{8}, Y: []float64{1}}}},
	} {
		count, attrs, texts := elements(t, c.SVG())
		points := 0
		for _, s := range c.Series {
			points += len(s.X)
			if !slices.Contains(texts, s.Name) {
				t.Errorf("%s: the legend lacks %q", name, s.Name)
			}
		}
		if count["polyline"] != len(c.Series) || count["circle"] != points {
			t.Errorf("%s: %v, want %d lines and %d points", name, count, len(c.Series), points)
		}
		height := 0.0
		for _, a := range attrs {
			if height == 0 && a.Name.Local == "height" { // the first is the document's
				height, _ = strconv.ParseFloat(a.Value, 64)
			}
			v, err := strconv.ParseFloat(a.Value, 64)
			inside := map[string]float64{"cx": chartWidth, "x1": chartWidth, "x2": chartWidth, "cy": chartHeight, "y1": height, "y": height}[a.Name.Local]
			if inside > 0 && (err != nil || v < 0 || v > inside) {
				t.Errorf("%s: %s is %s", name, a.Name.Local, a.Value)
			}
		}
	}
	golden(t, "chart.svg", string((&Chart{Title: "t", YLabel: "y", Series: []Series{{"a", []float64{1 << 10, 1 << 20}, []float64{1, 4}}, {"b", []float64{1 << 10}, []float64{2.5}}}}).SVG()))
}

// Where the axis says that a value is, it must be drawn.
func TestAxes(t *testing.T) {
	c := Chart{Series: []Series{{X: []float64{4, 256 << 20}, Y: []float64{0.5, 9}}}}
	x, y := c.axes()
	if x.at(4) != plotLeft || x.at(256<<20) != plotLeft+plotWidth || y.at(0) != plotTop+plotHeight {
		t.Errorf("4 B at %v, 256 MiB at %v, 0 at %v", x.at(4), x.at(256<<20), y.at(0))
	}
	if !slices.Equal(x.tickLabels, []string{"16 B", "256 B", "4 KiB", "64 KiB", "1 MiB", "16 MiB", "256 MiB"}) {
		t.Errorf("sizes %v", x.tickLabels)
	}
	if !slices.Equal(y.tickLabels, []string{"0", "2", "4", "6", "8", "10"}) || y.at(10) != plotTop {
		t.Errorf("values %v", y.tickLabels)
	}
}

func TestPlotNamesWhatDiffers(t *testing.T) {
	dir := t.TempDir()
	header := strings.Join(csvColumns, ",") + "\n"
	row := func(path, memory, bytes string) string {
		return "allreduce," + path + "," + memory + ",false,2," + bytes + ",1,float32,sum,-1,in-place,20,1,2,3,1,4,1,1,5,6,0\n"
	}
	write := func(name, text string) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		return file
	}
	ours := write("a.csv", header+row("raw", "slices", "8")+row("raw", "arena", "8")+row("raw", "arena", "64"))
	peers := write("b.csv", "# x\nompi,allreduce,2,8,20,1.0,1.0,2.0,3.0\nompi,allreduce,2,8,20,1.0,1.0,2.0,5.0\nompi,allreduce,4,8,20,1.0,1.0,2.0,3.0\nompi,barrier,2,0,20,1.0,1.0,0,0\n")
	var all []point
	for _, f := range []string{ours, peers} {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		points, err := readPoints(f, bytes.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, points...)
	}
	all = slices.DeleteFunc(all, func(p point) bool { return p.ranks != 2 })
	got := series(all, BusBandwidth)
	var names []string
	for _, s := range got {
		names = append(names, s.Name)
	}
	if len(got) != 3 || !strings.Contains(names[0], "slices") || !strings.HasPrefix(names[1], "a ") || !strings.Contains(names[1], "arena") || !strings.HasPrefix(names[2], "ompi") {
		t.Fatalf("series %q, want slices, arena and ompi", names)
	}
	if !slices.Equal(got[1].X, []float64{8, 64}) || !slices.Equal(got[2].Y, []float64{4}) { // the median of 3 and 5
		t.Errorf("got %+v", got)
	}
	out := filepath.Join(dir, "out.svg")
	if err := Plot(out, []string{ours, peers}, PlotOptions{Ranks: 2, Op: "allreduce", Metric: Time}); err != nil {
		t.Fatal(err)
	}
	svg, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	if count, _, _ := elements(t, svg); count["polyline"] != 3 {
		t.Errorf("%d lines are drawn, want 3", count["polyline"])
	}
	if err := Plot(out, []string{peers}, PlotOptions{Op: "barrier"}); err == nil {
		t.Error("a barrier has no size, but is drawn")
	}
	for text, want := range map[string]string{"a,b\n": "2 columns, want 9", "ompi,allreduce,2,x,1,1,1,1,1\n": `got "x"`} {
		if err := Plot(out, []string{write("c.csv", text)}, PlotOptions{}); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "line 1") {
			t.Errorf("%q: got error %v, want one with %q", text, err, want)
		}
	}
}
