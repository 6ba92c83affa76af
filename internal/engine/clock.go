package engine

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

// rankClock is the engine's clock, and the state of the measurement of its offset from rank 0's clock. The
// loop owns all fields except Clock.
type rankClock struct {
	trace.Clock
	due    time.Duration // the time at which the next series begins
	period time.Duration // the time from one series to the next
	left   int           // number of probes of this series that are still to be sent
	best   trace.Offset  // the best measurement of this series
	any    bool          // whether best is set
}

// probe starts a series of probes to rank 0 if one is due. Rank 0 sends no probes: it records once that its
// own offset is zero.
func (e *Engine) probe() {
	c := &e.clock
	if e.now < c.due {
		return
	}
	c.period = min(max(2*c.period, firstProbePeriod), probePeriod)
	c.due = e.now + c.period
	if e.cfg.Rank == 0 {
		c.due = controller.Never
		e.observer.align(trace.Offset{At: e.now, Job: c.Job()})
		return
	}
	c.left, c.any = probesAtOnce, false
	e.sendProbe()
}

// sendProbe sends a probe. It ignores an error of the connection, because the reader of the connection or a
// later send reports the error.
func (e *Engine) sendProbe() {
	e.clock.left--
	frame := message.AppendProbe(e.scratch.frame[:0], &message.Probe{Sent: uint64(e.observer.Since())})
	e.scratch.frame = frame
	_ = e.sendUp(frame)
}

// handleProbe handles a frame of a clock measurement. Rank 0 answers a probe from another rank. Any other
// rank evaluates the answer from rank 0. handleProbe returns an error if the frame cannot be decoded, which
// is the fault of the sender.
func (e *Engine) handleProbe(from topo.Rank, frame []byte) error {
	at := e.observer.Since()
	p, err := message.DecodeProbe(frame)
	if err != nil {
		return err
	}
	if e.cfg.Rank == 0 {
		p.Received, p.Monotonic, p.Domain = uint64(at), uint64(e.clock.Monotonic), e.clock.Domain
		p.Replied = uint64(e.observer.Since())
		answer := message.AppendProbe(nil, &p)
		_, _ = e.sendDown(from, answer)
		return nil
	}
	e.handleProbeReply(at, &p)
	return nil
}

// handleProbeReply evaluates an answer that arrived at the time at. If the series has probes left, it sends
// the next one. Otherwise it records the best measurement. An answer with impossible times ends the series.
func (e *Engine) handleProbeReply(at time.Duration, p *message.Probe) {
	c := &e.clock
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
		e.sendProbe()
		return
	}
	c.best.Job = trace.Clock{Domain: p.Domain, Monotonic: time.Duration(p.Monotonic)}.Job()
	e.observer.align(c.best)
}
