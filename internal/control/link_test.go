package control

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// pipe is a connection that counts the bytes that are passed to Send. The test sets the number of bytes that
// the method Sent returns.
type pipe struct {
	transport.Conn
	taken, sent uint64
}

func (p *pipe) Send(b []byte) error {
	p.taken += uint64(len(b))
	return nil
}

func (p *pipe) Sent() uint64 { return p.sent }

// A link reuses the buffers of frames, but it keeps no buffer larger than maxKeptBytes and at most
// maxKeptBuffers buffers.
func TestLinkKeepsLittle(t *testing.T) {
	p := new(pipe)
	l := &link{conn: p}
	send := func(numBytes int) {
		if err := l.send(make([]byte, numBytes)); err != nil {
			t.Fatal(err)
		}
	}
	send(2 * maxKeptBytes)
	for range 2 * maxKeptBuffers {
		send(100)
	}
	p.sent = p.taken
	send(100)
	if n := len(l.free); n != maxKeptBuffers-1 { // one of them is in use again
		t.Errorf("keeps %d buffers, want %d", n, maxKeptBuffers-1)
	}
	for _, b := range l.free {
		if cap(b) > maxKeptBytes {
			t.Errorf("keeps a buffer of %d bytes", cap(b))
		}
	}
}

// A link accepts no frame while more than maxBacklogBytes bytes wait, however many it has sent before.
func TestLinkBacklog(t *testing.T) {
	p := &pipe{sent: 1 << 40}
	l := &link{conn: p, total: p.sent + maxBacklogBytes}
	if err := l.send(nil); err != nil {
		t.Errorf("with %d bytes waiting: %v", maxBacklogBytes, err)
	}
	if err := l.send(nil); !errors.Is(err, ErrBacklog) {
		t.Errorf("with more: got error %v, want %v", err, ErrBacklog)
	}
}

// A frame that is too large is the fault of this rank, and a full queue that of the peer.
func TestFaultOfSend(t *testing.T) {
	l := &Links{cfg: Config{Rank: 2, Sent: func() {}}}
	for _, c := range []struct {
		waiting, numBytes int
		want              topo.Rank
		err               error
	}{{0, message.MaxFrameBytes + 1, 2, ErrTooLarge}, {maxBacklogBytes + 1, 1, 3, ErrBacklog}} {
		k := &link{peer: 3, conn: new(pipe), total: uint64(c.waiting)}
		if r, err := l.sendOver(k, make([]byte, c.numBytes)); r != c.want || !errors.Is(err, c.err) {
			t.Errorf("got a fault of rank %d, %v, want one of rank %d, %v", r, err, c.want, c.err)
		}
	}
}

// A rank leads only those whose frames it passes on, and no rank that the job does not have.
func TestLeads(t *testing.T) {
	l := &Links{cfg: Config{Size: 6, Leaders: topo.Leaders{0, 1, 2, 2, 4, 4}}}
	for _, c := range []struct {
		leader topo.Rank
		ranks  []topo.Rank
		want   bool
	}{
		{2, []topo.Rank{2, 3}, true}, {2, nil, true}, {2, []topo.Rank{3, 4}, false},
		{3, []topo.Rank{2}, false}, {2, []topo.Rank{3, 6}, false}, {4, []topo.Rank{1 << 30}, false},
	} {
		if got := l.Leads(c.leader, c.ranks); got != c.want {
			t.Errorf("rank %d leads ranks %v: %t, want %t", c.leader, c.ranks, got, c.want)
		}
	}
}

// FuzzReceive checks two properties for any received bytes: every returned frame has exactly the bytes that
// were received, and the buffer is at most about twice as large as the received bytes.
func FuzzReceive(f *testing.F) {
	header := func(n, seq uint32) []byte {
		return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, n), seq)
	}
	f.Add(append(append(header(2, 0), "ab"...), header(0, 1)...))
	f.Add(header(1<<32-1, 0))
	f.Add(header(2, 1))
	f.Fuzz(func(t *testing.T, in []byte) {
		from := &frames{conn: &arrivals{pieces: [][]byte{in}, end: io.EOF}}
		rest := in
		for seq := uint32(0); ; seq++ {
			ev, ok := from.next()
			if cap(from.buf) > 2*len(in)+2*readStep {
				t.Fatalf("%d bytes were allocated for %d", cap(from.buf), len(in))
			}
			if !ok || ev.Err != nil {
				return
			}
			if !bytes.HasPrefix(rest, append(header(uint32(len(ev.Frame)), seq), ev.Frame...)) {
				t.Fatalf("got frame %d %x of %x", seq, ev.Frame, rest)
			}
			rest = rest[headerBytes+len(ev.Frame):]
		}
	})
}
