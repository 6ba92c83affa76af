package timelinetest_test

import (
	"bytes"
	"compress/gzip"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/timeline/timelinetest"
)

const sound = `[
{"name":"process_name","ph":"M","pid":0,"args":{"start_time_since_epoch_in_micros":1}},
{"name":"process_sort_index","ph":"M","pid":0,"args":{"sort_index":0}},
{"name":"hvd_rank","ph":"M","pid":0,"args":{"rank":1,"size":2,"file":"t.json","host":"h","epoch":7,"segment":1,"clock_domain":"d","monotonic_us":5,"dropped":0,"version":1}},
{"name":"hvd_clock","ph":"i","s":"p","ts":1,"pid":0,"args":{"offset_us":-1.5,"error_us":0.25}},
{"name":"CYCLE_START","ph":"i","s":"g","ts":2,"pid":0},
{"name":"process_name","ph":"M","pid":1,"args":{"name":"g [set 3]"}},
{"name":"process_sort_index","ph":"M","pid":1,"args":{"sort_index":1}},
{"name":"NEGOTIATE_ALLREDUCE","ph":"B","ts":900,"pid":1,"args":{"set":3,"op":1,"submitted":1000}},
{"name":"1","ph":"X","ts":900,"dur":0,"pid":1},
{"name":"0","ph":"X","ts":1100.001,"dur":0,"pid":1},
{"ph":"E","ts":1200,"pid":1,"args":{"cached":true,"sent":1010,"last":0,"late_us":200.001}},
{"name":"ALLREDUCE","ph":"B","ts":1200,"pid":1},
{"name":"QUEUE","ph":"B","ts":1200,"pid":1},
{"ph":"E","ts":1300,"pid":1},
{"name":"SHM_ALLREDUCE","ph":"B","ts":1350,"pid":1},
{"ph":"E","ts":1800,"pid":1},
{"ph":"E","ts":1900,"pid":1,"args":{"dtype":"float32","shape":"[2, 3]","bytes":24,"fused":2,"backend":"shm","algorithm":"ring"}},
{"name":"hvd_end","ph":"i","s":"p","ts":1901,"pid":0,"args":{"dropped":2}}
]
`

func TestSound(t *testing.T) {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	_, _ = w.Write([]byte(sound))
	_ = w.Close()
	for _, text := range []string{sound, z.String()} {
		s, err := timelinetest.Read(strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		o := s.Operations[0]
		if s.Rank != 1 || !s.Ended || s.Dropped != 2 || s.Cycles != 1 || len(s.Clocks) != 1 ||
			o.Submitted != 1000 || o.Granted != 1200 || o.Begun != 1300 || o.Late != 200.001 {
			t.Errorf("got %+v", s)
		}
	}
	if err := timelinetest.Check(strings.NewReader(z.String() + z.String())); err == nil {
		t.Error("two gzip members pass")
	}
}

// A valid file is changed: a line is removed, two lines are swapped, or a value is changed. Check returns an
// error for each changed file.
func TestBroken(t *testing.T) {
	lines := strings.SplitAfter(sound, "\n")
	for i := range lines[:len(lines)-1] {
		switch {
		case i == 4 || i == 5 || i == 18:
			// Clock, cycle and end events are optional, so the file stays valid without them. If the end is
			// removed, the comma before it makes the file malformed.
			continue
		}
		if err := timelinetest.Check(strings.NewReader(strings.Join(append(lines[:i:i], lines[i+1:]...),
			""))); err == nil {
			t.Errorf("without line %d it passes: %s", i+1, lines[i])
		}
	}
	for i := 1; i < len(lines)-4; i++ {
		if i == 4 {
			continue // these two lines may be in any order, except for their times
		}
		swapped := strings.Join(lines[:i], "") + lines[i+1] + lines[i] + strings.Join(lines[i+2:], "")
		if err := timelinetest.Check(strings.NewReader(swapped)); err == nil && i != 5 {
			t.Errorf("with lines %d and %d in each other's place it passes", i+1, i+2)
		}
	}
	for _, c := range [][2]string{
		{`]` + "\n", ``}, {`]` + "\n", `]]`}, {"[\n", "{\n"}, {`"version":1`, `"version":2`},
		{`"host":"h",`, ``}, {`"rank":1`, `"rank":2`},
		{`"segment":1`, `"segment":0`}, {`"monotonic_us":5`, `"monotonic_us":"5"`},
		{`"offset_us":-1.5`, `"offset_us":-1.5555`},
		{`"error_us":0.25`, `"error_us":-1`},
		{`"error_us":0.25`, `"error_us":0.250`}, {`"error_us":0.25`, `"error_us":2.5e-1`},
		{`"error_us":0.25`, `"error_us":1.0`}, {`"error_us":0.25`, `"error_us":"0.25"`},
		{`"error_us":0.25`, `"error_us":null`}, {`"args":{"sort_index":1}`, `"args":[1]`},
		{`"args":{"sort_index":1}`, `"args":1`}, {`"args":{"sort_index":1}`, `"args":null`},
		{`"s":"g"`, `"s":"p"`}, {`"ts":2,"pid":0`, `"ts":0.5,"pid":0`}, {`"name":"g [set 3]"`, `"name":"g"`},
		{`"sort_index":1`, `"sort_index":2`}, {`NEGOTIATE_ALLREDUCE`, `NEGOTIATE_SOMETHING`},
		{`NEGOTIATE_ALLREDUCE`, `NEGOTIATE_ALLGATHER`},
		{`"submitted":1000`, `"sbmitted":1000`}, {`"name":"1","ph":"X"`, `"name":"0","ph":"X"`},
		{`"name":"1","ph":"X"`, `"name":"01","ph":"X"`},
		{`"ts":900,"dur":0`, `"ts":900,"dur":1`}, {`"ts":900,"dur":0`, `"ts":900,"dur":0,"tid":1`},
		{`"cached":true,`, ``}, {`,"last":0`, ``}, {`,"late_us":200.001`, ``},
		{`"last":0`, `"last":1`}, {`"late_us":200.001`, `"late_us":200.003`},
		{`{"name":"QUEUE","ph":"B","ts":1200`, `{"name":"QUEUE","ph":"B","ts":1201`},
		{`"name":"ALLREDUCE","ph":"B","ts":1200`, `"name":"ALLREDUCE","ph":"B","ts":1201`},
		{`"QUEUE"`, `"SHM"`}, {`"SHM_ALLREDUCE"`, `"QUEUE"`},
		{`"ts":1800`, `"ts":1349`}, {`"shape":"[2, 3]"`, `"shape":"[2 3]"`}, {`"dtype":"float32",`, ``},
		{`"bytes":24,`, ``}, {`"fused":2`, `"fused":0`},
		{`"bytes":24,`, `"bytes":24,"op":1,`}, {`{"ph":"E","ts":1300`, `{"name":"QUEUE","ph":"E","ts":1300`},
		{`"name":"ALLREDUCE","ph":"B"`, `"name":"ERROR","ph":"B"`}, {`"ts":1901`, `"ts":1`},
		{`"ph":"E","ts":1800`, `"ph":"Z","ts":1800`},
		{`"start_time_since_epoch_in_micros":1`, `"start":1`}, {`"ts":1800,"pid":1`, `"ts":1800,"pid":2`},
		{`"hvd_end"`, `"hvd_over"`}, {`"ts":1350,"pid":1`, `"ts":1350`},
		{`"ts":900,"dur":0,"pid":1`, `"ts":900,"dur":0,"pid":1,"args":{"at":901}`},
	} {
		if strings.Count(sound, c[0]) < 1 {
			t.Fatalf("%s is not in the text", c[0])
		}
		i := strings.LastIndex(sound, c[0])
		if err := timelinetest.Check(strings.NewReader(sound[:i] + c[1] + sound[i+len(c[0]):])); err == nil {
			t.Errorf("with %s in place of %s it passes", c[1], c[0])
		}
	}
}
