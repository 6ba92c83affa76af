package engine_test

import (
	"testing"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
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

// total returns the number of operations of the given kind.
func total(all []trace.Operations, kind message.Kind) (n uint64) {
	for _, o := range all {
		if o.Kind == kind {
			n += o.Tensors
		}
	}
	return n
}
