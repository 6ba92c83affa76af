package shm

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/secret"
	"github.com/gohvd/gohvd/topo"
)

func TestCard(t *testing.T) {
	token := [tokenBytes]byte{1, 2, 31: 9}
	for _, c := range []card{
		{uid: 7, pid: 8, token: token, path: "/tmp/x"},
		{uid: 1<<32 - 1, path: "/" + strings.Repeat("x", maxPathBytes-1)},
		{uid: 7, token: token, reason: "no socket"},
	} {
		got, err := decodeCard(c.encode())
		if err != nil || *got != c {
			t.Errorf("got %+v, %v, want %+v", got, err, c)
		}
	}
	long := card{reason: strings.Repeat("x", 10_000)}
	b := long.encode()
	if got, err := decodeCard(b); err != nil || len(b) != MaxCardBytes || !strings.HasPrefix(long.reason, got.reason) {
		t.Errorf("a long reason: got %d bytes, %v, want %d", len(b), err, MaxCardBytes)
	}
	good := (&card{path: "/tmp/x"}).encode()
	for name, spoil := range map[string]func(b []byte) []byte{
		"empty":         func([]byte) []byte { return nil },
		"cut":           func(b []byte) []byte { return b[:len(b)-1] },
		"longer":        func(b []byte) []byte { return append(b, 'x') },
		"version":       func(b []byte) []byte { b[0]++; return b },
		"kind":          func(b []byte) []byte { b[1] = 2; return b },
		"no text":       func(b []byte) []byte { return append(b[:cardHeadBytes-2], 0, 0) },
		"relative":      func(b []byte) []byte { b[cardHeadBytes] = 'x'; return b },
		"abstract":      func(b []byte) []byte { b[cardHeadBytes] = '@'; return b },
		"path too long": func([]byte) []byte { return (&card{path: "/" + strings.Repeat("x", maxPathBytes)}).encode() },
	} {
		if c, err := decodeCard(spoil(bytes.Clone(good))); err == nil {
			t.Errorf("%s: got %+v", name, c)
		}
	}
}

func FuzzCard(f *testing.F) {
	f.Add((&card{uid: 7, pid: 8, path: "/tmp/x"}).encode())
	f.Add((&card{reason: "no socket"}).encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := decodeCard(b)
		if err != nil {
			return
		}
		if again := c.encode(); !bytes.Equal(again, b) {
			t.Errorf("got %x, want %x", again, b)
		}
	})
}

func FuzzHello(f *testing.F) {
	f.Add(encodeHello(1))
	f.Fuzz(func(t *testing.T, b []byte) {
		from, err := decodeHello(b)
		if err != nil {
			return
		}
		if again := encodeHello(from); !bytes.Equal(again, b) {
			t.Errorf("got %x, want %x", again, b)
		}
	})
}

func FuzzMessage(f *testing.F) {
	f.Add((&message{kind: shareMessage, id: 3, size: 4096}).encode(), 1)
	f.Fuzz(func(t *testing.T, b []byte, fds int) {
		m, err := decodeMessage(b, make([]int, max(0, min(fds, 10))))
		if err != nil {
			return
		}
		if again := m.encode(); !bytes.Equal(again, b) || len(m.fds) != numFDs[m.kind] {
			t.Errorf("got %x with %d descriptors, want %x with %d", again, len(m.fds), b, fds)
		}
	})
}

// Each side finds out by itself that the other does not know its token, or is of another epoch or job.
func TestHandshake(t *testing.T) {
	good := [2]card{{token: [tokenBytes]byte{1}}, {token: [tokenBytes]byte{2}}}
	wrong := card{token: [tokenBytes]byte{3}}
	here := Epoch{Job: "job", Epoch: 3}
	for name, c := range map[string]struct {
		dialer, acceptor Epoch
		rank             topo.Rank // of the dialer
		ofAcceptor       card      // that the dialer has
		ofDialer         card      // that the acceptor has
		dials, accepts   error     // nil is none, errAny is some
	}{
		"good":                   {here, here, 0, good[1], good[0], nil, nil},
		"dialer without token":   {here, here, 0, wrong, good[0], secret.ErrWrong, errAny},
		"acceptor without token": {here, here, 0, good[1], wrong, secret.ErrWrong, errAny},
		"other epoch":            {Epoch{Job: "job", Epoch: 4}, here, 0, good[1], good[0], errAny, errAny},
		"other job":              {Epoch{Job: "other", Epoch: 3}, here, 0, good[1], good[0], errAny, errAny},
		"other rank":             {here, here, 2, good[1], good[0], errAny, errAny},
	} {
		t.Run(name, func(t *testing.T) {
			ln, err := net.ListenUnix(network, &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: network})
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			accepted := make(chan error, 1)
			go func() {
				uc, err := ln.AcceptUnix()
				if err != nil {
					accepted <- err
					return
				}
				defer uc.Close()
				ep := c.acceptor
				ep.Rank = 1
				from, err := welcome(uc, &ep, &good[1], []*card{&c.ofDialer, nil, nil})
				if err == nil && from != c.rank {
					err = fmt.Errorf("welcomed rank %d", from)
				}
				accepted <- err
			}()
			uc, err := net.DialUnix(network, nil, ln.Addr().(*net.UnixAddr))
			if err != nil {
				t.Fatal(err)
			}
			ep := c.dialer
			ep.Rank = c.rank
			err = greet(uc, &ep, &good[0], &c.ofAcceptor, 1)
			if closing := uc.Close(); closing != nil {
				t.Error(closing)
			}
			for side, e := range map[string][2]error{"dialer": {err, c.dials}, "acceptor": {<-accepted, c.accepts}} {
				if got, want := e[0], e[1]; want == errAny && got == nil || want != errAny && !errors.Is(got, want) {
					t.Errorf("%s: got %v, want %v", side, got, want)
				}
			}
		})
	}
}

var errAny = errors.New("some error")
