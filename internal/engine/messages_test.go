package engine_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Rank 0 sends a small message, a large one in an arena, and one that does not fit. Both ranks count them.
func TestMessagesAreCounted(t *testing.T) {
	large, err := arena.Alloc(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := arena.Free(large); err != nil {
			t.Error(err)
		}
	}()
	counted := make(chan struct{}) // closed when rank 0 has counted the messages in flight
	testcluster.Run(t, testcluster.Options{Ranks: 2, Transport: testcluster.SHM}, func(r *testcluster.Rank) {
		kind, refused := message.Send, uint64(0)
		if r.Rank == 1 {
			kind, refused = message.Recv, 1
		}
		for tag, numBytes := range []int{100, 1 << 20, 5} {
			buf := make([]byte, numBytes+tag/2*int(r.Rank))
			if tag == 1 && r.Rank == 0 {
				buf = large
			}
			if tag == 1 && r.Rank == 1 {
				<-counted
			}
			done := make(chan error, 1)
			o := &p2p.Op{Peer: 1 - r.Rank, Tag: uint32(tag), DType: tensor.Uint8, Buf: buf,
				Done: func(err error) { done <- err }}
			if err := r.Engine.Post(topo.Global, o, kind == message.Recv); err != nil {
				t.Error(err)
				return
			}
			if tag == 1 && r.Rank == 0 {
				if n := r.Engine.Stats().InFlight; n != 1 {
					t.Errorf("got %d messages in flight, want 1", n)
				}
				close(counted)
			}
			if err := <-done; err != nil && tag < 2 {
				t.Error(err)
			}
		}
		st := r.Engine.Stats()
		bytes := map[message.Backend]uint64{}
		for _, m := range st.Moved {
			if m.Kind == kind && m.DType == tensor.Uint8 {
				bytes[m.Backend] = m.Bytes
			}
		}
		small := uint64(100)
		if kind == message.Send {
			small += 5 // the send of a message that does not fit succeeds
		}
		if bytes[message.TCP] != small || bytes[message.SHM] != 1<<20 || st.Refused != refused ||
			st.Failed != 0 {
			t.Errorf("rank %d: got bytes %v, %d refused, %d failed, want %d, %d, %d, 0", r.Rank, bytes,
				st.Refused, st.Failed, small, 1<<20, refused)
		}
		if n := total(st.Operations, kind); n != 3-refused {
			t.Errorf("rank %d: got %d messages, want %d", r.Rank, n, 3-refused)
		}
	})
}

// One member removes a process set while the other one still waits for a message and for an earlier
// operation. The end of the channel is then no failure, and the removal ends the message.
func TestMessagesOfARemovedSet(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		synctest.Test(t, func(t *testing.T) {
			c := start(t, 2, withSet(lockstep))
			message := make(chan error, 1)
			recv := &p2p.Op{Peer: 0, DType: tensor.Uint8, Buf: make([]byte, 1),
				Timeout: time.Second, Done: func(err error) { message <- err }}
			if err := c.engines[1].Post(1, recv, true); err != nil {
				t.Fatal(err)
			}
			sent, release := c.submit(0, over(1, broadcast())), make(chan struct{})
			received := over(1, broadcast())
			received.Done = func(error) { <-release }
			if err := c.engines[1].Submit(received); err != nil {
				t.Fatal(err)
			}
			if err := c.wait(sent); err != nil {
				t.Error(err)
			}
			one := c.submit(1, removal(1))
			if err := c.wait(c.submit(0, removal(1))); err != nil {
				t.Error(err)
			}
			time.Sleep(15 * time.Second) // longer than the timeouts of the message and of silent ranks
			if isDone(one) || isDone(message) {
				t.Error("the removal or the message has ended before the earlier operation")
			}
			close(release)
			if err := c.wait(one); err != nil {
				t.Error(err)
			}
			if err := c.wait(message); !errors.Is(err, engine.ErrNoProcessSet) {
				t.Errorf("the message: got error %v, want ErrNoProcessSet", err)
			}
			c.shutdown()
		})
	})
}

// broadcast returns a broadcast of one byte from rank 0.
func broadcast() *tensorqueue.Entry {
	b := make([]byte, 1)
	return &tensorqueue.Entry{Request: message.Request{Kind: message.Broadcast, Name: "b", DType: tensor.Uint8,
		Shape: tensor.Shape{1}}, Input: b, Output: b}
}

// total returns the number of operations of the given kind.
func total(all []trace.Operations, kind message.Kind) (n uint64) {
	for _, o := range all {
		if o.Kind == kind {
			n += o.Tensors
		}
	}
	return n
}
