package report

import (
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/trace"
)

// A stream decodes at most aheadOf tensors at a time, or one operation.
func TestBatchesAreLimitedByTensors(t *testing.T) {
	const operations = 40
	for tensors, want := range map[int]int{1: aheadOf, 5: 4 * 5, 100: 100} {
		r := new(live.Records)
		for range operations {
			o := &trace.Operation{Records: make([]trace.Record, tensors)}
			for i := range o.Records {
				o.Records[i].Submitted = 1
			}
			r.Entries = append(r.Entries, live.Entry{Operation: o})
		}
		s := &stream{rankReader: newRankReader(OfRecords(1, []*live.Records{r}).ranks[0])}
		all, most := 0, 0
		for batch := range s.batches {
			n := 0
			for _, i := range batch {
				n += len(i.op.Records)
			}
			all, most = all+n, max(most, n)
		}
		if all != operations*tensors || most != want {
			t.Errorf("%d tensors in an operation: got %d in all and up to %d at a time, want %d and %d", tensors,
				all, most, operations*tensors, want)
		}
	}
}

// An entry with more arrivals than the job has ranks has none, because each of its tensors would get a copy.
func TestArrivalsAreLimitedByRanks(t *testing.T) {
	for arrivals, want := range map[int]int{2: 4, 3: 0} {
		o := &trace.Operation{Records: []trace.Record{{Submitted: 1}, {Submitted: 1}}}
		r := &live.Records{Entries: []live.Entry{{Operation: o, Arrivals: make([]time.Duration, arrivals)}}}
		reader := newRankReader(OfRecords(2, []*live.Records{r}).ranks[0])
		err := reader.operations(func(o *operation) bool {
			if len(o.Arrivals) != want {
				t.Errorf("%d arrivals: got %d for two tensors, want %d", arrivals, len(o.Arrivals), want)
			}
			return true
		})
		if err != nil {
			t.Error(err)
		}
	}
}
