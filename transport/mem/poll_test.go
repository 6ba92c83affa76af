package mem_test

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
	"github.com/gohvd/gohvd/transport/mem"
	"github.com/gohvd/gohvd/transport/transporttest"
)

func polled(_ testing.TB, size int) []transport.Mesh { return meshesOf(mem.NewPolled(size), size) }

func TestContractOfPolled(t *testing.T)         { transporttest.Run(t, polled) }
func TestContractOfPolledInBubble(t *testing.T) { transporttest.RunInBubble(t, polled) }

// Only a cluster that is asked to has Pollers, so that tests choose which way a loop takes.
func TestWhichMeshesPoll(t *testing.T) {
	if _, ok := mem.New(2).Mesh(0).(transport.Poller); ok {
		t.Error("a mesh of New is a Poller")
	}
	if _, ok := mem.NewPolled(2).Mesh(0).(transport.Poller); !ok {
		t.Error("a mesh of NewPolled is no Poller")
	}
}

// looker is rank 1 of a polled cluster, and its channel to rank 0.
type looker struct {
	t     *testing.T
	c     *mem.Cluster
	mesh  transport.Poller
	conn  transport.Polled
	peer  transport.Conn
	rings atomic.Int32
}

func newLooker(t *testing.T) *looker {
	l := &looker{t: t, c: mem.NewPolled(3)}
	l.mesh = l.c.Mesh(1).(transport.Poller)
	l.mesh.OnBell(func() { l.rings.Add(1) })
	control := func(of, to topo.Rank) transport.Conn {
		c, err := l.c.Mesh(of).Conn(t.Context(), transport.Control, to)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	l.peer = control(0, 1)
	l.conn = control(1, 0).(transport.Polled)
	control(1, 2) // another, on which nothing happens
	return l
}

func (l *looker) read(want string) {
	l.t.Helper()
	b := make([]byte, 10)
	n, err := l.conn.TryRead(b)
	if err != nil || string(b[:n]) != want {
		l.t.Errorf("got %q, %v, want %q", b[:n], err, want)
	}
}

func (l *looker) rang(want int32) {
	l.t.Helper()
	if got := l.rings.Swap(0); got != want {
		l.t.Errorf("rang %d times, want %d", got, want)
	}
}

func (l *looker) rest(want bool) {
	l.t.Helper()
	if got := l.mesh.Rest(); got != want {
		l.t.Errorf("rest: got %v, want %v", got, want)
	}
}

func TestPolling(t *testing.T) {
	l := newLooker(t)
	l.read("")
	mustSend(t, l.peer, "looking")
	l.rang(0)
	l.rest(false) // something is there
	mustSend(t, l.peer, " on")
	l.rang(0)
	l.read("looking on")
	l.read("")

	l.rest(true)
	mustSend(t, l.peer, "a")
	l.rang(1)
	l.mesh.Wake()
	mustSend(t, l.peer, "b")
	l.rang(0)
	l.read("ab")

	other := conn(t, l.c, 0, 1) // another lane
	l.rest(true)
	mustSend(t, other, "x")
	l.rang(0)
	l.mesh.Wake()

	b := make([]byte, 10)
	if n := testing.AllocsPerRun(100, func() { _, _ = l.conn.TryRead(b) }); n != 0 {
		t.Errorf("a look makes %v allocations", n)
	}
}

// Who polls decides when a peer that rests is told of what was sent, and one that has seen it by itself is not told.
func TestRing(t *testing.T) {
	l := newLooker(t)
	teller := l.c.Mesh(0).(transport.Poller)
	teller.OnBell(func() {})
	l.rest(true)
	mustSend(t, l.peer, "seen")
	l.rang(0)
	l.read("seen")
	teller.Ring()
	l.rang(0)
	mustSend(t, l.peer, "new")
	l.rang(0)
	teller.Ring()
	l.rang(1)
	l.read("new")
	l.rest(true)
	teller.Ring()
	l.rang(0)
}

// The end of a channel rings too, comes after the bytes, and once it was told it keeps nobody from resting.
func TestPollingADeadPeer(t *testing.T) {
	l := newLooker(t)
	mustSend(t, l.peer, "last")
	l.rest(false)
	l.read("last")
	l.rest(true)
	l.c.Kill(0)
	l.rang(1)
	l.rest(false)
	var peer *transport.PeerError
	if n, err := l.conn.TryRead(make([]byte, 1)); n != 0 || !errors.As(err, &peer) || peer.Peer != 0 {
		t.Errorf("got %d bytes, %v, want that rank 0 is gone", n, err)
	}
	l.rest(true)
	l.mesh.Wake()
}

// What this rank does to itself rings too: it may rest in one goroutine and be closed by another.
func TestPollingAClosedMesh(t *testing.T) {
	for name, end := range map[string]func(transport.Mesh) error{
		"close": func(m transport.Mesh) error { return m.Close() },
		"abort": func(m transport.Mesh) error { m.Abort(transport.Control, transport.ErrClosed); return nil },
	} {
		l := newLooker(t)
		l.rest(true)
		if err := end(l.mesh); err != nil {
			t.Error(err)
		}
		l.rang(1)
		if _, err := l.conn.TryRead(make([]byte, 1)); !errors.Is(err, transport.ErrClosed) {
			t.Errorf("%s: got error %v, want %v", name, err, transport.ErrClosed)
		}
	}
}
