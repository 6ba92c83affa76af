package engine

import (
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/tensorqueue"
)

// The method take returns the entry under a cache bit if the entry has the right name. If the entry of
// another tensor is stored under the bit, take returns nil.
func TestVotes(t *testing.T) {
	entry := func(name string, bit uint32) *tensorqueue.Entry {
		return &tensorqueue.Entry{Request: message.Request{Name: name, Bit: bit}}
	}
	var v votes
	a, b, c := entry("a", 3), entry("b", 3), entry("c", 0)
	for _, e := range []*tensorqueue.Entry{a, b, c} {
		v.add(e)
	}
	if got := v.take(3, &message.Response{Name: "a"}); got != nil {
		t.Errorf("got entry %q for a, want none, because b is stored under its bit", got.Request.Name)
	}
	if v.take(3, &message.Response{Name: "b"}) != b || v.take(3, &message.Response{Name: "b"}) != nil {
		t.Error("b was not returned exactly once")
	}
	if v.take(1, &message.Response{Name: "c"}) != nil || v.take(9, &message.Response{Name: "c"}) != nil {
		t.Error("c was returned for another bit than its own")
	}
	v.drop(a) // b has replaced a, so nothing is removed
	v.drop(c)
	v.drop(nil)
	v.drop(entry("d", 99))
	if v.take(0, &message.Response{Name: "c"}) != nil {
		t.Error("c was returned after it was dropped")
	}
}
