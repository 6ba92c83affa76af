package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// TestLog checks that the log has the format that the settings choose, and that its logger is named hvdd.
func TestLog(t *testing.T) {
	self := testnet.Self(t)
	for want, env := range map[string][]string{
		`{"level":"warn","logger":"hvdd","msg":"the connection of a client ended with an error","error":"`: {
			"HOROVOD_LOG_HIDE_TIME=1"},
		"WARN\thvdd\tthe connection of a client ended with an error\t{\"error\": \"": {"HOROVOD_LOG_HIDE_TIME=1",
			"HVD_LOG_FORMAT=console"},
	} {
		dir := t.TempDir()
		log, err := os.Create(filepath.Join(dir, "log"))
		if err != nil {
			t.Fatal(err)
		}
		defer log.Close()
		path := filepath.Join(dir, "s")
		cmd := exec.CommandContext(t.Context(), self, "--socket", path)
		cmd.Env, cmd.Stderr = append(append(os.Environ(), asDaemon+"=1"), env...), log
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		at(t, path).Write([]byte("GET / HTTP/1.1\r\n\r\n"))
		testnet.Eventually(t, want, func() bool {
			text := testnet.ReadFile(t, log.Name())
			return strings.HasPrefix(string(text), want)
		})
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}
}
