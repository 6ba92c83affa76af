package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// The first four variables tell the program "dies" which rank is the victim, after which step of Init the
// victim fails, how long after this step, and how it fails: it dies if the variable is not set.
const (
	victimVariable = "GOHVD_E2E_VICTIM"
	stepVariable   = "GOHVD_E2E_STEP"
	delayVariable  = "GOHVD_E2E_DELAY"
	howVariable    = "GOHVD_E2E_HOW"
	stops          = "stop" // all threads of the process stop
	hangs          = "hang" // only the goroutine that calls Init hangs
	// initMethodVariable names the variable with the URL of an init method, without the rank. The variable is
	// set if the ranks meet by an init method.
	initMethodVariable = "GOHVD_E2E_INIT_METHOD"
	// gateVariable names a variable that makes the ranks print "up" and wait for the end of standard input
	// before they call Init. So all ranks call Init at the same time, because the time limit of Init is
	// short.
	gateVariable = "GOHVD_E2E_GATE"
)

const (
	// initTime is the time limit of Init in cases in which the test waits for this limit.
	initTime = 5 * time.Second
	// noticeDeadline limits how long the survivors may take to notice a death. The liveness limit is
	// longTime, and under hvdrun the time limit of Init too. So a death that is noticed within noticeDeadline
	// was not noticed by a timeout.
	noticeDeadline = 30 * time.Second
	longTime       = 2 * noticeDeadline
)

// A victim fails at one of the following points: before Init, at a log message of Init, or after Init.
const (
	stepBegin  = "begin"
	stepJoined = "init: all ranks have joined"
	stepEnd    = "end"
)

var initSteps = []string{
	stepBegin, "init: joining the other ranks", stepJoined, "init: connecting to the other ranks",
	"init: connected, waiting until all ranks are connected", stepEnd,
}

// dies is the program of a rank that calls Init and then waits at a barrier. The victim kills or stops itself
// at the given point, or hangs. Every rank prints which points it has passed, and how long a call of Init
// that has failed has taken.
func dies(ctx context.Context) int {
	delay, err := time.ParseDuration(os.Getenv(delayVariable))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	reached := func(step string) {
		if step == stepJoined {
			fmt.Println("joined")
		}
		if os.Getenv("HOROVOD_RANK") != os.Getenv(victimVariable) || step != os.Getenv(stepVariable) {
			return
		}
		signal := syscall.SIGKILL
		switch os.Getenv(howVariable) {
		case hangs:
			select {}
		case stops:
			signal = syscall.SIGSTOP
		}
		time.AfterFunc(delay, func() {
			fmt.Println("dies")
			_ = syscall.Kill(os.Getpid(), signal)
		})
	}
	if os.Getenv(gateVariable) != "" {
		fmt.Println("up")
		if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 2
		}
	}
	reached(stepBegin)
	options := []hvd.InitOption{hvd.WithLogger(follows(reached))}
	if url := os.Getenv(initMethodVariable); url != "" {
		options = append(options, hvd.WithInitMethod(url))
	}
	began := time.Now()
	if err = hvd.Init(ctx, options...); err != nil {
		fmt.Println("took", time.Since(began))
	} else {
		reached(stepEnd)
		if os.Getenv("HOROVOD_RANK") == os.Getenv(victimVariable) {
			select {} // the timer above kills this process
		}
		err = hvd.Barrier(ctx)
	}
	if peer, ok := errors.AsType[*hvd.PeerError](err); ok {
		fmt.Println("failed", peer.Ranks, err)
	} else {
		fmt.Println("failed []", err)
	}
	return 1
}

// follows returns a logger that calls reached with each message and drops it. Init logs a message at each of
// its steps.
func follows(reached func(step string)) *slog.Logger { return slog.New(follower(reached)) }

// follower is a slog.Handler that calls a function with the message of each entry.
type follower func(message string)

func (f follower) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelDebug }

func (f follower) Handle(_ context.Context, r slog.Record) error { f(r.Message); return nil }

func (f follower) WithAttrs([]slog.Attr) slog.Handler { return f }

func (f follower) WithGroup(string) slog.Handler { return f }

// A rank is killed at a random point of Init. The ranks meet under hvdrun, at a store that outlives the
// victim, or at a store in rank 0, and use shared memory or TCP. A rank that knew all others when the victim
// died soon gets a PeerError that names the victim. The other ranks wait for a replacement. hvdrun soon names
// the victim. Without hvdrun, the waiting ranks fail at the time limit with an error that names only the
// victim.
func TestDeathInInit(t *testing.T) {
	random := draws(t)
	var deaths []death
	for _, memory := range []string{"shm", "tcp"} {
		for _, by := range []string{"hvdrun", "store", "tcp://"} {
			for _, step := range initSteps {
				deaths = append(deaths, death{by, memory, step, random.IntN(ranks),
					time.Duration(random.Int64N(int64(3 * time.Millisecond)))})
			}
		}
	}
	deaths = sample(random, deaths, 8)
	var mu sync.Mutex
	told := make(map[string]int)
	t.Run("deaths", func(t *testing.T) {
		for _, d := range deaths {
			t.Run(d.String(), func(t *testing.T) {
				t.Parallel() // run in parallel, because some cases wait for the time limit of Init
				outcome := d.run(t)
				mu.Lock()
				defer mu.Unlock()
				told[outcome]++
			})
		}
	})
	t.Logf("%d deaths: %v", len(deaths), told)
}

// death is a case of TestDeathInInit: how the ranks meet, and when the victim dies.
type death struct {
	by     string // how the ranks meet: "hvdrun", "store" or "tcp://"
	memory string
	step   string
	victim int
	delay  time.Duration
}

func (d death) String() string {
	return fmt.Sprintf("%s/%s/%s/rank %d after %v", d.memory, d.by, d.step, d.victim, d.delay)
}

func (d death) env() []string {
	return []string{
		victimVariable + "=" + strconv.Itoa(d.victim), stepVariable + "=" + d.step, delayVariable + "=" +
			d.delay.String(),
		"HOROVOD_CPU_OPERATIONS=" + d.memory, fmt.Sprint("HVD_LIVENESS_SECONDS=", longTime.Seconds()),
	}
}

// run runs a job in which this death happens, and checks the lines that the survivors print. It returns
// whether the survivors had joined or were waiting for a replacement.
func (d death) run(t *testing.T) string {
	if d.by == "hvdrun" {
		j := start(t, ranks, "dies",
			append(d.env(), fmt.Sprint("HOROVOD_GLOO_TIMEOUT_SECONDS=", longTime.Seconds()))...)
		var lines []line
		j.until("the death", func(l line) bool { lines = append(lines, l); return l.text == "dies" })
		died := lines[len(lines)-1].at
		j.untilError("hvdrun names the rank", func(text string) bool {
			return strings.Contains(text, fmt.Sprintf("rank %d: killed by SIGKILL", d.victim))
		})
		if took := time.Since(died); took > noticeDeadline {
			t.Errorf("hvdrun took %v to name the rank", took)
		}
		for l := range j.lines {
			lines = append(lines, l)
		}
		j.ends(128 + int(syscall.SIGKILL))
		_, cause, _ := strings.Cut(j.err(), "Root cause")
		if cause, _, _ = strings.Cut(cause, "Other ranks"); !strings.Contains(cause,
			fmt.Sprintf("rank %d: killed by SIGKILL", d.victim)) ||
			strings.Count(cause, "\n  rank ") != 1 {
			t.Errorf("hvdrun gives as the cause: %s", cause)
		}
		return d.check(t, lines, died)
	}
	lines := d.alone(t)
	i := slices.IndexFunc(lines, func(l line) bool { return l.text == "dies" })
	if i < 0 {
		t.Fatalf("no rank has died: %v", lines)
	}
	return d.check(t, lines, lines[i].at)
}

// alone runs the ranks without hvdrun and returns the lines that they print. It returns when all ranks have
// ended.
func (d death) alone(t *testing.T) []line {
	self := testnet.Self(t)
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	server, err := store.Serve("127.0.0.1:0", kv, store.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	host, port, _ := strings.Cut(server.Addr(), ":")
	meet := []string{"HOROVOD_GLOO_RENDEZVOUS_ADDR=" + host, "HOROVOD_GLOO_RENDEZVOUS_PORT=" + port,
		"HVD_INSECURE=1"}
	if d.by != "store" {
		meet = []string{fmt.Sprintf("%s=tcp://127.0.0.1:%d", initMethodVariable, testnet.FreePort(t))}
	}
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	var mu sync.Mutex
	var lines []line
	var readers, up sync.WaitGroup
	up.Add(ranks)
	var gates []io.Closer
	for rank := range ranks {
		cmd := exec.CommandContext(ctx, self)
		cmd.Env = slices.Concat(os.Environ(), d.env(), meet, []string{
			programVariable + "=dies", fmt.Sprint("HOROVOD_RANK=", rank), fmt.Sprint("HOROVOD_SIZE=", ranks),
			gateVariable + "=1", fmt.Sprint("HOROVOD_GLOO_TIMEOUT_SECONDS=", initTime.Seconds()),
		})
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		gate, err := cmd.StdinPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		gates = append(gates, gate)
		readers.Go(func() {
			isUp := sync.OnceFunc(up.Done)
			defer isUp()
			for s := bufio.NewScanner(out); s.Scan(); {
				if s.Text() == "up" {
					isUp()
					continue
				}
				mu.Lock()
				lines = append(lines, line{rank: rank, text: s.Text(), at: time.Now()})
				mu.Unlock()
			}
			_ = cmd.Wait() // the error is ignored, because the printed lines show how the rank ended
		})
	}
	up.Wait()
	for _, gate := range gates {
		if err := gate.Close(); err != nil {
			t.Error(err)
		}
	}
	readers.Wait()
	return lines
}

// check checks that the lines of each survivor fit what the survivor knew when the victim died. It returns
// whether the survivors had joined or were waiting for a replacement.
func (d death) check(t *testing.T, lines []line, died time.Time) string {
	joined := make(map[int]bool)
	failed := make(map[int]line)
	for _, l := range lines {
		switch {
		case l.text == "joined":
			joined[l.rank] = true
		case strings.HasPrefix(l.text, "failed "):
			failed[l.rank] = l
		}
	}
	outcome := "waited for a replacement"
	for rank := range ranks {
		l, ended := failed[rank]
		text := strings.TrimPrefix(l.text, "failed ")
		switch {
		case rank == d.victim:
		case joined[rank]:
			outcome = "had joined"
			if took := l.at.Sub(died); !ended || !strings.HasPrefix(text, fmt.Sprintf("[%d] ", d.victim)) ||
				took > noticeDeadline {
				t.Errorf("rank %d had joined and says after %v: %s", rank, took, text)
			}
		case !ended && d.by == "hvdrun": // hvdrun has killed this rank
		case !d.isMissing(text):
			t.Errorf("rank %d names others than rank %d: %s", rank, d.victim, text)
		}
	}
	if t.Failed() {
		t.Logf("the ranks said %v", lines)
	}
	return outcome
}

// isMissing reports whether an error says that the victim has not joined, and does not say this of any other
// rank.
func (d death) isMissing(text string) bool {
	if d.victim == 0 && (strings.Contains(text, "the root of rank 0") || strings.Contains(text, "rank 0 serves its root") ||
		strings.Contains(text, "the store of rank 0")) {
		return true
	}
	return strings.Contains(text, fmt.Sprintf("waiting for rank %d: ", d.victim))
}

// A rank has too few file descriptors for Init. It fails at once with an error that says so. Every other
// rank's error names this rank.
func TestFewDescriptors(t *testing.T) {
	for _, c := range []struct {
		victim, limit int
		memory        string
	}{
		{2, 14, "shm"}, {2, 16, "shm"}, {2, 20, "shm"}, {0, 15, "shm"}, {0, 18, "shm"}, {0, 20, "shm"},
		{2, 10, "tcp"}, {0, 13, "tcp"}, {0, 15, "tcp"},
	} {
		t.Run(fmt.Sprintf("%s/rank %d has %d", c.memory, c.victim, c.limit), func(t *testing.T) {
			// The arguments of the outer shell are hvdrun, -np, 4 and the program. The inner shell lowers the
			// limit for one rank only.
			few := fmt.Sprintf("if [ $HOROVOD_RANK = %d ]; then ulimit -n %d; fi", c.victim, c.limit)
			wrap := []string{"sh", "-c", `exec "$1" "$2" "$3" sh -c '` + few + `; exec "$0"' "$4"`, "sh"}
			j := startWith(t, wrap, ranks, "sums", "HOROVOD_CPU_OPERATIONS="+c.memory)
			status := j.wait()
			_, cause, _ := strings.Cut(j.err(), "Root cause")
			cause, _, _ = strings.Cut(cause, "Other ranks")
			testnet.WantText(t, cause, "too many open files", "ulimit -n",
				fmt.Sprintf("\n  rank %d: exit status 1", c.victim))
			for rank := range ranks {
				said := fmt.Sprintf("[%d]<stderr>:hvd: init: rank %d failed: ", rank, c.victim)
				if rank != c.victim && !strings.Contains(j.err(), said) {
					t.Errorf("rank %d does not name rank %d", rank, c.victim)
				}
			}
			if status != 1 || t.Failed() {
				t.Errorf("hvdrun ended with status %d:\n%s", status, j.err())
			}
		})
	}
}
