package mem_test

import (
	"errors"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/internal/transport/transporttest"
)

const latency = 10 * time.Millisecond

// TestContractWithLatency checks that a cluster with latency obeys the contract of package transport. The
// test runs in real time, because some tests of the contract poll Sent without blocking. The clock of a
// synctest bubble does not advance while a goroutine polls.
func TestContractWithLatency(t *testing.T) {
	transporttest.Run(t, func(_ testing.TB, size int) []transport.Mesh {
		return meshesOf(mem.NewWithLatency(size, 100*time.Microsecond), size)
	})
}

// stopwatch measures the time since newStopwatch was called. It is used in a synctest bubble.
type stopwatch struct {
	t     *testing.T
	began time.Time
}

func newStopwatch(t *testing.T) *stopwatch { return &stopwatch{t, time.Now()} }

// at fails the test unless exactly the time d has passed since newStopwatch.
func (w *stopwatch) at(what string, d time.Duration) {
	w.t.Helper()
	if got := time.Since(w.began); got != d {
		w.t.Errorf("%s: at %v, want %v", what, got, d)
	}
}

// wait sleeps until the time d has passed since newStopwatch.
func (w *stopwatch) wait(d time.Duration) { time.Sleep(d - time.Since(w.began)) }

// wantRead fails the test unless one call of c.Read returns want.
func wantRead(t *testing.T, c transport.Conn, want string) {
	t.Helper()
	got := make([]byte, 100)
	n, err := c.Read(got)
	if err != nil || string(got[:n]) != want {
		t.Errorf("got %q, %v, want %q", got[:n], err, want)
	}
}

func mustSend(t *testing.T, c transport.Conn, text string) {
	t.Helper()
	if err := c.Send([]byte(text)); err != nil {
		t.Error(err)
	}
}

// TestLatency checks that each byte arrives exactly one latency after it was sent, however many bytes are in
// flight. Sent must count a byte when the receiver has read it.
func TestLatency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := mem.NewWithLatency(2, latency)
		a, b := conn(t, c, 0, 1), conn(t, c, 1, 0)
		w := newStopwatch(t)
		var wg sync.WaitGroup
		defer wg.Wait()
		wg.Go(func() {
			mustSend(t, a, "a")
			mustSend(t, a, "b")
			w.wait(3 * time.Millisecond)
			mustSend(t, a, "c")
			w.wait(12 * time.Millisecond)
			mustSend(t, a, "d")
			w.wait(14 * time.Millisecond)
			mustSend(t, a, "e")
			w.at("send", 14*time.Millisecond)
			if got := a.Sent(); got != 3 {
				t.Errorf("sent: got %d, want the 3 bytes that were read", got)
			}
			if err := a.Flush(); err != nil {
				t.Error(err)
			}
			w.at("flush", 30*time.Millisecond)
		})
		wantRead(t, b, "ab")
		w.at("a and b", latency)
		wantRead(t, b, "c")
		w.at("c", latency+3*time.Millisecond)
		w.wait(30 * time.Millisecond)
		wantRead(t, b, "de")
		w.at("d and e", 30*time.Millisecond)
	})
}

// TestLinksAreIndependent checks that lanes, pairs of ranks and directions are separate links. Bytes that are
// in flight or unread on one link must not delay bytes on another link.
func TestLinksAreIndependent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := mem.NewWithLatency(3, latency)
		type link struct {
			lane     transport.Lane
			from, to topo.Rank
		}
		links := []link{{1, 0, 1}, {2, 0, 1}, {1, 1, 0}, {1, 0, 2}, {1, 2, 1}}
		ends := make([][2]transport.Conn, len(links))
		connect := func(l link) [2]transport.Conn {
			var ends [2]transport.Conn
			var errs [2]error
			var wg sync.WaitGroup
			wg.Go(func() { ends[0], errs[0] = c.Mesh(l.from).Conn(t.Context(), l.lane, l.to) })
			wg.Go(func() { ends[1], errs[1] = c.Mesh(l.to).Conn(t.Context(), l.lane, l.from) })
			wg.Wait()
			if err := errors.Join(errs[:]...); err != nil {
				t.Fatal(err)
			}
			return ends
		}
		for i, l := range links {
			ends[i] = connect(l)
		}
		w := newStopwatch(t)
		// The bytes on each link are sent 1 ms after the bytes on the previous link. The bytes on links[0]
		// are never read.
		for i := range links {
			mustSend(t, ends[i][0], string(make([]byte, 1<<20)))
			time.Sleep(time.Millisecond)
		}
		var wg sync.WaitGroup
		for i, l := range links[1:] {
			wg.Go(func() {
				if _, err := io.ReadFull(ends[i+1][1], make([]byte, 1<<20)); err != nil {
					t.Error(err)
				}
				if got, want := time.Since(w.began), latency+time.Duration(
					i+1)*time.Millisecond; got != want {
					t.Errorf("%+v: at %v, want %v", l, got, want)
				}
			})
		}
		wg.Wait()
	})
}

// TestKillWithLatency kills a rank. Its peers must notice when the last bytes of the rank have arrived. Ranks
// that wait for it in Conn must notice at once, and its own calls must fail at once.
func TestKillWithLatency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := mem.NewWithLatency(3, latency)
		up, down := conn(t, c, 0, 1), conn(t, c, 1, 0)
		w := newStopwatch(t)
		mustSend(t, up, "last words")
		mustSend(t, down, "never read")
		w.wait(4 * time.Millisecond)
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := c.Mesh(2).Conn(t.Context(), 1, 0)
			wantPeer(t, "conn", err, 0)
			w.at("conn", 4*time.Millisecond)
		})
		wg.Go(func() {
			if _, err := up.Read(make([]byte, 1)); !errors.Is(err, transport.ErrClosed) {
				t.Errorf("read of the dead: got error %v, want %v", err, transport.ErrClosed)
			}
			w.at("read of the dead", 4*time.Millisecond)
		})
		wg.Go(func() {
			wantPeer(t, "flush", down.Flush(), 0)
			w.at("flush", latency+4*time.Millisecond)
			wantPeer(t, "send", down.Send([]byte("x")), 0)
		})
		wg.Go(func() {
			wantRead(t, down, "last words")
			w.at("last words", latency)
			_, err := down.Read(make([]byte, 1))
			wantPeer(t, "read", err, 0)
			w.at("read", latency+4*time.Millisecond)
		})
		synctest.Wait()
		c.Kill(0)
		mustSend(t, down, "not known yet")
		wg.Wait()
	})
}

// TestAbortWithLatency checks that Abort makes the rank's own calls fail at once, and that the bytes that the
// rank had sent still arrive.
func TestAbortWithLatency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := mem.NewWithLatency(2, latency)
		a, b := conn(t, c, 0, 1), conn(t, c, 1, 0)
		w := newStopwatch(t)
		buf := []byte("last words")
		if err := a.Send(buf); err != nil {
			t.Fatal(err)
		}
		errBoom := errors.New("boom")
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := a.Read(make([]byte, 1)); err != errBoom {
				t.Errorf("read: got error %v, want %v", err, errBoom)
			}
			w.at("read", 0)
		})
		wg.Go(func() {
			if err := a.Flush(); err != errBoom {
				t.Errorf("flush: got error %v, want %v", err, errBoom)
			}
			w.at("flush", 0)
			copy(buf, "overwritten")
		})
		synctest.Wait()
		c.Mesh(0).Abort(1, errBoom)
		wg.Wait()
		wantRead(t, b, "last words")
		w.at("last words", latency)
		wg.Go(func() {
			if _, err := b.Read(make([]byte, 1)); err != errBoom {
				t.Errorf("read of the peer: got error %v, want its own %v", err, errBoom)
			}
			w.at("read of the peer", time.Hour)
		})
		w.wait(time.Hour)
		c.Mesh(1).Abort(1, errBoom)
		wg.Wait()
	})
}

// TestReleaseWithLatency lets a rank release a lane. Its peer must first receive the bytes that were sent on
// the lane, and then learn of the release.
func TestReleaseWithLatency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := mem.NewWithLatency(2, latency)
		a, b := conn(t, c, 0, 1), conn(t, c, 1, 0)
		w := newStopwatch(t)
		mustSend(t, a, "last words")
		mustSend(t, b, "drop")
		w.wait(4 * time.Millisecond)
		c.Mesh(0).Release(1)
		mustSend(t, b, "ped")
		if err := b.Flush(); err != nil || b.Sent() != uint64(len("dropped")) {
			t.Errorf("flush to a rank that released: got error %v and %d bytes sent, want all", err, b.Sent())
		}
		w.at("flush", 4*time.Millisecond)
		wantRead(t, b, "last words")
		w.at("last words", latency)
		w.wait(12 * time.Millisecond)
		c.Kill(0) // this must not delay the end of the stream
		_, err := b.Read(make([]byte, 1))
		wantPeer(t, "read", err, 0)
		w.at("read", latency+4*time.Millisecond)
	})
}
