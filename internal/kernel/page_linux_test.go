package kernel

import (
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"syscall"
	"testing"
)

// pages returns n bytes of memory between two pages that cannot be accessed.
func pages(t *testing.T, n int) []byte {
	page := syscall.Getpagesize()
	all, err := syscall.Mmap(-1, 0, n+2*page, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Munmap(all); err != nil {
			t.Error(err)
		}
	})
	for _, guard := range [][]byte{all[:page], all[page+n:]} {
		if err := syscall.Mprotect(guard, syscall.PROT_NONE); err != nil {
			t.Fatal(err)
		}
	}
	return all[page : page+n]
}

// No function accesses memory outside of its arguments. The buffers begin or end next to memory that cannot
// be accessed.
func TestNothingBeyond(t *testing.T) {
	sets := vectorSets(t)
	size := syscall.Getpagesize()
	dst, sources := pages(t, size), [][]byte{pages(t, size), pages(t, size)}
	r := rand.New(rand.NewPCG(11, 12))
	for _, o := range layoutOperations() {
		var data [][]byte
		for _, dt := range o.in {
			data = append(data, values(r, dt, mostElems))
		}
		for _, s := range sets {
			for n := range mostElems + 1 {
				for _, end := range []bool{false, true} {
					cut := func(b []byte, elem int) []byte {
						if end {
							return b[len(b)-n*elem:]
						}
						return b[:n*elem]
					}
					d, in := cut(dst, o.to.Size()), make([][]byte, len(o.in))
					for i, dt := range o.in {
						in[i] = cut(sources[i], dt.Size())
						copy(in[i], data[i])
					}
					what := func() string { return fmt.Sprintf("%s, at the end %v", s.name, end) }
					faults(t, func() string { return fmt.Sprintf("%s of %d, %s", o.name, n, what()) },
						func() { o.run(s, d, in) })
					o.check(t, what, d, o.apply(plainSet, in), in)
				}
			}
		}
	}
}

// faults calls f and fails the test if f accesses memory that cannot be accessed.
func faults(t *testing.T, what func() string, f func()) {
	t.Helper()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		t.Helper()
		if p := recover(); p != nil {
			t.Fatalf("%s: %v", what(), p)
		}
	}()
	f()
}
