package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/timeline/report"
)

// putTimelines writes the timeline files of two ranks and returns their folder. The second rank is 5 ms late
// in each of 10 steps, which take 100 ms.
func putTimelines(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for rank, name := range []string{"t.json", "t.rank1.json"} {
		var b strings.Builder
		fmt.Fprintf(&b, `[{"name":"hvd_rank","ph":"M","pid":0,"args":{"rank":%d,"size":2,"host":"h","epoch":1,"segment":1,"clock_domain":"d","monotonic_us":0}}`, rank)
		b.WriteString(`,{"name":"process_name","ph":"M","pid":1,"args":{"name":"grad"}}`)
		for step := 1; step <= 10; step++ {
			at := step * 100_000
			fmt.Fprintf(&b, `,{"name":"NEGOTIATE_ALLREDUCE","ph":"B","ts":%d,"pid":1,"args":{"set":0,"op":%d}}`, at+rank*5000, step)
			fmt.Fprintf(&b, `,{"ph":"E","ts":%d,"pid":1,"args":{"cached":true}},{"name":"ALLREDUCE","ph":"B","ts":%d,"pid":1}`, at+5100, at+5100)
			fmt.Fprintf(&b, `,{"ph":"E","ts":%d,"pid":1,"args":{"dtype":"float32","shape":"[1]","bytes":4,"set":0,"op":%d,"fused":1,"backend":"shm"}}`, at+6000, step)
		}
		testnet.WriteFile(t, filepath.Join(dir, name), b.String()+"]")
	}
	return dir
}

func TestTimeline(t *testing.T) {
	dir := putTimelines(t)
	stdout, stderr, status := output(t, "timeline", filepath.Join(dir, "t.json"))
	if status != 0 || stderr != "" ||
		!strings.Contains(stdout, "rank 1 held up all others for 5.00 ms per step (") {
		t.Errorf("got exit status %d, %q and %q, want rank 1 named", status, stdout, stderr)
	}
	stdout, stderr, status = output(t, "timeline", "--json", dir)
	var r report.Report
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || status != 0 || stderr != "" {
		t.Fatalf("got exit status %d, %q and %q: %v", status, stdout, stderr, err)
	}
	if r.Lateness.Ranks[1].Share != 1 || r.Steps != 9 || r.Fusion.ThresholdBytes != 128<<20 {
		t.Errorf("got %+v", r)
	}

	stdout, stderr, status = output(t, "timeline", dir, "--compare", dir)
	if status != 0 || stderr != "" ||
		!strings.Contains(stdout, "the runs cannot be compared: A has 8 complete steps") {
		t.Errorf("got exit status %d, %q and %q, want that there are too few steps", status, stdout, stderr)
	}
	stdout, stderr, status = output(t, "timeline", "--json", dir, "--compare", dir)
	var c report.Comparison
	if err := json.Unmarshal([]byte(stdout), &c); err != nil || status != 0 || c.B.Title != dir ||
		c.A.Ranks != 2 {
		t.Errorf("got exit status %d, %q and %q: %v", status, stdout, stderr, err)
	}

	out := filepath.Join(t.TempDir(), "all.json")
	_, stderr, status = output(t, "timeline", "--merge", out, dir)
	if status != 0 || !strings.Contains(stderr, "merged ") ||
		!strings.Contains(stderr, "events of 2 ranks to "+out) {
		t.Errorf("got exit status %d and %q, want the ranks merged", status, stderr)
	}
	text, err := os.ReadFile(out)
	if err != nil || !json.Valid(text) || !strings.Contains(string(text), `"name":"rank 1 on host h"`) {
		t.Errorf("got %.300q, %v, want a trace with both ranks", text, err)
	}
}

// TestTimelineOfWhatIsNone checks that hvdrun timeline fails with an error for files that are not timelines
// and for wrong flags.
func TestTimelineOfWhatIsNone(t *testing.T) {
	dir := putTimelines(t)
	bad := filepath.Join(dir, "bad")
	testnet.WriteFile(t, bad, "hello")
	other := putTimelines(t)
	testnet.WriteFile(t, filepath.Join(other, "t.json"), "hello")
	for _, c := range []struct {
		args   []string
		status int
		want   string
		report bool
	}{
		{[]string{bad}, 1, bad + ": byte 0: invalid character 'h' at start of value: want the JSON array",
			false},
		{[]string{filepath.Join(dir, "none.json")}, 1, "no such file", false},
		{[]string{dir + "/t.json", bad}, 1, bad + ": byte 0", true},
		{[]string{dir}, 0, "", true}, // a folder may contain other files too
		{nil, 2, "got no FILE, want rank 0's timeline", false},
		{[]string{"--compare", "none.json", dir}, 1, "--compare: ", false},
		{[]string{"--compare", other + "/t.json", dir}, 1, "--compare: " + other + "/t.json: byte 0", true},
		{[]string{"--compare", dir, "--merge", "x", dir}, 2, "want at most one of them", false},
		{[]string{"--merge"}, 2, "flag needs an argument: --merge", false},
		{[]string{"--merge", filepath.Join(dir, "t.json"), dir}, 1, "is one of the files to merge", false},
	} {
		stdout, stderr, status := output(t, append([]string{"timeline"}, c.args...)...)
		if status != c.status || !strings.Contains(stderr, c.want) || (stderr == "") != (c.want == "") ||
			(stdout != "") != c.report {
			t.Errorf("%q: got exit status %d, %q and %q, want %d and %q", c.args, status, stdout, stderr,
				c.status, c.want)
		}
	}
	stdout, _, status := output(t, "timeline", "--help")
	if status != 0 || !strings.Contains(stdout, "hvdrun timeline --merge all.json.gz timelines/") {
		t.Errorf("got exit status %d and %q, want help with examples", status, stdout)
	}
}
