// Package config holds all settings in one table, loads their values, and knows the version of gohvd.
//
// A setting that Horovod or ps-lite also has keeps its name there (HOROVOD_..., DMLC_..., PS_...). The names
// of all other settings begin with HVD_. The table determines how values are parsed, which flags and help
// texts hvdrun has, and what the page docs/settings.md says. No other package of this module reads the
// environment.
//
// A value comes from the first of these sources that has one: the program (API), a flag of hvdrun, the
// environment, the file named by HVD_CONFIG_FILE, the default. Config.Origin returns which source it was.
package config

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/binding"
)

//go:generate go test -run ^TestPageIsUpToDate$ -rewrite .

// Unset is the value of HOROVOD_RANK and similar settings if no source has a value.
const Unset = -1

// TimelineDynamic is a special value of Timeline. With it, no timeline starts when the job starts, but the
// program can start one later.
const TimelineDynamic = "DYNAMIC"

// Config holds the values of all settings of a process.
type Config struct {
	// Rank and Size are the rank of this process and the size of the job. If both are Unset, the job has one
	// rank.
	Rank, Size int
	// LocalRank, LocalSize, CrossRank and CrossSize have the meanings that package topo describes. If one of
	// them is Unset, it is computed from the hosts of the ranks.
	LocalRank, LocalSize int
	CrossRank, CrossSize int
	// RendezvousAddr and RendezvousPort are the address and port of the launcher's store.
	RendezvousAddr string
	RendezvousPort int
	// Hostname identifies this host: ranks with the same Hostname are local to each other.
	Hostname string
	// HostID identifies the memory of this host: ranks with the same HostID may share memory. If it is empty,
	// an ID is derived from properties of the host.
	HostID string
	// HierarchicalAllreduce and HierarchicalAllgather run operations of a job with several hosts on two
	// levels: in shared memory inside each host, and over TCP between hosts. HierarchicalAllgather is for
	// allgather, HierarchicalAllreduce for allreduce, reducescatter and broadcast. Default true. Turning them
	// off sends more bytes between hosts.
	HierarchicalAllreduce, HierarchicalAllgather bool
	// SharedMemory says which jobs move tensors through shared memory.
	SharedMemory SharedMemory
	// MPIController makes the ranks meet by MPI. MPIOperations moves tensors with MPI. With
	// MPIThreadsDisable, only one thread calls MPI.
	MPIController, MPIOperations, MPIThreadsDisable bool
	// GPU says how operations on tensors on CUDA devices run. NCCLLibrary and CUDALibrary are the files of
	// NCCL and of the CUDA runtime, or empty.
	GPU                      GPUOperations
	NCCLLibrary, CUDALibrary string
	// NCCLStreams is the number of streams of each device for operations with NCCL. Default 1.
	NCCLStreams int
	// AsyncCompletion completes operations with NCCL when they have been launched.
	AsyncCompletion bool
	// Secret is the text of the secret by which a process proves that it belongs to the job. SecretFile is a
	// file that contains that text. Insecure permits a job without a secret on several hosts.
	Secret, SecretFile string
	Insecure           bool
	// TLS turns on the encryption of every connection. It requires a secret and makes transfers slower.
	TLS bool
	// NetworkInterfaces selects the interfaces on which this rank listens (see package netif). If it is
	// empty, the rank listens on the interface of the route to the rendezvous.
	NetworkInterfaces []string
	// MeetHost and MeetPort are the address at which rank 0 serves the store of a job that another launcher
	// has started. They replace the address that the launcher provides. They are "" and 0 if no source has a
	// value.
	MeetHost string
	MeetPort int
	// InitMethod is the URL of an init method. UniqueID is the text of a unique ID, or of several IDs
	// separated by commas. The ranks use one of the two to meet, unless the program chooses another way. Both
	// are empty if no source has a value.
	InitMethod, UniqueID string
	// LauncherRanks has the launcher's number of each rank of the job. It is empty if the ranks have the same
	// numbers in both.
	LauncherRanks []int
	// JobID identifies the job, so that its processes refuse processes of another job that uses the same
	// addresses.
	JobID string
	// Member says which process of an elastic job this is. It is empty if the job is not elastic.
	Member string
	// StartTimeout is the time limit of Init. Within this time all ranks must have met.
	StartTimeout time.Duration
	// ElasticTimeout is how long an elastic job waits for slots.
	ElasticTimeout time.Duration
	// LivenessTimeout is the time without a message after which a rank is considered dead. A higher value
	// delays the verdict on a host that has vanished. The death of a process is detected at once, even with a
	// high value.
	LivenessTimeout time.Duration
	// FusionThresholdBytes is the maximum size of a fused response. With 0 there is no fusion. A grouped
	// allreduce is one response even if it is larger. Raising the value saves round trips and costs cache
	// misses.
	FusionThresholdBytes int64
	// CycleTime is the least time between two cycles of the coordinator. A higher value makes more tensors
	// fuse and delays responses. With 0, the default, the coordinator answers as soon as possible. Horovod's
	// default is 1 ms.
	CycleTime time.Duration
	// CacheCapacity is the number of responses in the cache of each process set. With 0 there is no cache,
	// and every request is sent in full.
	CacheCapacity int
	// Lockstep selects negotiation in lock-step, in which all ranks enter every cycle.
	Lockstep bool
	// LeadersAbove is the number of ranks above which leaders pass on the control frames of their hosts. If
	// there are more hosts than this, and more than 64, besides that of rank 0, these leaders have leaders. A
	// higher value saves a step, but rank 0 has more connections.
	LeadersAbove int
	// DisableGroupFusion forbids fusing the tensors of a group with other tensors.
	DisableGroupFusion bool
	// Autotune makes rank 0 search for good settings while the job runs. The next fields concern only rank 0.
	Autotune bool
	// AutotuneLog is the file to which the search writes a table of its rounds. If it is empty, there is no
	// such file.
	AutotuneLog string
	// AutotuneFile is a file with tuned settings, which is read at the start and written when the search has
	// ended. If it is empty, no file is read or written.
	AutotuneFile string
	// AutotuneWarmupSamples, AutotuneStepsPerSample, AutotuneMaxSamples and AutotuneNoise are the fields
	// WarmupSamples, StepsPerSample, MaxRounds and Noise of autotune.Options.
	AutotuneWarmupSamples, AutotuneStepsPerSample, AutotuneMaxSamples int
	AutotuneNoise                                                     float64
	// StallWarning is how long a tensor may wait for ranks before a warning names these ranks. With 0 there
	// are no warnings.
	StallWarning time.Duration
	// StallShutdown is how long a tensor may wait for ranks before the job is ended. With 0 the job is never
	// ended. Any other value is at least StallWarning.
	StallShutdown time.Duration
	// DynamicProcessSets permits adding and removing process sets after Init.
	DynamicProcessSets bool
	// Deterministic makes results bitwise equal from run to run, even if data arrives in another order. It
	// makes operations slower.
	Deterministic bool
	// Algorithm is a list of algorithms that the user has chosen for operations over TCP.
	Algorithm string
	// OperationTimeout is the time limit of every operation except Join, from submission to completion. With
	// 0 there is no limit.
	OperationTimeout time.Duration
	// Timeline is the file to which rank 0 writes its timeline. The other ranks write to files in the same
	// folder. With TimelineDynamic, or if Timeline is empty, no timeline is started. Only Horovod's Python
	// API distinguishes the two values.
	Timeline string
	// TimelineMarkCycles marks in the timeline when cycles begin.
	TimelineMarkCycles bool
	// TimelineMaxMiB is the maximum disk space, in MiB, for the timeline of a rank.
	TimelineMaxMiB int
	// MetricsAddr is the address at which the rank serves its metrics. If it is empty, the rank does not
	// serve them.
	MetricsAddr string
	// FlightRecorder turns on the flight recorder, which keeps the last operations in memory.
	FlightRecorder bool
	// DumpDir is the folder to which the flight recorder is dumped when the job stalls or fails. If it is
	// empty, the rank writes no dumps to files.
	DumpDir string
	// LogLevel is the lowest severity that is logged.
	LogLevel string
	// LogHideTime leaves out the time in each line of the log.
	LogHideTime bool
	// LogFormat is "console", "json", or "auto", which means console on a terminal and json elsewhere.
	LogFormat string
	// ThreadAffinity holds, for each local rank, the number of the core for its background threads. If it is
	// empty, threads are not pinned.
	ThreadAffinity []int
	// BindTo says to what the ranks of a host are bound.
	BindTo binding.Unit
	// PS has the settings of a node of the parameter server.
	PS ParameterServer
	// Warnings holds sentences for the user about settings that may not have the intended effect. Warnings
	// that the launcher has already printed are not repeated.
	Warnings []string

	stallCheckDisabled bool
	environ            map[string]string
	given              map[string]value // values that come from sources, by name of the setting
	warned             []string         // names about which the user has been or will be warned
	// byLauncher and haveStore are Sources.Launcher and Sources.HaveStore.
	byLauncher, haveStore bool
}

// ParameterServer holds the settings of a node of the parameter server.
type ParameterServer struct {
	// Role is "scheduler", "server" or "worker", or empty if no source has a value.
	Role string
	// NumWorkers and NumServers are the size of the job, or Unset.
	NumWorkers, NumServers int
	// RootHost and RootPort are the address of the scheduler. They are "" and 0 if no source has a value.
	RootHost string
	RootPort int
	// Rank is the rank that the node wants, or Unset.
	Rank int
	// Process is the number of this process among those that hvdrun has started as nodes, or Unset.
	Process int
	// NodeHost is the name or address of a server for other nodes. If it is empty, it is the address of the
	// network interface.
	NodeHost string
	// Interfaces selects the network interface of a server (see package netif).
	Interfaces []string
	// Local says that all nodes are on this host.
	Local bool
	// Kubernetes makes the scheduler listen on all addresses.
	Kubernetes bool
	// WaterMark is the maximum number of unanswered requests to a node. Default 1000.
	WaterMark int
	// HeartbeatInterval is the time between two heartbeats. Default 1 s. With 0 there are no heartbeats.
	HeartbeatInterval time.Duration
	// Recovery is the time for which Finalize waits for a node that has ended to be started again. Default 0:
	// it does not wait.
	Recovery time.Duration
	// HeartbeatTimeout is the time without a message after which a node is dead. Default 10 s. With 0 silence
	// does not count.
	HeartbeatTimeout time.Duration
	// Staleness is the number of iterations by which a worker may be ahead of the slowest one. 0 means that
	// the job is bulk-synchronous, and Unset that it is asynchronous.
	Staleness int
	// Replicas is the number of further servers that have the values of each key, 0 or 1. Default 0.
	Replicas int
	// Resend makes the node send messages again that are not acknowledged within ResendTimeout, 1 s by
	// default. It costs acknowledgements and copies.
	Resend        bool
	ResendTimeout time.Duration
	// Verbose is 1 to log connections and 2 to log messages too.
	Verbose int
}

// Sources holds the places from which values come. If a value in the environment or from the program is
// empty, it counts as not set.
type Sources struct {
	// Environ is the environment in the form NAME=value, as os.Environ returns it.
	Environ []string
	// Flags holds the flags on the launcher's command line, in their order. One of the flags may name a
	// settings file. The file overrides the flags before that flag. The flags after that flag override the
	// file.
	Flags []FlagValue
	// API holds the values that the program sets, by the name of the setting.
	API map[string]string
	// Launcher is set if this process is the launcher. Then variables that a launcher sets for each rank,
	// such as HOROVOD_RANK, are ignored.
	Launcher bool
	// HaveStore is set if the program passes a rendezvous store. Then the settings need not contain the
	// address of a store.
	HaveStore bool
}

// FlagValue is a flag on the launcher's command line.
type FlagValue struct {
	// Flag is the flag as the user wrote it, such as --cache-capacity.
	Flag string
	// Name is the name of the setting. Value is its value in the form of the environment (see
	// Setting.FromFlag).
	Name, Value string
}

// SharedMemory says which jobs move tensors through shared memory.
type SharedMemory uint8

const (
	// SharedByHost selects shared memory for the ranks of each host. If shared memory is not available there,
	// the job fails.
	SharedByHost SharedMemory = iota
	// SharedIfPossible selects shared memory for the ranks of each host on which it is available to all
	// ranks.
	SharedIfPossible
	// SharedAlways selects shared memory for every job. With this value, a job on several hosts fails.
	SharedAlways
	// SharedNever selects TCP for every job.
	SharedNever
)

// Defaults returns a configuration in which every setting has its default value.
func Defaults() Config {
	c := Config{
		Rank: Unset, Size: Unset,
		LocalRank: Unset, LocalSize: Unset,
		CrossRank: Unset, CrossSize: Unset,
		PS: ParameterServer{NumWorkers: Unset, NumServers: Unset, Rank: Unset, Process: Unset,
			Staleness: Unset},
	}
	for _, s := range settings {
		if s.Default == "" {
			continue
		}
		if err := s.set(&c, s.Default); err != nil {
			panic(fmt.Sprintf("config: default of %s: %v", s.Name, err))
		}
	}
	return c
}

// Environ returns the environment of this process in the form NAME=value. In libgohvd it is another function,
// because there the program may have changed the environment after Go has made its copy.
var Environ = os.Environ

// InElasticJob reports whether the launcher has started this process for an elastic job.
func InElasticJob() bool {
	return slices.ContainsFunc(Environ(), func(v string) bool { return strings.HasPrefix(v, "HVD_MEMBER=") })
}

// FromEnvironment loads the settings of a process that runs an engine. Values come from the environment of
// the process and from the map overrides, which holds the values that the program sets, by name. haveStore
// has the meaning of Sources.HaveStore. It is an error if HVD_SIDECAR is set, because then another process
// runs the engine of this rank.
func FromEnvironment(overrides map[string]string, haveStore bool) (Config, error) {
	c, err := Load(Sources{Environ: Environ(), API: overrides, HaveStore: haveStore})
	if err != nil {
		return Config{}, err
	}
	if at := c.Variable(SidecarVariable); at != "" {
		return Config{}, fmt.Errorf(
			"config: %[1]s is %[2]q, but this program runs its own engine: unset %[1]s here; it is only for "+
				"programs in Python or with libgohvd", SidecarVariable, at)
	}
	if c.Hostname == "" {
		if c.Hostname, err = os.Hostname(); err != nil {
			return Config{}, fmt.Errorf(
				"config: HOROVOD_HOSTNAME is not set, and the name of this host cannot be read: %w", err)
		}
	}
	return c, nil
}

// Variable returns the value of an environment variable, for instance of a variable that another launcher
// sets. If name is the name of a setting, the value may come from any source. Variable returns "" if no
// source has a value, even if the setting has a default.
func (c Config) Variable(name string) string {
	if v, ok := c.given[name]; ok {
		return v.text
	}
	return c.environ[name]
}

// Environment returns the value of a variable in the environment of the process. The setting with that name
// may have another value, from another source. Environment returns "" if the variable is not set.
func (c Config) Environment(name string) string { return c.environ[name] }

// Given reports whether a source has a value for the named setting.
func (c Config) Given(name string) bool {
	_, ok := c.given[name]
	return ok
}

// Load reads every setting. An error names the setting, the source of its value, the value, and which values
// are valid.
func Load(src Sources) (Config, error) {
	l, err := collect(src)
	if err != nil {
		return Config{}, err
	}
	c := Defaults()
	c.given, c.environ = l.given, l.environ
	c.byLauncher, c.haveStore = src.Launcher, src.HaveStore
	for _, s := range settings {
		v, ok := c.given[s.Name]
		if !ok {
			continue
		}
		if err := s.set(&c, v.text); err != nil {
			return Config{}, fmt.Errorf("config: %s from %s: got %q, %w", s.Name, v.origin, v.text, err)
		}
	}
	l.warnings = append(l.warnings, c.settleStalls()...)
	l.warnings = append(l.warnings, c.settleGPUs()...)
	c.warn(l.warnings, l.shown)
	if err := c.check(src.HaveStore); err != nil {
		return Config{}, err
	}
	return c, nil
}

// settleStalls applies Horovod's rules about combinations of the settings for the stall check. It returns
// warnings about settings that have no effect.
func (c *Config) settleStalls() []warning {
	const name = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
	if c.stallCheckDisabled {
		c.StallWarning = 0
	}
	if c.StallShutdown == 0 || c.StallWarning != 0 && c.StallShutdown >= c.StallWarning {
		return nil
	}
	reason := "the stall check is off"
	if c.StallWarning != 0 {
		reason = fmt.Sprintf("%v is less than the %v of HOROVOD_STALL_CHECK_TIME_SECONDS", c.StallShutdown,
			c.StallWarning)
	}
	c.StallShutdown = 0
	return []warning{noEffect(name, reason)}
}

// check returns an error if settings contradict each other.
func (c *Config) check(haveStore bool) error {
	switch {
	case (c.Rank == Unset) != (c.Size == Unset):
		return fmt.Errorf("config: HOROVOD_RANK and HOROVOD_SIZE must be set together: rank is %s, size is %s", orUnset(c.Rank), orUnset(c.Size))
	case c.Rank != Unset && c.Rank >= c.Size:
		return fmt.Errorf("config: HOROVOD_RANK is %d, want less than HOROVOD_SIZE, which is %d", c.Rank,
			c.Size)
	case c.Size > 1 && !haveStore && c.InitMethod == "" && c.UniqueID == "" && (c.RendezvousAddr == "" ||
		c.RendezvousPort == 0):
		return fmt.Errorf("config: a job of %d ranks needs HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT: start it with hvdrun, which sets them", c.Size)
	}
	return nil
}

// CheckBinding returns an error if the settings bind the threads of a rank twice.
func (c *Config) CheckBinding() error {
	if c.BindTo == binding.None || len(c.ThreadAffinity) == 0 {
		return nil
	}
	return fmt.Errorf("HVD_BIND_TO (--bind-to) is %s and HOROVOD_THREAD_AFFINITY (--thread-affinity) is set: use one of them, "+
		"because HVD_BIND_TO binds all threads of a rank", c.BindTo)
}

func orUnset(v int) string {
	if v == Unset {
		return "unset"
	}
	return strconv.Itoa(v)
}
