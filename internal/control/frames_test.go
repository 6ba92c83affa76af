package control

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/transport"
)

// arrivals is a connection on which the bytes of the given pieces arrive. Each call of TryRead returns bytes
// of one piece, or no bytes if the piece is empty. After the last piece it returns the error in the field
// end.
type arrivals struct {
	transport.Conn
	pieces [][]byte
	end    error
	tries  int
}

func (a *arrivals) TryRead(p []byte) (int, error) {
	a.tries++
	if len(a.pieces) == 0 {
		return 0, a.end
	}
	n := copy(p, a.pieces[0])
	a.pieces[0] = a.pieces[0][n:]
	if len(a.pieces[0]) == 0 {
		a.pieces = a.pieces[1:]
	}
	return n, nil
}

func appendFrame(b []byte, seq uint32, body []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(body)))
	b = binary.LittleEndian.AppendUint32(b, seq)
	return append(b, body...)
}

// take returns copies of all frames from f. It stops at the first error. It also stops when all pieces have
// arrived and f has no more frames.
func take(f *frames, a *arrivals) (got []string, err error) {
	for {
		for {
			ev, ok := f.next()
			if !ok {
				break
			}
			if ev.From != f.peer {
				return got, fmt.Errorf("from rank %d, want %d", ev.From, f.peer)
			}
			if ev.Err != nil {
				return got, ev.Err
			}
			got = append(got, string(ev.Frame))
		}
		if len(a.pieces) == 0 {
			return got, nil
		}
	}
}

// The method next returns the same frames no matter where the stream is cut into pieces. After the last frame
// it reports the end of the connection, once. Afterwards f does not read from the connection.
func TestFramesHoweverTheyAreCut(t *testing.T) {
	want := []string{"first", "", "third frame"}
	var stream []byte
	for i, body := range want {
		stream = appendFrame(stream, uint32(i), []byte(body))
	}
	for at := range len(stream) + 1 {
		for _, gap := range []bool{false, true} {
			pieces := [][]byte{stream[:at], {}, stream[at:]}
			if !gap {
				pieces = [][]byte{stream[:at], stream[at:]}
			}
			a := &arrivals{pieces: pieces}
			f := &frames{peer: 3, conn: a}
			got, err := take(f, a)
			if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
				t.Fatalf("cut at %d: got %q, %v, want %q", at, got, err, want)
			}
			if cap(f.buf) > firstStep {
				t.Errorf("cut at %d: the buffer has %d bytes, want %d", at, cap(f.buf), firstStep)
			}
			a.end = &transport.PeerError{Peer: 3, Err: io.ErrUnexpectedEOF}
			if _, err := take(f, a); !errors.Is(err, errPeerClosed) {
				t.Errorf("cut at %d: the connection ended with %v, want %v", at, err, errPeerClosed)
			}
			a.tries = 0
			if ev, ok := f.next(); ok || f.fill() || a.tries > 0 {
				t.Errorf("cut at %d: after the end: got %+v and %d reads, want neither", at, ev, a.tries)
			}
		}
	}
}

// If a connection ends in the middle of a frame, the method next returns the complete frames and then
// errPeerClosed.
func TestFramesCutShort(t *testing.T) {
	stream := appendFrame(appendFrame(nil, 0, []byte("whole")), 1, []byte("cut short"))
	for _, short := range []int{1, 9, 10, 16} {
		a := &arrivals{pieces: [][]byte{stream[:len(stream)-short]},
			end: &transport.PeerError{Err: io.ErrUnexpectedEOF}}
		got, err := take(&frames{conn: a}, a)
		if len(got) != 1 || got[0] != "whole" || !errors.Is(err, errPeerClosed) {
			t.Errorf("%d bytes short: got %q and %v, want the complete frame and %v", short, got, err,
				errPeerClosed)
		}
	}
}

func TestFramesThatBreakTheProtocol(t *testing.T) {
	long := binary.LittleEndian.AppendUint32(nil, message.MaxFrameBytes+1)
	for name, bad := range map[string][]byte{
		"too long":     binary.LittleEndian.AppendUint32(long, 1),
		"wrong number": appendFrame(nil, 2, []byte("x")),
	} {
		a := &arrivals{pieces: [][]byte{append(appendFrame(nil, 0, []byte("good")), bad...),
			appendFrame(nil, 1, []byte("late"))}}
		f := &frames{conn: a}
		got, err := take(f, a)
		if len(got) != 1 || !errors.Is(err, ErrFrame) {
			t.Errorf("%s: got %q and %v, want one frame and %v", name, got, err, ErrFrame)
		}
		if ev, ok := f.next(); ok {
			t.Errorf("%s: then came %+v", name, ev)
		}
		if cap(f.buf) > 2*readStep {
			t.Errorf("%s: %d bytes are held", name, cap(f.buf))
		}
	}
}

// While a large frame arrives, the buffer is at most about twice as large as the received bytes. When the
// frame has been returned, the buffer is released.
func TestFramesGrowWithWhatArrives(t *testing.T) {
	body := bytes.Repeat([]byte("0123456789"), 1<<18)
	stream := appendFrame(appendFrame(nil, 0, body), 1, []byte("next"))
	a := &arrivals{}
	f := &frames{conn: a}
	for sent := 0; sent < len(body); {
		n := min(50_000, len(body)-sent)
		a.pieces = [][]byte{stream[sent : sent+n]}
		sent += n
		if ev, ok := f.next(); ok {
			t.Fatalf("after %d bytes came %d bytes, %v", sent, len(ev.Frame), ev.Err)
		}
		if most := 2*sent + 2*readStep; cap(f.buf) > most {
			t.Fatalf("after %d bytes %d are held, want at most %d", sent, cap(f.buf), most)
		}
	}
	a.pieces = [][]byte{stream[len(body):]}
	ev, ok := f.next()
	if !ok || !bytes.Equal(ev.Frame, body) {
		t.Fatalf("got %d bytes, %v, want the %d", len(ev.Frame), ev.Err, len(body))
	}
	if ev, ok := f.next(); !ok || string(ev.Frame) != "next" {
		t.Errorf("then came %q, %v", ev.Frame, ev.Err)
	}
	if _, ok := f.next(); ok || cap(f.buf) > maxKeptBytes {
		t.Errorf("%d bytes are kept, want at most %d", cap(f.buf), maxKeptBytes)
	}
}

// A steady stream of frames allocates nothing, even if frames are split over several reads.
func TestFramesAllocateNothing(t *testing.T) {
	var stream []byte
	var pieces [2][]byte
	a := &arrivals{}
	f := &frames{conn: a}
	body := make([]byte, 1000)
	seq := uint32(0)
	turn := func() {
		stream = appendFrame(stream[:0], seq, body)
		pieces = [2][]byte{stream[:300], stream[300:]}
		a.pieces = pieces[:]
		seq++
		if ev, ok := f.next(); !ok || len(ev.Frame) != len(body) {
			t.Errorf("frame %d: got %d bytes, %v", seq, len(ev.Frame), ev.Err)
		}
	}
	turn()
	if n := testing.AllocsPerRun(200, turn); n != 0 {
		t.Errorf("%v allocations a frame", n)
	}
}

// The buffer does not grow even if every read leaves a part of a frame in it.
func TestFramesThatNeverPause(t *testing.T) {
	var stream []byte
	for seq := range uint32(2000) {
		stream = appendFrame(stream, seq, make([]byte, 990))
	}
	a := &arrivals{}
	f := &frames{conn: a}
	most := 0
	for ; len(stream) > 0; stream = stream[min(len(stream), 10_007):] {
		a.pieces = [][]byte{stream[:min(len(stream), 10_007)]}
		if _, err := take(f, a); err != nil {
			t.Fatal(err)
		}
		most = max(most, cap(f.buf))
	}
	if f.seq != 2000 || most > 2*readStep {
		t.Errorf("%d frames came, %d bytes were held, want 2000 and at most %d", f.seq, most, 2*readStep)
	}
}
