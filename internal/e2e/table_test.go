package e2e

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testmpi"
	"github.com/gohvd/gohvd/internal/testnet"
)

// The faults of TestFaultTable: the columns of its table.
var tableFaults = []string{"killed", "stopped", "raised", "exit 0", "exit 7", "cut", "hung in Init"}

// tableInit is the time limit of Init in TestFaultTable.
const tableInit = 8 * time.Second

// tableKind is a kind of job: a row of the table of TestFaultTable.
type tableKind struct {
	name    string
	victims []string // the last one is alone on its host if there are two hosts
	hosts   bool     // the job always runs on two hosts. Otherwise it does so only if the link is cut
	returns bool     // hvdrun starts the victim again
	goesOn  bool     // the others go on without the victim
	quick   bool     // TestFaultTable runs some of these jobs without -whole too
	env     []string
	// command returns the command of the job. If over is set, the job runs on two hosts, which it makes.
	command func(t *testing.T, over bool) (hosts []*testnet.Host, command, env []string)
	// first is the process of hvdrun that is rank 0 of the job, and is so called in errors.
	first  int
	raised int // the exit status of a process whose program has raised an error
	// status is a regular expression that matches the exit status of the launcher. If it is empty, the
	// launcher must end with the status of the victim, or 1 if that is 0.
	status string
	// blamed returns the processes that the job has blamed. errors are the errors of all but the victim.
	blamed func(j *job, errors map[string]line) string
}

// tableCell is a fault in a kind of job.
type tableCell struct {
	kind  *tableKind
	fault string
}

// tableRound is what has been seen in one round of a cell.
type tableRound struct {
	blamed string
	status int
	took   time.Duration // from the fault until the last other process has reported it, or the job has ended
	wrong  string        // empty if all is right
}

// A process of a job is killed, stopped, raises an error, exits with status 0 or 7 in mid-job, loses its
// network, or hangs in Init. This process is blamed, and the launcher ends with the right status. With
// -whole, each cell of the table has so many rounds, the others must have reported the fault at most a second
// after the time limit that notices it, and the table is printed. Jobs with MPI need the flag -mpi.
//
// Without -whole, the test draws from the cells that take less than a second: those that need no time limit,
// Python, MPI or restart.
func TestFaultTable(t *testing.T) {
	random := draws(t)
	kinds := tableKinds(t)
	var cells []tableCell
	for _, k := range kinds {
		for _, fault := range tableFaults {
			quick := k.quick && !slices.Contains([]string{"stopped", "cut", "hung in Init"}, fault)
			if quick || *whole > 0 {
				cells = append(cells, tableCell{k, fault})
			}
		}
	}
	var mu sync.Mutex
	seen := make(map[tableCell][]tableRound)
	t.Run("jobs", func(t *testing.T) {
		for _, c := range sample(random, cells, 4) {
			seed := random.Uint64()
			t.Run(c.kind.name+"/"+c.fault, func(t *testing.T) {
				r := c.run(t, rand.New(rand.NewPCG(seed, 0)))
				mu.Lock()
				defer mu.Unlock()
				seen[c] = append(seen[c], r)
			})
		}
	})
	t.Log(formatTable(kinds, seen))
}

// formatTable returns the table: for each cell the blamed process, the status, and the longest time. If a
// round was wrong, the cell says so.
func formatTable(kinds []*tableKind, seen map[tableCell][]tableRound) string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n| kind of job | %s |\n|%s\n", strings.Join(tableFaults, " | "),
		strings.Repeat("---|", len(tableFaults)+1))
	for _, k := range kinds {
		fmt.Fprintf(&b, "| %s |", k.name)
		for _, fault := range tableFaults {
			var took time.Duration
			var all, wrong []string
			for _, r := range seen[tableCell{k, fault}] {
				took = max(took, r.took)
				all = append(all, fmt.Sprintf("%s, %d", r.blamed, r.status))
				if r.wrong != "" {
					wrong = append(wrong, r.wrong)
				}
			}
			slices.Sort(all)
			text := strings.Join(slices.Compact(all), "; ")
			if len(all) > 0 {
				text += fmt.Sprintf(", %.1f s", took.Seconds())
			}
			if wrong != nil {
				text += fmt.Sprintf(" (%d of %d WRONG: %s)", len(wrong), len(all), wrong[0])
			}
			fmt.Fprintf(&b, " %s |", text)
		}
		b.WriteString("\n")
	}
	return b.String()
}

// tableJob is a job of TestFaultTable and what its processes have printed so far.
type tableJob struct {
	tableCell
	*job
	victim    string
	processes int
	hosts     []*testnet.Host
	limit     time.Duration // within which the fault must be noticed, except for a second
	goOn      time.Duration // time after which the victim continues, if it is stopped and must return
	end       string        // path of the file that ends the program faultyNode

	pid   int             // of the victim
	ready int             // number of lines "ready"
	began time.Time       // when the fault happened
	errs  map[string]line // errors of the other processes
	// back has the times of the first rounds of the workers or ranks that have gone on. If the job waits for
	// the victim, it has the time at which the victim was ready again, and those of later rounds.
	back map[string]time.Time
}

// run runs a job in which the fault happens to a random victim.
func (c tableCell) run(t *testing.T, random *rand.Rand) tableRound {
	const (
		liveness = 3 * time.Second
		// A victim that hvdrun is to start again is stopped for so much longer than the limit. Then it learns
		// with a heartbeat that it counts as dead.
		pause, heartbeat = 2 * time.Second, time.Second
		// If the others wait for the return of the victim, hvdrun ends them so long after it has lost the
		// host of the victim.
		notice = 5 * time.Second
	)
	k := c.kind
	j := &tableJob{tableCell: c, victim: k.victims[random.IntN(len(k.victims))], processes: len(k.victims),
		errs: make(map[string]line), back: make(map[string]time.Time)}
	if c.fault == "cut" {
		j.victim = k.victims[len(k.victims)-1]
	}
	j.limit = map[string]time.Duration{"stopped": liveness, "cut": liveness, "hung in Init": tableInit}[c.fault]
	switch {
	case k.returns && c.fault == "stopped":
		j.limit += pause + heartbeat
		j.goOn = liveness + pause
	case k.returns && c.fault == "cut":
		j.limit += notice
	case k.returns && c.fault == "exit 0": // hvdrun asks for a second, and the others wait for its return
		j.limit += time.Second + notice
	}
	step := initSteps[random.IntN(len(initSteps)-1)] // not after Init
	t.Logf("victim: %s; step of Init: %s", j.victim, step)
	dir := t.TempDir()
	j.end = filepath.Join(dir, "end")
	hosts, command, env := k.command(t, c.fault == "cut" || k.hosts)
	limit := jobLimit // only a process that hangs in Init reaches the limit
	if c.fault == "hung in Init" {
		limit = tableInit
	}
	env = slices.Concat(env, k.env, []string{
		faultVariable + "=" + c.fault, victimVariable + "=" + strings.TrimPrefix(j.victim, "rank "),
		stepVariable + "=" + step, onceVariable + "=" + filepath.Join(dir, "once"), "E2E_END=" + j.end,
		fmt.Sprint("HVD_LIVENESS_SECONDS=", liveness.Seconds()),
		fmt.Sprint("HOROVOD_GLOO_TIMEOUT_SECONDS=", limit.Seconds()),
	})
	if slices.Contains(k.victims, "server 0") {
		j.processes = 1 + servers + workers
		env = append(env, fmt.Sprint("PS_HEARTBEAT_TIMEOUT=", liveness.Seconds()))
	}
	j.hosts, j.job = hosts, startCommand(t, command, env...)
	for l := range j.lines {
		j.follow(l)
	}
	status := j.wait()
	return j.round(status, time.Now())
}

// follow handles a line that a process has printed.
func (j *tableJob) follow(l line) {
	name := l.node
	if name == "" {
		name = fmt.Sprint("rank ", l.rank)
	}
	switch word, rest, _ := strings.Cut(l.text, " "); word {
	case "pid":
		if name == j.victim {
			j.pid, _ = strconv.Atoi(rest)
		}
	case "begins": // the time limit of Init begins at its call
		if j.fault == "hung in Init" && name != j.victim {
			j.began = l.at
		}
	case "fault":
		j.began = l.at
		if j.kind.returns && j.fault == "stopped" {
			pid := j.pid
			time.AfterFunc(j.goOn, func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
		}
	case "ready":
		if j.ready++; j.ready == j.processes && j.fault == "cut" {
			j.hosts[1].SetLink(false)
			j.began = time.Now()
		}
		if j.kind.returns && name == j.victim && !j.began.IsZero() {
			j.back[name] = l.at
		}
	case "round":
		awaited := 1 + workers
		if j.kind.goesOn {
			awaited = len(j.kind.victims) - 1
		}
		if j.kind.returns && j.back[j.victim].IsZero() || !j.back[name].IsZero() {
			return
		}
		j.back[name] = l.at
		if len(j.back) == awaited {
			if err := os.WriteFile(j.end, nil, 0o600); err != nil {
				j.t.Error(err)
			}
		}
	case "error":
		if name != j.victim {
			// The launcher may pass the line on late: Open MPI's mpirun does so while it ends other ranks.
			at, text, _ := strings.Cut(rest, " ")
			ns, _ := strconv.ParseInt(at, 10, 64)
			j.errs[name] = line{text: text, at: time.Unix(0, ns)}
		}
	}
}

// round returns what has been seen when the job has ended.
func (j *tableJob) round(status int, over time.Time) tableRound {
	r := tableRound{status: status}
	if j.began.IsZero() {
		r.wrong = "the fault has not happened"
	} else {
		for _, l := range j.errs {
			r.took = max(r.took, l.at.Sub(j.began))
		}
		for _, at := range j.back {
			r.took = max(r.took, at.Sub(j.began))
		}
		if r.took == 0 {
			r.took = over.Sub(j.began)
		}
		r.blamed = j.kind.blamed(j.job, j.errs)
		r.wrong = j.check(r)
	}
	if r.wrong != "" {
		j.t.Errorf("%s is the victim; blamed: %q, status %d, after %.1f s: %s", j.victim, r.blamed, r.status,
			r.took.Seconds(), r.wrong)
		j.t.Logf("output:\n%.6000s\nstandard error:\n%.6000s", j.out(), j.err())
	}
	return r
}

// status returns a regular expression that matches the right exit status of the launcher.
func (j *tableJob) status() string {
	victim := map[string]int{"raised": j.kind.raised, "exit 0": 1, "exit 7": 7}[j.fault]
	killed := strconv.Itoa(128 + int(syscall.SIGKILL))
	switch {
	case j.kind.status != "":
		return j.kind.status
	case j.fault == "cut": // the victim may end, with 1 or by SIGTERM, before hvdrun loses its host
		return killed + "|143|1"
	case j.kind.returns && j.fault != "exit 0" && j.fault != "hung in Init":
		return "0"
	case victim == 0:
		return killed
	}
	return strconv.Itoa(victim)
}

// check returns what is wrong in a round, or "".
func (j *tableJob) check(r tableRound) string {
	var wrong []string
	if r.blamed != j.victim {
		wrong = append(wrong, "want blamed: "+j.victim)
	}
	if want := j.status(); !regexp.MustCompile("^(?:" + want + ")$").MatchString(strconv.Itoa(r.status)) {
		wrong = append(wrong, "want status: "+want)
	}
	if most := j.limit + time.Second; *whole > 0 && r.took > most {
		wrong = append(wrong, fmt.Sprintf("want at most %v", most))
	}
	naming, victim := 0, j.victim
	if number, is := strings.CutPrefix(victim, "rank "); is {
		n, _ := strconv.Atoi(number)
		victim = fmt.Sprint("rank ", n-j.kind.first)
	}
	// This mpirun continues a stopped rank before it ends it, and then the others wait for another one.
	continued := j.kind.name == "MPI, openmpi" && j.fault == "hung in Init"
	for name, l := range j.errs {
		switch {
		case strings.Contains(l.text, victim):
			naming++
		case strings.HasPrefix(j.victim, "rank ") && !continued:
			wrong = append(wrong, fmt.Sprintf("%s does not name %s: %s", name, victim, l.text))
		}
	}
	// The other nodes may name one that has ended because of the victim.
	if len(j.errs) > 0 && naming == 0 {
		wrong = append(wrong, "no other process names "+j.victim)
	}
	if others := len(j.kind.victims) - 1; j.kind.goesOn && len(j.back) != others {
		wrong = append(wrong, fmt.Sprintf("%d of %d others have gone on", len(j.back), others))
	}
	return strings.Join(wrong, ", ")
}

var (
	rootOfReport  = regexp.MustCompile(`(?m)^  (rank \d+|scheduler|server \d+|worker \d+): `)
	rootUnderMPI  = regexp.MustCompile(`^ \([^)]*\): (ranks? [\d, and]*\d) failed: `)
	startedAgain  = regexp.MustCompile(`(?m)^hvdrun: (server \d+|worker \d+): .*; starting it again`)
	notReady      = regexp.MustCompile(`: not ready within [^ ]+: (.*)`)
	failedInError = regexp.MustCompile(`(ranks? [\d, and]*\d) failed: |waiting (?:for|until) (ranks? [\d, and]*\d)[ :]`)
)

// rootCause returns the processes that the report of hvdrun names as the root cause or, if the job has gone
// on, those that were started again.
func rootCause(j *job, _ map[string]line) string {
	_, report, failed := strings.Cut(j.err(), "Root cause")
	if !failed {
		return first(startedAgain.FindAllStringSubmatch(j.err(), -1))
	}
	report, _, _ = strings.Cut(report, "\nOther ")
	if m := rootUnderMPI.FindStringSubmatch(report); m != nil && !rootOfReport.MatchString(report) {
		return m[1]
	}
	return first(rootOfReport.FindAllStringSubmatch(report, -1))
}

// first returns the different texts that matches have in their first group that is not empty.
func first(matches [][]string) string {
	var all []string
	for _, m := range matches {
		if text := cmp.Or(m[1:]...); !slices.Contains(all, text) {
			all = append(all, text)
		}
	}
	return strings.Join(all, " and ")
}

// leftOut returns the processes without which generations of an elastic job have begun, by the ranks that
// they had first: their slots, and on the second of two hosts those after the two slots of the first one.
func leftOut(j *job, _ map[string]line) string {
	var all [][]string
	for text := range strings.Lines(j.err()) {
		names := blamedForChange(text)
		if m := notReady.FindStringSubmatch(text); m != nil {
			names = append(names, strings.Split(m[1], ", ")...)
		}
		for _, name := range names {
			host, slot, _ := strings.Cut(name, ":")
			rank, _ := strconv.Atoi(slot)
			if strings.HasSuffix(host, ".2") {
				rank += 2
			}
			all = append(all, []string{"", fmt.Sprint("rank ", rank)})
		}
	}
	return first(all)
}

// blamedByRanks returns the ranks that the errors of the other ranks name.
func blamedByRanks(_ *job, errs map[string]line) string {
	var all [][]string
	for _, l := range errs {
		all = append(all, failedInError.FindAllStringSubmatch(l.text, -1)...)
	}
	return first(all)
}

// tableKinds returns the kinds of jobs.
func tableKinds(t *testing.T) []*tableKind {
	self := testnet.Self(t)
	three := []string{"rank 0", "rank 1", "rank 2"}
	asRanks := programVariable + "=faulty"
	kinds := []*tableKind{
		{name: "ranks, shm", victims: three, raised: 3, env: []string{asRanks}, command: underHvdrun(nil, self)},
		{name: "ranks, tcp", victims: three, raised: 3, env: []string{asRanks, "HOROVOD_CPU_OPERATIONS=tcp"},
			command: underHvdrun(nil, self)},
		{name: "ranks, lock-step", victims: three, raised: 3, env: []string{asRanks, "HVD_NEGOTIATION=lockstep"},
			command: underHvdrun(nil, self)},
		{name: "ranks, hosts", victims: three, hosts: true, raised: 3, env: []string{asRanks},
			command: underHvdrun(nil, self)},
		{name: "ranks, elastic", victims: three, goesOn: true, status: "0", blamed: leftOut, quick: true,
			env:     []string{programVariable + "=faulty-elastic"},
			command: underHvdrun([]string{"--min-np", "2"}, self)},
		torchKind(t, "torch.distributed, hvdrun"), torchKind(t, "torch.distributed, torchrun"),
		torchKind(t, "torch.distributed, sidecars"),
		torchKind(t, "torch.distributed, hvdrun, group of ranks 1 and 2"),
		mpiKind(t, "openmpi"), mpiKind(t, "mpich"),
	}
	for _, k := range kinds {
		if k.blamed == nil {
			k.blamed = rootCause
		}
	}
	for _, k := range kinds[:3] {
		k.quick = true
	}
	for _, k := range []tableKind{
		{name: "ps", quick: true}, {name: "ps, replicas", quick: true, env: []string{"HVD_PS_REPLICAS=1"}},
		{name: "ps, restarts", returns: true},
		{name: "ps, replicas and restarts", returns: true, env: []string{"HVD_PS_REPLICAS=1"}},
	} {
		flags := []string{"--servers", strconv.Itoa(servers), "--workers", strconv.Itoa(workers)}
		k.victims = []string{"scheduler", "worker 0", "worker 1", "server 0", "server 1"}
		k.env = append(k.env, programVariable+"=faulty-node")
		if k.returns {
			flags = append(flags, "--restarts", "2")
			k.victims = []string{"server 0", "server 1"}
			k.env = append(k.env, returnVariable+"=1")
		}
		k.raised, k.blamed = 3, rootCause
		k.command = func(t *testing.T, over bool) (hosts []*testnet.Host, command, env []string) {
			if !over {
				return nil, slices.Concat([]string{hvdrunPath}, flags, []string{self}), nil
			}
			hosts, command, more := sshHosts(t, 2)
			return hosts, slices.Concat(command, []string{hvdrunPath}, more, flags, []string{"-H",
				list(hosts, layout{servers + workers - 1, 1}, true), self}), nil
		}
		kinds = append(kinds, &k)
	}
	return kinds
}

// underHvdrun returns a function for tableKind.command that runs three ranks of a program with hvdrun, which
// gets the given flags.
func underHvdrun(flags []string, program ...string) func(*testing.T, bool) (hosts []*testnet.Host, command,
	env []string) {
	flags = append([]string{"-np", "3"}, flags...)
	return func(t *testing.T, over bool) (hosts []*testnet.Host, command, env []string) {
		if !over {
			return nil, slices.Concat([]string{hvdrunPath}, flags, program), nil
		}
		hosts, command, more := sshHosts(t, 2)
		return hosts, slices.Concat(command, []string{hvdrunPath}, more, flags,
			[]string{"-H", list(hosts, layout{2, 1}, true)}, program), nil
	}
}

// mpiKind returns the kind of jobs that hvdrun starts with the mpirun of a library.
func mpiKind(t *testing.T, library string) *tableKind {
	build := sync.OnceValue(func() string { return testmpi.Need(t, library).Build(t, "test", "./internal/e2e") })
	return &tableKind{
		name: "MPI, " + library, victims: []string{"rank 0", "rank 1", "rank 2"}, status: "[1-9][0-9]*",
		// UCX would abort a survivor that copies from the memory of the victim.
		env: []string{programVariable + "=faulty", "OMPI_MCA_mpi_yield_when_idle=1", "UCX_TLS=^cma"},
		command: func(t *testing.T, over bool) (hosts []*testnet.Host, command, env []string) {
			path := "PATH=" + testmpi.Need(t, library).Path(t)
			if !over {
				return nil, []string{"env", path, hvdrunPath, "--mpi", "-np", "3", build()}, nil
			}
			hosts = testnet.NewHosts(t, 2)
			return hosts, append(on(t, hosts[0]), path, hvdrunPath, "--mpi", "-H", list(hosts, layout{2, 1}, true),
				"--agent", enterAddress(t, hosts), build()), nil
		},
	}
}

// torchFaulty is the program faulty with torch.distributed. It stops its sidecar too, because a frozen
// container has both. If E2E_GROUP is set, only ranks 1 and 2 use gohvd, in a group of their own.
const torchFaulty = `
import datetime, os, signal, sys, time
import torch, torch.distributed as dist
import gohvd.torch.distributed

rank = int(os.environ.get("RANK") or os.environ["HOROVOD_RANK"])
label = "" if "HVD_JOB_ID" in os.environ else f"[{rank}]<stdout>:"
fault, victim = os.environ["GOHVD_E2E_FAULT"], str(rank) == os.environ["GOHVD_E2E_VICTIM"]

def say(text):
    os.write(1, (label + text.replace("\n", " ") + "\n").encode())

def happen():
    if fault != "cut":
        say("fault")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault in ("stopped", "hung in Init"):
        threads = os.listdir("/proc/self/task")
        children = [open(f"/proc/self/task/{t}/children").read().split() for t in threads]
        for pid in sum(children, []):
            os.kill(int(pid), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raised":
        raise KeyError("raised")
    if fault.startswith("exit"):
        os._exit(int(fault[5:]))

seconds = datetime.timedelta(seconds=float(os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"]))
meeting = {}
if "E2E_URL" in os.environ: # hvdrun has no store for torch if there are several hosts
    meeting = {"init_method": os.environ["E2E_URL"], "rank": rank, "world_size": 3}
part = "E2E_GROUP" in os.environ
if part:
    dist.init_process_group("gloo", **meeting)
    if rank == 0:
        signal.pause()
say("begins")
if victim and fault == "hung in Init":
    happen()
try:
    if part:
        group = dist.new_group([1, 2], backend="gohvd", timeout=seconds, use_local_synchronization=True)
    else:
        group = None
        dist.init_process_group("gohvd", timeout=seconds, **meeting)
    step = 0
    while True:
        if victim and step == 20 and fault != "hung in Init":
            happen()
        dist.all_reduce(torch.ones(1000), group=group)
        if step == 20:
            say("ready")
        step += 1
except KeyError:
    raise
except Exception as e:
    say(f"error {time.time_ns()} {e}")
    sys.exit(1)
`

// torchKind returns a kind of jobs that use torch.distributed.
func torchKind(t *testing.T, name string) *tableKind {
	script := filepath.Join(t.TempDir(), "faulty.py")
	testnet.WriteFile(t, script, torchFaulty)
	package_, err := filepath.Abs("../../python")
	if err != nil {
		t.Fatal(err)
	}
	k := &tableKind{name: name, victims: []string{"rank 0", "rank 1", "rank 2"}, raised: 1, env: []string{
		"PYTHONPATH=" + package_, "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1"}}
	if strings.HasSuffix(name, "ranks 1 and 2") {
		k.victims, k.first, k.env = k.victims[1:], 1, append(k.env, "E2E_GROUP=1")
	}
	hvdd := sync.OnceValue(func() string { return buildHvdd(t) })
	byTorchrun := strings.HasSuffix(name, "torchrun")
	if byTorchrun {
		k.status, k.blamed = "1", blamedByRanks
	}
	k.command = func(t *testing.T, over bool) (hosts []*testnet.Host, command, env []string) {
		python := testnet.NewTorch(t)
		env = []string{"HVD_LIBRARY=" + library(t)}
		if strings.HasSuffix(name, "sidecars") {
			env = append(env, "HVD_SIDECAR=spawn", "HVD_SIDECAR_BINARY="+hvdd())
		}
		words := []string{python, "-m", "torch.distributed.run"}
		switch {
		case !byTorchrun:
			if hosts, command, _ = underHvdrun(nil, python, script)(t, over); over {
				env = append(env, "E2E_URL=tcp://"+hosts[0].Addr.String()+":29500",
					"GLOO_SOCKET_IFNAME="+testnet.HostInterface)
			}
		case !over:
			command = slices.Concat(words, testnet.Standalone(t), []string{"--nproc_per_node=3", script})
		default:
			hosts = testnet.NewHosts(t, 2)
			words = append(words, "--nnodes=2", "--rdzv_backend=c10d",
				"--rdzv_endpoint="+hosts[0].Addr.String()+":29500")
			at := func(host, ranks int) string {
				var quoted []string
				// Without these options, torchrun resolves the names of the hosts.
				for _, word := range slices.Concat(on(t, hosts[host]), words, []string{
					fmt.Sprint("--rdzv_conf=is_host=", host == 0), "--local-addr=" + hosts[host].Addr.String(),
					fmt.Sprint("--nproc_per_node=", ranks), script}) {
					quoted = append(quoted, "'"+strings.ReplaceAll(word, "'", `'\''`)+"'")
				}
				return strings.Join(quoted, " ")
			}
			command = []string{"sh", "-c", fmt.Sprintf(
				"setsid %s & second=$!; %s; status=$?; kill -9 -$second; exit $status", at(1, 1), at(0, 2))}
			env = append(env, "HVD_SECRET_FILE="+jobSecret(t))
		}
		return hosts, command, env
	}
	return k
}
