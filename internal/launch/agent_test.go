package launch

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"testing"

	"github.com/hashicorp/yamux"
	"golang.org/x/sys/unix"
)

// TestLauncherIsGoneAtBegin ends the connection to the launcher while the agent starts ranks. Afterwards no
// rank may be alive. The test runs the agent in a process of its own, because the agent reaps all children of
// its process.
func TestLauncherIsGoneAtBegin(t *testing.T) {
	const inChild = "LAUNCH_TEST_GONE_AT_BEGIN"
	if os.Getenv(inChild) == "" {
		cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.timeout=60s")
		cmd.Env = append(os.Environ(), inChild+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	for range 20 {
		mine, theirs := net.Pipe()
		var f family
		ended := make(chan error, 1)
		go func() { ended <- serveLauncher(&link{in: theirs, out: theirs}, 0, os.Environ(), &f, nil) }()
		l := &link{in: mine, out: mine}
		if err := readHello(l); err != nil {
			t.Fatal(err)
		}
		s, err := newSession(yamux.Client, l, 0)
		if err != nil {
			t.Fatal(err)
		}
		control, err := s.OpenStream()
		if err == nil {
			err = send(control, order{Job: &hostJob{Command: words{"sleep", "1000"},
				Ranks: []words{{"A=1"}, {"A=2"}}}})
		}
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
	const inChild = "LAUNCH_TEST_REFUSAL_OF_NEW_RANK"
	if os.Getenv(inChild) == "" {
		cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.timeout=60s")
		cmd.Env = append(os.Environ(), inChild+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	mine, theirs := net.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- serveLauncher(&link{in: theirs, out: theirs}, 0, os.Environ(), new(family), nil) }()
	l := &link{in: mine, out: mine}
	if err := readHello(l); err != nil {
		t.Fatal(err)
	}
	s, err := newSession(yamux.Client, l, 0)
	if err != nil {
		t.Fatal(err)
	}
	control, err := s.OpenStream()
	if err == nil {
		err = send(control, order{Job: &hostJob{Command: words{"sleep", "1000"}, Restarts: true}})
	}
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
	var limit unix.Rlimit
	err = unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)
	err = errors.Join(err, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Max: limit.Max}))
	start(1)
	if n := next(); n.Refused == nil {
		t.Fatalf("got %+v, want a refusal", n)
	}
	err = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	start(1)
	for n := next(); n.Rank != 1 || !isStarted(n); n = next() { // the agent has killed the first rank
	}
	s.Close()
	<-ended
}
