// Package secret is what the processes of a job know and nobody else does, and how the two ends of a connection prove that
// to each other before they say anything else.
//
//	client: "GHVA", version u8, 0 u8, 0 u16, nonce [32]
//	server: "GHVA", version u8, status u8, 0 u16, nonce [32], HMAC(server) [32]
//	client: HMAC(client) [32]
//
// The HMACs are SHA-256 with the secret as key, over who speaks, what for, and both nonces. So a proof is good for one
// connection, in one direction, for one protocol. The secret never travels. What follows is neither encrypted nor
// authenticated: that takes TLS. A process without a secret says nothing of this, and neither side takes the other for one
// of its job if only one has a secret.
package secret

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
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
	statusNeeded    = 1 // sent alone, to a client that has begun with something else
)

// Secret is that of a job. The zero Secret is none: then nothing is proven. It prints as a word, so that it gets into no log.
type Secret struct{ key *[sha256.Size]byte }

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
	return Secret{&key}, nil
}

// IsZero reports whether there is none.
func (s Secret) IsZero() bool { return s.key == nil }

func (s Secret) String() string {
	if s.IsZero() {
		return "no secret"
	}
	return "a secret"
}

// GoString is String: also %#v shows nothing.
func (s Secret) GoString() string { return s.String() }

// Dial proves the secret to the server at the other end of conn, and has it do so. purpose names the protocol that follows.
// The caller sets a deadline.
func (s Secret) Dial(conn io.ReadWriter, purpose string) error {
	if s.IsZero() {
		return nil
	}
	var mine [nonceBytes]byte
	rand.Read(mine[:])
	if _, err := conn.Write(append(head(statusChallenge), mine[:]...)); err != nil {
		return fmt.Errorf("secret: %w", err)
	}
	if _, err := readHead(conn); err != nil {
		return fmt.Errorf("secret: %w", err)
	}
	var answer [nonceBytes + proofBytes]byte
	if err := readFull(conn, answer[:]); err != nil {
		return fmt.Errorf("secret: %w", err)
	}
	theirs := answer[:nonceBytes]
	if !hmac.Equal(answer[nonceBytes:], s.proof("server", purpose, mine[:], theirs)) {
		return fmt.Errorf("secret: %w", ErrWrong)
	}
	if _, err := conn.Write(s.proof("client", purpose, mine[:], theirs)); err != nil {
		return fmt.Errorf("secret: %w", err)
	}
	return nil
}

// Accept is the server's side of Dial. It reads no byte of what follows. Its error wraps io.EOF if the client has said nothing.
func (s Secret) Accept(conn io.ReadWriter, purpose string) error {
	if s.IsZero() {
		return nil
	}
	if began, err := readHead(conn); err != nil {
		if errors.Is(err, ErrNone) && began != "" {
			_, _ = conn.Write(head(statusNeeded)) // so that it can say so; it is closed anyhow
		}
		return fmt.Errorf("secret: %w", err)
	}
	var mine, theirs [nonceBytes]byte
	if err := readFull(conn, theirs[:]); err != nil {
		return fmt.Errorf("secret: %w", err)
	}
	rand.Read(mine[:])
	answer := append(head(statusChallenge), mine[:]...)
	if _, err := conn.Write(append(answer, s.proof("server", purpose, theirs[:], mine[:])...)); err != nil {
		return fmt.Errorf("secret: %w", err)
	}
	var proof [proofBytes]byte
	if err := readFull(conn, proof[:]); err != nil {
		return fmt.Errorf("secret: the other end gave no proof: %w", err)
	}
	if !hmac.Equal(proof[:], s.proof("client", purpose, theirs[:], mine[:])) {
		return fmt.Errorf("secret: %w", ErrWrong)
	}
	return nil
}

// proof is what who shows that knows the secret, over the nonces of client and server.
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

// readHead reads how the other end begins; began is what it said where that is something else.
func readHead(r io.Reader) (began string, err error) {
	var h [headBytes]byte
	if n, err := io.ReadFull(r, h[:4]); n == 0 && err == io.EOF {
		return "", err // it has only looked whether anybody is here, or is no server of ours
	} else if err != nil {
		return string(h[:n]), err
	}
	if string(h[:4]) != Magic {
		return string(h[:4]), fmt.Errorf("%w: it began with %q", ErrNone, h[:4])
	}
	if err := readFull(r, h[4:]); err != nil {
		return "", err
	}
	switch {
	case h[4] != version:
		return "", fmt.Errorf("the other end speaks version %d of the proof, want %d", h[4], version)
	case h[5] == statusNeeded:
		return "", ErrNeeded
	case h[5] != statusChallenge:
		return "", fmt.Errorf("the other end answered %d", h[5])
	}
	return "", nil
}

// readFull is io.ReadFull in the middle of a proof, with an end that says what it may mean.
func readFull(r io.Reader, b []byte) error {
	_, err := io.ReadFull(r, b)
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return fmt.Errorf("the other end closed the connection (has it the secret of this job?): %w", io.ErrUnexpectedEOF)
	}
	return err
}
