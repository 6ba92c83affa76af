package rendezvous

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// outside returns an address of this machine that is not a loopback address. If there is none, it skips the
// test.
func outside(t *testing.T) netip.Addr {
	t.Helper()
	addrs, err := netif.Choice{}.Addresses()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if a.Is4() {
			return a
		}
	}
	t.Skip("this machine has no address but loopback")
	return netip.Addr{}
}

// at returns the configuration of a rank that has reached the store at the given address and listens on the
// given one. The port tells whether it has moved: it is 1 before and 2 afterwards.
func at(kv store.Store, rank, size int, reached, listens string) JoinConfig {
	cfg := config(kv, rank, size)
	cfg.ListenHost = "0.0.0.0"
	cfg.StoreHost, _ = netip.ParseAddr(reached)
	cfg.Self.Addr = net.JoinHostPort(listens, "1")
	cfg.Move = func(host string) (string, error) { return net.JoinHostPort(host, "2"), nil }
	return cfg
}

// wantAddrs checks that all ranks have joined and know the given addresses.
func wantAddrs(t *testing.T, results []result, addrs ...string) {
	t.Helper()
	for rank, r := range results {
		if r.err != nil {
			t.Fatalf("rank %d: %v", rank, r.err)
		}
		for i, want := range addrs {
			if got := r.Records[i].Addr; got != want {
				t.Errorf("rank %d: rank %d listens on %s, want %s", rank, i, got, want)
			}
		}
	}
}

// A rank that listens on loopback moves to an address that the other ranks can dial if a rank has reached the
// root over a network. If none has, all stay on loopback.
func TestMove(t *testing.T) {
	out := outside(t).String()
	kv := newStore(t)
	ctx := testnet.Context(t)
	wantAddrs(t, joinAll(t, ctx, at(kv, 0, 3, "", "127.0.0.1"), at(kv, 1, 3, "127.0.0.1", "127.0.0.1"),
		at(kv, 2, 3, "127.0.0.1", "127.0.0.1")), "127.0.0.1:1", "127.0.0.1:1", "127.0.0.1:1")

	kv = newStore(t)
	wantAddrs(t, joinAll(t, ctx, at(kv, 0, 4, "", "127.0.0.1"), at(kv, 1, 4, "127.0.0.1", "127.0.0.1"),
		at(kv, 2, 4, out, out), at(kv, 3, 4, "127.0.0.1", "127.0.0.1")),
		out+":2", out+":2", out+":1", out+":2")

	// The store is on another host than rank 0, and rank 1 is on the host of the store. Rank 1 cannot use the
	// address of the root. It uses the one from which it reaches the root.
	kv = newStore(t)
	zero, one := at(kv, 0, 2, out, out), at(kv, 1, 2, "127.0.0.1", "127.0.0.1")
	zero.ListenHost = out
	wantAddrs(t, joinAll(t, ctx, zero, one), out+":1", out+":2")

	// The user has chosen loopback.
	kv = newStore(t)
	one = at(kv, 1, 3, "127.0.0.1", "127.0.0.1")
	one.Move = nil
	wantAddrs(t, joinAll(t, ctx, at(kv, 0, 3, "", "127.0.0.1"), one, at(kv, 2, 3, out, out)),
		out+":2", "127.0.0.1:1", out+":1")
}

// In each epoch, the ranks move only if that epoch has ranks of other hosts.
func TestMoveInLaterEpochs(t *testing.T) {
	out := outside(t).String()
	kv := newStore(t)
	var last uint64
	for _, reached := range []string{"127.0.0.1", out, "127.0.0.1"} {
		want := "127.0.0.1:1"
		if reached == out {
			want = out + ":2"
		}
		zero, one := at(kv, 0, 2, "", "127.0.0.1"), at(kv, 1, 2, reached, reached)
		zero.LastEpoch, one.LastEpoch = last, last
		results := joinAll(t, testnet.Context(t), zero, one)
		wantAddrs(t, results, want, reached+":1")
		last = results[0].Epoch
		for _, r := range results {
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// A rank cannot listen where the other ranks need it. All ranks get the same error, which says why.
func TestCannotMove(t *testing.T) {
	out := outside(t).String()
	kv := newStore(t)
	one := at(kv, 1, 3, "127.0.0.1", "127.0.0.1")
	one.Move = func(string) (string, error) { return "", errors.New("no secret") }
	for rank, r := range joinAll(t, testnet.Context(t), at(kv, 0, 3, "", "127.0.0.1"), one, at(kv, 2, 3, out, out)) {
		if why, ok := errors.AsType[*RefusedError](r.err); !ok || why.Reason != NoAddress {
			t.Errorf("rank %d: got %v, want the reason NoAddress", rank, r.err)
		}
		testnet.WantError(t, r.err, "rank 1, pid 100 on host", "cannot listen on "+out, "no secret")
	}
	kv = newStore(t)
	zero := at(kv, 0, 2, "", "127.0.0.1")
	zero.Move = one.Move
	for _, r := range joinAll(t, testnet.Context(t), zero, at(kv, 1, 2, out, out)) {
		testnet.WantError(t, r.err, "cannot listen on "+out, "no secret")
	}
}

// A rank hangs while it moves. The errors of the other ranks name it.
func TestHangsWhileMoving(t *testing.T) {
	out := outside(t).String()
	kv := newStore(t)
	hung := make(chan struct{})
	ctx, pass := withLimit(t)
	one := at(kv, 1, 3, "127.0.0.1", "127.0.0.1")
	asked := make(chan struct{})
	one.Move = func(string) (string, error) {
		close(asked)
		<-hung
		return "", errors.New("too late")
	}
	longer, cancel := context.WithCancel(testnet.Context(t))
	hanging := start(t, longer, one)
	zero, two := start(t, ctx, at(kv, 0, 3, "", "127.0.0.1")), start(t, ctx, at(kv, 2, 3, out, out))
	<-asked
	pass()
	for _, r := range []<-chan result{zero, two} {
		err := (<-r).err
		wantAwaited(t, err, 1)
		testnet.WantError(t, err, "waiting for rank 1 to listen on another address")
	}
	close(hung)
	cancel()
	if err := (<-hanging).err; err == nil {
		t.Error("the rank that has hung has joined")
	}
}

// The connection of a rank breaks after the root has asked the rank to move. When the rank asks again, the
// root repeats what it has asked for. A rank that says it has moved without having been asked is refused.
func TestConnectionBreaksWhileMoving(t *testing.T) {
	out := outside(t).String()
	kv := newStore(t)
	log, entries := testnet.Logs()
	zero := at(kv, 0, 3, "", "127.0.0.1")
	zero.Log = log
	r := start(t, testnet.Context(t), zero)
	root := rootOf(t, kv)
	one := at(kv, 1, 3, "127.0.0.1", "127.0.0.1")
	nonce := newToken()
	ask := func() net.Conn {
		request, err := appendMessage(nil, &rendezvouspb.JoinRequest{Job: "job", Token: root.GetToken(),
			Nonce: nonce, Rank: 1, Size: 3, Record: recordToProto(&one.Self)})
		if err != nil {
			t.Fatal(err)
		}
		conn := say(t, secret.Secret{}, one.dialAddr(root), dial.Greeting(rootMagic, rootVersion), request)
		if _, err := dial.ReadGreeting(conn, rootMagic); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	moved := &rendezvouspb.Status{Kind: rendezvouspb.Status_MOVED, Text: out + ":3"}
	if err := sendStatus(ask(), moved); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, "the rank is refused", func() bool {
		return testnet.Logged(entries, "got MOVED before all ranks have joined")
	})
	want := func(conn net.Conn, kind rendezvouspb.Answer_Kind) {
		t.Helper()
		if a, err := readAnswer(conn); err != nil || a.GetKind() != kind ||
			kind == rendezvouspb.Answer_MOVE && a.GetText() != out {
			t.Fatalf("got answer %v, %v, want %v", a, err, kind)
		}
	}
	broken := ask()
	two := start(t, testnet.Context(t), at(kv, 2, 3, out, out))
	want(broken, rendezvouspb.Answer_MOVE)
	broken.Close()
	again := ask()
	want(again, rendezvouspb.Answer_MOVE)
	if err := sendStatus(again, moved); err != nil {
		t.Fatal(err)
	}
	want(again, rendezvouspb.Answer_TABLE)
	defer again.Close()
	wantAddrs(t, []result{<-r, <-two}, out+":2", out+":3", out+":1")
}

// A rank dials the root as it has reached the store if that is an address of the root's host.
func TestDialAddr(t *testing.T) {
	all := []string{"10.0.0.5", "fd00::5"}
	for _, c := range []struct {
		reached, addr string
		hosts         []string
		want          string
	}{
		{"10.0.0.5", "192.168.0.1:7", all, "10.0.0.5:7"},
		{"fd00::5", "192.168.0.1:7", all, "[fd00::5]:7"},
		{"127.0.0.1", "192.168.0.1:7", all, "127.0.0.1:7"},
		{"127.0.0.1", "192.168.0.1:7", nil, "192.168.0.1:7"}, // the root is on another host than the store
		{"10.9.9.9", "192.168.0.1:7", all, "192.168.0.1:7"},  // network address translation
		{"", "192.168.0.1:7", all, "192.168.0.1:7"},
	} {
		cfg := JoinConfig{}
		cfg.StoreHost, _ = netip.ParseAddr(c.reached)
		if got := cfg.dialAddr(&rendezvouspb.Root{Addr: c.addr, Hosts: c.hosts}); got != c.want {
			t.Errorf("a rank that has reached the store at %q dials %s, want %s", c.reached, got, c.want)
		}
	}
}

// connFrom is a connection from the given address of this host.
type connFrom struct {
	net.Conn
	from string
}

func (c connFrom) LocalAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(c.from))
}

// A rank on another host than the root cannot listen at the address of the root's host. It listens at the one
// from which it has reached the root.
func TestMoveTo(t *testing.T) {
	for from, want := range map[string]string{"10.0.0.7:4": "10.0.0.7:2", "[fd00::7]:4": "[fd00::7]:2",
		"127.0.0.1:4": "10.0.0.5:2", "[::ffff:127.0.0.1]:4": "10.0.0.5:2"} {
		cfg := at(nil, 1, 2, "", "127.0.0.1")
		c := &client{cfg: &cfg}
		if got := c.move(connFrom{from: from}, "10.0.0.5"); got.GetText() != want || cfg.Self.Addr != want {
			t.Errorf("a rank that has reached the root from %s listens on %s, want %s", from, got.GetText(), want)
		}
	}
}
