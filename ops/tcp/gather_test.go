package tcp_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

// If allocate of one rank fails or returns a buffer of the wrong length, the alltoall and all later
// operations of this rank fail.
func TestAlltoallNoRoom(t *testing.T) {
	for _, alg := range tcp.Algorithms(message.Alltoall) {
		t.Run(alg.String(), func(t *testing.T) { testNoRoom(t, alg) })
	}
}

func testNoRoom(t *testing.T, alg message.Algorithm) {
	noRoom := errors.New("no room")
	for name, test := range map[string]struct {
		size int
		err  error
		want string
	}{
		"refused":   {0, noRoom, "no room"},
		"too short": {5, nil, "got an output buffer of 5 bytes, want 6"},
		"too long":  {7, nil, "got an output buffer of 7 bytes, want 6"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(memMeshes(3), topo.UpTo(3), tcp.Config{})
			const nobody = -1
			errs := c.judge(nobody, func(r int, b *opstest.Blocking) error {
				return b.Alltoall(t.Context(), alg, make([]byte, 6), []int64{2, 2, 2},
					func([]int64) ([]byte, error) {
						if r == 0 {
							return make([]byte, test.size), test.err
						}
						return make([]byte, 6), nil
					})
			})
			if errs[0] == nil || !strings.Contains(errs[0].Error(), test.want) || test.err != nil &&
				!errors.Is(errs[0], test.err) {
				t.Errorf("got %v, want %v", errs[0], test.want)
			}
			if err := c.backends[0].Broadcast(t.Context(), message.Tree, 0, nil); !errors.Is(err, errs[0]) {
				t.Errorf("after %v: got %v, want the same", errs[0], err)
			}
		})
	}
}

// The lengths that peers announce add up to more than an int64 can hold. The alltoall then fails with an
// error that names the rank, and does not call allocate. With Bruck the same holds for a length that exceeds
// the largest length of all ranks.
func TestAlltoallLies(t *testing.T) {
	lies := func(name string, alg message.Algorithm, said ...[]uint64) {
		t.Run(fmt.Sprint(alg, "/", name), func(t *testing.T) { testAlltoallLies(t, alg, said) })
	}
	for name, counts := range map[string][2]uint64{
		"negative":        {math.MaxUint64, 0},
		"below zero":      {1 << 63, 0},
		"overflow":        {math.MaxInt64, 1},
		"two that exceed": {1 << 62, 1 << 62},
	} {
		lies(name, message.Direct, counts[:1], counts[1:])
		// With Bruck, a message begins with the greatest length of a block, followed by the length of the
		// block for rank 0.
		largest := max(counts[0], counts[1])
		lies(name, message.Bruck, []uint64{largest, counts[0]}, []uint64{largest, counts[1]})
	}
	lies("more than the largest", message.Bruck, []uint64{4, 4}, []uint64{4, 5})
}

// testAlltoallLies runs an alltoall at rank 0. The ranks 1 and 2 send the numbers in said.
func testAlltoallLies(t *testing.T, alg message.Algorithm, said [][]uint64) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	meshes := memMeshes(3)
	b := &opstest.Blocking{Backend: tcp.New(meshes[0], lane, topo.UpTo(3), 0, tcp.Config{})}
	done := make(chan error, 1)
	go func() {
		done <- b.Alltoall(ctx, alg, nil, []int64{0, 0, 0}, func(counts []int64) ([]byte, error) {
			t.Errorf("allocate was called with %v, want no call", counts)
			return nil, errors.New("no room")
		})
	}()
	for i, numbers := range said {
		liar, err := meshes[i+1].Conn(ctx, lane, 0)
		if err != nil {
			t.Fatal(err)
		}
		var p []byte
		for _, k := range numbers {
			p = binary.LittleEndian.AppendUint64(p, k)
		}
		if err := liar.Send(p); err != nil {
			t.Fatal(err)
		}
		var reader sync.WaitGroup
		reader.Go(func() { _, _ = io.Copy(io.Discard, liar) }) // rank 0 waits until its bytes have left
		defer reader.Wait()
		defer meshes[i+1].Abort(lane, errors.New("the test has ended"))
	}
	if err := <-done; err == nil || !strings.Contains(err.Error(), "from rank") {
		t.Errorf("got %v, want an error that names the rank", err)
	}
}

// counting is a mesh that counts the buffers that its rank passes to channels.
type counting struct {
	transport.Mesh
	sent atomic.Int64
}

type countingConn struct {
	transport.Conn
	sent *atomic.Int64
}

func (m *counting) Conn(ctx context.Context, l transport.Lane, peer topo.Rank) (transport.Conn, error) {
	c, err := m.Mesh.Conn(ctx, l, peer)
	return &countingConn{c, &m.sent}, err
}

func (c *countingConn) TrySend(p []byte) (int, error) {
	c.sent.Add(1)
	return c.Conn.TrySend(p)
}

// In an alltoall of small blocks among 64 ranks, each rank sends 12 messages with Bruck, 6 with lengths and 6
// with blocks. With Direct it sends a length and a block to each of 63 ranks.
func TestMessagesOfAlltoall(t *testing.T) {
	const n = 64
	for alg, want := range map[message.Algorithm]int64{message.Bruck: 12, message.Direct: 126} {
		meshes := memMeshes(n)
		for r := range meshes {
			meshes[r] = &counting{Mesh: meshes[r]}
		}
		c := newCluster(meshes, topo.UpTo(n), tcp.Config{})
		c.must(t, func(r int, b *opstest.Blocking) error {
			size := 16 + r%2
			return b.Alltoall(t.Context(), alg, make([]byte, n*size), slices.Repeat([]int64{int64(size)}, n),
				func([]int64) ([]byte, error) { return make([]byte, n*16+n/2), nil })
		})
		for r, m := range meshes {
			if got := m.(*counting).sent.Load(); got != want {
				t.Errorf("%v: rank %d sent %d messages, want %d", alg, r, got, want)
			}
		}
		c.close()
	}
}

// slowMesh is the mesh of a rank whose sockets have little room, and which reads so late that all data has
// arrived.
type slowMesh struct{ transport.Mesh }

func (m *slowMesh) Conn(ctx context.Context, l transport.Lane, peer topo.Rank) (transport.Conn, error) {
	c, err := m.Mesh.Conn(ctx, l, peer)
	return &slowConn{c}, err
}

type slowConn struct{ transport.Conn }

func (c *slowConn) TrySend(p []byte) (int, error) {
	n := (len(p) + 1) / 2
	return n, c.Send(p[:n])
}

func (c *slowConn) TryRead(p []byte) (int, error) {
	for {
		if n, err := c.Conn.TryRead(p); n > 0 || err != nil {
			return n, err
		}
		runtime.Gosched()
	}
}

// Rank 3 waits for a channel that rank 0 makes when it has received bytes that are pending at rank 3. So rank
// 3 must send them before it waits.
func TestPendingBytesBeforeDialing(t *testing.T) {
	const n = 7
	meshes := tcpMeshes(t, n)
	meshes[3] = &slowMesh{meshes[3]}
	c := newCluster(meshes, topo.UpTo(n), tcp.Config{})
	defer c.close()
	c.must(t, func(_ int, b *opstest.Blocking) error {
		return b.Allgather(t.Context(), message.Bruck, make([]byte, 64*n), slices.Repeat([]int64{64}, n))
	})
}

// A gather and a scatter open only the channels to the root.
func TestRootedChannels(t *testing.T) {
	const n, root = 4, 2
	for _, kind := range []message.Kind{message.Gather, message.Scatter} {
		c := newCluster(strictMeshes(t, n), topo.UpTo(n), tcp.Config{})
		c.must(t, func(r int, b *opstest.Blocking) error {
			counts, total := make([]int64, n), 0
			for to := range counts {
				if kind == message.Gather && to == root || kind == message.Scatter && r == root {
					counts[to] = 1
					total++
				}
			}
			allocate := func(counts []int64) ([]byte, error) {
				total := int64(0)
				for _, k := range counts {
					total += k
				}
				return make([]byte, total), nil
			}
			return ops.Run(t.Context(), b.Backend, ops.Operation{Kind: kind, Algorithm: message.Direct,
				Root: root, Buf: make([]byte, total), Counts: counts, Allocate: allocate})
		})
		for r, m := range c.meshes {
			got := slices.Sorted(maps.Keys(m.(*strictMesh).conns))
			want := []topo.Rank{root}
			if r == root {
				want = []topo.Rank{0, 1, 3}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%v: rank %d has channels to ranks %v, want %v", kind, r, got, want)
			}
		}
	}
}
