package responsecache_test

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/responsecache"
)

// assign puts r into the cache and issues the cycle. It returns the bit of r, and the bits that were erased
// in the cycle.
func assign(t *testing.T, p *responsecache.Primary, r *message.Response, cycle uint64,
	pinned ...uint32) (bit uint32, ok bool, erased []uint32) {
	t.Helper()
	var pin message.Bits
	for _, b := range pinned {
		pin.Set(b)
	}
	bit, ok = p.Assign(r, cycle, pin)
	return bit, ok, p.Issue(cycle, nil)
}

// wantBit puts r into the cache and issues the cycle. It fails the test unless the bit of r equals want and
// the cycle erases exactly the bits in erased.
func wantBit(t *testing.T, p *responsecache.Primary, r *message.Response, cycle uint64, want uint32,
	erased ...uint32) {
	t.Helper()
	bit, ok, gone := assign(t, p, r, cycle)
	if !ok || bit != want || !slices.Equal(gone, erased) {
		t.Fatalf("%q: got bit %d (%v) for %v, want bit %d for %v", r.Name, bit, ok, gone, want, erased)
	}
}

func vote(t *testing.T, p *responsecache.Primary, member int, bit uint32, seen uint64) (complete bool) {
	t.Helper()
	late, err := p.Vote(member, bit, seen)
	if late != nil || err != nil {
		t.Fatalf("vote for bit %d: late %v, error %v", bit, late, err)
	}
	return p.Votes(bit) == 2
}

func TestVotes(t *testing.T) {
	p := responsecache.NewPrimary(4)
	wantBit(t, p, allreduce("a", 1), 1, 0)
	if vote(t, p, 1, 0, 1) {
		t.Error("complete with one vote of two")
	}
	if p.Voted(0, 0) || !p.Voted(1, 0) || p.Votes(0) != 1 {
		t.Error("the vote was counted for the wrong member")
	}
	if _, err := p.Vote(1, 0, 1); err == nil ||
		!strings.Contains(err.Error(), `second vote for cache bit 0 ("a")`) {
		t.Errorf("second vote: got error %v", err)
	}
	if !vote(t, p, 0, 0, 1) {
		t.Error("not complete with all votes")
	}
	p.Granted(0)
	if p.Voted(0, 0) || p.Voted(1, 0) || p.Votes(0) != 0 {
		t.Error("there are votes after the grant")
	}
	vote(t, p, 1, 0, 1)
	for _, test := range []struct {
		name string
		bit  uint32
		seen uint64
	}{
		{"free bit", 1, 1}, {"bit that never was", 1 << 19, 1}, {"before the put", 0, 0},
	} {
		if _, err := p.Vote(0, test.bit, test.seen); err == nil ||
			!strings.Contains(err.Error(), "had no entry at cycle") {
			t.Errorf("%s: got error %v", test.name, err)
		}
		if _, _, err := p.NameAt(test.bit, test.seen); err == nil ||
			!strings.Contains(err.Error(), "had no entry at cycle") {
			t.Errorf("%s: got error %v", test.name, err)
		}
	}
}

func TestBits(t *testing.T) {
	p := responsecache.NewPrimary(3)
	wantBit(t, p, allreduce("a", 1), 1, 0)
	wantBit(t, p, allreduce("b", 1), 2, 1)
	wantBit(t, p, allreduce("c", 1), 3, 2)
	// Assign uses the lowest free bit and does not change the bits of other entries.
	p.Invalidate(1)
	p.Invalidate(0)
	if !p.Unissued() {
		t.Error("Unissued is false after two erasures")
	}
	if bit, ok := p.Assign(allreduce("d", 1), 4, nil); !ok || bit != 0 {
		t.Errorf("d: got bit %d (%v), want the lower of the free bits 0 and 1", bit, ok)
	}
	if gone := p.Issue(4, []uint32{9}); !slices.Equal(gone, []uint32{9, 1, 0}) || p.Unissued() {
		t.Errorf("erased %v, want 1 and 0 appended in the order of erasure", gone)
	}
	if bit, ok := p.BitOf("c"); !ok || bit != 2 {
		t.Errorf("c has bit %d (%v), want 2 as before", bit, ok)
	}
	wantBit(t, p, allreduce("e", 1), 5, 1)
	// If a name already has a bit, it does not get a second one.
	if bit, ok, _ := assign(t, p, allreduce("e", 1), 6); ok {
		t.Errorf("e got bit %d as a second bit", bit)
	}
}

func TestEviction(t *testing.T) {
	p := responsecache.NewPrimary(3)
	for i, name := range []string{"a", "b", "c"} {
		wantBit(t, p, allreduce(name, 1), uint64(i+1), uint32(i))
	}
	// Entries are ordered by their last grants. After the grant of a, b is the oldest entry, followed by c.
	vote(t, p, 0, 0, 3)
	vote(t, p, 1, 0, 3)
	p.Granted(0)
	wantBit(t, p, allreduce("d", 1), 4, 1, 1) // the order is now c, a, d
	// An entry with a vote is not evicted, so c keeps its bit.
	vote(t, p, 1, 2, 4)
	wantBit(t, p, allreduce("e", 1), 5, 0, 0) // the order is now c, d, e
	// A pinned entry is not evicted either.
	if bit, ok, gone := assign(t, p, allreduce("f", 1), 6, 1); !ok || bit != 0 ||
		!slices.Equal(gone, []uint32{0}) {
		t.Errorf("f: got bit %d (%v) for %v, want 0", bit, ok, gone)
	} // the order is now c, d, f
	if bit, ok, gone := assign(t, p, allreduce("g", 1), 7, 0, 1); ok || len(gone) > 0 {
		t.Errorf("g: got bit %d for %v, want none, because all entries have votes or are pinned", bit, gone)
	}
	// An entry is not evicted in the cycle in which it got its bit. So the first call of Assign evicts the
	// entry of bit 1, the second evicts the entry of bit 0, and the third finds no entry to evict.
	if bit, ok := p.Assign(allreduce("h", 1), 8, nil); !ok || bit != 1 {
		t.Errorf("h: got bit %d (%v), want 1", bit, ok)
	}
	if bit, ok := p.Assign(allreduce("i", 1), 8, nil); !ok || bit != 0 {
		t.Errorf("i: got bit %d (%v), want 0", bit, ok)
	}
	if bit, ok := p.Assign(allreduce("j", 1), 8, nil); ok {
		t.Errorf("j: got bit %d of an entry put in the same cycle", bit)
	}
	if gone := p.Issue(8, nil); !slices.Equal(gone, []uint32{1, 0}) {
		t.Errorf("erased %v, want 1 and 0", gone)
	}
	if p.Len() != 3 {
		t.Errorf("%d entries, want 3", p.Len())
	}
	// The number of grants is known only for names that were put into the cache before the first eviction.
	if c, h := p.Grants(2), p.Grants(1); c != 1 || h != 0 {
		t.Errorf("got %d grants of c and %d of h, want 1 and none that are known", c, h)
	}
}

func TestInvalidations(t *testing.T) {
	p := responsecache.NewPrimary(2)
	for i := range 3 {
		bit, ok, _ := assign(t, p, allreduce("a", int64(i)), uint64(i+1))
		if !ok || bit != 0 {
			t.Fatalf("after %d invalidations: got bit %d (%v), want 0", i, bit, ok)
		}
		vote(t, p, 2, 0, uint64(i+1))
		vote(t, p, 0, 0, uint64(i+1))
		want := []responsecache.LateVote{
			{Member: 0, Request: allreduce("a", int64(i)).Request(0)},
			{Member: 2, Request: allreduce("a", int64(i)).Request(2)},
		}
		if late := p.Invalidate(0); !reflect.DeepEqual(late, want) {
			t.Errorf("invalidation %d: got %v, want %v", i+1, late, want)
		}
	}
	if bit, ok, _ := assign(t, p, allreduce("a", 9), 4); ok {
		t.Errorf("got bit %d after three invalidations", bit)
	}
	// Evictions do not count as invalidations, so names that are evicted often are still cached.
	q := responsecache.NewPrimary(1)
	for i := range 10 {
		if _, ok, _ := assign(t, q, allreduce([]string{"a", "b"}[i%2], 1), uint64(i+1)); !ok {
			t.Fatalf("not cached after %d evictions", i)
		}
	}
}

func TestNotCached(t *testing.T) {
	p := responsecache.NewPrimary(0)
	if bit, ok, _ := assign(t, p, allreduce("a", 1), 1); ok {
		t.Errorf("capacity 0: got bit %d", bit)
	}
	p = responsecache.NewPrimary(8)
	for _, r := range []*message.Response{
		{Kind: message.Barrier, Name: "b"}, {Kind: message.Join, Name: "j"},
		{Kind: message.AddProcessSet, Name: "s"},
		{Kind: message.RemoveProcessSet, Name: "s"}, {Kind: message.Error, Name: "e", Text: "no"},
	} {
		if bit, ok, _ := assign(t, p, r, 1); ok || responsecache.Cacheable(r.Kind) {
			t.Errorf("%v: got bit %d", r.Kind, bit)
		}
	}
	for i, r := range []*message.Response{
		allreduce("a", 1), allgather("g", 1),
		{Kind: message.Broadcast, Name: "w", DType: tensor.Uint8}, {Kind: message.Reducescatter, Name: "r"},
		{Kind: message.Alltoall, Name: "x"},
	} {
		wantBit(t, p, r, 1, uint32(i))
	}
}

// A vote counts for the entry that the bit had in the last cycle that the member had seen.
func TestLateVotes(t *testing.T) {
	p := responsecache.NewPrimary(1)
	wantBit(t, p, allgather("a", 5, 6), 1, 0)
	wantBit(t, p, allreduce("b", 1), 2, 0, 0)
	late, err := p.Vote(1, 0, 1)
	if want := allgather("a", 5, 6).Request(1); err != nil || late == nil || !reflect.DeepEqual(*late, want) {
		t.Errorf("vote of cycle 1: got %v, %v, want the request %v", late, err, want)
	}
	if p.Voted(1, 0) {
		t.Error("the late vote was counted for b")
	}
	if name, current, err := p.NameAt(0, 1); name != "a" || current || err != nil {
		t.Errorf("bit 0 at cycle 1: got %q, %v, %v", name, current, err)
	}
	if name, current, err := p.NameAt(0, 2); name != "b" || !current || err != nil {
		t.Errorf("bit 0 at cycle 2: got %q, %v, %v", name, current, err)
	}
	vote(t, p, 0, 0, 2)

	// No cycle has issued this erasure yet, so no member can have seen it, whatever cycle its vote names.
	if got := p.Invalidate(0); len(got) != 1 {
		t.Errorf("got %v, want the vote of member 0", got)
	}
	if late, err := p.Vote(1, 0, 5); err != nil || late == nil || late.Name != "b" {
		t.Errorf("vote for an entry whose erasure is not issued: got %v, %v", late, err)
	}
	p.Issue(6, nil)
	if _, err := p.Vote(1, 0, 6); err == nil {
		t.Error("a vote for an erased entry by a member that has seen the erasure gave no error")
	}

	// An erased entry is remembered until all members have seen the erasure.
	for _, c := range []struct {
		seen uint64
		kept int
	}{{1, 2}, {2, 1}, {5, 1}, {6, 0}} {
		if p.Forget(c.seen); p.Remembered() != c.kept {
			t.Errorf("all have seen cycle %d: %d erased entries are kept, want %d", c.seen, p.Remembered(),
				c.kept)
		}
	}
}
