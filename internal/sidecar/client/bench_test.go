package client

import (
	"fmt"
	"testing"

	"github.com/gohvd/gohvd/internal/rank"
)

// BenchmarkSpawned measures operations through a sidecar in a process of its own, in a job of one rank.
func BenchmarkSpawned(b *testing.B) {
	clients := spawn(b, 1)
	ranks := make([]*rank.Rank, 1)
	initAll(b, clients, ranks)
	p := program{Rank: ranks[0]}
	b.Run("blocking-4B", func(b *testing.B) {
		buf := make([]byte, 4)
		b.ReportAllocs()
		for b.Loop() {
			if err := begin(p.execution(sum("", 1), rank.Buffer{In: buf, Out: buf}))(); err != nil {
				b.Fatal(err)
			}
		}
	})
	for _, numBytes := range []int{1 << 20, 64 << 20} {
		b.Run(fmt.Sprint("blocking-", numBytes), func(b *testing.B) {
			buf := make([]byte, numBytes)
			b.SetBytes(int64(numBytes))
			for b.Loop() {
				if err := begin(p.execution(sum("", numBytes/4), rank.Buffer{In: buf,
					Out: buf}))(); err != nil {
					b.Fatal(err)
				}
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
