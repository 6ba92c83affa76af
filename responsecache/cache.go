// Package responsecache remembers the responses that the ranks have agreed on, so that a rank can send a
// repeated request as one bit (docs/negotiation.md, Cache).
//
// Every rank has a Cache. The coordinator has a Primary, which is a Cache that also records the order in
// which entries were last used, the votes for the entries, and the entries that were erased recently. An
// entry keeps its bit until it is erased. It is the complete agreed response and contains nothing that is
// specific to one rank. So after every cycle the caches of all members of a process set are equal. Tests
// verify that by comparing the results of Digest.
//
// Nothing in this package is safe for concurrent use.
package responsecache

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"

	"github.com/gohvd/gohvd/internal/message"
)

// State is the result of looking up a request in a cache.
type State uint8

// These are the states of a request.
const (
	// Miss means that no entry has the name of the request.
	Miss State = iota
	// Hit means that the entry is the response to the request.
	Hit
	// Invalid means that the entry has the name of the request but other parameters.
	Invalid
)

func (s State) String() string { return [...]string{"miss", "hit", "invalid"}[s] }

// Cache maps names to bits and bits to responses. The zero value is empty and ready to use.
type Cache struct {
	entries []*message.Response // by bit; nil if the bit is free
	byName  map[string]uint32
}

// Lookup looks up the request q of a member. The argument member is the position of the member in the process
// set. If an entry has the name of q, Lookup returns the entry's bit and stores it in q.Bit. If the result is
// Hit, Lookup stores the entry in q.Hit; otherwise it sets q.Hit to nil. Lookup allocates nothing.
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

// BitOf returns the bit of the entry with the given name, and whether there is such an entry.
func (c *Cache) BitOf(name string) (bit uint32, ok bool) {
	bit, ok = c.byName[name]
	return bit, ok
}

// At returns the response with the given bit, or nil if the bit is free.
func (c *Cache) At(bit uint32) *message.Response {
	if int64(bit) >= int64(len(c.entries)) {
		return nil
	}
	return c.entries[bit]
}

// Bound returns a number that is greater than every bit that is in use.
func (c *Cache) Bound() uint32 { return uint32(len(c.entries)) }

// Len returns the number of entries.
func (c *Cache) Len() int { return len(c.byName) }

// Put stores r as the entry of bit. It returns an error if the bit or the name is in use.
func (c *Cache) Put(bit uint32, r *message.Response) error {
	if bit >= message.MaxCacheBits {
		return fmt.Errorf("responsecache: put %q: got cache bit %d, want less than %d", r.Name, bit,
			message.MaxCacheBits)
	}
	if old := c.At(bit); old != nil {
		return fmt.Errorf("responsecache: put %q: cache bit %d already has the entry %q", r.Name, bit, old.Name)
	}
	if old, ok := c.byName[r.Name]; ok {
		return fmt.Errorf("responsecache: put %q: got cache bit %d, but the name already has cache bit %d", r.Name,
			bit, old)
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

// Erase removes the entry of bit. It returns an error if the bit has no entry.
func (c *Cache) Erase(bit uint32) error {
	r := c.At(bit)
	if r == nil {
		return fmt.Errorf("responsecache: got an erasure of cache bit %d, but the cache has no entry for this bit", bit)
	}
	delete(c.byName, r.Name)
	c.entries[bit] = nil
	return nil
}

// Digest returns a hash of all bits and entries. Equal caches have equal digests.
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
		b = binary.AppendUvarint(b, uint64(len(r.Devices)))
		for _, d := range r.Devices {
			b = binary.AppendVarint(b, int64(d))
		}
		for _, text := range []string{r.Name, r.Group} {
			b = binary.AppendUvarint(b, uint64(len(text)))
			b = append(b, text...)
		}
		h.Write(b)
	}
	return h.Sum64()
}
