package engine

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"math"
	"os"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// A rank measures its clock against rank 0's as NTP does (Mills, Internet Time Synchronization, 1991): it notes when its question
// left and when the answer came, rank 0 when the one came and the other left. The truth lies within half of the time that was
// spent on the way; of several questions that with the shortest way counts.

const (
	// probesAtOnce are asked one after the other, each when the answer to the one before has come.
	probesAtOnce = 8
	// firstProbePeriod is the time between the first two such rows, after each of which it doubles up to probePeriod. Clocks of
	// computers drift apart by up to 50 us a second; between two measurements the drift can be made up for.
	firstProbePeriod = time.Second
	probePeriod      = 8 * time.Second
)

// rankClock is how an engine's times compare with others'. The loop owns all but Clock.
type rankClock struct {
	trace.Clock
	due    time.Duration // when the next row begins
	period time.Duration // after it
	left   int           // questions of this row
	best   trace.Offset  // of this row
	any    bool          // best is one
}

// newClock returns the clock of an engine that starts now.
func newClock(start time.Time, log *zap.Logger) trace.Clock {
	c := trace.Clock{Start: start, Domain: clockDomain()}
	var err error
	if c.Monotonic, err = monotonic(start); err != nil {
		log.Warn("times of this rank cannot be compared with others' of its host", zap.Error(err))
		c.Domain = ""
	}
	return c
}

// probe asks rank 0 for the time if that is due.
func (e *Engine) probe() {
	c := &e.clock
	if e.now < c.due {
		return
	}
	c.period = min(max(2*c.period, firstProbePeriod), probePeriod)
	c.due = e.now + c.period
	if e.cfg.Rank == 0 {
		c.due = never
		e.observer.align(trace.Offset{At: e.now, Job: c.Job()})
		return
	}
	c.left, c.any = probesAtOnce, false
	e.ask()
}

// ask sends a question. If the channel is broken others notice.
func (e *Engine) ask() {
	e.clock.left--
	frame := message.AppendProbe(e.scratch.frame[:0], &message.Probe{Sent: uint64(e.observer.since())})
	e.scratch.frame = frame
	_ = e.send(e.links[0], frame)
}

// hearProbe answers a question, or takes the answer. What cannot be read is the sender's fault.
func (e *Engine) hearProbe(from topo.Rank, frame []byte) error {
	at := e.observer.since()
	p, err := message.DecodeProbe(frame)
	if err != nil {
		return err
	}
	if e.cfg.Rank == 0 {
		p.Received, p.Monotonic, p.Domain = uint64(at), uint64(e.clock.Monotonic), e.clock.Domain
		p.Replied = uint64(e.observer.since())
		answer := message.AppendProbe(nil, &p)
		_ = e.send(e.links[from-1], answer)
		return nil
	}
	e.measured(at, &p)
	return nil
}

// measured takes an answer that came at a time.
func (e *Engine) measured(at time.Duration, p *message.Probe) {
	c := &e.clock
	sent, received, replied := time.Duration(p.Sent), time.Duration(p.Received), time.Duration(p.Replied)
	m := trace.Offset{At: at}
	switch way := (at - sent) - (replied - received); {
	case p.Domain == c.Domain && c.Domain != "":
		m.Offset = c.Monotonic - time.Duration(p.Monotonic)
		c.due, c.left = never, 0 // it stays so
	case sent < 0 || sent > at || received < 0 || replied < received || way < 0:
		return // no time of a clock
	default:
		m.Offset = (received - sent + replied - at) / 2
		m.Error = (way + 1) / 2
	}
	if !c.any || m.Error < c.best.Error {
		c.best, c.any = m, true
	}
	if c.left > 0 {
		e.ask()
		return
	}
	c.best.Job = trace.Clock{Domain: p.Domain, Monotonic: time.Duration(p.Monotonic)}.Job()
	e.observer.align(c.best)
}

// clockDomain names the clock that monotonic reads: processes with the same one read the same clock. It stands for a boot of a host
// and for a time namespace, whose clocks are set apart (time_namespaces(7)). Where these cannot be found out it is one of
// its own.
func clockDomain() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return rand.Text()
	}
	namespace, err := os.Readlink("/proc/self/ns/time")
	if err != nil {
		namespace = "time" // a kernel without them
	}
	return fmt.Sprintf("%s/%s", bytes.TrimSpace(boot), namespace)
}

// monotonic returns what the clock of the domain shows at a time that time.Now gave a moment ago. It is right to within the time that
// two readings of a clock take.
func monotonic(at time.Time) (time.Duration, error) {
	// Between the two readings the thread may lose its processor. Of some tries that with the least between them counts.
	best, shown := time.Duration(math.MaxInt64), time.Duration(0)
	for range 5 {
		before := time.Since(at)
		var ts unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
			return 0, fmt.Errorf("clock: %w", err)
		}
		if took := time.Since(at) - before; took < best {
			best, shown = took, time.Duration(ts.Nano())-before-took/2
		}
	}
	return shown, nil
}
