package lint

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ps"
)

// The command with which a push sets values has the same number in Go, C and Python.
func TestInitCommand(t *testing.T) {
	for file, want := range map[string]string{
		"cmd/libgohvd/gohvd.h": fmt.Sprintf("\n#define HVD_PS_INIT (%d)\n", ps.InitCmd),
		"python/gohvd/ps.py":   fmt.Sprintf("\nINIT = %d\n", ps.InitCmd),
	} {
		text, err := os.ReadFile(filepath.Join("../..", file))
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s: %v, want the line %q", file, err, want)
		}
	}
}

// numbered matches a number of the protocol with its name, such as "4 alltoall".
var numbered = regexp.MustCompile(`(\d+) ([a-zA-Z0-9 -]+)`)

// The numbers and limits in docs/negotiation.md are those in the code. Programs that take part in the
// protocol can be written from this page, so a wrong number would make them run a wrong operation.
func TestProtocolNumbers(t *testing.T) {
	root := moduleRoot(t)
	names := map[string]func(int) string{
		"kind":      func(i int) string { return message.Kind(i).String() },
		"dtype":     func(i int) string { return tensor.DType(i).String() },
		"reduce_op": func(i int) string { return tensor.ReduceOp(i).String() },
		"backend":   func(i int) string { return message.Backend(i).String() },
		"algorithm": func(i int) string { return message.Algorithm(i).String() },
	}
	text, err := os.ReadFile(filepath.Join(root, "docs/negotiation.md"))
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]int{"kind": message.NumKinds - 1, "backend": message.NumBackends}
	found := 0
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(line, "|")
		if len(cells) != 4 {
			continue
		}
		field := strings.TrimSpace(cells[1])
		name := names[field]
		if name == nil {
			continue
		}
		values := numbered.FindAllStringSubmatch(strings.ReplaceAll(cells[2], "in responses also ", ""), -1)
		if len(values) == 0 {
			continue // a row of another table
		}
		found++
		for _, m := range values {
			var number int
			if _, err := fmt.Sscan(m[1], &number); err != nil {
				t.Fatal(err)
			}
			if got := name(number); got != strings.ToLower(strings.TrimSpace(m[2])) {
				t.Errorf("docs/negotiation.md: %s %d is %q, and %q in the code", field, number, m[2], got)
			}
		}
		if want := counts[field]; want > 0 && len(values) != want {
			t.Errorf("docs/negotiation.md: %s has %d values, want %d", field, len(values), want)
		}
	}
	if found != 5 {
		t.Errorf("docs/negotiation.md has %d lists of numbers, want 5", found)
	}
	for _, limit := range []struct {
		name  string
		value string
	}{
		{"frame", fmt.Sprintf("%d MiB", message.MaxFrameBytes>>20)},
		{"tensor or group name", fmt.Sprintf("1 to %d bytes of UTF-8", message.MaxNameBytes)},
		{"dimensions of a shape", fmt.Sprint(message.MaxDims)},
		{"cache bits of a set", power(message.MaxCacheBits)},
		{"process sets of a job", fmt.Sprint(message.MaxSets)},
		{"process sets of a frame", fmt.Sprint(message.MaxFrameSets)},
		{"rank", "below " + power(message.MaxRanks)},
	} {
		if row := fmt.Sprintf("| %s | %s |\n", limit.name, limit.value); !strings.Contains(string(text),
			row) {
			t.Errorf("docs/negotiation.md lacks %q", row)
		}
	}
	// The rows of the frame types begin with their numbers.
	for i, want := range []string{"up", "heartbeat", "bye", "suspect", "timeout", "released"} {
		if got := message.UpType(i + 1).String(); got != want {
			t.Errorf("frame %d to the coordinator is %q in the code, want %q: change docs/negotiation.md too",
				i+1, got, want)
		}
		name := want
		if want == "up" {
			name = "news"
		}
		if row := fmt.Sprintf("| %d %s |", i+1, name); !strings.Contains(string(text), row) {
			t.Errorf("docs/negotiation.md lacks a row %q", row)
		}
	}
}

// rows returns the first column of the tables in a section of a page, without their titles.
func rows(t *testing.T, file, section string) (first []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../..", file))
	if err != nil {
		t.Fatal(err)
	}
	_, after, found := strings.Cut(string(text), section+"\n")
	if !found {
		t.Fatalf("%s lacks %q", file, section)
	}
	after, _, _ = strings.Cut(after, "\n#")
	_, after, _ = strings.Cut(after, "|---")
	for line := range strings.Lines(after) {
		if cells := strings.Split(line, "|"); len(cells) > 3 && !strings.HasPrefix(cells[1], "--") {
			first = append(first, strings.TrimSpace(cells[1]))
		}
	}
	return first
}

// The pages name every kind of operation whose requests are compared, every value that rank 0 can change, and
// every backend.
func TestPagesAreComplete(t *testing.T) {
	compared := strings.Join(rows(t, "docs/negotiation.md", "### Agreement"), ", ")
	for k := range message.Kind(message.NumKinds) {
		sets := k == message.AddProcessSet || k == message.RemoveProcessSet
		if (k.MovesData() || sets) && !slices.Contains(strings.Split(compared, ", "), k.String()) {
			t.Errorf("docs/negotiation.md does not say what is compared for %v", k)
		}
	}
	fields := reflect.TypeFor[message.Tuning]().NumField()
	if values := rows(t, "docs/negotiation.md", "## Tuning"); len(values) != fields {
		t.Errorf("docs/negotiation.md: a cycle can change %q, want %d values", values, fields)
	}
	glossary, err := os.ReadFile("../../docs/glossary.md")
	if err != nil {
		t.Fatal(err)
	}
	for b := range message.Backend(message.NumBackends) {
		if name := fmt.Sprintf("(`%v`)", b); b > 0 && !strings.Contains(string(glossary), name) {
			t.Errorf("docs/glossary.md lacks the backend %s", name)
		}
	}
}

// power returns n as a string, in the form 2^k if it is a power of two.
func power(n int) string {
	for exponent := range 63 {
		if n == 1<<exponent {
			return fmt.Sprintf("2^%d", exponent)
		}
	}
	return fmt.Sprint(n)
}

// retired matches words that pages do not use any more: the field has terms for them (docs/glossary.md).
var retired = regexp.MustCompile(
	`(?i)\b(whoever|doorway|guest|letter|farewell|stirs?|heeds?|rouse|hurry|twin|since \d+ m?s)\b`)

// No page uses a retired word, because a reader could not look it up.
func TestRetiredWords(t *testing.T) {
	root := moduleRoot(t)
	for file, p := range readPages(t, root) {
		for _, line := range p.lines {
			if word := retired.FindString(line.text); word != "" && !line.code {
				t.Errorf("%s:%d: %q is retired: see docs/glossary.md", file, line.number, word)
			}
		}
	}
}
