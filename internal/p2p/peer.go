package p2p

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// Kinds of frames. Each frame begins with a header. Eager and data frames are followed by the message, and
// share frames by its place.
const (
	eager  uint8 = 1 + iota // a message, with the number id
	offer                   // a message that waits at its sender, under the number id
	share                   // the same, but the receiver copies it from the memory of the sender
	accept                  // the receiver is ready for the message id
	finish                  // the receiver does not need the message id any more
	data                    // the message id
	credit                  // numBytes of eager messages were matched
	bye                     // the sender of the frame sends no more messages
)

// headerBytes is the size of a header: kind u8, type u8, 0 u16, tag u32, id u64, size u64 (little-endian).
const headerBytes = 24

// header is the beginning of a frame.
type header struct {
	kind     uint8
	dt       tensor.DType
	tag      uint32
	id       uint64
	numBytes uint64
}

func (h header) append(b []byte) []byte {
	b = append(b, h.kind, uint8(h.dt), 0, 0)
	b = binary.LittleEndian.AppendUint32(b, h.tag)
	b = binary.LittleEndian.AppendUint64(b, h.id)
	return binary.LittleEndian.AppendUint64(b, h.numBytes)
}

// placeBytes is the size of the place of a shared message: chunk u32, 0 u32, offset u64 (little-endian).
const placeBytes = 16

func appendPlace(b []byte, at arena.Ref) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(at.Chunk))
	return binary.LittleEndian.AppendUint64(b, uint64(at.Offset))
}

func decodePlace(b []byte) arena.Ref {
	return arena.Ref{Chunk: binary.LittleEndian.Uint32(b), Offset: int64(binary.LittleEndian.Uint64(b[8:]))}
}

func decode(b []byte) header {
	return header{kind: b[0], dt: tensor.DType(b[1]), tag: binary.LittleEndian.Uint32(b[4:]),
		id: binary.LittleEndian.Uint64(b[8:]), numBytes: binary.LittleEndian.Uint64(b[16:])}
}

// message is a message that has arrived or was offered and that no receive has matched.
type message struct {
	header
	payload []byte    // of an eager message
	place   arena.Ref // of a shared message, in the process of the sender
	arrival uint64
}

// outgoing is a frame to send. If op is set, it is the message with number id, whose buffer follows the
// frame.
type outgoing struct {
	frame []byte
	id    uint64
	op    *Op
	last  bool // whether this is the bye
}

// state is the state of a channel.
type state uint8

const (
	unopened state = iota
	opening
	opened
)

// peer is the other end of a channel. The fields after near are guarded by the mutex of x.
type peer struct {
	x    *Exchange
	rank topo.Rank
	self bool // whether this is not a peer but this rank
	near bool // whether the peer shares memory with this rank

	wake    sync.Cond // wakes the writer, and flush
	state   state
	conn    transport.Conn // set when the channel is opened
	queue   []outgoing
	writing bool  // whether the writer sends frames, so that other goroutines must queue theirs
	flushed bool  // whether the bye has left this rank
	closed  bool  // whether the Exchange is closed
	stopped bool  // whether the writer has ended
	broken  error // why the channel has failed, or nil
	ended   bool  // whether the bye was queued
	wrote   bool  // whether frames other than the bye were written or queued
	left    bool  // whether the rank has announced its shutdown
	silent  bool  // whether the rank sends no more messages

	kept     int            // bytes of eager messages that the peer has not matched yet
	returned int            // bytes of matched eager messages that the peer does not know of yet
	sent     uint64         // number of messages that were sent to the peer or offered to it
	offers   map[uint64]*Op // messages that the peer has not accepted yet
	accepted map[uint64]*Op // messages that the peer has accepted, and that are not sent yet
	expected map[uint64]*Op // receives of messages that this rank has accepted
	// unexpected are the messages of the peer that no receive has matched, in the order of their arrival.
	// stored counts the bytes of those that are here.
	unexpected []message
	stored     int
}

// departed reports whether the peer receives no more messages.
func (p *peer) departed() bool { return p.left || p.silent }

// unsent reports whether Flush has to wait for the peer: the bye has not left this rank, or the peer has not
// copied all messages that it has accepted. The caller holds x.mu.
func (p *peer) unsent() bool {
	return p.state == opened && !p.left && p.broken == nil && (p.ended && !p.flushed || len(p.accepted) > 0)
}

// open begins to open the channel unless that has been done before, or nothing comes over it. The caller
// holds x.mu.
func (p *peer) open() {
	if p.state != unopened || p.self || p.silent {
		return
	}
	p.state = opening
	p.x.wg.Go(func() {
		conn, err := p.x.cfg.Mesh.Conn(p.x.ctx, p.x.cfg.Lane, p.rank)
		if err != nil {
			p.fail(err)
			return
		}
		p.x.mu.Lock()
		p.conn, p.state = conn, opened
		p.x.mu.Unlock()
		p.x.wg.Go(p.read)
		p.writeAll()
	})
}

// write sends a frame, or queues it for the writer. The caller holds x.mu.
func (p *peer) write(o outgoing) {
	p.wrote = p.wrote || !o.last
	if p.state == opened && !p.writing && len(p.queue) == 0 && o.op == nil && !o.last && p.broken == nil {
		_ = p.conn.Send(o.frame) // the reader gets the error too
		return
	}
	p.queue = append(p.queue, o)
	p.wake.Broadcast()
}

// writeAll sends the queued frames until the Exchange is closed or the channel fails.
func (p *peer) writeAll() {
	p.x.mu.Lock()
	defer p.x.mu.Unlock()
	defer func() { p.stopped = true; p.wake.Broadcast() }()
	for {
		for len(p.queue) == 0 && !p.closed && p.broken == nil {
			p.wake.Wait()
		}
		if p.closed || p.broken != nil {
			return
		}
		o := p.queue[0]
		p.queue = without(p.queue, 0)
		p.writing = true
		p.x.mu.Unlock()
		err := p.send(o)
		p.x.mu.Lock()
		p.writing = false
		if o.last {
			p.flushed = true
			p.wake.Broadcast()
		}
		if p.accepted[o.id] != nil && err == nil {
			delete(p.accepted, o.id)
			p.x.mu.Unlock()
			o.op.Done(nil)
			p.x.mu.Lock()
		}
	}
}

// send sends one frame. When it returns, the channel holds no buffer of an operation.
func (p *peer) send(o outgoing) error {
	err := p.conn.Send(o.frame)
	if err == nil && o.op != nil {
		err = p.conn.Send(o.op.Buf)
	}
	if o.op != nil || o.last {
		if flushed := p.conn.Flush(); err == nil {
			err = flushed
		}
	}
	return err
}

// offer offers the message o to the peer. The caller holds x.mu.
func (p *peer) offer(o *Op) error {
	if len(p.offers) >= maxOffers {
		return fmt.Errorf("%d messages to rank %d wait until it receives them, want at most %d", len(p.offers)+1,
			p.rank, maxOffers)
	}
	place, shared := p.share(o)
	o.shared = shared
	put(&p.offers, o.Number, o)
	h := header{kind: offer, tag: o.Tag, dt: o.DType, numBytes: uint64(len(o.Buf)), id: o.Number}
	if shared {
		h.kind = share
		p.write(outgoing{frame: appendPlace(h.append(nil), place)})
	} else {
		p.write(outgoing{frame: h.append(nil)})
	}
	return nil
}

// put adds o to a map, which it makes if there is none.
func put(m *map[uint64]*Op, id uint64, o *Op) {
	if *m == nil {
		*m = make(map[uint64]*Op)
	}
	(*m)[id] = o
}

// fail records that the channel has failed with err. If the peer has left the job, that is not an error, but
// no more messages come from the peer.
func (p *peer) fail(err error) {
	p.x.mu.Lock()
	p.broken = err
	p.wake.Broadcast()
	orderly, closed := p.departed(), p.closed
	for orderly && p.state == opened && !p.stopped {
		p.wake.Wait() // then the writer uses no buffer of an operation
	}
	p.x.mu.Unlock()
	switch {
	case closed:
	case orderly:
		p.silence()
	default:
		p.x.cfg.Failed(err)
	}
}

// silence ends the operations that only the peer could complete, because it has shut down. If the channel
// works, the data of accepted messages still moves.
func (p *peer) silence() {
	x := p.x
	x.mu.Lock()
	p.silent = true
	p.wake.Broadcast()
	var ops []*Op
	var errs []error
	x.posted = slices.DeleteFunc(x.posted, func(o *Op) bool {
		err := x.unreachable(o)
		if err != nil {
			ops, errs = append(ops, o), append(errs, err)
		}
		return err != nil
	})
	ended := []*map[uint64]*Op{&p.offers}
	if p.broken != nil {
		p.unexpected = slices.DeleteFunc(p.unexpected, func(m message) bool { return m.kind != eager })
		ended = append(ended, &p.accepted, &p.expected)
	}
	for _, some := range ended {
		for _, id := range slices.Sorted(maps.Keys(*some)) {
			if o := (*some)[id]; !o.receive || !o.shared { // otherwise fetch uses its memory and ends it
				ops, errs = append(ops, o), append(errs, &LeftError{[]topo.Rank{p.rank}})
				delete(*some, id)
			}
		}
	}
	x.mu.Unlock()
	for i, o := range ops {
		o.Done(errs[i])
	}
	x.cfg.Silent()
}

// read receives frames until the channel fails.
func (p *peer) read() {
	in := bufio.NewReaderSize(p.conn, maxEagerBytes+headerBytes)
	for {
		h, err := in.Peek(headerBytes)
		if err == nil {
			frame := decode(h)
			_, _ = in.Discard(headerBytes)
			err = p.handle(frame, in)
		}
		if err != nil {
			p.fail(err)
			return
		}
	}
}

// handle handles a frame from the peer. The rest of the frame is read from in.
func (p *peer) handle(h header, in *bufio.Reader) error {
	switch h.kind {
	case eager:
		return p.arrived(h, in)
	case offer:
		return p.offered(message{header: h})
	case share:
		return p.shared(h, in)
	case accept:
		return p.accept(h)
	case finish:
		return p.finish(h)
	case data:
		return p.received(h, in)
	case credit:
		return p.credited(h)
	case bye:
		p.silence()
		return nil
	}
	return p.malformed("unknown kind %d", h.kind)
}

func (p *peer) malformed(format string, args ...any) error {
	return &transport.PeerError{Peer: p.rank, Lane: p.x.cfg.Lane,
		Err: fmt.Errorf("%w: %s", errProtocol, fmt.Sprintf(format, args...))}
}

// arrived handles an eager message.
func (p *peer) arrived(h header, in *bufio.Reader) error {
	if h.numBytes > maxEagerBytes {
		return p.malformed("%d bytes, want at most %d", h.numBytes, maxEagerBytes)
	}
	payload, err := in.Peek(int(h.numBytes))
	if err != nil {
		return err
	}
	x := p.x
	x.mu.Lock()
	o := x.takePosted(p.rank, h.tag)
	if o == nil {
		p.stored += len(payload) + headerBytes
		if p.stored > maxKeptBytes {
			x.mu.Unlock()
			return p.malformed("%d bytes that were not matched, want at most %d", p.stored, maxKeptBytes)
		}
		x.arrivals++
		m := message{header: h, payload: slices.Clone(payload), arrival: x.arrivals}
		p.unexpected = append(p.unexpected, m)
		x.mu.Unlock()
	} else {
		done := p.take(o, message{header: h, payload: payload})
		x.mu.Unlock()
		done()
	}
	_, _ = in.Discard(len(payload))
	return nil
}

// offered handles the offer of the message m. After Quit no message is accepted, because the peer may have
// ended its operation when it received the bye.
func (p *peer) offered(m message) error {
	x := p.x
	x.mu.Lock()
	var o *Op
	if x.err == nil {
		o = x.takePosted(p.rank, m.tag)
	}
	var done func()
	switch {
	case o != nil:
		done = p.take(o, m)
	case len(p.unexpected) >= maxUnmatched:
		x.mu.Unlock()
		return p.malformed("%d messages that were not matched", maxUnmatched)
	default:
		x.arrivals++
		m.arrival = x.arrivals
		p.unexpected = append(p.unexpected, m)
	}
	x.mu.Unlock()
	if done != nil {
		done()
	}
	return nil
}

// takePosted removes and returns the oldest receive for a message from the given rank, or nil. The caller
// holds mu.
func (x *Exchange) takePosted(from topo.Rank, tag uint32) *Op {
	for i, o := range x.posted {
		if o.Tag == tag && (o.Peer == AnySource || o.Peer == from) {
			x.posted = without(x.posted, i)
			return o
		}
	}
	return nil
}

// take gives the message m to the receive o. If the message is here, or if it does not fit, take returns a
// function that completes o, to be called without x.mu. Otherwise take accepts the message. The caller holds
// x.mu.
func (p *peer) take(o *Op, m message) (done func()) {
	o.Source, o.Number, o.Matched = p.rank, m.id, time.Now()
	var err error
	if m.numBytes != uint64(len(o.Buf)) || m.dt != o.DType {
		err = &SizeError{Source: p.rank, Got: sizeOf(m.dt, m.numBytes),
			Want: sizeOf(o.DType, uint64(len(o.Buf)))}
	}
	if m.kind != eager {
		if err != nil {
			p.answer(finish, m.id)
			return func() { o.Done(err) }
		}
		p.answer(accept, m.id)
		put(&p.expected, m.id, o)
		if m.kind == share {
			o.shared = true
			p.x.wg.Go(func() { p.fetch(o, m) })
		}
		return nil
	}
	if err == nil {
		copy(o.Buf, m.payload)
	}
	p.returned += len(m.payload) + headerBytes
	if p.returned >= maxKeptBytes/2 {
		p.write(outgoing{frame: header{kind: credit, numBytes: uint64(p.returned)}.append(nil)})
		p.returned = 0
	}
	return func() { o.Done(err) }
}

// sizeOf returns a text such as "4 elements of float32".
func sizeOf(dt tensor.DType, numBytes uint64) string {
	if !dt.Valid() {
		return fmt.Sprintf("%d bytes of type %d", numBytes, uint8(dt))
	}
	return fmt.Sprintf("%d elements of %v", numBytes/uint64(dt.Size()), dt)
}

// answer answers the offer with the number id. The caller holds x.mu.
func (p *peer) answer(kind uint8, id uint64) {
	p.write(outgoing{frame: header{kind: kind, id: id}.append(nil)})
}

// accept handles the answer that the peer is ready for an offered message.
func (p *peer) accept(h header) error {
	p.x.mu.Lock()
	defer p.x.mu.Unlock()
	o := p.offers[h.id]
	if o == nil {
		return p.unknown(h)
	}
	delete(p.offers, h.id)
	put(&p.accepted, h.id, o)
	o.Matched = time.Now()
	if !o.shared {
		d := header{kind: data, id: h.id, numBytes: uint64(len(o.Buf))}
		p.write(outgoing{frame: d.append(nil), id: h.id, op: o})
	}
	return nil
}

// finish handles the answer that the peer does not need an offered message any more: it has copied a shared
// message, or the message does not fit its receive.
func (p *peer) finish(h header) error {
	p.x.mu.Lock()
	o := p.offers[h.id]
	if o == nil {
		if o = p.accepted[h.id]; o == nil || !o.shared {
			defer p.x.mu.Unlock()
			return p.unknown(h)
		}
	}
	delete(p.offers, h.id)
	delete(p.accepted, h.id)
	p.wake.Broadcast() // flush waits for accepted messages
	p.x.mu.Unlock()
	o.Done(nil)
	return nil
}

// unknown returns the error for an answer to a message that this rank has not offered. If the Exchange is
// closed, it returns nil. The caller holds x.mu.
func (p *peer) unknown(h header) error {
	if p.closed {
		return nil
	}
	return p.malformed("an answer to message %d, which was not offered", h.id)
}

// received receives the data of a message that this rank has accepted.
func (p *peer) received(h header, in *bufio.Reader) error {
	p.x.mu.Lock()
	o := p.expected[h.id]
	p.x.mu.Unlock()
	if o == nil || uint64(len(o.Buf)) != h.numBytes {
		return p.malformed("%d bytes for message %d, which was not accepted", h.numBytes, h.id)
	}
	if _, err := io.ReadFull(in, o.Buf); err != nil {
		return err
	}
	p.x.mu.Lock()
	_, mine := p.expected[h.id]
	delete(p.expected, h.id)
	p.x.mu.Unlock()
	if mine { // otherwise Close ends it
		o.Done(nil)
	}
	return nil
}

// credited records that the peer has matched eager messages.
func (p *peer) credited(h header) error {
	p.x.mu.Lock()
	defer p.x.mu.Unlock()
	if h.numBytes > uint64(p.kept) {
		return p.malformed("%d matched bytes, want at most %d", h.numBytes, p.kept)
	}
	p.kept -= int(h.numBytes)
	return nil
}
