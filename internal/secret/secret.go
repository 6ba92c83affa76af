// Package secret implements the secret of a job, and a mutual challenge-response with which the two ends of a
// connection prove to each other that they know the secret. The proof is the first exchange on the
// connection.
//
//	client: "GHVA", version u8, 0 u8, 0 u16, nonce [32]
//	server: "GHVA", version u8, status u8, 0 u16, nonce [32], HMAC(server) [32]
//	client: HMAC(client) [32]
//
// The HMACs are HMAC-SHA256 with a key derived from the secret, over the role (client or server), the purpose
// (the name of the protocol that is used after the proof) and both nonces. So a recorded proof is useless on
// another connection, in the other direction and for another protocol. But a process between client and
// server can relay the proof, and then read and change what follows. The secret itself is never sent. A
// process without a secret skips this exchange. If only one end has a secret, the connection fails at both
// ends, because they do not belong to the same job.
//
// # TLS
//
// With [Secret.Encrypted], the proof and the data are sent inside TLS 1.3, so a process that relays them can
// neither read nor change them. The connections on which processes learn each other's addresses always use
// TLS: those to stores, to the root of the rendezvous and to the scheduler of a parameter server. Other
// connections use it only if the user wants that (HVD_TLS).
//
// No certificates have to be distributed, because every process has the secret anyway. Each process derives
// the Ed25519 key of the job from the secret (HKDF-SHA256). Before its first connection, it makes a
// certificate and signs it with this key. It accepts a peer, client or server, only if the peer's certificate
// has exactly this key. Names, times and issuers in a certificate are ignored, so a certificate is of use
// only within its job. TLS has these effects:
//
//   - An eavesdropper learns only how much is sent, and when. Each connection has its own key exchange, so
//     recorded traffic stays secret even if the secret becomes known later.
//   - If bytes are changed, dropped or inserted in transit, the connection ends. All bytes read before that
//     are bytes that the peer has sent.
//   - As without TLS, a process that has the secret can act as client or as server. And as without TLS,
//     anybody who can connect to a server gets data with which guesses of the secret can be tested, so the
//     secret should be random.
//
// The proof is exchanged inside TLS too. It binds the connection to one protocol, and both kinds of
// connections use the same code. If one end encrypts and the other does not, the error is ErrMixed.
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
	"sync"
	"syscall"
)

// Magic is the start of the first message of a client that has a secret.
const Magic = "GHVA"

// MinBytes and MaxBytes are the minimum and the maximum length of the text of a secret.
const (
	MinBytes = 16
	MaxBytes = 4096
)

var (
	// ErrWrong reports that the peer has another secret.
	ErrWrong = errors.New("the peer has another secret, so it does not belong to this job")
	// ErrNone reports that this process has a secret and the peer has none.
	ErrNone = errors.New("the peer has no secret, so it does not belong to this job")
	// ErrNeeded reports that the peer has a secret and this process has none.
	ErrNeeded = errors.New("the peer requires the secret of its job, but this process has none")
)

const (
	version    = 1
	nonceBytes = 32
	proofBytes = sha256.Size
	headBytes  = 8
)

// These are the status codes in a server's answer.
const (
	statusChallenge = 0
	// A server sends statusNeeded and statusMixed without a nonce and without TLS.
	statusNeeded = 1 // the client did not start with a proof
	statusMixed  = 2 // only one end encrypts
)

// Secret is the secret of a job. The zero Secret means that the job has no secret, so no proofs are
// exchanged. String never returns the secret itself, so that no log contains it.
type Secret struct {
	job     *jobKey // nil if the job has no secret
	encrypt bool    // whether connections are encrypted
}

// jobKey is the key that is derived from the text of a secret.
type jobKey struct {
	key [sha256.Size]byte
	// tls returns the TLS configuration of the job, which it makes at the first call.
	tls func() *tls.Config
}

// Equal reports whether s and t are the same secret.
func (s Secret) Equal(t Secret) bool {
	return s.job == t.job || s.job != nil && t.job != nil && s.job.key == t.job.key
}

// New makes a random secret, and returns it also as text. Other processes pass the text to Parse to get the
// same secret.
func New() (s Secret, text string) {
	var b [32]byte
	rand.Read(b[:]) // rand.Read never fails
	text = hex.EncodeToString(b[:])
	s, err := Parse(text)
	if err != nil {
		panic("secret: " + err.Error())
	}
	return s, text
}

// Parse makes a secret from text. Without the white space around it, the text must have MinBytes to MaxBytes
// bytes. The error does not contain the text.
func Parse(text string) (Secret, error) {
	text = strings.TrimSpace(text)
	if len(text) < MinBytes || len(text) > MaxBytes {
		return Secret{}, fmt.Errorf("the secret has %d bytes, want %d to %d", len(text), MinBytes, MaxBytes)
	}
	job := &jobKey{key: sha256.Sum256([]byte("gohvd secret\x00" + text))}
	job.tls = sync.OnceValue(job.mint)
	return Secret{job: job}, nil
}

// IsZero reports whether the job has no secret.
func (s Secret) IsZero() bool { return s.job == nil }

// IsEncrypted reports whether connections with this secret are encrypted.
func (s Secret) IsEncrypted() bool { return s.encrypt }

func (s Secret) String() string {
	if s.IsZero() {
		return "no secret"
	}
	return "a secret"
}

// GoString returns String, so that %#v does not print the secret either.
func (s Secret) GoString() string { return s.String() }

// Dial proves to the server at the other end of conn that this process knows the secret, and checks the
// server's proof. purpose names the protocol that is used after the proof. The caller must use the returned
// connection for that protocol. This connection is either conn itself, or TLS over conn; its deadlines and
// its Close act on conn. After an error, conn is still open.
func (s Secret) Dial(conn net.Conn, purpose string) (net.Conn, error) {
	over, err := s.open(conn, tls.Client)
	switch {
	case err == nil:
		err = s.dial(over, purpose)
	case errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET):
		err = errHungUp // a server without a secret closes the connection at the first bytes of TLS
	}
	if err != nil {
		return nil, fmt.Errorf("secret: %w", err)
	}
	return over, nil
}

// Accept checks the proof of the client at the other end of conn, and proves to the client that this process
// knows the secret. It is called at the server if the client calls Dial. It does not read bytes of the
// protocol that is used after the proof. Its error wraps io.EOF if the client closed the connection without
// sending anything.
func (s Secret) Accept(conn net.Conn, purpose string) (net.Conn, error) {
	over, err := s.open(conn, tls.Server)
	if err != nil {
		over = conn // there is no TLS session, so the refusal is sent unencrypted
	} else {
		err = s.accept(over, purpose)
	}
	if err != nil {
		refuse(over, err)
		return nil, fmt.Errorf("secret: %w", err)
	}
	return over, nil
}

// refuse tells the client why it is refused if err says that the client started without a proof or that only
// one end encrypts. Errors of the write are ignored, because the connection is closed anyway.
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

// proof returns the HMAC that the end with the given role ("client" or "server") sends. The parameters client
// and server are the nonces of the two ends.
func (s Secret) proof(role, purpose string, client, server []byte) []byte {
	h := hmac.New(sha256.New, s.job.key[:])
	for _, part := range [][]byte{[]byte("gohvd " + role), []byte(purpose), client, server} {
		// The length of each part is written before the part, so that different lists of parts give different
		// bytes.
		h.Write([]byte{byte(len(part))})
		h.Write(part)
	}
	return h.Sum(nil)
}

func head(status byte) []byte { return append([]byte(Magic), version, status, 0, 0) }

// readHead reads and checks the first 8 bytes that the peer sends. If connections are encrypted, r is the TLS
// connection.
func readHead(r io.Reader) error {
	var h [headBytes]byte
	if _, err := io.ReadFull(r, h[:4]); err != nil {
		// The error is io.EOF if the peer is a client that only probed the port, or a server of another
		// program.
		return err
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
		return fmt.Errorf("%w (HVD_TLS is set at the peer)", ErrMixed)
	case h[5] != statusChallenge:
		return fmt.Errorf("the peer sent the unknown status %d", h[5])
	}
	return nil
}

// notOurs returns the error for a peer whose first bytes are not Magic.
func notOurs(first []byte) error {
	if isClientHello(first) {
		return fmt.Errorf("%w (HVD_TLS is set at the peer)", ErrMixed)
	}
	return fmt.Errorf("%w: its first bytes are %q", ErrNone, first)
}

// Foreign examines the first bytes that a peer has sent to a process without a secret. It needs at least four
// bytes. If they are the start of a proof or of TLS, the peer has a secret, and Foreign returns ErrNeeded.
// Otherwise it returns nil.
func Foreign(first []byte) error {
	if bytes.HasPrefix(first, []byte(Magic)) || isClientHello(first) {
		return ErrNeeded
	}
	return nil
}

// errHungUp reports that the peer has closed the connection before the proof was complete.
var errHungUp = fmt.Errorf("the peer closed the connection, perhaps because its secret differs or it has none: %w",
	io.ErrUnexpectedEOF)

// readFull fills b with bytes of a proof that has already begun. If the connection ends before b is full, the
// error says that the secrets may differ.
func readFull(r io.Reader, b []byte) error {
	if _, err := io.ReadFull(r, b); err != io.EOF && err != io.ErrUnexpectedEOF {
		return err
	}
	return errHungUp
}
