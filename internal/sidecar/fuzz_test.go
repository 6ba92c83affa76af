package sidecar

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/sidecartest"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

// FuzzFrames decodes arbitrary bytes. cutFrame must cut frames at their lengths. A request that can be
// decoded must not change if it is encoded and decoded again. A valid operation must have one input and one
// output for each tensor.
func FuzzFrames(f *testing.F) {
	c := new(sidecartest.Client)
	f.Add([]byte{0})
	f.Add([]byte{0x80, 0x80, 0x80, 0x08})
	f.Add(bytes.Repeat([]byte{0xff}, 12))
	group := sidecartest.Sum("x", 1, 64, 4)
	group.Grouped, group.Tensors = true, append(group.Tensors, group.Tensors[0])
	for _, q := range []*sidecarpb.Request{
		sidecartest.Init(map[string]string{"HOROVOD_RANK": "1"}, &sidecarpb.Ranks{Ranks: []int32{0, 1}}),
		sidecartest.Prepare(1, sidecartest.Sum("x", 1, 64, 4)), sidecartest.Prepare(2, group),
		sidecartest.Prepare(3, sidecartest.Sum("x", 2, 0, 0)),
		sidecartest.Prepare(4, messageOp(15, 0, -1, 1, 2)),
		sidecartest.Arena(1, 4096), sidecartest.Free(1<<31, 64), sidecartest.Shutdown(),
	} {
		f.Add(c.Frame(q))
		f.Add(append(c.Frame(q), c.Frame(sidecartest.StopTimeline())...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for len(b) > 0 {
			body, n, err := wire.CutFrame(b)
			if err != nil && !errors.Is(err, wire.ErrFrame) {
				t.Fatalf("error %v, want a broken frame", err)
			}
			if n == 0 || err != nil {
				if err == nil && len(b) > wire.MaxFrameBytes+wire.MaxHeadBytes {
					t.Fatal("a frame that is longer than frames may be is waited for")
				}
				return
			}
			if n < len(body) || n > len(body)+wire.MaxHeadBytes || !bytes.Equal(b[n-len(body):n], body) {
				t.Fatalf("a frame of %d bytes with a body of %d", n, len(body))
			}
			b = b[n:]
			q, err := readRequest(body)
			if err != nil {
				continue
			}
			again, err := proto.Marshal(q)
			if err != nil {
				t.Fatal(err)
			}
			if q2, err := readRequest(again); err != nil || !proto.Equal(q, q2) && !hasNaN(again) {
				t.Fatalf("%v became %v, %v", q, q2, err)
			}
			o := q.GetPrepare().GetOperation()
			p := newPlan(o)
			if p.wrong != nil {
				if class := wire.Describe(p.wrong).Class; class != classUsage {
					t.Fatalf("class %d of %v", class, p.wrong)
				}
				continue
			}
			if len(p.places) != 2*len(p.Tensors) || len(p.Tensors) != len(o.GetTensors()) {
				t.Fatalf("%d tensors with %d places", len(p.Tensors), len(p.places))
			}
			m := memory{all: map[uint32]*clientArena{1: {number: 1, bytes: make([]byte, 4096)}}}
			uses, err := m.use(p.places, nil)
			if err == nil {
				err = m.unuse(uses)
			}
			if m.all[1].users != 0 {
				t.Fatalf("%d users are left: %v", m.all[1].users, err)
			}
		}
	})
}

// hasNaN reports whether the encoded message b may contain a NaN. The fuzz test skips such a message, because
// it does not equal itself.
func hasNaN(b []byte) bool {
	for i := 0; i+8 <= len(b); i++ {
		if bits := binary.LittleEndian.Uint64(b[i:]); bits&0x7ff0000000000000 == 0x7ff0000000000000 {
			return true
		}
	}
	return false
}

// FuzzRing fills a ring with arbitrary values. The sidecar must either read at most as many submissions as
// the ring has entries, or return an error.
func FuzzRing(f *testing.F) {
	f.Add(uint32(wire.RingMagic), uint32(3), uint32(16), uint64(3), []byte{1, 0, 0, 0, 0, 0, 0, 0, 5})
	f.Add(uint32(wire.RingMagic), uint32(3), uint32(32), uint64(1<<63), []byte{})
	f.Add(uint32(wire.RingMagic), uint32(3), uint32(1<<31), uint64(0), []byte{})
	s, err := shmem.Create("ring", 8192)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { s.Close() })
	f.Fuzz(func(t *testing.T, magic, version, n uint32, submitted uint64, entries []byte) {
		b := s.Bytes()
		clear(b)
		binary.LittleEndian.PutUint32(b, magic)
		binary.LittleEndian.PutUint32(b[4:], version)
		binary.LittleEndian.PutUint32(b[8:], n)
		binary.LittleEndian.PutUint64(b[wire.RingSubmitted:], submitted)
		copy(b[wire.RingEntries:], entries)
		r, err := newRing(s)
		if err != nil {
			return
		}
		if n > 128 {
			t.Fatalf("a ring of %d entries in %d bytes", n, len(b))
		}
		taken, until := uint64(0), r.pending()
		for {
			s, ok, err := r.next(until)
			if err != nil || !ok {
				if !errors.Is(err, wire.ErrFrame) && taken != until {
					t.Fatalf("took %d of %d: %v", taken, until, err)
				}
				break
			}
			if taken++; taken > uint64(n) || s.id == 0 {
				t.Fatalf("took %d from a ring of %d, the last with number %d", taken, n, s.id)
			}
		}
		for i := range taken {
			r.complete(i+1, true)
		}
		for i := range taken {
			state := b[wire.RingEntries+wire.RingEntryBytes*(uint64(n)+(i+1)%uint64(n)):]
			if got := binary.LittleEndian.Uint32(state); got != wire.StateDone {
				t.Fatalf("the state of operation %d is %d, want %d", i+1, got, wire.StateDone)
			}
		}
	})
}
