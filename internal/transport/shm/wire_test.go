package shm

import (
	"bytes"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/topo"
)

func TestOffer(t *testing.T) {
	good := Offer{Token: make([]byte, tokenBytes), Socket: "/tmp/x"}
	if err := good.check(); err != nil {
		t.Error(err)
	}
	long := Unavailable(errors.New(strings.Repeat("é", 10_000))).Offer()
	if err := long.check(); err == nil || !utf8.ValidString(err.Error()) ||
		len(err.Error()) > maxReasonBytes {
		t.Errorf("a long reason: got %v", err)
	}
	for name, spoil := range map[string]func(*Offer){
		"none":          func(o *Offer) { *o = Offer{} },
		"short token":   func(o *Offer) { o.Token = o.Token[1:] },
		"relative path": func(o *Offer) { o.Socket = "x" },
		"abstract name": func(o *Offer) { o.Socket = "@x" },
		"path too long": func(o *Offer) { o.Socket = "/" + strings.Repeat("x", maxPathBytes) },
	} {
		bad := good
		spoil(&bad)
		if bad.check() == nil {
			t.Errorf("%s: got no error for %v, want one", name, bad)
		}
	}
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

func FuzzPacket(f *testing.F) {
	f.Add(encodePacket([]message{{kind: shareMessage, id: 3, size: 4096, to: rankSet{1, 2}}}), 1)
	f.Add(encodePacket([]message{{kind: goneMessage, id: 1, from: 9}, {kind: arenaMessage, id: 1}}), 1)
	f.Fuzz(func(t *testing.T, b []byte, fds int) {
		messages, err := decodePacket(b, make([]int, max(0, min(fds, 10))), 10)
		if err != nil {
			return
		}
		used := 0
		for _, m := range messages {
			if used += len(m.files); len(m.files) != numFDs[m.kind] {
				t.Errorf("got %d descriptors in a message of kind %d", len(m.files), m.kind)
			}
		}
		if again := encodePacket(messages); !bytes.Equal(again, b) || used != fds {
			t.Errorf("got %x with %d descriptors, want %x with %d", again, used, b, fds)
		}
	})
}

// TestHandshake checks that a handshake fails if one side does not know the token of the other side, or if
// the sides belong to different epochs or jobs. Each case says which of the two sides must get an error.
func TestHandshake(t *testing.T) {
	good := [2]Offer{{Token: make([]byte, tokenBytes)}, {Token: append(make([]byte, tokenBytes-1), 1)}}
	wrong := Offer{Token: append(make([]byte, tokenBytes-1), 3)}
	here := Epoch{Job: "job", Epoch: 3}
	for name, c := range map[string]struct {
		dialer, acceptor Epoch
		rank             topo.Rank // the rank that the dialer claims to be
		ofAcceptor       Offer     // the acceptor's offer as the dialer knows it
		ofDialer         Offer     // the dialer's offer as the acceptor knows it
		// dials and accepts are the errors that the sides must get. nil means no error, and errAny means any
		// error.
		dials, accepts error
	}{
		"good":                   {here, here, 0, good[1], good[0], nil, nil},
		"dialer without token":   {here, here, 0, wrong, good[0], secret.ErrWrong, errAny},
		"acceptor without token": {here, here, 0, good[1], wrong, secret.ErrWrong, errAny},
		"other epoch":            {Epoch{Job: "job", Epoch: 4}, here, 0, good[1], good[0], errAny, errAny},
		"other job":              {Epoch{Job: "other", Epoch: 3}, here, 0, good[1], good[0], errAny, errAny},
		"other rank":             {here, here, 2, good[1], good[0], errAny, errAny},
	} {
		t.Run(name, func(t *testing.T) {
			ln, err := net.ListenUnix(network, &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"),
				Net: network})
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
				ep.Offers = []Offer{c.ofDialer, {}, {}}
				accepted <- acceptHandshake(uc, &ep, &good[1], 0)
			}()
			uc, err := net.DialUnix(network, nil, ln.Addr().(*net.UnixAddr))
			if err != nil {
				t.Fatal(err)
			}
			ep := c.dialer
			ep.Rank = c.rank
			ep.Offers = []Offer{{}, c.ofAcceptor}
			err = dialHandshake(uc, &ep, &good[0], 1)
			if closing := uc.Close(); closing != nil {
				t.Error(closing)
			}
			for side, e := range map[string][2]error{"dialer": {err, c.dials},
				"acceptor": {<-accepted, c.accepts}} {
				if got, want := e[0], e[1]; want == errAny && got == nil || want != errAny &&
					!errors.Is(got, want) {
					t.Errorf("%s: got %v, want %v", side, got, want)
				}
			}
		})
	}
}

// TestInFlight lets the kernel refuse a message, because the user has too many descriptors in flight. The
// message must be sent again until the kernel takes it, or until the mesh is closed, and there must be one
// warning if that takes long. The kernel is replaced, because other programs of the user count too.
func TestInFlight(t *testing.T) {
	for name, c := range map[string]struct {
		refused  time.Duration
		closes   bool
		want     error
		warnings int
	}{
		"at once":         {refused: 0},
		"soon":            {refused: inFlightWarning / 2},
		"late":            {refused: 3 * inFlightWarning, warnings: 1},
		"until it closes": {refused: time.Hour, closes: true, want: unix.ETOOMANYREFS, warnings: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				core, logged := observer.New(zap.WarnLevel)
				m := &Mesh{log: zap.New(core), closing: make(chan struct{})}
				if c.closes {
					time.AfterFunc(time.Minute, func() { close(m.closing) })
				}
				start := time.Now()
				err := m.retry(3, func() error {
					if time.Since(start) < c.refused {
						return os.NewSyscallError("sendmsg", unix.ETOOMANYREFS)
					}
					return nil
				})
				if !errors.Is(err, c.want) {
					t.Errorf("got error %v, want %v", err, c.want)
				}
				entries := logged.All()
				if len(entries) != c.warnings {
					t.Errorf("got %d warnings, want %d", len(entries), c.warnings)
				}
				for _, e := range entries {
					if !strings.HasPrefix(e.Message, "shm: cannot send descriptors to rank 3 for 1s") {
						t.Errorf("got warning %q", e.Message)
					}
				}
			})
		})
	}
}

var errAny = errors.New("some error")
