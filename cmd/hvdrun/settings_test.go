package main

import (
	"encoding/json"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/doctor"
	"github.com/gohvd/gohvd/internal/testnet"
)

// writeFile writes a settings file and returns its path.
func writeFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "settings.yaml")
	testnet.WriteFile(t, path, text)
	return path
}

// TestSettingFlagsReachTheRanks checks that each flag of a setting sets the setting's variable in the
// environment of the ranks.
func TestSettingFlagsReachTheRanks(t *testing.T) {
	for _, c := range []struct{ flag, want string }{
		{"--gloo-timeout-seconds=7", "HOROVOD_GLOO_TIMEOUT_SECONDS=7"},
		{"--start-timeout=8", "HOROVOD_GLOO_TIMEOUT_SECONDS=8"},
		{"--thread-affinity=0,1", "HOROVOD_THREAD_AFFINITY=0,1"},
		{"--fusion-threshold-mb=2", "HOROVOD_FUSION_THRESHOLD=2097152"},
		{"--cycle-time-ms=1.5", "HOROVOD_CYCLE_TIME=1.5"},
		{"--cache-capacity=0", "HOROVOD_CACHE_CAPACITY=0"},
		{"--disable-group-fusion", "HOROVOD_DISABLE_GROUP_FUSION=1"},
		{"--no-disable-group-fusion", "HOROVOD_DISABLE_GROUP_FUSION=0"},
		{"--negotiation=lockstep", "HVD_NEGOTIATION=lockstep"},
		{"--deterministic", "HVD_DETERMINISTIC=1"},
		{"--no-deterministic", "HVD_DETERMINISTIC=0"},
		{"--dynamic-process-sets", "HOROVOD_DYNAMIC_PROCESS_SETS=1"},
		{"--no-dynamic-process-sets", "HOROVOD_DYNAMIC_PROCESS_SETS=0"},
		{"--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE=1"},
		{"--stall-check", "HOROVOD_STALL_CHECK_DISABLE=0"},
		{"--stall-check-warning-time-seconds=4", "HOROVOD_STALL_CHECK_TIME_SECONDS=4"},
		{"--stall-check-shutdown-time-seconds=70", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=70"},
		{"--operation-timeout-seconds=5", "HVD_OPERATION_TIMEOUT_SECONDS=5"},
		{"--liveness-seconds=6", "HVD_LIVENESS_SECONDS=6"},
		{"--gloo", "HOROVOD_CONTROLLER=gloo"},
		{"--timeline-filename=t.json", "HOROVOD_TIMELINE=t.json"},
		{"--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES=1"},
		{"--no-timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES=0"},
		{"--timeline-max-mb=64", "HVD_TIMELINE_MAX_MB=64"},
		{"--dump-dir=d", "HVD_DUMP_DIR=d"},
		{"--log-format=json", "HVD_LOG_FORMAT=json"},
		{"--log-level=info", "HOROVOD_LOG_LEVEL=info"},
		{"--log-without-timestamp", "HOROVOD_LOG_HIDE_TIME=1"},
		{"--log-with-timestamp", "HOROVOD_LOG_HIDE_TIME=0"},
		{"--log-hide-timestamp", "HOROVOD_LOG_HIDE_TIME=1"},
		{"--no-log-hide-timestamp", "HOROVOD_LOG_HIDE_TIME=0"},
	} {
		r := new(runner)
		root := r.command()
		if err := root.ParseFlags([]string{c.flag}); err != nil {
			t.Errorf("%s: %v", c.flag, err)
			continue
		}
		settings, err := config.Load(config.Sources{Flags: r.flags, Launcher: true})
		if err != nil || !slices.Contains(settings.ForRanks(), c.want) {
			t.Errorf("%s: got %q and error %v, want %s", c.flag, settings.ForRanks(), err, c.want)
		}
	}
}

// TestOrderOfFileAndFlags checks that the settings file overrides flags before --config-file, and that flags
// after --config-file override the file.
func TestOrderOfFileAndFlags(t *testing.T) {
	file := writeFile(t, "params:\n  cycle_time_ms: 1\n  cache_capacity: 1\n")
	cmd := hvdrun(t, "-np", "1", "--tag-output=false",
		"--cycle-time-ms", "2", "--liveness-seconds", "4", "--config-file", filepath.Base(file),
		"--cache-capacity", "3",
		"sh", "-c",
		`echo "$HOROVOD_CYCLE_TIME/$HOROVOD_CACHE_CAPACITY/$HVD_LIVENESS_SECONDS/$HVD_CONFIG_FILE"`)
	cmd.Dir = filepath.Dir(file)
	out, err := cmd.Output()
	if want := "/3/4/" + file + "\n"; err != nil || string(out) != want {
		t.Errorf("got %q and error %v, want %q", out, err, want)
	}
}

// TestWarnings checks the warnings about wrong variables and flags. The ranks must get a list of the names
// that hvdrun has warned about, so that they do not repeat the warnings.
func TestWarnings(t *testing.T) {
	cmd := hvdrun(t, "-np", "2", "--log-hide-timestamp", "-x", "NO_SUCH_NAME", "-x", "PATH", "-x",
		"HVD_TYPO=1",
		"sh", "-c", `echo "$HVD_SHOWN"`)
	cmd.Env = append(cmd.Env, "HOROVOD_FUSION_TRESHOLD=1")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	want := `hvdrun: warning: -x NO_SUCH_NAME: the environment has no such variable, so the ranks do not get it
hvdrun: warning: HOROVOD_FUSION_TRESHOLD is not a setting; did you mean HOROVOD_FUSION_THRESHOLD?
hvdrun: warning: HVD_TYPO is not a setting
hvdrun: warning: --log-hide-timestamp is deprecated: use --log-without-timestamp
`
	if stderr.String() != want {
		t.Errorf("got %s\nwant %s", stderr.String(), want)
	}
	if got := strings.Count(string(out),
		">:HOROVOD_FUSION_TRESHOLD,HVD_TYPO,--log-hide-timestamp\n"); got != 2 {
		t.Errorf("got %q, want the names at both ranks", out)
	}
}

func TestConfigCommand(t *testing.T) {
	file := writeFile(t, "params:\n  cycle_time_ms: 1\n")
	args := []string{"config", "-np", "2", "--config-file", file, "--cache-capacity", "7", "-x",
		"HOROVOD_LOG_LEVEL=info"}
	run := func(args ...string) string {
		t.Helper()
		cmd := hvdrun(t, args...)
		cmd.Env = append(cmd.Env, "HVD_LIVENESS_SECONDS=5", "HOROVOD_RANK=3", "HVD_UNIQUE_ID=hush")
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}

	table := run(append(args, "no-such-command", "--json")...)
	for _, want := range []string{
		"SETTING VALUE FROM",
		"HVD_CONFIG_FILE " + file + " flag --config-file",
		"HOROVOD_CYCLE_TIME 1 file " + file + " line 2",
		"HOROVOD_CACHE_CAPACITY 7 flag --cache-capacity",
		"HOROVOD_LOG_LEVEL info flag -x",
		"HVD_LIVENESS_SECONDS 5 environment",
		"HVD_UNIQUE_ID set, not shown environment",
		"HOROVOD_FUSION_THRESHOLD 134217728 default",
		"HOROVOD_THREAD_AFFINITY (not pinned) default",
	} {
		if !slices.ContainsFunc(strings.Split(table, "\n"), func(line string) bool {
			return strings.Join(strings.Fields(line), " ") == want
		}) {
			t.Errorf("%q is missing in\n%s", want, table)
		}
	}
	if strings.Contains(table, "HOROVOD_RANK") {
		t.Error("a setting is shown that the launcher sets for each rank")
	}

	var shown []struct{ Name, Value, Origin string }
	if err := json.Unmarshal([]byte(run(append(args, "--json")...)), &shown); err != nil {
		t.Fatal(err)
	}
	got := make(map[string]string)
	for _, s := range shown {
		got[s.Name] = s.Value + " from " + s.Origin
	}
	if len(got) != strings.Count(table, "\n")-1 ||
		got["HOROVOD_CACHE_CAPACITY"] != "7 from flag --cache-capacity" ||
		got["HOROVOD_THREAD_AFFINITY"] != " from default" {
		t.Errorf("got %q", got)
	}

	if got := run("config", "--markdown"); got != config.Page() {
		t.Errorf("got %.80q, want the page", got)
	}
	if _, stderr, status := output(t, "config", "--cache-capacity", "x"); status != 2 ||
		!strings.Contains(stderr, `--cache-capacity: got "x"`) {
		t.Errorf("a bad value: got exit status %d and %q, want 2", status, stderr)
	}
	if stdout, _, status := output(t, "config", "--help"); status != 0 ||
		!strings.Contains(stdout, "--json") || !strings.Contains(stdout, "--cache-capacity") {
		t.Errorf("got exit status %d and %q, want the help", status, stdout)
	}
}

func TestCheckBuild(t *testing.T) {
	for _, flag := range []string{"-cb", "--check-build"} {
		stdout, stderr, status := output(t, flag)
		if status != 0 || stderr != "" ||
			strings.Count(stdout, "[X] Gloo (gohvd's own, over shared memory and TCP)\n") != 2 ||
			strings.Count(stdout, "[ ] MPI\n") != 2 {
			t.Errorf("%s: got exit status %d, %q and %q, want what is built", flag, status, stdout, stderr)
		}
	}
}

// TestCheckBuildAsksTheLibrary checks that --check-build and hvdrun doctor list PyTorch and NCCL as Python's
// library says, or say why they have not found one.
func TestCheckBuildAsksTheLibrary(t *testing.T) {
	dir, none := t.TempDir(), t.TempDir()
	script := `#!/bin/sh
echo '{"built": true, "nccl": {"version": "2.28.9", "error": ""}, "cuda": {"error": ""}}'
`
	testnet.WriteScript(t, filepath.Join(dir, doctor.AnyPython), script)
	for path, want := range map[string][]string{
		none: {"[ ] PyTorch (python3 is not in PATH)", "[ ] NCCL (python3 is not in PATH)"},
		dir:  {"[X] PyTorch (over libgohvd)", "[X] NCCL (version 2.28.9, over libgohvd)"},
	} {
		t.Setenv("PATH", path)
		stdout, stderr, status := output(t, "--check-build")
		for _, line := range want {
			if status != 0 || stderr != "" || !strings.Contains(stdout, "    "+line+"\n") {
				t.Errorf("got exit status %d, %q and %q, want %q", status, stdout, stderr, line)
			}
		}
	}
}

// TestFlagsForWhatHolds gives hvdrun flags of horovodrun for features that hvdrun lacks. A flag that turns
// such a feature off must be accepted without effect. A flag that turns it on must be refused.
func TestFlagsForWhatHolds(t *testing.T) {
	flags := []string{
		"--disable-cache", "--no-hierarchical-allreduce", "--no-hierarchical-allgather",
		"--no-torus-allreduce",
	}
	stdout, stderr, status := output(t, append(flags, "-np", "1", "--tag-output=false", "sh", "-c",
		"echo $HOROVOD_CACHE_CAPACITY.")...)
	if status != 0 || stdout != ".\n" || stderr != "" {
		t.Errorf("got exit status %d, %q and %q, want the command run and no setting", status, stdout, stderr)
	}
	for _, flag := range []string{"--torus-allreduce", "--disable-cache=false"} {
		if _, stderr, status := output(t, flag, "-np", "1", "true"); status != 2 ||
			!strings.Contains(stderr, "hvdrun: "+strings.TrimSuffix(flag, "=false")+": ") {
			t.Errorf("%s: got exit status %d and %q, want 2", flag, status, stderr)
		}
	}
}

// horovodrun is a list of all flags of the program horovodrun.
const horovodrun = `
version num-proc np check-build disable-cache start-timeout network-interfaces network-interface output-filename verbose
config-file ssh-port ssh-identity-file fusion-threshold-mb cycle-time-ms cache-capacity hierarchical-allreduce
no-hierarchical-allreduce hierarchical-allgather no-hierarchical-allgather torus-allreduce no-torus-allreduce autotune
no-autotune autotune-log-file autotune-warmup-samples autotune-steps-per-sample autotune-bayes-opt-max-samples
autotune-gaussian-process-noise min-np min-num-proc max-np max-num-proc slots-per-host elastic-timeout reset-limit
blacklist-cooldown-range timeline-filename timeline-mark-cycles no-timeline-mark-cycles no-stall-check stall-check
stall-check-warning-time-seconds stall-check-shutdown-time-seconds mpi-threads-disable no-mpi-threads-disable mpi-args
tcp binding-args num-nccl-streams thread-affinity gloo-timeout-seconds log-level log-with-timestamp
log-without-timestamp prefix-output-with-timestamp prefix-timestamp log-hide-timestamp no-log-hide-timestamp hosts
hostfile host-discovery-script gloo mpi jsrun`

// TestAllFlagsOfHorovodrunAreKnown checks that every flag of horovodrun either works or is rejected with a
// reason, and that none is unknown.
func TestAllFlagsOfHorovodrunAreKnown(t *testing.T) {
	flags := new(runner).command().Flags()
	known := strings.Fields(horovodrun)
	for _, name := range known {
		if flags.Lookup(name) == nil {
			t.Errorf("--%s is unknown", name)
		}
	}
	refused := func(name, value, reason string) {
		t.Helper()
		var absent *absentError
		if err := flags.Set(name, value); !errors.As(err, &absent) || !strings.Contains(err.Error(), reason) {
			t.Errorf("--%s=%s: got error %v, want that %s", name, value, err, reason)
		}
	}
	for _, i := range config.Inerts() {
		for _, name := range strings.Fields(i.Flags) {
			if !slices.Contains(known, name) {
				t.Errorf("--%s is not a flag of horovodrun", name)
			}
			if !strings.HasPrefix(name, "no-") && name != "disable-cache" {
				refused(name, "1", i.Reason)
				continue
			}
			if err := flags.Set(name, "true"); err != nil {
				t.Errorf("--%s: got error %v, want the flag accepted", name, err)
			}
			refused(name, "false", i.Reason)
			if err := flags.Set(name, "x"); err == nil || !strings.Contains(err.Error(), "want the flag without a value") {
				t.Errorf("--%s=x: got error %v, want an error that says so", name, err)
			}
		}
	}
	shorthands := map[string]string{"H": "hosts", "p": "ssh-port", "i": "ssh-identity-file", "v": "version",
		"h": "help", "n": "num-proc", "x": "x"}
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Shorthand != "" && shorthands[f.Shorthand] != f.Name {
			t.Errorf("-%s is --%s, want --%s", f.Shorthand, f.Name, shorthands[f.Shorthand])
		}
		delete(shorthands, f.Shorthand)
	})
	if len(shorthands) > 0 {
		t.Errorf("the short flags %v are missing", shorthands)
	}
}

// TestUnreadSettings checks that hvdrun warns once about a setting that has no effect in the processes that
// it starts, and that the processes do not repeat the warning.
func TestUnreadSettings(t *testing.T) {
	const shown = "echo shown $HVD_SHOWN"
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"-np", "2", "--autotune-log-file", "x", "sh", "-c", shown},
			"HOROVOD_AUTOTUNE_LOG has no effect: HOROVOD_AUTOTUNE is off"},
		{[]string{"--servers", "1", "--workers", "1", "--cycle-time-ms", "3", "sh", "-c", shown},
			"HOROVOD_CYCLE_TIME has no effect: nodes of a parameter server do not use it"},
		{[]string{"-np", "2", "-x", "HVD_STALENESS=0", "sh", "-c", shown},
			"HVD_STALENESS has no effect: DMLC_ROLE is not set, so this process is no node of a parameter server"},
	} {
		stdout, stderr, _ := output(t, c.args...)
		name, _, _ := strings.Cut(c.want, " ")
		if n := strings.Count(stderr, "hvdrun: warning: "+c.want+"\n"); n != 1 ||
			strings.Count(stdout, "shown "+name) < 2 {
			t.Errorf("%q: got %q and %q, want one warning %q, of which all processes know", c.args, stdout, stderr,
				c.want)
		}
	}
}
