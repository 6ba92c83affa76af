package tcp

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/transport"
)

func sampleHello() hello {
	return hello{version: version, job: hashJob("test"), epoch: 0x0102030405060708, from: 3, to: 0x11223344,
		lane: 0xfffffffe}
}

// TestHelloBytes checks the encoding of a hello against fixed bytes. The encoding must not change: it is part
// of the protocol, and other versions must be able to read the first eight bytes.
func TestHelloBytes(t *testing.T) {
	want := "67687664" + "00000001" + "9f86d081884c7d659a2feaa0c55ad015" + "0102030405060708" + "00000003" +
		"11223344" + "fffffffe"
	if got := hex.EncodeToString(sampleHello().encode()); got != want {
		t.Errorf("hello: got %s, want %s", got, want)
	}
	if got, want := hex.EncodeToString(encodeAnswer(StaleEpoch)), "67687664"+"00000003"; got != want {
		t.Errorf("answer: got %s, want %s", got, want)
	}
}

func TestReadAnswer(t *testing.T) {
	for r := range numRefusals + 2 {
		err := readAnswer(bytes.NewReader(encodeAnswer(r)))
		if r == accepted && err != nil || r != accepted && !errors.Is(err, r) {
			t.Errorf("status %d: got error %v", r, err)
		}
		if r.Error() == "" {
			t.Errorf("status %d has no text", r)
		}
	}
	if err := readAnswer(bytes.NewReader([]byte("HTTP/1.1 400 Bad Request"))); !errors.Is(err, errNotOurs) {
		t.Errorf("got error %v, want %v", err, errNotOurs)
	}
	for n := range answerSize {
		if err := readAnswer(bytes.NewReader(encodeAnswer(accepted)[:n])); !errors.Is(err, io.EOF) &&
			!errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%d bytes: got error %v, want an end of file", n, err)
		}
	}
}

func FuzzReadHello(f *testing.F) {
	f.Add(sampleHello().encode())
	f.Add(append(sampleHello().encode(), "data"...))
	f.Add(hello{}.encode())
	f.Add(hello{from: -1, to: -1}.encode()[:helloSize-1])
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		h, err := readHello(r)
		used := len(b) - r.Len()
		ours := len(b) >= 4 && bytes.Equal(b[:4], sampleHello().encode()[:4])
		switch {
		case ours && len(b) >= helloSize:
			if err != nil {
				t.Fatal(err)
			}
			if used != helloSize {
				t.Fatalf("read %d bytes, want %d", used, helloSize)
			}
			if got := h.encode(); !bytes.Equal(got, b[:helloSize]) {
				t.Fatalf("encoded again: got %x, want %x", got, b[:helloSize])
			}
		case err == nil:
			t.Fatalf("%x is a hello", b)
		case !ours && used > 4:
			t.Fatalf("read %d bytes of an unauthenticated peer, want at most 4", used)
		}
	})
}

// TestSecret checks that ranks prove to each other that they know the secret of their job before they send a
// hello. If they do not have the same secret, the dialer must get an error.
func TestSecret(t *testing.T) {
	key, _ := secret.New()
	other, _ := secret.New()
	for _, test := range []struct {
		name      string
		zero, one secret.Secret
		// want is the expected error of the dialer, rank 0. nil means no error, and io.EOF means any error.
		want error
	}{
		{"the same", key, key, nil},
		{"another", key, other, secret.ErrWrong},
		{"none at the dialer", secret.Secret{}, key, secret.ErrNeeded},
		{"none at the other", key, secret.Secret{}, io.EOF},
		{"the same with TLS", key.Encrypted(), key.Encrypted(), nil},
		{"another with TLS", key.Encrypted(), other.Encrypted(), secret.ErrWrong},
		{"none at the dialer, TLS", secret.Secret{}, key.Encrypted(), secret.ErrNeeded},
		{"none at the other, TLS", key.Encrypted(), secret.Secret{}, io.EOF},
		{"TLS at the dialer", key.Encrypted(), key, secret.ErrMixed},
		{"TLS at the other", key, key.Encrypted(), secret.ErrMixed},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), hangTimeout)
			defer cancel()
			meshes := func(timeout time.Duration) (zero, one *Mesh) {
				a := listen(t, Config{Secret: test.zero, DialTimeout: timeout})
				b := listen(t, Config{Secret: test.one})
				return join(t, a, Epoch{Rank: 0, Addrs: addrsOf(a, b)}),
					join(t, b, Epoch{Rank: 1, Addrs: addrsOf(a, b)})
			}
			if test.want == nil {
				zero, one := meshes(hangTimeout)
				pair(t, zero, one, transport.Control)
				return
			}
			// The dialer retries until its timeout ends, because at first another process may have used the
			// port.
			patiently(t, 2*time.Second, func(timeout time.Duration) error {
				zero, _ := meshes(timeout)
				_, err := zero.Conn(ctx, transport.Control, 1)
				if err == nil {
					t.Errorf("got a connection, want %v", test.want)
				} else if test.want != io.EOF && !errors.Is(err, test.want) {
					return fmt.Errorf("got %w, want %v", err, test.want)
				}
				return nil
			})
		})
	}
}

func FuzzReadAnswer(f *testing.F) {
	for r := accepted; r <= numRefusals; r++ {
		f.Add(encodeAnswer(r))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		err := readAnswer(bytes.NewReader(b))
		if r := accepted; err == nil && !bytes.HasPrefix(b, encodeAnswer(r)) {
			t.Errorf("%x accepts", b)
		} else if errors.As(err, &r) && !bytes.HasPrefix(b, encodeAnswer(r)) {
			t.Errorf("%x was read as %v", b, r)
		}
	})
}
