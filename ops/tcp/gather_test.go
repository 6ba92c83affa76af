package tcp_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

func TestAllgather(t *testing.T) {
	eachCluster(t, func(t *testing.T, c *cluster, _ int) {
		n := len(c.backends)
		for _, of := range []func(r int) int64{
			func(r int) int64 { return 100 },
			func(r int) int64 { return int64(r*r*61) % 200 },    // rank 0 contributes nothing
			func(r int) int64 { return int64(n-1-r) % 3 * 333 }, // the last rank contributes nothing
			func(r int) int64 { return int64(r/(n-1+1/n)) * 7 }, // only the last rank sends
			func(r int) int64 { return 0 },
		} {
			checkAllgather(t, c, of)
		}
		checkAllgather(t, c, func(r int) int64 { return int64(5000 * (r + 1)) })
	})
}

func checkAllgather(t *testing.T, c *cluster, of func(r int) int64) {
	t.Helper()
	var counts []int64
	var want []byte
	for r := range c.backends {
		counts = append(counts, of(r))
		for i := range of(r) {
			want = append(want, byte(17*r+int(i)%251))
		}
	}
	for _, alg := range tcp.Algorithms(message.Allgather) {
		got := make([][]byte, len(c.backends))
		c.must(t, func(r int, b *opstest.Blocking) error {
			got[r] = bytes.Repeat([]byte{0xee}, len(want))
			from := int64(0)
			for _, k := range counts[:r] {
				from += k
			}
			copy(got[r][from:from+counts[r]], want[from:])
			return b.Allgather(t.Context(), alg, got[r], counts)
		})
		for r := range got {
			if !bytes.Equal(got[r], want) {
				t.Errorf("%v, counts %v: rank %d has bytes that differ from the input", alg, counts, r)
			}
		}
	}
}

func TestBroadcast(t *testing.T) {
	eachCluster(t, func(t *testing.T, c *cluster, _ int) {
		for root := range c.backends {
			for _, size := range []int{0, 1, 63, 64, 65, 5000} {
				checkBroadcast(t, c, root, size)
			}
		}
	})
}

func checkBroadcast(t *testing.T, c *cluster, root, size int) {
	t.Helper()
	want := make([]byte, size)
	for i := range want {
		want[i] = byte(i*31 + i>>8 + root)
	}
	for _, alg := range tcp.Algorithms(message.Broadcast) {
		got := make([][]byte, len(c.backends))
		c.must(t, func(r int, b *opstest.Blocking) error {
			if got[r] = make([]byte, size); r == root {
				copy(got[r], want)
			}
			return b.Broadcast(t.Context(), alg, root, got[r])
		})
		for r := range got {
			if !bytes.Equal(got[r], want) {
				t.Errorf("%v from root %d, %d bytes: rank %d has other bytes", alg, root, size, r)
			}
		}
	}
}

func TestAlltoall(t *testing.T) {
	eachCluster(t, func(t *testing.T, c *cluster, _ int) {
		n := len(c.backends)
		for _, of := range []func(from, to int) int64{
			func(int, int) int64 { return 100 },
			func(from, to int) int64 { return int64(from*61+to*17) % 200 },
			func(from, to int) int64 { return int64((from + to) % 2 * 333) },
			func(from, to int) int64 { return int64(from / (n - 1 + 1/n) * 7) }, // only the last rank sends
			// Only the last rank receives bytes.
			func(from, to int) int64 { return int64(to / (n - 1 + 1/n) * 7) },
			func(int, int) int64 { return 0 },
		} {
			checkAlltoall(t, c, of)
		}
		checkAlltoall(t, c, func(from, to int) int64 { return int64(5000*from + to) })
	})
}

// checkAlltoall runs an alltoall and checks its result. The function of returns the number of bytes that one
// rank sends to another.
func checkAlltoall(t *testing.T, c *cluster, of func(from, to int) int64) {
	t.Helper()
	n := len(c.backends)
	blocks := func(count func(i int) int64, first func(i int) int) (buf []byte, counts []int64) {
		for i := range n {
			counts = append(counts, count(i))
			for k := range counts[i] {
				buf = append(buf, byte(first(i)+int(k)%251))
			}
		}
		return buf, counts
	}
	got, gotCounts, calls := make([][]byte, n), make([][]int64, n), make([]int, n)
	c.must(t, func(r int, b *opstest.Blocking) error {
		in, counts := blocks(func(to int) int64 { return of(r, to) }, func(to int) int { return 31*r + 7*to })
		return b.Alltoall(t.Context(), message.Direct, in, counts, func(counts []int64) ([]byte, error) {
			calls[r]++
			gotCounts[r] = slices.Clone(counts)
			total := int64(0)
			for _, k := range counts {
				total += k
			}
			got[r] = bytes.Repeat([]byte{0xee}, int(total))
			return got[r], nil
		})
	})
	for r := range n {
		want, counts := blocks(func(from int) int64 { return of(from, r) }, func(from int) int {
			return 31*from + 7*r
		})
		if calls[r] != 1 || !slices.Equal(gotCounts[r], counts) {
			t.Errorf("rank %d: allocate was called %d times, the last time with %v, want once with %v", r,
				calls[r], gotCounts[r], counts)
		}
		if !bytes.Equal(got[r], want) {
			t.Errorf("counts %v: rank %d has bytes that differ from the input", counts, r)
		}
	}
}

// If allocate of one rank fails or returns a buffer of the wrong length, the alltoall and all later
// operations of this rank fail.
func TestAlltoallNoRoom(t *testing.T) {
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
			c := newCluster(memMeshes(3), upTo(3), tcp.Config{})
			const nobody = -1
			errs := c.judge(nobody, func(r int, b *opstest.Blocking) error {
				return b.Alltoall(t.Context(), message.Direct, make([]byte, 6), []int64{2, 2, 2},
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
// error that names the rank, and does not call allocate.
func TestAlltoallLies(t *testing.T) {
	for name, counts := range map[string][2]uint64{
		"negative":        {math.MaxUint64, 0},
		"below zero":      {1 << 63, 0},
		"overflow":        {math.MaxInt64, 1},
		"two that exceed": {1 << 62, 1 << 62},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			meshes := memMeshes(3)
			b := &opstest.Blocking{Backend: tcp.New(meshes[0], lane, upTo(3), 0, tcp.Config{})}
			done := make(chan error, 1)
			go func() {
				done <- b.Alltoall(ctx, message.Direct, nil, []int64{0, 0, 0},
					func(counts []int64) ([]byte, error) {
						t.Errorf("allocate was called with %v, want no call", counts)
						return nil, errors.New("no room")
					})
			}()
			for i, count := range counts {
				liar, err := meshes[i+1].Conn(ctx, lane, 0)
				if err != nil {
					t.Fatal(err)
				}
				if err := liar.Send(binary.LittleEndian.AppendUint64(nil, count)); err != nil {
					t.Fatal(err)
				}
			}
			if err := <-done; err == nil || !strings.Contains(err.Error(), "from rank") {
				t.Errorf("got %v, want an error that names the rank", err)
			}
		})
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
	c := newCluster(meshes, upTo(n), tcp.Config{})
	defer c.close()
	c.must(t, func(_ int, b *opstest.Blocking) error {
		return b.Allgather(t.Context(), message.Bruck, make([]byte, 64*n), slices.Repeat([]int64{64}, n))
	})
}
