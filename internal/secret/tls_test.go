package secret_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
)

// pair runs the proof with s over the connection whose ends are a and b. It returns the connections that Dial
// and Accept have returned.
func pair(t *testing.T, s secret.Secret, a, b net.Conn) (client, server net.Conn) {
	t.Helper()
	var wg sync.WaitGroup
	wg.Go(func() {
		var err error
		if server, err = s.Accept(b, "p"); err != nil {
			t.Error(err)
			b.Close()
		}
	})
	client, err := s.Dial(a, "p")
	if err != nil {
		t.Error(err)
		a.Close()
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return client, server
}

// wiretap is a connection that records all bytes that are written to it. If spoil is set, it changes a byte
// of each write.
type wiretap struct {
	net.Conn
	mu    sync.Mutex
	heard []byte
	spoil bool
}

func (w *wiretap) Write(b []byte) (int, error) {
	w.mu.Lock()
	w.heard = append(w.heard, b...)
	if w.spoil {
		b = bytes.Clone(b)
		b[len(b)-1] ^= 1
	}
	w.mu.Unlock()
	return w.Conn.Write(b)
}

// Without TLS, the data appears unchanged in the bytes that are sent. With TLS it does not, and if a byte is
// changed in transit, the connection ends.
func TestWire(t *testing.T) {
	words := strings.Repeat("the weights of a model ", 3000) // long enough for several records
	for kind, of := range kinds {
		s, _ := secret.New()
		a, b := connection(t)
		tap := &wiretap{Conn: a}
		client, server := pair(t, of(s), tap, b)
		send := func() <-chan error {
			done := make(chan error, 1)
			go func() {
				_, err := io.WriteString(client, words)
				done <- err
			}()
			return done
		}
		done := send()
		got := make([]byte, len(words))
		if _, err := io.ReadFull(server, got); err != nil || string(got) != words {
			t.Fatalf("%s: got %d bytes that differ, %v", kind, len(got), err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if seen := bytes.Contains(tap.heard, []byte("weights of a")); seen != (kind == "plain") {
			t.Errorf("%s: words on the wire: %v", kind, seen)
		}
		tap.spoil = true
		done = send()
		_, err := io.ReadFull(server, got)
		if changed := err == nil; changed != (kind == "plain") {
			t.Errorf("%s: a spoilt byte gave %v", kind, err)
		}
		if kind == "TLS" {
			if _, again := server.Read(got); again == nil {
				t.Error("what followed a spoilt byte was read")
			}
		}
		client.Close()
		server.Close()
		<-done
	}
}

// Each connection uses TLS 1.3 with a certificate at both ends and its own key exchange. No session is
// resumed.
func TestSession(t *testing.T) {
	s, text := secret.New()
	a, b := connection(t)
	client, server := pair(t, s.Encrypted(), a, b)
	type stater interface{ ConnectionState() tls.ConnectionState }
	for _, end := range []net.Conn{client, server} {
		state := end.(stater).ConnectionState()
		if state.Version != tls.VersionTLS13 || state.DidResume || len(state.PeerCertificates) != 1 {
			t.Errorf("got version %x, resumed %v, %d certificates", state.Version, state.DidResume,
				len(state.PeerCertificates))
		}
	}
	// Processes with the same secret derive the same key. Processes with another secret derive another key.
	key := func(s secret.Secret) ed25519.PublicKey {
		a, b := connection(t)
		client, _ := pair(t, s.Encrypted(), a, b)
		return client.(stater).ConnectionState().PeerCertificates[0].PublicKey.(ed25519.PublicKey)
	}
	other, _ := secret.New()
	if !key(s).Equal(key(parse(t, text))) || key(s).Equal(key(other)) {
		t.Error("the key is not that of the secret")
	}
	if strings.Contains(fmt.Sprintf("%v %+v %#v", s.Encrypted(), s.Encrypted(), s.Encrypted()), "0x") {
		t.Error("it prints more than a word")
	}
	if none := (secret.Secret{}).Encrypted(); !none.IsZero() || none.IsEncrypted() || s.IsEncrypted() ||
		!s.Encrypted().IsEncrypted() {
		t.Error("which is encrypted?")
	}
}

// tickets counts the session tickets that a client gets.
type tickets struct {
	mu  sync.Mutex
	got int
}

func (c *tickets) Get(string) (*tls.ClientSessionState, bool) { return nil, false }

func (c *tickets) Put(_ string, s *tls.ClientSessionState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s != nil {
		c.got++
	}
}

// A client gets no session ticket, even if it could use one, so no connection can be resumed later.
func TestNoTickets(t *testing.T) {
	s, _ := secret.New()
	s = s.Encrypted()
	cache := new(tickets)
	cfg := s.TLS().Clone()
	cfg.ClientSessionCache, cfg.ServerName = cache, "job"
	c, e := meet(t, func(conn net.Conn) error {
		tc := tls.Client(conn, cfg)
		if _, err := io.WriteString(tc, "this is no proof"); err != nil {
			return err
		}
		_, err := io.Copy(io.Discard, tc) // if the server sends a ticket, this reads it
		return err
	}, func(conn net.Conn) error { return accept(s, conn, "p") })
	if c != nil || !errors.Is(e, secret.ErrNone) || cache.got != 0 {
		t.Errorf("got %v, %v and %d tickets", c, e, cache.got)
	}
}

// If only one end encrypts, the errors at both ends say which one does.
func TestMixed(t *testing.T) {
	s, _ := secret.New()
	for _, test := range []struct {
		name           string
		client, server secret.Secret
		want           [2]string // texts that the errors of client and server must contain
	}{
		{"the client encrypts", s.Encrypted(), s, [2]string{"(HVD_TLS is set in this process)", "(HVD_TLS is set at the peer)"}},
		{"the server encrypts", s, s.Encrypted(), [2]string{"(HVD_TLS is set at the peer)", "(HVD_TLS is set in this process)"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, e := meet(t, func(conn net.Conn) error { return dial(test.client, conn, "p") },
				func(conn net.Conn) error { return accept(test.server, conn, "p") })
			for i, err := range []error{c, e} {
				if !errors.Is(err, secret.ErrMixed) {
					t.Errorf("end %d: got %v, want %v", i, err, secret.ErrMixed)
				}
				testnet.WantError(t, err, "HVD_TLS", test.want[i])
			}
		})
	}
}

// certificate returns a TLS certificate that does not belong to the job, with its private key.
func certificate(t *testing.T) tls.Certificate {
	t.Helper()
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	form := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, form, form, public, private)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private}
}

// Server and client both require that the peer uses TLS 1.3, shows the job's certificate and has the private
// key of that certificate. Otherwise the proof fails.
func TestUnauthenticatedPeersWithTLS(t *testing.T) {
	s, _ := secret.New()
	foreign := certificate(t)
	// An attacker can copy the server's certificate, because the server sends it to every client. The
	// attacker does not get the private key.
	a, b := connection(t)
	client, _ := pair(t, s.Encrypted(), a, b)
	shown := client.(interface {
		ConnectionState() tls.ConnectionState
	}).ConnectionState().PeerCertificates[0].Raw
	stolen := tls.Certificate{Certificate: [][]byte{shown}, PrivateKey: foreign.PrivateKey}
	for _, test := range []struct {
		name string
		cfg  *tls.Config
		// The field client is the text that the error of a client must contain if its server uses cfg. The
		// field server is the text that the error of a server must contain if its client uses cfg.
		client string
		server string
	}{
		{"no certificate", &tls.Config{}, "", "client didn't provide a certificate"},
		{"another certificate", &tls.Config{Certificates: []tls.Certificate{foreign}}, "another secret",
			"another secret"},
		{"another's certificate", &tls.Config{Certificates: []tls.Certificate{stolen}}, "invalid signature",
			"invalid signature"},
		{"TLS 1.2", &tls.Config{Certificates: []tls.Certificate{foreign}, MaxVersion: tls.VersionTLS12},
			"TLS handshake", "unsupported versions"},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.cfg.InsecureSkipVerify = true
			_, err := meet(t, func(conn net.Conn) error {
				c := tls.Client(conn, test.cfg)
				_, err := c.Read(make([]byte, 1))
				return err
			}, func(conn net.Conn) error { return accept(s.Encrypted(), conn, "p") })
			testnet.WantError(t, err, test.server)
			if test.client == "" {
				return
			}
			test.cfg.ClientAuth = tls.RequestClientCert
			err, _ = meet(t, func(conn net.Conn) error { return dial(s.Encrypted(), conn, "p") },
				func(conn net.Conn) error {
					_, err := tls.Server(conn, test.cfg).Read(make([]byte, 1))
					return err
				})
			testnet.WantError(t, err, test.client)
		})
	}
}

// If a client closes the connection before it has sent any byte, Accept returns an error that wraps io.EOF,
// so that servers do not log it. If the client closes the connection in the middle of the proof, the error
// does not wrap io.EOF.
func TestBreakingOff(t *testing.T) {
	s, _ := secret.New()
	for kind, of := range kinds {
		for _, test := range []struct {
			say   string
			quiet bool
		}{{"", true}, {"\x16\x03\x01\x00\x05", false}, {"\x16\x03\x01\x00\x04\x01\x00\x00\x09",
			false}, {"\x16\x03", false}, {"GH", false}, {secret.Magic, false}} {
			_, err := meet(t, func(conn net.Conn) error {
				_, err := io.WriteString(conn, test.say)
				return err
			}, func(conn net.Conn) error { return accept(of(s), conn, "p") })
			if err == nil || errors.Is(err, io.EOF) != test.quiet {
				t.Errorf("%s, after %q: got %v, want io.EOF: %v", kind, test.say, err, test.quiet)
			}
		}
	}
}

// A handshake fails at the deadline that the caller has set. It also fails when the peer has sent 16 KiB and
// the handshake is not complete.
func TestHandshakeIsBounded(t *testing.T) {
	s, _ := secret.New()
	for name, end := range map[string]func(secret.Secret, net.Conn, string) error{"client": dial,
		"server": accept} {
		a, b := net.Pipe()
		go io.Copy(io.Discard, b)
		a.SetDeadline(time.Now().Add(20 * time.Millisecond))
		if err := end(s.Encrypted(), a, "p"); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: got %v, want that the time is over", name, err)
		}
		a.Close()
		b.Close()
	}
	// crypto/tls would accept this hello of 64 KiB, which is sent in records of 1 KiB.
	hello := append([]byte{1, 0, 0xff, 0xff}, make([]byte, 0xffff)...)
	a, b := net.Pipe() // a write to the pipe returns only when all its bytes were read
	var said int
	var wg sync.WaitGroup
	wg.Go(func() {
		for piece := range slices.Chunk(hello, 1024) {
			n, err := a.Write(append([]byte{22, 3, 1, byte(len(piece) >> 8), byte(len(piece))}, piece...))
			if said += n; err != nil {
				return
			}
		}
	})
	// Nobody reads the alert from the pipe, so the deadline limits the time of its write.
	b.SetDeadline(time.Now().Add(time.Second))
	testnet.WantError(t, accept(s.Encrypted(), b, "p"), "more than 16384 bytes")
	b.Close()
	wg.Wait()
	if said > 16<<10 {
		t.Errorf("%d bytes were taken", said)
	}
}

// Close returns even if the peer does not read, because it sends no alert. The deadlines of the underlying
// connection apply to the encrypted connection too.
func TestEndOfEncrypted(t *testing.T) {
	s, _ := secret.New()
	raw, b := net.Pipe()
	defer raw.Close()
	defer b.Close()
	client, server := pair(t, s.Encrypted(), raw, b)
	raw.SetReadDeadline(time.Unix(1, 0))
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read got %v, want that the time is over", err)
	}
	raw.SetReadDeadline(time.Time{})
	go io.WriteString(server, "x")
	if _, err := client.Read(make([]byte, 1)); err != nil {
		t.Errorf("read after a deadline: %v", err)
	}
	client.SetWriteDeadline(time.Unix(1, 0))
	if _, err := raw.Write([]byte("x")); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("write got %v, want that the time is over", err)
	}
	began := time.Now()
	server.Close() // nobody reads from the pipe, so Close could not send an alert
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("close took %v", took)
	}
	if _, err := server.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("write after close got %v", err)
	}
}

func BenchmarkMeet(b *testing.B) {
	s, _ := secret.New()
	for kind, of := range kinds {
		b.Run(kind, func(b *testing.B) {
			s := of(s)
			for b.Loop() {
				x, y := net.Pipe()
				var wg sync.WaitGroup
				wg.Go(func() {
					if _, err := s.Accept(y, "p"); err != nil {
						b.Error(err)
					}
				})
				if _, err := s.Dial(x, "p"); err != nil {
					b.Error(err)
				}
				wg.Wait()
			}
		})
	}
}
