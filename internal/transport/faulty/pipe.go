package faulty

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gohvd/gohvd/internal/transport"
)

const (
	// chunkBytes is the maximum number of bytes that are passed to the wrapped connection at once.
	chunkBytes = 64 << 10
	// maxUnread is the number of unread bytes from which on a pipe stops reading the wrapped connection, so
	// that a sender notices a receiver that does not read.
	maxUnread = 64 << 10
)

// pipe is one direction of a connection. The meshes of its two ranks share it.
type pipe struct {
	key
	network  *Network
	rules    []*Rule // the rules that select this direction
	maxBytes int     // the maximum number of bytes that pass the rules at once
	sent     atomic.Uint64
	// waker is that of the receiving rank. It is nil until this rank connects, and on lanes except Control.
	waker atomic.Pointer[transport.Waker]

	mu       sync.Mutex
	changed  sync.Cond
	silenced bool  // a silent cut has ended this direction
	cutErr   error // the error of reads after a cut that is not silent

	sender   side
	broken   chan struct{} // closed when the sender's calls begin to fail
	random   *rand.Rand    // for jitter
	queue    []piece       // what was sent and has not passed the rules
	accepted uint64        // number of bytes that were sent, including those lost by a cut
	passed   uint64        // number of bytes that have passed the rules

	receiver    side
	unread      bytes.Buffer // what has arrived and was not read
	arrived     uint64       // number of bytes that have arrived
	errReturned bool         // a read has returned an error
}

// piece is the part of a message that the rules still hold back. The rules release it no earlier than at the
// time in the field ready.
type piece struct {
	bytes []byte
	ready time.Time
}

// side has the errors with which the calls of one end of a pipe fail. own is an error that the rank at this
// end has caused. other is an error of the connection. If both are set, calls fail with own.
type side struct{ own, other error }

func (s *side) err() error {
	if s.own != nil {
		return s.own
	}
	return s.other
}

// fail sets own to err. ErrReleased and ErrClosed replace an error from Abort.
func (s *side) fail(err error) {
	final := func(err error) bool { return err == transport.ErrReleased || err == transport.ErrClosed }
	if s.own == nil || final(err) && !final(s.own) {
		s.own = err
	}
}

func (p *pipe) send(b []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.sender.err(); err != nil || len(b) == 0 {
		return err
	}
	p.accepted += uint64(len(b))
	if p.silenced {
		p.sent.Add(uint64(len(b)))
		return nil
	}
	ready := time.Now()
	for _, r := range p.rules {
		if ready = ready.Add(r.Delay); r.Jitter > 0 {
			ready = ready.Add(time.Duration(p.random.Int64N(int64(r.Jitter))))
		}
	}
	p.queue = append(p.queue, piece{b, ready})
	p.changed.Broadcast()
	return nil
}

func (p *pipe) flush() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.sender.err() == nil && p.sent.Load() < p.accepted {
		p.changed.Wait()
	}
	return p.sender.err()
}

// forward passes what was sent to the wrapped connection. It runs in a goroutine of the sending mesh until
// the sender's calls fail.
func (p *pipe) forward(inner transport.Conn) {
	buf := make([]byte, p.maxBytes)
	for {
		n := p.next(buf)
		if n < 0 {
			return
		}
		err := inner.Send(buf[:n])
		if err == nil {
			err = inner.Flush()
		}
		p.mu.Lock()
		if err != nil && !p.silenced {
			p.failSender(err)
		} else {
			p.sent.Add(uint64(n))
		}
		p.changed.Broadcast()
		p.mu.Unlock()
		p.network.cutDue(p)
	}
}

// next waits until bytes may pass the rules, copies them into buf and returns their number. If the sender's
// calls fail, it returns -1. It may return 0 if a cut is due.
func (p *pipe) next(buf []byte) int {
	for {
		p.mu.Lock()
		for len(p.queue) == 0 && p.sender.err() == nil {
			p.changed.Wait()
		}
		if p.sender.err() != nil {
			p.mu.Unlock()
			return -1
		}
		first := p.queue[0]
		p.mu.Unlock()
		p.waitUntil(first.ready)
		n := min(len(first.bytes), len(buf))
		p.waitUntil(p.network.reserve(p, n))
		if n := p.pass(buf[:n]); n >= 0 {
			return n
		}
	}
}

// waitUntil waits until the given time, or until the sender's calls fail.
func (p *pipe) waitUntil(at time.Time) {
	d := time.Until(at)
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.broken:
	}
}

// pass moves up to len(buf) bytes of the oldest piece to buf, as many as may pass before a rule cuts the
// connection. It counts them and returns their number. If the queue was emptied in the meantime, it returns
// -1.
func (p *pipe) pass(buf []byte) int {
	p.network.mu.Lock()
	defer p.network.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) == 0 {
		return -1
	}
	n := len(buf)
	for _, r := range p.rules {
		n = r.left(n)
	}
	first := &p.queue[0]
	copy(buf[:n], first.bytes)
	p.passed += uint64(n)
	first.bytes = first.bytes[n:]
	ended := len(first.bytes) == 0
	if ended {
		p.queue[0] = piece{}
		p.queue = p.queue[1:]
	}
	for _, r := range p.rules {
		r.counts.Bytes += int64(n)
		if ended {
			r.counts.Messages++
		}
	}
	return n
}

// receive reads what arrives on the wrapped connection. It runs in a goroutine of the receiving mesh until
// the wrapped connection fails.
func (p *pipe) receive(inner transport.Conn) {
	buf := make([]byte, chunkBytes)
	for p.waitForRoom() {
		n, err := inner.Read(buf)
		p.arrive(buf[:n], err)
		if err != nil {
			return
		}
	}
}

// waitForRoom waits until there is room for more unread bytes. If the receiver's calls fail, it returns
// false.
func (p *pipe) waitForRoom() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.unread.Len() >= maxUnread && p.receiver.own == nil {
		p.changed.Wait()
	}
	return p.receiver.own == nil
}

// arrive adds what was read from the wrapped connection: bytes, and the error that has ended it, if any.
// After a silent cut the error is dropped, because the news of the other rank's end would not arrive.
func (p *pipe) arrive(b []byte, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.arrived += uint64(len(b))
	p.unread.Write(b)
	if !p.silenced {
		p.receiver.other = err
	}
	p.wake()
}

// read copies into b what has arrived. If wait is not set, it may return 0 and no error.
func (p *pipe) read(b []byte, wait bool) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for wait && len(b) > 0 && p.unread.Len() == 0 && p.receiveErr() == nil {
		p.changed.Wait()
	}
	if p.receiver.own != nil || p.unread.Len() == 0 {
		err := p.receiveErr()
		p.errReturned = err != nil
		return 0, err
	}
	p.changed.Broadcast()
	return p.unread.Read(b)
}

// receiveErr returns the error of reads when all bytes that have arrived were read. The caller holds mu.
func (p *pipe) receiveErr() error {
	if p.receiver.own == nil && p.cutErr != nil && p.arrived >= p.passed {
		return p.cutErr
	}
	return p.receiver.err()
}

// hasUnread reports whether a read would return bytes, or an error that no read has returned yet.
func (p *pipe) hasUnread() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.receiver.own == nil && p.unread.Len() > 0 || p.receiveErr() != nil && !p.errReturned
}

// end cuts the pipe as rule r says. The caller holds the network's mu.
func (p *pipe) end(r *Rule) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.silenced || p.cutErr != nil:
	case r.Silent:
		p.silenced = true
		for _, lost := range p.queue {
			p.sent.Add(uint64(len(lost.bytes)))
		}
		p.queue = nil
		p.changed.Broadcast()
	default:
		err := fmt.Errorf("faulty: rule %q cut the connection: %w", r.Name, syscall.ECONNRESET)
		p.cutErr = &transport.PeerError{Peer: p.from, Lane: p.lane, Err: err}
		p.failSender(&transport.PeerError{Peer: p.to, Lane: p.lane, Err: err})
		p.wake()
	}
}

// failSender makes the sender's calls fail with err, unless they fail already. It drops the queue. The caller
// holds mu.
func (p *pipe) failSender(err error) {
	if p.sender.err() == nil {
		close(p.broken)
		p.sender.other = err
	}
	p.queue = nil
}

// giveUpSending makes the sender's calls fail with err, which the sending rank has caused.
func (p *pipe) giveUpSending(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failSender(err)
	p.sender.fail(err)
	p.changed.Broadcast()
}

// giveUpReceiving makes reads fail with err, which the receiving rank has caused.
func (p *pipe) giveUpReceiving(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.receiver.fail(err)
	p.unread, p.errReturned = bytes.Buffer{}, false
	p.wake()
}

// wake wakes the calls and goroutines that wait for a change of the pipe. If the receiving rank is parked, it
// notifies that rank. The caller holds mu.
func (p *pipe) wake() {
	p.changed.Broadcast()
	if w := p.waker.Load(); w != nil {
		w.Wake()
	}
}
