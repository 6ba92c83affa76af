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

// ErrMixed is the error of a connection of which one end encrypts and the other does not.
var ErrMixed = errors.New(
	"only one side of the connection has HVD_TLS set: set it for all processes of the job or for none")

// maxHandshakeBytes bounds what the peer may send before it has shown its certificate. A handshake takes
// some 2 KiB.
const maxHandshakeBytes = 16 << 10

// Encrypted returns s with TLS on the connections that it dials and accepts; both ends must use it. The zero
// Secret stays as it is.
func (s Secret) Encrypted() Secret {
	if s.IsZero() || s.tls != nil {
		return s
	}
	cfg, err := s.mint()
	if err != nil {
		panic("secret: " + err.Error()) // fails only by a bug in mint
	}
	s.tls = cfg
	return s
}

// mint derives the key of the job and makes a certificate of it. The configuration is for either end.
func (s Secret) mint() (*tls.Config, error) {
	seed, err := hkdf.Key(sha256.New, s.key[:], nil, "gohvd tls ed25519", ed25519.SeedSize)
	if err != nil {
		return nil, err
	}
	private := ed25519.NewKeyFromSeed(seed)
	public := private.Public().(ed25519.PublicKey)
	// No process checks the times, because the clocks of hosts may differ. RFC 5280 gives this NotAfter for a
	// certificate without an end.
	form := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "gohvd job"},
		NotBefore:    time.Unix(0, 0),
		NotAfter:     time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
		KeyUsage:     x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, form, form, public, private)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: private}},
		MinVersion:   tls.VersionTLS13,
		ClientAuth:   tls.RequireAnyClientCert,
		// crypto/tls checks neither chain nor name: VerifyConnection, which each handshake calls, requires
		// the key of the job.
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			if !public.Equal(state.PeerCertificates[0].PublicKey) {
				return ErrWrong
			}
			return nil
		},
		// Without tickets each connection has a key exchange of its own, and the server sends nothing after
		// the handshake that a client might never read.
		SessionTicketsDisabled: true,
		// Tensors are sent in large pieces, which small first records would only slow down.
		DynamicRecordSizingDisabled: true,
	}, nil
}

// open begins TLS on conn if s encrypts; end is crypto/tls's Client or Server.
func (s Secret) open(conn net.Conn, end func(net.Conn, *tls.Config) *tls.Conn) (net.Conn, error) {
	if s.tls == nil {
		return conn, nil
	}
	o := &opening{Conn: conn}
	tc := end(o, s.tls)
	if err := tc.Handshake(); err != nil {
		return nil, o.explain(err)
	}
	o.done = true
	return encrypted{tc}, nil
}

// encrypted closes without a closing alert. TLS would send one and wait for room for it, but Close must not
// wait. Nothing is lost, because no protocol here takes the end of a stream for an answer.
type encrypted struct{ *tls.Conn }

func (c encrypted) Close() error { return c.NetConn().Close() }

// opening is a connection in its handshake. What the peer sends in it is bounded, and counted to tell an
// end that has sent nothing.
type opening struct {
	net.Conn
	received int
	done     bool // set before other goroutines call Read
}

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

// explain returns the error of a handshake that failed with err.
func (o *opening) explain(err error) error {
	record, notTLS := errors.AsType[tls.RecordHeaderError](err)
	alert, isOp := errors.AsType[*net.OpError](err)
	switch {
	case notTLS && bytes.HasPrefix(record.RecordHeader[:], []byte(Magic)):
		return fmt.Errorf("%w (this process has)", ErrMixed)
	case notTLS && record.Conn != nil: // the peer's first bytes are no TLS record
		return notOurs(record.RecordHeader[:4])
	case isOp && alert.Op == "remote error": // usually the peer rejects the key of this process's certificate
		return fmt.Errorf("%w: TLS handshake: %w", ErrWrong, err)
	case o.received > 0 && errors.Is(err, io.EOF):
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("TLS handshake: %w", err)
}

// clientHello is the beginning of what a client that encrypts sends: a handshake record of some version 3
// (RFC 8446, section 5.1).
const clientHello = "\x16\x03"
