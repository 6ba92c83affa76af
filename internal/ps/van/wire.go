package van

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"unsafe"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/ps/pspb"
)

const (
	// magic and version are the content of a greeting.
	magic   = "GHVP"
	version = 3
	// maxHeaderBytes is the maximum length of a header. The table of a job of 10,000 nodes fits.
	maxHeaderBytes = 4 << 20
	// maxHelloBytes is the maximum length of the header of the first message on a connection.
	maxHelloBytes = 64 << 10
	// maxFrames is the maximum number of frames of a message.
	maxFrames = 4
	// MaxDataBytes is the maximum length of all frames of a message together. So the number of values of a
	// key is an int32.
	MaxDataBytes = math.MaxInt32
	// firstBytes is the maximum number of bytes that are allocated for frames before their first byte
	// arrives.
	firstBytes = 1 << 20
	// smallBytes is the size up to which the frames of a message are next to its header in memory.
	smallBytes = 128
	// readerBytes is the size of the buffer of a reader.
	readerBytes = 64 << 10
)

// Message is a message between two nodes: a header and frames. The frames are not part of the protobuf
// encoding. Their bytes have the byte order of the machine, so all nodes must have the same one.
//
// A Message that was received belongs to the receiver, which must call Release. A Message that was passed to
// Send belongs to the van.
type Message struct {
	Header *pspb.Header
	// Data has the frames. Their types are in the header.
	Data [][]byte
	// Free is called when neither the van nor the receiver reads Data of a message that was passed to Send.
	// Until then the frames must not change. If Free is nil, they must not change until the message was
	// answered.
	Free func()
	// Batch says that a reply need not leave before this process has handled the messages of the peer that
	// have arrived, as long as that takes little time. So several replies are written together.
	Batch bool
	// Prompt says that a request does not wait for others while none is in flight, because the program will
	// probably not call Flush.
	Prompt bool
	// lazy says that the message may wait until another one is sent, or for the van's tick.
	lazy bool

	buf  *buffer // memory of Data, or nil
	size int     // length of the header and of all frames together, once it is known
	// storage is the memory in which the message is, or nil. reused says that it is used again when the
	// message was sent, and received that it is when the message is released.
	storage          *storage
	reused, received bool
	flight           flight // its place in the queue of a link

	link   *link    // the link to which the following fields belong
	fds    []int    // descriptors that are sent with the message, once the header was encoded
	own    []*block // blocks of the frames of a message that is sent, nil for other frames
	theirs []uint32 // blocks of the frames of a message that was received
	// regions has the region of each such block that is in one.
	regions []uint32
}

// storage has a message and what belongs to it, so that they need no memory of their own.
type storage struct {
	message Message
	header  pspb.Header
	data    [maxFrames][]byte
	buf     buffer
	small   [smallBytes / 8]uint64
	frames  [maxFrames]pspb.Frame
	types   [maxFrames]*pspb.Frame
}

// stored has storage for messages.
var stored = sync.Pool{New: func() any { return new(storage) }}

// Make returns a message for Request or Reply with an empty header. When it was sent, its memory is used for
// another message.
func Make() *Message {
	m := stored.Get().(*storage).empty()
	m.reused = true
	return m
}

// empty returns the message in s, with an empty header.
func (s *storage) empty() *Message {
	s.header.Reset()
	s.message = Message{Header: &s.header, storage: s}
	return &s.message
}

// NewMessage returns a message with a frame of each given size, whose content is undefined. The memory of the
// frames belongs to the message.
func NewMessage(h *pspb.Header, sizes ...int) *Message {
	m := &Message{Header: h}
	m.allocate(sizes)
	return m
}

// allocate gives m frames of the given sizes, whose content is undefined.
func (m *Message) allocate(sizes []int) {
	m.buf = m.newBuffer(room(sizes))
	m.split(sizes)
}

// split sets Data to consecutive parts of the buffer.
func (m *Message) split(sizes []int) {
	if m.storage != nil {
		m.Data = m.storage.data[:0]
	}
	m.Data = m.buf.split(m.Data, sizes)
}

// newBuffer returns a buffer of at least n bytes. Their content is undefined.
func (m *Message) newBuffer(n int) *buffer {
	if s := m.storage; s != nil && n <= smallBytes {
		s.buf.mem = unsafe.Slice((*byte)(unsafe.Pointer(&s.small)), smallBytes)
		return &s.buf
	}
	return newBuffer(n)
}

// SetData sets the frames of a message that was made with Make. Their memory belongs to the caller.
func (m *Message) SetData(frames ...[]byte) { m.Data = append(m.storage.data[:0], frames...) }

// Release frees the memory of the message. The caller must not use the frames any more, and nothing of a
// message that was received.
func (m *Message) Release() {
	if m.buf != nil {
		m.buf.free()
		m.buf = nil
	}
	if m.theirs != nil {
		m.link.release(m.theirs, m.regions)
		m.theirs, m.regions = nil, nil
	}
	m.Data = nil
	if m.received {
		m.received = false
		stored.Put(m.storage)
	}
}

// Clone returns a copy of a message that was received.
func (m *Message) Clone() *Message {
	sizes := make([]int, len(m.Data))
	for i, d := range m.Data {
		sizes[i] = len(d)
	}
	c := NewMessage(m.Header, sizes...)
	c.Batch, c.Prompt = m.Batch, m.Prompt
	for i, d := range m.Data {
		copy(c.Data[i], d)
	}
	return c
}

// controlMessage returns a message for the van of another node.
func controlMessage(c *pspb.Control) *Message { return &Message{Header: &pspb.Header{Control: c}} }

// written frees the memory of a message that was sent, except that its blocks belong to the receiver.
func (m *Message) written() {
	for _, b := range m.own {
		if b != nil {
			m.link.own.written(b)
		}
	}
	m.own = nil
	if m.Drop(); m.reused {
		stored.Put(m.storage)
	}
}

// Drop frees the memory of a message that is not sent.
func (m *Message) Drop() {
	for _, b := range m.own {
		if b != nil {
			m.link.own.give(b)
		}
	}
	m.own = nil
	m.Release()
	if m.Free != nil {
		m.Free()
		m.Free = nil
	}
}

// Bytes returns the length of all frames together.
func (m *Message) Bytes() (n int) {
	for _, d := range m.Data {
		n += len(d)
	}
	return n
}

// Size returns the length of the header and of all frames together, when it was first called or the message
// was received.
func (m *Message) Size() int {
	if m.size == 0 {
		m.size = headerBytes(m.Header) + m.Bytes()
	}
	return m.size
}

// checkLimits returns a *LimitError if a peer would not accept the message.
func (m *Message) checkLimits() error {
	if len(m.Data) > maxFrames {
		return limitError("a message has %d frames, want at most %d", len(m.Data), maxFrames)
	}
	data := m.Bytes()
	if data > MaxDataBytes {
		return limitError("a message has %d bytes, want at most %d", data, MaxDataBytes)
	}
	if n := m.Size() - data; n > maxHeaderBytes-maxFrames*64 {
		return limitError("the header of a message has %d bytes, want at most %d", n,
			maxHeaderBytes-maxFrames*64)
	}
	return nil
}

// limitError returns a *LimitError.
func limitError(format string, got, want int) error {
	return &LimitError{fmt.Sprintf(format, got, want)}
}

// SetTypes sets the types of the frames of a message.
func (m *Message) SetTypes(types ...pspb.DataType) {
	h := m.Header
	if !m.reused {
		h.Frames = make([]*pspb.Frame, len(types))
		for i, t := range types {
			h.Frames[i] = &pspb.Frame{Type: t}
		}
		return
	}
	h.Frames = nil
	for _, t := range types {
		m.storage.addFrame().Type = t
	}
}

// addFrame adds an empty frame to the header in s, which has less than maxFrames.
func (s *storage) addFrame() *pspb.Frame {
	i := len(s.header.Frames)
	s.types[i] = &s.frames[i]
	s.frames[i].Reset()
	s.header.Frames = s.types[:i+1]
	return &s.frames[i]
}

// encode appends the header, as it is sent, to b.
func (m *Message) encode(b []byte) ([]byte, error) {
	for i, d := range m.Data {
		if i >= len(m.Header.Frames) {
			m.Header.Frames = append(m.Header.Frames, &pspb.Frame{Type: pspb.DataType_OTHER})
		}
		m.Header.Frames[i].Bytes = uint64(len(d))
	}
	m.fds = m.describe()
	at := len(b)
	b = append(b, make([]byte, dial.FrameHeaderBytes)...)
	b, err := appendHeader(b, m.Header)
	if err != nil {
		return b[:at], err
	}
	dial.SealFrame(b[at:])
	return b, nil
}

// reader reads messages from a connection.
type reader struct {
	in     *bufio.Reader
	from   io.Reader // the connection
	size   [dial.FrameHeaderBytes]byte
	head   []byte  // memory for headers
	limit  int     // maximum length of a header
	frames bool    // messages may have frames
	link   *link   // the link of the connection, once the peer has registered
	sock   *socket // nil if the connection has none

	// begun is a message of which only the header was read, or nil. failed is the error of an earlier read,
	// or nil. The next call of next returns it, even if whole messages have arrived after the error.
	begun  *Message
	failed error
}

// newReader returns a reader that accepts only short messages without frames, until open is called.
func newReader(from io.Reader) *reader {
	r := &reader{from: from, limit: maxHelloBytes}
	r.sock = newSocket(from)
	if r.sock != nil {
		r.from = r.sock
	}
	r.in = bufio.NewReaderSize(connReader{r}, readerBytes)
	return r
}

// connReader reads the connection of a reader. Before it may wait, it makes the link write what is held back.
type connReader struct{ r *reader }

func (c connReader) Read(p []byte) (int, error) {
	if l := c.r.link; l != nil {
		l.writeHeld()
	}
	return c.r.from.Read(p)
}

// open makes the reader accept all messages, because the peer has proved that it belongs to the job.
func (r *reader) open(l *link) { r.limit, r.frames, r.link = maxHeaderBytes, true, l }

// close frees what the reader holds. The caller closes the connection.
func (r *reader) close() {
	if r.sock != nil {
		r.sock.close()
	}
}

// next reads a message. If the stream ends before a message, the error is io.EOF.
func (r *reader) next() (*Message, error) {
	if r.failed != nil {
		return nil, r.failed
	}
	m := r.begun
	r.begun = nil
	if m == nil {
		var err error
		if m, err = r.begin(); err != nil {
			return nil, err
		}
	}
	if err := r.data(m); err != nil {
		return nil, err
	}
	m.size += m.Bytes()
	m.received = true
	return m, nil
}

// begin reads the header of a message.
func (r *reader) begin() (*Message, error) {
	if _, err := io.ReadFull(r.in, r.size[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(r.size[:])
	if uint64(n) > uint64(r.limit) {
		return nil, fmt.Errorf("malformed message: its header has %d bytes, want at most %d", n, r.limit)
	}
	var err error
	if r.head, err = dial.ReadBytes(r.in, r.head, int(n)); err != nil {
		return nil, err
	}
	m := stored.Get().(*storage).empty()
	if err := m.storage.decode(r.head); err != nil {
		return nil, fmt.Errorf("malformed message: %w", err)
	}
	if cap(r.head) > readerBytes {
		r.head = nil // a long header is rare
	}
	m.size = dial.FrameHeaderBytes + int(n)
	return m, nil
}

// hasWhole reports whether the next message has arrived as a whole, is no longer than the buffer, and is one
// that accept accepts. If the connection must not wait and a part of the header is missing, the error is
// errNothing.
func (r *reader) hasWhole(accept func(*Message) bool) (bool, error) {
	b, err := r.in.Peek(dial.FrameHeaderBytes)
	if err != nil {
		return false, err
	}
	head := dial.FrameHeaderBytes + uint64(binary.BigEndian.Uint32(b))
	if head > readerBytes { // Peek would keep errNothing for the next read
		return false, nil
	}
	if _, err := r.in.Peek(int(head)); err != nil {
		return false, err
	}
	m, err := r.begin()
	if err != nil {
		return false, err
	}
	r.begun = m
	left := uint64(r.in.Buffered())
	for _, f := range m.Header.Frames {
		if f.Block != 0 {
			continue
		}
		if f.Bytes > left {
			return false, nil
		}
		left -= f.Bytes
	}
	return accept(m), nil
}

// data reads the frames of m.
func (r *reader) data(m *Message) error {
	frames := m.Header.Frames
	if len(frames) == 0 {
		return nil
	}
	if !r.frames {
		return fmt.Errorf("malformed message: it has %d data frames, but its sender has not registered yet",
			len(frames))
	}
	var all [maxFrames]int
	sizes, left := all[:len(frames)], uint64(MaxDataBytes)
	for i, f := range frames {
		if f.Bytes > left {
			return fmt.Errorf("malformed message: its frames have more than %d bytes", MaxDataBytes)
		}
		left -= f.Bytes
		sizes[i] = int(f.Bytes)
		if f.Block != 0 {
			sizes[i] = 0
		}
	}
	var err error
	if m.buf, err = r.fill(m, sizes); err != nil {
		return err
	}
	m.split(sizes)
	return r.blocks(m)
}

// blocks sets the frames of m that are in blocks of shared memory.
func (r *reader) blocks(m *Message) (err error) {
	for i, f := range m.Header.Frames {
		if f.Block == 0 {
			continue
		}
		if r.sock == nil || !r.sock.passes() {
			return errors.New("malformed message: it has a block, but the connection shares no memory")
		}
		if m.theirs == nil {
			m.link = r.link
			r.link.theirs.hold() // from now on the blocks stay mapped until m is released
		}
		m.theirs = append(m.theirs, f.Block)
		if m.Data[i], err = r.block(f); err != nil {
			m.Release()
			return err
		}
		if f.Region != 0 {
			m.regions = append(m.regions, f.Region)
		}
	}
	return nil
}

// block returns a frame that is in a block of shared memory. If the block or its region is new, its
// descriptor has arrived.
func (r *reader) block(f *pspb.Frame) ([]byte, error) {
	if f.BlockBytes > 0 {
		fd, err := r.sock.takeDescriptor()
		if err != nil {
			return nil, err
		}
		if f.Region != 0 {
			err = r.link.theirs.addRegion(f.Region, fd)
		} else {
			err = r.link.theirs.addBlock(f.Block, f.BlockBytes, fd)
		}
		if err != nil {
			return nil, err
		}
	}
	return r.link.theirs.frameOf(f)
}

// fill reads frames of m, which have the given sizes, into a buffer. If no free buffer is large enough, it
// allocates memory as bytes arrive.
func (r *reader) fill(m *Message, sizes []int) (*buffer, error) {
	total := room(sizes)
	b := pooled(total)
	if b == nil {
		b = m.newBuffer(min(total, firstBytes))
	}
	at := 0
	for _, n := range sizes {
		for end := at + n; at < end; {
			if at >= len(b.mem) {
				b = b.grow(min(total, 2*len(b.mem)))
			}
			part := b.mem[at:min(end, len(b.mem))]
			if _, err := io.ReadFull(r.in, part); err != nil {
				b.free()
				if err == io.EOF {
					err = io.ErrUnexpectedEOF
				}
				return nil, err
			}
			at += len(part)
		}
		at = aligned(at)
	}
	return b, nil
}
