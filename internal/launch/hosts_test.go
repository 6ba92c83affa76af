package launch_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// several holds the options with which a launcher starts agents on other hosts. In these tests the agents of
// all hosts run on this host.
type several struct {
	list   []launch.Host
	addrs  []netip.AddrPort
	secret string
	torch  netip.AddrPort
	reach  func(host string, words []string) []string
	close  func() error
}

func severalHosts(s *spec) (h several, err error) {
	if h.list, err = launch.ParseHosts(s.Hosts); err != nil {
		return h, err
	}
	var key secret.Secret
	key, h.secret = secret.New()
	kv := store.NewHashStore(store.Limits{})
	server, err := store.Serve("127.0.0.1:0", kv, store.Config{Secret: key})
	if err != nil {
		return h, err
	}
	h.close = func() error { return errors.Join(server.Close(), kv.Close()) }
	if s.TorchStore != "" {
		if h.torch, err = netip.ParseAddrPort(s.TorchStore); err != nil {
			return h, err
		}
	}
	if s.StoreAddrs == nil {
		s.StoreAddrs = []string{"STORE"}
	}
	for _, text := range s.StoreAddrs {
		addr, err := netip.ParseAddrPort(strings.Replace(text, "STORE", server.Addr(), 1))
		if err != nil {
			return h, err
		}
		h.addrs = append(h.addrs, addr)
	}
	if s.Reach == nil {
		s.Reach = []string{"env", "AT={host}"}
	}
	h.reach = func(host string, words []string) (argv []string) {
		for _, w := range s.Reach {
			argv = append(argv, strings.ReplaceAll(w, "{host}", host))
		}
		return append(argv, words...)
	}
	return h, nil
}

// byShell returns the value of spec.Reach that runs an agent by a shell script. In the script, "$@" is the
// command of the agent and $AT is the host.
func byShell(script string) []string {
	return []string{"env", "AT={host}", "sh", "-c", script, "sh"}
}

// TestSeveralHosts starts four ranks on three hosts and checks the environment of each rank: the rank and
// size variables, the variables of its host, and the variables that the launcher adds.
func TestSeveralHosts(t *testing.T) {
	t.Parallel()
	mine := []string{"env", "USER=me", "SSH_TTY=mine", "HVD_HOSTID=mine", "CUDA_VISIBLE_DEVICES=mine",
		"HVD_CYCLE=mine"}
	r := start(t, spec{NP: 4, Hosts: "h1:2,localhost,h2:3", NoPrefix: true, Set: []string{"A=1", "HOME=/set"},
		wrap: mine, TorchStore: "192.0.2.1:7", Reach: []string{
			"env", "-i", "{mark}", "AT={host}", "HOME=/home/{host}", "USER=me@{host}", "SSH_TTY={host}",
			"HVD_TYPO=1", "HVD_HOSTID={host}", "A=0",
			"PATH=/nowhere", "RANK=9", "MASTER_ADDR=other", "CUDA_VISIBLE_DEVICES={host}",
		}, Command: sh(`env | sed "s/^/$HOROVOD_RANK:/"; [ -z "$(cat)" ]`)})
	r.ends(0)
	lines := strings.Split(r.stdout.String(), "\n")
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for rank, want := range [][]string{
		{"HOROVOD_HOSTNAME=h1", "HOROVOD_LOCAL_RANK=0", "HOROVOD_LOCAL_SIZE=2", "HOROVOD_CROSS_RANK=0",
			"HOROVOD_CROSS_SIZE=3", "AT=h1"},
		{"HOROVOD_HOSTNAME=h1", "HOROVOD_LOCAL_RANK=1", "HOROVOD_LOCAL_SIZE=2", "HOROVOD_CROSS_RANK=0",
			"HOROVOD_CROSS_SIZE=1", "USER=me@h1",
			"SSH_TTY=h1", "HVD_HOSTID=h1", "CUDA_VISIBLE_DEVICES=h1", "RANK=1", "LOCAL_RANK=1",
			"GROUP_RANK=0", "GROUP_WORLD_SIZE=3",
			"MASTER_ADDR=192.0.2.1"},
		{"HOROVOD_HOSTNAME=localhost", "HOROVOD_LOCAL_RANK=0", "HOROVOD_LOCAL_SIZE=1", "HOROVOD_CROSS_RANK=1",
			"HOROVOD_CROSS_SIZE=3", "USER=me",
			"SSH_TTY=mine", "HVD_HOSTID=mine"},
		{"HOROVOD_HOSTNAME=h2", "HOROVOD_LOCAL_RANK=0", "HOROVOD_LOCAL_SIZE=1", "HOROVOD_CROSS_RANK=2",
			"HOROVOD_CROSS_SIZE=3", "AT=h2"},
	} {
		want = append(want, fmt.Sprint("HOROVOD_RANK=", rank), "HOROVOD_SIZE=4", "A=1", "HOME=/set",
			"HVD_CYCLE=mine", "PWD="+dir, markVariable+"="+r.mark,
			"HOROVOD_GLOO_RENDEZVOUS_ADDR=127.0.0.1")
		for _, w := range want {
			if !slices.Contains(lines, fmt.Sprintf("%d:%s", rank, w)) {
				t.Errorf("rank %d lacks %s", rank, w)
			}
		}
	}
	for _, unwanted := range []string{"0:HVD_TYPO=1", "0:PATH=/nowhere", "2:AT=localhost", "0:RANK=9",
		"3:MASTER_ADDR=other", "1:HOROVOD_RANK=77"} {
		if slices.Contains(lines, unwanted) {
			t.Errorf("got %s", unwanted)
		}
	}
	ids := regexp.MustCompile(`(?m)^\d:(HVD_JOB_ID|HVD_SECRET)=(\S+)$`).FindAllStringSubmatch(
		r.stdout.String(), -1)
	seen := make(map[string]int)
	for _, id := range ids {
		seen[id[1]+id[2]]++
	}
	if len(ids) != 8 || len(seen) != 2 {
		t.Errorf("got %v, want one job id and one secret for all", seen)
	}
}

// TestBytesTravel checks that arguments and variables that are not UTF-8 arrive unchanged at ranks on another
// host, and that no process has the secret in its arguments.
func TestBytesTravel(t *testing.T) {
	t.Parallel()
	r := start(t, spec{NP: 1, Hosts: "h1", NoPrefix: true, wrap: []string{"env", "B=\xff\xfe"},
		Command: sh("printf '%s' \"$B\" | od -An -tx1; cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | awk 'index($0, ENVIRON[\"HVD_SECRET\"]) {n++} END {print n+0}'")})
	r.wait()
	if got := r.stdout.String(); got != " ff fe\n0\n" {
		t.Errorf("got %q, want the bytes, and no process with the secret", got)
	}
}

// TestStatusOverHosts checks the exit status, the root cause and the report of jobs on two hosts.
func TestStatusOverHosts(t *testing.T) {
	for _, c := range []struct {
		name   string
		script string
		want   int
		roots  []int
		report string
	}{
		{"success", "exit 0", 0, nil, ""},
		{"failure", `[ $HOROVOD_RANK = 2 ] || exit 0; echo oops >&2; exit 3`, 3, []int{2},
			"  rank 2: exit status 3\n    host: h2\n"},
		{"killed", `[ $HOROVOD_RANK = 1 ] || exit 0; kill -9 $$`, 137, []int{1}, "    host: h1\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := start(t, spec{NP: 4, Hosts: "h1:2,h2:2", Command: sh(c.script)})
			r.ends(c.want)
			res := r.outcome()
			if res.Status != c.want || !slices.Equal(res.Roots, c.roots) || len(res.Ranks) != 4 ||
				res.Ranks[1].Host != "h1" || res.Ranks[2].Host != "h2" {
				t.Errorf("got result %+v, want status %d, roots %v", res, c.want, c.roots)
			}
			if !strings.Contains(r.stderr.String(), c.report) || c.report == "" && r.stderr.String() != "" {
				t.Errorf("the report lacks %q", c.report)
			}
			for rank, e := range res.Ranks {
				if took := time.Since(e.At); e.PID == 0 || took > deadline {
					t.Errorf("rank %d: got %+v, want a process and this host's time", rank, e)
				}
			}
		})
	}
}

// TestReportNamesHosts checks that the report of a failure names the host of every failed rank, also of ranks
// that failed only because another rank had failed.
func TestReportNamesHosts(t *testing.T) {
	t.Parallel()
	r := start(t, spec{NP: 2, Hosts: "h1,h2", NoticeMS: 10,
		Command: sh(`[ $HOROVOD_RANK = 1 ] && exit 3; sleep 1000`)})
	r.ends(3)
	if !regexp.MustCompile(`  rank 0: killed by SIGTERM from hvdrun, pid \d+ on h1, at `).MatchString(
		r.stderr.String()) {
		t.Errorf("got %s", r.stderr.String())
	}
}

// TestSignalsOverHosts checks that a signal to the launcher reaches the ranks on all hosts.
func TestSignalsOverHosts(t *testing.T) {
	for _, c := range []struct {
		sent syscall.Signal
		want int
	}{{unix.SIGINT, 130}, {unix.SIGTERM, 143}, {unix.SIGUSR1, 0}} {
		t.Run(unix.SignalName(c.sent), func(t *testing.T) {
			t.Parallel()
			r := start(t, spec{NP: 3, Hosts: "h1:2,localhost", GraceMS: 600_000,
				Command: []string{self(), "rank", "obey"}})
			r.awaitOutput(&r.stdout, "ready", 3)
			r.signal(c.sent)
			r.ends(c.want)
			for rank := range 3 {
				if want := fmt.Sprintf("[%d]<stdout>:got %s\n", rank,
					unix.SignalName(c.sent)); !strings.Contains(r.stdout.String(), want) {
					t.Errorf("missing %q", want)
				}
			}
		})
	}
}

// startSaving starts a job whose ranks save their state in the files saved.R after SIGTERM, when there is a
// file go. It returns the agent of the host of the ranks 0 and 1.
func startSaving(t *testing.T) (r *run, agent int) {
	t.Parallel()
	r = start(t, spec{NP: 3, Hosts: "h1:2,localhost", GraceMS: 600_000, EchoMS: 1, LivenessMS: 600_000,
		Command: sh(`trap 'echo got; until [ -e go ]; do sleep 0.01; done; >saved.$HOROVOD_RANK; echo saved; exit 1' TERM
echo ready; until false; do sleep 0.01; done`), dir: t.TempDir()})
	r.awaitOutput(&r.stdout, "ready", 3)
	return r, r.agentOf("h1")
}

// TestSIGTERMToAgentAlone sends SIGTERM to the agent of a host while the launcher is stopped. The ranks of
// that host save their state if the launcher is killed then, or if the agent gets SIGTERM again.
func TestSIGTERMToAgentAlone(t *testing.T) {
	for _, lost := range []bool{true, false} {
		t.Run(fmt.Sprintf("lost=%t", lost), func(t *testing.T) {
			r, agent := startSaving(t)
			writeFile(filepath.Join(r.cmd.Dir, "go"), "")
			r.signal(unix.SIGSTOP)
			unix.Kill(agent, unix.SIGTERM)
			if lost {
				r.signal(unix.SIGKILL)
			}
			r.await("the end of the agent", func() bool {
				if !lost {
					unix.Kill(agent, unix.SIGTERM)
				}
				return !slices.ContainsFunc(r.processes(), func(p process) bool { return p.pid == agent })
			})
			for rank := range 2 {
				if _, err := os.Stat(filepath.Join(r.cmd.Dir, fmt.Sprint("saved.", rank))); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestSIGTERMAfterAgent sends SIGTERM to the agent of a host and then to the launcher. The first one to the
// launcher does not count as a second signal, but the next one does.
func TestSIGTERMAfterAgent(t *testing.T) {
	r, agent := startSaving(t)
	unix.Kill(agent, unix.SIGTERM)
	r.awaitOutput(&r.stdout, "got", 3)
	r.await("the end of the ranks", func() bool {
		r.signal(unix.SIGTERM)
		return strings.Contains(r.stderr.String(), "SIGTERM again: killing the ranks")
	})
	r.ends(143)
}

// TestSignalsToAgent sends signals to the agent of a host. SIGTERM ends the job as SIGTERM to the launcher
// does, also if the launcher gets it later. The others are dropped.
func TestSignalsToAgent(t *testing.T) {
	r, agent := startSaving(t)
	for _, s := range []syscall.Signal{unix.SIGINT, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2, unix.SIGTERM} {
		unix.Kill(agent, s)
	}
	r.awaitOutput(&r.stdout, "got", 3)
	r.signal(unix.SIGTERM)
	writeFile(filepath.Join(r.cmd.Dir, "go"), "")
	r.ends(143)
	if got := strings.Count(r.stdout.String(), "saved"); got != 3 {
		t.Errorf("got %d ranks that have ended by themselves, want 3", got)
	}
}

// TestNothingOutlivesTheLauncherOverHosts kills the launcher with SIGKILL. All processes of the ranks must
// end, including processes in other sessions and processes that ignore signals.
func TestNothingOutlivesTheLauncherOverHosts(t *testing.T) {
	t.Parallel()
	r := start(t, spec{NP: 2, Hosts: "h1,localhost",
		Command: sh("trap '' INT TERM HUP; (setsid sh -c 'sleep 1000 & sleep 1000; true' &); sleep 1000; true")})
	r.await("all processes", func() bool { return len(r.processes()) == 1+2*(1+2+3) })
	r.signal(unix.SIGKILL)
	r.cmd.Wait()
	r.await("the end of all processes", func() bool { return len(r.processes()) == 0 })
}

// agentOf returns the process ID of the agent of a host. If several processes have the command line of the
// agent, agentOf returns the ID of the process that is last in the list of processes.
func (r *run) agentOf(host string) (pid int) {
	r.t.Helper()
	r.await("agent of "+host, func() bool {
		for _, p := range r.processes() {
			env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.pid))
			if p.isAgent() && bytes.Contains(env, []byte("AT="+host+"\x00")) {
				pid = p.pid
			}
		}
		return pid != 0
	})
	return pid
}

// TestAgentIsKilled kills the agent of one host. The report must name the ranks of that host as lost, and say
// that the agent has ended if the command that reaches the host ends with status 0 then.
func TestAgentIsKilled(t *testing.T) {
	for _, c := range []struct {
		name  string
		reach []string
		want  string
	}{
		{"with its command", nil, "lost host h2: env: killed by SIGKILL"},
		{"without its command", byShell(`"$@"; exit 0`), "lost host h2: its agent has ended"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := start(t, spec{NP: 3, Hosts: "h1,h2:2", NoticeMS: 50, Reach: c.reach,
				Command: sh("(setsid sh -c 'sleep 1000; true' &); echo ready; sleep 1000; true")})
			r.awaitOutput(&r.stdout, "ready", 3)
			unix.Kill(r.agentOf("h2"), unix.SIGKILL)
			r.ends(137)
			res := r.outcome()
			if len(res.Roots) != 1 || res.Roots[0] == 0 || !res.Ranks[1].Lost || !res.Ranks[2].Lost ||
				res.Ranks[0].Lost || res.Ranks[1].PID == 0 {
				t.Errorf("got %+v, want ranks 1 and 2 lost", res)
			}
			if strings.Count(r.stderr.String(), c.want) < 2 {
				t.Errorf("the report lacks %q:\n%s", c.want, r.stderr.String())
			}
		})
	}
}

// TestAgentIsStopped stops an agent. The launcher must report the host and its ranks as lost, and the job
// must end without waiting for that agent.
func TestAgentIsStopped(t *testing.T) {
	t.Parallel()
	r := start(t, spec{NP: 2, Hosts: "h1,h2", NoticeMS: 50, LivenessMS: 1, KillMS: 600_000,
		Command: sh("echo ready; sleep 1000; true")})
	r.awaitOutput(&r.stdout, "ready", 2)
	unix.Kill(r.agentOf("h2"), unix.SIGSTOP)
	r.ends(137)
	if want := "rank 1: lost host h2: received nothing from the other end for 3s"; !strings.Contains(r.stderr.String(), want) {
		t.Errorf("the report lacks %q:\n%s", want, r.stderr.String())
	}
}

// TestLauncherIsStopped stops the launcher process. If it is stopped for a short time, the job must go on. If
// it is stopped for a long time, the agents must kill their ranks, even while output of the ranks waits for
// the launcher.
func TestLauncherIsStopped(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	flood, orders, answers := filepath.Join(dir, "flood"), filepath.Join(dir, "orders"),
		filepath.Join(dir, "answers")
	r := start(t, spec{NP: 3, Hosts: "h1:2,h2", NoticeMS: 50, LivenessMS: 6000,
		Reach:   byShell(`tee '` + orders + `' | "$@" | tee '` + answers + `'`),
		Command: sh("echo ready; " + laterScript(flood) + "yes")})
	r.awaitOutput(&r.stdout, "ready", 3)
	// From here on the ranks start and end nothing, so launcher and agents send each other only pings.
	awaitPings := func(file string, n int64) {
		t.Helper()
		size := func() int64 {
			info, err := os.Stat(file)
			if err != nil {
				t.Fatal(err)
			}
			return info.Size()
		}
		before := size()
		r.await("pings in "+filepath.Base(file), func() bool { return size() >= before+n*pingBytes })
	}
	r.signal(unix.SIGSTOP)
	awaitPings(answers, 1)
	r.signal(unix.SIGCONT)
	awaitPings(orders, 2)
	awaitPings(answers, 1)
	helpers := 0
	for _, p := range r.processes() {
		if p.isHelper() {
			helpers++
		}
	}
	if helpers != 3 {
		t.Errorf("%d helpers are left after a short stop, want 3", helpers)
	}
	testnet.WriteFile(t, flood, "")
	r.signal(unix.SIGSTOP)
	r.await("the end of all agents", func() bool {
		return !slices.ContainsFunc(r.processes(), func(p process) bool {
			// The arguments of the shell contain the command of the agent, so isAgent is true for the shell
			// too.
			ofShell := strings.HasPrefix(p.command, "sh ")
			return p.isAgent() && !ofShell || p.isHelper() || p.command == "yes"
		})
	})
	r.signal(unix.SIGCONT)
	r.ends(137)
	const want = "the launcher is gone, and the ranks were killed (connection to the launcher: received nothing from the other end for 6s)"
	if strings.Count(r.stderr.String(), want) == 0 || strings.Contains(r.stderr.String(), "are still alive") {
		t.Errorf("got %s, want %q", r.stderr.String(), want)
	}
}

// pingBytes is the size of a ping. The reply to a ping has the same size.
const pingBytes = 12

// TestLostHostIsBlamed checks that the ranks of a lost host count as failed from the time at which the
// launcher last received something from the host. So the rank on the lost host must be the root cause,
// although a rank on another host failed before the launcher declared the host lost.
func TestLostHostIsBlamed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	files := []string{filepath.Join(dir, "word"), filepath.Join(dir, "end")}
	r := start(t, spec{NP: 2, Hosts: "h1,h2", NoticeMS: 60_000, LivenessMS: 3000,
		Command: sh("echo ready; [ $HOROVOD_RANK = 0 ] || exec sleep 1000; " + laterScript(files[0]) +
			"echo word; " + laterScript(files[1]) + "exit 5")})
	r.awaitOutput(&r.stdout, "ready", 2)
	agent := r.agentOf("h2")
	unix.Kill(agent, unix.SIGSTOP)
	// The rank on the other host prints a word after the agent has stopped. When the launcher prints that
	// word, it has read everything that the agent sent before.
	r.await("a stopped agent", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", agent))
		return err == nil && strings.Contains(string(stat), ") T ")
	})
	for i, f := range files {
		testnet.WriteFile(t, f, "")
		if i == 0 {
			r.awaitOutput(&r.stdout, "word", 1)
		}
	}
	r.ends(137)
	if res := r.outcome(); !slices.Equal(res.Roots, []int{1}) || res.Ranks[0].Code != 5 {
		t.Errorf("got %+v, want rank 1 blamed", res)
	}
}

// TestAgentThatObeysNothing runs an agent that stays alive but carries out no orders. The job is ended by a
// signal or by the failure of a rank. In both cases the launcher must kill that agent and name its ranks.
func TestAgentThatObeysNothing(t *testing.T) {
	for name, c := range map[string]struct {
		command []string
		want    int
	}{
		"signal":  {[]string{self(), "rank", "obey"}, 130},
		"failure": {sh("echo ready; exit 3"), 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, spec{NP: 2, Hosts: "h1,h2", NoticeMS: 50, GraceMS: 50, KillMS: 100,
				Command: c.command,
				Reach:   byShell(`[ $AT = h2 ] || exec "$@"; exec "$1" "fake agent" '{"Notices": ["{\"Ready\":true}"], "Lives": true}'`)})
			r.awaitOutput(&r.stdout, "ready", 1)
			if name == "signal" {
				r.signal(unix.SIGINT)
			}
			if got := r.wait(); got != c.want ||
				!strings.Contains(r.stderr.String(), "processes of rank 1 are still alive after SIGKILL") {
				t.Errorf("got exit status %d and %q, want %d and rank 1 named", got, r.stderr.String(),
					c.want)
			}
		})
	}
}

// TestAgentThatEndsEarly runs agents that end before they have sent all notices. The launcher must report
// that output was lost, and must not blame ranks that ended with status 0.
func TestAgentThatEndsEarly(t *testing.T) {
	const (
		ready   = `{"Ready":true}`
		started = `{"Report":{"pid":12345}}`
		ended   = `{"Report":{"ended":true}}`
		gone    = `{"Report":{"gone":true}}`
		over    = `{"Over":true}`
		bye     = `{"Bye":true}`
	)
	for _, c := range []struct {
		name    string
		notices []string
		status  int
		want    string // text that must follow "the last output was lost: "
	}{
		{"before it says gone", []string{ready, started, ended}, 1, "env: exit status 7: bad line"},
		{"gone alone", []string{ready, started, gone}, 137, "env: exit status 7: bad line"},
		{"without bye", []string{ready, started, ended, gone, over}, 1, "env: exit status 7: bad line"},
		{"bye before the end", []string{ready, started, ended, gone, bye}, 1,
			"the agent sent Bye before"},
		{"all", []string{ready, started, ended, gone, over, bye}, 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := start(t, spec{NP: 1, Hosts: "h1", Command: []string{"true"},
				Reach: fake{Notices: c.notices, Print: "half"}.reach()})
			got, said := r.wait(), r.stderr.String()
			want := "launch: host h1: the last output was lost: " + c.want
			if got != c.status || c.want != "" && !strings.Contains(said, want) ||
				c.want == "" && strings.Contains(said, "lost") {
				t.Errorf("got exit status %d and %q, want %d and %q", got, said, c.status, want)
			}
			if out := r.stdout.String(); out != "[0]<stdout>:half" {
				t.Errorf("got %q, want the output that the agent had sent", out)
			}
			// The report has the time of the launcher's clock, because the clock of the agent's host may
			// differ.
			if e := r.outcome().Ranks[0]; time.Since(e.At) > deadline || e.PID != 12345 {
				t.Errorf("got %+v, want this host's time", e)
			}
		})
	}
}

// TestSecretIsForAgents runs, in place of an agent, a program that does not send the hello of an agent. The
// launcher must not send anything to it, because the first order contains the secret.
func TestSecretIsForAgents(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "received")
	testnet.WriteFile(t, file, "") // the program may not have started after StartMS
	r := start(t, spec{NP: 1, Hosts: "h1", StartMS: 500, Reach: byShell(`echo menu; cat >"` + file + `"`),
		Command: []string{"true"}})
	r.ends(1)
	if received, err := os.ReadFile(file); err != nil || len(received) > 0 {
		t.Errorf("the program was sent %d bytes (error %v), want none", len(received), err)
	}
}

func TestHelperIsKilledOverHosts(t *testing.T) {
	t.Parallel()
	r := start(t, spec{NP: 2, Hosts: "h1,h2", NoticeMS: 50,
		Command: sh("setsid sleep 1000 & echo ready; sleep 1000; true")})
	r.awaitOutput(&r.stdout, "ready", 2)
	unix.Kill(r.helper("1"), unix.SIGKILL)
	r.ends(137)
	r.says(&r.stderr, "rank 1: its helper process was killed")
}

// TestHelperIsStopped stops a helper, so that the helper carries out no orders. The agent must kill the
// helper, and the launcher must not kill the agent.
func TestHelperIsStopped(t *testing.T) {
	t.Parallel()
	r := start(t, spec{NP: 2, Hosts: "h1:2", GraceMS: 50, KillMS: 5000,
		Command: sh("setsid sleep 1000 & echo ready; sleep 1000; true")})
	r.awaitOutput(&r.stdout, "ready", 2)
	unix.Kill(r.helper("0"), unix.SIGSTOP)
	r.signal(unix.SIGINT)
	r.ends(130)
	for _, never := range []string{"lost", "still alive after SIGKILL"} {
		if strings.Contains(r.stderr.String(), never) {
			t.Errorf("the agent did not kill the helper, or was killed because of it:\n%s", r.stderr.String())
		}
	}
}

// TestHostsThatAreNotReady checks that no rank starts on any host if one host does not get ready. The
// launcher must print an error that names the host and the reason.
func TestHostsThatAreNotReady(t *testing.T) {
	const helloText = `\0hvdrun host agent\0`
	for _, c := range []struct {
		name    string
		s       spec
		want    int
		stderr  []string
		exclude string
	}{
		{"no command", spec{Command: []string{"no-such-program"}}, 127,
			[]string{`command "no-such-program" on host h`, "not found"}, ""},
		{"not executable", spec{Command: []string{os.TempDir()}}, 126, []string{`on host h`}, ""},
		{"no interpreter", spec{Command: []string{brokenScript(t)}}, 127,
			[]string{`on host h`, "no such file"}, "Root cause"},
		{"no reach", spec{Reach: []string{"no-such-agent"}}, 1, []string{"host h1: no-such-agent: ",
			"not found"}, ""},
		{"no reach, and this host", spec{Hosts: "h1:2,localhost:2", Reach: []string{"no-such-agent"}}, 1,
			[]string{"host h1: no-such-agent: "}, ""},
		{"no hvdrun", spec{Reach: byShell(`[ $AT = h1 ] || exec /no/hvdrun; exec "$@"`)}, 1,
			[]string{"host h2: found no hvdrun at " + self() +
				" on that host: give its path with --remote-hvdrun", "exit status 127",
				"/no/hvdrun: not found", "hvdrun: host h2: "}, ""},
		{"ends at once", spec{
			Reach: byShell(`[ $AT = h1 ] || { echo name unknown >&2; exit 255; }; exec "$@"`)}, 1,
			[]string{"launch: host h2: env: exit status 255: name unknown\n"}, ""},
		{"is killed", spec{Reach: byShell(`kill -9 $$`)}, 1, []string{": env: killed by SIGKILL"}, ""},
		{"says something else", spec{Reach: byShell(`echo this is a menu`)}, 1,
			[]string{`got "this is a menu", want the greeting of an hvdrun agent`}, ""},
		{"says without end", spec{Reach: []string{"sh", "-c", "yes menu"}}, 1,
			[]string{"without the greeting of an hvdrun agent", "menu"}, ""},
		{"another version", spec{Reach: byShell(`printf '` + helloText + `\0\0\0\7'; cat`)}, 1,
			[]string{"got version 7 of the agent protocol", "want version 6", "same hvdrun"}, ""},
		{"no session", spec{Reach: byShell(`printf '` + helloText +
			`\0\0\0\6\377\377\377\377\377\377\377\377\377\377\377\377'; cat >/dev/null`)}, 1,
			[]string{"invalid protocol version"}, ""},
		{"bad frames", spec{Reach: fake{Notices: []string{strings.Repeat("x", 70_000)}}.reach()}, 1,
			[]string{"frame of 70000 bytes"}, ""},
		{"garbled", spec{Reach: fake{Notices: []string{"{"}}.reach()}, 1, []string{"malformed message"}, ""},
		{"gone and done", spec{Reach: fake{Notices: []string{`{"Rank":256,"Report":{"gone":true}}`}}.reach()},
			1, []string{"malformed notice from the agent: got rank index 256, want less than 2"}, ""},
		{"hangs", spec{StartMS: 10_000, Reach: byShell(`[ $AT = h1 ] || exec sleep 1000; exec "$@"`)}, 1,
			[]string{"host h2: its agent was not ready within 10s"}, "h1:"},
		{"closes its output", spec{Reach: byShell(`[ $AT = h1 ] || exec sleep 1000 >/dev/null; exec "$@"`)},
			1, []string{"host h2: the agent closed its output, but env is still running"}, ""},
		{"no store", spec{Hosts: "h1:4", StoreAddrs: []string{"127.0.0.1:9", "127.0.0.1:7"}}, 1,
			[]string{"host h1: cannot reach the job's store",
				"at 127.0.0.1:9, 127.0.0.1:7: check for a firewall", "--network-interfaces"}, ""},
		{"no directory", spec{dir: filepath.Join(t.TempDir(), "gone"),
			Reach: byShell(`rmdir "$PWD"; exec "$@"`)}, 1,
			[]string{"working directory", "/gone: no such file"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.s.NP, c.s.KillMS = 4, 600_000
			if c.s.Hosts == "" {
				c.s.Hosts = "h1:2,h2:2"
			}
			started := filepath.Join(t.TempDir(), "started")
			if c.s.Command == nil {
				c.s.Command = []string{"touch", started}
			}
			if c.s.dir != "" {
				if err := os.Mkdir(c.s.dir, 0o700); err != nil {
					t.Fatal(err)
				}
			}
			r := start(t, c.s)
			r.ends(c.want)
			r.says(&r.stderr, c.stderr...)
			if c.exclude != "" && strings.Contains(r.stderr.String(), c.exclude) {
				t.Errorf("got %q, which has %q", r.stderr.String(), c.exclude)
			}
			if _, err := os.Stat(started); err == nil {
				t.Error("a rank was started")
			}
		})
	}
}

func brokenScript(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "script")
	testnet.WriteScript(t, path, "#!/no/such/interpreter\n")
	return path
}

// TestLoginThatPrints starts an agent through a login that prints text first. The launcher must skip the text
// that the login prints on standard output, and must print its text on standard error.
func TestLoginThatPrints(t *testing.T) {
	t.Parallel()
	r := start(t, spec{NP: 1, Hosts: "h1",
		Reach:   byShell(`printf 'Welcome!\n\0hvdrun host\n'; head -c 60000 /dev/zero; echo hear ye >&2; exec "$@"`),
		Command: []string{"echo", "works"}})
	if got := r.wait(); got != 0 || r.stdout.String() != "[0]<stdout>:works\n" ||
		r.stderr.String() != "hvdrun: host h1: hear ye\n" {
		t.Errorf("got exit status %d, %q and %q", got, r.stdout.String(), r.stderr.String())
	}
}

// TestStoreAddresses checks that an agent chooses, from several addresses of the store, the first one at
// which the store can be reached.
func TestStoreAddresses(t *testing.T) {
	t.Parallel()
	r := start(t, spec{NP: 1, Hosts: "h1", StoreAddrs: []string{"127.0.0.1:9", "STORE", "[::1]:9"},
		NoPrefix: true,
		Command:  sh("echo $HOROVOD_GLOO_RENDEZVOUS_ADDR; [ $HOROVOD_GLOO_RENDEZVOUS_PORT -gt 9 ]")})
	if got := r.wait(); got != 0 || r.stdout.String() != "127.0.0.1\n" {
		t.Errorf("got exit status %d and %q", got, r.stdout.String())
	}
}

// TestInterruptWhileHostsGetReady sends SIGINT while the commands that reach the hosts hang and ignore
// signals. The job must end at once, before any rank was started.
func TestInterruptWhileHostsGetReady(t *testing.T) {
	t.Parallel()
	r := start(t, spec{NP: 2, Hosts: "h1,h2", GraceMS: 600_000, KillMS: 600_000,
		Reach:   byShell(`echo hangs >&2; trap '' INT TERM; sleep 1000 & sleep 1000; true`),
		Command: []string{"true"}})
	r.awaitOutput(&r.stderr, "hangs", 2)
	r.signal(unix.SIGINT)
	if got := r.wait(); got != 130 ||
		!strings.Contains(r.stderr.String(), "SIGINT: stopping before any rank was started") {
		t.Errorf("got exit status %d and %q, want 130", got, r.stderr.String())
	}
}

func TestContextEndsHostsThatGetReady(t *testing.T) {
	t.Parallel()
	r := start(t, spec{NP: 2, Hosts: "h1,h2", TimeoutMS: 200, Reach: byShell(`sleep 1000`),
		Command: []string{"true"}})
	if got := r.wait(); got != 143 || !strings.Contains(r.stderr.String(), "deadline exceeded") {
		t.Errorf("got exit status %d and %q, want 143", got, r.stderr.String())
	}
}

// TestOutputOverHosts checks that large output of ranks on two hosts arrives completely, and that the lines
// of each stream keep their order.
func TestOutputOverHosts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := start(t, spec{NP: 3, Hosts: "h1:2,h2", OutputDir: dir,
		Command: sh(`seq 300000; printf 'half '$HOROVOD_RANK >&2`)})
	r.ends(0)
	var all bytes.Buffer
	for i := range 300000 {
		fmt.Fprintln(&all, i+1)
	}
	for rank := range 3 {
		got, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("rank.%d", rank), "stdout"))
		if err != nil || !bytes.Equal(got, all.Bytes()) {
			t.Errorf("rank %d: got %d bytes and error %v, want %d", rank, len(got), err, all.Len())
		}
		if want := fmt.Sprintf("[%d]<stderr>:half %d", rank, rank); !strings.Contains(r.stderr.String(),
			want) {
			t.Errorf("missing %q", want)
		}
	}
	if n := strings.Count(r.stdout.String(), "\n"); n != 900000 {
		t.Errorf("got %d lines, want 900000", n)
	}
}

func TestIsThisHost(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{
		"localhost": true, "LocalHost": true, "127.0.0.1": true, "127.8.8.8": true, "::1": true, host: true,
		strings.ToUpper(host): true,
		"192.0.2.1":           false, "no-such-host": false, "": false, host + "x": false,
	} {
		if got := launch.IsThisHost(name); got != want {
			t.Errorf("%q: got %v", name, got)
		}
	}
}
