package bootstrap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// rankVariable is the name of an environment variable. A real launcher in a test starts this test binary as a
// rank, with the variable set. Its value says what the rank has to do.
const rankVariable = "BOOTSTRAP_TEST_RANK"

// givenVariable is the name of the environment variable that holds the secret that the user gives to the
// ranks.
const givenVariable = "BOOTSTRAP_TEST_SECRET"

func TestMain(m *testing.M) {
	if what := os.Getenv(rankVariable); what != "" {
		if err := rankMain(what); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func rankMain(what string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	e, lines, err := Detect(os.Getenv)
	if err != nil || e == nil {
		return fmt.Errorf("detected %v: %w; %v", e, err, lines)
	}
	var o MeetOptions
	if text := os.Getenv(givenVariable); text != "" {
		if o.Secret, err = secret.Parse(text); err != nil {
			return err
		}
	}
	m, err := e.Meet(ctx, o)
	if err != nil {
		return err
	}
	if what == "twice" {
		if err := twice(ctx, m); err != nil {
			return err
		}
	}
	if err := work(ctx, e, m, true); err != nil {
		return err
	}
	// Write the line with one call, so that the launcher does not mix it with lines of other ranks.
	fmt.Printf("met by %s: rank %d of %d, local rank %d of %d, job %s\n", e.Kind, e.Rank, e.Size, e.LocalRank,
		e.LocalSize, m.JobID)
	return nil
}

// twice checks that Meet fails if a program calls it a second time, after the connection to the launcher was
// closed.
func twice(ctx context.Context, first *Place) error {
	e, _, err := Detect(os.Getenv)
	if err != nil {
		return err
	}
	m, err := e.Meet(ctx, MeetOptions{})
	if err == nil {
		return errors.Join(errors.New("the ranks met a second time"), m.Close(), first.Close())
	}
	if ctx.Err() != nil || !strings.Contains(err.Error(), "pmi: init") {
		return fmt.Errorf("the second meeting failed with %w", err)
	}
	return nil
}

// work does what a rank does after the meeting. The rank writes a value to the store and reads the values of
// all other ranks. It checks that it has a secret if wantSecret is true, and that all ranks have the same
// secret. Then it calls Met. Rank 0 returns only when all other ranks are done.
func work(ctx context.Context, e *Env, m *Place, wantSecret bool) (err error) {
	defer func() { err = errors.Join(err, m.Close()) }()
	if m.Secret.IsZero() == wantSecret {
		return fmt.Errorf("rank %d has %v", e.Rank, m.Secret)
	}
	key := func(what string, r int) string { return what + "/" + strconv.Itoa(r) }
	if err := m.Store.Set(ctx, key("value", e.Rank), []byte(strconv.Itoa(e.Rank*e.Rank))); err != nil {
		return err
	}
	n, err := m.Store.Add(ctx, "count", 1)
	if err == nil && n == int64(e.Size) {
		err = m.Store.Set(ctx, "all", nil)
	}
	if err != nil {
		return err
	}
	if err := m.Store.Wait(ctx, "all"); err != nil {
		return err
	}
	for r := range e.Size {
		got, err := m.Store.Get(ctx, key("value", r))
		if err != nil {
			return err
		}
		if want := strconv.Itoa(r * r); string(got) != want {
			return fmt.Errorf("rank %d reads %q of rank %d, want %q", e.Rank, got, r, want)
		}
	}
	if n, err := m.Store.Add(ctx, "count", 0); err != nil || n != int64(e.Size) {
		return fmt.Errorf("%d ranks have counted themselves, want %d: %w", n, e.Size, err)
	}
	if err := sameSecret(ctx, e, m); err != nil {
		return err
	}
	if e.Rank != 0 {
		// The error is ignored, because rank 0 may close the store before the answer arrives.
		_, _ = m.Store.Add(ctx, "done", 1)
		return nil
	}
	return awaitCount(ctx, m.Store, "done", e.Size-1)
}

// awaitCount waits until the counter key has reached n.
func awaitCount(ctx context.Context, s store.Store, key string, n int) error {
	for {
		got, err := s.Add(ctx, key, 0)
		if err != nil || got == int64(n) {
			return err
		}
		dial.Pause(ctx, 5*time.Millisecond, nil)
	}
}

// sameSecret checks that all ranks have the same secret. Rank 0 serves another store with its secret, and the
// other ranks connect to this store with their secrets.
func sameSecret(ctx context.Context, e *Env, m *Place) error {
	cfg := store.Config{Secret: m.Secret}
	if e.Rank != 0 {
		addr, err := m.Store.Get(ctx, "proof")
		if err != nil {
			return err
		}
		c, err := store.Dial(ctx, string(addr), cfg)
		if err != nil {
			return err
		}
		_, addErr := m.Store.Add(ctx, "proven", 1)
		return errors.Join(addErr, c.Close())
	}
	h := store.NewHashStore(store.Limits{})
	s, err := store.Serve("127.0.0.1:0", h, cfg)
	if err != nil {
		return err
	}
	if err := m.Store.Set(ctx, "proof", []byte(s.Addr())); err != nil {
		return err
	}
	return errors.Join(awaitCount(ctx, m.Store, "proven", e.Size-1), s.Close(), h.Close())
}

// needLauncher skips the test if the launcher is not installed. In CI, the test fails instead.
func needLauncher(t *testing.T, name, pkg string) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("%v; CI installs %s", err, pkg)
		}
		t.Skipf("%v; it is in Debian's package %s", err, pkg)
	}
}

// launch runs a launcher that starts n ranks. It waits until the launcher ends, and checks that each rank has
// printed its line.
func launch(t *testing.T, kind Kind, n int, env []string, argv ...string) {
	t.Helper()
	cmd := exec.CommandContext(testnet.Context(t), argv[0], argv[1:]...)
	cmd.Env = append(append(os.Environ(), "OMP_NUM_THREADS=1"), env...)
	cmd.WaitDelay = 5 * time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v\n%s%s", argv[0], err, &stdout, &stderr)
	}
	var got, want []string
	job := ""
	for line := range strings.Lines(stdout.String()) {
		line, j, ok := strings.Cut(strings.TrimSpace(line), ", job ")
		if !ok || j == "" || job != "" && j != job {
			t.Errorf("rank says %q of job %q, another of %q", line, j, job)
		}
		job = j
		got = append(got, line)
	}
	for r := range n {
		want = append(want, fmt.Sprintf("met by %s: rank %d of %d, local rank %d of %d", kind, r, n, r, n))
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s\nand on standard error\n%s", strings.Join(got, "\n"),
			strings.Join(want, "\n"), &stderr)
	}
}

const userSecret = "a secret of the user"

var bothSecrets = map[string]string{"secret made": givenVariable + "=", "secret given": givenVariable + "=" +
	userSecret}

func TestOpenMPI(t *testing.T) {
	needLauncher(t, "mpirun.openmpi", "openmpi-bin")
	for name, env := range bothSecrets {
		t.Run(name, func(t *testing.T) {
			launch(t, OpenMPI, 4, []string{rankVariable + "=once", env},
				"mpirun.openmpi", "--oversubscribe", "--allow-run-as-root", "-np", "4", testnet.Self(t))
		})
	}
}

func TestMPICH(t *testing.T) {
	needLauncher(t, "mpiexec.mpich", "mpich")
	for name, env := range bothSecrets {
		t.Run(name, func(t *testing.T) {
			launch(t, PMI, 4, []string{rankVariable + "=once", env}, "mpiexec.mpich", "-n", "4", testnet.Self(t))
		})
	}
	t.Run("twice", func(t *testing.T) {
		launch(t, PMI, 2, []string{rankVariable + "=twice"}, "mpiexec.mpich", "-n", "2", testnet.Self(t))
	})
}

// environment holds the environment variables of a rank in a test.
type environment map[string]string

func (e environment) get(name string) string { return e[name] }

// with returns a changed copy of e. The slice more holds names and values of variables in turn. An empty
// value removes the variable.
func (e environment) with(more ...string) environment {
	all := make(environment)
	for name, value := range e {
		all[name] = value
	}
	for i := 0; i < len(more); i += 2 {
		all[more[i]] = more[i+1]
	}
	return all
}

func detect(t *testing.T, env environment) *Env {
	t.Helper()
	e, lines, err := Detect(env.get)
	if err != nil || e == nil {
		t.Fatalf("detected %v, %v; %v", e, err, lines)
	}
	return e
}

// meetAll starts a goroutine for each rank, which runs Meet and then work. It returns the error of each rank.
func meetAll(ctx context.Context, wantSecret bool, options func(rank int) MeetOptions, envs ...*Env) []error {
	errs := make([]error, len(envs))
	var wg sync.WaitGroup
	for r, e := range envs {
		wg.Go(func() {
			m, err := e.Meet(ctx, options(r))
			if err == nil {
				err = work(ctx, e, m, wantSecret)
			}
			errs[r] = err
		})
	}
	wg.Wait()
	return errs
}

func same(o MeetOptions) func(int) MeetOptions { return func(int) MeetOptions { return o } }

func mustMeet(t *testing.T, wantSecret bool, options func(rank int) MeetOptions, envs ...*Env) {
	t.Helper()
	for r, err := range meetAll(testnet.Context(t), wantSecret, options, envs...) {
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}

func parse(t *testing.T, text string) secret.Secret {
	t.Helper()
	s, err := secret.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
