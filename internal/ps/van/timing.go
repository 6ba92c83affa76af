package van

import "time"

// timing is the clock of a van, and what the configuration says of its ticks. It does not change.
type timing struct {
	cfg     *Config
	started time.Time
}

// now returns the time since the start of the van.
func (t timing) now() time.Duration { return time.Since(t.started) }

// beats reports whether heartbeats are on.
func (t timing) beats() bool { return t.cfg.HeartbeatInterval > 0 && t.cfg.HeartbeatTimeout > 0 }

// interval returns the time between two ticks.
func (t timing) interval() time.Duration {
	d := 250 * time.Millisecond
	if t.beats() {
		d = min(d, t.cfg.HeartbeatInterval/2)
	}
	if t.cfg.Resend {
		d = min(d, t.cfg.ResendTimeout/4)
	}
	return max(d, time.Millisecond)
}

// stopped returns the time for which this process has probably been stopped since the tick at the given time.
func (t timing) stopped(ticked time.Duration) time.Duration {
	return max(0, t.now()-ticked-2*t.interval())
}
