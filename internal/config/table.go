package config

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/binding"
)

// Setting is a row of the table of settings.
type Setting struct {
	// Name is the name of the setting and of its environment variable.
	Name string
	// Key is the key in the settings file, as section.key. It is empty if the file cannot contain the
	// setting.
	Key string
	// Flags holds the flags of hvdrun for the setting. The first is the preferred one.
	Flags []Flag
	// Default is the default value, in the form of the environment. If it is empty, there is no default
	// value, and the field Otherwise has a text that tells users what applies instead.
	Default, Otherwise string
	// Doc is a phrase for users that describes the setting. Sentences may follow it.
	Doc string
	// Raise is a sentence for users about the effect of raising the value or of turning the setting on. It
	// may be empty.
	Raise string
	// Section is the heading above the setting in the help and on the page.
	Section string
	// Scope says whether the value of the setting must be the same at all ranks.
	Scope Scope
	// Secret is set if the value of the setting must not be printed.
	Secret bool

	kind
	form *form // how values are written in the file and in flags; nil if as in the environment
}

// Flag is a flag of hvdrun that sets a setting.
type Flag struct {
	// Name is the name of the flag, without leading dashes.
	Name string
	// Arg is the placeholder for the value in the help, such as SECONDS. It is empty for a switch.
	Arg string
	// Means is the value that the setting gets if the user passes the switch. The value has the form of the
	// environment.
	Means string
	// Adds says that the flag adds its value to that of the flags before it, with a comma between them.
	Adds bool
	// Instead is the flag that replaces this flag, if this flag is deprecated. Otherwise it is empty.
	Instead string
}

// Scope says whether the value of a setting must be the same at all ranks, and who sets it.
type Scope int

const (
	// PerProcess is for settings that may differ from rank to rank.
	PerProcess Scope = iota
	// PerJob is for settings that must be the same at all ranks. hvdrun passes the same values to all ranks.
	// Init fails if ranks have different values.
	PerJob
	// PathPerJob is for settings that name files. The content of the file must be the same at all ranks, but
	// its path may differ from rank to rank. So Init does not compare these settings.
	PathPerJob
	// ToMeet is for settings that must be the same at all ranks, because ranks with different values cannot
	// connect. So Init cannot compare these settings.
	ToMeet
	// ByLauncher is for settings that the launcher sets for each rank.
	ByLauncher
)

func (s Scope) String() string {
	switch s {
	case PerJob:
		return "must be the same at all ranks"
	case PathPerJob:
		return "must be the same at all ranks, but the path may differ"
	case ToMeet:
		return "must be the same at all ranks, else they cannot connect"
	case ByLauncher:
		return "set by the launcher"
	}
	return "may differ between ranks"
}

// SidecarVariable is the setting that tells clients the address of a running sidecar.
const SidecarVariable = "HVD_SIDECAR"

// SidecarProgram is the file name of the sidecar. SidecarBinaryVariable is the setting with the path of that
// program.
const (
	SidecarProgram        = "hvdd"
	SidecarBinaryVariable = "HVD_SIDECAR_BINARY"
)

// LibraryFile is the file name of the library for programs that are not in Go. LibraryVariable is the setting
// with the path of that file.
const (
	LibraryFile     = "libgohvd.so"
	LibraryVariable = "HVD_LIBRARY"
)

// FileVariable is the setting with the path of the settings file.
const FileVariable = "HVD_CONFIG_FILE"

// shownVariable is the setting in which hvdrun passes to the ranks the names that it has printed warnings
// about (see Config.ForRanks).
const shownVariable = "HVD_SHOWN"

const (
	sectionStart     = "Start of the job"
	sectionNegotiate = "Negotiation and fusion"
	sectionTune      = "Autotuning"
	sectionTrouble   = "Stalls and failures"
	sectionChoice    = "Backends"
	sectionSee       = "Timeline, metrics and reports"
	sectionLog       = "Logging"
	sectionPlace     = "Place in the job"
	sectionServer    = "Parameter server"
)

// onOff returns the two flags of a boolean setting: --name turns it on, and --no-name turns it off.
func onOff(name string) []Flag {
	return []Flag{{Name: name, Means: "1"}, {Name: "no-" + name, Means: "0"}}
}

var settings = []Setting{
	{
		Name: FileVariable, Section: sectionStart, Scope: PathPerJob,
		Flags:     []Flag{{Name: "config-file", Arg: "FILE"}},
		Otherwise: "none",
		Doc:       "YAML file with settings",
		kind:      anything("the name of a file"),
	},
	{
		Name: "HOROVOD_GLOO_TIMEOUT_SECONDS", Section: sectionStart, Scope: PerJob,
		Key: "library_options.gloo_timeout_seconds",
		Flags: []Flag{{Name: "gloo-timeout-seconds", Arg: "SECONDS"},
			{Name: "start-timeout", Arg: "SECONDS"}},
		Default: "30",
		Doc:     "time limit of Init, within which all ranks must have joined",
		Raise:   "A higher value tolerates ranks that start late, and delays the error if a rank never starts.",
		kind:    seconds(func(c *Config) *time.Duration { return &c.StartTimeout }, 0.001),
	},
	{
		Name: "HOROVOD_SPARK_START_TIMEOUT", Section: sectionStart, Scope: PerProcess,
		Default: "600",
		Doc: "for how many seconds gohvd.spark.run waits for slots for all ranks, unless its argument start_timeout says it " +
			"(docs/clusters.md)",
		kind: anything("a number of seconds"),
	},
	{
		Name: "HOROVOD_ELASTIC_TIMEOUT", Section: sectionStart, Scope: PerJob,
		Flags:   []Flag{{Name: "elastic-timeout", Arg: "SECONDS"}},
		Default: "600",
		Doc: "how long an elastic job waits for slots, at its start and when it pauses because there are too few ranks " +
			"(docs/elastic.md)",
		kind: seconds(func(c *Config) *time.Duration { return &c.ElasticTimeout }, 0.001),
	},
	{
		Name: "HVD_SECRET_FILE", Section: sectionStart, Scope: PathPerJob,
		Otherwise: "none",
		Doc: "file with the job's secret, at least 16 bytes. A job on several hosts needs it, unless " +
			"hvdrun starts the job. All ranks must have the same secret",
		kind: text("the name of a file", func(c *Config) *string { return &c.SecretFile }),
	},
	{
		Name: "HVD_INSECURE", Section: sectionStart, Scope: PerJob,
		Default: "0",
		Doc:     "allow a job without a secret, on several hosts or for every user of this host",
		Raise:   "Turning it on lets any process that reaches the ports of the job take part in it.",
		kind:    boolOf(func(c *Config) *bool { return &c.Insecure }),
	},
	{
		Name: "HVD_TLS", Section: sectionStart, Scope: PerJob,
		Key:     "library_options.tls",
		Flags:   onOff("tls"),
		Default: "0",
		Doc: "encrypt every connection between processes with TLS 1.3, and not only those on which ranks " +
			"meet, except those that MPI and NCCL make. The certificates are derived from the job's secret, " +
			"so a job without a secret does not start",
		Raise: "Turning it on slows down transfers over TCP (docs/performance.md).",
		kind:  boolOf(func(c *Config) *bool { return &c.TLS }),
	},
	{
		Name: "HOROVOD_GLOO_IFACE", Section: sectionStart, Scope: PerProcess,
		Key: "library_options.network_interfaces",
		Flags: []Flag{{Name: "network-interfaces", Arg: "LIST"}, {Name: "network-interface", Arg: "LIST",
			Instead: "network-interfaces", Adds: true}},
		Otherwise: "the interface of the route to the address where the ranks meet",
		Doc: "network interfaces that ranks may listen on: names, addresses or networks, separated by " +
			"commas, as in eth0,10.0.0.0/8. Each host uses its first address that matches. As in NCCL's " +
			"variable NCCL_SOCKET_IFNAME, eth stands for eth0 and eth1 unless there is an interface eth, =eth0 " +
			"does not stand for eth01, and ^docker,lo stands for all interfaces except those",
		kind: interfaces(func(c *Config) *[]string { return &c.NetworkInterfaces }),
	},
	{
		Name: "HVD_RENDEZVOUS_HOST", Section: sectionStart, Scope: ToMeet,
		Otherwise: "the address that the launcher provides",
		Doc: "name or address of the host of rank 0. It is used only under launchers whose ranks meet at a " +
			"store that rank 0 serves (docs/launchers.md)",
		kind: text("a host's name or address", func(c *Config) *string { return &c.MeetHost }),
	},
	{
		Name: "HVD_RENDEZVOUS_PORT", Section: sectionStart, Scope: ToMeet,
		Otherwise: "the port that the launcher provides",
		Doc: "port of the store that rank 0 serves. It is used only under launchers whose ranks meet at " +
			"this store (docs/launchers.md)",
		kind: port(func(c *Config) *int { return &c.MeetPort }),
	},
	{
		Name: "HVD_SIZE", Section: sectionStart, Scope: ToMeet,
		Otherwise: "none",
		Doc: "number of ranks. The value 1 makes this process a job with one rank, even if a launcher " +
			"other than hvdrun says otherwise. In an Indexed Job of Kubernetes, and under launchers that " +
			"tell a process only its rank (docs/launchers.md), set it to the number of processes. If several " +
			"launchers have started this process, the size of the job says that this size is intended",
		kind: anything("a number of at least 1"),
	},
	{
		Name: "HVD_SUBDOMAIN", Section: sectionStart, Scope: ToMeet,
		Otherwise: "the name of the Kubernetes job",
		Doc: "name of the headless service through which the pods of an Indexed Job of Kubernetes find " +
			"each other",
		kind: anything("the name of a service"),
	},
	{
		Name: "HOROVOD_THREAD_AFFINITY", Section: sectionStart, Scope: PerProcess,
		Key:       "library_options.thread_affinity",
		Flags:     []Flag{{Name: "thread-affinity", Arg: "CORES"}},
		Otherwise: "not pinned",
		Doc: "processor cores to which the ranks of a host pin their background threads: one core for " +
			"each local rank, in the order of local ranks, as in 0,2,4. Init fails if the list is shorter " +
			"than the number of ranks on the host, or if the process may not run on its core",
		kind: numbers(func(c *Config) *[]int { return &c.ThreadAffinity }),
	},
	{
		Name: "HVD_BIND_TO", Section: sectionStart, Scope: PerProcess,
		Flags:   []Flag{{Name: "bind-to", Arg: "UNIT"}},
		Default: string(binding.None),
		Doc: "the cores to which the ranks of a host are bound. core gives each rank the same number of cores, as " +
			"many as there are, and no core to two ranks. numa gives each rank all cores of a NUMA node. Cores " +
			"that the launcher or a cgroup does not allow are left out. hvdrun binds the processes that it " +
			"starts; under other launchers, Init binds the threads of its process until Shutdown",
		kind: oneOf(func(c *Config, word string) { c.BindTo = binding.Unit(word) }, string(binding.None),
			string(binding.Core), string(binding.NUMA)),
	},
	{
		Name: "HOROVOD_FUSION_THRESHOLD", Section: sectionNegotiate, Scope: PerJob,
		Key:     "params.fusion_threshold_mb",
		Flags:   []Flag{{Name: "fusion-threshold-mb", Arg: "MIB"}},
		Default: "134217728",
		Doc: "maximum total size of the tensors that are fused into one response. 0 turns fusion off. A " +
			"grouped allreduce is one response whatever its size",
		Raise: "A higher value saves round trips, but causes more misses in the caches of the processor.",
		kind:  bytesOf(func(c *Config) *int64 { return &c.FusionThresholdBytes }), form: mebibytes,
	},
	{
		Name: "HOROVOD_CYCLE_TIME", Section: sectionNegotiate, Scope: PerJob,
		Key:     "params.cycle_time_ms",
		Flags:   []Flag{{Name: "cycle-time-ms", Arg: "MS"}},
		Default: "0",
		Doc: "minimum time between two negotiation cycles. If it is 0, requests are answered at once. " +
			"Horovod's default is 1 ms",
		Raise: "A higher value fuses more tensors into one response, but delays responses.",
		kind:  milliseconds(func(c *Config) *time.Duration { return &c.CycleTime }, 0),
	},
	{
		Name: "HOROVOD_CACHE_CAPACITY", Section: sectionNegotiate, Scope: PerJob,
		Key:     "params.cache_capacity",
		Flags:   []Flag{{Name: "cache-capacity", Arg: "N"}},
		Default: "1024",
		Doc:     "number of responses in the response cache of each process set. 0 turns the cache off",
		Raise: "If the cache has room for all tensors of a training step, each repeated tensor is " +
			"negotiated with one bit.",
		kind: whole(func(c *Config) *int { return &c.CacheCapacity }, 0),
	},
	{
		Name: "HOROVOD_DISABLE_GROUP_FUSION", Section: sectionNegotiate, Scope: PerJob,
		Key:     "params.disable_group_fusion",
		Flags:   onOff("disable-group-fusion"),
		Default: "0",
		Doc:     "fuse the tensors of a group only with each other, not with tensors outside the group",
		Raise:   "Turning it on gives each group a response of its own, so there are more responses.",
		kind:    boolOf(func(c *Config) *bool { return &c.DisableGroupFusion }),
	},
	{
		Name: "HVD_NEGOTIATION", Section: sectionNegotiate, Scope: PerJob,
		Key:     "params.negotiation",
		Flags:   []Flag{{Name: "negotiation", Arg: "WORD"}},
		Default: "event",
		Doc: "how ranks negotiate. With event, a rank sends its requests as soon as it has some. With " +
			"lockstep, all ranks take part in every cycle, as in Horovod",
		kind: oneOf(func(c *Config, word string) { c.Lockstep = word == "lockstep" }, "event", "lockstep"),
	},
	{
		Name: "HVD_LEADERS_ABOVE", Section: sectionNegotiate, Scope: PerJob,
		Key:     "params.leaders_above",
		Flags:   []Flag{{Name: "leaders-above", Arg: "N"}},
		Default: "64",
		Doc: "number of ranks above which one rank of each host, its leader, passes on the control frames of " +
			"the other ranks of its host. Up to this number, each rank has a control connection to rank 0. If there " +
			"are more hosts than this, and more than 64, besides that of rank 0, one leader of each group of " +
			"leaders passes on the control frames of the others",
		Raise: "A higher value saves a step of small operations, but rank 0 has more connections and more work.",
		kind:  whole(func(c *Config) *int { return &c.LeadersAbove }, 1),
	},
	{
		Name: "HVD_DETERMINISTIC", Section: sectionNegotiate, Scope: PerJob,
		Key:     "library_options.deterministic",
		Flags:   onOff("deterministic"),
		Default: "0",
		Doc:     "make results equal bit by bit from run to run, even if data arrives in another order",
		Raise:   "Turning it on makes operations slower.",
		kind:    boolOf(func(c *Config) *bool { return &c.Deterministic }),
	},
	{
		Name: "HOROVOD_DYNAMIC_PROCESS_SETS", Section: sectionNegotiate, Scope: PerJob,
		Key:     "library_options.dynamic_process_sets",
		Flags:   onOff("dynamic-process-sets"),
		Default: "1",
		Doc: "allow process sets to be added and removed after Init. Unlike in Horovod, this is on by " +
			"default, because it costs nothing",
		kind: boolOf(func(c *Config) *bool { return &c.DynamicProcessSets }),
	},
	{
		Name: "HOROVOD_AUTOTUNE", Section: sectionTune, Scope: PerProcess,
		Key:     "autotune.enabled",
		Flags:   onOff("autotune"),
		Default: "0",
		Doc: "search for good settings while the job runs (docs/performance.md). Rank 0 searches, so " +
			"only its settings of this section count. Settings that have a value from any source " +
			"are kept",
		Raise: "Turning it on makes some steps slower until the search has ended.",
		kind:  boolOf(func(c *Config) *bool { return &c.Autotune }),
	},
	{
		Name: "HOROVOD_AUTOTUNE_LOG", Section: sectionTune, Scope: PerProcess,
		Key:       "autotune.log_file",
		Flags:     []Flag{{Name: "autotune-log-file", Arg: "FILE"}},
		Otherwise: "none",
		Doc: "file to which rank 0 writes what it has tried and the scores, as comma-separated " +
			"values with Horovod's columns",
		kind: text("the name of a file", func(c *Config) *string { return &c.AutotuneLog }),
	},
	{
		Name: "HVD_AUTOTUNE_FILE", Section: sectionTune, Scope: PerProcess,
		Key:       "autotune.file",
		Flags:     []Flag{{Name: "autotune-file", Arg: "FILE"}},
		Otherwise: "none",
		Doc: "file with tuned settings. Rank 0 reads it at the start, also if HOROVOD_AUTOTUNE is " +
			"off, and replaces it by the result when the search has ended, or by the best settings so far " +
			"when the job ends. If HOROVOD_AUTOTUNE is on, the file need not exist, and if the name is a " +
			"symbolic link, the file to which it leads at the start is replaced; a link of another user is an error",
		kind: text("the name of a file", func(c *Config) *string { return &c.AutotuneFile }),
	},
	{
		Name: "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", Section: sectionTune, Scope: PerProcess,
		Key:     "autotune.warmup_samples",
		Flags:   []Flag{{Name: "autotune-warmup-samples", Arg: "N"}},
		Default: "3",
		Doc:     "number of samples at the beginning that are discarded",
		Raise:   "Raising it keeps a slow start of the program out of the scores.",
		kind:    whole(func(c *Config) *int { return &c.AutotuneWarmupSamples }, 0),
	},
	{
		Name: "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", Section: sectionTune, Scope: PerProcess,
		Key:     "autotune.steps_per_sample",
		Flags:   []Flag{{Name: "autotune-steps-per-sample", Arg: "N"}},
		Default: "10",
		Doc: "number of training steps of a sample. A step ends when a tensor of the step is reduced " +
			"again",
		Raise: "Raising it makes scores less noisy, but the search takes longer.",
		kind:  whole(func(c *Config) *int { return &c.AutotuneStepsPerSample }, 1),
	},
	{
		Name: "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", Section: sectionTune, Scope: PerProcess,
		Key:     "autotune.bayes_opt_max_samples",
		Flags:   []Flag{{Name: "autotune-bayes-opt-max-samples", Arg: "N"}},
		Default: "20",
		Doc: "maximum number of points that are tried, for all parameters together. With 0 or 1 " +
			"there is no search",
		Raise: "Raising it finds better settings in some jobs, but the search takes longer.",
		kind:  whole(func(c *Config) *int { return &c.AutotuneMaxSamples }, 0),
	},
	{
		Name: "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", Section: sectionTune, Scope: PerProcess,
		Key:     "autotune.gaussian_process_noise",
		Flags:   []Flag{{Name: "autotune-gaussian-process-noise", Arg: "X"}},
		Default: "0.8",
		Doc:     "maximum noise of a score, as a fraction of the spread of the scores",
		Raise:   "Raising it makes the search trust single scores less.",
		kind:    fraction(func(c *Config) *float64 { return &c.AutotuneNoise }),
	},
	{
		Name: "HOROVOD_STALL_CHECK_DISABLE", Section: sectionTrouble, Scope: PerJob,
		Key:     "stall_check.enabled",
		Flags:   []Flag{{Name: "no-stall-check", Means: "1"}, {Name: "stall-check", Means: "0"}},
		Default: "0",
		Doc:     "turn off the check for stalled tensors",
		Raise:   "Turning it on prevents stall warnings and the shutdown of a stalled job.",
		kind:    boolOf(func(c *Config) *bool { return &c.stallCheckDisabled }), form: negated,
	},
	{
		Name: "HOROVOD_STALL_CHECK_TIME_SECONDS", Section: sectionTrouble, Scope: PerJob,
		Key:     "stall_check.warning_time_seconds",
		Flags:   []Flag{{Name: "stall-check-warning-time-seconds", Arg: "SECONDS"}},
		Default: "60",
		Doc: "time that a tensor may wait for ranks before a warning names these ranks. 0 turns the " +
			"warnings off",
		Raise: "A higher value avoids warnings about ranks that are slow now and then, but reports stalls " +
			"later.",
		kind: seconds(func(c *Config) *time.Duration { return &c.StallWarning }, 0),
	},
	{
		Name: "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", Section: sectionTrouble, Scope: PerJob,
		Key:     "stall_check.shutdown_time_seconds",
		Flags:   []Flag{{Name: "stall-check-shutdown-time-seconds", Arg: "SECONDS"}},
		Default: "0",
		Doc: "time that a tensor may wait for ranks before the job is ended. It must be at least " +
			"HOROVOD_STALL_CHECK_TIME_SECONDS. With 0, a stall never ends the job",
		Raise: "A higher value lets a stalled job run, and occupy its machines, for longer.",
		kind:  seconds(func(c *Config) *time.Duration { return &c.StallShutdown }, 0),
	},
	{
		Name: "HVD_OPERATION_TIMEOUT_SECONDS", Section: sectionTrouble, Scope: PerProcess,
		Key:     "library_options.operation_timeout_seconds",
		Flags:   []Flag{{Name: "operation-timeout-seconds", Arg: "SECONDS"}},
		Default: "0",
		Doc: "time limit of every operation except Join, from submission to completion. When it has " +
			"passed, the job fails. It is also the time limit of a request, a barrier and a clock of the parameter " +
			"server, but then only the call fails. 0 sets no limit",
		Raise: "A higher value tolerates slow operations, but detects stuck operations later.",
		kind:  seconds(func(c *Config) *time.Duration { return &c.OperationTimeout }, 0),
	},
	{
		Name: "HVD_LIVENESS_SECONDS", Section: sectionTrouble, Scope: PerJob,
		Key:     "library_options.liveness_seconds",
		Flags:   []Flag{{Name: "liveness-seconds", Arg: "SECONDS"}},
		Default: "10",
		Doc: "time without a message after which a rank is considered dead, and time without an acknowledgement " +
			"after which a connection between two ranks has failed",
		Raise: "A higher value delays the error if a host vanishes. The death of a process is noticed at once, " +
			"whatever the value.",
		// The minimum of 3 s leaves time for a few heartbeats, because ranks send one every second.
		kind: seconds(func(c *Config) *time.Duration { return &c.LivenessTimeout }, 3),
	},
	{
		Name: "HOROVOD_CONTROLLER", Section: sectionChoice, Scope: PerJob,
		Key:     "controller",
		Flags:   []Flag{{Name: "gloo", Means: "gloo"}},
		Default: "gloo",
		Doc: "controller for the negotiation. gloo and tcp both mean gohvd's own controller, whose ranks " +
			"meet by their launcher. With mpi, the ranks meet by MPI, and HVD_NEGOTIATION=lockstep uses MPI; " +
			"this needs a build with MPI (docs/mpi.md)",
		kind: builtOnly(controllers(), "ccl"),
	},
	{
		Name: "HOROVOD_CPU_OPERATIONS", Section: sectionChoice, Scope: PerJob,
		Key:     "cpu_operations",
		Default: "gloo",
		Doc: "backend for tensors in host memory. With gloo, the ranks of a host use shared memory, and the " +
			"job fails if there is none; ranks on different hosts use TCP. shm,tcp is like gloo, but uses " +
			"TCP if there is no shared memory. With shm, all ranks must share memory, so the job fails if it " +
			"has several hosts. With tcp, all ranks use TCP. With mpi, all ranks use MPI, and TCP for what " +
			"MPI cannot do; this needs a build with MPI (docs/mpi.md)",
		kind: builtOnly(cpuOperations(), "ccl"),
	},
	{
		Name: "HOROVOD_GPU_OPERATIONS", Section: sectionChoice, Scope: PerJob,
		Key:       "gpu_operations",
		Otherwise: "nccl if all ranks have its library and a driver for CUDA, and none otherwise",
		Doc: "backend for tensors on CUDA devices. With none, operations on such tensors fail. With nccl, " +
			"all ranks use NCCL; this needs a build with NCCL, and the libraries and a device at every rank. " +
			"With host, tensors are copied through host memory, which is slow and needs all of this but NCCL's " +
			"library (docs/nccl.md). The five settings below choose for one operation each. If only they are " +
			"set, operations without a choice use host",
		kind: gpuBackend((*GPUOperations).all, "none", "nccl", "host"),
	},
	gpuOperation("allreduce", "allreduce and reduce", func(g *GPUOperations) *GPUBackend { return &g.Allreduce }),
	gpuOperation("allgather", "allgather", func(g *GPUOperations) *GPUBackend { return &g.Allgather }),
	gpuOperation("broadcast", "broadcast", func(g *GPUOperations) *GPUBackend { return &g.Broadcast }),
	gpuOperation("alltoall", "alltoall, gather and scatter", func(g *GPUOperations) *GPUBackend {
		return &g.Alltoall
	}),
	gpuOperation("reducescatter", "reducescatter", func(g *GPUOperations) *GPUBackend {
		return &g.Reducescatter
	}),
	{
		Name: "HOROVOD_NUM_NCCL_STREAMS", Section: sectionChoice, Scope: PerJob,
		Key:     "library_options.num_nccl_streams",
		Flags:   []Flag{{Name: "num-nccl-streams", Arg: "N"}},
		Default: "1",
		Doc: "number of CUDA streams of each device for operations with NCCL. Process set s uses stream s " +
			"modulo this number, so that operations of different process sets can run at the same time. More " +
			"than one needs NCCL 2.17, and limits the blocks of threads of each operation (docs/nccl.md)",
		Raise: "Raising it lets more process sets run at the same time, each with a smaller part of the device.",
		kind:  integer("", "a whole number, 1 to 8", func(c *Config) *int { return &c.NCCLStreams }, 1, 8),
	},
	{
		Name: "HOROVOD_ENABLE_ASYNC_COMPLETION", Section: sectionChoice, Scope: PerProcess,
		Key:     "enable_async_completion",
		Default: "0",
		Doc: "complete operations with NCCL when they have been launched, instead of when a CPU has seen their " +
			"end. The streams of the program wait for them on the device. It has no effect while a timeline is " +
			"written, and in sidecars (docs/nccl.md)",
		Raise: "Turning it on lets the program go on earlier, but it learns of a failure only from a later call.",
		kind:  boolOf(func(c *Config) *bool { return &c.AsyncCompletion }),
	},
	{
		Name: "HVD_NCCL_LIBRARY", Section: sectionChoice, Scope: PerProcess,
		Key:       "library_options.nccl_library",
		Otherwise: "the one that the process has loaded, of PyPI's packages, or where the dynamic loader finds it",
		Doc:       "file of NCCL's library",
		kind:      text("the name of a file", func(c *Config) *string { return &c.NCCLLibrary }),
	},
	{
		Name: "HVD_CUDART_LIBRARY", Section: sectionChoice, Scope: PerProcess,
		Key:       "library_options.cudart_library",
		Otherwise: "the one that the process has loaded, of PyPI's packages, or where the dynamic loader finds it",
		Doc:       "file of the library of the CUDA runtime",
		kind:      text("the name of a file", func(c *Config) *string { return &c.CUDALibrary }),
	},
	{
		Name: "HOROVOD_MPI_THREADS_DISABLE", Section: sectionChoice, Scope: PerProcess,
		Key:     "library_options.mpi_threads_disable",
		Flags:   onOff("mpi-threads-disable"),
		Default: "0",
		Doc:     "let only one thread of each rank call MPI",
		Raise:   "Turning it on makes operations over MPI slower.",
		kind:    boolOf(func(c *Config) *bool { return &c.MPIThreadsDisable }),
	},
	{
		Name: "HVD_ALGORITHM", Section: sectionChoice, Scope: PerJob,
		Key:       "library_options.algorithm",
		Flags:     []Flag{{Name: "algorithm", Arg: "OPERATION=ALGORITHM"}},
		Otherwise: "chosen by the table of algorithms",
		Doc: "algorithms over TCP, such as allreduce=ring,broadcast=tree. docs/execution.md lists them. An " +
			"operation that the algorithm cannot serve fails",
		kind: text("a list such as allreduce=ring,broadcast=tree", func(c *Config) *string {
			return &c.Algorithm
		}),
	},
	{
		Name: "HOROVOD_HIERARCHICAL_ALLREDUCE", Section: sectionChoice, Scope: PerJob,
		Key:     "params.hierarchical_allreduce",
		Flags:   onOff("hierarchical-allreduce"),
		Default: "1",
		Doc: "run allreduce, reducescatter and broadcast on two levels if the ranks are on several hosts, and " +
			"several of them on one host: in shared memory inside each host, and over TCP between hosts. For " +
			"a reducescatter, the ranks of each host must be consecutive. Unlike in Horovod it is on by " +
			"default. In deterministic mode, reductions always run on one level, and so do operations whose " +
			"algorithm HVD_ALGORITHM chooses. It has no effect on tensors on CUDA devices that NCCL moves " +
			"(docs/decisions.md)",
		Raise: "Turning it off makes all ranks exchange data over TCP, which sends more bytes between hosts.",
		kind:  boolOf(func(c *Config) *bool { return &c.HierarchicalAllreduce }),
	},
	{
		Name: "HOROVOD_HIERARCHICAL_ALLGATHER", Section: sectionChoice, Scope: PerJob,
		Key:     "params.hierarchical_allgather",
		Flags:   onOff("hierarchical-allgather"),
		Default: "1",
		Doc: "run allgather on two levels, as HOROVOD_HIERARCHICAL_ALLREDUCE does with other operations. " +
			"The ranks of each host must be consecutive",
		Raise: "Turning it off makes all ranks exchange data over TCP, which sends more bytes between hosts.",
		kind:  boolOf(func(c *Config) *bool { return &c.HierarchicalAllgather }),
	},
	{
		Name: "HOROVOD_TIMELINE", Section: sectionSee, Scope: PathPerJob,
		Key:       "timeline.filename",
		Flags:     []Flag{{Name: "timeline-filename", Arg: "FILE"}},
		Otherwise: "none",
		Doc: "file to which rank 0 writes its timeline (docs/timeline.md). The other ranks write to " +
			"files beside it, with .rankN before the extension. If the name ends in .gz, the files are " +
			"compressed. With DYNAMIC, no timeline is written until the program or hvdrun top starts one",
		kind: text("the name of a file, or DYNAMIC", func(c *Config) *string { return &c.Timeline }),
	},
	{
		Name: "HOROVOD_TIMELINE_MARK_CYCLES", Section: sectionSee, Scope: PerJob,
		Key:     "timeline.mark_cycles",
		Flags:   onOff("timeline-mark-cycles"),
		Default: "0",
		Doc:     "mark in the timeline when negotiation cycles begin",
		Raise:   "Turning it on makes the timeline larger.",
		kind:    boolOf(func(c *Config) *bool { return &c.TimelineMarkCycles }),
	},
	{
		Name: "HVD_TIMELINE_MAX_MB", Section: sectionSee, Scope: PerJob,
		Key:     "timeline.max_mb",
		Flags:   []Flag{{Name: "timeline-max-mb", Arg: "MIB"}},
		Default: "1024",
		Doc: "maximum disk space, in MiB, for the timeline of a rank. When it is used up, the oldest " +
			"part is deleted",
		Raise: "A higher value keeps the timeline of a longer part of the job.",
		kind:  whole(func(c *Config) *int { return &c.TimelineMaxMiB }, 1),
	},
	{
		Name: "HVD_METRICS_ADDR", Section: sectionSee, Scope: PerProcess,
		Key:       "metrics.addr",
		Otherwise: "none",
		Doc: "host:port at which each rank serves its metrics (docs/metrics.md). Each rank adds its " +
			"local rank to the port, unless the port is 0, and a node of a parameter server its number. To get the metrics of all ranks at one " +
			"address, use hvdrun --metrics-addr",
		kind: text("host:port", func(c *Config) *string { return &c.MetricsAddr }),
	},
	{
		Name: "HVD_FLIGHT_RECORDER", Section: sectionSee, Scope: PerJob,
		Key:     "flight_recorder.enabled",
		Default: "1",
		Doc:     "record the operations of the last 10000 tensors in memory, for reports on stalls and failures",
		Raise:   "Turning it off saves up to 1.6 MB of memory per rank and a few nanoseconds per tensor.",
		kind:    boolOf(func(c *Config) *bool { return &c.FlightRecorder }),
	},
	{
		Name: "HVD_DUMP_DIR", Section: sectionSee, Scope: PerProcess,
		Key:       "flight_recorder.dump_dir",
		Flags:     []Flag{{Name: "dump-dir", Arg: "DIR"}},
		Otherwise: "none",
		Doc: "folder to which hvdrun writes its reports and the flight recorders of the ranks " +
			"(docs/troubleshooting.md). Without hvdrun, each rank writes its recorder there when the job " +
			"fails, and rank 0 also when the job stalls",
		kind: text("the name of a folder", func(c *Config) *string { return &c.DumpDir }),
	},
	{
		Name: "HOROVOD_LOG_LEVEL", Section: sectionLog, Scope: PerProcess,
		Key:     "logging.level",
		Flags:   []Flag{{Name: "log-level", Arg: "LEVEL"}},
		Default: "warning",
		Doc:     "lowest severity that is logged",
		kind: oneOf(func(c *Config, word string) { c.LogLevel = word }, "trace", "debug", "info",
			"warning", "error", "fatal"),
	},
	{
		Name: "HOROVOD_LOG_HIDE_TIME", Section: sectionLog, Scope: PerProcess,
		Key: "logging.with_timestamp",
		Flags: []Flag{
			{Name: "log-without-timestamp", Means: "1"}, {Name: "log-with-timestamp", Means: "0"},
			{Name: "log-hide-timestamp", Means: "1", Instead: "log-without-timestamp"},
			{Name: "no-log-hide-timestamp", Means: "0", Instead: "log-with-timestamp"},
		},
		Default: "0",
		Doc:     "leave the time out of log lines",
		kind:    boolOf(func(c *Config) *bool { return &c.LogHideTime }), form: negated,
	},
	{
		Name: "HVD_LOG_FORMAT", Section: sectionLog, Scope: PerProcess,
		Key:     "logging.format",
		Flags:   []Flag{{Name: "log-format", Arg: "FORMAT"}},
		Default: "auto",
		Doc: "format of the log: console for people, json for programs, or auto, which means console " +
			"on a terminal and json elsewhere",
		kind: oneOf(func(c *Config, word string) { c.LogFormat = word }, "auto", "console", "json"),
	},
	{
		Name: "HOROVOD_RANK", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "the rank that another launcher provides, or 0 without a launcher",
		Doc:       "rank of this process, from 0 to HOROVOD_SIZE - 1",
		kind:      whole(func(c *Config) *int { return &c.Rank }, 0),
	},
	{
		Name: "HOROVOD_SIZE", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "the number that another launcher provides, or 1 without a launcher, so that the job has one rank",
		Doc:       "number of ranks in the job",
		kind:      whole(func(c *Config) *int { return &c.Size }, 1),
	},
	{
		Name: "HOROVOD_LOCAL_RANK", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "derived from the hosts of the ranks",
		Doc:       "number of this rank among the ranks on its host, counted from 0",
		kind:      whole(func(c *Config) *int { return &c.LocalRank }, 0),
	},
	{
		Name: "HOROVOD_LOCAL_SIZE", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "derived from the hosts of the ranks",
		Doc:       "number of ranks on this host",
		kind:      whole(func(c *Config) *int { return &c.LocalSize }, 1),
	},
	{
		Name: "HOROVOD_CROSS_RANK", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "derived from the hosts of the ranks",
		Doc:       "index of this host among the hosts that have a rank with this local rank",
		kind:      whole(func(c *Config) *int { return &c.CrossRank }, 0),
	},
	{
		Name: "HOROVOD_CROSS_SIZE", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "derived from the hosts of the ranks",
		Doc:       "number of hosts that have a rank with this local rank",
		kind:      whole(func(c *Config) *int { return &c.CrossSize }, 1),
	},
	{
		Name: "HOROVOD_HOSTNAME", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "the host's name",
		Doc:       "identity of this host. Ranks with the same identity are local to each other",
		kind:      text("any text", func(c *Config) *string { return &c.Hostname }),
	},
	{
		Name: "HVD_HOSTID", Section: sectionPlace, Scope: PerProcess,
		Otherwise: "derived from host name, boot ID and network namespace",
		Doc:       "identity of the memory of this host. Ranks with the same identity may share memory",
		kind:      text("any text", func(c *Config) *string { return &c.HostID }),
	},
	{
		Name: "HOROVOD_GLOO_RENDEZVOUS_ADDR", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "none",
		Doc:       "host of the launcher's store, through which the ranks find each other",
		kind:      text("a host's name or address", func(c *Config) *string { return &c.RendezvousAddr }),
	},
	{
		Name: "HOROVOD_GLOO_RENDEZVOUS_PORT", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "none",
		Doc:       "port of the launcher's store, through which the ranks find each other",
		kind:      port(func(c *Config) *int { return &c.RendezvousPort }),
	},
	{
		Name: "HVD_JOB_ID", Section: sectionPlace, Scope: ByLauncher,
		Default: "gohvd",
		Doc:     "identity of the job. Ranks refuse connections from another job",
		kind:    short(func(c *Config) *string { return &c.JobID }),
	},
	{
		Name: "HOROVOD_ELASTIC", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "the job is not elastic",
		Doc:       "1 in a process of an elastic job, for programs that ask for it",
		kind:      anything("1"),
	},
	{
		Name: "HVD_MEMBER", Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "the job is not elastic",
		Doc:       "which process of an elastic job this is, as HOST:SLOT/NUMBER. hvdrun sets it (docs/elastic.md)",
		kind:      text("HOST:SLOT/NUMBER", func(c *Config) *string { return &c.Member }),
	},
	{
		Name: "HVD_INIT_METHOD", Section: sectionPlace, Scope: PerProcess,
		Otherwise: "the ranks meet as the launcher says",
		Doc: "URL at which the ranks meet, as for PyTorch's init_process_group: env://, " +
			"tcp://HOST:PORT or file:///PATH (docs/launchers.md). Append ?rank=R&world_size=N unless a " +
			"launcher, or HOROVOD_RANK and HOROVOD_SIZE, give these numbers",
		kind: text("a URL", func(c *Config) *string { return &c.InitMethod }),
	},
	{
		Name: "HVD_UNIQUE_ID", Section: sectionPlace, Scope: PerProcess, Secret: true,
		Otherwise: "the ranks meet as the launcher says",
		Doc: "id with which the ranks find each other, made by hvd.NewUniqueID. It must be the same at all ranks. " +
			"Rank and size come from a launcher, or from HOROVOD_RANK and HOROVOD_SIZE. Every process " +
			"that has the id can join the job",
		kind: text("the text of an id, or several with commas between them", func(c *Config) *string {
			return &c.UniqueID
		}),
	},
	{
		Name: "HVD_LAUNCHER_RANKS", Section: sectionPlace, Scope: PerProcess,
		Otherwise: "those of the job",
		Doc: "ranks that hvdrun has given to the ranks of a job that has only some of its processes, in the " +
			"order of the job's ranks, as in 0,2. hvdrun then learns which of them has failed. The package " +
			"gohvd.torch.distributed sets it",
		kind: numbers(func(c *Config) *[]int { return &c.LauncherRanks }),
	},
	{
		Name: "HVD_SECRET", Section: sectionPlace, Scope: ByLauncher, Secret: true,
		Otherwise: "none",
		Doc: "text of the job's secret, with which a process proves that it belongs to the job. " +
			"Processes refuse connections from a peer that has a different secret",
		kind: text("any text", func(c *Config) *string { return &c.Secret }),
	},
	{
		Name: SidecarVariable, Section: sectionPlace, Scope: PerProcess,
		Otherwise: "the rank runs in the process of the program",
		Doc: "address of the hvdd that runs the rank of a program in Python or with libgohvd (docs/sidecar.md). " +
			"With spawn, the library starts hvdd. A Go program runs its own engine and refuses the setting",
		kind: anything("unix:///path, or spawn"),
	},
	{
		Name: SidecarBinaryVariable, Section: sectionPlace, Scope: PerProcess,
		Otherwise: "hvdd beside libgohvd or in the folder bin beside its folder, then hvdd on PATH",
		Doc: "path of the hvdd that HVD_SIDECAR=spawn starts. If hvdd is beside hvdrun, hvdrun sets it for the ranks " +
			"of a job on one host without --host-discovery-script",
		kind: anything("the path of a program"),
	},
	{
		Name: LibraryVariable, Section: sectionPlace, Scope: PerProcess,
		Otherwise: "lib/libgohvd.so of the Python package, then bin/libgohvd.so of the checkout",
		Doc: "path of libgohvd.so, for Python programs. If the library is beside hvdrun, hvdrun sets it for the " +
			"ranks of a job on one host without --host-discovery-script",
		kind: anything("the path of a file"),
	},
	{
		Name: "HVD_RUN", Section: sectionPlace, Scope: PerProcess,
		Otherwise: "bin/hvdrun of the Python package, then hvdrun on PATH",
		Doc:       "path of hvdrun, for horovod.run in Python",
		kind:      anything("the path of a program"),
	},
	{
		Name: shownVariable, Section: sectionPlace, Scope: ByLauncher,
		Otherwise: "none",
		Doc: "names of settings about which hvdrun has already printed warnings, so that the ranks do " +
			"not print these warnings again",
		kind: anything("set by hvdrun for its ranks; do not set it yourself"),
	},
	{
		Name: "DMLC_ROLE", Section: sectionServer, Scope: ByLauncher,
		Otherwise: "none",
		Doc:       "role of this process in a job with a parameter server (docs/ps.md)",
		kind: oneOf(func(c *Config, word string) { c.PS.Role = word }, "scheduler", "server",
			"worker"),
	},
	{
		Name: "DMLC_NUM_WORKER", Section: sectionServer, Scope: ByLauncher,
		Otherwise: "none",
		Doc:       "number of workers of the job. A process with several customers counts as several workers",
		kind:      whole(func(c *Config) *int { return &c.PS.NumWorkers }, 0),
	},
	{
		Name: "DMLC_NUM_SERVER", Section: sectionServer, Scope: ByLauncher,
		Otherwise: "none",
		Doc:       "number of servers of the job",
		kind:      whole(func(c *Config) *int { return &c.PS.NumServers }, 0),
	},
	{
		Name: "DMLC_PS_ROOT_URI", Section: sectionServer, Scope: ByLauncher,
		Otherwise: "none",
		Doc:       "name or address of the scheduler's host",
		kind:      text("a host's name or address", func(c *Config) *string { return &c.PS.RootHost }),
	},
	{
		Name: "DMLC_PS_ROOT_PORT", Section: sectionServer, Scope: ByLauncher,
		Otherwise: "none",
		Doc:       "port of the scheduler",
		kind:      port(func(c *Config) *int { return &c.PS.RootPort }),
	},
	{
		Name: "DMLC_RANK", Section: sectionServer, Scope: ByLauncher,
		Otherwise: "the scheduler assigns it",
		Doc: "rank that this worker or server wants among the nodes of its role. The scheduler assigns it " +
			"unless another node has it already",
		kind: whole(func(c *Config) *int { return &c.PS.Rank }, 0),
	},
	{
		Name: "HVD_NODE_PROCESS", Section: sectionServer, Scope: ByLauncher,
		Otherwise: "none",
		Doc: "number of this process among those that hvdrun has started as nodes. If it is set, the node " +
			"connects with hvdrun, tells it which node has failed, and sends it metrics",
		kind: whole(func(c *Config) *int { return &c.PS.Process }, 0),
	},
	{
		Name: "DMLC_NODE_HOST", Section: sectionServer, Scope: PerProcess,
		Otherwise: "the address of the network interface",
		Doc:       "name or address under which the workers reach this server",
		kind:      text("a host's name or address", func(c *Config) *string { return &c.PS.NodeHost }),
	},
	{
		Name: "DMLC_INTERFACE", Section: sectionServer, Scope: PerProcess,
		Otherwise: "the interface of the route to the scheduler",
		Doc: "network interface on which this server listens: a name, an address or a network, in the forms " +
			"of HOROVOD_GLOO_IFACE",
		kind: interfaces(func(c *Config) *[]string { return &c.PS.Interfaces }),
	},
	{
		Name: "PORT", Section: sectionServer, Scope: PerProcess,
		Otherwise: "a free port",
		Doc:       "port on which this server listens. It has no effect at other nodes",
		// Any process may have a variable PORT, so its value is checked only at a server.
		kind: anything("a port, 1 to 65535"),
	},
	{
		Name: "DMLC_LOCAL", Section: sectionServer, Scope: PerProcess,
		Default: "0",
		Doc:     "whether all nodes are on this host. Then servers listen on 127.0.0.1",
		kind:    boolOf(func(c *Config) *bool { return &c.PS.Local }),
	},
	{
		Name: "DMLC_USE_KUBERNETES", Section: sectionServer, Scope: PerProcess,
		Default: "0",
		Doc: "whether the scheduler listens on all addresses of its host, because DMLC_PS_ROOT_URI names a " +
			"service and not the host",
		kind: boolOf(func(c *Config) *bool { return &c.PS.Kubernetes }),
	},
	{
		Name: "DMLC_PS_WATER_MARK", Section: sectionServer, Scope: PerProcess,
		Default: "1000",
		Doc:     "maximum number of unanswered requests of a node to another node. Further requests wait",
		Raise:   "A higher value allows more requests in flight and takes more memory.",
		kind: integer("", "a whole number, 1 to 65536", func(c *Config) *int { return &c.PS.WaterMark },
			1, 1<<16),
	},
	{
		Name: "HVD_STALENESS", Section: sectionServer, Scope: ToMeet,
		Otherwise: "asynchronous",
		Doc: "number of iterations by which a worker may be ahead of the slowest worker (stale-synchronous). 0 " +
			"means that all workers do the same iteration (bulk-synchronous). Workers end iterations with Clock",
		Raise: "A higher value lets fast workers wait less, and they compute with older values.",
		kind: integer("", "a whole number, 0 to 1000000", func(c *Config) *int { return &c.PS.Staleness },
			0, 1_000_000),
	},
	{
		Name: "HVD_PS_REPLICAS", Section: sectionServer, Scope: ToMeet,
		Default: "0",
		Doc: "number of further servers that have the values of each key. With 1, no acknowledged push is lost " +
			"if a server dies while the other server of its keys has all values (docs/ps.md). That needs at least " +
			"two servers, built-in handlers and asynchronous mode",
		Raise: "With 1, a push takes longer, and servers need twice the memory for values.",
		kind:  integer("", "a whole number, 0 or 1", func(c *Config) *int { return &c.PS.Replicas }, 0, 1),
	},
	{
		Name: "HVD_RECOVERY_SECONDS", Section: sectionServer, Scope: PerProcess,
		Default: "0",
		Doc: "time for which Join and Finalize wait for a node that has ended to be started again. 0 means " +
			"that they do not wait. hvdrun --restarts sets it to 60 seconds if it is not set",
		Raise: "A higher value gives nodes more time to return, and delays the error if one does not.",
		kind:  seconds(func(c *Config) *time.Duration { return &c.PS.Recovery }, 0),
	},
	{
		Name: "PS_HEARTBEAT_INTERVAL", Section: sectionServer, Scope: PerProcess,
		Default: "1",
		Doc:     "time between two heartbeats of a node to the scheduler. 0 turns heartbeats off",
		kind:    seconds(func(c *Config) *time.Duration { return &c.PS.HeartbeatInterval }, 0),
	},
	{
		Name: "PS_HEARTBEAT_TIMEOUT", Section: sectionServer, Scope: PerProcess,
		Default: "10",
		Doc: "time without a message after which a node is dead. 0 means that no node is dead because of " +
			"silence",
		Raise: "A higher value delays the error if a host vanishes. The death of a process is noticed at once.",
		kind:  seconds(func(c *Config) *time.Duration { return &c.PS.HeartbeatTimeout }, 0),
	},
	{
		Name: "PS_RESEND", Section: sectionServer, Scope: PerProcess,
		Default: "0",
		Doc: "whether this node sends messages again that were not acknowledged. TCP does not lose messages, " +
			"so this is for tests and for networks with proxies",
		Raise: "Turning it on costs an acknowledgement for each message, and a copy of values.",
		kind:  boolOf(func(c *Config) *bool { return &c.PS.Resend }),
	},
	{
		Name: "PS_RESEND_TIMEOUT", Section: sectionServer, Scope: PerProcess,
		Default: "1000",
		Doc: "time after which a message is sent again. Each further time is twice as long, up to 32 times " +
			"this one",
		kind: milliseconds(func(c *Config) *time.Duration { return &c.PS.ResendTimeout }, 1),
	},
	{
		Name: "PS_VERBOSE", Section: sectionServer, Scope: PerProcess,
		Default: "0",
		Doc:     "1 logs the connections of the node, 2 also every message",
		kind:    integer("", "0, 1 or 2", func(c *Config) *int { return &c.PS.Verbose }, 0, 2),
	},
}

// Settings returns the table in the order of the documentation. The caller may change the slice.
func Settings() []Setting { return append([]Setting(nil), settings...) }

// Lookup returns the setting with this name. ok is false if there is none.
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

// FromFlag converts text, the value of flag f, to the form of the environment. For a switch without a value,
// text is "true". An error says which values are valid.
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
		return "", fmt.Errorf("want the flag without a value, or with %s", wantBoolean)
	}
	return "", fmt.Errorf("want the flag without a value")
}

// fromForm converts text, which has the form of the settings file, to the form of the environment.
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
