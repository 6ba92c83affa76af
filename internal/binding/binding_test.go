package binding

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// host describes a machine: for each NUMA node, the CPUs of each core.
type host [][]CPUs

// root returns the files that the kernel shows on the host.
func (h host) root() fstest.MapFS {
	m := fstest.MapFS{}
	for i, cores := range h {
		m[fmt.Sprintf("sys/devices/system/node/node%d/cpulist", i)] = &fstest.MapFile{
			Data: []byte(join(cores).String() + "\n")}
		for _, core := range cores {
			for _, cpu := range core {
				m[fmt.Sprintf("sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu)] = &fstest.MapFile{
					Data: []byte(core.String() + "\n")}
			}
		}
	}
	return m
}

// single returns cores of one CPU each, from low to high.
func single(low, high int) (cores []CPUs) {
	for cpu := low; cpu <= high; cpu++ {
		cores = append(cores, CPUs{cpu})
	}
	return cores
}

var (
	plain = host{single(0, 7)}
	// twoSockets has 2 sockets of 4 cores with 2 hardware threads. As on most servers, the second threads of
	// all cores have the highest numbers.
	twoSockets = host{
		{{0, 8}, {1, 9}, {2, 10}, {3, 11}},
		{{4, 12}, {5, 13}, {6, 14}, {7, 15}},
	}
	// withMemory has a node between the others that has only memory.
	withMemory = host{single(0, 1), nil, single(2, 3)}
)

func cpus(t *testing.T, text string) CPUs {
	t.Helper()
	c, err := parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestPlace(t *testing.T) {
	for _, c := range []struct {
		host    host
		allowed string
		to      Unit
		want    string // the CPUs of each rank, or the error
	}{
		{plain, "0-7", Core, "0-7"},
		{plain, "0-7", Core, "0-3 4-7"},
		{plain, "0-7", Core, "0-1 2-3 4-5"},
		{plain, "0-7", Core, "0 1 2 3 4 5 6 7"},
		{plain, "1,3,6", Core, "1 3 6"},
		{plain, "1,3,6", Core, "1 3"},
		{plain, "0-7", NUMA, "error: only one NUMA node"},
		{twoSockets, "0-15", Core, "0-3,8-11"}, // one rank stays in one node
		{twoSockets, "0-15", Core, "0-3,8-11 4-7,12-15"},
		{twoSockets, "0-15", Core, "0-1,8-9 2-3,10-11 4-5,12-13"},
		{twoSockets, "0-15", Core, "0-1,8-9 2-3,10-11 4-5,12-13 6-7,14-15"},
		{twoSockets, "0-15", Core, "0,8 1,9 3,11 4,12 6,14"},
		{twoSockets, "0-15", Core, "0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15"},
		{twoSockets, "0-15", Core, "error: got 9 ranks on this host, but they may use only 8 cores (CPUs 0-15)"},
		{twoSockets, "0-15", NUMA, "0-3,8-11"},
		{twoSockets, "0-15", NUMA, "0-3,8-11 4-7,12-15"},
		{twoSockets, "0-15", NUMA, "0-3,8-11 0-3,8-11 4-7,12-15"},
		{twoSockets, "0-15", NUMA, "0-3,8-11 0-3,8-11 4-7,12-15 4-7,12-15"},
		// Only some CPUs are allowed: of core 3 only one thread, and two cores of the second node.
		{twoSockets, "3,4,5,12,13", Core, "3 4,12 5,13"},
		{twoSockets, "3,4,5,12,13", NUMA, "3 4-5,12-13 4-5,12-13"},
		{twoSockets, "3,11", Core, "error: got 2 ranks on this host, but they may use only 1 core (CPUs 3,11)"},
		{twoSockets, "2,3", NUMA, "2-3 2-3"},
		{withMemory, "0-3", Core, "0 1 2 3"},
		{withMemory, "0-3", NUMA, "0-1 2-3"},
		{plain, "0-7", "socket", `error: got the unit "socket"`},
	} {
		top, err := Read(c.host.root(), cpus(t, c.allowed))
		if err != nil {
			t.Fatal(err)
		}
		want := strings.Fields(c.want)
		size := len(want)
		text, fails := strings.CutPrefix(c.want, "error: ")
		if fails {
			size = 2
			fmt.Sscanf(text, "got %d ranks", &size)
		}
		var got []string
		for rank := range size {
			p, err := top.Place(c.to, rank, size)
			if err != nil {
				if !fails || !strings.Contains(err.Error(), text) {
					t.Errorf("%s of %s: got error %v, want %s", c.to, c.allowed, err, c.want)
				}
				continue
			}
			got = append(got, p.String())
		}
		if !fails && !slices.Equal(got, want) || fails && len(got) > 0 {
			t.Errorf("%s of %s: got %q, want %q", c.to, c.allowed, got, want)
		}
	}
}

// TestPlaceShares checks for many masks and sizes that the ranks of a host get allowed cores, the same number
// of cores each, and with Core no core twice.
func TestPlaceShares(t *testing.T) {
	for mask := 1; mask < 1<<16; mask += 7 {
		var allowed CPUs
		for cpu := range 16 {
			if mask>>cpu&1 != 0 {
				allowed = append(allowed, cpu)
			}
		}
		top, err := Read(twoSockets.root(), allowed)
		if err != nil {
			t.Fatal(err)
		}
		for size := 1; size <= top.cores(); size++ {
			used := make(map[int]int)
			share := 0
			for rank := range size {
				p, err := top.Place(Core, rank, size)
				if err != nil {
					t.Fatalf("CPUs %s, %d ranks: %v", allowed, size, err)
				}
				cores := make(map[int]bool)
				for _, cpu := range p {
					cores[cpu%8] = true
					if used[cpu]++; used[cpu] > 1 || !slices.Contains(allowed, cpu) {
						t.Fatalf("CPUs %s, %d ranks: rank %d got %s", allowed, size, rank, p)
					}
				}
				if share = max(share, len(cores)); len(cores) != share {
					t.Fatalf("CPUs %s, %d ranks: rank %d got %s, want %d cores", allowed, size, rank, p, share)
				}
			}
		}
	}
}

func TestReadWithoutTopology(t *testing.T) {
	noNodes := plain.root()
	delete(noNodes, "sys/devices/system/node/node0/cpulist")
	if top, err := Read(noNodes, CPUs{0, 1}); err != nil || top.Describe() != "2 cores on CPUs 0-1, one NUMA node" {
		t.Errorf("without NUMA: got %+v and error %v", top, err)
	}
	for want, root := range map[string]fstest.MapFS{
		"read the topology of the processor": {},
		`got "0-", want a list of CPUs`:      {"sys/devices/system/node/node0/cpulist": {Data: []byte("0-")}},
		"has CPU 1":                          host{single(0, 0)}.root(),
		"want a list with CPU 0": {
			"sys/devices/system/cpu/cpu0/topology/thread_siblings_list": {Data: []byte("1")},
		},
	} {
		if _, err := Read(root, CPUs{0, 1}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want %q", err, want)
		}
	}
}

func TestDescribe(t *testing.T) {
	top, err := Read(twoSockets.root(), cpus(t, "0-3,8,12"))
	if err != nil {
		t.Fatal(err)
	}
	const want = "5 cores on CPUs 0-3,8,12, in 2 of 2 NUMA nodes: node 0 has 0-3,8, node 1 has 12"
	if got := top.Describe(); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestParse(t *testing.T) {
	for text, want := range map[string]string{"": "", "\n": "", "3\n": "3", "0-3,8": "0-3,8", "8,0-1,1": "0-1,8"} {
		if got, err := parse(text); err != nil || got.String() != want {
			t.Errorf("%q: got %v and error %v, want %s", text, got, err, want)
		}
	}
	for _, text := range []string{"x", "1-", "-1", "3-1", "0-99999999", "1,,2"} {
		if got, err := parse(text); err == nil {
			t.Errorf("%q: got %v, want an error", text, got)
		}
	}
}
