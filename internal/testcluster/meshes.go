package testcluster

import (
	"testing"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/internal/transport/tcp"
)

// MemMeshes returns the meshes of n ranks that are connected within this process.
func MemMeshes(n int) []transport.Mesh { return meshesOf(mem.New(n), n) }

// meshesOf returns the meshes of the n ranks of c.
func meshesOf(c *mem.Cluster, n int) []transport.Mesh {
	meshes := make([]transport.Mesh, n)
	for r := range meshes {
		meshes[r] = c.Mesh(topo.Rank(r))
	}
	return meshes
}

// TCPMeshes returns the meshes of n ranks that are connected over TCP on the loopback interface. They are
// closed at the latest when the test ends.
func TCPMeshes(tb testing.TB, n int) []transport.Mesh {
	tb.Helper()
	return SecretTCPMeshes(tb, n, secret.Secret{})
}

// SecretTCPMeshes is like TCPMeshes, but the ranks have the secret of a job.
func SecretTCPMeshes(tb testing.TB, n int, key secret.Secret) []transport.Mesh {
	tb.Helper()
	endpoints, addrs := make([]*tcp.Endpoint, n), make([]string, n)
	for r := range endpoints {
		e, err := tcp.Listen(tcp.Config{ListenAddr: "127.0.0.1:0", Secret: key})
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
	meshes := make([]transport.Mesh, n)
	for r, e := range endpoints {
		m, err := e.Connect(tcp.Epoch{Job: "test", Epoch: 1, Rank: topo.Rank(r), Addrs: addrs})
		if err != nil {
			tb.Fatal(err)
		}
		meshes[r] = m
	}
	return meshes
}
