package engine_test

import (
	"fmt"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/tensorqueue"
)

// rootLoad counts the frames and bytes on the control connections of rank 0, and the processor time of the
// thread of its loop.
type rootLoad struct {
	mu            sync.Mutex
	frames, bytes int
	cpu           int64 // in nanoseconds
}

// loadConn is a control connection of rank 0 or to rank 0.
type loadConn struct {
	transport.Conn
	load *rootLoad
	root bool
}

func (c *loadConn) Send(p []byte) error {
	c.load.mu.Lock()
	c.load.frames++
	c.load.bytes += len(p)
	if c.root { // the loop of rank 0 sends in its own thread
		var used unix.Rusage
		if unix.Getrusage(unix.RUSAGE_THREAD, &used) == nil {
			c.load.cpu = used.Utime.Nano() + used.Stime.Nano()
		}
	}
	c.load.mu.Unlock()
	return c.Conn.Send(p)
}

// BenchmarkLeaders measures what the negotiation costs rank 0 in a job on hosts of eight ranks, with and
// without leaders, for each step of a program that submits eight tensors at once, with and without the cache.
func BenchmarkLeaders(b *testing.B) {
	for _, ranks := range []int{64, 256} {
		for _, capacity := range []int{64, 0} {
			for _, mode := range []string{"star", "leaders"} {
				b.Run(fmt.Sprintf("ranks=%d/cache=%d/%s", ranks, capacity, mode), func(b *testing.B) {
					measureRoot(b, ranks, func(cfg *engine.Config) {
						cfg.CacheCapacity, cfg.LeadersAbove = capacity, 1
						if mode == "star" {
							cfg.LeadersAbove = ranks
						}
					})
				})
			}
		}
	}
}

func measureRoot(b *testing.B, ranks int, change func(*engine.Config)) {
	const perHost, tensors = 8, 8
	var load rootLoad
	var where []string
	for r := range ranks {
		where = append(where, fmt.Sprint("host", r/perHost))
	}
	over := overTCP(b, ranks)
	c := startOn(b, mem.New(ranks), ranks, func(cfg *engine.Config) {
		over(cfg)
		change(cfg)
		cfg.Hosts, cfg.Spin = where, -1
		root := cfg.Rank == 0
		if root {
			cfg.Cores = []int{0} // so that the loop keeps its thread
		}
		cfg.Mesh = &tappedMesh{cfg.Mesh, func(c transport.Conn, peer topo.Rank) transport.Conn {
			if root || peer == 0 {
				return &loadConn{c, &load, root}
			}
			return c
		}}
	})
	step := func(r int) {
		entries := make([]*tensorqueue.Entry, tensors)
		for i := range entries {
			entries[i] = sum(fmt.Sprint("g", i), make([]byte, 8))
		}
		done := c.submit(r, entries...)
		for range entries {
			if err := c.wait(done); err != nil {
				b.Error(err)
				return
			}
		}
	}
	for range 2 { // the first steps make the connections and fill the cache
		c.each(step)
	}
	load.mu.Lock()
	frames, bytes, cpu := load.frames, load.bytes, load.cpu
	load.mu.Unlock()
	b.ResetTimer()
	c.each(func(r int) {
		for range b.N {
			step(r)
		}
	})
	b.StopTimer()
	load.mu.Lock()
	n := float64(b.N)
	b.ReportMetric(float64(load.frames-frames)/n, "frames/op")
	b.ReportMetric(float64(load.bytes-bytes)/n, "controlB/op")
	b.ReportMetric(float64(load.cpu-cpu)/n/1e3, "rootcpu-us/op")
	load.mu.Unlock()
	c.shutdown()
}
