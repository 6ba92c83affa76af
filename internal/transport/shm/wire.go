package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// These are the kinds of messages on a Unix connection after the handshake. Each message is one packet. The
// descriptors that belong to its kind are sent with it:
//
//	kind u32 | id u32 | size u64      (little-endian)
const (
	// controlMessage is the first message and is sent once. It carries descriptors of the sender's control
	// segment and of the sender's eventfd. The field id is the index of the sender in the group, and the
	// field size is the size of one of the sender's rings in bytes.
	controlMessage = 1 + iota
	// shareMessage carries a descriptor of the segment that the sender shares for a lane. The field id is the
	// lane, and the field size is the size of the segment in bytes.
	shareMessage
	// arenaMessage carries a descriptor of an arena chunk of the sender. The field id is the ID of the chunk,
	// and the field size is its size in bytes.
	arenaMessage
	// keptMessage means that the sender could not send a descriptor of an arena chunk. The field id is the ID
	// of the chunk, and the field size is the error number (errno).
	keptMessage
	// dropMessage means that the sender no longer shares an arena chunk. The field id is the ID of the chunk.
	dropMessage

	messageBytes = 16
	maxFDs       = 2
)

// numFDs[k] is the number of descriptors in a message of kind k.
var numFDs = [...]int{controlMessage: 2, shareMessage: 1, arenaMessage: 1, keptMessage: 0, dropMessage: 0}

// message is one packet. A function that receives a message must close its descriptors.
type message struct {
	kind, id uint32
	size     uint64
	fds      []int
}

func (m *message) encode() []byte {
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, messageBytes), m.kind)
	b = binary.LittleEndian.AppendUint32(b, m.id)
	return binary.LittleEndian.AppendUint64(b, m.size)
}

// decodeMessage decodes and checks one packet. If it returns an error, the caller must close fds.
func decodeMessage(b []byte, fds []int) (message, error) {
	if len(b) != messageBytes {
		return message{}, fmt.Errorf("got a message of %d bytes, want %d", len(b), messageBytes)
	}
	m := message{binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:]),
		binary.LittleEndian.Uint64(b[8:]), fds}
	if m.kind < controlMessage || m.kind > dropMessage {
		return message{}, fmt.Errorf("got a message of kind %d, want %d to %d", m.kind, controlMessage,
			dropMessage)
	}
	if want := numFDs[m.kind]; len(fds) != want {
		return message{}, fmt.Errorf("got a message of kind %d with %d descriptors, want %d", m.kind,
			len(fds), want)
	}
	return m, nil
}

// close closes the descriptors.
func (m *message) close() { closeAll(m.fds) }

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd) // the error is ignored, because nothing was written through fd
	}
}

// write sends m and closes its descriptors.
func (m *message) write(c *net.UnixConn) error {
	defer m.close()
	var rights []byte
	if len(m.fds) > 0 {
		rights = unix.UnixRights(m.fds...)
	}
	_, _, err := c.WriteMsgUnix(m.encode(), rights, nil)
	return err
}

// readMessage receives one message. If the connection has ended for any reason, the error is
// io.ErrUnexpectedEOF.
func readMessage(c *net.UnixConn) (message, error) {
	var b [messageBytes + 1]byte
	rights := make([]byte, unix.CmsgSpace(4*maxFDs))
	// ReadMsgUnix sets close-on-exec on the descriptors.
	n, nr, flags, _, err := c.ReadMsgUnix(b[:], rights)
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
		return message{}, io.ErrUnexpectedEOF
	}
	fds, parsed := received(rights[:nr])
	if err == nil {
		err = parsed
	}
	switch {
	case err != nil:
	case flags&unix.MSG_CTRUNC != 0 && len(fds) < maxFDs:
		err = fmt.Errorf("receive the descriptors of a message: %w", unix.EMFILE)
	case flags&(unix.MSG_CTRUNC|unix.MSG_TRUNC) != 0:
		err = errors.New("got a message with more bytes or descriptors than any kind of message has")
	}
	var m message
	if err == nil {
		m, err = decodeMessage(b[:n], fds)
	}
	if err != nil {
		closeAll(fds)
	}
	return m, err
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
func duplicate(fd int) (int, error) { return unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0) }
