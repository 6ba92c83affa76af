// Package testnet has what tests need of the world around a process: sockets, hosts made of network namespaces, PyTorch and
// Prometheus. Where one of the programs is missing the test is skipped, but not in CI.
package testnet

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

// Context ends after a minute, so that what hangs fails.
func Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// Eventually waits for what another goroutine does without saying so.
func Eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	ctx := Context(t)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

// Logs returns a logger and what it was given.
func Logs() (*zap.Logger, *observer.ObservedLogs) {
	core, entries := observer.New(zapcore.DebugLevel)
	return zap.New(core), entries
}

// Logged reports whether an entry has all parts, in its message or fields.
func Logged(entries *observer.ObservedLogs, parts ...string) bool {
	for _, e := range entries.All() {
		text := fmt.Sprint(e.Message, e.ContextMap())
		found := true
		for _, part := range parts {
			found = found && strings.Contains(text, part)
		}
		if found {
			return true
		}
	}
	return false
}

// WantError holds the text of an error against parts of it.
func WantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("got no error, want one with %q", parts)
		return
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("got error %q, want %q in it", err, part)
		}
	}
}

// FakeServer accepts one connection after the other and hands each to serve.
func FakeServer(t *testing.T, serve func(net.Conn)) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(time.Minute))
				serve(conn)
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		wg.Wait()
	})
	return ln.Addr().String()
}

// RawDial connects and sends parts.
func RawDial(t *testing.T, addr string, parts ...[]byte) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(time.Minute))
	if _, err := conn.Write(bytes.Join(parts, nil)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// FreePort returns a port of loopback on which nobody listened a moment ago, and which the kernel gives to nobody by itself: it is
// below those for connections.
func FreePort(t testing.TB) int {
	t.Helper()
	const first, last = 10000, 30000
	for range 100 {
		port := first + rand.IntN(last-first)
		ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue
		}
		if err := ln.Close(); err != nil {
			t.Fatal(err)
		}
		return port
	}
	t.Fatal("no port is free")
	return 0
}
