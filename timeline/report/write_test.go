package report

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	us = 1
	ms = 1000 * us
)

// rankID has the values in the header of a timeline file.
type rankID struct {
	rank, size     int
	host, domain   string
	epoch, segment int
	monotonic      int // in us
	start          int // in us
	job            string
}

// testTensor is one tensor of an operation at one rank. All times are in us.
type testTensor struct {
	name      string
	submitted int
	bytes     int
	// arrivals has the times at which requests arrived, indexed by position in the set. A time is 0 if no
	// request arrived.
	arrivals []int
	miss     bool
	fails    string
}

type testActivity struct {
	name     string
	duration int
}

type testOp struct {
	set, number           int
	kind                  string // the empty string means ALLREDUCE
	granted, begun, ended int
	tensors               []testTensor
	activities            []testActivity
	backend               string
}

// file builds the text of a rank's timeline in the format of package timeline.
type file struct {
	b    bytes.Buffer
	pids map[string]int
}

func newFile(id rankID) *file {
	f := &file{pids: make(map[string]int)}
	if id.start == 0 {
		id.start = 1_700_000_000_000_000
	}
	fmt.Fprintf(&f.b, "[\n"+
		`{"name":"process_name","ph":"M","pid":0,"args":{"start_time_since_epoch_in_micros":%d}}`, id.start)
	f.event(`{"name":"process_sort_index","ph":"M","pid":0,"args":{"sort_index":0}}`)
	f.event(`{"name":"hvd_rank","ph":"M","pid":0,"args":{"rank":%d,"size":%d,"host":%q,"epoch":%d,"segment":%d,"clock_domain":%q,"monotonic_us":%d,"dropped":0,"version":1}}`,
		id.rank, id.size, id.host, id.epoch, max(id.segment, 1), id.domain, id.monotonic)
	if id.job != "" {
		f.event(`{"name":"hvd_clock","ph":"i","s":"p","ts":0,"pid":0,"args":{"offset_us":0,"error_us":0,"job":%q}}`, id.job)
	}
	return f
}

func (f *file) event(format string, args ...any) {
	f.b.WriteString(",\n")
	fmt.Fprintf(&f.b, format, args...)
}

func (f *file) clock(at, offset, err int) {
	f.event(`{"name":"hvd_clock","ph":"i","s":"p","pid":0,"ts":%d,"args":{"offset_us":%d,"error_us":%d}}`, at,
		offset, err)
}

// step marks the beginning of a step.
func (f *file) step(at, number int) {
	f.event(`{"name":"hvd_step","ph":"i","s":"p","pid":0,"ts":%d,"args":{"step":%d}}`, at, number)
}

// span writes what the program did: it waited for the tensor with the given name, or was in the range with
// this name.
func (f *file) span(category, name string, begin, end int) {
	if category == "wait" {
		f.event(`{"name":"WAIT","cat":"wait","ph":"X","ts":%d,"dur":%d,"pid":0,"tid":1,"args":{"tensor":%q}}`,
			begin, end-begin, name)
		return
	}
	f.event(`{"name":%q,"cat":"range","ph":"X","ts":%d,"dur":%d,"pid":0,"tid":1}`, name, begin, end-begin)
}

func (f *file) op(o testOp) {
	if o.kind == "" {
		o.kind = "ALLREDUCE"
	}
	for _, t := range o.tensors {
		pid := f.pids[t.name]
		if pid == 0 {
			pid = len(f.pids) + 1
			f.pids[t.name] = pid
			f.event(`{"name":"process_name","ph":"M","pid":%d,"args":{"name":%q}}`, pid, t.name)
			f.event(`{"name":"process_sort_index","ph":"M","pid":%d,"args":{"sort_index":%d}}`, pid, pid)
		}
		begin, note := t.submitted, ""
		for _, a := range t.arrivals {
			if a > 0 && a < begin {
				begin, note = a, fmt.Sprintf(`,"submitted":%d`, t.submitted)
			}
		}
		f.event(`{"name":"NEGOTIATE_%s","ph":"B","ts":%d,"pid":%d,"args":{"set":%d,"op":%d%s}}`, o.kind,
			begin, pid, o.set, o.number, note)
		order := make([]int, len(t.arrivals))
		for i := range order {
			order[i] = i
		}
		slices.SortStableFunc(order, func(a, b int) int { return t.arrivals[a] - t.arrivals[b] })
		for _, i := range order {
			if t.arrivals[i] > 0 {
				f.event(`{"name":"%d","ph":"X","ts":%d,"dur":0,"pid":%d}`, i, t.arrivals[i], pid)
			}
		}
		late := ""
		if n := len(order); n > 0 && t.arrivals[order[0]] > 0 {
			late = fmt.Sprintf(`,"last":%d,"late_us":%d`, order[n-1],
				t.arrivals[order[n-1]]-t.arrivals[order[0]])
		}
		f.event(`{"ph":"E","ts":%d,"pid":%d,"args":{"cached":%v%s}}`, o.granted, pid, !t.miss, late)
		top, problem := o.kind, ""
		if t.fails != "" {
			top, problem = "ERROR", fmt.Sprintf(`,"error":%q`, t.fails)
		}
		f.event(`{"name":%q,"ph":"B","ts":%d,"pid":%d}`, top, o.granted, pid)
		f.event(`{"name":"QUEUE","ph":"B","ts":%d,"pid":%d}`, o.granted, pid)
		f.event(`{"ph":"E","ts":%d,"pid":%d}`, o.begun, pid)
		at := o.begun
		for _, a := range o.activities {
			f.event(`{"name":%q,"ph":"B","ts":%d,"pid":%d}`, a.name, at, pid)
			at += a.duration
			f.event(`{"ph":"E","ts":%d,"pid":%d}`, at, pid)
		}
		f.event(`{"ph":"E","ts":%d,"pid":%d,"args":{"dtype":"float32","shape":"[%d]","bytes":%d,"fused":%d,"backend":%q,"algorithm":"ring"%s}}`,
			o.ended, pid, t.bytes/4, t.bytes, len(o.tensors), cmp.Or(o.backend, "none"), problem)
	}
}

func (f *file) end(at, dropped int) string {
	f.event(`{"name":"hvd_end","ph":"i","s":"p","pid":0,"ts":%d,"args":{"dropped":%d}}`, at, dropped)
	return f.b.String() + "\n]\n"
}

// put writes text to a file in the folder dir and returns the path of the file. If the name ends in .gz, the
// text is compressed.
func put(t testing.TB, dir, name, text string) string {
	t.Helper()
	data := []byte(text)
	if strings.HasSuffix(name, ".gz") {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		if _, err := z.Write(data); err != nil {
			t.Fatal(err)
		}
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}
		data = b.Bytes()
	}
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// openJob opens the files at paths, and fails the test if one of them cannot be read.
func openJob(t testing.TB, paths ...string) *Job {
	t.Helper()
	j, bad, err := Open(paths)
	if bad != nil || err != nil {
		t.Fatalf("open %q: %v, %v", paths, bad, err)
	}
	return j
}

// reportOf returns the report on the files at paths, and fails the test if one of them cannot be read.
func reportOf(t testing.TB, paths ...string) *Report {
	t.Helper()
	r, err := openJob(t, paths...).Report(Options{FusionThresholdBytes: 1 << 20, CacheCapacity: 1024})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// straggler is a job of 4 ranks and 50 steps of 100 ms, in which one rank is 5 ms late in each step. Each
// step has an operation with two tensors, and 1 ms later an operation with one tensor.
type straggler struct {
	late     int
	cached   bool
	arrivals bool
	domains  []string
	// started and monotonic give, by rank, the moment at which the rank's ts is 0: started on rank 0's clock,
	// and monotonic on the monotonic clock that the ranks with the same element of domains share.
	started, monotonic []int
	clockError         int
}

const (
	stragglerSteps = 50
	stragglerBegin = 5000 * ms // a moment at which all ranks have started
)

func (s straggler) write(t testing.TB, dir, extension string) string {
	t.Helper()
	const size = 4
	number := 0
	files := make([]*file, size)
	for r := range files {
		files[r] = newFile(rankID{rank: r, size: size, host: "h-" + s.domains[r], domain: s.domains[r],
			epoch: 1, monotonic: s.monotonic[r]})
		if s.domains[r] != s.domains[0] {
			files[r].clock(0, s.started[r], s.clockError)
		}
	}
	for step := range stragglerSteps {
		begin := stragglerBegin + step*100*ms
		for o := range 2 {
			number++
			last := 0
			submitted := make([]int, size)
			for r := range size {
				submitted[r] = begin + o*ms + r*10*us
				if r == s.late {
					submitted[r] += 5 * ms
				}
				last = max(last, submitted[r])
			}
			granted := last + 200*us
			for r, f := range files {
				off := s.started[r]
				var arrivals []int
				if s.arrivals && r == 0 {
					for _, at := range submitted {
						arrivals = append(arrivals, at+20*us)
					}
				}
				op := testOp{
					number: number, granted: granted - off, begun: granted + 300*us - off,
					ended: granted + 2*ms - off, backend: "tcp",
					activities: []testActivity{{"MEMCPY_IN_FUSION_BUFFER", 100 * us},
						{"TCP_ALLREDUCE", 1 * ms}, {"MEMCPY_OUT_FUSION_BUFFER", 100 * us}},
				}
				names := []string{"grad/0", "grad/1"}
				if o == 1 {
					names = []string{"loss"}
				}
				for i, n := range names {
					op.tensors = append(op.tensors, testTensor{
						name: n, submitted: submitted[r] - off - i*us, bytes: 4096 * (i + 1),
						arrivals: arrivals, miss: !s.cached || step == 0,
					})
				}
				f.op(op)
			}
		}
	}
	for r, f := range files {
		name := "t" + extension
		if r > 0 {
			name = fmt.Sprintf("t.rank%d%s", r, extension)
		}
		put(t, dir, name, f.end(stragglerBegin+stragglerSteps*100*ms, 0))
	}
	return filepath.Join(dir, "t"+extension)
}

func oneClock() straggler {
	return straggler{
		late: 2, cached: true, domains: []string{"a", "a", "a", "a"},
		started: []int{0, 500, 700, 900}, monotonic: []int{1000, 1500, 1700, 1900},
	}
}
