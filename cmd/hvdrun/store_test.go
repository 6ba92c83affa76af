package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/store/c10d"
)

// TestStoreAlone checks that hvdrun store serves clients that know its secret, until it gets a signal.
func TestStoreAlone(t *testing.T) {
	const text = "sixteen bytes or more"
	file := filepath.Join(t.TempDir(), "secret")
	testnet.WriteFile(t, file, text)
	key, err := secret.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	ours := func(ctx context.Context, addr string) (store.Store, error) {
		return store.Dial(ctx, addr, store.Config{Secret: key})
	}
	offered := func(ctx context.Context, addr string) (store.Store, error) {
		key, err := bootstrap.AskSecret(ctx, addr)
		if err != nil {
			return nil, err
		}
		return store.Dial(ctx, addr, store.Config{Secret: key})
	}
	fixed := net.JoinHostPort("127.0.0.1", strconv.Itoa(testnet.FreePort(t)))
	torch := func(ctx context.Context, addr string) (store.Store, error) {
		return c10d.Dial(ctx, addr, c10d.Modern)
	}
	for name, test := range map[string]struct {
		args []string
		dial func(ctx context.Context, addr string) (store.Store, error)
		end  syscall.Signal
	}{
		"with a secret": {[]string{"store", "--secret-file", file}, ours, syscall.SIGTERM},
		"own secret":    {[]string{"store"}, offered, syscall.SIGTERM},
		"a fixed port":  {[]string{"store", "--listen", fixed}, offered, syscall.SIGTERM},
		"no port":       {[]string{"store", "--listen", "127.0.0.1:"}, offered, syscall.SIGTERM},
		"insecure": {[]string{"store", "--insecure"}, func(ctx context.Context, addr string) (store.Store, error) {
			if _, err := bootstrap.AskSecret(ctx, addr); !errors.Is(err, bootstrap.ErrNotOffered) {
				return nil, fmt.Errorf("got %w, want %w", err, bootstrap.ErrNotOffered)
			}
			return store.Dial(ctx, addr, store.Config{})
		}, syscall.SIGTERM},
		"torch": {[]string{"store", "--torch", "--listen", "127.0.0.1:0"}, torch, syscall.SIGINT},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := hvdrun(t, test.args...)
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			line, err := bufio.NewReader(out).ReadString('\n')
			addr, ok := strings.CutPrefix(strings.TrimSpace(line), "listening on ")
			if err != nil || !ok {
				t.Fatalf("got %q, %v", line, err)
			}
			s, err := test.dial(testnet.Context(t), addr)
			if err != nil {
				t.Fatal(err)
			}
			if n, err := s.Add(testnet.Context(t), "n", 2); n != 2 || err != nil {
				t.Errorf("got %d, %v", n, err)
			}
			s.Close()
			if err := cmd.Process.Signal(test.end); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err != nil {
				t.Errorf("the store ended with %v", err)
			}
			if conn, err := net.Dial("tcp", addr); err == nil {
				conn.Close()
				t.Error("the address still accepts connections")
			}
		})
	}
}

// TestStoreEndsWithItsParent checks that hvdrun store takes its secret from standard input, and ends when
// standard input ends.
func TestStoreEndsWithItsParent(t *testing.T) {
	const text = "sixteen bytes or more"
	key, err := secret.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	cmd := hvdrun(t, "store", "--secret-file", "-")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(in, text)
	line, err := bufio.NewReader(out).ReadString('\n')
	addr, ok := strings.CutPrefix(strings.TrimSpace(line), "listening on ")
	if err != nil || !ok {
		t.Fatalf("got %q, %v", line, err)
	}
	s, err := store.Dial(testnet.Context(t), addr, store.Config{Secret: key})
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Errorf("the store ended with %v", err)
	}
}

// TestStoreAloneRefuses checks that hvdrun store fails with an error if its flags are wrong or contradict
// each other.
func TestStoreAloneRefuses(t *testing.T) {
	short := filepath.Join(t.TempDir(), "short")
	testnet.WriteFile(t, short, "short")
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"--listen", "0.0.0.0:0"}, "other hosts can reach this address and there is no secret"},
		{[]string{"--listen", ":0", "--torch"}, "other hosts can reach this address"},
		{[]string{"--secret-file", short}, "the secret has 5 bytes, want 16"},
		{[]string{"--secret-file", short + ".not"}, "no such file"},
		{[]string{"--torch", "--secret-file", short}, "cannot be used together"},
		{[]string{"extra"}, "extra"},
		{[]string{"--no-such"}, "unknown flag"},
	} {
		out, err := hvdrun(t, append([]string{"store"}, test.args...)...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), test.want) ||
			strings.Contains(string(out), "short\n") {
			t.Errorf("%q: got %v, %s, want %q", test.args, err, out, test.want)
		}
	}
}
