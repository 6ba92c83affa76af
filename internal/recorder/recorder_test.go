package recorder

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/trace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ms = time.Millisecond

// operation returns an allreduce of the named tensors in set 0. The number of its grant is n, and it ended at
// the time in ended.
func operation(n uint64, ended time.Duration, names ...string) *trace.Operation {
	op := new(trace.Operation)
	for _, name := range names {
		op.Records = append(op.Records, trace.Record{
			Number: n, Kind: message.Allreduce, Backend: message.SHM, Algorithm: message.Direct, Name: name,
			DType: tensor.Float32, Shape: tensor.Shape{2, 3}, Bytes: 24, Cached: n > 1,
			Submitted: ended - 4*ms, Sent: ended - 3*ms, Granted: ended - 2*ms, Begun: ended - ms,
			Ended: ended,
		})
	}
	return op
}

func TestRecord(t *testing.T) {
	r := New(8)
	first, second := operation(1, 100*ms, "a", "b"), operation(2, 200*ms, "c")
	r.Record(first)
	r.Record(second)
	if d, want := r.Dump(About{Size: 1}), append(first.Records, second.Records...); d.Recorded != 3 ||
		!reflect.DeepEqual(d.Operations, want) {
		t.Errorf("of %d got\n%+v\nwant of 3\n%+v", d.Recorded, d.Operations, want)
	}
}

// A recorder gets more operations than it has room for. A new operation overwrites the oldest one, and its
// slot keeps nothing of the old content.
func TestOldestGoesFirst(t *testing.T) {
	const rounds = 400
	for _, size := range []int{0, 1, 2, 3, 7, firstSlots + 1, 200, 1000} {
		r := New(size)
		bad := operation(1, 4*ms, "bad")
		bad.Records[0].Error = "failed"
		r.Record(bad)
		for n := range rounds {
			r.Record(operation(uint64(n+2), time.Duration(n+5)*ms, "x", "y"))
			r.Record(&trace.Operation{Records: []trace.Record{{Number: uint64(100 + n),
				Kind: message.Barrier}}})
		}
		d := r.Dump(About{Size: 1})
		var got, want []string
		for i := range d.Operations {
			o := &d.Operations[i]
			got = append(got, fmt.Sprint(o.Number, o.Name, o.Error, o.Bytes, len(o.Shape), o.Cached))
		}
		for n := range rounds {
			want = append(want, fmt.Sprint(n+2, "x", "", 24, 2, true), fmt.Sprint(n+2, "y", "", 24, 2, true),
				fmt.Sprint(100+n, "", "", 0, 0, false))
		}
		want = want[len(want)-max(size, 1):]
		if !slices.Equal(got, want) || d.Recorded != 3*rounds+1 {
			t.Errorf("of %d got %q, want %q", d.Recorded, got, want)
		}
		few := r.Dump(About{Size: 1, MaxOperations: 2})
		if want := d.Operations[max(len(d.Operations)-2, 0):]; few.Recorded != 3*rounds+1 ||
			!reflect.DeepEqual(few.Operations, want) {
			t.Errorf("with at most 2, of %d got %+v, want %+v", few.Recorded, few.Operations, want)
		}
	}
}

func TestNoRecorder(t *testing.T) {
	var r *Recorder
	r.Record(operation(1, 4*ms, "x"))
	if d := r.Dump(About{Rank: 1, Size: 2}); len(d.Operations) != 0 || d.Recorded != 0 || d.Rank != 1 {
		t.Errorf("got %+v", d)
	}
}

func TestRecordWhileDumped(t *testing.T) {
	r := New(64)
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for n := range uint64(2000) {
				r.Record(operation(n, 5*ms, "x", "y", "z"))
			}
		})
	}
	for range 200 {
		d := r.Dump(About{Size: 1})
		for i := range d.Operations {
			if o := &d.Operations[i]; o.Ended != 5*ms || len(o.Name) != 1 {
				t.Fatalf("got half an operation: %+v", o)
			}
		}
	}
	wg.Wait()
}

func TestRecordAllocatesNothing(t *testing.T) {
	r := New(1000)
	op := operation(1, 5*ms, slices.Repeat([]string{"gradient"}, 161)...)
	for range 7 {
		r.Record(op)
	}
	if len(r.slots) != 1000 || cap(r.slots) != 1000 {
		t.Errorf("%d of %d slots are in use, want 1000 of 1000", len(r.slots), cap(r.slots))
	}
	if n := testing.AllocsPerRun(100, func() { r.Record(op) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
	// If the size of a record changes, the comment of New, the help of HVD_FLIGHT_RECORDER and
	// docs/troubleshooting.md must change too.
	if size := unsafe.Sizeof(trace.Record{}); size != 160 {
		t.Errorf("a record has %d bytes, want 160", size)
	}
	megabytes := fmt.Sprintf(" %.1f MB ", float64(unsafe.Sizeof(trace.Record{}))*DefaultOperations/1e6)
	if s, _ := config.Lookup("HVD_FLIGHT_RECORDER"); !strings.Contains(s.Raise, megabytes) {
		t.Errorf("the help says %q, want%s", s.Raise, megabytes)
	}
}

func BenchmarkRecord(b *testing.B) {
	for _, n := range []int{1, 161} {
		b.Run(fmt.Sprintf("tensors=%d", n), func(b *testing.B) {
			r := New(DefaultOperations)
			op := operation(1, 5*ms, slices.Repeat([]string{"gradient"}, n)...)
			b.ReportAllocs()
			for b.Loop() {
				r.Record(op)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/tensor")
		})
	}
}

func BenchmarkDump(b *testing.B) {
	r := New(DefaultOperations)
	for n := range uint64(DefaultOperations) {
		r.Record(operation(n, 5*ms, fmt.Sprintf("layer%d.conv.weight", n%161)))
	}
	b.Run("dump", func(b *testing.B) {
		for b.Loop() {
			r.Dump(About{Size: 1})
		}
	})
	d := r.Dump(About{Size: 1})
	var text []byte
	b.Run("encode", func(b *testing.B) {
		for b.Loop() {
			var err error
			if text, err = Encode(d, DefaultOperations); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(len(text)), "bytes")
	})
	b.Run("decode", func(b *testing.B) {
		for b.Loop() {
			if _, err := Decode(text); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("analyse", func(b *testing.B) {
		for b.Loop() {
			analysis.Analyse([]*analysis.Snapshot{d}, 1, nil)
		}
	})
}
