package mem

import "time"

// clock measures the time since it was created. It also knows the latency of the links. If the latency is 0,
// its time is always 0, and bytes arrive at time 0.
type clock struct {
	latency time.Duration // at least 0
	began   time.Time
}

func newClock(latency time.Duration) clock {
	if latency <= 0 {
		return clock{}
	}
	return clock{latency: latency, began: time.Now()}
}

func (c *clock) now() time.Duration {
	if c.latency == 0 {
		return 0
	}
	return time.Since(c.began)
}

// arrival returns the time at which bytes that are sent now arrive.
func (c *clock) arrival() time.Duration { return c.now() + c.latency }
