package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/rendezvous"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
)

// newIDs returns n ids. The store of each id listens on loopback until the test ends.
func newIDs(t testing.TB, n int, encrypt bool) (ids []ID) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	for range n {
		id, served, err := NewID(ctx, "127.0.0.1", encrypt, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			cancel()
			<-served
		})
		ids = append(ids, id)
	}
	return ids
}

// meetByIDs lets one rank for each element of ids join a job. The element is the list of ids of this rank.
// The rank has no other information. meetByIDs returns the session and the error of each rank.
func meetByIDs(t *testing.T, ids ...[]ID) ([]*rendezvous.Session, []error) {
	t.Helper()
	size := len(ids)
	sessions, errs := make([]*rendezvous.Session, size), make([]error, size)
	ctx := testnet.Context(t)
	var wg sync.WaitGroup
	for rank := range ids {
		p, err := OpenIDs(ctx, ids[rank], rank, size)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := p.Close(); err != nil {
				t.Errorf("rank %d: closing the store: %v", rank, err)
			}
		})
		wg.Go(func() {
			sessions[rank], errs[rank] = rendezvous.Join(ctx, rendezvous.JoinConfig{
				Store: p.Store, Job: p.JobID, Secret: p.Secret, Terms: p.Terms, Rank: topo.Rank(rank),
				Size: size, Self: rendezvous.Record{PID: rank},
			})
		})
	}
	wg.Wait()
	t.Cleanup(func() {
		for _, s := range sessions {
			if s != nil {
				s.Close()
			}
		}
	})
	return sessions, errs
}

func TestID(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "::1"} {
		if ln, err := net.Listen("tcp", net.JoinHostPort(host, "0")); err != nil {
			t.Logf("no %s here: %v", host, err)
			continue
		} else {
			ln.Close()
		}
		ctx, cancel := context.WithCancel(t.Context())
		id, served, err := NewID(ctx, host, false, nil)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseID(" \n" + id.String() + "\n")
		if err != nil || again != id {
			t.Errorf("%s: text was read as %v, %v", host, again, err)
		}
		p, err := OpenIDs(ctx, []ID{id}, 0, 1)
		if err != nil || p.Addr != addrOf(t, id) {
			t.Fatalf("%s: %v, %v", host, p, err)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		cancel()
		<-served
	}
}

// TestJoinByIDs checks that ranks can meet if they have only ids. The job has one id for each rank, or fewer
// ids.
func TestJoinByIDs(t *testing.T) {
	for _, encrypt := range []bool{false, true} {
		for _, size := range []int{2, 3, 7} {
			for k := 1; k <= size; k += 2 {
				t.Run(fmt.Sprintf("encrypted=%v/ranks=%d/ids=%d", encrypt, size, k), func(t *testing.T) {
					sessions, errs := meetByIDs(t, slices.Repeat([][]ID{newIDs(t, k, encrypt)}, size)...)
					for rank, s := range sessions {
						if errs[rank] != nil {
							t.Fatalf("rank %d: %v", rank, errs[rank])
						}
						for other, r := range s.Records {
							if r.PID != other || s.Epoch != sessions[0].Epoch {
								t.Errorf("rank %d: got %v for rank %d, in epoch %d", rank, r, other, s.Epoch)
							}
						}
					}
				})
			}
		}
	}
}

// TestStoreOfIDEnds checks that the store of an id is closed some time after rank 0 has called Met, and not
// before.
func TestStoreOfIDEnds(t *testing.T) {
	ctx := testnet.Context(t)
	id, served, err := serveID(ctx, "127.0.0.1", false, nil, time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	p, err := OpenIDs(ctx, []ID{id}, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Store.Set(ctx, "x", nil); err != nil {
		t.Fatal(err)
	}
	select {
	case <-served:
		t.Error("the store ended before the ranks had met")
	default:
	}
	if err := p.Met(ctx); err != nil {
		t.Fatal(err)
	}
	<-served
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

func TestListsOfIDsDiffer(t *testing.T) {
	ids := newIDs(t, 2, false)
	_, errs := meetByIDs(t, ids, ids[:1])
	for rank, err := range errs {
		if refused, ok := errors.AsType[*rendezvous.RefusedError](err); !ok ||
			refused.Reason != rendezvous.TermsDiffer ||
			!strings.Contains(refused.Text, "the list of unique ids") {
			t.Errorf("rank %d: got %v, want that the lists of ids differ", rank, err)
		}
	}
	for want, given := range map[string][]ID{
		"ids 0 and 1 are the same": {ids[0], ids[0]},
		"0 ids, want 1":            nil,
		"got 3 ids, want 1 to 2":   {ids[0], ids[1], ids[0]},
		"not a unique id":          {{}},
	} {
		_, err := OpenIDs(t.Context(), given, 0, 2)
		testnet.WantError(t, err, want)
	}
}

func someID(t testing.TB, addr string) ID {
	t.Helper()
	id, err := newID(netip.MustParseAddrPort(addr), [keyBytes]byte{1, 2, 3}, false)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestDamagedIDs(t *testing.T) {
	id := someID(t, "10.1.2.3:4567")
	text := id.String()
	for i := range id {
		damaged := id
		damaged[i] ^= 0x10
		if _, err := ParseID(damaged.String()); err == nil {
			t.Errorf("byte %d is wrong, and it was read", i)
		} else if strings.Contains(err.Error(), text[:20]) {
			t.Errorf("error shows the id: %v", err)
		}
	}
	for _, c := range []struct {
		change func(*ID)
		want   string
	}{
		{func(id *ID) { id[0] = 'X' }, "not a unique id"},
		{func(id *ID) { id[7] = 1 }, "the version of the id is 1, want 2"},
		{func(id *ID) { id[idAddr] = 5 }, "address family is 5"},
		{func(id *ID) { id[idAddr+2], id[idAddr+3] = 0, 0 }, "port 0"},
		{func(id *ID) { copy(id[idAddr+4:], make([]byte, 4)) }, "address is 0.0.0.0"},
		{func(id *ID) { id[idFlags] = 2 }, "reserved bytes are not zero"},
		{func(id *ID) { id[idAddr+4+4] = 1 }, "reserved bytes are not zero"},
		{func(id *ID) { id[60] = 1 }, "reserved bytes are not zero"},
		{func(id *ID) { id[idSum-1] = 1 }, "reserved bytes are not zero"},
		{func(id *ID) {
			v4 := netip.MustParseAddr("10.1.2.3").As16()
			id[idAddr] = 6
			copy(id[idAddr+4:], v4[:])
		}, "address is ::ffff:10.1.2.3"},
	} {
		changed := id
		c.change(&changed)
		changed.seal()
		_, err := ParseID(changed.String())
		testnet.WantError(t, err, "bootstrap: parse id: ", c.want)
	}
	changed := id
	changed[idSum] ^= 1
	_, err := ParseID(changed.String())
	testnet.WantError(t, err, "the checksum is wrong")
	for _, wrong := range []string{"", text[1:], text + "A"} {
		_, err := ParseID(wrong)
		testnet.WantError(t, err, "characters, want 171")
	}
	_, err = ParseID("!" + text[1:])
	testnet.WantError(t, err, "not base64")
}

func TestNoIDForWhatCannotBeDialed(t *testing.T) {
	for _, addr := range []string{"0.0.0.0:1", "[::]:1", "10.0.0.1:0", "[fe80::1%eth0]:1"} {
		if _, err := newID(netip.MustParseAddrPort(addr), [keyBytes]byte{}, false); err == nil {
			t.Errorf("there is an id for %s", addr)
		}
	}
	if _, err := newID(netip.AddrPort{}, [keyBytes]byte{}, false); err == nil {
		t.Error("there is an id for no address")
	}
}

// TestIDSaysWhetherToEncrypt checks that the flag in an id decides whether connections are encrypted. If only
// some ids of a job have the flag, OpenIDs must return an error.
func TestIDSaysWhetherToEncrypt(t *testing.T) {
	ctx := testnet.Context(t)
	plain, sealed := newIDs(t, 1, false)[0], newIDs(t, 1, true)[0]
	for _, ids := range [][]ID{{plain, sealed}, {sealed, plain}} {
		_, err := OpenIDs(ctx, ids, 0, 2)
		testnet.WantError(t, err, "only one of ids 0 and 1 is for encrypted connections")
	}
	wrong := plain
	wrong[idKey] ^= 1
	wrong.seal()
	_, err := OpenIDs(ctx, []ID{wrong}, 0, 1)
	testnet.WantError(t, err, addrOf(t, plain), "another secret")
}

func TestIDsHaveTheirOwnKeys(t *testing.T) {
	ids := newIDs(t, 2, false)
	if [keyBytes]byte(ids[0][idKey:]) == [keyBytes]byte(ids[1][idKey:]) {
		t.Error("two ids have one key")
	}
}

func FuzzParseID(f *testing.F) {
	f.Add(someID(f, "10.1.2.3:4567").String())
	f.Add(someID(f, "[2001:db8::1]:80").String())
	encrypted := someID(f, "10.1.2.3:4567")
	encrypted[idFlags] = flagEncrypt
	encrypted.seal()
	f.Add(encrypted.String())
	f.Add("A\n" + strings.Repeat("A", 169)) // has the right length, but decodes to one byte too few
	f.Fuzz(func(t *testing.T, text string) {
		id, err := ParseID(text)
		if err == nil && id.String() != strings.TrimSpace(text) {
			t.Errorf("%q was read as %s", text, id)
		}
	})
}

// FuzzOpenID changes the bytes of an id before the checksum and appends the right checksum, because a random
// checksum is rarely right. If open accepts the id, newID must return the same id for the values that open
// returns.
func FuzzOpenID(f *testing.F) {
	for _, addr := range []string{"10.1.2.3:4567", "[2001:db8::1]:80"} {
		id := someID(f, addr)
		f.Add(id[:idSum])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var id ID
		copy(id[:idSum], b)
		id.seal()
		m, err := id.open()
		if err != nil {
			return
		}
		again, err := newID(netip.MustParseAddrPort(m.addr), [keyBytes]byte(id[idKey:]), m.encrypt)
		if err != nil || again != id {
			t.Errorf("%x was read as %s and became %x, %v", id, m.addr, again, err)
		}
	})
}

// addrOf returns the address of the store to which id refers.
func addrOf(t *testing.T, id ID) string {
	t.Helper()
	s, err := id.open()
	if err != nil {
		t.Fatal(err)
	}
	return s.addr
}
