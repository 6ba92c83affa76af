package control

import (
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// A rank measures the offset of its clock from rank 0's clock as NTP does (Mills, Internet Time
// Synchronization, 1991). It sends a probe and records when it sent the probe and when the answer arrived.
// Rank 0 records when the probe arrived and when it sent the answer. The error of the offset is at most half
// of the time that probe and answer were in transit. The engine makes several probes and uses the one with
// the shortest transit time.

const (
	// probesAtOnce is the number of probes in a series. A rank sends the next probe of a series when the
	// answer to the previous one has arrived.
	probesAtOnce = 8
	// firstProbePeriod is the time between the first two series. The time doubles after each series until it
	// reaches probePeriod. The clocks of two computers drift apart by up to 50 us a second. Two measurements
	// give the drift between them, so that times can be corrected for it.
	firstProbePeriod = time.Second
	probePeriod      = 8 * time.Second
)

// Clock is the engine's clock, which measures its offset from rank 0's clock. Only the goroutine that runs
// turns of the loop may use the fields and methods other than those of trace.Clock.
type Clock struct {
	trace.Clock
	cfg    ClockConfig
	frame  []byte        // memory for probes
	due    time.Duration // the time at which the next series begins
	period time.Duration // the time from one series to the next
	left   int           // number of probes of this series that are still to be sent
	best   trace.Offset  // the best measurement of this series
	any    bool          // whether best is set
}

// ClockConfig has what a Clock needs.
type ClockConfig struct {
	Rank topo.Rank
	// Now returns the time since the engine's start.
	Now func() time.Duration
	// Up sends a probe to rank 0, and Down an answer from rank 0 to another rank. They drop errors of
	// connections, because the reader of the connection or a later send reports them.
	Up   func(probe []byte)
	Down func(to topo.Rank, answer []byte)
	// Measured is called with each measurement.
	Measured func(trace.Offset)
}

// NewClock returns the clock of a rank.
func NewClock(c trace.Clock, cfg ClockConfig) *Clock { return &Clock{Clock: c, cfg: cfg} }

// Due returns the time at which Probe must be called.
func (c *Clock) Due() time.Duration { return c.due }

// Probe starts a series of probes to rank 0 if one is due at the time now. Rank 0 sends no probes: it records
// once that its own offset is zero.
func (c *Clock) Probe(now time.Duration) {
	if now < c.due {
		return
	}
	c.period = min(max(2*c.period, firstProbePeriod), probePeriod)
	c.due = now + c.period
	if c.cfg.Rank == 0 {
		c.due = controller.Never
		c.cfg.Measured(trace.Offset{At: now, Job: c.Job()})
		return
	}
	c.left, c.any = probesAtOnce, false
	c.send()
}

// send sends a probe.
func (c *Clock) send() {
	c.left--
	c.frame = message.AppendProbe(c.frame[:0], &message.Probe{Sent: uint64(c.cfg.Now())})
	c.cfg.Up(c.frame)
}

// Handle handles a frame of a clock measurement. Rank 0 answers a probe from another rank. Any other rank
// evaluates the answer from rank 0. Handle returns an error if the frame cannot be decoded, which is the
// fault of the sender.
func (c *Clock) Handle(from topo.Rank, frame []byte) error {
	at := c.cfg.Now()
	p, err := message.DecodeProbe(frame)
	if err != nil {
		return err
	}
	if c.cfg.Rank == 0 {
		p.Received, p.Monotonic, p.Domain = uint64(at), uint64(c.Monotonic), c.Domain
		p.Replied = uint64(c.cfg.Now())
		c.frame = message.AppendProbe(c.frame[:0], &p)
		c.cfg.Down(from, c.frame)
		return nil
	}
	c.evaluate(at, &p)
	return nil
}

// evaluate evaluates an answer that arrived at the time at. If the series has probes left, it sends
// the next one. Otherwise it records the best measurement. An answer with impossible times ends the series.
func (c *Clock) evaluate(at time.Duration, p *message.Probe) {
	sent, received, replied := time.Duration(p.Sent), time.Duration(p.Received), time.Duration(p.Replied)
	m := trace.Offset{At: at}
	switch roundTrip := (at - sent) - (replied - received); {
	case p.Domain == c.Domain && c.Domain != "":
		m.Offset = c.Monotonic - time.Duration(p.Monotonic)
		c.due, c.left = controller.Never, 0 // both ranks read the same clock, so the offset never changes
	case sent < 0 || sent > at || received < 0 || replied < received || roundTrip < 0:
		return // the times contradict each other
	default:
		m.Offset = (received - sent + replied - at) / 2
		m.Error = (roundTrip + 1) / 2
	}
	if !c.any || m.Error < c.best.Error {
		c.best, c.any = m, true
	}
	if c.left > 0 {
		c.send()
		return
	}
	c.best.Job = trace.Clock{Domain: p.Domain, Monotonic: time.Duration(p.Monotonic)}.Job()
	c.cfg.Measured(c.best)
}
