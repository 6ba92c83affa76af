package launch_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// nodeScript returns a script for nodes. Each process of a node adds a line to a file, and has the number of
// its lines in $n. It then runs the part for its role. The function finish ends the parts that wait for it.
func nodeScript(t *testing.T, scheduler, server, worker string) []string {
	dir := t.TempDir()
	return sh(`cd ` + dir + `; echo >>$DMLC_ROLE.$DMLC_RANK; n=$(wc -l <$DMLC_ROLE.$DMLC_RANK)
finish() { echo >finished; }
await() { until [ -e "$1" ]; do sleep 0.01; done; }
case $DMLC_ROLE in
scheduler) ` + scheduler + `;;
server) ` + server + `;;
worker) ` + worker + `;;
esac`)
}

const untilFinished = "await finished"

// TestRestart checks that nodes that fail are started again, with their output, and that the job then ends
// with status 0. The output of a new process begins in a new line.
func TestRestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := start(t, spec{Servers: 2, Workers: 1, Restarts: 2, OutputDir: dir, Command: nodeScript(t,
		untilFinished, `printf "life $n"; case $DMLC_RANK.$n in 1.1) exit 7;; 1.2) echo >back;; esac; await finished`,
		`echo life $n; case $n in 1) kill -9 $$;; 2) exit 3;; esac; await back; finish`)})
	r.ends(0)
	for name, want := range map[string]string{"worker 0": "life 1\nlife 2\nlife 3\n", "server 0": "life 1\n",
		"server 1": "life 1\nlife 2\n"} {
		var got strings.Builder
		for line := range strings.Lines(r.stdout.String()) {
			if text, ok := strings.CutPrefix(line, "["+name+"]<stdout>:"); ok {
				got.WriteString(text)
			}
		}
		// The last line of the output may have no end.
		if strings.TrimSuffix(got.String(), "\n") != strings.TrimSuffix(want, "\n") {
			t.Errorf("%s: got output %q, want %q", name, got.String(), want)
		}
		text, err := os.ReadFile(filepath.Join(dir, strings.ReplaceAll(name, " ", "."), "stdout"))
		if strings.HasPrefix(name, "server") {
			want = strings.ReplaceAll(want, "\n", "")
		}
		if err != nil || string(text) != want {
			t.Errorf("%s: got file %q and error %v, want %q", name, text, err, want)
		}
	}
	for _, want := range []string{
		`hvdrun: worker 0: killed by SIGKILL, which hvdrun did not send .*; starting it again in 100ms \(restart 1 of 2\)\n`,
		`hvdrun: worker 0: exit status 3; starting it again in 200ms \(restart 2 of 2\)\n`,
		`hvdrun: server 1: exit status 7; starting it again in 100ms \(restart 1 of 2\)\n`,
		`\nhvdrun: restarts of nodes: 3\n(  .*\n){3}$`,
		`\n  worker 0 at [0-9:.]{12}: exit status 3, pid \d+, at [0-9:.]{12}\n`,
	} {
		if !regexp.MustCompile(want).MatchString(r.stderr.String()) {
			t.Errorf("got %q, want %s", r.stderr.String(), want)
		}
	}
	res := r.outcome()
	var ranks []int
	for _, restart := range res.Restarts {
		ranks = append(ranks, restart.Rank)
		if e := restart.Exit; e.Title != res.Ranks[restart.Rank].Title {
			t.Errorf("got the title %q of a process that was replaced, want %q", e.Title, res.Ranks[restart.Rank].Title)
		}
	}
	slices.Sort(ranks)
	if !slices.Equal(ranks, []int{2, 3, 3}) || res.Ranks[3].Status() != 0 || res.Roots != nil {
		t.Errorf("got result %+v, want restarts of ranks 2, 3 and 3", res)
	}
}

// TestRestartsUsedUp checks that the job ends with the status of the node that has failed once more than it
// may be started again. The report shows its last process, and not a node that failed before and was started
// again, or was about to be.
func TestRestartsUsedUp(t *testing.T) {
	t.Parallel()
	r := start(t, spec{Servers: 1, Workers: 2, Restarts: 2, Command: nodeScript(t, untilFinished,
		`[ $n = 1 ] && exit 9; echo >back; await finished`,
		`[ $DMLC_RANK = 1 ] && await finished; echo life $n >&2; [ $n = 3 ] && await back; exit $n`)})
	r.ends(3)
	r.says(&r.stderr, "Root cause (first observed failure):\n  worker 0: exit status 3, after 2 restarts\n",
		"last lines on stderr:\n      life 3\n", "\n  server 0: killed by SIGTERM from hvdrun, pid",
		"hvdrun: worker 0: exit status 3, after 2 restarts; waiting 5s for the other nodes to end\n")
	if res := r.outcome(); !slices.Equal(res.Roots, []int{2}) || len(res.Restarts) != 3 {
		t.Errorf("got result %+v, want root 2 and 3 restarts", res)
	}
}

// TestNoRestartWithoutScheduler checks that no node is started again once the scheduler has ended. If the
// scheduler has failed, it is the root cause, and otherwise the node.
func TestNoRestartWithoutScheduler(t *testing.T) {
	for name, c := range map[string]struct {
		scheduler string
		worker    string
		status    int
		root      int
	}{
		"scheduler fails":                 {"await failed; exit 5", "echo >failed; exit 3", 5, 0},
		"scheduler ends":                  {"await failed; exit 0", "echo >failed; exit 3", 3, 2},
		"scheduler ends before a failure": {"echo >ended; exit 0", "await ended; sleep 0.2; exit 3", 3, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, spec{Servers: 1, Workers: 1, Restarts: 9, NoticeMS: 100,
				Command: nodeScript(t, c.scheduler, untilFinished, c.worker)})
			r.ends(c.status)
			if res := r.outcome(); !slices.Equal(res.Roots, []int{c.root}) {
				t.Errorf("got result %+v, want root %d", res, c.root)
			}
		})
	}
}

// TestRestartAfterHelperDeath checks that a node whose helper was killed, and the node with it, is started
// again.
func TestRestartAfterHelperDeath(t *testing.T) {
	t.Parallel()
	r := start(t, spec{Servers: 1, Workers: 1, Restarts: 1, Command: nodeScript(t, untilFinished,
		untilFinished, `if [ $n = 1 ]; then kill -9 $PPID; sleep 1000; fi; finish`)})
	r.ends(0)
	const want = "hvdrun: worker 0: its helper process was killed, and the command with it; starting it again"
	r.says(&r.stderr, want)
}

// TestRestartOfMissingProgram takes the program away before a node is started again, as a build does for a
// moment. This is a failure as others, so the node is started again later, if it may.
func TestRestartOfMissingProgram(t *testing.T) {
	for restarts, want := range map[int]int{9: 0, 1: 127} {
		t.Run(strconv.Itoa(restarts), func(t *testing.T) {
			t.Parallel()
			program := filepath.Join(t.TempDir(), "sh")
			if err := exec.Command("cp", "/bin/sh", program).Run(); err != nil {
				t.Fatal(err)
			}
			command := nodeScript(t, "echo >one; await finished", "echo >two; await finished",
				"if [ $n = 1 ]; then await one; await two; mv "+program+" "+program+".old; exit 3; fi; finish")
			command[0] = program
			r := start(t, spec{Servers: 1, Workers: 1, Restarts: restarts, Command: command})
			why := "worker 0: command \"" + program + "\": no such file or directory"
			if want == 0 {
				r.awaitOutput(&r.stderr, why+"; starting it again", 1)
				if err := os.Rename(program+".old", program); err != nil {
					t.Fatal(err)
				}
			}
			r.ends(want)
			if want != 0 && (!strings.Contains(r.stderr.String(), "\n  "+why+", after a restart\n") ||
				strings.Contains(r.stderr.String(), "pid:  0")) {
				t.Errorf("got %q, want a report with %q and no process ID", r.stderr.String(), why)
			}
		})
	}
}

// TestRestartRefused starts a node again on a host whose agent has no file descriptor left. The job fails as
// if the host were lost.
func TestRestartRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := start(t, spec{Servers: 1, Workers: 1, Restarts: 9, Hosts: "h1,h2", NoticeMS: 100,
		Command: nodeScript(t, untilFinished, "echo server; exec sleep 1000",
			"echo worker; until [ -e "+dir+"/limited ]; do sleep 0.01; done; exit 3")})
	r.awaitOutput(&r.stdout, "]<stdout>:", 2)
	limit := unix.Rlimit{}
	for _, host := range []string{"h1", "h2"} {
		pid := r.agentOf(host)
		if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &limit); err != nil {
			t.Fatal(err)
		}
		limit.Cur = 0
		if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, &limit, nil); err != nil {
			t.Fatal(err)
		}
	}
	writeFile(filepath.Join(dir, "limited"), "")
	r.ends(137)
	if want := regexp.MustCompile(`\n  worker 0: lost host h\d: .*too many open files, after a restart\n`); !want.MatchString(
		r.stderr.String()) {
		t.Errorf("got %q, want %v", r.stderr.String(), want)
	}
}

// TestSignalBeforeRestart checks that a signal ends a job in which a node is to be started again.
func TestSignalBeforeRestart(t *testing.T) {
	t.Parallel()
	r := start(t, spec{Servers: 1, Workers: 1, Restarts: 1000, Command: nodeScript(t, untilFinished,
		untilFinished, `exit 3`)})
	r.awaitOutput(&r.stderr, "(restart 3 of 1000)", 1)
	r.signal(syscall.SIGINT)
	r.ends(130)
	if res := r.outcome(); res.Signal != syscall.SIGINT || res.Roots != nil {
		t.Errorf("got result %+v, want SIGINT and no root cause", res)
	}
}
