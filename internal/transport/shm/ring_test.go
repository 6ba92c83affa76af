package shm_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/shm"
)

// controls returns both ends of the Control channel between ranks 0 and 1. zero is the end at rank 0, and one
// is the end at rank 1.
func controls(tb testing.TB, meshes []shm.Sharer) (zero, one transport.Conn) {
	tb.Helper()
	a, err := meshes[0].Conn(tb.Context(), transport.Control, 1)
	if err != nil {
		tb.Fatal(err)
	}
	b, err := meshes[1].Conn(tb.Context(), transport.Control, 0)
	if err != nil {
		tb.Fatal(err)
	}
	return a, b
}

// poll calls TryRead until it has filled p.
func poll(c transport.Conn, p []byte) error {
	for len(p) > 0 {
		n, err := c.TryRead(p)
		if err != nil {
			return err
		}
		if n == 0 {
			runtime.Gosched()
		}
		p = p[n:]
	}
	return nil
}

func bytesOf(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 0))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// TestRing sends pieces of many sizes around the size of the ring. They must arrive unchanged, with TryRead
// and with Read, whether the sender is faster or slower than the receiver.
func TestRing(t *testing.T) {
	for _, ringBytes := range []int{64, 256} {
		meshes := onOneHost(t, shm.Config{RingBytes: ringBytes}, 2)
		zero, one := controls(t, meshes)
		data := bytesOf(1, 60_000)
		for mode := range 4 {
			var wg sync.WaitGroup
			wg.Go(func() {
				r := rand.New(rand.NewPCG(uint64(mode), 2))
				for rest := data; len(rest) > 0; {
					n := min(r.IntN(3*ringBytes), len(rest))
					if err := zero.Send(rest[:n]); err != nil {
						t.Error(err)
						return
					}
					if mode&1 != 0 {
						if err := zero.Flush(); err != nil {
							t.Error(err)
							return
						}
					}
					rest = rest[n:]
				}
			})
			r := rand.New(rand.NewPCG(uint64(mode), 3))
			var got []byte
			for len(got) < len(data) {
				p := make([]byte, 1+r.IntN(2*ringBytes))
				n, err := one.TryRead(p)
				if mode&2 != 0 && n == 0 && err == nil {
					n, err = one.Read(p)
				}
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, p[:n]...)
				if n == 0 {
					runtime.Gosched()
				}
			}
			wg.Wait()
			if err := zero.Flush(); err != nil {
				t.Error(err)
			}
			if !bytes.Equal(got, data) {
				t.Errorf("ring of %d bytes, mode %d: wrong bytes", ringBytes, mode)
			}
			if want := uint64((mode + 1) * len(data)); zero.Sent() != want {
				t.Errorf("sent: got %d, want %d", zero.Sent(), want)
			}
		}
	}
}

// TestPark checks that a parked rank is notified if bytes arrive, and that a rank that is not parked is not
// notified. If there are unread bytes, Park must return false.
func TestPark(t *testing.T) {
	meshes := onOneHost(t, shm.Config{}, 3)
	zero, one := controls(t, meshes)
	polls := meshes[1]
	notified := make(chan struct{}, 100)
	polls.OnNotify(func() { notified <- struct{}{} })

	if err := zero.Send([]byte("a")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 10)
	if polls.Park() {
		t.Error("parked though bytes have arrived")
	}
	if n, at := shm.Inner(meshes[1]).Sleepers(); n != 0 || at {
		t.Errorf("after Park returned false: %d sleepers, seen by peers: %v", n, at)
	}
	if err := poll(one, got[:1]); err != nil {
		t.Fatal(err)
	}
	if n, err := one.TryRead(got); n != 0 || err != nil {
		t.Errorf("nothing has come: got %d, %v", n, err)
	}
	for range 2 { // the second call of Park must have no effect
		if !polls.Park() {
			t.Error("cannot park though nothing has arrived")
		}
	}
	if n, at := shm.Inner(meshes[1]).Sleepers(); n != 1 || !at {
		t.Errorf("parked: %d sleepers, seen by peers: %v", n, at)
	}
	if err := zero.Send([]byte("b")); err != nil {
		t.Fatal(err)
	}
	<-notified
	if err := poll(one, got[:1]); err != nil || got[0] != 'b' {
		t.Fatalf("got %q, %v", got[:1], err)
	}
	polls.Unpark()
	polls.Unpark()
	if n, at := shm.Inner(meshes[1]).Sleepers(); n != 0 || at {
		t.Errorf("awake: %d sleepers, seen by peers: %v", n, at)
	}
	for len(notified) > 0 {
		<-notified
	}
	if err := zero.Send([]byte("c")); err != nil {
		t.Fatal(err)
	}
	if err := poll(one, got[:1]); err != nil {
		t.Fatal(err)
	}
	if len(notified) > 0 {
		t.Error("notified though no goroutine is parked")
	}

	// A failed channel does not prevent parking if Mesh.Conn has never returned it, or if a read has already
	// returned the error.
	if !polls.Park() {
		t.Error("cannot park")
	}
	if err := meshes[2].Close(); err != nil {
		t.Fatal(err)
	}
	<-notified // wait for one notification; more may follow
	within(t, "the death is not noticed", func() bool { return meshes[1].Err(1, 2) != nil })
	polls.Unpark()
	if !polls.Park() {
		t.Error("cannot park because of a channel that is not used")
	}
	for len(notified) > 0 {
		<-notified
	}
	if err := meshes[0].Close(); err != nil {
		t.Fatal(err)
	}
	<-notified
	polls.Unpark()
	if polls.Park() {
		t.Error("parked though a channel has failed")
	}
	_, err := one.TryRead(got)
	wantPeer(t, "try to read", err, transport.Control, 0)
	if !polls.Park() {
		t.Error("cannot park because of an error that a read has returned")
	}
}

// TestParkRace lets a rank park while its peer sends. In whatever order the two run, the rank must be
// notified of the bytes.
func TestParkRace(t *testing.T) {
	const rounds = 20_000
	meshes := onOneHost(t, shm.Config{RingBytes: 64}, 2)
	zero, one := controls(t, meshes)
	var wg sync.WaitGroup
	for r, c := range []transport.Conn{zero, one} {
		polls := meshes[r]
		notified := make(chan struct{}, 1)
		polls.OnNotify(func() {
			select {
			case notified <- struct{}{}:
			default:
			}
		})
		wg.Go(func() {
			var p [8]byte
			for i := range rounds {
				if r == 0 {
					if err := c.Send(p[:]); err != nil {
						t.Error(err)
						return
					}
					polls.NotifyPeers()
				}
				for got := 0; got < len(p); {
					n, err := c.TryRead(p[got:])
					if err != nil {
						t.Error(err)
						return
					}
					if got += n; n == 0 && polls.Park() {
						select {
						case <-notified:
						case <-time.After(hangTimeout):
							t.Errorf("rank %d was not notified in round %d", r, i)
							return
						}
						polls.Unpark()
					}
				}
				if r == 1 {
					if err := c.Send(p[:]); err != nil {
						t.Error(err)
						return
					}
					polls.NotifyPeers()
				}
			}
		})
	}
	wg.Wait()
}

// TestImpossibleWords writes values to a head or tail that a correct peer never writes. Calls for that
// direction of the channel must then fail with a *PeerError.
func TestImpossibleWords(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(m *shm.Mesh)
		read  bool
	}{
		"head beyond the ring": {func(m *shm.Mesh) { m.SetHead(1, 100+64+1) }, true},
		"head far beyond":      {func(m *shm.Mesh) { m.SetHead(1, 1<<63) }, true},
		"head goes back":       {func(m *shm.Mesh) { m.SetHead(1, 99) }, true},
		"tail before the head": {func(m *shm.Mesh) { m.SetTail(1, 1000) }, false},
		"tail goes back":       {func(m *shm.Mesh) { m.SetTail(1, 0) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			meshes := onOneHost(t, shm.Config{RingBytes: 64}, 2)
			zero, one := controls(t, meshes)
			// Send 100 bytes in each direction.
			for _, way := range [][2]transport.Conn{{zero, one}, {one, zero}} {
				if err := way[0].Send(make([]byte, 100)); err != nil {
					t.Fatal(err)
				}
				if err := poll(way[1], make([]byte, 100)); err != nil {
					t.Fatal(err)
				}
				if err := way[0].Flush(); err != nil {
					t.Fatal(err)
				}
			}
			c.spoil(shm.Inner(meshes[0]))
			if c.read {
				_, err := one.TryRead(make([]byte, 10))
				wantPeer(t, "try to read", err, transport.Control, 0)
				_, err = one.Read(make([]byte, 10))
				wantPeer(t, "read", err, transport.Control, 0)
				return
			}
			big := make([]byte, 1000)
			err := errors.Join(one.Send(big), one.Flush())
			wantPeer(t, "send", err, transport.Control, 0)
			wantPeer(t, "send again", one.Send(big), transport.Control, 0)
		})
	}
}

// FuzzRingWords writes arbitrary values to the words that a peer writes. Reading and sending must either fail
// or continue. They must never access memory outside the ring.
func FuzzRingWords(f *testing.F) {
	f.Add(uint64(10), uint64(0), uint64(64), uint64(0))
	f.Add(uint64(65), uint64(1), uint64(1<<63), uint64(1<<63))
	f.Fuzz(func(t *testing.T, head, tail, nextHead, nextTail uint64) {
		c, setWords := shm.Loopback()
		p := make([]byte, 100)
		for _, words := range [][2]uint64{{head, tail}, {nextHead, nextTail}} {
			setWords(words[0], words[1])
			n, err := c.TryRead(p)
			if n > 64 || n > 0 && err != nil {
				t.Fatalf("head %d: read %d bytes and error %v", words[0], n, err)
			}
			if err := c.Send(p[:10]); err == nil && c.Sent() > 128 {
				t.Fatalf("tail %d: %d bytes were sent", words[1], c.Sent())
			}
		}
	})
}

// TestRingAllocatesNothing checks that no call allocates once the first messages have been sent. It uses a
// ring that has room for a whole message, and a smaller ring.
func TestRingAllocatesNothing(t *testing.T) {
	for _, ringBytes := range []int{0, 64} {
		meshes := onOneHost(t, shm.Config{RingBytes: ringBytes}, 2)
		zero, one := controls(t, meshes)
		polls := meshes[1]
		polls.OnNotify(func() {})
		out, in := make([]byte, 200), make([]byte, 200)
		if n := testing.AllocsPerRun(200, func() {
			polls.Park()
			err := zero.Send(out)
			polls.Unpark()
			if err := errors.Join(err, poll(one, in), zero.Flush()); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("ring of %d bytes: got %v allocations, want none", ringBytes, n)
		}
	}
}

// TestIdle checks that waiting ranks use almost no processor time, whether they are parked, wait in Read, or
// have sent bytes that the peer does not read.
func TestIdle(t *testing.T) {
	meshes := onOneHost(t, shm.Config{RingBytes: 64}, 3)
	zero, one := controls(t, meshes)
	for _, m := range meshes {
		polls := m
		polls.OnNotify(func() {})
		if !polls.Park() {
			t.Error("cannot park")
		}
	}
	done := make(chan error, 1)
	go func() {
		_, err := one.Read(make([]byte, 1))
		done <- err
	}()
	if err := one.Send(make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	runtime.GC() // collect garbage now, so that no collection runs during the measurement
	const idle = 300 * time.Millisecond
	for tries := 1; ; tries++ { // on a busy machine it takes some time until all ranks wait
		before := testnet.ProcessorTime(t)
		<-time.After(idle) // the measurement is the processor time that is used during this time
		took := testnet.ProcessorTime(t) - before
		if took <= idle/10 {
			break
		}
		if tries == 20 {
			t.Fatalf("used %v of processor time in %v, want almost none", took, idle)
		}
	}
	if err := zero.Send([]byte{1}); err != nil {
		t.Error(err)
	}
	meshes[0].NotifyPeers()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestNotifyPeers checks that after OnNotify, NotifyPeers notifies a parked peer, and Send does not. If the
// peer has already read the bytes, NotifyPeers must not notify it.
func TestNotifyPeers(t *testing.T) {
	meshes := onOneHost(t, shm.Config{}, 2)
	zero, one := controls(t, meshes)
	sender, looker := meshes[0], meshes[1]
	sender.OnNotify(func() {})
	notified := make(chan struct{}, 10)
	looker.OnNotify(func() { notified <- struct{}{} })
	// Connecting has also notified looker. This loop receives these notifications.
	looker.Park()
	for settled := false; !settled; {
		select {
		case <-notified:
		case <-time.After(300 * time.Millisecond):
			settled = true
		}
	}
	looker.Unpark()
	var b [10]byte
	for i := range 3 {
		if !looker.Park() {
			t.Fatal("cannot park")
		}
		if err := zero.Send([]byte("seen")); err != nil {
			t.Fatal(err)
		}
		if err := poll(one, b[:4]); err != nil {
			t.Fatal(err)
		}
		sender.NotifyPeers()
		if err := zero.Send([]byte("new")); err != nil {
			t.Fatal(err)
		}
		// If Send notified the peer, the notification would arrive in this time.
		<-time.After(time.Millisecond)
		if n := len(notified); n != 0 {
			t.Errorf("round %d: notified %d times before NotifyPeers", i, n)
		}
		sender.NotifyPeers()
		<-notified
		looker.Unpark()
		if err := poll(one, b[:3]); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCloseWhileInUse closes a mesh while all of its methods run. They must fail with ErrClosed or a
// *PeerError. No call may access unmapped memory.
func TestCloseWhileInUse(t *testing.T) {
	for i := range 20 {
		meshes := onOneHost(t, shm.Config{RingBytes: 64}, 2)
		zero, one := controls(t, meshes)
		var wg sync.WaitGroup
		var begun atomic.Int32
		loop := func(f func() error) {
			wg.Go(func() {
				err := f()
				for begun.Add(1); err == nil; err = f() {
					runtime.Gosched()
				}
				var p *transport.PeerError
				if !errors.Is(err, transport.ErrClosed) && !errors.As(err, &p) {
					t.Error(err)
				}
			})
		}
		for r, c := range []transport.Conn{zero, one} {
			out, in := make([]byte, 50), make([]byte, 70)
			loop(func() error { return errors.Join(c.Send(out), c.Flush()) })
			polls := meshes[r]
			loop(func() error {
				polls.Park()
				polls.Unpark()
				_, err := c.TryRead(in)
				return err
			})
			loop(func() error { return meshes[r].Err(1, topo.Rank(1-r)) })
		}
		within(t, "a call hangs", func() bool { return begun.Load() == 6 })
		if err := errors.Join(meshes[i%2].Close(), meshes[1-i%2].Close()); err != nil {
			t.Error(err)
		}
		wg.Wait()
	}
}

// TestLastWords lets a rank close its mesh right after it has sent. Its peer must receive all bytes, and then
// the end of the stream.
func TestLastWords(t *testing.T) {
	meshes := onOneHost(t, shm.Config{}, 2)
	zero, one := controls(t, meshes)
	if err := errors.Join(zero.Send([]byte("last words")), meshes[0].Close()); err != nil {
		t.Fatal(err)
	}
	within(t, "the end is not noticed", func() bool { return meshes[1].Err(1, 0) != nil })
	got, err := io.ReadAll(io.LimitReader(one, 10))
	if string(got) != "last words" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
	_, err = one.TryRead(got)
	wantPeer(t, "read", err, transport.Control, 0)
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v, want an unexpected end of file in it", err)
	}
}

func BenchmarkPingPong(b *testing.B) {
	for _, size := range []int{8, 64, 512} {
		b.Run(fmt.Sprintf("%dB", size), func(b *testing.B) {
			meshes := onOneHost(b, shm.Config{}, 2)
			zero, one := controls(b, meshes)
			stop := make(chan struct{})
			go func() {
				defer close(stop)
				runtime.LockOSThread()
				pong(one, size)
			}()
			measure(b, zero, size)
			b.StopTimer()
			meshes[0].Abort(transport.Control, errors.New("done"))
			meshes[1].Abort(transport.Control, errors.New("done"))
			<-stop
		})
	}
}

// measure sends messages of size bytes to a rank that answers each of them. It reports half of the median
// round-trip time.
func measure(b *testing.B, c transport.Conn, size int) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p := make([]byte, size)
	took := make([]time.Duration, 0, 1<<20)
	b.ReportAllocs()
	for b.Loop() {
		began := time.Now()
		if err := ping(c, p); err != nil {
			b.Fatal(err)
		}
		if len(took) < cap(took) {
			took = append(took, time.Since(began))
		}
	}
	// Report the median, because the mean depends more on the load of the machine.
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2])/2, "p50-ns/way")
}

// ping sends p and then polls, without yielding the processor, until it has received len(p) bytes.
func ping(c transport.Conn, p []byte) error {
	if err := c.Send(p); err != nil {
		return err
	}
	return spin(c, p)
}

func spin(c transport.Conn, p []byte) error {
	for len(p) > 0 {
		n, err := c.TryRead(p)
		if err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// pong answers each message of size bytes until a call fails.
func pong(c transport.Conn, size int) {
	p := make([]byte, size)
	for spin(c, p) == nil && c.Send(p) == nil {
	}
}
