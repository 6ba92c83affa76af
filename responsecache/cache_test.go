package responsecache_test

import (
	"math"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/responsecache"
)

func allreduce(name string, dims ...int64) *message.Response {
	return &message.Response{
		Kind: message.Allreduce, Name: name, DType: tensor.Float32, Shape: dims,
		Op: tensor.Sum, Prescale: 1, Postscale: 1,
	}
}

func allgather(name string, firstDims ...int64) *message.Response {
	return &message.Response{
		Kind: message.Allgather, Name: name, DType: tensor.Float32, Shape: tensor.Shape{0, 3},
		FirstDims: firstDims,
	}
}

func put(t *testing.T, c *responsecache.Cache, bit uint32, r *message.Response) {
	t.Helper()
	if err := c.Put(bit, r); err != nil {
		t.Fatal(err)
	}
}

func TestLookup(t *testing.T) {
	var c responsecache.Cache
	put(t, &c, 2, allreduce("g", 4, 5))
	put(t, &c, 0, allgather("rows", 7, 8))
	put(t, &c, 70, &message.Response{Kind: message.Broadcast, Name: "w", DType: tensor.Int64, Root: 1})
	if c.Len() != 3 {
		t.Errorf("%d entries, want 3", c.Len())
	}
	for _, test := range []struct {
		name   string
		of     uint32 // the bit of the entry whose request is changed and then looked up
		change func(q *message.Request)
		member int
		state  responsecache.State
	}{
		{"repeated", 2, func(*message.Request) {}, 1, responsecache.Hit},
		{"other name", 2, func(q *message.Request) { q.Name = "h" }, 0, responsecache.Miss},
		{"other kind", 2, func(q *message.Request) { q.Kind = message.Broadcast }, 0, responsecache.Invalid},
		{"other type", 2, func(q *message.Request) { q.DType = tensor.Int32 }, 0, responsecache.Invalid},
		{"other shape", 2, func(q *message.Request) { q.Shape = tensor.Shape{4, 6} }, 0,
			responsecache.Invalid},
		{"other first dimension", 2, func(q *message.Request) { q.Shape = tensor.Shape{5, 5} }, 0,
			responsecache.Invalid},
		{"fewer dimensions", 2, func(q *message.Request) { q.Shape = tensor.Shape{4} }, 0,
			responsecache.Invalid},
		{"other reduction", 2, func(q *message.Request) { q.Op = tensor.Max }, 0, responsecache.Invalid},
		{"other prescale", 2, func(q *message.Request) { q.Prescale = 2 }, 0, responsecache.Invalid},
		{"other postscale", 2, func(q *message.Request) { q.Postscale = 2 }, 0, responsecache.Invalid},
		{"own rows", 0, func(*message.Request) {}, 1, responsecache.Hit},
		{"another's rows", 0, func(q *message.Request) { q.Shape = tensor.Shape{7, 3} }, 1,
			responsecache.Invalid},
		{"other rows", 0, func(q *message.Request) { q.Shape = tensor.Shape{8, 4} }, 1,
			responsecache.Invalid},
		{"same root", 70, func(*message.Request) {}, 0, responsecache.Hit},
		{"other root", 70, func(q *message.Request) { q.Root = 0 }, 0, responsecache.Invalid},
	} {
		q := c.At(test.of).Request(test.member)
		test.change(&q)
		for guess := range uint32(80) { // the right bit, bits of other names, free bits, too high bits
			q := q
			q.Bit = guess
			if bit, state := c.Lookup(&q, test.member); state != test.state || state != responsecache.Miss &&
				(bit != test.of || q.Bit != bit) {
				t.Errorf("%s, guess %d: got bit %d, %v and the guess %d, want %d and %v", test.name, guess,
					bit, state, q.Bit, test.of, test.state)
			}
		}
		bit, state := c.Lookup(&q, test.member)
		if state != test.state || state != responsecache.Miss && bit != test.of {
			t.Errorf("%s: got %v of bit %d, want %v of bit %d", test.name, state, bit, test.state, test.of)
		}
	}
	q := c.At(2).Request(0)
	if n := testing.AllocsPerRun(10, func() { c.Lookup(&q, 0) }); n != 0 {
		t.Errorf("Lookup makes %v allocations", n)
	}
}

func TestPutAndErase(t *testing.T) {
	var c responsecache.Cache
	put(t, &c, 1, allreduce("a", 1))
	for _, test := range []struct {
		name string
		err  error
		want string
	}{
		{"taken bit", c.Put(1, allreduce("b", 1)), `responsecache: put "b": cache bit 1 already has the entry "a"`},
		{"taken name", c.Put(0, allreduce("a", 1)),
			`responsecache: put "a": got cache bit 0, but the name already has cache bit 1`},
		{"bit too high", c.Put(message.MaxCacheBits, allreduce("b", 1)),
			`responsecache: put "b": got cache bit 1048576, want less than 1048576`},
		{"highest number", c.Put(math.MaxUint32, allreduce("b", 1)), `want less than 1048576`},
		{"free bit", c.Erase(0), "responsecache: got an erasure of cache bit 0, but the cache has no entry for this bit"},
		{"bit that never was", c.Erase(math.MaxUint32),
			"responsecache: got an erasure of cache bit 4294967295, but the cache has no entry for this bit"},
	} {
		if test.err == nil || !strings.Contains(test.err.Error(), test.want) {
			t.Errorf("%s: got error %v, want %q", test.name, test.err, test.want)
		}
	}
	if c.Len() != 1 || c.At(1).Name != "a" || c.At(0) != nil || c.At(math.MaxUint32) != nil {
		t.Error("a call that returned an error has changed the cache")
	}
	if bit, ok := c.BitOf("a"); !ok || bit != 1 {
		t.Errorf("a has bit %d, %v", bit, ok)
	}
	if err := c.Erase(1); err != nil {
		t.Fatal(err)
	}
	if _, ok := c.BitOf("a"); ok || c.Len() != 0 || c.At(1) != nil {
		t.Error("the erased entry is still there")
	}
	if c.Bound() != 2 {
		t.Errorf("bits are below %d, want 2", c.Bound())
	}
	put(t, &c, 1, allreduce("b", 1))
	put(t, &c, 0, allreduce("a", 1))
}

func TestDigest(t *testing.T) {
	build := func(change func(*responsecache.Cache)) uint64 {
		var c responsecache.Cache
		put(t, &c, 0, allreduce("a", 4))
		put(t, &c, 2, allgather("rows", 7, 8))
		if change != nil {
			change(&c)
		}
		return c.Digest()
	}
	replace := func(bit uint32, r *message.Response) func(*responsecache.Cache) {
		return func(c *responsecache.Cache) {
			if err := c.Erase(bit); err != nil {
				t.Fatal(err)
			}
			put(t, c, bit, r)
		}
	}
	with := func(r *message.Response, change func(*message.Response)) *message.Response {
		change(r)
		return r
	}
	want := build(nil)
	for name, change := range map[string]func(*responsecache.Cache){
		"put and erased": func(c *responsecache.Cache) {
			put(t, c, 9, allreduce("b", 1))
			if err := c.Erase(9); err != nil {
				t.Fatal(err)
			}
		},
		"an equal entry": replace(0, allreduce("a", 4)),
		"another order": func(c *responsecache.Cache) {
			replace(0, allreduce("x", 4))(c)
			replace(2, allgather("rows", 7, 8))(c)
			replace(0, allreduce("a", 4))(c)
		},
	} {
		if got := build(change); got != want {
			t.Errorf("%s: the digest differs for equal caches", name)
		}
	}
	seen := map[uint64]string{want: "the original"}
	for name, change := range map[string]func(*responsecache.Cache){
		"empty": func(c *responsecache.Cache) { *c = responsecache.Cache{} },
		"one less": func(c *responsecache.Cache) {
			if err := c.Erase(2); err != nil {
				t.Fatal(err)
			}
		},
		"one more": func(c *responsecache.Cache) { put(t, c, 1, allreduce("b", 1)) },
		"other bit": func(c *responsecache.Cache) {
			r := c.At(0)
			if err := c.Erase(0); err != nil {
				t.Fatal(err)
			}
			put(t, c, 1, r)
		},
		"other name":      replace(0, allreduce("b", 4)),
		"other shape":     replace(0, allreduce("a", 5)),
		"more dimensions": replace(0, allreduce("a", 4, 1)),
		"scalar":          replace(0, allreduce("a")),
		"other type": replace(0, with(allreduce("a", 4), func(r *message.Response) {
			r.DType = tensor.Int32
		})),
		"other kind": replace(0, with(allreduce("a", 4), func(r *message.Response) {
			r.Kind = message.Broadcast
		})),
		"other reduction": replace(0, with(allreduce("a", 4), func(r *message.Response) {
			r.Op = tensor.Min
		})),
		"other prescale":  replace(0, with(allreduce("a", 4), func(r *message.Response) { r.Prescale = 2 })),
		"other postscale": replace(0, with(allreduce("a", 4), func(r *message.Response) { r.Postscale = 2 })),
		"other root":      replace(0, with(allreduce("a", 4), func(r *message.Response) { r.Root = 2 })),
		"other wire type": replace(0, with(allreduce("a", 4), func(r *message.Response) {
			r.Wire = tensor.Float16
		})),
		"on devices": replace(0, with(allreduce("a", 4), func(r *message.Response) {
			r.Devices = []tensor.Device{1, 2}
		})),
		"on other devices": replace(0, with(allreduce("a", 4), func(r *message.Response) {
			r.Devices = []tensor.Device{1, 3}
		})),
		"group":      replace(0, with(allreduce("a", 4), func(r *message.Response) { r.Group = "G" })),
		"group size": replace(0, with(allreduce("a", 4), func(r *message.Response) { r.GroupSize = 2 })),
		"parts": replace(0, with(allreduce("a", 4), func(r *message.Response) {
			r.Parts = message.Parts{int64(tensor.Float32), 1, 4}
		})),
		"other parts": replace(0, with(allreduce("a", 4), func(r *message.Response) {
			r.Parts = message.Parts{int64(tensor.Float32), 2, 4, 1}
		})),
		"other rows":     replace(2, allgather("rows", 7, 9)),
		"rows exchanged": replace(2, allgather("rows", 8, 7)),
	} {
		got := build(change)
		if other, ok := seen[got]; ok {
			t.Errorf("%s: the digest equals the digest of %s", name, other)
		}
		seen[got] = name
	}
}

func TestStateString(t *testing.T) {
	if got := responsecache.Miss.String() + " " + responsecache.Hit.String() + " " +
		responsecache.Invalid.String(); got != "miss hit invalid" {
		t.Errorf("got %q", got)
	}
}
