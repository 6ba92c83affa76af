package sidecar

import (
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/tensor"
)

// messageOp returns a send (kind 14) of elems int32 at the beginning of the arena of rank r, or a recv
// (kind 15) into as many in its second half.
func messageOp(kind uint32, r, peer int, tag uint32, elems int) *sidecarpb.Operation {
	offset := 0
	if kind == 15 {
		offset = 1 << 19
	}
	return &sidecarpb.Operation{Kind: kind, Dtype: 5, Peer: int32(peer), Tag: tag,
		Tensors: []*sidecarpb.Tensor{{Shape: []int64{int64(elems)}, Input: at(r, offset, 4*elems)}}}
}

// TestMessages passes tensors of several sizes around a ring of ranks. The receives are in place, or into
// memory of the sidecar, and from the rank before or from any rank.
func TestMessages(t *testing.T) {
	const n = 3
	ranks(t, n, func(r int, c *client, b []byte) {
		x := tensor.View[int32](b)
		next, before := (r+1)%n, (r+n-1)%n
		for tag, elems := range []int{0, 1, 1000, 1 << 17} {
			for _, peer := range []int{before, -1} {
				for _, given := range []bool{true, false} {
					for i := range x[:elems] {
						x[i] = int32(1000*r + i)
					}
					recv := messageOp(15, r, peer, uint32(tag), elems)
					if given {
						recv.Tensors[0].Output = recv.Tensors[0].Input
					}
					begun := c.Begin(recv)
					c.MustRun(messageOp(14, r, next, uint32(tag), elems))
					reply := c.Await(begun)
					a := reply.GetCompletion()
					if reply.Error != nil {
						t.Error(reply.Error)
						return
					}
					m := a.Results[0].Memory
					got := tensor.View[int32](c.Arenas[m.Arena][m.Offset : m.Offset+m.Bytes])
					if len(got) != elems || elems > 0 && (got[0] != int32(1000*before) ||
						got[elems-1] != int32(1000*before+elems-1)) {
						t.Errorf("rank %d, %d elements from rank %d: got %d other ones", r, elems, peer, len(got))
					}
					if (peer == -1 || !given) && int(a.Source) != before {
						t.Errorf("got a message of rank %d, want rank %d", a.Source, before)
					}
					if !given && !slices.Equal(a.Results[0].Shape, []int64{int64(elems)}) {
						t.Errorf("got shape %v, want %d elements", a.Results[0].Shape, elems)
					}
				}
			}
		}
	})
}
