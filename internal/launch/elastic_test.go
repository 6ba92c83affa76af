package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/internal/launch"
)

// elasticSpec makes the job of a test elastic. Its processes are shell scripts, which tell their events by
// files in Folder, as the function tell of elasticScript does, which returns when the launcher knows of the
// event. The launcher writes the members of generation N to the file roster.N there. If Discover is set, the
// hosts are what the script hosts there prints.
type elasticSpec struct {
	Min, Max, ResetLimit int // ResetLimit is one more than the number of resets, or 0
	CooldownMS           int
	Folder               string
	Discover             bool
}

// options returns the options for launch.Run. The caller must call stop.
func (s *elasticSpec) options() (e *launch.Elastic, stop func()) {
	if s == nil {
		return nil, func() {}
	}
	events := make(chan func(*elastic.Machine, time.Time) elastic.Output)
	ctx, cancel := context.WithCancel(context.Background())
	cooldown := time.Duration(s.CooldownMS) * time.Millisecond
	e = &launch.Elastic{Events: events, Config: elastic.Config{Min: s.Min,
		Max: s.Max, Timeout: time.Minute, StartTimeout: time.Minute, Settle: time.Minute,
		ResetLimit: s.ResetLimit - 1, Cooldown: [2]time.Duration{cooldown, cooldown}}}
	e.Publish = func(r *elastic.Roster) {
		var text strings.Builder
		for _, m := range r.Members {
			fmt.Fprintln(&text, m.Text())
		}
		writeFile(filepath.Join(s.Folder, fmt.Sprintf("roster.%d", r.Generation)), text.String())
	}
	e.Resumed = func(*elastic.Resume) {}
	if s.Discover {
		e.Discovery = &launch.Discovery{Command: ". " + s.Folder + "/hosts", Slots: 1,
			Interval: 10 * time.Millisecond, Limit: time.Minute}
	}
	var watcher sync.WaitGroup
	watcher.Go(func() { s.watch(ctx, events) })
	return e, func() {
		cancel()
		watcher.Wait()
	}
}

// watch sends the events for which there are files. It deletes the files.
func (s *elasticSpec) watch(ctx context.Context,
	events chan<- func(*elastic.Machine, time.Time) elastic.Output) {
	for ctx.Err() == nil {
		files, _ := filepath.Glob(filepath.Join(s.Folder, "tell.*"))
		for _, file := range files {
			kind, text, _ := strings.Cut(strings.TrimPrefix(filepath.Base(file), "tell."), ".")
			p, _ := elastic.ParseMember(strings.Replace(text, "=", "/", 1))
			event := func(m *elastic.Machine, now time.Time) elastic.Output {
				switch kind {
				case "ready":
					return m.Ready(now, p)
				case "synced":
					return m.Synced(now, uint64(must(strconv.Atoi(text))), time.Second)
				case "done":
					return m.Done(now, p)
				case "failed":
					return m.Failed(now, []elastic.Member{p}, "does not answer")
				}
				panic("event " + kind)
			}
			select {
			case events <- event:
				os.Remove(file)
			case <-ctx.Done():
			}
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

func writeFile(path, text string) {
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		panic(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		panic(err)
	}
}

// elasticScript returns a script for the processes of an elastic job, which runs in folder. part is run by
// each process when it has told that it is ready. There, $me is the member, such as h1:0/1, await waits for a
// file, and roster waits for the members of a generation and fails if the process is not one of them.
func elasticScript(folder, part string) []string {
	return sh(`cd ` + folder + `; me=$HVD_MEMBER
tell() { f="tell.$1.${2:-${me%/*}=${me#*/}}"; >"$f"; while [ -e "$f" ]; do sleep 0.01; done; }
await() { until [ -e "$1" ]; do sleep 0.01; done; }
roster() { await roster.$1; grep -q "^$me\$" roster.$1; }
hosts() { for h; do echo "echo $h"; done >hosts.new; mv hosts.new hosts; }
echo begin $me at $HOROVOD_LOCAL_RANK$RANK
tell ready
` + part)
}

// TestElasticDeath kills a rank. The others go on at once, and a new process takes the place of the dead one.
func TestElasticDeath(t *testing.T) {
	t.Parallel()
	dir, out := t.TempDir(), t.TempDir()
	r := start(t, spec{NP: 3, OutputDir: out, Elastic: &elasticSpec{Min: 2, CooldownMS: 1, Folder: dir},
		Command: elasticScript(dir, `case $me in *:1/1) roster 1; tell synced 1; kill -9 $$;; *:1/2) ;; *) roster 1; roster 2;; esac
roster 3; tell done; exit 0`)})
	r.ends(0)
	host := must(os.Hostname())
	for generation, want := range []string{"", "HOST:0/1\nHOST:1/1\nHOST:2/1\n", "HOST:0/1\nHOST:2/1\n",
		"HOST:0/1\nHOST:2/1\nHOST:1/2\n"} {
		if generation == 0 {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("roster.%d", generation)))
		if got := strings.ReplaceAll(string(text), host+":", "HOST:"); got != want {
			t.Errorf("generation %d: got members %q and error %v, want %q", generation, got, err, want)
		}
	}
	for _, want := range []string{
		`hvdrun: generation 1: 3 ranks\n`,
		`hvdrun: generation 2: 2 ranks: rank 1 \(.*:1\): killed by SIGKILL, which hvdrun did not send .*\n`,
		`hvdrun: generation 3: 3 ranks: new: .*:1 \(process 2\)\n`,
		`\nhvdrun: changes of the ranks: 2\n(  .*\n){2}$`,
	} {
		if !regexp.MustCompile(want).MatchString(r.stderr.String()) {
			t.Errorf("got %q, want %s", r.stderr.String(), want)
		}
	}
	text, err := os.ReadFile(filepath.Join(out, host+".1", "stdout"))
	if want := fmt.Sprintf("begin %s:1/1 at 1\nbegin %[1]s:1/2 at 1\n", host); err != nil || string(text) != want {
		t.Errorf("got file %q and error %v, want %q", text, err, want)
	}
	if res := r.outcome(); res.Status != 0 || res.Roots != nil {
		t.Errorf("got result %+v, want success", res)
	}
}

// TestElasticHang kills a rank that does not answer, as the others have told.
func TestElasticHang(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := start(t, spec{NP: 2, NoticeMS: 1, Elastic: &elasticSpec{Min: 1, Folder: dir}, Command: elasticScript(
		dir, `roster 1; case $me in *:1/1) kill -STOP $$;; esac; tell synced 1; tell failed ${me%:*}:1=1; roster 2; tell done`)})
	r.ends(0)
	if want := `generation 2: 1 rank: rank 1 \(.*:1\): does not answer\n`; !regexp.MustCompile(want).MatchString(
		r.stderr.String()) {
		t.Errorf("got %q, want %s", r.stderr.String(), want)
	}
}

// TestElasticHosts adds a host, removes the first one, and loses the agent of another one.
func TestElasticHosts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeFile(filepath.Join(dir, "hosts"), "echo h1")
	r := start(t, spec{NP: 1, Hosts: "h1",
		Elastic: &elasticSpec{Min: 1, CooldownMS: 1, Folder: dir, Discover: true},
		Reach:   byShell(`echo $$ >` + dir + `/agent.$AT; exec "$@"`), Command: elasticScript(dir, `case $me in
h1:0/1) roster 1; tell synced 1; hosts h1 h2; roster 2; await roster.3; exit 0;;
h2:0/1) roster 2; tell synced 2; hosts h2; roster 3;
	hosts h2 h3; roster 4; roster 5; roster 6; tell done;;
h3:0/1) roster 4; tell synced 4; kill -9 $(cat agent.h3); sleep 100;;
h3:0/2) roster 6; tell synced 6; tell done;;
esac`)})
	r.ends(0)
	r.says(&r.stderr,
		"generation 2: 2 ranks: new: h2:0\n",
		"generation 3: 1 rank: rank 0 (h1:0) leaves: its slot is not offered any more\n",
		"generation 4: 2 ranks: new: h3:0\n",
		"generation 5: 1 rank: rank 1 (h3:0): lost host h3: ",
		"generation 6: 2 ranks: new: h3:0 (process 2)\n")
}

// TestElasticNotice sends SIGTERM to the agent of a host. The ranks there leave together, and later the end
// of the agent does not matter.
func TestElasticNotice(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := start(t, spec{NP: 3, Hosts: "h1:1,h2:2", Verbose: true,
		Elastic: &elasticSpec{Min: 1, CooldownMS: 1, Folder: dir},
		Reach:   byShell(`echo $$ >` + dir + `/agent.$AT; exec "$@"`), Command: elasticScript(dir, `case $me in
h1:0/1) roster 1; tell synced 1; kill $(cat agent.h2); roster 2; await left
	kill -9 $(cat agent.h2); await go; tell done;;
h2:*) roster 1; await roster.2; exit 0;;
esac`)})
	r.awaitOutput(&r.stderr, "h2:0: all its processes have ended", 1)
	r.awaitOutput(&r.stderr, "h2:1: all its processes have ended", 1)
	writeFile(filepath.Join(dir, "left"), "")
	r.awaitOutput(&r.stderr, "lost host h2, which had no rank any more: ", 1)
	writeFile(filepath.Join(dir, "go"), "")
	r.ends(0)
	want := "generation 2: 1 rank: rank 1 (h2:0) leaves: SIGTERM to the agent on its host; rank 2 (h2:1) leaves: "
	r.says(&r.stderr, want)
}

// TestElasticRefusal adds a slot to a host whose agent has no file descriptor left for another rank. The host
// is lost, and the others go on.
func TestElasticRefusal(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeFile(filepath.Join(dir, "hosts"), "echo h1; echo h2")
	r := start(t, spec{NP: 2, Hosts: "h1,h2",
		Elastic: &elasticSpec{Min: 1, CooldownMS: 60_000, Folder: dir, Discover: true},
		Command: elasticScript(dir, `case $me in
h1:0/1) roster 1; tell synced 1; await limited; hosts h1 h2:2; roster 2; tell synced 2; tell done;;
h2:0/1) roster 1; sleep 1000;;
esac`)})
	pid := r.agentOf("h2")
	r.awaitOutput(&r.stderr, "generation 1: 2 ranks", 1)
	var limit unix.Rlimit
	err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &limit)
	limit.Cur = 0
	if err = errors.Join(err, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &limit, nil)); err != nil {
		t.Fatal(err)
	}
	writeFile(filepath.Join(dir, "limited"), "")
	r.ends(0)
	const want = "generation 2: 1 rank: rank 1 (h2:0): lost host h2: "
	if text := r.stderr.String(); !strings.Contains(text, want) || !strings.Contains(text, "too many open files") {
		t.Errorf("got %q, want %q, and the reason", text, want)
	}
}

// TestElasticDiscovery checks what is printed if the script finds no hosts, and if it fails twice.
func TestElasticDiscovery(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeFile(filepath.Join(dir, "hosts"), `cd `+dir+`; echo >>calls; case $(wc -l <calls) in
[12]) echo all are down >&2;; 3|5) echo h1;; [467]) exit 3;; *) : >enough; echo h1;;
esac`)
	r := start(t, spec{NP: 1, Hosts: "h1", Elastic: &elasticSpec{Min: 1, Folder: dir, Discover: true},
		Command: elasticScript(dir, `roster 1; tell synced 1; await enough; tell done`)})
	r.ends(0)
	for want, n := range map[string]int{
		"hvdrun: waiting up to 1m0s for 1 slot; there are 0\n":                                1,
		"/hosts: it has printed no hosts: all are down\n":                                     1,
		"hvdrun: warning: host discovery: . " + dir + "/hosts: exit status 3; the hosts stay": 2,
	} {
		if got := strings.Count(r.stderr.String(), want); got != n {
			t.Errorf("got %d times %q, want %d", got, want, n)
		}
	}
}

// TestElasticFailures checks jobs that cannot go on.
func TestElasticFailures(t *testing.T) {
	for _, c := range []struct {
		name   string
		spec   spec
		el     elasticSpec
		hosts  string
		script string
		status int
		want   string
	}{
		{"all fail at the start", spec{NP: 2}, elasticSpec{Min: 1, CooldownMS: 60_000}, "",
			"exit 3", 3, "exit status 3"},
		{"too many resets", spec{NP: 3}, elasticSpec{Min: 1, ResetLimit: 1}, "",
			`roster 1; tell synced 1; case $me in *:2/*) exit 4;; esac; await never`, 4,
			"the number of resets exceeds the limit of 0: rank 2 ("},
		{"a rank reports its own failure", spec{NP: 1}, elasticSpec{Min: 1}, "",
			`roster 1; tell synced 1; tell failed; exit 3`, 3,
			"all ranks with the state of the training have ended: rank 0 ("},
		{"a rank that has failed does not end", spec{NP: 1, NoticeMS: 1}, elasticSpec{Min: 1}, "",
			`roster 1; tell synced 1; tell failed; await never`, 137, "killed by SIGKILL from hvdrun\n"},
		{"discovery fails", spec{NP: 1, Hosts: "h1"}, elasticSpec{Min: 1, Discover: true}, "echo no cluster >&2; exit 3", "", 1,
			"/hosts: exit status 3: no cluster"},
		{"command not found", spec{NP: 1, Command: []string{"no-such-program"}}, elasticSpec{Min: 1}, "", "", 127,
			"no-such-program"},
		{"agent fails", spec{NP: 1, Hosts: "h1", Reach: byShell("echo no route >&2; exit 255")},
			elasticSpec{Min: 1, Discover: true}, "echo h1", "", 1,
			"h1:0: lost host h1: env: exit status 255: no route, before it was a rank"},
		{"agent does not answer", spec{NP: 1, Hosts: "h1", StartMS: 300, Reach: byShell("exec sleep 1000")},
			elasticSpec{Min: 1}, "", "", 1, "h1:0: lost host h1: its agent was not ready within 300ms, before it was a rank"},
		{"more slots than ranks", spec{NP: 1, Hosts: "h1:5000", StartMS: 300, Reach: byShell("exec sleep 1000")},
			elasticSpec{Min: 1}, "", "", 1, "h1:10, h1:11 and 4084 more\n---"},
		{"no output files", spec{NP: 2, Hosts: "h1,h2", OutputDir: "hosts"}, elasticSpec{Min: 1}, "", "exit 3", 1,
			"launch: create the output files: mkdir hosts: not a directory\n"},
		{"no output files of a later slot", spec{NP: 1, Hosts: "h1", OutputDir: "."}, elasticSpec{Min: 1, Discover: true},
			">h2.0; echo h1", `roster 1 && tell synced 1 && hosts h1 h2; roster 2; tell done`, 1,
			"launch: h2:0: output file is incomplete: mkdir h2.0: not a directory\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			writeFile(filepath.Join(dir, "hosts"), c.hosts)
			s := c.spec
			s.Elastic, s.dir = &c.el, dir
			s.Elastic.Folder = dir
			if s.Command == nil {
				s.Command = elasticScript(dir, c.script)
			}
			r := start(t, s)
			if got := r.wait(); got != c.status || !strings.Contains(r.stderr.String(), c.want) {
				t.Errorf("got exit status %d and %q, want %d and %q", got, r.stderr.String(), c.status, c.want)
			}
		})
	}
}

// TestElasticCulprit lets a job fail while another process runs in the slot of the first rank that has
// failed. The job ends with the status of that rank, and its last lines are in the report.
func TestElasticCulprit(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	script := elasticScript(dir, `roster 1; tell synced 1; case $me in
*:0/1) echo the cause >&2; exit 3;;
*:1/1) await second; exit 4;;
esac`)
	script[2] = strings.Replace(script[2], "tell ready", "case $me in *:0/2) >second; exec sleep 1000;; esac; tell ready", 1)
	r := start(t, spec{NP: 2, Elastic: &elasticSpec{Min: 2, CooldownMS: 1, Folder: dir}, Command: script})
	r.ends(3)
	res := r.outcome()
	if len(res.Roots) != 1 || res.Ranks[res.Roots[0]].Code != 3 ||
		!slices.Equal(res.Ranks[res.Roots[0]].Stderr, []string{"the cause"}) {
		t.Errorf("got result %+v, want exit status 3 and the last lines", res)
	}
	if want := ":0: exit status 3\n"; strings.Count(r.stderr.String(), want) != 1 ||
		!strings.Contains(r.stderr.String(), "last lines on stderr:\n      the cause\n") {
		t.Errorf("got %q, want %q", r.stderr.String(), want)
	}
}

// TestElasticSignal ends an elastic job while it trains, and while it waits for slots.
func TestElasticSignal(t *testing.T) {
	t.Parallel()
	for _, np := range []int{1, 2} {
		dir := t.TempDir()
		writeFile(filepath.Join(dir, "hosts"), "echo h1")
		r := start(t, spec{NP: np, Hosts: "h1", Elastic: &elasticSpec{Min: 1, Folder: dir, Discover: true},
			Command: elasticScript(dir, `roster 1; echo training; await never`)})
		if np == 1 {
			r.awaitOutput(&r.stdout, "training", 1)
		} else {
			r.awaitOutput(&r.stderr, "waiting up to 1m0s for 2 slots; there is 1\n", 1)
		}
		r.signal(unix.SIGTERM)
		if got := r.wait(); got != 128+15 {
			t.Errorf("%d slots: got exit status %d, want 143", np, got)
		}
	}
}
