package bootstrap

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/gohvd/gohvd/internal/frame"
	"github.com/gohvd/gohvd/topo"
)

const (
	rootMagic = "GHVU"
	ringMagic = "GHVC"
	// protocolVersion is that of both.
	protocolVersion = 1
)

// kind is the first byte of a frame.
type kind byte

const (
	kindReport kind = iota + 1
	kindNext
	kindHello
	kindWelcome
	kindPiece
	kindDone
	kindComplete
	kindFailure
)

const (
	maxTextBytes = 1 << 10 // of a failure
	// maxControlBytes bounds every frame but pieces.
	maxControlBytes = 2 << 10
	// maxPieceBytes is kind, rank, and a record: flags, pid, four names and info, with their lengths.
	maxPieceBytes = 1 + 4 + 1 + 8 + 4*(2+MaxNameBytes) + 2 + MaxInfoBytes
)

// peer is a rank as others know it before they have its record.
type peer struct {
	rank topo.Rank
	pid  int
	host string
	addr string // of its ring listener
}

func (p peer) String() string {
	return fmt.Sprintf("rank %d (pid %d on host %q)", p.rank, p.pid, p.host)
}

// report is what a rank tells a root.
type report struct {
	peer
	size  int
	root  int               // which of the ids is this root's
	roots int               // how many ids there are
	ids   [sha256.Size]byte // names all of them
}

// hello is how a rank begins towards the next one.
type hello struct {
	from, to topo.Rank
	size     int
}

// message begins a frame of kind k.
func message(k kind) []byte { return append(frame.New(256), byte(k)) }

func appendName(b []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint16(b, uint16(len(s))), s...)
}

func appendPeer(b []byte, p peer) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(p.rank))
	b = binary.BigEndian.AppendUint64(b, uint64(p.pid))
	return appendName(appendName(b, p.host), p.addr)
}

func encodeReport(q report) []byte {
	b := appendPeer(message(kindReport), q.peer)
	for _, n := range []int{q.size, q.root, q.roots} {
		b = binary.BigEndian.AppendUint32(b, uint32(n))
	}
	return frame.Seal(append(b, q.ids[:]...))
}

func encodeNext(p peer) []byte { return frame.Seal(appendPeer(message(kindNext), p)) }

func encodeHello(h hello) []byte {
	b := message(kindHello)
	for _, n := range []int{int(h.from), int(h.to), h.size} {
		b = binary.BigEndian.AppendUint32(b, uint32(n))
	}
	return frame.Seal(b)
}

// encodeFailure cuts a text that is too long, at the end: the reason and the ranks come first.
func encodeFailure(e *RefusedError) []byte {
	text := strings.ToValidUTF8(e.Text, "?")
	if len(text) > maxTextBytes {
		text = strings.ToValidUTF8(text[:maxTextBytes], "") // the cut may go through a character
	}
	return frame.Seal(appendName(append(message(kindFailure), byte(e.Reason)), text))
}

// encodePlain is a frame without a body.
func encodePlain(k kind) []byte { return frame.Seal(message(k)) }

// appendPiece appends the frame with what rank gives to a gathering.
func appendPiece(b []byte, rank int, data []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(1+4+len(data)))
	b = append(b, byte(kindPiece))
	return append(binary.BigEndian.AppendUint32(b, uint32(rank)), data...)
}

// readPiece reads one; rank is not checked.
func readPiece(r io.Reader) (rank int, data []byte, err error) {
	body, err := frame.Read(r, maxPieceBytes)
	if err != nil {
		return 0, nil, err
	}
	if len(body) < 5 || kind(body[0]) != kindPiece {
		return 0, nil, fmt.Errorf("frame of %d bytes is no piece", len(body))
	}
	return int(binary.BigEndian.Uint32(body[1:])), body[5:], nil
}

// encodeRecord is what travels round the ring about a rank.
func encodeRecord(r *Record, share bool) []byte {
	b := make([]byte, 1, maxPieceBytes)
	if share {
		b[0] = 1
	}
	b = binary.BigEndian.AppendUint64(b, uint64(r.PID))
	for _, s := range []string{r.Addr, r.HostHash, r.Device, r.Host} {
		b = appendName(b, s)
	}
	return append(binary.BigEndian.AppendUint16(b, uint16(len(r.Info))), r.Info...)
}

// decodeRecord keeps b: Info is a part of it.
func decodeRecord(b []byte) (r Record, share bool, err error) {
	d := decoder{b: b}
	switch flags := d.bytes(1); {
	case d.err == nil && flags[0] == 1:
		share = true
	case d.err == nil && flags[0] != 0:
		d.err = fmt.Errorf("flags are %#x", flags[0])
	}
	r.PID = d.pid()
	for _, s := range []*string{&r.Addr, &r.HostHash, &r.Device, &r.Host} {
		*s = d.name(MaxNameBytes)
	}
	if r.Info = d.bytes(d.length(MaxInfoBytes)); len(r.Info) == 0 {
		r.Info = nil
	}
	return r, share, d.end()
}

// decode is the body of a frame of the kinds that want, whose first byte is its kind.
func decode(body []byte, want ...kind) (kind, *decoder, error) {
	if len(body) == 0 {
		return 0, nil, errors.New("empty frame")
	}
	for _, k := range want {
		if kind(body[0]) == k {
			return k, &decoder{b: body[1:]}, nil
		}
	}
	return 0, nil, fmt.Errorf("frame is of kind %d, want one of %d", body[0], want)
}

// decoder reads a body from front to back. After its first error everything is zero.
type decoder struct {
	b   []byte
	err error
}

func (d *decoder) bytes(n int) []byte {
	if d.err == nil && len(d.b) < n {
		d.err = fmt.Errorf("frame ends %d bytes early", n-len(d.b))
	}
	if d.err != nil {
		return nil
	}
	b := d.b[:n:n]
	d.b = d.b[n:]
	return b
}

func (d *decoder) uint32() uint32 {
	if b := d.bytes(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

// number is one from least to most.
func (d *decoder) number(what string, least, most int) int {
	n := d.uint32()
	if d.err == nil && (uint64(n) < uint64(least) || uint64(n) > uint64(most)) {
		d.err = fmt.Errorf("%s is %d, want %d to %d", what, n, least, most)
	}
	return int(n)
}

func (d *decoder) pid() int {
	b := d.bytes(8)
	if b == nil {
		return 0
	}
	pid := binary.BigEndian.Uint64(b)
	if pid > maxPID {
		d.err = fmt.Errorf("pid is %d, want at most %d", pid, maxPID)
		return 0
	}
	return int(pid)
}

func (d *decoder) length(most int) int {
	b := d.bytes(2)
	if b == nil {
		return 0
	}
	n := int(binary.BigEndian.Uint16(b))
	if n > most {
		d.err = fmt.Errorf("field of %d bytes, want at most %d", n, most)
		return 0
	}
	return n
}

func (d *decoder) name(most int) string {
	s := string(d.bytes(d.length(most)))
	if d.err == nil && !utf8.ValidString(s) {
		d.err = fmt.Errorf("field is %q, want UTF-8", s)
	}
	return s
}

func (d *decoder) peer() peer {
	return peer{topo.Rank(d.uint32()), d.pid(), d.name(MaxNameBytes), d.name(MaxNameBytes)}
}

// end is the first error, or that there are bytes left.
func (d *decoder) end() error {
	if d.err == nil && len(d.b) > 0 {
		d.err = fmt.Errorf("frame has %d bytes too many", len(d.b))
	}
	return d.err
}

// decodeReport leaves the rank as it is: one that is out of range is answered, not dropped.
func decodeReport(body []byte) (q report, err error) {
	_, d, err := decode(body, kindReport)
	if err != nil {
		return q, err
	}
	q.peer = d.peer()
	q.size = d.number("size", 1, MaxSize)
	q.root = d.number("root", 0, MaxSize-1)
	q.roots = d.number("number of roots", q.root+1, max(q.size, q.root+1))
	copy(q.ids[:], d.bytes(len(q.ids)))
	return q, d.end()
}

func decodeHello(body []byte) (h hello, err error) {
	_, d, err := decode(body, kindHello)
	if err != nil {
		return h, err
	}
	h.from, h.to = topo.Rank(d.uint32()), topo.Rank(d.uint32())
	h.size = d.number("size", 1, MaxSize)
	return h, d.end()
}

// failure is the rest of a frame of that kind.
func (d *decoder) failure() (*RefusedError, error) {
	e := &RefusedError{}
	if b := d.bytes(1); b != nil {
		e.Reason = Reason(b[0])
		if e.Reason == NoReason || e.Reason >= numReasons {
			d.err = fmt.Errorf("reason is %d", e.Reason)
		}
	}
	e.Text = d.name(maxTextBytes)
	return e, d.end()
}
