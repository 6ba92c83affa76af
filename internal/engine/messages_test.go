package engine_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Rank 0 sends a small message, a large one in an arena, and one that does not fit. Both ranks count them.
func TestMessagesAreCounted(t *testing.T) {
	large, err := arena.Alloc(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := arena.Free(large); err != nil {
			t.Error(err)
		}
	}()
	counted := make(chan struct{}) // closed when rank 0 has counted the messages in flight
	testcluster.Run(t, testcluster.Options{Ranks: 2, Transport: testcluster.SHM}, func(r *testcluster.Rank) {
		kind, refused := message.Send, uint64(0)
		if r.Rank == 1 {
			kind, refused = message.Recv, 1
		}
		for tag, numBytes := range []int{100, 1 << 20, 5} {
			buf := make([]byte, numBytes+tag/2*int(r.Rank))
			if tag == 1 && r.Rank == 0 {
				buf = large
			}
			if tag == 1 && r.Rank == 1 {
				<-counted
			}
			done := make(chan error, 1)
			o := &p2p.Op{Peer: 1 - r.Rank, Tag: uint32(tag), DType: tensor.Uint8, Buf: buf,
				Done: func(err error) { done <- err }}
			if err := r.Engine.Post(topo.Global, o, kind == message.Recv); err != nil {
				t.Error(err)
				return
			}
			if tag == 1 && r.Rank == 0 {
				if n := r.Engine.Stats().InFlight; n != 1 {
					t.Errorf("got %d messages in flight, want 1", n)
				}
				close(counted)
			}
			if err := <-done; err != nil && tag < 2 {
				t.Error(err)
			}
		}
		st := r.Engine.Stats()
		bytes := map[message.Backend]uint64{}
		for _, m := range st.Moved {
			if m.Kind == kind && m.DType == tensor.Uint8 {
				bytes[m.Backend] = m.Bytes
			}
		}
		small := uint64(100)
		if kind == message.Send {
			small += 5 // the send of a message that does not fit succeeds
		}
		if bytes[message.TCP] != small || bytes[message.SHM] != 1<<20 || st.Refused != refused ||
			st.Failed != 0 {
			t.Errorf("rank %d: got bytes %v, %d refused, %d failed, want %d, %d, %d, 0", r.Rank, bytes,
				st.Refused, st.Failed, small, 1<<20, refused)
		}
		if n := total(st.Operations, kind); n != 3-refused {
			t.Errorf("rank %d: got %d messages, want %d", r.Rank, n, 3-refused)
		}
	})
}

// Rank 1 waits one second for rank 0 to send a message. Then rank 0 waits one second for rank 1 to receive a
// large message. The records of both ranks have the same name and number, and how long the rank has waited. A
// message in flight is pending.
func TestMessagesAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var logs [2]log
		c := start(t, 2, func(cfg *engine.Config) { cfg.Recorder = &logs[cfg.Rank] })
		time.Sleep(time.Second)
		post := func(r, numBytes int) chan error {
			done := make(chan error, 1)
			o := &p2p.Op{Peer: topo.Rank(1 - r), Tag: 7, DType: tensor.Int16, Buf: make([]byte, numBytes),
				Done: func(err error) { done <- err }}
			if r == 1 && numBytes == 4 {
				o.Peer = p2p.AnySource
			}
			if err := c.engines[r].Post(topo.Global, o, r == 1); err != nil {
				t.Fatal(err)
			}
			return done
		}
		second := func(late, early, numBytes int, kind message.Kind, pending trace.Record) {
			first := post(early, numBytes)
			time.Sleep(time.Second)
			if p := c.engines[early].Pending(); len(p) != 1 || p[0].Kind != kind || p[0].Granted != 0 ||
				p[0].Name != pending.Name || p[0].Number != pending.Number ||
				!slices.Equal(p[0].Among, pending.Among) {
				t.Errorf("got pending %+v, want %+v", p, pending)
			}
			if err := errors.Join(c.wait(post(late, numBytes)), c.wait(first)); err != nil {
				t.Error(err)
			}
		}
		second(0, 1, 4, message.Recv, trace.Record{Name: "any rank to rank 1, tag 7"})
		second(1, 0, 1<<20, message.Send, trace.Record{Name: "rank 0 to rank 1, tag 7", Number: 2,
			Among: []topo.Rank{0, 1}})
		for r := range logs {
			kind, activity := message.Send, "TCP_SEND"
			if r == 1 {
				kind, activity = message.Recv, "TCP_RECV"
			}
			ops := logs[r].operations()
			if len(ops) != 2 {
				t.Fatalf("rank %d: got %d records, want 2", r, len(ops))
			}
			for i, op := range ops {
				n, numBytes, waited := op.Records[0], []int64{4, 1 << 20}[i], time.Duration(0)
				if i != r {
					waited = time.Second
				}
				if n.Kind != kind || n.Peer != topo.Rank(1-r) || n.Number != uint64(i+1) ||
					n.Backend != message.TCP || n.Name != "rank 0 to rank 1, tag 7" || n.Bytes != numBytes ||
					n.DType != tensor.Int16 || !slices.Equal(n.Shape, tensor.Shape{numBytes / 2}) ||
					n.Granted-n.Submitted != waited || n.Begun != n.Granted || n.Ended < n.Begun ||
					len(op.Activities) != 1 || op.Activities[0].Name != activity || n.Error != "" {
					t.Errorf("rank %d: got %+v, want message %d with a wait of %v", r, op, i+1, waited)
				}
			}
			if p := c.engines[r].Pending(); len(p) != 0 {
				t.Errorf("rank %d: got pending %+v after the messages", r, p)
			}
		}
		c.shutdown()
	})
}

// Rank 1 shuts down while its large message waits. So its bye overtakes the data, and rank 0 needs nothing
// more of rank 1 when it has accepted the message. The data arrives, although it takes a second more.
func TestMessagesOfALeaverAfterItsBye(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := start(t, 2, func(cfg *engine.Config) {
			if cfg.Rank == 1 {
				cfg.Mesh = slowMessages{cfg.Mesh}
			}
		})
		var done [2]chan error
		for r := range done {
			done[r] = make(chan error, 1)
			o := &p2p.Op{Peer: topo.Rank(1 - r), DType: tensor.Uint8, Buf: make([]byte, 1<<20),
				Done: func(err error) { done[r] <- err }}
			if err := c.engines[r].Post(topo.Global, o, r == 0); err != nil {
				t.Fatal(err)
			}
		}
		left := make(chan error, 1)
		go func() { left <- c.engines[1].Shutdown(c.ctx, engine.Departure{}) }()
		for _, d := range done {
			if err := c.wait(d); err != nil {
				t.Error(err)
			}
		}
		if err := errors.Join(c.wait(left), c.engines[0].Shutdown(c.ctx, engine.Departure{})); err != nil {
			t.Error(err)
		}
	})
}

// slowMessages is a mesh on which each frame of messages in the global process set takes a second.
type slowMessages struct{ transport.Mesh }

// Conn implements transport.Mesh.
func (m slowMessages) Conn(ctx context.Context, lane transport.Lane, peer topo.Rank) (transport.Conn, error) {
	c, err := m.Mesh.Conn(ctx, lane, peer)
	if err == nil && lane == transport.MessageLane(topo.Global) {
		c = slowFrames{c}
	}
	return c, err
}

type slowFrames struct{ transport.Conn }

// Send implements transport.Conn.
func (c slowFrames) Send(p []byte) error {
	time.Sleep(time.Second)
	return c.Conn.Send(p)
}

// One member removes a process set while the other one still waits for a message and for an earlier
// operation. The end of the channel is then no failure, and the removal ends the message.
func TestMessagesOfARemovedSet(t *testing.T) {
	inBubbles(t, func(t *testing.T, lockstep bool) {
		c := start(t, 2, withSet(lockstep))
		message := make(chan error, 1)
		recv := &p2p.Op{Peer: 0, DType: tensor.Uint8, Buf: make([]byte, 1),
			Timeout: time.Second, Done: func(err error) { message <- err }}
		if err := c.engines[1].Post(1, recv, true); err != nil {
			t.Fatal(err)
		}
		sent, release := c.submit(0, over(1, broadcast())), make(chan struct{})
		received := over(1, broadcast())
		received.Done = func(error) { <-release }
		if err := c.engines[1].Submit(received); err != nil {
			t.Fatal(err)
		}
		c.succeeds(sent)
		one := c.submit(1, removal(1))
		c.succeeds(c.submit(0, removal(1)))
		time.Sleep(15 * time.Second) // longer than the timeouts of the message and of silent ranks
		if isDone(one) || isDone(message) {
			t.Error("the removal or the message has ended before the earlier operation")
		}
		close(release)
		c.succeeds(one)
		if err := c.wait(message); !errors.Is(err, engine.ErrNoProcessSet) {
			t.Errorf("the message: got error %v, want ErrNoProcessSet", err)
		}
		c.shutdown()
	})
}

// broadcast returns a broadcast of one byte from rank 0.
func broadcast() *tensorqueue.Entry {
	b := make([]byte, 1)
	return &tensorqueue.Entry{Request: message.Request{Kind: message.Broadcast, Name: "b", DType: tensor.Uint8,
		Shape: tensor.Shape{1}}, Input: b, Output: b}
}

// total returns the number of operations of the given kind.
func total(all []trace.Operations, kind message.Kind) (n uint64) {
	for _, o := range all {
		if o.Kind == kind {
			n += o.Tensors
		}
	}
	return n
}
