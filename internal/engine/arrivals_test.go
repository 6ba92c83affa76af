package engine_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/tensorqueue"
)

// If a timeline begins after some ranks have requested a tensor, the arrival times of these requests are
// missing, and the record of the tensor has Partial set. The record of the next tensor has the arrival times
// of all ranks. A member that has joined has no arrival time, but that does not set Partial.
func TestTimelineBeginsBetweenArrivals(t *testing.T) {
	const n = 3
	c := start(t, n, nil)
	wait := func(all ...chan error) {
		t.Helper()
		c.succeeds(all...)
	}
	everywhere := func(name string) {
		t.Helper()
		c.each(func(r int) { wait(c.allreduce(r, name, make([]byte, 8))) })
	}
	early := c.allreduce(1, "x", make([]byte, 8))
	everywhere("behind x") // rank 0 has received rank 1's request for x by now
	var seen log
	c.engines[0].Observer().Watch(&seen)
	last := func() (*trace.Record, []time.Duration) {
		ops := seen.operations()
		op := &ops[len(ops)-1]
		return &op.Records[0], op.ArrivalsOf(0)
	}
	for i := 0; ; i++ {
		everywhere(fmt.Sprint("until arrivals are noted ", i))
		if _, arrivals := last(); len(arrivals) == n {
			break
		}
	}
	wait(c.allreduce(2, "x", make([]byte, 8)), c.allreduce(0, "x", make([]byte, 8)), early)
	if x, arrivals := last(); x.Name != "x" || !x.Partial || len(arrivals) != n || arrivals[1] != 0 {
		t.Errorf("got %+v, want tensor x without the arrival time of rank 1", x)
	}
	everywhere("after x")
	if x, arrivals := last(); x.Partial || len(arrivals) != n {
		t.Errorf("got %+v, want the arrival times of all ranks", x)
	}
	join := func(r int) chan error {
		return c.submit(r, &tensorqueue.Entry{Request: message.Request{Kind: message.Join, Name: "join"}})
	}
	joined := join(1)
	wait(c.allreduce(0, "without rank 1", make([]byte, 8)), c.allreduce(2, "without rank 1", make([]byte, 8)))
	if x, arrivals := last(); x.Name != "without rank 1" || x.Partial || len(arrivals) != n || arrivals[1] != 0 {
		t.Errorf("got %+v, want the arrival times of ranks 0 and 2, and Partial not set", x)
	}
	wait(join(0), join(2), joined)
	c.shutdown()
}
