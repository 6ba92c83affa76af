package mem

import "time"

// clock tells the time since it was made, and how long links take. Without latency it always says 0, which is also
// when everything arrives.
type clock struct {
	latency time.Duration // 0 or more
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

// arrival returns when what is sent now arrives.
func (c *clock) arrival() time.Duration { return c.now() + c.latency }
