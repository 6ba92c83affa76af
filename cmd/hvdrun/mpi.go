package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/binding"
	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/store"
)

// These are first arguments of hvdrun when mpirun has started it.
const (
	mpiRankArg  = "__hvdrun-mpi-rank"  // see mpiRankMain
	mpiReachArg = "__hvdrun-mpi-reach" // see mpiReachMain
)

// mpirun is the program that starts the ranks with --mpi.
const mpirun = "mpirun"

// mpiFlags holds the flags for jobs that mpirun starts.
type mpiFlags struct {
	on            bool
	args, binding string
}

func (m *mpiFlags) group() group {
	g := newGroup("MPI")
	g.flags.BoolVar(&m.on, "mpi", false,
		"start the ranks with mpirun of Open MPI or MPICH (docs/mpi.md). HOROVOD_CONTROLLER and HOROVOD_CPU_OPERATIONS are "+
			"then mpi by default")
	g.flags.StringVar(&m.args, "mpi-args", "", "further arguments `ARGS` of mpirun, separated by spaces; requires --mpi")
	g.flags.StringVar(&m.binding, "binding-args", "",
		"arguments `ARGS` of mpirun that bind ranks to cores, separated by spaces; requires --mpi. By default mpirun gets "+
			"--bind-to")
	return g
}

// check returns an error if flags were given that cannot be used together. given holds the flags on the
// command line.
func (m *mpiFlags) check(given *pflag.FlagSet) error {
	names := []string{"mpi-args", "binding-args"}
	text := "--%s requires --mpi"
	if m.on {
		names, text = []string{"servers", "workers", "torch-store"}, "--%s cannot be used with --mpi"
	}
	for _, name := range names {
		if given.Changed(name) {
			return usagef(text, name)
		}
	}
	return nil
}

// mpiLibrary is the MPI library of mpirun.
type mpiLibrary int

const (
	openMPI mpiLibrary = iota
	mpich
)

// findMPI returns the library of the mpirun in PATH.
func findMPI() (mpiLibrary, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	text, err := exec.CommandContext(ctx, mpirun, "--version").CombinedOutput()
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return 0, errors.New("--mpi: mpirun is not in PATH: install Open MPI or MPICH (docs/mpi.md)")
	case bytes.Contains(text, []byte("Open MPI")) || bytes.Contains(text, []byte("OpenRTE")):
		return openMPI, nil
	case bytes.Contains(text, []byte("HYDRA")):
		return mpich, nil
	}
	line, _, _ := bytes.Cut(text, []byte("\n"))
	return 0, fmt.Errorf("--mpi: got %q from mpirun --version (error %v), want Open MPI or MPICH", line, err)
}

// mpiJob is a job that mpirun starts.
type mpiJob struct {
	*runner
	library  mpiLibrary
	np       int
	hosts    []launch.Host
	settings *config.Config
	agent    string // path of a program that takes the place of ssh, or empty if there are no other hosts
}

// byMPI changes options so that mpirun starts the ranks. The caller must call release when the job has ended.
func (r *runner) byMPI(o *launch.Options, settings *config.Config,
	reports *reporter) (release func(), err error) {
	library, err := findMPI()
	if err != nil {
		return nil, err
	}
	if o.Hosts != nil {
		if _, err := launch.Assign(o.Hosts, o.NP); err != nil {
			return nil, usageError{err}
		}
	}
	m := &mpiJob{runner: r, library: library, np: o.NP, hosts: o.Hosts, settings: settings}
	release = func() {}
	if onSeveral(o.Hosts) {
		var dir string
		if dir, err = m.writeAgent(); err != nil {
			return nil, err
		}
		release = func() { _ = os.RemoveAll(dir) }
	}
	for _, name := range []string{"HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"} {
		if settings.Origin(name).Source == config.FromDefault {
			o.Set = append(o.Set, name+"=mpi")
		}
	}
	words, err := m.words(o.Env, o.Set)
	if err != nil {
		release()
		return nil, err
	}
	var addrs []string
	for _, a := range o.StoreAddrs {
		addrs = append(addrs, a.String())
	}
	o.Command = slices.Concat(words, []string{o.AgentPath, mpiRankArg, strings.Join(addrs, ",")}, o.Command)
	o.Starter, o.NP, o.Hosts, o.NoPrefix, o.OutputDir = mpirun, 1, nil, true, ""
	o.Timestamp, o.TorchStore, o.BindTo = false, netip.AddrPort{}, ""
	o.Verdict, o.Failed = reports.mpiVerdict, reports.failed
	return release, nil
}

// words returns the command line of mpirun up to the command of the ranks. The ranks get the variables env
// and set.
func (m *mpiJob) words(env, set []string) ([]string, error) {
	var slots []string
	for _, h := range m.hosts {
		slots = append(slots, fmt.Sprintf("%s:%d", h.Name, h.Slots))
	}
	words := []string{mpirun, "-np", strconv.Itoa(m.np)}
	binds, to := strings.Fields(m.mpi.binding), m.settings.BindTo
	bound := to != binding.None
	if bound && len(binds) > 0 {
		return nil, usagef("--bind-to %s and --binding-args cannot be used together", to)
	}
	if m.library == mpich {
		switch {
		case m.outputDir != "":
			return nil, usagef("--output-filename: mpirun of MPICH does not have this")
		case m.timestamp:
			return nil, usagef("--prefix-output-with-timestamp: mpirun of MPICH does not have this")
		}
		words = appendIf(words, m.tagOutput, "-prepend-rank")
		words = appendIf(words, slots != nil, "-hosts", strings.Join(slots, ","))
		words = appendIf(words, m.agent != "", "-launcher", "rsh", "-launcher-exec", m.agent)
		if bound {
			binds = []string{"-bind-to", string(to)}
		}
		return slices.Concat(words, binds, strings.Fields(m.mpi.args)), nil
	}
	if slots == nil {
		slots = []string{fmt.Sprintf("localhost:%d", m.np)}
	}
	if len(binds) == 0 {
		binds = []string{"--bind-to", string(to), "--map-by", "slot"}
	}
	words = append(words, "--allow-run-as-root", "--host", strings.Join(slots, ","))
	words = appendIf(words, m.tagOutput, "--tag-output")
	words = appendIf(words, m.timestamp, "--timestamp-output")
	words = appendIf(words, m.outputDir != "", "--output-filename", m.outputDir)
	if m.agent != "" {
		words = append(words, "--mca", "plm_rsh_agent", m.agent)
		for _, name := range exported(env, set) {
			words = append(words, "-x", name)
		}
	}
	return slices.Concat(words, binds, strings.Fields(m.mpi.args)), nil
}

func appendIf(words []string, is bool, more ...string) []string {
	if is {
		return append(words, more...)
	}
	return words
}

// exported returns the names of the variables that ranks on other hosts must get from mpirun. MPICH passes
// all variables on, but Open MPI only those on its command line.
func exported(env, set []string) (names []string) {
	add := func(name string) {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for _, v := range env {
		name, _, _ := strings.Cut(v, "=")
		ours := strings.HasPrefix(name, "HOROVOD_") || strings.HasPrefix(name, "HVD_") // set has those that count
		if !launch.IsOfHost(name) && !ours && !strings.ContainsAny(name, "%()") {
			add(name)
		}
	}
	for _, v := range append([]string{"HVD_JOB_ID", "HVD_SECRET", "PYTHONUNBUFFERED"}, set...) {
		name, _, _ := strings.Cut(v, "=")
		add(name)
	}
	return names
}

// writeAgent writes a program that mpirun runs in place of ssh, in a new folder. It reaches hosts in the same
// way as hvdrun does without --mpi.
func (m *mpiJob) writeAgent() (dir string, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	if dir, err = os.MkdirTemp("", "hvdrun-"); err != nil {
		return "", err
	}
	m.agent = filepath.Join(dir, "agent")
	words := []string{self, mpiReachArg, m.where.agent, strconv.Itoa(m.where.sshPort), m.where.sshIdentity}
	for i := range words {
		words[i] = shellWord(words[i])
	}
	text := fmt.Sprintf("#!/bin/sh\nexec %s \"$@\"\n", strings.Join(words, " "))
	return dir, os.WriteFile(m.agent, []byte(text), 0o700)
}

// mpiReachMain runs a command on another host, for mpirun. The last arguments are the host and the words of
// the command, which a shell splits.
func mpiReachMain(args, env []string, stderr io.Writer) int {
	if len(args) < 5 {
		fmt.Fprintf(stderr, "hvdrun: %s is an internal argument of hvdrun\n", mpiReachArg)
		return statusUsage
	}
	port, _ := strconv.Atoi(args[1]) // hvdrun has checked it
	where := hostFlags{agent: args[0], sshPort: port, sshIdentity: args[2]}
	words := where.reach(args[3], []string{"sh", "-c", strings.Join(args[4:], " ")})
	path, err := exec.LookPath(words[0])
	if err == nil {
		err = syscall.Exec(path, words, env)
	}
	fmt.Fprintf(stderr, "hvdrun: reach host %s: %v\n", args[3], err)
	return statusFailure
}

// mpiRankMain runs the command of a rank that mpirun has started, and returns its exit status. The command
// gets the variables with which hvdrun tells a rank its number and the place where the ranks meet. When the
// command has ended, hvdrun gets a report.
func mpiRankMain(args, env []string, stderr io.Writer) int {
	// The kernel kills the command when the thread that started it ends.
	runtime.LockOSThread()
	if len(args) < 2 {
		fmt.Fprintf(stderr, "hvdrun: %s is an internal argument of hvdrun\n", mpiRankArg)
		return statusUsage
	}
	status, err := runMPIRank(strings.Split(args[0], ","), args[1:], env)
	if err != nil {
		fmt.Fprintf(stderr, "hvdrun: %v\n", err)
	}
	return status
}

func runMPIRank(addrs, command, env []string) (status int, err error) {
	get := func(name string) string {
		i := slices.IndexFunc(env, func(v string) bool { return strings.HasPrefix(v, name+"=") })
		if i < 0 {
			return ""
		}
		return env[i][len(name)+1:]
	}
	at, _, err := bootstrap.Detect(get)
	if err == nil && at == nil {
		err = errors.New("mpirun has not set the variables of Open MPI or of PMI, so the rank is unknown")
	}
	if err != nil {
		return statusFailure, err
	}
	kv, addr, err := dialAny(addrs, get("HVD_SECRET"))
	if err != nil {
		return statusFailure, fmt.Errorf("rank %d: %w", at.Rank, err)
	}
	defer kv.Close()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	cmd.Env = slices.Concat(env, []string{"HOROVOD_RANK=" + strconv.Itoa(at.Rank),
		"HOROVOD_SIZE=" + strconv.Itoa(at.Size),
		"HOROVOD_GLOO_RENDEZVOUS_ADDR=" + addr.Addr().String(),
		"HOROVOD_GLOO_RENDEZVOUS_PORT=" + strconv.Itoa(int(addr.Port()))})
	if at.LocalRank >= 0 {
		cmd.Env = append(cmd.Env, "HOROVOD_LOCAL_RANK="+strconv.Itoa(at.LocalRank),
			"HOROVOD_LOCAL_SIZE="+strconv.Itoa(at.LocalSize))
	}
	signals := receivedSignals()
	if err := cmd.Start(); err != nil {
		return statusFailure, fmt.Errorf("rank %d: %w", at.Rank, err)
	}
	go func() {
		for s := range signals {
			_ = cmd.Process.Signal(s) // it may have ended
		}
	}()
	_ = cmd.Wait() // its state says more than the error
	signal.Stop(signals)
	close(signals)
	end := launch.Exit{Code: cmd.ProcessState.ExitCode()}
	if s := cmd.ProcessState.Sys().(syscall.WaitStatus); s.Signaled() {
		end = launch.Exit{Signal: s.Signal()}
	}
	host, err := os.Hostname()
	text := ""
	if end.Status() != 0 {
		text = fmt.Sprintf("%s (pid %d on host %s)", end.Describe(), cmd.Process.Pid, host)
	}
	ctx, cancel := context.WithTimeout(context.Background(), mpiReportTime)
	defer cancel()
	err = errors.Join(err, joblink.New(kv, at.Rank).Report(ctx, joblink.Exit, []byte(text)))
	if err != nil && end.Status() == 0 {
		return statusFailure, fmt.Errorf("rank %d has ended with status 0, but hvdrun does not know it: %w", at.Rank, err)
	}
	return end.Status(), err
}

// mpiReportTime is the time limit for the report of a rank's end. It is generous, because a rank whose report
// is missing counts as failed.
const mpiReportTime = 5 * time.Second

// dialAny connects to the store of hvdrun at the first of its addresses that can be reached.
func dialAny(addrs []string, text string) (kv *store.Client, at netip.AddrPort, err error) {
	key, err := secret.Parse(text)
	if err != nil {
		return nil, at, err
	}
	for _, a := range addrs {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		var dialErr error
		kv, dialErr = store.Dial(ctx, a, store.Config{Secret: key})
		cancel()
		if dialErr == nil {
			at, err = netip.ParseAddrPort(a)
			return kv, at, err
		}
		err = errors.Join(err, dialErr)
	}
	return nil, at, fmt.Errorf("cannot reach hvdrun: %w", err)
}

// mpiVerdict returns the verdict of the survivors of a job that mpirun has started or, if there is none, the
// first rank whose command has failed. It returns an error if no rank has failed or if all commands have
// ended with status 0, as after a failure that the program has handled.
//
// mpirun may end with status 0 although a rank has failed. If a rank ends without having finalized MPI,
// mpirun kills the other ranks, and may do so before one of them has reported a failure. So the rank that has
// ended first has failed if mpirun has ended and some ranks have not reported the end of their commands.
func (r *reporter) mpiVerdict(ctx context.Context, ended bool) (joblink.Verdict, error) {
	if ended {
		// A rank on a host that has lost its link stays connected. But what the others have sent is in the
		// store, because each waits for that before it ends.
		_ = r.server.Idle(ctx)
		r.close()
	}
	v, err := r.ranks.Verdict(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	failed := slices.IndexFunc(r.exits, func(e exit) bool { return e.text != "" })
	switch {
	case failed < 0 && len(r.exits) == r.size:
		return joblink.Verdict{}, errors.New("the commands of all ranks have ended with status 0")
	case err == nil:
	case failed >= 0:
		v = joblink.Verdict{Ranks: []topo.Rank{r.exits[failed].rank}, Reason: r.exits[failed].text}
	case ended && len(r.exits) > 0:
		v = joblink.Verdict{Ranks: []topo.Rank{r.exits[0].rank}, Reason: fmt.Sprintf(
			"its command has ended with status 0, and then mpirun has ended without waiting for %d of %d ranks",
			r.size-len(r.exits), r.size)}
	default:
		return v, err
	}
	v.At = time.Now()
	reason := v.Reason
	for _, e := range r.exits {
		if slices.Contains(v.Ranks, e.rank) && e.text != "" && e.text != reason {
			v.Reason += "; " + e.text
		}
	}
	v.Reason = fmt.Sprintf("%s failed: %s", topo.FormatRanks(v.Ranks), v.Reason)
	return v, nil
}
