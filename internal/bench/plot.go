package bench

import (
	"cmp"
	"encoding/xml"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"
	"strings"
)

// Series is a line of a chart.
type Series struct {
	Name string
	X, Y []float64 // bytes, and what the chart shows
}

// Chart is a drawing of Y over a logarithmic X in bytes.
type Chart struct {
	Title  string
	YLabel string
	LogY   bool
	Series []Series
}

// Metric is what a chart shows of each point.
type Metric string

// The metrics.
const (
	BusBandwidth Metric = "busbw"
	Time         Metric = "time"

	algBandwidth Metric = "algbw" // of results of one rank, which has no busbw
)

func (m Metric) label() string {
	switch m {
	case Time:
		return "median time in µs"
	case algBandwidth:
		return "algorithm bandwidth (algbw) in GB/s"
	}
	return "bus bandwidth in GB/s"
}

func (m Metric) of(p point) float64 {
	switch m {
	case Time:
		return p.us
	case algBandwidth:
		return p.algbw
	}
	return p.busbw
}

// PlotOptions choose what is drawn. Empty strings and 0 choose everything.
type PlotOptions struct {
	Title, Op string
	Ranks     int
	Metric    Metric
}

// Plot draws the results of CSV files, of hvdbench or the harness, into a file of SVG.
func Plot(out string, files []string, o PlotOptions) error {
	var all []point
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		points, err := readPoints(name, f)
		f.Close()
		if err != nil {
			return err
		}
		all = append(all, points...)
	}
	all = slices.DeleteFunc(all, func(p point) bool {
		return o.Op != "" && p.op != o.Op || o.Ranks != 0 && p.ranks != o.Ranks
	})
	d, err := openDrawing(out)
	if err != nil {
		return err
	}
	return errors.Join(d.draw(all, o), d.close())
}

// drawing is a file to draw into. Until then it stays what it was.
type drawing struct {
	*os.File
	made bool // by openDrawing, and nothing is in it
}

func openDrawing(name string) (*drawing, error) {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	made := err == nil
	if errors.Is(err, fs.ErrExist) {
		f, err = os.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o666) // it may be a link to a file that is not
	}
	if err != nil {
		return nil, fmt.Errorf("plot: %w", err)
	}
	return &drawing{f, made}, nil
}

// close leaves no empty file behind. d may be nil.
func (d *drawing) close() error {
	if d == nil {
		return nil
	}
	err := d.Close()
	if d.made {
		err = errors.Join(err, os.Remove(d.Name()))
	}
	return err
}

func (d *drawing) draw(all []point, o PlotOptions) error {
	c, err := newChart(all, o)
	if err != nil {
		return fmt.Errorf("plot %s: %w", d.Name(), err)
	}
	d.made = false
	if info, err := d.Stat(); err == nil && info.Mode().IsRegular() { // a pipe has no end to cut off
		if err := d.Truncate(0); err != nil {
			return err
		}
	}
	_, err = d.Write(c.SVG())
	return err
}

func newChart(all []point, o PlotOptions) (*Chart, error) {
	metric := cmp.Or(o.Metric, BusBandwidth)
	found := series(all, metric)
	if len(found) == 0 && metric == BusBandwidth {
		metric = algBandwidth
		found = series(all, metric)
	}
	if len(found) == 0 {
		return nil, errors.New("there is no result with a size to draw")
	}
	c := &Chart{Title: o.Title, YLabel: metric.label(), LogY: metric == Time, Series: found}
	if c.Title == "" {
		c.Title = strings.Join(common(all), ", ")
	}
	return c, nil
}

// series are the points of one sort each. Their names have what differs between them.
func series(all []point, m Metric) []Series {
	all = slices.DeleteFunc(slices.Clone(all), func(p point) bool {
		y := m.of(p)
		return p.bytes <= 0 || !(y > 0) || math.IsInf(y, 0)
	})
	varying := make([]bool, numAttrs)
	files := false
	for _, p := range all {
		for a := range numAttrs {
			varying[a] = varying[a] || p.attrs[a] != all[0].attrs[a]
		}
		files = files || p.file != all[0].file
	}
	byName := make(map[string]map[float64][]float64)
	var names []string
	for _, p := range all {
		var words []string
		if files && p.attrs[attrPeer] == "" {
			words = append(words, p.file)
		}
		for a := range numAttrs {
			if varying[a] && p.attrs[a] != "" {
				words = append(words, p.attrs[a])
			}
		}
		name := strings.Join(words, " ")
		if byName[name] == nil {
			byName[name] = make(map[float64][]float64)
			names = append(names, name)
		}
		x := float64(p.bytes)
		byName[name][x] = append(byName[name][x], m.of(p))
	}
	var list []Series
	for _, name := range names {
		s := Series{Name: name}
		for x := range byName[name] {
			s.X = append(s.X, x)
		}
		slices.Sort(s.X)
		for _, x := range s.X {
			s.Y = append(s.Y, median(byName[name][x])) // of several rounds
		}
		list = append(list, s)
	}
	return list
}

// common are the attributes that all points share and that a title should say.
func common(all []point) []string {
	var words []string
	for _, a := range []int{attrOp, attrRanks, attrPath, attrMemory, attrType, attrRedop, attrPlacement} {
		text := all[0].attrs[a]
		if text != "" && !slices.ContainsFunc(all, func(p point) bool { return p.attrs[a] != text }) {
			words = append(words, text)
		}
	}
	return words
}

// The drawing, in pixels.
const (
	chartWidth, chartHeight = 860, 480
	plotLeft, plotTop       = 72, 52
	plotWidth, plotHeight   = 540, 364
	legendLeft, legendTop   = plotLeft + plotWidth + 20, plotTop + 10
	legendRow               = 22
)

// colors can be told apart by people who confuse some (Okabe and Ito, Color universal design, 2008), without the yellow.
var colors = []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#333333"}

// dashes tell series of one color apart.
var dashes = []string{"", "7 4", "2 3"}

// SVG is the chart as a document of its own. It is as high as its legend needs.
func (c *Chart) SVG() []byte {
	var b strings.Builder
	height := max(chartHeight, legendTop+legendRow*len(c.Series))
	x, y := c.axes()
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#222">`+"\n",
		chartWidth, height, chartWidth, height)
	fmt.Fprintf(&b, `<title>%s</title>`+"\n", escape(c.Title))
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#ffffff"/>`+"\n", chartWidth, chartHeight)
	fmt.Fprintf(&b, `<text x="%d" y="28" font-size="16" font-weight="bold">%s</text>`+"\n", plotLeft, escape(c.Title))
	c.grid(&b, x, y)
	for i, s := range c.Series {
		c.curve(&b, i, s, x, y)
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

func escape(text string) string {
	var b strings.Builder
	if err := xml.EscapeText(&b, []byte(text)); err != nil {
		return ""
	}
	return b.String()
}

// axis maps values to pixels.
type axis struct {
	low, high  float64 // logarithms if log
	from, to   float64 // pixels
	log        bool
	ticks      []float64
	tickLabels []string
}

func (a *axis) at(v float64) float64 {
	if a.log {
		v = math.Log2(v)
	}
	return a.from + (v-a.low)/(a.high-a.low)*(a.to-a.from)
}

func (c *Chart) axes() (x, y axis) {
	var xs, ys []float64
	for _, s := range c.Series {
		xs, ys = append(xs, s.X...), append(ys, s.Y...)
	}
	x = axis{from: plotLeft, to: plotLeft + plotWidth, log: true}
	x.low, x.high = math.Floor(math.Log2(slices.Min(xs))), math.Ceil(math.Log2(slices.Max(xs)))
	if x.low == x.high {
		x.low, x.high = x.low-1, x.high+1
	}
	step := 1.0
	for _, step = range []float64{1, 2, 4, 10, 20} {
		if (x.high-x.low)/step <= 9 {
			break
		}
	}
	for e := math.Ceil(x.low/step) * step; e <= x.high; e += step {
		x.ticks = append(x.ticks, math.Exp2(e))
		x.tickLabels = append(x.tickLabels, bytesLabel(math.Exp2(e)))
	}
	y = axis{from: plotTop + plotHeight, to: plotTop, log: c.LogY}
	if c.LogY {
		low, high := math.Floor(math.Log10(slices.Min(ys))), math.Ceil(math.Log10(slices.Max(ys)))
		if low == high {
			high++
		}
		y.low, y.high = low*math.Log2(10), high*math.Log2(10)
		for e := low; e <= high; e++ {
			y.ticks = append(y.ticks, math.Pow(10, e))
			y.tickLabels = append(y.tickLabels, plain(math.Pow(10, e)))
		}
		return x, y
	}
	top := slices.Max(ys)
	unit := niceStep(top / 6)
	y.high = math.Ceil(top/unit) * unit
	for i := 0; float64(i)*unit <= y.high+unit/2; i++ {
		y.ticks = append(y.ticks, float64(i)*unit)
		y.tickLabels = append(y.tickLabels, plain(float64(i)*unit))
	}
	return x, y
}

// niceStep is the least of 1, 2 and 5 times a power of 10 that is not below v.
func niceStep(v float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(v)))
	for _, f := range []float64{1, 2, 5} {
		if f*power >= v {
			return f * power
		}
	}
	return 10 * power
}

func bytesLabel(v float64) string {
	unit := cmp.Compare(v, 1<<10) >= 0
	if !unit {
		return plain(v) + " B"
	}
	return strings.NewReplacer("K", " KiB", "M", " MiB", "G", " GiB").Replace(FormatSize(int64(v)))
}

// plain is v without an exponent and without zeros behind.
func plain(v float64) string {
	text := fmt.Sprintf("%.6f", v)
	return strings.TrimSuffix(strings.TrimRight(text, "0"), ".")
}

func (c *Chart) grid(b *strings.Builder, x, y axis) {
	bottom := plotTop + plotHeight
	b.WriteString(`<g stroke="#dddddd" stroke-width="1">` + "\n")
	for _, v := range y.ticks {
		fmt.Fprintf(b, `<line x1="%d" y1="%.1f" x2="%d" y2="%.1f"/>`+"\n", plotLeft, y.at(v), plotLeft+plotWidth, y.at(v))
	}
	for _, v := range x.ticks {
		fmt.Fprintf(b, `<line x1="%.1f" y1="%d" x2="%.1f" y2="%d"/>`+"\n", x.at(v), plotTop, x.at(v), bottom)
	}
	b.WriteString("</g>\n")
	fmt.Fprintf(b, `<path d="M%d %dV%dH%d" fill="none" stroke="#444444"/>`+"\n", plotLeft, plotTop, bottom, plotLeft+plotWidth)
	for i, v := range y.ticks {
		fmt.Fprintf(b, `<text x="%d" y="%.1f" text-anchor="end">%s</text>`+"\n", plotLeft-8, y.at(v)+4, y.tickLabels[i])
	}
	for i, v := range x.ticks {
		fmt.Fprintf(b, `<text x="%.1f" y="%d" text-anchor="middle">%s</text>`+"\n", x.at(v), bottom+20, x.tickLabels[i])
	}
	fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="middle">size in bytes</text>`+"\n", plotLeft+plotWidth/2, bottom+44)
	fmt.Fprintf(b, `<text transform="translate(20 %d) rotate(-90)" text-anchor="middle">%s</text>`+"\n", plotTop+plotHeight/2, escape(c.YLabel))
}

func (c *Chart) curve(b *strings.Builder, i int, s Series, x, y axis) {
	color, dash := colors[i%len(colors)], dashes[i/len(colors)%len(dashes)]
	style := fmt.Sprintf(`stroke="%s" stroke-width="2.2" stroke-linejoin="round"`, color)
	if dash != "" {
		style += fmt.Sprintf(` stroke-dasharray="%s"`, dash)
	}
	var path []string
	for k := range s.X {
		path = append(path, fmt.Sprintf("%.1f,%.1f", x.at(s.X[k]), y.at(s.Y[k])))
	}
	fmt.Fprintf(b, `<polyline fill="none" %s points="%s"/>`+"\n", style, strings.Join(path, " "))
	for k := range s.X {
		fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"><title>%s: %s, %.4g</title></circle>`+"\n",
			x.at(s.X[k]), y.at(s.Y[k]), color, escape(s.Name), bytesLabel(s.X[k]), s.Y[k])
	}
	if s.Name == "" {
		return
	}
	row := legendTop + legendRow*i
	fmt.Fprintf(b, `<line x1="%d" y1="%d" x2="%d" y2="%d" %s/>`+"\n", legendLeft, row, legendLeft+26, row, style)
	fmt.Fprintf(b, `<text x="%d" y="%d">%s</text>`+"\n", legendLeft+34, row+4, escape(s.Name))
}
