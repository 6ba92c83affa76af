// Package secret is what the processes of a job know and nobody else does, and how the two ends of a connection prove that
// to each other before they say anything else.
//
//	client: "GHVA", version u8, 0 u8, 0 u16, nonce [32]
//	server: "GHVA", version u8, status u8, 0 u16, nonce [32], HMAC(server) [32]
//	client: HMAC(client) [32]
//
// The HMACs are SHA-256 with the secret as key, over who speaks, what for, and both nonces. So a proof is good for one
// connection, in one direction, for one protocol. The secret never travels. A process without a secret says nothing of this,
// and neither side takes the other for one of its job if only one has a secret.
//
// # TLS
//
// What follows a proof is neither encrypted nor authenticated, unless the secret is [Secret.Encrypted]. Then all of the above
// is said inside TLS 1.3. No certificates are handed round, for that takes something that all launchers have, and they have a
// way to give processes a secret: so each process derives the job's Ed25519 key from it (HKDF-SHA256), mints at start a
// certificate that the key itself signs, and wants of the other end, client or server, a certificate of exactly that key. So
// the certificates of a job are of use in that job alone, whatever names, times and authorities are in them, and
//
//   - who listens learns nothing but how much is said and when. Each connection has a key exchange of its own, so that what
//     was recorded stays closed to who learns the secret later;
//   - who changes, drops or inserts bytes ends the connection: what was read before is as it was sent;
//   - who has the secret can play either end, as without TLS. It should be random: who reaches a server gets what a guess can
//     be held against, again as without TLS.
//
// The proof inside names the protocol, and keeps one path for both kinds. One end that encrypts and one that does not find
// each other out: ErrMixed.
package secret

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
)

// Magic is what a client that has a secret begins with.
const Magic = "GHVA"

// Bounds on the text of a secret.
const (
	MinBytes = 16
	MaxBytes = 4096
)

var (
	// ErrWrong is the error of a connection to a process that has another secret.
	ErrWrong = errors.New("the other end has another secret: it is not of this job")
	// ErrNone is the error of a connection to a process that has none.
	ErrNone = errors.New("the other end has no secret: it is not of this job")
	// ErrNeeded is the error of a connection from a process without a secret to one that has one.
	ErrNeeded = errors.New("the other end wants the secret of its job, and this process has none")
)

const (
	version    = 1
	nonceBytes = 32
	proofBytes = sha256.Size
	headBytes  = 8
)

// Statuses in a server's answer.
const (
	statusChallenge = 0
	// These are sent alone, and without TLS.
	statusNeeded = 1 // to a client that has begun with something else
	statusMixed  = 2 // to a client that encrypts and should not, or the other way round
)

// Secret is that of a job. The zero Secret is none: then nothing is proven. It prints as a word, so that it gets into no log.
type Secret struct {
	key *[sha256.Size]byte
	tls *tls.Config // nil does not encrypt
}

// New makes a secret that nobody has. text is what other processes Parse.
func New() (s Secret, text string) {
	var b [32]byte
	rand.Read(b[:]) // never fails
	text = hex.EncodeToString(b[:])
	s, err := Parse(text)
	if err != nil {
		panic("secret: " + err.Error())
	}
	return s, text
}

// Parse makes the secret of a text, from MinBytes to MaxBytes without the white space around it. Its error does not
// show the text.
func Parse(text string) (Secret, error) {
	text = strings.TrimSpace(text)
	if len(text) < MinBytes || len(text) > MaxBytes {
		return Secret{}, fmt.Errorf("a secret of %d bytes, want %d to %d", len(text), MinBytes, MaxBytes)
	}
	key := sha256.Sum256([]byte("gohvd secret\x00" + text))
	return Secret{key: &key}, nil
}

// IsZero reports whether there is none.
func (s Secret) IsZero() bool { return s.key == nil }

// IsEncrypted reports whether connections are encrypted.
func (s Secret) IsEncrypted() bool { return s.tls != nil }

func (s Secret) String() string {
	if s.IsZero() {
		return "no secret"
	}
	return "a secret"
}

// GoString is String: also %#v shows nothing.
func (s Secret) GoString() string { return s.String() }

// Dial proves the secret to the server at the other end of conn, and has it do so. purpose names the protocol that follows,
// which is to be spoken over the connection that Dial returns: conn itself, or TLS over it. Deadlines and Close are the
// caller's, and on either connection they are those of conn; after an error too, which leaves conn open.
func (s Secret) Dial(conn net.Conn, purpose string) (net.Conn, error) {
	over, err := s.open(conn, tls.Client)
	if err == nil {
		err = s.dial(over, purpose)
	}
	if err != nil {
		return nil, fmt.Errorf("secret: %w", err)
	}
	return over, nil
}

// Accept is the server's side of Dial. It reads no byte of what follows. Its error wraps io.EOF if the client has said nothing.
func (s Secret) Accept(conn net.Conn, purpose string) (net.Conn, error) {
	over, err := s.open(conn, tls.Server)
	if err != nil {
		over = conn // nothing was agreed on
	} else {
		err = s.accept(over, purpose)
	}
	if err != nil {
		refuse(over, err)
		return nil, fmt.Errorf("secret: %w", err)
	}
	return over, nil
}

// refuse tells a client that began in the wrong way, for it may be one that can say so. It is closed anyhow.
func refuse(w io.Writer, err error) {
	switch {
	case errors.Is(err, ErrMixed):
		_, _ = w.Write(head(statusMixed))
	case errors.Is(err, ErrNone):
		_, _ = w.Write(head(statusNeeded))
	}
}

func (s Secret) dial(conn io.ReadWriter, purpose string) error {
	if s.IsZero() {
		return nil
	}
	var mine [nonceBytes]byte
	rand.Read(mine[:])
	if _, err := conn.Write(append(head(statusChallenge), mine[:]...)); err != nil {
		return err
	}
	if err := readHead(conn); err != nil {
		return err
	}
	var answer [nonceBytes + proofBytes]byte
	if err := readFull(conn, answer[:]); err != nil {
		return err
	}
	theirs := answer[:nonceBytes]
	if !hmac.Equal(answer[nonceBytes:], s.proof("server", purpose, mine[:], theirs)) {
		return ErrWrong
	}
	_, err := conn.Write(s.proof("client", purpose, mine[:], theirs))
	return err
}

func (s Secret) accept(conn io.ReadWriter, purpose string) error {
	if s.IsZero() {
		return nil
	}
	if err := readHead(conn); err != nil {
		return err
	}
	var mine, theirs [nonceBytes]byte
	if err := readFull(conn, theirs[:]); err != nil {
		return err
	}
	rand.Read(mine[:])
	answer := append(head(statusChallenge), mine[:]...)
	if _, err := conn.Write(append(answer, s.proof("server", purpose, theirs[:], mine[:])...)); err != nil {
		return err
	}
	var proof [proofBytes]byte
	if err := readFull(conn, proof[:]); err != nil {
		return fmt.Errorf("the other end gave no proof: %w", err)
	}
	if !hmac.Equal(proof[:], s.proof("client", purpose, theirs[:], mine[:])) {
		return ErrWrong
	}
	return nil
}

// proof returns what who shows that knows the secret, over the nonces of client and server.
func (s Secret) proof(who, purpose string, client, server []byte) []byte {
	h := hmac.New(sha256.New, s.key[:])
	for _, part := range [][]byte{[]byte("gohvd " + who), []byte(purpose), client, server} {
		// Each part with its length, so that no two lists of parts give the same bytes.
		h.Write([]byte{byte(len(part))})
		h.Write(part)
	}
	return h.Sum(nil)
}

func head(status byte) []byte { return append([]byte(Magic), version, status, 0, 0) }

// readHead reads how the other end begins, over a connection that is encrypted if it is to be.
func readHead(r io.Reader) error {
	var h [headBytes]byte
	if _, err := io.ReadFull(r, h[:4]); err != nil {
		return err // io.EOF: it has only looked whether anybody is here, or is no server of ours
	}
	if string(h[:4]) != Magic {
		return notOurs(h[:4])
	}
	if err := readFull(r, h[4:]); err != nil {
		return err
	}
	switch {
	case h[4] != version:
		return fmt.Errorf("the other end speaks version %d of the proof, want %d", h[4], version)
	case h[5] == statusNeeded:
		return ErrNeeded
	case h[5] == statusMixed:
		return fmt.Errorf("%w (the other end has)", ErrMixed)
	case h[5] != statusChallenge:
		return fmt.Errorf("the other end answered %d", h[5])
	}
	return nil
}

// notOurs returns the error of a connection whose other end began in another way than with a proof.
func notOurs(first []byte) error {
	if bytes.HasPrefix(first, []byte(clientHello)) {
		return fmt.Errorf("%w (the other end has)", ErrMixed)
	}
	return fmt.Errorf("%w: it began with %q", ErrNone, first)
}

// Foreign returns what the first bytes of a connection, four or more, say of the other end where it was to speak a protocol without
// a secret: that it has one, or encrypts. It is nil if they are none of this package's.
func Foreign(first []byte) error {
	switch err := notOurs(first); {
	case bytes.HasPrefix(first, []byte(Magic)):
		return ErrNeeded
	case errors.Is(err, ErrMixed):
		return err
	}
	return nil
}

// readFull is io.ReadFull in the middle of a proof, with an end that says what it may mean.
func readFull(r io.Reader, b []byte) error {
	if _, err := io.ReadFull(r, b); err != io.EOF && err != io.ErrUnexpectedEOF {
		return err
	}
	return fmt.Errorf("the other end closed the connection (has it the secret of this job?): %w", io.ErrUnexpectedEOF)
}
