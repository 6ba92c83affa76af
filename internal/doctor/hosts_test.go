package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

func TestAgent(t *testing.T) {
	s := soundSystem()
	holds(t, "there", look(t, s, "agent"), "ok agent: /usr/bin/agent")
	s.LookPath = func(string) (string, error) { return "", errors.New("not there") }
	holds(t, "not needed", look(t, s, "agent"), "warn agent: not there; only jobs on several hosts need it")
	s.Hosts = []string{"h1"}
	holds(t, "needed", look(t, s, "agent"), "fail agent: not there")
}

func TestHosts(t *testing.T) {
	s := soundSystem()
	s.Hosts = []string{"h1", "h2", "h3"}
	s.Reach = func(_ context.Context, argv []string) (string, error) {
		if !slices.Equal(slices.Delete(slices.Clone(argv), 2, 3), []string{"agent", "-q", "true"}) {
			t.Errorf("got %q, want the agent, its flag, a host and true", argv)
		}
		switch argv[2] {
		case "h1":
			return "Warning: something\n", nil
		case "h2":
			return "banner\nh2: Permission denied (publickey).\r\n\n", errors.New("exit status 255")
		default:
			return "", errors.New("exit status 1")
		}
	}
	lines := look(t, s, "hosts")
	holds(t, "three", lines, "ok host h1: reached in", "fail host h2: ssh-copy-id h2",
		"fail host h3: run it by hand: agent -q h3 true")
	if want := "exit status 255: h2: Permission denied (publickey)."; lines[1].Text != want {
		t.Errorf("got %q, want %q", lines[1].Text, want)
	}
	if lines[2].Text != "exit status 1" {
		t.Errorf("got %q, want only the exit status", lines[2].Text)
	}
	for said, want := range map[string]string{
		"Host key verification failed.":                                         "accept it by running once: ssh h",
		"ssh: Could not resolve hostname h: Name or service not known":          "correct the name",
		"ssh: connect to host h port 22: Connection refused":                    "start sshd on the host",
		"ssh: connect to host h port 22: Connection timed out":                  "firewall",
		"ssh: connect to host h port 22: No route to host":                      "on this network",
		"kex_exchange_identification: Connection closed by remote host\nlost..": "run it by hand: agent h true",
	} {
		if got := fixFor("h", said, "agent h true"); !strings.Contains(got, want) {
			t.Errorf("%q: got %q, want %q", said, got, want)
		}
	}
}

// TestManyHosts checks that at most maxAgents agents run at the same time, and that Run returns at its time
// limit if hosts do not answer.
func TestManyHosts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = 8 * time.Second
		s := soundSystem()
		for i := range maxAgents + 8 {
			s.Hosts = append(s.Hosts, fmt.Sprintf("h%d", i))
		}
		var now, most atomic.Int32
		wait := time.Second
		s.Reach = func(ctx context.Context, _ []string) (string, error) {
			if n := now.Add(1); n > most.Load() {
				most.Store(n)
			}
			defer now.Add(-1)
			select {
			case <-time.After(wait):
				return "", nil
			case <-ctx.Done():
				return "", errors.New("killed")
			}
		}
		start := time.Now()
		lines := Run(t.Context(), s, []Check{{"hosts", "hosts", hosts}}, limit)
		if took := time.Since(start); took != 2*time.Second || most.Load() != maxAgents {
			t.Errorf("took %v with %d at once, want 2s with %d", took, most.Load(), maxAgents)
		}
		for i, l := range lines {
			if l.Status != OK || l.Name != "host "+s.Hosts[i] || l.Text != "reached in 1s" {
				t.Errorf("got %+v, want host %s reached in 1s", l, s.Hosts[i])
			}
		}

		wait, start = time.Hour, time.Now()
		lines = Run(t.Context(), s, []Check{{"hosts", "hosts", hosts}}, limit)
		if took := time.Since(start); took != limit-grace {
			t.Errorf("took %v, want %v", took, limit-grace)
		}
		hung, left := 0, 0
		for _, l := range lines {
			switch {
			case l.Status == Fail && l.Text == "no answer within 7s" &&
				l.Fix == "run it by hand to see why it hangs: agent -q "+strings.TrimPrefix(l.Name, "host ")+
					" true":
				hung++
			case l.Status == Warn && strings.HasPrefix(l.Text, "not tried"):
				left++
			default:
				t.Errorf("got %+v", l)
			}
		}
		if hung != maxAgents || left != 8 {
			t.Errorf("got %d without an answer and %d not tried, want %d and 8", hung, left, maxAgents)
		}
	})
}

// script writes a program for /bin/sh to a file and returns its path.
func script(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "agent")
	testnet.WriteScript(t, file, "#!/bin/sh\n"+text)
	return file
}

// TestReach checks the standard error and the error that reach returns for agents that succeed, fail, print
// much text or are killed.
func TestReach(t *testing.T) {
	for name, c := range map[string]struct{ text, said, err string }{
		"success":    {`test "$*" = "-v h1 true"`, "", ""},
		"no input":   {"cat && exit 3", "", "exit status 3"},
		"no output":  {"seq 100000; exit 4", "", "exit status 4"},
		"last words": {"echo early >&2; echo late >&2; exit 255", "early\nlate\n", "exit status 255"},
		"many words": {"head -c 100000 /dev/zero | tr '\\0' x >&2; printf y >&2; exit 1",
			strings.Repeat("x", keptBytes-1) + "y", "exit status 1"},
		"by a signal": {"kill -9 $$", "", "signal: killed"},
	} {
		said, err := reach(testnet.Context(t), []string{script(t, c.text), "-v", "h1", "true"})
		if (err == nil) != (c.err == "") || err != nil && err.Error() != c.err || said != c.said {
			t.Errorf("%s: got %.200q and error %v, want %.200q and %q", name, said, err, c.said, c.err)
		}
	}
	if _, err := reach(testnet.Context(t), []string{filepath.Join(t.TempDir(), "none")}); !errors.Is(err,
		os.ErrNotExist) {
		t.Errorf("got error %v, want %v", err, os.ErrNotExist)
	}
}

// TestReachIgnoresWhatIsLeft runs an agent that leaves behind a process that keeps standard error open. reach
// must not wait for that process. ssh with ControlPersist leaves such a process.
func TestReachIgnoresWhatIsLeft(t *testing.T) {
	pid := filepath.Join(t.TempDir(), "pid")
	said, err := reach(testnet.Context(t),
		[]string{script(t, "sleep 100 & echo $! >'"+pid+"'; echo said >&2")})
	if err != nil || said != "said\n" {
		t.Errorf("got %q and error %v, want what it said", said, err)
	}
	left := readPID(t, pid)
	if err := syscall.Kill(left, syscall.SIGKILL); err != nil {
		t.Errorf("process %d: %v", left, err)
	}
}

// TestReachKills checks that an agent that hangs is killed together with the processes that it started.
func TestReachKills(t *testing.T) {
	pid := filepath.Join(t.TempDir(), "pid")
	agent := script(t, "trap '' TERM INT HUP; sleep 100 & echo $! >'"+pid+".new'; mv '"+pid+".new' '"+pid+
		"'; wait")
	ctx, cancel := context.WithCancel(testnet.Context(t))
	defer cancel()
	end := make(chan error, 1)
	go func() {
		_, err := reach(ctx, []string{agent})
		end <- err
	}()
	testnet.Eventually(t, "the agent's child", func() bool { _, err := os.Stat(pid); return err == nil })
	child := readPID(t, pid)
	cancel()
	select {
	case err := <-end:
		if err == nil {
			t.Error("got no error")
		}
	case <-testnet.Context(t).Done():
		t.Fatal("reach has not returned after the end of its context")
	}
	testnet.Eventually(t, "the end of the agent's child", func() bool { return gone(child) })
}

// gone reports whether a process has ended, even if it is still a zombie.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func readPID(t *testing.T, file string) (pid int) {
	t.Helper()
	text := testnet.ReadFile(t, file)
	if _, err := fmt.Sscan(string(text), &pid); err != nil {
		t.Fatal(err)
	}
	return pid
}
