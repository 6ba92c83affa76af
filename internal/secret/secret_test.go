package secret_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
)

// kinds has the two kinds of secrets: with and without encryption.
var kinds = map[string]func(secret.Secret) secret.Secret{
	"plain": func(s secret.Secret) secret.Secret { return s },
	"TLS":   secret.Secret.Encrypted,
}

func parse(t *testing.T, text string) secret.Secret {
	t.Helper()
	s, err := secret.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// dial and accept run the proof as client and as server of a connection. Nothing else is sent over the
// connection.
func dial(s secret.Secret, conn net.Conn, purpose string) error {
	_, err := s.Dial(conn, purpose)
	return err
}

func accept(s secret.Secret, conn net.Conn, purpose string) error {
	_, err := s.Accept(conn, purpose)
	return err
}

// connection returns both ends of a TCP connection. The ends have deadlines.
func connection(t *testing.T) (a, b net.Conn) {
	t.Helper()
	ln := testnet.Listen(t)
	defer ln.Close()
	a = testnet.RawDial(t, ln.Addr().String())
	b, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	b.SetDeadline(time.Now().Add(time.Minute))
	return a, b
}

// meet runs client and server at the two ends of a connection, and returns their errors.
func meet(t *testing.T, client func(net.Conn) error,
	server func(net.Conn) error) (clientErr, serverErr error) {
	t.Helper()
	a, b := connection(t)
	done := make(chan error)
	go func() {
		err := server(b)
		b.Close()
		done <- err
	}()
	clientErr = client(a)
	a.Close()
	return clientErr, <-done
}

func TestProof(t *testing.T) {
	one, other := parse(t, "one secret of the job"), parse(t, "another secret of another")
	var none secret.Secret
	for kind, of := range kinds {
		for _, test := range []struct {
			name             string
			client, server   secret.Secret
			purpose          [2]string
			onClient, onServ error // wanted errors at client and server; io.EOF means any error
		}{
			{"the same", one, one, [2]string{"store", "store"}, nil, nil},
			{"no secrets", none, none, [2]string{"store", "store"}, nil, nil},
			{"another", one, other, [2]string{"store", "store"}, secret.ErrWrong, io.EOF},
			{"another protocol", one, one, [2]string{"store", "data"}, secret.ErrWrong, io.EOF},
			{"parts run together", one, one, [2]string{"store", "stor"}, secret.ErrWrong, io.EOF},
		} {
			c, s := meet(t,
				func(conn net.Conn) error { return dial(of(test.client), conn, test.purpose[0]) },
				func(conn net.Conn) error { return accept(of(test.server), conn, test.purpose[1]) })
			for i, got := range []error{c, s} {
				want := []error{test.onClient, test.onServ}[i]
				if want == nil && got != nil || want != nil && got == nil || want != nil && want != io.EOF &&
					!errors.Is(got, want) {
					t.Errorf("%s, %s: end %d got %v, want %v", kind, test.name, i, got, want)
				}
			}
		}
	}
}

// The bytes that are sent after the proof arrive unchanged.
func TestWhatFollows(t *testing.T) {
	for kind, of := range kinds {
		s, text := secret.New()
		c, e := meet(t, func(conn net.Conn) error {
			over, err := of(s).Dial(conn, "p")
			if err != nil {
				return err
			}
			_, err = io.WriteString(over, "and then")
			return err
		}, func(conn net.Conn) error {
			over, err := of(parse(t, text)).Accept(conn, "p")
			if err != nil {
				return err
			}
			b, err := io.ReadAll(over)
			if string(b) != "and then" {
				return fmt.Errorf("got %q", b)
			}
			return err
		})
		if c != nil || e != nil {
			t.Error(kind, c, e)
		}
	}
}

// If only the server has a secret, the client gets ErrNeeded. If only the client has a secret, the server
// gets ErrNeeded.
func TestOneHasNone(t *testing.T) {
	s, _ := secret.New()
	var none secret.Secret
	for kind, of := range kinds {
		c, e := meet(t, func(conn net.Conn) error {
			if err := dial(none, conn, "p"); err != nil {
				return err
			}
			if _, err := io.WriteString(conn, "GHVS\x00\x00\x00\x01"); err != nil {
				return err
			}
			var b [8]byte
			if _, err := io.ReadFull(conn, b[:]); err != nil {
				return err
			}
			return secret.Foreign(b[:])
		}, func(conn net.Conn) error { return accept(of(s), conn, "p") })
		if !errors.Is(c, secret.ErrNeeded) || !errors.Is(e, secret.ErrNone) {
			t.Errorf("%s, a client without: got %v and %v", kind, c, e)
		}
		c, e = meet(t, func(conn net.Conn) error { return dial(of(s), conn, "p") },
			func(conn net.Conn) error {
				if err := accept(none, conn, "p"); err != nil {
					return err
				}
				var b [8]byte
				if _, err := io.ReadFull(conn, b[:]); err != nil {
					return err
				}
				return secret.Foreign(b[:])
			})
		if c == nil || !errors.Is(e, secret.ErrNeeded) {
			t.Errorf("%s, a server without: got %v and %v, want ErrNeeded at the server", kind, c, e)
		}
	}
}

// If a client has sent other bytes instead of a proof, and then reads the server's answer as part of a proof,
// the client gets ErrNeeded.
func TestNeeded(t *testing.T) {
	s, _ := secret.New()
	c, e := meet(t, func(conn net.Conn) error {
		if _, err := io.WriteString(conn, "GHVS\x00\x00\x00\x01"); err != nil {
			return err
		}
		return dial(s, readFirst{conn}, "p")
	}, func(conn net.Conn) error { return accept(s, conn, "p") })
	if !errors.Is(c, secret.ErrNeeded) || !errors.Is(e, secret.ErrNone) {
		t.Errorf("got %v and %v", c, e)
	}
}

// readFirst is a connection that discards all bytes that are written to it. A client that uses it reads the
// server's answer without having sent a proof.
type readFirst struct{ net.Conn }

func (readFirst) Write(b []byte) (int, error) { return len(b), nil }

// recorded is a connection that plays back the bytes that one end of another connection has sent.
type recorded struct {
	net.Conn // always nil
	in       io.Reader
	out      bytes.Buffer
}

func (r *recorded) Read(b []byte) (int, error)  { return r.in.Read(b) }
func (r *recorded) Write(b []byte) (int, error) { return r.out.Write(b) }

// tap is a connection that records all bytes that arrive over it.
type tap struct {
	net.Conn
	heard *bytes.Buffer
}

func (t tap) Read(b []byte) (int, error) {
	n, err := t.Conn.Read(b)
	t.heard.Write(b[:n])
	return n, err
}

// If a recorded proof of a client or a server is sent again, the other end refuses it. If a client's own
// messages are sent back to it, the client refuses them.
func TestReplay(t *testing.T) {
	s, _ := secret.New()
	var fromServer, fromClient bytes.Buffer
	c, e := meet(t, func(conn net.Conn) error { return dial(s, tap{conn, &fromServer}, "p") },
		func(conn net.Conn) error { return accept(s, tap{conn, &fromClient}, "p") })
	if c != nil || e != nil {
		t.Fatal(c, e)
	}
	if err := accept(s, &recorded{in: bytes.NewReader(fromClient.Bytes())}, "p"); !errors.Is(err,
		secret.ErrWrong) {
		t.Errorf("a client's words again: got %v", err)
	}
	if err := dial(s, &recorded{in: bytes.NewReader(fromServer.Bytes())}, "p"); !errors.Is(err,
		secret.ErrWrong) {
		t.Errorf("a server's words again: got %v", err)
	}
	c, _ = meet(t, func(conn net.Conn) error { return dial(s, conn, "p") }, func(conn net.Conn) error {
		var hello [40]byte
		if _, err := io.ReadFull(conn, hello[:]); err != nil {
			return err
		}
		// Send the client's own nonce back to it, with a proof that consists of zeros.
		_, err := conn.Write(append(hello[:], make([]byte, 32)...))
		return err
	})
	if !errors.Is(c, secret.ErrWrong) {
		t.Errorf("its own words back: got %v", c)
	}
}

// If a client without the secret sends the server's proof back as its own, the server refuses it.
func TestEcho(t *testing.T) {
	s, _ := secret.New()
	_, e := meet(t, func(conn net.Conn) error {
		if _, err := io.WriteString(conn, secret.Magic+"\x01\x00\x00\x00"+
			strings.Repeat("n", 32)); err != nil {
			return err
		}
		var answer [8 + 32 + 32]byte
		if _, err := io.ReadFull(conn, answer[:]); err != nil {
			return err
		}
		_, err := conn.Write(answer[40:])
		return err
	}, func(conn net.Conn) error { return accept(s, conn, "p") })
	if !errors.Is(e, secret.ErrWrong) {
		t.Errorf("got %v, want that the proof is wrong", e)
	}
}

func TestParse(t *testing.T) {
	for _, bad := range []string{"", "short", strings.Repeat("x", 15), strings.Repeat("x", 4097), "   \n" +
		strings.Repeat("x", 15) + "\n"} {
		if _, err := secret.Parse(bad); err == nil ||
			bad != "" && strings.Contains(err.Error(), strings.TrimSpace(bad)) {
			t.Errorf("%d bytes: got %v", len(bad), err)
		}
	}
	s := parse(t, "this is what nobody may see")
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%x", "%q", "%d"} {
		if text := fmt.Sprintf(format, struct{ S secret.Secret }{s}); strings.Contains(text, "nobody") ||
			len(text) > 60 {
			t.Errorf("%s prints %s", format, text)
		}
	}
	if s.IsZero() || !(secret.Secret{}).IsZero() {
		t.Error("which is none?")
	}
}

func FuzzAccept(f *testing.F) {
	s, _ := secret.New()
	f.Add([]byte(secret.Magic + "\x01\x00\x00\x00" + strings.Repeat("n", 64)))
	f.Add([]byte("GHVS\x00\x00\x00\x01"))
	f.Add([]byte("\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03"))
	encrypted := s.Encrypted()
	f.Fuzz(func(t *testing.T, in []byte) {
		for kind, s := range map[string]secret.Secret{"plain": s, "TLS": encrypted} {
			if err := accept(s, &recorded{in: bytes.NewReader(in)}, "p"); err == nil {
				t.Fatal(kind, "proven by nobody")
			}
			if err := dial(s, &recorded{in: bytes.NewReader(in)}, "p"); err == nil {
				t.Fatal(kind, "proven by nobody")
			}
		}
	})
}
