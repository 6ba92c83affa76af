package p2p_test

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
)

// someMemory is the memory of peers that have shared one chunk of 100 bytes.
type someMemory struct{}

func (someMemory) Share(transport.Lane, int64, []topo.Rank) ([]byte, error) {
	return make([]byte, 64), nil
}

func (someMemory) Peer(context.Context, transport.Lane, topo.Rank) ([]byte, error) {
	return make([]byte, 64), nil
}

func (someMemory) Arena(_ context.Context, _ topo.Rank, chunk uint32) ([]byte, error) {
	if chunk != 1 {
		return nil, errOver
	}
	return make([]byte, 100), nil
}

func (someMemory) Find(b []byte) (arena.Ref, bool) { return arena.Find(b) }

func (someMemory) Err(transport.Lane, topo.Rank) error { return nil }

// FuzzFrames sends bytes to a rank that has operations in flight. The rank reports a failure at the end of
// the bytes, or before.
func FuzzFrames(f *testing.F) {
	message := append([]byte{1, 1, 0, 0, 4, 0, 0, 0}, make([]byte, 16)...)
	message[16] = 3
	f.Add(append(bytes.Clone(message), 7, 8, 9))
	f.Add(append([]byte{2, 1, 0, 0, 4, 0, 0, 0}, message[8:]...))
	for _, offset := range []byte{0, 97, 98, 101} {
		place := []byte{1, 0, 0, 0, 0, 0, 0, 0, offset, 0, 0, 0, 0, 0, 0, 0}
		f.Add(slices.Concat([]byte{3, 1, 0, 0, 4, 0, 0, 0}, message[8:], place))
	}
	f.Add([]byte{4, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{6, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 255})
	f.Add(append([]byte{7}, message[1:]...))
	f.Add(append([]byte{8}, message[1:]...))
	f.Add(bytes.Repeat([]byte{255}, 1<<20)) // the rank reads only the first frame
	f.Fuzz(func(t *testing.T, b []byte) {
		c := mem.New(2)
		failed := make(chan error, 10)
		x := p2p.New(p2p.Config{Mesh: c.Mesh(0), Lane: lane, Ranks: []topo.Rank{0, 1}, Silent: func() {},
			Memory: someMemory{}, Groups: []topo.Rank{0, 0},
			Failed: func(err error) { failed <- err }})
		ended := make(chan error, 10)
		op := func(numBytes int) *p2p.Op {
			return &p2p.Op{Peer: 1, Tag: 4, DType: tensor.Uint8, Buf: make([]byte, numBytes),
				Done: func(err error) { ended <- err }}
		}
		for _, err := range []error{x.Receive(op(3)), x.Receive(op(3)), x.Send(op(100_000))} {
			if err != nil {
				t.Fatal(err)
			}
		}
		conn, err := c.Mesh(1).Conn(t.Context(), lane, 0)
		if err != nil {
			t.Fatal(err)
		}
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			// A rank that has failed reads no more, so these calls may block until its mesh is closed.
			if err := conn.Send(b); err == nil {
				_ = conn.Flush()
			}
			_ = c.Mesh(1).Close()
		}()
		// A rank that has said bye does not fail when its channel ends.
		select {
		case <-failed:
		case <-ended:
		case <-time.After(20 * time.Second):
			t.Error("the end of the channel was not noticed")
		}
		x.Close(errOver)
		_ = c.Mesh(0).Close()
		<-sent
	})
}
