package hvd_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/hvd"
)

// A rank takes messages of any rank, and tells the senders that it has got them, on a process set.
func TestMessagesFromAnySource(t *testing.T) {
	run(t, 3, func(ctx context.Context, e *hvd.Engine) {
		set, err := hvd.AddProcessSet(ctx, []int{0, 2}, hvd.On(e))
		if err != nil || e.Rank() == 1 {
			return
		}
		if e.Rank() == 2 {
			noError(t, hvd.Send(ctx, []bool{true, false}, 0, 3, hvd.Over(set)))
			if source, err := hvd.Recv(ctx, []int8{0}, 0, 4, hvd.Over(set)); err != nil || source != 0 {
				t.Errorf("got rank %d and error %v", source, err)
			}
			return
		}
		got := make([]bool, 2)
		source, err := hvd.Recv(ctx, got, hvd.AnySource, 3, hvd.Over(set))
		if err != nil || source != 2 || !got[0] || got[1] {
			t.Errorf("got %v from rank %d and error %v", got, source, err)
		}
		noError(t, hvd.Send(ctx, []int8{1}, 2, 4, hvd.Over(set)))
	})
}

// TestMessagesRefused checks the errors of wrong calls and of messages that do not fit.
func TestMessagesRefused(t *testing.T) {
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		me := e.Rank()
		for _, c := range []struct{ peer, tag int }{
			{me, 1}, {2, 1}, {-2, 1}, {1 - me, -1}, {1 - me, 1 << 31},
		} {
			var usage *hvd.UsageError
			if err := hvd.Send(ctx, []int8{1}, c.peer, c.tag, hvd.On(e)); !errors.As(err, &usage) {
				t.Errorf("send to rank %d with tag %d: got error %v, want a UsageError", c.peer, c.tag, err)
			}
			if _, err := hvd.Recv(ctx, []int8{1}, c.peer, c.tag, hvd.On(e)); !errors.As(err, &usage) {
				t.Errorf("recv from rank %d with tag %d: got error %v, want a UsageError", c.peer, c.tag, err)
			}
		}
		if me == 0 {
			for _, x := range [][]float32{make([]float32, 3), {4, 5}} {
				noError(t, hvd.Send(ctx, x, 1, 7, hvd.On(e)))
			}
			return
		}
		x := make([]float32, 2)
		var mismatch *hvd.MismatchError
		const want = `hvd: recv "rank 0 to rank 1, tag 7": ` +
			`got 3 elements of float32 from rank 0, want 2 elements of float32`
		if _, err := hvd.Recv(ctx, x, 0, 7, hvd.On(e)); !errors.As(err, &mismatch) || err.Error() != want {
			t.Errorf("got error %v, want %s", err, want)
		}
		if _, err := hvd.Recv(ctx, x, 0, 7, hvd.On(e)); err != nil || !slices.Equal(x, []float32{4, 5}) {
			t.Errorf("the next message: got %v and error %v", x, err)
		}
	})
}

// A rank that is alone cannot receive a message of any rank. It gets an error at once, which names no rank.
func TestMessagesOfNobody(t *testing.T) {
	run(t, 1, func(ctx context.Context, e *hvd.Engine) {
		var usage *hvd.UsageError
		_, err := hvd.Recv(ctx, []int8{0}, hvd.AnySource, 1, hvd.On(e))
		const want = `hvd: recv: got process set 0 of ranks [0], want a process set with another rank`
		if !errors.As(err, &usage) || err.Error() != want {
			t.Errorf("got error %v, want %s", err, want)
		}
	})
}

// If a rank waits for messages of ranks that have shut down, it gets an error that names them, also if there
// was never a message between them. Messages that were sent before are received.
func TestMessagesOfALeaver(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		for _, leaver := range []int{0, 1} {
			for _, sends := range []bool{true, false} {
				engines(t, 2, func(ctx context.Context, e *hvd.Engine) {
					if other := 1 - e.Rank(); e.Rank() != leaver {
						awaitLeaver(ctx, t, e, other, sends)
					} else if sends {
						noError(t, hvd.Send(ctx, []int8{5}, other, 1, hvd.On(e)))
					}
					noError(t, e.Shutdown(ctx))
				}, nil, mode...)
			}
		}
	})
}

// awaitLeaver waits for messages of a rank that shuts down, perhaps after it has sent a message.
func awaitLeaver(ctx context.Context, t *testing.T, e *hvd.Engine, leaver int, sends bool) {
	x := []int8{0}
	if sends {
		if _, err := hvd.Recv(ctx, x, leaver, 1, hvd.On(e)); err != nil || x[0] != 5 {
			t.Errorf("rank %d: got %v and error %v", e.Rank(), x, err)
		}
	}
	for _, source := range []int{leaver, hvd.AnySource} {
		var peer *hvd.PeerError
		_, err := hvd.Recv(ctx, x, source, 2, hvd.On(e))
		if !errors.As(err, &peer) || !slices.Equal(peer.Ranks, []int{leaver}) || !peer.ShutDown {
			t.Errorf("rank %d: sends %v: recv from rank %d: got error %v", e.Rank(), sends, source, err)
		}
	}
}

// Rank 1 sends messages and shuts down before the other ranks begin to receive. The messages arrive.
func TestMessagesOfARankThatHasLeft(t *testing.T) {
	left := make(chan struct{})
	engines(t, 3, func(ctx context.Context, e *hvd.Engine) {
		set := must(hvd.AddProcessSet(ctx, []int{0, 1, 2}, hvd.MembersOnly(), hvd.On(e)))
		options := [][]any{{hvd.On(e)}, {hvd.On(e), hvd.Over(set)}}
		for i, o := range options {
			for _, other := range []int{0, 2} {
				if e.Rank() == 1 {
					noError(t, hvd.Send(ctx, []int8{int8(i)}, other, 1,
						as[hvd.MessageOption](o)...))
				}
			}
		}
		if e.Rank() != 1 {
			<-left
			for i, o := range options {
				x := []int8{9}
				if _, err := hvd.Recv(ctx, x, 1, 1,
					as[hvd.MessageOption](o)...); err != nil || x[0] != int8(i) {
					t.Errorf("rank %d: got %v and error %v, want %d", e.Rank(), x, err, i)
				}
				var peer *hvd.PeerError
				if _, err := hvd.Recv(ctx, x, 1, 1, as[hvd.MessageOption](o)...); !errors.As(err,
					&peer) || !peer.ShutDown {
					t.Errorf("rank %d: another message: got error %v", e.Rank(), err)
				}
			}
		}
		noError(t, e.Shutdown(ctx))
		if e.Rank() == 1 {
			close(left)
		}
	}, nil)
}

// The context of a Recv bounds the wait and not the operation. The end of the job ends it.
func TestMessagesPending(t *testing.T) {
	var late *hvd.PendingError
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		if e.Rank() == 1 {
			short, cancel := context.WithTimeout(ctx, time.Millisecond)
			defer cancel()
			if _, err := hvd.Recv(short, []int8{0}, 0, 2, hvd.On(e)); !errors.As(err, &late) {
				t.Errorf("got error %v, want a PendingError", err)
			}
		}
		noError(t, hvd.Barrier(ctx, hvd.On(e)))
	})
	_, err := late.Handle.(*hvd.Handle[int]).Wait(t.Context())
	if !errors.Is(err, hvd.ErrShutDown) {
		t.Errorf("after Shutdown: got error %v, want ErrShutDown", err)
	}
}

// If a message is not sent in time, the job fails, and the verdict names the rank that should have sent it.
func TestMessageTimesOut(t *testing.T) {
	for _, src := range []int{2, hvd.AnySource} {
		engines(t, 3, func(ctx context.Context, e *hvd.Engine) {
			var err error
			if e.Rank() == 1 {
				_, err = hvd.Recv(ctx, make([]int8, 1), src, 4, hvd.Timeout(time.Second), hvd.On(e))
			} else {
				err = hvd.Barrier(ctx, hvd.On(e))
			}
			var peer *hvd.PeerError
			want, why := 2, `recv from rank 2, tag 4 timed out after 1s at rank 1: rank 2 has not taken part in it`
			if src == hvd.AnySource {
				want, why = 1, `recv from any rank, tag 4 timed out after 1s at rank 1: no rank has sent it`
			}
			if !errors.As(err, &peer) || !slices.Equal(peer.Ranks, []int{want}) || peer.Reason != why {
				t.Errorf("rank %d: got error %v, want one that names rank %d: %s", e.Rank(), err, want, why)
			}
			_ = e.Shutdown(ctx)
		}, nil)
	}
}
