package rendezvous

import (
	"bufio"
	"context"
	"fmt"
	"math"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

const (
	// ringAbove is the default of JoinConfig.RingAbove.
	ringAbove = 128
	// tableLane is the lane of the mesh on which the ranks pass the records. Other lanes have the numbers of
	// process sets, and no process set has a number as great as this.
	tableLane = transport.Lane(math.MaxUint32)
)

// sentWith returns the ranks whose records the root sends along with the table. If ring is set, these are
// only the two neighbours of the rank that gets the table, else all ranks.
func sentWith(rank, size int, ring bool) []int {
	if ring {
		return []int{(rank + size - 1) % size, (rank + 1) % size}
	}
	all := make([]int, size)
	for i := range all {
		all[i] = i
	}
	return all
}

// Gather completes Records in a large job. In other jobs it does nothing. All ranks call it after Join. The
// ranks form a ring and pass the records round it in size-1 steps: each rank sends the next rank its own
// record first, and then the size-2 records that it receives from the previous rank and that the next rank
// lacks. mesh must connect this rank to its two neighbours, whose records Join has provided. Gather releases
// its lane of the mesh.
//
// If a rank dies, the error is a *transport.PeerError. Only the neighbours of the dead rank get this error by
// themselves. They should call Fail, because the calls of Gather at all other ranks wait until Fail is called
// or ctx ends.
func (s *Session) Gather(ctx context.Context, mesh transport.Mesh) error {
	if !s.ring {
		return nil
	}
	defer mesh.Release(tableLane)
	// The methods of a Conn have no context as a parameter, so the end of ctx has to abort the lane.
	defer context.AfterFunc(ctx, func() { mesh.Abort(tableLane, context.Cause(ctx)) })()
	records, err := s.gather(ctx, mesh)
	if err != nil {
		return fmt.Errorf("rendezvous: gathering the records of %d ranks: %w", len(s.Records), err)
	}
	s.Records = records
	return nil
}

func (s *Session) gather(ctx context.Context, mesh transport.Mesh) ([]Record, error) {
	size, rank := len(s.Records), int(s.rank)
	at := func(places int) topo.Rank { return topo.Rank((rank + size + places) % size) }
	next, err := mesh.Conn(ctx, tableLane, at(1))
	if err != nil {
		return nil, err
	}
	prev, err := mesh.Conn(ctx, tableLane, at(-1))
	if err != nil {
		return nil, err
	}
	records := make([]Record, size)
	records[rank] = s.Records[rank]
	piece, err := appendMessage(nil, recordToProto(&records[rank]))
	if err != nil {
		return nil, err
	}
	in := bufio.NewReader(prev)
	last := new(Record)
	for i := 1; i < size; i++ {
		if err := next.Send(piece); err != nil {
			return nil, err
		}
		from := at(-i)
		body, err := dial.ReadFrame(in, maxRecordBytes)
		if err != nil {
			return nil, fmt.Errorf("reading the record of rank %d: %w", from, err)
		}
		if records[from], err = decodeRecord(body); err != nil {
			return nil, fmt.Errorf("malformed record of rank %d, received from rank %d: %w", from, at(-1), err)
		}
		records[from].share(last)
		last = &records[from]
		piece = dial.SealFrame(append(dial.NewFrame(len(body)), body...))
	}
	return records, next.Flush()
}
