package launch

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"testing"

	"github.com/hashicorp/yamux"

	"github.com/gohvd/gohvd/internal/testnet"
)

// inOwnProcess reports whether this process runs only this test. Otherwise it starts such a process, because
// an agent reaps all children of its process.
func inOwnProcess(t *testing.T) bool {
	t.Helper()
	const test = "LAUNCH_TEST_OF_AGENT"
	if os.Getenv(test) != "" {
		return true
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.timeout=60s")
	cmd.Env = append(os.Environ(), test+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	return false
}

// startAgent starts an agent and returns the launcher's session and its control stream. The channel ended
// gets the error of the agent.
func startAgent(t *testing.T, f *family) (s *session, control *yamux.Stream, ended chan error) {
	t.Helper()
	mine, theirs := net.Pipe()
	ended = make(chan error, 1)
	go func() { ended <- serveLauncher(&link{in: theirs, out: theirs}, 0, os.Environ(), f, nil) }()
	l := &link{in: mine, out: mine}
	err := readHello(l)
	if err == nil {
		s, err = newSession(yamux.Client, l, 0)
	}
	if err == nil {
		control, err = s.OpenStream()
	}
	if err != nil {
		t.Fatal(err)
	}
	return s, control, ended
}

// TestLauncherIsGoneAtBegin ends the connection to the launcher while the agent starts ranks. Afterwards no
// rank may be alive.
func TestLauncherIsGoneAtBegin(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	for range 20 {
		var f family
		s, control, ended := startAgent(t, &f)
		err := send(control, order{Job: &hostJob{Command: words{"sleep", "1000"},
			Ranks: []words{{"A=1"}, {"A=2"}}}})
		for range 4 {
			_, openErr := s.OpenStream()
			err = errors.Join(err, openErr)
		}
		var n notice
		if err = errors.Join(err, receive(control, maxNoticeBytes, &n),
			send(control, order{Begin: true})); err != nil || !n.Ready {
			t.Fatalf("got %+v and error %v, want a ready agent", n, err)
		}
		s.Close()
		if err := <-ended; err == nil {
			t.Error("got no error, want that the launcher is gone")
		}
		f.mu.Lock()
		if len(f.own) > 0 {
			t.Fatalf("%d helpers are left", len(f.own))
		}
		f.mu.Unlock()
	}
}

// TestRefusalOfNewRank orders an agent to start another rank when the agent has no file descriptor left. The
// agent refuses, and can still carry out orders.
func TestRefusalOfNewRank(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	s, control, ended := startAgent(t, new(family))
	err := send(control, order{Job: &hostJob{Command: words{"sleep", "1000"}, Restarts: true}})
	next := func() (n notice) {
		t.Helper()
		if err = errors.Join(err, receive(control, maxNoticeBytes, &n)); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := next(); !n.Ready {
		t.Fatalf("got %+v, want a ready agent", n)
	}
	start := func(index int) {
		for range 2 {
			_, openErr := s.OpenStream()
			err = errors.Join(err, openErr)
		}
		err = errors.Join(err, send(control, order{Start: &index, Env: []string{"A=1"}}))
	}
	isStarted := func(n notice) bool { return n.Report != nil && n.Report.PID != 0 }
	err = send(control, order{Begin: true})
	start(0)
	if n := next(); !isStarted(n) {
		t.Fatalf("got %+v, want a rank that was started", n)
	}
	restore := testnet.LimitDescriptors(t, 0)
	start(1)
	if n := next(); n.Refused == nil {
		t.Fatalf("got %+v, want a refusal", n)
	}
	restore()
	start(1)
	for n := next(); n.Rank != 1 || !isStarted(n); n = next() { // the agent has killed the first rank
	}
	s.Close()
	<-ended
}
