package trace

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

const clockChild = "HVD_TEST_CLOCK_CHILD"

// TestClockOfAChild is not a test of its own: the tests below run it in child processes. It prints the clock
// domain and the reading of the child's clock.
func TestClockOfAChild(t *testing.T) {
	if os.Getenv(clockChild) == "" {
		t.Skip("run by other tests")
	}
	shown, err := monotonic(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	fmt.Println(clockDomain(), shown)
}

// Two processes of a host are in the same clock domain and read the same clock: the reading of a child lies
// between two readings by this process, one taken before the child's reading and one after it.
func TestProcessesShareADomain(t *testing.T) {
	before, err := monotonic(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	domain, shown := childClock(t, exec.Command(os.Args[0], "-test.run=^TestClockOfAChild$"))
	after, err := monotonic(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if domain != clockDomain() {
		t.Errorf("a child is in domain %s, want %s", domain, clockDomain())
	}
	if shown < before || shown > after {
		t.Errorf("a child reads %v, want %v to %v", shown, before, after)
	}
}

// For a time in the past, monotonic returns the reading that the clock had at that time. So the reading for
// an hour ago is an hour less than the reading for now.
func TestMonotonicOfThePast(t *testing.T) {
	now := time.Now()
	a, err := monotonic(now)
	if err != nil {
		t.Fatal(err)
	}
	b, err := monotonic(now.Add(-time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	// In every try of monotonic, the thread may be descheduled between two readings of a clock. So the error
	// is bounded only by the running time of the test.
	if d, took := a-b-time.Hour, time.Since(now); d.Abs() > took {
		t.Errorf("the reading for an hour ago is off by %v, want at most %v", d, took)
	}
}

// A process in another time namespace is in another clock domain, because the offset of its clock differs.
func TestTimeNamespace(t *testing.T) {
	if err := exec.Command("unshare", "-T", "--monotonic", "1000", "true").Run(); err != nil {
		t.Skip("this machine makes no time namespaces: ", err)
	}
	here, err := monotonic(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	domain, shown := childClock(t, exec.Command("unshare", "-T", "--monotonic", "1000", os.Args[0],
		"-test.run=^TestClockOfAChild$"))
	if domain == clockDomain() {
		t.Errorf("both processes are in domain %s", domain)
	}
	if d := shown - here; d < 1000*time.Second || d > 1100*time.Second {
		t.Errorf("the clocks are %v apart, want 1000 s and a little", d)
	}
}

func childClock(t *testing.T, cmd *exec.Cmd) (domain string, shown time.Duration) {
	t.Helper()
	cmd.Env = append(os.Environ(), clockChild+"=1")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(out), "\n")
	domain, text, _ := strings.Cut(line, " ")
	if shown, err = time.ParseDuration(text); err != nil {
		t.Fatal(err)
	}
	return domain, shown
}
