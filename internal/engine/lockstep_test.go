package engine_test

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/ops"
)

// againstFrames runs rank 0 in lock-step until its epoch ends, and returns the error with which its engine
// ended. The function rank1 acts as rank 1: it sends frames to rank 0. The functions in rank0 are called with
// the engine of rank 0.
func againstFrames(t *testing.T, rank1 func(ctx context.Context, send func(frame []byte) error) error,
	rank0 ...func(e *engine.Engine),
) error {
	net := mem.New(2)
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	sent := make(chan error, 1)
	ended := make(chan struct{})
	go func() {
		conn, err := net.Mesh(1).Conn(ctx, transport.Control, 0)
		if err != nil {
			sent <- err
			return
		}
		go func() {
			<-ended
			cancel()
		}()
		seq := uint32(0)
		sent <- rank1(ctx, func(frame []byte) error {
			b := binary.LittleEndian.AppendUint32(nil, uint32(len(frame)))
			b = binary.LittleEndian.AppendUint32(b, seq)
			seq++
			return conn.Send(append(b, frame...))
		})
	}()
	e, err := engine.Start(ctx, engine.Config{
		Rank: 0, Size: 2, Mesh: net.Mesh(0), CacheCapacity: 4, LivenessTimeout: 10 * time.Second,
		Lockstep: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range rank0 {
		f(e)
	}
	<-e.Ended()
	close(ended)
	if err := <-sent; err != nil {
		t.Error(err)
	}
	e.Close()
	if err := net.Mesh(1).Close(); err != nil {
		t.Error(err)
	}
	return e.Err()
}

func wantRank1(t *testing.T, err error, text string) {
	t.Helper()
	var peer *engine.PeerError
	if !errors.As(err, &peer) || !slices.Equal(peer.Ranks, []int{1}) || !strings.Contains(err.Error(), text) {
		t.Errorf("got error %v, want one that names rank 1 and says %q", err, text)
	}
}

// If rank 1 sends malformed or contradictory frames in lock-step, the verdict names rank 1 and not the rank
// that detects the error.
func TestLockstepNamesWhoBreaksTheProtocol(t *testing.T) {
	q := message.Request{
		Kind: message.Allreduce, Name: "x", DType: tensor.Int64, Shape: tensor.Shape{1}, Op: tensor.Sum,
		Prescale: 1, Postscale: 1,
	}
	twice, err := message.AppendUp(nil, &message.Up{Type: message.UpNews,
		Sets: []message.UpSet{{Requests: []message.Request{q, q}}}})
	if err != nil {
		t.Fatal(err)
	}
	const flagGather = 1
	for name, c := range map[string]struct {
		frames [][]byte
		want   string
	}{
		"second request": {[][]byte{message.AppendVectors(nil, nil, []uint64{flagGather}),
			twice}, "second request"},
		"broken news": {[][]byte{message.AppendVectors(nil, nil, []uint64{flagGather}),
			twice[:len(twice)-1]}, "protocol error"},
		"broken vectors": {[][]byte{message.AppendVectors(nil, nil, []uint64{0})[:9]},
			"protocol error"},
		"longer vectors": {[][]byte{message.AppendVectors(nil, []uint64{0}, []uint64{0, 0})},
			"an OR vector of 2 words, want 0 and 1"},
	} {
		t.Run(name, func(t *testing.T) {
			wantRank1(t, againstFrames(t, func(_ context.Context, send func([]byte) error) (err error) {
				for _, frame := range c.frames {
					err = errors.Join(err, send(frame))
				}
				return err
			}), c.want)
		})
	}
}

// If a rank sends heartbeats but does not enter a collective, it fails after two liveness timeouts, and the
// verdict names it.
func TestLockstepDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		beat, err := message.AppendUp(nil, &message.Up{Type: message.UpHeartbeat})
		if err != nil {
			t.Fatal(err)
		}
		wantRank1(t, againstFrames(t, func(ctx context.Context, send func([]byte) error) error {
			for ctx.Err() == nil {
				if err := send(beat); err != nil {
					return err
				}
				select {
				case <-ctx.Done():
				case <-time.After(time.Second): // this takes no real time in the bubble
				}
			}
			return nil
		}), "it has not entered a negotiation cycle for 20s, although it sends heartbeats")
		if took := time.Since(began); took < 20*time.Second || took > 21*time.Second {
			t.Errorf("took %v, want 20s", took)
		}
	})
}

// broken are collectives that fail with err. Poll reports each time that Test has to be called.
type broken struct {
	stuck
	tests int // number of calls of Test
}

func (b *broken) Test() ([][]byte, bool, error) {
	if b.tests++; b.tests == 1000 {
		time.Sleep(time.Hour) // a loop that calls Test without a pause would stop the time in the bubble
	}
	return b.stuck.Test()
}

// After an error in a cycle, the rank that cannot tell which rank has failed waits for the verdict without
// calling Test again.
func TestCollectivesFailOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		failing := &broken{stuck: stuck{&ops.UnknownRankError{Ranks: []topo.Rank{0, 1},
			Err: errors.New("no such peer")}}}
		c := start(t, 2, func(cfg *engine.Config) {
			cfg.Lockstep = true
			cfg.Collectives = []engine.Collectives{stuck{}, failing}[cfg.Rank]
		})
		c.each(func(r int) {
			<-c.engines[r].Ended()
			want := "rank 0 or rank 1 failed: rank 1 cannot tell which of ranks 0 and 1 has failed: no such peer"
			if err := c.engines[r].Err(); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("rank %d: got error %v, want %q", r, err, want)
			}
			c.engines[r].Close()
		})
		if failing.tests != 1 {
			t.Errorf("rank 1 called Test %d times, want once", failing.tests)
		}
	})
}

// stuck are collectives that never complete, or that fail with err.
type stuck struct{ err error }

func (stuck) AndOr(_, _ []uint64)  {}
func (stuck) Gather([]byte)        {}
func (stuck) Broadcast([]byte)     {}
func (s stuck) Poll() bool         { return s.err != nil }
func (stuck) Missing() []topo.Rank { return nil }

func (s stuck) Test() ([][]byte, bool, error) { return nil, false, s.err }

// If a collective of another library fails or does not end, the job ends with the reason. The library does
// not say for which rank it waits.
func TestCollectivesFail(t *testing.T) {
	for _, c := range []struct {
		collectives stuck
		want        string
		after       time.Duration
	}{
		{stuck{}, "a negotiation cycle has not ended for 20s", 20 * time.Second},
		{stuck{errors.New("the network is down")}, "the network is down", 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			e, err := engine.Start(t.Context(), engine.Config{Size: 1, Mesh: mem.New(1).Mesh(0), Spin: -1,
				LivenessTimeout: 10 * time.Second, Lockstep: true, Collectives: c.collectives})
			if err != nil {
				t.Fatal(err)
			}
			<-e.Ended()
			if err := e.Err(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got error %v, want %q", err, c.want)
			}
			if took := time.Since(began).Round(time.Second); took != c.after {
				t.Errorf("took %v, want %v", took, c.after)
			}
			e.Close()
		})
	}
}

// alone are the collectives of a job with one rank.
type alone struct {
	stuck
	frames [][]byte
	cycles atomic.Int32
}

func (a *alone) AndOr(_, _ []uint64)           { a.cycles.Add(1) }
func (a *alone) Gather(frame []byte)           { a.frames = [][]byte{frame} }
func (a *alone) Broadcast(frame []byte)        { a.frames = [][]byte{frame} }
func (a *alone) Poll() bool                    { return true }
func (a *alone) Test() ([][]byte, bool, error) { return a.frames, true, nil }

// After a grant, a rank waits a short time for its program before it enters the next cycle. It enters the
// cycle at once if the program submits something. If the program took longer the last time, it does not wait.
func TestLockstepWaitsForTheProgram(t *testing.T) {
	const patience, step = 50 * time.Microsecond, 25 * time.Microsecond
	synctest.Test(t, func(t *testing.T) {
		collectives := new(alone)
		c := start(t, 1, func(cfg *engine.Config) {
			cfg.Lockstep, cfg.Collectives, cfg.Spin = true, collectives, -1
		})
		// after returns the number of cycles that the rank enters after an allreduce without the program.
		after := func() int32 {
			synctest.Wait()
			n := collectives.cycles.Load()
			if err := c.wait(c.allreduce(0, "x", make([]byte, 8))); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			return collectives.cycles.Load() - n - 1 // one cycle grants the allreduce
		}
		if n := after(); n != 0 {
			t.Errorf("%d cycles right after the first grant, want none", n)
		}
		time.Sleep(patience - 1)
		began := time.Now()
		if n := after(); n != 0 {
			t.Errorf("%d cycles right after a grant to a quick program, want none", n)
		}
		if took := time.Since(began); took > 0 {
			t.Errorf("the operation of a quick program took %v, want no time", took)
		}
		n := collectives.cycles.Load()
		time.Sleep(patience + step)
		synctest.Wait()
		if collectives.cycles.Load() == n {
			t.Error("no cycle although the program is late")
		}
		time.Sleep(10 * time.Millisecond) // the longest pause between two cycles is over
		if n := after(); n == 0 {
			t.Error("the rank waits for a program that was late")
		}
		if n := after(); n != 0 {
			t.Errorf("%d cycles right after a grant to a program that is quick again, want none", n)
		}
		began = time.Now()
		c.shutdown()
		if took := time.Since(began); took > 0 {
			t.Errorf("the shutdown took %v, want no time", took)
		}
	})
}

// stopped are the collectives of a job with one rank, whose process is stopped for 30 s in the first one.
// After that, this collective completes only in the next turn.
type stopped struct {
	alone
	tests int // number of calls of Test
}

func (s *stopped) Test() ([][]byte, bool, error) {
	if s.tests++; s.tests == 1 {
		time.Sleep(30 * time.Second) // longer than a cycle may take
	}
	if s.tests <= 2 {
		return nil, false, nil
	}
	return s.alone.Test()
}

// The time for which a process was stopped in a cycle does not count for the deadline of the cycle.
func TestLockstepAfterAStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := start(t, 1, func(cfg *engine.Config) {
			cfg.Lockstep, cfg.Collectives, cfg.Spin = true, new(stopped), -1
		})
		if err := c.wait(c.allreduce(0, "x", make([]byte, 8))); err != nil {
			t.Error(err)
		}
		c.shutdown()
	})
}
