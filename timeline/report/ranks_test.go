package report

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/timeline"
)

// randomOperation returns an operation that ends after the time at. Operations with other numbers have
// tensors with other names, because the times on a track may not go back.
func randomOperation(r *rand.Rand, number uint64, at time.Duration) trace.Operation {
	// The file has no Sent that is less than a microsecond after Submitted.
	step := func() time.Duration { at += time.Microsecond + time.Duration(r.IntN(1e7)); return at }
	whole := trace.Record{Set: topo.ProcessSetID(r.IntN(2)), Number: number,
		Kind:    message.Kind(1 + r.IntN(message.NumKinds-1)),
		Backend: message.Backend(r.IntN(message.NumBackends)), Algorithm: message.Algorithm(r.IntN(8))}
	tensors, arrived := 1+r.IntN(3), r.IntN(2) == 0
	if whole.Kind.IsMessage() || whole.Kind.IsRequest() {
		tensors, whole.Peer = 1, topo.Rank(r.IntN(4)-1)
	}
	if r.IntN(8) == 0 || whole.Kind == message.Error {
		whole.Error = "rank 1 failed"
	}
	var op trace.Operation
	for i := range tensors {
		n := whole
		n.Name, n.Cached, n.Bytes = fmt.Sprintf("t%d.%d", number, i), r.IntN(2) == 0, r.Int64N(1<<40)
		if whole.Set != topo.Global {
			n.Name += fmt.Sprintf(" [set %d]", whole.Set)
		}
		n.DType = tensor.DType(r.IntN(tensor.NumDTypes))
		if n.DType.Valid() {
			n.Shape = tensor.Shape{r.Int64N(9), 2}[:r.IntN(3)]
		}
		if r.IntN(8) == 0 && whole.Kind != message.Error {
			n.Refused, n.Error = true, `rank 1 sent "x"`
		}
		first, second := step(), step()
		n.Submitted, n.Sent = first, second
		if arrived {
			op.Arrivals = append(op.Arrivals, second, 0, first)
		}
		op.Records = append(op.Records, n)
	}
	granted, begun := step(), step()
	for _, name := range []string{"MEMCPY_IN_FUSION_BUFFER", "SHM_ALLREDUCE"}[:r.IntN(3)] {
		op.Activities = append(op.Activities, trace.Activity{Name: name, Begun: step(), End: step()})
	}
	ended := step()
	for i := range op.Records {
		op.Records[i].Granted, op.Records[i].Begun, op.Records[i].Ended = granted, begun, ended
	}
	return op
}

// The reader gets the operations that a timeline has recorded: the same records, activities and arrivals. The
// scanner parses no frequent event with package json.
func TestOperationsComeBack(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	r := rand.New(rand.NewPCG(seed, 1))
	path := filepath.Join(t.TempDir(), "t.json.gz")
	tl, err := timeline.Start(timeline.Config{Path: path, Size: 3, Host: "h", Epoch: 1, MaxBytes: 1 << 30,
		Clock: trace.Clock{Domain: "a"}})
	if err != nil {
		t.Fatal(err)
	}
	var want []trace.Operation
	at := time.Duration(1)
	for number := range uint64(500) {
		op := randomOperation(r, number+1, at)
		at = op.Records[0].Ended
		want = append(want, op)
		own := op
		own.Records = slices.Clone(op.Records)
		for i := range own.Records { // the timeline adds the set to the names
			own.Records[i].Name = fmt.Sprintf("t%d.%d", number+1, i)
		}
		tl.Record(&own)
		tl.Cycle(at)
	}
	tl.Span(trace.Span{Kind: trace.Range, Name: "forward", Begun: 1, End: at})
	tl.Span(trace.Span{Kind: trace.Wait, Name: "t1.0", Begun: 1, End: at})
	if err := tl.Close(); err != nil || tl.Dropped() > 0 {
		t.Fatalf("%v, %d dropped", err, tl.Dropped())
	}
	j, n := openJob(t, path), 0
	err = newRankReader(j.ranks[0]).operations(func(o *operation) bool {
		if len(o.Arrivals) == 0 {
			o.Arrivals = nil
		}
		if len(o.Activities) == 0 {
			o.Activities = nil
		}
		if !reflect.DeepEqual(o.Operation, want[n]) {
			t.Errorf("seed %d, operation %d: got\n%+v\nwant\n%+v", seed, n, o.Operation, want[n])
			return false
		}
		n++
		return true
	})
	if problems := j.damages(); err != nil || n != len(want) || len(problems) > 0 {
		t.Errorf("seed %d: got %d operations, %v and %q, want %d", seed, n, err, problems, len(want))
	}
	var q quick
	err = j.ranks[0].segments[0].events(func(_ *event, text jsontext.Value, _ error) error {
		rare := bytes.Contains(text, []byte(`"hvd_`)) || bytes.Contains(text, []byte(`_micros"`))
		escaped := bytes.ContainsRune(text, '\\')
		if e := new(event); q.event(append(slices.Clone(text), 0), e) != len(text) && !rare && !escaped {
			t.Errorf("%s is not decoded by quick", text)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
