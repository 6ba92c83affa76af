package main

import "testing"

func TestTensorsBeginAtTheOffset(t *testing.T) {
	for _, offset := range []int64{8, 2048, pageBytes - 8} {
		m := memory{offset: offset}
		for _, n := range []int64{1, 4096, 1 << 20} {
			b, err := m.alloc(n, false)
			if err != nil {
				t.Fatal(err)
			}
			if got := addressOf(b) % pageBytes; int64(len(b)) != n || got != offset {
				t.Errorf("got %d bytes at offset %d, want %d at %d", len(b), got, n, offset)
			}
		}
	}
}

func TestTouchWritesEveryByte(t *testing.T) {
	for _, n := range []int{0, 1, 7, 8, 9, 100} {
		b := make([]byte, n)
		touch(b, touchBools)
		for i, v := range b {
			if v != 1 {
				t.Errorf("byte %d of %d is %d, want 1", i, n, v)
			}
		}
	}
}
