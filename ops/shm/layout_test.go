package shm

import (
	"bytes"
	"errors"
	"testing"
)

// For any content of a peer's table, read does not panic, and all extents that it accepts lie within the
// peer's memory.
func FuzzReadLayout(f *testing.F) {
	table := make([]byte, tableBytes)
	(&layout{extents: []extent{{end: 64, in: place{chunk: 1, offset: 64}}, {end: 128}}}).write(table)
	f.Add(table[:tableHeader+2*extentBytes], int64(128))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff}, int64(0))
	f.Fuzz(func(t *testing.T, b []byte, total int64) {
		table := make([]byte, tableBytes)
		copy(table, b)
		var l layout
		err := l.read(table, total, 4, func(id uint32) ([]byte, error) {
			if id != 1 {
				return nil, errors.New("no such arena")
			}
			return make([]byte, 4096), nil
		})
		if err != nil {
			return
		}
		var begin int64
		for _, e := range l.extents {
			for _, p := range []place{e.in, e.out} {
				if !p.staged() {
					_ = p.mem[p.offset:][:e.end-begin]
				}
			}
			begin = e.end
		}
		again := make([]byte, tableBytes)
		l.write(again)
		if n := tableHeader + extentBytes*len(l.extents); !bytes.Equal(again[4+4:n], table[4+4:n]) ||
			begin != total {
			t.Errorf("%x was read as %+v", b, l.extents)
		}
	})
}
