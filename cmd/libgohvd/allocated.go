//go:build cgo

package main

import (
	"sync"
	"unsafe"
)

// allocated has the memory that hvd_alloc has returned.
var allocated = allocations{all: make(map[unsafe.Pointer][]byte)}

type allocations struct {
	mu  sync.Mutex
	all map[unsafe.Pointer][]byte
}

func (a *allocations) add(b []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all[unsafe.Pointer(unsafe.SliceData(b))] = b
}

// take removes and returns the memory at p. It returns nil if there is none.
func (a *allocations) take(p unsafe.Pointer) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	b := a.all[p]
	delete(a.all, p)
	return b
}
