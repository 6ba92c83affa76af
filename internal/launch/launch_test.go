package launch_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/testnet"
)

func TestStatus(t *testing.T) {
	for _, c := range []struct {
		name   string
		np     int
		script string
		want   int
		roots  []int
	}{
		{"success", 3, "exit 0", 0, nil},
		{"one of one", 1, "exit 3", 3, []int{0}},
		{"early success", 2, `[ $HOROVOD_RANK = 0 ] || exit 0; exec 3<>/dev/null; sleep 0.1`, 0, nil},
		{"killed", 2, `[ $HOROVOD_RANK = 1 ] || exit 0; kill -9 $$`, 137, []int{1}},
		{"highest", 2, `[ $HOROVOD_RANK = 1 ] || exit 0; exit 255`, 255, []int{1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := start(t, spec{NP: c.np, Command: sh(c.script)})
			r.ends(c.want)
			res := r.outcome()
			if res.Status != c.want || !slices.Equal(res.Roots, c.roots) || len(res.Ranks) != c.np {
				t.Errorf("got result %+v, want status %d, roots %v", res, c.want, c.roots)
			}
			if failed := strings.Contains(r.stderr.String(), "Root cause"); failed != (c.want != 0) {
				t.Errorf("a report was printed: %v", failed)
			}
		})
	}
}

func TestManyRanks(t *testing.T) {
	r := start(t, spec{NP: 64, Command: []string{"true"}})
	r.ends(0)
}

func TestCommandThatCannotRun(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, c := range []struct {
		name, command string
		want          int
	}{
		{"not found", "no-such-program", 127},
		{"path not found", filepath.Join(dir, "nothing"), 127},
		{"not executable", file("plain", "text", 0o600), 126},
		{"directory", dir, 126},
		{"of another machine", file("program", "\x7fELF\x02\x01\x01\x00not for this one", 0o700), 126},
		{"no interpreter", file("script", "#!/no/such/interpreter\n", 0o700), 127},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := start(t, spec{NP: 3, Command: []string{c.command}})
			r.ends(c.want)
			if out := r.stderr.String(); !strings.Contains(out, c.command) ||
				strings.Contains(out, "Root cause") {
				t.Errorf("got %q, want the command named and no report", out)
			}
		})
	}
}

// TestScriptWithoutInterpreter checks that /bin/sh runs a script that has no #! line, as execvp and shells
// do.
func TestScriptWithoutInterpreter(t *testing.T) {
	dir := t.TempDir()
	script := filepath.Join(dir, "a script")
	if err := os.WriteFile(script, []byte("# no interpreter\necho \"$0:$#:$1:$2\"; exit $HOROVOD_RANK\n"),
		0o700); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(dir, "empty")
	testnet.WriteScript(t, empty, "")
	for _, hosts := range []string{"", "h1,localhost"} {
		r := start(t, spec{NP: 2, Hosts: hosts, Command: []string{script, "a b", ""}})
		if got := r.wait(); got != 1 {
			t.Errorf("hosts %q: got exit status %d, want 1, from rank 1", hosts, got)
		}
		for rank := range 2 {
			if want := fmt.Sprintf("[%d]<stdout>:%s:2:a b:\n", rank, script); !strings.Contains(
				r.stdout.String(), want) {
				t.Errorf("hosts %q: got %q, want %q", hosts, r.stdout.String(), want)
			}
		}
	}
	r := start(t, spec{NP: 1, Command: []string{empty}})
	if got := r.wait(); got != 0 {
		t.Errorf("an empty script: got exit status %d, want 0", got)
	}
}

// TestEnvironment checks the environment of a rank on one host. If the launcher's own environment has
// variables such as HOROVOD_RANK, the rank must get its own values of them.
func TestEnvironment(t *testing.T) {
	r := start(t, spec{NP: 2, NoPrefix: true, Set: []string{"A=1", "A=2", "HOROVOD_CYCLE_TIME=3"},
		Command: sh(`env | sed "s/^/$HOROVOD_RANK:/"; [ -z "$(cat)" ]`)})
	r.ends(0)
	var lines []string
	for _, l := range strings.Split(r.stdout.String(), "\n") {
		if strings.HasPrefix(l, "1:") {
			lines = append(lines, l[2:])
		}
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"HOROVOD_RANK=1", "HOROVOD_SIZE=2", "HOROVOD_LOCAL_RANK=1", "HOROVOD_LOCAL_SIZE=2",
		"HOROVOD_CROSS_RANK=0",
		"HOROVOD_CROSS_SIZE=1", "HOROVOD_HOSTNAME=" + host, "HOROVOD_GLOO_RENDEZVOUS_ADDR=127.0.0.1",
		"HOROVOD_GLOO_RENDEZVOUS_PORT=4711", "PYTHONUNBUFFERED=1", "A=2", "HOROVOD_CYCLE_TIME=3",
		markVariable + "=" + r.mark,
	} {
		if !slices.Contains(lines, want) {
			t.Errorf("%s is missing", want)
		}
	}
	ids := regexp.MustCompile(`(?m)^[01]:HVD_JOB_ID=([0-9a-f]{32})$`).FindAllStringSubmatch(r.stdout.String(),
		-1)
	if len(ids) != 2 || ids[0][1] != ids[1][1] {
		t.Errorf("got job ids %v, want the same 128 bits at both ranks", ids)
	}
}

func TestOptionsThatCannotBe(t *testing.T) {
	nodes := &launch.Nodes{Servers: 1, Workers: 2}
	for _, c := range []struct {
		o    launch.Options
		want string
	}{
		{launch.Options{NP: 0, Command: []string{"true"}}, "number of ranks: got 0"},
		{launch.Options{NP: launch.MaxRanks + 1, Command: []string{"true"}}, "want 1 to 4096"},
		{launch.Options{NP: 1}, "command"},
		{launch.Options{NP: 1, Command: []string{""}}, "command"},
		{launch.Options{NP: 1, Command: []string{"true"}, Set: []string{"A"}}, "NAME=value"},
		{launch.Options{NP: 1, Command: []string{"true"}, Set: []string{"=v"}}, "NAME=value"},
		{launch.Options{NP: 1, Command: []string{"true"}, Set: []string{"HOROVOD_RANK=1"}}, "HOROVOD_RANK"},
		{launch.Options{NP: 1, Command: []string{"true"}, Set: []string{"HVD_JOB_ID=1"}}, "HVD_JOB_ID"},
		{launch.Options{NP: 3, Command: []string{"true"}, Nodes: nodes}, "number of nodes: got 3, want 4"},
		{launch.Options{NP: 5, Command: []string{"true"}, Nodes: nodes}, "number of nodes: got 5, want 4"},
		{launch.Options{NP: 1, Command: []string{"true"}, Nodes: &launch.Nodes{Servers: -1, Workers: 1}}, "-1 servers"},
		{launch.Options{NP: 4, Command: []string{"true"}, Nodes: nodes, Elastic: &launch.Elastic{}}, "cannot be elastic"},
		{launch.Options{NP: 4, Command: []string{"true"}, Hosts: []launch.Host{{Name: "h1", Slots: 3}}},
			"got 4 ranks, but the hosts have only 3 slots"},
	} {
		_, err := launch.Run(t.Context(), c.o)
		if _, ok := err.(*launch.OptionError); !ok || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: got error %v, want an OptionError with %q", c.o, err, c.want)
		}
	}
}

func TestSignalsEndTheJob(t *testing.T) {
	for _, c := range []struct {
		sent syscall.Signal
		seen string
		want int
	}{
		{unix.SIGINT, "SIGINT", 130},
		{unix.SIGTERM, "SIGTERM", 143},
		{unix.SIGHUP, "SIGTERM", 129},
	} {
		t.Run(unix.SignalName(c.sent), func(t *testing.T) {
			t.Parallel()
			r := start(t, spec{NP: 3, GraceMS: 60_000, Command: []string{self(), "rank", "obey"}})
			r.awaitOutput(&r.stdout, "ready", 3)
			r.signal(c.sent)
			r.ends(c.want)
			for rank := range 3 {
				if want := fmt.Sprintf("[%d]<stdout>:got %s\n", rank, c.seen); !strings.Contains(
					r.stdout.String(), want) {
					t.Errorf("missing %q", want)
				}
			}
		})
	}
}

func TestSignalsAreForwarded(t *testing.T) {
	for _, s := range []syscall.Signal{unix.SIGUSR1, unix.SIGUSR2, unix.SIGQUIT} {
		t.Run(unix.SignalName(s), func(t *testing.T) {
			t.Parallel()
			r := start(t, spec{NP: 2, Command: []string{self(), "rank", "obey"}})
			r.awaitOutput(&r.stdout, "ready", 2)
			r.signal(s)
			r.ends(0)
			if n := strings.Count(r.stdout.String(), "got "+unix.SignalName(s)); n != 2 {
				t.Errorf("%d ranks got the signal, want 2", n)
			}
		})
	}
}

func TestSecondInterruptKills(t *testing.T) {
	r := start(t, spec{NP: 2, GraceMS: 600_000, Command: []string{self(), "rank", "ignore"}})
	r.awaitOutput(&r.stdout, "ready", 2)
	r.signal(unix.SIGINT)
	r.awaitOutput(&r.stderr, "a second signal kills them", 1)
	r.interruptAgain()
	r.ends(130)
}

// interruptAgain sends SIGINT repeatedly until the launcher counts one of them as a second signal.
func (r *run) interruptAgain() {
	r.t.Helper()
	var sent time.Time
	r.await("word of a second signal", func() bool {
		if strings.Contains(r.stderr.String(), "SIGINT again: killing the ranks") {
			return true
		}
		if time.Since(sent) > 100*time.Millisecond {
			sent = time.Now()
			r.signal(unix.SIGINT)
		}
		return false
	})
}

// TestSignalThatComesTwice checks that two equal signals within Echo count as one, so that the ranks keep
// their grace period. timeout(1), for instance, sends a signal to its child and then to the process group of
// both. After the two signals the test sends another signal, which the launcher forwards. When the ranks
// print that signal, the launcher has handled the first two.
func TestSignalThatComesTwice(t *testing.T) {
	for _, s := range []syscall.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP} {
		t.Run(unix.SignalName(s), func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "later")
			r := start(t, spec{NP: 1, GraceMS: 600_000, EchoMS: 600_000,
				Command: sh("trap 'echo user' USR1; trap : INT TERM; echo ready; " +
					laterScript(file) + "echo saved")})
			r.awaitOutput(&r.stdout, "ready", 1)
			r.signalTwice(s, func() bool {
				return strings.Contains(r.stderr.String(), "a second signal kills them")
			})
			r.signal(unix.SIGUSR1)
			r.awaitOutput(&r.stdout, "user", 1)
			writeFile(file, "")
			if got := r.wait(); got != 128+int(s) || !strings.Contains(r.stdout.String(), "saved") {
				t.Errorf("got exit status %d and %q, want %d and the rank's last line", got,
					r.stdout.String(), 128+int(s))
			}
		})
	}
}

// signalTwice sends s, waits until the function between returns true, and sends s again. If less than EchoMS
// has passed between the two signals, they count as one.
func (r *run) signalTwice(s syscall.Signal, between func() bool) {
	r.t.Helper()
	r.signal(s)
	r.await("what comes between two signals", between)
	r.signal(s)
}

// TestSignalThatComesTwiceKeepsOutput sends two equal signals within Echo while nothing reads the launcher's
// output. The launcher must not discard the output.
func TestSignalThatComesTwiceKeepsOutput(t *testing.T) {
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	const numBytes = 1 << 20
	file := filepath.Join(t.TempDir(), "printed")
	r := start(t, spec{NP: 1, GraceMS: 600_000, EchoMS: 600_000, NoPrefix: true, stdout: writer,
		Command: sh(fmt.Sprintf(
			`trap 'exit 0' TERM; head -c %d /dev/zero; : >"%s"; while :; do sleep 0.01; done`, numBytes,
			file))})
	writer.Close()
	r.await("printed output", func() bool { _, err := os.Stat(file); return err == nil })
	r.signalTwice(unix.SIGTERM, func() bool { return len(r.processes()) == 0 })
	n, err := io.Copy(io.Discard, reader)
	if got := r.wait(); err != nil || got != 143 || n < numBytes {
		t.Errorf("got exit status %d, %d bytes and error %v, want 143 and at least %d", got, n, err, numBytes)
	}
}

// TestCommandThatLeavesItsGroup checks that the launcher ends a command that has joined another process group
// of its session.
func TestCommandThatLeavesItsGroup(t *testing.T) {
	r := start(t, spec{NP: 2, GraceMS: 600_000, Command: []string{self(), "rank", "stray"}})
	r.awaitOutput(&r.stdout, "ready", 2)
	r.signal(unix.SIGINT)
	r.awaitOutput(&r.stdout, "got SIGINT", 2)
	r.signal(unix.SIGTERM) // counts as a second signal, because it differs from the first
	r.ends(130)
}

func TestGraceEnds(t *testing.T) {
	r := start(t, spec{NP: 2, GraceMS: 50, Command: []string{self(), "rank", "ignore"}})
	r.awaitOutput(&r.stdout, "ready", 2)
	r.signal(unix.SIGTERM)
	r.ends(143)
}

func TestContextEndsTheJob(t *testing.T) {
	r := start(t, spec{NP: 2, GraceMS: 50, TimeoutMS: 200, Command: []string{self(), "rank", "ignore"}})
	r.ends(143)
	r.says(&r.stderr, "deadline exceeded")
}

// TestGraceIsForTheWholeGroup checks that after SIGTERM the processes in a rank's process group get time to
// clean up, even if the shell that started them dies at once. Processes that have left the group do not get
// the signal, so the launcher must kill them.
func TestGraceIsForTheWholeGroup(t *testing.T) {
	r := start(t, spec{NP: 2, GraceMS: 600_000, Command: sh(`setsid sleep 1000 & "` + self() +
		`" rank tidy; true`)})
	r.awaitOutput(&r.stdout, "ready", 2)
	r.signal(unix.SIGTERM)
	r.ends(143)
	if n := strings.Count(r.stdout.String(), "clean\n"); n != 2 {
		t.Errorf("%d of 2 ranks could clean up", n)
	}
}

// TestRanksStartWithDefaultSignals checks that signals have their default actions in ranks, although the
// launcher and the helpers catch signals.
func TestRanksStartWithDefaultSignals(t *testing.T) {
	for _, s := range []syscall.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGQUIT, unix.SIGUSR1} {
		t.Run(unix.SignalName(s), func(t *testing.T) {
			t.Parallel()
			r := start(t, spec{NP: 1, GraceMS: 600_000, Command: []string{"sleep", "1000"}})
			r.await("the command", func() bool {
				return slices.ContainsFunc(r.processes(), func(p process) bool {
					return p.command == "sleep 1000"
				})
			})
			r.signal(s)
			if got, want := r.wait(), 128+int(s); got != want {
				t.Errorf("got exit status %d, want %d", got, want)
			}
			if e := r.outcome().Ranks[0]; e.Signal != s {
				t.Errorf("got %+v, want killed by %v", e, s)
			}
		})
	}
}

// TestOthersGetTimeThenAreEnded lets one rank fail. The launcher must first give the other ranks time to end
// by themselves, then send SIGTERM, and then SIGKILL.
func TestOthersGetTimeThenAreEnded(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "later")
	r := start(t, spec{NP: 3, NoticeMS: 50, GraceMS: 6000, Command: sh(`
		case $HOROVOD_RANK in
		0) exec "` + self() + `" rank ignore;;
		1) exec "` + self() + `" rank obey;;
		2) ` + laterScript(file) + `exit 3;;
		esac`)})
	r.awaitOutput(&r.stdout, "ready", 2)
	writeFile(file, "")
	r.ends(3)
	res := r.outcome()
	if e := res.Ranks[0]; e.Signal != unix.SIGKILL || e.Sent != unix.SIGKILL {
		t.Errorf("the rank that ignores SIGTERM: got %+v, want killed by the launcher", e)
	}
	if e := res.Ranks[1]; e.Code != 0 || e.Sent != unix.SIGTERM {
		t.Errorf("the rank that obeys: got %+v, want ended by SIGTERM", e)
	}
	r.says(&r.stderr, "  rank 0: killed by SIGKILL from hvdrun, pid ")
}

// goProgram writes a program that "go run" can run, and returns its directory. The program prints "ready" and
// then sleeps for an hour.
func goProgram(t *testing.T) string {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":  "module waits\n\ngo 1.26\n",
		"main.go": "package main\n\nimport \"time\"\n\nfunc main() {\n\tprintln(\"ready\")\n\ttime.Sleep(time.Hour)\n}\n",
	} {
		testnet.WriteFile(t, filepath.Join(dir, name), text)
	}
	return dir
}

// TestNothingOutlivesTheLauncher kills the launcher with SIGKILL. All processes that the ranks have started
// must end.
func TestNothingOutlivesTheLauncher(t *testing.T) {
	for _, c := range []struct {
		name    string
		script  string
		perRank int // number of processes of each rank besides the helper
	}{
		{"background", "sleep 1000 & sleep 1000; true", 3},
		{"own session", "setsid sleep 1000 & sleep 1000; true", 3},
		{"daemon", "(setsid sh -c 'sleep 1000 & sleep 1000; true' &); exec sleep 1000", 4},
		{"many", "for i in 1 2 3 4 5 6 7 8 9; do setsid sh -c 'sleep 1000; true' & done; wait", 19},
		{"ignores signals", "trap '' INT TERM HUP; sleep 1000; true", 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			const np = 2
			r := start(t, spec{NP: np, Command: sh(c.script)})
			r.await("all processes", func() bool { return len(r.processes()) == np*(c.perRank+1) })
			r.signal(unix.SIGKILL)
			r.cmd.Wait()
			r.await("the end of all processes", func() bool { return len(r.processes()) == 0 })
		})
	}
}

func TestGoRunDoesNotOutliveTheLauncher(t *testing.T) {
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("needs the go command")
	}
	r := start(t, spec{NP: 2, Command: sh(`cd "` + goProgram(t) + `" && exec go run .`)})
	r.awaitOutput(&r.stderr, "ready", 2)
	if n := len(r.processes()); n != 2*3 {
		t.Errorf("%d processes, want helper, go and program for each rank", n)
	}
	r.signal(unix.SIGKILL)
	r.cmd.Wait()
	r.await("the end of all processes", func() bool { return len(r.processes()) == 0 })
}

func TestGoRunShowsItsOwnLines(t *testing.T) {
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("needs the go command")
	}
	r := start(t, spec{NP: 1, Command: sh(`cd "` + goProgram(t) + `" && exec go run .`)})
	r.awaitOutput(&r.stderr, "ready", 1)
	for _, p := range r.processes() {
		if strings.HasSuffix(p.command, "/waits") {
			unix.Kill(p.pid, unix.SIGKILL)
		}
	}
	r.ends(1)
	r.says(&r.stderr, "      signal: killed\n")
}

// TestHelperIsKilled kills a helper. The rank of that helper must be the root cause, and all processes of the
// job must end.
func TestHelperIsKilled(t *testing.T) {
	r := start(t, spec{NP: 2, NoticeMS: 50,
		Command: sh("setsid sleep 1000 & (setsid sh -c 'sleep 1000; true' &); sleep 1000; true")})
	r.await("all processes", func() bool { return len(r.processes()) == 2*6 })
	unix.Kill(r.helper("1"), unix.SIGKILL)
	r.ends(137)
	res := r.outcome()
	if !slices.Equal(res.Roots, []int{1}) || !res.Ranks[1].Lost || res.Ranks[1].PID == 0 {
		t.Errorf("got %+v, want rank 1 lost", res)
	}
	r.says(&r.stderr, "rank 1: its helper process was killed")
}

// TestCommandDiesWithItsHelper checks that the command of a rank dies if its helper is killed. The launcher
// is stopped meanwhile, so it cannot kill the command.
func TestCommandDiesWithItsHelper(t *testing.T) {
	r := start(t, spec{NP: 1, Command: []string{"sleep", "1000"}})
	r.await("all processes", func() bool { return len(r.processes()) == 2 })
	r.signal(unix.SIGSTOP)
	unix.Kill(r.helper("0"), unix.SIGKILL)
	r.await("the end of all processes", func() bool { return len(r.processes()) == 0 })
	r.signal(unix.SIGCONT)
	r.ends(137)
}

func TestHelperObeysOnlyTheLauncher(t *testing.T) {
	r := start(t, spec{NP: 1, Command: []string{self(), "rank", "obey"}})
	r.awaitOutput(&r.stdout, "ready", 1)
	for _, s := range []syscall.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1,
		unix.SIGUSR2} {
		unix.Kill(r.helper("0"), s)
	}
	r.signal(unix.SIGUSR1)
	if got := r.wait(); got != 0 || !strings.Contains(r.stdout.String(), "got SIGUSR1") {
		t.Errorf("got exit status %d and %q, want 0 and the launcher's SIGUSR1", got, r.stdout.String())
	}
}

func TestWhatACommandLeavesBehindIsKilled(t *testing.T) {
	for _, script := range []string{
		"sleep 1000 & echo done",
		"setsid sleep 1000 & echo done",
		"(setsid sh -c 'sleep 1000; true' &); echo done",
	} {
		t.Run(script, func(t *testing.T) {
			t.Parallel()
			r := start(t, spec{NP: 2, Command: sh(script)})
			r.ends(0)
			if n := strings.Count(r.stdout.String(), "<stdout>:done\n"); n != 2 {
				t.Errorf("%d of 2 ranks have printed", n)
			}
		})
	}
}

// TestOutputHeldFromOutside lets a process outside the job inherit the output of a rank and keep it open. The
// job must end nevertheless.
func TestOutputHeldFromOutside(t *testing.T) {
	file := filepath.Join(t.TempDir(), "later")
	r := start(t, spec{NP: 1, Command: sh("echo ready; " + laterScript(file) + "echo done")})
	r.awaitOutput(&r.stdout, "ready", 1)
	var held []*os.File
	for _, p := range r.processes() {
		f, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/1", p.pid), os.O_WRONLY, 0)
		if err == nil {
			defer f.Close()
			held = append(held, f)
		}
	}
	if len(held) == 0 {
		t.Fatal("could not open the rank's output")
	}
	writeFile(file, "")
	if got := r.wait(); got != 0 || !strings.Contains(r.stdout.String(), "<stdout>:done\n") {
		t.Errorf("got exit status %d and %q, want 0 and all output", got, r.stdout.String())
	}
}

// TestChildrenOfBeforeAreLeftAlone starts children in a process that then replaces itself with the launcher
// (execve). The launcher must not kill these children.
func TestChildrenOfBeforeAreLeftAlone(t *testing.T) {
	r := start(t, spec{NP: 2, Command: sh("kill -9 $PPID; sleep 1000"), NoticeMS: 10,
		wrap: []string{"sh", "-c", `sleep 1000 >/dev/null 2>&1 & echo $! >&2; exec "$@"`, "sh"}})
	r.cmd.Wait()
	left := r.processes()
	pid, _, _ := strings.Cut(r.stderr.String(), "\n")
	if len(left) != 1 || strconv.Itoa(left[0].pid) != pid {
		t.Errorf("left: %v, want process %s only", left, pid)
	}
	if got := r.cmd.ProcessState.ExitCode(); got != 137 {
		t.Errorf("got exit status %d, want 137", got)
	}
}

// laterScript returns shell commands that wait until file exists.
func laterScript(file string) string { return `until [ -e "` + file + `" ]; do sleep 0.01; done; ` }

// TestAlikeFailures checks that the report describes ranks that failed in the same way only once.
func TestAlikeFailures(t *testing.T) {
	t.Parallel()
	r := start(t, spec{NP: 9, NoticeMS: 60_000, Verdict: `{"epoch":1,"ranks":[0,1,2,3,4],"reason":"x"}`, Command: sh(`
		case $HOROVOD_RANK in
		2) echo other >&2;;
		[0-4]) echo same >&2;;
		esac
		exit 1`)})
	r.ends(1)
	_, report, _ := strings.Cut(r.stderr.String(), "Root cause")
	for want, n := range map[string]int{
		"last lines on stderr:\n      same\n": 1, "last lines on stderr:\n      other\n": 1,
		"\n  and 3 more in the same way: ranks 1, 3 and 4\n": 1,
		"Other ranks that failed:\n  rank 5: exit status 1":  1,
		"\n  and 3 more in the same way: ranks 6-8\n":        1,
	} {
		if got := strings.Count(report, want); got != n {
			t.Errorf("got %q %d times in the report, want %d:\n%s", want, got, n, report)
		}
	}
}

// TestRootCause checks which ranks the report names as the root cause. These must be the ranks of the
// verdict. If there is no verdict, it must be the rank that failed first.
func TestRootCause(t *testing.T) {
	for _, c := range []struct {
		name, verdict string
		old           bool
		roots         []int
		status        int
		report        []string
	}{
		{"first by time", "", false, []int{0}, 1,
			[]string{"Root cause (first observed failure):\n  rank 0: exit status 1\n",
				"Other ranks that failed:\n  rank 2: killed by SIGKILL, which hvdrun did not send"}},
		{"verdict", `{"epoch":1,"ranks":[2],"reason":"connection\nlost"}`, false, []int{2}, 137,
			[]string{"Root cause (found by the surviving ranks): connection\\nlost\n  rank 2: killed by SIGKILL", "Other ranks that failed:\n  rank 0: exit status 1, pid "}},
		{"long verdict", `{"epoch":1,"ranks":[2],"reason":"` + strings.Repeat("x", 4000) + ` timed out"}`, false, []int{2},
			137, []string{"xx timed out\n  rank 2: killed by SIGKILL"}},
		{"verdict on two", `{"epoch":1,"ranks":[0,2],"reason":"x"}`, false, []int{0, 2}, 1,
			[]string{"  rank 0: exit", "  rank 2: killed"}},
		{"verdict on a rank that ended well", `{"epoch":1,"ranks":[1],"reason":"left early"}`, false, []int{1}, 1,
			[]string{"left early\n  rank 1: exit status 0\n"}},
		{"old verdict on a rank that ended well", `{"epoch":1,"ranks":[1],"reason":"left early"}`, true, []int{1}, 1,
			[]string{"left early\n  rank 1: exit status 0\n"}},
		{"old verdict on a node that ended well", `{"epoch":1,"ranks":[1],"reason":"left early"}`, true, []int{0}, 1,
			[]string{"first observed failure"}},
		{"old verdict", `{"epoch":1,"ranks":[1,2],"reason":"x"}`, true, []int{1, 2}, 137, []string{"  rank 2: killed"}},
		{"verdict on nobody here", `{"epoch":1,"ranks":[9],"reason":"x"}`, false, []int{0}, 1,
			[]string{"first observed failure"}},
		{"garbage", `{"epoch":1,"ranks":`, false, []int{0}, 1, []string{"first observed failure"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "later")
			s := spec{NP: 3, NoticeMS: 60_000, Verdict: c.verdict, OldVerdict: c.old, Command: sh(`
				case ${HOROVOD_RANK:-$HVD_NODE_PROCESS} in
				0) exit 1;;
				1) exit 0;;
				2) ` + laterScript(file) + `kill -9 $$;;
				esac`)}
			if strings.Contains(c.name, "node") {
				s.Servers, s.Workers = 1, 1
			}
			r := start(t, s)
			r.awaitOutput(&r.stderr, ": exit status 1; waiting 1m0s for the other ", 1)
			writeFile(file, "")
			r.ends(c.status)
			if res := r.outcome(); !slices.Equal(res.Roots, c.roots) {
				t.Errorf("got roots %v, want %v", res.Roots, c.roots)
			}
			r.says(&r.stderr, c.report...)
		})
	}
}

func TestReportShowsTheLastLines(t *testing.T) {
	r := start(t, spec{NP: 1,
		Command: sh(`for i in $(seq 100 130); do echo line $i >&2; done; printf 'half' >&2; exit 1`)})
	r.ends(1)
	_, report, _ := strings.Cut(r.stderr.String(), "Root cause")
	if strings.Contains(report, "line 111\n") || !strings.Contains(report, "      line 112\n") ||
		!strings.Contains(report, "      line 130\n      half\n") {
		t.Errorf("got\n%s\nwant the last 20 lines, 112 to half", report)
	}
	if lines := r.outcome().Ranks[0].Stderr; len(lines) != 20 || lines[19] != "half" {
		t.Errorf("got %q, want 20 lines", lines)
	}
}

func TestPrefixes(t *testing.T) {
	const script = `printf '10%%\r50%%\r\n\nlast'; printf 'oops\n' >&2`
	for _, c := range []struct {
		s      spec
		stdout string
		stderr string
	}{
		{spec{}, "^\\[0\\]<stdout>:10%\r\\[0\\]<stdout>:50%\r\n\\[0\\]<stdout>:\n\\[0\\]<stdout>:last$",
			"^\\[0\\]<stderr>:oops\n$"},
		{spec{NoPrefix: true}, "^10%\r50%\r\n\nlast$", "^oops\n$"},
		{spec{Timestamp: true},
			"^[A-Z][a-z]{2} [A-Z][a-z]{2} [ 0-9]\\d \\d\\d:\\d\\d:\\d\\d \\d{4}\\[0\\]<stdout>:10%\r",
			"\\d{4}\\[0\\]<stderr>:oops\n$"},
	} {
		c.s.Command = sh(script)
		r := start(t, c.s)
		r.ends(0)
		out := r.stdout.String()
		if !regexp.MustCompile(c.stdout).MatchString(out) {
			t.Errorf("%+v: got %q on stdout, want %q", c.s, out, c.stdout)
		}
		if !regexp.MustCompile(c.stderr).MatchString(r.stderr.String()) {
			t.Errorf("%+v: got %q on stderr, want %q", c.s, r.stderr.String(), c.stderr)
		}
	}
}

// TestLongLinesAreNotMixed checks that each line of the output comes from one rank, although lines are longer
// than the launcher keeps in memory.
func TestLongLinesAreNotMixed(t *testing.T) {
	const np = 4
	r := start(t, spec{NP: np, Command: []string{self(), "rank", "flood"}})
	r.ends(0)
	var got [np]int
	for l := range strings.Lines(r.stdout.String()) {
		m := regexp.MustCompile(`^\[([0-3])\]<stdout>:(.*)\n$`).FindStringSubmatch(l)
		if m == nil {
			t.Fatalf("got %.80q, want a prefix", l)
		}
		rank := int(m[1][0] - '0')
		if letter := string(rune('a' + rank)); strings.Trim(m[2], letter) != "" {
			t.Fatalf("rank %d: got %.80q, want %s only", rank, m[2], letter)
		}
		if len(m[2]) > floodBytes {
			t.Fatalf("got a line of %d bytes, want at most %d", len(m[2]), floodBytes)
		}
		got[rank] += len(m[2])
	}
	for rank, n := range got {
		if n != floodLines*floodBytes {
			t.Errorf("rank %d: got %d bytes, want %d", rank, n, floodLines*floodBytes)
		}
	}
}

func TestOutputFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "logs")
	r := start(t, spec{NP: 11, OutputDir: dir,
		Command: sh(`printf "a\rb $HOROVOD_RANK\n\nhalf"; echo e$HOROVOD_RANK >&2`)})
	r.ends(0)
	for rank := range 11 {
		for name, want := range map[string]string{"stdout": fmt.Sprintf("a\rb %d\n\nhalf", rank),
			"stderr": fmt.Sprintf("e%d\n", rank)} {
			got, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("rank.%02d", rank), name))
			if err != nil || string(got) != want {
				t.Errorf("rank %d %s: got %q and error %v, want %q", rank, name, got, err, want)
			}
		}
		if want := fmt.Sprintf("\n[%d]<stdout>:half", rank); !strings.Contains(r.stdout.String(), want) {
			t.Errorf("the console lacks %q", want)
		}
	}
}

func TestOutputFilesCannotBeMade(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	writeFile(file, "")
	started := filepath.Join(t.TempDir(), "started")
	r := start(t, spec{NP: 2, OutputDir: file, Command: []string{"touch", started}})
	if got := r.wait(); got != 1 || !strings.Contains(r.stderr.String(), file) {
		t.Errorf("got exit status %d and %q, want 1 and the path", got, r.stderr.String())
	}
	if _, err := os.Stat(started); err == nil {
		t.Error("a rank was started")
	}
}

// TestOutputFilesOfOthers checks that the launcher neither writes to what another user has put in the place
// of an output file nor waits for it.
func TestOutputFilesOfOthers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give a file to another user")
	}
	for name, put := range map[string]func(path, precious string) error{
		"rank.0/stdout is a FIFO": func(path, _ string) error { return syscall.Mkfifo(path, 0o666) },
		"rank.0/stderr is a link": func(path, precious string) error {
			return errors.Join(os.Symlink(precious, path), os.Lchown(path, 1234, 1234))
		},
		"rank.0 is a link": func(path, precious string) error {
			return errors.Join(os.Symlink(filepath.Dir(precious), path), os.Lchown(path, 1234, 1234))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir, precious := t.TempDir(), filepath.Join(t.TempDir(), "stdout")
			what, _, _ := strings.Cut(name, " ")
			path := filepath.Join(dir, what)
			if err := errors.Join(os.WriteFile(precious, []byte("x"), 0o600),
				os.MkdirAll(filepath.Dir(path), 0o777), put(path, precious)); err != nil {
				t.Fatal(err)
			}
			r := start(t, spec{NP: 1, OutputDir: dir, Command: sh("echo y; echo z >&2")})
			if got := r.wait(); got != 1 || !strings.Contains(r.stderr.String(), path) {
				t.Errorf("got exit status %d and %q, want 1 and the path", got, r.stderr.String())
			}
			if got, err := os.ReadFile(precious); string(got) != "x" || err != nil {
				t.Errorf("the file of the user has %q, %v", got, err)
			}
		})
	}
}

func TestOutputThatIsLostIsAnError(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip(err)
	}
	defer full.Close()
	r := start(t, spec{NP: 1, stdout: full, Command: sh("echo x; exit 0")})
	if got := r.wait(); got != 1 || !strings.Contains(r.stderr.String(), "output was lost") {
		t.Errorf("got exit status %d and %q, want 1 and the reason", got, r.stderr.String())
	}
}

// TestOutputThatNobodyReads ends the reader of the launcher's output, and sends SIGINT or lets the rank
// print. The rank has the time to write a checkpoint, after another line of output.
func TestOutputThatNobodyReads(t *testing.T) {
	for status, interrupt := range map[int]bool{130: true, 141: false} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			t.Parallel()
			reader, writer, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			r := start(t, spec{NP: 1, GraceMS: 60_000, EchoMS: 1, stdout: writer, NoPrefix: true,
				Command: sh("cd " + dir + `; trap 'echo saving; sleep 0.3; echo saved >checkpoint; exit' INT TERM
echo ready; until [ -e go ]; do sleep 0.01; done; echo more; while :; do sleep 0.01; done`)})
			writer.Close()
			if line, err := bufio.NewReader(reader).ReadString('\n'); err != nil || line != "ready\n" {
				t.Errorf("got output %q and error %v, want ready", line, err)
			}
			reader.Close()
			if interrupt {
				r.signal(unix.SIGINT)
			} else {
				writeFile(filepath.Join(dir, "go"), "")
			}
			r.ends(status)
			if _, err := os.Stat(filepath.Join(dir, "checkpoint")); err != nil {
				t.Error(err)
			}
			want := "launch: output was lost: write /dev/stdout: broken pipe\n"
			r.says(&r.stderr, want)
		})
	}
}

// TestOutputLostAtTheEnd checks the status of a job that ends by itself before the launcher could end it
// because nobody reads its output.
func TestOutputLostAtTheEnd(t *testing.T) {
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	reader.Close()
	r := start(t, spec{NP: 1, GraceMS: 60_000, EchoMS: 60_000, stdout: writer, NoPrefix: true,
		Command: sh("echo a")})
	writer.Close()
	r.ends(141)
}

// TestBlockedTerminal runs ranks with endless output that nothing reads. The launcher must use bounded memory
// and must still handle signals.
func TestBlockedTerminal(t *testing.T) {
	for name, hosts := range map[string]string{"one host": "", "several": "h1,localhost"} {
		t.Run(name, func(t *testing.T) { blockedTerminal(t, hosts) })
	}
}

func blockedTerminal(t *testing.T, hosts string) {
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	r := start(t, spec{NP: 2, Hosts: hosts, GraceMS: 100, stdout: writer,
		Command: []string{"yes", strings.Repeat("x", 100)}})
	writer.Close()
	// The ranks are considered blocked when their processor time has stopped growing.
	var before []string
	still := 0
	r.await("blocked ranks", func() bool {
		var times []string
		for _, p := range r.processes() {
			if text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid)); err == nil && !p.isHelper() &&
				!p.isAgent() {
				times = append(times, strings.Join(strings.Fields(string(text))[13:15], "+"))
			}
		}
		if still++; len(times) != 2 || !slices.Equal(times, before) {
			still = 0
		}
		before = times
		return still > 60
	})
	status := testnet.ReadFile(t, fmt.Sprintf("/proc/%d/status", r.cmd.Process.Pid))
	peak := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(status)
	if kb, err := strconv.Atoi(string(peak[1])); err != nil || kb > 256<<10 {
		t.Errorf("the launcher has used %s kB, want at most 256 MiB", peak[1])
	}
	r.signal(unix.SIGINT)
	r.ends(130)
}
