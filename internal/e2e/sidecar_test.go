package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// buildLibrary builds libgohvd.so, which runs the engine of Python programs, in the directory of hvdrun.
var buildLibrary = sync.OnceValues(func() (path string, err error) {
	path = filepath.Join(filepath.Dir(hvdrunPath), "libgohvd.so")
	if out, err := exec.Command("../../scripts/build-libgohvd.sh", path).CombinedOutput(); err != nil {
		return "", fmt.Errorf("building libgohvd.so: %w\n%s", err, out)
	}
	return path, nil
})

func library(t testing.TB) string {
	t.Helper()
	path, err := buildLibrary()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// buildHvdd builds hvdd, in another directory than that of hvdrun, which would use it.
func buildHvdd(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := testnet.Link(dir, "cmd/hvdd"); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "hvdd")
}

// An executable hvdd is in hvdrun's own directory. hvdrun tells its ranks the path of this hvdd, unless the
// user has set another path.
func TestSidecarBesideHvdrun(t *testing.T) {
	dir := t.TempDir()
	hvdrun, hvdd := filepath.Join(dir, "hvdrun"), filepath.Join(dir, "hvdd")
	if err := os.Link(hvdrunPath, hvdrun); err != nil {
		t.Fatal(err)
	}
	told := func(env ...string) string {
		t.Helper()
		cmd := exec.Command(hvdrun, "-np", "1", "--tag-output=false", "sh", "-c",
			`echo "$HVD_SIDECAR_BINARY"`)
		cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool {
			return strings.HasPrefix(v, "HVD_SIDECAR_BINARY=")
		}), env...)
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(out))
	}
	if got := told(); got != "" {
		t.Errorf("without hvdd: got %q", got)
	}
	testnet.WriteScript(t, hvdd, "#!/bin/sh\n")
	if got := told(); got != hvdd {
		t.Errorf("got %q, want %s", got, hvdd)
	}
	if got := told("HVD_SIDECAR_BINARY=/mine"); got != "/mine" {
		t.Errorf("got %q, want the user's", got)
	}
}
