package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/testnet"
)

// cutVariable tells the program "severed" what to do: the two ranks whose connections are cut, which of them
// ("data" or "all"), when ("idle" or "busy"), and which operations the ranks run.
const cutVariable = "GOHVD_E2E_CUT"

// TestConnectionIsCut cuts the data connections between two living ranks without an error, as a firewall does
// that forgets them. All ranks end with an error that names both, soon after the liveness limit. If the
// control connection is cut too, rank 0 names the other rank, and the other rank names rank 0.
func TestConnectionIsCut(t *testing.T) {
	type severance struct {
		ranks int
		cut   string
		hosts int // number of ranks of each simulated host, or 0 for one host without shared memory
	}
	for _, c := range sample(draws(t), []severance{
		{2, "0 1 data busy large", 0},
		{2, "0 1 data idle large", 0},
		{2, "0 1 data busy broadcast", 0},
		{2, "0 1 data busy messages", 0},
		{2, "0 1 all busy large", 0},
		{3, "1 2 data busy large", 0},
		{3, "0 2 data busy small", 0},
		{3, "1 2 data idle messages", 0},
		{3, "0 2 all idle large", 0},
		{4, "0 2 data busy large", 2},
	}, 5) {
		t.Run(fmt.Sprint(c.ranks, " ", c.cut), func(t *testing.T) {
			t.Parallel()
			severedJob(t, c.ranks, c.hosts, c.cut)
		})
	}
}

// severedJob runs the program "severed" and checks the errors of all ranks.
func severedJob(t *testing.T, ranks, perHost int, what string) {
	self := testnet.Self(t)
	// With a limit of 3 s, a busy machine can make another rank silent for too long.
	env := []string{programVariable + "=severed", cutVariable + "=" + what, "HVD_LIVENESS_SECONDS=8",
		staysVariable + "=1"}
	command := []string{hvdrunPath, "-np", fmt.Sprint(ranks), self}
	if perHost > 0 {
		script := fmt.Sprintf(`HVD_HOSTID=h$((HOROVOD_RANK / %d)) exec "$0"`, perHost)
		command = []string{hvdrunPath, "-np", fmt.Sprint(ranks), "sh", "-c", script, self}
	} else {
		env = append(env, "HOROVOD_CPU_OPERATIONS=tcp")
	}
	j := startCommand(t, command, env...)
	var a, b int
	var which string
	if _, err := fmt.Sscan(what, &a, &b, &which); err != nil {
		t.Fatal(err)
	}
	reports := 0
	var cut time.Time
	j.until("all ranks had reported", func(l line) bool {
		if l.text == "cut" {
			cut = l.at
		}
		got, ok := strings.CutPrefix(l.text, "error ")
		if !ok {
			return false
		}
		reports++
		t.Logf("rank %d after %v: %s", l.rank, l.at.Sub(cut).Round(time.Millisecond), got)
		want := fmt.Sprintf(": rank %d or rank %d failed: ", a, b)
		if which == "all" {
			want = fmt.Sprintf(": rank %d failed: silent for 8s", b)
			if l.rank == b {
				want = fmt.Sprintf(": rank %d failed: silent for 8s", a)
			}
		} else if !strings.Contains(got, "no acknowledgement for 8s") {
			t.Errorf("rank %d does not give the reason: %s", l.rank, got)
		}
		if !strings.Contains(got, want) {
			t.Errorf("rank %d does not say %q: %s", l.rank, want, got)
		}
		return reports == ranks
	})
	j.signal(os.Interrupt)
	if status := j.wait(); status == 0 {
		t.Error("hvdrun ended with status 0")
	}
}

// severed is the program of a rank of TestConnectionIsCut.
func severed(ctx context.Context) error {
	var a, b int
	var which, when, what string
	if _, err := fmt.Sscan(os.Getenv(cutVariable), &a, &b, &which, &when, &what); err != nil {
		return err
	}
	step := map[string]func(context.Context, []float32) error{
		"large": func(ctx context.Context, x []float32) error {
			_, err := hvd.Allreduce(ctx, x, hvd.InPlace(), hvd.Name("large"))
			return err
		},
		"small": func(ctx context.Context, x []float32) error {
			_, err := hvd.Allreduce(ctx, x[:100], hvd.InPlace(), hvd.Name("small"))
			return err
		},
		"broadcast": func(ctx context.Context, x []float32) error {
			_, err := hvd.Broadcast(ctx, x, a, hvd.InPlace(), hvd.Name("broadcast"))
			return err
		},
		"messages": passRound,
	}[what]
	x := make([]float32, 1<<20)
	for range 3 {
		if err := errors.Join(passRound(ctx, x), hvd.Barrier(ctx)); err != nil {
			return err
		}
		if _, err := hvd.Allreduce(ctx, x, hvd.InPlace(), hvd.Name("large")); err != nil {
			return err
		}
	}
	between, err := flows(ctx, a, b, which == "all")
	if err != nil {
		return err
	}
	sever := func() error {
		if me := hvd.Rank(); me != a && me != b {
			return nil
		}
		n, err := testnet.Cut(func(c testnet.Connection) bool {
			return between[[2]netip.AddrPort{c.Local, c.Remote}]
		})
		if err == nil && n != len(between) {
			err = fmt.Errorf("cut %d connections, want %d", n, len(between))
		}
		fmt.Println("cut")
		return err
	}
	failed := make(chan error, 1)
	if when == "idle" {
		failed <- sever()
		time.Sleep(time.Second) // meanwhile nothing is in flight on the data connections
	} else {
		go func() {
			time.Sleep(20 * time.Millisecond) // cut in the middle of an operation
			failed <- sever()
		}()
	}
	for {
		if err := step(ctx, x); err != nil {
			return errors.Join(err, <-failed)
		}
	}
}

// passRound sends x to the next rank, and receives that of the previous one.
func passRound(ctx context.Context, x []float32) error {
	me, n := hvd.Rank(), hvd.Size()
	sent, err := hvd.SendAsync(x, (me+1)%n, 0)
	if err != nil {
		return err
	}
	if _, err := hvd.Recv(ctx, make([]float32, len(x)), (me+n-1)%n, 0); err != nil {
		return err
	}
	_, err = sent.Wait(ctx)
	return err
}

// flows returns the connections between the ranks a and b, by their local and remote addresses at this rank.
// If all is not set, it returns only those that have carried data, and not the control connection.
func flows(ctx context.Context, a, b int, all bool) (map[[2]netip.AddrPort]bool, error) {
	own, err := testnet.Connections()
	if err != nil {
		return nil, err
	}
	var text strings.Builder
	for _, c := range own {
		if all || c.Bytes > 1<<20 {
			fmt.Fprintln(&text, hvd.Rank(), c.Local, c.Remote)
		}
	}
	every, err := hvd.Allgather(ctx, []byte(text.String()), hvd.Name("flows"))
	if err != nil {
		return nil, err
	}
	of := make(map[int]map[[2]string]bool)
	for line := range strings.Lines(string(every)) {
		var rank int
		var local, remote string
		if _, err := fmt.Sscan(line, &rank, &local, &remote); err != nil {
			return nil, err
		}
		if of[rank] == nil {
			of[rank] = make(map[[2]string]bool)
		}
		of[rank][[2]string{local, remote}] = true
	}
	between := make(map[[2]netip.AddrPort]bool)
	other := a + b - hvd.Rank()
	for _, c := range own {
		if of[hvd.Rank()][[2]string{c.Local.String(), c.Remote.String()}] &&
			of[other][[2]string{c.Remote.String(), c.Local.String()}] {
			between[[2]netip.AddrPort{c.Local, c.Remote}] = true
		}
	}
	if (hvd.Rank() == a || hvd.Rank() == b) && len(between) == 0 {
		return nil, fmt.Errorf("ranks %d and %d have no connections", a, b)
	}
	return between, nil
}
