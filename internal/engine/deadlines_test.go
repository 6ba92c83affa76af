package engine

import (
	"math"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/tensorqueue"
)

// The deadline of an operation with a very long time limit does not overflow.
func TestSetDeadlines(t *testing.T) {
	const now = 5 * time.Second
	for timeout, want := range map[time.Duration]time.Duration{
		0: 0, time.Second: 6 * time.Second, math.MaxInt64: controller.Never,
	} {
		e := &tensorqueue.Entry{Timeout: timeout, Deadline: time.Hour}
		setDeadlines([]*tensorqueue.Entry{e}, now)
		if e.Deadline != want || e.Times.Submitted != now {
			t.Errorf("time limit %v: got deadline %v and submission at %v, want %v and %v", timeout, e.Deadline,
				e.Times.Submitted, want, now)
		}
	}
}
