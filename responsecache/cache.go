// Package responsecache remembers what ranks agreed on, so that a repeated request is one bit instead of a
// message (docs/negotiation.md, Cache).
//
// Every rank holds a Cache; the coordinator holds a Primary, which is a Cache together with the recency of
// its entries, the votes for them, and the entries lately erased. A bit is never renumbered. An entry is the
// whole agreed response and nothing local, so after every cycle the caches of all members of a process set are
// equal, which Digest shows.
//
// Nothing here is safe for concurrent use.
package responsecache

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"

	"github.com/gohvd/gohvd/internal/message"
)

// State is what a cache knows of a request.
type State uint8

// The states.
const (
	// Miss: no entry has the request's name.
	Miss State = iota
	// Hit: the entry is what the request asks for.
	Hit
	// Invalid: the entry has the request's name and other parameters.
	Invalid
)

func (s State) String() string { return [...]string{"miss", "hit", "invalid"}[s] }

// Cache maps names to bits and bits to responses. The zero value is empty and ready.
type Cache struct {
	entries []*message.Response // by bit; nil where free
	byName  map[string]uint32
}

// Lookup classifies q, a request of the given member (an index into the process set), and sets q.Bit if it knows the name, and q.Hit.
// It allocates nothing.
func (c *Cache) Lookup(q *message.Request, member int) (bit uint32, s State) {
	bit, q.Hit = q.Bit, nil
	if r := c.At(bit); r == nil || r.Name != q.Name {
		var ok bool
		if bit, ok = c.byName[q.Name]; !ok {
			return 0, Miss
		}
		q.Bit = bit
	}
	r := c.entries[bit]
	if !r.Matches(q, member) {
		return bit, Invalid
	}
	q.Hit = r
	return bit, Hit
}

// BitOf returns the bit of a name.
func (c *Cache) BitOf(name string) (bit uint32, ok bool) {
	bit, ok = c.byName[name]
	return bit, ok
}

// At returns the response that bit stands for, or nil.
func (c *Cache) At(bit uint32) *message.Response {
	if int64(bit) >= int64(len(c.entries)) {
		return nil
	}
	return c.entries[bit]
}

// Bound returns a number that all bits are below.
func (c *Cache) Bound() uint32 { return uint32(len(c.entries)) }

// Len returns the number of entries.
func (c *Cache) Len() int { return len(c.byName) }

// Put makes bit stand for r. The bit and the name must be free.
func (c *Cache) Put(bit uint32, r *message.Response) error {
	if bit >= message.MaxCacheBits {
		return fmt.Errorf("responsecache: put %q as bit %d, want less than %d", r.Name, bit, message.MaxCacheBits)
	}
	if old := c.At(bit); old != nil {
		return fmt.Errorf("responsecache: put %q as bit %d, which stands for %q", r.Name, bit, old.Name)
	}
	if old, ok := c.byName[r.Name]; ok {
		return fmt.Errorf("responsecache: put %q as bit %d, but it has bit %d", r.Name, bit, old)
	}
	for int64(len(c.entries)) <= int64(bit) {
		c.entries = append(c.entries, nil)
	}
	if c.byName == nil {
		c.byName = make(map[string]uint32)
	}
	c.entries[bit] = r
	c.byName[r.Name] = bit
	return nil
}

// Erase makes bit free. It must stand for something.
func (c *Cache) Erase(bit uint32) error {
	r := c.At(bit)
	if r == nil {
		return fmt.Errorf("responsecache: erase bit %d, which is free", bit)
	}
	delete(c.byName, r.Name)
	c.entries[bit] = nil
	return nil
}

// Digest returns a hash of the bits and what they stand for. Equal caches have equal digests.
func (c *Cache) Digest() uint64 {
	h := fnv.New64a()
	var b []byte
	for bit, r := range c.entries {
		if r == nil {
			continue
		}
		b = binary.AppendUvarint(b[:0], uint64(bit))
		b = append(b, byte(r.Kind), byte(r.DType), byte(r.Op), byte(r.Wire))
		b = binary.AppendVarint(b, int64(r.Root))
		b = binary.AppendVarint(b, int64(r.GroupSize))
		b = binary.AppendUvarint(b, math.Float64bits(r.Prescale))
		b = binary.AppendUvarint(b, math.Float64bits(r.Postscale))
		for _, dims := range [][]int64{r.Shape, r.FirstDims, r.Parts} {
			b = binary.AppendUvarint(b, uint64(len(dims)))
			for _, d := range dims {
				b = binary.AppendVarint(b, d)
			}
		}
		for _, text := range []string{r.Name, r.Group} {
			b = binary.AppendUvarint(b, uint64(len(text)))
			b = append(b, text...)
		}
		h.Write(b)
	}
	return h.Sum64()
}
