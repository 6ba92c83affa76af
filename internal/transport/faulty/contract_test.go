package faulty_test

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/faulty"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/internal/transport/tcp"
	"github.com/gohvd/gohvd/internal/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// overMem returns a factory of meshes over transport/mem with new rules.
func overMem(rules func() []*faulty.Rule) transporttest.Factory {
	return func(_ testing.TB, size int) []transport.Mesh { return wrap(size, mem.New(size).Mesh, rules()...) }
}

// overTCP returns a factory of meshes over transport/tcp on loopback with new rules.
func overTCP(rules func() []*faulty.Rule) transporttest.Factory {
	return func(tb testing.TB, size int) []transport.Mesh {
		tb.Helper()
		endpoints, addrs := make([]*tcp.Endpoint, size), make([]string, size)
		for r := range endpoints {
			e, err := tcp.Listen(tcp.Config{ListenAddr: "127.0.0.1:0"})
			if err != nil {
				tb.Fatal(err)
			}
			tb.Cleanup(func() {
				if err := e.Close(); err != nil {
					tb.Error(err)
				}
			})
			endpoints[r], addrs[r] = e, e.Addr()
		}
		return wrap(size, func(r topo.Rank) transport.Mesh {
			m, err := endpoints[r].Connect(tcp.Epoch{Job: "test", Epoch: 1, Rank: r, Addrs: addrs})
			if err != nil {
				tb.Fatal(err)
			}
			return m
		}, rules()...)
	}
}

// wrap returns the meshes of a network with rules over the given meshes.
func wrap(size int, inner func(topo.Rank) transport.Mesh, rules ...*faulty.Rule) []transport.Mesh {
	n := faulty.New(1, rules...)
	all := make([]transport.Mesh, size)
	for r := range all {
		all[r] = n.Wrap(topo.Rank(r), inner(topo.Rank(r)))
	}
	return all
}

// The wrapped meshes obey the contract of package transport, without rules and with rules that slow bytes
// down. With the latter the test runs in real time, because some tests of the contract poll Sent.
func TestContract(t *testing.T) {
	t.Run("mem", func(t *testing.T) { transporttest.Run(t, overMem(nothing)) })
	t.Run("mem in a bubble", func(t *testing.T) { transporttest.RunInBubble(t, overMem(nothing)) })
	t.Run("slow mem", func(t *testing.T) { transporttest.Run(t, overMem(slow)) })
	t.Run("tcp", func(t *testing.T) { transporttest.Run(t, overTCP(nothing)) })
	t.Run("slow tcp", func(t *testing.T) { transporttest.Run(t, overTCP(slow)) })
}

func nothing() []*faulty.Rule { return nil }

func slow() []*faulty.Rule {
	return []*faulty.Rule{
		{Name: "link", BytesPerSecond: 1 << 30, BurstBytes: 4 << 20},
		{Name: "distance", Delay: 50 * time.Microsecond, Jitter: 50 * time.Microsecond},
	}
}
