package version_test

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/version"
)

func TestUnknown(t *testing.T) {
	// A test binary has no version of its module.
	if v := version.Module(); v != "(devel)" || !strings.HasPrefix(version.Text(), v) {
		t.Errorf("got %q and %q", v, version.Text())
	}
}

// The variable that a release sets is where its comment says.
func TestRelease(t *testing.T) {
	hvdrun := filepath.Join(t.TempDir(), "hvdrun")
	build := exec.Command("go", "build", "-ldflags", "-X github.com/gohvd/gohvd/internal/version.release=v1.2.3", "-o", hvdrun, "github.com/gohvd/gohvd/cmd/hvdrun")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if out, err := exec.Command(hvdrun, "--version").CombinedOutput(); err != nil || !strings.Contains(string(out), "v1.2.3") {
		t.Errorf("got %s, %v", out, err)
	}
}
