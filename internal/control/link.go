package control

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

const (
	// maxBacklogBytes is the maximum number of bytes that may wait to be sent to a peer that does not read.
	// If the backlog of a peer grows larger, the peer is considered failed.
	maxBacklogBytes = 64 << 20
	// headerBytes is the size of a frame's header: the length of the frame (u32), then the number of the
	// frame on its connection (u32).
	headerBytes = 8
	// firstStep is the size of a receive buffer at first, which has room for the frames of a cached cycle.
	// The buffer doubles, but grows by at most readStep before more bytes arrive.
	firstStep = 1 << 10
	readStep  = 64 << 10
	// maxKeptBytes is the maximum size of a buffer that is kept for later frames, and maxKeptBuffers is the
	// maximum number of such buffers.
	maxKeptBytes   = 1 << 20
	maxKeptBuffers = 64
)

// link sends negotiation frames over a control connection.
type link struct {
	peer topo.Rank
	conn transport.Conn
	// The fields below are used at rank 0 and at leaders. behind is the number of ranks behind the peer. to
	// has the ranks for which the next frame is. If every is set, it is for the peer and all ranks behind it.
	behind int
	to     []topo.Rank
	every  bool

	seq    uint32
	total  uint64     // number of bytes passed to the connection so far
	queued []outgoing // buffers that the connection may still hold, oldest first
	free   [][]byte   // unused buffers, for later frames
}

type outgoing struct {
	buf []byte
	end uint64 // the value of total after the buffer was sent
}

var (
	// ErrBacklog is returned by send if the peer is not reading its frames.
	ErrBacklog = errors.New("the peer does not read its messages: the send queue is full")
	// ErrTooLarge is returned by send if the frame exceeds the size limit, which is the same for all peers.
	ErrTooLarge = errors.New("the negotiation frame is too large")
)

// send queues a frame for sending. It copies the frame, does not block, and allocates nothing in steady
// state. If send returns an error other than ErrBacklog and ErrTooLarge, reading from the connection returns
// the same error, after the frames that arrived before it.
func (l *link) send(frame []byte) error {
	sent := l.conn.Sent()
	n := 0
	for n < len(l.queued) && l.queued[n].end <= sent {
		if b := l.queued[n].buf; cap(b) <= maxKeptBytes && len(l.free) < maxKeptBuffers {
			l.free = append(l.free, b[:0])
		}
		n++
	}
	kept := copy(l.queued, l.queued[n:])
	clear(l.queued[kept:])
	l.queued = l.queued[:kept]
	if len(frame) > message.MaxFrameBytes {
		return fmt.Errorf("%w: it has %d bytes, want at most %d: submit fewer tensors at once", ErrTooLarge,
			len(frame), message.MaxFrameBytes)
	}
	if l.total-sent > maxBacklogBytes {
		return fmt.Errorf("%w: it holds %d bytes, want at most %d", ErrBacklog,
			l.total-sent, maxBacklogBytes)
	}
	var buf []byte
	if k := len(l.free); k > 0 {
		buf, l.free = l.free[k-1], l.free[:k-1]
	}
	buf = binary.LittleEndian.AppendUint32(buf, uint32(len(frame)))
	buf = binary.LittleEndian.AppendUint32(buf, l.seq)
	buf = append(buf, frame...)
	l.seq++
	l.total += uint64(len(buf))
	l.queued = append(l.queued, outgoing{buf, l.total})
	return l.conn.Send(buf)
}

// flush blocks until all queued frames have left this process.
func (l *link) flush() error { return l.conn.Flush() }

// frameBytes returns the length of the frame that follows header. It returns an error if the frame is too
// large, or if its number on the connection is not seq.
func frameBytes(header []byte, seq uint32) (int, error) {
	n, got := binary.LittleEndian.Uint32(header), binary.LittleEndian.Uint32(header[4:])
	if n > message.MaxFrameBytes || got != seq {
		return 0, fmt.Errorf(
			"%w: got frame number %d with %d bytes, want frame number %d with at most %d bytes", ErrFrame,
			got, n, seq, message.MaxFrameBytes)
	}
	return int(n), nil
}

// Cause returns err without the parts that a verdict states anyway: the peer, the lane and the addresses. If
// err means the end of the stream, Cause returns errPeerClosed.
func Cause(err error) error {
	var p *transport.PeerError
	if errors.As(err, &p) {
		err = p.Err
	}
	var op *net.OpError
	if errors.As(err, &op) {
		err = op.Err
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errPeerClosed
	}
	return err
}

// ErrFrame reports that a received frame breaks the protocol. This rank may still send a verdict over the
// connection.
var ErrFrame = errors.New("malformed frame")

// errPeerClosed reports the end of a stream. The peer's process has ended, or it has closed its connections
// without a shutdown.
var errPeerClosed = errors.New("the process exited or closed the connection")

// Event is a frame from a peer, or the error with which a connection ended.
type Event struct {
	From  topo.Rank
	Frame []byte
	Err   error
}
