package engine_test

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/transport"
	"github.com/gohvd/gohvd/transport/mem"
)

// In lock-step too, a rank that breaks the protocol is named, and not the one that notices.
func TestLockstepNamesWhoBreaksTheProtocol(t *testing.T) {
	net := mem.New(2)
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	sent := make(chan error, 1)
	go func() {
		conn, err := net.Mesh(1).Conn(ctx, transport.Control, 0)
		if err != nil {
			sent <- err
			return
		}
		q := message.Request{
			Kind: message.Allreduce, Name: "x", DType: tensor.Int64, Shape: tensor.Shape{1}, Op: tensor.Sum, Prescale: 1, Postscale: 1,
		}
		twice, err := message.AppendUp(nil, &message.Up{Type: message.UpNews, Sets: []message.UpSet{{Requests: []message.Request{q, q}}}})
		const flagRequests = 2
		for seq, frame := range [][]byte{message.AppendVectors(nil, []uint64{0}, []uint64{flagRequests, 0, 0}), twice} {
			b := binary.LittleEndian.AppendUint32(nil, uint32(len(frame)))
			b = binary.LittleEndian.AppendUint32(b, uint32(seq))
			err = errors.Join(err, conn.Send(append(b, frame...)))
		}
		sent <- err
	}()
	e, err := engine.Start(ctx, engine.Config{
		Rank: 0, Size: 2, Mesh: net.Mesh(0), CacheCapacity: 4, LivenessTimeout: 10 * time.Second, Lockstep: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
	<-e.Ended()
	var peer *engine.PeerError
	if !errors.As(e.Err(), &peer) || !slices.Equal(peer.Ranks, []int{1}) {
		t.Errorf("got error %v, want one that names rank 1", e.Err())
	}
	e.Close()
	if err := net.Mesh(1).Close(); err != nil {
		t.Error(err)
	}
}
