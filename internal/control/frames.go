package control

import (
	"slices"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// framesPerTurn is the maximum number of frames from one peer that a turn handles, so that one peer cannot
// keep the loop from serving the other peers.
const framesPerTurn = 64

// frames splits the bytes that are received on a control connection into frames, without blocking.
type frames struct {
	peer topo.Rank
	conn transport.Conn

	seq   uint32
	short bool   // whether the last read returned fewer bytes than there was room for
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
		f.buf, f.at = f.buf[:0], 0
		if cap(f.buf) > maxKeptBytes {
			f.buf = nil
		}
	case len(f.buf) == cap(f.buf) && f.at > 0:
		f.buf, f.at = f.buf[:copy(f.buf, f.buf[f.at:])], 0
	}
	if len(f.buf) == cap(f.buf) {
		// Grow the buffer only as bytes arrive, because the announced length of a frame may be wrong.
		f.buf = slices.Grow(f.buf, min(max(cap(f.buf), firstStep), readStep))
	}
	n, err := f.conn.TryRead(f.buf[len(f.buf):cap(f.buf)])
	f.short = n > 0 && n < cap(f.buf)-len(f.buf) && err == nil
	f.buf = f.buf[:len(f.buf)+n]
	if err != nil {
		f.err = Cause(err)
	}
	return n > 0 || err != nil
}

// drained reports whether nothing more has arrived, as far as is known without another read: the last read
// was short, and next has returned all of its frames.
func (f *frames) drained() bool { return f.short && f.at == len(f.buf) }

// next returns the oldest complete frame that it has not returned yet. After the last frame it returns the
// error with which the connection has ended, but only once. A returned frame is valid until the next call of
// fill or next.
func (f *frames) next() (ev Event, ok bool) {
	if f.ended {
		return Event{}, false
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
				return Event{From: f.peer, Frame: unused[headerBytes:end]}, true
			}
		}
		if f.fill() {
			continue
		}
		if f.err == nil {
			return Event{}, false
		}
		break
	}
	f.ended = true
	return Event{From: f.peer, Err: f.err}, true
}
