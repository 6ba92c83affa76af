package bootstrap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/frame"
	"github.com/gohvd/gohvd/internal/serve"
	"github.com/gohvd/gohvd/internal/testnet"
)

func TestJoin(t *testing.T) { overBoth(t, testJoin) }

func testJoin(t *testing.T, encrypt bool) {
	for _, size := range []int{1, 2, 3, 7, 8, 64} {
		for _, k := range []int{1, 2, 3, 7} {
			if k > size {
				continue
			}
			t.Run(fmt.Sprintf("ranks=%d/roots=%d", size, k), func(t *testing.T) {
				ctx := testnet.Context(t)
				ids, roots := openRoots(t, ctx, k, Config{Encrypt: encrypt}, defaultLimits)
				cfgs := configs(size)
				results := joinAll(t, ctx, ids, cfgs...)
				joined(t, results, cfgs)
				for _, r := range roots {
					if err := r.Wait(ctx); err != nil {
						t.Error(err)
					}
				}
				for round := range 3 {
					gatherAll(t, ctx, results, round)
				}
				for rank, r := range results {
					// report, done, n-1 pieces and n-1 more for each gathering, hello and welcome; and a report and done more
					// for the first of a block.
					want := 2 + 4*(size-1) + 2
					if size == 1 {
						want = 2
					}
					if k > 1 && blockOf(rootOf(rank, k, size), k, size).first == rank {
						want += 2
					}
					if r.sent != want {
						t.Errorf("rank %d has sent %d messages, want %d", rank, r.sent, want)
					}
					if err := r.Close(); err != nil {
						t.Errorf("closing the ring of rank %d: %v", rank, err)
					}
					if err := r.Close(); err != nil {
						t.Errorf("closing the ring of rank %d again: %v", rank, err)
					}
				}
			})
		}
	}
}

// gatherAll has all gather pieces of all sizes, and checks them.
func gatherAll(t *testing.T, ctx context.Context, rings []result, round int) {
	t.Helper()
	piece := func(rank int) []byte {
		return bytes.Repeat([]byte{byte(rank + round)}, []int{0, 1, MaxInfoBytes, 100}[(rank+round)%4])
	}
	done := make(chan error, len(rings))
	for rank, r := range rings {
		go func() {
			all, err := r.Allgather(ctx, piece(rank))
			for from, got := range all {
				if !bytes.Equal(got, piece(from)) {
					err = fmt.Errorf("rank %d has %d bytes of rank %d, want %d", rank, len(got), from, len(piece(from)))
				}
			}
			done <- err
		}()
	}
	for range rings {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestNothingToWarnOf(t *testing.T) { overBoth(t, testNothingToWarnOf) }

func testNothingToWarnOf(t *testing.T, encrypt bool) {
	ctx := testnet.Context(t)
	log, logs := testnet.Logs()
	ids, roots := openRoots(t, ctx, 2, Config{Log: log, Encrypt: encrypt}, defaultLimits)
	cfgs := configs(5)
	for i := range cfgs {
		cfgs[i].Log = log
	}
	results := joinAll(t, ctx, ids, cfgs...)
	joined(t, results, cfgs)
	for i, r := range results {
		if err := r.Close(); err != nil {
			t.Errorf("rank %d: %v", i, err)
		}
	}
	for _, r := range roots {
		r.Close()
	}
	if n := logs.FilterLevelExact(zap.DebugLevel).Len(); n == 0 || n != logs.Len() {
		t.Errorf("%d of %d lines are for debugging: %v", n, logs.Len(), logs.All())
	}
	keepsKeys(t, ids, logs)
}

func TestManyRanks(t *testing.T) {
	ctx := testnet.Context(t)
	ids, _ := openRoots(t, ctx, 1, Config{}, defaultLimits)
	cfgs := configs(64)
	joined(t, joinAll(t, ctx, ids, cfgs...), cfgs)
}

func TestContradictions(t *testing.T) {
	with := func(change func(*Config)) Config {
		cfg := configOf(2, 3)
		change(&cfg)
		return cfg
	}
	for _, c := range []struct {
		name   string
		third  Config
		reason Reason
		parts  []string
	}{
		{"size", with(func(c *Config) { c.Size = 4 }), SizeMismatch, []string{
			`rank 2 (pid 1002 on host "host1") has size 4, want 3 as rank 0 (pid 1000 on host "host0") has`}},
		{"duplicate", configOf(1, 3), DuplicateRank, []string{"rank 1 is there twice", `pid 1001 on host "host0"`}},
		{"too great", configOf(3, 3), RankOutOfRange, []string{`rank 3 (pid 1003 on host "host1") is out of range, want 0 to 2`}},
		{"negative", with(func(c *Config) { c.Rank = -1 }), RankOutOfRange, []string{"rank -1 (pid 1002", "want 0 to 2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx := testnet.Context(t)
			log, logs := testnet.Logs()
			ids, roots := openRoots(t, ctx, 1, Config{Log: log}, defaultLimits)
			running := []<-chan result{start(t, ctx, ids, configOf(0, 3))}
			reported(t, roots[0], 1)
			running = append(running, start(t, ctx, ids, configOf(1, 3)))
			reported(t, roots[0], 2)
			running = append(running, start(t, ctx, ids, c.third))
			results := collectAll(running)
			// Also to those who come afterwards.
			results = append(results, joinAll(t, ctx, ids, configOf(2, 3))...)
			results = append(results, result{err: roots[0].Wait(ctx)})
			refused(t, results, c.reason, c.parts...)
			keepsKeys(t, ids, logs, results[0].err)
		})
	}
}

func TestListsOfIDsDiffer(t *testing.T) {
	ctx := testnet.Context(t)
	ids, roots := openRoots(t, ctx, 3, Config{}, defaultLimits)
	first := start(t, ctx, ids[:2], configOf(0, 3))
	reported(t, roots[0], 1)
	results := append(joinAll(t, ctx, ids, configOf(0, 3)), <-first)
	refused(t, results, IDMismatch, "rank 0", "has 3 ids", "want the list of", ": 2, number 0")

	ids, roots = openRoots(t, ctx, 2, Config{}, defaultLimits)
	first = start(t, ctx, ids, configOf(1, 3))
	reported(t, roots[0], 1)
	results = append(joinAll(t, ctx, []ID{ids[1], ids[0]}, configOf(2, 3)), <-first)
	refused(t, results, IDMismatch, "rank 2", "has 2 ids, this root's being number 1, want the list of rank 1", ": 2, number 0")
}

func TestRankOfAnotherRoot(t *testing.T) {
	ctx := testnet.Context(t)
	ids, _ := openRoots(t, ctx, 3, Config{}, defaultLimits)
	conn := bareRank(t, ids, 1, configOf(2, 7))
	if why := readFailure(t, conn); why.Reason != RankOutOfRange {
		t.Errorf("got %v", why)
	} else {
		testnet.WantError(t, why, "rank 2", "out of range of root 1 of 3, want 3 to 4 or 5")
	}
}

func TestLatecomer(t *testing.T) { overBoth(t, testLatecomer) }

func testLatecomer(t *testing.T, encrypt bool) {
	ctx := testnet.Context(t)
	ids, roots := openRoots(t, ctx, 1, Config{Encrypt: encrypt}, defaultLimits)
	running := []<-chan result{start(t, ctx, ids, configOf(0, 3)), start(t, ctx, ids, configOf(1, 3))}
	reported(t, roots[0], 2)
	// All have reported, the ring is not there yet.
	bare := bareRank(t, ids, 0, configOf(2, 3))
	reported(t, roots[0], 3)
	refused(t, joinAll(t, ctx, ids, configOf(2, 3)), Late, "rank 2 (pid 1002", "came late: all 3 ranks of the root at "+roots[0].Addr())
	bare.Close()
	refused(t, collectAll(running), RankLost, `rank 2 (pid 1002 on host "host1") went away before all ranks had met`)

	// And now with a job that is complete.
	ids, roots = openRoots(t, ctx, 1, Config{Encrypt: encrypt}, defaultLimits)
	cfgs := configs(3)
	results := joinAll(t, ctx, ids, cfgs...)
	refused(t, joinAll(t, ctx, ids, configOf(1, 3)), Late, "rank 1 (pid 1001", "came late")
	refused(t, joinAll(t, ctx, ids, configOf(9, 20)), Late, "rank 9 (pid 1009", "came late")
	joined(t, results, cfgs)
	gatherAll(t, ctx, results, 0)
	if err := roots[0].Wait(ctx); err != nil {
		t.Error(err)
	}
}

func TestStrangers(t *testing.T) { overBoth(t, testStrangers) }

func testStrangers(t *testing.T, encrypt bool) {
	ctx := testnet.Context(t)
	log, logs := testnet.Logs()
	ids, roots := openRoots(t, ctx, 1, Config{Log: log, Encrypt: encrypt}, defaultLimits)
	addr := roots[0].Addr()

	wrong := ids[0]
	wrong[idKey] ^= 1
	wrong.seal()
	_, err := Join(ctx, []ID{wrong}, configOf(0, 2))
	testnet.WantError(t, err, "join as rank 0 of 2", "reaching the root at "+addr, "another secret")

	first := start(t, ctx, ids, configOf(0, 2))
	reported(t, roots[0], 1)
	for name, garbage := range map[string][]byte{
		"http":   []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
		"report": encodeReport(report{peer: peer{rank: 1}, size: 2, roots: 1}),
		"hello":  dial.Greeting(rootMagic, protocolVersion),
		"zeros":  make([]byte, 4096),
	} {
		conn := testnet.RawDial(t, addr, garbage)
		if n, err := readToEnd(conn); err != nil && !isReset(err) {
			t.Errorf("%s: read %d bytes, %v", name, n, err)
		}
	}
	// One that has the key and then says what is no report, and one with another version.
	m, err := ids[0].open()
	if err != nil {
		t.Fatal(err)
	}
	knower, err := dial.Greet(ctx, addr, m.key, rootMagic, protocolVersion)
	if err != nil {
		t.Fatal(err)
	}
	defer knower.Close()
	if _, err := knower.Write([]byte{0x10, 0, 0, 0}); err != nil {
		t.Fatal(err)
	}
	if n, err := readToEnd(knower); n != 0 || err != nil && !isReset(err) {
		t.Errorf("read %d bytes, %v", n, err)
	}
	if _, err := dial.Greet(ctx, addr, m.key, rootMagic, protocolVersion+1); err == nil {
		t.Error("another version was let in")
	}
	testnet.RawDial(t, addr).Close()
	refusal := "gave no proof"
	if encrypt {
		refusal = "bad certificate"
	}
	for _, want := range []string{refusal, "it began with \"GET \"", "frame of 268435456 bytes, want at most", "peer speaks version 2"} {
		testnet.Eventually(t, want, func() bool { return testnet.Logged(logs, "root closed a connection", want) })
	}
	// None of them has disturbed the job.
	cfgs := configs(2)
	second := joinAll(t, ctx, ids, cfgs[1])[0]
	joined(t, []result{<-first, second}, cfgs)
	keepsKeys(t, ids, logs)
}

func readToEnd(conn net.Conn) (n int, err error) {
	b := make([]byte, 4096)
	for {
		m, err := conn.Read(b)
		if n += m; err != nil {
			if err.Error() == "EOF" {
				err = nil
			}
			return n, err
		}
	}
}

func isReset(err error) bool { return err != nil && dial.MayRecover(err) && !isTimeout(err) }

func isTimeout(err error) bool {
	ne, ok := errors.AsType[net.Error](err)
	return ok && ne.Timeout()
}

func TestHalfOpenConnections(t *testing.T) { overBoth(t, testHalfOpenConnections) }

func testHalfOpenConnections(t *testing.T, encrypt bool) {
	ctx := testnet.Context(t)
	log, logs := testnet.Logs()
	l := defaultLimits
	l.doorway = 4
	l.proof = time.Hour // to wait for the squatters' would take too long
	ids, roots := openRoots(t, ctx, 1, Config{Log: log, Encrypt: encrypt}, l)
	const squatters = 20
	for range squatters {
		testnet.RawDial(t, roots[0].Addr())
	}
	testnet.Eventually(t, "all but those for whom there is room are thrown out", func() bool {
		return logs.FilterField(zap.Error(serve.ErrCrowded)).Len() == squatters-l.doorway
	})
	cfgs := configs(2)
	joined(t, joinAll(t, ctx, ids, cfgs...), cfgs)
}

func TestSlowProof(t *testing.T) { overBoth(t, testSlowProof) }

func testSlowProof(t *testing.T, encrypt bool) {
	ctx := testnet.Context(t)
	l := defaultLimits
	l.proof = 20 * time.Millisecond
	_, roots := openRoots(t, ctx, 1, Config{Encrypt: encrypt}, l)
	conn := testnet.RawDial(t, roots[0].Addr(), []byte("GHVA"))
	if n, err := readToEnd(conn); n != 0 || isTimeout(err) {
		t.Errorf("read %d bytes, %v, want to be closed", n, err)
	}
}

func TestDeathBeforeReporting(t *testing.T) { overBoth(t, testDeathBeforeReporting) }

func testDeathBeforeReporting(t *testing.T, encrypt bool) {
	ctx := testnet.Context(t)
	ids, roots := openRoots(t, ctx, 1, Config{Encrypt: encrypt}, defaultLimits)
	first := start(t, ctx, ids, configOf(0, 2))
	reported(t, roots[0], 1)
	m, err := ids[0].open()
	if err != nil {
		t.Fatal(err)
	}
	conn, err := dial.Greet(ctx, m.addr, m.key, rootMagic, protocolVersion)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	// Nobody knew that it was there: another process may be its rank.
	cfgs := configs(2)
	second := joinAll(t, ctx, ids, cfgs[1])[0]
	joined(t, []result{<-first, second}, cfgs)
}

func TestDeathAfterReporting(t *testing.T) { overBoth(t, testDeathAfterReporting) }

func testDeathAfterReporting(t *testing.T, encrypt bool) {
	lost := `rank 2 (pid 1002 on host "host1") went away before all ranks had met`
	t.Run("others missing", func(t *testing.T) {
		ctx := testnet.Context(t)
		ids, roots := openRoots(t, ctx, 1, Config{Encrypt: encrypt}, defaultLimits)
		running := []<-chan result{start(t, ctx, ids, configOf(0, 4))}
		bare := bareRank(t, ids, 0, configOf(2, 4))
		reported(t, roots[0], 2)
		bare.Close()
		results := append(collectAll(running), joinAll(t, ctx, ids, configOf(3, 4))...)
		refused(t, append(results, result{err: roots[0].Wait(ctx)}), RankLost, lost)
	})
	t.Run("ring under way", func(t *testing.T) {
		ctx := testnet.Context(t)
		ids, roots := openRoots(t, ctx, 1, Config{Encrypt: encrypt}, defaultLimits)
		var running []<-chan result
		for _, rank := range []int{0, 1, 3} {
			running = append(running, start(t, ctx, ids, configOf(rank, 4)))
		}
		reported(t, roots[0], 3)
		bare := bareRank(t, ids, 0, configOf(2, 4))
		if body, err := frame.Read(bare, maxControlBytes); err != nil || kind(body[0]) != kindNext {
			t.Fatalf("got %v, %v, want the next rank", body, err)
		}
		bare.Close()
		refused(t, collectAll(running), RankLost, lost)
	})
}

// A root decides once, whatever is still on its way to it.
func TestVerdictStands(t *testing.T) { overBoth(t, testVerdictStands) }

func testVerdictStands(t *testing.T, encrypt bool) {
	ctx := testnet.Context(t)
	ids, roots := openRoots(t, ctx, 1, Config{Encrypt: encrypt}, defaultLimits)
	bare := []net.Conn{bareRank(t, ids, 0, configOf(0, 2)), bareRank(t, ids, 0, configOf(1, 2))}
	reported(t, roots[0], 2)
	first := encodeFailure(&RefusedError{GaveUp, "the first"})
	for _, f := range [][]byte{first, encodeFailure(&RefusedError{GaveUp, "the second"}), encodePlain(kindDone)} {
		if _, err := bare[0].Write(f); err != nil {
			t.Fatal(err)
		}
	}
	results := []result{{err: readFailure(t, bare[0])}, {err: readFailure(t, bare[1])}}
	if _, err := bare[1].Write(encodePlain(kindDone)); err != nil {
		t.Fatal(err)
	}
	for _, conn := range bare {
		conn.Close()
	}
	roots[0].Close() // has heard all of it
	refused(t, append(results, result{err: roots[0].Wait(ctx)}), GaveUp, "the first; ")
}

// Only the root of its block tells a rank who is next.
func TestOneRootNamesTheNext(t *testing.T) {
	ids, roots := openRoots(t, testnet.Context(t), 2, Config{}, defaultLimits)
	own, border := bareRank(t, ids, 0, configOf(0, 2)), bareRank(t, ids, 0, configOf(1, 2))
	reported(t, roots[0], 2)
	if _, err := own.Write(encodePlain(kindDone)); err != nil {
		t.Fatal(err)
	}
	if _, err := border.Write(encodePlain(kindDone)); err != nil {
		t.Fatal(err)
	}
	for conn, want := range map[net.Conn]kind{own: kindNext, border: kindComplete} {
		if body, err := frame.Read(conn, maxControlBytes); err != nil || kind(body[0]) != want {
			t.Errorf("got %v, %v, want kind %d", body, err, want)
		}
	}
}

// A rank whose listener cannot be reached, but whose connection to the root is there, is found by the one before it.
func TestUnreachableRank(t *testing.T) { overBoth(t, testUnreachableRank) }

func testUnreachableRank(t *testing.T, encrypt bool) {
	ctx := testnet.Context(t)
	ids, roots := openRoots(t, ctx, 1, Config{Encrypt: encrypt}, defaultLimits)
	bareRank(t, ids, 0, configOf(2, 3))
	var results []<-chan result
	for rank := range 2 {
		results = append(results, impatient(t, ctx, ids, configOf(rank, 3)))
	}
	refused(t, append(collectAll(results), result{err: roots[0].Wait(ctx)}), RankLost,
		`rank 1 (pid 1001 on host "host0") failed: connecting to rank 2 (pid 1002 on host "host1") at 127.0.0.1:1`, "nobody listens there")
}

// impatient starts a Join that gives up sooner.
func impatient(t *testing.T, ctx context.Context, ids []ID, cfg Config) <-chan result {
	got := make(chan result, 1)
	p := defaultPatience
	p.gone = 50 * time.Millisecond
	go func() {
		j := &joiner{cfg: cfg.fill(), patience: p}
		ring, err := j.run(ctx, ids)
		got <- result{ring, err}
	}()
	return got
}

func TestRootGone(t *testing.T) {
	ctx := testnet.Context(t)
	ids, roots := openRoots(t, ctx, 1, Config{}, defaultLimits)
	if err := roots[0].Close(); err != nil {
		t.Fatal(err)
	}
	r := <-impatient(t, ctx, ids, configOf(0, 1))
	testnet.WantError(t, r.err, "reaching the root at "+roots[0].Addr(), "nobody listens there any more", "refused")
	if ctx.Err() != nil {
		t.Error("it took until the end of the context")
	}
}

func TestRootEnds(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(cancel context.CancelFunc, r *Root)
		cfg  Config
		part string
	}{
		{"close", func(_ context.CancelFunc, r *Root) { r.Close() }, Config{}, "ended: it was closed"},
		{"context", func(cancel context.CancelFunc, _ *Root) { cancel() }, Config{}, "ended: context canceled"},
		{"time", func(context.CancelFunc, *Root) {}, Config{Timeout: 3 * time.Second}, "ended: its time of 3s is over"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx := testnet.Context(t)
			rctx, cancel := context.WithCancel(ctx)
			defer cancel()
			l := defaultLimits
			l.proof = 2 * time.Second // does not count any more once a rank has reported
			ids, roots := openRoots(t, rctx, 1, c.cfg, l)
			running := []<-chan result{start(t, ctx, ids, configOf(0, 5)), start(t, ctx, ids, configOf(2, 5))}
			reported(t, roots[0], 2)
			c.end(cancel, roots[0])
			results := append(collectAll(running), result{err: roots[0].Wait(ctx)})
			refused(t, results, RootEnded, "the root at "+roots[0].Addr(), c.part, "ranks 1, 3, 4 had not reported")
			<-roots[0].ended
		})
	}
}

func TestRootEndsEmptyAndBusy(t *testing.T) {
	ctx := testnet.Context(t)
	_, roots := openRoots(t, ctx, 1, Config{}, defaultLimits)
	roots[0].Close()
	testnet.WantError(t, roots[0].Wait(ctx), "no rank had reported")

	ids, roots := openRoots(t, ctx, 1, Config{}, defaultLimits)
	bare := bareRank(t, ids, 0, configOf(0, 1))
	reported(t, roots[0], 1)
	closed := make(chan error, 1)
	go func() { closed <- roots[0].Close() }()
	testnet.WantError(t, readFailure(t, bare), "rank 0 had not gathered the records")
	bare.Close()
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// A rank that takes its answer and stays does not keep the root.
func TestRootDoesNotWaitForTheStubborn(t *testing.T) {
	ctx := testnet.Context(t)
	l := defaultLimits
	l.farewell = 10 * time.Millisecond
	ids, roots := openRoots(t, ctx, 1, Config{}, l)
	bareRank(t, ids, 0, configOf(0, 2))
	reported(t, roots[0], 1)
	began := time.Now()
	roots[0].Close()
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("closing took %v", took)
	}
}

func TestRootEndsByItself(t *testing.T) {
	ctx := testnet.Context(t)
	l := defaultLimits
	l.linger = 20 * time.Millisecond
	ids, roots := openRoots(t, ctx, 1, Config{}, l)
	cfgs := configs(3)
	results := joinAll(t, ctx, ids, cfgs...)
	joined(t, results, cfgs)
	select {
	case <-roots[0].ended:
	case <-ctx.Done():
		t.Fatal("the root has not ended")
	}
	if err := roots[0].Wait(ctx); err != nil {
		t.Error(err)
	}
	gatherAll(t, ctx, results, 0) // the ring needs no root
}

func TestContextEnds(t *testing.T) { overBoth(t, testContextEnds) }

func testContextEnds(t *testing.T, encrypt bool) {
	ctx := testnet.Context(t)
	ids, roots := openRoots(t, ctx, 1, Config{Encrypt: encrypt}, defaultLimits)
	cctx, cancel := context.WithCancel(ctx)
	impatient := start(t, cctx, ids, configOf(0, 3))
	reported(t, roots[0], 1)
	other := start(t, ctx, ids, configOf(2, 3))
	reported(t, roots[0], 2)
	cancel()
	err := (<-impatient).err
	testnet.WantError(t, err, "waiting for rank 1 to report to the root at "+roots[0].Addr(), "canceled; rank 1 had not reported")
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	refused(t, collectAll([]<-chan result{other}), GaveUp, `rank 0 (pid 1000 on host "host0") gave up`, "canceled; rank 1 had not reported")

	if _, err := Join(cctx, ids, configOf(0, 3)); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: got %v", err)
	}
	if _, _, err := NewID(cctx, Config{}); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: got %v", err)
	}
	wctx, cancel := context.WithCancel(ctx)
	cancel()
	_, roots = openRoots(t, ctx, 1, Config{Encrypt: encrypt}, defaultLimits)
	if err := roots[0].Wait(wctx); !errors.Is(err, context.Canceled) {
		t.Errorf("waiting with a context that has ended: got %v", err)
	}
}

// The failure of one root reaches all ranks of all others, with its reason.
func TestFailureCrossesBlocks(t *testing.T) { overBoth(t, testFailureCrossesBlocks) }

func testFailureCrossesBlocks(t *testing.T, encrypt bool) {
	ctx := testnet.Context(t)
	ids, roots := openRoots(t, ctx, 3, Config{Encrypt: encrypt}, defaultLimits) // ranks 0-2, 3-4, 5-6
	var running []<-chan result
	for _, rank := range []int{0, 1, 2, 3, 5, 6} {
		running = append(running, start(t, ctx, ids, configOf(rank, 7)))
	}
	bare := bareRank(t, ids, 1, configOf(4, 7))
	reported(t, roots[0], 4)
	reported(t, roots[1], 3)
	reported(t, roots[2], 3)
	bare.Close()
	results := collectAll(running)
	for _, r := range roots {
		results = append(results, result{err: r.Wait(ctx)})
	}
	refused(t, results, RankLost, `rank 4 (pid 1004 on host "host2") went away`)
}

func TestSizeMismatchAcrossBlocks(t *testing.T) {
	ctx := testnet.Context(t)
	ids, _ := openRoots(t, ctx, 2, Config{}, defaultLimits)
	cfgs := configs(6)
	for rank := 3; rank < 6; rank++ {
		cfgs[rank].Size = 7
	}
	for i, r := range joinAll(t, ctx, ids, cfgs...) {
		why, ok := errors.AsType[*RefusedError](r.err)
		if !ok || why.Reason != SizeMismatch {
			t.Errorf("rank %d: got %v", i, r.err)
		}
	}
}

func TestDevices(t *testing.T) {
	gpu := func(rank int, hash, device string, share bool) Config {
		cfg := configOf(rank, 4)
		cfg.Self.HostHash, cfg.Self.Device, cfg.ShareDevices = hash, device, share
		return cfg
	}
	for _, c := range []struct {
		name string
		cfgs []Config
		want string // in the error, "" for none
	}{
		{"one each", []Config{gpu(0, "a", "0", false), gpu(1, "a", "1", false), gpu(2, "b", "0", false), gpu(3, "b", "1", false)}, ""},
		{"none", []Config{gpu(0, "a", "", false), gpu(1, "a", "", false), gpu(2, "a", "", false), gpu(3, "a", "", false)}, ""},
		{"same", []Config{gpu(0, "a", "0", false), gpu(1, "a", "1", false), gpu(2, "b", "0", false), gpu(3, "a", "1", false)},
			`rank 1 (pid 1001 on host "host0") and rank 3 (pid 1003 on host "host1") both use device "1"`},
		{"shared", []Config{gpu(0, "a", "0", true), gpu(1, "a", "0", true), gpu(2, "a", "0", true), gpu(3, "b", "0", false)}, ""},
		{"first shares", []Config{gpu(0, "a", "0", true), gpu(1, "a", "0", false), gpu(2, "a", "2", true), gpu(3, "b", "0", false)},
			"rank 0 (pid 1000 on host \"host0\") and rank 1 "},
		{"second shares", []Config{gpu(0, "a", "0", false), gpu(1, "a", "0", true), gpu(2, "a", "2", true), gpu(3, "b", "0", false)},
			"rank 0 (pid 1000 on host \"host0\") and rank 1 "},
		{"third does not", []Config{gpu(0, "a", "0", true), gpu(1, "a", "0", true), gpu(2, "a", "0", false), gpu(3, "b", "0", false)},
			"rank 0 (pid 1000 on host \"host0\") and rank 2 "},
	} {
		for _, k := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s/roots=%d", c.name, k), func(t *testing.T) {
				ctx := testnet.Context(t)
				ids, _ := openRoots(t, ctx, k, Config{}, defaultLimits)
				results := joinAll(t, ctx, ids, c.cfgs...)
				if c.want == "" {
					joined(t, results, c.cfgs)
				} else {
					refused(t, results, DuplicateDevice, c.want)
				}
			})
		}
	}
}

func TestRingAddressIsThatOfTheRoot(t *testing.T) {
	ctx := testnet.Context(t)
	ids, roots := openRoots(t, ctx, 1, Config{ListenHost: "127.0.0.1"}, defaultLimits)
	cfg := configOf(1, 3)
	cfg.ListenHost = "127.0.0.2"
	start(t, ctx, ids, cfg)
	start(t, ctx, ids, configOf(0, 3))
	reported(t, roots[0], 2)
	roots[0].mu.Lock()
	defer roots[0].mu.Unlock()
	for rank, want := range []string{"127.0.0.1:", "127.0.0.2:"} {
		if got := roots[0].members[rank].addr; !strings.HasPrefix(got, want) {
			t.Errorf("rank %d listens on %s, want %s", rank, got, want)
		}
	}
	t.Cleanup(func() { roots[0].Close() }) // before the ranks are waited for
}

func TestDefaultsOfRecord(t *testing.T) {
	ctx := testnet.Context(t)
	ids, _ := openRoots(t, ctx, 1, Config{}, defaultLimits)
	r := joinAll(t, ctx, ids, Config{Size: 1})[0]
	if r.err != nil {
		t.Fatal(r.err)
	}
	if got := r.Records()[0]; got.PID == 0 || got.Host == "" {
		t.Errorf("got %+v, want pid and host filled in", got)
	}
}

func TestBadConfig(t *testing.T) {
	ctx := testnet.Context(t)
	ids, _ := openRoots(t, ctx, 2, Config{}, defaultLimits)
	long := strings.Repeat("x", MaxNameBytes+1)
	for _, c := range []struct {
		ids  []ID
		cfg  Config
		want string
	}{
		{ids, Config{}, "size is 0, want 1 to 65536"},
		{ids, Config{Size: MaxSize + 1}, "size is 65537"},
		{nil, Config{Size: 1}, "0 ids, want 1"},
		{ids, Config{Size: 1}, "2 ids, want 1 to one per rank: 1"},
		{[]ID{ids[0], ids[0]}, Config{Size: 2}, "ids 0 and 1 are the same"},
		{[]ID{ids[0], {}}, Config{Size: 2}, "id 1: no id"},
		{ids[:1], Config{Size: 1, Self: Record{Info: make([]byte, MaxInfoBytes+1)}}, "info has 4097 bytes, want at most 4096"},
		{ids[:1], Config{Size: 1, Self: Record{Addr: long}}, "data address has 257 bytes"},
		{ids[:1], Config{Size: 1, Self: Record{HostHash: long}}, "host hash has 257 bytes"},
		{ids[:1], Config{Size: 1, Self: Record{Device: long}}, "device has 257 bytes"},
		{ids[:1], Config{Size: 1, Self: Record{Host: "\xff"}}, "want UTF-8"},
		{ids[:1], Config{Size: 1, Self: Record{PID: -1}}, "pid is -1"},
		{ids[:1], Config{Size: 1, ListenHost: "0.0.0.0"}, "listen host is 0.0.0.0"},
	} {
		_, err := Join(ctx, c.ids, c.cfg)
		testnet.WantError(t, err, fmt.Sprintf("bootstrap: join as rank 0 of %d", c.cfg.Size), c.want)
	}
	for _, host := range []string{"0.0.0.0", "::"} {
		_, _, err := NewID(ctx, Config{ListenHost: host})
		testnet.WantError(t, err, "bootstrap: new id: listen host is "+host)
	}
}
