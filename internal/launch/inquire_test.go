package launch_test

import (
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestQuitAsks checks that SIGQUIT starts a survey. A second SIGQUIT must be forwarded to the ranks, even if
// the survey has not ended. The survey must end when the job ends.
func TestQuitAsks(t *testing.T) {
	r := start(t, spec{NP: 2, Inquire: true, Verbose: true, Command: []string{self(), "rank", "obey"}})
	r.awaitOutput(&r.stdout, "ready", 2)
	r.awaitOutput(&r.stderr, "surveyed for an alarm\n", 1)
	r.signal(unix.SIGQUIT)
	r.awaitOutput(&r.stderr, "an alarm meanwhile: ignored, because the ranks are already being asked", 1)
	if strings.Contains(r.stdout.String(), "got") {
		t.Errorf("got %q, want no rank to get a signal", r.stdout.String())
	}
	r.signal(unix.SIGQUIT)
	r.ends(0)
	if n := strings.Count(r.stdout.String(), "got SIGQUIT"); n != 2 {
		t.Errorf("%d ranks got SIGQUIT, want 2", n)
	}
	out := r.stderr.String()
	if n := strings.Count(out, "surveyed for SIGQUIT\n"); n != 1 {
		t.Errorf("%d surveys were printed, want 1", n)
	}
	if state := regexp.MustCompile(
		`asked for SIGQUIT: \["process \d+ is (sleeping|running)" "process \d+ is (sleeping|running)"\]`); !state.MatchString(out) {
		t.Errorf("got %q, want the state of both processes", out)
	}
	if strings.Contains(out, "epilogue") || strings.Count(out, `end ["exit status 0, at `) != 1 {
		t.Errorf("got %q, want an epilogue that knows that no rank has failed", out)
	}
}

func TestEpilogue(t *testing.T) {
	r := start(t, spec{NP: 2, Inquire: true, Command: sh(`[ $HOROVOD_RANK = 1 ] || exit 0; exit 3`)})
	r.ends(3)
	_, after, found := strings.Cut(r.stderr.String(), "Root cause")
	if want := regexp.MustCompile(
		`-\nepilogue \["exit status 0, at [0-9:.]+" "exit status 3, at [0-9:.]+"\]\n$`); !found ||
		!want.MatchString(after) {
		t.Errorf("got %q, want an epilogue after the report", r.stderr.String())
	}
}
