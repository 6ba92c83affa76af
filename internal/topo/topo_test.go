package topo_test

import (
	"testing"

	"github.com/gohvd/gohvd/internal/topo"
)

func TestFromHosts(t *testing.T) {
	hosts := []string{"a", "b", "a", "b", "c", "b"}
	want := []topo.Topology{
		{Rank: 0, Size: 6, LocalRank: 0, LocalSize: 2, CrossRank: 0, CrossSize: 3},
		{Rank: 1, Size: 6, LocalRank: 0, LocalSize: 3, CrossRank: 1, CrossSize: 3},
		{Rank: 2, Size: 6, LocalRank: 1, LocalSize: 2, CrossRank: 0, CrossSize: 2},
		{Rank: 3, Size: 6, LocalRank: 1, LocalSize: 3, CrossRank: 1, CrossSize: 2},
		{Rank: 4, Size: 6, LocalRank: 0, LocalSize: 1, CrossRank: 2, CrossSize: 3},
		{Rank: 5, Size: 6, LocalRank: 2, LocalSize: 3, CrossRank: 0, CrossSize: 1},
	}
	for r, got := range topo.FromHosts(hosts) {
		if got != want[r] {
			t.Errorf("rank %d: got %+v, want %+v", r, got, want[r])
		}
		if err := got.Validate(); err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}

func TestValidate(t *testing.T) {
	ok := topo.Topology{Rank: 1, Size: 2, LocalSize: 1, CrossSize: 1}
	if err := ok.Validate(); err != nil {
		t.Error(err)
	}
	for _, bad := range []topo.Topology{
		{},
		{Rank: 2, Size: 2, LocalSize: 1, CrossSize: 1},
		{Rank: -1, Size: 2, LocalSize: 1, CrossSize: 1},
		{Size: 1, LocalRank: 3, LocalSize: 2, CrossSize: 1},
		{Size: 1, LocalSize: 1, CrossSize: 0},
	} {
		if bad.Validate() == nil {
			t.Errorf("%+v was accepted", bad)
		}
	}
}

func TestHostID(t *testing.T) {
	base := topo.HostID("", "h", "b", "n")
	for _, other := range []string{topo.HostID("", "H", "b", "n"), topo.HostID("", "h", "B", "n"),
		topo.HostID("", "h", "b", "N")} {
		if other == base {
			t.Errorf("two hosts have the same identity %q", base)
		}
	}
	if got := topo.HostID("rack1", "h", "b", "n"); got != "rack1" {
		t.Errorf("got %q, want the given rack1", got)
	}
}

func TestFormatRanks(t *testing.T) {
	for want, ranks := range map[string][]topo.Rank{
		"no ranks": nil, "rank 3": {3}, "ranks 0 and 1": {0, 1}, "ranks 0-2": {0, 1, 2},
		"ranks 0, 1 and 3":   {0, 1, 3},
		"ranks 0-2, 5 and 7": {0, 1, 2, 5, 7}, "ranks 0 and 2-5": {0, 2, 3, 4, 5},
		"ranks 1, 3, 4, 6, 8, 10, 12, 14, 16, 18 and 2 more": {1, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22},
	} {
		if got := topo.FormatRanks(ranks); got != want {
			t.Errorf("%v: got %q, want %q", ranks, got, want)
		}
	}
}

func TestFormatReasons(t *testing.T) {
	for _, c := range []struct {
		reasons []string // of rank 10, rank 11, and so on
		want    string
	}{
		{nil, ""},
		{[]string{"a"}, "rank 10: a"},
		{[]string{"a", "a", "a"}, "ranks 10-12: a"},
		{[]string{"a", "b", "a"}, "ranks 10 and 12: a; rank 11: b"},
		{[]string{"a", "b", "c", "d", "a", "e"},
			"ranks 10 and 14: a; rank 11: b; rank 12: c; ranks 13 and 15 for other reasons"},
	} {
		var ranks []topo.Rank
		for i := range c.reasons {
			ranks = append(ranks, topo.Rank(10+i))
		}
		if got := topo.FormatReasons(ranks, ": ", c.reasons); got != c.want {
			t.Errorf("%q: got %q, want %q", c.reasons, got, c.want)
		}
	}
}
