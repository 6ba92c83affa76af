package main

import (
	"strings"
	"testing"
)

func TestReadMemory(t *testing.T) {
	m, err := readMemory(strings.NewReader("Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t 1024 kB\nRssShmem:\t      12 kB\n"))
	if err != nil || m.peak != 2<<20 || m.shared != 12<<10 {
		t.Errorf("got %+v and error %v", m, err)
	}
	for _, text := range []string{"VmHWM: 1 kB\n", "VmHWM: many\nRssShmem: 1 kB\n", ""} {
		if _, err := readMemory(strings.NewReader(text)); err == nil {
			t.Errorf("%q is no error", text)
		}
	}
	if m, err := memoryUsed(); err != nil || m.peak < 1<<20 {
		t.Errorf("of this process: %+v and error %v", m, err)
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
