package joblink

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// served serves a launcher's store. It returns the store, and a function that returns a new client of that
// store.
func served(t *testing.T) (*store.HashStore, func() store.Store) {
	t.Helper()
	kv := store.NewHashStore(store.Limits{})
	key, _ := secret.New()
	server, err := store.Serve("127.0.0.1:0", kv, store.Config{Secret: key})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		server.Close()
		kv.Close()
	})
	return kv, func() store.Store {
		c, err := store.Dial(testnet.Context(t), server.Addr(), store.Config{Secret: key})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
}

// listen calls Listen. The Launcher is closed when the test ends.
func listen(t *testing.T, kv *store.HashStore, ranks int,
	hear func(rank int, what string, body []byte)) *Launcher {
	t.Helper()
	l, err := Listen(kv, ranks, hear)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// awaitRead waits until the launcher has read everything that the ranks have sent.
func awaitRead(t *testing.T, kv *store.HashStore) {
	t.Helper()
	testnet.Eventually(t, "the launcher has read it", func() bool {
		n, err := kv.QueueLen(t.Context(), keyAnswers)
		return err == nil && n == 0 && kv.Waits() == 2
	})
}

func deaf(int, string, []byte) {}

// answers makes ranks 0 to n-1 answer questions by calling handle, until the function end is called or the
// test ends.
func answers(t *testing.T, n int, dial func() store.Store,
	handle func(rank int, what string) []byte) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(testnet.Context(t))
	var wg sync.WaitGroup
	for r := range n {
		rank := New(dial(), r)
		wg.Go(func() {
			if err := rank.Answer(ctx, func(what string) []byte { return handle(r, what) }); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	end = func() {
		cancel()
		wg.Wait()
	}
	t.Cleanup(end)
	return end
}

func echo(rank int, what string) []byte { return fmt.Appendf(nil, "%s of %d", what, rank) }

func wantEchoes(t *testing.T, what string, n int, got map[int][]byte, missing []int, err error) {
	t.Helper()
	if err != nil || len(missing) > 0 || len(got) != n {
		t.Fatalf("%s: got %d answers, %v missing, error %v, want %d answers", what, len(got), missing, err, n)
	}
	for r, body := range got {
		if !bytes.Equal(body, echo(r, what)) {
			t.Errorf("rank %d: got %q, want %q", r, body, echo(r, what))
		}
	}
}

// TestAsk asks several questions at the same time. Each must get its own answers. Afterwards no question and
// no answer may be left in the store.
func TestAsk(t *testing.T) {
	const n, askers, times = 32, 4, 5
	kv, dial := served(t)
	l := listen(t, kv, n, deaf)
	answers(t, n, dial, echo)
	var wg sync.WaitGroup
	for a := range askers {
		wg.Go(func() {
			for i := range times {
				what := fmt.Sprintf("what %d.%d", a, i)
				got, missing, err := l.Ask(testnet.Context(t), what)
				if err != nil || len(missing) > 0 {
					t.Errorf("%s: %v missing, error %v", what, missing, err)
				}
				for r, body := range got {
					if !bytes.Equal(body, echo(r, what)) {
						t.Errorf("%s: rank %d answered %q", what, r, body)
					}
				}
			}
		})
	}
	wg.Wait()
	if list, err := kv.Get(t.Context(), keyQuestions); string(list) != "[]" || err != nil {
		t.Errorf("got questions %s, error %v, want none", list, err)
	}
	if keys, err := kv.NumKeys(t.Context()); err != nil || keys != 1 {
		t.Errorf("got %d keys, error %v, want that of the questions", keys, err)
	}
}

// A rank that is not asked sends no answer.
func TestAskFew(t *testing.T) {
	kv, dial := served(t)
	l := listen(t, kv, 3, deaf)
	answers(t, 3, dial, func(rank int, what string) []byte {
		if what == Dump && rank != 1 {
			t.Errorf("rank %d was asked", rank)
		}
		return echo(rank, what)
	})
	got, missing, err := l.Ask(testnet.Context(t), Dump, 1)
	if err != nil || len(missing) > 0 || len(got) != 1 || !bytes.Equal(got[1], echo(1, Dump)) {
		t.Errorf("got %v, %v missing, error %v, want the answer of rank 1", got, missing, err)
	}
	got, missing, err = l.Ask(testnet.Context(t), Metrics) // after it, all have seen the first question
	wantEchoes(t, Metrics, 3, got, missing, err)
}

// TestDeadline checks that Ask returns when its context ends, and that missing contains the ranks that have
// not answered. An answer that arrives later must not count as the answer to another question.
func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := store.NewHashStore(store.Limits{})
		t.Cleanup(func() { kv.Close() })
		l := listen(t, kv, 4, deaf)
		ctx, cancel := context.WithCancel(t.Context())
		release := make(chan struct{})
		var wg sync.WaitGroup
		for r := range 3 {
			wg.Go(func() {
				New(kv, r).Answer(ctx, func(what string) []byte {
					if r == 2 && what == Dump {
						<-release
					}
					return echo(r, what)
				})
			})
		}
		limited, stop := context.WithTimeout(ctx, 1500*time.Millisecond)
		defer stop()
		begun := time.Now()
		got, missing, err := l.Ask(limited, Dump)
		if err != nil || !slices.Equal(missing, []int{2, 3}) ||
			!slices.Equal(slices.Sorted(maps.Keys(got)), []int{0, 1}) {
			t.Errorf("got answers of %v, %v missing, error %v", slices.Sorted(maps.Keys(got)), missing, err)
		}
		if took := time.Since(begun); took != 1500*time.Millisecond {
			t.Errorf("it took %v, want 1.5 s", took)
		}
		close(release)
		wg.Go(func() { New(kv, 3).Answer(ctx, func(what string) []byte { return echo(3, what) }) })
		got, missing, err = l.Ask(ctx, Metrics)
		wantEchoes(t, Metrics, 4, got, missing, err)
		cancel()
		wg.Wait()
	})
}

// TestNothingToSay lets the function handle return nil or too many bytes. Ask must report the rank as missing
// at once, without waiting for the deadline.
func TestNothingToSay(t *testing.T) {
	kv, dial := served(t)
	l := listen(t, kv, 4, deaf)
	answers(t, 4, dial, func(rank int, _ string) []byte {
		switch rank {
		case 1:
			return nil
		case 2:
			return make([]byte, MaxBodyBytes+1)
		case 3:
			return []byte{}
		}
		return make([]byte, MaxBodyBytes)
	})
	got, missing, err := l.Ask(testnet.Context(t), Dump)
	if err != nil || !slices.Equal(missing, []int{1, 2}) || len(got[0]) != MaxBodyBytes || got[3] == nil ||
		len(got[3]) != 0 {
		t.Errorf("got %d answers, %v missing, error %v, want all of 0, nothing of 3, and 1 and 2 missing",
			len(got), missing, err)
	}
}

// TestFullStore uses a store that has no room for an answer. Ask must report the rank as missing. The rank
// must still answer later questions.
func TestFullStore(t *testing.T) {
	kv := store.NewHashStore(store.Limits{Bytes: 64 << 10})
	t.Cleanup(func() { kv.Close() })
	l := listen(t, kv, 2, deaf)
	answers(t, 2, func() store.Store { return kv }, func(rank int, what string) []byte {
		if what == Metrics {
			return echo(rank, what)
		}
		return make([]byte, 63<<10+rank*100<<10)
	})
	ctx := testnet.Context(t)
	got, missing, err := l.Ask(ctx, Dump)
	if err != nil || !slices.Equal(missing, []int{1}) || len(got[0]) != 63<<10 {
		t.Errorf("got %d answers, %v missing, error %v, want 1 missing", len(got), missing, err)
	}
	got, missing, err = l.Ask(ctx, Metrics)
	wantEchoes(t, Metrics, 2, got, missing, err)
}

// TestGenerations changes the ranks of an elastic job while a question is open. Only the new ranks count, and
// reports of the old ones are dropped.
func TestGenerations(t *testing.T) {
	kv := store.NewHashStore(store.Limits{})
	t.Cleanup(func() { kv.Close() })
	reports := make(chan string, 4)
	l := listen(t, kv, 1, func(_ int, _ string, body []byte) { reports <- string(body) })
	l.SetRanks(1, 3)
	ctx, cancel := context.WithCancel(testnet.Context(t))
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		old := func(rank int) Link { return NewOf(1, kv, rank) }
		list, err := kv.Watch(ctx, keyQuestions, []byte("[]"))
		open, _ := decodeQuestions(list)
		if err != nil || len(open) != 1 {
			t.Errorf("got questions %s, error %v, want one", list, err)
			return
		}
		err = old(0).(*link).reply(ctx, open[0].ID, []byte("1"))
		l.SetRanks(2, 2) // the third rank was dead, and the second one has not answered yet
		err = errors.Join(err, old(1).(*link).reply(ctx, open[0].ID, []byte("1")),
			old(1).Report(ctx, Failure, []byte("old")), NewOf(2, kv, 1).Report(ctx, Failure, []byte("new")))
		if err != nil {
			t.Error(err)
		}
		for r := range 2 {
			wg.Go(func() {
				_ = NewOf(2, kv, r).Answer(ctx, func(string) []byte { return []byte("2") })
			})
		}
	})
	got, missing, err := l.Ask(ctx, Dump)
	if err != nil || len(missing) > 0 || string(got[0]) != "2" || string(got[1]) != "2" {
		t.Errorf("got answers %s and %s, %v missing, error %v, want those of generation 2", got[0], got[1],
			missing, err)
	}
	if got := <-reports; got != "new" {
		t.Errorf("got the report %q, want that of generation 2", got)
	}
}

// TestRepeatedAnswers lets two processes with the same rank answer. Only the first answer must count. An
// answer from a rank number that is outside of the job must not count.
func TestRepeatedAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := store.NewHashStore(store.Limits{})
		t.Cleanup(func() { kv.Close() })
		l := listen(t, kv, 2, deaf)
		var wg sync.WaitGroup
		for i, rank := range []int{0, 0, 7} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			wg.Go(func() {
				time.Sleep(time.Duration(i) * time.Second)
				New(kv, rank).Answer(ctx, func(string) []byte { return []byte{byte(i)} })
			})
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		got, missing, err := l.Ask(ctx, Dump)
		if err != nil || !slices.Equal(missing, []int{1}) || !bytes.Equal(got[0], []byte{0}) ||
			len(got) != 1 {
			t.Errorf("got %v, %v missing, error %v, want the first answer of rank 0", got, missing, err)
		}
		wg.Wait()
	})
}

// TestReports checks that each report arrives once, and that the reports of one rank arrive in order. Reports
// that are in the store when Close is called must still be delivered.
func TestReports(t *testing.T) {
	kv, dial := served(t)
	ctx := testnet.Context(t)
	if listens, err := New(kv, 0).HasListener(ctx); listens || err != nil {
		t.Errorf("got %v, %v, want false", listens, err)
	}
	if err := New(kv, 0).Report(ctx, Stall, nil); !errors.Is(err, ErrNoLauncher) {
		t.Errorf("got %v, want %v", err, ErrNoLauncher)
	}
	const ranks, times = 4, 10
	var got [ranks][]string
	held := make(chan struct{})
	l, err := Listen(kv, ranks, func(rank int, what string, body []byte) {
		<-held
		got[rank] = append(got[rank], what+string(body))
	})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for r := range ranks {
		rank := New(dial(), r)
		wg.Go(func() {
			for i := range times {
				if err := rank.Report(ctx, Stall, fmt.Append(nil, i)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for _, garbage := range []string{"", "\n", "{}", "x\ny"} {
		if err := kv.Push(ctx, keyReports, []byte(garbage)); err != nil {
			t.Fatal(err)
		}
	}
	close(held)
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	for r, heard := range got {
		if len(heard) != times || !slices.IsSorted(heard) || heard[0] != "stall0" {
			t.Errorf("rank %d: got %q, want %d in order", r, heard, times)
		}
	}
	if err := New(kv, 0).Report(ctx, strings.Repeat("x", maxHeadBytes), nil); err == nil {
		t.Error("a report with a name of 1024 bytes was taken")
	}
	if err := New(kv, 0).Report(ctx, Stall, make([]byte, MaxBodyBytes+1)); err == nil {
		t.Error("too long a report was taken")
	}
	for range maxReports {
		if err := kv.Push(ctx, keyReports, nil); err != nil {
			t.Fatal(err)
		}
	}
	testnet.WantError(t, New(kv, 0).Report(ctx, Stall, nil), "16384 unread reports")
}

func verdictOf(epoch uint64, reason string, ranks ...topo.Rank) Verdict {
	return Verdict{Epoch: epoch, Ranks: ranks, Reason: reason}
}

// TestVerdict sends several verdicts. The first verdict of an epoch must count. A verdict of a later epoch
// must replace it, and a verdict of an earlier epoch must be ignored.
func TestVerdict(t *testing.T) {
	kv, dial := served(t)
	ctx := testnet.Context(t)
	l := listen(t, kv, 3, deaf)
	limited, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	if v, err := l.Verdict(limited); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, %v before there is one", v, err)
	}
	rank := New(dial(), 2)
	// Reports of ranks that do not exist, or about such ranks, are dropped.
	for by := range 100 {
		for _, about := range []string{"[1]", "[-1]", "[3]", "[0,1,2,0]"} {
			body := fmt.Appendf(nil, `{"epoch":9,"ranks":%s}`, about)
			if by >= 3 || about != "[1]" {
				l.take(message{Rank: by - by%2*100, What: verdict, Has: true, body: body})
			}
		}
	}
	if got := l.Accused(); got != nil {
		t.Errorf("got %v accused by ranks that do not exist, or ranks that do not exist accused", got)
	}
	for _, step := range []struct{ says, want Verdict }{
		{verdictOf(3, "first", 1), verdictOf(3, "first", 1)},
		{verdictOf(3, "second", 0), verdictOf(3, "first", 1)},
		{verdictOf(2, "old", 0), verdictOf(3, "first", 1)},
		{Verdict{Epoch: 3, Ranks: []topo.Rank{0}, Over: true}, verdictOf(3, "first", 1)},
		{verdictOf(4, strings.Repeat("é", MaxReasonBytes), 0, 2),
			verdictOf(4, strings.Repeat("é", MaxReasonBytes/2), 0, 2)},
	} {
		if err := rank.ReportVerdict(ctx, step.says); err != nil {
			t.Fatal(err)
		}
		awaitRead(t, kv)
		v, err := l.Verdict(ctx)
		if err != nil || v.Epoch != step.want.Epoch || !slices.Equal(v.Ranks, step.want.Ranks) ||
			v.Reason != step.want.Reason || v.At.IsZero() {
			t.Errorf("got %v, %v, want %v", v, err, step.want)
		}
	}
	// When all ranks have joined an epoch, the verdict of an earlier one does not count, and neither does one
	// that arrives late, or that said that this epoch has not begun. The verdict of a program that is started
	// later and cannot join counts, although that program does not know how many epochs there have been.
	starting := func(epoch uint64) Verdict {
		return Verdict{Epoch: epoch, Ranks: []topo.Rank{1}, Starting: true}
	}
	for _, step := range []struct {
		begun uint64
		says  Verdict
		want  []topo.Rank
	}{
		{5, verdictOf(4, "", 1), nil},
		{5, starting(6), []topo.Rank{1}},
		{6, verdictOf(5, "", 0), nil},
		{6, starting(1), []topo.Rank{1}},
		{6, verdictOf(6, "", 0), []topo.Rank{0}},
	} {
		l.Begin(step.begun)
		if err := rank.ReportVerdict(ctx, step.says); err != nil {
			t.Fatal(err)
		}
		awaitRead(t, kv)
		if got := l.Accused(); !slices.Equal(got, step.want) {
			t.Errorf("epoch %d, after %v: got the accused ranks %v, want %v", step.begun, step.says, got,
				step.want)
		}
	}
	testnet.WantError(t, rank.ReportVerdict(ctx, Verdict{Epoch: 9}), "malformed verdict")
	unheard, err := Listen(store.NewHashStore(store.Limits{}), 1, deaf)
	if err == nil {
		err = unheard.Close()
	}
	if _, waited := unheard.Verdict(ctx); err != nil || !errors.Is(waited, store.ErrClosed) {
		t.Errorf("after Close: got error %v", waited)
	}
}

// The verdict of a job that has only some of the launcher's processes names them as the launcher does.
func TestVerdictOfPart(t *testing.T) {
	kv, dial := served(t)
	ctx := testnet.Context(t)
	l := listen(t, kv, 4, deaf)
	rank := NewOfPart(dial(), []int{3, 0, 2}, 1)
	told := verdictOf(1, "it is silent", 0, 2)
	if err := rank.ReportVerdict(ctx, told); err != nil {
		t.Fatal(err)
	}
	v, err := l.Verdict(ctx)
	if want := []topo.Rank{3, 2}; err != nil || !slices.Equal(v.Ranks, want) ||
		v.Reason != "it is silent (ranks 0 and 2 in the job of hvdrun's ranks 0, 2 and 3)" {
		t.Errorf("got %v, %v, want ranks %v", v, err, want)
	}
	if want := []topo.Rank{0, 2}; !slices.Equal(told.Ranks, want) {
		t.Errorf("the caller's verdict has ranks %v now, want %v", told.Ranks, want)
	}
	if heard, err := rank.HasListener(ctx); heard || err != nil {
		t.Errorf("a launcher listens to stalls of a part: %v, %v", heard, err)
	}
	limited, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	go func() {
		_ = rank.Answer(limited, func(string) []byte {
			t.Error("a part was asked")
			return nil
		})
	}()
	if answers, missing, err := l.Ask(limited, Dump); len(answers) > 0 || len(missing) != 4 {
		t.Errorf("got %v, missing %v, %v", answers, missing, err)
	}
}

// An elastic job gets each verdict, with the rank that has reported it, except those that are taken back.
func TestOnVerdict(t *testing.T) {
	kv, dial := served(t)
	l := listen(t, kv, 2, deaf)
	type heard struct {
		generation uint64
		by         topo.Rank
		ranks      string
	}
	all := make(chan heard, 2)
	l.OnVerdict(func(v Verdict, by topo.Rank) { all <- heard{v.Generation, by, topo.FormatRanks(v.Ranks)} })
	for by := range 2 {
		link, other := NewOf(3, dial(), by), []topo.Rank{topo.Rank(1 - by)}
		for _, over := range []bool{true, false} {
			v := Verdict{Epoch: 1, Ranks: other, Over: over}
			if err := link.ReportVerdict(t.Context(), v); err != nil {
				t.Fatal(err)
			}
		}
		if got, want := <-all, (heard{3, topo.Rank(by), topo.FormatRanks(other)}); got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
}

// TestDoubt checks that the next verdict replaces one that is doubted, and that a verdict about whichever
// process has a rank counts after the restart of the rank too.
func TestDoubt(t *testing.T) {
	kv, dial := served(t)
	ctx := testnet.Context(t)
	l := listen(t, kv, 3, deaf)
	rank := New(dial(), 2)
	l.Restarted(1)
	if err := New(dial(), 1).Introduce(ctx, 4711); err != nil {
		t.Fatal(err)
	}
	var last Verdict
	for i, step := range []struct {
		about topo.Rank
		doubt bool // the verdict before is doubted
		want  topo.Rank
	}{{1, false, 1}, {0, false, 1}, {2, true, 2}, {1, false, 2}, {0, true, 0}} {
		if step.doubt {
			l.Doubt(last)
			if got := l.Accused(); got != nil {
				t.Errorf("step %d: got the accused ranks %v after Doubt", i, got)
			}
		}
		next := make(chan Verdict, 1)
		if step.doubt {
			go func() {
				v, _ := l.Accusation(ctx)
				next <- v
			}()
		}
		if err := rank.ReportVerdict(ctx, Verdict{Epoch: 1, Ranks: []topo.Rank{step.about}}); err != nil {
			t.Fatal(err)
		}
		if step.doubt {
			last = <-next
		} else {
			awaitRead(t, kv)
			last, _ = l.Accusation(ctx)
		}
		want := []topo.Rank{step.want}
		if !slices.Equal(last.Ranks, want) || !slices.Equal(l.Accused(), want) {
			t.Errorf("step %d: got a verdict about %v, want %v", i, last.Ranks, want)
		}
	}
}

// TestSilentRank checks that a verdict does not count which says that a rank is silent, if that rank blames
// others before or after it, and that it counts if the rank only blames itself or is blamed for another
// reason.
func TestSilentRank(t *testing.T) {
	silent, dead := verdictOf(1, "silent", 0), verdictOf(1, "dead", 0)
	silent.Silent = true
	type report struct {
		rank    int
		verdict Verdict
	}
	for _, c := range []struct {
		reports []report
		want    string
	}{
		{[]report{{1, silent}, {0, verdictOf(1, "missing", 2)}}, "missing"},
		{[]report{{0, verdictOf(1, "missing", 2)}, {1, silent}}, "missing"},
		{[]report{{1, silent}, {2, verdictOf(1, "missing", 2)}}, "silent"},
		{[]report{{1, silent}, {0, verdictOf(1, "its own", 0)}}, "silent"},
		{[]report{{1, silent}, {0, verdictOf(0, "earlier", 2)}}, "silent"},
		{[]report{{1, dead}, {0, verdictOf(1, "missing", 2)}}, "dead"},
	} {
		kv, dial := served(t)
		l := listen(t, kv, 3, deaf)
		for _, r := range c.reports {
			if err := New(dial(), r.rank).ReportVerdict(testnet.Context(t), r.verdict); err != nil {
				t.Fatal(err)
			}
		}
		if err := l.Close(); err != nil { // reads all reports
			t.Fatal(err)
		}
		if v, err := l.Verdict(testnet.Context(t)); err != nil || v.Reason != c.want {
			t.Errorf("%v: got %v, %v", c, v, err)
		}
	}
}

// TestAskSome checks that a question waits only for the answers of the given ranks.
func TestAskSome(t *testing.T) {
	kv, dial := served(t)
	ctx := testnet.Context(t)
	l := listen(t, kv, 3, deaf)
	link := New(dial(), 1)
	answering, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- link.Answer(answering, func(string) []byte { return []byte("here") }) }()
	if _, missing, err := l.Ask(ctx, Node, 1); err != nil || len(missing) > 0 {
		t.Errorf("got the missing ranks %v, and error %v", missing, err)
	}
	limited, cancelLimited := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancelLimited()
	if _, missing, err := l.Ask(limited, Node, 1, 2); err != nil || !slices.Equal(missing, []int{2}) {
		t.Errorf("got the missing ranks %v, and error %v", missing, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestVerdictAfterRestart checks that after the restart of a rank only verdicts about its new process count,
// that verdicts about other ranks count as before, and that the rank that has reported a verdict, and no
// other one, can take it back. Then the first verdict of another rank counts.
func TestVerdictAfterRestart(t *testing.T) {
	kv, dial := served(t)
	ctx := testnet.Context(t)
	l := listen(t, kv, 3, deaf)
	rank, client := New(dial(), 2), dial()
	about := func(r topo.Rank, process uint64) Verdict {
		return Verdict{Epoch: 1, Ranks: []topo.Rank{r}, Process: process}
	}
	introduce := func(process uint64) func() error {
		return func() error { return New(client, 1).Introduce(ctx, process) }
	}
	report := func(from Link, v Verdict) func() error {
		return func() error { return from.ReportVerdict(ctx, v) }
	}
	say := func(v Verdict) func() error { return report(rank, v) }
	takeBack := func(from Link, v Verdict) func() error {
		v.Over = true
		return report(from, v)
	}
	restart := func() error { l.Restarted(1); return nil }
	for i, step := range []struct {
		do   func() error
		want uint64 // the process in the verdict that counts; 0 if there is none
	}{
		{introduce(10), 0},
		{say(about(1, 10)), 10},
		{restart, 0},
		{say(about(1, 10)), 0},
		{introduce(11), 0},
		{say(about(1, 10)), 0},
		{say(about(1, 11)), 11},
		{say(about(0, 5)), 11},
		{restart, 0},
		{say(about(1, 11)), 0},
		{introduce(12), 0},
		{say(about(0, 5)), 5},
		{restart, 5},
		{say(about(1, 12)), 5},
		{takeBack(New(client, 1), about(0, 5)), 5}, // by a rank that has not reported it
		{takeBack(rank, about(1, 12)), 5},
		{takeBack(rank, about(0, 5)), 0},
		{say(about(0, 6)), 6},
		{introduce(13), 6},
		{report(New(client, 0), about(1, 13)), 6},
		{report(New(client, 1), about(2, 7)), 6},
		{takeBack(rank, about(0, 6)), 13},
		{restart, 7},
	} {
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		awaitRead(t, kv)
		limited, cancel := context.WithCancel(ctx)
		cancel()
		v, err := l.Verdict(limited)
		if v.Process != step.want || step.want == 0 && !errors.Is(err, context.Canceled) {
			t.Errorf("step %d: got %v, %v, want one about process %d", i, v, err, step.want)
		}
	}
}

// TestStoreGoesAway closes the store. All waiting and later calls must return ErrClosed.
func TestStoreGoesAway(t *testing.T) {
	kv := store.NewHashStore(store.Limits{})
	l, err := Listen(kv, 1, deaf)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := New(kv, 0).Answer(testnet.Context(t), func(string) []byte { return nil }); !errors.Is(err,
			store.ErrClosed) {
			t.Errorf("answering: got %v", err)
		}
	})
	testnet.Eventually(t, "all wait", func() bool { return kv.Waits() == 3 })
	kv.Close()
	wg.Wait()
	_, missing, err := l.Ask(testnet.Context(t), Dump)
	if !errors.Is(err, store.ErrClosed) || !slices.Equal(missing, []int{0}) {
		t.Errorf("asking: got %v, %v", missing, err)
	}
	if _, err := l.Verdict(testnet.Context(t)); !errors.Is(err, store.ErrClosed) {
		t.Errorf("waiting for a verdict: got %v", err)
	}
	if err := l.Close(); !errors.Is(err, store.ErrClosed) {
		t.Errorf("closing: got %v", err)
	}
	if _, err := Listen(kv, 1, deaf); !errors.Is(err, store.ErrClosed) {
		t.Errorf("listening: got %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte("{\"rank\":1,\"question\":2,\"what\":\"dump\",\"has\":true}\nbody"))
	f.Add([]byte("{\"epoch\":1,\"ranks\":[2],\"reason\":\"x\"}"))
	f.Add([]byte("[{\"id\":1,\"what\":\"dump\"}]"))
	f.Add([]byte("{\"Generation\":1,\"Members\":[{\"Host\":\"h\",\"Index\":1,\"Number\":2}]}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if m, err := decodeMessage(b); err == nil {
			text, err := m.encode()
			if err != nil {
				return // the name is too long once it is escaped
			}
			again, err := decodeMessage(text)
			if err != nil || again.Rank != m.Rank || again.Question != m.Question ||
				!bytes.Equal(again.body, m.body) {
				t.Errorf("%q was read as %v and again as %v, %v", b, m, again, err)
			}
		}
		if v, err := decodeVerdict(b); err == nil && len(v.Ranks) == 0 {
			t.Errorf("%q was read as %v", b, v)
		}
		decodeQuestions(b)
		if r, err := decodeRoster(b); err == nil && len(r.Topology()) != len(r.Members) {
			t.Errorf("%q was read as %v", b, r)
		}
		decodeEvent(b)
	})
}
