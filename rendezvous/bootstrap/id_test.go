package bootstrap

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

func TestID(t *testing.T) { overBoth(t, testID) }

func testID(t *testing.T, encrypt bool) {
	ctx := testnet.Context(t)
	for _, host := range []string{"127.0.0.1", "::1"} {
		if ln, err := net.Listen("tcp", net.JoinHostPort(host, "0")); err != nil {
			t.Logf("no %s here: %v", host, err)
			continue
		} else {
			ln.Close()
		}
		id, r, err := NewID(ctx, Config{ListenHost: host, Encrypt: encrypt})
		if err != nil {
			t.Fatal(err)
		}
		m, err := id.open()
		if err != nil || m.addr != r.Addr() {
			t.Errorf("%s: id has address %s, %v, want %s", host, m.addr, err, r.Addr())
		}
		again, err := ParseID(" \n" + id.String() + "\n")
		if err != nil || again != id {
			t.Errorf("%s: text was read as %v, %v", host, again, err)
		}
		if got := joinAlone(t, id); got != nil {
			t.Errorf("%s: %v", host, got)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if err := r.Close(); err != nil {
			t.Errorf("again: %v", err)
		}
	}
}

// joinAlone joins as the only rank.
func joinAlone(t *testing.T, id ID) error {
	r, err := Join(testnet.Context(t), []ID{id}, Config{Size: 1})
	if err != nil {
		return err
	}
	return r.Close()
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
		{func(id *ID) { id[0] = 'X' }, "no id"},
		{func(id *ID) { id[7] = 2 }, "version is 2, want 1"},
		{func(id *ID) { id[idRoots+3] = 2 }, "id has 2 roots, want 1"},
		{func(id *ID) { id[idAddr] = 5 }, "address family is 5"},
		{func(id *ID) { id[idAddr+2], id[idAddr+3] = 0, 0 }, "port 0"},
		{func(id *ID) { copy(id[idAddr+4:], make([]byte, 4)) }, "address is 0.0.0.0"},
		{func(id *ID) { id[idFlags] = 2 }, "bytes that must be zero"},
		{func(id *ID) { id[idAddr+4+4] = 1 }, "bytes that must be zero"},
		{func(id *ID) { id[idReserved] = 1 }, "bytes that must be zero"},
		{func(id *ID) { id[idSum-1] = 1 }, "bytes that must be zero"},
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
	testnet.WantError(t, err, "checksum is wrong")
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

// Ids say whether connections are encrypted; a job does not have both kinds.
func TestIDSaysWhetherToEncrypt(t *testing.T) {
	ctx := testnet.Context(t)
	log, logs := testnet.Logs()
	plain, _ := openRoots(t, ctx, 1, Config{}, defaultLimits)
	sealed, roots := openRoots(t, ctx, 1, Config{Encrypt: true, Log: log}, defaultLimits)
	for _, ids := range [][]ID{{plain[0], sealed[0]}, {sealed[0], plain[0]}} {
		_, err := Join(ctx, ids, configOf(0, 2))
		testnet.WantError(t, err, "of ids 0 and 1 one is for encrypted connections")
	}
	// Who leaves the flag out does not come in, and is told why.
	bare := sealed[0]
	bare[idFlags] = 0
	bare.seal()
	_, err := Join(ctx, []ID{bare}, configOf(0, 1))
	testnet.WantError(t, err, "reaching the root at "+roots[0].Addr(), "HVD_TLS", "(the other end has)")
	testnet.Eventually(t, "the log", func() bool { return testnet.Logged(logs, "root closed a connection", "HVD_TLS", "(this end has)") })
	for _, test := range []struct {
		ids     []ID
		encrypt bool
	}{{plain, false}, {sealed, true}} {
		_, _, ring, err := meetings(test.ids)
		if err != nil {
			t.Fatal(err)
		}
		a, b := net.Pipe()
		go func() {
			ring.Dial(a, "p")
			a.Close()
		}()
		first := make([]byte, 1)
		b.SetDeadline(time.Now().Add(time.Minute))
		if _, err := b.Read(first); err != nil || (first[0] == 22) != test.encrypt {
			t.Errorf("the ring begins with %d, %v, encrypted: want %v", first, err, test.encrypt)
		}
		b.Close()
	}
}

func TestIDsHaveTheirOwnKeys(t *testing.T) {
	ids, _ := openRoots(t, testnet.Context(t), 2, Config{}, defaultLimits)
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
	f.Add("A\n" + strings.Repeat("A", 169)) // of the right length, and decodes to one byte less
	f.Fuzz(func(t *testing.T, text string) {
		id, err := ParseID(text)
		if err == nil && id.String() != strings.TrimSpace(text) {
			t.Errorf("%q was read as %s", text, id)
		}
	})
}

// The checksum stands in the way of a fuzzer that changes texts.
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
