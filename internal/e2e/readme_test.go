package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// The first command in the README is run. Four ranks train the example, and their weights are the same at the
// end.
func TestReadmeCommand(t *testing.T) {
	readme := testnet.ReadFile(t, "../../README.md")
	const command = "go run ./cmd/hvdrun -np 4 go run ./examples/digits"
	if !strings.Contains(string(readme), "    "+command+"\n") {
		t.Fatalf("the README does not have the command %q", command)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*jobLimit) // each rank links the example
	defer cancel()
	args := strings.Fields(command)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir = "../.."
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, out, stderr.String())
	}
	last := regexp.MustCompile(
		`(?m)^\[(\d)\]<stdout>:digits: ranks=4 epochs=(\d+) test_accuracy=([0-9.]+) seconds=[0-9.]+ weights_sha256=([0-9a-f]{64})$`)
	found := last.FindAllStringSubmatch(string(out), -1)
	seen := map[string]bool{}
	for _, f := range found {
		seen[f[1]] = true
		if accuracy, _ := strconv.ParseFloat(f[3], 64); accuracy < 0.95 {
			t.Errorf("rank %s: accuracy %v, want at least 0.95", f[1], accuracy)
		}
		if f[4] != found[0][4] {
			t.Errorf("rank %s has other weights than rank %s", f[1], found[0][1])
		}
	}
	if len(found) != 4 || len(seen) != 4 {
		t.Errorf("%d ranks printed their result, want 4:\n%s", len(found), out)
	}
	if epochs := strings.Count(string(out), "<stdout>:epoch "); len(found) > 0 &&
		strconv.Itoa(epochs) != found[0][2] {
		t.Errorf("%d lines of progress, want %s", epochs, found[0][2])
	}
}

// The program in the README compiles, and prints the output that the README shows.
func TestReadmeProgram(t *testing.T) {
	readme := testnet.ReadFile(t, "../../README.md")
	_, source, ok := strings.Cut(string(readme), "```go\n")
	source, _, closed := strings.Cut(source, "```")
	if !ok || !closed {
		t.Fatal("the README has no Go program")
	}
	dir := t.TempDir()
	file, binary := filepath.Join(dir, "main.go"), filepath.Join(dir, "program")
	testnet.WriteFile(t, file, source)
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	build := exec.CommandContext(ctx, "go", "build", "-ldflags=-s -w", "-o", binary, file)
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	alone, err := exec.CommandContext(ctx, binary).CombinedOutput()
	if err != nil || string(alone) != "0 of 1 got [0] <nil>\n" {
		t.Errorf("alone: got %q and error %v", alone, err)
	}
	together, err := exec.CommandContext(ctx, hvdrunPath, "-np", "4", binary).CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, together)
	}
	for r := range 4 {
		if want := fmt.Sprintf("[%d]<stdout>:%d of 4 got [1.5] <nil>\n", r, r); !strings.Contains(
			string(together), want) {
			t.Errorf("got %q, want %q in it", together, want)
		}
	}
}
