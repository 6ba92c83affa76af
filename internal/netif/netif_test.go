package netif

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// variable is the name of an environment variable. A test that starts this test binary on another host sets
// the variable to a list for Parse. The process then prints the addresses of its host that this list permits.
const variable = "GOHVD_NETIF"

func TestMain(m *testing.M) {
	if list, ok := os.LookupEnv(variable); ok {
		c, err := Parse(strings.Split(list, ","))
		if err == nil {
			var addrs []netip.Addr
			addrs, err = c.Addresses()
			fmt.Println(addrs)
		}
		if err != nil {
			fmt.Println(err)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestInterfaces checks that Addresses returns the addresses of interfaces that are up, except link-local
// addresses. It must not return an address of an interface that is down.
func TestInterfaces(t *testing.T) {
	host := testnet.NewHosts(t, 1)[0]
	self := testnet.Self(t)
	sh := func(env, command string, args ...string) string {
		t.Helper()
		cmd := host.Command(t.Context(), command, args...)
		cmd.Env = append(os.Environ(), variable+"="+env)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", command, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	for _, args := range []string{
		"link add down0 type veth peer name down1", "address add 10.99.0.1/24 dev down0",
		"link add up0 type veth peer name up1", "address add 10.98.0.1/24 dev up0",
		"address add 169.254.1.1/16 dev up0", "link set up0 up",
	} {
		sh("", "ip", strings.Fields(args)...)
	}
	for list, want := range map[string]string{
		"":                             fmt.Sprintf("[%s 10.98.0.1]", host.Addr),
		"up0":                          "[10.98.0.1]",
		"10.0.0.0/8":                   fmt.Sprintf("[%s 10.98.0.1]", host.Addr),
		"u":                            "[10.98.0.1]",
		"^up,lo":                       fmt.Sprintf("[%s]", host.Addr),
		"^up,10.98.0.0/16":             fmt.Sprintf("[%s 127.0.0.1 ::1]", host.Addr),
		"up0," + testnet.HostInterface: fmt.Sprintf("[10.98.0.1 %s]", host.Addr),
	} {
		if got := sh(list, self); got != want {
			t.Errorf("%q: got %s, want %s", list, got, want)
		}
	}
	if got := sh("^0.0.0.0/0,::/0", self); !strings.Contains(got, "network interfaces ^0.0.0.0/0,::/0: none is up") {
		t.Errorf("everything excluded: got %s", got)
	}
	if got := sh("down0", self); !strings.Contains(got, "network interfaces down0: none is up on this host") {
		t.Errorf("an interface that is down: got %s", got)
	}
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func TestChoice(t *testing.T) {
	have := []own{
		{"lo", addr("127.0.0.1")}, {"lo", addr("::1")}, {"eth0", addr("10.1.2.3")},
		{"eth0", addr("2001:db8::5")},
		{"ib0", addr("192.168.7.9")}, {"ib0", addr("10.1.2.3")}, {"eth0.10", addr("172.16.0.1")},
		{"down1", addr("172.17.0.1")},
	}
	names := []string{"lo", "eth0", "ib0", "eth0.10", "down", "down1"}
	for _, test := range []struct {
		list []string
		want []string
	}{
		{nil, []string{"10.1.2.3", "2001:db8::5", "192.168.7.9", "172.16.0.1", "172.17.0.1"}},
		{[]string{" ", ""}, []string{"10.1.2.3", "2001:db8::5", "192.168.7.9", "172.16.0.1", "172.17.0.1"}},
		{[]string{"ib0", " eth0 "}, []string{"192.168.7.9", "10.1.2.3", "2001:db8::5"}},
		{[]string{"lo"}, []string{"127.0.0.1", "::1"}},
		{[]string{"192.168.0.0/16"}, []string{"192.168.7.9"}},
		{[]string{"192.168.7.1/16"}, []string{"192.168.7.9"}},
		{[]string{"eth9", "2001:db8::/32"}, []string{"2001:db8::5"}},
		{[]string{"10.1.2.3"}, []string{"10.1.2.3"}},
		{[]string{"10.1.2.4"}, nil},
		{[]string{"eth"}, []string{"10.1.2.3", "2001:db8::5", "172.16.0.1"}},
		{[]string{"eth0.1"}, []string{"172.16.0.1"}}, // eth0.1 is not among the addresses, but eth0.10 is
		{[]string{"eth0"}, []string{"10.1.2.3", "2001:db8::5"}},
		{[]string{"down"}, nil}, // an interface of this name exists, so it does not stand for down1
		{[]string{"=eth"}, nil},
		{[]string{"=ib0", "l"}, []string{"192.168.7.9", "10.1.2.3"}},
		{[]string{"ib", "=l"}, []string{"192.168.7.9", "10.1.2.3"}},
		{[]string{"^ib"}, []string{"10.1.2.3", "2001:db8::5", "172.16.0.1", "172.17.0.1", "127.0.0.1", "::1"}},
		{[]string{"^ib", "^eth0", "down1", "lo"}, []string{"172.16.0.1"}},
		{[]string{"^=ib", "l", "172.16.0.0/12", "2001:db8::5"}, []string{"10.1.2.3", "192.168.7.9", "127.0.0.1", "::1"}},
	} {
		c, err := Parse(test.list)
		if err != nil {
			t.Errorf("%q: %v", test.list, err)
			continue
		}
		var got []string
		for _, a := range c.of(have, names) {
			got = append(got, a.String())
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%q: got %v, want %v", test.list, got, test.want)
		}
	}
}

func TestText(t *testing.T) {
	for _, list := range []string{"eth0,10.0.0.0/8", "=eth0", "^docker,lo", "^=docker0,=lo"} {
		if c, err := Parse(strings.Split(list, ",")); err != nil || c.String() != list {
			t.Errorf("%s: got %s and error %v", list, c, err)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, text := range []string{"10.0.0.0/33", "eth0/8", "an interface", "a:b", "sixteen-letters-",
		"10.0.0.0/8/8", "^docker", "^", "=", "=^ib", "==ib"} {
		if c, err := Parse([]string{"eth0", text}); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%q: got %v, %v, want an error with it", text, c, err)
		}
	}
}

func TestThisHost(t *testing.T) {
	local, remote, err := Route(t.Context(), "127.0.0.1:9")
	if err != nil || local != addr("127.0.0.1") || remote != local {
		t.Errorf("route to loopback: got %v, %v, %v", local, remote, err)
	}
	if _, _, err := Route(t.Context(), "nonsense"); err == nil || !strings.Contains(err.Error(), "nonsense") {
		t.Errorf("got error %v, want one with the address", err)
	}
	lo, err := Parse([]string{"127.0.0.0/8"})
	if err != nil {
		t.Fatal(err)
	}
	for _, target := range []string{"127.0.0.1:9", "192.0.2.1:9"} {
		got, err := lo.Towards(t.Context(), target)
		if _, _, routed := Route(t.Context(), target); routed == nil && (err != nil || !got.IsLoopback()) {
			t.Errorf("towards %s by loopback alone: got %v, %v", target, got, err)
		}
	}
	if a, err := (Choice{}).Any(); err == nil && !a.IsLoopback() {
		both, err := Parse([]string{a.String(), "127.0.0.0/8"})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := both.Towards(t.Context(), "127.0.0.1:9"); err != nil || !got.IsLoopback() {
			t.Errorf("towards loopback, which is allowed second: got %v, %v", got, err)
		}
	}
	none, err := Parse([]string{"192.0.2.77", "no-such-if"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := none.Any(); err == nil || !strings.Contains(err.Error(), "192.0.2.77/32,no-such-if") ||
		!strings.Contains(err.Error(), "lo 127.0.0.1") {
		t.Errorf("got %v, want what was chosen and what there is", err)
	}
	if _, err := none.Towards(t.Context(), "127.0.0.1:9"); err == nil {
		t.Error("an address that is not chosen was taken")
	}
	a, err := Choice{}.Any()
	if err != nil {
		t.Fatal(err)
	}
	for who, want := range map[string]bool{a.String(): true, "127.0.0.1": true, "127.0.1.1": true,
		"192.0.2.77": false} {
		if is, err := IsOwn(addr(who)); is != want || err != nil {
			t.Errorf("%s: own is %v, %v, want %v", who, is, err, want)
		}
	}
}
