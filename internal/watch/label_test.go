package watch

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// last keeps the name and the shape of the last message.
type last struct {
	name  string
	shape tensor.Shape
}

func (l *last) Record(op *trace.Operation) { l.name, l.shape = op.Records[0].Name, op.Records[0].Shape }

// Messages with the tags of earlier ones allocate nothing when they end, with and without a recorder.
func TestMessagesEndWithoutAllocation(t *testing.T) {
	for name, r := range map[string]Recorder{"no recorder": nil, "recorder": &last{}} {
		o := &Observer{start: time.Now(), recorder: r}
		now := time.Now()
		m := &p2p.Op{Peer: 1, DType: tensor.Float32, Buf: make([]byte, 4), Begun: now, Matched: now}
		once := func() {
			for m.Tag = range 8 {
				o.MessageEnded(0, topo.Global, m, nil)
			}
		}
		once()
		if n := testing.AllocsPerRun(200, once); n != 0 {
			t.Errorf("%s: 8 messages allocate %v times when they end, want 0", name, n)
		}
	}
}

// Messages have the right names and shapes, also if there are more of them than an observer keeps.
func TestLabelsAreBounded(t *testing.T) {
	var got last
	o := &Observer{start: time.Now(), recorder: &got}
	for i := range 3 * maxLabels {
		m := &p2p.Op{Peer: 1, Tag: uint32(i / 2), DType: tensor.Uint8, Buf: make([]byte, i%2+1)}
		o.MessageEnded(0, topo.Global, m, nil)
		name, shape := fmt.Sprintf("rank 0 to rank 1, tag %d", i/2), tensor.Shape{int64(i%2 + 1)}
		if got.name != name || !slices.Equal(got.shape, shape) || len(o.labels) > maxLabels {
			t.Fatalf("got %q %v with %d labels, want %q %v with at most %d", got.name, got.shape,
				len(o.labels), name, shape, maxLabels)
		}
	}
}
