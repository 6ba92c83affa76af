package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// TestUnits checks the units in deploy/systemd with systemd-analyze. The service must pass what hvdd needs
// from systemd: a socket, a place for its notifications, and a folder for sockets that it shares with other
// ranks.
func TestUnits(t *testing.T) {
	const installed = "/opt/gohvd/bin/hvdd" // the path in the unit
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("%v; CI installs systemd", err)
		}
		t.Skip("systemd-analyze is not in PATH")
	}
	self := testnet.Self(t)
	dir := t.TempDir()
	args, texts := []string{"verify", "--man=no"}, make(map[string]string)
	for _, name := range []string{"hvdd.service", "hvdd.socket"} {
		text := testnet.ReadFile(t, filepath.Join("..", "..", "deploy", "systemd", name))
		texts[name] = string(text)
		file := filepath.Join(dir, name)
		// systemd-analyze reports a program that does not exist.
		unit := strings.ReplaceAll(texts[name], installed, self)
		testnet.WriteFile(t, file, unit)
		args = append(args, file)
	}
	if out, err := exec.CommandContext(t.Context(), analyze, args...).CombinedOutput(); err != nil ||
		len(out) > 0 {
		t.Errorf("%v\n%s", err, out)
	}
	for name, lines := range map[string][]string{
		"hvdd.service": {"Type=notify", "Requires=hvdd.socket", "ExecStart=" + installed,
			"RuntimeDirectory=gohvd-ranks", "RuntimeDirectoryPreserve=yes", "Environment=XDG_RUNTIME_DIR=%t/gohvd-ranks"},
		"hvdd.socket": {"SocketMode=0600", "ListenStream=/run/gohvd/hvdd.sock"},
	} {
		for _, line := range lines {
			if !strings.Contains(texts[name], "\n"+line+"\n") {
				t.Errorf("%s has no line %s", name, line)
			}
		}
	}
}
