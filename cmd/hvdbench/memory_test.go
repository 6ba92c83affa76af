package main

import "testing"

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
