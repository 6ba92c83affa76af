package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/binding"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/doctor"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
)

// job is the job that the command line and the settings ask for.
type job struct {
	command  []string
	hosts    []launch.Host   // nil if no hosts were given: all processes run on this host
	several  bool            // whether hosts has other hosts than this one
	nodes    *launch.Nodes   // nil if the processes are ranks
	elastic  *launch.Elastic // nil if the job is not elastic
	np       int             // the number of processes
	settings config.Config
	recovery []string // see the function recovery
}

// launch starts the servers that a job needs, runs command as the ranks of the job, and sets the exit status.
func (r *runner) launch(cmd *cobra.Command, command []string) error {
	if r.checkBuild {
		ctx, stop := context.WithTimeout(context.Background(), doctorLimit)
		defer stop()
		return doctor.Here(r.env).WriteBuild(ctx, r.stdout)
	}
	j, err := r.job(cmd.Flags(), command)
	if err != nil {
		return err
	}

	if n := j.here(); n > 0 {
		for _, text := range doctor.Here(r.env).Crowded(n) {
			fmt.Fprintf(r.stderr, "hvdrun: warning: %s\n", text)
		}
	}

	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	key, text := secret.New()
	server, addrs, err := j.startStore(kv, store.Config{Secret: key, Log: r.logger()})
	if err != nil {
		return err
	}
	defer server.Close()
	path, err := r.where.agentPath()
	if err != nil {
		return err
	}

	reports, err := newReporter(kv, server, j.np, j.settings.DumpDir, j.settings.StallWarning)
	if err != nil {
		return err
	}
	defer reports.close()

	var torch netip.AddrPort
	var release func()
	inquiry := reports.inquiry()
	var hung func(context.Context) ([]int, joblink.Verdict)
	var accused func() []int
	switch {
	case j.nodes != nil:
		nodes := &nodeReporter{reports, j.nodes}
		inquiry, hung, accused = nodes.inquiry(), nodes.hung, nodes.accused
		j.nodes.Root, release, err = reservePort(j.several)
	case j.elastic != nil:
		release = func() {} // its processes get no address of a TCPStore
	default:
		torch, release, err = r.serveTorch(j.several, cmd.Flags().Changed("torch-store"))
	}
	if err != nil {
		return err
	}
	defer release()

	counts := new(elasticCounts)
	stopMetrics, err := r.serveMetrics(j, reports.ranks, counts)
	if err != nil {
		return err
	}
	defer stopMetrics()

	verdict := reports.verdict
	if j.elastic != nil {
		ctx, stop := context.WithCancel(context.Background())
		defer stop()
		serveMembers(ctx, j.elastic, kv, reports, counts)
		verdict = nil // a verdict changes the ranks
	}
	signals := receivedSignals()
	defer signal.Stop(signals)

	// ssh connects again each second while a host or its sshd is starting. It gives up before the time limit
	// of launch, so that it can say why.
	attempts := max(1, int(j.settings.StartTimeout.Seconds())-1)
	r.where.sshOptions = []string{"-o", fmt.Sprintf("ConnectionAttempts=%d", attempts)}
	options := launch.Options{
		NP: j.np, Nodes: j.nodes, Elastic: j.elastic, Hosts: j.hosts, Command: j.command, Env: r.env,
		Set: slices.Concat(r.onlyTCP(), r.extra, r.logFormat(&j.settings),
			besideHvdrun(&j.settings, j.several), j.recovery,
			j.settings.ForRanks()),
		Verdict: verdict, Restarted: reports.restarted, Hung: hung, Accused: accused,
		StoreAddrs: addrs, Secret: text, TorchStore: torch,
		Reach: r.where.reach, AgentPath: path, Start: j.settings.StartTimeout,
		Liveness: j.settings.LivenessTimeout,
		Stdout:   r.stdout, Stderr: r.stderr,
		NoPrefix: !r.tagOutput, Timestamp: r.timestamp, OutputDir: r.outputDir, Verbose: r.verbose,
		Signals: signals, Inquiry: inquiry,
	}
	if j.nodes == nil && j.settings.BindTo != binding.None {
		// The ranks must not divide again what they are bound to.
		options.BindTo, options.Set = j.settings.BindTo, append(options.Set, "HVD_BIND_TO=none")
	}
	if r.mpi.on {
		release, err := r.byMPI(&options, &j.settings, reports)
		if err != nil {
			return err
		}
		defer release()
	}
	report := keepEpilogue(options.Inquiry)
	finish, folder := r.serveLive(j, reports, options.Inquiry)
	closeView, err := r.viewOwn(j, folder)
	if err != nil {
		finish(context.Background(), &live.End{Status: statusFailure, Text: err.Error()})
		return err
	}
	result, err := launch.Run(context.Background(), options)
	end := endOf(result, err, j.nodes)
	end.Report = report()
	waiting, stopWaiting := untilSignal(signals)
	defer stopWaiting()
	finish(waiting, end)
	closeView(waiting)
	r.status = result.Status
	return r.where.explain(err)
}

// job checks the flags and returns the job that they describe. It prints the warnings about the settings.
func (r *runner) job(flags *pflag.FlagSet, command []string) (*job, error) {
	if err := r.where.check(flags); err != nil {
		return nil, err
	}
	if err := r.mpi.check(flags); err != nil {
		return nil, err
	}
	j := &job{command: command}
	var err error
	if j.hosts, err = r.where.hosts(); err != nil {
		return nil, err
	}
	if j.nodes, err = r.nodes(flags); err != nil {
		return nil, err
	}
	if j.hosts == nil && r.elasticFlags.discovery == "" {
		if j.hosts, err = r.allocated(j.nodes == nil); err != nil {
			return nil, err
		}
	}
	if j.hosts, err = hostsOfNodes(j.hosts, j.nodes); err != nil {
		return nil, err
	}
	j.several = onSeveral(j.hosts)
	if j.np, err = r.processes(j.nodes, j.hosts); err != nil {
		return nil, err
	}
	if r.elasticFlags.discovery != "" {
		j.several = true
	}
	if len(command) == 0 {
		return nil, usagef("the command is missing: %s command [args...]", usageOf(j.nodes, j.np))
	}
	if err := r.where.splitList(command[0]); err != nil {
		return nil, err
	}
	if r.elasticFlags.discovery == "" {
		r.warnings = append(r.warnings, r.where.unusedFlags(flags, j.hosts)...)
	}
	reader := config.Rank
	if j.nodes != nil {
		reader = config.Node
	}
	if j.settings, err = r.settings(reader); err != nil {
		return nil, err
	}
	if err := j.settings.CheckBinding(); err != nil {
		return nil, usageError{err}
	}
	if j.elastic, err = r.elastic(flags, j.np, j.hosts, &j.settings); err != nil {
		return nil, err
	}
	j.recovery, err = recovery(j.nodes, &j.settings)
	return j, err
}

// here returns the number of processes of the job on this host. It returns 0 if only the script that
// discovers hosts knows it, or if the processes are nodes on several hosts.
func (j *job) here() (n int) {
	if !j.several {
		return j.np
	}
	if j.nodes != nil {
		return 0
	}
	left := j.np
	for _, h := range j.hosts { // as launch.Assign places them
		most := min(h.Slots, left)
		if launch.IsThisHost(h.Name) {
			n += most
		}
		left -= most
	}
	return n
}

// startStore serves kv to the processes of the job. It returns the server, which the caller must close, and
// the addresses at which the processes can reach it.
func (j *job) startStore(kv *store.HashStore, cfg store.Config) (*store.Server, []netip.AddrPort, error) {
	listen := "127.0.0.1:0"
	if j.several {
		listen = ":0"
	}
	server, err := store.Serve(listen, kv, cfg)
	if err != nil {
		return nil, nil, err
	}
	addr, err := netip.ParseAddrPort(server.Addr())
	if err != nil {
		server.Close()
		return nil, nil, fmt.Errorf("parse the address of the store: %w", err)
	}
	addrs := []netip.AddrPort{addr}
	if j.several {
		if addrs, err = storeAddresses(&j.settings, j.hosts, addr.Port()); err != nil {
			server.Close()
			return nil, nil, err
		}
	}
	return server, addrs, nil
}

// receivedSignals returns a channel that gets the signals that hvdrun handles.
func receivedSignals() chan os.Signal {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unignored(unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1,
		unix.SIGUSR2)...)
	return signals
}

// unignored returns the signals without those that hvdrun's parent has ignored, as nohup does with SIGHUP.
// They stay ignored. One of the signals must be SIGTERM, which Go never ignores, because no signals would
// mean all to package signal.
func unignored(signals ...os.Signal) []os.Signal { return slices.DeleteFunc(signals, signal.Ignored) }

// untilSignal returns a context that ends when a signal arrives that ends hvdrun, or stop is called.
func untilSignal(signals <-chan os.Signal) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case s := <-signals:
				if s == unix.SIGINT || s == unix.SIGTERM || s == unix.SIGHUP {
					cancel()
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, func() { cancel(); <-done }
}

// processes returns the number of processes of the job. nodes is nil if they are ranks.
func (r *runner) processes(nodes *launch.Nodes, hosts []launch.Host) (int, error) {
	if nodes != nil {
		return nodes.Count(), nil
	}
	return r.ranks(hosts)
}

// usageOf returns the beginning of a command line that starts such a job.
func usageOf(nodes *launch.Nodes, np int) string {
	if nodes != nil {
		return fmt.Sprintf("hvdrun --servers %d --workers %d", nodes.Servers, nodes.Workers)
	}
	return fmt.Sprintf("hvdrun -np %d", np)
}

// ranks returns the number of ranks: the value of -np or, without that flag, the number of slots of the
// hosts.
func (r *runner) ranks(hosts []launch.Host) (int, error) {
	if r.numProc == "" && r.elasticFlags.min != "" {
		r.numProc = r.elasticFlags.min
	}
	if r.numProc == "" && hosts != nil {
		if n := launch.Slots(hosts); n <= launch.MaxRanks {
			return n, nil
		}
		return 0,
			usagef("got %d slots on all hosts, want at most %d ranks: give the number of ranks with -np",
				launch.Slots(hosts), launch.MaxRanks)
	}
	if r.numProc == "" {
		return 0, usagef("the number of ranks is missing: hvdrun -np N command [args...]")
	}
	np, err := strconv.Atoi(r.numProc)
	if err != nil || np < 1 || np > launch.MaxRanks {
		return 0, usagef("-np: got %q, want a number from 1 to %d", r.numProc, launch.MaxRanks)
	}
	return np, nil
}

// settings returns the settings that the processes of the job will get, and prints the warnings about these
// settings. All processes are of the kind reader.
func (r *runner) settings(reader config.Reader) (config.Config, error) {
	c, err := config.Load(config.Sources{Environ: slices.Concat(r.env, r.extra), Flags: r.flags,
		Launcher: true})
	if err != nil {
		return c, usageError{err}
	}
	c.WarnUnread(reader)
	for _, w := range slices.Concat(r.warnings, c.Warnings) {
		fmt.Fprintf(r.stderr, "hvdrun: warning: %s\n", w)
	}
	return c, nil
}

// logger returns the logger for the servers in this process. The logger writes to standard error and obeys
// the settings for logs. With --verbose it also logs the connections of clients. The method logger ignores
// errors in settings, because the method settings reports them.
func (r *runner) logger() *zap.Logger {
	c, err := config.Load(config.Sources{Environ: slices.Concat(r.env, r.extra), Flags: r.flags,
		Launcher: true})
	if err != nil {
		c = config.Defaults()
	}
	if r.verbose && logs.Level(c.LogLevel) > zapcore.InfoLevel {
		c.LogLevel = "info"
	}
	return c.Logger(r.stderr)
}

// besideHvdrun returns the variables that tell ranks in Python the paths of the libgohvd.so and of the hvdd
// in the folder of hvdrun. It omits files that do not exist, and variables that already have a value. If
// ranks are on other hosts, it returns nil.
func besideHvdrun(settings *config.Config, several bool) (variables []string) {
	if several {
		return nil
	}
	for variable, name := range map[string]string{
		config.LibraryVariable: config.LibraryFile, config.SidecarBinaryVariable: config.SidecarProgram,
	} {
		if path := doctor.BesideSelf(name); path != "" && settings.Variable(variable) == "" {
			variables = append(variables, variable+"="+path)
		}
	}
	return variables
}

// onlyTCP returns the variables by which --tcp makes NCCL and, with --mpi, Open MPI and UCX use only TCP
// between hosts. Without --tcp it returns nil.
func (r *runner) onlyTCP() []string {
	switch {
	case !r.tcp:
		return nil
	case !r.mpi.on:
		return []string{"NCCL_IB_DISABLE=1"}
	}
	return []string{"NCCL_IB_DISABLE=1", "OMPI_MCA_pml=ob1", "OMPI_MCA_btl=self,vader,tcp", "UCX_TLS=tcp,self,sm"}
}

// logFormat returns the variable that makes ranks log in the console format, if the format is auto and
// hvdrun's standard error is a terminal. Otherwise it returns nil. The ranks themselves cannot detect the
// terminal, because their standard error is a pipe.
func (r *runner) logFormat(settings *config.Config) []string {
	if settings.LogFormat == "auto" && logs.IsTerminal(r.stderr) {
		return []string{"HVD_LOG_FORMAT=console"}
	}
	return nil
}
