package engine

import (
	"cmp"
	"io"
	"runtime"
	"slices"
	"sync"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// send sends a frame to a peer. If the peer is parked, it is notified later.
func (e *Engine) send(l *link, frame []byte) error {
	e.sched.sent()
	return l.send(frame)
}

// openPolled makes the loop poll the control connections.
func (e *Engine) openPolled() {
	for _, l := range e.links {
		e.polled = append(e.polled, &frames{peer: l.peer, conn: l.conn})
	}
	e.cfg.Mesh.OnNotify(e.sched.notify)
	e.sched.poll(e.cfg.Mesh, newPollLimits(e.cfg.Spin, len(e.cfg.Cores) > 0, e.cfg.Mesh.EntersKernel(),
		e.cfg.ForClient,
		cmp.Or(e.cfg.LocalProcesses, e.cfg.Size), runtime.NumCPU(), runtime.GOMAXPROCS(0)))
}

// receive applies the frames that have arrived on the control connections.
func (e *Engine) receive() error {
	for _, f := range e.polled {
		for n := 0; ; n++ {
			if n == framesPerTurn {
				e.sched.notify()
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

// drain keeps reading the control connections when the loop has ended, so that peers can send their backlog.
// Its goroutines, which connected counts, end when the mesh is closed.
func (e *Engine) drain(connected *sync.WaitGroup) {
	for _, l := range e.links {
		connected.Go(func() { _, _ = io.Copy(io.Discard, l.conn) }) // ends when the mesh is closed
	}
}

// framesPerTurn bounds the frames of one peer that a turn applies, so that one peer cannot keep the loop from
// the others.
const framesPerTurn = 64

// frames extracts the frames from the received bytes of a control connection, without blocking.
type frames struct {
	peer topo.Rank
	conn transport.Conn

	seq   uint32
	buf   []byte // buf[at:] was received and not used yet
	at    int
	err   error // the error that ended the connection
	ended bool  // next has returned err
}

// fill reads from the connection once, without blocking, and reports whether that returned bytes or the end
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
		// Grow with the bytes that arrive, not with the announced length.
		f.buf = slices.Grow(f.buf, readStep)
	}
	n, err := f.conn.TryRead(f.buf[len(f.buf):cap(f.buf)])
	f.buf = f.buf[:len(f.buf)+n]
	if err != nil {
		f.err = cause(err)
	}
	return n > 0 || err != nil
}

// next returns the oldest complete frame. After all of them it returns, once, the error that ended the
// connection. The frame is valid until the next call of a method.
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
