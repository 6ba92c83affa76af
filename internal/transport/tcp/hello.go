package tcp

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// Refusal is the reason why a rank has refused a connection. At the rank that dialed, the error of Conn wraps
// the Refusal, so that for example errors.Is(err, StaleEpoch) is true.
type Refusal uint32

// These are the reasons for a refusal. The value 0 is not a reason: it means that the rank accepts the
// connection.
const (
	accepted Refusal = iota

	// WrongVersion means that the dialer uses another version of this protocol.
	WrongVersion
	// WrongJob means that the dialer belongs to another job.
	WrongJob
	// StaleEpoch means that the dialer is in another epoch. Either the dialer has used an outdated address,
	// or the rank that refuses is in an outdated epoch.
	StaleEpoch
	// NotMe means that the dialer expected another rank at this address.
	NotMe
	// UnknownRank means that the dialer's rank is not lower than the rank that it dials. Only lower ranks may
	// dial.
	UnknownRank
	// DuplicateChannel means that this rank already has a connection to the dialer on this lane.
	DuplicateChannel

	numRefusals
)

var refusals = [numRefusals]string{
	"accepted", "wrong protocol version", "wrong job", "stale epoch", "wrong rank at this address",
	"unknown rank",
	"duplicate channel",
}

func (r Refusal) Error() string {
	if r >= numRefusals {
		return fmt.Sprintf("tcp: refused: unknown status %d", uint32(r))
	}
	return "tcp: refused: " + refusals[r]
}

// errNotOurs reports that a message does not begin with the magic of this protocol.
var errNotOurs = errors.New("tcp: handshake: the peer does not use the protocol of gohvd ranks")

const (
	magic      = 0x67687664 // "ghvd"
	purpose    = "ghvd"     // name of this protocol in the proof of the secret
	version    = 1
	helloSize  = 44
	answerSize = 8
)

// hello is the first message of a dialer. In all versions of the protocol it has this size and begins with
// the same eight bytes. So a rank can read a hello of a version that it does not know, and can answer it.
//
//	magic u32 | version u32 | job [16] | epoch u64 | from u32 | to u32 | lane u32     (big-endian)
type hello struct {
	version  uint32
	job      [16]byte // see hashJob
	epoch    uint64
	from, to topo.Rank
	lane     transport.Lane
}

// hashJob returns a hash of the job's identity. The hello contains the hash because it has a fixed size. The
// hash is not meant to hide the identity.
func hashJob(job string) [16]byte {
	sum := sha256.Sum256([]byte(job))
	return [16]byte(sum[:16])
}

func (h hello) encode() []byte {
	b := make([]byte, 0, helloSize)
	b = binary.BigEndian.AppendUint32(b, magic)
	b = binary.BigEndian.AppendUint32(b, h.version)
	b = append(b, h.job[:]...)
	b = binary.BigEndian.AppendUint64(b, h.epoch)
	b = binary.BigEndian.AppendUint32(b, uint32(h.from))
	b = binary.BigEndian.AppendUint32(b, uint32(h.to))
	return binary.BigEndian.AppendUint32(b, uint32(h.lane))
}

// readHello reads exactly one hello. If the magic is wrong, it reads only the magic.
func readHello(r io.Reader) (hello, error) {
	var b [helloSize]byte
	if err := readMagic(r, b[:4]); err != nil {
		return hello{}, err
	}
	if n, err := io.ReadFull(r, b[4:]); err != nil {
		return hello{}, fmt.Errorf("tcp: handshake: got %d of the %d bytes of the hello: %w", 4+n, helloSize, err)
	}
	return hello{
		version: binary.BigEndian.Uint32(b[4:]),
		job:     [16]byte(b[8:24]),
		epoch:   binary.BigEndian.Uint64(b[24:]),
		from:    topo.Rank(binary.BigEndian.Uint32(b[32:])),
		to:      topo.Rank(binary.BigEndian.Uint32(b[36:])),
		lane:    transport.Lane(binary.BigEndian.Uint32(b[40:])),
	}, nil
}

// encodeAnswer returns the answer to a hello: magic u32 | status u32. Status 0 means that the connection is
// accepted. Any other status is a Refusal.
func encodeAnswer(r Refusal) []byte {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, answerSize), magic)
	return binary.BigEndian.AppendUint32(b, uint32(r))
}

// readAnswer reads the answer to a hello. If the other end has accepted, readAnswer returns nil. If the other
// end has refused, it returns the Refusal.
func readAnswer(r io.Reader) error {
	var b [answerSize]byte
	if err := readMagic(r, b[:4]); err != nil {
		return err
	}
	if _, err := io.ReadFull(r, b[4:]); err != nil {
		return fmt.Errorf("tcp: handshake: receive the answer: %w", err)
	}
	if status := Refusal(binary.BigEndian.Uint32(b[4:])); status != accepted {
		return status
	}
	return nil
}

func readMagic(r io.Reader, b []byte) error {
	if n, err := io.ReadFull(r, b); err != nil {
		return fmt.Errorf("tcp: handshake: got %d of the %d bytes that begin a message: %w", n, len(b), err)
	}
	if err := secret.Foreign(b); err != nil {
		return fmt.Errorf("tcp: handshake: %w", err)
	}
	if got := binary.BigEndian.Uint32(b); got != magic {
		return fmt.Errorf("%w: its message begins with %#08x, want %#08x", errNotOurs, got, uint32(magic))
	}
	return nil
}
