package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
)

// onHosts makes one rank join for each letter of the string hosts. Ranks with the same letter are on the same
// host. It returns the sessions, indexed by rank.
func onHosts(t *testing.T, key secret.Secret, hosts string) []result {
	t.Helper()
	kv := newStore(t)
	var cfgs []JoinConfig
	for rank, host := range strings.Split(hosts, "") {
		cfg := keyed(kv, rank, len(hosts), key)
		cfg.Self.HostID = host
		cfgs = append(cfgs, cfg)
	}
	results := joinAll(t, testnet.Context(t), cfgs...)
	for rank, r := range results {
		if r.err != nil {
			t.Fatalf("rank %d: %v", rank, r.err)
		}
	}
	return results
}

// agree calls the function try for each rank. Then it calls Agree with each result that is not nil,
// concurrently at all these ranks. It returns the results of Agree, indexed by rank.
func agree(ctx context.Context, sessions []result,
	try func(rank int) func(context.Context) error) (failed []map[topo.Rank]string, errs []error) {
	failed, errs = make([]map[topo.Rank]string, len(sessions)), make([]error, len(sessions))
	var wg sync.WaitGroup
	for rank, s := range sessions {
		if f := try(rank); f != nil {
			wg.Go(func() { failed[rank], errs[rank] = s.Agree(ctx, f) })
		}
	}
	wg.Wait()
	return failed, errs
}

func succeeds(context.Context) error { return nil }

// waits is a try for Agree that fails only when ctx ends, as if it waited for a peer that does not arrive.
func waits(ctx context.Context) error {
	<-ctx.Done()
	return fmt.Errorf("waiting for a peer: %w", ctx.Err())
}

// stoppedAfter returns a try for Agree that waits until it is told to stop, and then returns err.
func stoppedAfter(err error) func(context.Context) error {
	return func(ctx context.Context) error {
		<-ctx.Done()
		return err
	}
}

func fails(err error) func(context.Context) error {
	return func(context.Context) error { return err }
}

// All ranks of a host get the same result of Agree, which names the failed ranks of this host with their
// errors. It names the lowest failed rank of each other host without the error.
func TestAgree(t *testing.T) { overBoth(t, testAgree) }

func testAgree(t *testing.T, key secret.Secret) {
	long := strings.Repeat("é", maxTriedBytes)
	for name, test := range map[string]struct {
		hosts string
		tries []func(context.Context) error
		want  []map[topo.Rank]string
	}{
		"all succeed": {"aaa", []func(context.Context) error{succeeds, succeeds,
			succeeds}, []map[topo.Rank]string{{}, {}, {}}},
		"one fails": {"aaa", []func(context.Context) error{waits, succeeds,
			fails(errors.New("no memory"))}, []map[topo.Rank]string{{2: "no memory"}, {2: "no memory"},
			{2: "no memory"}}},
		"rank 0 fails": {"aaa",
			[]func(context.Context) error{fails(errors.New("no memory")), waits,
				waits}, []map[topo.Rank]string{{0: "no memory"}, {0: "no memory"}, {0: "no memory"}}},
		"stopped before it could say why": {"aa", []func(context.Context) error{fails(syscall.ECONNRESET),
			stoppedAfter(syscall.EMFILE)}, []map[topo.Rank]string{{1: "too many open files"},
			{1: "too many open files"}}},
		"stopped by a stop": {"aa", []func(context.Context) error{fails(syscall.ECONNRESET),
			stoppedAfter(syscall.ENOENT)}, []map[topo.Rank]string{{0: "connection reset by peer"},
			{0: "connection reset by peer"}}},
		"another host is fine": {"abab", []func(context.Context) error{succeeds, waits, succeeds,
			fails(errors.New("x"))}, []map[topo.Rank]string{{3: ""}, {3: "x"}, {3: ""}, {3: "x"}}},
		"two hosts fail": {"abbcb", []func(context.Context) error{succeeds, fails(errors.New("x")), waits,
			succeeds, fails(errors.New("y"))}, []map[topo.Rank]string{{1: ""}, {1: "x", 4: "y"},
			{1: "x", 4: "y"}, {1: ""}, {1: "x", 4: "y"}}},
		"the consequence does not count": {"aaa", []func(context.Context) error{fails(syscall.ECONNREFUSED),
			fails(errors.New("no memory")), fails(syscall.ENOENT)},
			[]map[topo.Rank]string{{1: "no memory"}, {1: "no memory"}, {1: "no memory"}}},
		"only consequences": {"aa", []func(context.Context) error{fails(syscall.ECONNREFUSED), waits},
			[]map[topo.Rank]string{{0: "connection refused"}, {0: "connection refused"}}},
		"a long text": {"aa", []func(context.Context) error{fails(errors.New(long)), waits},
			[]map[topo.Rank]string{{0: long[:maxTriedBytes]}, {0: long[:maxTriedBytes]}}},
		"a host without a try": {"baa", []func(context.Context) error{nil, succeeds, waits}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			// One rank of the host does not call Agree, so the other rank waits until ctx ends.
			if test.want == nil {
				sessions := onHosts(t, key, test.hosts)
				ctx, cancel := context.WithCancelCause(t.Context())
				why := errors.New("enough")
				_, errs := agree(ctx, sessions, func(rank int) func(context.Context) error {
					if rank == 2 {
						return func(trying context.Context) error { cancel(why); return waits(trying) }
					}
					return test.tries[rank]
				})
				if !errors.Is(errs[1], why) || !errors.Is(errs[2], why) {
					t.Errorf("got %v, want %v", errs, why)
				}
				return
			}
			got, errs := agree(testnet.Context(t), onHosts(t, key, test.hosts),
				func(rank int) func(context.Context) error { return test.tries[rank] })
			for rank, failed := range got {
				if errs[rank] != nil || !maps.Equal(failed, test.want[rank]) {
					t.Errorf("rank %d: got %v, %v, want %v", rank, failed, errs[rank], test.want[rank])
				}
			}
		})
	}
}

// If a rank dies before it calls Agree, Agree returns an error at all other ranks, and the errors name the
// dead rank.
func TestDeathWhileAgreeing(t *testing.T) {
	for _, dead := range []int{0, 1, 2} {
		sessions := onHosts(t, secret.Secret{}, "aaa")
		_, errs := agree(testnet.Context(t), sessions, func(rank int) func(context.Context) error {
			if rank == dead {
				return nil
			}
			return func(ctx context.Context) error {
				if rank == (dead+1)%3 {
					if dead == 0 {
						sessions[0].Close()
					} else {
						sessions[dead].member.conn.Close()
					}
				}
				return waits(ctx)
			}
		})
		for rank, err := range errs {
			why, ok := errors.AsType[*FailedError](err)
			if rank != dead && (!ok || !slices.Equal(why.Ranks, []topo.Rank{topo.Rank(dead)})) {
				t.Errorf("rank %d: got %v, want that rank %d failed", rank, err, dead)
			}
		}
	}
}

// FuzzStatusAndAnswer decodes arbitrary bytes as a Status and as an Answer. The result must be a valid
// message or an error.
func FuzzStatusAndAnswer(f *testing.F) {
	for _, m := range []proto.Message{
		&rendezvouspb.Status{Kind: rendezvouspb.Status_TRIED, Text: "no memory", MayPass: true},
		&rendezvouspb.Status{Kind: rendezvouspb.Status_FAILED, Ranks: []int32{1, -1}},
		&rendezvouspb.Answer{Kind: rendezvouspb.Answer_TRIED, Tried: map[int32]string{1: "x", -1: "y"}},
		&rendezvouspb.Answer{Kind: rendezvouspb.Answer_STOP},
	} {
		b, err := appendMessage(nil, m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, err := readStatus(bytes.NewReader(b)); err == nil &&
			(s.GetKind() < rendezvouspb.Status_TIMEOUT || s.GetKind() > rendezvouspb.Status_TRIED) {
			t.Errorf("%x was read as %v", b, s)
		}
		a, err := readAnswer(bytes.NewReader(b))
		if err != nil {
			return
		}
		h := newAgreement()
		if first := h.handle(a); first == nil && h.handle(a) == nil {
			t.Errorf("%v was accepted twice", a)
		}
	})
}
