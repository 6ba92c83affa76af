//go:build !mpi

package rank

import (
	"bufio"
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/testmpi"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/store"
)

// After a failed job, a process cannot use MPI again, and says so.
func TestInitAfterFailureWithMPI(t *testing.T) {
	testmpi.Each(t, func(t *testing.T, l testmpi.Library) {
		program := l.Build(t, "test", "./internal/rank")
		cmd := l.Surviving().Command(t, 3, program, "-test.run", "TestInitAfterFailureOfMPI", "-test.v")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stderr = cmd.Stdout
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var all []string
		refused := 0
		for lines := bufio.NewScanner(out); lines.Scan(); {
			all = append(all, lines.Text())
			if strings.Contains(lines.Text(), "MPI was refused") {
				refused++
			}
			if refused == 3 {
				_ = cmd.Cancel() // the processes wait for their end
			}
		}
		_ = cmd.Wait() // mpirun says that it was interrupted
		if refused != 3 {
			t.Errorf("got %d refusals, want 3:\n%s", refused, strings.Join(all, "\n"))
		}
	})
}

// endingContext is a context whose error a test sets.
type endingContext struct {
	context.Context
	err error
}

func (c *endingContext) Err() error { return c.err }

// TestEnterMPI checks that the ranks that have not come to Init when its time limit passes are in the error,
// and that hvdrun hears of them. If the program cancels Init, they are not.
func TestEnterMPI(t *testing.T) {
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	server, err := store.Serve("127.0.0.1:0", kv, store.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	launcher, err := joblink.Listen(kv, 4, func(int, string, []byte) {})
	if err != nil {
		t.Fatal(err)
	}
	defer launcher.Close()
	addr := netip.MustParseAddrPort(server.Addr())
	enter := func(rank int, end error) error {
		ctx := &endingContext{Context: t.Context()}
		explain := enterMPI(ctx, &config.Config{Rank: rank, Size: 4, MPIController: true,
			RendezvousAddr: addr.Addr().String(), RendezvousPort: int(addr.Port())}, new(Options))
		ctx.err = end
		return explain(end)
	}
	if err := enter(2, nil); err != nil {
		t.Error(err)
	}
	for _, end := range []error{context.Canceled, context.DeadlineExceeded} {
		err := enter(1, end)
		late, named := errors.AsType[*engine.PeerError](err)
		if !errors.Is(err, end) || named != (end == context.DeadlineExceeded) ||
			named && !slices.Equal(late.Ranks, []int{0, 3}) {
			t.Errorf("%v: got %v", end, err)
		}
		if accused := launcher.Accused(); len(accused) > 0 && !named {
			t.Errorf("%v: hvdrun hears of %v", end, accused)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	v, err := launcher.Verdict(ctx)
	if err != nil || !v.Starting || v.Epoch != 1 || !slices.Equal(v.Ranks, []topo.Rank{0, 3}) {
		t.Errorf("the verdict is %+v (%v), want that ranks 0 and 3 have failed before epoch 1", v, err)
	}
}
