package timeline

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	ossignal "os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/timeline/timelinetest"
)

// byHand returns knobs with a long interval, so that the writer writes only when Write or Close is called or
// a batch is half full.
func byHand() knobs {
	k := quick
	k.interval, k.retry = time.Hour, time.Hour
	return k
}

// Operations are recorded before and during a failure of the disk. The first Write or Close after the failure
// writes all of them.
func TestRecordedDuringFailure(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(*Timeline) error
	}{{"Write", (*Timeline).Write}, {"Close", (*Timeline).Close}} {
		dir := filepath.Join(t.TempDir(), "d")
		noError(t, os.Mkdir(dir, 0o700))
		path := filepath.Join(dir, "t.json")
		tl := mustStart(t, testConfig(path), byHand())
		for n := range uint64(2) {
			tl.Record(simple(n+1, "g"))
			noError(t, tl.Write())
		}
		noError(t, os.RemoveAll(dir))
		for n := range uint64(2) {
			tl.Record(simple(n+3, "g"))
			testnet.WantError(t, tl.Write(), "no such file")
		}
		tl.Record(simple(5, "g"))
		noError(t, os.Mkdir(dir, 0o700))
		if err := c.do(tl); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if got := numbers(mustRead(t, path)); !slices.Equal(got, []uint64{3, 4, 5}) || tl.Dropped() != 0 {
			t.Errorf("%s: got operations %v, %d dropped, want 3, 4 and 5", c.name, got, tl.Dropped())
		}
	}
}

// A batch that is half full is written at once, although the interval between writes is long.
func TestHalfFull(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.json")
	k := byHand()
	k.tensors = 64
	tl := mustStart(t, testConfig(path), k)
	for n := range uint64(5) { // five rounds use both batches several times
		before := len(mustRead(t, path).Operations)
		for range k.tensors / 2 {
			op := simple(n+1, "g")
			op.Activities = nil
			tl.Record(op)
		}
		testnet.Eventually(t, "they are written", func() bool {
			return operationsIn(path) == before+k.tensors/2
		})
	}
	if tl.Dropped() > 0 {
		t.Errorf("%d dropped", tl.Dropped())
	}
}

// An operation does not fit in one of the slices of a batch. Then no part of the operation is in the batch,
// and the operations before and after it are complete.
func TestNoRoom(t *testing.T) {
	for name, large := range map[string]func(*trace.Operation){
		"tensors":    func(op *trace.Operation) { op.Records = slices.Repeat(op.Records, 4) },
		"arrivals":   func(op *trace.Operation) { op.Arrivals = make([]time.Duration, 32*8) },
		"activities": func(op *trace.Operation) { op.Activities = slices.Repeat(op.Activities, 16) },
	} {
		path := filepath.Join(t.TempDir(), "t.json")
		k := byHand()
		k.tensors = 8
		tl := mustStart(t, testConfig(path), k)
		operation := func(number uint64) *trace.Operation {
			op := simple(number, fmt.Sprint("a", number), fmt.Sprint("b", number))
			op.Arrivals = []time.Duration{time.Duration(number) * time.Millisecond, 0}
			op.Activities = op.Activities[:1]
			op.Activities[0].Name = fmt.Sprint("A", number)
			return op
		}
		too := operation(2)
		large(too)
		tl.mu.Lock() // keeps the writer from taking the batch, so that all operations go into one batch
		took := []bool{tl.filling.operation(operation(1)), tl.filling.operation(too),
			tl.filling.operation(operation(3))}
		tl.mu.Unlock()
		if !slices.Equal(took, []bool{true, false, true}) {
			t.Errorf("%s: took %v, want all but the second", name, took)
		}
		mustClose(t, tl)
		s := mustRead(t, path)
		if got := numbers(s); !slices.Equal(got, []uint64{1, 1, 3, 3}) {
			t.Errorf("%s: got operations %v, want 1 and 3 with two tensors each", name, got)
		}
		for i, o := range s.Operations {
			if len(o.Activities) != 1 || o.Activities[0] != fmt.Sprint("A", o.Number) ||
				len(o.Arrivals) != 1-i%2 || o.Track != fmt.Sprint("ab"[i%2:][:1], o.Number) {
				t.Errorf("%s: got %+v, want activities and arrivals of operation %d", name, o, o.Number)
			}
		}
	}
}

// An operation that is larger than an empty batch is written like any other. The batch grows only as much as
// needed, and has its original size again after the write.
func TestLargerThanMemory(t *testing.T) {
	const tensors = 8
	for name, enlarge := range map[string]func(*trace.Operation){
		"tensors": func(op *trace.Operation) { op.Records = slices.Repeat(op.Records, 50) },
		"arrivals": func(op *trace.Operation) {
			op.Arrivals = slices.Repeat([]time.Duration{1}, 100*tensors)
		},
		"activities": func(op *trace.Operation) { op.Activities = slices.Repeat(op.Activities[:1], 50) },
	} {
		path := filepath.Join(t.TempDir(), "t.json")
		log, entries := testnet.Logs()
		cfg, k := testConfig(path), byHand()
		cfg.Log, k.tensors = log, tensors
		tl := mustStart(t, cfg, k)
		large := func(number uint64) *trace.Operation {
			op := simple(number, "a")
			enlarge(op)
			return op
		}
		tl.mu.Lock() // keeps the writer from taking the batch, so that all operations go into one batch
		b := tl.filling
		took := []bool{b.operation(simple(1, "a")), b.operation(large(2)), b.operation(simple(3, "a")),
			b.operation(large(4))}
		tl.mu.Unlock()
		if took[3] || !took[0] || !took[1] {
			t.Errorf("%s: took %v, want one operation that is too large at a time", name, took)
		}
		noError(t, tl.Write())
		want := slices.Compact(numbers(mustRead(t, path)))
		if !slices.Contains(want, 2) {
			t.Errorf("%s: got operations %v, want 2 among them", name, want)
		}
		// The batch is empty again, so it must accept a large operation.
		if tl.Record(large(5)); tl.Dropped() != 0 {
			t.Errorf("%s: %d dropped", name, tl.Dropped())
		}
		for range 2 { // each Write swaps the two batches
			noError(t, tl.Write())
		}
		tl.mu.Lock()
		if got, fresh := tl.filling, newBatch(tensors); cap(got.records) != cap(fresh.records) ||
			cap(got.arrivals) != cap(fresh.arrivals) || cap(got.activities) != cap(fresh.activities) ||
			got.grown {
			t.Errorf("%s: there is room for %d tensors, %d arrivals and %d activities afterwards", name,
				cap(got.records), cap(got.arrivals), cap(got.activities))
		}
		tl.mu.Unlock()
		mustClose(t, tl)
		if got := slices.Compact(numbers(mustRead(t, path))); !slices.Equal(got, append(want, 5)) ||
			entries.Len() > 0 {
			t.Errorf("%s: got operations %v and log %v, want %v and 5", name, got, entries.All(), want)
		}
	}
}

// An operation is recorded while the batch is full. It is dropped, and the writer is woken to log the drop.
func TestDropsAreReported(t *testing.T) {
	tl := &Timeline{filling: newBatch(1), wake: make(chan struct{}, 1), full: make(chan struct{}, 1)}
	tl.Record(simple(1, "a"))
	<-tl.wake
	if tl.Record(simple(2, "a")); tl.Dropped() != 1 || len(tl.wake) != 1 {
		t.Errorf("%d dropped, %d signals, want 1 and 1", tl.Dropped(), len(tl.wake))
	}
}

// numbers returns the operation numbers in files. The number of an operation occurs once for each tensor.
func numbers(files ...*timelinetest.Summary) (n []uint64) {
	for _, s := range files {
		for _, o := range s.Operations {
			n = append(n, o.Number)
		}
	}
	return n
}

// A pipe accepts a part of the text and is then full for a while. Later it gets the rest. Each operation is
// written exactly once.
func TestStreamResumes(t *testing.T) {
	for _, name := range []string{"t.json", "t.json.gz"} {
		path := filepath.Join(t.TempDir(), name)
		noError(t, syscall.Mkfifo(path, 0o600))
		cfg := testConfig(path)
		k := byHand()
		k.tensors = 1 << 14
		tl := mustStart(t, cfg, k)
		var want []uint64
		record := func(operations int) {
			for range operations {
				number := uint64(len(want)/4 + 1)
				// The names are random, so that the text compresses badly and exceeds the 64 KiB that a
				// pipe holds.
				long := func() (name string) {
					for range 8 {
						name += strconv.FormatUint(rand.Uint64(), 36)
					}
					return name
				}
				op := simple(number, long(), "b", long(), "d")
				op.Activities = nil
				tl.Record(op)
				want = append(want, number, number, number, number)
			}
		}
		for range 3 {
			record(250) // the text of these operations is longer than one chunk
			// The deadline also applies to the write in Close, so that Close does not block forever.
			noError(t, tl.stream.f.SetWriteDeadline(time.Now().Add(20*time.Millisecond)))
			if err := tl.Write(); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("%s: got %v, want the pipe to be full", name, err)
			}
		}
		record(1)
		noError(t, tl.stream.f.SetWriteDeadline(time.Time{}))
		f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		noError(t, err)
		var wg sync.WaitGroup
		var s *timelinetest.Summary
		wg.Go(func() { s, err = timelinetest.Read(f) })
		if err := tl.Write(); err != nil {
			t.Error(err)
		}
		mustClose(t, tl)
		wg.Wait()
		_ = f.Close()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := numbers(s); !slices.Equal(got, want) || tl.Dropped() != 0 || !s.Ended {
			t.Errorf("%s: got %d tensors, %d dropped, want each of %d once", name, len(got), tl.Dropped(), len(want))
		}
	}
}

// A pipe becomes full. Close counts as lost only the operations that no earlier
// Write has written.
func TestStreamCloseCounts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.json")
	noError(t, syscall.Mkfifo(path, 0o600))
	cfg := testConfig(path)
	k := byHand()
	k.tensors, k.timeout = 1<<14, time.Second
	tl := mustStart(t, cfg, k)
	for n := range uint64(3) {
		tl.Record(simple(n+1, "g"))
	}
	if err := tl.Write(); err != nil { // these operations fit in the pipe
		t.Fatal(err)
	}
	for n := range uint64(1000) {
		tl.Record(simple(n+4, "g"))
	}
	testnet.WantError(t, tl.Close(), "1000 operations were not written")
	if tl.Dropped() != 1000 {
		t.Errorf("got %d dropped, want 1000", tl.Dropped())
	}
}

// A child process limits the size of its files, so that a write may end after any byte. Later writes complete
// the file. No operation is lost, and none is written twice.
func TestPartialWrites(t *testing.T) {
	cmd := command(t, "limits", t.TempDir())
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		t.Errorf("%v: %s", err, stderr.String())
	}
}

func writeToLimits(dir string) error {
	ossignal.Ignore(syscall.SIGXFSZ) // the signal is ignored because it would end the process at the limit
	seed := uint64(time.Now().UnixNano())
	for i, c := range []struct {
		name string
		cfg  func(*Config)
	}{
		{"whole.json", func(*Config) {}},
		{"whole.json.gz", func(*Config) {}},
		{"segments.json", func(c *Config) { c.MaxBytes = 200 << 10 }},
		{"segments.json.gz", func(c *Config) { c.MaxBytes = 32 << 10 }},
	} {
		cfg, k := testConfig(filepath.Join(dir, c.name)), byHand()
		c.cfg(&cfg)
		if err := limits(cfg, k, rand.New(rand.NewPCG(seed, uint64(i)))); err != nil {
			return fmt.Errorf("%s, seed %d: %w", c.name, seed, err)
		}
	}
	return nil
}

func limits(cfg Config, k knobs, r *rand.Rand) error {
	var usual syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &usual); err != nil {
		return err
	}
	limit := func(bytes int64) error {
		l := usual
		l.Cur = uint64(bytes)
		return syscall.Setrlimit(syscall.RLIMIT_FSIZE, &l)
	}
	tl, err := start(cfg, k)
	if err != nil {
		return err
	}
	var want []uint64
	failed, succeeded := 0, 0
	for round := range 40 {
		for range max(r.IntN(4), 1-round%4) {
			number := uint64(len(want)/2 + 1)
			tl.Record(simple(number, fmt.Sprint(r.Uint64()), "g"))
			want = append(want, number, number)
		}
		// The limit is near the current size of the file, or it is random, or there is no limit. In every
		// fourth round the write must fail, and in the round after it the write must succeed.
		if which := r.IntN(4); round%4 == 0 || which > 0 && round%4 != 1 {
			most := r.Int64N(8<<10) >> r.IntN(6)
			if at, err := os.Stat(cfg.Path); err == nil {
				if round%4 == 0 {
					most = 10 // too small for any write; in round 0 the file contains only its header
				}
				// The limit affects only growth, because a process can still overwrite a file on a full disk.
				most += at.Size()
			}
			if err := limit(most); err != nil {
				return err
			}
		}
		err := tl.Write()
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &usual); err != nil {
			return err
		}
		if err == nil {
			succeeded++
		} else if failed++; !errors.Is(err, syscall.EFBIG) {
			return err
		}
		s, again := readFile(cfg.Path)
		switch {
		case again == nil && err == nil && len(want) > 0:
			if n := numbers(s); len(n) > 0 && n[len(n)-1] != want[len(want)-1] {
				return fmt.Errorf("got operations up to %d, and Write had returned after %d", n[len(n)-1],
					want[len(want)-1])
			}
		case again != nil:
			return fmt.Errorf("after a Write with the answer %v: %w", err, again)
		}
	}
	if failed < 5 || succeeded < 5 {
		return fmt.Errorf("%d failed and %d succeeded, want several of each", failed, succeeded)
	}
	if err := tl.Close(); err != nil {
		return err
	}
	names, err := segments(cfg.Path)
	if err != nil {
		return err
	}
	var files []*timelinetest.Summary
	for _, name := range append(names, cfg.Path) {
		s, err := readFile(name)
		if err != nil {
			return err
		}
		files = append(files, s)
	}
	slices.SortFunc(files, func(a, b *timelinetest.Summary) int { return a.Segment - b.Segment })
	if cfg.MaxBytes > 0 && len(files) < 3 {
		return fmt.Errorf("got %d segments, want several", len(files))
	}
	if got := numbers(files...); !slices.Equal(got, want) || tl.Dropped() != 0 {
		return fmt.Errorf("got %d dropped, operations %v, want %v", tl.Dropped(), got, want)
	}
	return nil
}
