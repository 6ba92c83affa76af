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
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/doctor"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
)

// launch starts the servers that a job needs, runs command as the ranks of the job, and sets the exit status.
func (r *runner) launch(cmd *cobra.Command, command []string) error {
	if r.checkBuild {
		ctx, stop := context.WithTimeout(context.Background(), doctorLimit)
		defer stop()
		return doctor.Here(r.env).WriteBuild(ctx, r.stdout)
	}
	if err := r.where.check(cmd.Flags()); err != nil {
		return err
	}
	if err := r.mpi.check(cmd.Flags()); err != nil {
		return err
	}
	hosts, err := r.where.hosts()
	if err != nil {
		return err
	}
	nodes, err := r.nodes(cmd.Flags())
	if err != nil {
		return err
	}
	if hosts, err = hostsOfNodes(hosts, nodes); err != nil {
		return err
	}
	np, err := r.processes(nodes, hosts)
	if err != nil {
		return err
	}
	if len(command) == 0 {
		return usagef("the command is missing: %s command [args...]", usageOf(nodes, np))
	}
	r.warnings = append(r.warnings, r.where.unusedFlags(cmd.Flags(), hosts)...)
	settings, err := r.settings()
	if err != nil {
		return err
	}

	waits, err := recovery(nodes, &settings)
	if err != nil {
		return err
	}

	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	key, text := secret.New()
	if settings.TLS {
		key = key.Encrypted()
	}
	listen := "127.0.0.1:0"
	several := onSeveral(hosts)
	if several {
		listen = ":0"
	}
	server, err := store.Serve(listen, kv, store.Config{Secret: key, Log: r.logger()})
	if err != nil {
		return err
	}
	defer server.Close()
	addr, err := netip.ParseAddrPort(server.Addr())
	if err != nil {
		return fmt.Errorf("parse the address of the store: %w", err)
	}

	addrs := []netip.AddrPort{addr}
	if several {
		if addrs, err = storeAddresses(&settings, addr.Port()); err != nil {
			return err
		}
	}
	path, err := r.where.agentPath()
	if err != nil {
		return err
	}

	reports, err := newReporter(kv, server, np, settings.DumpDir, settings.StallWarning)
	if err != nil {
		return err
	}
	defer reports.close()

	var torch netip.AddrPort
	var release func()
	inquiry := reports.inquiry()
	if nodes == nil {
		torch, release, err = r.serveTorch(several, cmd.Flags().Changed("torch-store"))
	} else {
		inquiry = (&nodeReporter{reports, nodes}).inquiry()
		nodes.Root, release, err = reservePort(several)
	}
	if err != nil {
		return err
	}
	defer release()

	stopMetrics, err := r.serveMetrics(hosts, nodes, np, reports.ranks)
	if err != nil {
		return err
	}
	defer stopMetrics()

	signals := make(chan os.Signal, 16)
	for _, s := range []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1,
		unix.SIGUSR2} {
		if !signal.Ignored(s) { // a signal stays ignored if the parent ignored it, as nohup does with SIGHUP
			signal.Notify(signals, s)
		}
	}
	defer signal.Stop(signals)

	options := launch.Options{
		NP: np, Nodes: nodes, Hosts: hosts, Command: command, Env: r.env,
		Set: slices.Concat(r.extra, r.logFormat(&settings), sidecarBinary(&settings, several),
			timelineSignal(&settings), waits, settings.ForRanks()),
		Verdict: reports.verdict, Restarted: reports.restarted,
		StoreAddrs: addrs, Secret: text, TLS: settings.TLS, TorchStore: torch,
		Reach: r.where.reach, AgentPath: path, Start: settings.StartTimeout,
		Liveness: settings.LivenessTimeout,
		Stdout:   r.stdout, Stderr: r.stderr,
		NoPrefix: !r.tagOutput, Timestamp: r.timestamp, OutputDir: r.outputDir, Verbose: r.verbose,
		Signals: signals, Inquiry: inquiry,
	}
	if r.mpi.on {
		release, err := r.byMPI(&options, &settings, reports)
		if err != nil {
			return err
		}
		defer release()
	}
	result, err := launch.Run(context.Background(), options)
	r.status = result.Status
	return err
}

// processes returns the number of processes of the job. nodes is nil if they are ranks.
func (r *runner) processes(nodes *launch.Nodes, hosts []launch.Host) (int, error) {
	if nodes != nil {
		return nodes.Count(), nil
	}
	np, err := r.ranks(hosts)
	if err == nil {
		err = r.fixedWorld(np)
	}
	return np, err
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

// settings returns the settings that the ranks will get, and prints the warnings about these settings.
func (r *runner) settings() (config.Config, error) {
	c, err := config.Load(config.Sources{Environ: slices.Concat(r.env, r.extra), Flags: r.flags,
		Launcher: true})
	if err != nil {
		return c, usageError{err}
	}
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

// sidecarBinary returns the variable that tells ranks in Python the path of the hvdd in the folder of hvdrun.
// It returns nil if there is no such hvdd, if ranks are on other hosts, or if the variable already has a
// value.
func sidecarBinary(settings *config.Config, several bool) []string {
	path := doctor.BesideSelf(config.SidecarProgram)
	if path == "" || several || settings.Variable(config.SidecarBinaryVariable) != "" {
		return nil
	}
	return []string{config.SidecarBinaryVariable + "=" + path}
}

// timelineSignal returns the variable with the timeline signal if the settings file has that setting. Package
// launch looks for the variable in the environment of the ranks, so hvdrun must add it there.
func timelineSignal(settings *config.Config) []string {
	const name = "HVD_TIMELINE_SIGNAL"
	if settings.Origin(name).Source != config.FromFile || settings.TimelineSignal == "" {
		return nil
	}
	return []string{name + "=" + settings.TimelineSignal}
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
