package secret

import (
	"bytes"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"time"
)

// ErrMixed reports that one end of a connection encrypts and the other does not.
var ErrMixed = errors.New(
	"only one side of the connection has HVD_TLS set: set it for all processes of the job or for none, " +
		"and use one version of gohvd")

// maxHandshakeBytes is the maximum number of bytes that a peer may send before its certificate is verified. A
// handshake takes about 2 KiB.
const maxHandshakeBytes = 16 << 10

// Encrypted returns a copy of s whose methods Dial and Accept use TLS. The peer must use an encrypted Secret
// too. If s is the zero Secret, Encrypted returns it unchanged.
func (s Secret) Encrypted() Secret {
	s.encrypt = !s.IsZero()
	return s
}

// mint derives the Ed25519 key of the job, makes a certificate, signs it with the key, and returns a
// configuration that works for a client and for a server.
func (j *jobKey) mint() *tls.Config {
	seed, err := hkdf.Key(sha256.New, j.key[:], nil, "gohvd tls ed25519", ed25519.SeedSize)
	if err != nil {
		panic("secret: " + err.Error()) // fails only if this function has a bug
	}
	private := ed25519.NewKeyFromSeed(seed)
	public := private.Public().(ed25519.PublicKey)
	// No process checks the times in the certificate, because the clocks of hosts may differ. RFC 5280
	// defines this NotAfter for a certificate that does not expire.
	form := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "gohvd job"},
		NotBefore:    time.Unix(0, 0),
		NotAfter:     time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
		KeyUsage:     x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, form, form, public, private)
	if err != nil {
		panic("secret: " + err.Error()) // fails only if this function has a bug
	}
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: private}},
		MinVersion:   tls.VersionTLS13,
		ClientAuth:   tls.RequireAnyClientCert,
		// This makes crypto/tls check neither the chain of certificates nor the name. Instead, each handshake
		// calls VerifyConnection, which requires the key of the job.
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			if !public.Equal(state.PeerCertificates[0].PublicKey) {
				return ErrWrong
			}
			return nil
		},
		// Without session tickets, each connection has its own key exchange. The server also sends nothing
		// after the handshake, which a client might never read.
		SessionTicketsDisabled: true,
		// crypto/tls would begin with small records. They would slow down tensors, which are sent in large
		// pieces.
		DynamicRecordSizingDisabled: true,
	}
}

// open starts TLS on conn if s is encrypted, else it returns conn. The parameter end is tls.Client or
// tls.Server.
func (s Secret) open(conn net.Conn, end func(net.Conn, *tls.Config) *tls.Conn) (net.Conn, error) {
	if !s.encrypt {
		return conn, nil
	}
	o := &opening{Conn: conn}
	tc := end(o, s.job.tls())
	if err := tc.Handshake(); err != nil {
		return nil, o.explain(err)
	}
	o.done = true
	return encrypted{tc}, nil
}

// encrypted is a TLS connection that sends no alert when it is closed. tls.Conn.Close would wait until the
// send buffer has room for the alert, but Close must not wait here. The alert is not needed, because no
// protocol of gohvd treats the end of the stream as a message.
type encrypted struct{ *tls.Conn }

func (c encrypted) Close() error { return c.NetConn().Close() }

// opening is a connection during its TLS handshake. It limits the number of bytes that the peer may send. It
// also counts them, so that explain knows whether the peer has sent anything.
type opening struct {
	net.Conn
	received int
	done     bool // set before another goroutine can call Read
}

// NetConn returns the connection below.
func (o *opening) NetConn() net.Conn { return o.Conn }

func (o *opening) Read(p []byte) (int, error) {
	if o.done {
		return o.Conn.Read(p)
	}
	if o.received == maxHandshakeBytes {
		return 0, fmt.Errorf("the peer sent more than %d bytes before the end of the handshake",
			maxHandshakeBytes)
	}
	n, err := o.Conn.Read(p[:min(len(p), maxHandshakeBytes-o.received)])
	o.received += n
	return n, err
}

// explain converts err, the error of a failed handshake, to an error that describes the cause.
func (o *opening) explain(err error) error {
	record, notTLS := errors.AsType[tls.RecordHeaderError](err)
	alert, isOp := errors.AsType[*net.OpError](err)
	switch {
	case notTLS && bytes.HasPrefix(record.RecordHeader[:], []byte(Magic)):
		return fmt.Errorf("%w (HVD_TLS is set in this process)", ErrMixed)
	case notTLS && record.Conn != nil: // the peer's first bytes are not a TLS record
		return notOurs(record.RecordHeader[:4])
	// The usual reason is that the peer has rejected the key of this process's certificate.
	case isOp && alert.Op == "remote error":
		return fmt.Errorf("%w: TLS handshake: %w", ErrWrong, err)
	case o.received > 0 && errors.Is(err, io.EOF):
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("TLS handshake: %w", err)
}

// isClientHello reports whether first is the start of the first message of a client that encrypts: a
// handshake record with major version 3 (RFC 8446, section 5.1).
func isClientHello(first []byte) bool { return bytes.HasPrefix(first, []byte("\x16\x03")) }
