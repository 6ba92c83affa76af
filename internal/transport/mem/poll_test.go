package mem_test

import (
	"sync/atomic"
	"testing"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
)

// looker is rank 1 of a cluster with 3 ranks. It polls its Control channel to rank 0 and counts its
// notifications.
type looker struct {
	t     *testing.T
	c     *mem.Cluster
	mesh  transport.Mesh
	conn  transport.Conn
	peer  transport.Conn
	rings atomic.Int32
}

func newLooker(t *testing.T) *looker {
	l := &looker{t: t, c: mem.New(3)}
	l.mesh = l.c.Mesh(1)
	l.mesh.OnNotify(func() { l.rings.Add(1) })
	control := func(of, to topo.Rank) transport.Conn {
		c, err := l.c.Mesh(of).Conn(t.Context(), transport.Control, to)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	l.peer = control(0, 1)
	l.conn = control(1, 0)
	control(1, 2) // a channel on which nothing is sent
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
		l.t.Errorf("got %d notifications, want %d", got, want)
	}
}

func (l *looker) park(want bool) {
	l.t.Helper()
	if got := l.mesh.Park(); got != want {
		l.t.Errorf("park: got %v, want %v", got, want)
	}
}

func TestPolling(t *testing.T) {
	l := newLooker(t)
	l.read("")
	mustSend(t, l.peer, "looking")
	l.rang(0)
	l.park(false) // must not park, because bytes have arrived
	mustSend(t, l.peer, " on")
	l.rang(0)
	l.read("looking on")
	l.read("")

	l.park(true)
	mustSend(t, l.peer, "a")
	l.rang(1)
	l.mesh.Unpark()
	mustSend(t, l.peer, "b")
	l.rang(0)
	l.read("ab")

	other := conn(t, l.c, 0, 1) // a parked rank must not be notified of bytes on this lane
	l.park(true)
	mustSend(t, other, "x")
	l.rang(0)
	l.mesh.Unpark()

	b := make([]byte, 10)
	if n := testing.AllocsPerRun(100, func() { _, _ = l.conn.TryRead(b) }); n != 0 {
		t.Errorf("polling makes %v allocations, want none", n)
	}
}

// TestRing checks that after OnNotify, NotifyPeers notifies a parked peer, and Send does not. If the peer has
// already read the bytes, NotifyPeers must not notify it.
func TestRing(t *testing.T) {
	l := newLooker(t)
	teller := l.c.Mesh(0)
	teller.OnNotify(func() {})
	l.park(true)
	mustSend(t, l.peer, "seen")
	l.rang(0)
	l.read("seen")
	teller.NotifyPeers()
	l.rang(0)
	mustSend(t, l.peer, "new")
	l.rang(0)
	teller.NotifyPeers()
	l.rang(1)
	l.read("new")
	l.park(true)
	teller.NotifyPeers()
	l.rang(0)
}
