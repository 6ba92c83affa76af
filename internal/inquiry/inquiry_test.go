package inquiry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/secret"
	"github.com/gohvd/gohvd/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// served is a store and who connects to it.
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

// answers has ranks 0 to n-1 answer until the test ends, or the returned function was called.
func answers(t *testing.T, n int, dial func() store.Store, handle func(rank int, what string) []byte) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(testnet.Context(t))
	var wg sync.WaitGroup
	for r := range n {
		kv := dial()
		wg.Go(func() {
			if err := Answer(ctx, kv, r, func(what string) []byte { return handle(r, what) }); err != nil {
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

// wantTidy wants nothing in the store but what stays there: a number of keys that does not grow with the questions.
func wantTidy(t *testing.T, kv *store.HashStore, questions int64) {
	t.Helper()
	ctx := testnet.Context(t)
	testnet.Eventually(t, "queues are empty", func() bool {
		for id := range questions {
			if n, err := kv.QueueLen(ctx, answersTo(id+1)); n != 0 || err != nil {
				return false
			}
		}
		return true
	})
	if open, err := kv.Get(ctx, keyOpen); string(open) != "[]" || err != nil {
		t.Errorf("got open questions %s, error %v, want none", open, err)
	}
}

func TestAskManyRanks(t *testing.T) {
	const n = 64
	kv, dial := served(t)
	answers(t, n, dial, echo)
	ctx := testnet.Context(t)
	for _, asker := range []store.Store{kv, dial()} {
		for _, what := range []string{Dump, Metrics} {
			begun := time.Now()
			got, missing, err := Ask(ctx, asker, what, n)
			wantEchoes(t, what, n, got, missing, err)
			t.Logf("%d ranks have answered in %v", n, time.Since(begun))
		}
	}
	wantTidy(t, kv, 4)
}

// Several askers at once, of one process and of others: each gets the answers to its own question.
func TestAskersAtOnce(t *testing.T) {
	const n, askers, times = 8, 6, 5
	kv, dial := served(t)
	answers(t, n, dial, echo)
	ctx := testnet.Context(t)
	var wg sync.WaitGroup
	for a := range askers {
		asker := store.Store(kv)
		if a%2 > 0 {
			asker = dial()
		}
		wg.Go(func() {
			for i := range times {
				what := fmt.Sprintf("what %d.%d", a, i)
				got, missing, err := Ask(ctx, asker, what, n)
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
	wantTidy(t, kv, askers*times)
	keys, err := kv.NumKeys(ctx)
	if err != nil || keys > n+2 {
		t.Errorf("got %d keys, error %v, want %d at most: the list, the last number and one of each rank", keys, err, n+2)
	}
	if text, err := kv.Get(ctx, keyAnswered+"0"); err != nil || len(text) > 5*askers {
		t.Errorf("rank 0 remembers %s, error %v, want what may still be open", text, err)
	}
}

// A rank that hangs is missing when the time is over; its late answer harms nobody and does not stay.
func TestLateAnswers(t *testing.T) {
	kv, dial := served(t)
	asked, release := make(chan string), make(chan struct{})
	end := answers(t, 3, dial, func(rank int, what string) []byte {
		if rank == 1 {
			asked <- what
			<-release
		}
		return echo(rank, what)
	})
	ctx, cancel := context.WithCancel(testnet.Context(t))
	var (
		got     map[int][]byte
		missing []int
		err     error
		wg      sync.WaitGroup
	)
	wg.Go(func() { got, missing, err = Ask(ctx, kv, Dump, 4) })
	<-asked
	testnet.Eventually(t, "the others have answered", func() bool {
		n, err := kv.QueueLen(testnet.Context(t), answersTo(1))
		there, _ := kv.Check(testnet.Context(t), keyAnswered+"0", keyAnswered+"2")
		return err == nil && n == 0 && there
	})
	cancel()
	wg.Wait()
	// Whether those who have the question had answered before the end is not said; who has none had not.
	if err != nil || !slices.Contains(missing, 1) || !slices.Contains(missing, 3) || len(got)+len(missing) != 4 {
		t.Fatalf("got %d answers, %v missing, error %v, want 1 and 3 missing", len(got), missing, err)
	}
	close(release)
	wg.Go(func() { <-asked })
	got, missing, err = Ask(testnet.Context(t), kv, Metrics, 3)
	wantEchoes(t, Metrics, 3, got, missing, err)
	wg.Wait()
	end()
	wantTidy(t, kv, 2)
	testnet.Eventually(t, "nobody waits for a key", func() bool { return kv.Waits() == 0 })
}

// Time is over in exactly the time given, whatever hangs.
func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := store.NewHashStore(store.Limits{})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for r := range 3 {
			wg.Go(func() {
				Answer(ctx, kv, r, func(string) []byte {
					if r == 2 {
						<-ctx.Done()
					}
					return []byte{byte(r)}
				})
			})
		}
		limited, stop := context.WithTimeout(ctx, 1500*time.Millisecond)
		defer stop()
		begun := time.Now()
		got, missing, err := Ask(limited, kv, Dump, 4)
		if err != nil || !slices.Equal(missing, []int{2, 3}) || !slices.Equal(slices.Sorted(maps.Keys(got)), []int{0, 1}) {
			t.Errorf("got answers of %v, %v missing, error %v", slices.Sorted(maps.Keys(got)), missing, err)
		}
		if took := time.Since(begun); took != 1500*time.Millisecond {
			t.Errorf("it took %v, want 1.5 s", took)
		}
		begun = time.Now()
		if _, missing, err = Ask(ctx, kv, Dump, 2); err != nil || len(missing) > 0 || time.Since(begun) != 0 {
			t.Errorf("got %v missing, error %v after %v, want all at once", missing, err, time.Since(begun))
		}
		cancel()
		wg.Wait()
	})
}

// A rank that has nothing to say, or too much, is missing, and nobody waits for it.
func TestNothingToSay(t *testing.T) {
	kv, dial := served(t)
	answers(t, 4, dial, func(rank int, what string) []byte {
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
	got, missing, err := Ask(testnet.Context(t), kv, Dump, 4)
	if err != nil || !slices.Equal(missing, []int{1, 2}) || len(got[0]) != MaxBodyBytes || got[3] == nil || len(got[3]) != 0 {
		t.Errorf("got %d answers, %v missing, error %v, want all of 0, nothing of 3, and 1 and 2 missing", len(got), missing, err)
	}
}

// A rank whose answers find no room in the store says so, and goes on.
func TestFullStore(t *testing.T) {
	kv := store.NewHashStore(store.Limits{Bytes: 64 << 10})
	t.Cleanup(func() { kv.Close() })
	answers(t, 2, func() store.Store { return kv }, func(rank int, what string) []byte {
		if what == Metrics {
			return echo(rank, what)
		}
		return make([]byte, 63<<10+rank*100<<10)
	})
	ctx := testnet.Context(t)
	got, missing, err := Ask(ctx, kv, Dump, 2)
	if err != nil || !slices.Equal(missing, []int{1}) || len(got[0]) != 63<<10 {
		t.Errorf("got %d answers, %v missing, error %v, want 1 missing", len(got), missing, err)
	}
	got, missing, err = Ask(ctx, kv, Metrics, 2)
	wantEchoes(t, Metrics, 2, got, missing, err)
}

// Where there is room for nothing at all, a rank says nothing, and answers when there is.
func TestNoRoomAtAll(t *testing.T) {
	kv := store.NewHashStore(store.Limits{Bytes: 64 << 10})
	t.Cleanup(func() { kv.Close() })
	ctx := testnet.Context(t)
	answers(t, 1, func() store.Store { return kv }, echo)
	id, err := kv.Add(ctx, keyLast, 1)
	if err != nil {
		t.Fatal(err)
	}
	list := fmt.Appendf(nil, `[{"id":%d,"what":"dump"}]`, id)
	if err := kv.Set(ctx, keyOpen, make([]byte, len(list))); err != nil {
		t.Fatal(err)
	}
	size := 64 << 10
	for ; ; size-- {
		err := kv.Set(ctx, "filler", make([]byte, size))
		if err == nil {
			break
		}
		if !errors.Is(err, store.ErrLimit) {
			t.Fatal(err)
		}
	}
	if err := kv.Set(ctx, keyOpen, list); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, "rank 0 waits for the next question", func() bool {
		return kv.Waits() == 1
	})
	if n, err := kv.QueueLen(ctx, answersTo(id)); n != 0 || err != nil {
		t.Errorf("got %d answers, error %v, want none", n, err)
	}
	if _, err := kv.Delete(ctx, "filler"); err != nil {
		t.Fatal(err)
	}
	got, missing, err := Ask(ctx, kv, Metrics, 1)
	wantEchoes(t, Metrics, 1, got, missing, err)
}

// Who comes again does not answer again, and what comes twice, or of a rank that is not asked, does not count.
func TestRepeatedAnswers(t *testing.T) {
	kv, dial := served(t)
	ctx, cancel := context.WithCancel(testnet.Context(t))
	var (
		wg      sync.WaitGroup
		missing []int
		got     map[int][]byte
		err     error
	)
	wg.Go(func() { got, missing, err = Ask(ctx, kv, Dump, 3) })
	var calls atomic.Int32
	for range 3 {
		end := answers(t, 1, dial, func(rank int, what string) []byte {
			calls.Add(1)
			return echo(rank, what)
		})
		testnet.Eventually(t, "rank 0 has answered", func() bool {
			// Waits is about the key of questions and the asker's queue.
			n, err := kv.QueueLen(ctx, answersTo(1))
			return calls.Load() > 0 && n == 0 && err == nil && kv.Waits() == 2
		})
		end()
	}
	if calls.Load() != 1 {
		t.Errorf("rank 0 was asked %d times in three epochs, want once", calls.Load())
	}
	for _, text := range [][]byte{
		encodeAnswer(0, []byte("again")), encodeAnswer(7, []byte("stranger")), {}, {2, 1}, {1, 0xff}, {1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1},
		encodeAnswer(2, []byte("2")), encodeAnswer(2, nil),
	} {
		if err := kv.Push(ctx, answersTo(1), text); err != nil {
			t.Fatal(err)
		}
	}
	testnet.Eventually(t, "all is heard", func() bool {
		n, err := kv.QueueLen(ctx, answersTo(1))
		return n == 0 && err == nil && kv.Waits() == 1
	})
	cancel()
	wg.Wait()
	if err != nil || !slices.Equal(missing, []int{1}) || string(got[0]) != "dump of 0" || string(got[2]) != "2" || len(got) != 2 {
		t.Errorf("got %v, %v missing, error %v", got, missing, err)
	}
}

// Questions of askers that died are pushed off the list, and what their ranks answered is removed.
func TestAbandonedQuestions(t *testing.T) {
	const abandoned = maxOpen + 5
	kv := store.NewHashStore(store.Limits{})
	t.Cleanup(func() { kv.Close() })
	ctx := testnet.Context(t)
	answers(t, 2, func() store.Store { return kv }, echo)
	for range abandoned {
		id, err := kv.Add(ctx, keyLast, 1)
		if err != nil {
			t.Fatal(err)
		}
		err = change(ctx, kv, func(open []question) []question {
			return append(open[max(len(open)-maxOpen+1, 0):], question{id, "abandoned"})
		})
		if err != nil {
			t.Fatal(err)
		}
		testnet.Eventually(t, "both answer", func() bool {
			n, err := kv.QueueLen(ctx, answersTo(id))
			return n == 2 && err == nil
		})
	}
	for range maxOpen {
		got, missing, err := Ask(ctx, kv, Dump, 2)
		wantEchoes(t, Dump, 2, got, missing, err)
	}
	open, err := decodeOpen(mustPeek(t, kv, keyOpen))
	if err != nil || len(open) != maxOpen-1 {
		t.Errorf("got %d questions on the list, error %v, want %d", len(open), err, maxOpen-1)
	}
	// The first of the list was pushed off by the first question of this test's.
	if n, err := kv.QueueLen(ctx, answersTo(abandoned-maxOpen+1)); n != 0 || err != nil {
		t.Errorf("%d answers to a question that was pushed off, error %v", n, err)
	}
}

func mustPeek(t *testing.T, kv store.Store, key string) []byte {
	t.Helper()
	text, err := peek(testnet.Context(t), kv, key)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// What is no list is replaced by the next question.
func TestMalformedList(t *testing.T) {
	for _, text := range []string{"x", "", `{"id":1}`, "[" + strings.Repeat(`{"id":1},`, maxOpen) + `{"id":2}]`, strings.Repeat(" ", 1<<20)} {
		kv := store.NewHashStore(store.Limits{})
		ctx := testnet.Context(t)
		if err := kv.Set(ctx, keyOpen, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if err := kv.Set(ctx, keyAnswered+"0", []byte(text)); err != nil {
			t.Fatal(err)
		}
		if _, err := decodeOpen([]byte(text)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%.20q: got error %v, want ErrMalformed", text, err)
		}
		end := answers(t, 2, func() store.Store { return kv }, echo)
		got, missing, err := Ask(ctx, kv, Dump, 2)
		wantEchoes(t, Dump, 2, got, missing, err)
		end()
		kv.Close()
	}
}

func TestStoreGoesAway(t *testing.T) {
	kv, dial := served(t)
	client := dial()
	failed := make(chan error, 3)
	ctx := testnet.Context(t)
	var wg sync.WaitGroup
	wg.Go(func() { failed <- Answer(ctx, client, 5, func(string) []byte { return nil }) })
	wg.Go(func() { failed <- Watch(ctx, client, func(int, string, []byte) {}) })
	wg.Go(func() {
		_, missing, err := Ask(ctx, client, Dump, 2)
		if len(missing) != 2 {
			t.Errorf("got %v missing, want both", missing)
		}
		failed <- err
	})
	testnet.Eventually(t, "all wait", func() bool { return kv.Waits() == 3 })
	client.Close()
	var texts []string
	for range 3 {
		err := <-failed
		if !errors.Is(err, store.ErrClosed) {
			t.Errorf("got %v, want ErrClosed", err)
		}
		texts = append(texts, fmt.Sprint(err))
	}
	wg.Wait()
	all := strings.Join(texts, "\n")
	for _, want := range []string{"inquiry: rank 5: answer: ", "inquiry: watch: ", `inquiry: ask ranks for "dump": `} {
		if !strings.Contains(all, want) {
			t.Errorf("got %s, want %q", all, want)
		}
	}
}

func TestReports(t *testing.T) {
	kv, dial := served(t)
	ctx, cancel := context.WithCancel(testnet.Context(t))
	defer cancel()
	client := dial()
	if err := Report(ctx, client, 0, Stall, []byte("x")); !errors.Is(err, ErrNobody) {
		t.Errorf("got %v, want ErrNobody", err)
	}
	if n, err := kv.QueueLen(ctx, keyReports); n != 0 || err != nil {
		t.Errorf("%d reports are there, error %v, want none", n, err)
	}
	var (
		wg    sync.WaitGroup
		heard = make(chan string)
		first = make(chan struct{})
	)
	wg.Go(func() {
		defer close(heard)
		err := Watch(ctx, kv, func(rank int, what string, body []byte) {
			heard <- strconv.Itoa(rank) + " " + what + " " + string(body[:min(len(body), 10)]) + " " + strconv.Itoa(len(body))
			<-first
		})
		if err != nil {
			t.Error(err)
		}
	})
	testnet.Eventually(t, "somebody watches", func() bool {
		watched, err := IsWatched(ctx, kv)
		return watched && err == nil
	})
	if err := Report(ctx, client, 3, Stall, []byte("grad/7")); err != nil {
		t.Fatal(err)
	}
	if got := <-heard; got != "3 stall grad/7 6" {
		t.Errorf("got %q", got)
	}
	// What comes while the watcher is busy, or ends, is handed on all the same; what is malformed is not.
	for _, text := range [][]byte{{}, {0xff}, {0}, {0, 1}, {0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 'x'}} {
		if err := kv.Push(ctx, keyReports, text); err != nil {
			t.Fatal(err)
		}
	}
	if err := Report(ctx, client, 4095, Failure, make([]byte, MaxBodyBytes)); err != nil {
		t.Fatal(err)
	}
	if err := Report(ctx, client, 1, Failure, nil); err != nil {
		t.Fatal(err)
	}
	cancel()
	close(first)
	var got []string
	for text := range heard {
		got = append(got, text)
	}
	wg.Wait()
	want := []string{"4095 failure " + string(make([]byte, 10)) + " " + strconv.Itoa(MaxBodyBytes), "1 failure  0"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestBounds(t *testing.T) {
	kv := store.NewHashStore(store.Limits{})
	t.Cleanup(func() { kv.Close() })
	ctx := testnet.Context(t)
	for _, what := range []string{"", strings.Repeat("x", MaxWhatBytes+1)} {
		_, missing, err := Ask(ctx, kv, what, 2)
		testnet.WantError(t, err, "want 1 to 128")
		if len(missing) != 2 {
			t.Errorf("got %v missing, want both", missing)
		}
		testnet.WantError(t, Report(ctx, kv, 0, what, nil), "want 1 to 128")
	}
	testnet.WantError(t, Report(ctx, kv, 2, Stall, make([]byte, MaxBodyBytes+1)), "rank 2", strconv.Itoa(MaxBodyBytes+1), strconv.Itoa(MaxBodyBytes))
	if err := kv.Set(ctx, keyWatched, nil); err != nil {
		t.Fatal(err)
	}
	var err error
	n := 0
	for ; err == nil && n <= maxReports; n++ {
		err = Report(ctx, kv, 0, Stall, nil)
	}
	testnet.WantError(t, err, "16384 reports")
	if n != maxReports+1 {
		t.Errorf("%d reports were taken, want %d", n-1, maxReports)
	}
	// Nobody is asked.
	if got, missing, err := Ask(ctx, kv, strings.Repeat("x", MaxWhatBytes), 0); len(got) != 0 || len(missing) != 0 || err != nil {
		t.Errorf("got %v, %v missing, error %v", got, missing, err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(encodeAnswer(3, []byte("body")))
	f.Add(encodeAnswer(0, nil))
	f.Add(encodeReport(3, Stall, []byte("body")))
	f.Add([]byte(`[{"id":1,"what":"dump"}]`))
	f.Fuzz(func(t *testing.T, text []byte) {
		if rank, body, has, err := decodeAnswer(text); err == nil && has {
			r, b, h, err := decodeAnswer(encodeAnswer(rank, body))
			if r != rank || !bytes.Equal(b, body) || !h || err != nil {
				t.Errorf("answer: got %d, %q, %v, error %v after encoding again", r, b, h, err)
			}
		}
		if rank, what, body, err := decodeReport(text); err == nil {
			r, w, b, err := decodeReport(encodeReport(rank, what, body))
			if r != rank || w != what || !bytes.Equal(b, body) || err != nil {
				t.Errorf("report: got %d, %q, %q, error %v after encoding again", r, w, b, err)
			}
		}
		if open, err := decodeOpen(text); err == nil && len(open) > maxOpen {
			t.Errorf("got %d questions", len(open))
		}
	})
}
