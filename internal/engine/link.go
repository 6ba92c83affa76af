package engine

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
	// maxBacklogBytes caps the send backlog for a peer that does not read. If the backlog exceeds it, the
	// peer has failed.
	maxBacklogBytes = 64 << 20
	// headerBytes is the size of a frame's header: u32 length of the frame | u32 its number on this
	// connection.
	headerBytes = 8
	// readStep caps what is allocated for a frame before its bytes have arrived.
	readStep = 64 << 10
	// maxKeptBytes caps the size of a buffer that is kept for later frames, and maxKeptBuffers the number of
	// such buffers.
	maxKeptBytes   = 1 << 20
	maxKeptBuffers = 64
)

// link sends negotiation frames over a control connection.
type link struct {
	peer topo.Rank
	conn transport.Conn

	seq    uint32
	total  uint64     // number of bytes that were passed to the connection
	queued []outgoing // buffers that the connection may still hold, oldest first
	free   [][]byte
}

type outgoing struct {
	buf []byte
	end uint64 // the value of total after this buffer
}

// errBacklog is the error of send if the peer does not read its frames, and errTooLarge if the frame exceeds
// the limit, which is the same for all peers.
var (
	errBacklog  = errors.New("send backlog is full")
	errTooLarge = errors.New("negotiation frame is too large")
)

// send queues a frame. It does not block, does not keep frame, and allocates nothing in steady state. An
// error other than errBacklog and errTooLarge also ends the receiving half of the connection, which reports
// it after the frames that arrived before.
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
		return fmt.Errorf("%w: got %d bytes, want at most %d: submit fewer tensors at once", errTooLarge,
			len(frame), message.MaxFrameBytes)
	}
	if l.total-sent > maxBacklogBytes {
		return fmt.Errorf("%w: got %d bytes, want at most %d: the peer is not reading", errBacklog,
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

// flush blocks until all frames have left this process.
func (l *link) flush() error { return l.conn.Flush() }

// frameBytes returns the length of the frame that header announces. It returns an error if the frame is too
// large or is not number seq of its connection.
func frameBytes(header []byte, seq uint32) (int, error) {
	n, got := binary.LittleEndian.Uint32(header), binary.LittleEndian.Uint32(header[4:])
	if n > message.MaxFrameBytes || got != seq {
		return 0, fmt.Errorf(
			"%w: got frame number %d with %d bytes, want frame number %d with at most %d bytes", errFrame,
			got, n, seq, message.MaxFrameBytes)
	}
	return int(n), nil
}

// cause returns err without the parts that a verdict states already: the peer, the lane and the addresses.
// At the end of a stream it returns errPeerClosed.
func cause(err error) error {
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

// errFrame is the error of a frame that breaks the protocol. The connection may still carry a verdict in the
// other direction.
var errFrame = errors.New("malformed frame")

// errPeerClosed is the error of the end of a stream: the process has ended, or has closed its connections
// without a shutdown.
var errPeerClosed = errors.New("the process exited or closed it")

// event is a frame from a peer, or the error that ended the connection.
type event struct {
	from  topo.Rank
	frame []byte
	err   error
}
