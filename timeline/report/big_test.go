package report

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/metrics"
	"strings"
	"sync"
	"testing"
	"time"
)

// peak calls the given function and returns the maximum growth of the heap during the call, in bytes.
func peak(do func()) uint64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	read := func() uint64 {
		metrics.Read(sample)
		return sample[0].Value.Uint64()
	}
	runtime.GC()
	before := read()
	most := before
	stop := make(chan struct{})
	var wait sync.WaitGroup
	wait.Go(func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				most = max(most, read())
			}
		}
	})
	do()
	close(stop)
	wait.Wait()
	return max(most, read()) - before
}

// big writes a timeline file in pieces, so that the test does not hold the whole file in memory.
type big struct {
	*file
	w *bufio.Writer
	f *os.File
}

func newBig(t *testing.T, path string, id rankID) *big {
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	return &big{newFile(id), bufio.NewWriterSize(f, 1<<20), f}
}

func (b *big) flush(t *testing.T) {
	if _, err := b.b.WriteTo(b.w); err != nil {
		t.Fatal(err)
	}
}

func (b *big) close(t *testing.T) {
	b.event(`{"name":"hvd_end","ph":"i","s":"p","pid":0,"ts":1,"args":{"dropped":0}}`)
	b.b.WriteString("\n]\n")
	b.flush(t)
	if err := b.w.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := b.f.Close(); err != nil {
		t.Fatal(err)
	}
}

// Two ranks write a million events each, and rank 1 is always 1 ms late. The report says that rank 1 is late,
// and needs at most 32 MiB of heap.
func TestTwoMillionEvents(t *testing.T) {
	const names = 200
	steps := 500
	if raceEnabled {
		steps = 25 // fewer steps, because with the race detector the test is 20 times slower
	}
	dir := t.TempDir()
	for r := range 2 {
		b := newBig(t, filepath.Join(dir, fmt.Sprintf("t.rank%d.json", r)),
			rankID{rank: r, size: 2, domain: "a", epoch: 1})
		for step := range steps {
			for n := range names {
				at := (step+1)*300*ms + n*ms
				b.op(testOp{number: step*names + n + 1, granted: at + 2*ms, begun: at + 2*ms,
					ended: at + 3*ms, backend: "shm",
					activities: []testActivity{{"MEMCPY_IN_FUSION_BUFFER", 1}, {"SHM_ALLREDUCE", 2}},
					tensors: []testTensor{{name: fmt.Sprint("layer.", n), submitted: at + r*ms,
						bytes: 4}}})
			}
			b.flush(t)
		}
		b.close(t)
	}
	var r *Report
	begun := time.Now()
	heap := peak(func() { r = reportOf(t, dir) })
	took := time.Since(begun)
	t.Logf("%v, %d KiB of heap at most", took, heap>>10)
	if n := int64(names * steps); r.Operations != 2*n || r.Steps != int64(steps-1) ||
		r.Lateness.Compared != n-names {
		t.Errorf("got %d operations, %d steps, %d compared", r.Operations, r.Steps,
			r.Lateness.Compared)
	}
	if l := r.Lateness.Ranks[1]; l.Share != 1 || l.P50US != 1000 {
		t.Errorf("got %+v, want all waiting caused by it and 1 ms late", l)
	}
	if heap > 32<<20 { // most of the heap is garbage, which is collected later if the processors are busy
		t.Errorf("got %d bytes of heap, want at most 32 MiB", heap)
	}
}

// A file has long names that occur only once, and operations that only one rank has. A report and a merge of
// it use bounded memory.
func TestHostileInputIsBounded(t *testing.T) {
	dir := t.TempDir()
	const count = 36_000
	b := newBig(t, filepath.Join(dir, "t.json"), rankID{rank: 0, size: 2, domain: "a", epoch: 1})
	long := strings.Repeat("x.yz/", 60)
	for n := 1; n <= count; n++ {
		b.op(testOp{set: n, number: n, granted: n, begun: n, ended: n,
			tensors: []testTensor{{name: fmt.Sprint(long, n), submitted: n, arrivals: []int{n, n + n%90}}}})
		b.flush(t)
	}
	b.close(t)
	b = newBig(t, filepath.Join(dir, "t.rank1.json"), rankID{rank: 1, size: 2, domain: "a", epoch: 1})
	b.op(testOp{number: 1, granted: 1, begun: 1, ended: 1, tensors: []testTensor{{name: "x", submitted: 1}}})
	b.close(t)
	var r *Report
	heap := peak(func() { r = reportOf(t, dir) })
	t.Logf("%d KiB of heap at most; %q", heap>>10, r.Problems)
	if heap > 100<<20 {
		t.Errorf("got %d bytes of heap, want at most 100 MiB", heap)
	}
	if r.Names > maxNames || r.Operations != count+1 ||
		!strings.Contains(strings.Join(r.Problems, "\n"), "there are more than 16384 tensor names") {
		t.Errorf("got %d names and %d operations", r.Names, r.Operations)
	}
	out := filepath.Join(t.TempDir(), "out.json")
	heap = peak(func() {
		if _, err := openJob(t, dir).Merge(t.Context(), out); err != nil {
			t.Error(err)
		}
	})
	if heap > 150<<20 {
		t.Errorf("merging: got %d bytes of heap, want at most 150 MiB", heap)
	}
	t.Logf("merging: %d KiB of heap at most", heap>>10)
}
