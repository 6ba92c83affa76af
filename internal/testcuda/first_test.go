package testcuda_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// TestFirstMinutes checks that scripts/gpu-first.sh writes a line for each of its steps if every program
// fails, and skips the steps for which no time is left.
func TestFirstMinutes(t *testing.T) {
	script := filepath.Join("..", "..", "scripts", "gpu-first.sh")
	text := testnet.ReadFile(t, script)
	var want []string
	for _, step := range regexp.MustCompile(`(?m)^\tstep "([^"]+)"`).FindAllStringSubmatch(string(text), -1) {
		want = append(want, step[1])
	}
	dir := t.TempDir()
	for _, name := range []string{"hvdrun", "hvdbench", "nccl.test", "conformance.test", "python"} {
		testnet.WriteScript(t, filepath.Join(dir, name), "#!/bin/sh\nexit 7\n")
	}
	packed := filepath.Join(dir, "gpu.tgz")
	if out, err := exec.Command("tar", "-czf", packed, "-C", dir, "hvdrun", "hvdbench", "nccl.test",
		"conformance.test").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	lines := func(part, seconds string) (all []string) {
		out := t.TempDir()
		cmd := exec.Command("bash", script, part, seconds)
		cmd.Env = append(os.Environ(), "OUT="+out, "PROGRAMS="+packed, "PYTHON="+filepath.Join(dir, "python"))
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("part %s: %v: %s", part, err, text)
		}
		result := testnet.ReadFile(t, filepath.Join(out, "result"))
		for line := range strings.Lines(string(result)) {
			all = append(all, strings.TrimSpace(line))
		}
		return all
	}
	var got []string
	for _, line := range slices.Concat(lines("a", "400"), lines("b", "290")) {
		status, name, _ := strings.Cut(line, " s: ")
		if !strings.HasPrefix(status, "status 7 after ") {
			t.Errorf("got %q, want status 7", line)
		}
		got = append(got, name)
	}
	if len(want) < 10 || !slices.Equal(got, want) {
		t.Errorf("got lines for %q, want %q", got, want)
	}
	if skipped := lines("b", "5"); len(skipped) == 0 || !strings.HasPrefix(skipped[0], "skipped: ") {
		t.Errorf("without time: got %q", skipped)
	}
}
