package library

import (
	"testing"
	"unsafe"

	"github.com/gohvd/gohvd/internal/rank"
)

// BenchmarkRun measures an operation of a job with one rank: what the library adds to the engine, and the
// turn of the loop.
func BenchmarkRun(b *testing.B) {
	l := New(nil)
	if err := l.Wait(l.Init(InitOptions{Settings: map[string]string{"HVD_SIZE": "1"}}), Forever, nil); err != nil {
		b.Fatal(err)
	}
	x := make([]float32, 1)
	b.ReportAllocs()
	for b.Loop() {
		o := &Op{Spec: rank.Spec{Kind: 1, DType: 9, ReduceOp: 2, Name: "x", Prescale: 1, Postscale: 1}}
		o.SetTensors(1)
		o.SetTensor(0, 0, []int64{1},
			Place{In: unsafe.Pointer(&x[0]), Out: unsafe.Pointer(&x[0]), OutBytes: 4})
		if _, err := l.Run(o, Memory{}, Forever, nil); err != nil {
			b.Fatal(err)
		}
	}
}
