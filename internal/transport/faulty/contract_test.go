package faulty_test

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/faulty"
	"github.com/gohvd/gohvd/internal/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// overMem returns a factory of meshes over transport/mem with new rules.
func overMem(rules func() []*faulty.Rule) transporttest.Factory {
	return func(_ testing.TB, size int) []transport.Mesh {
		return wrap(testcluster.MemMeshes(size), rules()...)
	}
}

// overTCP returns a factory of meshes over transport/tcp on loopback with new rules.
func overTCP(rules func() []*faulty.Rule) transporttest.Factory {
	return func(tb testing.TB, size int) []transport.Mesh {
		tb.Helper()
		return wrap(testcluster.TCPMeshes(tb, size), rules()...)
	}
}

// wrap returns the meshes of a network with rules over the given meshes.
func wrap(inner []transport.Mesh, rules ...*faulty.Rule) []transport.Mesh {
	n := faulty.New(1, rules...)
	all := make([]transport.Mesh, len(inner))
	for r, m := range inner {
		all[r] = n.Wrap(topo.Rank(r), m)
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
