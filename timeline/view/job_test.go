package view

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/gohvd/gohvd/timeline/report"
)

// testJob is a training of which timelines are written. In each step, the ranks compute, submit their
// gradients, and wait for the last one. Times are in us.
type testJob struct {
	ranks, hosts, tensors, steps int
	// compute is the time from the end of a step to the first gradient. Late is the rank that takes lateBy
	// longer, before the tensor lateFrom.
	compute, late, lateBy, lateFrom int
	// names are the first names of the tensors. The others are called layerN.weight.
	names []string
	// fused says that the tensors of a step are one operation.
	fused bool
}

var activities = []string{"MEMCPY_IN_FUSION_BUFFER", "SHM_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"}

func (j testJob) name(i int) string {
	if i < len(j.names) {
		return j.names[i]
	}
	return fmt.Sprintf("layer%d.weight", i)
}

// write writes the timelines to a folder. Each rank's file has one tensor per track, and three activities in
// each operation.
func (j testJob) write(tb testing.TB, dir string) string {
	tb.Helper()
	hosts := max(j.hosts, 1)
	quoted := make([]string, j.tensors)
	for i := range quoted {
		text, err := json.Marshal(j.name(i))
		if err != nil {
			tb.Fatal(err)
		}
		quoted[i] = string(text)
	}
	for rank := range j.ranks {
		name := "t.json"
		if rank > 0 {
			name = fmt.Sprintf("t.rank%d.json", rank)
		}
		f, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			tb.Fatal(err)
		}
		w := bufio.NewWriter(f)
		fmt.Fprintf(w, `[{"name":"process_name","ph":"M","pid":0,"args":{"start_time_since_epoch_in_micros":1700000000000000}}`)
		fmt.Fprintf(w, `,{"name":"hvd_rank","ph":"M","pid":0,"args":{"rank":%d,"size":%d,"host":"node%d","epoch":1,"segment":1,"clock_domain":"d","monotonic_us":0}}`,
			rank, j.ranks, rank*hosts/j.ranks)
		for i, q := range quoted {
			fmt.Fprintf(w, ",\n"+`{"name":"process_name","ph":"M","pid":%d,"args":{"name":%s}}`, i+1, q)
		}
		now := 1000
		for step := range j.steps {
			// The gradients follow each other by 100 us. The late rank submits each of them, from lateFrom
			// on, lateBy after the others.
			lane := 0
			for i := range j.tensors {
				usual := now + j.compute + 7*((rank*31+step*17)%13) + i*100
				last := now + j.compute + 7*12 + i*100
				at := usual
				if j.lateBy > 0 && i >= j.lateFrom {
					last += j.lateBy
				}
				if rank == j.late && i >= j.lateFrom {
					at += j.lateBy
				}
				op, size := step*j.tensors+i+1, 1
				if j.fused {
					op, size = step+1, j.tensors
					last += (j.tensors - 1 - i) * 100
				}
				granted := last + 30
				begun := max(granted, lane) + 10
				if j.fused {
					begun = granted + 10
				}
				ended := begun + 160
				lane = ended
				e := func(format string, args ...any) {
					fmt.Fprintf(w, ",\n{"+format+`,"pid":%d}`, append(args, i+1)...)
				}
				e(`"name":"NEGOTIATE_ALLREDUCE","ph":"B","ts":%d,"args":{"set":0,"op":%d}`, at, op)
				e(`"ph":"E","ts":%d,"args":{"cached":true}`, granted)
				e(`"name":"ALLREDUCE","ph":"B","ts":%d`, granted)
				e(`"name":"QUEUE","ph":"B","ts":%d`, granted)
				e(`"ph":"E","ts":%d`, begun)
				for k, a := range activities {
					e(`"name":%q,"ph":"B","ts":%d`, a, begun+[]int{0, 20, 140}[k])
					e(`"ph":"E","ts":%d`, begun+[]int{20, 140, 160}[k])
				}
				e(`"ph":"E","ts":%d,"args":{"dtype":"float32","shape":"[1024, %d]","bytes":%d,"set":0,"op":%d,"fused":%d,"backend":"shm"}`,
					ended, 10+i, 4096*(10+i), op, size)
			}
			now = lane + 100
		}
		fmt.Fprint(w, "\n]\n")
		if err := w.Flush(); err != nil {
			tb.Fatal(err)
		}
		if err := f.Close(); err != nil {
			tb.Fatal(err)
		}
	}
	return dir
}

// read writes the timelines of a job and reads them.
func (j testJob) read(tb testing.TB) *Run {
	tb.Helper()
	return readRun(tb, j.write(tb, tb.TempDir()))
}

func readRun(tb testing.TB, dir string) *Run {
	tb.Helper()
	job, bad, err := report.Open([]string{dir})
	if err != nil || bad != nil {
		tb.Fatal(err, bad)
	}
	run, err := Read(job, report.Options{FusionThresholdBytes: 64 << 20, CacheCapacity: 1024}, dir)
	if err != nil {
		tb.Fatal(err)
	}
	return run
}
