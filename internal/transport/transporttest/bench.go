package transporttest

import (
	"fmt"
	"io"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/internal/transport"
)

// PingPong measures round trips of a message to the peer and back. The throughput includes the bytes of both
// directions.
func PingPong(b *testing.B, f Factory) {
	for _, size := range []int{8, 64 << 10} {
		b.Run(fmt.Sprintf("%dB", size), func(b *testing.B) {
			zero, done := benchPair(b, f, func(one transport.Conn) {
				for buf := make([]byte, size); ; {
					if _, err := io.ReadFull(one, buf); err != nil {
						return // an error means that the benchmark is over
					}
					if one.Send(buf) != nil || one.Flush() != nil {
						return
					}
				}
			})
			defer done()
			buf, got := make([]byte, size), make([]byte, size)
			b.SetBytes(2 * int64(size))
			b.ReportAllocs()
			for b.Loop() {
				if err := zero.Send(buf); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(zero, got); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// Stream measures how fast messages of 1 MiB are sent in one direction. Each message is flushed before the
// next one is sent.
func Stream(b *testing.B, f Factory) {
	const size = 1 << 20
	zero, done := benchPair(b, f, func(one transport.Conn) {
		for buf := make([]byte, size); ; {
			if _, err := one.Read(buf); err != nil {
				return // an error means that the benchmark is over
			}
		}
	})
	defer done()
	buf := make([]byte, size)
	b.SetBytes(size)
	b.ReportAllocs()
	for b.Loop() {
		if err := zero.Send(buf); err != nil {
			b.Fatal(err)
		}
		if err := zero.Flush(); err != nil {
			b.Fatal(err)
		}
	}
}

// benchPair connects two ranks on lane 1 and returns the Conn of rank 0. It calls the function peer in a
// goroutine with the Conn of rank 1. When peer returns because of an error, rank 1 is closed. The function
// done closes rank 0 and waits until peer has returned.
func benchPair(b *testing.B, f Factory, peer func(one transport.Conn)) (zero transport.Conn, done func()) {
	meshes := f(b, 2)
	closeMesh := func(m transport.Mesh) {
		if err := m.Close(); err != nil {
			b.Error(err)
		}
	}
	zero, err := meshes[0].Conn(b.Context(), 1, 1)
	if err != nil {
		b.Fatal(err)
	}
	one, err := meshes[1].Conn(b.Context(), 1, 0)
	if err != nil {
		b.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		defer closeMesh(meshes[1])
		peer(one)
	})
	return zero, func() {
		closeMesh(meshes[0])
		wg.Wait()
	}
}
