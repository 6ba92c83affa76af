package sidecar

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/sidecartest"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
	"github.com/gohvd/gohvd/internal/tensor"
)

// ranks starts a job of n ranks with one client each. Between Init and Shutdown it calls f concurrently for
// all ranks r. c is the client of rank r. It has an arena with the number r+1, and b is the memory of this
// arena.
func ranks(t *testing.T, n int, f func(r int, c *client, b []byte)) {
	t.Helper()
	all(job(t, n), func(r int, s *Server) {
		c := connect(t, s)
		if ready := c.Init(); int(ready.Rank) != r || int(ready.Size) != n || ready.Epoch != 1 {
			t.Errorf("rank %d of %d got ready: %v", r, n, ready)
		}
		f(r, c, c.Arena(uint32(r+1), 1<<20))
		c.Shutdown()
		c.bye()
	})
}

// at describes the numBytes bytes at offset in the arena of rank r.
func at(r int, offset, numBytes int) *sidecarpb.Memory {
	return &sidecarpb.Memory{Arena: uint32(r + 1), Offset: uint64(offset), Bytes: uint64(numBytes)}
}

// TestOperations checks the result of each operation, with outputs that the client provides and with outputs
// that the sidecar allocates.
func TestOperations(t *testing.T) {
	const n = 3
	ranks(t, n, func(r int, c *client, b []byte) {
		x := tensor.View[int32](b)
		const out = 1 << 16 // byte offset of the outputs in the arena
		rows := int64(6)
		if r == 1 {
			rows = 0
		}
		gathered := []int32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 200, 201, 202, 203, 204, 205, 206, 207, 208,
			209, 210, 211}
		for _, c2 := range []struct {
			what    string
			op      *sidecarpb.Operation
			shape   []int64
			outSize int
			want    []int32
			wantDim []int64
			splits  []int64
		}{
			{"allreduce", &sidecarpb.Operation{Kind: 1, ReduceOp: 2}, []int64{2, 2}, 16,
				[]int32{300, 303, 306, 309}, []int64{2, 2}, nil},
			{"average", &sidecarpb.Operation{Kind: 1}, []int64{2}, 8, []int32{100, 101}, []int64{2}, nil},
			{"scaled", &sidecarpb.Operation{Kind: 1, ReduceOp: 2, Prescale: new(2.0), Postscale: new(0.5)},
				[]int64{2}, 8, []int32{300, 303}, []int64{2}, nil},
			{"scaled by 1", &sidecarpb.Operation{Kind: 1, ReduceOp: 2, Prescale: new(1.0),
				Postscale: new(1.0)}, []int64{2}, 8, []int32{300, 303}, []int64{2}, nil},
			{"scaled to 0", &sidecarpb.Operation{Kind: 1, ReduceOp: 2, Prescale: new(0.0)}, []int64{2}, 8,
				[]int32{0, 0}, []int64{2}, nil},
			{"scaled to 0 at last", &sidecarpb.Operation{Kind: 5, ReduceOp: 2, Postscale: new(0.0)},
				[]int64{3}, 4, []int32{0}, []int64{1}, nil},
			{"scalar", &sidecarpb.Operation{Kind: 1, ReduceOp: 4}, nil, 4, []int32{200}, nil, nil},
			{"allgather", &sidecarpb.Operation{Kind: 2}, []int64{rows, 2}, 96, gathered, []int64{12, 2}, nil},
			{"broadcast", &sidecarpb.Operation{Kind: 3, RootRank: 2}, []int64{3}, 12, []int32{200, 201, 202},
				[]int64{3}, nil},
			{"alltoall", &sidecarpb.Operation{Kind: 4}, []int64{3}, 12, []int32{int32(r), int32(100 + r),
				int32(200 + r)}, []int64{3}, []int64{1, 1, 1}},
			{"reducescatter", &sidecarpb.Operation{Kind: 5, ReduceOp: 2}, []int64{6, 1}, 8,
				[]int32{int32(300 + 6*r), int32(303 + 6*r)}, []int64{2, 1}, nil},
			{"min", &sidecarpb.Operation{Kind: 5, ReduceOp: 3}, []int64{3}, 4, []int32{int32(r)}, []int64{1},
				nil},
		} {
			for _, given := range []bool{false, true} {
				for k := range x {
					x[k] = int32(100*r + k)
				}
				elems, err := tensor.Shape(c2.shape).NumElems()
				if err != nil {
					t.Error(err)
				}
				o := c2.op
				o.Dtype, o.Name = 5, c2.what
				tt := &sidecarpb.Tensor{Shape: c2.shape, Input: at(r, 0, int(4*elems))}
				if given {
					tt.Output = at(r, out, c2.outSize)
				}
				o.Tensors = []*sidecarpb.Tensor{tt}
				a := c.MustRun(o)
				m := a.Results[0].Memory
				got := tensor.View[int32](c.Arenas[m.Arena][m.Offset : m.Offset+m.Bytes])
				wantShape := !given || c2.splits != nil
				if !slices.Equal(got, c2.want) ||
					wantShape && !slices.Equal(a.Results[0].Shape, c2.wantDim) ||
					!slices.Equal(a.ReceivedSplits, c2.splits) {
					t.Errorf("rank %d, %s, output given: %v: got %v of shape %v with splits %v, want %v, %v, %v",
						r, c2.what, given, got, a.Results[0].Shape, a.ReceivedSplits, c2.want, c2.wantDim,
						c2.splits)
				}
				if given != (m.Arena < wire.OwnArenas) {
					t.Errorf("%s, output given: %v: the result is in arena %d", c2.what, given, m.Arena)
				}
				if !given {
					c.Send(sidecartest.Free(m.Arena, m.Offset))
					c.Send(sidecartest.Free(m.Arena, m.Offset)) // the second Free must have no effect
				}
				if want := int32(100 * r); x[0] != want {
					t.Errorf("%s: the input was overwritten", c2.what)
				}
			}
		}
		splits := &sidecarpb.Operation{Kind: 4, Dtype: 5, Name: "splits", Splits: []int64{int64(r), 0, 1},
			Tensors: []*sidecarpb.Tensor{
				{Shape: []int64{int64(r + 1)}, Input: at(r, 0, 4*(r+1))},
			}}
		a := c.MustRun(splits)
		want := [][]int64{{0, 1, 2}, {0, 0, 0}, {1, 1, 1}}[r]
		if !slices.Equal(a.ReceivedSplits, want) {
			t.Errorf("received splits %v, want %v", a.ReceivedSplits, want)
		}
		if m := a.Results[0].Memory; (m.Bytes == 0) != (m.Arena == 0) {
			t.Errorf("a result of %d bytes is in arena %d", m.Bytes, m.Arena)
		}
		// The test does not free the other results, because the sidecar must free them when the client
		// leaves.
	})
	if _, _, live := arena.Stats(); live != 0 {
		t.Errorf("%d bytes of results are left when their clients have gone", live)
	}
}

// own runs an allreduce of the memory in. The sidecar allocates the output. own returns the location of the
// output.
func (c *client) own(name string, in *sidecarpb.Memory) *sidecarpb.Memory {
	c.t.Helper()
	o := &sidecarpb.Operation{Kind: 1, Dtype: 1, ReduceOp: 2, Name: name,
		Tensors: []*sidecarpb.Tensor{{Shape: []int64{int64(in.Bytes)}, Input: in}}}
	return c.MustRun(o).Results[0].Memory
}

// TestFreeTwice frees a result twice. The second request must have no effect.
func TestFreeTwice(t *testing.T) {
	ranks(t, 1, func(_ int, c *client, _ []byte) {
		place := c.own("a", at(0, 0, 64))
		c.Send(sidecartest.Free(place.Arena, place.Offset))
		c.Send(sidecartest.Free(place.Arena, place.Offset))
		first := c.own("b", at(0, 0, 64))
		if first.Offset != place.Offset || first.Arena != place.Arena {
			t.Fatalf("the place %v was not used again, but %v", place, first)
		}
		if second := c.own("c", at(0, 0, 64)); second.Offset == place.Offset && second.Arena == place.Arena {
			t.Error("the place of a result was used for another one")
		}
	})
}

// TestArenaOfTheSidecarGoes checks that a client that knows an arena of the sidecar is notified when the
// sidecar removes the arena. Then the client can unmap it.
func TestArenaOfTheSidecarGoes(t *testing.T) {
	const large = 65 << 20 // more than the sidecar keeps for later results
	ranks(t, 1, func(_ int, c *client, _ []byte) {
		c.Arena(9, large)
		place := c.own("x", &sidecarpb.Memory{Arena: 9, Bytes: large})
		if c.Arenas[place.Arena] == nil {
			t.Fatalf("nothing was said of arena %d", place.Arena)
		}
		c.Send(sidecartest.Free(place.Arena, place.Offset))
		news := c.Until(func(r *sidecarpb.Reply) bool { return r.GetDropArena() != nil })
		if got := news.GetDropArena().Arena; got != place.Arena {
			t.Errorf("arena %d has gone, want %d", got, place.Arena)
		}
	})
}

// TestLookingNeedsNoDoorbell checks that a submission needs no doorbell while the word RingLooking says that
// the sidecar is looking at the ring.
func TestLookingNeedsNoDoorbell(t *testing.T) {
	taken := make(chan struct{})
	all(job(t, 2), func(r int, s *Server) {
		c := connect(t, s)
		c.Init()
		c.Ring(16)
		c.Arena(uint32(r+1), 1<<20)
		for slot := range uint32(2) {
			c.Send(sidecartest.Prepare(slot, sidecartest.Sum(fmt.Sprint("x", slot), uint32(r+1),
				64*uint64(slot), 1)))
		}
		var ids []uint64
		if r == 0 {
			// The reader drives the engine and polls the ring until rank 1 has submitted the operation too.
			engine := *s.running.Load()
			install(s, stub{begin: engine.Begin, drive: func(ctx context.Context, done func() bool) {
				for !done() {
					engine.Drive(ctx, done)
				}
			}})
			ids = append(ids, c.Push(0))
			c.Doorbell()
			until(t, func() bool { return c.Word(sidecartest.RingLooking).Load() != 0 })
			ids = append(ids, c.Push(1))
			until(t, func() bool { return c.Word(wire.RingTaken).Load() == 2 })
			close(taken)
		} else {
			<-taken
			ids = append(ids, c.Push(0), c.Push(1))
			c.Doorbell()
		}
		for _, id := range ids {
			c.Wait(id)
		}
		until(t, func() bool { return c.Word(sidecartest.RingLooking).Load() == 0 })
		c.Shutdown()
		c.bye()
	})
}

// TestDozingNeedsNoDoorbell submits an operation for which the client does not wait. The sidecar must poll
// the ring for a while before it sleeps, so that a submission in this time needs no doorbell. If the client
// waits for the operation, the sidecar must not poll.
func TestDozingNeedsNoDoorbell(t *testing.T) {
	ranks(t, 1, func(_ int, c *client, _ []byte) {
		c.Ring(16)
		c.Send(sidecartest.Prepare(0, sidecartest.Sum("x", 1, 0, 1)))
		state, waiting := c.Word(sidecartest.RingLooking), c.Word(sidecartest.RingWaiting)
		waiting.Store(0)
		run := func() (was uint64) {
			id := c.Push(0)
			if was = state.Load(); was == wire.Asleep {
				c.Doorbell()
			}
			c.Wait(id)
			return was
		}
		until(t, func() bool { return run() == wire.Polling })
		until(t, func() bool { return state.Load() == wire.Asleep })
		waiting.Store(1)
		for range 100 {
			if was := run(); was == wire.Polling {
				t.Fatal("the sidecar polls after an operation that the client has waited for")
			}
			for state.Load() == wire.Looking {
				runtime.Gosched()
			}
		}
	})
}

// until calls the function so again and again until it returns true. If that takes longer than
// sidecartest.HangTimeout, the test fails.
func until(t *testing.T, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(sidecartest.HangTimeout); !so(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Error("the condition did not become true in time")
			return
		}
	}
}

// TestPark checks that park returns false if the ring has a submission that the reader has not read yet. So
// the reader does not sleep.
func TestPark(t *testing.T) {
	fd, b := sidecartest.NewRing(t, 16)
	segment, err := shmem.Adopt(fd)
	if err != nil {
		t.Fatal(err)
	}
	r, err := newRing(segment)
	if err != nil {
		t.Fatal(err)
	}
	state, submitted := word(b, wire.RingLooking), word(b, wire.RingSubmitted)
	if r.startLooking(); state.Load() != wire.Looking {
		t.Error("the state is not looking")
	}
	if !r.park(wire.Asleep) || state.Load() != wire.Asleep {
		t.Errorf("park with nothing submitted: got state %d, want asleep and true", state.Load())
	}
	submitted.Store(1)
	if r.startLooking(); r.park(wire.Asleep) || r.park(wire.Polling) {
		t.Error("the reader parks although there is a submission")
	}
	waiting := word(b, wire.RingWaiting)
	for value, want := range map[uint64]bool{0: false, 1: true, 2: true} {
		if waiting.Store(value); r.awaited() != want {
			t.Errorf("with %d threads, the client waits: %v, want %v", value, !want, want)
		}
	}
	if err := errors.Join(r.close(), unix.Munmap(b)); err != nil {
		t.Error(err)
	}
}

// TestGroupOfSeveralTypes checks that the tensors in a group may have different types, and that a tensor
// outside of a group must have the type of the operation. If a type is unknown, a location is unaligned or a
// shape is wrong, the client must get an error.
func TestGroupOfSeveralTypes(t *testing.T) {
	ranks(t, 2, func(r int, c *client, b []byte) {
		own := func(dt tensor.DType, offset, numBytes int) *sidecarpb.Tensor {
			return &sidecarpb.Tensor{
				Dtype: uint32(dt), Shape: []int64{int64(numBytes) / int64(max(dt.Size(), 4))},
				Input: at(r, offset, numBytes), Output: at(r, offset, numBytes),
			}
		}
		f, n := tensor.View[float32](b), tensor.View[int64](b)
		f[0], f[16], n[16] = 1.5, 2.5, int64(r)<<40
		o := &sidecarpb.Operation{Kind: 1, Dtype: uint32(tensor.Float32), ReduceOp: 2, Grouped: true,
			Name: "g", Tensors: []*sidecarpb.Tensor{
				// Type 0 means the type of the operation.
				own(tensor.Float32, 0, 4), own(tensor.Int64, 128, 8), own(0, 64, 4),
			}}
		c.MustRun(o)
		if f[0] != 3 || f[16] != 5 || n[16] != 1<<40 {
			t.Errorf("rank %d: got %v, %v and %v", r, f[0], f[16], n[16])
		}
		f[0], f[16], n[16] = 1.5, 2.5, int64(r)<<40
		a := c.MustRun(&sidecarpb.Operation{Kind: 2, Dtype: uint32(tensor.Float32), Grouped: true,
			Name: "gathered", Tensors: []*sidecarpb.Tensor{
				{Shape: []int64{1}, Input: at(r, 0, 4)}, {Dtype: uint32(tensor.Int64), Shape: []int64{1},
					Input: at(r, 128, 8)},
			}})
		place := func(i int) []byte {
			m := a.Results[i].Memory
			return c.Arenas[m.Arena][m.Offset : m.Offset+m.Bytes]
		}
		if gotF, gotN := tensor.View[float32](place(0)), tensor.View[int64](place(1)); !slices.Equal(gotF,
			[]float32{1.5, 1.5}) || !slices.Equal(gotN, []int64{0, 1 << 40}) {
			t.Errorf("rank %d: gathered %v and %v", r, gotF, gotN)
		}
		for _, refused := range []struct {
			change func(*sidecarpb.Operation)
			want   string
		}{
			{func(o *sidecarpb.Operation) { o.Grouped, o.Tensors = false, o.Tensors[1:2] },
				"element type int64 in an operation on float32"},
			{func(o *sidecarpb.Operation) { o.Tensors[1].Dtype = 77 }, "element type 77 is unknown"},
			{func(o *sidecarpb.Operation) { o.Tensors[1].Dtype = 256 + uint32(tensor.Int64) }, "is unknown"},
			{func(o *sidecarpb.Operation) { o.Tensors[1].Input.Offset += 4 }, "want multiples of 8"},
			{func(o *sidecarpb.Operation) { o.Tensors[1].Shape[0] = 2 },
				"an input of 8 bytes, which does not match shape [2] and element type int64"},
		} {
			o := proto.Clone(o).(*sidecarpb.Operation)
			refused.change(o)
			if a := c.Run(o); !strings.Contains(a.GetError().GetText(), refused.want) {
				t.Errorf("rank %d: got %v, want %q", r, a, refused.want)
			}
		}
	})
}

// TestEmptyOverTheRing runs operations with empty results. If the sidecar allocates an output, it must send
// an answer. If the client provides all outputs, it must not send one.
func TestEmptyOverTheRing(t *testing.T) {
	for _, n := range []int{1, 2, 3} {
		ranks(t, n, func(r int, c *client, _ []byte) {
			c.Ring(16)
			empty := func(given bool) *sidecarpb.Tensor {
				tt := &sidecarpb.Tensor{Shape: []int64{0, 6}, Input: &sidecarpb.Memory{}}
				if given {
					tt.Output = &sidecarpb.Memory{}
				}
				return tt
			}
			slot := uint32(0)
			for _, kind := range []uint32{1, 2, 3, 4, 5} {
				for _, given := range [][]bool{{false}, {true}, {false, false}, {true, true}, {true, false}} {
					grouped := len(given) > 1
					if grouped && (kind == 3 || kind == 4) {
						continue
					}
					o := &sidecarpb.Operation{Kind: kind, Dtype: 9, Grouped: grouped,
						Name: fmt.Sprint(kind, given)}
					if kind == 1 || kind == 5 {
						o.ReduceOp = 2
					}
					for _, g := range given {
						o.Tensors = append(o.Tensors, empty(g))
					}
					c.Send(sidecartest.Prepare(slot, o))
					// An alltoall always has an answer, because the answer contains the received splits.
					want := kind != 4 && !slices.Contains(given, false)
					for range 4 {
						id := c.Push(slot)
						c.Doorbell()
						if got := c.Wait(id); got != want {
							t.Errorf("rank %d, %s: the ring says that the operation is done: %v, want %v", r, o.Name,
								got, want)
							return
						}
						if want {
							continue
						}
						results := c.Reply(id).GetCompletion().GetResults()
						if len(results) != len(given) {
							t.Errorf("rank %d, %s: results %v, want %d", r, o.Name, results, len(given))
						}
						for _, got := range results {
							if m := got.Memory; !slices.Equal(got.Shape, []int64{0, 6}) || m.Arena != 0 ||
								m.Bytes != 0 {
								t.Errorf("rank %d, %s: result %v, want shape [0 6] and no memory", r, o.Name,
									got)
							}
						}
					}
					slot++
				}
			}
		})
	}
}

// TestNumberedCalls submits the operation of one slot as call 1 and as call 2. The ranks submit the calls in
// different orders, so the sums are right only if the calls are matched by number. A number needs a name.
func TestNumberedCalls(t *testing.T) {
	ranks(t, 2, func(r int, c *client, b []byte) {
		c.Ring(16)
		x := tensor.View[float32](b)
		for slot := range 2 {
			x[slot] = float32(10*slot + 10)
			c.Send(sidecartest.Prepare(uint32(slot), sidecartest.Sum("a", uint32(r+1), uint64(4*slot), 1)))
		}
		var ids []uint64
		for k := range 2 {
			slot := uint32(k ^ r)
			ids = append(ids, c.PushCall(slot, slot+1))
			c.Doorbell()
		}
		for _, id := range ids {
			if !c.Wait(id) {
				t.Errorf("rank %d: operation %d: %v", r, id, c.Reply(id))
			}
		}
		if x[0] != 20 || x[1] != 40 {
			t.Errorf("rank %d: got sums %v and %v, want 20 and 40", r, x[0], x[1])
		}
		c.Send(sidecartest.Prepare(2, sidecartest.Sum("", uint32(r+1), 0, 1)))
		id := c.PushCall(2, 1)
		c.Doorbell()
		refused(t, "no name", c.Reply(id), classUsage, "call number 1 of an operation without a name")
	})
}

// TestManyOverTheRing lets two ranks submit 16 operations in opposite orders to a ring of 16 entries, in 50
// rounds. All must complete with the right results.
func TestManyOverTheRing(t *testing.T) {
	const n, rounds = 16, 50
	ranks(t, 2, func(r int, c *client, b []byte) {
		x := tensor.View[float32](b)
		c.Ring(n)
		for slot := range uint32(n) { // send the requests without waiting for answers
			c.Send(sidecartest.Prepare(slot, sidecartest.Sum(fmt.Sprint("x", slot), uint32(r+1),
				uint64(1024*slot), 100)))
		}
		for round := range rounds {
			var ids []uint64
			for i := range uint32(n) {
				slot := i
				if r == 1 {
					slot = n - 1 - i
				}
				for k := range 100 {
					x[256*int(slot)+k] = float32(round)
				}
				ids = append(ids, c.Push(slot))
				if (int(i)+round)%3 == 0 {
					c.Doorbell()
				}
			}
			c.Doorbell()
			for _, id := range ids {
				if !c.Wait(id) {
					t.Errorf("operation %d: got the answer %v", id, c.Reply(id))
					return
				}
			}
			for slot := range n {
				if got := x[256*slot+99]; got != float32(2*round) {
					t.Errorf("round %d: tensor %d is %v", round, slot, got)
					return
				}
			}
		}
	})
}

// TestPrepareAndSubmitAtOnce prepares a slot and submits it at once. If an earlier doorbell wakes the
// sidecar, it may see the submission before it has read the frame that prepares the slot. It must execute the
// operation anyway.
func TestPrepareAndSubmitAtOnce(t *testing.T) {
	ranks(t, 1, func(_ int, c *client, b []byte) {
		c.Ring(16)
		for i := range uint32(200) {
			c.Doorbell()
			c.Send(sidecartest.Prepare(i, sidecartest.Sum("x", 1, 0, 1)))
			id := c.Push(i)
			c.Doorbell()
			if !c.Wait(id) {
				t.Errorf("slot %d: %v", i, c.Reply(id))
			}
		}
	})
}
