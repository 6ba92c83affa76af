package conformance

import (
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/ops/tcp"
)

// restless is a tuner that changes all settings after every second grant of a tensor.
type restless struct {
	// sameSegments is set if the segment size must not change, because the bits of an Adasum depend on it.
	sameSegments bool

	notify          func()
	grants, changes uint64
}

func (t *restless) Start(notify func()) { t.notify = notify }

func (t *restless) Granted(string, int64, time.Duration) {
	if t.grants++; t.grants%2 == 0 {
		t.notify()
	}
}

func (t *restless) Changed() (message.Tuning, bool) {
	if t.grants/2 == t.changes {
		return message.Tuning{}, false
	}
	t.changes = t.grants / 2
	pick := func(of uint64) uint64 { return hash(t.changes, of) % of }
	v := message.Tuning{
		FusionThresholdBytes: []int64{0, 64, 4096, 64 << 20}[pick(4)],
		CycleTime:            []time.Duration{0, 20 * time.Microsecond, 200 * time.Microsecond}[pick(3)],
		SegmentBytes:         []int{0, 1, 64, 1000, 64 << 10}[pick(5)],
		CacheOff:             pick(2) == 1,
		OneLevelAllreduce:    pick(6) > 2, OneLevelAllgather: pick(7) > 3,
		Allreduce: append(tcp.Algorithms(message.Allreduce), message.NoAlgorithm)[pick(8)%6],
	}
	if t.sameSegments {
		v.SegmentBytes = 0
	}
	return v, true
}

func (t *restless) Stats() *trace.Tuning { return nil }
func (t *restless) Close()               {}
