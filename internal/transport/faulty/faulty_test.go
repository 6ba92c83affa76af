package faulty_test

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/faulty"
	"github.com/gohvd/gohvd/internal/transport/mem"
)

// inBubble calls f in a synctest bubble with the meshes of size ranks, over transport/mem with the given
// rules. Afterwards it closes the meshes, which must not wait for bytes that a rule holds back.
func inBubble(t *testing.T, size int, rules []*faulty.Rule, f func(t *testing.T, meshes []transport.Mesh)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		meshes := wrap(testcluster.MemMeshes(size), rules...)
		defer func() {
			began := time.Now()
			closeAll(t, meshes)
			at(t, "close", began, 0)
		}()
		f(t, meshes)
	})
}

func closeAll(t *testing.T, meshes []transport.Mesh) {
	t.Helper()
	for _, m := range meshes {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}

// connect connects ranks a and b on a lane and returns both ends.
func connect(t *testing.T, meshes []transport.Mesh, lane transport.Lane, a, b topo.Rank) (atA,
	atB transport.Conn) {
	t.Helper()
	var wg sync.WaitGroup
	var errs [2]error
	wg.Go(func() { atA, errs[0] = meshes[a].Conn(t.Context(), lane, b) })
	wg.Go(func() { atB, errs[1] = meshes[b].Conn(t.Context(), lane, a) })
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		t.Fatal(err)
	}
	return atA, atB
}

func send(t *testing.T, c transport.Conn, b []byte) {
	t.Helper()
	if err := c.Send(b); err != nil {
		t.Error(err)
	}
}

// read reads n bytes.
func read(t *testing.T, c transport.Conn, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	if _, err := io.ReadFull(c, b); err != nil {
		t.Error(err)
	}
	return b
}

// wantReset fails the test unless err says that the connection to a peer was reset.
func wantReset(t *testing.T, call string, err error, lane transport.Lane, peer topo.Rank) {
	t.Helper()
	var pe *transport.PeerError
	if !errors.As(err, &pe) || pe.Peer != peer || pe.Lane != lane || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%s: got error %v, want a reset of lane %d by rank %d", call, err, lane, peer)
	}
}

// at fails the test unless exactly d has passed since began.
func at(t *testing.T, what string, began time.Time, d time.Duration) {
	t.Helper()
	if got := time.Since(began); got != d {
		t.Errorf("%s: at %v, want %v", what, got, d)
	}
}

// At 1 MB/s, 10 MB arrive after exactly 10 s. The other direction and other pairs have the full bandwidth.
func TestThrottle(t *testing.T) {
	link := &faulty.Rule{Name: "link", Pairs: faulty.Pair(0, 1), BytesPerSecond: 1e6}
	inBubble(t, 3, []*faulty.Rule{link}, func(t *testing.T, meshes []transport.Mesh) {
		zero, one := connect(t, meshes, 1, 0, 1)
		zero2, two := connect(t, meshes, 1, 0, 2)
		began := time.Now()
		send(t, zero, make([]byte, 10e6))
		send(t, one, make([]byte, 10e6))
		send(t, zero2, make([]byte, 10e6))
		read(t, zero, 10e6)
		read(t, two, 10e6)
		at(t, "other links", began, 0)
		read(t, one, 1e6)
		at(t, "1 MB", began, time.Second)
		if got := zero.Sent(); got > 1.1e6 {
			t.Errorf("after 1 s %d bytes have left the sender", got)
		}
		read(t, one, 9e6)
		at(t, "10 MB", began, 10*time.Second)
		if err := zero.Flush(); err != nil {
			t.Error(err)
		}
		at(t, "flush", began, 10*time.Second)
	})
}

// The pairs and lanes that a rule selects share its bandwidth in equal parts. A short message waits only for
// the pieces of the others that are in turn before it.
func TestThrottleIsShared(t *testing.T) {
	hosts := []string{"a", "a", "b", "b"}
	link := &faulty.Rule{Name: "a to b", Pairs: faulty.Hosts(hosts, "a", "b"), BytesPerSecond: 1e6}
	inBubble(t, 4, []*faulty.Rule{link}, func(t *testing.T, meshes []transport.Mesh) {
		zero, two := connect(t, meshes, 1, 0, 2)
		one, three := connect(t, meshes, 2, 1, 3)
		control, atThree := connect(t, meshes, transport.Control, 0, 3)
		began := time.Now()
		send(t, zero, make([]byte, 5e6))
		send(t, one, make([]byte, 5e6))
		var wg sync.WaitGroup
		for _, c := range []transport.Conn{two, three} {
			wg.Go(func() {
				read(t, c, 5e6-10e3)
				if took := time.Since(began); took < 9950*time.Millisecond {
					t.Errorf("one of two streams had all but one piece of 5 MB after %v", took)
				}
				read(t, c, 10e3)
			})
		}
		wg.Go(func() {
			time.Sleep(time.Second)
			send(t, control, make([]byte, 100))
			read(t, atThree, 100)
			if took := time.Since(began) - time.Second; took > 30*time.Millisecond {
				t.Errorf("a short message took %v, want at most 3 pieces of 10 ms", took)
			}
		})
		wg.Wait()
		at(t, "all", began, 10*time.Second+100*time.Microsecond)
	})
}

// A burst passes without delay, and passes again when the bucket had time to fill.
func TestBurst(t *testing.T) {
	link := &faulty.Rule{Name: "link", BytesPerSecond: 1e6, BurstBytes: 2e6}
	inBubble(t, 2, []*faulty.Rule{link}, func(t *testing.T, meshes []transport.Mesh) {
		zero, one := connect(t, meshes, 1, 0, 1)
		began := time.Now()
		pass := func(n int, want time.Duration) {
			t.Helper()
			send(t, zero, make([]byte, n))
			read(t, one, n)
			at(t, "read", began, want)
		}
		pass(2e6, 0)
		pass(1e6, time.Second)
		time.Sleep(500 * time.Millisecond)
		pass(1e6, 2*time.Second)
		time.Sleep(time.Hour)
		pass(3e6, time.Hour+3*time.Second)
	})
}

// Each message arrives exactly one delay after it was sent, however many messages are in flight. A parked
// receiver is notified when the message arrives.
func TestDelay(t *testing.T) {
	const delay = 10 * time.Millisecond
	rules := []*faulty.Rule{{Name: "distance", Delay: delay / 2}, {Name: "more", Delay: delay / 2}}
	inBubble(t, 2, rules, func(t *testing.T, meshes []transport.Mesh) {
		zero, one := connect(t, meshes, transport.Control, 0, 1)
		notified := make(chan struct{}, 1)
		meshes[1].OnNotify(func() { notified <- struct{}{} })
		began := time.Now()
		send(t, zero, []byte("a"))
		time.Sleep(3 * time.Millisecond)
		send(t, zero, []byte("b"))
		for i, want := range []string{"a", "b"} {
			if !meshes[1].Park() {
				t.Errorf("%s: park failed though nothing has arrived", want)
			}
			<-notified
			at(t, want, began, delay+time.Duration(i)*3*time.Millisecond)
			b := make([]byte, 10)
			if n, err := one.TryRead(b); err != nil || string(b[:n]) != want {
				t.Errorf("got %q, %v, want %q", b[:n], err, want)
			}
		}
		send(t, zero, []byte("c"))
		if err := zero.Flush(); err != nil {
			t.Error(err)
		}
		at(t, "flush", began, 2*delay+3*time.Millisecond)
	})
}

// Jitter stays in its range, keeps the order, and depends only on the seed.
func TestJitter(t *testing.T) {
	const delay, jitter, spacing, count = 10 * time.Millisecond, 5 * time.Millisecond, time.Millisecond, 200
	arrivals := func(seed uint64) (took []time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			n := faulty.New(seed, &faulty.Rule{Name: "distance", Delay: delay, Jitter: jitter})
			cluster := mem.New(2)
			meshes := []transport.Mesh{n.Wrap(0, cluster.Mesh(0)), n.Wrap(1, cluster.Mesh(1))}
			defer closeAll(t, meshes)
			zero, one := connect(t, meshes, 1, 0, 1)
			began := time.Now()
			var wg sync.WaitGroup
			defer wg.Wait()
			wg.Go(func() {
				for i := range count {
					send(t, zero, []byte{byte(i)})
					time.Sleep(spacing)
				}
			})
			for i := range count {
				if b := read(t, one, 1); b[0] != byte(i) {
					t.Fatalf("got message %d, want %d", b[0], byte(i))
				}
				took = append(took, time.Since(began)-time.Duration(i)*spacing)
			}
		})
		return took
	}
	first := arrivals(1)
	if low, high := slices.Min(first), slices.Max(first); low < delay || high >= delay+jitter ||
		high-low < jitter/2 {
		t.Errorf("messages took %v to %v, want %v to %v", low, high, delay, delay+jitter)
	}
	if !slices.Equal(first, arrivals(1)) {
		t.Error("two runs with the same seed differ")
	}
	if slices.Equal(first, arrivals(2)) {
		t.Error("runs with different seeds do not differ")
	}
}

// job has the rules and the meshes of three ranks. The function settle waits until all goroutines wait, but
// only over transport/mem.
type job struct {
	rules  []*faulty.Rule
	meshes []transport.Mesh
	settle func()
}

// eachTransport calls f with a job over transport/mem in a bubble, and with a job over transport/tcp.
func eachTransport(t *testing.T, rules func() []*faulty.Rule, f func(*testing.T, job)) {
	t.Run("mem", func(t *testing.T) {
		r := rules()
		inBubble(t, 3, r, func(t *testing.T, meshes []transport.Mesh) { f(t, job{r, meshes, synctest.Wait}) })
	})
	t.Run("tcp", func(t *testing.T) {
		r := rules()
		meshes := overTCP(func() []*faulty.Rule { return r })(t, 3)
		defer closeAll(t, meshes)
		f(t, job{r, meshes, func() {}})
	})
}

// After a cut by the number of bytes, the receiver gets exactly these bytes, and then both ends get the error
// of a reset, on the selected lane only.
func TestCutAfterBytes(t *testing.T) {
	eachTransport(t, func() []*faulty.Rule {
		return []*faulty.Rule{{Name: "cable", Pairs: faulty.Pair(1, 2), Lanes: faulty.Lane(1),
			CutAfterBytes: 100_000}}
	}, func(t *testing.T, j job) {
		one, two := connect(t, j.meshes, 1, 1, 2)
		otherOne, otherTwo := connect(t, j.meshes, 2, 1, 2)
		zero, zerosOne := connect(t, j.meshes, 1, 0, 1)
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := one.Read(make([]byte, 1))
			wantReset(t, "pending read of the sender", err, 1, 2)
		})
		send(t, one, bytes.Repeat([]byte("x"), 60_000))
		send(t, one, bytes.Repeat([]byte("y"), 60_000))
		wantReset(t, "flush", one.Flush(), 1, 2)
		wantReset(t, "send", one.Send([]byte("z")), 1, 2)
		wantReset(t, "send of the receiver", two.Send([]byte("z")), 1, 1)
		wantReset(t, "flush of the receiver", two.Flush(), 1, 1)
		got, err := io.ReadAll(two)
		wantReset(t, "read", err, 1, 1)
		if want := append(bytes.Repeat([]byte("x"), 60_000),
			bytes.Repeat([]byte("y"), 40_000)...); !bytes.Equal(got, want) {
			t.Errorf("got %d bytes before the reset, want the first %d bytes", len(got), len(want))
		}
		wg.Wait()
		for _, c := range [][2]transport.Conn{{otherOne, otherTwo}, {zero, zerosOne}} {
			send(t, c[0], []byte("still here"))
			read(t, c[1], len("still here"))
		}
		if got, want := j.rules[0].Counts(), (faulty.Counts{Bytes: 100_000, Messages: 1}); got != want {
			t.Errorf("counts: got %+v, want %+v", got, want)
		}
	})
}

// A cut after the second message ends the connection behind this message. A cut in one direction leaves the
// other direction alone.
func TestCutAfterMessagesOneWay(t *testing.T) {
	eachTransport(t, func() []*faulty.Rule {
		return []*faulty.Rule{{Name: "cable", Pairs: faulty.Pair(0, 1), CutAfterMessages: 2, OneWay: true}}
	}, func(t *testing.T, j job) {
		zero, one := connect(t, j.meshes, 1, 0, 1)
		send(t, zero, []byte("first"))
		if err := zero.Flush(); err != nil {
			t.Error(err)
		}
		send(t, zero, []byte("second"))
		_ = zero.Send([]byte("third")) // fails if the cut is faster
		got, err := io.ReadAll(one)
		wantReset(t, "read", err, 1, 0)
		if string(got) != "firstsecond" {
			t.Errorf("got %q before the reset, want two messages", got)
		}
		wantReset(t, "flush", zero.Flush(), 1, 1)
		send(t, one, []byte("the other way"))
		read(t, zero, len("the other way"))
	})
}

// Cut resets the connections of the rule at once, also those that wait, are parked, or are made later.
func TestCut(t *testing.T) {
	eachTransport(t, func() []*faulty.Rule {
		return []*faulty.Rule{{Name: "cable", Pairs: faulty.Pair(0, 1)}, {Name: "distance", Delay: time.Hour,
			Lanes: faulty.Data}}
	}, func(t *testing.T, j job) {
		zero, one := connect(t, j.meshes, 1, 0, 1)
		control, atOne := connect(t, j.meshes, transport.Control, 0, 1)
		notified := make(chan struct{}, 2)
		for _, m := range j.meshes[:2] {
			m.OnNotify(func() { notified <- struct{}{} })
			if !m.Park() {
				t.Error("park failed though nothing has arrived")
			}
		}
		lost := []byte("lost")
		send(t, zero, lost)
		var wg sync.WaitGroup
		wg.Go(func() {
			wantReset(t, "pending flush", zero.Flush(), 1, 1)
			copy(lost, "used")
		})
		wg.Go(func() {
			_, err := one.Read(make([]byte, 1))
			wantReset(t, "pending read", err, 1, 0)
		})
		j.settle()
		j.rules[0].Cut()
		wg.Wait()
		<-notified
		<-notified
		_, err := control.TryRead(make([]byte, 1))
		wantReset(t, "try of rank 0", err, transport.Control, 1)
		_, err = atOne.TryRead(make([]byte, 1))
		wantReset(t, "try of rank 1", err, transport.Control, 0)
		for _, m := range j.meshes[:2] {
			if !m.Park() {
				t.Error("park failed though all errors were returned")
			}
		}
		zero, one = connect(t, j.meshes, 2, 0, 1)
		wantReset(t, "send of a new connection", zero.Send([]byte("x")), 2, 1)
		_, err = one.Read(make([]byte, 1))
		wantReset(t, "read of a new connection", err, 2, 0)
		j.settle()
		if got := j.rules[0].Counts(); got != (faulty.Counts{}) {
			t.Errorf("counts: got %+v, want none", got)
		}
	})
}

// After a silent cut nothing arrives and no call of the sender fails, even when the peer closes its mesh.
func TestSilentCut(t *testing.T) {
	cable := &faulty.Rule{Name: "cable", Pairs: faulty.Pair(0, 1), CutAfterBytes: 5, Silent: true}
	inBubble(t, 3, []*faulty.Rule{cable}, func(t *testing.T, meshes []transport.Mesh) {
		zero, one := connect(t, meshes, 1, 0, 1)
		send(t, zero, []byte("heard, unheard"))
		read(t, one, 5)
		var wg sync.WaitGroup
		for rank, c := range []transport.Conn{zero, one} {
			wg.Go(func() {
				if n, err := c.Read(make([]byte, 1)); n != 0 || err != transport.ErrClosed {
					t.Errorf("rank %d: read %d bytes and error %v, want silence until its own close", rank, n, err)
				}
			})
			send(t, c, []byte("anyone?"))
			if err := c.Flush(); err != nil {
				t.Errorf("rank %d: flush: %v", rank, err)
			}
		}
		if sent := zero.Sent(); sent != uint64(len("heard, unheardanyone?")) {
			t.Errorf("sent: got %d bytes, want all", sent)
		}
		began := time.Now()
		synctest.Wait()
		closeAll(t, meshes[:1])
		send(t, one, []byte("anyone?"))
		time.Sleep(time.Hour)
		closeAll(t, meshes[1:2])
		wg.Wait()
		at(t, "end", began, time.Hour)
		if got, want := cable.Counts(), (faulty.Counts{Bytes: 5}); got != want {
			t.Errorf("counts: got %+v, want %+v", got, want)
		}
	})
}

// If the peer closes its mesh after a silent cut, not even bytes that were on their way make calls fail.
func TestSilentCutWithBytesOnTheirWay(t *testing.T) {
	cable := &faulty.Rule{Name: "cable", Pairs: faulty.Pair(0, 1), Silent: true}
	inBubble(t, 2, []*faulty.Rule{cable}, func(t *testing.T, meshes []transport.Mesh) {
		zero, _ := connect(t, meshes, 1, 0, 1)
		send(t, zero, make([]byte, 10e6)) // not read, so a part stays in the wrapped connection
		synctest.Wait()
		cable.Cut()
		closeAll(t, meshes[1:])
		synctest.Wait()
		send(t, zero, []byte("anyone?"))
		if err := zero.Flush(); err != nil {
			t.Errorf("flush: %v", err)
		}
		if n, err := zero.TryRead(make([]byte, 1)); n != 0 || err != nil {
			t.Errorf("got %d bytes and error %v, want silence", n, err)
		}
	})
}

// A silent cut in one direction leaves the other direction alone.
func TestSilentCutOneWay(t *testing.T) {
	cable := &faulty.Rule{Name: "cable", Pairs: faulty.Pair(0, 1), Silent: true, OneWay: true}
	inBubble(t, 2, []*faulty.Rule{cable}, func(t *testing.T, meshes []transport.Mesh) {
		zero, one := connect(t, meshes, 1, 0, 1)
		cable.Cut()
		send(t, zero, []byte("anyone?"))
		send(t, one, []byte("yes"))
		read(t, zero, 3)
		synctest.Wait()
		if n, err := one.TryRead(make([]byte, 10)); n != 0 || err != nil {
			t.Errorf("got %d bytes and error %v, want silence", n, err)
		}
	})
}

// A rule without faults counts the bytes and messages of the directions and lanes that it selects.
func TestCounts(t *testing.T) {
	rules := []*faulty.Rule{
		{Name: "all"},
		{Name: "0 to 1", Pairs: faulty.Pair(0, 1)},
		{Name: "data to 1", Pairs: func(_, to topo.Rank) bool { return to == 1 }, Lanes: faulty.Data},
		{Name: "lane 2", Lanes: faulty.Lane(2)},
	}
	inBubble(t, 3, rules, func(t *testing.T, meshes []transport.Mesh) {
		pass := func(lane transport.Lane, from, to topo.Rank, messages ...int) {
			t.Helper()
			a, b := connect(t, meshes, lane, from, to)
			for _, n := range messages {
				send(t, a, make([]byte, n))
				read(t, b, n)
			}
		}
		pass(transport.Control, 0, 1, 10, 20)
		pass(1, 0, 1, 100_000, 0)
		pass(1, 1, 0, 7)
		pass(2, 2, 1, 3)
		for i, want := range []faulty.Counts{{100_040, 5}, {100_030, 3}, {100_003, 2}, {3, 1}} {
			if got := rules[i].Counts(); got != want {
				t.Errorf("rule %q: got %+v, want %+v", rules[i].Name, got, want)
			}
		}
	})
}

// If the receiver does not read, bytes stay in the sender's buffer.
func TestUnreadBytesStayAtTheSender(t *testing.T) {
	inBubble(t, 2, nil, func(t *testing.T, meshes []transport.Mesh) {
		zero, one := connect(t, meshes, 1, 0, 1)
		send(t, zero, make([]byte, 10e6))
		synctest.Wait()
		if sent := zero.Sent(); sent > 500e3 {
			t.Errorf("%d bytes have left the sender though none was read", sent)
		}
		read(t, one, 10e6)
		if err := zero.Flush(); err != nil {
			t.Error(err)
		}
	})
}
