package launch_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestParseHosts checks that ParseHosts returns the right hosts and slots for valid lists.
func TestParseHosts(t *testing.T) {
	for _, c := range []struct {
		list string
		want []launch.Host
	}{
		{"h1", []launch.Host{{"h1", 1}}},
		{"h1:2,h2:3", []launch.Host{{"h1", 2}, {"h2", 3}}},
		{" h1:2 , h2 ", []launch.Host{{"h1", 2}, {"h2", 1}}},
		{"10.0.0.1:4,[fe80::1%eth0]:2,fd00::7,[fd00::8]", []launch.Host{{"10.0.0.1", 4}, {"fe80::1%eth0", 2},
			{"fd00::7", 1}, {"fd00::8", 1}}},
		{"me@h-1.a_b.example:2", []launch.Host{{"me@h-1.a_b.example", 2}}},
		{"me@fd00::7,[me@fd00::8]:2,me@[fd00::9]:3,a:2::b:1", []launch.Host{{"me@fd00::7", 1}, {"me@fd00::8", 2},
			{"me@fd00::9", 3}, {"a:2::b:1", 1}}},
		{"h1:65536", []launch.Host{{"h1", launch.MaxSlots}}},
		{"h1:2,", []launch.Host{{"h1", 2}}},
		{" ,h1:2,h2, ", []launch.Host{{"h1", 2}, {"h2", 1}}},
		{"h1,h2:3,h1:2,[h2]", []launch.Host{{"h1", 3}, {"h2", 4}}},
		{"[::1],::1", []launch.Host{{"::1", 2}}},
	} {
		if got, err := launch.ParseHosts(c.list); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%q: got %v and error %v, want %v", c.list, got, err, c.want)
		}
	}
}

// TestListsThatCannotBe checks that ParseHosts returns an error for invalid lists. The error must be short
// and say what is wrong.
func TestListsThatCannotBe(t *testing.T) {
	var many []string
	for i := range launch.MaxHosts + 1 {
		many = append(many, fmt.Sprint("h", i))
	}
	for _, c := range []struct{ list, want string }{
		{"", `got "" in ""`},
		{"h1,,h2", `got "" in "h1,,h2"`},
		{",", `got "" in ","`},
		{"h1:2,,", `got "" in "h1:2,,"`},
		{"h1:65536,h2,h1", `got "h1" in "h1:65536,h2,h1", with which host h1 has 65537 slots, want at most 65536`},
		{"h1:0", "from 1 to 65536"},
		{"h1:65537", "from 1 to 65536"},
		{"h1:-1", "from 1 to 65536"},
		{"h1:x", "from 1 to 65536"},
		{"h1:", "from 1 to 65536"},
		{"[::1]22", "as in h1:2"},
		{"[::1", "the name or the address of a host"},
		{"-oProxyCommand=x", "the name or the address of a host"},
		{"me[::1]:2", "the name or the address of a host"},
		{"[-v]", "the name or the address of a host"},
		{"h1;reboot", "the name or the address of a host"},
		{"$(x)", "the name or the address of a host"},
		{"h 1", `got "h 1", want commas between hosts, as in h,1`},
		{"h1:2, h2:2 h3:1,", `got "h1:2, h2:2 h3:1,", want commas between hosts, as in h1:2,h2:2,h3:1`},
		{"h1;reboot now", "the name or the address of a host"},
		{"{host}", "the name or the address of a host"},
		{"a:2b:1", "with commas between hosts"},
		{"h1:2:3", "with commas between hosts"},
		{"h1:2 h2:2", `got "h1:2 h2:2", want commas between hosts, as in h1:2,h2:2`},
		{"me@h1:2me@h2:1", "with commas between hosts"},
		{"[h1:2]", "with commas between hosts"},
		{"fd00::7x,h2", "with commas between hosts"},
		{":2", "the name or the address of a host"},
		{"]", "the name or the address of a host"},
		{strings.Repeat("x", 256), "the name or the address of a host"},
		{strings.Join(many, ","), "at most 4096 hosts"},
	} {
		got, err := launch.ParseHosts(c.list)
		if err == nil || !strings.Contains(err.Error(), c.want) || len(err.Error()) > 400 {
			t.Errorf("%.80q: got %v and error %v, want one with %q", c.list, got, err, c.want)
		}
	}
}

func TestParseHostFile(t *testing.T) {
	write := func(text string) string {
		path := filepath.Join(t.TempDir(), "hosts")
		testnet.WriteFile(t, path, text)
		return path
	}
	for _, c := range []struct {
		text string
		want []launch.Host
	}{
		{"# all of them\n\nh1 slots=2 # near\n\th2:3\r\n[fd00::1]:4\n[fd00::2] slots=5\nfd00::3 slots=6\nh3",
			[]launch.Host{{"h1", 2}, {"h2", 3}, {"fd00::1", 4}, {"fd00::2", 5}, {"fd00::3", 6}, {"h3", 1}}},
		{"\ufeffh1 slots = 2\nh2 slots= 3 max_slots = 3\nh3 slots =4 // near\n// far\nh4\tslots=5\tmax-slots=8\n" +
			"h5 max_slots=2\nh6:2 slots-max=4\n", []launch.Host{{"h1", 2}, {"h2", 3}, {"h3", 4}, {"h4", 5},
			{"h5", 1}, {"h6", 2}}},
		{"h1\nh2 slots=2\nh1\nh1:3\n", []launch.Host{{"h1", 5}, {"h2", 2}}},
	} {
		if got, err := launch.ParseHostFile(write(c.text)); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%q: got %v and error %v, want %v", c.text, got, err, c.want)
		}
	}
	for _, c := range []struct{ text, want string }{
		{"", "names no host"},
		{"# h1\n", "names no host"},
		{"h1\nh2 slots=0\n", `line 2: got "h2 slots=0", want a number of slots`},
		{"h1 slots=x", "want a number of slots"},
		{"h1:2:3", "with commas between hosts"},
		{"h1:2:3 slots=2", "with commas between hosts"},
		{"h1 2", "want one host per line, as HOST slots=N or HOST:N"},
		{"h1 h2", "want one host per line"},
		{"h1:2, h2:2", `line 1: got "h1:2, h2:2", want one host per line`},
		{"h1 slots=2 slots=2", "want one host per line"},
		{"h1 slots=", "want a number of slots"},
		{"h1 slots=2 max_slots=x", "want a number of slots"},
		{"h1 slots=3 max_slots=2", "want max_slots of at least 3"},
		{"-x slots=2", "the name or the address of a host"},
		{"h0\nh1:2 slots=2", "line 2: got \"h1:2 slots=2\", want one host per line"},
		{"h1\nh1 slots=65536", "line 2: got \"h1 slots=65536\", with which host h1 has 65537 slots"},
		{strings.Repeat("#", 1<<20), "names no host"},
		{strings.Repeat("#", 1<<20+1), "more than 1048576 bytes"},
	} {
		path := write(c.text)
		if got, err := launch.ParseHostFile(path); err == nil || !strings.Contains(err.Error(), c.want) ||
			!strings.Contains(err.Error(), path) {
			t.Errorf("%.80q: got %v and error %v, want one with %q and the path", c.text, got, err, c.want)
		}
	}
	if _, err := launch.ParseHostFile(t.TempDir() + "/none"); !os.IsNotExist(err) {
		t.Errorf("no file: got error %v", err)
	}
}

// TestAssignHosts places random numbers of ranks on random hosts. The ranks must fill the hosts in order.
func TestAssignHosts(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	draw := rand.New(rand.NewPCG(seed, 0))
	for range 300 {
		var hosts []launch.Host
		for i := range 1 + draw.IntN(5) {
			hosts = append(hosts, launch.Host{Name: fmt.Sprint("h", i), Slots: 1 + draw.IntN(4)})
		}
		np := 1 + draw.IntN(launch.Slots(hosts))
		places, err := launch.Assign(hosts, np)
		if err != nil || len(places) != np {
			t.Fatalf("%d ranks on %v: got %v and error %v", np, hosts, places, err)
		}
		used := make([]int, len(hosts))
		for r, p := range places {
			used[p.Host]++
			if r > 0 && p.Host < places[r-1].Host {
				t.Fatalf("%d ranks on %v: rank %d goes back to host %d", np, hosts, r, p.Host)
			}
		}
		for i, n := range used {
			if n > hosts[i].Slots || n < hosts[i].Slots && i+1 < len(hosts) && used[i+1] > 0 {
				t.Fatalf("%d ranks on %v: host %d has %d", np, hosts, i, n)
			}
		}
	}
}

func TestAssignNeedsSlots(t *testing.T) {
	_, err := launch.Assign([]launch.Host{{"h1", 2}, {"h2", 1}}, 4)
	const want = "got 4 ranks, but the hosts have only 3 slots (h1 has 2, h2 has 1): lower -np, or raise the number after a host in -H or --hostfile"
	if err == nil || err.Error() != want {
		t.Errorf("got error %v, want %s", err, want)
	}
}

func ExampleAssign() {
	hosts, err := launch.ParseHosts("a:2,b:1")
	if err != nil {
		panic(err)
	}
	places, err := launch.Assign(hosts, 3)
	if err != nil {
		panic(err)
	}
	for _, p := range places {
		fmt.Println(hosts[p.Host].Name, p.Rank, "local", p.LocalRank, "of", p.LocalSize, "cross", p.CrossRank,
			"of", p.CrossSize)
	}
	// Output:
	// a 0 local 0 of 2 cross 0 of 2
	// a 1 local 1 of 2 cross 0 of 1
	// b 2 local 0 of 1 cross 1 of 2
}

// FuzzParseHosts parses arbitrary lists. If a list is valid, the test writes its hosts as a new list, with
// brackets around addresses. Parsing the new list must return the same hosts.
func FuzzParseHosts(f *testing.F) {
	f.Add("h1:2,[fe80::1]:2,10.0.0.1:4,h3")
	f.Add("[]:1,a@b:3")
	f.Fuzz(func(t *testing.T, list string) {
		hosts, err := launch.ParseHosts(list)
		if err != nil {
			return
		}
		var words []string
		for _, h := range hosts {
			words = append(words, fmt.Sprintf("[%s]:%d", h.Name, h.Slots))
		}
		again, err := launch.ParseHosts(strings.Join(words, ","))
		if err != nil || !slices.Equal(again, hosts) {
			t.Errorf("%q: got %v, then %v and error %v", list, hosts, again, err)
		}
	})
}

// TestAssignNodes checks that the scheduler is on this host, that servers are spread over the hosts, that
// workers fill the other slots, and that hosts without nodes are left out. Placing nodes on the hosts that
// have got some must give the same result.
func TestAssignNodes(t *testing.T) {
	for _, c := range []struct {
		hosts            string
		servers, workers int
		used             string
		index            []int // of the host of each node
	}{
		{"localhost:3", 1, 2, "localhost", []int{0, 0, 0, 0}},
		{"h1:4,h2:4", 2, 4, "self h1 h2", []int{0, 1, 2, 1, 1, 1, 2}},
		{"h1:4,localhost:4", 2, 4, "h1 localhost", []int{1, 0, 1, 0, 0, 0, 1}},
		{"h1:1,h2:3,h3:2", 5, 1, "self h1 h2 h3", []int{0, 1, 2, 3, 2, 3, 2}},
		{"h1:2,h2:9", 1, 1, "self h1", []int{0, 1, 1}},
		{"h1:2,h2:9,localhost:9", 1, 1, "h1 localhost", []int{1, 0, 0}},
		{"localhost:2,h2:9", 1, 1, "localhost", []int{0, 0, 0}},
	} {
		hosts, err := launch.ParseHosts(c.hosts)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			n := &launch.Nodes{Servers: c.servers, Workers: c.workers}
			used, places, err := launch.AssignNodes(hosts, n, "self")
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			var index []int
			for _, h := range used {
				names = append(names, h.Name)
			}
			for _, p := range places {
				index = append(index, p.Host)
			}
			if strings.Join(names, " ") != c.used || !slices.Equal(index, c.index) {
				t.Errorf("%s: got hosts %q and places %v, want %q and %v", c.hosts, names, index, c.used, c.index)
			}
			if hosts = used; slices.Contains(names, "self") { // "self" is not this host for the second call
				break
			}
		}
	}
	if _, _, err := launch.AssignNodes([]launch.Host{{Name: "h1", Slots: 2}},
		&launch.Nodes{Servers: 1, Workers: 2}, "self"); err == nil {
		t.Error("3 nodes fit 2 slots")
	}
}
