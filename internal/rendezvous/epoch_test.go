package rendezvous

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

func TestLatecomer(t *testing.T) {
	for _, rank := range []int{0, 1} {
		t.Run(fmt.Sprint("rank ", rank), func(t *testing.T) {
			kv := newStore(t)
			log, entries := testnet.Logs()
			zero := config(kv, 0, 2)
			zero.Log = log
			formed(t, joinAll(t, testnet.Context(t), zero, config(kv, 1, 2)), recordOf(0, 0), recordOf(1, 0))

			ctx, cancel := context.WithCancel(testnet.Context(t))
			late := config(kv, rank, 2)
			late.Self = recordOf(rank, 9)
			lateLog, lateEntries := testnet.Logs()
			late.Log = lateLog
			r := start(t, ctx, late)
			testnet.Eventually(t, "rank 0's log", func() bool {
				return testnet.Logged(entries, "joined too late: the epoch is complete",
					fmt.Sprintf("pid %d ", late.Self.PID))
			})
			testnet.Eventually(t, "the latecomer's log", func() bool {
				return testnet.Logged(lateEntries, "waiting for a")
			})
			cancel()
			err := (<-r).err
			if refused, ok := errors.AsType[*RefusedError](err); !ok || refused.Reason != Late {
				t.Errorf("got %v, want that it was late", err)
			}
			if !errors.Is(err, context.Canceled) {
				t.Errorf("%v does not wrap the cause of its end", err)
			}
			testnet.WantError(t, err, "epoch 1 is complete", rootOf(t, kv).GetAddr())
		})
	}
}

// If a new rank 0 asks the root of a running epoch twice, and its ctx ends before the second answer arrives,
// the error contains the first answer.
func TestLateWhileAsking(t *testing.T) {
	kv := newStore(t)
	ctx, cancel := context.WithCancel(testnet.Context(t))
	defer cancel()
	var asked atomic.Int32
	addr := testnet.FakeServer(t, func(conn net.Conn) {
		if asked.Add(1) > 1 {
			cancel()
			io.Copy(io.Discard, conn) // keeps the connection open, but sends no further answer
			return
		}
		dial.ReadGreeting(conn, rootMagic)
		conn.Write(dial.Greeting(rootMagic, rootVersion))
		if _, err := dial.ReadFrame(conn, maxJoinRequestBytes); err != nil {
			t.Error(err)
		}
		answer, err := appendMessage(nil, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_COMPLETE, Epoch: 7})
		if err != nil {
			t.Error(err)
		}
		conn.Write(answer)
	})
	publishRoot(t, kv, addr, 1)
	_, err := Join(ctx, config(kv, 0, 2))
	if refused, ok := errors.AsType[*RefusedError](err); !ok || refused.Reason != Late ||
		!errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want that it was late, and stopped", err)
	}
	testnet.WantError(t, err, "epoch 7 is complete", addr)
}

// A process that has connected to a complete root, but has not sent its request when the root is closed,
// learns that the epoch is complete. Otherwise it would think that rank 0 has died while the epoch was
// forming.
func TestAskClosingRoot(t *testing.T) { overBoth(t, testAskClosingRoot) }

func testAskClosingRoot(t *testing.T, key secret.Secret) {
	kv := newStore(t)
	ranks := joinAll(t, testnet.Context(t), keyed(kv, 0, 2, key), keyed(kv, 1, 2, key))
	formed(t, ranks, recordOf(0, 0), recordOf(1, 0))
	root, record := rootOf(t, kv), recordOf(1, 9)
	conn := say(t, key, root.GetAddr(), dial.Greeting(rootMagic, rootVersion))
	if _, err := dial.ReadGreeting(conn, rootMagic); err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	go func() { closed <- ranks[0].Close() }()
	testnet.Eventually(t, "the root no longer listens", func() bool {
		conn, err := net.Dial("tcp", root.GetAddr())
		if err == nil {
			conn.Close()
		}
		return err != nil
	})
	request, err := appendMessage(nil, &rendezvouspb.JoinRequest{Job: "job", Token: root.GetToken(),
		Nonce: newToken(), Rank: 1, Size: 2, Record: recordToProto(&record)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write(request); err != nil {
		t.Fatal(err)
	}
	a, err := readAnswer(bufio.NewReader(conn))
	if err != nil || a.GetKind() != rendezvouspb.Answer_COMPLETE {
		t.Errorf("got %v, %v, want the answer that the epoch is complete", a, err)
	}
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// If the replacement of a dead rank starts while the other ranks are still in the old epoch, the replacement
// waits and then takes part in the new epoch.
func TestReplacementMeetsOldRoot(t *testing.T) {
	for _, dead := range []int{0, 1, 2} {
		t.Run(fmt.Sprint("rank ", dead), func(t *testing.T) {
			ctx := testnet.Context(t)
			kv := newStore(t)
			log, entries := testnet.Logs()
			cfgs := []JoinConfig{config(kv, 0, 3), config(kv, 1, 3), config(kv, 2, 3)}
			cfgs[0].Log = log
			records := []Record{recordOf(0, 0), recordOf(1, 0), recordOf(2, 0)}
			old := joinAll(t, ctx, cfgs...)
			first := formed(t, old, records...)

			fresh := config(kv, dead, 3)
			fresh.Self = recordOf(dead, 1)
			records[dead] = fresh.Self
			r := start(t, ctx, fresh)
			testnet.Eventually(t, "rank 0 sees the replacement", func() bool {
				return testnet.Logged(entries, "joined too late", "pid")
			})

			old[0].Close()
			again := make([]result, 3)
			var rejoined []JoinConfig
			for rank, cfg := range cfgs {
				if rank != dead {
					cfg.LastEpoch = first
					rejoined = append(rejoined, cfg)
				}
			}
			for i, r := range joinAll(t, ctx, rejoined...) {
				again[rejoined[i].Rank] = r
			}
			again[dead] = <-r
			if second := formed(t, again, records...); second <= first {
				t.Errorf("epoch %d follows %d", second, first)
			}
		})
	}
}

// A process that was in the old epoch becomes rank 0 and replaces the old root, without waiting until the old
// root is closed. So processes can change their ranks even if the old rank 0 is the last to notice the end of
// the epoch.
func TestNewRankZeroFromOldEpoch(t *testing.T) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	first := formed(t, joinAll(t, ctx, config(kv, 0, 2), config(kv, 1, 2)), recordOf(0, 0), recordOf(1, 0))
	zero, one := config(kv, 0, 2), config(kv, 1, 2)
	zero.LastEpoch, one.LastEpoch = first, first
	zero.Self, one.Self = one.Self, zero.Self
	// The sessions of the first epoch are still open.
	formed(t, joinAll(t, ctx, zero, one), recordOf(1, 0), recordOf(0, 0))
}

// The number of a new epoch is greater than the LastEpoch of each rank, even if the store was restarted and
// counts from 1 again. Afterwards the counter in the store is at least the number of the new epoch.
func TestEpochExceedsAll(t *testing.T) {
	for _, last := range [][]uint64{{0, 0, 0}, {7, 0, 0}, {0, 41, 7}, {3, 3, 3}, {5, 0, 6}} {
		ctx := testnet.Context(t)
		kv := newStore(t)
		var cfgs []JoinConfig
		for rank := range last {
			cfg := config(kv, rank, 3)
			cfg.LastEpoch = last[rank]
			cfgs = append(cfgs, cfg)
		}
		epoch := formed(t, joinAll(t, ctx, cfgs...), recordOf(0, 0), recordOf(1, 0), recordOf(2, 0))
		if want := slices.Max(last) + 1; epoch < want {
			t.Errorf("last epochs %d: got epoch %d, want at least %d", last, epoch, want)
		}
		if n, err := kv.Add(ctx, "gohvd/job/epoch", 0); err != nil || n < int64(epoch) {
			t.Errorf("last epochs %d: the counter is %d at epoch %d, %v", last, n, epoch, err)
		}
	}
}

// heldStore is a store whose second call of Add closes the channel held and then waits until the channel
// release is closed.
type heldStore struct {
	store.Store
	adds          int
	held, release chan struct{}
}

func (s *heldStore) Add(ctx context.Context, key string, delta int64) (int64, error) {
	if s.adds++; s.adds == 2 {
		close(s.held)
		<-s.release
	}
	return s.Store.Add(ctx, key, delta)
}

// While rank 0 draws a number for a new epoch, a rank is replaced by a process that has seen a greater epoch.
// The number of the new epoch must be greater than the epoch of that process too.
func TestEpochExceedsReplacement(t *testing.T) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	log, entries := testnet.Logs()
	held := &heldStore{Store: kv, held: make(chan struct{}), release: make(chan struct{})}
	zero := config(held, 0, 2)
	zero.Log = log
	r := start(t, ctx, zero)

	short, cancel := context.WithCancel(ctx)
	one := config(kv, 1, 2)
	one.LastEpoch = 5
	gone := start(t, short, one)
	<-held.held
	cancel()
	<-gone
	testnet.Eventually(t, "rank 1 is forgotten", func() bool {
		return testnet.Logged(entries, "left before all ranks had joined")
	})
	one.LastEpoch = 50
	again := start(t, ctx, one)
	testnet.Eventually(t, "rank 1 is back", func() bool {
		return len(entries.FilterMessage("rendezvous: rank has joined").All()) == 2
	})
	close(held.release)
	if epoch := formed(t, []result{<-r, <-again}, recordOf(0, 0), recordOf(1, 0)); epoch != 51 {
		t.Errorf("got epoch %d, want 51", epoch)
	}
}

// All ranks leave and join again 20 times, in varying order. If rank 0 leaves last, the others find the root
// of the epoch that they have left. If rank 0 leaves first, they find no root. In both cases all ranks take
// part in each new epoch.
func TestManyEpochs(t *testing.T) {
	const size, epochs = 4, 20
	ctx := testnet.Context(t)
	kv := newStore(t)
	log, entries := testnet.Logs()
	var seen [size][]uint64
	// Each rank that leaves epoch i before the slowest rank sends an element to left[i].
	var left [epochs]chan struct{}
	for i := range left {
		left[i] = make(chan struct{}, size)
	}
	var wg sync.WaitGroup
	for rank := range size {
		wg.Go(func() {
			cfg := config(kv, rank, size)
			cfg.Log = log
			for i := range epochs {
				s, err := Join(ctx, cfg)
				if err != nil {
					t.Errorf("rank %d, epoch %d: %v", rank, i, err)
					return
				}
				cfg.LastEpoch = s.Epoch
				seen[rank] = append(seen[rank], s.Epoch)
				if slowest := i % size; rank != slowest {
					left[i] <- struct{}{}
				} else {
					for range size - 1 {
						select {
						case <-left[i]:
						case <-ctx.Done():
						}
					}
				}
				if err := s.Close(); err != nil {
					t.Errorf("rank %d, epoch %d: close: %v", rank, i, err)
				}
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	for rank := range size {
		if !slices.Equal(seen[rank], seen[0]) || !slices.IsSorted(seen[rank]) {
			t.Errorf("rank %d was in epochs %d, rank 0 in %d", rank, seen[rank], seen[0])
		}
	}
	if testnet.Logged(entries, "joined too late") {
		t.Error("a rank that came back was taken for a latecomer")
	}
}
