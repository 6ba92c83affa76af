package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// These are the kinds of messages on a Unix connection after the handshake. A packet has up to maxBatch
// messages, and after them the ranks for which the leader passes the messages on (message.to):
//
//	count u32 | count × (kind u32 | id u32 | size u64 | from u32) | to      (little-endian)
//
// The descriptors that belong to the kinds of the messages are sent with the packet, in the order of the
// messages.
const (
	// controlMessage is the first message and is sent once. It carries descriptors of the sender's control
	// segment and of the sender's eventfd. The field size is the size of one of the sender's rings in bytes.
	controlMessage = 1 + iota
	// shareMessage carries a descriptor of the segment that a rank shares for a lane. The field id is the
	// lane, and the field size is the size of the segment in bytes.
	shareMessage
	// arenaMessage carries a descriptor of an arena chunk of a rank. The field id is the ID of the chunk, and
	// the field size is its size in bytes.
	arenaMessage
	// dropMessage means that a rank no longer shares an arena chunk. The field id is the ID of the chunk.
	dropMessage
	// goneMessage is sent only by the leader. It means that the leader has lost a rank. If the reason is that
	// the leader lacks a resource, the field size is the error number (errno), else 0.
	goneMessage

	headerBytes  = 4
	messageBytes = 20
	maxBatch     = 64
	maxFDs       = maxBatch // of a packet; the kernel permits 253
)

// numFDs[k] is the number of descriptors in a message of kind k.
var numFDs = [...]int{controlMessage: 2, shareMessage: 1, arenaMessage: 1, dropMessage: 0, goneMessage: 0}

// message is a message on a Unix connection. from is the index in the group of the rank that it is about,
// which is also the rank that has made it, except if the kind is goneMessage. A function that gets a message
// must close it.
type message struct {
	kind, id uint32
	size     uint64
	from     uint32
	// to has a bit for each rank of the group that is to get the message from the leader. It is nil if the
	// message is for all ranks, or if the leader sends it.
	to    rankSet
	files []*file
}

// rankSet has a bit for each rank of a group, by index.
type rankSet []byte

func newRankSet(size int) rankSet    { return make(rankSet, (size+7)/8) }
func (s rankSet) add(index int)      { s[index/8] |= 1 << (index % 8) }
func (s rankSet) has(index int) bool { return s == nil || s[index/8]>>(index%8)&1 != 0 }

// file is a descriptor that several messages use. The last of them that is closed closes it.
type file struct {
	fd   int
	uses atomic.Int32
}

// newFile returns a file with one use, for the message that owns it.
func newFile(fd int) *file {
	f := &file{fd: fd}
	f.uses.Store(1)
	return f
}

// share returns m for another recipient, which must close it too.
func (m *message) share() message {
	for _, f := range m.files {
		f.uses.Add(1)
	}
	return *m
}

// close gives up the descriptors.
func (m *message) close() {
	for _, f := range m.files {
		if f.uses.Add(-1) == 0 {
			_ = unix.Close(f.fd) // the error is ignored, because nothing was written through the descriptor
		}
	}
}

func closeAll(messages []message) {
	for i := range messages {
		messages[i].close()
	}
}

// encodePacket encodes messages that have the same recipients.
func encodePacket(messages []message) []byte {
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, headerBytes+len(messages)*messageBytes),
		uint32(len(messages)))
	for i := range messages {
		m := &messages[i]
		b = binary.LittleEndian.AppendUint32(b, m.kind)
		b = binary.LittleEndian.AppendUint32(b, m.id)
		b = binary.LittleEndian.AppendUint64(b, m.size)
		b = binary.LittleEndian.AppendUint32(b, m.from)
	}
	return append(b, messages[0].to...)
}

// decodePacket decodes and checks one packet of a group of the given size. The messages own the descriptors
// fds. If decodePacket returns an error, the caller must close fds.
func decodePacket(b []byte, fds []int, size int) ([]message, error) {
	if len(b) < headerBytes {
		return nil, fmt.Errorf("got a packet of %d bytes, want at least %d", len(b), headerBytes)
	}
	n := int(min(binary.LittleEndian.Uint32(b), maxBatch+1))
	if b = b[headerBytes:]; n == 0 || n > maxBatch || len(b) < n*messageBytes {
		return nil, fmt.Errorf("got a packet of %d messages in %d bytes, want 1 to %d messages of %d bytes", n,
			len(b), maxBatch, messageBytes)
	}
	to := rankSet(slices.Clone(b[n*messageBytes:]))
	if len(to) != 0 && len(to) != len(newRankSet(size)) {
		return nil, fmt.Errorf("got a set of ranks with %d bytes, want none or %d", len(to),
			len(newRankSet(size)))
	}
	if len(to) == 0 {
		to = nil
	}
	messages, used := make([]message, n), 0
	for i := range messages {
		m := &messages[i]
		*m = message{kind: binary.LittleEndian.Uint32(b), id: binary.LittleEndian.Uint32(b[4:]),
			size: binary.LittleEndian.Uint64(b[8:]), from: binary.LittleEndian.Uint32(b[16:]), to: to}
		b = b[messageBytes:]
		if m.kind < controlMessage || m.kind > goneMessage {
			return nil, fmt.Errorf("got a message of kind %d, want %d to %d", m.kind, controlMessage,
				goneMessage)
		}
		if int64(m.from) >= int64(size) {
			return nil, fmt.Errorf("got a message about rank %d of the host, want at most %d", m.from, size-1)
		}
		used += numFDs[m.kind]
	}
	if len(fds) != used {
		return nil, fmt.Errorf("got messages with %d descriptors, want %d", len(fds), used)
	}
	for i := range messages {
		m := &messages[i]
		for range numFDs[m.kind] {
			m.files, fds = append(m.files, newFile(fds[0])), fds[1:]
		}
	}
	return messages, nil
}

// writePacket sends messages that have the same recipients.
func writePacket(c *net.UnixConn, messages []message) error {
	var fds []int
	for i := range messages {
		for _, f := range messages[i].files {
			fds = append(fds, f.fd)
		}
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix(encodePacket(messages), rights, nil)
	return err
}

// reader reads the packets of a Unix connection.
type reader struct {
	conn      *net.UnixConn
	size      int // number of ranks in the group
	b, rights []byte
}

func newReader(c *net.UnixConn, size int) *reader {
	return &reader{c, size, make([]byte, headerBytes+maxBatch*messageBytes+len(newRankSet(size))+1),
		make([]byte, unix.CmsgSpace(4*maxFDs))}
}

// read receives one packet. If the connection has ended for any reason, the error is io.ErrUnexpectedEOF.
func (r *reader) read() ([]message, error) {
	// ReadMsgUnix sets close-on-exec on the descriptors.
	n, nr, flags, _, err := r.conn.ReadMsgUnix(r.b, r.rights)
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
		return nil, io.ErrUnexpectedEOF
	}
	fds, parsed := received(r.rights[:nr])
	if err == nil {
		err = parsed
	}
	switch {
	case err != nil:
	case flags&unix.MSG_CTRUNC != 0 && len(fds) < maxFDs:
		err = fmt.Errorf("receive the descriptors of a message: %w", unix.EMFILE)
	case flags&(unix.MSG_CTRUNC|unix.MSG_TRUNC) != 0:
		err = errors.New("got a packet with more bytes or descriptors than any packet has")
	}
	var messages []message
	if err == nil {
		messages, err = decodePacket(r.b[:n], fds, r.size)
	}
	if err != nil {
		for _, fd := range fds {
			_ = unix.Close(fd) // the error is ignored, because nothing was written through the descriptor
		}
	}
	return messages, err
}

// received returns the descriptors in rights, the control data of a packet.
func received(rights []byte) ([]int, error) {
	if len(rights) == 0 {
		return nil, nil
	}
	parts, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil, err
	}
	var fds []int
	for i := range parts {
		got, err := unix.ParseUnixRights(&parts[i])
		if err != nil {
			return fds, err
		}
		fds = append(fds, got...)
	}
	return fds, nil
}

// duplicate returns a new descriptor for the same open file as fd.
func duplicate(fd int) (*file, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return newFile(dup), nil
}
