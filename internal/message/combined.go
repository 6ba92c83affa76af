package message

import (
	"encoding/binary"
	"fmt"

	"github.com/gohvd/gohvd/internal/topo"
)

// Part is a part of the frame in which the leader of a host passes on frames of its ranks to rank 0.
type Part struct {
	// Ranks are the ranks that have sent Frame, an Up frame or a Probe. If All is set, the leader and all
	// ranks behind it have sent it, and Ranks has the last of them and the last but one.
	Ranks []topo.Rank
	All   bool
	// Held has for each element of Ranks how long the leader has held the frame, in microseconds. With All,
	// First is the time for which it has held the first of the frames.
	Held  []uint32
	First uint32
	Frame []byte
}

// NumBytes returns the size of the part in a combined frame.
func (p *Part) NumBytes() int {
	n := 4 + 8*len(p.Ranks) + 4 + len(p.Frame)
	if p.All {
		n += 4
	}
	return n
}

// lastOfAll is the number of elements of Ranks with All.
const lastOfAll = 2

// AppendCombined appends the encoding of a frame with the given parts to b.
func AppendCombined(b []byte, parts []Part) []byte {
	b = append(b, combinedType)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(parts)))
	for i := range parts {
		p := &parts[i]
		if p.All {
			b = binary.LittleEndian.AppendUint32(b, 0)
			b = binary.LittleEndian.AppendUint32(b, p.First)
		} else {
			b = binary.LittleEndian.AppendUint32(b, uint32(len(p.Ranks)))
		}
		for j, r := range p.Ranks {
			b = binary.LittleEndian.AppendUint32(b, uint32(r))
			b = binary.LittleEndian.AppendUint32(b, p.Held[j])
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(len(p.Frame)))
		b = append(b, p.Frame...)
	}
	return b
}

// IsCombined reports whether the first byte of a frame is the type of combined frames. The rest of the frame
// may be malformed.
func IsCombined(frame []byte) bool { return len(frame) > 0 && frame[0] == combinedType }

// DecodeCombined decodes a frame that AppendCombined has encoded. It reuses the memory of parts. The frames
// in the result are parts of b. They may be malformed.
func DecodeCombined(b []byte, parts []Part) ([]Part, error) {
	d := decoder{b: b}
	if t := d.u8(); t != combinedType {
		d.fail(fmt.Errorf("has type %d, want %d", t, combinedType))
	}
	parts = parts[:0]
	for range d.count(4 + 8 + 4) {
		p := grow(&parts)
		p.Ranks, p.Held = p.Ranks[:0], p.Held[:0]
		n := d.count(8)
		p.All, p.First = n == 0, 0
		if p.All {
			p.First, n = d.u32(), lastOfAll
		}
		for range n {
			p.Ranks, p.Held = append(p.Ranks, d.rank()), append(p.Held, d.u32())
		}
		p.Frame = d.take(d.count(1))
		if d.err != nil {
			break
		}
	}
	if err := d.end(); err != nil {
		return parts[:0], fmt.Errorf("message: combined frame %w", err)
	}
	return parts, nil
}

// AppendAddressed appends to b the encoding of a frame from rank 0 together with the ranks that it is for. If
// there are none, the frame is for the leader that receives it and all ranks behind it. The leader passes the
// frame on to them.
func AppendAddressed(b []byte, to []topo.Rank, frame []byte) []byte {
	b = append(b, addressedType)
	b = appendRanks(b, to)
	return append(b, frame...)
}

// DecodeAddressed decodes a frame that AppendAddressed has encoded. It reuses the memory of to. The returned
// frame is a part of b. It may be malformed.
func DecodeAddressed(b []byte, to []topo.Rank) (_ []topo.Rank, frame []byte, err error) {
	d := decoder{b: b}
	if t := d.u8(); t != addressedType {
		d.fail(fmt.Errorf("has type %d, want %d", t, addressedType))
	}
	to = to[:0]
	d.ranks(&to)
	if d.err != nil {
		return to[:0], nil, fmt.Errorf("message: addressed frame %w", d.err)
	}
	return to, d.b, nil
}
