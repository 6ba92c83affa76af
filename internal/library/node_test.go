package library

import (
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/ps/node"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/ps"
)

// fullNode is a node whose requests wait for room until the channel of their app is closed.
type fullNode struct {
	member
	room  []chan struct{} // by app
	mu    sync.Mutex
	calls []string
}

func (n *fullNode) role() ps.Role { return ps.Worker }

func (n *fullNode) called(what string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.calls = append(n.calls, what)
	return nil
}

func (n *fullNode) exchange(x *node.Exchange) (wait func() error, err error) {
	<-n.room[x.App]
	return func() error { return nil }, n.called("exchange")
}

func (n *fullNode) clock() error { return n.called("clock") }

func (n *fullNode) barrier(int) error { return n.called("barrier") }

func (n *fullNode) finalize(bool) error { return n.called("finalize") }

// begin begins a request in this thread, of which none waits for room.
func begin(t *testing.T, l *Library, app int) Handle {
	h, err := l.Exchange(&node.Exchange{App: app}, true)
	if err != nil {
		t.Error(err)
	}
	return h
}

// TestCallsDuringExchange checks that a request that has room and takes long to begin holds up further ones
// for a while only, and no other calls.
func TestCallsDuringExchange(t *testing.T) {
	l := new(Library)
	n := nodeOf(&fullNode{room: []chan struct{}{make(chan struct{})}}, 10)
	l.node.Store(n)
	var exchange sync.WaitGroup
	exchange.Go(func() {
		if err := l.Wait(begin(t, l, 0), Forever, nil); err != nil {
			t.Error(err)
		}
	})
	testnet.Eventually(t, "the request begins", func() bool { return len(n.taking) == 1 })
	made := make(chan Handle)
	go func() {
		if _, err := l.Exchange(new(node.Exchange), true); err != ErrPending {
			t.Errorf("a second request got the error %v", err)
		}
		made <- l.Clock()
	}()
	select {
	case h := <-made:
		must(t, l, h)
		close(n.member.(*fullNode).room[0])
	case <-time.After(10 * time.Second):
		t.Error("Clock does not return while another request begins")
		close(n.member.(*fullNode).room[0])
		must(t, l, <-made)
	}
	exchange.Wait()
}

// TestExchangeWaitsForRoom checks that a request that waits for room holds up the further ones of its thread,
// but not those of another thread, and that the ends of an iteration and of the job do not overtake it.
func TestExchangeWaitsForRoom(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	l := new(Library)
	n := &fullNode{room: []chan struct{}{make(chan struct{}), make(chan struct{})}}
	l.node.Store(nodeOf(n, 0))
	handles := []Handle{begin(t, l, 0)}
	if _, err := l.Exchange(new(node.Exchange), true); err != ErrPending {
		t.Errorf("a second request got the error %v", err)
	}
	var other sync.WaitGroup
	other.Go(func() {
		runtime.LockOSThread()
		close(n.room[1])
		for _, h := range []Handle{begin(t, l, 1), l.Barrier(4)} {
			if err := l.Wait(h, Forever, nil); err != nil {
				t.Error(err)
			}
		}
	})
	other.Wait()
	for _, begun := range []func() Handle{l.Clock, func() Handle { return l.Barrier(4) },
		func() Handle { return l.Finalize(true) }} {
		h := begun()
		if err := l.Wait(h, 20*time.Millisecond, nil); err != ErrPending {
			t.Errorf("a call that must wait got the error %v", err)
		}
		handles = append(handles, h)
	}
	close(n.room[0])
	for _, h := range handles {
		must(t, l, h)
	}
	if len(n.calls) != 6 || !slices.Equal(n.calls[:3], []string{"exchange", "barrier", "exchange"}) {
		t.Errorf("got the calls %q", n.calls)
	}
}
