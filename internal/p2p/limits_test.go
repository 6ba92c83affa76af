package p2p

import (
	"slices"
	"testing"
)

// A rank whose messages no receive has matched gets an error before the receiver would refuse one.
func TestOffersAreBounded(t *testing.T) {
	p := &peer{rank: 3, x: New(Config{}), state: opening}
	for n := range uint64(maxOffers) {
		put(&p.offers, n, nil)
	}
	const want = "1048577 messages to rank 3 wait until it receives them, want at most 1048576"
	if err := p.offer(&Op{}); err == nil || err.Error() != want {
		t.Errorf("got error %v, want %s", err, want)
	}
	delete(p.offers, 0)
	if err := p.offer(&Op{}); err != nil {
		t.Error(err)
	}
}

func TestWithout(t *testing.T) {
	for i, want := range [][]int{{2, 3}, {1, 3}, {1, 2}} {
		if got := without([]int{1, 2, 3}, i); !slices.Equal(got, want) {
			t.Errorf("without element %d: got %v, want %v", i, got, want)
		}
	}
	one := make([]int, 1, 8)
	if got := without(one, 0); len(got) != 0 || cap(got) != 8 {
		t.Errorf("the last element: got %d elements of %d, want none of 8", len(got), cap(got))
	}
}
