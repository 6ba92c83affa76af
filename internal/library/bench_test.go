package library

import (
	"strconv"
	"testing"
)

// alone returns a library whose job has one rank.
func alone(t testing.TB) *Library {
	l := New(nil, goMemory)
	if err := l.Wait(l.Init(InitOptions{Settings: map[string]string{"HVD_SIZE": "1"}}), Forever, nil); err != nil {
		t.Fatal(err)
	}
	return l
}

// BenchmarkRun measures an operation of a job with one rank: what the library adds to the engine, and the
// turn of the loop.
func BenchmarkRun(b *testing.B) {
	l := alone(b)
	x := make([]float32, 1)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := l.Run(sum("x", x, true), Forever, nil); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkSubmit measures an operation of a job with one rank when many are submitted and then waited for.
func BenchmarkSubmit(b *testing.B) {
	l := alone(b)
	const many = 1000
	x := make([]float32, 64*many)
	var names [many]string
	for i := range names {
		names[i] = "x" + strconv.Itoa(i)
	}
	var handles [many]Handle
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		at := i % many
		var err error
		if handles[at], err = l.Submit(sum(names[at], x[64*at:][:64], true)); err != nil {
			b.Fatal(err)
		}
		if at < many-1 {
			continue
		}
		for _, h := range handles {
			if err := l.Wait(h, Forever, nil); err != nil {
				b.Fatal(err)
			}
		}
	}
}
