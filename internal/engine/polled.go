package engine

import (
	"cmp"
	"io"
	"runtime"
	"slices"
	"sync"

	"github.com/gohvd/gohvd/internal/sched"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// send sends a frame to a peer. If the peer is parked, the scheduler notifies it later.
func (e *Engine) send(l *link, frame []byte) error {
	e.sched.Sent()
	return l.send(frame)
}

// openPolled makes the loop poll the control connections.
func (e *Engine) openPolled() {
	for _, l := range e.links {
		e.polled = append(e.polled, &frames{peer: l.peer, conn: l.conn})
	}
	e.cfg.Mesh.OnNotify(e.sched.Notify)
	e.sched.Poll(e.cfg.Mesh, sched.NewLimits(e.cfg.Spin, len(e.cfg.Cores) > 0,
		e.cfg.Mesh.EntersKernel() && e.cfg.Collectives == nil,
		e.cfg.ForClient,
		cmp.Or(e.cfg.LocalProcesses, e.cfg.Size), cmp.Or(e.cfg.Processors, runtime.NumCPU()),
		runtime.GOMAXPROCS(0)))
}

// receive handles the frames that have arrived on the control connections. If it returns an error, the epoch
// ends at once.
func (e *Engine) receive() error {
	if !e.unread && !e.negotiation.reads() {
		return nil
	}
	e.unread = false
	for _, f := range e.polled {
		for n := 0; ; n++ {
			if n == framesPerTurn {
				e.unread = true
				e.sched.Notify()
				break
			}
			ev, ok := f.next()
			if !ok {
				break
			}
			if err := e.handleEvent(&ev); err != nil {
				return err
			}
		}
	}
	return nil
}

// drain starts goroutines that keep reading the control connections after the loop has ended, so that peers
// can send their backlog. The goroutines end when the mesh is closed. The WaitGroup connected counts them.
func (e *Engine) drain(connected *sync.WaitGroup) {
	for _, l := range e.links {
		connected.Go(func() { _, _ = io.Copy(io.Discard, l.conn) }) // returns when the mesh is closed
	}
}

// framesPerTurn is the maximum number of frames from one peer that a turn handles, so that one peer cannot
// keep the loop from serving the other peers.
const framesPerTurn = 64

// frames splits the bytes that are received on a control connection into frames, without blocking.
type frames struct {
	peer topo.Rank
	conn transport.Conn

	seq   uint32
	buf   []byte // buf[at:] was received and has not been returned by next
	at    int
	err   error // the error with which the connection has ended
	ended bool  // whether next has returned err
}

// fill reads from the connection once, without blocking. It reports whether it has received bytes or the end
// of the connection.
func (f *frames) fill() bool {
	if f.err != nil {
		return false
	}
	switch {
	case f.at == len(f.buf):
		if f.buf, f.at = f.buf[:0], 0; cap(f.buf) > maxKeptBytes {
			f.buf = nil
		}
	case len(f.buf) == cap(f.buf) && f.at > 0:
		f.buf, f.at = f.buf[:copy(f.buf, f.buf[f.at:])], 0
	}
	if len(f.buf) == cap(f.buf) {
		// Grow the buffer only as bytes arrive, because the announced length of a frame may be wrong.
		f.buf = slices.Grow(f.buf, readStep)
	}
	n, err := f.conn.TryRead(f.buf[len(f.buf):cap(f.buf)])
	f.buf = f.buf[:len(f.buf)+n]
	if err != nil {
		f.err = cause(err)
	}
	return n > 0 || err != nil
}

// next returns the oldest complete frame that it has not returned yet. After the last frame it returns the
// error with which the connection has ended, but only once. A returned frame is valid until the next call of
// fill or next.
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
