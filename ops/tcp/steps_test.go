package tcp_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

// onThreads is a backend whose steps run in goroutines that are locked to threads, like goroutines that were
// called from C. Each step runs in another goroutine.
type onThreads struct {
	ops.Backend
	blocked int // how often Step has returned Blocked
}

func (b *onThreads) Step(ctx context.Context, wait bool) (p ops.Progress, err error) {
	done := make(chan struct{})
	go func() { // this also ends the thread
		defer close(done)
		runtime.LockOSThread()
		p, err = b.Backend.Step(ctx, wait)
	}()
	<-done
	if p == ops.Blocked {
		b.blocked++
	}
	return p, err
}

// Any goroutine may run any step of any operation. Once the channels exist, no step that may not wait returns
// Blocked.
func TestStepsOnThreads(t *testing.T) {
	const n = 3
	for name := range operations {
		t.Run(name, func(t *testing.T) {
			c := newCluster(memMeshes(n), topo.UpTo(n), tcp.Config{SegmentBytes: 64})
			defer c.close()
			c.must(t, func(i int, b *opstest.Blocking) error { return runOperation(t.Context(), name, b, n) })
			c.must(t, func(i int, b *opstest.Blocking) error {
				threads := &onThreads{Backend: b.Backend}
				err := runOperation(t.Context(), name, &opstest.Blocking{Backend: threads, Steps: true}, n)
				if threads.blocked > 0 {
					t.Errorf("rank %d: a step returned Blocked", i)
				}
				return err
			})
		})
	}
}

// A step that may not wait ends when it has received 2 MiB, even if more data has arrived. So a large
// operation does not keep its caller from other work.
func TestStepsOfRings(t *testing.T) {
	const n, numBytes = 2, 16 << 20
	c := newCluster(memMeshes(n), topo.UpTo(n), tcp.Config{SegmentBytes: 256 << 10})
	defer c.close()
	c.must(t, func(_ int, b *opstest.Blocking) error { // the first operation makes the channels
		return b.Allreduce(t.Context(), message.Ring, tensor.Float32, tensor.Sum, make([]byte, 4))
	})
	for kind, want := range map[message.Kind]int{
		message.Allreduce: numBytes/(2<<20) - 1, message.Allgather: numBytes/n/(2<<20) - 1,
	} {
		c.must(t, func(r int, b *opstest.Blocking) error {
			buf := make([]byte, numBytes)
			if err := b.Start(ops.Operation{
				Kind: kind, Algorithm: message.Ring, DType: tensor.Float32, Op: tensor.Sum,
				Tensors: []ops.Tensor{{In: buf, Out: buf}}, Scaling: ops.Scaling{Pre: 1, Post: 1},
				Buf: buf, Counts: []int64{numBytes / n, numBytes / n},
			}); err != nil {
				return err
			}
			for moved := 0; ; {
				p, err := b.Step(t.Context(), false)
				switch {
				case err != nil:
					return err
				case p == ops.Moving:
					moved++
				case p == ops.Finished && moved < want:
					return fmt.Errorf("rank %d: %v: Step returned Moving %d times, want at least %d times", r, kind,
						moved, want)
				case p == ops.Finished:
					return nil
				}
				runtime.Gosched()
			}
		})
	}
}

// late is a mesh whose channels return 0 from Sent while its field held is set.
type late struct {
	transport.Mesh
	held atomic.Bool
}

type lateConn struct {
	transport.Conn
	held *atomic.Bool
}

func (m *late) Conn(ctx context.Context, l transport.Lane, peer topo.Rank) (transport.Conn, error) {
	c, err := m.Mesh.Conn(ctx, l, peer)
	return &lateConn{c, &m.held}, err
}

func (c *lateConn) Sent() uint64 {
	if c.held.Load() {
		return 0
	}
	return c.Conn.Sent()
}

// TestStepsWhileBuffersAreHeld checks that a step that may not wait returns Waiting if the channel still
// holds a buffer that the operation must overwrite.
func TestStepsWhileBuffersAreHeld(t *testing.T) {
	meshes := memMeshes(2)
	l := &late{Mesh: meshes[0]}
	meshes[0] = l
	c := newCluster(meshes, topo.UpTo(2), tcp.Config{})
	defer c.close()
	var bufs [2][2]float32
	sum := func(r int, b *opstest.Blocking) error {
		bufs[r] = [2]float32{1, 2}
		return b.Allreduce(t.Context(), message.Ring, tensor.Float32, tensor.Sum, tensor.Bytes(bufs[r][:]))
	}
	c.must(t, sum) // the first operation makes the channels
	l.held.Store(true)
	b := c.backends[0]
	bufs[0] = [2]float32{1, 2}
	buf := tensor.Bytes(bufs[0][:])
	op := ops.Operation{
		Kind: message.Allreduce, Algorithm: message.Ring, DType: tensor.Float32, Op: tensor.Sum,
		Tensors: []ops.Tensor{{In: buf, Out: buf}}, Scaling: ops.Scaling{Pre: 1, Post: 1},
	}
	if err := b.Start(op); err != nil {
		t.Fatal(err)
	}
	other := make(chan error, 1)
	go func() { other <- sum(1, c.backends[1]) }()
	for ended := false; ; {
		p, err := b.Step(t.Context(), false)
		if err != nil || p == ops.Finished {
			t.Fatalf("%v, %v, want Waiting while the channel holds the buffer", p, err)
		}
		if ended {
			break
		}
		select {
		case err := <-other: // rank 1 has finished, so it has received all bytes of rank 0
			if err != nil {
				t.Fatal(err)
			}
			ended = true
		default:
			runtime.Gosched()
		}
	}
	l.held.Store(false)
	if _, err := b.Step(t.Context(), true); err != nil || bufs[0] != [2]float32{2, 4} {
		t.Errorf("got %v, %v, want [2 4]", bufs[0], err)
	}
}

// slowPeerMesh has only a channel to a peer that answers each message with zeros, at the third poll.
type slowPeerMesh struct {
	transport.Mesh
	peer *slowPeer
}

func (m slowPeerMesh) Conn(context.Context, transport.Lane, topo.Rank) (transport.Conn, error) {
	return m.peer, nil
}

// slowPeer is the channel of a slowPeerMesh.
type slowPeer struct {
	transport.Conn
	polls, blocked int
	sent           uint64
}

func (s *slowPeer) TryRead(p []byte) (int, error) {
	if s.polls++; s.polls%3 > 0 {
		return 0, nil
	}
	clear(p)
	return len(p), nil
}

func (s *slowPeer) Read(p []byte) (int, error) {
	s.blocked++
	clear(p)
	return len(p), nil
}

func (s *slowPeer) TrySend(p []byte) (int, error) {
	s.sent += uint64(len(p))
	return len(p), nil
}

func (s *slowPeer) Sent() uint64 { return s.sent }

func (s *slowPeer) Flush() error { return nil }

// A step that may wait polls before it blocks.
func TestPollsBeforeItBlocks(t *testing.T) {
	s := &slowPeer{}
	b := tcp.New(slowPeerMesh{peer: s}, transport.DataLane(0), topo.UpTo(2), 0, tcp.Config{})
	defer b.Close()
	x := tensor.Bytes([]float32{1})
	op := ops.Operation{Kind: message.Allreduce, Algorithm: message.RecursiveDoubling,
		DType: tensor.Float32, Op: tensor.Sum, Tensors: []ops.Tensor{{In: x, Out: x}}}
	if err := ops.Run(t.Context(), b, op); err != nil || s.polls != 3 || s.blocked != 0 {
		t.Errorf("error %v after %d polls and %d blocking reads, want 3 and 0", err, s.polls, s.blocked)
	}
}

// A step that may not wait returns Moving, not Waiting, if much data has arrived since the last step, so that
// its caller does not give up an operation that makes progress.
func TestStepsMoveWhileDataArrives(t *testing.T) {
	for numBytes, want := range map[int][]ops.Progress{
		64 << 10: {ops.Waiting, ops.Waiting, ops.Waiting, ops.Waiting, ops.Finished},
		1 << 20:  {ops.Waiting, ops.Waiting, ops.Moving, ops.Waiting, ops.Finished},
	} {
		b := tcp.New(slowPeerMesh{peer: &slowPeer{}}, transport.DataLane(0), topo.UpTo(2), 0, tcp.Config{})
		x := make([]byte, numBytes)
		op := ops.Operation{Kind: message.Allreduce, Algorithm: message.HalvingDoubling,
			DType: tensor.Float32, Op: tensor.Sum, Tensors: []ops.Tensor{{In: x, Out: x}}}
		connect := ops.Operation{Kind: message.Allreduce, Algorithm: message.HalvingDoubling,
			DType: tensor.Float32, Op: tensor.Sum, Tensors: []ops.Tensor{{In: x[:8], Out: x[:8]}}}
		if err := ops.Run(t.Context(), b, connect); err != nil { // makes the channel
			t.Fatal(err)
		}
		if err := b.Start(op); err != nil {
			t.Fatal(err)
		}
		var got []ops.Progress
		for len(got) < len(want) {
			p, err := b.Step(t.Context(), false)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, p)
		}
		b.Close()
		if !slices.Equal(got, want) {
			t.Errorf("%d bytes: got %v, want %v", numBytes, got, want)
		}
	}
}
