package client

import (
	"fmt"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/rank"
)

// BenchmarkSpawned measures operations through a sidecar in a process of its own, in a job of one rank.
func BenchmarkSpawned(b *testing.B) {
	clients := spawn(b, 1)
	ranks := make([]*rank.Rank, 1)
	initAll(b, clients, ranks)
	p := program{Rank: ranks[0]}
	for _, numBytes := range []int{4, 1 << 20, 64 << 20} {
		b.Run(fmt.Sprint("blocking-", numBytes), func(b *testing.B) {
			buf := make([]byte, numBytes)
			b.SetBytes(int64(numBytes))
			b.ReportAllocs()
			for b.Loop() {
				x := p.execution(sum("x", numBytes/4), rank.Buffer{In: buf, Out: buf})
				done := make(chan error, 1)
				x.Owner = owner{func(err error) { done <- err }}
				if err := x.Begin(); err != nil {
					b.Fatal(err)
				}
				x.Drive(time.Time{}, func() bool { return len(done) > 0 })
				if err := <-done; err != nil {
					b.Fatal(err)
				}
				x.Seen()
			}
		})
	}
	b.Run("asynchronous-256B", func(b *testing.B) {
		const n = 1000
		bufs, waits, names := make([][]byte, n), make([]func() error, n), make([]string, n)
		for i := range bufs {
			bufs[i], names[i] = make([]byte, 256), fmt.Sprint("x", i)
		}
		b.ReportAllocs()
		for b.Loop() {
			for i, buf := range bufs {
				waits[i] = begin(p.execution(sum(names[i], 64), rank.Buffer{In: buf, Out: buf}))
			}
			for _, wait := range waits {
				if err := wait(); err != nil {
					b.Fatal(err)
				}
			}
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/tensor")
	})
}
