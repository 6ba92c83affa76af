package config

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Setting is one row of the table of settings.
type Setting struct {
	// Name is the name of the setting: its environment variable.
	Name string
	// Key is the key in the file of settings, section.key; empty if the file cannot have the setting.
	Key string
	// Flags are the flags of hvdrun for the setting. The first is the preferred one.
	Flags []Flag
	// Default is the value if no source has one, in the form of the environment. If it is empty, there is no
	// default, and Otherwise says what applies without a value.
	Default, Otherwise string
	// Doc is a phrase for users that describes the setting.
	Doc string
	// Raise is a sentence for users on the effect of raising the value, or of turning the setting on; it may
	// be empty.
	Raise string
	// Section is the heading for the setting in the help and on the page.
	Section string
	// Scope says which ranks must have the same value.
	Scope Scope
	// Secret states that the value must not be printed.
	Secret bool

	kind
	form *form // form of values in the file and in flags; nil if they are as in the environment
}

// Flag is a flag of hvdrun for a setting.
type Flag struct {
	// Name is the name of the flag without leading dashes.
	Name string
	// Arg is the word for the value in the help. It is empty for a switch.
	Arg string
	// Means is the value, in the form of the environment, that a switch sets.
	Means string
	// Instead, if not empty, is the flag that replaces this one, which is deprecated.
	Instead string
}

// Scope says which ranks must have the same value of a setting.
type Scope int

const (
	// PerProcess settings may differ from rank to rank.
	PerProcess Scope = iota
	// PerJob settings must be the same at all ranks. hvdrun gives all ranks the same values, and Init fails
	// if ranks differ.
	PerJob
	// PathPerJob settings are files that must be the same at all ranks but may have different paths. Init
	// does not compare them.
	PathPerJob
	// ToMeet settings must be the same at all ranks because the ranks cannot connect otherwise. Init cannot
	// compare them.
	ToMeet
	// ByLauncher settings are set by the launcher for each rank.
	ByLauncher
)

func (s Scope) String() string {
	switch s {
	case PerJob:
		return "the same at all ranks"
	case PathPerJob:
		return "the same at all ranks; paths may differ"
	case ToMeet:
		return "the same at all ranks, which do not meet otherwise"
	case ByLauncher:
		return "set by the launcher"
	}
	return "each rank for itself"
}

// SidecarVariable is the setting with which clients find a running sidecar.
const SidecarVariable = "HVD_SIDECAR"

// SidecarProgram is the sidecar's name. SidecarBinaryVariable is the setting with the path of its program.
const (
	SidecarProgram        = "hvdd"
	SidecarBinaryVariable = "HVD_SIDECAR_BINARY"
)

// FileVariable is the setting with the path of the file of settings.
const FileVariable = "HVD_CONFIG_FILE"

// shownVariable is the setting with the names about which hvdrun has printed warnings (see Config.ForRanks).
const shownVariable = "HVD_SHOWN"

const (
	sectionStart     = "Start of the job"
	sectionNegotiate = "Negotiation and fusion"
	sectionTrouble   = "Stalls and failures"
	sectionChoice    = "Choice of parts"
	sectionSee       = "Timeline, metrics and reports"
	sectionLog       = "Logging"
	sectionPlace     = "Place in the job"
)

// onOff returns the flags --name and --no-name of a boolean setting: the first turns it on, the second off.
func onOff(name string) []Flag {
	return []Flag{{Name: name, Means: "1"}, {Name: "no-" + name, Means: "0"}}
}

var settings = []Setting{
	{
		Name: FileVariable, Section: sectionStart, Scope: PathPerJob,
		Flags:     []Flag{{Name: "config-file", Arg: "FILE"}},
		Otherwise: "none", Doc: "YAML file of settings",
		kind: anything("the name of a file"),
	},
	{
		Name: "HOROVOD_GLOO_TIMEOUT_SECONDS", Section: sectionStart, Scope: PerJob,
		Key:     "library_options.gloo_timeout_seconds",
		Flags:   []Flag{{Name: "gloo-timeout-seconds", Arg: "SECONDS"}, {Name: "start-timeout", Arg: "SECONDS"}},
		Default: "30", Doc: "how long Init waits for the other ranks",
		Raise: "Raising it leaves slow starters more time and reports a rank that never comes later.",
		kind:  seconds(func(c *Config) *time.Duration { return &c.StartTimeout }, 0.001),
	},
	{
		Name: "HVD_SECRET_FILE", Section: sectionStart, Scope: PathPerJob,
		Otherwise: "none", Doc: "file with the job's secret, 16 bytes or more, for a job on several hosts that hvdrun does not start; the same on all",
		kind: text("the name of a file", func(c *Config) *string { return &c.SecretFile }),
	},
	{
		Name: "HVD_INSECURE", Section: sectionStart, Scope: PerJob,
		Default: "0", Doc: "let a job without a secret run on several hosts, where anybody who reaches its ports can take part",
		kind: boolOf(func(c *Config) *bool { return &c.Insecure }),
	},
	{
		Name: "HVD_TLS", Section: sectionStart, Scope: ToMeet,
		Key:     "library_options.tls",
		Flags:   onOff("tls"),
		Default: "0", Doc: "encrypt every connection between processes with TLS 1.3, by certificates made of the job's secret; a job without one does not start",
		Raise: "Turning it on costs speed where tensors go over TCP (docs/performance.md).",
		kind:  boolOf(func(c *Config) *bool { return &c.TLS }),
	},
	{
		Name: "HOROVOD_GLOO_IFACE", Section: sectionStart, Scope: PerProcess,
		Key:       "library_options.network_interfaces",
		Flags:     []Flag{{Name: "network-interfaces", Arg: "LIST"}, {Name: "network-interface", Arg: "LIST", Instead: "network-interfaces"}},
		Otherwise: "the one that leads to where the ranks meet",
		Doc: "network interfaces that the ranks use: names, addresses or networks with commas between them, as in eth0,10.0.0.0/8; " +
			"each host takes its first address among them",
		kind: interfaces(func(c *Config) *[]string { return &c.NetworkInterfaces }),
	},
	{
		Name: "HVD_RENDEZVOUS_HOST", Section: sectionStart, Scope: ToMeet,
		Otherwise: "what the launcher says", Doc: "rank 0's host, for launchers whose ranks meet at a store of rank 0 (docs/launchers.md)",
		kind: text("a host's name or address", func(c *Config) *string { return &c.MeetHost }),
	},
	{
		Name: "HVD_RENDEZVOUS_PORT", Section: sectionStart, Scope: ToMeet,
		Otherwise: "what the launcher says", Doc: "port of that store",
		kind: port(func(c *Config) *int { return &c.MeetPort }),
	},
	{
		Name: "HVD_SIZE", Section: sectionStart, Scope: ToMeet,
		Otherwise: "none", Doc: "1: this process is a job of its own, whatever any launcher but hvdrun says; else the number of pods of an Indexed Job of Kubernetes, which does not tell them",
		kind: anything("a number of at least 1"),
	},
	{
		Name: "HVD_SUBDOMAIN", Section: sectionStart, Scope: ToMeet,
		Otherwise: "the name of the job", Doc: "headless service of an Indexed Job of Kubernetes",
		kind: anything("a name"),
	},
	{
		Name: "HOROVOD_THREAD_AFFINITY", Section: sectionStart, Scope: PerProcess,
		Key:       "library_options.thread_affinity",
		Flags:     []Flag{{Name: "thread-affinity", Arg: "CORES"}},
		Otherwise: "not pinned", Doc: "core of each local rank's background thread, in the order of local ranks, as in 0,2,4",
		kind: cores(func(c *Config) *[]int { return &c.ThreadAffinity }),
	},
	{
		Name: "HOROVOD_FUSION_THRESHOLD", Section: sectionNegotiate, Scope: PerJob,
		Key:     "params.fusion_threshold_mb",
		Flags:   []Flag{{Name: "fusion-threshold-mb", Arg: "MIB"}},
		Default: "134217728", Doc: "most that one fused response may hold; 0 fuses nothing; a grouped allreduce is one response whatever its size",
		Raise: "Raising it saves round trips and costs cache misses.",
		kind:  bytesOf(func(c *Config) *int64 { return &c.FusionThresholdBytes }), form: mebibytes,
	},
	{
		Name: "HOROVOD_CYCLE_TIME", Section: sectionNegotiate, Scope: PerJob,
		Key:     "params.cycle_time_ms",
		Flags:   []Flag{{Name: "cycle-time-ms", Arg: "MS"}},
		Default: "0", Doc: "least time between two negotiation cycles; 0, unlike Horovod's 1, answers at once",
		Raise: "Raising it fuses more and answers later.",
		kind:  milliseconds(func(c *Config) *time.Duration { return &c.CycleTime }, 0),
	},
	{
		Name: "HOROVOD_CACHE_CAPACITY", Section: sectionNegotiate, Scope: PerJob,
		Key:     "params.cache_capacity",
		Flags:   []Flag{{Name: "cache-capacity", Arg: "N"}},
		Default: "1024", Doc: "responses that each process set remembers; 0 remembers none",
		Raise: "Raising it to the number of tensors of a step makes each cost one bit of negotiation.",
		kind:  whole(func(c *Config) *int { return &c.CacheCapacity }, 0),
	},
	{
		Name: "HOROVOD_DISABLE_GROUP_FUSION", Section: sectionNegotiate, Scope: PerJob,
		Key:     "params.disable_group_fusion",
		Flags:   onOff("disable-group-fusion"),
		Default: "0", Doc: "fuse a group's tensors only with each other",
		Raise: "Turning it on makes each group a response of its own, at the price of more responses.",
		kind:  boolOf(func(c *Config) *bool { return &c.DisableGroupFusion }),
	},
	{
		Name: "HVD_NEGOTIATION", Section: sectionNegotiate, Scope: PerJob,
		Key:     "params.negotiation",
		Flags:   []Flag{{Name: "negotiation", Arg: "WORD"}},
		Default: "event", Doc: "event: ranks speak when they have news; lockstep: all ranks enter every cycle, as in Horovod",
		kind: oneOf(func(c *Config, word string) { c.Lockstep = word == "lockstep" }, "event", "lockstep"),
	},
	{
		Name: "HVD_DETERMINISTIC", Section: sectionNegotiate, Scope: PerJob,
		Key:     "library_options.deterministic",
		Flags:   onOff("deterministic"),
		Default: "0", Doc: "same bits from run to run, whatever arrives first",
		Raise: "Turning it on costs speed.",
		kind:  boolOf(func(c *Config) *bool { return &c.Deterministic }),
	},
	{
		Name: "HOROVOD_DYNAMIC_PROCESS_SETS", Section: sectionNegotiate, Scope: PerJob,
		Key:     "library_options.dynamic_process_sets",
		Flags:   onOff("dynamic-process-sets"),
		Default: "1", Doc: "allow process sets to be added and removed after Init; on, unlike in Horovod, as it costs nothing",
		kind: boolOf(func(c *Config) *bool { return &c.DynamicProcessSets }),
	},
	{
		Name: "HOROVOD_STALL_CHECK_DISABLE", Section: sectionTrouble, Scope: PerJob,
		Key:     "stall_check.enabled",
		Flags:   []Flag{{Name: "no-stall-check", Means: "1"}, {Name: "stall-check", Means: "0"}},
		Default: "0", Doc: "turn the search for stalled tensors off",
		kind: boolOf(func(c *Config) *bool { return &c.stallCheckDisabled }), form: negated,
	},
	{
		Name: "HOROVOD_STALL_CHECK_TIME_SECONDS", Section: sectionTrouble, Scope: PerJob,
		Key:     "stall_check.warning_time_seconds",
		Flags:   []Flag{{Name: "stall-check-warning-time-seconds", Arg: "SECONDS"}},
		Default: "60", Doc: "how long a tensor may wait for some ranks before a warning names them; 0 never warns",
		Raise: "Raising it spares ranks that are slow now and then a warning, and finds stalls later.",
		kind:  seconds(func(c *Config) *time.Duration { return &c.StallWarning }, 0),
	},
	{
		Name: "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", Section: sectionTrouble, Scope: PerJob,
		Key:     "stall_check.shutdown_time_seconds",
		Flags:   []Flag{{Name: "stall-check-shutdown-time-seconds", Arg: "SECONDS"}},
		Default: "0", Doc: "how long it may wait before the job is ended, at least the time of the warning; 0 never ends it",
		Raise: "Raising it lets a job that is stuck hold its machines for longer.",
		kind:  seconds(func(c *Config) *time.Duration { return &c.StallShutdown }, 0),
	},
	{
		Name: "HVD_OPERATION_TIMEOUT_SECONDS", Section: sectionTrouble, Scope: PerProcess,
		Key:     "library_options.operation_timeout_seconds",
		Flags:   []Flag{{Name: "operation-timeout-seconds", Arg: "SECONDS"}},
		Default: "0", Doc: "how long an operation may take from being submitted to its end; 0 sets no bound",
		Raise: "Raising it spares slow operations and finds stuck ones later.",
		kind:  seconds(func(c *Config) *time.Duration { return &c.OperationTimeout }, 0),
	},
	{
		Name: "HVD_LIVENESS_SECONDS", Section: sectionTrouble, Scope: PerJob,
		Key:     "library_options.liveness_seconds",
		Flags:   []Flag{{Name: "liveness-seconds", Arg: "SECONDS"}},
		Default: "10", Doc: "silence after which a rank is taken for dead",
		Raise: "Raising it delays the verdict on a host that vanished; a process that dies is noticed at once regardless.",
		// The minimum leaves time for a few heartbeats, which are sent every second.
		kind: seconds(func(c *Config) *time.Duration { return &c.LivenessTimeout }, 3),
	},
	{
		Name: "HOROVOD_CONTROLLER", Section: sectionChoice, Scope: PerJob,
		Key:     "controller",
		Flags:   []Flag{{Name: "gloo", Means: "gloo"}},
		Default: "gloo", Doc: "what negotiates; gloo and tcp both mean gohvd's own controller",
		kind: builtOnly(ownController(), "mpi"),
	},
	{
		Name: "HOROVOD_CPU_OPERATIONS", Section: sectionChoice, Scope: PerJob,
		Key:     "cpu_operations",
		Default: "gloo", Doc: "what moves and reduces tensors in host memory: gloo is shared memory if all ranks are on one host, else TCP; " +
			"shm,tcp the same, but TCP also where the memory cannot be had, which is an error otherwise; shm and tcp that one alone",
		kind: builtOnly(cpuOperations(), "mpi", "ccl"),
	},
	{
		Name: "HOROVOD_TIMELINE", Section: sectionSee, Scope: PathPerJob,
		Key:       "timeline.filename",
		Flags:     []Flag{{Name: "timeline-filename", Arg: "FILE"}},
		Otherwise: "none", Doc: "file that rank 0 writes its timeline to, the other ranks beside it as FILE.rankN before the last dot (docs/timeline.md); " +
			"with .gz at the end it is compressed; DYNAMIC writes none until the program or a signal asks for it",
		kind: text("the name of a file, or DYNAMIC", func(c *Config) *string { return &c.Timeline }),
	},
	{
		Name: "HOROVOD_TIMELINE_MARK_CYCLES", Section: sectionSee, Scope: PerJob,
		Key:     "timeline.mark_cycles",
		Flags:   onOff("timeline-mark-cycles"),
		Default: "0", Doc: "mark in the timeline when negotiation cycles begin",
		kind: boolOf(func(c *Config) *bool { return &c.TimelineMarkCycles }),
	},
	{
		Name: "HVD_TIMELINE_MAX_MB", Section: sectionSee, Scope: PerJob,
		Key:     "timeline.max_mb",
		Flags:   []Flag{{Name: "timeline-max-mb", Arg: "MIB"}},
		Default: "1024", Doc: "most MiB that the timeline of a rank takes on disk; when it is full the oldest part is dropped",
		Raise: "Raising it keeps more of a long job.",
		kind:  whole(func(c *Config) *int { return &c.TimelineMaxMiB }, 1),
	},
	{
		Name: "HVD_TIMELINE_LAST_SECONDS", Section: sectionSee, Scope: PerJob,
		Key:     "timeline.last_seconds",
		Flags:   []Flag{{Name: "timeline-last-seconds", Arg: "SECONDS"}},
		Default: "0", Doc: "keep only the last seconds of the timeline, in memory, and write them when it is stopped or the job ends or fails; 0 writes all of it as it comes",
		kind: seconds(func(c *Config) *time.Duration { return &c.TimelineLast }, 0),
	},
	{
		Name: "HVD_TIMELINE_SIGNAL", Section: sectionSee, Scope: PerProcess,
		Key:       "timeline.signal",
		Otherwise: "none", Doc: "signal that starts the timeline, and stops it when it is sent again; hvdrun passes the one that it gets to all ranks, " +
			"and starts them with it ignored, so that it ends no program that has not asked for it",
		kind: oneOf(func(c *Config, word string) { c.TimelineSignal = word }, "SIGUSR1", "SIGUSR2"),
	},
	{
		Name: "HVD_METRICS_ADDR", Section: sectionSee, Scope: PerProcess,
		Key:       "metrics.addr",
		Otherwise: "none", Doc: "host:port on which the rank shows its metrics, plus its local rank unless the port is 0 (docs/metrics.md); " +
			"hvdrun --metrics-addr shows those of all ranks on one",
		kind: text("host:port", func(c *Config) *string { return &c.MetricsAddr }),
	},
	{
		Name: "HVD_FLIGHT_RECORDER", Section: sectionSee, Scope: PerJob,
		Key:     "flight_recorder.enabled",
		Default: "1", Doc: "keep the last 10000 operations in memory for reports on stalls and failures",
		Raise: "Turning it off saves 1.3 MB per rank and some nanoseconds per tensor.",
		kind:  boolOf(func(c *Config) *bool { return &c.FlightRecorder }),
	},
	{
		Name: "HVD_DUMP_DIR", Section: sectionSee, Scope: PerProcess,
		Key:       "flight_recorder.dump_dir",
		Flags:     []Flag{{Name: "dump-dir", Arg: "DIR"}},
		Otherwise: "none", Doc: "folder in which hvdrun leaves its reports and what the ranks' flight recorders have; without hvdrun each rank when the job fails, and rank 0 when it stalls (docs/troubleshooting.md)",
		kind: text("the name of a folder", func(c *Config) *string { return &c.DumpDir }),
	},
	{
		Name: "HOROVOD_LOG_LEVEL", Section: sectionLog, Scope: PerProcess,
		Key:     "logging.level",
		Flags:   []Flag{{Name: "log-level", Arg: "LEVEL"}},
		Default: "warning", Doc: "least severity that is logged",
		kind: oneOf(func(c *Config, word string) { c.LogLevel = word }, "trace", "debug", "info", "warning", "error", "fatal"),
	},
	{
		Name: "HOROVOD_LOG_HIDE_TIME", Section: sectionLog, Scope: PerProcess,
		Key: "logging.with_timestamp",
		Flags: []Flag{
			{Name: "log-without-timestamp", Means: "1"}, {Name: "log-with-timestamp", Means: "0"},
			{Name: "log-hide-timestamp", Means: "1", Instead: "log-without-timestamp"},
			{Name: "no-log-hide-timestamp", Means: "0", Instead: "log-with-timestamp"},
		},
		Default: "0", Doc: "leave the time out of the log",
		kind: boolOf(func(c *Config) *bool { return &c.LogHideTime }), form: negated,
	},
	{
		Name: "HVD_LOG_FORMAT", Section: sectionLog, Scope: PerProcess,
		Key:     "logging.format",
		Flags:   []Flag{{Name: "log-format", Arg: "FORMAT"}},
		Default: "auto", Doc: "form of the log: console is for people, json for programs, auto is console on a terminal and json elsewhere",
		kind: oneOf(func(c *Config, word string) { c.LogFormat = word }, "auto", "console", "json"),
	},
	{
		Name: "HOROVOD_RANK", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "0 of a job of one", Doc: "rank of this process, 0 to size-1",
		kind: whole(func(c *Config) *int { return &c.Rank }, 0),
	},
	{
		Name: "HOROVOD_SIZE", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "a job of one", Doc: "number of processes in the job",
		kind: whole(func(c *Config) *int { return &c.Size }, 1),
	},
	{
		Name: "HOROVOD_LOCAL_RANK", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "by host", Doc: "rank among the processes of this host",
		kind: whole(func(c *Config) *int { return &c.LocalRank }, 0),
	},
	{
		Name: "HOROVOD_LOCAL_SIZE", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "by host", Doc: "number of processes on this host",
		kind: whole(func(c *Config) *int { return &c.LocalSize }, 1),
	},
	{
		Name: "HOROVOD_CROSS_RANK", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "by host", Doc: "index of this host among those that have this local rank",
		kind: whole(func(c *Config) *int { return &c.CrossRank }, 0),
	},
	{
		Name: "HOROVOD_CROSS_SIZE", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "by host", Doc: "number of hosts that have this local rank",
		kind: whole(func(c *Config) *int { return &c.CrossSize }, 1),
	},
	{
		Name: "HOROVOD_HOSTNAME", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "the host's name", Doc: "identity of this host: ranks with equal ones are local to each other",
		kind: text("any text", func(c *Config) *string { return &c.Hostname }),
	},
	{
		Name: "HVD_HOSTID", Section: sectionPlace, Scope: PerProcess,
		Otherwise: "host name, boot and network namespace", Doc: "identity of the memory of this host: ranks with equal ones may share memory",
		kind: text("any text", func(c *Config) *string { return &c.HostID }),
	},
	{
		Name: "HOROVOD_GLOO_RENDEZVOUS_ADDR", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "none", Doc: "host of the launcher's store",
		kind: text("a host's name or address", func(c *Config) *string { return &c.RendezvousAddr }),
	},
	{
		Name: "HOROVOD_GLOO_RENDEZVOUS_PORT", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "none", Doc: "port of the launcher's store",
		kind: port(func(c *Config) *int { return &c.RendezvousPort }),
	},
	{
		Name: "HVD_JOB_ID", Section: sectionPlace, Scope: ByLauncher,
		Default: "gohvd", Doc: "identity of the job; connections from another job are refused",
		kind: short(func(c *Config) *string { return &c.JobID }),
	},
	{
		Name: "HVD_INIT_METHOD", Section: sectionPlace, Scope: PerProcess,
		Otherwise: "as the launcher says", Doc: "URL by which the ranks meet, as of PyTorch's init_process_group: env://, tcp://HOST:PORT or " +
			"file:///PATH, with ?rank=R&world_size=N unless a launcher or HOROVOD_RANK and HOROVOD_SIZE say them (docs/launchers.md)",
		kind: text("a URL", func(c *Config) *string { return &c.InitMethod }),
	},
	{
		Name: "HVD_UNIQUE_ID", Section: sectionPlace, Scope: PerProcess, Secret: true,
		Otherwise: "as the launcher says", Doc: "id of hvd.NewUniqueID by which the ranks meet, the same at all; a launcher or HOROVOD_RANK and HOROVOD_SIZE say " +
			"which rank this is; every process that has the id can join the job",
		kind: text("the text of an id, or several with commas between them", func(c *Config) *string { return &c.UniqueID }),
	},
	{
		Name: "HVD_SECRET", Section: sectionPlace, Scope: ByLauncher, Secret: true,
		Otherwise: "none", Doc: "text that proves that a process is of this job: every connection is refused to who has another",
		kind: text("any text", func(c *Config) *string { return &c.Secret }),
	},
	{
		Name: SidecarVariable, Section: sectionPlace, Scope: PerProcess,
		Otherwise: "the program starts one", Doc: "the running sidecar that a program in Python uses; a Go program, which runs the engine itself, refuses it (docs/sidecar.md)",
		kind: anything("unix:///path"),
	},
	{
		Name: SidecarBinaryVariable, Section: sectionPlace, Scope: PerProcess,
		Otherwise: "bin/hvdd of the Python package, then hvdd on PATH", Doc: "hvdd, for Python programs that start a sidecar",
		kind: anything("the path of a program"),
	},
	{
		Name: "HVD_RUN", Section: sectionPlace, Scope: PerProcess,
		Otherwise: "hvdrun on PATH", Doc: "hvdrun, for horovod.run in Python",
		kind: anything("the path of a program"),
	},
	{
		Name: shownVariable, Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "none", Doc: "names that hvdrun has warned of, so that the ranks do not warn again",
		kind: anything("what hvdrun writes"),
	},
}

// Settings returns the table, in the order of the documentation. The caller owns the slice.
func Settings() []Setting { return append([]Setting(nil), settings...) }

// Lookup returns the setting with this name.
func Lookup(name string) (Setting, bool) {
	return find(func(s Setting) bool { return s.Name == name })
}

func find(is func(Setting) bool) (Setting, bool) {
	i := slices.IndexFunc(settings, is)
	if i < 0 {
		return Setting{}, false
	}
	return settings[i], true
}

// FromFlag converts the value of flag f to the form of the environment. text is "true" for a switch without a
// value. The error says what was wanted.
func (s Setting) FromFlag(f Flag, text string) (string, error) {
	if f.Arg != "" {
		return s.fromForm(text)
	}
	on, ok := boolean(text)
	switch off, negatable := map[string]string{"1": "0", "0": "1"}[f.Means]; {
	case ok && on:
		return f.Means, nil
	case ok && negatable:
		return off, nil
	case negatable:
		return "", fmt.Errorf("want no value or %s", wantBoolean)
	}
	return "", fmt.Errorf("want no value")
}

// fromForm converts a value in the form of the file to the form of the environment.
func (s Setting) fromForm(text string) (string, error) {
	if s.form == nil {
		return text, s.check(text)
	}
	env, ok := s.form.read(text)
	if !ok {
		return "", fmt.Errorf("want %s", s.form.want)
	}
	return env, nil
}

// check returns an error if text is not a valid value of the setting.
func (s Setting) check(text string) error {
	var scratch Config
	return s.set(&scratch, text)
}

// Fallback returns a text for users that says what applies if no source has a value.
func (s Setting) Fallback() string {
	if s.Default == "" {
		return s.Otherwise
	}
	return strings.TrimSpace(s.Default + " " + s.Unit())
}
