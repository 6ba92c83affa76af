package mem_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/internal/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func meshes(_ testing.TB, size int) []transport.Mesh { return meshesOf(mem.New(size), size) }

// meshesOf returns the meshes of all ranks of c.
func meshesOf(c *mem.Cluster, size int) []transport.Mesh {
	all := make([]transport.Mesh, size)
	for r := range all {
		all[r] = c.Mesh(topo.Rank(r))
	}
	return all
}

func Example() {
	cluster := mem.New(2)
	var wg sync.WaitGroup
	wg.Go(func() {
		conn, err := cluster.Mesh(0).Conn(context.Background(), transport.Control, 1)
		if err != nil {
			panic(err)
		}
		if err := errors.Join(conn.Send([]byte("hello")), conn.Flush()); err != nil {
			panic(err)
		}
	})
	conn, err := cluster.Mesh(1).Conn(context.Background(), transport.Control, 0)
	if err != nil {
		panic(err)
	}
	word := make([]byte, 5)
	if _, err := io.ReadFull(conn, word); err != nil {
		panic(err)
	}
	wg.Wait()
	cluster.Kill(0)
	_, err = conn.Read(word)
	fmt.Printf("%s; %v\n", word, err)
	// Output: hello; transport: connection to rank 0 on lane 0 failed: unexpected EOF
}

func TestContract(t *testing.T)         { transporttest.Run(t, meshes) }
func TestContractInBubble(t *testing.T) { transporttest.RunInBubble(t, meshes) }

func conn(t *testing.T, c *mem.Cluster, rank, peer topo.Rank) transport.Conn {
	t.Helper()
	x, err := c.Mesh(rank).Conn(t.Context(), 1, peer)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func wantPeer(t *testing.T, call string, err error, peer topo.Rank) {
	t.Helper()
	var pe *transport.PeerError
	if !errors.As(err, &pe) || pe.Peer != peer || pe.Lane != 1 {
		t.Errorf("%s: got error %v, want a *PeerError for lane 1 to rank %d", call, err, peer)
	}
}

// TestKill kills a rank. Calls that wait for it must return an error. Its peers must be able to read the
// bytes that it had sent, even if its buffers are reused.
func TestKill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := mem.New(4)
		up, down := conn(t, c, 0, 1), conn(t, c, 1, 0)
		idle := conn(t, c, 1, 2)
		buf := []byte("last words")
		if err := errors.Join(up.Send(buf), down.Send(make([]byte, 100))); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() { wantPeer(t, "pending flush", down.Flush(), 0) })
		wg.Go(func() {
			_, err := c.Mesh(3).Conn(t.Context(), 1, 0)
			wantPeer(t, "pending conn", err, 0)
		})
		wg.Go(func() {
			if err := up.Flush(); !errors.Is(err, transport.ErrClosed) {
				t.Errorf("pending flush of the dead: got error %v, want %v", err, transport.ErrClosed)
			}
			copy(buf, "overwritten")
		})
		synctest.Wait()
		c.Kill(0)
		wg.Wait()

		got := make([]byte, len(buf))
		if _, err := io.ReadFull(down, got); err != nil || string(got) != "last words" {
			t.Errorf("got %q, %v, want the bytes that were sent before", got, err)
		}
		_, err := down.Read(got)
		wantPeer(t, "read", err, 0)
		wantPeer(t, "send", down.Send(got), 0)
		_, err = c.Mesh(2).Conn(t.Context(), 1, 0)
		wantPeer(t, "conn of a higher rank", err, 0)
		c.Kill(3)
		_, err = c.Mesh(1).Conn(t.Context(), 1, 3)
		wantPeer(t, "conn of a lower rank", err, 3)

		if err := idle.Send([]byte("x")); err != nil {
			t.Errorf("another peer's channel: %v", err)
		}
	})
}

// TestFlushWaitsForReceiver checks that Flush returns exactly when the receiver has read all bytes.
func TestFlushWaitsForReceiver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := mem.New(2)
		a, b := conn(t, c, 0, 1), conn(t, c, 1, 0)
		if err := a.Send(make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
		flushed := make(chan error, 1)
		go func() { flushed <- a.Flush() }()
		for taken := range 10 {
			synctest.Wait()
			select {
			case err := <-flushed:
				t.Fatalf("flush returned %v when %d bytes were taken", err, taken)
			default:
			}
			if got := a.Sent(); got != uint64(taken) {
				t.Errorf("sent: got %d, want %d", got, taken)
			}
			if _, err := b.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
		}
		if err := <-flushed; err != nil {
			t.Error(err)
		}
	})
}

// TestConnInFakeTime checks that Conn returns exactly when its context ends if the peer never calls Conn.
func TestConnInFakeTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		began := time.Now()
		_, err := mem.New(2).Mesh(1).Conn(ctx, 1, 0)
		if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took != time.Hour {
			t.Errorf("got error %v after %v, want %v after an hour", err, took, context.DeadlineExceeded)
		}
	})
}

func BenchmarkPingPong(b *testing.B) { transporttest.PingPong(b, meshes) }
func BenchmarkStream(b *testing.B)   { transporttest.Stream(b, meshes) }
