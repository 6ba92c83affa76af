package client_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/sidecar"
)

func sumOf(ctx context.Context, e *hvd.Engine, name string) (int32, error) {
	got, err := hvd.Allreduce(ctx, []int32{int32(e.Rank() + 1)}, hvd.Op(hvd.Sum), hvd.Name(name), hvd.On(e))
	if err != nil {
		return 0, err
	}
	return got[0], nil
}

// Where nobody listens, Init says so when its time is over, and not before: a sidecar may come late.
func TestNoSidecar(t *testing.T) {
	ctx := patience(t)
	path := filepath.Join(t.TempDir(), "s")
	began := time.Now()
	_, err := hvd.New(ctx, with("HVD_SIDECAR", "unix://"+path, "HOROVOD_GLOO_TIMEOUT_SECONDS", "0.3")...)
	if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "none came within 300ms") {
		t.Errorf("got %v, want that none came to %s", err, path)
	}
	if took := time.Since(began); took < 250*time.Millisecond || took > 5*time.Second {
		t.Errorf("it took %v, want 300 ms", took)
	}
	_, err = hvd.New(ctx, with("HVD_SIDECAR", "unix://"+filepath.Join(path, "s", strings.Repeat("x", 200)))...)
	if err == nil || time.Since(began) > 10*time.Second {
		t.Errorf("a path that cannot be: got %v after %v, want an error at once", err, time.Since(began))
	}
}

// A listener that says nothing, or nonsense, is no sidecar.
func TestStrangers(t *testing.T) {
	for says, want := range map[string]string{"": "deadline", "HTTP/1.1 400\r\n": "greeting", "GHVD\x00\x00\x00\x02": "version 2"} {
		path := filepath.Join(t.TempDir(), "s")
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		var serving sync.WaitGroup
		serving.Go(func() {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			defer conn.Close()
			_, _ = conn.Write([]byte(says)) // if that fails the client's error says it
			_, _ = conn.Read(make([]byte, 8))
			_, _ = conn.Read(make([]byte, 8)) // until it goes
		})
		_, err = hvd.New(patience(t), with("HVD_SIDECAR", "unix://"+path, "HOROVOD_GLOO_TIMEOUT_SECONDS", "0.3")...)
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%q: got %v, want an error with %q and the path", says, err, want)
		}
		l.Close()
		serving.Wait()
	}
}

// Client and sidecar must know one secret.
func TestSecret(t *testing.T) {
	const text, other = "a secret of the job", "a secret of another job"
	ctx := patience(t)
	s := serve(t, sidecar.Config{Secret: newSecret(t, text)})
	for _, c := range []struct {
		settings []string
		want     string
	}{
		{[]string{"HVD_SECRET", text}, ""},
		{[]string{"HVD_SECRET", " " + text + "\n"}, ""},
		{[]string{"HVD_SECRET", text, "HVD_TLS", "1"}, ""}, // which is for the network
		{[]string{"HVD_SECRET", other}, "secret"},
		{nil, "secret"},
	} {
		e, err := over(ctx, s, with(append(c.settings, "HOROVOD_GLOO_TIMEOUT_SECONDS", "5")...)...)
		if c.want != "" {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%q: got %v, want an error with %q", c.settings, err, c.want)
			}
			continue
		}
		if err != nil {
			t.Errorf("%q: %v", c.settings, err)
			continue
		}
		if err := e.Shutdown(ctx); err != nil {
			t.Error(err)
		}
	}
}

// What a program gives Init reaches the engine in the sidecar; what cannot is refused, and so is a place that is not the sidecar's.
func TestInit(t *testing.T) {
	ctx := patience(t)
	s := serve(t, sidecar.Config{})
	for _, c := range []struct {
		opts []hvd.InitOption
		want string
	}{
		{[]hvd.InitOption{hvd.WithInitMethod("file:///nowhere?rank=0&world_size=1")}, "WithInitMethod"},
		{[]hvd.InitOption{hvd.WithProcessSets([]int{0, 7})}, "rank 7"},
		{with("HOROVOD_GLOO_TIMEOUT_SECONDS", "0"), "HOROVOD_GLOO_TIMEOUT_SECONDS"},
		{with("HVD_SIDECAR", "/no/url"), "unix:///path"},
	} {
		if e, err := over(ctx, s, c.opts...); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v and %v, want an error with %q", e, err, c.want)
		} else if strings.Count(err.Error(), "init:") > 1 {
			t.Errorf("%v: it says twice whose error it is", err)
		}
	}
	// The setting is the sidecar's: without it the set could be added.
	e, err := over(ctx, s, with("HOROVOD_DYNAMIC_PROCESS_SETS", "0")...)
	if err != nil {
		t.Fatal(err)
	}
	if e.Rank() != 0 || e.Size() != 1 || e.LocalSize() != 1 || e.Epoch() == 0 || len(e.ProcessSets()) != 1 {
		t.Errorf("got rank %d of %d, %d on the host, epoch %d, %d process sets", e.Rank(), e.Size(), e.LocalSize(), e.Epoch(), len(e.ProcessSets()))
	}
	// A second client of another mind about the job that there is leaves that alone.
	for want, opts := range map[string][]hvd.InitOption{
		"the sidecar is rank 0 of 1": with("HOROVOD_RANK", "1", "HOROVOD_SIZE", "2",
			"HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT", "4711"),
	} {
		if _, err := over(ctx, s, opts...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
	if got, err := sumOf(ctx, e, "x"); got != 1 || err != nil {
		t.Errorf("afterwards: got %d and error %v", got, err)
	}
	if err := e.Shutdown(ctx); err != nil {
		t.Error(err)
	}
}

// Process sets can be made and removed, and given to Init.
func TestProcessSets(t *testing.T) {
	ways[1].run(t, 3, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		if given := e.ProcessSets(); len(given) != 2 || fmt.Sprint(given[1].Ranks()) != "[0 2]" {
			t.Errorf("rank %d: got %v", e.Rank(), given)
			return
		}
		for _, ranks := range [][]int{{2, 1}, {0}} {
			set, err := hvd.AddProcessSet(ctx, ranks, hvd.On(e))
			if err != nil {
				t.Errorf("rank %d: %v", e.Rank(), err)
				return
			}
			if set.Included() {
				got, err := hvd.Allreduce(ctx, []int32{1}, hvd.Op(hvd.Sum), hvd.Over(set))
				if err != nil || int(got[0]) != len(ranks) {
					t.Errorf("rank %d: over %v: got %v and error %v", e.Rank(), set, got, err)
				}
			}
			if err := hvd.RemoveProcessSet(ctx, set); err != nil {
				t.Errorf("rank %d: %v", e.Rank(), err)
			}
		}
	}, hvd.WithProcessSets([]int{2, 0}))
}

// Several programs are one rank, and the shutdown of one is that of all. After it the rank can join again.
func TestSeveralClients(t *testing.T) {
	ctx := patience(t)
	all := sidecars(t, 2)
	var epoch uint64
	for range 3 {
		var engines [2][3]*hvd.Engine
		ranks(2, func(r int) {
			for i := range engines[r] {
				var err error
				if engines[r][i], err = over(ctx, all[r]); err != nil {
					t.Errorf("rank %d: client %d: %v", r, i, err)
				}
			}
		})
		if t.Failed() {
			return
		}
		if got := engines[0][2].Epoch(); got <= epoch || got != engines[1][0].Epoch() {
			t.Errorf("epoch %d after %d, and %d at the other rank", got, epoch, engines[1][0].Epoch())
		}
		epoch = engines[0][0].Epoch()
		var wg sync.WaitGroup
		for r := range engines {
			for i, e := range engines[r] {
				wg.Go(func() {
					for k := range 20 {
						if got, err := sumOf(ctx, e, fmt.Sprint("of client ", i, k%3)); got != 3 || err != nil {
							t.Errorf("rank %d: client %d: got %d and error %v, want 3", r, i, got, err)
							return
						}
					}
				})
			}
		}
		wg.Wait()
		ranks(2, func(r int) {
			if err := engines[r][1].Shutdown(ctx); err != nil {
				t.Errorf("rank %d: shutdown: %v", r, err)
			}
			for _, i := range []int{0, 2} {
				e := engines[r][i]
				<-e.Done()
				if _, err := sumOf(ctx, e, "late"); !errors.Is(err, hvd.ErrShutDown) || e.Err() != nil {
					t.Errorf("rank %d: client %d: got %v after %v, want %v", r, i, err, e.Err(), hvd.ErrShutDown)
				}
				if err := e.Shutdown(ctx); err != nil {
					t.Errorf("rank %d: client %d: shutdown: %v", r, i, err)
				}
			}
		})
	}
}

// A client that has other process sets than the job that there is leaves it alone.
func TestOtherProcessSets(t *testing.T) {
	ctx := patience(t)
	all := sidecars(t, 2)
	ranks(2, func(r int) {
		e, err := over(ctx, all[r])
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
			return
		}
		const want = "no process set 1 of ranks [0]"
		if _, err := over(ctx, all[r], hvd.WithProcessSets([]int{0})); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("rank %d: got %v, want an error with %q", r, err, want)
		}
		if got, err := sumOf(ctx, e, "x"); got != 3 || err != nil {
			t.Errorf("rank %d: afterwards: got %d and error %v", r, got, err)
		}
		if err := e.Shutdown(ctx); err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	})
}

// A timeline is as in process, to a path as the program sees it.
func TestTimeline(t *testing.T) {
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			const n = 2
			w.run(t, n, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
				path := []string{"t.json", "t.rank1.json"}[e.Rank()]
				if err := e.StopTimeline(); err != nil {
					t.Errorf("stop without a timeline: %v", err)
				}
				err := e.StartTimeline(filepath.Join("no-such-folder", "t.json"), false)
				if err == nil || !strings.HasPrefix(err.Error(), "hvd: start timeline: ") || strings.Count(err.Error(), "start timeline: ") != 1 {
					t.Errorf("got %v", err)
				}
				for _, step := range []struct {
					name  string
					first func() error
				}{
					{"before", func() error { return nil }},
					{"within", func() error { return e.StartTimeline("t.json", true) }},
					{"after", e.StopTimeline},
				} {
					if err := errors.Join(step.first(), hvd.Barrier(ctx, hvd.On(e))); err != nil {
						t.Errorf("rank %d: %s: %v", e.Rank(), step.name, err)
					}
					if _, err := hvd.Allreduce(ctx, []int32{1}, hvd.Name(step.name), hvd.On(e)); err != nil {
						t.Error(err)
					}
				}
				got, err := os.ReadFile(path)
				for word, want := range map[string]bool{`"before"`: false, `"within"`: true, `"after"`: false} {
					if err != nil || strings.Contains(string(got), word) != want {
						t.Errorf("rank %d: %s in the timeline: %v, want %v, %v", e.Rank(), word, !want, want, err)
					}
				}
			})
		})
	}
}

// An operation that is submitted just before Shutdown runs, though the sidecar must be given memory for it first.
func TestLastOperationBeforeShutdown(t *testing.T) {
	for _, w := range ways {
		for range 10 {
			w.start(t, 2, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
				h, err := hvd.AllreduceAsync([]int32{1}, named("last", e, hvd.Op(hvd.Sum))...)
				if err != nil {
					t.Error(err)
					return
				}
				if err := e.Shutdown(ctx); err != nil {
					t.Errorf("%s: rank %d: %v", w.name, e.Rank(), err)
				}
				if got, err := h.Wait(ctx); err != nil || got[0] != 2 {
					t.Errorf("%s: rank %d: got %v and error %v, want 2", w.name, e.Rank(), got, err)
				}
			})
		}
	}
}

// A deferred Shutdown tells the other ranks of a panic, whatever bytes its text has.
func TestPanic(t *testing.T) {
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			w.start(t, 2, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
				if e.Rank() == 1 {
					defer func() {
						if recover() == nil {
							t.Error("the panic is lost")
						}
					}()
					defer e.Shutdown(ctx)
					panic("no file x\xff")
				}
				var peer *hvd.PeerError
				if err := hvd.Barrier(ctx, hvd.On(e)); !errors.As(err, &peer) || peer.Reason != "its program has panicked: no file x" {
					t.Errorf("got error %v, want the panic of rank 1", err)
				}
				if err := e.Shutdown(ctx); !errors.As(err, &peer) {
					t.Errorf("shutdown: %v", err)
				}
			})
		})
	}
}
