package engine

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/futex"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
)

const (
	// defaultSpin is about what it takes to be woken, with what that costs whoever wakes.
	defaultSpin = 50 * time.Microsecond
	// defaultHelp is for who waits and has a processor of its own: others may be late by what it takes them to queue a step's tensors.
	defaultHelp = time.Millisecond
	// looksPerClock keeps the look at the clock from being what a look costs.
	looksPerClock = 8
	// pauses between two looks leave a sibling hyper-thread, and the memory, some room.
	pauses = 4
	// looksPerRing is for how many looks, or a budget's time, a peer that rests is left to look by itself: one that has just
	// finished an operation mostly begins the next.
	looksPerRing = 64
)

// spin is how the loop watches before it sleeps.
type spin struct {
	budget     time.Duration // of who takes turns; 0 is not at all
	watch      time.Duration // the budget of BackgroundThreadLoop
	help       time.Duration // the budget of a goroutine that helps
	watching   pace          // of BackgroundThreadLoop
	helping    pace          // of a goroutine that helps
	pinned     bool          // to a thread: then only another thread can run a lane
	tight      bool          // a lane that executes needs the processor that watching would take
	until      time.Duration // when this rank is not busy any more
	dispatched bool          // in this turn
	// unrung says that something was sent of which a peer that rests was not told, and that it is after so many looks, in as
	// many turns as they take, or when ringAt is over.
	unrung bool
	looks  int
	ringAt time.Duration
}

// pace is how often who watches gives way.
type pace struct {
	looksPerYield   int // after so many looks to other threads
	looksPerGosched int // after so many looks to other goroutines
}

// newSpin is for a loop among the given number of processes on a host with so many processors, in one that uses so many
// threads for goroutines. The numbers of looks are those of the shortest times to completion that were measured.
func newSpin(budget time.Duration, pinned bool, processes, cores, threads int) spin {
	// Each keeps two threads busy if it can: the loop watches while a lane runs, or the caller. If the caller helps it is
	// one.
	busy := processes * min(2, threads)
	// The kernel may put two threads on one processor though another is idle, so there are always some yields. To give way
	// to a goroutine may wake a thread for it, which is much where it has no processor of its own to look from.
	s := spin{pinned: pinned, tight: busy > cores, watching: pace{16, 64}, helping: pace{16, 256}}
	if pinned || busy >= cores {
		s.watching = pace{1, 4}
	}
	if threads == 1 || processes > cores {
		s.watching.looksPerGosched = 1 // there is no other thread, or it is late
	}
	if processes > cores {
		s.helping = pace{1, 64}
	}
	s.watch = max(budget, 0)
	if budget == 0 {
		// Who gives way waits for its turn as well.
		s.watch = defaultSpin * time.Duration((busy+cores-1)/cores)
	}
	s.help = s.watch
	if budget == 0 && processes <= cores {
		s.help = max(s.watch, defaultHelp)
	}
	s.budget = s.watch
	return s
}

// extend notes that there is, or was at the given time, something to do. Heartbeats are no reason: an idle job takes no
// processor time.
func (s *spin) extend(now time.Duration) { s.until = now + s.budget }

// sent notes that something was sent at the given time.
func (s *spin) sent(now time.Duration) {
	if !s.unrung {
		s.unrung, s.looks, s.ringAt = true, looksPerRing, now+s.watch
	}
}

// overdue counts a look, and reports whether peers that rest are to be told now.
func (s *spin) overdue(now time.Duration) bool {
	s.looks--
	return s.unrung && (s.looks <= 0 || now >= s.ringAt)
}

// send sends a frame to a peer, which is told later if it rests.
func (e *Engine) send(l *link, frame []byte) error {
	e.spin.sent(e.now)
	return l.send(frame)
}

// tellPeers rings for those that rest.
func (e *Engine) tellPeers() {
	e.spin.unrung = false
	e.poller.Ring()
}

// poll makes the loop ask the control connections, if they can be asked.
func (e *Engine) poll() error {
	p, ok := e.cfg.Mesh.(transport.Poller)
	if !ok {
		return nil
	}
	for _, l := range e.links {
		conn, ok := l.conn.(transport.Polled)
		if !ok {
			return fmt.Errorf("engine: rank %d: control channel to rank %d is a %T, want a transport.Polled", e.cfg.Rank, l.peer, l.conn)
		}
		e.polled = append(e.polled, &frames{peer: l.peer, conn: conn})
	}
	e.poller = p
	p.OnBell(e.ring)
	e.spin = newSpin(e.cfg.Spin, len(e.cfg.Cores) > 0, e.localProcesses(), runtime.NumCPU(), runtime.GOMAXPROCS(0))
	e.helpable = !e.spin.pinned && e.spin.budget > 0
	e.late.period, e.late.timer = latePeriod, time.AfterFunc(never, e.ringLate)
	e.late.timer.Stop()
	return nil
}

// listenPolled applies what the control connections have.
func (e *Engine) listenPolled() error {
	for _, f := range e.polled {
		for n := 0; ; n++ {
			if n == framesPerTurn {
				e.ring()
				break
			}
			ev, ok := f.next()
			if !ok {
				break
			}
			if err := e.hear(&ev); err != nil {
				return err
			}
		}
	}
	return nil
}

// drain reads on after the loop, as receivers do, so that peers can get rid of what they have sent.
func (e *Engine) drain(connected *sync.WaitGroup) {
	for _, l := range e.links {
		connected.Go(func() { _, _ = io.Copy(io.Discard, l.conn) }) // until the mesh is closed
	}
}

// look reports whether there is something to do. If this rank is busy it watches for that a while, unless quit.
func (e *Engine) look(p *pace, quit func() bool) bool {
	if e.poller == nil {
		return false
	}
	s := &e.spin
	if s.dispatched && !s.pinned {
		// The lane comes next on this processor, which is sooner than another thread could take it.
		runtime.Gosched()
	}
	s.dispatched = false
	for n := 1; ; n++ {
		// Also where there is always something to do for this rank: what waits may be another's.
		if s.overdue(e.now) {
			e.tellPeers()
		}
		if e.rung.Load() {
			return true
		}
		e.looks.Add(1)
		for _, f := range e.polled {
			if f.fill() {
				return true
			}
		}
		if len(e.trying) > 0 && e.try() {
			return true
		}
		if e.now >= s.until || s.tight && e.granted > len(e.trying) || quit() {
			return false
		}
		if n%p.looksPerYield == 0 {
			futex.Yield()
		} else {
			futex.Pause(pauses)
		}
		if !s.pinned && n%p.looksPerGosched == 0 {
			runtime.Gosched()
		}
		if n%looksPerClock == 0 {
			e.now = time.Since(e.start)
		}
	}
}

// rest says that the loop is about to sleep, and reports whether it may.
func (e *Engine) rest() bool {
	e.resting.Store(true)
	return !e.rung.Load() && (e.poller == nil || e.poller.Rest())
}

// wake says that the loop does not sleep.
func (e *Engine) wake() {
	if !e.resting.Load() {
		return
	}
	e.resting.Store(false)
	if e.poller != nil {
		e.poller.Wake()
	}
}

// framesPerTurn bounds what one peer can keep the loop busy with before others are heard.
const framesPerTurn = 64

// frames cuts the frames out of what a control connection has received, without waiting.
type frames struct {
	peer topo.Rank
	conn transport.Polled

	seq   uint32
	buf   []byte // from at on, what came and was not used
	at    int
	err   error // why the connection ended
	ended bool  // and that was told
}

// fill asks the connection once, and reports whether that brought something: bytes, or the end.
func (f *frames) fill() bool {
	if f.err != nil {
		return false
	}
	switch {
	case f.at == len(f.buf):
		if f.buf, f.at = f.buf[:0], 0; cap(f.buf) > maxKept {
			f.buf = nil
		}
	case len(f.buf) == cap(f.buf) && f.at > 0:
		f.buf, f.at = f.buf[:copy(f.buf, f.buf[f.at:])], 0
	}
	if len(f.buf) == cap(f.buf) {
		// Grows with what arrives, not with what was announced.
		f.buf = slices.Grow(f.buf, readStep)
	}
	n, err := f.conn.TryRead(f.buf[len(f.buf):cap(f.buf)])
	f.buf = f.buf[:len(f.buf)+n]
	if err != nil {
		f.err = cause(err)
	}
	return n > 0 || err != nil
}

// next is the oldest frame that has come whole, or, after all of them, once, why the connection ended. The frame is valid
// until the next call of a method.
func (f *frames) next() (ev event, ok bool) {
	if f.ended {
		return event{}, false
	}
	for {
		unused := f.buf[f.at:]
		if len(unused) >= headerBytes {
			n, err := frameBytes(unused, f.seq)
			if err != nil {
				f.err = err
				break
			}
			if end := headerBytes + n; len(unused) >= end {
				f.seq++
				f.at += end
				return event{from: f.peer, frame: unused[headerBytes:end]}, true
			}
		}
		if f.fill() {
			continue
		}
		if f.err == nil {
			return event{}, false
		}
		break
	}
	f.ended = true
	return event{from: f.peer, err: f.err}, true
}
