package config_test

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/config"
)

// TestUnknownVersion checks that Version returns (devel) if the build does not contain the version.
func TestUnknownVersion(t *testing.T) {
	// The build of a test binary records no version for its module.
	if v := config.Version(); v != "(devel)" || !strings.HasPrefix(config.VersionText(), v) {
		t.Errorf("got %q and %q", v, config.VersionText())
	}
}

// TestReleaseVersion builds hvdrun with the linker flag in the comment of config.release and checks that
// hvdrun prints that version.
func TestReleaseVersion(t *testing.T) {
	hvdrun := filepath.Join(t.TempDir(), "hvdrun")
	build := exec.Command("go", "build", "-ldflags",
		"-s -w -X github.com/gohvd/gohvd/internal/config.release=v1.2.3", "-o", hvdrun,
		"github.com/gohvd/gohvd/cmd/hvdrun")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if out, err := exec.Command(hvdrun, "--version").CombinedOutput(); err != nil ||
		!strings.Contains(string(out), "v1.2.3") {
		t.Errorf("got %s, %v", out, err)
	}
}
