package e2e

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/testnet"
)

// cluster is an elastic job whose hosts are all this one.
type cluster struct {
	*job
	folder string
}

// byAgent makes hvdrun start agents of hosts with any names on this host.
const byAgent = "env AT={host}"

// startCluster starts a job whose discovery script is the file hosts in its folder. The script offers these
// hosts first. Its processes run the shell script, in which "$0" runs the program and $folder is the folder.
func startCluster(t testing.TB, hosts string, flags []string, script, program string,
	env ...string) *cluster {
	c := &cluster{folder: t.TempDir()}
	self := testnet.Self(t)
	c.offer(t, hosts)
	command := slices.Concat([]string{hvdrunPath, "--host-discovery-script",
		"sh " + filepath.Join(c.folder, "hosts"), "--agent", byAgent}, flags,
		[]string{"sh", "-c", "folder=" + c.folder + "; " + script, self})
	c.job = startCommand(t, command, append([]string{programVariable + "=" + program, stateVariable + "=100000",
		folderVariable + "=" + c.folder}, env...)...)
	return c
}

// offer makes the discovery script print the hosts, which are separated by blanks.
func (c *cluster) offer(t testing.TB, hosts string) {
	t.Helper()
	c.write(t, "hosts", "printf '%s\\n' "+hosts)
}

func (c *cluster) write(t testing.TB, name, text string) {
	t.Helper()
	path := filepath.Join(c.folder, name)
	testnet.WriteFile(t, path+".new", text)
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// trained waits until the ranks of a generation have trained, and returns their process IDs by their slots,
// such as h1:0. After the first generation, it waits until all ranks have the state in this generation, so
// that they do not end the training in an earlier one.
func (c *cluster) trained(generation, ranks int) map[string]int {
	c.t.Helper()
	c.says(fmt.Sprintf("hvdrun: generation %d: %d rank", generation, ranks))
	if generation > 1 {
		c.says(fmt.Sprintf("hvdrun: generation %d: trains after a stop of ", generation))
	}
	pids := make(map[string]int)
	for at, f := range c.begun(ranks) {
		pids[at] = f.pid
	}
	return pids
}

// begun waits until the ranks of a generation with so many ranks have trained that is the newest one, and
// returns what they have printed, by their slots.
func (c *cluster) begun(ranks int) map[string]begun {
	c.t.Helper()
	all := make(map[string]begun)
	done := func() bool {
		clear(all)
		for text := range strings.Lines(c.out()) {
			label, text, _ := strings.Cut(strings.TrimSpace(text), "]<stdout>:")
			f, ok := parseBegun(line{text: text})
			if ok && (f.size != ranks || len(all) == ranks) {
				clear(all)
			}
			if ok && f.size == ranks {
				all[strings.TrimPrefix(label, "[")] = f
			}
		}
		return len(all) == ranks
	}
	if !done() {
		c.until(fmt.Sprintf("%d ranks trained", ranks), func(line) bool { return done() })
	}
	return all
}

// says waits until hvdrun has said the text.
func (c *cluster) says(text string) {
	c.t.Helper()
	c.untilError(text, func(all string) bool { return strings.Contains(all, text) })
}

// spare waits until a process is ready as a spare that is named so, and returns its slot and process ID.
func (c *cluster) spare(name string) (at string, pid int) {
	c.t.Helper()
	ready := regexp.MustCompile(`(?m)^hvdrun: (` + name + `) is ready as a spare$`)
	c.untilError("a spare "+name, func(all string) bool {
		m := ready.FindStringSubmatch(all)
		if m != nil {
			at, _, _ = strings.Cut(m[1], " ")
		}
		return m != nil
	})
	for text := range strings.Lines(c.out()) {
		if number, found := strings.CutPrefix(strings.TrimSpace(text), "["+at+"]<stdout>:pid "); found {
			pid, _ = strconv.Atoi(number)
		}
	}
	if pid == 0 {
		c.t.Fatalf("got no process ID of the spare at %s in %q", at, c.out())
	}
	return at, pid
}

// kill kills processes.
func (c *cluster) kill(pids ...int) {
	c.t.Helper()
	for _, pid := range pids {
		// The agent's helper kills and reaps the processes of an agent that has died.
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			c.t.Fatal(err)
		}
	}
}

// agentOf returns the process ID of the agent that has started a process.
func (c *cluster) agentOf(pid int) int {
	c.t.Helper()
	for pid > 1 {
		stat := testnet.ReadFile(c.t, fmt.Sprintf("/proc/%d/stat", pid))
		_, fields, _ := strings.Cut(string(stat), ") ")
		pid, _ = strconv.Atoi(strings.Fields(fields)[1])
		arguments := testnet.ReadFile(c.t, fmt.Sprintf("/proc/%d/cmdline", pid))
		if strings.Contains(string(arguments), "__hvdrun-host-agent") {
			return pid
		}
	}
	c.t.Fatal("no agent among the parents")
	return 0
}

// runsForever makes the discovery script never end, and waits until it runs.
func (c *cluster) runsForever(t *testing.T) {
	t.Helper()
	path := filepath.Join(c.folder, "runs")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	pipe, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	c.write(t, "hosts", "echo >"+path+"; exec sleep 1000")
	if err := pipe.SetReadDeadline(time.Now().Add(jobLimit)); err != nil {
		t.Fatal(err)
	}
	if _, err := pipe.Read(make([]byte, 1)); err != nil {
		t.Fatal("the script does not run: ", err)
	}
}

// TestElasticIssues has problems of elastic jobs that users of Horovod have reported, by the numbers of their
// reports. docs/elastic.md lists those that other tests show.
func TestElasticIssues(t *testing.T) {
	const noCooldown, forever = "1,1", "3600,3600"
	for _, c := range []struct {
		name     string
		hosts    string
		flags    []string
		cooldown string
		script   string // of the processes; by default exec "$0"
		program  string // by default "elastic-steps"
		env      string
		play     func(t *testing.T, c *cluster)
		status   int
		said     string // what hvdrun says, besides the changes of the ranks
		silent   bool   // hvdrun says nothing about generation 2
		results  int    // how many ranks finish the training
		result   string // a regular expression for what they print; by default the state of one step
	}{
		{name: "1872: a host is added and removed again before its process is ready", hosts: "h1 h2",
			script: `case $HVD_MEMBER in h3*) echo slow; exec sleep 1000;; esac; exec "$0"`,
			play: func(t *testing.T, c *cluster) {
				c.trained(1, 2)
				c.offer(t, "h1 h2 h3")
				c.until("a process on h3", func(l line) bool { return l.text == "slow" })
				c.offer(t, "h1 h2")
				c.says("h3:0: all its processes have ended")
			}, flags: []string{"--verbose"}, silent: true, results: 2},
		{name: "1926: a host that was taken away may come back", hosts: "h1 h2", cooldown: forever,
			play: func(t *testing.T, c *cluster) {
				c.trained(1, 2)
				c.offer(t, "h1")
				c.trained(2, 1)
				c.offer(t, "h1 h2")
				c.trained(3, 2)
			}, results: 2},
		{name: "2030: hosts are excluded, and the others fewer than the minimum", hosts: "h1 h2",
			flags: []string{"--min-np", "2", "--blacklist", "host"}, env: "HOROVOD_ELASTIC_TIMEOUT=10",
			play: func(t *testing.T, c *cluster) {
				c.kill(c.trained(1, 2)["h1:0"])
			}, status: 137, said: "timed out waiting for slots: got 1, want at least 2, after 10s"},
		{name: "2030: fewer slots than the minimum", hosts: "h1 h2", flags: []string{"--min-np", "2"},
			cooldown: forever, env: "HOROVOD_ELASTIC_TIMEOUT=10",
			play: func(t *testing.T, c *cluster) {
				c.kill(c.trained(1, 2)["h1:0"])
			}, status: 137, said: "timed out waiting for slots: got 1, want at least 2, after 10s"},
		{name: "2835: autotuning", hosts: "h1 h2", env: "HOROVOD_AUTOTUNE=1",
			play: func(t *testing.T, c *cluster) {
				c.kill(c.trained(1, 2)["h1:0"])
				c.trained(3, 2)
			}, results: 2},
		{name: "3014: a new process dies while the script runs", hosts: "h1 h2 h3", cooldown: noCooldown,
			flags: []string{"-np", "2", "--spares", "1"},
			play: func(t *testing.T, c *cluster) {
				pids := c.trained(1, 2)
				at, spare := c.spare("h[123]:0")
				c.runsForever(t)
				c.kill(spare)
				c.says(at + ": killed by SIGKILL")
				c.spare(at + ` \(process 2\)`)
				for _, pid := range pids {
					c.kill(pid)
					break
				}
				c.trained(2, 2)
			}, said: "before it was a rank", results: 2},
		{name: "3197: all hosts are replaced", hosts: "h1 h2 h3", flags: []string{"--min-np", "3"},
			program: "elastic-exact",
			play: func(t *testing.T, c *cluster) {
				c.trained(1, 3)
				c.offer(t, "h4 h5 h6")
				c.trained(3, 3)
			}, said: "generation 3: 3 ranks: rank 0 (h1:0) leaves", results: 3,
			// The training was exact, and the last three ranks have not begun with the first sample.
			result: `^true true \d+ \[3 0 .*\b3 [1-9]\d*\]$`},
		{name: "3264: the host of rank 0 is lost", hosts: "h1:2 h2:2", cooldown: forever,
			play: func(t *testing.T, c *cluster) {
				pids := c.trained(1, 4)
				c.kill(c.agentOf(pids["h1:0"]), pids["h1:0"], pids["h1:1"])
				c.says(": 2 ranks: rank 0 (h1:")
			}, said: "lost host h1", results: 2},
		{name: "3436: the script fails for a while", hosts: "h1",
			play: func(t *testing.T, c *cluster) {
				c.trained(1, 1)
				c.write(t, "hosts", "echo no cluster >&2; exit 3")
				c.says("no cluster")
				c.offer(t, "h1 h2")
				c.trained(2, 2)
			}, said: "exit status 3: no cluster", results: 2},
		{name: "3494: a host goes and one comes at the minimum", hosts: "h1 h2",
			flags: []string{"--min-np", "2"},
			play: func(t *testing.T, c *cluster) {
				c.trained(1, 2)
				c.offer(t, "h2 h3")
				c.trained(2, 2)
			}, said: "generation 2: 2 ranks: rank 0 (h1:0) leaves: its slot is not offered any more; new: h3:0",
			results: 2},
		{name: "3852: a process ends with status 0", hosts: "h1 h2 h3", cooldown: forever,
			script: `"$0"; exit 0`,
			play: func(t *testing.T, c *cluster) {
				c.kill(c.trained(1, 3)["h2:0"])
				c.trained(2, 2)
			}, results: 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			flags := append([]string{"-np", strconv.Itoa(slots(c.hosts)), "--min-np", "1"}, c.flags...)
			result := regexp.MustCompile(cmp.Or(c.result, `^\d+ 0$`))
			if c.cooldown != "" {
				flags = append(flags, "--blacklist-cooldown-range", c.cooldown)
			}
			script, program := c.script, c.program
			if script == "" {
				script = `exec "$0"`
			}
			if program == "" {
				program = "elastic-steps"
			}
			j := startCluster(t, c.hosts, flags, script, program, c.env)
			c.play(t, j)
			j.write(t, "end", "")
			if status := j.wait(); status != c.status || !strings.Contains(j.err(), c.said) {
				t.Errorf("hvdrun ended with status %d, want %d and %q", status, c.status, c.said)
			}
			if c.silent && strings.Contains(j.err(), "generation 2") {
				t.Error("the ranks have changed")
			}
			var results []string
			for text := range strings.Lines(j.out()) {
				if _, text, ok := strings.Cut(strings.TrimSpace(text), ">:done "); ok {
					results = append(results, text)
				}
			}
			if len(results) != c.results || len(slices.Compact(results)) > 1 ||
				len(results) > 0 && !result.MatchString(results[0]) {
				t.Errorf("got results %q, want %d equal ones that match %s", results, c.results, result)
			}
			tellJob(t, j.job)
		})
	}
}

// slots returns the number of slots that hosts such as "h1 h2:2" have.
func slots(hosts string) (n int) {
	for _, host := range strings.Fields(hosts) {
		if _, count, ok := strings.Cut(host, ":"); ok {
			k, _ := strconv.Atoi(count)
			n += k
		} else {
			n++
		}
	}
	return n
}
