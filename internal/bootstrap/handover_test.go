package bootstrap

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
)

// asOtherUser calls f in a thread that runs as another user. It skips the test if this process may not change
// its user.
func asOtherUser(t *testing.T, f func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root may run code as another user")
	}
	const keep = ^uintptr(0)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// The system call itself changes only this thread.
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, 12345, keep); errno != 0 {
		t.Fatal(errno)
	}
	defer func() {
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, 0, keep); errno != 0 {
			panic(errno) // no other test may run in this thread
		}
	}()
	f()
}

func TestHandOver(t *testing.T) {
	ctx := testnet.Context(t)
	name := newHandoverName()
	if _, err := takeOver(ctx, name); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("before: got %v, want %v", err, syscall.ECONNREFUSED)
	}
	s, text := secret.New()
	stop, err := handOver(name, text, nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		got, err := takeOver(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := got.Unseal("k", s.Seal("k", nil)); err != nil {
			t.Error("got another secret")
		}
	}
	if _, err := handOver(name, "", nil); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a second socket: got %v, want %v", err, syscall.EADDRINUSE)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	if _, err := takeOver(ctx, name); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("after: got %v, want %v", err, syscall.ECONNREFUSED)
	}
}

// A process of another user asks for the secret. It gets nothing.
func TestOtherUserAsksForSecret(t *testing.T) {
	ctx := testnet.Context(t)
	log, entries := testnet.Logs()
	name := newHandoverName()
	_, text := secret.New()
	stop, err := handOver(name, text, log)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	var conn net.Conn
	asOtherUser(t, func() { conn, err = dial.Connect(ctx, dial.UnixPrefix+"@"+handoverPrefix+name) })
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got, err := io.ReadAll(conn); len(got) > 0 {
		t.Errorf("another user got %q, %v", got, err)
	}
	testnet.Eventually(t, "the reason", func() bool {
		return testnet.Logged(entries, "closed a connection", "runs as user 12345")
	})
}

// A process of another user has opened the socket before, and hands over a secret that it knows. No rank
// takes it.
func TestOtherUserHandsOverSecret(t *testing.T) {
	name := newHandoverName()
	var a *dial.Acceptor
	var err error
	asOtherUser(t, func() {
		a, err = dial.Serve(dial.UnixPrefix+"@"+handoverPrefix+name, "test", 10, nil,
			func(_ context.Context, conn net.Conn, slot *dial.Slot) error {
				defer slot.Release()
				_, err := io.WriteString(conn, "0123456789abcdef0123456789abcdef")
				return err
			})
	})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	s, err := takeOver(testnet.Context(t), name)
	testnet.WantError(t, err, handoverPrefix+name, "runs as user 12345")
	if !s.IsZero() {
		t.Error("got a secret")
	}
	if _, err := handOver(name, "", nil); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("got %v, want %v", err, syscall.EADDRINUSE)
	}
}

// If a socket is closed before the secret has arrived, for example because too many processes ask for it, the
// process may ask again.
func TestHandOverIsCutShort(t *testing.T) {
	name := newHandoverName()
	a, err := dial.Serve(dial.UnixPrefix+"@"+handoverPrefix+name, "test", 10, nil,
		func(_ context.Context, _ net.Conn, slot *dial.Slot) error {
			slot.Release()
			return io.EOF
		})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if _, err := takeOver(testnet.Context(t), name); err == nil || !dial.MayRecover(err) {
		t.Errorf("got %v, want an error after which another attempt may succeed", err)
	}
}
