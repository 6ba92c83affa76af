// Package secret implements the secret of a job and the mutual challenge-response by which the two ends of a
// connection prove that they know it, before anything else is sent.
//
//	client: "GHVA", version u8, 0 u8, 0 u16, nonce [32]
//	server: "GHVA", version u8, status u8, 0 u16, nonce [32], HMAC(server) [32]
//	client: HMAC(client) [32]
//
// The HMACs are SHA-256 with the secret as key, over the role, the purpose and both nonces. So a proof is
// valid for one connection, in one direction, for one protocol. The secret itself is never sent. A process
// without a secret sends none of this, and if only one end has a secret neither takes the other for a process
// of its job.
//
// # TLS
//
// The data after a proof is neither encrypted nor authenticated, unless the secret is [Secret.Encrypted].
// Then all of the above happens inside TLS 1.3. No certificates are distributed, because every launcher
// already has a way to give processes a secret. Each process derives the job's Ed25519 key from the secret
// (HKDF-SHA256), makes a certificate at its start that this key signs, and accepts from the peer, client or
// server, only a certificate of exactly this key. So the certificates of a job are of use only in that job,
// whatever names, times and authorities they contain, and
//
//   - an eavesdropper learns only how much is sent and when. Each connection has a key exchange of its own, so recorded
//     traffic stays secret even if the secret becomes known later;
//   - changing, dropping or inserting bytes ends the connection. What was read before is what was sent;
//   - a process that has the secret can play either end, as without TLS. The secret should be random: anybody who reaches a
//     server gets something to test guesses against, again as without TLS.
//
// The proof inside names the protocol, and keeps one code path for both kinds. If one end encrypts and the
// other does not, the error is ErrMixed.
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

// Magic begins what a client with a secret sends.
const Magic = "GHVA"

// Bounds on the text of a secret.
const (
	MinBytes = 16
	MaxBytes = 4096
)

var (
	// ErrWrong is the error of a connection to a process that has another secret.
	ErrWrong = errors.New("the peer has another secret, so it does not belong to this job")
	// ErrNone is the error of a connection to a process that has none.
	ErrNone = errors.New("the peer has no secret, so it does not belong to this job")
	// ErrNeeded is the error of a connection from a process without a secret to one that has one.
	ErrNeeded = errors.New("the peer requires the secret of its job, but this process has none")
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
	// A server sends the other statuses without a nonce and without TLS.
	statusNeeded = 1 // the client began without a proof
	statusMixed  = 2 // only one of client and server encrypts
)

// Secret is the secret of a job. The zero Secret is none: then nothing is proven. It prints as a word, so
// that it gets into no log.
type Secret struct {
	key *[sha256.Size]byte
	tls *tls.Config // nil if connections are not encrypted
}

// New makes a random secret. text is what other processes Parse.
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

// Parse makes the secret of a text of MinBytes to MaxBytes, without the white space around it. Its error does
// not contain the text.
func Parse(text string) (Secret, error) {
	text = strings.TrimSpace(text)
	if len(text) < MinBytes || len(text) > MaxBytes {
		return Secret{}, fmt.Errorf("a secret of %d bytes, want %d to %d", len(text), MinBytes, MaxBytes)
	}
	key := sha256.Sum256([]byte("gohvd secret\x00" + text))
	return Secret{key: &key}, nil
}

// IsZero reports whether s is no secret.
func (s Secret) IsZero() bool { return s.key == nil }

// IsEncrypted reports whether connections are encrypted.
func (s Secret) IsEncrypted() bool { return s.tls != nil }

func (s Secret) String() string {
	if s.IsZero() {
		return "no secret"
	}
	return "a secret"
}

// GoString returns String, so that %#v shows nothing either.
func (s Secret) GoString() string { return s.String() }

// Dial proves the secret to the server at the far side of conn, and makes the server prove it too. purpose
// names the protocol that follows, which must use the connection that Dial returns: conn itself, or TLS over
// it. The caller sets deadlines and closes; on either connection that affects conn. After an error conn is
// still open.
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

// Accept does the server's part of Dial. It reads no byte of what follows. Its error wraps io.EOF if the
// client has sent nothing.
func (s Secret) Accept(conn net.Conn, purpose string) (net.Conn, error) {
	over, err := s.open(conn, tls.Server)
	if err != nil {
		over = conn // TLS was not established, so the refusal is sent in plain
	} else {
		err = s.accept(over, purpose)
	}
	if err != nil {
		refuse(over, err)
		return nil, fmt.Errorf("secret: %w", err)
	}
	return over, nil
}

// refuse tells a client that began in the wrong way, in case it can report that. The connection is closed in
// any case.
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
		return fmt.Errorf("the peer sent no proof: %w", err)
	}
	if !hmac.Equal(proof[:], s.proof("client", purpose, theirs[:], mine[:])) {
		return ErrWrong
	}
	return nil
}

// proof returns the proof that a role, client or server, knows the secret, over the nonces of both.
func (s Secret) proof(role, purpose string, client, server []byte) []byte {
	h := hmac.New(sha256.New, s.key[:])
	for _, part := range [][]byte{[]byte("gohvd " + role), []byte(purpose), client, server} {
		// The length before each part ensures that no two lists of parts give the same bytes.
		h.Write([]byte{byte(len(part))})
		h.Write(part)
	}
	return h.Sum(nil)
}

func head(status byte) []byte { return append([]byte(Magic), version, status, 0, 0) }

// readHead reads the first bytes that the peer sends, over a connection that is encrypted if required.
func readHead(r io.Reader) error {
	var h [headBytes]byte
	if _, err := io.ReadFull(r, h[:4]); err != nil {
		return err // io.EOF: a client that only probed the port, or a server that is not gohvd's
	}
	if string(h[:4]) != Magic {
		return notOurs(h[:4])
	}
	if err := readFull(r, h[4:]); err != nil {
		return err
	}
	switch {
	case h[4] != version:
		return fmt.Errorf("the peer speaks version %d of the secret protocol, want %d", h[4], version)
	case h[5] == statusNeeded:
		return ErrNeeded
	case h[5] == statusMixed:
		return fmt.Errorf("%w (the peer has)", ErrMixed)
	case h[5] != statusChallenge:
		return fmt.Errorf("unknown status %d of the peer", h[5])
	}
	return nil
}

// notOurs returns the error of a connection whose peer began with something other than a proof.
func notOurs(first []byte) error {
	if bytes.HasPrefix(first, []byte(clientHello)) {
		return fmt.Errorf("%w (the peer has)", ErrMixed)
	}
	return fmt.Errorf("%w: its first bytes are %q", ErrNone, first)
}

// Foreign returns what the first bytes of a connection, at least four, say about the peer if a protocol
// without a secret was expected: that it has a secret, or encrypts. It is nil if they are none of this
// package's.
func Foreign(first []byte) error {
	switch err := notOurs(first); {
	case bytes.HasPrefix(first, []byte(Magic)):
		return ErrNeeded
	case errors.Is(err, ErrMixed):
		return err
	}
	return nil
}

// readFull reads as io.ReadFull does, in the middle of a proof. If the connection ends, its error says what
// the reason may be.
func readFull(r io.Reader, b []byte) error {
	if _, err := io.ReadFull(r, b); err != io.EOF && err != io.ErrUnexpectedEOF {
		return err
	}
	return fmt.Errorf("the peer closed the connection, perhaps because its secret differs: %w",
		io.ErrUnexpectedEOF)
}
