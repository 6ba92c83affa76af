package logs_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/testnet"
)

// writesVariable is set in a process that only runs writes.
const writesVariable = "TEST_WRITES_TO_STDERR"

func TestMain(m *testing.M) {
	if os.Getenv(writesVariable) != "" {
		fmt.Println(writes())
		return
	}
	os.Exit(m.Run())
}

// writes writes a line to standard error, and a second one after standard input has ended. It returns what
// is wrong.
func writes() string {
	if n, err := (logs.Stderr{}).Write([]byte("line\n")); n != 5 || err != nil {
		return fmt.Sprintf("wrote %d bytes, error %v", n, err)
	}
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err.Error()
	}
	if n, err := (logs.Stderr{}).Write([]byte("line\n")); n != 0 || !errors.Is(err, unix.EPIPE) {
		return fmt.Sprintf("wrote %d bytes, error %v, want EPIPE", n, err)
	}
	return "well"
}

// TestStderr lets a process write to standard error, and again when nobody reads it any more. That must not
// end the process.
func TestStderr(t *testing.T) {
	self := testnet.Self(t)
	ctx := testnet.Context(t)
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), writesVariable+"=1")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 10)
	if n, err := io.ReadAtLeast(stderr, b, 5); string(b[:n]) != "line\n" || err != nil {
		t.Errorf("read %q, error %v", b[:n], err)
	}
	stderr.Close()
	stdin.Close()
	if got, err := io.ReadAll(stdout); string(got) != "well\n" || err != nil {
		t.Errorf("%s (%v)", got, err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}
