package bootstrap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/frame"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/topo"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// overBoth runs a test with ids for connections as they are, and for encrypted ones.
func overBoth(t *testing.T, test func(t *testing.T, encrypt bool)) {
	t.Run("plain", func(t *testing.T) { test(t, false) })
	t.Run("TLS", func(t *testing.T) { test(t, true) })
}

func configOf(rank, size int) Config {
	return Config{Rank: topo.Rank(rank), Size: size, Self: Record{
		Addr: fmt.Sprintf("10.0.0.%d:7", rank&255), HostHash: fmt.Sprintf("hash%d", max(rank, 0)/2), Device: fmt.Sprintf("gpu%d", rank),
		Info: bytes.Repeat([]byte{byte(rank)}, max(rank, 0)&127), Host: fmt.Sprintf("host%d", max(rank, 0)/2), PID: 1000 + max(rank, 0),
	}}
}

func configs(size int) (all []Config) {
	for rank := range size {
		all = append(all, configOf(rank, size))
	}
	return all
}

// openRoots opens k roots with limits; they are closed at the end of the test.
func openRoots(t testing.TB, ctx context.Context, k int, cfg Config, l limits) (ids []ID, roots []*Root) {
	t.Helper()
	for range k {
		id, r, err := open(ctx, cfg.fill(), l)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := r.Close(); err != nil {
				t.Errorf("closing a root: %v", err)
			}
		})
		ids, roots = append(ids, id), append(roots, r)
	}
	return ids, roots
}

type result struct {
	*Ring
	err error
}

// start joins in a goroutine. Rings are closed at the end of the test.
func start(t testing.TB, ctx context.Context, ids []ID, cfg Config) <-chan result {
	t.Helper()
	got := make(chan result, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		r, err := Join(ctx, ids, cfg)
		if (r == nil) == (err == nil) {
			t.Errorf("join gave %v and %v", r, err)
		}
		if err == nil {
			t.Cleanup(func() { r.Close() })
		}
		got <- result{r, err}
	})
	t.Cleanup(wg.Wait)
	return got
}

func joinAll(t testing.TB, ctx context.Context, ids []ID, cfgs ...Config) []result {
	t.Helper()
	var running []<-chan result
	for _, cfg := range cfgs {
		running = append(running, start(t, ctx, ids, cfg))
	}
	return collectAll(running)
}

func collectAll(running []<-chan result) (results []result) {
	for _, r := range running {
		results = append(results, <-r)
	}
	return results
}

func sameRecord(a, b Record) bool {
	return a.Addr == b.Addr && a.HostHash == b.HostHash && a.Device == b.Device && a.Host == b.Host && a.PID == b.PID &&
		bytes.Equal(a.Info, b.Info)
}

// joined checks that results are a job of cfgs.
func joined(t *testing.T, results []result, cfgs []Config) {
	t.Helper()
	for i, r := range results {
		if r.err != nil {
			t.Fatalf("rank %d: %v", i, r.err)
		}
		if !slices.EqualFunc(r.Records(), cfgs, func(r Record, c Config) bool { return sameRecord(r, c.Self) }) {
			t.Fatalf("rank %d has records %+v", i, r.Records())
		}
	}
}

// refused checks that all failed for one reason, with one text that has parts.
func refused(t *testing.T, results []result, reason Reason, parts ...string) {
	t.Helper()
	text := ""
	for i, r := range results {
		why, ok := errors.AsType[*RefusedError](r.err)
		if !ok || why.Reason != reason {
			t.Errorf("result %d: got %v, want reason %d", i, r.err, reason)
			continue
		}
		testnet.WantError(t, r.err, parts...)
		if text == "" {
			text = why.Text
		}
		if why.Text != text {
			t.Errorf("result %d has %q, another %q", i, why.Text, text)
		}
	}
}

// reported waits until so many ranks have reported to r.
func reported(t *testing.T, r *Root, n int) {
	t.Helper()
	testnet.Eventually(t, fmt.Sprintf("%d ranks have reported", n), func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.members) == n
	})
}

// bareRank reports as a rank does, and then does nothing by itself.
func bareRank(t *testing.T, ids []ID, root int, cfg Config) net.Conn {
	t.Helper()
	all, list, _, err := meetings(ids)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := dial.Greet(testnet.Context(t), all[root].addr, all[root].key, rootMagic, protocolVersion)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(time.Minute))
	q := report{
		peer: peer{cfg.Rank, cfg.Self.PID, cfg.Self.Host, "127.0.0.1:1"}, size: cfg.Size, root: root, roots: len(ids), ids: list,
	}
	if _, err := conn.Write(encodeReport(q)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// readFailure reads the verdict of a root.
func readFailure(t *testing.T, conn net.Conn) *RefusedError {
	t.Helper()
	for {
		body, err := frame.Read(conn, maxControlBytes)
		if err != nil {
			t.Fatal(err)
		}
		k, d, err := decode(body, kindNext, kindFailure)
		if err != nil {
			t.Fatal(err)
		}
		if k == kindFailure {
			why, err := d.failure()
			if err != nil {
				t.Fatal(err)
			}
			return why
		}
	}
}

// keepsKeys checks that what was logged and err show nothing of the keys of ids.
func keepsKeys(t *testing.T, ids []ID, logs *observer.ObservedLogs, errs ...error) {
	t.Helper()
	said := fmt.Sprint(errs)
	for _, e := range logs.All() {
		said += fmt.Sprint(e.Message, e.ContextMap())
	}
	for _, id := range ids {
		key := id[idKey : idKey+keyBytes]
		for _, form := range []string{id.String(), fmt.Sprintf("%x", key), fmt.Sprint(key), string(key)} {
			if strings.Contains(said, form) {
				t.Errorf("a key was logged or is in an error: %s", said)
			}
		}
	}
}
