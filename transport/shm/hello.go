package shm

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/topo"
)

const (
	magic      = 0x67687368 // "ghsh"
	version    = 1
	nonceBytes = 32
	proofBytes = sha256.Size
	helloBytes = 4 + 4 + 16 + 8 + 4 + 4 + nonceBytes
)

// hello is what each side of a Unix connection says about itself. The dialer begins; the acceptor answers with its own
// and a proof; the dialer gives its proof. A proof shows that its maker has the other's token, which only the rendezvous
// gave away.
//
//	magic u32 | version u32 | job [16] | epoch u64 | from u32 | to u32 | nonce [32]      (little-endian)
//	proof [32] = HMAC-SHA256(token of who reads it, "dial" or "accept" | hello of the dialer | hello of the acceptor)
type hello struct {
	job      [16]byte // the begin of the SHA-256 of the job's identity
	epoch    uint64
	from, to topo.Rank
	nonce    [nonceBytes]byte
}

func newHello(ep *Epoch, to topo.Rank) (hello, error) {
	sum := sha256.Sum256([]byte(ep.Job))
	h := hello{job: [16]byte(sum[:16]), epoch: ep.Epoch, from: ep.Rank, to: to}
	_, err := rand.Read(h.nonce[:])
	return h, err
}

func (h *hello) encode() []byte {
	b := make([]byte, 0, helloBytes+proofBytes)
	b = binary.LittleEndian.AppendUint32(b, magic)
	b = binary.LittleEndian.AppendUint32(b, version)
	b = append(b, h.job[:]...)
	b = binary.LittleEndian.AppendUint64(b, h.epoch)
	b = binary.LittleEndian.AppendUint32(b, uint32(h.from))
	b = binary.LittleEndian.AppendUint32(b, uint32(h.to))
	return append(b, h.nonce[:]...)
}

func decodeHello(b []byte) (hello, error) {
	if len(b) != helloBytes {
		return hello{}, fmt.Errorf("hello of %d bytes, want %d", len(b), helloBytes)
	}
	if m, v := binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:]); m != magic || v != version {
		return hello{}, fmt.Errorf("hello begins with %#08x and version %d, want %#08x and %d", m, v, uint32(magic), version)
	}
	return hello{
		job:   [16]byte(b[8:]),
		epoch: binary.LittleEndian.Uint64(b[24:]),
		from:  topo.Rank(binary.LittleEndian.Uint32(b[32:])),
		to:    topo.Rank(binary.LittleEndian.Uint32(b[36:])),
		nonce: [nonceBytes]byte(b[40:]),
	}, nil
}

// answers checks that h is what a rank of this epoch says to mine.
func (h *hello) answers(mine *hello) error {
	switch {
	case h.job != mine.job:
		return errors.New("it is of another job")
	case h.epoch != mine.epoch:
		return fmt.Errorf("it is in epoch %d, this is epoch %d", h.epoch, mine.epoch)
	case h.to != mine.from || h.from != mine.to:
		return fmt.Errorf("it is rank %d and looks for rank %d, this is rank %d and looks for rank %d", h.from, h.to, mine.from, mine.to)
	}
	return nil
}

// proof is made of the token of the rank that will check it.
func proof(token *[tokenBytes]byte, who string, dialer, acceptor *hello) []byte {
	mac := hmac.New(sha256.New, token[:])
	mac.Write([]byte(who))
	mac.Write(dialer.encode())
	mac.Write(acceptor.encode())
	return mac.Sum(nil)
}

var errProof = errors.New("it does not know this rank's token")

// greet is the dialer's side.
func greet(c *net.UnixConn, ep *Epoch, own, other *card, to topo.Rank) error {
	if err := sameUser(c); err != nil {
		return err
	}
	mine, err := newHello(ep, to)
	if err != nil {
		return err
	}
	if _, err := c.Write(mine.encode()); err != nil {
		return err
	}
	b, err := readPacket(c)
	if err != nil {
		return err
	}
	if len(b) != helloBytes+proofBytes {
		return fmt.Errorf("answer of %d bytes, want %d", len(b), helloBytes+proofBytes)
	}
	theirs, err := decodeHello(b[:helloBytes])
	if err != nil {
		return err
	}
	if err := theirs.answers(&mine); err != nil {
		return err
	}
	if !hmac.Equal(b[helloBytes:], proof(&own.token, "accept", &mine, &theirs)) {
		return errProof
	}
	_, err = c.Write(proof(&other.token, "dial", &mine, &theirs))
	return err
}

// welcome is the acceptor's side. who has the cards of those that may come, by rank; the others are nil.
func welcome(c *net.UnixConn, ep *Epoch, own *card, who []*card) (topo.Rank, error) {
	if err := sameUser(c); err != nil {
		return 0, err
	}
	b, err := readPacket(c)
	if err != nil {
		return 0, err
	}
	theirs, err := decodeHello(b)
	if err != nil {
		return 0, err
	}
	if theirs.from < 0 || int(theirs.from) >= len(who) || who[theirs.from] == nil {
		return 0, fmt.Errorf("rank %d has no business here", theirs.from)
	}
	mine, err := newHello(ep, theirs.from)
	if err != nil {
		return 0, err
	}
	if err := theirs.answers(&mine); err != nil {
		return 0, err
	}
	if _, err := c.Write(append(mine.encode(), proof(&who[theirs.from].token, "accept", &theirs, &mine)...)); err != nil {
		return 0, err
	}
	if b, err = readPacket(c); err != nil {
		return 0, err
	}
	if !hmac.Equal(b, proof(&own.token, "dial", &theirs, &mine)) {
		return 0, errProof
	}
	return theirs.from, nil
}

// readPacket reads one message of the handshake. What does not fit is cut off, and then has the wrong length.
func readPacket(c *net.UnixConn) ([]byte, error) {
	var b [helloBytes + proofBytes + 1]byte
	n, err := c.Read(b[:])
	if err != nil {
		return nil, err
	}
	return b[:n], nil
}

// sameUser checks whose process is at the other end.
func sameUser(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) {
		cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if failed != nil {
		return fmt.Errorf("user of the other end: %w", failed)
	}
	if own := uint32(unix.Geteuid()); cred.Uid != own {
		return fmt.Errorf("the other end runs as user %d, this process as user %d", cred.Uid, own)
	}
	return nil
}
