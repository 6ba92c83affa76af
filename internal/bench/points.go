package bench

import (
	"bufio"
	"encoding/csv"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"strings"
)

// point is a result as plots and reports need it, from a CSV of hvdbench or of the harness.
type point struct {
	file  string // base name without its suffix
	attrs [numAttrs]string
	op    string
	ranks int
	bytes int64
	us    float64 // median
	algbw float64 // 10^9 bytes per second
	busbw float64 // 10^9 bytes per second
}

// Attributes that tell the series of a plot apart, in the order in which they are named.
const (
	attrPeer = iota
	attrOp
	attrRanks
	attrPath
	attrMemory
	attrTouch
	attrType
	attrRedop
	attrRoot
	attrPlacement
	numAttrs
)

// harnessColumns are those of the rows that every program of the harness prints.
const harnessColumns = "peer,op,np,bytes,iters,median_us,min_us,algbw_GBps,busbw_GBps"

// readPoints reads a CSV. A header chooses its form; without one it is the harness's.
func readPoints(name string, r io.Reader) ([]point, error) {
	file := strings.TrimSuffix(filepath.Base(name), ".csv")
	columns := strings.Split(harnessColumns, ",")
	var points []point
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		text := strings.TrimSpace(lines.Text())
		if text == "" || text[0] == '#' {
			continue
		}
		fields, err := csv.NewReader(strings.NewReader(text)).Read()
		if err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", name, n, err)
		}
		if text == harnessColumns || text == strings.Join(csvColumns, ",") {
			columns = fields
			continue
		}
		if len(fields) != len(columns) {
			return nil, fmt.Errorf("%s, line %d: %d columns, want %d", name, n, len(fields), len(columns))
		}
		p, err := newPoint(columns, fields)
		if err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", name, n, err)
		}
		p.file = file
		points = append(points, p)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return points, nil
}

func newPoint(columns, fields []string) (p point, err error) {
	number := func(text string) float64 {
		v, e := strconv.ParseFloat(text, 64)
		if e != nil && err == nil {
			err = fmt.Errorf("got %q, want a number", text)
		}
		return v
	}
	for i, text := range fields {
		switch columns[i] {
		case "peer":
			p.attrs[attrPeer] = text
		case "op", "collective":
			p.op, p.attrs[attrOp] = text, text
		case "np", "ranks":
			p.ranks, p.attrs[attrRanks] = int(number(text)), text+" ranks"
		case "path":
			p.attrs[attrPath] = text
		case "memory":
			p.attrs[attrMemory] = text
		case "touch":
			p.attrs[attrTouch] = map[string]string{"true": "touched", "false": "untouched"}[text]
		case "type":
			p.attrs[attrType] = text
		case "redop":
			p.attrs[attrRedop] = text
		case "root":
			p.attrs[attrRoot] = "root " + text
		case "placement":
			p.attrs[attrPlacement] = text
		case "bytes":
			p.bytes = int64(number(text))
		case "median_us", "p50_us":
			p.us = number(text)
		case "algbw_GBps":
			p.algbw = number(text)
		case "busbw_GBps":
			p.busbw = number(text)
		}
	}
	return p, err
}

// points are rows as a plot needs them.
func points(rows []*Row) []point {
	var all []point
	for _, r := range rows {
		p, err := newPoint(csvColumns, r.fields())
		if err != nil {
			continue // a number that cannot be read is one that cannot be drawn
		}
		all = append(all, p)
	}
	return all
}
